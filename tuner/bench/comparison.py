"""Comparison of own kernels and peers: compile missing kernels, then time row by row."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from tuner.bench.contenders import Lineup, line_up
from tuner.bench.results import Results, Row, TimedKernel
from tuner.bench.suites import Named, none_named
from tuner.compile.compiler import Compiler
from tuner.errors import BenchmarkError, ConfigError, StoreError, TunerError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure.gate import REFERENCE
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.selection.reader import Entry

#: Seconds between two lines on the progress of compiling.
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class RowTask:
    """One row to fill."""

    suite: str
    problem: Problem
    regime: Regime
    rounds: int
    against: tuple[str, ...]
    """Names for `contenders.peers_named`."""
    named: Named = none_named

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()}, {self.regime}"


class Machines(Protocol):
    """Interface of `runners.choose.Runners` for a comparison."""

    @property
    def gpu(self) -> Gpu | None:
        """GPU to measure on."""

    def of(self, problem: Problem, regime: Regime) -> Runner:
        """Runner of a problem."""

    def compiler(self) -> Compiler:
        """Compiler for all of them."""


class ComparisonRun:
    """Run over many rows. A failing row does not stop the others.

    Args:
        tasks: rows to fill, in order.
        machines: runners and compiler.
        entries: decisions of the store.
        own: number of own kernels to take from each decision.
        with_untuned: True to also time the kernel that the cost model picks.
        with_kernel_times: True to profile the kernel durations of the fastest own kernel and peer
            once all rows are timed.
        note: callback for progress.
    """

    def __init__(
        self,
        tasks: Sequence[RowTask],
        machines: Machines,
        entries: Sequence[Entry],
        *,
        own: int = 3,
        with_untuned: bool = False,
        with_kernel_times: bool = False,
        note: Callable[[str], None],
    ) -> None:
        self._tasks, self._machines, self._entries = tasks, machines, entries
        self._own, self._with_untuned, self._note = own, with_untuned, note
        self._with_kernel_times = with_kernel_times

    def run(self, save: Callable[[Results], None], earlier: Results | None = None) -> Results:
        """Fill every row. `save` gets the results so far after each.

        Args:
            save: function that stores intermediate results.
            earlier: rows of another run. Rows of other tasks stay. A task's row is reused if the
                same kernels were timed, else timed again.

        Raises:
            BenchmarkError: when there is no GPU.
            ConfigError: when `earlier` comes from another environment.
            CompileError: when there is no compiler.
            StoreError: when the disk is full.
        """
        gpu = self._machines.gpu
        if gpu is None:
            raise BenchmarkError("no GPU found: a bench times kernels on one")
        lineups = [self._lineup(task, gpu) for task in self._tasks]
        first = self._tasks[0]
        environment = self._machines.of(first.problem, first.regime).environment
        base = Results(gpu, environment)
        filled: dict[int, Row] = {}
        if earlier is not None:
            _check_same(earlier, base)
            base = _others(earlier, self._tasks)
            earlier_rows = map(partial(_known, earlier), self._tasks, lineups)
            filled = {number: row for number, row in enumerate(earlier_rows) if row is not None}
            self._note(f"{len(filled)} of {len(self._tasks)} rows known before")
        waiting = [number for number in range(len(self._tasks)) if number not in filled]
        self._compile([(self._tasks[number].problem, lineups[number]) for number in waiting])
        results = base.with_rows(filled)
        for done, number in enumerate(waiting, 1):
            filled[number] = self._row(self._tasks[number], lineups[number])
            results = base.with_rows(filled)
            save(results)
            report = f"{self._tasks[number].label}: {_said(filled[number])}"
            self._note(f"{done}/{len(waiting)} {report}")
        # Profiled last, because a profiler stays loaded in its process.
        for number in waiting if self._with_kernel_times else ():
            filled[number] = self._profiled(filled[number])
            results = base.with_rows(filled)
            save(results)
        return results

    def _profiled(self, row: Row) -> Row:
        """Add the durations of the fastest kernels to a row of regime `stream`. If profiling
        fails, the row is unchanged.
        """
        fastest = [t for t in (row.own, row.peer) if t is not None and row.regime.behind]
        if not fastest:
            return row
        try:
            runner = self._machines.of(row.problem, row.regime)
            profiles = runner.kernel_times(row.problem, [timed.config for timed in fastest])
        except StoreError:
            raise
        except TunerError as exc:
            return replace(row, notes=(*row.notes, f"not profiled: {exc}"))
        by_name = {t.name: m for t, m in zip(fastest, profiles, strict=False)}
        failed = [f"{name} was not profiled: {m.log}" for name, m in by_name.items() if not m.ok]
        timed = tuple(
            replace(t, kernel_us=by_name[t.name].latency_us) if t.name in by_name else t
            for t in row.timed
        )
        return replace(row, timed=timed, notes=(*row.notes, *failed))

    def compile(self) -> list[BaseException]:
        """Build every kernel of every row, and the gate's kernels. Does not need a GPU.

        Returns:
            Errors of kernels that could not be built, one each.

        Raises:
            CompileError: when there is no compiler.
            StoreError: when the disk is full.
        """
        gpu = self._machines.gpu or DEFAULT_GPU
        return self._compile([(task.problem, self._lineup(task, gpu)) for task in self._tasks])

    def _lineup(self, task: RowTask, gpu: Gpu) -> Lineup:
        return line_up(
            task.problem,
            gpu,
            task.regime,
            self._entries,
            task.against,
            own=self._own,
            with_untuned=self._with_untuned,
            named=task.named(task.problem, gpu),
        )

    def _compile(self, pairs: Sequence[tuple[Problem, Lineup]]) -> list[BaseException]:
        """Build every kernel before the timing. A failure affects only its row. Returns errors."""
        specs: dict[KernelSpec, None] = {REFERENCE: None}
        for problem, lineup in pairs:
            for contender in lineup.contenders:
                kernels = family(contender.config.family).kernels(problem, contender.config)
                specs.update(dict.fromkeys(kernels.values()))
        futures = [future for _, future in self._machines.compiler().submit(list(specs))]
        building = [future for future in futures if not future.done()]
        total = len(building)
        while building:
            self._note(f"compiling: {total - len(building)} of {total} kernels")
            _, waiting = concurrent.futures.wait(building, timeout=_PROGRESS_S)
            building = list(waiting)
        return [exc for future in futures if (exc := future.exception()) is not None]

    def _row(self, task: RowTask, lineup: Lineup) -> Row:
        """Time a lineup. An error that prevents all of it becomes the row's failure."""
        empty = Row(
            task.suite,
            task.problem,
            task.regime,
            notes=lineup.notes,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if not lineup.contenders:
            return replace(empty, failure="no kernel serves it")
        configs = [contender.config for contender in lineup.contenders]
        try:
            runner = self._machines.of(task.problem, task.regime)
            runs = runner.retime(task.problem, configs, task.rounds)
        except StoreError:
            raise
        except TunerError as exc:
            return replace(empty, failure=str(exc))
        timed = tuple(TimedKernel.of(c, m) for c, m in zip(lineup.contenders, runs, strict=True))
        clocks = next((m.clocks for m in runs if m.ok), empty.clocks)
        return replace(empty, timed=timed, clocks=clocks)


def _check_same(earlier: Results, here: Results) -> None:
    """Check that rows of an earlier run are comparable with those of this one.

    Raises:
        ConfigError: when its environment differs; names the differences.
    """
    theirs = {"gpu": earlier.gpu.name, **earlier.environment.facts}
    ours = {"gpu": here.gpu.name, **here.environment.facts}
    differing = [
        f"{name} {theirs.get(name, 'absent')}, here {ours.get(name, 'absent')}"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        raise ConfigError(
            f"the earlier rows were measured in another environment ({'; '.join(differing)}): "
            "start again without --resume"
        )


def _others(earlier: Results, tasks: Sequence[RowTask]) -> Results:
    """Earlier rows that do not belong to a task."""
    places = {(task.suite, task.problem, task.regime) for task in tasks}
    other_rows = [r for r in earlier.rows if (r.suite, r.problem, r.regime) not in places]
    return replace(earlier, rows=tuple(other_rows))


def _known(earlier: Results, task: RowTask, lineup: Lineup) -> Row | None:
    """Earlier row of a task, if it timed these kernels over as many rounds."""
    configs = {contender.config for contender in lineup.contenders}
    for row in earlier.rows:
        if (
            (row.suite, row.problem, row.regime) == (task.suite, task.problem, task.regime)
            and not row.failure
            and {timed.config for timed in row.timed} == configs
            and all(timed.rounds >= task.rounds for timed in row.timed if timed.latency_us)
        ):
            return row
    return None


def _said(row: Row) -> str:
    """Short description of a row."""
    if row.failure:
        return row.failure
    parts = [f"{t.name} {t.latency_us:.4g} us" for t in (row.own, row.peer) if t and t.latency_us]
    if row.ratio is not None:
        parts.append(row.verdict)
    return ", ".join(parts) or "no kernel passed"
