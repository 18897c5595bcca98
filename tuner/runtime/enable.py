"""`enable`: the tuned kernels behind PyTorch's own attention, so that a model changes no line.

The switch is a provider, named "tuner", of PyTorch's registry of flash-attention implementations.
It stands before the kernels of two operators: flash, as every provider does, and cuDNN, which
PyTorch 2.13 prefers on Hopper. So it is reached under either order of preference, and the order
stays: putting flash first, for the whole process, would give every call without a tuned kernel to
FlashAttention-2 (22 us at (1,16,1024,64) on an H200) where cuDNN takes 14.

PyTorch decides as ever which backend may take a call, computes gradients with that backend's
backward kernel, and traces the same graphs: what is compiled follows the switch when it runs.

Under ``is_causal`` the two operators align the mask differently where there are more keys than
queries, or fewer: flash bottom-right (`torch.nn.attention.bias.causal_lower_right` calls it so),
cuDNN top-left, as tuned kernels do. `scaled_dot_product_attention` itself means top-left, and
gives flash no such call.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from tuner.errors import TunerError
from tuner.runtime import devices, dispatch, guards, native
from tuner.runtime.attention_plan import find_plan
from tuner.runtime.refusal import Kind, Refusal
from tuner.runtime.table import table

PROVIDER = "tuner"
"""Its name in `torch.nn.attention.list_flash_attention_impls`."""
Outputs = tuple[Any, ...]
"""Output, log-sum-exp, cumulative lengths of nested tensors (none), the longest query and key,
the state of dropout's generator in two tensors, a mask for debugging."""


class _Handle:
    """What is in the dispatcher while the provider is active."""

    def __init__(self) -> None:
        native.is_watched = True
        self._library: Library | None = Library("aten", "IMPL")
        key = devices.TYPE.upper()
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        for name, before in (
            ("_scaled_dot_product_flash_attention", _before_flash),
            ("_scaled_dot_product_cudnn_attention", _before_cudnn),
        ):
            if not has_kernel(f"aten::{name}", key):  # a PyTorch without CUDA
                continue
            kernel = torch.library.get_kernel(f"aten::{name}", key)
            with warnings.catch_warnings():  # of a kernel replaced by another: it is meant
                warnings.simplefilter("ignore", UserWarning)
                self._library.impl(name, before(kernel), key, with_keyset=True)

    def remove(self) -> None:
        """Leave the dispatcher as it was found."""
        self._library = None
        native.is_watched = False


