"""Subjects of timing: an own config with its artifacts loaded, or a vendor's kernel.

`CompiledSubject` launches artifacts and is captured into a CUDA graph by cuda-python;
`VendorSubject` calls PyTorch and is captured by it. Both read the same buffers.
"""

from __future__ import annotations

import copy
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tuner.compile.artifacts import LoadedKernel
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import LSE, Family, Launch, Ref, Strides
from tuner.families.vendor import PreparedCall
from tuner.measure.device import CapturedGraph, Device
from tuner.measurement import Status
from tuner.problem import Operand, Problem

WORKSPACE = "workspace"
"""Name of the kernels' workspaces among the buffers of a call."""
_ALIGN = 256

Call = Callable[[], Any]


class Bound:
    """One call on fixed buffers, enqueued when it is called.

    Args:
        call: enqueues it.
        first: device address of its first operand as the kernel reads it.
    """

    def __init__(self, call: Call, first: int) -> None:
        self._call, self.first = call, first

    def __call__(self) -> Any:
        return self._call()


class Subject(ABC):
    """Something that computes a problem and can be timed."""

    scratch_bytes = 0
    """Its own temporary buffers: the family's scratch."""
    workspace_bytes = 0
    """Its kernels' workspaces together."""
    temporary_bytes = 0
    """Memory that a call allocates beside its output, seen when it was checked."""

    @abstractmethod
    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        """One call on fixed buffers, enqueued on the device's stream.

        Args:
            buffers: device address of each operand, of `SCRATCH` and of `WORKSPACE`.
            scale: see `Family.launches`.
            deliver: the output has to arrive in the operand's buffer (for a check); without it
                a vendor's kernel leaves it where it made it.
        """

    @abstractmethod
    def capture(self, calls: Iterable[Call]) -> Any:
        """Capture calls into a graph that has `replay()`."""

    @abstractmethod
    def stream(self) -> int:
        """The stream that a call would now be enqueued on."""

    def close(self) -> None:
        """Give back what timing it took."""
        return


class CompiledSubject(Subject):
    """A config of an own family, its artifacts loaded."""

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
        """Raises: BenchmarkError: when the family takes no such strides."""
        if not self._strides:
            return self._family.launches(self._problem, self._config, scale)
        found = self._family.strided_launches(self._problem, self._config, scale, self._strides)
        if isinstance(found, str):
            raise BenchmarkError(found)
        return found

    def parts(self) -> dict[str, CompiledSubject]:
        """Each kernel's launches as a subject of their own, in the order of the kernels. Timed on
        the buffers of the whole, which has to have run before.
        """
        found = {}
        for name in self._kernels:
            found[name] = copy.copy(self)
            found[name]._only = name
        return found

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
    """Address of a launch's tensor; null for a log-sum-exp that is not wanted."""
    if ref.operand == LSE and LSE not in buffers:
        return 0
    return buffers[ref.operand] + ref.offset_bytes


class CudaArray:
    """Device memory in the form that `torch.as_tensor` takes without copying."""

    def __init__(self, pointer: int, operand: Operand) -> None:
        # Integers of the right width: the interface has no bfloat16. Viewed as the real type.
        width = operand.bytes // operand.elements
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": operand.shape,
            "strides": tuple(stride * width for stride in operand.strides),
            "typestr": f"<i{width}",
            "version": 2,
        }


class VendorSubject(Subject):
    """A vendor's kernel through PyTorch, on our buffers and our stream."""

    def __init__(self, device: Device, family: Family, problem: Problem, config: Config) -> None:
        """Imports torch, and makes the device's stream its current one.

        A vendor that wants another layout than the problem's (`Family.handed_over`) gets copies
        of the inputs, made when a call is bound and no part of it. Then it also prepares itself
        for their contents (`PreparedCall`).

        Raises:
            BenchmarkError: with status UNAVAILABLE where there is no torch; `bind` raises it
                where the vendor cannot serve the problem.
        """
        self._device, self._family, self._problem, self._config = device, family, problem, config
        self._wanted = family.handed_over(problem, config)
        self._torch = import_torch(device)
        self._callables: dict[float, Callable[..., Any]] = {}

    def _callable(self, scale: float) -> Callable[..., Any]:
        if scale not in self._callables:
            made = self._family.vendor_call(self._wanted, self._config, scale)
            if isinstance(made, str):
                raise BenchmarkError(made, status=Status.UNAVAILABLE)
            self._callables[scale] = made
        return self._callables[scale]

    def _tensor(self, pointer: int, operand: Operand) -> Any:
        array = CudaArray(pointer, operand)
        tensor = self._torch.as_tensor(array, device=f"cuda:{self._device.index}")
        return tensor.view(getattr(self._torch, operand.dtype))

    def _input(self, pointer: int, here: Operand, wanted: Operand) -> Any:
        """An input as the vendor wants it: the buffer itself, or a copy with other strides."""
        tensor = self._tensor(pointer, here)
        if here.strides == wanted.strides:
            return tensor
        empty = self._torch.empty_strided
        made = empty(wanted.shape, wanted.strides, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Bound:
        function = self._callable(scale)
        inputs = [
            self._input(buffers[one.name], one, other)
            for one, other in zip(self._problem.inputs, self._wanted.inputs, strict=True)
        ]
        if isinstance(function, PreparedCall):
            function = function.prepared(*inputs)
        outputs = [self._tensor(buffers[one.name], one) for one in self._problem.outputs]
        size = sum(one.bytes for one in self._problem.outputs)
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
            came, wanted = ([tuple(t.shape) for t in ts] for ts in (results, outputs))
            if came != wanted:
                raise BenchmarkError(
                    f"{self._family.name} returned shapes {came}, wanted {wanted}",
                    status=Status.WRONG_RESULT,
                )
            for output, one in zip(outputs, results, strict=True):
                output.copy_(one)

        return Bound(call_and_deliver if deliver else call, inputs[0].data_ptr())

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def _requested(self, which: str) -> int:
        """Bytes that were asked of torch's allocator, now or at the peak."""
        return int(self._torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])

    def capture(self, calls: Iterable[Call]) -> Any:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        # Outputs of different sets stay alive side by side, as own kernels' do: writing one
        # buffer again and again would leave it in L2.
        outputs: dict[Call, Any] = {}
        with torch.cuda.graph(graph):
            for call in calls:
                outputs[call] = call()
        return graph

    def close(self) -> None:
        self._callables.clear()
        self._torch.cuda.empty_cache()


def import_torch(device: Device) -> Any:
    """PyTorch on the device's stream.

    Raises:
        BenchmarkError: with status UNAVAILABLE where it is not installed or sees no GPU.
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
