"""Attention under block-sparse masks on the GPU: proofs of its kernels, FlexAttention through the
gate, and a table that the gate refuses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fused_configs import maker
from gating import Gated
from proving import attention_target, faults

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measure.worker_client import WorkerClient
from tuner.measurement import Status
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

FAMILY = family("fused_attention")
FLEX = Config("vendor_flex", {"kernel": "flex"})
make = maker(early_exp=50, ping_pong=True)

#: What is compiled in, and a config.
KERNELS: dict[str, tuple[str, Config]] = {
    "persistent": (
        "H=3,D=128,dtype=bf16,block_mask=1",
        make(2, 128, persistent=True, pdl=True, stages_output=True),
    ),
    "two score buffers": (
        "B=2,H=3,D=64,dtype=bf16,block_mask=bh", make(2, 128, 2, persistent=True),
    ),
    "packed heads": (
        "B=2,H=8,HKV=2,D=64,softcap=20,block_mask=b",
        make(1, 64, packed_heads=4, blocks_per_sm=2),
    ),
    "one tile a block": (
        "H=4,HKV=2,D=128,dtype=bf16,block_mask=h,layout=bshd",
        make(2, 128, packed_heads=1, q_in_registers=True),
    ),
    "wide heads": ("B=2,H=2,D=256,dtype=bf16,block_mask=1", make(2, 64)),
}  # fmt: skip


def posed(name: str, queries: int, keys: int) -> AttentionProblem:
    return AttentionProblem.parse(f"SQ={queries},SKV={keys},{KERNELS[name][0]}")


def spec(name: str) -> KernelSpec:
    return FAMILY.kernels(posed(name, 1000, 1000), KERNELS[name][1])["attention"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec(name) for name in KERNELS)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    target = attention_target(*KERNELS[name])
    assert faults(compiler, worker, tmp_path / "kernels.json", target) == []


@pytest.mark.parametrize(
    "text",
    [
        "B=2,H=4,HKV=2,SQ=300,SKV=700,D=64,dtype=bf16,block_mask=bh",
        "H=4,S=500,D=128,softcap=20,block_mask=1",
        "H=4,S=500,D=64,causal=1,window=90,softcap=20",
        "H=4,SQ=200,SKV=600,D=64,left=40,right=70",
    ],
)
def test_the_gate_passes_flex_attention(text: str, gated: Gated) -> None:
    """Under drawn masks, which it reads of the tables, and the timed one, a function without."""
    gated.passes(AttentionProblem.parse(text), FLEX)


def test_the_gate_sees_a_table_of_another_head(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    name = "two score buffers"
    [(_, future)] = compiler.submit([spec(name)])
    problem, config = posed(name, 700, 900), KERNELS[name][1]
    kernel = load(future.result())
    gate.open(problem, 7)
    try:
        gate.load("dominant")
        gate.arm()
        (launch,) = FAMILY.launches(problem, config, scale_of(problem, "dominant"))
        integers = [*launch.integers]
        integers[22] = 0  # rows of the table from one head to the next
        addresses = [gate.pointers.get(ref.operand, 0) for ref in launch.tensors]
        with Pool(device) as pool:
            workspace = pool.allocate(max(1, kernel.workspace_bytes(integers)))
            kernel.launch(addresses, integers, launch.scalars, workspace, device.stream)
            assert gate.examine().status is not Status.OK
    finally:
        gate.close()
