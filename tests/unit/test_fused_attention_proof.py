"""What proves the kernels on a GPU is itself proven: on CPU tensors, with kernels that are wrong
in known ways.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from fused_attention_proof import cases, plan
from fused_attention_proof.cases import Case

from tuner.families import family
from tuner.families.base import LSE
from tuner.hardware import DEFAULT_GPU
from tuner.measure.subjects import WORKSPACE, Bound, Subject
from tuner.problem import AttentionProblem

if importlib.util.find_spec("torch"):
    import torch
    from fused_attention_proof import prover, reference
    from fused_attention_proof.prover import Finding

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
FUSED = family("fused_attention")
DRAWN = cases.drawn()
CPU = "cpu"


def case(text: str, kind: str = "random", **more: Any) -> Case:
    return Case("test", AttentionProblem.parse(text), kind, **more)


# --- the cases ---


def test_the_list_is_what_was_asked_for() -> None:
    problems = [c.problem for c in DRAWN]
    assert len(set(problems)) >= 200
    assert len(set(DRAWN)) == len(DRAWN) == len({c.label() + str(c.seed) for c in DRAWN})
    assert {(p.seqlen_q, p.seqlen_kv) for p in problems} >= set(
        product(cases.LENGTHS, cases.LENGTHS)
    )
    assert {p.heads_q // p.heads_kv for p in problems} >= {1, 2, 4, 8}
    assert {p.head_dim for p in problems} == set(range(8, 257, 8))
    small = [c.problem for c in DRAWN if c.section in ("lengths", "random")]
    traits = Counter((p.is_causal, p.dtype, p.layout) for p in small)
    assert len(traits) == 8 and min(traits.values()) >= 5
    grid = {(p.batch, p.heads_q, p.seqlen_q) for p in problems if p.seqlen_q == p.seqlen_kv}
    assert grid >= set(product((1, 8, 32), (8, 16, 32), (512, 2048, 8192)))
    assert any(p.seqlen_q == p.seqlen_kv == 131072 and p.heads_q == 1 for p in problems)
    strides = {(o.name, p.layout) for p in problems for o in p.operands if o.strides[0] > 2**31}
    assert strides == set(product(("query", "key", "value", "out"), cases.LAYOUTS))


def test_every_kind_is_on_every_instance_mask_and_type() -> None:
    seen = {(c.kind, *plan.combination_of(c)) for c in DRAWN}
    for instance, causal, dtype in product(cases.INSTANCES, cases.MASKS, cases.DTYPES):
        kinds = [k for k in cases.KINDS if causal or k != "infinite_unseen"]
        assert {(kind, instance, causal, dtype) for kind in kinds} <= seen
        assert any(
            c.problem.seqlen_kv == 1 and plan.combination_of(c) == (instance, causal, dtype)
            for c in DRAWN
        )


# --- the kernels ---


@pytest.fixture(scope="module")
def some() -> tuple[list[Case], list[plan.Kernel]]:
    """The cases of two combinations and what is chosen for them."""
    combinations = {(64, False, "float16"), (256, True, "bfloat16")}
    drawn = [c for c in DRAWN if plan.combination_of(c) in combinations]
    return drawn, plan.choose(FUSED, DEFAULT_GPU, drawn)


def test_few_kernels_serve_every_case_and_every_lever(
    some: tuple[list[Case], list[plan.Kernel]],
) -> None:
    drawn, chosen = some
    wanted = plan.trials(FUSED, DEFAULT_GPU, chosen, drawn)
    assert {trial.case for trial in wanted} == set(drawn)
    for trial in wanted:
        assert FUSED.violations(trial.case.problem, trial.config, DEFAULT_GPU) == []
    pairs = [(trial.case.problem, trial.config) for trial in wanted]
    assert 4 <= len(plan.specs(FUSED, pairs)) <= 16
    assert Counter(kernel.combination for kernel in chosen).most_common()[-1][1] >= 2
    launched = {fact for trial in wanted for fact in trial.config.params.items()}
    probes = [AttentionProblem.parse(f"{text},D=64") for text in plan.PROBES]
    offered = {
        fact
        for problem in probes
        for config in FUSED.space(problem, DEFAULT_GPU)
        for fact in config.params.items()
        if fact[0] not in FUSED.runtime_parameters
    }
    assert offered <= launched
    for name in FUSED.runtime_parameters:
        assert {value for known, value in launched if known == name} >= {
            config.params.get(name) for p in probes for config in FUSED.space(p, DEFAULT_GPU)[:200]
        } & set(FUSED.tried(name))


# --- numbers ---

CASES = [
    case("B=2,H=4,HKV=2,SQ=65,SKV=130,D=64"),
    case("B=1,H=3,SQ=70,SKV=40,D=40,causal=1,layout=bshd", scale_factor=0.5),
    case("B=1,H=2,HKV=1,SQ=30,SKV=100,D=96,causal=1", "infinite_unseen"),
    case("B=1,H=2,S=90,D=128,dtype=bf16", "dominant"),
    case("B=1,H=2,S=90,D=64,causal=1,dtype=bf16,layout=bshd", "large_scores"),
    case("B=2,H=1,SQ=33,SKV=77,D=8", "equal_row"),
    case("B=2,H=2,SQ=64,SKV=1,D=64"),
]


def label(value: Case) -> str:
    return value.label()


def repeated(problem: AttentionProblem, tensors: Mapping[str, Any]) -> list[Any]:
    """Query, key and value in fp64, a key head for every query head."""
    query, key, value = (tensors[name].double() for name in ("query", "key", "value"))
    group = problem.heads_q // problem.heads_kv
    return [query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)]


def empty(problem: AttentionProblem) -> dict[str, Any]:
    return {
        o.name: torch.empty_strided(o.shape, o.strides, dtype=getattr(torch, o.dtype))
        for o in problem.operands
    }


@needs_torch
@pytest.mark.parametrize("drawn", CASES, ids=label)
def test_the_reference_is_attention(drawn: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_BYTES", 8 * 100 * 7)  # several rows at a time
    problem, tensors = drawn.problem, empty(drawn.problem)
    reference.draw_inputs(drawn, tensors)
    query, key, value = repeated(problem, tensors)
    scores = drawn.scale * query @ key.mT
    if problem.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    found = reference.attention(drawn, tensors)
    weights = scores.softmax(-1)
    torch.testing.assert_close(found.out, weights @ value)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1))
    torch.testing.assert_close(found.weight, weights.square().sum(-1).sqrt())


@needs_torch
def test_the_kinds_are_what_they_say() -> None:
    def drawn(kind: str, text: str = "H=4,HKV=2,SQ=200,SKV=300,D=64") -> tuple[Case, Any, Any]:
        made = case(text, kind)
        tensors = empty(made.problem)
        reference.draw_inputs(made, tensors)
        again = empty(made.problem)
        reference.draw_inputs(made, again)
        assert torch.equal(tensors["query"], again["query"])
        query, key, _ = repeated(made.problem, tensors)
        return made, tensors, made.scale * query @ key.mT

    _, tensors, scores = drawn("random")
    assert abs(float(tensors["query"].double().mean())) < 0.02
    assert abs(float(scores.std()) - 1) < 0.1
    _, _, scores = drawn("large_scores")
    assert abs(float(scores.std()) - 30) < 3
    made, _, scores = drawn("equal_row")
    assert (scores[:, :, reference.equal_row(made)] == 0).all()
    assert int((scores == 0).all(-1).sum()) == made.problem.heads_q
    _, _, scores = drawn("dominant")
    followed, turned = scores[:, :, 1::4], scores[:, :, 0::4]
    assert float(followed.softmax(-1).amax(-1).median()) > 0.99
    assert float((turned < 0).double().mean()) > 0.9
    made, tensors, _ = drawn("infinite_unseen", "H=2,SQ=100,SKV=300,D=64,causal=1")
    assert torch.isinf(tensors["key"][:, :, 100:]).all()
    assert all(torch.isfinite(tensors[name]).all() for name in ("query", "value"))
    assert torch.isfinite(tensors["key"][:, :, :100]).all()
    found = reference.attention(made, tensors)
    assert torch.isfinite(found.out).all() and torch.isfinite(found.lse).all()


@needs_torch
def test_the_difference_is_measured() -> None:
    drawn = case("B=3,H=4,SQ=50,SKV=60,D=64")
    tensors = empty(drawn.problem)
    reference.draw_inputs(drawn, tensors)
    wanted = reference.attention(drawn, tensors)
    noise = torch.randn(wanted.out.shape, dtype=torch.float64)
    noise *= 1e-3 * wanted.out.norm() / noise.norm()
    found = reference.difference(wanted.out + noise, wanted)
    assert found.frobenius == pytest.approx(1e-3) and 1e-3 < found.row < 3e-3
    spoiled = wanted.out.clone()
    spoiled[2, 3, 49] *= 1.1
    found = reference.difference(spoiled, wanted)
    assert found.row == pytest.approx(0.1, rel=0.3) and found.frobenius < 0.02
    spoiled[0, 0, 0, 5] = math.nan
    found = reference.difference(spoiled, wanted)
    assert math.isnan(found.frobenius) and found.row == math.inf and found.not_finite == 1
    assert reference.lse_difference(wanted.lse.float(), wanted)[0] < 1e-6
    assert reference.lse_difference(wanted.lse + 3e-4, wanted) == pytest.approx((3e-4, 3e-4))
    large = replace(wanted, lse=wanted.lse + 320)
    assert reference.lse_difference(large.lse + 3e-4, large)[1] < 4e-5


# --- the prover, on kernels that are wrong in one way ---


def at(address: int, size: int) -> Any:
    """Memory as bytes."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


