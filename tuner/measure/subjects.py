"""Subjects of timing: configs of own families with loaded artifacts, and vendors' kernels.

`CompiledSubject` launches artifacts, and cuda-python captures it into a CUDA graph. `VendorSubject`
calls PyTorch, which also captures it. Both read the same buffers.
"""

from __future__ import annotations

import copy
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tuner.compile.loading import LoadedKernel
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import LSE, Family, Launch, Ref, Strides
from tuner.families.peers import PreparedCall
from tuner.measure.device import CapturedGraph, Device
from tuner.measurement import Status
from tuner.problem import Operand, Problem

WORKSPACE = "workspace"
"""Name of the kernels' workspace among a call's buffers."""
_ALIGN = 256

Call = Callable[[], Any]


class Bound:
    """Call on fixed buffers.

    Args:
        call: function that enqueues the call.
        first: device address of the first operand that the kernel reads.
    """

    def __init__(self, call: Call, first: int) -> None:
        self._call, self.first = call, first

    def __call__(self) -> Any:
        return self._call()


class Subject(ABC):
    """Implementation of a problem that can be timed."""

    scratch_bytes = 0
    """Bytes of its own temporary buffers, the family's scratch."""
    workspace_bytes = 0
    """Bytes of its kernels' workspaces together."""
    temporary_bytes = 0
    """Bytes that a call allocates beside its output, observed during its check."""

    @abstractmethod
    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        """Bind one call to fixed buffers, to be enqueued on the device's stream.

        Args:
            buffers: device address of each operand, of `SCRATCH` and of `WORKSPACE`.
            scale: see `Family.launches`.
            deliver: True if the output must arrive in the operand's buffer, as for a check. If
                False, a vendor's kernel leaves it in its own memory.
        """

    @abstractmethod
    def capture(self, calls: Iterable[Call]) -> Any:
        """Capture calls into a graph with a method `replay`."""

    @abstractmethod
    def stream(self) -> int:
        """Stream on which a call would now be enqueued."""

    def close(self) -> None:
        """Release the resources of timing."""
        return


class CompiledSubject(Subject):
    """Config of an own family, with loaded artifacts."""

    def __init__(
        self,
        device: Device,
        family: Family,
        problem: Problem,
        config: Config,
        kernels: Mapping[str, LoadedKernel],
        scale: float,
        strides: Strides | None = None,
    ) -> None:
        self._strides = strides or {}
        self._device, self._family, self._problem = device, family, problem
        self._config, self._kernels = config, kernels
        self._only = ""
        self._offsets: list[int] = []
        for launch in self._launches(scale):
            self._offsets.append(self.workspace_bytes)
            needed = kernels[launch.kernel].workspace_bytes(launch.integers)
            self.workspace_bytes += math.ceil(needed / _ALIGN) * _ALIGN
        self.scratch_bytes = family.scratch_bytes(problem, config)
        if not self._offsets:
            raise BenchmarkError(f"{family.name} launches nothing for {config.digest}")

    def _launches(self, scale: float) -> list[Launch]:
        """Raises: BenchmarkError: when the family does not support such strides."""
        if not self._strides:
            return self._family.launches(self._problem, self._config, scale)
        launches = self._family.strided_launches(self._problem, self._config, scale, self._strides)
        if isinstance(launches, str):
            raise BenchmarkError(launches)
        return launches

    def parts(self) -> dict[str, CompiledSubject]:
        """One subject for each kernel's launches, in the order of the kernels. They are timed on
        the buffers of the whole call, which must have run before.
        """
        parts = {}
        for name in self._kernels:
            parts[name] = copy.copy(self)
            parts[name]._only = name
        return parts

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        launches = self._launches(scale)
        device, lanes = self._device, 1 + max(launch.lane for launch in launches)
        prepared = [
            (
                launch.lane,
                self._kernels[launch.kernel],
                [_address(buffers, ref) for ref in launch.tensors],
                launch.integers,
                launch.scalars,
                buffers[WORKSPACE] + offset,
            )
            for launch, offset in zip(launches, self._offsets, strict=True)
            if self._only in ("", launch.kernel)
        ]

        def call() -> None:
            for _, kernel, tensors, integers, scalars, workspace in prepared:
                kernel.launch(tensors, integers, scalars, workspace, device.stream)

        def call_on_lanes() -> None:
            streams = device.fork(lanes)
            for lane, kernel, tensors, integers, scalars, workspace in prepared:
                kernel.launch(tensors, integers, scalars, workspace, streams[lane])
            device.join(lanes)

        first = buffers[self._problem.operands[0].name]
        return Bound(call if lanes == 1 else call_on_lanes, first)

    def stream(self) -> int:
        return self._device.stream

    def capture(self, calls: Iterable[Call]) -> CapturedGraph:
        def work() -> None:
            for call in calls:
                call()

        return self._device.capture(work)


