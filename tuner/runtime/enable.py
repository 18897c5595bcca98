"""`enable`: tuned kernels behind PyTorch's own attention, without a change to the model.

The C++ dispatcher (`templates/dispatcher/operators.h`) overrides these operators.

| operator of `aten` | dispatch key | calls that reach it |
|---|---|---|
| `scaled_dot_product_attention` | CompositeImplicitAutograd | all, before a backend is chosen |
| `_scaled_dot_product_flash_attention` | BackendSelect | recorded by autograd; compiled graphs |
| `_scaled_dot_product_cudnn_attention` | BackendSelect | the same |
| `_scaled_dot_product_efficient_attention` | BackendSelect | compiled graphs, masked calls too |
| `_scaled_dot_product_flash_attention_backward` | BackendSelect | gradients of flash's outputs |
| `_scaled_dot_product_cudnn_attention_backward` | BackendSelect | gradients of cuDNN's outputs |

The first is the fast path: it saves PyTorch's choice of a backend. It is registered under
PyTorch's own dispatch key, so tables computed from that key stay valid. A kernel for CUDA or
AutogradCUDA would end the operator's decomposition. Tracing in inference mode would find such a
kernel, and put the whole operator into the graph.

The kernel serves plain tensors that want neither a gradient nor a tangent, where the program allows
a fused backend (`sdpa_kernel`). Everything else goes to PyTorch's function: fake tensors,
subclasses, nested tensors, functorch's transforms and modes.

A mask of booleans that is expanded over the keys hides whole queries. Transformers builds one
where it traces an encoder. PyTorch's fused kernels refuse its strides. Such a call is computed
without the mask, and hidden queries become zero, as by PyTorch's composite.

A call that wants a gradient passes through PyTorch's function to a backend's operator. Autograd
records it there with PyTorch's formula, and the overriding kernel returns output and log-sum-exp.
The switch may be on in one pass and off in the other: each backward kernel takes output and
log-sum-exp of any forward kernel.

BackendSelect is the last key before the backend's own, where PyTorch has no kernel for these
operators. The other calls go on to the kernel that the backend has at that time, unboxed.

The backward operators are overridden from Python, for gradients of much work. `gradients` computes
them where that is expected to be faster. In FlashAttention-2's place cuDNN's kernel also does.
At lengths where cuDNN's gradients may be NaN another kernel computes them at any size, masked ones
too. Gradients through dropout stay cuDNN's, whose random numbers no other kernel draws.

The dispatcher's table answers hits and refusals without Python and without the GIL. Python answers,
under the GIL, unknown kinds of calls, and looks at the store twice a second. A refused call passes
the other three operators uncounted. `disable` removes the registrations, and PyTorch's kernels are
active again.

Without a built dispatcher, Python overrides the flash and cuDNN operators at the same key. A
dispatcher built in the meantime takes over at the next `enable`.

Under ``is_causal`` with unequal SQ and SKV the operators align the mask differently.
FlashAttention aligns it bottom-right (`torch.nn.attention.bias.causal_lower_right`): tuned kernels
take it for a window. The others align it top-left. `scaled_dot_product_attention` means top-left,
and passes no such call to FlashAttention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from tuner.errors import TunerError
from tuner.families.vendor.sdpa_backward import may_be_nan
from tuner.runtime import autograd, devices, dispatch, finite_gradients, guards, native
from tuner.runtime.attention_plan import TOO_FEW_TILES, AttentionCall, find_plan
from tuner.runtime.bias import as_operand, fills_the_gpu
from tuner.runtime.composed import Extras
from tuner.runtime.gradients import gradients
from tuner.runtime.plan import KernelPlan, Plan
from tuner.runtime.refusal import Kind, Refusal
from tuner.runtime.serving import answer
from tuner.runtime.table import table

Outputs = tuple[Any, ...]
"""Results of a backend's operator. After output and log-sum-exp come cumulative lengths of nested
tensors (empty), longest query and key, dropout's random state (two tensors), and a debug mask."""
Found = tuple[torch.Tensor, torch.Tensor | None]
"""Output and log-sum-exp."""

#: Keys that a call goes on to from the overriding kernel.
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Overrides:
    """Registrations with torch's dispatcher, for the lifetime of this object."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._of_gradients: Library | None = _override_gradients()
        dispatch.load_built(then=table.renew)
        exchange = dispatch.override(_ask)
        if exchange is None:
            self._library = _override_from_python()
        native.exchange = exchange or native.exchange_here
        native.is_watched = True

    def remove(self) -> None:
        """Restore PyTorch's dispatcher."""
        native.is_watched = False
        native.exchange = native.exchange_here
        if self._library is None:
            dispatch.remove_overrides()
        self._library = self._of_gradients = None


def _ask(operation: int, *arguments: Any) -> Found | None:
    """A tuned kernel's outputs, or None and a counted reason; see `dispatch.override`."""
    return _answer(dispatch.OPERATIONS[operation], *arguments)


