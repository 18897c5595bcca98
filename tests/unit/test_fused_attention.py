"""Our own attention kernel: its variables, its launches and its estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fused_configs import maker
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.families import attention_work
from tuner.families.attention_instances import INSTANCES, REGISTERS, instance, launch_registers
from tuner.families.attention_work import AttentionSizes
from tuner.families.base import group_by_kernels
from tuner.families.fused_attention import FusedAttention, paged
from tuner.families.fused_attention.legality import PAGED_ONLY
from tuner.hardware import (
    DEFAULT_GPU,
)
from tuner.problem import AttentionProblem

FAMILY = FusedAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64")
GROUPED = AttentionProblem.parse("H=16,HKV=4,S=1024,D=64")
make = maker()


def problem_of(head_dim: int) -> AttentionProblem:
    return AttentionProblem(seqlen_q=1024, seqlen_kv=1024, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_a_head_is_padded_to_the_next_instance(head_dim: int) -> None:
    columns = instance(head_dim)
    assert columns in INSTANCES
    assert not any(head_dim <= smaller < columns for smaller in INSTANCES)
    problem = problem_of(head_dim)
    spec = FAMILY.kernels(problem, make(1, 64))["attention"]
    assert spec.variables["head_dim"] == columns
    (launch,) = FAMILY.launches(problem, make(1, 64), 0.5)
    assert launch.integers[5] == head_dim  # TMA pads: it is told the columns that exist


@pytest.mark.parametrize(("shape", "registers"), REGISTERS.items())
def test_setmaxnreg_asks_for_no_more_than_a_block_has(
    shape: tuple[int, int], registers: tuple[int, int]
) -> None:
    """A group that asks for more than its block was launched with waits for ever."""
    (groups, blocks), (producer, consumer) = shape, registers
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer <= consumer <= 256
    assert producer + groups * consumer <= (groups + 1) * launch_registers(groups, blocks)
    spec = FAMILY.kernels(PROBLEM, make(groups, 64, blocks_per_sm=blocks))["attention"]
    assert spec.variables["producer_registers"] == producer
    assert spec.variables["consumer_registers"] == consumer


@pytest.mark.parametrize(
    ("groups", "blocks", "a_thread"),
    [
        (1, 1, 248),
        (1, 2, 128),
        (2, 1, 168),
        (2, 2, 80),
        (3, 1, 128),
        (3, 2, 64),
        (4, 1, 96),
        (4, 2, 48),
    ],
)
def test_registers_at_launch(groups: int, blocks: int, a_thread: int) -> None:
    """The register file among the resident blocks' threads, in eights; no thread has over 255."""
    assert launch_registers(groups, blocks) == a_thread


@pytest.mark.parametrize(
    ("text", "strides"),
    [
        (
            "B=3,H=8,HKV=2,SQ=64,SKV=256,D=40,layout=bhsd",
            ((20480, 2560, 40), (20480, 10240, 40), (20480, 10240, 40), (20480, 2560, 40)),
        ),
        (
            "B=3,H=8,HKV=2,SQ=64,SKV=256,D=40,layout=bshd",
            ((20480, 40, 320), (20480, 40, 80), (20480, 40, 80), (20480, 40, 320)),
        ),
    ],
)
def test_one_launch_with_extents_strides_and_schedule(
    text: str, strides: tuple[tuple[int, int, int], ...]
) -> None:
    problem = AttentionProblem.parse(text)
    config = make(2, 64, packed_heads=4, splits=3, pdl=True)
    (launch,) = FAMILY.launches(problem, config, 0.125)
    assert launch.kernel == "attention"
    assert [ref.operand for ref in launch.tensors] == ["query", "key", "value", "out", "lse"]
    assert all(ref.offset_bytes == 0 for ref in launch.tensors)
    assert launch.integers[:6] == (3, 8, 2, 64, 256, 40)
    assert launch.integers[6:18] == tuple(s for group in strides for s in group)
    assert launch.integers[18:] == (3, 1, 0)
    assert launch.scalars == (0.125,)
    assert FAMILY.scratch_bytes(problem, config) == 0
    clustered = make(2, 64, packed_heads=4, splits=3, combine="cluster")
    assert FAMILY.launches(problem, clustered, 0.125)[0].integers[18:] == (3, 0, 1)


