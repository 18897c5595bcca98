"""Plans and refusals over ranges of key lengths: the launches of every length, and no Python behind
the dispatcher while a generation grows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_server import (
    Server,
    Toy,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    inputs,
    measured,
)

import tuner
from tuner.config import Config
from tuner.families import families
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.selection.reader import Entry, LookupResult, decided_lengths

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.runtime.call import lengths  # noqa: E402

built, server = built_dispatcher, dispatched_server
SDPA = torch.nn.functional.scaled_dot_product_attention
#: Lengths of each range that are compared, besides its ends.
SAMPLED = 200


def test_blocks_are_a_partition() -> None:
    first = 1
    while first < 1 << 17:
        begin, end = lengths.block(first)
        assert begin == first
        assert end - begin + 1 <= max(lengths.MIN_BLOCK, begin / 8)
        assert all(lengths.block(n) == (begin, end) for n in (begin, (begin + end) // 2, end))
        first = end + 1


def test_a_decided_length_has_a_range_of_its_own() -> None:
    assert lengths.between(4200, ()) == (4096, 4607)
    assert lengths.between(4200, (4100, 4300, 9000)) == (4101, 4299)
    assert lengths.between(4100, (4100, 4300)) == (4100, 4100)
    assert lengths.between(4200, (), width=64) == (4160, 4223)


class Kernel:
    """A loaded kernel's constants."""

    address = 4096

    def workspace_bytes(self, integers: Any) -> int:
        return 300

    def bind(self, integers: Any, scalars: Any) -> None:
        return None


DECODING = ["H=8,HKV=2,SQ=1,D=64", "B=4,H=4,SQ=1,D=128,layout=bshd", "H=16,HKV=2,SQ=4,D=64"]


def configs(rng: random.Random) -> list[tuple[Any, AttentionProblem, Config]]:
    """Of every own family of attention a few configs for each kind of decoding."""
    found = []
    for member in families().values():
        if member.op != "attention" or member.is_vendor:
            continue
        for shape in DECODING:
            problem = AttentionProblem.parse(f"{shape},SKV=4096,dtype=bf16")
            space = [
                config
                for config in member.space(problem, DEFAULT_GPU)
                if not member.violations(problem, config, DEFAULT_GPU)
            ]
            found += [(member, problem, c) for c in rng.sample(space, min(4, len(space)))]
    return found


