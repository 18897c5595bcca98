"""The fused attention of e4m3 tensors on the GPU: against fp64, and against FlashAttention-3's
arithmetic on the same inputs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
from fused_attention_proof.cases import Case
from fused_configs import maker
from gating import Gated, specs_of

from tuner.config import Config
from tuner.families import family
from tuner.families.base import LSE, KernelSpec
from tuner.measure.device import Device
from tuner.measure.subjects import WORKSPACE, Subject, import_torch
from tuner.measure.tolerance import E4M3_DEPTH, E4M3_TRUNCATION
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
from fused_attention_proof import e4m3, reference  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FAMILY = family("fused_attention")
#: Over the error of FlashAttention-3's arithmetic, beside what the accumulators cut off: both
#: round probabilities alike, but tiles and so running maxima differ.
PEER_MARGIN = 1.05
#: The log-sum-exp's error over that with scores of cuBLAS's product, whose tensor cores cut off
#: alike; and what the softmax's own arithmetic may add.
PRODUCT_MARGIN, LSE_ERROR = 1.25, 1e-3
make = maker(early_exp=50, ping_pong=True)

WIDE = make(2, 224, persistent=True)
GROUPED = make(2, 224, persistent=True, packed_heads=1)
CAUSAL = make(2, 128, persistent=True, pdl=True)
DEEP = make(2, 128, score_buffers=2)
THREE = make(3, 160, early_exp=0)
PACKED = make(
    1, 64, kv_stages=4, blocks_per_sm=2, packed_heads=4, splits=3, combine="kernel", pdl=True
)
CLUSTERED = Config(PACKED.family, {**PACKED.params, "combine": "cluster"})
REGISTERS = make(2, 96, q_in_registers=True, kv_stages=3, ping_pong=False)

#: Odd lengths, grouped heads, heads that TMA pads, keys that dominate, scores of deviation 30.
CASES = [
    ("B=1,H=2,S=1024,D=128", "random", WIDE),
    ("B=2,H=4,HKV=2,SQ=300,SKV=1000,D=128", "dominant", GROUPED),
    ("B=1,H=2,SQ=129,SKV=4095,D=128,layout=bshd", "random", WIDE),
    ("B=1,H=2,S=1,D=128", "random", WIDE),
    ("B=3,H=16,S=777,D=128,causal=1", "random", CAUSAL),
    ("B=1,H=4,S=640,D=128,causal=1,layout=bshd", "dominant", CAUSAL),
    ("B=1,H=4,SQ=700,SKV=333,D=128,causal=1", "large_scores", CAUSAL),
    ("B=1,H=2,S=1023,D=128,causal=1", "random", DEEP),
    ("B=1,H=2,SQ=65,SKV=2050,D=112", "dominant", DEEP),
    ("B=2,H=3,S=515,D=64", "random", THREE),
    ("B=1,H=3,SQ=193,SKV=161,D=48,layout=bshd_bhsd", "large_scores", THREE),
    ("B=2,H=8,HKV=2,SQ=7,SKV=1111,D=64", "random", PACKED),
    ("B=2,H=8,HKV=2,SQ=60,SKV=257,D=64", "dominant", PACKED),
    ("B=2,H=8,HKV=2,SQ=7,SKV=1111,D=64", "random", CLUSTERED),
    ("B=1,H=2,SQ=200,SKV=900,D=96", "random", REGISTERS),
    ("B=1,H=2,S=511,D=192,causal=1", "random", make(2, 128)),
    ("B=1,H=2,SQ=300,SKV=1500,D=256", "dominant", make(2, 128, early_exp=0)),
]  # fmt: skip
#: Kernels with blocks that take several tiles, and with keys that blocks share.
HUGE = [
    ("B=1,H=16,S=128,D=128,causal=1", CAUSAL),
    ("B=1,H=16,HKV=4,SQ=7,SKV=1111,D=64", PACKED),
]
DRAWN = [(Case("e4m3", AttentionProblem.parse(f"{t},dtype=e4m3"), k), c) for t, k, c in CASES]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    posed = [(case.problem, config) for case, config in DRAWN]
    posed += [(AttentionProblem.parse(f"{text},dtype=e4m3"), config) for text, config in HUGE]
    return specs_of(posed)


@dataclass
class Inputs:
    """Of one case: what the kernel gets, what it stands for, and the exact result."""

    case: Case
    given: dict[str, Any]
    restored: dict[str, Any]
    exact: Any


@pytest.fixture(scope="module")
def device(device: Device) -> Device:
    import_torch(device)
    return device


def draw(case: Case, device: Device) -> Inputs:
    where = torch.device("cuda", device.index)
    matrices = case.problem.matrices[:3]
    drawn = {m.name: torch.empty(m.shape, device=where) for m in matrices}
    reference.draw_inputs(case, drawn)
    given, restored = {}, {}
    for matrix in matrices:
        # Heads of unlike sizes: a factor of another head would show.
        sizes = torch.linspace(0.7, 1.4, matrix.shape[1], device=where)
        quantised, factors = e4m3.quantise(drawn[matrix.name] * sizes[:, None, None])
        memory = torch.empty_strided(matrix.shape, matrix.strides, dtype=e4m3.E4M3, device=where)
        given[matrix.name] = memory.copy_(quantised)
        given[f"descale_{matrix.name[0]}"] = factors.contiguous()
        restored[matrix.name] = e4m3.restored(quantised, factors)
    return Inputs(case, given, restored, reference.attention(case, restored))


def run(subject: Subject, inputs: Inputs, device: Device) -> tuple[Any, Any]:
    """Output and log-sum-exp, written over NaNs, from a workspace of NaNs."""
    where = torch.device("cuda", device.index)
    output = inputs.case.problem.output
    out = torch.empty_strided(output.shape, output.strides, dtype=torch.bfloat16, device=where)
    lse = torch.full(output.shape[:3], math.nan, device=where)
    size = max(subject.workspace_bytes, 1)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=where)
    buffers = {name: tensor.data_ptr() for name, tensor in inputs.given.items()}
    buffers |= {output.name: out.fill_(math.nan).data_ptr(), LSE: lse.data_ptr()}
    buffers |= {WORKSPACE: workspace.data_ptr()}
    subject.bind(buffers, inputs.case.scale)()
    device.wait()
    return out, lse


def lse_of_product(inputs: Inputs) -> Any:
    """Log-sum-exps (B, H, SQ), fp64, of the scores that `torch._scaled_mm` computes."""
    problem, given = inputs.case.problem, inputs.given
    group = problem.heads_q // problem.heads_kv
    one = torch.ones((), device=given["query"].device)
    lse = torch.empty_like(inputs.exact.lse)
    for batch, head in itertools.product(range(problem.batch), range(problem.heads_q)):
        query, key = (
            padded(given[name][batch, of]) for name, of in (("query", head), ("key", head // group))
        )
        found = torch._scaled_mm(
            query, key.mT, one, one, out_dtype=torch.float32, use_fast_accum=True
        )
        factor = given["descale_q"][batch, head] * given["descale_k"][batch, head // group]
        scores = found[: problem.seqlen_q, : problem.seqlen_kv].double()
        scores *= factor.double() * inputs.case.scale
        scores.masked_fill_(~e4m3.visible(problem, scores.device), -math.inf)
        lse[batch, head] = scores.logsumexp(-1)
    return lse


def padded(tensor: Any) -> Any:
    """(S, D) with zeros up to multiples of 16 both ways, contiguous: what `_scaled_mm` takes."""
    rows, columns = (-(-extent // 16) * 16 for extent in tensor.shape)
    made = torch.zeros((rows, columns), dtype=torch.float32, device=tensor.device)
    made[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
    return made.to(e4m3.E4M3)


@pytest.mark.parametrize(("case", "config"), DRAWN, ids=[case.label() for case, _ in DRAWN])
def test_e4m3_is_right(gated: Gated, case: Case, config: Config) -> None:
    problem, device = case.problem, gated.device
    inputs = draw(case, device)
    subject = gated.subject(problem, config)
    out, lse = run(subject, inputs, device)
    found = reference.difference(out, inputs.exact)
    assert found.not_finite == 0
    peer = e4m3.flash_attention_3(case, inputs.restored, 128 if problem.is_causal else 224)
    rounding = reference.difference(peer, inputs.exact).frobenius
    print(f"{case.label()}: {found.frobenius:.2e}, FlashAttention-3's arithmetic {rounding:.2e}")
    # What accumulators cut off: of the output at each step, of the scores, which move probabilities
    # by as much, about twice.
    largest = max(8.0, float(inputs.exact.lse.abs().max()))
    steps = math.ceil(problem.seqlen_kv / E4M3_DEPTH)
    assert found.frobenius <= PEER_MARGIN * rounding + E4M3_TRUNCATION * (steps + 2 * largest)
    wrong, _ = reference.lse_difference(lse, inputs.exact)
    of_product, _ = reference.lse_difference(lse_of_product(inputs), inputs.exact)
    assert wrong <= PRODUCT_MARGIN * of_product + LSE_ERROR
    for _ in range(3):
        again, lse_again = run(subject, inputs, device)
        assert torch.equal(again.view(torch.int16), out.view(torch.int16))
        assert torch.equal(lse_again, lse)


def test_the_output_of_a_head_follows_its_own_factors(gated: Gated) -> None:
    """A value head's factor times 2 is its outputs times 2, to the bit, and nobody else's."""
    (case, config), device = DRAWN[4], gated.device
    inputs = draw(case, device)
    subject = gated.subject(case.problem, config)
    out, _ = run(subject, inputs, device)
    inputs.given["descale_v"][1, 3] *= 2
    twice, _ = run(subject, inputs, device)
    out[1, 3] *= 2
    assert torch.equal(out, twice)


def test_small_scores_are_not_computed_again(gated: Gated) -> None:
    """A row that is computed again in fp32 (`Recomputed`) has none of e4m3's rounding. One whose
    scaled maximum is near zero was: the lift costs the maximum its last bits there.
    """
    (case, config), device = DRAWN[0], gated.device
    inputs = draw(case, device)
    inputs.given["descale_q"] /= 16
    restored = {**inputs.restored, "query": inputs.restored["query"] / 16}
    exact = reference.attention(case, restored)
    subject = gated.subject(case.problem, config)
    out, _ = run(subject, inputs, device)
    peer = e4m3.flash_attention_3(case, restored, 224)
    rounding = reference.difference(peer, exact).frobenius
    assert reference.difference(out, exact).frobenius >= rounding / 2


@pytest.mark.parametrize(("text", "config"), HUGE, ids=["several tiles", "splits"])
def test_scores_that_round_the_lift_away(gated: Gated, text: str, config: Config) -> None:
    """From 2^26 on a scaled maximum less the lift is rounded, upwards or downwards: a probability
    of 2^16 was stored as 448. All scores of a row are equal here, so that its output is the values'
    mean.
    """
    problem, device = AttentionProblem.parse(f"{text},dtype=e4m3"), gated.device
    inputs = draw(Case("e4m3", problem, "random"), device)
    given = inputs.given
    for name in ("query", "key"):
        given[name].copy_(torch.ones(given[name].shape).to(e4m3.E4M3))
        given[f"descale_{name[0]}"].fill_(1.0)
    rows = torch.arange(problem.heads_q, device=given["query"].device)
    # Scaled maxima to base 2 from 2^26 to 2^28, with all bits of the mantissa.
    given["descale_q"].copy_(2.0**22 * (1.5 + 0.20317 * rows))
    subject = gated.subject(problem, config)
    out, _ = run(subject, inputs, device)
    group = problem.heads_q // problem.heads_kv
    values = inputs.restored["value"].double().repeat_interleave(group, 1)
    mean = values.mean(2, keepdim=True).expand(values.shape)
    if problem.is_causal:
        counts = torch.arange(1, problem.seqlen_kv + 1, device=values.device)
        mean = values.cumsum(2) / counts[:, None]
    wanted = mean[:, :, : problem.seqlen_q]
    errors = (out.double() - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
    assert errors.max() <= 5e-3, errors