class Kernel(Subject):
    """Attention in fp32 with 16-bit probabilities, by addresses as a compiled one gets them."""

    def __init__(self, drawn: Case, fault: str) -> None:
        self.case, self.fault = drawn, fault
        self.workspace_bytes = 64
        self.launches = 0
        self.in_graph = False
        self.read: dict[int, Any] = {}

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        return Bound(lambda: self.launch(dict(buffers), scale), buffers["query"])

    def stream(self) -> int:
        return 0

    def capture(self, calls: Iterable[Callable[[], None]]) -> Any:
        calls = list(calls)

        def replay() -> None:
            self.in_graph = True
            self.read.clear()
            for call in calls:
                call()
            self.in_graph = False

        return SimpleNamespace(replay=replay, close=lambda: None)

    def launch(self, buffers: dict[str, int], scale: float) -> None:
        self.launches += 1
        problem, fault = self.case.problem, self.fault
        tensors = {
            o.name: reference.strided(o, at(buffers[o.name], o.bytes)) for o in problem.operands
        }
        if fault == "early" and self.in_graph:  # reads before the last launch has written
            read = self.read.setdefault(buffers["query"], tensors["query"].clone())
            tensors["query"] = read
        group = problem.heads_q // problem.heads_kv
        query, key, value = (
            tensors[name].float().repeat_interleave(group if name != "query" else 1, 1)
            for name in ("query", "key", "value")
        )
        scores = scale * query @ key.mT
        if problem.is_causal:
            seen = torch.ones(scores.shape[-2:]).tril(1 if fault == "mask" else 0).bool()
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().to(tensors["query"].dtype).float()
        out = weights @ value
        if fault == "row":
            out[-1, -1, -1] *= 1.02
        if fault == "coarse":
            out *= 1 + 8e-4 * torch.randn(out.shape)
        if fault == "lse":
            lse = lse + 2e-4
        if fault == "unstable" and self.launches == 58:
            out[0, 0, 0, 0] += 0.01
        if fault == "workspace":
            out += 0.01 * float(at(buffers[WORKSPACE], 1)[0] == 0)
            at(buffers[WORKSPACE], 1)[0] = 0
        tensors["out"].copy_(out)
        if fault == "unwritten":
            tensors["out"][0, -1, 3, 1:] = torch.nan
        if fault == "infinite":
            tensors["out"][0, 0, 0, 0] = math.inf
        if fault == "stray":
            at(buffers["out"] + problem.output.bytes, 2)[0] = 1
        if fault == "stray workspace":
            at(buffers[WORKSPACE] - 2, 2)[0] = 1
        if fault == "input":
            at(buffers["key"], 2)[0] ^= 1
        if buffers[LSE]:
            size = lse.numel() * 4
            at(buffers[LSE], size).view(torch.float32).copy_(lse.flatten())


