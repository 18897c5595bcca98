"""The candidates of the family `gemm`, what is expected of them, and what a search begins with."""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from gemm_samples import GEMM, PROBLEMS, SQUARE, coop, ping, stream_k

from tuner.compile.render import render
from tuner.config import Config
from tuner.families.base import group_by_kernels
from tuner.families.gemm import cost as gemm_cost
from tuner.families.gemm.shape import tile_blocks
from tuner.families.gemm.space import GemmShape
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.problem import GemmProblem


def test_the_space_of_a_square_is_wide_and_shows_every_choice() -> None:
    space = GEMM.space(SQUARE, DEFAULT_GPU)
    assert len(group_by_kernels(GEMM, space)) >= 120
    seen = {name: {c.get(name) for c in space} for name in GEMM.domains}
    assert seen["kernel_schedule"] == set(GEMM.domains["kernel_schedule"])
    assert seen["epilogue_schedule"] == set(GEMM.domains["epilogue_schedule"])
    assert seen["max_swizzle_size"] == {1, 2, 4, 8, None}
    assert seen["raster_order"] == {"AlongM", "AlongN", None}
    assert {c.get("decomposition_mode") for c in space} == {None, "StreamK", "SplitK"}


def test_a_short_side_is_also_offered_swapped() -> None:
    def swaps(problem: GemmProblem) -> set[Any]:
        return {c["swap_ab"] for c in GEMM.space(problem, DEFAULT_GPU)}

    assert swaps(SQUARE) == {False}
    assert swaps(PROBLEMS["few rows"]) == swaps(PROBLEMS["values"]) == {False, True}


def test_few_rows_are_split_along_k() -> None:
    space = GEMM.space(GemmProblem(16, 4096, 4096), DEFAULT_GPU)
    assert {c.get("splits") for c in space} >= {2, 4, 8}


def test_clusters_of_8_are_offered_where_their_tiles_fill_the_multiprocessors_once() -> None:
    def offered(problem: GemmProblem, gpu: Gpu = DEFAULT_GPU) -> set[tuple[int, ...]]:
        names = "tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n"
        space = GEMM.space(problem, gpu)
        found = {tuple(c[name] for name in names) for c in space if not c["swap_ab"]}
        return {one for one in found if one[3] * one[4] == 8}

    assert offered(GemmProblem(128, 3584, 4096)) == {
        *((64, 64, depth, 2, 4) for depth in (64, 128)),
        (64, 80, 64, 2, 4),
    }
    assert (128, 96, 64, 2, 4) in offered(GemmProblem(192, 5120, 5120))
    assert not offered(GemmProblem(128, 4096, 4096, layout_b="row"))  # of 80 columns
    for m, n in ((64, 3584), (257, 3584), (128, 1024), (128, 14464), (4096, 4096)):
        assert not offered(GemmProblem(m, n, 4096))
    fewer = replace(DEFAULT_GPU, sm_count=114)
    assert {one[1] for one in offered(GemmProblem(128, 3584, 4096), fewer)} == {80, 96}


@pytest.mark.parametrize(
    ("m", "n", "is_offered"),
    [(16, 4096, True), (9, 4096, True), (8, 4096, False), (17, 4096, False), (16, 14336, False)],
)
def test_two_blocks_share_rows_where_tiles_of_16_columns_are_few(
    m: int, n: int, is_offered: bool
) -> None:
    """64 tiles of 64 x 16 leave half of the multiprocessors idle; 224 do not."""
    space = GEMM.space(GemmProblem(m, n, 4096), DEFAULT_GPU)
    narrow = [c for c in space if c["tile_n"] == 8]
    assert bool(narrow) is is_offered
    assert all(c["swap_ab"] and (c["cluster_m"], c["cluster_n"]) == (1, 2) for c in narrow)


def test_run_time_choices_share_one_kernel() -> None:
    problem = SQUARE
    for group in group_by_kernels(GEMM, GEMM.space(problem, DEFAULT_GPU)):
        assert len({GEMM.kernels(problem, c)["gemm"].key for c in group}) == 1
        launches = {GEMM.launches(problem, c, 1.0)[0].integers for c in group}
        assert len(launches) == len(group)


