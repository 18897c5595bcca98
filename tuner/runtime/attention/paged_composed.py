"""Attention over a paged cache by PyTorch: its FlashAttention-2 over a copy of the keys and values.

PyTorch's operations answer calls that it does not take, one sequence after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.runtime.attention import flash2
from tuner.runtime.attention.composed import Extras
from tuner.runtime.call import handed_over

#: Bytes of scores held at once.
_SCORES_BYTES = 1 << 28
#: Bytes of keys and values that are copied out of their pages at once.
_DENSE_BYTES = 1 << 30


class Paged(NamedTuple):
    """Tensors and options of a call (`tuner.paged_attention`)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    page_table: torch.Tensor
    seqused_k: torch.Tensor
    starts_q: torch.Tensor | None
    sinks: torch.Tensor | None
    longest_q: int
    longest_kv: int
    is_causal: bool
    extras: Extras
    scale: float
    with_lse: bool
    out: torch.Tensor | None
    descales: tuple[torch.Tensor, ...] = ()
    """Factors of e4m3 queries (H,), keys and values (HKV,); else none."""
    total_kv: int | None = None
    """Keys of all sequences, if known."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the output."""
        return output_type(self.query)

    @property
    def batch(self) -> int:
        """Sequences, B."""
        return int(self.seqused_k.numel())


def output_type(query: torch.Tensor) -> torch.dtype:
    """Type of the output: the queries', bf16 of e4m3."""
    return torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype


