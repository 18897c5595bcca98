"""Time one candidate, or many interleaved, under a regime.

A `Subject` is anything that can be timed: `CompiledSubject` launches artifacts and is captured
into a CUDA graph by cuda-python; `VendorSubject` calls PyTorch and is captured by it. Both read
the same buffers. A `Burst` is n calls of one subject, enqueued at once; times are of bursts.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.compile.artifacts import LoadedKernel
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import LSE, Family, Ref
from tuner.hardware import Gpu
from tuner.measure import device as device_room
from tuner.measure.device import Device, Graph, Pool
from tuner.measure.round_order import Rota
from tuner.measurement import Clocks, Regime, Status
from tuner.problem import Operand, Problem

#: A burst lasts about this long: the gap between a graph's launch and its first kernel (several
#: microseconds) then stays under 2 %, and events (0.5 us) far below.
BURST_US = 400.0
#: Calls a burst, warm; and, cold, the most sets of buffers that are rotated over.
MOST_CALLS = 200
MOST_SETS = 1024
#: Clocks ramp from idle (345 MHz on an H200) within this time.
WARM_UP_US = 20_000.0
QUICK_REPLAYS = 7
#: A call of this length is not run again only to learn its time.
SLOW_US = 50_000.0
#: Rotated buffers hold this many times the L2, so that a call finds none of its own.
COLD_L2S = 3
#: A round times each subject's burst this often, after one that is not timed.
REPLAYS_A_ROUND = 3
#: What deviates by this part of its median or more over the rounds is timed again, then flagged.
MOST_DEVIATION = 0.02
WORKSPACE = "workspace"
"""Name of the kernels' workspaces among the buffers of a call."""
_ALIGN = 256

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over `rounds` repetitions."""

    median_us: float
    std_us: float
    rounds: int
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        spread = statistics.stdev(samples) if len(samples) > 1 else 0.0
        return cls(statistics.median(samples), spread, len(samples))

    @property
    def is_noisy(self) -> bool:
        return self.std_us >= MOST_DEVIATION * self.median_us


class Subject(ABC):
    """Something that computes a problem and can be timed."""

    scratch_bytes = 0
    """Its own temporary buffers: the family's scratch."""
    workspace_bytes = 0
    """Its kernels' workspaces together."""
    temporary_bytes = 0
    """What a call allocates by itself beside its output, seen when it was checked."""

    @abstractmethod
    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Call:
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
    ) -> None:
        self._device, self._family, self._problem = device, family, problem
        self._config, self._kernels = config, kernels
        self._only = ""
        self._offsets: list[int] = []
        for launch in family.launches(problem, config, scale):
            self._offsets.append(self.workspace_bytes)
            needed = kernels[launch.kernel].workspace_bytes(launch.integers)
            self.workspace_bytes += math.ceil(needed / _ALIGN) * _ALIGN
        self.scratch_bytes = family.scratch_bytes(problem, config)
        if not self._offsets:
            raise BenchmarkError(f"{family.name} launches nothing for {config.digest}")

    def parts(self) -> dict[str, CompiledSubject]:
        """Each kernel's launches as a subject of their own, in the order of the kernels. Timed on
        the buffers of the whole, which has to have run before.
        """
        found = {}
        for name in self._kernels:
            found[name] = copy.copy(self)
            found[name]._only = name
        return found

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Call:
        launches = self._family.launches(self._problem, self._config, scale)
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

        return call if lanes == 1 else call_on_lanes

    def capture(self, calls: Iterable[Call]) -> Graph:
        def work() -> None:
            for call in calls:
                call()

        return self._device.capture(work)


def _address(buffers: Mapping[str, int], ref: Ref) -> int:
    """Where a launch finds a tensor; null for the log-sum-exp where nobody wants it."""
    if ref.operand == LSE and LSE not in buffers:
        return 0
    return buffers[ref.operand] + ref.offset_bytes


class _CudaArray:
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
        of the inputs, made when a call is bound and no part of it.

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
        array = _CudaArray(pointer, operand)
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

    def bind(self, buffers: Mapping[str, int], scale: float, *, deliver: bool = False) -> Call:
        function = self._callable(scale)
        *here, last = self._problem.operands
        *wanted, _ = self._wanted.operands
        inputs = [
            self._input(buffers[one.name], one, other)
            for one, other in zip(here, wanted, strict=True)
        ]
        output = self._tensor(buffers[last.name], last)
        torch = self._torch

        def call() -> Any:
            with torch.no_grad():
                return function(*inputs)

        def call_and_deliver() -> None:
            torch.cuda.reset_peak_memory_stats()
            before = self._requested("current")
            result = call()
            used = self._requested("peak") - before - last.bytes
            self.temporary_bytes = max(self.temporary_bytes, used)
            if tuple(result.shape) != tuple(output.shape):
                raise BenchmarkError(
                    f"{self._family.name} returned shape {tuple(result.shape)}, "
                    f"wanted {tuple(output.shape)}",
                    status=Status.WRONG_RESULT,
                )
            output.copy_(result)

        return call_and_deliver if deliver else call

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


