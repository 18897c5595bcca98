"""A compiler and the process that measures, of a machine that has neither nvcc nor GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.compile.compiler import Underway
from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Resources, Status

Submitted = list[tuple[KernelSpec, Future[Artifact]]]


class FakeCompiler:
    """Has every kernel at once, or with `late` when it is told to `build` it."""

    jobs, batch = 8, 2
    toolchain = SimpleNamespace(nvcc_version="13.0.88", cutlass_version="4.2.0")
    used: Resources | None = None
    """Resources of each artifact."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.futures: dict[KernelSpec, Future[Artifact]] = {}
        self.submitted: list[KernelSpec] = []
        self.begun: list[KernelSpec] = []
        self.released: list[Any] = []

    def error(self, spec: KernelSpec) -> Exception | None:
        """Return the error that there is in place of an artifact."""
        return None

    def key(self, spec: KernelSpec) -> str:
        return spec.key

    def submit(self, specs: Sequence[KernelSpec], owner: Any = None) -> Submitted:
        for spec in specs:
            self.submitted.append(spec)
            if spec not in self.futures:
                self.futures[spec] = Future()
                if not self.late:
                    self.build(spec)
        return [(spec, self.futures[spec]) for spec in specs]

    def build(self, spec: KernelSpec) -> None:
        if error := self.error(spec):
            self.futures[spec].set_exception(error)
        else:
            made = Artifact(self.key(spec), Path("/k.so"), "0" * 64, self.used, 6.5)
            self.futures[spec].set_result(made)

    def build_all(self) -> None:
        for spec in [spec for spec, future in self.futures.items() if not future.done()]:
            self.build(spec)

    def underway(self) -> dict[Future[Artifact], Underway]:
        return {self.futures[spec]: Underway(6.0, 2) for spec in self.begun}

    def release(self, owner: Any) -> None:
        self.released.append(owner)

    def close(self, cancel: bool = False) -> None: ...


class FakeWorker:
    """Remembers what it was asked; each candidate takes 10 us."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.closed = 0

    def outcome(self, config: Config, ask: Ask) -> CandidateOutcome:
        return CandidateOutcome(Status.OK, 10.0, 0.1, ask.rounds or 7)

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        self.asked.append(ask)
        return [self.outcome(config, ask) for config, _ in ask.candidates]

    def facts(self) -> dict[str, str]:
        return {"torch": "2.11"}

    def renew(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None:
        self.closed += 1
