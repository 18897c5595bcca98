"""Space of our own attention kernel: what its configs need, counted without the family."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.config import Config, Value
from tuner.families.attention_instances import instance, launch_registers
from tuner.families.fused_attention import FusedAttention
from tuner.families.fused_attention.legality import smem_bytes
from tuner.hardware import (
    DEFAULT_GPU,
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
)
from tuner.problem import AttentionProblem

FAMILY = FusedAttention()


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    heads_kv = draw(st.integers(1, 8))
    length = st.one_of(st.integers(1, 300), st.integers(1, 2**18))
    return AttentionProblem(
        seqlen_q=draw(length),
        seqlen_kv=draw(length),
        head_dim=8 * draw(st.integers(1, 32)),
        batch=draw(st.integers(1, 64)),
        heads_q=heads_kv * draw(st.integers(1, 72)),
        heads_kv=heads_kv,
        is_causal=draw(st.booleans()),
    )


def needed_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of a block, counted without the family."""
    groups, tile_n, stages = config["warp_groups"], config["tile_n"], config["kv_stages"]
    sharing = config.get("key_groups", 1)
    columns, rows = instance(problem.head_dim), 64 * (groups // sharing)
    # Q, the rings of K and V, their mbarriers (8 bytes) and two tiles (24 bytes).
    tiles = 2 * columns * (rows + 2 * stages * tile_n)
    # Or in their place what a cluster shares, of one group: O, padded, and the sums.
    share = 4 * 64 * (columns + 8 + 1) if groups == 1 and not config["persistent"] else 0
    # O of 16 bits; of every key group but one O, a maximum and a sum of fp32 by two threads a row
    # and quad: 128 threads for 64 rows, two rows each.
    out = 2 * rows * columns if config.get("stages_output", False) else 0
    left = (sharing - 1) * 128 * (rows // 64) * 4 * (columns // 2 + 2 + 2)
    return int(max(tiles, share) + out + left + 8 * (2 + 4 * stages + 5) + 2 * 24)


def check_room(problem: AttentionProblem, config: Config) -> None:
    """Assert that a config of the space has keys for each split, and shared memory for its blocks.

    Registers must hold the accumulators of 64 rows in 128 threads: scores and O in fp32, P and Q in
    16 bits.
    """
    needed = needed_bytes(problem, config) + SMEM_RESERVED_PER_BLOCK_BYTES
    assert config["blocks_per_sm"] * needed <= SMEM_PER_SM_BYTES
    assert config["splits"] <= -(-problem.seqlen_kv // config["tile_n"])
    columns, tile_n = instance(problem.head_dim), config["tile_n"]
    of_q = 64 * columns * 2 if config["q_in_registers"] else 0
    held = 64 * (4 * config["score_buffers"] * tile_n + 2 * tile_n + 4 * columns) + of_q
    variables = FAMILY.kernels(problem, config)["attention"].variables
    assert held / (128 * 4) < variables["consumer_registers"]


def check(problem: AttentionProblem, config: Config) -> None:
    """Assert the limits of the template and the chip, without the legality predicate."""
    groups, tile_n, stages = config["warp_groups"], config["tile_n"], config["kv_stages"]
    blocks, buffers, splits = config["blocks_per_sm"], config["score_buffers"], config["splits"]
    variables = FAMILY.kernels(problem, config)["attention"].variables
    sharing, columns = variables["key_groups"], variables["head_dim"]
    assert columns >= problem.head_dim
    needed = needed_bytes(problem, config)
    assert needed <= smem_bytes(problem, config) <= SMEM_PER_BLOCK_BYTES
    # Registers: both roles' within the block's, the blocks' within the file.
    producer, consumer = variables["producer_registers"], variables["consumer_registers"]
    assert producer + groups * consumer <= (groups + 1) * launch_registers(groups, blocks)
    assert blocks * 128 * (groups + 1) * launch_registers(groups, blocks) <= 65536
    # One WGMMA's accumulator, fp32 of 64 rows in 128 threads, where a block is launched with few.
    assert max(tile_n, columns) / 2 < launch_registers(groups, blocks)
    # A kernel that runs ahead by two Q K^T needs both keys' stages.
    assert stages >= buffers >= 1
    assert ("ping_pong" in config.params) == (groups > 1 and buffers == 1)
    assert ("early_exp" in config.params) == (buffers == 1)
    # Rows of a packed tile are whole groups of heads of one KV head.
    packed = variables["packed_heads"]
    assert ("packed_heads" in config.params) == (problem.heads_q > problem.heads_kv)
    group = problem.heads_q // problem.heads_kv
    assert group <= packed if "pads_heads" in config.params else group % packed == 0
    assert 64 * groups // sharing % packed == 0
    assert splits >= 1
    # Groups that share rows start at a stage each and merge once, at the end of the one tile.
    assert ("key_groups" in config.params) == (sharing > 1)
    if sharing > 1:
        assert groups % sharing == 0 and sharing <= stages
        assert not config["persistent"] and buffers == 1 and not config["ping_pong"]
    # Blocks that a group leaves out are those behind its last query, in one tile after the other.
    if "skips_masked" in config.params:
        assert problem.is_causal and config["persistent"] and buffers == 1 and sharing == 1
        assert not (problem.is_windowed or problem.is_packed or problem.block_mask)
        assert config["skips_masked"] == "blocks" or tile_n in (64, 128, 192, 256)
    # A warp's 16 rows of the output are whole queries, written once.
    if variables["stages_output"]:
        assert 16 % packed == 0


MANY_SHORT = AttentionProblem.parse("B=16,H=16,SQ=1,SKV=4096,D=256")  # more tiles than SMs


@settings(max_examples=60)
@example(MANY_SHORT, random.Random(1))
@given(problems(), st.randoms(use_true_random=False))
def test_space_and_legal_draws_are_what_the_kernel_needs(
    problem: AttentionProblem, rng: random.Random
) -> None:
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert space
    for config in space:
        check(problem, config)
        check_room(problem, config)
        sharing, packed = config.get("key_groups", 1), config.get("packed_heads", 1)
        rows = 64 * config["warp_groups"] // sharing
        if sharing > 1:
            tiles = -(-problem.seqlen_q * packed // rows) * problem.batch * problem.heads_kv
            group = problem.heads_q // problem.heads_kv
            assert tiles * max(1, group // packed) <= DEFAULT_GPU.sm_count
        per_head = -(-problem.seqlen_q * (packed if "pads_heads" in config.params else 1) // rows)
        if config["persistent"]:
            assert config["splits"] == 1
            assert per_head * problem.batch * problem.heads_q > DEFAULT_GPU.sm_count
    for _ in range(30):
        config = FAMILY.draw(problem, DEFAULT_GPU, space, rng)
        if not FAMILY.violations(problem, config, DEFAULT_GPU):
            check(problem, config)
    config = rng.choice(space)
    # The largest problem takes 1e8 us at best, and legal configs may be many times slower.
    assert 0 < FAMILY.predict_us(problem, config, DEFAULT_GPU) < 1e10


@pytest.mark.parametrize("heads", ["H=16", "H=32,HKV=8", "H=28,HKV=4", "H=24,HKV=8", "H=71,HKV=1"])
def test_no_candidate_comes_twice(heads: str) -> None:
    """Whatever packs of the heads to a KV head: all of them, some, or one alone."""
    problem = AttentionProblem.parse(f"{heads},S=512,D=128")
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert len(space) == len(set(space)) > 0


def test_space_uses_every_lever_where_it_pays() -> None:
    def space(text: str) -> list[Config]:
        return list(FAMILY.space(AttentionProblem.parse(text), DEFAULT_GPU))

    def values(found: list[Config], name: str) -> set[Value | None]:
        return {config.params.get(name) for config in found}

    small, large = space("S=1024,D=64"), space("B=16,S=2048,D=64")
    decoding = space("H=32,HKV=8,SQ=1,SKV=8192,D=128")
    narrow = space("H=32,HKV=8,SQ=1,SKV=8192,D=64")
    assert values(small, "warp_groups") == {1, 2, 3, 4}
    assert values(small, "key_groups") == {None, 2}  # 16 tiles of 64 rows a head are two waves
    assert values(small, "stages_output") == values(large, "stages_output") == {None, True}
    assert values(small, "ping_pong") == {None, False, True}
    assert values(small, "early_exp") == {None, 0, 50}
    assert values(small, "q_in_registers") == values(small, "pdl") == {False, True}
    assert values(small, "persistent") == {False}
    assert values(large, "persistent") == {True}
    assert values(large, "splits") == {1}
    causal = space("B=16,S=2048,D=64,causal=1")
    assert values(large, "skips_masked") == values(small, "skips_masked") == {None}
    assert values(causal, "skips_masked") == {None, "blocks", "halves"}
    assert values(causal, "early_exp") == {None, 0, 50}
    assert values(space("B=4,H=16,S=2048,D=128,causal=1"), "early_exp") == {None, 0, 25, 50}
    assert values(decoding, "warp_groups") == {1, 2}
    assert values(decoding, "key_groups") == {None, 2}
    assert values(narrow, "warp_groups") == {1, 2, 4}
    assert values(narrow, "key_groups") == {None, 2, 4}
    assert values(large, "key_groups") == {None}
    assert values(decoding, "packed_heads") == {1, 4}
    # 8 tiles: 16 and 33 splits fill 132 multiprocessors once and twice.
    assert values(decoding, "splits") == {1, 2, 4, 8, 16, 32, 33}
