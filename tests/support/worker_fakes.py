"""A device, a gate and a stopwatch without a GPU, for the worker's own `main`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, GateError
from tuner.families.base import Family
from tuner.measure.bursts import Entrant
from tuner.measure.rounds import Timing
from tuner.measure.tolerance import Verdict
from tuner.measurement import Clocks, Status
from tuner.problem import GemmProblem

PROBLEM = GemmProblem(m=512, n=512, k=512)


KERNEL = Artifact("k" * 32, Path("/nowhere/kernel.so"), "0" * 64, None, 0.0)


class Toy(Family):
    name, op = "toy", "gemm"

    def conflicts(self, problem: Any, config: Any, gpu: Any) -> list[str]:
        return []

    def space(self, problem: Any, gpu: Any) -> list[Config]:
        return []

    def predict_us(self, problem: Any, config: Any, gpu: Any) -> float:
        return 1.0


class FakeDevice:
    index = 0
    stream = 0

    def __init__(self) -> None:
        self.sticky = False
        self.open: list[Any] = []

    def close(self, what: Any) -> None:
        """As CUDA does: a lost context lets go of nothing."""
        self.synchronize()
        self.open.remove(what)

    def synchronize(self) -> None:
        if self.sticky:
            raise BenchmarkError("CUDA error 700", status=Status.ILLEGAL_ACCESS)

    def healthy(self) -> bool:
        return not self.sticky

    def wait(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        return 1 << 20

    def free(self, pointer: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30


class FakeGate:
    verdicts: list[Verdict]
    opened: ClassVar[list[bool]] = []
    """True for each request that checks a sample only."""
    broken: tuple[int, ...] = ()
    is_lse_wrong = False
    is_sound = True

    def __init__(self, device: FakeDevice, kernel: Any) -> None:
        self.device = self.memory = device
        self.pointers = {"a": 1, "b": 2, "d": 3}
        self.examined = 0

    def open(self, problem: Any, seed: int, strides: Any, *, is_sampled: bool) -> None:
        FakeGate.opened.append(is_sampled)

    def load(self, kind: str, with_lse: bool = False) -> None:
        if self.device.sticky:
            raise BenchmarkError("launch of k: cudaError 700", status=Status.ILLEGAL_ACCESS)
        self.with_lse = with_lse

    def arm(self, extra: Any = ()) -> None:
        pass

    def examine(self, extra: Any = ()) -> Verdict:
        examination = self.watch(extra)
        self.collect()
        return self.judge(examination)

    def watch(self, extra: Any = (), lse: Any = None) -> Any:
        assert lse is None or (self.with_lse and lse.bytes == 4 * 16 * 64)
        return SimpleNamespace(is_sound=FakeGate.is_sound, lse=lse)

    def collect(self) -> None:
        self.device.synchronize()

    def judge(self, examination: Any) -> Verdict:
        self.examined += 1
        if self.examined in FakeGate.broken:
            raise GateError("the reference is not finite")
        verdict = FakeGate.verdicts.pop(0) if FakeGate.verdicts else Verdict(Status.OK, 1e-4)
        if verdict.status is Status.OK and examination.lse and FakeGate.is_lse_wrong:
            return Verdict(Status.WRONG_RESULT, None, "log-sum-exp: 1 of 1024 rows are wrong")
        return verdict


class FakeSubject:
    scratch_bytes, workspace_bytes, temporary_bytes = 64, 256, 16

    def __init__(
        self, device: FakeDevice, family: Any, problem: Any, config: Config, *_: Any
    ) -> None:
        self.device, self.act = device, config.get("act", "ok")
        device.open.append(self)

    def timed(self) -> None:
        """Behaviour beside others, after its check and the quick timing passed."""
        if self.act == "sticky when timed":
            self.device.sticky = True
        if self.act == "refused when timed":
            raise BenchmarkError("CUDA error 1")

    def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Any:
        if self.act == "sticky":
            self.device.sticky = True
        if self.act == "raises":
            raise KeyError("tile_q")
        return lambda: None

    def parts(self) -> dict[str, FakeSubject]:
        return dict.fromkeys(("scores", "output") if self.act == "two" else ("main",), self)

    def close(self) -> None:
        self.device.close(self)


class FakeBurst:
    def __init__(self, entrant: Entrant) -> None:
        self.subject: Any = entrant.subject

        self.subject.device.open.append(self)

    def enqueue(self) -> None:
        pass

    def close(self) -> None:
        self.subject.device.close(self)


class FakeStopwatch:
    latency_us = 50.0

    def __init__(self, device: Any, regime: Any) -> None:
        self.device = device
        device.open.append(self)

    def prepare(self, entrant: Entrant) -> FakeBurst:
        if getattr(entrant.subject, "act", "") == "not captured":
            raise BenchmarkError("CUDA error 900")
        return FakeBurst(entrant)

    def quick(self, burst: Any) -> tuple[Timing, Clocks]:
        return Timing(self.latency_us, 0.1, 7), Clocks(1900)

    def final(self, bursts: Any, rounds: int, progress: Any, *, careful: bool) -> Any:
        for index, burst in enumerate(bursts):  # as for the round order, before the first round
            if careful:
                progress(index)
            burst.subject.timed()
            if careful:
                self.device.synchronize()
        self.device.synchronize()
        progress(-1)
        return [Timing(self.latency_us, 0.1, rounds) for _ in bursts], Clocks(1900)

    def close(self) -> None:
        self.device.close(self)


#: In place of what `worker` imports.
FAKES: dict[str, Any] = {
    "Gate": FakeGate,
    "CompiledSubject": FakeSubject,
    "Stopwatch": FakeStopwatch,
    "load": lambda artifact: None,
    "predecessor": lambda *_: None,
    "device_us": lambda device, burst: 9.0,
    "entrant": lambda subject, *_: Entrant(subject, []),
}


WHEN_TIMED = [
    ("sticky when timed", Status.ILLEGAL_ACCESS, "CUDA error 700"),
    ("refused when timed", Status.LAUNCH_ERROR, "CUDA error 1"),
]
