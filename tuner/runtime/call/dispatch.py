"""Python side of the C++ dispatcher (`templates/dispatcher`).

Without a loaded dispatcher every call goes through Python, and `stand_in` answers those that were
refused before. The first plan or refusal starts a thread that loads it, after compiling it if the
cache has none. No call waits for that thread. `load_built` loads a dispatcher that is built.

Results of `attention`, `linear` and `matmul`:

- a tensor: a tuned kernel's output, or PyTorch's for a kind of call that was refused before;
- `REFUSED`: such a refused call, which Python must pass to PyTorch;
- None: Python decides.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import torch

from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.loading import verify
from tuner.errors import TunerError
from tuner.runtime.call import counters, devices, stand_in
from tuner.runtime.call.lengths import Lengths, block, constant
from tuner.runtime.call.plan import KernelPlan
from tuner.runtime.call.refusal import Refusal

_log = logging.getLogger("tuner.runtime")

OPERATIONS = ("attention", "linear", "matmul", "flash", "cudnn_with_lse")
"""Operations in the order of the dispatcher's enum `Operation`. The last two are backends of
PyTorch's attention that return the log-sum-exp."""
_EXACT, _PORTFOLIO = 0, 1
"""The dispatcher's enum `Source`: plans of decisions, and plans that a portfolio selected."""
REFUSED = stand_in.REFUSED
_PRODUCTS = "linear", "matmul"


attention: Callable[..., torch.Tensor | Literal[False] | None] = stand_in.attention
linear: Callable[..., torch.Tensor | Literal[False] | None] = stand_in.linear
matmul: Callable[..., torch.Tensor | Literal[False] | None] = stand_in.matmul

_module: Any = None
_kinds: list[str] = []
"""Kinds of refusals, in the order in which the dispatcher counts them."""
_thread: threading.Thread | None = None
_waiting: list[Callable[[], None]] = []
"""Functions to call once it is loaded."""
_lock = threading.Lock()


START_AFTER_S = 0.2
"""Time for the first call to end, which would share the interpreter with the thread."""
_UNLOADABLE = (TunerError, ImportError, OSError, AttributeError)
"""Errors after which calls go through Python."""


def prepare(then: Callable[[], None]) -> threading.Thread:
    """Load the dispatcher in the background, building it if needed; done once.

    Args:
        then: called once it is loaded; equal functions count once.

    Returns:
        The thread; join it to wait.
    """
    global _thread
    with _lock:
        if then not in _waiting:
            _waiting.append(then)
        if _thread is None:
            _thread = threading.Thread(target=_prepare, name="tuner-dispatcher", daemon=True)
            _thread.start()
        return _thread


def load_built(then: Callable[[], None]) -> bool:
    """Load a dispatcher that is built already; true when one is loaded.

    Args:
        then: called if this call loaded it.
    """
    if _module is not None:
        return True
    try:
        from tuner.compile import dispatcher

        library = dispatcher.find(ArtifactCache())
        if library is None:
            return False
        use(load(library))
    except _UNLOADABLE as exc:
        _log.info("no dispatcher, calls go through Python: %s", exc)
        return False
    then()
    return True


def _prepare() -> None:
    time.sleep(START_AFTER_S)
    if _module is not None:
        return
    # A first call needs none of these.
    from tuner.base.processes import ProcessPool
    from tuner.compile import dispatcher, single

    processes = ProcessPool(single.TIMEOUT_S)
    atexit.register(processes.kill)
    try:
        cache = ArtifactCache()
        library = dispatcher.find(cache) or dispatcher.build(cache, processes)
        use(load(library))
    except _UNLOADABLE as exc:
        _log.warning(
            "no dispatcher, calls go through Python, and tuner.enable overrides nothing: %s", exc
        )
        return
    finally:
        atexit.unregister(processes.kill)
    for then in list(_waiting):
        then()


