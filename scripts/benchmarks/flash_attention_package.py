"""A package ``flash_attn_interface`` made of FlashAttention-3's serving build, for Transformers.

Transformers imports FlashAttention-3 from an installed package. `written` makes one in a folder,
whose functions call the peer in ``TUNER_PEERS_PATH``. New keys and values are written to the cache
by the peer where it was built for that, else by PyTorch's operations before the call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.errors import BenchmarkError

MODULE = "flash_attn_interface"
_DISTRIBUTION = "flash_attn_3-3.0.0"
_TEXT = f"""from {__name__} import attention as flash_attn_func
from {__name__} import over_cache as flash_attn_with_kvcache
from {__name__} import packed as flash_attn_varlen_func
from {__name__} import appends

appends()
"""


def written(folder: Path) -> Path:
    """The folder, with the package and its metadata."""
    facts = folder / f"{_DISTRIBUTION}.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    name, version = _DISTRIBUTION.split("-")
    (folder / f"{MODULE}.py").write_text(_TEXT)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (facts / "top_level.txt").write_text(f"{MODULE}\n")
    (facts / "RECORD").write_text(f"{MODULE}.py,,\n")
    return folder


def is_there() -> bool:
    """True if the folder of peers has the build."""
    folder = settings.peers_path()
    return folder is not None and (folder / "fa3_serving.py").is_file()


@cache
def _peer() -> Any:
    from tuner.families.peers import installed

    module = installed.module_of("flash3_serving")
    if isinstance(module, str):
        raise BenchmarkError(module)
    return module


def attention(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Attention of (B, S, H, D) tensors."""
    import torch

    used = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    options = {"scale": softmax_scale, "causal": causal, "window": tuple(window_size)}
    return _peer().fwd(q, k, v, seqused_k=used, max_seqlen_k=k.shape[1], softcap=softcap, **options)


def packed(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Attention of packed sequences, (total, H, D)."""
    return _peer().fwd(
        *(q, k, v, cu_seqlens_q, int(max_seqlen_q)),
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=int(max_seqlen_k),
        scale=softmax_scale,
        causal=causal,
        window=tuple(window_size),
        softcap=softcap,
    )


def over_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Attention over a paged cache, of (B, SQ, H, D) queries.

    Args:
        q: queries.
        k_cache: (pages, page size, HKV, D), as `v_cache`.
        v_cache: values.
        k: new keys (B, SQ, HKV, D), which are written behind those that are there.
        v: new values.
        cache_seqlens: int32 (B,), keys of each sequence before.
        page_table: int32 (B, columns).
        softmax_scale: scale of the scores; None: 1 / sqrt(D).
        causal: bottom-right.
        window_size: keys before and behind a query's own; -1: all.
        softcap: soft cap of the scores; 0: none.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    longest = page_table.shape[1] * k_cache.shape[1]
    if k is not None and appends():
        given = q, k_cache, v_cache, k, v, cache_seqlens, page_table, longest
        return _appended(*given, scale, causal, *window_size, softcap)
    used = cache_seqlens
    if k is not None:
        _append(k_cache, v_cache, k, v, used, page_table)
        used = used + k.shape[1]
    return _peer().fwd(
        *(q, k_cache, v_cache),
        page_table=page_table,
        seqused_k=used,
        max_seqlen_k=longest,
        scale=scale,
        causal=causal,
        window=tuple(window_size),
        softcap=softcap,
    )


@cache
def appends() -> bool:
    """True if the peer was built to write new keys and values; asked where nothing is captured."""
    import torch

    query, key, value, keys, values = _drawn("cuda")
    others = keys.clone(), values.clone()
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device="cuda")
    used = torch.tensor([3, 17], dtype=torch.int32, device="cuda")
    try:
        found = _appended(
            query, keys, values, key, value, used, table, 32, 0.125, True, -1, -1, 0.0
        )
    except (RuntimeError, TypeError):
        return False
    _append(*others, key, value, used, table)
    wanted = _peer().fwd(
        query, *others, page_table=table, seqused_k=used + 1, max_seqlen_k=32, scale=0.125
    )
    same = all(map(torch.equal, (keys, values), others))
    return same and torch.allclose(found, wanted, rtol=2e-2, atol=2e-2)


def _drawn(device: str) -> list[Any]:
    """Queries, new keys and values, and caches of four pages of 16 slots.

    Transformers imports the package while it draws a model's weights, so they come of a generator
    of their own.
    """
    import torch

    draw = torch.Generator(device).manual_seed(0)
    shapes = *((2, 1, heads, 64) for heads in (4, 2, 2)), *[(4, 16, 2, 64)] * 2
    on = {"dtype": torch.bfloat16, "device": device, "generator": draw}
    return [torch.randn(shape, **on) for shape in shapes]


def _appended(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    used: Any,
    table: Any,
    longest: int,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
) -> Any:
    """The peer's operator with new keys and values."""
    return _peer()._ops.fwd(
        *(q, k_cache, v_cache, k, v, None, None, None, None, None, None),
        *(used, None, longest, table, *[None] * 8),
        *(scale, causal, left, right, softcap, True, None, 0, None, 0, None, 1, 0, None),
    )[0]


def _append(k_cache: Any, v_cache: Any, k: Any, v: Any, used: Any, table: Any) -> None:
    """Write new keys and values to their slots. Those behind the table's rows, as a graph's padding
    has them, are written nowhere.
    """
    import torch

    size = k_cache.shape[1]
    at = used.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    columns = at // size
    pages = table.long().gather(1, columns.clamp(0, table.shape[1] - 1))
    has_place = (columns >= 0) & (columns < table.shape[1])
    has_place &= (pages >= 0) & (pages < k_cache.shape[0])
    # Sums of bits: what has no place adds nothing to a slot that another row may write.
    pages, slots = pages * has_place, at % size * has_place
    kind = torch.int16 if k.element_size() == 2 else torch.int32
    for cache_, new in ((k_cache, k), (v_cache, v)):
        bits = cache_.view(kind)
        more = (new.view(kind) - bits[pages, slots]) * has_place[..., None, None]
        bits.index_put_((pages, slots), more, accumulate=True)