def test_different_binaries_differ_in_their_text() -> None:
    for problem in (SQUARE, PROBLEMS["values"]):
        groups = group_by_kernels(GEMM, GEMM.space(problem, DEFAULT_GPU))
        assert len({GEMM.kernels(problem, g[0])["gemm"].key for g in groups}) == len(groups)


def test_no_candidate_is_mostly_padding() -> None:
    problem = PROBLEMS["values"]
    shape = GemmShape(1024, 64, 1024, 16, "row", "row", "row")
    for config in GEMM.space(problem, DEFAULT_GPU):
        if not config["swap_ab"]:
            _, blocks_n = tile_blocks(shape, config)
            assert blocks_n * config["tile_n"] <= 128


def widths(problem: GemmProblem, schedule: str, tile_m: int) -> set[int]:
    """tile_n of a schedule's candidates that CuTe has no instruction for."""
    space = GEMM.space(problem, DEFAULT_GPU)
    tiles = {(c["kernel_schedule"], c["tile_m"], c["tile_n"]) for c in space}
    return {n for s, m, n in tiles if (s, m) == (schedule, tile_m)} - {
        16,
        32,
        64,
        96,
        128,
        192,
        256,
    }


def test_widths_that_fill_the_last_wave_are_candidates() -> None:
    uneven = GemmProblem(512, 11008, 4096)
    # 252 tiles of 128 x 176, two for each of 132; of 192 columns 232, also two, of 256 172.
    assert widths(uneven, "TmaWarpSpecializedCooperative", 128) == {112, 176}
    assert widths(uneven, "TmaWarpSpecializedCooperative", 256) == {176}
    assert widths(replace(uneven, n=14336), "TmaWarpSpecializedCooperative", 128) == {224, 240}
    # 128 tiles of 128 x 128 are one wave, of which four multiprocessors lack a tile.
    assert widths(GemmProblem(512, 4096, 4096), "TmaWarpSpecializedPingpong", 128) == set()


def test_only_operands_along_k_have_instructions_of_any_width() -> None:
    uneven = GemmProblem(512, 11008, 4096)
    other = replace(uneven, layout_b="row")
    assert widths(other, "TmaWarpSpecializedCooperative", 128) == set()
    chosen = coop(tile_n=176)
    assert "m64n176k16" in render(GEMM.kernels(uneven, chosen)["gemm"], "x")
    assert "wgmma" not in render(GEMM.kernels(other, chosen)["gemm"], "x")
    assert "wgmma" not in render(GEMM.kernels(uneven, coop())["gemm"], "x")
    assert GEMM.predict_us(uneven, chosen, DEFAULT_GPU) < GEMM.predict_us(
        other, chosen, DEFAULT_GPU
    )


@pytest.mark.parametrize(
    ("problem", "measured_us"),
    [
        (SQUARE, 220),
        (GemmProblem(1024, 1024, 64, batch=16), 13.9),
        # Measured with warm inputs; the estimate is for cold ones, 10.9.
        (GemmProblem(1024, 64, 1024, batch=16, layout_b="row"), 8.5),
    ],
)
def test_the_best_estimate_is_near_the_best_measured(
    problem: GemmProblem, measured_us: float
) -> None:
    space = GEMM.space(problem, DEFAULT_GPU)
    best = min(GEMM.predict_us(problem, config, DEFAULT_GPU) for config in space)
    assert measured_us / 1.5 < best < measured_us * 1.5


def test_the_estimate_sees_padding_and_starving() -> None:
    assert cost(ping(tile_m=64, tile_n=16)) > 2 * cost(ping())
    assert cost(coop(cluster_m=1)) > cost(coop())
    assert cost(stream_k(splits=8)) > cost(coop())


def cost(config: Config) -> float:
    return GEMM.predict_us(SQUARE, config, DEFAULT_GPU)


def test_waves_load_again_what_the_l2_does_not_hold() -> None:
    """Eight columns of 10 bytes and four rows of 100, by waves of eight blocks."""
    loaded = partial(gemm_cost._loaded_bytes, (8, 1, 10), (4, 1, 100))
    assert loaded(1, 8, l2=1 << 20) == 80 + 4 * 100, "a row a wave; the columns stay"
    assert loaded(1, 8, l2=100) == 4 * (80 + 100)
    # Bands of two rows: four columns and both rows, the other four columns, and so again.
    assert loaded(2, 8, l2=1 << 20) == 2 * (80 + 200)
    assert loaded(2, 8, l2=100) == 4 * (40 + 200)