def test_splits_and_pdl_share_a_kernel_and_nothing_else_does() -> None:
    """But for those that paged caches have."""
    config = make(2, 64, packed_heads=2, splits=3)
    spec = FAMILY.kernels(GROUPED, config)["attention"]
    others: dict[str, Value] = {
        "warp_groups": 3,
        "tile_n": 80,
        "kv_stages": 3,
        "score_buffers": 2,
        "q_in_registers": True,
        "packed_heads": 4,
        "ping_pong": True,
        "early_exp": 50,
        "persistent": True,
        "blocks_per_sm": 2,
        "splits": 2,
        "pdl": True,
        "combine": "cluster",
        "key_groups": 2,
        "stages_output": True,
        "pads_heads": True,
        "skips_masked": "blocks",
        "rescale": "lazy",
        "turn_ends": "scores",
        "split_keys": 512,
        "carries_parts": True,
        "column_groups": 2,
        "searches": True,
        "fills_rows": True,
    }
    absent = {"key_groups", "stages_output", "pads_heads", "skips_masked", "rescale", "split_keys"}
    absent |= {"turn_ends", "carries_parts", "column_groups", "searches"}
    absent |= {"fills_rows"}
    assert set(others) == set(config.params) | absent == set(FAMILY.domains) - set(PAGED_ONLY)
    assert (spec.variables["key_groups"], spec.variables["stages_output"]) == (1, False)
    for name, value in others.items():
        other = Config(config.family, {**config.params, name: value})
        is_shared = name in ("splits", "pdl", "combine")
        assert (FAMILY.kernels(GROUPED, other)["attention"] == spec) == is_shared, name
        assert (len(group_by_kernels(FAMILY, [config, other])) == 1) == is_shared, name
        launched = [FAMILY.launches(GROUPED, c, 1.0)[0].integers for c in (config, other)]
        # Fixed parts are counted at launch.
        assert (launched[0] != launched[1]) == (is_shared or name == "split_keys"), name


def test_boxes_are_as_wide_as_pages_and_tiles_allow() -> None:
    """And one kernel serves pages of every size where a config says so."""

    def boxes(page_size: int, tile_n: int, **more: Value) -> Value:
        problem = AttentionProblem.parse(f"SQ=1,SKV=999,D=64,page_size={page_size}")
        config = make(1, tile_n, **more)
        reasons = FAMILY.violations(problem, config, DEFAULT_GPU)
        return reasons[0] if reasons else FAMILY.kernels(problem, config)["attention"].variables[
            "box_rows"
        ]  # fmt: skip

    assert [boxes(*each) for each in ((64, 64), (128, 128), (192, 64))] == [64] * 3
    assert [boxes(*each) for each in ((16, 64), (32, 64), (80, 64), (64, 80))] == [16] * 4
    assert boxes(64, 64, box_rows=16) == 16
    assert "box_rows=64 does not divide both page_size=48 and tile_n=64" in str(
        boxes(48, 64, box_rows=64)
    )
    dense = AttentionProblem.parse("S=512,D=64")
    assert FAMILY.violations(dense, make(1, 64, box_rows=16), DEFAULT_GPU) == [
        "box_rows is for paged caches, only"
    ]
    assert "box_rows" not in FAMILY.carried(dense, make(1, 64, box_rows=16)).params


@pytest.mark.parametrize(
    ("text", "params", "is_legal"),
    [
        ("causal=1", {"persistent": True}, True),
        ("causal=1", {"persistent": False}, False),
        ("causal=1", {"persistent": True, "stream_k": True}, False),
        ("causal=0", {"persistent": True}, False),
    ],
)
def test_the_longest_tiles_come_first_where_a_counter_hands_them_out(
    text: str, params: Mapping[str, Value], is_legal: bool
) -> None:
    problem = AttentionProblem.parse(f"SQ=300,SKV=999,D=128,page_size=16,{text}")
    config = make(2, 128, q_in_registers=False, longest_first=True, **params)
    assert ([] == FAMILY.violations(problem, config, DEFAULT_GPU)) is is_legal


