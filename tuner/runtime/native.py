"""PyTorch's own attention, also while `tuner.enable` stands before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class _Thread(threading.local):
    is_native = False


is_watched = False
"""True when `tuner.enable` overrides PyTorch's attention: else nothing reads the thread's flag."""
thread = _Thread()
"""`is_native` is true where a call of PyTorch's attention must stay PyTorch's: a fallback, or a
vendor's kernel that a plan calls."""


def exchange_here(is_native: bool) -> bool:
    """Set the thread's flag; returns what it was."""
    before = thread.is_native
    thread.is_native = is_native
    return before


exchange: Callable[[bool], bool] = exchange_here
"""As `exchange_here`, of the flag that is read: the dispatcher's where it overrides attention."""


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Result of `function`, with PyTorch's attention for every call that it makes."""
    swap = exchange
    before = swap(True)
    try:
        return function(*arguments, **options)
    finally:
        swap(before)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as it is without this project."""
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    if torch.compiler.is_compiling() or not is_watched:
        return scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
    out: torch.Tensor = call(
        scaled_dot_product_attention, *arguments, scale=scale, enable_gqa=enable_gqa
    )
    return out
