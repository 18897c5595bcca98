"""The fused attention of e4m3 tensors on the GPU: its kernels' proofs, factors of heads, and scores
that a kernel computes again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from e4m3 import E4M3, quantise, restored
from fused_configs import maker
from gating import Gated
from proving import attention_target, faults

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.measure.gate import REFERENCE
from tuner.measure.subjects import WORKSPACE
from tuner.measure.tolerance import E4M3_ROUNDING
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

make = maker(early_exp=50, ping_pong=True)
CAUSAL = ("H=16,D=128,causal=1", make(2, 128, persistent=True, pdl=True))
WIDE = ("H=2,D=128", make(2, 224, persistent=True))
PACKED = (
    "H=16,HKV=4,D=64",
    make(1, 64, kv_stages=4, blocks_per_sm=2, packed_heads=4, splits=3, combine="kernel", pdl=True),
)
KERNELS: dict[str, tuple[str, Config]] = {
    "wide": WIDE,
    "grouped": ("H=4,HKV=2,D=128", make(2, 224, persistent=True, packed_heads=1)),
    "causal": CAUSAL,
    "lazy": ("H=2,D=128", make(2, 224, persistent=True, rescale="lazy", turn_ends="scores")),
    "two score buffers": ("H=2,D=128", make(2, 128, score_buffers=2)),
    "causal, two score buffers": ("H=2,D=128,causal=1", make(2, 128, score_buffers=2)),
    "three groups": ("H=3,D=64", make(3, 160, early_exp=0)),
    "packed": PACKED,
    "queries in registers": (
        "H=2,D=96",
        make(2, 96, q_in_registers=True, kv_stages=3, ping_pong=False),
    ),
    "D=192": ("H=2,D=192,causal=1", make(2, 128)),
    "D=256": ("H=2,D=256", make(2, 128, early_exp=0)),
}
TARGETS = {
    name: attention_target(f"{text},dtype=e4m3", config) for name, (text, config) in KERNELS.items()
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(target.kernels["attention"] for target in TARGETS.values())]


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    assert faults(compiler, worker, tmp_path / "kernels.json", TARGETS[name]) == []


class Call:
    """A kernel on quantised normal tensors, with factors of unlike sizes."""

    def __init__(self, gated: Gated, text: str, config: Config) -> None:
        self.problem = AttentionProblem.parse(f"{text},dtype=e4m3")
        self.subject = gated.subject(self.problem, config)
        self.device = gated.device
        generator = torch.Generator("cuda").manual_seed(0)
        self.given: dict[str, Any] = {}
        for matrix in self.problem.matrices[:3]:
            sizes = torch.linspace(0.7, 1.4, matrix.shape[1], device="cuda")[:, None, None]
            drawn = torch.randn(matrix.shape, generator=generator, device="cuda") * sizes
            self.given[matrix.name], factors = quantise(drawn)
            self.given[f"descale_{matrix.name[0]}"] = factors.contiguous()

    def restored(self, name: str) -> Any:
        """A tensor in float64, a key head for each query head."""
        made = restored(self.given[name], self.given[f"descale_{name[0]}"])
        return made.repeat_interleave(self.problem.heads_q // made.shape[1], 1)

    def out(self) -> Any:
        """The output, written over NaNs, from a workspace of NaNs."""
        shape = self.problem.output.shape
        out = torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")
        size = max(self.subject.workspace_bytes, 1)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        buffers = {name: tensor.data_ptr() for name, tensor in self.given.items()}
        buffers |= {"out": out.data_ptr(), WORKSPACE: workspace.data_ptr()}
        torch.cuda.synchronize()
        self.subject.bind(buffers, self.problem.head_dim**-0.5)()
        self.device.wait()
        return out


def test_the_output_of_a_head_follows_its_own_factors(gated: Gated) -> None:
    """A value head's factor times 2 is its outputs times 2, to the bit, and nobody else's."""
    call = Call(gated, f"B=3,S=777,{CAUSAL[0]}", CAUSAL[1])
    out = call.out()
    call.given["descale_v"][1, 3] *= 2
    out[1, 3] *= 2
    assert torch.equal(out, call.out())


def test_small_scores_are_not_computed_again(gated: Gated) -> None:
    """A row that is computed again in fp32 (`Recomputed`) has none of e4m3's rounding. One whose
    scaled maximum is near zero was: the lift costs the maximum its last bits there.
    """
    call = Call(gated, f"S=1024,{WIDE[0]}", WIDE[1])
    call.given["descale_q"] /= 16
    query, key, value = (call.restored(name) for name in ("query", "key", "value"))
    exact = (query @ key.mT * call.problem.head_dim**-0.5).softmax(-1) @ value
    assert float((call.out().double() - exact).norm() / exact.norm()) >= E4M3_ROUNDING / 2


@pytest.mark.parametrize(
    ("lengths", "kernel"), [("S=128", CAUSAL), ("SQ=7,SKV=1111", PACKED)], ids=["tiles", "splits"]
)
def test_scores_that_round_the_lift_away(
    gated: Gated, lengths: str, kernel: tuple[str, Config]
) -> None:
    """From 2^26 on a scaled maximum less the lift is rounded, upwards or downwards: a probability
    of 2^16 was stored as 448. All scores of a row are equal here, so that its output is the values'
    mean.
    """
    call = Call(gated, f"{lengths},{kernel[0]}", kernel[1])
    problem, given = call.problem, call.given
    for name in ("query", "key"):
        given[name].copy_(torch.ones(given[name].shape).to(E4M3))
        given[f"descale_{name[0]}"].fill_(1.0)
    # Scaled maxima to base 2 from 2^26 to 2^28, with all bits of the mantissa.
    rows = torch.arange(problem.heads_q, device="cuda")
    given["descale_q"].copy_(2.0**22 * (1.5 + 0.20317 * rows))
    values = call.restored("value")
    mean = values.mean(2, keepdim=True).expand(values.shape)
    if problem.is_causal:
        counts = torch.arange(1, problem.seqlen_kv + 1, device="cuda")
        mean = values.cumsum(2) / counts[:, None]
    wanted = mean[:, :, : problem.seqlen_q]
    errors = (call.out().double() - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
    assert errors.max() <= 5e-3, errors