def composed(call: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (total_q, H, D) and log-sum-exp (H, total_q).

    Raises:
        ConfigError: on lengths that do not fit the tensors, and within a capture, where
            FlashAttention-2 does not take the call.
    """
    query, total = call.query, call.query.shape[0]
    is_empty = not (call.page_table.numel() and call.longest_q and call.longest_kv)
    beside = call.page_table, call.seqused_k, call.starts_q, call.sinks, *call.descales
    is_plain = flash2.are_together(query, *beside) and not (is_empty or call.extras.softcap)
    if is_plain and flash2.takes(query, call.key, call.value, call.dtype):
        return _by_flash2(call)
    flash2.check_uncaptured("tuner.paged_attention")
    wide = torch.promote_types(call.dtype, torch.float32)
    lengths = call.seqused_k.tolist()
    room = min(call.longest_kv, call.page_table.shape[1] * call.key.shape[1])
    if max(lengths, default=0) > room or min(lengths, default=0) < 0:
        raise ConfigError(
            f"seqused_k runs from {min(lengths)} to {max(lengths)} (allowed: 0 to {room})"
        )
    if call.starts_q is None:
        starts = [index * call.longest_q for index in range(call.batch + 1)]
    else:
        starts = call.starts_q.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or min(counts, default=0) < 0 or starts[-1] > total:
        raise ConfigError(
            f"cu_seqlens_q runs from {starts[0]} to {starts[-1]} "
            f"(allowed: from 0, never decreasing, to {total} at most)"
        )
    if max(counts, default=0) > call.longest_q:
        raise ConfigError(
            f"cu_seqlens_q has a sequence of {max(counts)} (allowed: up to {call.longest_q})"
        )
    parts = [
        part
        for index, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for part in _blocks(call, index, start, counts[index], length, wide)
    ]
    rest = query.new_zeros(query[starts[-1] :].shape, dtype=call.dtype)
    outs = [out for out, _ in parts]
    sums = [lse for _, lse in parts]
    blank = torch.full((query.shape[1], len(rest)), -math.inf, dtype=wide, device=query.device)
    return torch.cat([*outs, rest]), torch.cat([*sums, blank], -1)


def _blocks(
    call: Paged, index: int, start: int, queries: int, length: int, wide: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows, H, D) and (H, rows) of a sequence's rows, in order."""
    size, heads_kv = call.key.shape[1:3]
    heads = call.query.shape[1]
    pages = call.page_table[index, : -(-length // size)].long()
    of_query, *of_cache = [
        factor.to(wide).view(heads_kv, len(factor) // max(1, heads_kv), 1, 1)
        for factor in call.descales
    ] or (
        1.0,
        1.0,
        1.0,
    )
    keys, values = (
        _rows(cache, pages)[:length].to(wide).permute(1, 0, 2)[:, None] * factor
        for cache, factor in zip((call.key, call.value), of_cache, strict=True)
    )  # (HKV, 1, length, D)
    step = max(1, _SCORES_BYTES // max(1, heads * max(1, length) * wide.itemsize))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        rows = call.query[start + first : start + last].to(wide)
        rows = (
            rows.unflatten(1, (heads_kv, heads // max(1, heads_kv))).permute(1, 2, 0, 3) * of_query
        )
        scores = (rows * call.scale) @ keys.mT
        if softcap := call.extras.softcap:
            scores = softcap * torch.tanh(scores / softcap)
        away = torch.arange(length, device=scores.device) - (length - queries)
        away = away - torch.arange(first, last, device=scores.device)[:, None]
        right = 0 if call.is_causal else call.extras.right
        if right >= 0:
            scores = scores.masked_fill(away > right, -math.inf)
        if call.extras.left >= 0:
            scores = scores.masked_fill(away < -call.extras.left, -math.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(wide).view(*rows.shape[:2], 1, 1).expand(-1, -1, last - first, 1)
            scores = torch.cat((scores, sinks), -1)
        sums = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(
            scores.shape[:-1], -math.inf
        )  # fmt: skip
        weights = (scores - sums.masked_fill(sums.isneginf(), 0.0)[..., None]).exp()
        out = (weights[..., :length] @ values).flatten(0, 1).transpose(0, 1)
        yield out.to(call.dtype), sums.flatten(0, 1)


def _rows(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """(slots, HKV, D) of some pages; PyTorch indexes bytes, not e4m3."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[pages].flatten(0, 1).view(cache.dtype)
    return cache[pages].flatten(0, 1)


def _by_flash2(call: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """As `composed`, over keys and values that are copied out of their pages, some sequences at a
    time. No length is read on the host.
    """
    if call.starts_q is not None and call.longest_q == 1:
        return _by_single_queries(call, call.starts_q)
    size, columns = call.key.shape[1], -(-call.longest_kv // call.key.shape[1])
    columns = min(columns, call.page_table.shape[1])
    room, device, batch = columns * size, call.query.device, call.batch
    used = call.seqused_k.clamp(0, room)
    firsts = torch.arange(columns, device=device) * size
    pages = call.page_table[:, :columns].masked_fill(firsts >= used[:, None], 0).long()
    (query,) = handed_over.aligned(_widened(call.query, call, 0))
    total, queries = query.shape[0], call.longest_q
    is_even = call.starts_q is None
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
    starts = starts if call.starts_q is None else call.starts_q
    out = query.new_empty(query.shape)
    lse = torch.empty(query.shape[1::-1], dtype=torch.float32, device=device)
    step = max(1, _DENSE_BYTES // max(1, 4 * room * call.key.shape[2] * query.shape[2]))
    window = call.extras.left, call.extras.right
    for first, last in pairwise([*range(0, batch, step), batch]):
        rows = slice(first * queries, last * queries) if is_even else slice(None)
        of_rows = starts[first : last + 1] - (rows.start or 0)
        of_keys = torch.arange(last - first + 1, dtype=torch.int32, device=device) * room
        keys, values = (
            _widened(_rows(cache, pages[first:last].flatten()), call, side)
            for side, cache in enumerate((call.key, call.value), 1)
        )
        new = flash2.packed(
            *(query[rows], keys, values, (of_rows, of_keys), (queries, room)),
            *(call.is_causal, call.scale, window, used[first:last]),
        )
        if not is_even and first:  # rows of the sequences before are not among the new ones
            is_new = torch.arange(total, device=device) >= starts[first]
            new = torch.where(is_new[:, None, None], new[0], out), torch.where(is_new, new[1], lse)
        out[rows], lse[:, rows] = new
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None]
        out = (out * (lse - sinks).sigmoid().t()[..., None]).to(out.dtype)
        lse = torch.logaddexp(lse, sinks)
    return out, lse


def _by_single_queries(call: Paged, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_by_flash2`, for sequences of one query or none: it takes one of each."""
    total = call.query.shape[0]
    firsts = starts[:-1].clamp(max=total - 1)
    out, lse = _by_flash2(call._replace(query=call.query[firsts], starts_q=None))
    rows = torch.arange(total, dtype=starts.dtype, device=starts.device)
    owners = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=call.batch - 1)
    return out[owners], lse[:, owners]


def _widened(tensor: torch.Tensor, call: Paged, side: int) -> torch.Tensor:
    """(rows, heads, D) in the output's type: elements of e4m3 times their factors."""
    if not call.descales:
        return tensor
    return (tensor.to(call.dtype) * call.descales[side][:, None]).to(call.dtype)
