"""The template of products of few hundred rows through nvcc, and on emulated threads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster_gemm_cases import COMPILED, FAMILY, config, spec_of
from emulation import device_half
from emulation import emulated as run_emulated

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.problem import GemmProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

DIVIDED = config((64, 64), split_k=2)
SPECS = [spec_of(DIVIDED)]
#: Compiled and emulated in every run; the others with ``scripts/test --long``.
USUAL = {"widest", "two blocks", "narrowest"}
USUAL |= {"swapped, divided", "parts in turn", "a stage is left while it is read"}
DEVICE_SPECS = [spec_of(*case) for name, case in COMPILED.items() if name in USUAL]


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", COMPILED)
def test_no_kernel_spills_or_serialises_its_products(name: str, device_compiler: Compiler) -> None:
    [(_, future)] = device_compiler.submit([spec_of(*COMPILED[name])])
    artifact = future.result()
    used = artifact.resources
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert not artifact.facts.get("advice")


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    chosen = DIVIDED
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    problem = GemmProblem(100, 264, 136, dtype="bfloat16")
    (launch,) = FAMILY.launches(problem, chosen, 1.0)
    assert kernel.workspace_bytes(launch.integers) == 0
    wrong_values = {0: 0, 1: 260, 2: 64, 3: 128, 4: 140, 5: 256, 6: 0, 7: 3}
    for position, value in wrong_values.items():
        wrong = [*launch.integers]
        wrong[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(wrong)
        with pytest.raises(BenchmarkError):
            kernel.launch((256, 512, 768), wrong, launch.scalars, 0, 0)
    with pytest.raises(BenchmarkError):
        kernel.launch((264, 512, 768), launch.integers, launch.scalars, 0, 0)


#: What the template has in PTX is the emulator's.
_BODIES = {
    "multiply": "emulator::self().products.push_back({d, x, y, adds, kTileY});",
    "earlier_products_wait": "emulator::run_products(1);",
    "store_shared_words": "for (int i = 0; i < 4; ++i) store_shared(to + 4 * i, words[i]);",
}
#: M, N, K; tiles of a band, walked along the rows, blocks at once.
EMULATED = ((70, 72, 584, 1, True, 2), (130, 200, 640, 2, False, 3))
CASES = {
    "plain": config((64, 64), 2),
    "two groups": config((128, 32), 3),
    "two parts": config((256, 48), 2),
    "swapped": config((64, 24), 3, swap_ab=True),
    "swapped, two groups": config((128, 80), 2, swap_ab=True),
    "divided": config((64, 32), 3, split_k=2),
    "swapped, divided": config((128, 48), 4, swap_ab=True, split_k=4),
    "parts in turn": config((128, 64), 3, serial_parts=8),
}
MUTANTS = {
    "a stage is free before it was read": (
        "wait_for(ring.empty(stage.index), stage.phase ^ 1);  // the first time round it is",
        "",
    ),
    "a stage is left while it is read": ("earlier_products_wait();\n        leave(", "leave("),
    "the last stage is not left": ("leave(ring.empty(last));\n    store_tile", "store_tile"),
    "sums are overwritten while they are read": ("named_barrier(kConsumersMeet, kConsumers);", ""),
    "a block ends before its neighbour": (
        "  if constexpr (kSplits > 1) cluster_sync();\n}",
        "}",
    ),
    "the first block of a tile adds": ("k > 0 || block > of_k.begin", "true"),
}


def emulated(
    chosen: Config, nvcc: Path, folder: Path, mutant: tuple[str, str] = ("", ""), orders: int = 1
) -> str:
    """Output of an emulated kernel about its products; empty where all are right."""
    device = device_half(render(spec_of(chosen, "bias"), "emulated"))
    for name, body in _BODIES.items():
        pattern = re.compile(rf"(void {name}\([^)]*\) \{{).*?\}}\n(?=\n)", re.S)
        device, found = pattern.subn(rf"\1 {body} }}\n", device)
        assert found == 1, name
    device = f"#define EMULATES_BF16\n{device}"
    return run_emulated(device, "cluster_gemm.h", EMULATED, nvcc, folder, mutant, orders)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("case", CASES)
def test_an_emulated_kernel_is_right(compiler: Compiler, case: str, tmp_path: Path) -> None:
    assert emulated(CASES[case], compiler.toolchain.nvcc, tmp_path) == ""


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulator_finds_what_is_wrong(compiler: Compiler, name: str, tmp_path: Path) -> None:
    chosen = {
        "sums are overwritten while they are read": config((128, 64), 2, split_k=2),
        "a block ends before its neighbour": config((64, 32), 2, split_k=8),
    }.get(name, CASES["plain"])
    assert emulated(chosen, compiler.toolchain.nvcc, tmp_path, MUTANTS[name], orders=4) != ""