@pytest.fixture(autouse=True)
def fewer_repeats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer where it is not the repeating that is tested: a CPU takes its time."""
    if "torch" in globals() and "unstable" not in request.node.name:
        monkeypatch.setattr(prover, "REPEATS", 6)


def prove(drawn: Case, fault: str = "", peer: Any = None) -> Finding:
    setting = prover.Setting(drawn, torch.device(CPU), peer)
    return setting.prove(Kernel(drawn, fault), True, lambda: None)


@needs_torch
@pytest.mark.parametrize("drawn", CASES, ids=label)
def test_a_right_kernel_passes(drawn: Case) -> None:
    found = prove(drawn)
    assert found.faults == [] and found.repeats == prover.REPEATS
    assert found.frobenius is not None and found.lse is not None
    assert 0 <= found.frobenius < prover.LIMITS[drawn.problem.dtype] and found.lse < 1e-4


FAULTS = {
    "mask": "relative error",
    "row": "a row is off by",
    "coarse": "relative error",
    "lse": "log-sum-exp off by 2.0",
    "unstable": "1 of 100 repetitions differ, first 56",
    "unwritten": "63 elements are not finite, or were never written",
    "infinite": "1 elements are not finite",
    "stray": "written: 2 bytes beside out",
    "stray workspace": f"written: 2 bytes beside {WORKSPACE}",
    "input": "written: input key",
    "workspace": "5 of 6 repetitions differ",
    "early": "launches on each other's outputs differ",
}


@needs_torch
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(fault: str) -> None:
    found = prove(case("B=1,H=2,SQ=96,SKV=96,D=64,causal=1"), fault)
    assert any(FAULTS[fault] in text for text in found.faults), found.faults


@needs_torch
def test_a_kernel_without_a_log_sum_exp_is_judged_by_its_output() -> None:
    drawn = case("B=1,H=2,S=64,D=64")
    setting = prover.Setting(drawn, torch.device(CPU))
    found = setting.prove(Kernel(drawn, "lse"), False, lambda: None)
    assert found.faults == [] and found.lse is None


@needs_torch
def test_the_peer_s_own_error_is_a_limit() -> None:
    drawn = case("B=4,H=8,S=96,D=64")

    def exact(query: Any, key: Any, value: Any) -> Any:
        """Rounds once: about 0.7 of the error of a kernel that rounds probabilities too."""
        wide = (t.double() for t in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*wide).to(query.dtype)

    found = prove(drawn, peer=exact)
    assert found.peer is not None and found.frobenius is not None
    ratio = found.frobenius / found.peer
    assert ratio > 1.25
    assert any(f"is {ratio:.2f} of FlashAttention-2's" in text for text in found.faults)
    nothing = prove(drawn, peer=lambda query, *_: torch.full_like(query, math.nan))
    assert nothing.peer is None and nothing.faults == []
