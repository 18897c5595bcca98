"""Evaluate on GPUs of one kind: compile in the background, time what is compiled. The GPUs are this
machine's, unless the compiler and the pool are a cluster's.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import environment_facts
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families, families_in
from tuner.families.base import Family
from tuner.hardware import HOPPER, Gpu
from tuner.measure import device
from tuner.measure.evaluate import Evaluator, Pending
from tuner.measure.worker_client import TIMEOUT_S, AnyWorker, WorkerClient
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.runners.base import Building
from tuner.runners.pool import WorkerPool

_Done = tuple[Pending, "Future[list[Measurement]]"]


class LocalRunner:
    """GPUs of one kind under one regime. The compiler is the caller's to close.

    A group goes to the GPUs when its kernels are compiled, whether or not anybody collects.

    Args:
        device_index: CUDA device; of several, the one that describes them all.
        regime: timing regime of the candidates.
        compiler: compiler, which works in the background.
        max_workspace: bytes that a candidate may use beside its operands; None: no limit.
        timeout_s: longest silence of the worker beyond what a phase announces.
        family_modules: Python files that define further families, for tests.
        gpu: description of the device (default: read from it).
        pool: pool of workers, which the caller closes (default: one worker on the device).
        facts: the GPUs' environment (default: read from the device).

    Raises:
        BenchmarkError: when no GPU has that number.
    """

    provenance = Provenance.MEASURED

    def __init__(
        self,
        device_index: int,
        regime: Regime,
        compiler: Compiler,
        *,
        max_workspace: int | None = None,
        timeout_s: float = TIMEOUT_S,
        family_modules: Sequence[Path] = (),
        gpu: Gpu | None = None,
        pool: WorkerPool | None = None,
        facts: Mapping[str, str | int | float] | None = None,
    ) -> None:
        model = gpu or device.detect(device_index)
        if model is None:
            raise BenchmarkError(f"CUDA device {device_index} was not found")
        self.gpu = model
        self.regime = regime
        self._index, self._compiler, self._facts = device_index, compiler, facts
        self._max_workspace = max_workspace
        members: dict[str, Family] = dict(families())
        for path in family_modules:
            members |= families_in(path)
        self._owns_pool = pool is None
        self._pool = pool or WorkerPool(
            [WorkerClient(device_index, family_modules=family_modules, timeout_s=timeout_s)]
        )
        # Full translation units on every core, or two groups a GPU where the compiler is small;
        # a search that learns submits fewer.
        self.compiles = compiler.jobs
        self.capacity = max(compiler.batch * compiler.jobs, 2 * len(self._pool))
        self._evaluator = Evaluator(
            model, regime, compiler, members, lambda: self.environment, max_workspace
        )
        self._lock = threading.Lock()
        self._open: list[Pending] = []
        self._is_cancelled = False
        """True when nothing was submitted since the last `cancel`."""
        self._timed_as: dict[Pending, Future[list[Measurement]]] = {}
        """Requests of the groups that are compiled."""
        self._asked: set[Future[Any]] = set()
        """Requests that somebody waits for: final passes, libraries' lists."""
        self._done: queue.SimpleQueue[_Done | None] = queue.SimpleQueue()

    @cached_property
    def environment(self) -> Environment:
        """Facts of this machine, the compiler and the vendors' libraries; starts a worker."""
        tools = self._compiler.toolchain
        own = device.environment(self._index).facts if self._facts is None else self._facts
        facts = dict(own)
        facts |= environment_facts(tools)
        if self.gpu.compute_capability != HOPPER and tools.triton_version:
            # Where its kernels compete. Hopper's times have nothing of it.
            facts["triton"] = tools.triton_version
        facts |= self._pool.facts()
        return Environment(facts)

    @property
    def building(self) -> int:
        return sum(not pending.is_ready for pending in [*self._open])

    def candidates(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        if not family.is_listed:
            return space
        work = partial(_listing, problem=problem, name=family.name, most=self._max_workspace)
        asking = self._pool.submit(work, first=True, affinity=problem)
        with self._lock:
            self._asked.add(asking)
        try:
            listed = [c for c in asking.result() if family.accepts(problem, c, self.gpu)]
        except CancelledError:
            listed = []
        except BaseException:
            self._pool.cancel([asking])
            raise
        finally:
            with self._lock:
                self._asked.discard(asking)
        # A library that lists nothing says why when its first choice is measured.
        return listed or space

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        return self._compiler.compiled(family, problem, space)

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        self._evaluator.prefetch(problem, [config for group in groups for config in group])

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        pending = self._start(problem, group)
        with self._lock:
            self._open.append(pending)
            self._is_cancelled = False
            done = self._done
        pending.when_ready(partial(self._measure, pending, done))

    def under_way(self, problem: Problem) -> list[Building]:
        underway = self._compiler.underway()
        groups = []
        for pending in [*self._open]:
            if pending.problem == problem and not pending.is_ready:
                begun = [underway[f] for f in pending.futures.values() if f in underway]
                elapsed_s = max((b.elapsed_s for b in begun), default=None)
                kernels = max((b.kernels for b in begun), default=1)
                groups.append(Building(pending.group[0], elapsed_s, kernels))
        return groups

    def abandon(self, problem: Problem) -> None:
        with self._lock:
            others_open = []
            for pending in self._open:
                timing = self._timed_as.get(pending)
                if pending.problem != problem or (timing is not None and not timing.cancel()):
                    others_open.append(pending)
                else:
                    self._timed_as.pop(pending, None)
            self._open = others_open
        self._compiler.release(self._evaluator.owner(problem))

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        """The group that is measured first.

        Raises:
            TimeoutError: when nothing was done within `timeout_s`.
            BenchmarkError: when nothing was submitted, or a GPU cannot be used.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._is_cancelled:
                    return []
                if not self._open:
                    raise BenchmarkError("nothing was submitted to collect")
                # `cancel` wakes whoever waits at this one.
                results = self._done
            try:
                left_s = None if until is None else max(0.0, until - time.monotonic())
                done = results.get(timeout=left_s)
            except queue.Empty:
                raise TimeoutError from None
            except BaseException:
                self.cancel()
                raise
            if done is None:
                return []
            pending, timing = done
            with self._lock:
                is_open = pending in self._open  # else it was abandoned
                self._open = [other for other in self._open if other is not pending]
                self._timed_as.pop(pending, None)
            if is_open:
                try:
                    return timing.result()
                except CancelledError:
                    return []

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """One request, and so one GPU's times; empty after `cancel` or `timeout_s`."""
        return self._together(problem, finalists, mode="final", rounds=rounds, timeout_s=timeout_s)

    def kernel_times(self, problem: Problem, configs: Sequence[Config]) -> list[Measurement]:
        return self._together(problem, configs, mode="kernels")

    def _together(
        self,
        problem: Problem,
        configs: Sequence[Config],
        *,
        mode: str,
        rounds: int = 0,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """One request to one GPU."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        pending = self._start(problem, configs)
        # A GPU waits for no compiler.
        if concurrent.futures.wait(pending.futures.values(), timeout_s).not_done:
            return []
        work = partial(self._evaluator.finish, pending, mode=mode, rounds=rounds)
        timing = self._pool.submit(work, first=True, affinity=problem)
        with self._lock:
            self._asked.add(timing)
        try:
            return timing.result(None if until is None else max(0.0, until - time.monotonic()))
        except CancelledError:
            return []
        except TimeoutError:
            self._pool.cancel([timing])
            return []
        except BaseException:
            self._pool.cancel([timing])
            raise
        finally:
            with self._lock:
                self._asked.discard(timing)

    def cancel(self) -> None:
        with self._lock:
            timing, self._timed_as, self._open = [*self._timed_as.values()], {}, []
            requested, self._asked = self._asked, set()
            self._is_cancelled = True
            waiting, self._done = self._done, queue.SimpleQueue()
        self._pool.cancel([*timing, *requested])
        waiting.put(None)

    def close(self) -> None:
        self.cancel()
        if self._owns_pool:
            self._pool.close()

    def _start(self, problem: Problem, group: Sequence[Config]) -> Pending:
        _ = self.environment  # a thread of the pool that first asked would wait for itself
        return self._evaluator.start(problem, group)

    def _measure(self, pending: Pending, done: queue.SimpleQueue[_Done | None]) -> None:
        """Hand a compiled group to the GPUs; in the compiler's thread, maybe."""
        with self._lock:
            if not any(pending is other for other in self._open):
                return  # it was given up while it was compiled
            timing = self._pool.submit(
                partial(self._evaluator.finish, pending), affinity=pending.problem
            )
            self._timed_as[pending] = timing
        timing.add_done_callback(lambda timing: done.put((pending, timing)))


def _listing(worker: AnyWorker, *, problem: Problem, name: str, most: int | None) -> list[Config]:
    return worker.listing(problem, name, most)
