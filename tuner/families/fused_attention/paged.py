"""Kernels that serve paged caches of any shape: a few for each head dimension.

Chosen by measured times of paged decoding and of chunked prefill on an H200 (`scripts/bench
paged`). Boxes of 16 rows serve pages of every size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from tuner.config import Config, Value
from tuner.families.fused_attention.packing import MAX_PACKED, NAME

#: Time of a prompt by a kernel of so many groups over that by the dense kernel's rates, which make
#: three groups too fast: a tie with two at 300 tiles (an H200, 29 November 2026).
AT_PROMPTS = {3: 0.75}
#: Rows of a page that a copy brings: 16 are in every page.
_ANY_PAGE, _WIDE = 16, 64
#: Head dimensions whose chunks have a kernel of wide copies: narrow ones bind it.
_WIDE_CHUNKS = (64,)
#: Keys of a tile of 128 rows, and stages, by the instance.
_TALL_TILES = {64: (128, 3), 96: (128, 3), 128: (128, 3), 192: (64, 3), 256: (80, 2)}
#: Instances whose copies three warps issue: kernels that pad heads take 2 to 25 % less at decoding,
#: those of four heads 9 %, and those of chunks 19 to 32 % (an H200, 29 November 2026).
_COPIED_PADDED, _COPIED_FOUR, _COPIED_CHUNKS = (96, 128, 256), (96, 256), (96, 128, 192, 256)
#: Head dimensions whose copies bring whole rows: chunks take 20 % less, decoding 1 to 3 %
#: (an H200, 27 November 2026); and those of chunks only.
_WHOLE, _WHOLE_CHUNKS = (128,), (128, 256)
#: Instances whose chunks rescale lazily: 3 to 10 % less (an H200, 29 November 2026).
_LAZY_CHUNKS = (96, 128)
#: Head dimensions whose prompts have a kernel of three groups: of 2048 queries they take 2 to 12 %
#: less, of 512 30 % more (an H200, 29 November 2026).
_TALL_CHUNKS = (64,)
#: Head dimensions of public models with windows, with sinks, and in e4m3: others have kernels of
#: one query only, and in e4m3 of few.
WINDOWED, SINKS, QUANTISED = (128, 256), (64,), (64, 128)
#: Head dimensions with a kernel of equal parts, and with kernels of counted parts, as far as they
#: were timed.
_STREAMED, _COUNTED = (64, 128), (64, 96, 128, 256)


def kernels(
    head_dim: int,
    phase: Literal["prompt", "few", "one"],
    *,
    is_plain: bool,
    has_sinks: bool = False,
    is_e4m3: bool = False,
    is_windowed: bool = False,
) -> tuple[Config, ...]:
    """The kernels of one phase, preferred ones first, without the parameters of a schedule.

    Args:
        head_dim: the instance.
        phase: phase of the longest sequence: a chunk of a prompt, few queries, or one.
        is_plain: True without windows, soft caps and sinks; with windows kernels of padded heads
            decode, and one of single heads serves every call.
        has_sinks: sinks, as in GPT-OSS, whose KV heads have eight query heads each; other head
            dimensions than its 64 have kernels of one query only.
        is_e4m3: elements of e4m3, of a plain cache.
        is_windowed: a sliding window.
    """
    any_heads = _short(head_dim, 1, _ANY_PAGE)
    decoding = _padded(head_dim, MAX_PACKED, **_padded_copies(head_dim))
    if head_dim not in SINKS and has_sinks:
        return decoding, any_heads
    if has_sinks:
        made = _chunk if is_windowed else _tall  # no window was timed with three groups
        chunk = (decoding if phase == "one" else made(head_dim, 8),)
        return _short(head_dim, 8, _ANY_PAGE), *chunk, any_heads
    padded = tuple(_padded_kernels(head_dim, phase, is_e4m3))
    if not is_plain:
        if phase == "one":
            of_eight = (_padded(head_dim, 8),) if head_dim in WINDOWED else ()
            return *of_eight, decoding, any_heads
        return (any_heads,) if phase == "prompt" else (_padded(head_dim, 8), any_heads)
    if is_e4m3 and head_dim not in QUANTISED:
        return *padded, any_heads
    if is_e4m3:
        four, eight = (_short(head_dim, heads, _ANY_PAGE) for heads in (4, 8))
        both = _chunk(head_dim, 4), _chunk(head_dim, 1)
        if phase == "one":
            return four, eight, *padded, any_heads
        return (four, *padded, *both, any_heads) if phase == "few" else (four, *both)
    fours, chunks = tuple(_fours(head_dim)), tuple(_chunks(head_dim))
    counted = tuple(_counted(head_dim, fours, padded))
    if phase == "one":
        streaming = (_streaming(head_dim),) if head_dim in _STREAMED else ()
        alone = (_with(four, leaves_cluster=True) for four in fours[: head_dim in _STREAMED])
        wide = _short(head_dim, 4, _WIDE)
        return wide, *alone, *fours, *padded, any_heads, *streaming, *counted
    filled = _filled(chunks[-1])
    if phase == "few":
        return *fours, *padded, *chunks, filled, any_heads, *counted
    tall = (_tall(head_dim, heads) for heads in (4, 1) if head_dim in _TALL_CHUNKS)
    return *fours, *chunks, filled, *_divided(head_dim), *tall


def _short(head_dim: int, packed: int, box_rows: int) -> Config:
    """One group, whose keys splits may share."""
    is_narrow = head_dim <= 128
    params: dict[str, Value] = {
        "warp_groups": 1,
        "tile_n": 128 if head_dim == 64 else 64,
        "kv_stages": 3 if is_narrow else 2,
        "score_buffers": 1,
        "early_exp": 50,
        "q_in_registers": False,
        "persistent": False,
        "blocks_per_sm": 2 if is_narrow else 1,
        "pdl": True,
        "box_rows": box_rows,
    }
    return _packed(params, packed)


def _fours(head_dim: int) -> Iterator[Config]:
    """Kernels of one group and four heads; the last serves a D that an instance fills up."""
    four = _short(head_dim, 4, _ANY_PAGE)
    if head_dim in _WHOLE:
        yield _with(four, whole_rows=True)
    yield _with(four, copy_warps=3) if head_dim in _COPIED_FOUR else four


def _chunks(head_dim: int) -> Iterator[Config]:
    """Kernels of chunks of prompts; the last two serve a D that an instance fills up."""
    if head_dim in _WIDE_CHUNKS:
        yield _chunk(head_dim, 4, _WIDE)
    both = _chunk(head_dim, 4), _chunk(head_dim, 1)
    lazy: dict[str, Value] = {"rescale": "lazy"} if head_dim in _LAZY_CHUNKS else {}
    if head_dim in _WHOLE_CHUNKS:
        yield from (_with(one, whole_rows=True, copy_warps=3, **lazy) for one in both)
    copies = {"copy_warps": 3, **lazy} if head_dim in _COPIED_CHUNKS else {}
    yield from (_with(one, **copies) for one in both)


def _padded_kernels(head_dim: int, phase: str, is_e4m3: bool) -> Iterator[Config]:
    """Kernels for KV heads of any number of query heads, up to 32. Their tiles read each key once.

    Packs compute rows of heads that a KV head lacks in vain: a tile of 64 rows holds one query of
    32 heads, four queries of 16 or eight of 8. One of 128 rows holds twice as many, and takes up to
    1.5 times as long where it is half empty (an H200, 29 November 2026). The last of few queries
    has as many whole queries as its rows hold.
    """
    copies = {} if is_e4m3 else _padded_copies(head_dim)
    if phase == "one":
        if is_e4m3:
            yield _padded(head_dim, 8)
        yield _padded(head_dim, MAX_PACKED, **copies)
        return
    yield from (_padded(head_dim, heads, **copies) for heads in (8, 16))
    if is_e4m3 and head_dim not in QUANTISED:
        yield _padded(head_dim, MAX_PACKED)
        return
    yield from (_tall_padded(head_dim, heads, **copies) for heads in (16, MAX_PACKED))
    if not is_e4m3:
        yield _with(_padded(head_dim, MAX_PACKED, **copies), fills_rows=True)


def _tall_padded(head_dim: int, heads: int = MAX_PACKED, **copies: Value) -> Config:
    """As `_padded`, of two groups."""
    tile_n, stages = _TALL_TILES[head_dim]
    tall: dict[str, Value] = {"warp_groups": 2, "tile_n": tile_n, "kv_stages": stages}
    return _padded(head_dim, heads, **copies, **tall, blocks_per_sm=1, ping_pong=True)


def _divided(head_dim: int) -> Iterator[Config]:
    """A kernel of chunks that splits keys, for fewer tiles than multiprocessors. At eight chunks of
    4 to 16 query heads it took 0.68 of the others' time (an H200, 29 November 2026).
    """
    if head_dim in _COPIED_CHUNKS:
        yield _with(_tall_padded(head_dim, copy_warps=3), fills_rows=True)


def _padded_copies(head_dim: int) -> dict[str, Value]:
    return {"copy_warps": 3} if head_dim in _COPIED_PADDED else {}


def _padded(head_dim: int, heads: int, **more: Value) -> Config:
    return _with(_short(head_dim, heads, _ANY_PAGE), pads_heads=True, **more)


def _streaming(head_dim: int) -> Config:
    """As the padded kernel of one query, by blocks that take equal parts of all keys: for lengths
    that only the device knows.
    """
    return _padded(head_dim, MAX_PACKED, persistent=True, stream_k=True)


def _counted(head_dim: int, fours: Sequence[Config], padded: Sequence[Config]) -> Iterator[Config]:
    """Kernels whose blocks take counted parts of a sequence's keys: for unlike lengths.

    Args:
        head_dim: the instance.
        fours: kernels of four heads.
        padded: kernels of padded heads: the one of one query, or those of few.
    """
    if head_dim not in _COUNTED:
        return
    for one in padded:
        if len(padded) == 1 and head_dim == 64:
            yield _with(one, stream_k=True, own_first=True)
        if len(padded) == 1 or one["packed_heads"] == 16:
            yield _with(one, stream_k=True)


def _chunk(head_dim: int, packed: int, box_rows: int = _ANY_PAGE) -> Config:
    """Two groups, whose blocks take one tile of queries after the other: chunks of prompts, and
    batches that hold decoding too.
    """
    params: dict[str, Value] = {
        "warp_groups": 2,
        "tile_n": 128 if head_dim <= 128 else 80,
        "kv_stages": 2,
        "score_buffers": 1,
        "early_exp": 50,
        "ping_pong": True,
        "q_in_registers": False,
        "persistent": True,
        "blocks_per_sm": 1,
        "pdl": True,
        "box_rows": box_rows,
        "longest_first": True,
    }
    return _packed(params, packed)


def _filled(chunk: Config) -> Config:
    """A kernel of chunks whose tiles have as many whole queries as their rows hold, of all heads of
    a KV head. At 22 drawn batches of short chunks and few queries, of 2 to 13 heads a KV head, it
    took 0.62 of the others' time in the geometric mean (an H200, 29 November 2026).
    """
    return _with(chunk, packed_heads=MAX_PACKED, pads_heads=True, fills_rows=True)


def _with(one: Config, **params: Value) -> Config:
    return Config(NAME, {**one.params, **params})


def _tall(head_dim: int, packed: int) -> Config:
    """As `_chunk`, of three groups, which read a tile of keys for more queries: at D = 64 they take
    7 % less (an H200, 26 November 2026).
    """
    return _with(_chunk(head_dim, packed), warp_groups=3, early_exp=0)


def _packed(params: dict[str, Value], heads: int) -> Config:
    return Config(NAME, {**params, "packed_heads": heads} if heads > 1 else params)
