"""What fused attention's predicate says: each reason by itself, and what is near a limit."""

from __future__ import annotations

from typing import Any

import pytest
from fused_configs import maker

from tuner.config import Config, Value
from tuner.families.fused_attention import FusedAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

FAMILY = FusedAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64")
#: A config as the family's first version wrote it.
OLD = Config(
    "fused_attention",
    {
        "warp_groups": 2,
        "tile_n": 128,
        "kv_stages": 2,
        "overlap": True,
        "poly_every": 4,
        "lazy_rescale": 8,
        "blocks_per_sm": 1,
        "ping_pong": True,
    },
)

make = maker()


def without(config: Config, name: str) -> Config:
    return Config(config.family, {k: v for k, v in config.params.items() if k != name})


PING_PONG = "ping_pong is for two warp groups or more with one score buffer, only"
EARLY_EXP = "early_exp is for one score buffer, only"
PACKED = "packed_heads is for several query heads to a KV head, only"
PADS = "pads_heads is not for dense e4m3 and block masks"
SHARED = "key_groups is for one tile a block, one score buffer and no ping_pong, only"
STAGES = "stages_output is not for variable lengths, paged caches or more than 16 packed heads"
PARTS = "split_keys is for splits=1 without key_groups, stages_output, stream_k, rescale"
PARTS_COMBINED = "parts of split_keys are combined by a kernel, of blocks that do not persist"
PARTS_OF = "split_keys is for fp16 and bf16 without windows, sinks, block_mask or packed sequences"
RESCALES = "rescale is for one score buffer, only"
SKIPS = "skips_masked is for persistent blocks under a causal mask alone, with one score buffer"
HALVES: dict[str, Value] = {"skips_masked": "halves"}
STAGED: dict[str, Value] = {"stages_output": True}
CARRIED: dict[str, Value] = {"split_keys": 512, "carries_parts": True, "rescale": "lazy", **STAGED}
WGMMA = "accumulator registers of a WGMMA + 26 exceed"


def shared(groups: int, key_groups: int, tile_n: int, **more: Any) -> Config:
    """With groups that take the blocks of keys by turns."""
    return make(groups, tile_n, key_groups=key_groups, **more)