@pytest.mark.parametrize(
    ("text", "persistent", "is_legal"),
    [
        ("S=300,varlen=1", True, True),
        ("S=300,varlen=1,causal=1", True, True),
        ("S=300,varlen=1", False, False),
        ("S=300", True, False),
        ("SQ=300,SKV=999,varlen=1,page_size=16,causal=1", True, False),
    ],
)
def test_persistent_blocks_look_for_tiles_of_packed_sequences(
    text: str, persistent: bool, is_legal: bool
) -> None:
    problem = AttentionProblem.parse(f"B=3,D=128,{text}")
    config = make(2, 64, q_in_registers=False, persistent=persistent, searches=True)
    assert ([] == FAMILY.violations(problem, config, DEFAULT_GPU)) is is_legal
    carried = FAMILY.carried(problem, config).params
    assert ("searches" in carried) is ("varlen" in text and "page" not in text)


@pytest.mark.parametrize(
    ("text", "params", "is_legal"),
    [
        ("S=300", {}, True),
        ("S=300,causal=1,varlen=1", {"persistent": True, "searches": True}, True),
        ("S=300,window=9", {"splits": 1}, True),
        ("S=300", {"splits": 3, "combine": "kernel"}, True),
        ("S=300", {"splits": 3, "combine": "cluster"}, False),
        ("S=300", {"stages_output": True}, False),
        ("S=300,mask=bk", {}, False),
        ("SQ=8,SKV=999,page_size=16,causal=1", {}, True),
        ("SQ=8,SKV=999,page_size=16,causal=1,dtype=e4m3", {}, True),
        ("SQ=8,SKV=999,page_size=16,causal=1,dtype=e4m3,D=192", {}, True),
        ("SQ=8,SKV=999,page_size=16,causal=1,dtype=e4m3,D=80", {}, False),  # copies bring 64 bytes
    ],
)
def test_tiles_of_whole_queries_are_of_any_heads(
    text: str, params: Mapping[str, Value], is_legal: bool
) -> None:
    head_dim = "" if ",D=" in text else "D=128,"
    problem = AttentionProblem.parse(f"B=3,H=27,HKV=3,{head_dim}{text}")
    given = {"packed_heads": 16, "pads_heads": True, "splits": 1, **params}
    config = make(1, 64, q_in_registers=False, fills_rows=True, **given)
    assert ([] == FAMILY.violations(problem, config, DEFAULT_GPU)) is is_legal
    alone = replace(problem, heads_q=3)
    assert "fills_rows" not in FAMILY.carried(alone, config).params
    if problem.is_paged:
        return
    sizes = AttentionSizes.of(replace(problem, seqlen_q=14, is_varlen=False))
    counts = [
        attention_work.work(sizes, FAMILY.tiling(one), DEFAULT_GPU)[6] * DEFAULT_GPU.sm_count
        for one in (config, Config(config.family, {**config.params, "fills_rows": False}))
    ]
    splits = given["splits"]
    assert counts == [2 * 9 * splits, 4 * 9 * splits], "seven queries of nine heads, not four"


def test_whole_rows_are_of_heads_that_tma_does_not_fill_up() -> None:
    def reasons(text: str, **more: Value) -> list[str]:
        problem = AttentionProblem.parse(f"SQ=300,SKV=999,causal=1,{text}")
        config = make(2, 128, q_in_registers=False, ping_pong=True, **more)
        return FAMILY.violations(problem, config, DEFAULT_GPU)

    whole = {"whole_rows": True, "copy_warps": 3}
    assert reasons("D=128,page_size=48", **whole) == []
    [reason] = reasons("D=112,page_size=48", **whole)
    assert reason == "whole_rows is not for D=112 (allowed: 128, 192, 256)"
    assert reasons("D=112,page_size=48", copy_warps=3) == []
    [reason] = reasons("D=128,page_size=48,dtype=e4m3", **whole)
    assert reason == "whole_rows and copy_warps are not for e4m3"
    assert reasons("D=128", **whole) == [
        "whole_rows is for paged caches, only",
        "copy_warps is for paged caches, only",
    ]
    dense = AttentionProblem.parse("S=512,D=128")
    carried = FAMILY.carried(dense, make(2, 128, **whole)).params
    assert not set(whole) & set(carried)


