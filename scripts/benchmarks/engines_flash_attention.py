"""A package ``flash_attn_interface`` made of FlashAttention-3's serving build, for Transformers.

Transformers imports FlashAttention-3 from an installed package. `written` makes one in a folder,
whose functions call the peer in ``TUNER_PEERS_PATH``. New keys and values are written to the cache
by the peer where it was built for that, else by PyTorch's operations before the call.
"""

from __future__ import annotations

import importlib.util
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
Window = tuple[int, int]


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


def stands_in() -> bool:
    """True if Python has no such package, and the folder of peers has the build."""
    folder = settings.peers_path()
    has_build = folder is not None and (folder / "fa3_serving.py").is_file()
    return has_build and importlib.util.find_spec(MODULE) is None


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
    window_size: Window = (-1, -1),
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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Attention of packed sequences, (total, H, D)."""
    lengths = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": int(max_seqlen_k)}
    options = {"scale": softmax_scale, "causal": causal, "window": tuple(window_size)}
    queries = cu_seqlens_q, int(max_seqlen_q)
    return _peer().fwd(q, k, v, *queries, softcap=softcap, **lengths, **options)


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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    """Attention of (B, SQ, H, D) over a cache of pages (pages, page size, HKV, D).

    New keys and values, (B, SQ, HKV, D), are written behind the ``cache_seqlens`` of each sequence.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options: dict[str, Any] = {"scale": scale, "causal": causal, "softcap": softcap}
    options["window"], used = tuple(window_size), cache_seqlens
    if k is not None and appends():
        return _appended(q, k_cache, v_cache, k, v, used, page_table, **options)
    if k is not None:
        append(k_cache, v_cache, k, v, used, page_table)
        used = used + k.shape[1]
    longest = page_table.shape[1] * k_cache.shape[1]
    pages = {"page_table": page_table, "seqused_k": used, "max_seqlen_k": longest}
    return _peer().fwd(q, k_cache, v_cache, **pages, **options)


@cache
def appends() -> bool:
    """True if the peer was built to write new keys and values; asked where nothing is captured."""
    import torch

    # Nothing is drawn: Transformers imports the package while it draws a model's weights.
    shapes = (1, 1, 4, 64), *[(2, 16, 2, 64)] * 2, *[(1, 1, 2, 64)] * 2
    tensors = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    used, table = (torch.ones(shape, dtype=torch.int32, device="cuda") for shape in (1, (1, 1)))
    try:
        _appended(*tensors, used, table, scale=0.1, causal=True, window=(-1, -1), softcap=0.0)
    except (RuntimeError, TypeError):
        return False
    return True


def _appended(*tensors: Any, scale: float, causal: bool, window: Window, softcap: float) -> Any:
    """The peer's operator with new keys and values, by the arguments of `over_cache`."""
    *queries, used, table = tensors
    longest = table.shape[1] * queries[1].shape[1]
    return _peer()._ops.fwd(
        *(*queries, *[None] * 6, used, None, longest, table, *[None] * 8),
        *(scale, causal, *window, softcap, True, None, 0, None, 0, None, 1, 0, None),
    )[0]


def append(k_cache: Any, v_cache: Any, k: Any, v: Any, used: Any, table: Any) -> None:
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
    for cached, new in ((k_cache, k), (v_cache, v)):
        bits = cached.view(torch.int16)
        more = (new.view(torch.int16) - bits[pages, slots]) * has_place[..., None, None]
        bits.index_put_((pages, slots), more, accumulate=True)
