"""Ring attention: four ranks over gloo, forked once for all tests, on CPU tensors.

Every rank compares its results with attention of the whole sequence in fp64, in groups of four,
two and one; then one of them makes no call, and one is killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from programs import ran

from tuner.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.skipif(
    "not __import__('torch').distributed.is_available()", reason="this torch has no distributed"
)

RANKS, SURVIVORS, SIZES = 4, (0, 1, 3), (4, 2, 1)
PATIENCE_S = 150
#: Against fp64: a few roundings of numbers of about 1.
TOLERANCE = {"float64": 1e-13, "float32": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of each rank; the killed one writes nothing."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TUNER_CACHE_DIR": str(folder / "cache"),
    }
    done = ran(
        sys.executable,
        "-P",
        "-m",
        "ring_ranks",
        str(folder),
        code=None,
        env=environment,
        timeout=PATIENCE_S,
    )
    assert json.loads(done.stdout) == [0, 0, -9, 0], done.stderr
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in SURVIVORS}


Found = dict[int, dict[str, Any]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_output_and_gradients_are_those_of_the_whole_sequence(
    found: Found, size: int, is_causal: bool, dtype: str
) -> None:
    for seen in found.values():
        assert seen[f"error {size} {is_causal} {dtype}"] < TOLERANCE[dtype]


@pytest.mark.parametrize("size", SIZES)
def test_a_full_mask_takes_keys_of_another_length(found: Found, size: int) -> None:
    assert all(f[f"error {size} cross float64"] < TOLERANCE["float64"] for f in found.values())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("ranks", [3, 5])
def test_any_number_of_ranks_may_share_a_sequence(ranks: int, is_causal: bool) -> None:
    from threaded_ring import attend

    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, 12 * ranks, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 1, 1)
    ]
    grad_out = torch.randn(1, 4, 12 * ranks, 8, dtype=torch.float64)
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = attention(*inputs, is_causal=is_causal, enable_gqa=True)
    grads = torch.autograd.grad(wanted, inputs, grad_out)
    found = attend([*inputs, grad_out], ranks, is_causal)
    for ours, theirs in zip(found, (wanted, *grads), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=TOLERANCE["float64"])


def test_positions_are_in_zigzag_order_under_a_causal_mask(found: Found) -> None:
    assert found[0]["positions 4 True"] == [0, 1, 14, 15]
    assert found[1]["positions 4 True"] == [2, 3, 12, 13]
    assert found[1]["positions 4 False"] == [4, 5, 6, 7]
    assert found[3]["positions 2 True"] == list(range(4, 12))
    assert found[3]["positions 1 True"] == list(range(16))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_score_under_the_mask_is_computed_once_and_no_other(ranks: int) -> None:
    from tuner.runtime.parallel.context_parallel import _chunks, step_of

    length = 4
    held = {
        rank: [
            token
            for chunk in _chunks(rank, ranks, True)
            for token in range(chunk * length // 2, (chunk + 1) * length // 2)
        ]
        for rank in range(ranks)
    }
    if ranks == 1:
        held = {0: list(range(length))}
    computed: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        work = []
        for source in range(ranks):
            rows, keys, is_masked = step_of(rank, source, length, True)
            pairs = [
                (query, key)
                for i, query in enumerate(held[rank][rows])
                for j, key in enumerate(held[source][keys])
                if not is_masked or j <= i
            ]
            computed.update(pairs)
            work.append(len(pairs))
        assert sorted(work) == [8] * (ranks - 1) + [10]  # the same in each rank
    tokens = range(length * ranks)
    assert computed == Counter((i, j) for i in tokens for j in tokens if j <= i)


def test_a_transfer_runs_beside_each_step_s_one_kernel(found: Found) -> None:
    events = [name for name, *_ in found[0]["repeated None"]["events"]]
    step = ["start", "partial", "wait"]
    back = ["start", "partial_gradients", "wait"]
    # The last keys are sent to nobody; the gradients' sums go home at the end. The kind of call was
    # known, so nothing was published.
    assert events == [*step * (RANKS - 1), "partial", *back * RANKS, "start", "wait"]


def test_kernels_get_a_contiguous_log_sum_exp(found: Found) -> None:
    for seen in found.values():
        events = seen["repeated None"]["events"]
        assert all(event[3] for event in events if event[0] == "partial_gradients")


def test_gradients_of_keys_are_summed_in_single_precision(found: Found) -> None:
    events = found[0]["repeated None"]["events"]
    sent = [types for name, *types in events if name == "start"]
    keys, sums = "bfloat16", "float32"
    backward = [[keys], [keys, sums], [keys, sums], [sums], [sums]]
    assert sent == [[keys]] * (RANKS - 1) + backward


@pytest.mark.parametrize("deterministic", [None, True])
def test_equal_calls_give_equal_bits_by_the_kernels_asked_for(
    found: Found, deterministic: bool | None
) -> None:
    for seen in found.values():
        repeated = seen[f"repeated {deterministic}"]
        kernels = [event for event in repeated["events"] if event[0].startswith("partial")]
        assert repeated["equal"] and len(kernels) == 2 * RANKS
        assert {is_deterministic for *_, is_deterministic in kernels} == {bool(deterministic)}
        assert repeated["after"] is False


REFUSED = {
    "uneven": "rank 1 has query (1, 2, 10, 8), rank 0 (1, 2, 8, 8) (allowed: the same",
    "options": "rank 3 has scale 2.0, rank 0 1.0 (allowed: the same in every rank)",
    "gradient": "rank 1 has gradient True, rank 0 False (allowed: the same in every rank)",
    "parts": "rank 1 has part (4,), rank 0 (2,) (allowed: the same in every rank)",
    "odd": "under a causal mask (allowed: one even length, of two chunks)",
    "lengths": "under a causal mask (allowed: one even length, of two chunks)",
    "dropout": "takes no attn_mask and no dropout_p (allowed: None and 0)",
    "mask": "takes no attn_mask and no dropout_p (allowed: None and 0)",
    "heads": "with HKV a divisor of H)",
    "types": "differ in type or device (allowed: one of each)",
    "empty": "(allowed: 4-D (B, H, L, D), not empty)",
    "length": "a sequence of 12 cannot be split over 4 ranks (allowed: multiples of 8)",
    "join": "join_sequence passes no gradient (allowed: part.detach())",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_refused_in_every_rank_before_any_transfer(found: Found, case: str) -> None:
    answers = {tuple(seen["refused"][case]) for seen in found.values()}
    ((error, message, transfers),) = answers
    assert (error, transfers) == ("ConfigError", "0")
    assert REFUSED[case] in message and "\n" not in message


def test_other_ranks_say_which_one_cannot_make_a_call(found: Found) -> None:
    own = found[1]["refused"]["odd in one rank"]
    for rank in (0, 3):
        error, message, transfers = found[rank]["refused"]["odd in one rank"]
        assert message == f"rank 1 cannot do that: {own[1]}"
        assert (error, transfers) == ("ConfigError", "0")


def test_only_members_of_a_group_may_call(found: Found) -> None:
    assert found[0]["outside"][0] == ""
    assert found[3]["outside"][:2] == [
        "ConfigError",
        "rank 3 is not in the group (allowed: its members)",
    ]


def test_a_program_without_a_process_group_is_told_so() -> None:
    from tuner.runtime.parallel.context_parallel import position_ids

    with pytest.raises(ConfigError, match="init_process_group first"):
        position_ids(8, is_causal=True)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a group of one rank."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, at each break
def test_a_compiled_model_calls_it_outside_of_its_graph() -> None:
    from tuner.runtime.parallel.context_parallel import ring_attention

    def model(tensor: Any) -> Any:
        return ring_attention(2 * tensor, tensor, tensor, is_causal=True) + 1

    tensor = torch.randn(1, 2, 8, 8, requires_grad=True)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found = torch.compile(model, backend=backend)(tensor)
    wanted = model(tensor)
    assert torch.equal(found, wanted) and len(graphs) == 2
    grads = [torch.autograd.grad(out.sum(), tensor)[0] for out in (found, wanted)]
    assert torch.equal(*grads)


def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(found: Found) -> None:
    for rank, seen in found.items():  # its neighbours, and the one that misses them
        error, message, _ = seen["lost"]["killed"]
        assert error == "RankLostError"
        assert message == (
            f"rank 2 does not answer rank {rank} any more: end this process and start all ranks "
            "again from the last checkpoint"
        )
        assert seen["lost"]["afterwards"] == [error, message, "0"]


def test_a_rank_that_makes_no_call_is_lost_after_the_group_s_timeout(found: Found) -> None:
    error, message, transfers = found[0]["lost"]["silent"]  # of a known kind
    assert (error, transfers) == ("RankLostError", "1")
    assert message.startswith("rank 1 does not answer rank 0 any more")
    error, message, transfers = found[3]["lost"]["absent"]  # of a new kind
    assert (error, transfers) == ("RankLostError", "0")
    assert message.startswith("rank 2 does not answer rank 3 any more")


def test_both_neighbours_are_named_where_a_batch_is_one_work(found: Found) -> None:
    error, message, _ = found[0]["one work"]
    assert error == "RankLostError"
    assert message.startswith("rank 1 or rank 3 does not answer rank 0 any more")


def test_a_transfer_is_enqueued_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.runtime.call import devices

    events: list[Any] = []

    class Stream:
        def __init__(self, device: Any, priority: int = 0) -> None:
            self.name = f"side of {device}"

        def wait_stream(self, other: Any) -> None:
            events.append(f"{self.name} waits for {other}")

        def __enter__(self) -> None:
            events.append(f"on {self.name}")

        def __exit__(self, *_: Any) -> None:
            events.append("back")

    fake = SimpleNamespace(
        Stream=Stream, current_stream=lambda device: "current", stream=lambda stream: stream
    )
    monkeypatch.setattr(devices.torch, "cuda", fake)
    monkeypatch.setattr(devices, "_sides", {})
    with devices.beside(torch.device("cuda", 1)):
        events.append("transfer")
    side = "side of cuda:1"
    assert events == [f"{side} waits for current", f"on {side}", "transfer", "back"]
