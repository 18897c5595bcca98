"""Attention over a paged cache by PyTorch's operations, one sequence after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.runtime.attention.composed import Extras

#: Bytes of scores held at once.
_SCORES_BYTES = 1 << 28


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
    """Output (total_q, H, D) and log-sum-exp (H, total_q), a block of a sequence's rows at a time.

    Raises:
        ConfigError: on lengths that do not fit the tensors.
    """
    query, total = call.query, call.query.shape[0]
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
