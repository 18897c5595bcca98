"""The C++ dispatcher (`templates/dispatcher`) behind a few functions.

Until it is loaded, and where it cannot be, they know nothing and every call goes through Python.
It is loaded by a thread that the first plan or refusal starts; where the cache has none, that
thread compiles it. No call waits for it. `load_built` loads one that is built already.

`attention`, `linear` and `matmul` return a tuned kernel's output, PyTorch's where equal calls were
refused before (or `REFUSED` where PyTorch must be called from Python), and None where Python
decides.
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
from typing import Any, Final, Literal

import torch

from tuner.base.processes import ProcessPool
from tuner.compile import dispatcher
from tuner.compile.artifacts import Artifact, ArtifactCache, verify
from tuner.errors import TunerError
from tuner.runtime import counters, devices
from tuner.runtime.lengths import Lengths, block, constant
from tuner.runtime.plan import KernelPlan
from tuner.runtime.refusal import Refusal

_log = logging.getLogger("tuner.runtime")

OPERATIONS = ("attention", "linear", "matmul", "flash", "cudnn_with_lse")
"""In the order of the dispatcher's `Operation`; the last two are backends of PyTorch's attention
that return the log-sum-exp."""
_EXACT, _PORTFOLIO = 0, 1
"""The dispatcher's `Source`: plans of decisions, and those that a portfolio selected."""
REFUSED: Final = False
"""The answer to a call that is PyTorch's, which was counted."""
_PRODUCTS = "linear", "matmul"


def _unknown(*arguments: Any) -> None:
    """The answer of a dispatcher that knows nothing."""


attention: Callable[..., torch.Tensor | Literal[False] | None] = _unknown
linear: Callable[..., torch.Tensor | Literal[False] | None] = _unknown
matmul: Callable[..., torch.Tensor | Literal[False] | None] = _unknown

_module: Any = None
_kinds: list[str] = []
"""Kinds of refusals, in the order in which the dispatcher counts them."""
_thread: threading.Thread | None = None
_lock = threading.Lock()


_UNLOADABLE = (TunerError, ImportError, OSError, AttributeError)
"""Errors after which calls go through Python."""


