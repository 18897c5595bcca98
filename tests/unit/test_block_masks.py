"""Block-sparse masks: the problem, the tables that the gate draws, and those of a `BlockMask`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from fused_configs import maker

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families, family
from tuner.families.by_operation import AttentionDomain, domain_of
from tuner.hardware import DEFAULT_GPU
from tuner.measure import block_masks
from tuner.measure.gate.inputs import kinds_of
from tuner.measure.tolerance import floor_work
from tuner.problem import AttentionProblem, problem_from_json

torch = pytest.importorskip("torch", reason="torch is not installed")
FAMILY = family("fused_attention")
make = maker(ping_pong=True)
PROBLEMS = [
    AttentionProblem.parse(text)
    for text in (
        "S=300,D=64,block_mask=1",
        "B=2,H=3,SQ=130,SKV=513,D=64,block_mask=bh",
        "B=2,H=4,HKV=2,SQ=1,SKV=129,D=64,block_mask=b",
        "H=7,SQ=400,SKV=1,D=64,block_mask=h",
    )
]


def expanded(problem: AttentionProblem, counts: Any, indices: Any, bits: Any) -> Any:
    """The dense mask, (B, H, SQ, SKV), from what a kernel reads of the tables; -1 where it would
    take a block to be seen whole whose bits say otherwise.
    """
    *rows, columns = problem.block_shape
    found = torch.zeros(*rows, 128, columns, 128, dtype=torch.int8)
    at = torch.arange(128)
    for row in torch.cartesian_prod(*(torch.arange(extent) for extent in rows)).tolist():
        row = tuple(row)
        whole, some = counts[row].tolist()
        for place in range(whole + some):
            words = bits[(*row, place)][:, at % 8 // 2]
            block = (words >> (at // 8 * 2 + at % 2) & 1).to(torch.int8)
            column = int(indices[(*row, place)])
            assert not found[(*row, slice(None), column)].any(), "a block is listed twice"
            found[(*row, slice(None), column)] = block - 2 * (place < whole) * (1 - block)
    dense = found.flatten(-2).flatten(2, 3)
    assert not dense[:, :, : problem.seqlen_q, problem.seqlen_kv :].any()
    return dense[:, :, : problem.seqlen_q, : problem.seqlen_kv]


def of_gate(problem: AttentionProblem, tables: block_masks.Tables) -> tuple[Any, Any]:
    """The tables expanded, and the dense mask."""
    by_name = {operand.name: operand for operand in problem.operands}
    parts = [
        torch.frombuffer(bytearray(getattr(tables, name)), dtype=torch.int32).view(
            by_name[name].shape
        )
        for name in ("block_counts", "block_indices", "block_bits")
    ]
    dense = torch.frombuffer(bytearray(tables.dense), dtype=torch.int8)
    return expanded(problem, *parts), dense.view(
        *problem.block_shape[:2], problem.seqlen_q, problem.seqlen_kv
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.label)
def test_tables_of_the_gate_say_what_its_dense_mask_says(problem: AttentionProblem) -> None:
    kinds = kinds_of(problem)
    for kind in kinds:
        found, dense = of_gate(problem, block_masks.tables(problem, kind, 3))
        assert torch.equal(found, dense), kind
    assert int(dense.sum()) == problem.pairs * problem.block_shape[0] * problem.block_shape[1]
    assert kinds[-1] == "random"


def test_places_that_no_kernel_uses_hold_what_would_be_seen() -> None:
    tables = block_masks.tables_of([0, 1, 1 << 200], 300)
    assert struct.unpack("<2i3i", tables.block_counts + tables.block_indices) == (0, 2, 0, 1, -1)
    assert tables.block_bits[-128 * 16 :] == b"\xff" * 128 * 16
    assert tables.block_bits[3 * 16 : 128 * 16] == b"\xff" * 125 * 16


def test_masks_of_heads_differ_but_for_the_timed_one() -> None:
    problem = PROBLEMS[1]
    _, drawn = of_gate(problem, block_masks.tables(problem, "dominant", 1))
    assert not torch.equal(drawn[0, 0], drawn[0, 1]) and not torch.equal(drawn[0, 0], drawn[1, 0])
    _, other = of_gate(problem, block_masks.tables(problem, "dominant", 2))
    assert not torch.equal(drawn, other)
    _, timed = of_gate(problem, block_masks.tables(problem, "random", 1))
    assert torch.equal(timed, timed[:1, :1].expand_as(timed))


def test_keys_of_the_estimate_are_those_of_the_timed_mask() -> None:
    for problem in PROBLEMS:
        rows = block_masks.timed(problem)
        for first in range(0, problem.seqlen_q, 50):
            last = first + 49
            union = max(rows[first : last + 1])
            assert problem.keys_of(first, last) == range(union.bit_length())


def test_text_json_and_axes() -> None:
    problem = AttentionProblem.parse("B=2,H=4,S=300,D=64,softcap=5,block_mask=bh")
    assert AttentionProblem.parse(problem.label()) == problem
    assert problem_from_json(problem.to_json()) == problem
    assert "block_mask" not in AttentionProblem.parse("S=300,D=64").to_json()
    assert AttentionProblem.parse("B=1,H=4,S=300,D=64,block_mask=b").block_mask == "1"
    assert AttentionProblem.parse("B=1,H=4,S=300,D=64,block_mask=0").block_mask == ""
    assert problem.extras == "soft cap or block-sparse mask"
    assert domain_of(problem) == AttentionDomain(64, "full", "prompt", True, is_sparse=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("causal=1", "block_mask beside another mask is not known"),
        ("window=9", "block_mask beside another mask is not known"),
        ("bias=1", "block_mask beside another mask is not known"),
        ("dtype=e4m3", "dtype=e4m3 has no block-sparse mask"),
        ("varlen=1", "varlen=1 has no block-sparse mask"),
        ("page_size=16", "page_size has no block-sparse mask"),
    ],
)
def test_what_a_block_mask_does_not_come_with(more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AttentionProblem.parse(f"B=2,S=300,D=64,block_mask=1,{more}")


def test_axes_that_no_block_mask_has() -> None:
    with pytest.raises(ConfigError, match=r"block_mask=bk.*allowed: 0, 1, b, h, bh"):
        AttentionProblem.parse("B=2,S=300,D=64,block_mask=bk")


def test_no_other_family_but_flex_attention_takes_one() -> None:
    problem = AttentionProblem.parse("S=1024,D=64,block_mask=1")
    own = {
        name
        for name, member in families().items()
        if not member.supports(problem, DEFAULT_GPU) and member.space(problem, DEFAULT_GPU)
    }
    assert own == {"fused_attention", "vendor_flex"}


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        ("block_mask=1", make(2, 96), "tile_n=96 is not for block_mask (allowed: 32, 64, 128)"),
        ("block_mask=1", make(3, 64), "192 rows of 1 packed heads do not divide the 128 queries"),
        ("block_mask=1", make(2, 64, splits=2), "key_groups and splits > 1 are not for block_mask"),
        (
            "block_mask=1",
            make(2, 64, key_groups=2, ping_pong=None),
            "key_groups and splits > 1 are not for block_mask",
        ),
        (
            "HKV=4,block_mask=h",
            make(2, 64, packed_heads=4),
            "packed_heads=4 is not for a block_mask of each head (allowed: 1)",
        ),
    ],
)
def test_configs_that_no_block_mask_takes(shape: str, config: Config, words: str) -> None:
    problem = AttentionProblem.parse(f"S=1024,D=64,{shape}")
    params = {name: value for name, value in config.params.items() if value is not None}
    found = FAMILY.violations(problem, Config(config.family, params), DEFAULT_GPU)
    assert any(line.startswith(words) for line in found), found


def test_what_is_searched_is_legal_and_spills_nothing() -> None:
    for text in ("D=64,block_mask=1", "HKV=4,D=128,block_mask=h", "HKV=2,D=64,block_mask=b"):
        problem = AttentionProblem.parse(f"B=2,S=2048,{text}")
        space = FAMILY.space(problem, DEFAULT_GPU)
        assert len(space) > 20
        assert all(FAMILY.accepts(problem, config, DEFAULT_GPU) for config in space)
        packed = {config.get("packed_heads", 1) for config in space}
        assert packed == ({1, 8} if "block_mask=b" in text else {1})


def test_a_mask_is_compiled_in_and_its_axes_are_not() -> None:
    one, other, none = (
        FAMILY.kernels(AttentionProblem.parse(f"B=2,S=1024,D=64{more}"), make(2, 64))["attention"]
        for more in (",block_mask=1", ",block_mask=bh", "")
    )
    assert one == other != none
    assert "is_sparse" not in none.variables


def test_the_floor_counts_no_bits() -> None:
    """A kernel reads bits of blocks that are seen in part alone."""
    problem = AttentionProblem.parse("S=1024,D=64,block_mask=1")
    bits = next(one for one in problem.operands if one.name == "block_bits")
    flops, moved = floor_work(problem)
    assert moved == problem.bytes - bits.bytes
    assert flops == problem.flops == 4 * 16 * 64 * problem.pairs


LENGTHS = torch.tensor([0] * 100 + [1] * 300 + [2] * 147)
MODS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "documents": (lambda b, h, q, k: (LENGTHS[q] == LENGTHS[k]) & (q >= k), (1, 1, 547, 547), 128),
    "prefix": (lambda b, h, q, k: (k < 200) | (q >= k), (1, 1, 1, 300), 128),
    "small blocks": (
        lambda b, h, q, k: (k % (h + 2) == 0) & (q >= k - b * 50), (2, 3, 130, 700), 64,
    ),
    "wide blocks": (lambda b, h, q, k: (q < 300) & (k > 350), (1, 2, 547, 500), (128, 256)),
    "whole": (lambda b, h, q, k: q >= 0, (2, 1, 200, 256), 128),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_tables_of_a_block_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    from tuner.runtime.attention import block_mask

    mod, (batch, heads, queries, keys), size = MODS[name]
    mask = create_block_mask(mod, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=size)
    axes = block_mask.axes_of(mask)
    text = f"B={batch},H={heads},SQ={queries},SKV={keys},D=64,block_mask={axes}"
    problem = AttentionProblem.parse(text)
    tables = block_mask.tabulated(mask)
    shapes = [operand.shape for operand in problem.operands[3:6]]
    assert [tuple(table.shape) for table in tables] == shapes
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
    wanted = create_mask(mod, batch, heads, queries, keys, "cpu").to(torch.int8)
    assert torch.equal(expanded(problem, *tables), wanted)
    monkeypatch.setattr(block_mask, "_PAIRS_AT_ONCE", 1)  # a block of queries at a time
    for one, other in zip(tables, block_mask.tabulated(mask), strict=True):
        assert torch.equal(one, other)


def test_full_blocks_of_a_mask_are_seen_whatever_its_function_says() -> None:
    """As FlexAttention has it; keys behind the last one are not."""
    from torch.nn.attention.flex_attention import BlockMask

    from tuner.runtime.attention import block_mask

    def never(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q < 0

    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    columns = torch.tensor([[[[0, 7], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        counts, 1 - columns.clamp(max=1), counts, columns, mask_mod=never, seq_lengths=(256, 200)
    )
    found = expanded(
        AttentionProblem.parse("SQ=256,SKV=200,D=64,block_mask=1"), *block_mask.tabulated(mask)
    )
    assert found[0, 0].sum(-1).tolist() == [128] * 128 + [72] * 128
