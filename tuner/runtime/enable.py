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

Nothing is overridden before the dispatcher is loaded: through Python a call would take longer than
PyTorch's. `enable` loads one that is built, or has it built in the background. The operators are
overridden once it is there, in the main thread. Without a C++ compiler they never are.

Under ``is_causal`` with unequal SQ and SKV the operators align the mask differently.
FlashAttention aligns it bottom-right (`torch.nn.attention.bias.causal_lower_right`): tuned kernels
take it for a window. The others align it top-left. `scaled_dot_product_attention` means top-left,
and passes no such call to FlashAttention.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from tuner.base import forks
from tuner.errors import TunerError
from tuner.families.peers.sdpa_backward import may_be_nan
from tuner.runtime.attention.attention_call import TOO_FEW_TILES, AttentionCall, find_plan
from tuner.runtime.attention.bias import as_operand, fills_the_gpu
from tuner.runtime.attention.composed import Attended, BackwardInputs, Extras
from tuner.runtime.call import (
    devices,
    dispatch,
    finite_gradients,
    guards,
    handed_over,
    invariance,
    native,
)
from tuner.runtime.call.plan import KernelPlan, Plan
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import answer
from tuner.runtime.call.table import table
from tuner.runtime.training import autograd
from tuner.runtime.training.gradients import gradients

Outputs = tuple[Any, ...]
"""Results of a backend's operator. After output and log-sum-exp come cumulative lengths of nested
tensors (empty), longest query and key, dropout's random state (two tensors), and a debug mask."""
Found = tuple[torch.Tensor, torch.Tensor | None]
"""Output and log-sum-exp."""
TAKE_UP_S = 10.0
"""Time in which the main thread is expected to reach its next instruction."""

#: Keys that a call goes on to from the overriding kernel.
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Overrides:
    """Registrations with torch's dispatcher, for the lifetime of this object. The C++ dispatcher
    must be loaded.
    """

    def __init__(self) -> None:
        self._of_gradients: Library | None = _override_gradients()
        native.exchange = dispatch.override(_ask)
        native.is_watched = True

    def remove(self) -> None:
        """Restore PyTorch's dispatcher."""
        native.is_watched = False
        native.exchange = native.exchange_here
        dispatch.remove_overrides()
        self._of_gradients = None


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
    ready = dispatch.attention(*arguments) if generation == dispatch.generation() else None
    if ready is not None:
        return None if ready is dispatch.REFUSED else (ready, None)
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
    answer: Found | Refusal
    if attn_mask is not None:
        answer = Refusal(Kind.MASK)
    elif dropout_p:
        answer = Refusal(Kind.DROPOUT)
    elif name == "flash" and is_causal and query.shape[2] != key.shape[2]:
        answer = _lower_right(query, key, value, scale)
    else:
        plan = find_plan(query, key, value, is_causal, scale)
        answer = _run(plan, query, key, value)
        if isinstance(plan, KernelPlan) and not isinstance(answer, Refusal):
            dispatch.put(name, arguments, plan, generation=generation)
    if isinstance(answer, Refusal):
        invariance.forbid(answer.reason)
        dispatch.refuse(name, arguments, answer, generation)
        return None
    return answer


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
        *options: Any,
        scale: float | None = None,
    ) -> Outputs:
        cum_seq_q, _, _, _, dropout_p, is_causal, _, _ = options
        grad_out, query, key, value, out = handed_over.checked(grad_out, query, key, value, out)
        tensors = grad_out, query, key, value, out, logsumexp
        call = Attended(query, key, value, is_causal, scale)
        recorded = BackwardInputs(out, logsumexp, grad_out)
        is_alike = not is_causal or query.shape[2] == key.shape[2]  # both align the mask alike
        is_plain = not dropout_p and cum_seq_q is None and is_alike
        return _differentiated(
            tensors,
            (lambda: _faster_gradients(call, recorded)) if is_plain else None,
            lambda: operator.redispatch(keys & _BELOW, *tensors, *options, scale=scale),
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
        *options: Any,
        scale: float | None = None,
    ) -> Outputs:
        cum_seq_q, _, _, _, dropout_p, is_causal = options
        grad_out, query, key, value, out = handed_over.checked(grad_out, query, key, value, out)
        tensors = grad_out, query, key, value, out
        if attn_bias is not None and handed_over.is_checked(*tensors):
            attn_bias = handed_over.aligned_mask(attn_bias)
        is_replaced = not dropout_p and cum_seq_q is None
        more = logsumexp, philox_seed, philox_offset, attn_bias, *options

        def faster() -> Outputs | None:
            lse = logsumexp.squeeze(-1)
            if attn_bias is None:
                call = Attended(query, key, value, is_causal, scale)
                return _faster_gradients(call, BackwardInputs(out, lse, grad_out), is_cudnn=True)
            if not may_be_nan(query.shape[2], key.shape[2]):
                return None
            masked = grad_out, query, key, value, attn_bias, out, lse, is_causal, scale
            grads = finite_gradients.masked_backward(*masked)
            return _laid_out((query, key, value), grads)

        return _differentiated(
            tensors,
            faster if is_replaced else None,
            lambda: operator.redispatch(keys & _BELOW, *tensors, *more, scale=scale),
        )

    return differentiate


