"""The C++ dispatcher (`templates/dispatcher.cpp`) behind three functions.

Until it is loaded, and where it cannot be, they know nothing and every call goes through Python.
It is loaded by a thread that the first plan starts; where the cache has none, that thread compiles
it. No call waits for it.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tuner import dispatcher
from tuner.artifacts import Artifact, ArtifactCache
from tuner.errors import TunerError
from tuner.processes import ProcessPool
from tuner.runtime import counters, devices
from tuner.runtime.plan import KernelPlan

_log = logging.getLogger("tuner.runtime")

OPERATIONS = ("attention", "linear", "matmul")
"""In the order of the dispatcher's `Operation`."""


def _unknown(*arguments: Any) -> torch.Tensor | None:
    """The answer of a dispatcher that knows nothing."""
    return None


attention: Callable[..., torch.Tensor | None] = _unknown
linear: Callable[..., torch.Tensor | None] = _unknown
matmul: Callable[..., torch.Tensor | None] = _unknown

_module: Any = None
_thread: threading.Thread | None = None
_lock = threading.Lock()


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


def _prepare(then: Callable[[], None]) -> None:
    processes = ProcessPool(dispatcher.TIMEOUT_S)
    atexit.register(processes.kill)
    try:
        cache = ArtifactCache()
        found = dispatcher.find(cache) or dispatcher.build(cache, processes)
        use(load(found))
    except (TunerError, ImportError, OSError, AttributeError) as exc:
        _log.info("no dispatcher, calls go through Python: %s", exc)
        return
    finally:
        atexit.unregister(processes.kill)
    then()


def load(artifact: Artifact) -> ModuleType:
    """The extension module of an artifact, ready for `devices.TYPE`."""
    loader = importlib.machinery.ExtensionFileLoader(dispatcher.MODULE, str(artifact.library))
    spec = importlib.util.spec_from_loader(dispatcher.MODULE, loader)
    if spec is None:
        raise ImportError(f"{artifact.library} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    functions = devices.stream_function(), devices.bind_function()
    module.start(devices.TYPE, *(ctypes.cast(each, ctypes.c_void_p).value for each in functions))
    return module


def use(module: Any) -> None:
    """Have calls answered by this module from now on; None for none."""
    global _module, attention, linear, matmul
    _module = module
    attention, linear, matmul = (getattr(module, name, _unknown) for name in OPERATIONS)


def put(operation: str, arguments: tuple[Any, ...], plan: KernelPlan) -> None:
    """Have calls like this one answered with a plan.

    Args:
        operation: one of `OPERATIONS`.
        arguments: attention's query, key, value, is_causal, scale and enable_gqa; linear's input,
            weight, bias and activation; the two tensors of matmul.
        plan: what serves them.
    """
    if _module is None:
        return
    steps = [
        (step.kernel.address, step.tensors, step.integers, step.scalars, step.workspace_at)
        for step in plan.steps
    ]
    made = (plan.shape, plan.strides, plan.workspace_bytes, plan.is_nearest, steps)
    _module.put(OPERATIONS.index(operation), arguments, made)


def clear() -> None:
    """Forget every plan."""
    if _module is not None:
        _module.clear()


def serve_until(time: float) -> None:
    """Answer calls up to this time (`time.monotonic`)."""
    if _module is not None:
        _module.serve_until(time)


def _take_counts(reset: bool) -> tuple[int, int]:
    """Hits, and those of them that were nearest ones."""
    hits, nearest = _module.take_counts(reset) if _module is not None else (0, 0)
    return hits, nearest


counters.add_source(_take_counts)


def _after_fork() -> None:
    """A child has none of its parent's threads: what that had not loaded is prepared anew."""
    global _lock, _thread
    _lock = threading.Lock()
    if _module is None:
        _thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
