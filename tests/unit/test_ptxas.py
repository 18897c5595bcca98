from __future__ import annotations

from pathlib import Path

from tuner.compile.ptxas import parse_advice, parse_resources
from tuner.measurement import Resources

LOG = (Path(__file__).parents[1] / "assets" / "ptxas_gemm.txt").read_text()
"""Output of nvcc 13.0.88 for a unit of two ping-pong GEMMs, tiles 256x128 and 64x128."""
IGNORED = (Path(__file__).parents[1] / "assets" / "ptxas_setmaxnreg.txt").read_text()
"""Output of nvcc 13.0.88 for kernels with `setmaxnreg`: one bound, two bounds, and none."""
WIDE, NARROW = "503f8f5768849b10c9737f8c320ba0fb", "a7d0ec4bb650cab30c2be0d1dad5d6c3"


def test_resources_go_to_the_kernel_that_the_mangled_name_holds() -> None:
    assert parse_resources(LOG, [NARROW, WIDE]) == {
        WIDE: Resources(168, 2856, 2856, 1160, 0),
        NARROW: Resources(168, 0, 0, 0, 0),
    }


def test_kernels_that_were_not_asked_for_are_left_out() -> None:
    assert parse_resources(LOG, [NARROW]) == {NARROW: Resources(168, 0, 0, 0, 0)}
    assert parse_resources(LOG, ["0" * 32]) == {}
    assert parse_resources("", [NARROW]) == {}


def test_shared_memory_and_the_worst_of_several_functions() -> None:
    log = """
ptxas info    : Compiling entry function '_Z8kernel_aPf' for 'sm_90a'
ptxas info    : Function properties for _Z8kernel_aPf
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function '_Z12kernel_a_endPf' for 'sm_90a'
ptxas info    : Function properties for _Z12kernel_a_endPf
    0 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90a'
ptxas info    : Function properties for _Z5otherPf
    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 99 bytes smem
"""
    assert parse_resources(log, ["kernel_a"]) == {"kernel_a": Resources(40, 4, 12, 8, 1024)}


def test_serialised_wgmma_is_kept_as_advice() -> None:
    advice = parse_advice(LOG, [NARROW, WIDE])
    assert set(advice) == {WIDE}
    assert "wgmma.mma_async instructions are serialized" in advice[WIDE][0]
    assert "C7511" in advice[WIDE][0]
    assert WIDE not in advice[WIDE][0]


def test_advice_without_a_name_belongs_to_every_kernel_of_the_unit() -> None:
    """ptxas prints an ignored `setmaxnreg` before the name of the first kernel."""
    ids = ["kernel_one_argument", "kernel_two_arguments", "kernel_unbounded"]
    line = IGNORED.splitlines()[0]
    assert "'setmaxnreg' ignored" in line and not any(name in line for name in ids)
    assert parse_advice(IGNORED, ids) == dict.fromkeys(ids, (line,))
    assert parse_advice(IGNORED, []) == {}


def test_advice_about_another_function_is_left_out() -> None:
    assert parse_advice(LOG, [NARROW]) == {}