def test_stream_k_is_of_two_groups_at_most_over_pages() -> None:
    def reasons(text: str, groups: int = 1, **more: Value) -> list[str]:
        config = make(groups, 64, **{"stream_k": True, "persistent": True, **more})
        return FAMILY.violations(AttentionProblem.parse(f"SKV=999,{text}"), config, DEFAULT_GPU)

    assert reasons("SQ=1,D=128,page_size=16") == []
    assert reasons("SQ=8,D=128,causal=1,window=9,page_size=16") == []
    assert reasons("SQ=8,D=128,causal=1,page_size=16", 2) == []
    assert reasons("SQ=1,D=128,page_size=16", persistent=False) == []
    only = "stream_k is for splits=1 and one or two warp groups, only"
    assert reasons("SQ=1,D=128,page_size=16", 3) == [only]
    more = {"persistent": False, "splits": 2, "combine": "kernel"}
    assert reasons("SQ=1,D=128,page_size=16", **more) == [only]
    assert reasons("SQ=1,D=128") == ["stream_k is for paged caches, only"]
    for lever, other in (("own_first", {"persistent": True}), ("leaves_cluster", {})):
        [reason] = reasons("SQ=1,D=128,page_size=16", **{lever: True, **other})
        assert reason.startswith(f"{lever} is for")
    (unpadded,) = reasons("SQ=8,D=128,causal=1,page_size=16", fills_rows=True)
    assert unpadded.startswith("fills_rows is for pads_heads")


def test_e4m3_is_launched_with_its_factors_last() -> None:
    """As the template's opening comment lists tensors and integers."""
    problem = AttentionProblem.parse("B=2,H=8,HKV=4,SQ=96,SKV=200,D=64,dtype=e4m3,layout=bshd")
    config = make(2, 96, packed_heads=2, pdl=True)
    (launch,) = FAMILY.launches(problem, config, 0.5)
    assert [ref.operand for ref in launch.tensors] == [
        *("query", "key", "value", "out", "lse", "descale_q", "descale_k", "descale_v")
    ]
    of_queries, of_keys = (96 * 8 * 64, 64, 8 * 64), (200 * 4 * 64, 64, 4 * 64)
    strides = (*of_queries, *of_keys, *of_keys, *of_queries)
    assert launch.integers == (2, 8, 4, 96, 200, 64, *strides, 1, 1, 0)


def test_space_of_e4m3_takes_wider_tiles() -> None:
    problem = AttentionProblem.parse("B=2,S=8192,D=128,dtype=e4m3")
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert {config["tile_n"] for config in space} == {64, 96, 128, 160, 192, 224}
    half = AttentionProblem.parse("B=2,S=8192,D=128")
    config = make(2, 128, ping_pong=True, persistent=True)
    faster, slower = (FAMILY.predict_us(p, config, DEFAULT_GPU) for p in (problem, half))
    assert faster < slower < 2 * faster


def test_the_estimate_sees_that_clusters_need_their_place() -> None:
    """32 clusters of four do not run at once, though 128 blocks do: recorded 172.4 us in place of
    125.4, on one H200.
    """
    problem = AttentionProblem.parse("B=4,H=64,HKV=8,SQ=1,SKV=32768,D=128,dtype=bf16")
    cluster, kernel = (
        FAMILY.predict_us(
            problem,
            make(1, 128, packed_heads=8, splits=4, combine=combine, pdl=True),
            DEFAULT_GPU,
        )
        for combine in ("cluster", "kernel")
    )
    assert 1.25 * kernel < cluster < 1.6 * kernel


def test_windows_and_soft_caps_are_compiled_in_and_their_sizes_are_not() -> None:
    config = make(2, 64)
    texts = ("", ",window=64", ",window=65", ",softcap=30", ",softcap=50", ",left=9,softcap=5")
    problems = [AttentionProblem.parse(f"S=1024,D=64{text}") for text in texts]
    specs = [FAMILY.kernels(problem, config)["attention"] for problem in problems]
    assert [(s.variables["is_windowed"], s.variables["has_softcap"]) for s in specs] == [
        (False, False), (True, False), (True, False), (False, True), (False, True), (True, True),
    ]  # fmt: skip
    assert specs[1] == specs[2] and specs[3] == specs[4]
    launches = [FAMILY.launches(problem, config, 0.125)[0] for problem in problems]
    plain = launches[0]
    assert [launch.integers[len(plain.integers) :] for launch in launches] == [
        (), (64, 64), (65, 65), (), (), (9, 1024),
    ]  # fmt: skip
    assert all(x.integers[: len(plain.integers)] == plain.integers for x in launches)
    assert [launch.scalars[1:] for launch in launches] == [(), (), (), (30.0,), (50.0,), (5.0,)]
    causal = AttentionProblem.parse("S=1024,D=64,causal=1,window=64")
    assert FAMILY.launches(causal, config, 0.125)[0].integers[-2:] == (64, 0)


