"""The only module that calls torch's CUDA functions; tests on CPU tensors replace them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tuner.families.peers import installed, installed_versions
from tuner.hardware import GPUS, Gpu, bandwidth_gbs
from tuner.measurement import Environment

TYPE = "cuda"
"""Device type whose tensors are served."""

is_autocast: Callable[[], bool] = torch.is_autocast_enabled
"""True while autocast casts tensors of `TYPE`; with a name it takes three times as long to say."""

_SPIN_CLOCKS, _SPACING_CLOCKS = 400_000, 80_000
"""GPU clocks, about 200 us, in which the host enqueues the first calls; about 40 us for a call."""
_gpus: dict[int, Gpu] = {}


_RATES = (13, 36, 37, 38)
"""CUdevice_attribute of clock and memory's clock (kHz), width of its bus (bits) and L2 (bytes)."""


def gpu_of(index: int) -> Gpu:
    """The store's identity of a CUDA device, with its description's rates. A part without a
    description has those that its driver reports.
    """
    if index not in _gpus:
        facts = torch.cuda.get_device_properties(index)
        name, capability = facts.name, f"{facts.major}.{facts.minor}"
        gpu = Gpu(name, capability, facts.multi_processor_count, 0, 0.0, 0)
        shipped = (spec for spec in GPUS.values() if spec.identity == gpu.identity)
        _gpus[index] = next(shipped, None) or _reported(gpu, index)
    return _gpus[index]


def is_present() -> bool:
    """True when there is a device; creates no context, so that the process may fork afterwards."""
    return bool(torch.cuda.device_count() > 0)


def _reported(gpu: Gpu, index: int) -> Gpu:
    """A GPU with the rates that the driver reports; torch built for CUDA 13 does not."""
    try:
        clock_khz, memory_khz, bus_bits, l2_bytes = _attributes(index, _RATES)
    except (AttributeError, OSError):
        return gpu
    memory_gbs = bandwidth_gbs(memory_khz, bus_bits)
    return replace(gpu, clock_max_mhz=clock_khz // 1000, memory_gbs=memory_gbs, l2_bytes=l2_bytes)


def _attributes(index: int, numbers: tuple[int, ...]) -> list[int]:
    """Values of CUdevice_attribute; 0 where the driver does not say one."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, values = ctypes.c_int(), []
    driver.cuDeviceGet(ctypes.byref(device), index)
    for number in numbers:
        value = ctypes.c_int()
        is_said = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0
        values.append(value.value if is_said else 0)
    return values


def stream_of(index: int) -> int:
    """The CUstream handle of the current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def stream_function() -> Any:
    """C function of `stream_of`: ``int stream(int32_t device, void** handle)``, from torch's stable
    interface.
    """
    return _torch_cuda().aoti_torch_get_current_cuda_stream


def bind_function() -> Any:
    """C function ``int bind(int device)`` that makes a device's primary context the thread's.

    It is cudaSetDevice of the CUDA runtime that torch is linked to. Torch's own function skips that
    call for the device that is set already.
    """
    return _torch_cuda().cudaSetDevice


def _torch_cuda() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))


class _Thread(threading.local):
    is_bound = False


_thread = _Thread()


def bind(index: int) -> None:
    """Give this thread a current CUDA context, once, before it launches a kernel on a device.

    A thread without earlier CUDA calls has no context, and the allocator's cached memory creates
    none. Launch functions need one to encode TMA descriptors.
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
    """Context in which a device is the current one."""
    context: contextlib.AbstractContextManager[Any] = torch.cuda.device(index)
    return context


_sides: dict[int, Any] = {}
"""Streams of `beside`, by device."""


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Enqueue on a side stream: behind the current stream's work so far, beside its later work.
    Off CUDA the block runs as it is.
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


def ranks() -> int:
    """Number of ranks of this distributed program; 1 without a process group."""
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def is_repeatable() -> bool:
    """True where PyTorch is told to compute the same bits in every run."""
    return bool(torch.are_deterministic_algorithms_enabled())


def call_us(function: Callable[[], object], count: int, *, is_cold: bool) -> float:
    """Mean GPU time of a call of `function`, microseconds: each behind an ordinary kernel, as in a
    model.

    That kernel takes longer than the host needs for a call. It reads twice the L2 cache, or spins.

    Args:
        function: enqueues a call on the current stream.
        count: calls.
        is_cold: True if the calls find none of their inputs in L2, as a model's weights. They are
            warm where memory for that is lacking.
    """
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    before = _evicting() if is_cold else partial(torch.cuda._sleep, _SPACING_CLOCKS)
    torch.cuda._sleep(_SPIN_CLOCKS)
    for start, end in events:
        before()
        start.record()
        function()
        end.record()
    events[-1][1].synchronize()
    return sum(float(start.elapsed_time(end)) for start, end in events) * 1e3 / count


def _evicting() -> Callable[[], object]:
    """A function that enqueues reads of twice the L2 cache's bytes, or spins without memory for
    them.
    """
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    try:
        other = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        total = torch.empty((), dtype=torch.int64, device="cuda")
    except torch.OutOfMemoryError:
        return partial(torch.cuda._sleep, _SPACING_CLOCKS)
    return lambda: torch.sum(other, 0, out=total)


@cache
def environment() -> Environment:
    """Environment of measured times, read without a GPU: driver, torch, cuDNN, cuBLAS, peers."""
    facts: dict[str, str | int | float] = dict(installed_versions())
    facts |= installed.versions(installed.PEERS)
    with contextlib.suppress(OSError):
        facts["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return Environment(facts)
