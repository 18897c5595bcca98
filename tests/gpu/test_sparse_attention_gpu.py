"""Attention under block-sparse masks on the GPU against float64: another pattern in each block of
queries, blocks and rows without keys, tables by the gate and by the runtime. Each kernel runs in a
process of its own that may hang or die.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drawn_children import answers
from fused_configs import maker
from gating import Gated

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measurement import Status
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

FAMILY = family("fused_attention")
FLEX = Config("vendor_flex", {"kernel": "flex"})
CHILD = Path(__file__).parent / "sparse_attention_child.py"
LIMITS = {"float16": 2e-3, "bfloat16": 1.5e-2}
#: Masks drawn for each kernel.
DRAWS = 10
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


def draws(name: str) -> list[dict[str, Any]]:
    """Problems of a kernel: lengths at the edges of blocks, a few of many blocks."""
    rng = random.Random(name)
    lengths = (1, 127, 128, 129, 500, 1024, 2500)
    found = []
    for index in range(DRAWS):
        problem = posed(name, rng.choice(lengths), rng.choice(lengths))
        limit = LIMITS[problem.dtype]
        found.append({"problem": problem.label(), "seed": index, "limit": limit})
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_agrees_with_float64(name: str, compiler: Compiler) -> None:
    [(_, future)] = compiler.submit([spec(name)])
    artifact = future.result()
    lines = answers(CHILD, artifact, KERNELS[name][1], draws(name))
    found = [f"{line['draw']['problem']}: {line['faults'][:3]}" for line in lines if line["faults"]]
    assert not found, f"{len(found)} of {DRAWS} draws fail: " + "\n".join(found)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gate_passes_a_kernel(name: str, gated: Gated) -> None:
    gated.passes(posed(name, 700, 900), KERNELS[name][1])


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
