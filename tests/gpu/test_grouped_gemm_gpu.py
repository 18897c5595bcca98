"""The grouped kernels against fp64, with factors of blocks and without: through the gate, at groups
of any rows, which no tile divides.
"""

from __future__ import annotations

import pytest
from block_scaled_cases import CASES as BLOCKS
from block_scaled_cases import GROUPED, GROUPED_SIZES, grouped
from gating import Case, Gated, specs_of
from grouped_gemm_cases import CASES, SIZES

from tuner.families.base import KernelSpec
from tuner.measure.device import Pool
from tuner.measure.subjects import WORKSPACE
from tuner.problem import E4M3, GroupedGemmProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Those beside the small ones that groups of a warp's lanes, and their tiles, go beyond.
BLOCK_SIZES = (*GROUPED_SIZES, (64, 2048, 1408, 2048), (8, 4096, 1024, 512))


def plain(case: str, *size: int | str) -> Case:
    dtype, chosen = CASES[case]
    return GroupedGemmProblem(*size, dtype=dtype), chosen  # type: ignore[arg-type]


def scaled(case: str, *size: int | str) -> Case:
    return GroupedGemmProblem(*size, dtype=E4M3), grouped(BLOCKS[case])  # type: ignore[arg-type]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    plains = [plain(case, *SIZES[0]) for case in CASES]
    return specs_of([*plains, *(scaled(case, *BLOCK_SIZES[0], "zipf") for case in GROUPED)])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(gated: Gated, case: str, size: tuple[int | str, ...]) -> None:
    gated.passes(*plain(case, *size))


@pytest.mark.parametrize("size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("case", GROUPED)
def test_the_gate_passes_it_with_factors(gated: Gated, case: str, size: tuple[int, ...]) -> None:
    gated.passes(*scaled(case, *size, "zipf"))


@pytest.mark.parametrize(
    "posed",
    [
        plain("swapped", 9, 700, 264, 136, "uniform"),
        scaled("square", 9, 700, 264, 400),
        scaled("swapped", 9, 700, 264, 400),
    ],
    ids=["plain", "square", "swapped"],
)
def test_a_captured_call_reads_its_offsets_when_it_is_replayed(gated: Gated, posed: Case) -> None:
    """Each kind of inputs has other rows in a group."""
    gated.replays(*posed)


@pytest.mark.parametrize(
    "posed",
    [plain("pingpong", 3, 200, 136, 72, "uniform")]
    + [scaled(case, 3, 200, 136, 272) for case in GROUPED],
    ids=["plain", *GROUPED],
)
def test_offsets_beyond_the_rows_write_nothing_beside_them(gated: Gated, posed: Case) -> None:
    """Nobody can look at them before the kernel runs: it takes them for the nearest bound."""
    problem, gate, device = posed[0], gated.gate, gated.device
    subject = gated.subject(*posed)
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = gate.allocate(pool, WORKSPACE, subject.workspace_bytes)
        gate.load("random")
        gate.arm([own])
        offsets = (-70_000, 150, 100, 2_000_000)
        data = b"".join(at.to_bytes(4, "little", signed=True) for at in offsets)
        device.write(gate.pointers["offsets"], data)
        subject.bind({**gate.pointers, WORKSPACE: own.pointer}, 1.0)()
        log = gate.examine([own]).log
        assert log == "random inputs: input 'offsets' was changed"  # by this test, and no more
