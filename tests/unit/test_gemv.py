"""The family `gemv`: what it serves, its rules, its space, its launch and its text."""

from __future__ import annotations

from typing import Any

import gemv_cases
import pytest
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Ref, group_by_kernels
from tuner.families.gemv import KERNEL, Gemv, block_rows, padded_k, smem_bytes
from tuner.hardware import DEFAULT_GPU, SMEM_PER_SM_BYTES
from tuner.problem import AttentionProblem, GemmProblem

GEMV = Gemv()
ONE = GemmProblem(1, 4096, 4096)


def config(**changes: Any) -> Config:
    return gemv_cases.config((8, 8, 2, 4, 3, 2), **changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("M=17,N=4096,K=4096", "M up to 16, not 17"),
        ("M=1,N=4096,K=4096,layout_b=row", "K contiguous"),
        ("M=2,N=4096,K=4096,layout_a=col", "K contiguous"),
        ("M=1,N=4096,K=4100", "K=4100 is not a multiple of 8"),
        ("M=1,N=8,K=64,B=65536", "batch 65536 exceeds 65535"),
        ("M=1,N=64,K=64,dtype=e4m3", "takes no factors: only fp16 and bf16, without scales"),
        ("M=1,N=64,K=64,scales=row", "takes no factors"),
        ("M=8,N=4096,K=14336", "8 rows of K=14336 exceed a block's shared memory"),
    ],
)
def test_what_is_not_served_says_why(text: str, reason: str) -> None:
    problem = GemmProblem.parse(text)
    assert reason in GEMV.supports(problem, DEFAULT_GPU)
    assert GEMV.space(problem, DEFAULT_GPU) == []
    assert any(reason in said for said in GEMV.violations(problem, config(), DEFAULT_GPU))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 3}, "warps=3 is not known (allowed: 1, 2, 4"),
        ({"pdl": 1}, "pdl=1 is not known (allowed: False, True)"),
        ({"k_warps": 16}, "k_warps=16 do not divide 8 warps"),
        ({"lead": 1024, "pdl": False}, "lead=1024 needs pdl=True"),
        ({"blocks_per_sm": 8, "warps": 16}, "8 blocks of 544 threads exceed 2048"),
        ({"blocks_per_sm": 4, "warps": 16, "row_tiles": 4}, "96 registers a thread exceed 24"),
        ({"warps": 32}, "1056 threads exceed 1024"),
        ({"pieces": 16, "stages": 8}, "bytes of shared memory exceed 232448"),
        ({"pieces": 8}, "2 blocks of"),
        ({"whole_copies": True}, "whole_copies are of one step: K=4096 exceeds 1024"),
        ({"colour": 3}, "parameter 'colour' is not known"),
    ],
)
def test_what_is_illegal_says_why(changes: dict[str, Any], reason: str) -> None:
    assert GEMV.violations(ONE, config(), DEFAULT_GPU) == []
    reasons = GEMV.violations(ONE, config(**changes), DEFAULT_GPU)
    assert any(reason in said for said in reasons), reasons


def test_sizes_of_a_block() -> None:
    chosen = config(k_warps=4)
    assert block_rows(chosen) == 8 * 2 * 2
    # A step is 4 warps x 4 pieces x 32 elements.
    assert padded_k(GemmProblem(1, 8, 4096), chosen) == 4096
    assert padded_k(GemmProblem(1, 8, 4104), chosen) == 4608
    # Rows begin 64 bytes apart modulo 128. The ring, one row of A, two sets of 4 warps' sums.
    sums, barriers = 2 * 4 * 4 * 32, 1024
    ring = 3 * 32 * (2 * 512 + 64)
    assert smem_bytes(ONE, chosen) == ring + 2 * 4096 + 64 + sums + barriers
    wide = smem_bytes(GemmProblem(9, 8, 4096), chosen)  # two planes of eight rows of A
    assert wide == ring + 16 * (2 * 4096 + 64) + 9 * sums + barriers


@pytest.mark.parametrize(
    "text",
    ["M=1,N=14336,K=4096", "M=4,N=4096,K=14336", "M=16,N=4096,K=4096,dtype=bf16", "M=1,N=9,K=8"],
)
def test_the_space_is_legal_and_of_a_size_to_search(text: str) -> None:
    problem = GemmProblem.parse(text)
    space = GEMV.space(problem, DEFAULT_GPU)
    groups = group_by_kernels(GEMV, space)
    assert 8 <= len(groups) <= 120
    assert all(c["pdl"] for c in space if c["lead"])
    for chosen in space:
        assert GEMV.violations(problem, chosen, DEFAULT_GPU) == []
        assert chosen["blocks_per_sm"] * smem_bytes(problem, chosen) <= SMEM_PER_SM_BYTES


def test_a_launch_names_operands_strides_and_choices() -> None:
    problem = GemmProblem(4, 264, 520, 3, epilogue="bias_residual")
    chosen = config(persistent=True, pdl=True, lead=1024)
    (launch,) = GEMV.launches(problem, chosen, 0.5)
    assert launch.tensors == tuple(map(Ref, ("a", "b", "d", "bias", "residual")))
    assert launch.integers == (
        *(4, 264, 520, 3),
        *(520, 520, 264),
        *(4 * 520, 264 * 520, 4 * 264),
        *(1, 1, 1024),
    )
    assert launch.scalars == (0.5, 1.0)
    with pytest.raises(ConfigError, match="gemv serves gemm, not attention"):
        GEMV.launches(AttentionProblem.parse("S=64,D=64"), chosen, 1.0)


def test_rows_of_up_to_eight_share_a_kernel() -> None:
    assert isinstance(family("gemv"), Gemv)
    specs = [GEMV.kernels(GemmProblem(m, 4096, 4096), config())[KERNEL] for m in (1, 8, 9, 16)]
    assert specs[0] == specs[1] != specs[2] == specs[3]


def test_rows_are_read_together_where_there_are_several() -> None:
    for m, wanted in ((2, {None}), (3, {8}), (16, {8})):
        problem = GemmProblem(m, 4096, 4096)
        space = GEMV.space(problem, DEFAULT_GPU)
        assert {c.params.get("row_loads") for c in space} == wanted
        text = render(GEMV.kernels(problem, space[0])[KERNEL], "x")
        assert ("kRowLoads" in text) == (wanted == {8})


def test_golden_texts(goldens: Goldens) -> None:
    texts = {}
    for epilogue in ("", "bias_residual"):
        problem = GemmProblem(1, 4096, 4096, epilogue=epilogue)
        texts[epilogue or "plain"] = render(GEMV.kernels(problem, config())[KERNEL], "golden")
    goldens.check("gemv", texts)


def test_the_estimate_rewards_bytes_in_flight_and_a_hidden_start() -> None:
    def us(problem: GemmProblem = ONE, **changes: Any) -> float:
        return GEMV.predict_us(problem, config(**changes), DEFAULT_GPU)

    assert us(blocks_per_sm=1) > us()
    # As many bytes in flight, in copies of half the length.
    assert us(k_warps=4, row_tiles=1) > us()
    assert us(pdl=True, lead=1024) < us(pdl=True) < us()
    for problem in (ONE, GemmProblem(4, 14336, 4096)):
        assert us(problem) > problem.bytes / DEFAULT_GPU.memory_gbs / 1e3
