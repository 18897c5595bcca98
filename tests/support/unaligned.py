"""Tensors that start, or whose rows start, off 16 bytes; and attention written out in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


def shifted(tensor: Any, elements: int = 1) -> Any:
    """The same values, some elements past an aligned address."""
    room = tensor.new_empty(tensor.numel() + elements)[elements:]
    return room.view(tensor.shape).copy_(tensor)


def wider(tensor: Any, elements: int = 1) -> Any:
    """The same values, in rows that lie some elements apart."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + elements)
    return tensor.new_zeros(shape)[..., : tensor.shape[-1]].copy_(tensor)


def sliced(tensor: Any) -> Any:
    """The same values, between others of a longer tensor with odd rows."""
    *sizes, length, width = tensor.shape
    room = tensor.new_zeros((*sizes, length + 3, width + 3))
    return room[..., 2 : 2 + length, 1 : 1 + width].copy_(tensor)


WAYS: dict[str, Callable[[Any], Any]] = {
    "one element further": shifted,
    "eight bytes further": lambda tensor: shifted(tensor, 8 // tensor.element_size()),
    "wider rows": wider,
    "wider rows, tokens first": lambda tensor: wider(tensor.transpose(1, 2)).transpose(1, 2),
    "a slice": sliced,
}


def drawn_view(draw: random.Random, tensor: Any) -> Any:
    """The same values, as they lie or in one of the `WAYS`, all but one of which keep columns
    contiguous whatever the dimensions.
    """
    ways = (way for name, way in WAYS.items() if tensor.dim() == 4 or "tokens first" not in name)
    return draw.choice([lambda t: t, *ways])(tensor)


def exact(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """In float64; zeros where a query sees no key."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    group = query.shape[1] // max(1, key.shape[1])
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    factor = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    scores = factor * query @ key.mT
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask.double()
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0) @ value


def error(out: Any, wanted: Any) -> float:
    """Relative Frobenius error; infinity for numbers that are none."""
    out = out.detach().double()
    if out.shape != wanted.shape or not out.isfinite().all():
        return float("inf")
    return float((out - wanted).norm() / wanted.norm().clamp_min(1e-30))
