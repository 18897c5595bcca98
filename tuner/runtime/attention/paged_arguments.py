"""Checks of the arguments of attention over a paged cache."""

from __future__ import annotations

import torch

from tuner.errors import ConfigError
from tuner.problem.attention_masks import PAGE_MULTIPLE
from tuner.runtime.attention.paged_composed import output_type
from tuner.runtime.call import guards


def checked_scales(
    query: torch.Tensor, key: torch.Tensor, scales: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, ...]:
    """The factors of e4m3 tensors, one a head, or none for other types.

    Raises:
        ConfigError: on a factor that is missing, does not fit, or has nothing to scale.
    """
    if query.dtype not in guards.QUANTISED:
        if any(factor is not None for factor in scales):
            raise ConfigError(f"factors are for float8_e4m3fn, query is {query.dtype}")
        return ()
    found = []
    heads = query.shape[1], key.shape[2], key.shape[2]
    for name, factor, count in zip("qkv", scales, heads, strict=True):
        if factor is None:
            raise ConfigError(f"{name}_scale is missing (allowed: fp32 ({count},) or one element)")
        if factor.dtype != torch.float32 or (factor.numel() != 1 and factor.shape != (count,)):
            raise ConfigError(
                f"{name}_scale is {factor.dtype} {tuple(factor.shape)} "
                f"(allowed: torch.float32 ({count},) or one element)"
            )
        found.append(factor.reshape(-1).expand(count).contiguous())
    return tuple(found)


def checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    starts_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    longest_q: int | None,
    longest_kv: int | None,
    out: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Check the arguments of a call; returns the longest lengths of queries and keys.

    Args:
        query: (total_q, H, D).
        key: (pages, page size, HKV, D).
        value: as `key`.
        page_table: int32 (B, columns).
        seqused_k: int32 (B,).
        starts_q: int32 (B + 1,); None: equally many queries for each sequence.
        sinks: (H,); None: no sinks.
        longest_q: longest queries of a sequence; None: not given.
        longest_kv: longest keys of a sequence; None: all that the table can hold.
        out: tensor for the output; None: a new one.

    Raises:
        ConfigError: names the given and the allowed values.
    """
    size, batch, table = _checked_caches(query, key, value), seqused_k.numel(), page_table.shape
    for name, tensor, shape in (
        ("seqused_k", seqused_k, (batch,)),
        ("page_table", page_table, (batch, *table[-1:])),
        *(() if starts_q is None else (("cu_seqlens_q", starts_q, (batch + 1,)),)),
    ):
        is_row = shape[-1] < 2 or (tensor.dim() > 0 and tensor.stride(-1) == 1)
        if tensor.dtype != torch.int32 or tensor.shape != shape or not is_row:
            raise ConfigError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} "
                f"(allowed: torch.int32 {shape}, contiguous rows)"
            )
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ConfigError(f"sinks are {tuple(sinks.shape)} (allowed: ({query.shape[1]},))")
    if out is not None:
        _check_output(query, out)
    columns = table[1]
    room = columns * size
    keys = room if longest_kv is None else int(longest_kv)
    if not 0 <= keys <= room:
        raise ConfigError(
            f"max_seqlen_k={keys} is out of range (allowed: 0 to {room}, the "
            f"{columns} pages of {size} in a row of page_table)"
        )
    is_even = starts_q is None
    return _longest_queries(query.shape[0], batch, longest_q, is_even), keys


def _checked_caches(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Slots of a page of caches that fit the queries."""
    if query.dim() != 3 or key.dim() != 4 or key.shape != value.shape:
        raise _unlike(query, key, value, "(total_q, H, D) and twice (pages, page size, HKV, D)")
    _, size, heads_kv, width = key.shape
    _, heads, width_q = query.shape
    if width_q != width or (heads % heads_kv if heads_kv else heads):
        raise _unlike(query, key, value, "one D, and HKV a divisor of H")
    if not query.dtype == key.dtype == value.dtype:
        raise ConfigError(f"query is {query.dtype}, the caches {key.dtype} and {value.dtype}")
    if not size or size % PAGE_MULTIPLE:
        raise ConfigError(f"pages have {size} slots (allowed: multiples of {PAGE_MULTIPLE})")
    return int(size)


def _unlike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: str
) -> ConfigError:
    shapes = f"query {tuple(query.shape)}, caches {tuple(key.shape)} and {tuple(value.shape)}"
    return ConfigError(f"{shapes} (allowed: {allowed})")


def _check_output(query: torch.Tensor, out: torch.Tensor) -> None:
    dtype = output_type(query)
    is_like = (out.shape, out.dtype, out.device) == (query.shape, dtype, query.device)
    if not is_like or not out.is_contiguous():
        raise ConfigError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, strides {out.stride()} "
            f"(allowed: as query, {dtype} {tuple(query.shape)}, contiguous)"
        )


def _longest_queries(total: int, batch: int, longest: int | None, is_even: bool) -> int:
    """Queries of the longest sequence.

    Args:
        total: queries of all sequences.
        batch: sequences.
        longest: the caller's number; None: not given.
        is_even: True where every sequence has equally many.
    """
    if not is_even:
        queries = total if longest is None else int(longest)
    elif total % max(1, batch) or (longest is not None and longest * batch != total):
        raise ConfigError(
            f"{total} queries of {batch} sequences without cu_seqlens_q (allowed: the same number "
            "each)"
        )
    else:
        queries = total // max(1, batch)
    if queries < 0:
        raise ConfigError(f"max_seqlen_q={queries} is out of range (allowed: 0 or more)")
    return queries