def load(artifact: Artifact) -> ModuleType:
    """The extension module of an artifact, ready for `devices.TYPE`.

    Raises:
        BenchmarkError: when the library file has changed since it was built.
        ImportError: when it cannot be loaded.
    """
    verify(artifact)
    from tuner.compile import dispatcher

    loader = importlib.machinery.ExtensionFileLoader(dispatcher.MODULE, str(artifact.library))
    spec = importlib.util.spec_from_loader(dispatcher.MODULE, loader)
    if spec is None:
        raise ImportError(f"{artifact.library} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    functions = devices.stream_function(), devices.bind_function()
    module.start(devices.TYPE, *(ctypes.cast(each, ctypes.c_void_p).value for each in functions))
    return module


def is_loaded() -> bool:
    """True when a dispatcher answers calls."""
    return _module is not None


def is_preparing() -> bool:
    """True once `prepare` was called in this process."""
    return _thread is not None


def use(module: Any) -> None:
    """Answer calls by this extension module from now on; None: through Python."""
    global _module, attention, linear, matmul
    _module, functions = module, module or stand_in
    attention, linear, matmul = (getattr(functions, name) for name in OPERATIONS[:3])


def put(
    operation: str,
    arguments: tuple[Any, ...],
    plan: KernelPlan,
    lengths: Lengths | None = None,
    generation: int = -1,
) -> None:
    """Answer calls like this one with a plan.

    Args:
        operation: one of `OPERATIONS`.
        arguments: the call's arguments. Attention and its backends have query, key, value,
            attn_mask, dropout_p, is_causal, scale and enable_gqa. Linear has input, weight, bias
            and activation, matmul its two tensors.
        plan: launches for these calls.
        lengths: launches at other lengths of a growing cache.
        generation: value of `generation` before the plan was looked up; needed unless the table's
            lock is held.
    """
    if _module is None:
        return
    steps, first, last = constant(plan), 0, 0
    if lengths is not None:
        steps, first, last = lengths.steps, lengths.first, lengths.last
    source = _PORTFOLIO if plan.by_portfolio else _EXACT
    row = (plan.shape, plan.strides, plan.workspace_bytes, source, steps)
    _module.put(OPERATIONS.index(operation), arguments, row, first, last, generation)


def generation() -> int:
    """Changes with each `clear`; for `refuse`."""
    return stand_in.generation if _module is None else int(_module.generation())


def refuse(operation: str, arguments: tuple[Any, ...], refusal: Refusal, generation: int) -> None:
    """Count a refused call, and pass equal calls to PyTorch at once while the reason holds.

    Args:
        operation: one of `OPERATIONS`.
        arguments: as for `put`.
        refusal: the reason. Over a growing cache it holds for its `lengths`; without them, for all
            lengths of the `block`.
        generation: value of `generation` before the look-up, so that a `clear` since then is
            noticed.
    """
    counters.count_fallback(refusal.reason)
    if _module is None:
        stand_in.refuse(operation, arguments, refusal, generation)
        return
    if refusal.until <= time.monotonic():
        return
    kind = counters.kind_of(refusal.reason)
    with _lock:
        if kind not in _kinds:
            _kinds.append(kind)
    lengths = 0, 0
    if operation not in _PRODUCTS and arguments[1].dim() == 4:
        lengths = refusal.lengths or block(arguments[1].shape[2])
    which = OPERATIONS.index(operation), arguments, _kinds.index(kind), refusal.until
    _module.refuse(*which, *lengths, generation)


def override(ask: Callable[..., Any]) -> Callable[[bool], bool]:
    """Override PyTorch's attention by the dispatcher (`tuner.runtime.enable`).

    Args:
        ask: answers a kind of call that the dispatcher does not know. Called with the index in
            `OPERATIONS` and the arguments as for `put`. Returns the output and the log-sum-exp
            (or None), or None when PyTorch answers.

    Returns:
        A function that switches this thread's attention to PyTorch's or back, and returns the
        former state.

    Raises:
        TunerError: when no dispatcher is loaded, or this PyTorch has no such overrides.
    """
    if _module is None or not _module.install_overrides(ask):
        raise TunerError("the dispatcher cannot override PyTorch's attention here")
    exchange: Callable[[bool], bool] = _module.exchange_native
    return exchange


def remove_overrides() -> None:
    """Restore PyTorch's attention."""
    if _module is not None:
        _module.remove_overrides()


def clear() -> None:
    """Forget every plan and every refusal."""
    stand_in.forget()
    if _module is not None:
        _module.clear()


def serve_until(end: float, with_plans: bool = True) -> None:
    """Answer calls up to this time (`time.monotonic`, seconds); without plans only refused ones."""
    stand_in.hold_until(end)
    if _module is not None:
        _module.serve_until(end if with_plans else 0.0, end)


def _take_counts(reset: bool) -> tuple[int, int, Mapping[str, int]]:
    """Hits, the portfolio's share of them, and refused calls by kind of reason."""
    if _module is None:
        return 0, 0, {}
    exact, selected, refused = _module.take_counts(reset)
    return (
        exact + selected,
        selected,
        {kind: n for kind, n in zip(_kinds, refused, strict=False) if n},
    )


counters.add_source(_take_counts)


def _after_fork() -> None:
    """A child process has no threads of its parent: an unfinished load starts again."""
    global _lock, _thread
    _lock = threading.Lock()
    if _module is None:
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