def _answer(name: str, *arguments: Any) -> Found | None:
    """As `_ask`, with the operation's name."""
    if name != "attention":
        return _with_lse(name, *arguments)
    generation = dispatch.generation()
    table.refresh(arguments[0])
    # After the look that was due the dispatcher knows what it knew before; not what was cleared.
    known = dispatch.attention(*arguments) if generation == dispatch.generation() else None
    if known is not None:
        return None if known is dispatch.REFUSED else (known, None)
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    operand = None if attn_mask is None else as_operand(attn_mask, query, key, is_causal)
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    out = answer(AttentionCall(query, key, value, *options, operand=operand))
    return None if out is None else (out, None)


def _with_lse(name: str, *arguments: Any) -> Found | None:
    """Outputs for a backend's operator that returns the log-sum-exp.

    Args:
        name: one of `dispatch.OPERATIONS`.
        arguments: as of attention.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = arguments
    generation = table.refresh(query)
    found: Found | Refusal
    if attn_mask is not None:
        found = Refusal(Kind.MASK)
    elif dropout_p:
        found = Refusal(Kind.DROPOUT)
    elif name == "flash" and is_causal and query.shape[2] != key.shape[2]:
        found = _lower_right(query, key, value, scale)
    else:
        plan = find_plan(query, key, value, is_causal, scale)
        found = _run(plan, query, key, value)
        if isinstance(plan, KernelPlan) and not isinstance(found, Refusal):
            dispatch.put(name, arguments, plan, generation=generation)
    if isinstance(found, Refusal):
        dispatch.refuse(name, arguments, found, generation)
        return None
    return found


def _run(plan: Plan | Refusal, *tensors: torch.Tensor) -> Found | Refusal:
    """Output and log-sum-exp by a plan, or the reason why there are none."""
    if isinstance(plan, Refusal):
        return plan
    if not plan.has_lse:
        return Refusal(Kind.LSE, f"{plan.config.family} does not write it")
    return table.run_with_lse(plan, *tensors)


def _lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> Found | Refusal:
    """As `_run`, under a causal mask that ends at the last query and the last key: a window."""
    if (offset := key.shape[2] - query.shape[2]) < 0:
        return Refusal(Kind.BOTTOM_RIGHT, "the first queries see no key")
    if not fills_the_gpu(query):
        return TOO_FEW_TILES
    plan = find_plan(query, key, value, False, scale, extras=Extras(right=offset))
    return _run(plan, query, key, value)


def _override_gradients() -> Library:
    """Override FlashAttention-2's and cuDNN's backward operators."""
    library = Library("aten", "IMPL")
    for name, before in (
        ("_scaled_dot_product_flash_attention_backward", _before_flash_backward),
        ("_scaled_dot_product_cudnn_attention_backward", _before_cudnn_backward),
    ):
        operator = getattr(torch.ops.aten, name).default
        library.impl(name, before(operator), "BackendSelect", with_keyset=True)
    return library


def _before_flash_backward(operator: Any) -> Callable[..., Outputs]:
    def differentiate(
        keys: torch._C.DispatchKeySet,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        *,
        scale: float | None = None,
    ) -> Outputs:
        tensors = grad_out, query, key, value, out, logsumexp
        is_alike = not is_causal or query.shape[2] == key.shape[2]  # both align the mask alike
        is_plain = not dropout_p and cum_seq_q is None and is_alike
        rest = cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset
        return _differentiated(
            (lambda: _faster_gradients(*tensors, is_causal, scale)) if is_plain else None,
            lambda: operator.redispatch(keys & _BELOW, *tensors, *rest, scale=scale),
        )

    return differentiate


def _before_cudnn_backward(operator: Any) -> Callable[..., Outputs]:
    def differentiate(
        keys: torch._C.DispatchKeySet,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        attn_bias: torch.Tensor | None,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> Outputs:
        tensors = grad_out, query, key, value, out
        is_replaced = not dropout_p and cum_seq_q is None
        masks = philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k
        rest = logsumexp, *masks, max_q, max_k, dropout_p, is_causal

        def faster() -> Outputs | None:
            lse = logsumexp.squeeze(-1)
            if attn_bias is None:
                return _faster_gradients(*tensors, lse, is_causal, scale, is_cudnn=True)
            if not may_be_nan(query.shape[2], key.shape[2]):
                return None
            masked = grad_out, query, key, value, attn_bias, out, lse, is_causal, scale
            grads = finite_gradients.masked_backward(*masked)
            return _laid_out((query, key, value), grads)

        return _differentiated(
            faster if is_replaced else None,
            lambda: operator.redispatch(keys & _BELOW, *tensors, *rest, scale=scale),
        )

    return differentiate


def _differentiated(
    faster: Callable[[], Outputs | None] | None, own: Callable[[], Outputs]
) -> Outputs:
    """Gradients by `faster`, or by the operator's own kernel where that has none or calls itself.

    Operators within either are PyTorch's.
    """
    was_native = native.exchange(True)
    try:
        found = None if was_native or faster is None else faster()
        return own() if found is None else found
    finally:
        native.exchange(was_native)


def _faster_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    is_cudnn: bool = False,
) -> Outputs | None:
    """Gradients by another kernel than the operator's; None where that is to compute them.

    cuDNN's computes none that may be NaN.

    Args:
        grad_out: (B, H, SQ, D), gradient of the output.
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        out: (B, H, SQ, D), attention's output.
        lse: its log-sum-exp, fp32 (B, H, SQ).
        is_causal: mask of the attention.
        scale: factor of the scores.
        is_cudnn: True for cuDNN's operator, False for FlashAttention-2's.
    """
    is_unsafe = is_cudnn and may_be_nan(query.shape[2], key.shape[2])
    if not (is_unsafe or autograd.has_much_work(query, key, is_causal, is_cudnn)):
        return None
    arguments = grad_out, query, key, value, out, lse, is_causal, scale
    grads = gradients(*arguments)
    if grads is None and not is_cudnn:
        if autograd.gains_by_cudnn(query, key, value, is_causal, scale):
            grads = autograd.backward(*arguments)
    if grads is None and is_unsafe:
        grads = autograd.backward(*arguments)
    return None if grads is None else _laid_out((query, key, value), grads)


def _laid_out(tensors: Outputs, grads: Outputs) -> Outputs:
    """Gradients as the tensors lie."""
    pairs = zip(tensors, grads, strict=True)
    return tuple(guards.laid_out_as(tensor, grad) for tensor, grad in pairs)


def _override_from_python() -> Library:
    """Override the backends that this PyTorch has kernels for."""
    library, key = Library("aten", "IMPL"), devices.TYPE.upper()
    for name, before in (
        ("_scaled_dot_product_flash_attention", _before_flash),
        ("_scaled_dot_product_cudnn_attention", _before_cudnn),
    ):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            operator = getattr(torch.ops.aten, name).default
            library.impl(name, before(operator), "BackendSelect", with_keyset=True)
    return library


def _before_flash(operator: Any) -> Callable[..., Outputs]:
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
            outputs: Outputs = operator.redispatch(keys & _BELOW, *arguments, scale=scale)
            return outputs
        random_state = query.new_empty(2, dtype=torch.uint64)
        offset = query.new_empty((), dtype=torch.uint64)
        lengths = query.shape[2], key.shape[2]
        return *found, None, None, *lengths, random_state, offset, query.new_empty(0)

    return attend


def _before_cudnn(operator: Any) -> Callable[..., Outputs]:
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
            name = "cudnn_with_lse" if compute_log_sumexp else "attention"
            found = _tuned(name, query, key, value, attn_bias, dropout_p, is_causal, scale)
        if found is None:
            options = attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
            arguments = query, key, value, *options
            outputs: Outputs = operator.redispatch(keys & _BELOW, *arguments, scale=scale)
            return outputs
        out, lse = found
        lse = None if lse is None else lse.unsqueeze(-1)
        lengths = query.shape[2], key.shape[2]
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        return out, lse, None, None, *lengths, seed, offset, None

    return attend


def _tuned(name: str, *arguments: Any) -> Found | None:
    """As `_ask`, for the operators that Python overrides, which take grouped heads."""
    if native.thread.is_native:  # the caller has counted the call
        return None
    with torch.no_grad():  # autograd records the operator
        found = _answer(name, *arguments, True)
    return found and (guards.laid_out_as(arguments[0], found[0]), found[1])


class _Switch:
    """On while `enable` is in force or a `with enabled()` is open, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_enabled = False
        self._open = 0
        self._overrides: _Overrides | None = None

    @property
    def is_on(self) -> bool:
        return self._overrides is not None

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
        is_wanted = self._is_enabled or self._open > 0
        if is_wanted and self._overrides is None:
            if not hasattr(torch.library, "get_kernel"):
                raise TunerError(
                    f"tuner.enable needs PyTorch 2.11 or newer; this is {torch.__version__} "
                    "(tuner.attention works here)"
                )
            self._overrides = _Overrides()
        elif not is_wanted and self._overrides is not None:
            self._overrides.remove()
            self._overrides = None


_switch = _Switch()


def enable() -> None:
    """Serve `torch.nn.functional.scaled_dot_product_attention` with tuned kernels.

    Holds for the whole process, compiled models included. A tuned kernel answers if there is one
    and the program allows a fused backend. PyTorch answers all other calls as before, and
    `tuner.stats` counts them. Switch only while no other thread is inside attention. A second call
    changes nothing. A process started with ``spawn`` begins without tuned kernels.

    Raises:
        TunerError: when this PyTorch is older than 2.11.
    """
    _switch.set(is_enabled=True)


def disable() -> None:
    """Undo `enable` and restore PyTorch's dispatcher.

    Inside a ``with tuner.enabled()`` the tuned kernels stay until that block ends.
    """
    _switch.set(is_enabled=False)


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` for a block: ``with tuner.enabled(): model(...)``.

    Blocks nest, also across threads. The tuned kernels stay until the last block ends, or longer if
    `enable` was called.
    """
    _switch.set(opened=1)
    try:
        yield
    finally:
        _switch.set(opened=-1)