def test_the_estimate_counts_the_energy_of_memory() -> None:
    """Along N every wave reads nearly all of B anew, along M bands of it."""
    problem = GemmProblem(1024, 27648, 5120, dtype="bfloat16")
    along_n, along_m = (
        GEMM.predict_us(
            problem,
            coop(cluster_m=1, cluster_n=2, max_swizzle_size=1, raster_order=order),
            DEFAULT_GPU,
        )
        for order in ("AlongN", "AlongM")
    )
    assert along_n > 1.05 * along_m


def test_stream_k_divides_few_tiles_among_all_blocks() -> None:
    problem = GemmProblem(128, 4096, 14336)
    whole, divided = (
        GEMM.predict_us(problem, config, DEFAULT_GPU)
        for config in (
            coop(tile_n=128, cluster_m=1, max_swizzle_size=1),
            stream_k(tile_n=128, cluster_m=1, decomposition_mode="StreamK", splits=None),
        )
    )
    assert divided < 0.7 * whole


@pytest.fixture
def no_heuristics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    gemm_cost._interface.cache_clear()
    yield
    gemm_cost._interface.cache_clear()


def test_seeds_without_the_heuristics_follow_the_estimate(no_heuristics: None) -> None:
    space = GEMM.space(SQUARE, DEFAULT_GPU)
    assert gemm_cost.heuristic_seeds(SQUARE, DEFAULT_GPU, space, 8, GEMM.constants) == []
    seeds = GEMM.seeds(SQUARE, DEFAULT_GPU, space, 8)
    assert len({GEMM.compile_digest(c) for c in seeds}) == 8
    assert seeds[0] == min(space, key=cost)


def test_the_heuristics_name_large_tiles_for_a_square() -> None:
    pytest.importorskip("nvMatmulHeuristics", reason="nvidia-matmul-heuristics is not installed")
    space = GEMM.space(SQUARE, DEFAULT_GPU)
    seeds = gemm_cost.heuristic_seeds(SQUARE, DEFAULT_GPU, space, 4, GEMM.constants)
    assert len(seeds) == 4
    assert {(c["tile_m"], c["tile_n"]) for c in seeds} >= {(128, 256), (256, 128)}
    other = GPUS["H200"].__class__("A100", "8.0", 108, 1410, 1555.0, 40 << 20)
    assert gemm_cost.heuristic_seeds(SQUARE, other, space, 4, GEMM.constants) == []


class Heuristics:
    """nvMatmulHeuristics with a list of its own: (tile, cluster, seconds) of each answer."""

    def __init__(self, *answers: tuple[tuple[int, int, int], tuple[int, int], float]) -> None:
        self.answers, self.precisions = answers, list[str]()
        self.NvMatmulHeuristicsMatmulLayout = defaultdict[str, str](str)

    def makeNvMatmulHeuristicsProblem(self, *_: Any) -> None:
        return None

    def getEx(
        self, query: Any, count: int, backend: Any, *, precision: str
    ) -> list[dict[str, Any]]:
        self.precisions.append(precision)
        names = "cta_tile_m", "cta_tile_n", "cta_tile_k", "cluster_m", "cluster_n"
        return [
            {
                "runtime": seconds,
                "kernel": SimpleNamespace(**dict(zip(names, [*t, *c], strict=True))),
            }
            for t, c, seconds in self.answers
        ]


