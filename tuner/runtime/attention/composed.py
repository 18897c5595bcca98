"""Attention with a sliding window or a soft cap, composed of PyTorch's operations.

It answers calls that no tuned kernel serves: PyTorch's attention has neither option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import dropout

from tuner.errors import ConfigError
from tuner.runtime.attention import flash2
from tuner.runtime.attention.bias import with_elements
from tuner.runtime.call import native

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


class Attended(NamedTuple):
    """Attention without a mask operand and without dropout."""

    query: torch.Tensor
    """(B, H, SQ, D)."""
    key: torch.Tensor
    """(B, HKV, SKV, D), HKV a divisor of H."""
    value: torch.Tensor
    """As `key`."""
    is_causal: bool
    """Query i sees keys 0..i."""
    scale: float | None
    """Factor of the scores; 1/sqrt(D) when None."""
    extras: Extras = NONE
    """Window and soft cap."""

    @property
    def is_grouped(self) -> bool:
        """True when heads share keys."""
        return bool(self.query.shape[1] != self.key.shape[1])


class BackwardInputs(NamedTuple):
    """Tensors of a backward pass beside those of the forward pass."""

    out: torch.Tensor
    """(B, H, SQ, D), attention's output."""
    lse: torch.Tensor
    """Its log-sum-exp, (B, H, SQ)."""
    grad_out: torch.Tensor
    """Gradient of the output, as `out`."""


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
    """softmax(cap(scale * Q K^T) + mask) V by PyTorch's operations, differentiable.

    Queries without a visible key have zeros for their output.

    Args:
        query: (B, H, SQ, D), any floating type.
        key: (B, HKV, SKV, D).
        value: as `key`.
        attn_mask: booleans or terms of the scores, broadcast to (B, H, SQ, SKV); None: no mask.
        dropout_p: share of the weights that is dropped.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
        extras: window and soft cap.

    Returns:
        (B, H, SQ, D), of the query's type.
    """
    if attn_mask is None and not (dropout_p or extras.softcap):
        is_grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
        window = extras.left, extras.right
        if enable_gqa or not is_grouped:
            out = flash2.windowed(query, key, value, is_causal, scale, window)
            if out is not None:
                return out
    length, keys = query.shape[-2], key.shape[-2]
    visible = length if extras.left < 0 else min(length, keys + extras.left)
    mask = _mask(visible, keys, is_causal, extras, query.device)
    if attn_mask is not None:
        whole = with_elements(attn_mask, query.device)
        bias = whole if whole.shape[-2] == 1 else whole[..., :visible, :]
        if bias.dtype == torch.bool:
            mask = bias if mask is None else bias & mask
        else:
            mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    rows = query[..., :visible, :]
    if extras.softcap:
        out = _capped(rows, key, value, mask, dropout_p, scale, enable_gqa, extras.softcap)
    else:
        options = mask, dropout_p, False, scale, enable_gqa
        out = native.attend(rows, key, value, *options)
    if visible == length:
        return out
    return torch.cat([out, out.new_zeros(*out.shape[:-2], length - visible, out.shape[-1])], dim=-2)


def _mask(
    queries: int, keys: int, is_causal: bool, extras: Extras, device: torch.device, first: int = 0
) -> torch.Tensor | None:
    """(queries, keys), true where a query, from the first on, sees a key; None when every query
    sees all keys.
    """
    right = 0 if is_causal else extras.right
    if extras.left < 0 and right < 0:
        return None
    rows = torch.arange(first, first + queries, device=device)[:, None]
    away = torch.arange(keys, device=device) - rows
    visible = torch.ones_like(away, dtype=torch.bool)
    if extras.left >= 0:
        visible = visible & (away >= -extras.left)
    return visible & (away <= right) if right >= 0 else visible


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


class Scores(NamedTuple):
    """Scores of some queries, masked, in at least single precision."""

    rows: slice
    scores: torch.Tensor
    """(B, H, rows, SKV), -inf where a query does not see a key."""
    slopes: torch.Tensor | None
    """Derivatives of the soft cap, as `scores`; None without one."""


def scores_of(call: Attended) -> Iterator[Scores]:
    """A block of query rows at a time, so that few of all scores are held at once."""
    query, key, _, is_causal, scale, extras = call
    batch, heads, length, head_dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    key_t = key.to(wide).repeat_interleave(heads // max(1, key.shape[1]), 1).mT
    factor = 1 / math.sqrt(head_dim or 1) if scale is None else scale
    step = max(1, _SCORES_BYTES // max(1, batch * heads * key.shape[2] * wide.itemsize))
    for start in range(0, max(1, length), step):  # of no queries a block without rows
        rows = slice(start, min(start + step, length))
        scores, slopes = (query[:, :, rows].to(wide) * factor) @ key_t, None
        if extras.softcap:
            scores = torch.tanh(scores / extras.softcap)
            slopes, scores = 1 - scores * scores, scores * extras.softcap
        options = is_causal, extras, query.device, start
        mask = _mask(rows.stop - start, key.shape[2], *options)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        yield Scores(rows, scores, slopes)


def compose_with_lse(call: Attended) -> tuple[torch.Tensor, torch.Tensor]:
    """As `compose`, with the log-sum-exp.

    Returns:
        The output (B, H, SQ, D), and the log-sum-exp (B, H, SQ) in at least single precision, -inf
        for a query without a visible key.
    """
    query, key, value = call.query, call.key, call.value
    wide = torch.promote_types(query.dtype, torch.float32)
    value = value.to(wide).repeat_interleave(query.shape[1] // max(1, key.shape[1]), 1)
    outs, sums = [], []
    for _, scores, _ in scores_of(call):
        sums.append(scores.logsumexp(-1))
        outs.append((_softmax(scores, is_masked=True) @ value).to(query.dtype))
    return torch.cat(outs, dim=-2), torch.cat(sums, dim=-1)


def differentiate(
    call: Attended, recorded: BackwardInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value by PyTorch's operations."""
    (query, key, value, _, scale, _), (out, lse, grad_out) = call, recorded
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, heads, _, head_dim = query.shape
    factor = 1 / math.sqrt(head_dim or 1) if scale is None else scale
    grad_query = torch.empty_like(query)
    repeats = heads // max(1, key.shape[1])
    key_wide, value_wide = (t.to(wide).repeat_interleave(repeats, 1) for t in (key, value))
    grad_key, grad_value = torch.zeros_like(key_wide), torch.zeros_like(value_wide)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # no weight in rows without a key
    for rows, scores, slopes in scores_of(call):
        grad = grad_out[:, :, rows].to(wide)
        weights = scores.sub_(lse[:, :, rows, None]).exp_()
        grad_value += weights.mT @ grad
        inner = (grad * out[:, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * (grad @ value_wide.mT - inner) * factor
        if slopes is not None:
            grad_scores *= slopes
        grad_query[:, :, rows] = (grad_scores @ key_wide).to(query.dtype)
        grad_key += grad_scores.mT @ query[:, :, rows].to(wide)
    groups = (batch, key.shape[1], repeats, key.shape[2], head_dim)
    grad_key, grad_value = (t.view(groups).sum(2) for t in (grad_key, grad_value))
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _softmax(scores: torch.Tensor, is_masked: bool) -> torch.Tensor:
    """Softmax over the keys; zeros without a gradient in rows without a visible key, as in
    PyTorch's kernels.
    """
    if not is_masked:
        return scores.softmax(-1)
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