def test_a_mask_operand_is_launched_with_its_strides_last() -> None:
    """As the template's opening comment lists tensors and integers; 0 along missing axes."""
    config = make(2, 64)
    shape = "B=2,H=3,SQ=96,SKV=200,D=64"
    for text, kind, strides in (
        ("bias=bh", "additive", (3 * 96 * 200, 96 * 200, 200, 1)),
        ("bias=h", "additive", (0, 96 * 200, 200, 1)),
        ("mask=1", "bool", (0, 0, 200, 1)),
        ("mask=bk", "bool", (200, 0, 0, 1)),
        ("mask=bk,left=9", "bool", (200, 0, 0, 1)),
    ):
        problem = AttentionProblem.parse(f"{shape},{text}")
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        variables = FAMILY.kernels(problem, config)["attention"].variables
        assert variables["mask_operand"] == kind
        (launch,) = FAMILY.launches(problem, config, 0.5)
        name = "bias" if kind == "additive" else "mask"
        assert [ref.operand for ref in launch.tensors[3:]] == ["out", "lse", name]
        assert launch.integers[-4:] == strides
        assert len(launch.integers) == 25 + 2 * problem.is_windowed
        own = {name: (7, 8, 9, 0)}
        given = FAMILY.strided_launches(problem, config, 0.5, own)
        assert not isinstance(given, str)
        wanted = tuple(x and y for x, y in zip(strides, (7, 8, 9, 1), strict=True))
        assert given[0].integers[-4:-1] == wanted[:3] and given[0].integers[-1] == 0
    plain = FAMILY.kernels(AttentionProblem.parse(shape), config)["attention"]
    assert "mask_operand" not in plain.variables


def test_whole_rows_need_far_strides_that_a_coordinate_counts() -> None:
    shape = "B=2,H=8,HKV=2,SQ=1,SKV=64,D=128,dtype=bf16,page_size=16,layout=bshd"
    problem = AttentionProblem.parse(shape)
    kernels = paged.kernels(128, "one", is_plain=True)
    whole, plain = (
        FAMILY.called(problem, next(k for k in kernels if k.get("whole_rows", False) is way), 1)
        for way in (True, False)
    )
    near = {"key": (4136, 136, 272, 1)}
    given = FAMILY.strided_launches(problem, whole, 0.5, near)
    assert given == "key: strides of pages and heads are not multiples of 64"
    for config, strides in ((plain, near), (whole, {"key": (8192, 128, 512, 1)}), (whole, {})):
        assert not isinstance(FAMILY.strided_launches(problem, config, 0.5, strides), str)


def test_dense_calls_by_one_kernel_are_launched_plainly() -> None:
    dense, pages = (
        AttentionProblem.parse(f"B=2,H=8,HKV=2,SQ=1,SKV=64,D=128,dtype=bf16{text}")
        for text in ("", ",page_size=16")
    )
    early = paged.kernels(128, "one", is_plain=True)[0]
    cluster = Config(early.family, {**early.params, "combine": "cluster"})
    for problem, config, splits, is_early in (
        (dense, early, 1, False),
        (dense, early, 4, True),
        (dense, cluster, 4, False),
        (pages, early, 1, True),
    ):
        served = FAMILY.served(problem, FAMILY.called(problem, config, splits))
        assert served["splits"] == splits and served["pdl"] is is_early