def test_the_heuristics_answers_count_once_and_by_their_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists of 0.1.0.27 are not ranked, and name a tile and cluster up to four times. Estimates
    within 1 % of the least are alike.
    """
    answers = [
        ((128, 64, 64), (1, 1), 9e-6),
        *[((128, 128, 64), (2, 1), 5e-6)] * 40,
        ((128, 256, 64), (2, 1), 3e-6),
        ((256, 256, 64), (1, 1), 2.98e-6),  # which no config has
        ((128, 256, 64), (1, 2), 4e-6),
        ((64, 256, 64), (2, 1), 2.99e-6),
    ]
    library = Heuristics(*answers)
    monkeypatch.setattr(gemm_cost, "_interface", lambda _: (library, library, None))
    space = GEMM.space(SQUARE, DEFAULT_GPU)
    seeds = gemm_cost.heuristic_seeds(SQUARE, DEFAULT_GPU, space, 4, GEMM.constants)
    found = [((c["tile_m"], c["tile_n"]), (c["cluster_m"], c["cluster_n"])) for c in seeds]
    assert found == [
        ((128, 256), (2, 1)),
        ((64, 256), (2, 1)),
        ((128, 256), (1, 2)),
        ((128, 128), (2, 1)),
    ]
    assert gemm_cost.heuristic_seeds(SQUARE, DEFAULT_GPU, space, 2, GEMM.constants) == seeds[:2]
    assert gemm_cost.heuristic_seeds(SQUARE, DEFAULT_GPU, space, 0, GEMM.constants) == []


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ("dtype=fp16", "HSH"),
        ("dtype=bf16,dtype_d=fp32", "TSS"),
        ("dtype=e4m3", "QQTST"),
        ("dtype=e4m3,dtype_d=fp16,scales=row,fast_accum=0", "QQHSH"),
        ("dtype=e4m3,dtype_d=e4m3", "QQQSQ"),
    ],
)
def test_the_heuristics_are_asked_in_the_product_s_types(
    monkeypatch: pytest.MonkeyPatch, options: str, precision: str
) -> None:
    problem = GemmProblem.parse(f"M=4096,N=4096,K=4096,{options}")
    space = GEMM.space(problem, DEFAULT_GPU)
    library = Heuristics()
    with monkeypatch.context() as patch:
        patch.setattr(gemm_cost, "_interface", lambda _: (library, library, None))
        gemm_cost.heuristic_seeds(problem, DEFAULT_GPU, space, 4, GEMM.constants)
    assert set(library.precisions) == {precision}
    pytest.importorskip("nvMatmulHeuristics", reason="nvidia-matmul-heuristics is not installed")
    seeds = gemm_cost.heuristic_seeds(problem, DEFAULT_GPU, space, 4, GEMM.constants)
    assert seeds and set(seeds) <= set(space)


def test_the_library_s_lists_are_sorted_by_its_estimate() -> None:
    pytest.importorskip("nvMatmulHeuristics", reason="nvidia-matmul-heuristics is not installed")
    problem = GemmProblem(512, 14336, 4096)
    interface = gemm_cost._interface(gemm_cost._GPU_NAMES[DEFAULT_GPU.name])
    assert interface is not None
    library, handle, backend = interface
    layout = library.NvMatmulHeuristicsMatmulLayout["TN_ROW_MAJOR"]
    query = handle.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout, 1)
    seconds: dict[Any, float] = {}
    for answer in handle.getEx(query, 128, backend, precision="HSH"):
        kernel = answer["kernel"]
        tile = False, kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k
        name = tile, (kernel.cluster_m, kernel.cluster_n)
        seconds[name] = min(answer["runtime"], seconds.get(name, 1.0))
    order = gemm_cost.suggestions(problem, DEFAULT_GPU, {False})
    assert set(order) == set(seconds) and len(order) > 16
    ranked = [seconds[name] for name in order]
    assert all(b > a / gemm_cost.ALIKE for a, b in itertools.pairwise(ranked))
    listed = list(seconds.values())
    assert any(b < a / gemm_cost.ALIKE for a, b in itertools.pairwise(listed)), "as they come"


def test_products_with_a_short_side_may_be_programmatic_dependents() -> None:
    short = GEMM.space(PROBLEMS["few rows"], DEFAULT_GPU)
    chosen = [c for c in short if c.get("pdl")]
    assert chosen and not any(c.get("tile_scheduler") == "StreamK" for c in chosen)
    assert not any(c.get("pdl") for c in GEMM.space(SQUARE, DEFAULT_GPU))
    with_pdl, without = (
        GEMM.launches(SQUARE, ping(pdl=value), 1.0)[0].integers[15] for value in (True, None)
    )
    assert (with_pdl, without) == (1, 0)
    assert GEMM.violations(SQUARE, ping(pdl=False), DEFAULT_GPU) == [
        "pdl=False is not known (allowed: True)"
    ]
    stream_k = {"kernel_schedule": "TmaWarpSpecializedCooperative", "tile_scheduler": "StreamK"}
    assert "parameter pdl does not apply" in GEMM.violations(
        SQUARE, ping(**stream_k, pdl=True), DEFAULT_GPU
    )
