"""Attention with a sliding window or a soft cap, composed of PyTorch's operations.

It answers calls that no tuned kernel serves: `scaled_dot_product_attention` has neither option.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

from tuner.errors import ConfigError
from tuner.runtime.bias import with_elements

#: Bytes of scores held at once under a soft cap, when no gradient keeps all of them.
_SCORES_BYTES = 1 << 28


class Extras(NamedTuple):
    """Features of a call beyond plain attention; `AttentionProblem` defines them."""

    left: int = -1
    right: int = -1
    softcap: float = 0.0

    @classmethod
    def of(cls, window: Any, softcap: float) -> Self:
        """From the arguments of `tuner.attention`.

        Raises:
            ConfigError: when one is out of range.
        """
        if window is None:
            window = -1
        sides = (window, window) if isinstance(window, int) else window
        if (
            not isinstance(sides, tuple | list)
            or len(sides) != 2
            or not all(isinstance(s, int) and not isinstance(s, bool) and s >= -1 for s in sides)
        ):
            raise ConfigError(
                f"window={window} is not known (allowed: (left, right), or one number for both; "
                "-1, no limit, or more)"
            )
        if not isinstance(softcap, int | float) or not 0 <= softcap < math.inf:
            raise ConfigError(f"softcap={softcap!r} is out of range (allowed: 0, none, or more)")
        left, right = sides
        return cls(left, right, float(softcap))


NONE = Extras()


def compose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    extras: Extras,
) -> torch.Tensor:
    """softmax(cap(scale * Q K^T) + mask) V; arguments as of `tuner.attention`.

    Queries without a visible key have zeros for their output.
    """
    length, keys = query.shape[-2], key.shape[-2]
    seen = length if extras.left < 0 else min(length, keys + extras.left)
    mask = _mask(seen, keys, is_causal, extras, query.device)
    if attn_mask is not None:
        whole = with_elements(attn_mask, query.device)
        given = whole if whole.shape[-2] == 1 else whole[..., :seen, :]
        if given.dtype == torch.bool:
            mask = given if mask is None else given & mask
        else:
            mask = given if mask is None else given.masked_fill(~mask, -math.inf)
    rows = query[..., :seen, :]
    if extras.softcap:
        out = _capped(rows, key, value, mask, dropout_p, scale, enable_gqa, extras.softcap)
    else:
        out = scaled_dot_product_attention(
            rows, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    if seen == length:
        return out
    return torch.cat([out, out.new_zeros(*out.shape[:-2], length - seen, out.shape[-1])], dim=-2)


def _mask(
    queries: int, keys: int, is_causal: bool, extras: Extras, device: torch.device
) -> torch.Tensor | None:
    """(queries, keys), true where a query sees a key; None when every query sees all keys."""
    right = 0 if is_causal else extras.right
    if extras.left < 0 and right < 0:
        return None
    away = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    seen = torch.ones_like(away, dtype=torch.bool)
    if extras.left >= 0:
        seen = seen & (away >= -extras.left)
    return seen & (away <= right) if right >= 0 else seen


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    softcap: float,
) -> torch.Tensor:
    """Attention with a soft cap, a block of query rows at a time, in at least single precision."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = key.to(wide), value.to(wide)
    if enable_gqa:
        repeats = query.shape[-3] // max(1, key.shape[-3])
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    factor = (1 / math.sqrt(query.shape[-1] or 1) if scale is None else scale) / softcap
    a_row = math.prod(query.shape[:-2]) * key.shape[-2] * wide.itemsize
    blocks = []
    step = max(1, _SCORES_BYTES // max(1, a_row))
    for start in range(0, max(1, query.shape[-2]), step):
        rows = slice(start, start + step)
        scores = torch.tanh((query[..., rows, :].to(wide) * factor) @ key.mT) * softcap
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            scores = (
                scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
            )
        weights = _softmax(scores, is_masked=mask is not None)
        blocks.append((dropout(weights, dropout_p) @ value).to(query.dtype))
    return torch.cat(blocks, dim=-2)


def _softmax(scores: torch.Tensor, is_masked: bool) -> torch.Tensor:
    """Softmax over the keys; zeros without a gradient in rows without a visible key, as in
    PyTorch's kernels.
    """
    if not is_masked:
        return scores.softmax(-1)
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