@pytest.mark.parametrize(
    ("text", "config", "reason"),
    [
        ("D=64", make(2, 72), "tile_n=72 is not known (allowed: 16 to 256 in steps of 16)"),
        ("D=64", make(2, 64, kv_stages=7), "kv_stages=7 is not known (allowed: 1, 2, 3, 4, 5, 8)"),
        ("D=64", make(2, 64, early_exp=100000), "early_exp=100000 is not known (allowed: 0, 25, "),
        ("D=64", make(2, 64, kv_stages=1, score_buffers=2), "kv_stages=1 is less than score_bu"),
        ("D=64", make(1, 64, ping_pong=False), PING_PONG),
        ("D=64", make(2, 64, score_buffers=2, ping_pong=False), PING_PONG),
        ("D=64", without(make(2, 64), "ping_pong"), PING_PONG),
        ("D=64", make(2, 64, score_buffers=2, early_exp=0), EARLY_EXP),
        ("D=64", without(make(1, 64), "early_exp"), EARLY_EXP),
        ("D=64", make(2, 64, packed_heads=1), PACKED),
        ("H=8,HKV=2,D=64", make(2, 64), PACKED),
        ("H=8,HKV=2,D=64", make(3, 64, packed_heads=8), "packed_heads=8 does not divide the 4"),
        ("H=6,HKV=2,D=64", make(3, 64, packed_heads=3), "packed_heads=3 is not known (allowed: 1"),
        (
            "H=18,HKV=2,D=64",
            make(1, 64, packed_heads=8, pads_heads=True),
            "packed_heads=8 is less than the 9 heads to a KV head",
        ),
        ("D=64", make(1, 64, packed_heads=8, pads_heads=True), PACKED),
        ("H=14,HKV=2,D=64,dtype=e4m3", make(1, 64, packed_heads=8, pads_heads=True), PADS),
        ("D=64", make(2, 64, splits=0), "splits=0 is not known (allowed: 1 to 512)"),
        ("D=64", make(2, 64, splits=2, persistent=True), "splits=2 is for one block a tile"),
        ("D=64", make(2, 64, combine="kernel"), "combine is for splits > 1, only"),
        ("D=64", without(make(2, 64, splits=2), "combine"), "combine is for splits > 1, only"),
        (
            "D=64",
            make(1, 32, splits=17, combine="cluster"),
            "splits=17 exceed the 16 blocks of a cluster",
        ),
        ("D=64", make(2, 112, kv_stages=8), "246784 bytes of shared memory exceed 232448"),
        ("D=64", shared(2, 2, 112, kv_stages=8), "257024 bytes of shared memory exceed"),
        ("D=128", make(2, 128, kv_stages=3, **STAGED), "263168 bytes of shared memory exceed"),
        ("D=64", make(2, 112, blocks_per_sm=2), f"56 {WGMMA} the 80 of a launch"),
        ("D=64", make(3, 224), f"112 {WGMMA} the 128 of a launch"),
        ("D=128", make(3, 64, blocks_per_sm=2), f"64 {WGMMA} the 64 of a launch"),
        ("D=192", make(4, 32), f"96 {WGMMA} the 96 of a launch"),
        ("D=64", make(2, 64, splits=4, combine="cluster"), "combine=cluster is for one warp"),
        ("D=64,dtype=e4m3", make(2, 80), "tile_n=80 is not a multiple of 32"),
        (
            "H=16,HKV=1,D=64,dtype=e4m3",
            make(1, 64, packed_heads=16),
            "packed_heads=16 exceeds 8 of dense e4m3",
        ),
        (
            "D=128,dtype=e4m3",
            make(2, 224, kv_stages=4, persistent=True),
            "246784 bytes of shared memory exceed",
        ),
        ("D=64,varlen=1", make(2, 64, splits=2), "splits=2 is not for variable lengths"),
        ("D=64", make(5, 64), "warp_groups=5 is not known (allowed: 1, 2, 3, 4)"),
        ("D=64", make(4, 64, blocks_per_sm=2), f"32 {WGMMA} the 48 of a launch"),
        ("D=64", shared(3, 2, 64), "key_groups=2 does not divide warp_groups=3"),
        ("D=64", shared(2, 1, 64), "key_groups=1 is not known (allowed: 2, 4)"),
        ("D=64", shared(2, 4, 64, kv_stages=4), "key_groups=4 does not divide warp_groups=2"),
        ("D=64", shared(2, 2, 64, persistent=True), SHARED),
        ("D=64", shared(2, 2, 64, score_buffers=2), SHARED),
        ("D=64", shared(2, 2, 64, ping_pong=True), SHARED),
        (
            "D=64",
            shared(2, 2, 64, kv_stages=1),
            "key_groups=2 does not divide kv_stages=1: each group",
        ),
        (
            "D=64",
            shared(2, 2, 64, kv_stages=5),
            "key_groups=2 does not divide kv_stages=5: each group",
        ),
        ("D=64", shared(4, 2, 64, splits=2, combine="cluster"), "combine=cluster is for one warp"),
        ("D=64", make(2, 64, stages_output=False), "stages_output=False is not known (allowed: Tr"),
        ("D=64,varlen=1", make(2, 64, **STAGED), STAGES),
        ("H=32,HKV=1,D=64", make(2, 64, packed_heads=32, **STAGED), STAGES),
        ("D=64,page_size=16", make(2, 64, **STAGED), STAGES),
        ("D=64,page_size=16", shared(2, 2, 64), "key_groups is not for paged caches"),
        ("D=64", make(3, 128, persistent=True, **HALVES), SKIPS),
        ("D=64,causal=1", make(3, 128, **HALVES), SKIPS),
        ("D=64,causal=1", make(2, 64, score_buffers=2, persistent=True, **HALVES), SKIPS),
        ("D=64,causal=1", make(3, 96, persistent=True, **HALVES), SKIPS),
        ("D=64,causal=1", make(2, 128, persistent=True, skips_masked="blocks"), SKIPS),
        ("D=64", make(2, 64, 2, rescale="lazy"), RESCALES),
        (
            "D=64",
            make(2, 64, persistent=True, split_keys=512, combine="kernel"),
            PARTS_COMBINED,
        ),
        ("D=64", make(1, 64, split_keys=512, combine="cluster"), PARTS_COMBINED),
        ("D=64", make(2, 64, turn_ends="scores"), "turn_ends is for ping_pong, only"),
        ("D=64", make(2, 64, splits=2, split_keys=512), PARTS),
        ("D=64", make(2, 64, rescale="lazy", split_keys=512), PARTS),
        ("D=64,dtype=e4m3", make(2, 64, split_keys=512), PARTS_OF),
        ("D=64,causal=1,window=64", make(2, 64, split_keys=512), PARTS_OF),
        ("D=64,causal=1,varlen=1", make(2, 64, split_keys=512), PARTS_OF),
        ("D=64", make(2, 96, split_keys=512), "tile_n=96 does not divide split_keys=512"),
        ("D=64", make(2, 64, carries_parts=True), "carries_parts goes with split_keys"),
        (
            "D=64",
            make(2, 64, splits=2, **CARRIED),
            "split_keys is for splits=1 without key_groups, s",
        ),
        ("D=64,causal=1,window=64", make(3, 128, persistent=True, **HALVES), SKIPS),
        ("D=64,causal=1,varlen=1", make(3, 128, persistent=True, **HALVES), SKIPS),
        ("D=64,page_size=16", make(2, 64, splits=2, persistent=True), "splits=2 is for one block"),
        ("D=64", make(1, 64, blocks_per_sm=3), "blocks_per_sm=3 is not known (allowed: 1, 2)"),
    ],
)
def test_one_violation_at_a_time(text: str, config: Config, reason: str) -> None:
    found = FAMILY.violations(AttentionProblem.parse(f"S=1024,{text}"), config, DEFAULT_GPU)
    assert len(found) == 1, found
    assert found[0].startswith(reason)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("D=64", make(2, 96, kv_stages=8)),
        ("D=64", make(1, 80, kv_stages=4, blocks_per_sm=2)),
        ("D=64", make(2, 48, blocks_per_sm=2)),
        ("D=64", make(3, 128, kv_stages=5)),
        ("D=64", make(2, 80, splits=13)),
        ("D=128", make(2, 192)),
        ("D=128", make(2, 80, score_buffers=2, q_in_registers=True)),
        ("D=128,causal=1", make(2, 64, q_in_registers=True, ping_pong=True)),
        ("D=96,causal=1", make(2, 64, q_in_registers=True)),
        ("D=256", make(2, 80)),
        ("D=64,causal=1", make(2, 64, splits=2)),
        ("D=64", make(1, 64, splits=16, combine="cluster")),
        ("D=64", make(2, 32, splits=17)),
        ("D=64", make(2, 64, persistent=True, pdl=True)),
        ("D=64,causal=1", make(3, 96, persistent=True, skips_masked="blocks")),
        ("D=64", make(2, 64, rescale="lazy")),
        ("D=64,dtype=e4m3", make(2, 64, rescale="lazy")),
        ("D=64", make(2, 64, ping_pong=True, turn_ends="scores")),
        ("D=64", make(2, 64, split_keys=512)),
        ("D=64", make(2, 64, persistent=True, split_keys=256)),
        ("D=64", make(3, 64, persistent=True, split_keys=512, carries_parts=True)),
        ("D=128,causal=1", make(2, 128, persistent=True, kv_stages=2, **CARRIED, **HALVES)),
        ("D=64", make(2, 64, split_keys=512, combine="kernel")),
        ("D=64,page_size=16", make(1, 128, split_keys=2048)),
        ("D=128,causal=1", make(2, 128, persistent=True, **HALVES)),
        ("H=8,HKV=2,D=64,causal=1", make(2, 64, packed_heads=4, persistent=True, **HALVES)),
        ("H=8,HKV=2,D=64", make(2, 64, packed_heads=4)),
        ("H=28,HKV=4,D=128", make(1, 64, packed_heads=8, pads_heads=True)),
        ("H=14,HKV=2,D=64,dtype=e4m3,page_size=16", make(1, 64, packed_heads=8, pads_heads=True)),
        ("H=28,HKV=4,D=128,bias=h", make(1, 64, packed_heads=8, pads_heads=True)),
        ("H=28,HKV=4,D=128,mask=b", make(2, 64, packed_heads=8, pads_heads=True)),
        ("H=16,HKV=2,D=128,softcap=50", make(1, 64, packed_heads=8, pads_heads=True, **STAGED)),
        ("D=128,dtype=e4m3", make(2, 224, kv_stages=3, persistent=True)),
        ("D=64,dtype=e4m3", make(3, 160)),
        ("D=256,dtype=e4m3", make(2, 128)),
        ("D=128,causal=1,dtype=e4m3", make(2, 64, persistent=True, pdl=True)),
        ("H=16,HKV=2,D=64,dtype=e4m3", make(1, 64, packed_heads=8)),
        ("D=64,window=64", make(2, 112, score_buffers=2)),
        ("D=64,causal=1", make(2, 64, persistent=True, pdl=True)),
        # Slow, and left out of the space: more splits than tiles of keys, a window's keys split,
        # two blocks at an SM that has no room for both.
        ("D=64", make(2, 80, splits=14)),
        ("D=64,window=64", make(2, 64, splits=2)),
        ("D=64", make(1, 96, kv_stages=5, blocks_per_sm=2)),
        ("D=64", make(4, 64, pdl=True)),
        ("D=64", shared(2, 2, 64)),
        ("D=64", shared(2, 2, 96, kv_stages=8)),
        ("D=64,causal=1", shared(4, 4, 64, kv_stages=4, splits=3)),
        ("D=64,window=64", shared(4, 2, 64, kv_stages=2)),
        ("D=64,varlen=1", shared(4, 2, 64)),
        ("H=64,HKV=1,D=64", shared(2, 2, 64, packed_heads=32)),
        ("D=128,dtype=e4m3", shared(2, 2, 128, kv_stages=2, **STAGED)),
        ("D=256", shared(2, 2, 32, **STAGED)),
        ("D=128", make(2, 144, **STAGED)),
        ("D=256,causal=1", make(2, 32, persistent=True, **STAGED)),
        ("H=16,HKV=1,D=64,dtype=bf16", make(3, 64, packed_heads=16, **STAGED)),
        ("D=64,causal=1,window=64,softcap=30", make(2, 128, persistent=True)),
        ("D=128,softcap=30", make(2, 128, q_in_registers=True, splits=2)),
        ("B=3,H=8,HKV=2,D=64,causal=1,varlen=1", make(2, 64, packed_heads=4, persistent=True)),
        ("B=3,D=64,varlen=1,page_size=16", make(1, 80, splits=3)),
        ("D=64,causal=1,window=64,softcap=30,page_size=48,sinks=1", make(1, 256, splits=2)),
        (
            "H=8,HKV=2,D=128,page_size=272",
            make(1, 64, packed_heads=4, splits=16, combine="cluster"),
        ),
    ],
)
def test_legal_near_the_limits(text: str, config: Config) -> None:
    problem = AttentionProblem.parse(f"S=1024,{text}")
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("D=64", make(2, 80, blocks_per_sm=2)),
        ("D=64", make(3, 160)),
        ("D=64", shared(4, 4, 80, kv_stages=4)),
        ("D=64", make(3, 64, blocks_per_sm=2)),
        ("D=128", make(2, 128, score_buffers=2)),
        ("D=192", make(2, 64, score_buffers=2)),
        ("D=256", make(2, 80, q_in_registers=True, kv_stages=1)),
        ("D=128,dtype=e4m3", make(2, 256, persistent=True)),
        ("D=64,window=64", make(2, 128, score_buffers=2)),
        ("D=104,causal=1", make(2, 64, q_in_registers=True)),
    ],
)
def test_what_spills_is_legal_and_neither_searched_nor_taken_over(
    text: str, config: Config
) -> None:
    problem = AttentionProblem.parse(f"S=1024,{text}")
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    assert not FAMILY.accepts(problem, config, DEFAULT_GPU)
    assert config not in FAMILY.space(problem, DEFAULT_GPU)


def test_every_reason_is_said() -> None:
    config = make(1, 256, kv_stages=8, ping_pong=True, packed_heads=2, splits=9)
    assert [text.split()[0] for text in FAMILY.violations(PROBLEM, config, DEFAULT_GPU)] == [
        "ping_pong",
        "packed_heads",
        "533504",
    ]


@pytest.mark.parametrize("name", sorted({*FAMILY.domains} - FAMILY.optional))
def test_a_config_that_lacks_a_parameter_is_refused(name: str) -> None:
    (reason,) = FAMILY.violations(PROBLEM, without(make(2, 128), name), DEFAULT_GPU)
    assert reason == f"parameter {name} is missing"


def test_a_config_of_the_first_version_is_refused() -> None:
    assert FAMILY.violations(PROBLEM, OLD, DEFAULT_GPU) == [
        *(f"parameter '{name}' is not known" for name in ("overlap", "poly_every", "lazy_rescale")),
        *(
            f"parameter {name} is missing"
            for name in ("score_buffers", "q_in_registers", "persistent", "splits", "pdl")
        ),
    ]