def _address(buffers: Mapping[str, int], ref: Ref) -> int:
    """Address of a launch's tensor; null for a log-sum-exp that was not requested."""
    if ref.operand == LSE and LSE not in buffers:
        return 0
    return buffers[ref.operand] + ref.offset_bytes


class CudaArray:
    """Device memory in a form that `torch.as_tensor` takes without copying."""

    def __init__(self, pointer: int, operand: Operand) -> None:
        # Integers of the same width, viewed as the real type: the interface does not have bfloat16.
        width = operand.bytes // operand.elements
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": operand.shape,
            "strides": tuple(stride * width for stride in operand.strides),
            "typestr": f"<i{width}",
            "version": 2,
        }


class VendorSubject(Subject):
    """A vendor's kernel, called through PyTorch on the gate's buffers and stream."""

    def __init__(self, device: Device, family: Family, problem: Problem, config: Config) -> None:
        """Imports torch, and makes the device's stream its current one.

        A vendor that needs a different layout than the problem's (`Family.handed_over`) gets copies
        of the inputs. They are made when a call is bound, which is not timed. The vendor then also
        prepares itself for their contents (`PreparedCall`).

        Raises:
            BenchmarkError: with status UNAVAILABLE without torch. `bind` raises it if the vendor
                cannot serve the problem.
        """
        self._device, self._family, self._problem, self._config = device, family, problem, config
        self._wanted = family.handed_over(problem, config)
        self._torch = import_torch(device)
        self._callables: dict[float, Callable[..., Any]] = {}

    def _tensor(self, pointer: int, operand: Operand) -> Any:
        array = CudaArray(pointer, operand)
        tensor = self._torch.as_tensor(array, device=f"cuda:{self._device.index}")
        return tensor.view(getattr(self._torch, operand.dtype))

    def _input(self, pointer: int, here: Operand, operand: Operand) -> Any:
        """An input in the vendor's layout: the buffer itself, or a copy with other strides."""
        tensor = self._tensor(pointer, here)
        if here.strides == operand.strides:
            return tensor
        empty = self._torch.empty_strided
        copied = empty(operand.shape, operand.strides, dtype=tensor.dtype, device=tensor.device)
        return copied.copy_(tensor)

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        if scale not in self._callables:
            vendor_call = self._family.vendor_call(self._wanted, self._config, scale)
            if isinstance(vendor_call, str):
                raise BenchmarkError(vendor_call, status=Status.UNAVAILABLE)
            self._callables[scale] = vendor_call
        function = self._callables[scale]
        inputs = [
            self._input(buffers[here.name], here, other)
            for here, other in zip(self._problem.inputs, self._wanted.inputs, strict=True)
        ]
        if isinstance(function, PreparedCall):
            function = function.prepared(*inputs)
        outputs = [self._tensor(buffers[o.name], o) for o in self._problem.outputs]
        size = sum(o.bytes for o in self._problem.outputs)
        torch = self._torch

        def call() -> Any:
            with torch.no_grad():
                return function(*inputs)

        def call_and_deliver() -> None:
            torch.cuda.reset_peak_memory_stats()
            before = self._requested("current")
            result = call()
            used = self._requested("peak") - before - size
            self.temporary_bytes = max(self.temporary_bytes, used)
            results = result if isinstance(result, tuple) else (result,)
            came, shapes = ([tuple(t.shape) for t in ts] for ts in (results, outputs))
            if came != shapes:
                raise BenchmarkError(
                    f"{self._family.name} returned shapes {came}, wanted {shapes}",
                    status=Status.WRONG_RESULT,
                )
            for output, part in zip(outputs, results, strict=True):
                output.copy_(part)

        return Bound(call_and_deliver if deliver else call, inputs[0].data_ptr())

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def _requested(self, which: str) -> int:
        """Bytes requested from torch's allocator, now or at the peak."""
        return int(self._torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])

    def capture(self, calls: Iterable[Call]) -> Any:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        # Outputs of different sets stay alive side by side, as own kernels' do: a buffer that is
        # written repeatedly would stay in L2.
        outputs: dict[Call, Any] = {}
        with torch.cuda.graph(graph):
            for call in calls:
                outputs[call] = call()
        return graph

    def close(self) -> None:
        self._callables.clear()
        self._torch.cuda.empty_cache()


def import_torch(device: Device) -> Any:
    """Import PyTorch and make the device's stream its current one.

    Raises:
        BenchmarkError: with status UNAVAILABLE if it is not installed or sees no GPU.
    """
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as exc:
        raise BenchmarkError(
            f"PyTorch cannot be imported: {exc}", status=Status.UNAVAILABLE
        ) from exc
    if not torch.cuda.is_available():
        raise BenchmarkError("PyTorch sees no GPU", status=Status.UNAVAILABLE)
    torch.cuda.set_device(device.index)
    where = torch.device("cuda", device.index)
    torch.cuda.set_stream(torch.cuda.ExternalStream(device.stream, device=where))
    return torch