def prepare(then: Callable[[], None]) -> threading.Thread:
    """Have the dispatcher loaded, or built and loaded, in the background; the first call counts.

    Args:
        then: called when it is there.

    Returns:
        The thread, to be joined by who wants to wait.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(
                target=_prepare, args=(then,), name="tuner-dispatcher", daemon=True
            )
            _thread.start()
        return _thread


def load_built(then: Callable[[], None]) -> bool:
    """Load the dispatcher now, where it is built already; true where it is loaded.

    Args:
        then: called when it was loaded here.
    """
    if _module is not None:
        return True
    try:
        found = dispatcher.find(ArtifactCache())
        if found is None:
            return False
        use(load(found))
    except _UNLOADABLE as exc:
        _log.info("no dispatcher, calls go through Python: %s", exc)
        return False
    then()
    return True


def _prepare(then: Callable[[], None]) -> None:
    if _module is not None:
        return
    processes = ProcessPool(dispatcher.TIMEOUT_S)
    atexit.register(processes.kill)
    try:
        cache = ArtifactCache()
        found = dispatcher.find(cache) or dispatcher.build(cache, processes)
        use(load(found))
    except _UNLOADABLE as exc:
        _log.info("no dispatcher, calls go through Python: %s", exc)
        return
    finally:
        atexit.unregister(processes.kill)
    then()


def load(artifact: Artifact) -> ModuleType:
    """The extension module of an artifact, ready for `devices.TYPE`.

    Raises:
        BenchmarkError: when the library is not the artifact's any more.
        ImportError: when it cannot be loaded.
    """
    verify(artifact)
    loader = importlib.machinery.ExtensionFileLoader(dispatcher.MODULE, str(artifact.library))
    spec = importlib.util.spec_from_loader(dispatcher.MODULE, loader)
    if spec is None:
        raise ImportError(f"{artifact.library} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    functions = devices.stream_function(), devices.bind_function()
    module.start(devices.TYPE, *(ctypes.cast(each, ctypes.c_void_p).value for each in functions))
    return module


def is_loaded() -> bool:
    """True when calls are answered by a dispatcher."""
    return _module is not None


def use(module: Any) -> None:
    """Have calls answered by this module from now on; None for none."""
    global _module, attention, linear, matmul
    _module = module
    attention, linear, matmul = (getattr(module, name, _unknown) for name in OPERATIONS[:3])


def put(
    operation: str,
    arguments: tuple[Any, ...],
    plan: KernelPlan,
    lengths: Lengths | None = None,
    generation: int = -1,
) -> None:
    """Have calls like this one answered with a plan.

    Args:
        operation: one of `OPERATIONS`.
        arguments: attention's query, key, value, attn_mask, dropout_p, is_causal, scale and
            enable_gqa, for the backends too; linear's input, weight, bias and activation; the two
            tensors of matmul.
        plan: what serves them.
        lengths: of a cache of keys, those of other calls that it serves.
        generation: from before the plan was looked for, where the table's lock is not held.
    """
    if _module is None:
        return
    steps, first, last = constant(plan), 0, 0
    if lengths is not None:
        steps, first, last = lengths.steps, lengths.first, lengths.last
    source = _PORTFOLIO if plan.by_portfolio else _EXACT
    made = (plan.shape, plan.strides, plan.workspace_bytes, source, steps)
    _module.put(OPERATIONS.index(operation), arguments, made, first, last, generation)


def generation() -> int:
    """Changes with each `clear`; for `refuse`."""
    return 0 if _module is None else int(_module.generation())


def refuse(operation: str, arguments: tuple[Any, ...], refusal: Refusal, generation: int) -> None:
    """Count a call that is PyTorch's, and have equal calls refused at once while the reason holds.

    Args:
        operation: one of `OPERATIONS`.
        arguments: as of `put`.
        refusal: why. Over a cache of keys it holds for its `lengths`; where it names none, the
            reason lies in the tensors, and holds for the whole `block`.
        generation: from before the reason was looked for: what was cleared since is not known.
    """
    counters.count_fallback(refusal.reason)
    if _module is None or refusal.until <= time.monotonic():
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


def override(ask: Callable[..., Any]) -> Callable[[bool], bool] | None:
    """Override PyTorch's attention by the dispatcher (`tuner.runtime.enable`).

    Args:
        ask: gives the output and the log-sum-exp or None of a call that the dispatcher does not
            know, or None where the call is PyTorch's; called with the position in `OPERATIONS` and
            the arguments as of `put`.

    Returns:
        A function that sets whether this thread's attention stays PyTorch's and returns what it
        was; None where the dispatcher is not loaded, or this PyTorch has no such overrides.
    """
    if _module is None or not _module.install_overrides(ask):
        return None
    exchange: Callable[[bool], bool] = _module.exchange_native
    return exchange


def remove_overrides() -> None:
    """Leave PyTorch's attention as it was."""
    if _module is not None:
        _module.remove_overrides()


def clear() -> None:
    """Forget every plan and every refusal."""
    if _module is not None:
        _module.clear()


def serve_until(end: float, with_plans: bool = True) -> None:
    """Answer calls up to this time (`time.monotonic`); without plans, those that are refused."""
    if _module is not None:
        _module.serve_until(end if with_plans else 0.0, end)


def _take_counts(reset: bool) -> tuple[int, int, Mapping[str, int]]:
    """Hits, a portfolio's among them, and refused calls by kind of reason."""
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
    """A child has none of its parent's threads: what that had not loaded is prepared anew."""
    global _lock, _thread
    _lock = threading.Lock()
    if _module is None:
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
