"""Access to the GPU through cuda-python: properties, state, memory, events and graphs.

All access uses ``cuda.bindings`` (driver API and NVML). It is imported on first use, so that this
module loads on any machine. `detect`, `environment`, `occupants` and `read_clocks` create no
context and take no GPU memory; `Device` does.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from tuner.base.install import install_command
from tuner.errors import BenchmarkError
from tuner.hardware import GPUS, MAX_MEMORY_GBS, Gpu, bandwidth_gbs
from tuner.measurement import Clocks, Environment, Status, status_of

#: NVML clock event reasons (nvml.h, nvmlClocksEventReason*). Idle does not affect a timing.
THROTTLE_REASONS: dict[int, str] = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
#: Reasons for which a timing round is repeated. The software power cap is normal for large GEMMs
#: and is only recorded.
SLOWDOWNS = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)

STAGING_BYTES = 16 << 20
"""Bytes of pinned memory for copies between host and device; more where one copy is larger."""


def throttle_names(mask: int) -> tuple[str, ...]:
    """Names of the clock event reasons in an NVML bit mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)


@cache
def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise BenchmarkError(
            f"cuda-python is needed to talk to the GPU ({exc}): {install_command('cuda-bindings')}",
            status=Status.UNAVAILABLE,
        ) from exc


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function. Returns its value, or the tuple of its values.

    Raises:
        BenchmarkError: with the status for the driver's error code.
    """
    error, *values = getattr(_driver(), name)(*arguments)
    if int(error) != 0:
        raise BenchmarkError(f"{name}: {_describe(error)}", status=status_of(int(error)))
    return values[0] if len(values) == 1 else tuple(values)


def _describe(error: Any) -> str:
    texts = []
    for query in ("cuGetErrorName", "cuGetErrorString"):
        failed, text = getattr(_driver(), query)(error)
        if int(failed) == 0 and text:
            texts.append(text.decode())
    return f"CUDA error {int(error)} ({': '.join(texts)})"


@cache
def _nvml() -> Any | None:
    """Initialised NVML binding; None if the library or the binding is missing."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    except Exception as exc:  # NvmlError derives from Exception alone
        if type(exc).__module__.startswith("cuda."):
            return None
        raise
    return nvml


def _ask(name: str, *arguments: Any, default: Any = None) -> Any:
    """One NVML value, or `default` if this driver or machine does not provide it."""
    nvml = _nvml()
    if nvml is None or not hasattr(nvml, name):
        return default
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NvmlError:
        return default


@cache
def _handle(index: int) -> Any | None:
    """NVML handle of CUDA device `index`, found by PCI address because the two libraries number
    devices differently.
    """
    return _ask("device_get_handle_by_pci_bus_id_v2", pci_address(index)) if _nvml() else None


def pci_address(index: int = 0) -> str:
    """PCI address of CUDA device `index`, by which tools of the driver take it also."""
    return _text(call("cuDeviceGetPCIBusId", 16, call("cuDeviceGet", index)))


def _text(value: Any) -> str:
    return value.decode().split("\0", 1)[0] if isinstance(value, bytes) else str(value)


def count() -> int:
    """Number of visible CUDA devices (CUDA_VISIBLE_DEVICES); 0 without a driver."""
    try:
        call("cuInit", 0)
        return int(call("cuDeviceGetCount"))
    except (BenchmarkError, RuntimeError, OSError):
        return 0