def _before_flash(kernel: Any) -> Callable[..., Outputs]:
    def attend(
        keys: torch._C.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Outputs:
        found = None
        if not return_debug_mask:
            found = _tuned("flash", query, key, value, None, dropout_p, is_causal, scale)
        if found is None:
            arguments = query, key, value, dropout_p, is_causal, return_debug_mask
            outputs: Outputs = kernel.call_boxed(keys, *arguments, scale=scale)
            return outputs
        random_state = query.new_empty(2, dtype=torch.uint64)
        offset = query.new_empty((), dtype=torch.uint64)
        lengths = query.shape[2], key.shape[2]
        return *found, None, None, *lengths, random_state, offset, query.new_empty(0)

    return attend


def _before_cudnn(kernel: Any) -> Callable[..., Outputs]:
    def attend(
        keys: torch._C.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Outputs:
        found = None
        if not return_debug_mask:
            name = "cudnn_with_lse" if compute_log_sumexp else "cudnn"
            found = _tuned(name, query, key, value, attn_bias, dropout_p, is_causal, scale)
        if found is None:
            options = attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
            outputs: Outputs = kernel.call_boxed(keys, query, key, value, *options, scale=scale)
            return outputs
        out, lse = found
        lse = None if lse is None else lse.unsqueeze(-1)
        lengths = query.shape[2], key.shape[2]
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        return out, lse, None, None, *lengths, seed, offset, None

    return attend


def _tuned(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """A tuned kernel's output and log-sum-exp, or None, counted by its reason.

    The operator's name is one of `dispatch.OPERATIONS`; only "cudnn" wants no log-sum-exp.
    """
    if native.thread.is_native:  # counted where the call came from
        return None
    arguments = query, key, value, attn_bias, dropout_p, is_causal, scale, True
    if name == "cudnn" and attn_bias is None and not dropout_p:
        name = "attention"  # the very call of `tuner.attention`
        known = dispatch.attention(*arguments)
        if known is not None:
            is_refused = known is dispatch.REFUSED
            return None if is_refused else (guards.laid_out_as(query, known), None)
    elif dispatch.refuses(name, *arguments):
        return None
    found: tuple[torch.Tensor, torch.Tensor | None] | Refusal
    generation = table.refresh(query)
    if attn_bias is not None:
        found = Refusal(Kind.MASK)
    elif dropout_p:
        found = Refusal(Kind.DROPOUT)
    elif name == "flash" and is_causal and query.shape[2] != key.shape[2]:
        found = Refusal(Kind.BOTTOM_RIGHT, "tuned kernels align it top-left")
    else:
        found = _run(query, key, value, is_causal, scale, wants_lse=name != "attention")
    if isinstance(found, Refusal):
        dispatch.refuse(name, arguments, found, generation)
        return None
    out, lse = found
    return guards.laid_out_as(query, out), lse


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | Refusal:
    plan = find_plan(query, key, value, is_causal, scale)
    if isinstance(plan, Refusal):
        return plan
    if not wants_lse:
        out = table.run(plan, query, key, value)
        return out if isinstance(out, Refusal) else (out, None)
    if plan.has_lse:
        return table.run_with_lse(plan, query, key, value)
    return Refusal(Kind.LSE, f"{plan.config.family} does not write it")


class _Switch:
    """On while `enable` is in force or a `with enabled()` is open, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_enabled = False
        self._open = 0
        self._previous: str | None = None

    def set(self, is_enabled: bool | None = None, opened: int = 0) -> None:
        with self._lock:
            before = self._is_enabled, self._open
            if is_enabled is not None:
                self._is_enabled = is_enabled
            self._open += opened
            try:
                self._apply()
            except BaseException:
                self._is_enabled, self._open = before
                raise

    def _apply(self) -> None:
        try:
            from torch.nn.attention import (
                activate_flash_attention_impl,
                current_flash_attention_impl,
                register_flash_attention_impl,
                restore_flash_attention_impl,
            )
        except ImportError as exc:
            raise TunerError(
                "tuner.enable needs the registry of attention providers of PyTorch 2.11 or newer; "
                f"this is {torch.__version__} (tuner.attention works here)"
            ) from exc
        current = current_flash_attention_impl()
        wanted = self._is_enabled or self._open > 0
        if wanted and current != PROVIDER:
            self._previous = current
            register_flash_attention_impl(PROVIDER, register_fn=_Handle)
            activate_flash_attention_impl(PROVIDER)
        elif not wanted and current == PROVIDER:
            if self._previous is None:
                restore_flash_attention_impl()
            else:
                activate_flash_attention_impl(self._previous)


_switch = _Switch()


def enable() -> None:
    """Put the tuned kernels behind `torch.nn.functional.scaled_dot_product_attention`.

    For the whole process, compiled models too. A call is answered by a tuned kernel where PyTorch
    would have chosen its flash or cuDNN kernel; all others, and those without a tuned kernel, are
    PyTorch's exactly as before (`tuner.stats` counts the latter). Switch while no other thread is
    inside attention. Enabling twice is enabling once; a process started with ``spawn`` starts
    without.

    Raises:
        TunerError: when this PyTorch has no registry of attention providers.
    """
    _switch.set(is_enabled=True)


def disable() -> None:
    """Undo `enable`: the dispatcher, and a provider that was active before, are as they were.

    Inside a ``with tuner.enabled()`` the tuned kernels stay until it ends.
    """
    _switch.set(is_enabled=False)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` for a while: ``with tuner.enabled(): model(...)``.

    Nests, also across threads: the tuned kernels are there until the last one ends, and after it
    if `enable` is in force.
    """
    _switch.set(opened=1)
    try:
        yield
    finally:
        _switch.set(opened=-1)