def _differentiated(
    tensors: Outputs, faster: Callable[[], Outputs | None] | None, own: Callable[[], Outputs]
) -> Outputs:
    """Gradients by `faster`, or by the operator's own kernel where that has none or calls itself.

    Operators within either are PyTorch's. Of empty tensors gradients are zero.
    """
    if not all(tensor.numel() for tensor in tensors):
        return tuple(torch.zeros_like(tensor) for tensor in tensors[1:4])
    was_native = native.exchange(True)
    try:
        faster_out = None if was_native or faster is None else faster()
        return own() if faster_out is None else faster_out
    finally:
        native.exchange(was_native)


def _faster_gradients(
    call: Attended, recorded: BackwardInputs, is_cudnn: bool = False
) -> Outputs | None:
    """Gradients by another kernel than the operator's; None where that is to compute them.

    cuDNN's computes none that may be NaN.

    Args:
        call: the forward call.
        recorded: its results, and the output's gradient.
        is_cudnn: True for cuDNN's operator, False for FlashAttention-2's.
    """
    query, key, _ = tensors = call.query, call.key, call.value
    is_unsafe = is_cudnn and may_be_nan(query.shape[2], key.shape[2])
    if not (is_unsafe or autograd.has_much_work(query, key, call.is_causal, is_cudnn)):
        return None
    grads = gradients(call, recorded)
    is_replaced = is_unsafe or (not is_cudnn and grads is None and autograd.gains_by_cudnn(call))
    if grads is None and is_replaced:
        grads = autograd.backward(call, recorded)
    return None if grads is None else _laid_out(tensors, grads)


def _laid_out(tensors: Outputs, grads: Outputs) -> Outputs:
    """Gradients as the tensors lie."""
    pairs = zip(tensors, grads, strict=True)
    return tuple(guards.laid_out_as(tensor, grad) for tensor, grad in pairs)


class _Switch:
    """On while `enable` is in force or a `with enabled()` is open, in any thread."""

    _lock: threading.Lock

    def __init__(self) -> None:
        forks.add_lock(self)
        forks.in_child(self, _Switch._forget_threads)
        self._is_enabled = False
        self._open: Counter[int] = Counter()
        """Open blocks by thread."""
        self._overrides: _Overrides | None = None

    @property
    def _is_wanted(self) -> bool:
        return self._is_enabled or self._open.total() > 0

    def set(self, is_enabled: bool | None = None, opened: int = 0) -> None:
        with self._lock:
            before = self._is_enabled, self._open.copy()
            if is_enabled is not None:
                self._is_enabled = is_enabled
            self._open[threading.get_ident()] += opened
            self._open = Counter({thread: count for thread, count in self._open.items() if count})
            try:
                self._prepare()
                self._apply()
            except BaseException:
                self._is_enabled, self._open = before
                raise
        self.take_up()

    def _prepare(self) -> None:
        """Load the dispatcher, or have it built in the background."""
        if not self._is_wanted or self._overrides is not None:
            return
        if not hasattr(torch.library, "get_kernel"):
            raise TunerError(
                f"tuner.enable needs PyTorch 2.11 or newer; this is {torch.__version__} "
                "(tuner.attention works here)"
            )
        if dispatch.is_loaded():
            return
        if not dispatch.is_preparing():
            if not devices.is_present() or dispatch.load_built(then=table.renew):
                return
        dispatch.prepare(then=_take_up)

    def take_up(self) -> None:
        """Override the operators if the dispatcher was loaded meanwhile."""
        while self._is_wanted and self._overrides is None and dispatch.is_loaded():
            if not self._lock.acquire(blocking=False):
                return  # its holder comes here when it is done
            try:
                self._apply()
            finally:
                self._lock.release()

    def _apply(self) -> None:
        if not self._is_wanted and self._overrides is not None:
            self._overrides.remove()
            self._overrides = None
        elif self._is_wanted and self._overrides is None and dispatch.is_loaded():
            self._overrides = _Overrides()

    def _forget_threads(self) -> None:
        """Close the blocks of threads that a forked child does not have."""
        here = threading.get_ident()
        self._open = Counter({here: self._open[here]})


def _take_up() -> None:
    """Override the operators in the main thread, between two instructions of Python: so it is not
    inside attention. If it waits for something else, they are overridden here.
    """
    table.renew()
    _is_taken_up.clear()
    _add_pending_call(_IN_THE_MAIN_THREAD, None)
    if not _is_taken_up.wait(TAKE_UP_S):
        _switch.take_up()


def _take_up_here(_: object) -> int:
    _switch.take_up()
    _is_taken_up.set()
    return 0


_is_taken_up = threading.Event()
_IN_THE_MAIN_THREAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_take_up_here)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_switch = _Switch()


def enable() -> None:
    """Serve `torch.nn.functional.scaled_dot_product_attention` with tuned kernels.

    Holds for the whole process, compiled models included. A tuned kernel answers if there is one
    and the program allows a fused backend. PyTorch answers all other calls as before, and
    `tuner.stats` counts them. Switch only while no other thread is inside attention. A second call
    changes nothing. A process started with ``spawn`` begins without tuned kernels.

    The C++ dispatcher answers the calls. The first `enable` of a machine has it built in the
    background, which takes about a minute. Until then, and without a C++ compiler, PyTorch answers.

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
