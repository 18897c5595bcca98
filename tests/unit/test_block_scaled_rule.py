"""The rule of products with factors of blocks that nobody tuned: its kernels, its choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rule_trials import check_products, checked_trials

from tuner.families import families
from tuner.families.block_scaled_gemm import of_rows, serial
from tuner.families.block_scaled_gemm import rule as block_scaled
from tuner.families.block_scaled_gemm.expected import expected_us
from tuner.families.by_operation import rule_of
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.problem import E4M3, GemmProblem
from tuner.selection.invariant import select


def problem(rows: int, n: int = 7168, k: int = 2048) -> GemmProblem:
    return GemmProblem(rows, n, k, dtype=E4M3, scales="block")


@pytest.mark.parametrize("target", block_scaled.targets(), ids=lambda target: target.label())
def test_a_kernel_is_proven_on_products_of_every_kind(target: Any) -> None:
    check_products(target, checked_trials(target), 20)


def test_tiles_grow_with_the_rows() -> None:
    chosen = []
    for rows in (1, 64, 1024, 8192):
        selection = block_scaled.select(problem(rows), DEFAULT_GPU)
        times = [us for us, _ in selection.own()]
        most = [c for c in block_scaled.KERNELS if not c["swap_ab"] or rows <= 4 * c["tile_n"]]
        assert times == sorted(times) and len(times) == len(most)
        config = selection.expected[0][1]
        chosen.append(config["tile_n" if config["swap_ab"] else "tile_m"])
    assert chosen == sorted(chosen) and chosen[0] < chosen[1] < chosen[-1]


def test_rows_outside_of_the_last_tile_cost_time() -> None:
    """Where most multiprocessors have such a tile; kernels that copy no such rows lose nothing."""

    def added_us(m: int, n: int, *, clipped: bool) -> float:
        (config, rates), *_ = (
            (config, rates)
            for config, rates in block_scaled.KERNELS.items()
            if config["tile_m"] == 128 and ("clips_rows" in config.params) == clipped
            if not config["swap_ab"] and config["split_k"] == 1 and config["tile_n"] == 64
        )
        one, whole = problem(m, n, 7168), problem(-(-m // 128) * 128, n, 7168)
        expected = [expected_us(p, config, DEFAULT_GPU, rates) for p in (one, whole)]
        return expected[0] - expected[1]

    assert added_us(160, 8192, clipped=False) > 5.0
    assert added_us(160, 8192, clipped=True) <= 0.0
    assert added_us(160, 512, clipped=False) <= 0.0
    assert added_us(250, 8192, clipped=False) <= 0.0


def test_many_rows_have_kernels_in_the_order_of_few() -> None:
    """The batch-invariant mode alone has these kernels, for many rows."""
    scaled = families()["block_scaled_gemm"]
    (of_few,) = {scaled.reduction_class(problem(8192), config) for config in serial.KERNELS}
    for rows, is_serial in ((1, False), (8192, True)):
        one = problem(rows, 2560, 16384)
        usual, mode = block_scaled.select(one, DEFAULT_GPU), select(one, DEFAULT_GPU, None)
        assert usual is not None and mode is not None
        assert not any(config in serial.KERNELS for _, config in usual.own())
        config = mode.expected[0][1]
        assert (config in serial.KERNELS) == is_serial
        assert scaled.reduction_class(one, config) == of_few
        assert set(serial.KERNELS) <= {config for _, config in mode.own()}
    assert list(scaled.invariant_kernels(GemmProblem(64, 7168, 2048), DEFAULT_GPU)) == []


def test_factors_of_rows_have_kernels_where_cublaslt_is_slower() -> None:
    """It divides no K, and few rows take it as long as many."""
    few, many = (GemmProblem(m, 4096, 8192, dtype=E4M3, scales="row") for m in (8, 8192))
    assert rule_of(few) is block_scaled and block_scaled.serves(few, DEFAULT_GPU)
    selection = block_scaled.select(few, DEFAULT_GPU)
    assert selection is not None and selection.expected[0][1] in of_rows.KERNELS
    assert selection.expected[-1][0] * of_rows.MARGIN <= of_rows.pytorch_us(few, DEFAULT_GPU)
    assert block_scaled.select(many, DEFAULT_GPU) is None
    assert not block_scaled.serves(replace(few, dtype_d="float16"), DEFAULT_GPU)


def test_what_the_rule_does_not_serve() -> None:
    plain = GemmProblem(64, 7168, 2048)
    assert rule_of(plain) is None and rule_of(problem(64)) is block_scaled
    assert block_scaled.serves(problem(64), GPUS["H100"])
    assert not block_scaled.serves(plain, DEFAULT_GPU)
    assert not block_scaled.serves(problem(64), Gpu("NVIDIA A100", "8.0", 108, 0, 0.0, 0))
    assert block_scaled.select(problem(64, n=20), DEFAULT_GPU) is None