class Burst:
    """n calls of one subject, enqueued together: a graph's replay, or one by one when eager."""

    def __init__(self, subject: Subject, calls: Sequence[Call], n: int, launch: str) -> None:
        self.n = n
        self._calls = [calls[i % len(calls)] for i in range(n)]
        self._graph = subject.capture(self._calls) if launch == "graph" else None

    def enqueue(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for call in self._calls:
            call()

    def close(self) -> None:
        if isinstance(self._graph, Graph):
            self._graph.close()
        self._graph = None
        self._calls = []


def count_sets(problem: Problem, gpu: Gpu, regime: Regime, free_bytes: int) -> int:
    """Sets of operands to rotate over: one when warm, `COLD_L2S` times the L2 when cold.

    Limited by half of the free memory and by `MOST_SETS`.
    """
    if regime.l2 == "warm":
        return 1
    wanted = math.ceil(COLD_L2S * gpu.l2_bytes / problem.bytes)
    return max(1, min(wanted, MOST_SETS, 1 + free_bytes // 2 // problem.bytes))


def count_calls(estimate_us: float, sets: int) -> int:
    """Calls a burst: `BURST_US` long, at least 2, and every set equally often."""
    n = min(MOST_CALLS, max(2, math.ceil(BURST_US / max(estimate_us, 0.1))))
    return math.ceil(n / sets) * sets


class Sets:
    """Operands that calls are rotated over; the first is the gate's own."""

    def __init__(
        self, device: Device, problem: Problem, first: Mapping[str, int], count: int
    ) -> None:
        """Copies the inputs of `first` into `count - 1` further sets."""
        self._pool = Pool(device)
        self.buffers: list[dict[str, int]] = [dict(first)]
        try:
            for _ in range(count - 1):
                new = {o.name: self._pool.allocate(o.bytes) for o in problem.operands}
                for operand in problem.operands[:-1]:
                    device.copy(new[operand.name], first[operand.name], operand.bytes)
                self.buffers.append(new)
            device.wait()
        except BenchmarkError:
            self.close()
            raise

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True)
class Entrant:
    """A subject ready to be timed: what to call, one call a set of buffers."""

    subject: Subject
    calls: Sequence[Call]


def entrant(subject: Subject, sets: Sets, own: Mapping[str, int], scale: float) -> Entrant:
    """Bind a subject to every set; `own` holds its scratch and workspace."""
    calls = [subject.bind({**buffers, **own}, scale) for buffers in sets.buffers]
    return Entrant(subject, calls)


class Stopwatch:
    """Times bursts on one device."""

    def __init__(self, device: Device, regime: Regime) -> None:
        self._device, self._regime = device, regime
        self._events: list[Any] = []

    def prepare(self, entrant: Entrant) -> Burst:
        """Estimate a call's time, capture a burst of fitting length, and warm it up."""
        three = [entrant.calls[0]] * 3
        estimate = self._time(lambda: _all(three)) / 3
        if estimate < SLOW_US:  # the first calls may have loaded modules or chosen algorithms
            estimate = self._time(lambda: _all(three)) / 3
        n = count_calls(estimate, len(entrant.calls))
        burst = Burst(entrant.subject, entrant.calls, n, self._regime.launch)
        try:
            spent = 0.0
            while spent < WARM_UP_US:
                spent += max(self._time(burst.enqueue), 1.0)
        except BenchmarkError:
            with contextlib.suppress(BenchmarkError):  # of a device that is lost
                burst.close()
            raise
        return burst

    def quick(self, burst: Burst) -> tuple[Timing, Clocks]:
        """`QUICK_REPLAYS` bursts, one after the other, after one that is not timed."""
        events = self._take(QUICK_REPLAYS + 1)
        self._series(burst, events)
        clocks = device_room.read_clocks(self._device.index)
        return Timing.of(self._differences(events, burst.n)), clocks

    def final(
        self,
        bursts: Sequence[Burst],
        rounds: int,
        progress: Callable[[int], None],
        *,
        careful: bool,
    ) -> tuple[list[Timing], Clocks]:
        """Interleave all bursts over at least `rounds` accepted rounds, in the orders of `Rota`.

        Rounds under a thermal or hardware slowdown are taken again, as many as asked for at most;
        beyond that they stay and everything is flagged ``throttled``. When any deviation is
        `MOST_DEVIATION` or more, all is timed once more with twice the rounds; what still is gets
        the flag ``noisy``.

        Args:
            bursts: prepared bursts, own kernels and vendors'.
            rounds: accepted rounds wanted.
            progress: called with a burst's index before it is enqueued, -1 once a round.
            careful: wait for each burst, so that the one that hangs is known.
        """
        rota = self._rota(bursts, progress, careful)
        timings, clocks, throttled = self._rounds(bursts, rota, rounds, progress, careful)
        if any(timing.is_noisy for timing in timings):
            timings, clocks, throttled = self._rounds(bursts, rota, 2 * rounds, progress, careful)
        flagged = []
        for timing in timings:
            flags = (
                *(("noisy",) if timing.is_noisy else ()),
                *(("throttled",) if throttled else ()),
            )
            flagged.append(replace(timing, flags=flags))
        return flagged, clocks

    def _rota(
        self, bursts: Sequence[Burst], progress: Callable[[int], None], careful: bool
    ) -> Rota:
        times = []
        for index, burst in enumerate(bursts):
            if careful:
                progress(index)
            times.append(self._time(burst.enqueue))
        return Rota(times, [burst.n for burst in bursts], REPLAYS_A_ROUND + 1)

    def _rounds(
        self,
        bursts: Sequence[Burst],
        rota: Rota,
        rounds: int,
        progress: Callable[[int], None],
        careful: bool,
    ) -> tuple[list[Timing], Clocks, bool]:
        samples: list[list[float]] = [[] for _ in bursts]
        seen: list[Clocks] = []
        spare, throttled = rounds, False
        while len(seen) < rounds:
            progress(-1)
            times, clocks = self._round(bursts, rota, progress, careful)
            if device_room.SLOWDOWNS.intersection(clocks.throttle):
                if spare > 0:
                    spare -= 1
                    continue
                throttled = True
            seen.append(clocks)
            for series, time in zip(samples, times, strict=True):
                series.append(time)
        return [Timing.of(series) for series in samples], summarize(seen), throttled

    def _round(
        self, bursts: Sequence[Burst], rota: Rota, progress: Callable[[int], None], careful: bool
    ) -> tuple[list[float], Clocks]:
        """One burst after the other."""
        taken = self._take(len(bursts) * (REPLAYS_A_ROUND + 1))
        events = [taken[i :: len(bursts)] for i in range(len(bursts))]
        order = next(rota.orders)
        untimed = rota.settling(order[0])
        for index in order:
            if careful:
                progress(index)
            for _ in range(untimed):
                bursts[index].enqueue()
            untimed = 0
            self._series(bursts[index], events[index])
            if careful:
                self._device.wait()
        # Read while the GPU works: an idle one reports idle clocks.
        clocks = device_room.read_clocks(self._device.index)
        self._device.wait()
        times = [
            statistics.median(self._differences(mine, burst.n))
            for mine, burst in zip(events, bursts, strict=True)
        ]
        return times, clocks

    def _series(self, burst: Burst, events: Sequence[Any]) -> None:
        """Enqueue one burst untimed, then one between each event and the next."""
        burst.enqueue()
        self._device.record(events[0])
        for event in events[1:]:
            burst.enqueue()
            self._device.record(event)

    def close(self) -> None:
        while self._events:
            self._device.destroy_event(self._events.pop())

    def _time(self, work: Call) -> float:
        start, end = self._take(2)
        self._device.record(start)
        work()
        self._device.record(end)
        return self._device.elapsed_us(start, end)

    def _take(self, count: int) -> list[Any]:
        while len(self._events) < count:
            self._events.append(self._device.event())
        return self._events[:count]

    def _differences(self, events: Sequence[Any], n: int) -> list[float]:
        self._device.wait()
        return [
            self._device.elapsed_us(start, end) / n for start, end in itertools.pairwise(events)
        ]


def _all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


def summarize(seen: Sequence[Clocks]) -> Clocks:
    """Medians over rounds, the highest temperature, and every throttle reason."""
    if not seen:
        return Clocks()
    return Clocks(
        sm_mhz=round(statistics.median(c.sm_mhz for c in seen)),
        memory_mhz=round(statistics.median(c.memory_mhz for c in seen)),
        temperature_c=max(c.temperature_c for c in seen),
        power_w=round(statistics.median(c.power_w for c in seen), 1),
        throttle=tuple(sorted({reason for c in seen for reason in c.throttle})),
    )
