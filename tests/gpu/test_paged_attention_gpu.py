"""Attention over paged caches on the GPU against float64: pages shuffled and shared, lengths at
their edges, unset entries and unused slots that are no numbers. Each kernel runs in a process of
its own that may hang or die.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drawn_children import answers
from gating import Gated
from paged_cases import FAMILY, KERNELS, posed, spec

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measurement import Status
from tuner.problem import E4M3, AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

CHILD = Path(__file__).parent / "paged_attention_child.py"
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3, E4M3: 0.04}
#: Batches drawn for each kernel.
DRAWS = 20


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec(name) for name in KERNELS)]


def draws(name: str) -> list[dict[str, Any]]:
    """Problems of a kernel with the schedules that it can have."""
    _, sizes, most, config = KERNELS[name]
    rng = random.Random(name)
    can_split, can_cluster = not config["persistent"], config["warp_groups"] == 1
    found = []
    for index in range(DRAWS):
        queries = rng.choice((1, most)) if most < 64 else rng.choice((1, most // 2, most))
        keys, batch = rng.choice((70, 400, 2500)), rng.choice((1, 3, 9, 70))
        problem = posed(name, rng.choice(sizes), queries, keys, batch)
        splits = rng.choice((1, 2, 5, 16)) if can_split else 1
        combine = rng.choice(("kernel", "cluster")) if can_cluster else "kernel"
        found.append(
            {
                "problem": problem.label(),
                "seed": 1000 * len(name) + index,
                "splits": splits,
                "combine": combine,
                "is_mixed": rng.random() < 0.6,
                "is_captured": index % 5 == 0,
                "limit": LIMITS[problem.dtype],
            }
        )
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_agrees_with_float64(name: str, compiler: Compiler) -> None:
    config = KERNELS[name][3]
    [(_, future)] = compiler.submit([spec(name)])
    artifact = future.result()
    used = artifact.resources
    assert used is not None
    lines = answers(CHILD, artifact, config, draws(name))
    found = [f"{line['draw']['problem']} splits={line['draw']['splits']}: {line['faults'][:3]}"
             for line in lines if line["faults"]]  # fmt: skip
    assert not found, f"{len(found)} of {DRAWS} draws fail: " + "\n".join(found)


@pytest.mark.parametrize("name", ["few", "chunk", "sinks and window", "few, e4m3", "chunk, e4m3"])
def test_the_gate_passes_a_kernel(name: str, gated: Gated) -> None:
    text, sizes, queries, config = KERNELS[name]
    problem = AttentionProblem.parse(
        f"B=13,SQ={min(queries, 100)},SKV=600,{text},page_size={sizes[-1]},varlen=1,layout=bshd"
    )
    gated.passes(problem, config)


def test_the_gate_sees_keys_that_are_left_out(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    [(_, future)] = compiler.submit([spec("few")])
    text, sizes, queries, config = KERNELS["few"]
    problem = AttentionProblem.parse(f"B=3,SQ={queries},SKV=600,{text},page_size={sizes[0]}")
    kernel = load(future.result())
    gate.open(problem, 7)
    try:
        for kind in ("dominant", "random"):
            gate.load(kind)
            gate.arm()
            (launch,) = FAMILY.launches(problem, config, scale_of(problem, kind))
            integers = [*launch.integers]
            integers[4] = 599  # keys of a sequence at most
            addresses = [gate.pointers.get(ref.operand, 0) for ref in launch.tensors]
            kernel.launch(addresses, integers, launch.scalars, 0, device.stream)
            assert gate.examine().status is not Status.OK, kind
    finally:
        gate.close()