def test_a_mask_operand_leaves_registers_for_narrower_tiles() -> None:
    plain, masked, boolean = (
        AttentionProblem.parse(f"S=1024,D=128{text}") for text in ("", ",bias=1", ",mask=1")
    )
    wide = make(2, 160, ping_pong=True, persistent=True)
    assert FAMILY.accepts(plain, wide, DEFAULT_GPU)
    assert not FAMILY.accepts(masked, wide, DEFAULT_GPU)
    assert FAMILY.carried(plain, wide) == wide
    narrow = FAMILY.carried(masked, wide)
    assert narrow["tile_n"] == 128
    assert FAMILY.carried(boolean, wide)["tile_n"] == 144, "a byte a key, not two"
    assert FAMILY.accepts(masked, narrow, DEFAULT_GPU)
    assert {c["tile_n"] for c in FAMILY.space(masked, DEFAULT_GPU)} <= {64, 80, 96, 128}


def test_variable_lengths_are_launched_with_their_starts_and_totals_last() -> None:
    """As the template's opening comment lists tensors and integers."""
    problem = AttentionProblem.parse("B=3,H=8,HKV=4,SQ=96,SKV=200,D=64,varlen=1")
    config = make(2, 96, packed_heads=2, pdl=True)
    (launch,) = FAMILY.launches(problem, config, 0.5)
    assert [ref.operand for ref in launch.tensors] == [
        *("query", "key", "value", "out", "lse", "cu_seqlens_q", "cu_seqlens_kv")
    ]
    rows, keys = problem.total_q, problem.total_kv
    of_queries, of_keys = (rows * 8 * 64, 64, 8 * 64), (keys * 4 * 64, 64, 4 * 64)
    strides = (*of_queries, *of_keys, *of_keys, *of_queries)
    assert launch.integers == (3, 8, 4, 96, 200, 64, *strides, 1, 1, 0, rows, keys)
    plain = AttentionProblem.parse("B=3,H=8,HKV=4,SQ=96,SKV=200,D=64,layout=bshd")
    specs = [FAMILY.kernels(p, config)["attention"] for p in (problem, plain)]
    assert [spec.variables["is_varlen"] for spec in specs] == [True, False]


def test_space_of_variable_lengths_has_no_splits_and_is_estimated_by_the_mean() -> None:
    few, plain = (
        AttentionProblem.parse(f"B=2,H=4,SQ=1,SKV=8192,D=64{text}") for text in (",varlen=1", "")
    )
    assert {config["splits"] for config in FAMILY.space(few, DEFAULT_GPU)} == {1}
    assert {config["splits"] for config in FAMILY.space(plain, DEFAULT_GPU)} > {1}
    config = make(2, 128, ping_pong=True, persistent=True)
    packed, even = (
        FAMILY.predict_us(AttentionProblem.parse(f"B=16,S=4096,D=64{text}"), config, DEFAULT_GPU)
        for text in (",varlen=1", "")
    )
    assert 0.3 * even < packed < 0.6 * even  # of the pairs there are (5 / 8)^2


def test_a_window_is_estimated_by_the_keys_that_it_shows() -> None:
    config = make(2, 128, ping_pong=True, persistent=True)
    times = [
        FAMILY.predict_us(AttentionProblem.parse(f"S=16384,D=64{text}"), config, DEFAULT_GPU)
        for text in (
            ",causal=1,window=256",
            ",causal=1,window=4096",
            ",causal=1",
            "",
            ",softcap=30",
        )
    ]
    assert times == sorted(times)
    assert times[0] < times[2] / 8
    unseen = AttentionProblem.parse("SQ=16384,SKV=128,D=64,causal=1,window=64")
    assert 0 < FAMILY.predict_us(unseen, config, DEFAULT_GPU) < times[0]


@pytest.mark.parametrize("tile_n", [16, 64, 80, 112, 128, 160, 224])
def test_a_width_that_cute_has_not_is_written_out(tile_n: int) -> None:
    """CuTe's macro for all widths would triple what every unit costs to compile."""
    for dtype, name in (("fp16", "f16"), ("bf16", "bf16"), ("e4m3", "e4m3")):
        problem = AttentionProblem.parse(f"S=1024,D=64,dtype={dtype}")
        for in_registers, source in ((False, "ss"), (True, "rs")):
            if tile_n % (32 if dtype == "e4m3" else 16):
                continue
            config = make(1, tile_n, q_in_registers=in_registers)
            text = render(FAMILY.kernels(problem, config)["attention"], "id")
            assert "EXTENDED_MMA" not in text
            wide = f"tuner_64x{tile_n}_{name}_{source}"
            is_written = f"struct {wide} {{" in text
            assert is_written == (tile_n not in (16, 64, 128))
            assert is_written == (f"AtomQK = SM90::GMMA::{wide};" in text)
            if is_written:
                assert f"float[{tile_n // 2}]" in text
                assert text.count('"+f"(d') == tile_n // 2
                depth = 32 if dtype == "e4m3" else 16
                assert f"m64n{tile_n}k{depth}.f32.{name}.{name}" in text


