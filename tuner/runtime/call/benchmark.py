"""Autotuning at the first call: ``TUNER_BENCHMARK=1``, as ``torch.backends.cudnn.benchmark``.

The first call of an untuned shape, outside of graph captures, times the portfolio's most promising
proven kernels, peers' and PyTorch's on the call's tensors. The fastest is kept. A choice is a line
of ``benchmarked.jsonl`` under ``TUNER_CACHE_DIR``, for one problem, GPU and environment. It ends
when a promising kernel that it did not time is proven.

Timing holds a lock, so that all processes of a machine keep one choice. PyTorch answers while
another process holds it. Needs no compiler and no SQLAlchemy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from tuner import settings
from tuner.base import document, forks
from tuner.base.ownership import opened
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import BenchmarkError, StoreBusyError, StoreError
from tuner.families import family
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.runtime.call import counters, devices
from tuner.runtime.call.plan import Plan

_log = logging.getLogger("tuner.runtime")

KERNELS = 3
"""Own kernels timed for a shape, at most."""
MIN_GAIN = 0.02
"""Share of its time by which an own kernel must beat PyTorch's, and a peer's all own ones. Less is
noise of so few rounds."""
ROUNDS = range(3, 11)
"""Fewest and most rounds. In a round every contender runs `CALLS` times, in shuffled order."""
CALLS = 4
BUDGET_US = 200_000.0
"""GPU time, in microseconds, that the rounds of a shape may take beyond the fewest."""
WAIT_S = 0.2
"""Longest wait of a call for another process that times its kernels."""
_LOCK = "benchmarked"

Run = Callable[[Plan | None], object]
"""Function that enqueues the call by a plan, or by PyTorch for None."""


@dataclass(frozen=True)
class TimedChoice:
    """The choice for a problem."""

    config: Config | None
    """Chosen configuration; None: PyTorch's kernel."""
    us: float
    """Median time of the chosen kernel, microseconds."""
    pytorch_us: float
    timed: frozenset[str] = frozenset()
    """Digests of the configs that were timed; of an older version's choices the chosen one's."""

    def untimed(self, ranked: Sequence[Config]) -> Iterator[Config]:
        """Configs that would have been timed, had their kernels been proven.

        Args:
            ranked: candidates, the most promising first.
        """
        timed = 0
        for config in ranked:
            if config.digest in self.timed:
                timed += 1
            elif timed < KERNELS:
                yield config