def detect(index: int = 0) -> Gpu | None:
    """Description of CUDA device `index`; None without a driver or without such a device."""
    try:
        call("cuInit", 0)
        if index >= call("cuDeviceGetCount"):
            return None
        device = call("cuDeviceGet", index)
    except (BenchmarkError, RuntimeError, OSError):
        return None
    attributes = _driver().CUdevice_attribute

    def attribute(name: str) -> int:
        return int(
            call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
        )

    name = _text(call("cuDeviceGetName", 128, device))
    shipped = next((gpu for gpu in GPUS.values() if gpu.name == name), None)
    # Used only for a GPU that is not in `hardware.GPUS`.
    bandwidth = bandwidth_gbs(attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH"))
    handle = _handle(index)
    clock = _ask("device_get_max_clock_info", handle, _clock("CLOCK_SM")) if handle else None
    return Gpu(
        name=name,
        compute_capability=(
            f"{attribute('COMPUTE_CAPABILITY_MAJOR')}.{attribute('COMPUTE_CAPABILITY_MINOR')}"
        ),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        clock_max_mhz=int(clock or attribute("CLOCK_RATE") // 1000),
        memory_gbs=shipped.memory_gbs if shipped else bandwidth or MAX_MEMORY_GBS,
        l2_bytes=attribute("L2_CACHE_SIZE"),
    )


def _clock(name: str) -> int:
    nvml = _nvml()
    return int(getattr(nvml.ClockType, name)) if nvml is not None else 0


def environment(index: int = 0) -> Environment:
    """Driver and CUDA versions, and the chip's clock and power limits.

    Raises:
        BenchmarkError: when there is no GPU.
    """
    call("cuInit", 0)
    version = int(call("cuDriverGetVersion"))
    facts: dict[str, str | int | float] = {"cuda": f"{version // 1000}.{version % 1000 // 10}"}
    driver = _ask("system_get_driver_version")
    if driver is not None:
        facts["driver"] = _text(driver)
    handle = _handle(index)
    if handle:
        clock = _ask("device_get_max_clock_info", handle, _clock("CLOCK_SM"))
        limit = _ask("device_get_enforced_power_limit", handle)
        if clock is not None:
            facts["clock_max_mhz"] = int(clock)
        if limit is not None:
            facts["power_limit_w"] = round(int(limit) / 1000)
    return Environment(facts)


def occupants(index: int = 0, own: frozenset[int] = frozenset()) -> list[str]:
    """Other processes with a compute context on the GPU, as ``pid 123 (name), 512 MiB``.

    Args:
        index: CUDA device.
        own: further process ids to leave out, besides this process.
    """
    call("cuInit", 0)
    handle = _handle(index)
    if not handle:
        return []
    texts = []
    for process in _ask("device_get_compute_running_processes_v3", handle, default=()):
        pid = int(process.pid)
        if pid == os.getpid() or pid in own:
            continue
        name = _text(_ask("system_get_process_name", pid, default="name not readable"))
        mebibytes = int(process.used_gpu_memory) >> 20
        # NVML reports all ones if the memory of a process is not known.
        used = f", {mebibytes} MiB" if mebibytes < 1 << 40 else ""
        texts.append(f"pid {pid} ({name}){used}")
    return texts


def read_clocks(index: int = 0) -> Clocks:
    """Current clocks, temperature, power and throttle reasons; zeros without NVML."""
    handle = _handle(index)
    if not handle:
        return Clocks()
    return Clocks(
        sm_mhz=int(_ask("device_get_clock_info", handle, _clock("CLOCK_SM"), default=0)),
        memory_mhz=int(_ask("device_get_clock_info", handle, _clock("CLOCK_MEM"), default=0)),
        temperature_c=int(_ask("device_get_temperature_v", handle, 0, default=0)),
        power_w=round(int(_ask("device_get_power_usage", handle, default=0)) / 1000, 1),
        throttle=throttle_names(
            int(_ask("device_get_current_clocks_event_reasons", handle, default=0))
        ),
    )


class CapturedGraph:
    """Captured CUDA graph, replayed on the stream that it was captured from."""

    def __init__(self, graph: Any, stream: int) -> None:
        self._graph, self._stream = graph, stream
        self._executable = call("cuGraphInstantiate", graph, 0)

    def replay(self) -> None:
        call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        call("cuGraphExecDestroy", self._executable)
        call("cuGraphDestroy", self._graph)


class Device:
    """The primary context of one GPU, current in this thread, with one non-blocking stream.

    The primary context is the one that the CUDA runtime inside the artifacts and PyTorch use.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        call("cuInit", 0)
        self._device = call("cuDeviceGet", index)
        self._context = call("cuDevicePrimaryCtxRetain", self._device)
        call("cuCtxSetCurrent", self._context)
        flags = _driver().CUstream_flags.CU_STREAM_NON_BLOCKING
        # The type is an int in one version of the bindings and an enum in others; all accept the
        # value.
        self._flags = int(flags)
        self.stream = int(call("cuStreamCreate", self._flags))
        self._lanes = [self.stream]
        self._marks: list[Any] = []
        self._pinned, self._pinned_bytes, self._staged_bytes = 0, 0, 0

    def synchronize(self) -> None:
        """Wait for all work of the context. Raises the error of any of it."""
        call("cuCtxSynchronize")

    def healthy(self) -> bool:
        """False after a sticky CUDA error, after which the process must be replaced."""
        try:
            self.synchronize()
        except BenchmarkError:
            return False
        return True

    def free_bytes(self) -> int:
        return int(call("cuMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        """Allocate device memory, 256-byte aligned. Raises `BenchmarkError` with status out of
        memory.
        """
        try:
            return int(call("cuMemAlloc", max(size, 1)))
        except BenchmarkError as exc:
            if exc.status != Status.OUT_OF_MEMORY:
                raise
            raise BenchmarkError(
                f"{size} bytes of GPU memory were wanted, {self.free_bytes()} are free",
                status=Status.OUT_OF_MEMORY,
            ) from exc

    def free(self, pointer: int) -> None:
        call("cuMemFree", pointer)

    def fill16(self, pointer: int, pattern: int, size: int) -> None:
        """Set `size` bytes (even) to a 16-bit pattern, on the stream."""
        if size:
            call("cuMemsetD16Async", pointer, pattern, size // 2, self.stream)

    def fill8(self, pointer: int, value: int, size: int) -> None:
        """Set `size` bytes, on the stream."""
        if size:
            call("cuMemsetD8Async", pointer, value, size, self.stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy on the device, on the stream."""
        call("cuMemcpyDtoDAsync", target, source, size, self.stream)

    def read(self, pointer: int, size: int) -> bytes:
        """Wait for the stream and copy to the host."""
        host = self._staging(size)
        call("cuMemcpyDtoHAsync", host, pointer, size, self.stream)
        self.wait()
        return ctypes.string_at(host, size)

    def write(self, pointer: int, data: bytes) -> None:
        """Wait for the stream and copy from the host."""
        self.wait()
        host = (ctypes.c_char * len(data)).from_buffer_copy(data)
        call("cuMemcpyHtoD", pointer, ctypes.addressof(host), len(data))

    def stage(self, data: bytes) -> int:
        """Address of a copy of `data` that kernels on the stream can read, until the next `wait`.

        A kernel that copies from there waits for no other process of the GPU. The driver's copies
        from the host do, since they run on an engine of their own.
        """
        host = self._staging(len(data))
        ctypes.memmove(host, data, len(data))
        return host

    def _staging(self, size: int) -> int:
        """Address of `size` bytes of pinned memory that nothing in flight uses. Waits for the
        stream if none is left.
        """
        if self._staged_bytes + size > self._pinned_bytes:
            self.wait()
        if size > self._pinned_bytes:
            if self._pinned:
                call("cuMemFreeHost", self._pinned)
            self._pinned_bytes = max(size, STAGING_BYTES)
            self._pinned = int(call("cuMemHostAlloc", self._pinned_bytes, 0))
        host = self._pinned + self._staged_bytes
        self._staged_bytes += -(-size // 16) * 16
        return host

    def wait(self) -> None:
        """Wait for the stream. Raises the error of its work."""
        call("cuStreamSynchronize", self.stream)
        self._staged_bytes = 0

    def fork(self, count: int) -> list[int]:
        """Fork the device's stream, the first of those returned: the others wait for its work.
        `join` makes it wait for theirs. Both may be captured.
        """
        no_timing = int(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        while len(self._lanes) < count:
            self._lanes.append(int(call("cuStreamCreate", self._flags)))
        while len(self._marks) < count:
            self._marks.append(call("cuEventCreate", no_timing))
        call("cuEventRecord", self._marks[0], self.stream)
        for lane in self._lanes[1:count]:
            call("cuStreamWaitEvent", lane, self._marks[0], 0)
        return self._lanes[:count]

    def join(self, count: int) -> None:
        """Make the device's stream wait for the streams of `fork`."""
        for lane, mark in zip(self._lanes[1:count], self._marks[1:count], strict=True):
            call("cuEventRecord", mark, lane)
            call("cuStreamWaitEvent", self.stream, mark, 0)

    def event(self) -> Any:
        return call("cuEventCreate", 0)

    def destroy_event(self, event: Any) -> None:
        call("cuEventDestroy", event)

    def record(self, event: Any) -> None:
        call("cuEventRecord", event, self.stream)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two recorded events. Waits for the second."""
        call("cuEventSynchronize", end)
        return float(call("cuEventElapsedTime", start, end)) * 1e3

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Capture what `work` launches on the stream into a graph.

        Raises:
            BenchmarkError: when `work` makes a call that is not allowed during capture.
        """
        mode = _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # The stream must leave capture mode; the partial graph is discarded.
            _driver().cuStreamEndCapture(self.stream)
            raise
        return CapturedGraph(call("cuStreamEndCapture", self.stream), self.stream)


class Memory(Protocol):
    """Source of allocations: a device, or a part of its memory."""

    def allocate(self, size: int) -> int: ...

    def free(self, pointer: int) -> None: ...


class Pool:
    """Device allocations that are freed together."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pointers: list[int] = []

    def allocate(self, size: int) -> int:
        pointer = self._memory.allocate(size)
        self._pointers.append(pointer)
        return pointer

    def close(self) -> None:
        """Free everything. A lost context has nothing left to free."""
        while self._pointers:
            pointer = self._pointers.pop()
            try:
                self._memory.free(pointer)
            except BenchmarkError:
                self._pointers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