RENDERED = {
    "plain": ("S=1024,D=64", make(2, 128, ping_pong=True, early_exp=50)),
    "causal": (
        "H=16,HKV=4,S=1000,D=128,causal=1,dtype=bf16",
        make(2, 64, score_buffers=2, packed_heads=4, persistent=True),
    ),
    "e4m3": (
        "S=1024,D=128,dtype=e4m3",
        make(2, 224, ping_pong=True, early_exp=50, persistent=True),
    ),
    "varlen": (
        "B=3,H=8,HKV=2,S=1000,D=64,varlen=1",
        make(2, 96, score_buffers=2, packed_heads=4),
    ),
    "varlen_searches": (
        "B=3,H=10,HKV=2,S=1000,D=128,causal=1,varlen=1",
        make(2, 64, packed_heads=8, pads_heads=True, persistent=True, searches=True),
    ),
    "fits": (
        "B=3,H=18,HKV=2,SQ=8,SKV=1000,D=128,window=99,dtype=bf16",
        make(1, 64, packed_heads=16, pads_heads=True, fills_rows=True, splits=1),
    ),
    "values": (
        "H=8,S=1000,D=192,DV=128,causal=1,dtype=bf16",
        make(2, 128, ping_pong=True, early_exp=0, persistent=True),
    ),
    "bias": ("B=3,H=8,HKV=2,S=1000,D=64,softcap=30,bias=h", make(2, 64, packed_heads=4)),
    "mask": ("B=3,S=1000,D=64,causal=1,mask=bk", make(2, 64, score_buffers=2)),
    "paged": (
        "B=3,H=8,HKV=2,SQ=600,SKV=1000,D=128,causal=1,page_size=48",
        make(2, 128, packed_heads=4, ping_pong=True, early_exp=50, persistent=True),
    ),
    "paged_whole_rows": (
        "B=3,H=8,HKV=2,SQ=600,SKV=1000,D=128,causal=1,page_size=48",
        make(
            *(2, 128),
            packed_heads=4,
            ping_pong=True,
            early_exp=50,
            persistent=True,
            whole_rows=True,
            copy_warps=3,
        ),
    ),
    "paged_longest_first": (
        "B=3,H=8,HKV=2,SQ=600,SKV=1000,D=128,causal=1,page_size=48",
        make(2, 128, packed_heads=4, ping_pong=True, persistent=True, longest_first=True),
    ),
    "paged_e4m3": (
        "B=3,H=8,HKV=2,SQ=600,SKV=1000,D=128,causal=1,page_size=48,dtype=e4m3",
        make(2, 128, packed_heads=4, ping_pong=True, early_exp=50, persistent=True),
    ),
    "paged_sinks": (
        "B=3,H=8,HKV=1,SQ=4,SKV=1000,D=64,causal=1,window=99,page_size=64,sinks=1,dtype=bf16",
        make(1, 64, packed_heads=8, early_exp=50, splits=5),
    ),
    "skips": (
        "B=8,H=16,S=1000,D=64,causal=1",
        make(3, 128, ping_pong=True, persistent=True, skips_masked="halves"),
    ),
    "padded": (
        "B=3,H=28,HKV=4,SQ=8,SKV=1000,D=128,dtype=bf16",
        make(1, 64, packed_heads=8, pads_heads=True, stages_output=True, splits=1),
    ),
    "sparse": (
        "B=3,H=8,HKV=2,S=1000,D=128,dtype=bf16,block_mask=b",
        make(2, 64, packed_heads=4, ping_pong=True, early_exp=50, persistent=True),
    ),
}


def test_golden_texts(goldens: Goldens) -> None:
    texts = {}
    for name, (shape, config) in RENDERED.items():
        problem = AttentionProblem.parse(shape)
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        texts[name] = render(FAMILY.kernels(problem, config)["attention"], "golden")
    goldens.check("fused_attention", texts)
