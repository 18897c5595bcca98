"""Problems that kernels are proven on: every edge planted, all legal, bounded, repeatable."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from tuner.config import Config
from tuner.families.by_operation import AttentionDomain
from tuner.families.gemm.draws import tile_of
from tuner.families.target import Target
from tuner.families.trials import (
    MAX_BYTES,
    MAX_FLOPS,
    MAX_MASK_PAIRS,
    Fact,
    Trial,
    draw_of,
    trials,
)
from tuner.hardware import DEFAULT_GPU
from tuner.problem import LAYOUTS, AttentionProblem, GemmProblem
from tuner.selection.kernels import targets
from tuner.selection.portfolio import shipped

PORTFOLIOS = {one.op: one for one in shipped() if one.gpu == DEFAULT_GPU}
TARGETS = targets(PORTFOLIOS["attention"])
UNPADDED = [t for t in TARGETS if not t.config.get("pads_heads")]
#: One of each kind: persistent, one block a tile, packed heads, split keys.
KINDS = {
    "persistent": next(t for t in TARGETS if t.config["persistent"]),
    "one block a tile": next(
        t for t in UNPADDED if not t.config["persistent"] and t.config["warp_groups"] == 1
    ),
    "packed": next(t for t in UNPADDED if t.config.get("packed_heads", 1) > 1),
    "split": next(t for t in TARGETS if t.config.get("combine") == "kernel"),
    "large heads": next(t for t in TARGETS if t.problem.head_dim == 256),
}


def drawn(target: Target, count: int = 64, seed: int = 0) -> list[Trial]:
    return trials(target, DEFAULT_GPU, count, seed)


def facts(target: Target) -> set[Fact]:
    found: set[Fact] = set()
    draw = draw_of(target, DEFAULT_GPU, seed=0)
    return found.union(*(draw.facts(trial) for trial in drawn(target)))


def of_domain(mask: str, **more: bool) -> Target:
    """A kernel of a domain that no portfolio has yet."""
    domain = AttentionDomain(64, mask, "prompt", **more)  # type: ignore[arg-type]
    plain = KINDS["one block a tile"].config
    config = replace(plain, params={k: v for k, v in plain.params.items() if k != "stages_output"})
    return Target(config, domain.problems("float16")[0])


def paged(head_dim: int, box_rows: int) -> Target:
    """A kernel of decoding over pages."""
    return next(
        target
        for target in TARGETS
        if target.problem.is_paged
        and target.problem.head_dim == head_dim
        and target.config["box_rows"] == box_rows
    )


def values(found: set[Fact], axis: str) -> set[Any]:
    return {value for name, value in found if name == axis}


def test_every_group_that_a_kernel_pads_is_planted() -> None:
    params = {**KINDS["packed"].config.params, "packed_heads": 8, "pads_heads": True}
    problem = AttentionDomain(64, "full", "few").problems("float16")[0]
    found = values(facts(Target(Config("fused_attention", params), problem)), "heads")
    assert {heads_q // heads_kv for heads_q, heads_kv in found} == set(range(2, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_every_trial_is_legal_small_and_of_the_kernel(kind: str) -> None:
    target = KINDS[kind]
    found = drawn(target)
    assert len(found) >= 64 and len(set(found)) == len(found)
    for trial in found:
        problem = trial.problem
        assert not target.family.violations(problem, trial.config, DEFAULT_GPU)
        assert target.family.kernels(problem, trial.config) == target.kernels
        assert problem.flops <= MAX_FLOPS
        assert sum(operand.bytes for operand in problem.operands) <= MAX_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_edges_of_tiles_are_among_them(kind: str) -> None:
    target = KINDS[kind]
    tiling, found = target.family.tiling(target.config), facts(target)
    rows = tiling.rows // tiling.packed
    assert {1, rows - 1, rows, rows + 1, 2 * rows - 1, 2 * rows + 1} - {0} <= values(
        found, "seqlen_q"
    )
    assert {1, *(tiling.keys + n for n in (-1, 0, 1))} <= values(found, "seqlen_kv")
    assert values(found, "longer") == {-1, 0, 1}
    assert values(found, "fills_chip") == {False, True}


@pytest.mark.parametrize("kind", KINDS)
def test_head_dimensions_layouts_and_batches(kind: str) -> None:
    target, found = KINDS[kind], facts(KINDS[kind])
    widest = target.problem.head_dim
    first = {64: 8, 96: 72, 128: 104, 256: 200}[widest]
    assert values(found, "head_dim") == set(range(first, widest + 1, 8))
    assert values(found, "layout") == set(LAYOUTS)
    assert {1, 32} <= values(found, "batch") and max(values(found, "batch")) == 32
    assert values(found, "with_lse") == {False, True}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_every_legal_ratio(kind: str) -> None:
    target, found = KINDS[kind], values(facts(KINDS[kind]), "heads")
    packed = target.family.tiling(target.config).packed
    named = {(71, 1), (14, 2), (28, 4), (25, 25)}
    assert named & found == {pair for pair in named if pair[0] // pair[1] % packed == 0}
    ratios = {heads_q // heads_kv for heads_q, heads_kv in found}
    assert {packed * n for n in (1, 2, 3, 5, 7)} <= ratios


def test_splits_from_one_to_the_most_each_way_they_are_combined() -> None:
    schedules: dict[int, set[Any]] = defaultdict(set)
    for pairs in values(facts(KINDS["one block a tile"]), "schedule"):
        named = dict(pairs)
        schedules[named["splits"]].add((named.get("combine"), named["pdl"]))
    assert schedules[1] == {(None, False), (None, True)}
    both = {(way, pdl) for way in ("cluster", "kernel") for pdl in (False, True)}
    assert schedules[2] == schedules[16] == both
    assert schedules[512] == {("kernel", False), ("kernel", True)}


def test_persistent_kernels_are_not_split() -> None:
    found = values(facts(KINDS["persistent"]), "schedule")
    assert {dict(pairs)["splits"] for pairs in found} == {1}


def test_windows_on_either_side_and_soft_caps() -> None:
    sides = values(facts(of_domain("windowed")), "window")
    assert sides == {(True, False), (False, True), (True, True)}
    assert values(facts(of_domain("full", has_softcap=True)), "softcap") == {50.0, 5.0}


def test_packed_sequences_have_one_layout_and_no_splits() -> None:
    found = facts(of_domain("causal", is_varlen=True))
    assert values(found, "layout") == {"bshd"}
    assert {dict(pairs)["splits"] for pairs in values(found, "schedule")} == {1}


PRODUCTS = [t for op in ("gemm", "swiglu") for t in targets(PORTFOLIOS[op])]
#: One of each kind: all of A in shared memory, swapped operands, a wide tile, a gated one.
PRODUCT_KINDS = {
    "few rows": next(t for t in PRODUCTS if t.family.name == "gemv"),
    "swapped": next(t for t in PRODUCTS if t.config.get("swap_ab")),
    "wide": next(t for t in PRODUCTS if t.config.get("tile_scheduler") == "Persistent"),
    "with a bias": next(
        t
        for t in PRODUCTS
        if t.family.name == "gemm" and getattr(t.problem, "epilogue", "") == "bias"
    ),
    "gated": next(t for t in PRODUCTS if t.problem.op == "swiglu"),
}


@pytest.mark.parametrize("kind", PRODUCT_KINDS)
class TestProducts:
    def test_every_trial_is_legal_small_and_of_the_kernel(self, kind: str) -> None:
        target = PRODUCT_KINDS[kind]
        found = drawn(target)
        assert len(found) >= 64 and len(set(found)) == len(found)
        for trial in found:
            assert not target.family.violations(trial.problem, trial.config, DEFAULT_GPU)
            assert target.family.kernels(trial.problem, trial.config) == target.kernels
            assert trial.problem.flops <= MAX_FLOPS and trial.problem.bytes <= MAX_BYTES
            launched = target.family.strided_launches(
                trial.problem, trial.config, 1.0, trial.strides
            )
            assert isinstance(launched, list) or not trial.strides

    def test_edges_of_tiles_are_among_them(self, kind: str) -> None:
        target, found = PRODUCT_KINDS[kind], facts(PRODUCT_KINDS[kind])
        rows, columns, depth = tile_of(target.family.tiling(target.config))
        step = 32 if kind == "gated" else 8
        columns = columns // 2 if kind == "gated" else columns
        if kind != "few rows":
            assert {1, rows - 1, rows, rows + 1, 2 * rows + 1} <= values(found, "m")
        assert {step, columns, columns + step, 2 * columns - step} <= values(found, "n")
        assert {8, depth - 8, depth, depth + 8, 2 * depth + 8} <= values(found, "k")
        assert 16392 in values(found, "k") or kind == "few rows", "A would not fit"
        assert 128256 in values(found, "n") and values(found, "fills_chip") == {False, True}
        assert any(n // step % 2 for n in values(found, "n") if n > 16 * step)

    def test_rows_lie_apart(self, kind: str) -> None:
        apart = values(facts(PRODUCT_KINDS[kind]), "apart")
        if kind == "gated":  # its launches take no strides
            assert apart == {(0, 0)}
        else:
            assert {(0, 0), (8, 0), (0, 8), (72, 1024)} <= apart | {(8, 0), (72, 1024)}
            assert any(b for _, b in apart)

    def test_every_launch_is_among_them(self, kind: str) -> None:
        target = PRODUCT_KINDS[kind]
        schedules = [dict(pairs) for pairs in values(facts(target), "schedule")]
        if kind == "few rows":
            assert {(s["persistent"], s["pdl"]) for s in schedules} == {
                *((p, d) for p in (False, True) for d in (False, True))
            }
        else:
            assert {s["raster_order"] for s in schedules} == {"AlongM", "AlongN"}
            assert {s["max_swizzle_size"] for s in schedules} == {1, 2, 4, 8}
            assert {s.get("pdl", False) for s in schedules} == {False, True}


def test_strides_are_those_of_longer_rows() -> None:
    problem = GemmProblem(100, 200, 64)
    config = PRODUCT_KINDS["wide"].config
    assert Trial(problem, config).strides == {}
    assert Trial(problem, config, apart=(8, 16)).strides == {
        "a": (6400, 72, 1),
        "b": (12800, 1, 80),
    }


def test_equal_seeds_draw_equal_trials_and_both_types_alike() -> None:
    target = KINDS["packed"]
    assert drawn(target) == drawn(target) != drawn(target, seed=1)
    other = next(
        t for t in TARGETS if t.config == target.config and t.problem.dtype != target.problem.dtype
    )
    assert [replace(t.problem, dtype="bfloat16") for t in drawn(target)] == [
        replace(t.problem, dtype="bfloat16") for t in drawn(other)
    ]


def test_more_are_drawn_where_more_are_asked() -> None:
    target = KINDS["split"]
    assert len(drawn(target, 200)) >= 200


@pytest.mark.parametrize(
    ("box_rows", "sizes"), [(16, {16, 32, 48, 64, 80, 128, 192, 256}), (64, {64, 128, 192, 256})]
)
def test_paged_caches_have_every_page_layout_and_unlike_lengths(
    box_rows: int, sizes: set[int]
) -> None:
    target = paged(128, box_rows)
    found = facts(target)
    assert values(found, "page_size") == sizes
    assert values(found, "is_varlen") == {False, True}
    assert values(found, "layout") == {"bhsd", "bshd"}
    assert {("combine", "cluster"), ("combine", "kernel")} <= {
        one for schedule in values(found, "schedule") for one in schedule
    }
    for trial in drawn(target):
        assert not target.family.violations(trial.problem, trial.config, DEFAULT_GPU)
        assert target.family.kernels(trial.problem, trial.config) == target.kernels
        assert sum(operand.bytes for operand in trial.problem.operands) <= MAX_BYTES


def test_windows_and_sinks_of_paged_caches() -> None:
    for target in TARGETS:
        if target.problem.has_sinks and target.problem.is_windowed:
            sides = values(facts(target), "window")
            assert (True, False) in sides
            assert all(trial.problem.has_sinks for trial in drawn(target))
            return
    raise AssertionError("no kernel of sinks and windows")


def test_block_masks_have_all_axes_and_edges_of_blocks() -> None:
    target = next(t for t in TARGETS if t.problem.block_mask and t.problem.head_dim == 128)
    found = facts(target)
    assert values(found, "block_mask") == {"1", "b", "h", "bh"}
    assert {1, 127, 128, 129, 255, 257} <= values(found, "seqlen_q") & values(found, "seqlen_kv")
    assert values(found, "with_lse") == {False, True} and len(values(found, "heads")) > 10
    for trial in drawn(target):
        problem = trial.problem
        assert isinstance(problem, AttentionProblem)
        assert target.family.kernels(problem, trial.config) == target.kernels
        batches, heads, *_ = problem.block_shape
        assert batches * heads * problem.seqlen_q * problem.seqlen_kv <= MAX_MASK_PAIRS
