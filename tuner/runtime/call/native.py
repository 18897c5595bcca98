"""PyTorch's own attention, also while `tuner.enable` overrides it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner.runtime.call import finite_gradients, guards, handed_over, invariance


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
    """`scaled_dot_product_attention`, not overridden, by the rules of `handed_over`, and not by
    cuDNN where its gradients may be NaN.

    Rows of a boolean mask that see no key are zeros. An error on e4m3 tensors says in a note what
    takes them.

    Raises:
        NotInvariantError: in the mode of `tuner.deterministic`.
    """
    if invariance.was_on:
        invariance.forbid("PyTorch's attention", query)
    options = dropout_p, is_causal, scale, enable_gqa
    if attn_mask is None and handed_over.is_ready(query, key, value):
        return _pytorchs(query, key, value, attn_mask, *options)
    tensors = query, key, value
    if not (handed_over.is_checked(*tensors) or handed_over.is_empty(*tensors)):
        return _pytorchs(query, key, value, attn_mask, *options)
    if not handed_over.fits(query, key, value, attn_mask):
        return handed_over.by_math(query, key, value, attn_mask, *options)
    query, key, value = handed_over.aligned(query, key, value)
    hidden: torch.Tensor | None = None
    if attn_mask is not None and type(attn_mask) is torch.Tensor:
        attn_mask = handed_over.over_keys(attn_mask, key)
        if handed_over.may_ignore(query, attn_mask):
            if guards.wants_gradient(query, key, value):
                hidden = attn_mask.any(-1, keepdim=True).logical_not()
            else:
                attn_mask = handed_over.terms_of(attn_mask, query.dtype)
        attn_mask = handed_over.aligned_mask(attn_mask)
    out = _pytorchs(query, key, value, attn_mask, *options)
    return out if hidden is None else out.masked_fill(hidden, 0.0)


def _pytorchs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """PyTorch's attention of tensors that may be handed over."""
    arguments = query, key, value, mask, dropout_p, is_causal
    attend: Callable[..., torch.Tensor]
    options: dict[str, Any] = {"scale": scale}
    if finite_gradients.is_needed(*arguments, scale, enable_gqa):
        attend = finite_gradients.attend
    else:
        attend = scaled_dot_product_attention
        options["enable_gqa"] = enable_gqa
    if torch.compiler.is_compiling():
        return attend(*arguments, **options)
    try:
        if is_watched:
            out: torch.Tensor = call(attend, *arguments, **options)
        else:
            out = attend(*arguments, **options)
    except RuntimeError as exc:
        if query.dtype == torch.float8_e4m3fn:
            exc.add_note(QUANTISED_NOTE)
        raise
    return out
