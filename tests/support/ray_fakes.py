"""A Ray cluster's compile tasks and actors without nvcc and GPUs; the nodes import this module."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tuner
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import BenchmarkError
from tuner.hardware import GPUS
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem
from tuner.runners import recording, recording_archive
from tuner.runners.ray_nodes import Built, Card, Gauge, Reply

PROBLEM = AttentionProblem.parse("S=1024,D=64")
REGIME = Regime.default("attention")
FAMILY = "fused_attention"
H200, H100 = GPUS["H200"], GPUS["H100"]
SLOWER = 1.5
"""An H100's times over an H200's: the recording knows H200s only."""


def recorded() -> recording.Recording:
    """The shipped recording of the problem: one family's times, as if of `REGIME`. A config without
    a final time has its quick one, since a sweep of today chooses other finalists.
    """
    shipped = recording_archive.find(PROBLEM, H200, Regime.choices(PROBLEM.op))
    own = [replace(m, regime=REGIME) for m in shipped.measurements if m.config.family == FAMILY]
    quick = [m for m in own if not m.is_final]
    final = {m.config: replace(m, is_final=True) for m in quick}
    final |= {m.config: m for m in own if m.is_final}
    return replace(shipped, regime=REGIME, measurements=(*quick, *final.values()))


def folder() -> Path:
    """Folder of the messages between the nodes and the test."""
    return Path(os.environ["RAY_FAKES"])


def told(name: str) -> str:
    """Instructions of the test for the nodes; empty by default."""
    path = folder() / name
    return path.read_text() if path.exists() else ""


def happened(what: str, **facts: Any) -> None:
    with (folder() / "events").open("a") as file:
        file.write(
            json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **facts}) + "\n"
        )


def events(what: str) -> list[dict[str, Any]]:
    path = folder() / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["what"] == what]


def once(name: str) -> bool:
    """True for one caller of all processes, where the test wants `name`."""
    try:
        (folder() / name).unlink()
    except FileNotFoundError:
        return False
    return True


def build(specs: Sequence[Any], keys: Sequence[str], capability: str) -> Any:
    """One library a unit, of its keys."""
    import ray

    if once("task_dies"):
        os._exit(1)
    deadline = time.monotonic() + 60.0
    while told("overlap") and len(events("built")) > 3 and not events("measured"):
        assert time.monotonic() < deadline, "nothing is measured while units are built"
        time.sleep(0.02)
    library = "\n".join(keys).encode() * 5_000  # more than Ray sends beside a reply
    sha256 = hashlib.sha256(library).hexdigest()
    if once("task_damages") or told("all_tasks_damage"):
        library = library[:-1] + b"?"
    node = ray.get_runtime_context().get_node_id()
    happened("built", kernels=len(keys), node=node)
    return [Built(sha256, None, 2.0, {}) for _ in keys], {sha256: library}


class RecordedGauge(Gauge):
    """An actor that looks its answers up; its card is that of the node's label."""

    def __init__(self) -> None:
        import ray

        self._labels = ray.get_runtime_context().get_node_labels()
        self._cache = ArtifactCache(folder() / f"actor-{os.getpid()}")
        self._client: Any = FakeClient(self._labels["gpu"], self._cache)

    def card(self) -> Card:
        happened("actor", gpu=self._labels["gpu"])
        if told("broken") == self._labels["gpu"]:
            raise BenchmarkError("CUDA device 0 was not found")
        facts = recorded().environment.facts
        return Card("here", tuner.__version__, GPUS[self._labels["gpu"]], facts)

    def measure(self, ask: Ask, parcels: Mapping[str, Any]) -> Reply:
        reply = super().measure(ask, parcels)
        if reply.refused:
            happened("refused", reasons=list(reply.refused.values()))
        return reply


class FakeClient:
    """Answers from the recording, once it has read every library that the request names."""

    def __init__(self, gpu: str, cache: ArtifactCache) -> None:
        self.pid: int | None = 1
        self._gpu, self._cache = gpu, cache
        measured = recorded().measurements
        self._quick = {m.config: m for m in measured if not m.is_final}
        self._final = {m.config: m for m in measured if m.is_final}

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        for artifact in [ask.reference, *(a for _, used in ask.candidates for a in used.values())]:
            assert artifact.library.is_relative_to(self._cache.root)
            content = artifact.library.read_bytes()
            assert hashlib.sha256(content).hexdigest() == artifact.sha256
            assert artifact.key.encode() in content
        happened("measured", gpu=self._gpu, mode=ask.mode, candidates=len(ask.candidates))
        if once("actor_dies") or told("all_actors_die"):
            os._exit(1)
        if once("sticky_error"):
            self.pid = 2
        time.sleep(60.0 if told("slow") else 0.02)
        return [self._outcome(self._find(config, ask.mode)) for config, _ in ask.candidates]

    def _find(self, config: Any, mode: str) -> Measurement:
        first, second = self._quick, self._final
        if mode == "final":
            first, second = second, first
        found = first.get(config) or second.get(config)
        assert found is not None, config
        return found

    def _outcome(self, m: Measurement) -> CandidateOutcome:
        outcome = CandidateOutcome(m.status, m.latency_us, m.std_us, m.rounds, log=m.log)
        if self._gpu == "H100" and m.latency_us is not None:
            outcome = replace(outcome, latency_us=SLOWER * m.latency_us)
        return outcome