class Journal:
    """File of choices; safe between threads and processes."""

    _lock: threading.RLock

    def __init__(self) -> None:
        forks.add_lock(self, threading.RLock)
        self._path: Path | None = None
        self._read = 0
        self._known: dict[tuple[str, str, str], TimedChoice] = {}
        self._wait_s = WAIT_S
        """Wait for the lock; none after one in vain, until it was had again."""

    def find(self, problem: Problem, gpu: Gpu) -> TimedChoice | None:
        """The choice for a problem on a GPU, made in this environment."""
        with self._lock:
            self._refresh()
            return self._known.get(_key(problem, gpu))

    def decide(
        self,
        problem: Problem,
        gpu: Gpu,
        contenders: Mapping[Config, Plan],
        run: Run,
        *,
        is_cold: bool,
        ended: TimedChoice | None = None,
    ) -> TimedChoice | None:
        """Time the contenders and PyTorch's kernel, and keep the fastest. A choice that another
        process made meanwhile is taken over.

        Args:
            problem: the call's problem.
            gpu: GPU that it runs on.
            contenders: plans of own kernels and peers'.
            run: enqueues the call by a plan.
            is_cold: True if a model's call finds weights or caches outside of L2.
            ended: earlier choice that does not hold any more.

        Returns:
            None when memory ran out.

        Raises:
            StoreBusyError: when another process holds the lock for longer than `WAIT_S`.
        """
        with self._lock, self._alone():
            candidates = self.find(problem, gpu)
            if candidates is not None and candidates != ended:
                return candidates
            times = _time(contenders, run, is_cold=is_cold)
            if times is None:
                return None
            fastest = _fastest(times)
            self._write(problem, gpu, fastest)
            self._known[_key(problem, gpu)] = fastest
        name = "PyTorch's" if fastest.config is None else fastest.config.family
        _log.info(
            "%s: timed here: %s %.1f us, PyTorch's %.1f",
            *(problem.label(), name, fastest.us, fastest.pytorch_us),
        )
        return fastest

    def _refresh(self) -> None:
        """Read the lines added since the last look; count damaged ones and skip them."""
        path = _path()
        if path != self._path:
            self._path, self._read, self._known = path, 0, {}
        try:
            size = path.stat().st_size
            if size == self._read:
                return
            if size < self._read:  # another file
                self._read, self._known = 0, {}
            with opened(path) as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        except OSError as exc:
            counters.count_error(f"the timed choices cannot be read: {exc}")
            return
        whole = text.rfind(b"\n") + 1  # a line that is being written is read later
        self._read += whole
        for line in text[:whole].splitlines():
            try:
                key, timed = _from_line(line)
            except document.FAULTS as exc:
                counters.count_error(f"a line of {path.name} is damaged: {exc!r:.200}")
            else:
                self._known[key] = timed

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the journal's lock; go on without one where the cache has no locks.

        Raises:
            StoreBusyError: when another process holds it for longer than `WAIT_S`.
        """
        with contextlib.ExitStack() as stack:
            try:
                alone = stack.enter_context(ArtifactCache().lock(_LOCK, wait_s=self._wait_s))
            except StoreError as exc:
                counters.count_error(f"each process times kernels for itself: {exc}")
            else:
                self._wait_s = WAIT_S if alone else 0.0
                if not alone:
                    raise StoreBusyError("another process is timing kernels (it holds the lock)")
            yield

    def _write(self, problem: Problem, gpu: Gpu, timed: TimedChoice) -> None:
        key, identity, environment = _key(problem, gpu)
        row = {
            "problem": json.loads(key),
            "gpu": identity,
            "environment": environment,
            "config": None if timed.config is None else timed.config.to_json(),
            "us": round(timed.us, 3),
            "pytorch_us": round(timed.pytorch_us, 3),
            "timed": sorted(timed.timed),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        line = json.dumps(row, sort_keys=True).encode() + b"\n"
        try:
            _path().parent.mkdir(parents=True, exist_ok=True)
            with _path().open("ab+", buffering=0) as file:
                # Start a new line if the last one was cut short.
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
        except OSError as exc:
            counters.count_error(f"the timed choices cannot be written: {exc}")


def _path() -> Path:
    return settings.cache_dir() / "benchmarked.jsonl"


def _key(problem: Problem, gpu: Gpu) -> tuple[str, str, str]:
    return problem.key, gpu.identity, devices.environment().digest


def _from_line(line: bytes) -> tuple[tuple[str, str, str], TimedChoice]:
    row = document.checked(TimedChoice, document.parse(line))
    problem = json.dumps(row["problem"], sort_keys=True, separators=(",", ":"))
    config = None if row["config"] is None else Config.from_json(row["config"])
    digests = frozenset(map(str, row.get("timed", () if config is None else (config.digest,))))
    timed = TimedChoice(config, float(row["us"]), float(row["pytorch_us"]), digests)
    return (problem, str(row["gpu"]), str(row["environment"])), timed


def _time(
    contenders: Mapping[Config, Plan], run: Run, *, is_cold: bool
) -> dict[Config | None, float] | None:
    """Median microseconds of a call by each contender, and by PyTorch under the key None.

    A contender whose launch was refused has an infinite time. None when memory ran out.
    """
    # Its imports would be part of every program's first call.
    from statistics import median

    from tuner.measure.rounds import shuffled

    plans: dict[Config | None, Plan | None] = {None: None}
    plans.update(contenders.items())
    samplers = [partial(_sample, plan, run, is_cold) for plan in plans.values()]
    try:
        took = sum(sample() for sample in samplers) * CALLS  # loads, plans and warms up
        rounds = max(ROUNDS.start, min(ROUNDS.stop - 1, int(BUDGET_US / max(took, 1.0))))
        samples = shuffled(samplers, rounds)
    except torch.OutOfMemoryError:
        return None
    return dict(zip(plans, map(median, samples), strict=True))


def _sample(plan: Plan | None, run: Run, is_cold: bool) -> float:
    try:
        return devices.call_us(lambda: run(plan), CALLS, is_cold=is_cold)
    except BenchmarkError:
        return math.inf


def _fastest(times: Mapping[Config | None, float]) -> TimedChoice:
    pytorch_us = times[None]
    us = {config: time_us for config, time_us in times.items() if config is not None}
    timed = frozenset(config.digest for config in us)
    best = min(us, key=lambda config: us[config] * (1 + MIN_GAIN * family(config.family).is_vendor))
    if us[best] * (1 + MIN_GAIN) <= pytorch_us:
        return TimedChoice(best, us[best], pytorch_us, timed)
    return TimedChoice(None, pytorch_us, pytorch_us, timed)


journal = Journal()
