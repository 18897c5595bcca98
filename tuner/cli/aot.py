"""Ahead-of-time compilation for ``tuner sweep`` and ``tuner develop survey``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from tuner.cli import DONE, FAILED
from tuner.compile.artifacts import Artifact
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import Problem
from tuner.selection.describe import counted, cut
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.compile.compiler import Compiler
    from tuner.tuning.aot import Wanted
    from tuner.tuning.job import JobOptions

PROGRESS_S = 5.0
"""Seconds between two lines of progress."""
FIRST_PROGRESS_S = 1.0
"""Seconds before the first line of progress."""
COLUMNS = 120
"""Maximum width of a line about a group of kernels."""


def sweep_aot(
    args: argparse.Namespace, problems: Sequence[Problem], options: JobOptions, url: str
) -> int:
    """Print which kernels a sweep of some problems would try first, and compile them unless
    ``--list``.

    Neither needs nor uses a GPU. Returns 0 if all of them are compiled, or only listed.

    Raises:
        ConfigError: when the options do not fit a problem.
        CompileError: without a compiler.
        StoreError: when the store cannot be read.
    """
    from tuner.runners.choose import Machine, Runners
    from tuner.search.study import effort
    from tuner.tuning.aot import wanted

    started = time.monotonic()
    options.check(problems)
    say_planning(problems, DEFAULT_GPU)
    with Runners(Machine(jobs=args.jobs, replay=True), say) as runners:
        compiler = runners.compiler()
        with open_store(url) as store:
            sets = wanted(
                problems,
                options.regime,
                DEFAULT_GPU,
                store,
                options.sweep,
                each=options.sweep.trials or effort(options.sweep.effort).seeds,
                note=ProgressNotes(),
            )
        specs = list(dict.fromkeys(spec for kernel_set in sets for spec in kernel_set.kernels))
        for number, kernel_set in enumerate(sets, 1):
            say(wanted_text(number, kernel_set))
        compiled = sum(compiler.cached(spec) is not None for spec in specs)
        where = f"{len(problems)} problems on {DEFAULT_GPU.name}"
        say(f"{where}: {len(specs)} kernels, {compiled} of them compiled already")
        if args.list:
            return 0
        return compile_aot(specs, compiler, options.sweep.time_limit_s, started)


def wanted_text(number: int, row: Wanted) -> str:
    """One line of at most `COLUMNS`: expected gain, first problem, digest, and part of the config.

    The gain is in percent of a problem's time, summed over the problems.
    """
    first = f"{counted(len(row.problems), 'problem')}, first {row.problems[0].label()}"
    config = f"{row.config.digest[:6]} {row.config}"
    text = f"{number}: gain {100 * row.worth:.1f} % over {first}: {config}"
    return cut(text, COLUMNS)


def compile_aot(
    specs: Sequence[KernelSpec],
    compiler: Compiler,
    time_limit_s: float | None,
    started: float | None = None,
    finished: Callable[[KernelSpec, Artifact], None] = lambda spec, artifact: None,
    *,
    with_gate: bool = True,
    shares: Mapping[KernelSpec, float] | None = None,
) -> int:
    """Compile kernels, and those of the numerics gate. Returns 1 if some are left or failed.

    Args:
        specs: kernels, those with the most expected gain first.
        compiler: compiler to use.
        time_limit_s: seconds after which waiting ends; None: no limit.
        started: `time.monotonic` at which the limit starts; None: now.
        finished: callback for each kernel that is compiled or cached.
        with_gate: False to leave the gate's kernels out.
        shares: parts of the calls' time that the kernels answer; None: not told.
    """
    from tuner.measure.gate import REFERENCE

    started = time.monotonic() if started is None else started
    deadline = math.inf if time_limit_s is None else started + time_limit_s
    every = [REFERENCE, *specs] if with_gate else list(specs)
    specs_of = {future: spec for spec, future in compiler.submit(every)}
    waiting = set(specs_of)
    progress = _Progress(len(every), sum(map(Future.done, waiting)), shares or {}, started)
    failed: list[BaseException] = []
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ended, waiting = wait(waiting, min(left_s, PROGRESS_S), FIRST_COMPLETED)
        for future in ended:
            if (exc := future.exception()) is not None:
                failed.append(exc)
            else:
                finished(specs_of[future], future.result())
        progress.tell([specs_of[future] for future in ended], len(waiting), len(failed))
    say_failures(failed)
    if waiting:
        print(f"tuner: {len(waiting)} kernels are left; the same command goes on", file=sys.stderr)
    return FAILED if waiting or failed else DONE


class _Progress:
    """Lines of progress, one every `PROGRESS_S` at most.

    Args:
        count: number of kernels.
        there: number of them that were compiled before.
        shares: as of `compile_aot`.
        started: `time.monotonic` at which compiling began.
    """

    def __init__(
        self, count: int, there: int, shares: Mapping[KernelSpec, float], started: float
    ) -> None:
        self._count, self._there, self._shares, self._started = count, there, shares, started
        self._paced, self._share = Paced(), 0.0

    def tell(self, done: Sequence[KernelSpec], left: int, failed: int) -> None:
        """Note kernels that ended, and print a line if that is due."""
        self._share += sum(self._shares.get(spec, 0.0) for spec in done)
        if not self._paced.is_due() and left:
            return
        passed_s, ended = time.monotonic() - self._started, self._count - left
        text = f"{ended} of {self._count} kernels"
        if every := sum(self._shares.values()):
            text += f" for {100 * self._share / every:.0f} % of own kernels' time"
        text += f", {passed_s:.0f} s"
        if left and ended > self._there:
            text += f", about {left * passed_s / (ended - self._there):.0f} s left"
        say(f"{text}, {failed} failed" if failed else text)


def say_planning(problems: Sequence[Problem], gpu: Gpu) -> None:
    """Print the plan before any step that takes time."""
    say(f"planning {counted(len(problems), 'problem')} on {gpu.name}; nothing is measured")


class Paced:
    """Says when progress is due: after some seconds, and then every `PROGRESS_S`."""

    def __init__(self, first_s: float = 0.0) -> None:
        self._next = time.monotonic() + first_s if first_s else -math.inf

    def is_due(self) -> bool:
        """True if progress is to be told now."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PROGRESS_S
        return True


class ProgressNotes:
    """Prints progress after `FIRST_PROGRESS_S`, and then every `PROGRESS_S`."""

    def __init__(self) -> None:
        self._started, self._paced = time.monotonic(), Paced(FIRST_PROGRESS_S)

    def __call__(self, text: str) -> None:
        if self._paced.is_due():
            say(f"{text}, {time.monotonic() - self._started:.0f} s")


def say_failures(errors: Iterable[BaseException]) -> None:
    """Print on standard error why kernels were not compiled: one line a reason, the most frequent
    first.
    """
    from tuner.tuning.outcome import first_line

    reasons = Counter(first_line(str(exc)) or type(exc).__name__ for exc in errors)
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        say(f"tuner: {'1 kernel' if count == 1 else f'{count} kernels'} failed: {reason}")


def say(text: str) -> None:
    """Print a line on standard error, unbuffered."""
    print(text, file=sys.stderr, flush=True)
