"""PyTorch's own attention, also while `tuner.enable` overrides it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner.runtime import finite_gradients


class _Thread(threading.local):
    is_native = False


is_watched = False
"""True while `tuner.enable` overrides PyTorch's attention; the threads' flags matter only then."""
thread = _Thread()
"""`is_native` is true while calls of PyTorch's attention must not be overridden: in a fallback, or
in a vendor's kernel that a plan calls."""


QUANTISED_NOTE = (
    "tuner.attention takes float8_e4m3fn tensors with their factors: descale_q, descale_k and "
    "descale_v"
)
"""Note on PyTorch's error, which has no attention of such tensors."""


def exchange_here(is_native: bool) -> bool:
    """Set the thread's flag; returns the former value."""
    before = thread.is_native
    thread.is_native = is_native
    return before


exchange: Callable[[bool], bool] = exchange_here
"""As `exchange_here`, for the flag in use: the dispatcher's own while it overrides attention."""


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Result of `function`, called with PyTorch's attention not overridden."""
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
    """`scaled_dot_product_attention`, not overridden, and not by cuDNN where its gradients may be
    NaN. An error on e4m3 tensors says in a note what takes them.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    if finite_gradients.is_needed(*arguments, scale, enable_gqa):
        if torch.compiler.is_compiling():
            return finite_gradients.attend(*arguments, scale)
        recorded: torch.Tensor = call(finite_gradients.attend, *arguments, scale)
        return recorded
    if torch.compiler.is_compiling():
        return scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
    try:
        if not is_watched:
            return scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
        out: torch.Tensor = call(
            scaled_dot_product_attention, *arguments, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError as exc:
        if query.dtype == torch.float8_e4m3fn:
            exc.add_note(QUANTISED_NOTE)
        raise
    return out