def test_lines_are_the_launches_at_their_lengths(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(25)
    monkeypatch.setattr(on_cpu.plan, "loaded", lambda key: Kernel())
    over_lines = set()
    for member, problem, config in configs(rng):
        names = member.kernels(problem, config)
        result = replace(measured(problem), config=config, artifacts=dict.fromkeys(names, "k"))

        def plan_at(length: int, member: Any = member, p: Any = problem, m: Any = result) -> Any:
            there = replace(p, seqlen_kv=length)
            posed = on_cpu.plan.Posed(there, 0.5)
            return on_cpu.plan.own_plan(posed, member, m.but(problem=there), 0)

        length = rng.choice([rng.randint(5, 300), rng.randint(300, 9000), rng.randint(9000, 66000)])
        ends = lengths.block(length)
        if ends[0] <= problem.seqlen_q:
            continue
        made = lengths.served(plan_at(length), length, ends, plan_at)
        if made is None:
            continue
        over_lines.add(member.name)
        inside = range(made.first, made.last + 1)
        some = rng.sample(inside, min(SAMPLED, len(inside)))
        for other in sorted({made.first, made.last, *some}):
            for step, wanted in zip(made.steps, plan_at(other).steps, strict=True):
                address, tensors, integers, scalars, workspace_at = step
                found = [(which, base + slope * other) for which, (base, slope) in tensors]
                assert tuple(found) == wanted.tensors
                assert tuple(b + s * other for b, s in integers) == wanted.integers
                assert (scalars, workspace_at) == (wanted.scalars, wanted.workspace_at)
                assert address == wanted.kernel.address
    assert {"fused_attention", "triton_attention"} <= over_lines


def test_numbers_that_are_no_lines_are_not_taken(on_cpu: SimpleNamespace) -> None:
    def plan_at(length: int, number: Callable[[int], int], scratch: int = 0) -> Any:
        step = SimpleNamespace(
            kernel=Kernel(),
            tensors=((0, 0),),
            integers=(number(length),),
            scalars=(),
            workspace_at=0,
        )
        return SimpleNamespace(
            shape=(1,), strides=(1,), workspace_bytes=length * scratch, steps=(step,)
        )

    def over(number: Callable[[int], int], scratch: int = 0) -> Any:
        make = lambda n: plan_at(n, number, scratch)  # noqa: E731
        return lengths.served(make(100), 100, (64, 127), make)

    assert over(lambda n: 3 * n + 2).steps[0][2] == ((2, 3),)
    assert over(lambda n: n // 64).steps[0][2] == ((1, 0),)
    assert over(lambda n: -(-n // 64)) is None
    assert over(lambda n: n * n) is None
    assert over(lambda n: max(n, 80)) is None
    assert over(lambda n: n, scratch=4) is None
    make = lambda n: plan_at(n, lambda n: n)  # noqa: E731
    assert lengths.served(make(100), 100, (64, 127), lambda n: None) is None
    assert lengths.served(make(100), 100, (100, 100), make) is None


# --- behind the dispatcher -------------------------------------------------------------------


def cache(length: int, layout: str = "bhsd", queries: int = 1) -> list[Any]:
    shape = f"B=2,H=4,HKV=2,SQ={queries},SKV={length},D=8,layout={layout}"
    return inputs(AttentionProblem.parse(shape))


@pytest.fixture
def everywhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Every problem is decided, whatever its length; that is known by asking only."""

    def lookup(problem: Any, **options: Any) -> LookupResult:
        return LookupResult(entry=Entry.of((measured(problem),)), exact=True, notes=())

    monkeypatch.setattr(server.runtime.answers, "lookup", lookup)
    server.time_passes()
    return server


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_growing_cache_is_served_without_python(
    everywhere: Server, layout: str, is_enabled: bool
) -> None:
    attend = SDPA if is_enabled else everywhere.attention
    with tuner.enabled() if is_enabled else torch.no_grad():
        asked = 0
        for length in range(100, 700):
            q, k, v = cache(length, layout)
            out, by_python, launched = everywhere.went(
                lambda q=q, k=k, v=v: attend(q, k, v, enable_gqa=True)
            )
            asked += by_python
            assert launched and by_kernel(out, q, length), length
    blocks = {lengths.block(length) for length in range(100, 700)}
    assert asked == len(blocks)
    assert everywhere.runtime.counters.stats().hits == 600


def test_random_lengths_are_as_python_serves_them(everywhere: Server) -> None:
    rng = random.Random(7)
    module = everywhere.runtime.dispatch._module
    for _ in range(60):
        tensors = cache(rng.randint(2, 1500), rng.choice(["bhsd", "bshd"]), rng.choice([1, 3]))
        call = lambda t=tensors: everywhere.attention(*t, enable_gqa=True)  # noqa: E731
        found = call()
        everywhere.runtime.dispatch.use(None)
        assert torch.equal(found, call())
        everywhere.runtime.dispatch.use(module)


def test_strides_that_do_not_follow_from_the_length(everywhere: Server) -> None:
    """One of several caches, filled, lies as a tensor of its own but for the stride of the only
    batch; fewer rows of it do not, and this kernel takes no strides."""
    whole = torch.randn(1, 3, 2, 130, 8).half()[:, 1]
    q = torch.randn(1, 4, 1, 8).half()
    for rows, is_served in ((130, True), (129, False), (130, True), (128, False)):
        given = whole[:, :, :rows]
        out, _, launched = everywhere.went(
            lambda given=given: everywhere.attention(q, given, given, enable_gqa=True)
        )
        assert launched is is_served
        assert not launched or by_kernel(out, q, rows)


def test_a_static_cache_is_served_without_python(
    everywhere: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of one buffer, by a kernel that takes strides."""

    def launches(self: Any, problem: Any, config: Any, scale: float, strides: Any) -> Any:
        return self.launches(problem, config, scale)

    monkeypatch.setattr(Toy, "strided_launches", launches)
    q, keys, values = cache(400)
    asked = 0
    for length in range(130, 400):
        k, v = keys[:, :, :length], values[:, :, :length]
        out, by_python, launched = everywhere.went(
            lambda k=k, v=v: everywhere.attention(q, k, v, enable_gqa=True)
        )
        asked += by_python
        assert launched and by_kernel(out, q, length), length
    assert asked == len({lengths.block(length) for length in range(130, 400)})


def test_tensors_of_another_length_lie_as_the_dispatcher_has_it() -> None:
    made = lengths.over(torch.empty(2, 3, 7, 8), 9)
    assert (made.shape, made.is_contiguous()) == ((2, 3, 9, 8), True)
    seen = lengths.over(torch.empty(2, 7, 3, 8).transpose(1, 2), 9)
    assert seen.shape == (2, 3, 9, 8) and seen.transpose(1, 2).is_contiguous()
    longer = torch.empty(2, 3, 20, 8)[:, :, :7]
    assert lengths.over(longer, 9).stride() == longer.stride()
    other = torch.empty(1, 2, 3, 7, 8)[:, 1]
    assert lengths.over(other, 9).stride() == other.stride() != (168, 56, 8, 1)


def test_a_growing_refusal_asks_once_a_block(server: Server) -> None:
    server.decide(AttentionProblem.parse("S=16,D=8,H=2"))
    asked = 0
    for length in range(100, 400):
        q, k, v = cache(length)
        out, by_python, launched = server.went(
            lambda q=q, k=k, v=v: server.attention(q, k, v, enable_gqa=True)
        )
        asked += by_python
        assert not launched and torch.equal(out, SDPA(q, k, v, enable_gqa=True))
    assert asked == len({lengths.block(length) for length in range(100, 400)})
    assert server.runtime.counters.stats().fallbacks == {"no measured winner": 300}


@pytest.mark.parametrize("is_slice", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_masks_that_grow_are_served_without_python(
    everywhere: Server, monkeypatch: pytest.MonkeyPatch, is_slice: bool, is_enabled: bool
) -> None:
    """Masks of their own, or slices of one, by a kernel that takes strides."""

    def launches(self: Any, problem: Any, config: Any, scale: float, strides: Any) -> Any:
        return self.launches(problem, config, scale)

    monkeypatch.setattr(Toy, "strided_launches", launches)
    attend = SDPA if is_enabled else everywhere.attention
    whole = torch.ones(2, 1, 1, 512, dtype=torch.bool)
    lengths_seen = range(128, 400, 16)  # slices that begin aligned
    with tuner.enabled() if is_enabled else torch.no_grad():
        asked = 0
        for length in lengths_seen:
            q, k, v = cache(length)
            mask = whole[..., :length] if is_slice else whole[..., :length].contiguous()
            out, by_python, launched = everywhere.went(
                lambda q=q, k=k, v=v, mask=mask: attend(q, k, v, mask, enable_gqa=True)
            )
            asked += by_python
            assert launched and by_kernel(out, q, length), length
    assert asked == len({lengths.block(length) for length in lengths_seen})


def test_masks_that_grow_are_refused_without_python(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[str] = []
    count = server.runtime.counters.count_fallback
    monkeypatch.setattr(
        server.runtime.counters, "count_fallback", lambda r: (slow.append(r), count(r))
    )
    for length in range(130, 190):
        q, k, v = cache(length)
        mask = torch.ones(2, 1, 1, length)  # of another type than the tensors
        found = server.attention(q, k, v, mask, enable_gqa=True)
        assert torch.equal(found, SDPA(q, k, v, mask, enable_gqa=True))
    assert len(slow) == 1
    assert server.runtime.counters.stats().fallbacks == {"attn_mask is given": 60}


def test_a_decided_length_is_served_within_a_refused_block(server: Server) -> None:
    shape = "B=2,H=4,HKV=2,SQ=1,SKV={},D=8"
    problems = [AttentionProblem.parse(shape.format(n)) for n in (300, 310)]
    server.decide(*problems)
    assert decided_lengths(replace(problems[0], seqlen_kv=7)) == {300, 310}
    assert decided_lengths(replace(problems[0], head_dim=16)) == set()
    for _ in range(2):
        for length in (305, 299, 300, 301, 310, 311, 309):
            q, k, v = cache(length)
            out, _, launched = server.went(
                lambda q=q, k=k, v=v: server.attention(q, k, v, enable_gqa=True)
            )
            assert launched == (length in (300, 310)), length
            assert not launched or by_kernel(out, q, length)


def test_a_length_decided_later_is_served_within_a_refused_block(server: Server) -> None:
    """Its neighbours' refusal held for it too."""
    shape = "B=2,H=4,HKV=2,SQ=1,SKV={},D=8"

    def launched(length: int) -> bool:
        q, k, v = cache(length)
        return server.went(lambda: server.attention(q, k, v, enable_gqa=True))[2]

    server.decide(AttentionProblem.parse("S=16,D=8,H=2"))
    assert not launched(300)
    server.decide(AttentionProblem.parse("S=24,D=8,H=2"))
    assert not launched(300) and not launched(305)
    server.decide(AttentionProblem.parse(shape.format(310)))
    for _ in range(2):
        assert [launched(length) for length in (305, 310, 311)] == [False, True, False]


def test_a_cache_as_long_as_the_queries_is_another_kind(everywhere: Server) -> None:
    for length in (2, 3, 4, 3):
        q, k, v = cache(length, queries=3)
        out = everywhere.attention(q, k, v, enable_gqa=True)
        assert by_kernel(out, q, length), "rows of queries, and the keys beyond them"
