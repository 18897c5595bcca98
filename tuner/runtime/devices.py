"""The seam to torch's accelerator: everything that a test on CPU tensors swaps is here."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tuner.families.vendor import installed_versions
from tuner.hardware import GPUS, Gpu
from tuner.measurement import Environment

TYPE = "cuda"
"""Device type whose tensors are served."""

_SPIN_CLOCKS = 400_000
"""Clocks, some 200 us, in which the host enqueues a burst."""
_gpus: dict[int, Gpu] = {}


def gpu_of(index: int) -> Gpu:
    """The store's identity of a CUDA device; what lookup does not need of it is left at 0."""
    if index not in _gpus:
        found = torch.cuda.get_device_properties(index)
        gpu = Gpu(
            found.name, f"{found.major}.{found.minor}", found.multi_processor_count, 0, 0.0, 0
        )
        shipped = (known for known in GPUS.values() if known.identity == gpu.identity)
        _gpus[index] = next(shipped, gpu)
    return _gpus[index]


def stream_of(index: int) -> int:
    """The CUstream handle of the current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def stream_function() -> Any:
    """The same in C: ``int stream(int32_t device, void** handle)``, of torch's stable interface."""
    return _torch_cuda().aoti_torch_get_current_cuda_stream


def bind_function() -> Any:
    """``int bind(int device)`` makes a device's primary context the calling thread's: cudaSetDevice
    of the runtime that torch is linked to. Torch's own leaves it out for the device it finds set.
    """
    return _torch_cuda().cudaSetDevice


def _torch_cuda() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))


class _Thread(threading.local):
    is_bound = False


_thread = _Thread()


def bind(index: int) -> None:
    """Give this thread a current context, once, before it launches a kernel on a device.

    A thread that has called nothing of CUDA has none, and memory from the allocator's cache asks
    for none: launch functions, which encode TMA descriptors in it, would find none either.
    """
    if _thread.is_bound:
        return
    try:
        _thread.is_bound = bind_function()(index) == 0  # if not: the launch says why
    except (AttributeError, OSError):  # a torch that keeps its CUDA runtime to itself
        _thread.is_bound = True


def current() -> int:
    """Index of the current device."""
    return int(torch._C._cuda_getDevice())


def use(index: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one for a while."""
    context: contextlib.AbstractContextManager[Any] = torch.cuda.device(index)
    return context


_sides: dict[int, Any] = {}
"""Streams of `beside`, by device."""


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Enqueue on a stream that waits for what the current stream holds by now, and runs beside what
    it gets later. Off CUDA: at once.
    """
    if device.type != "cuda":
        yield
        return
    index = device.index
    if index not in _sides:
        _sides[index] = torch.cuda.Stream(device, priority=-1)
    _sides[index].wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(_sides[index]):
        yield


def is_capturing() -> bool:
    """True when the current stream records a CUDA graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def burst_us(function: Callable[[], object], count: int) -> float:
    """Microseconds of the current stream for `function` called so often in a row.

    The stream spins first, so that the host is ahead, and what the GPU does is what is timed.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SPIN_CLOCKS)
    start.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


@cache
def environment() -> Environment:
    """Environment of times, as far as it is known without asking the GPU: driver, torch, cuDNN,
    cuBLAS.
    """
    facts: dict[str, str | int | float] = dict(installed_versions())
    with contextlib.suppress(OSError):
        facts["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return Environment(facts)
