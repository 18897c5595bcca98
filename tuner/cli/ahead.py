"""Compiling what a later run on a GPU will need: for ``tuner sweep`` and ``tuner survey``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.ahead import Wanted
    from tuner.compiler import Compiler
    from tuner.families.base import KernelSpec
    from tuner.job import JobOptions
    from tuner.problem import Problem

PROGRESS_S = 5.0
"""Between two lines on how far it is."""


def sweep_ahead(
    args: argparse.Namespace, problems: Sequence[Problem], options: JobOptions, url: str
) -> int:
    """Say which kernels a sweep of some problems wants first, and compile them unless ``--list``.

    Needs and uses no GPU. Returns 0 when all of them are compiled, or were to be listed only.

    Raises:
        ConfigError: when the options do not suit a problem.
        CompileError: when there is no compiler.
        StoreError: when the store cannot be read.
    """
    from tuner.ahead import wanted
    from tuner.hardware import DEFAULT_GPU
    from tuner.runners.choose import Machine, Runners
    from tuner.search import effort
    from tuner.store import open_store

    options.check(problems)
    with Runners(Machine(jobs=args.jobs, replay=True), say) as runners:
        compiler = runners.compiler()
        with open_store(url) as store:
            found = wanted(
                problems,
                options.regime,
                DEFAULT_GPU,
                store,
                options.sweep,
                each=options.sweep.trials or effort(options.sweep.effort).seeds,
                note=Progress(),
            )
        specs = list(dict.fromkeys(spec for one in found for spec in one.kernels))
        for number, one in enumerate(found, 1):
            say(wanted_text(number, one))
        there = sum(compiler.cached(spec) is not None for spec in specs)
        where = f"{len(problems)} problems on {DEFAULT_GPU.name}"
        say(f"{where}: {len(specs)} kernels, {there} of them compiled already")
        return 0 if args.list else compile_ahead(specs, compiler, options.sweep.time_limit_s)


def wanted_text(number: int, one: Wanted) -> str:
    """One line, as ``1: worth 2.74 for 10 problems, S=2048,... first: fused_attention ...``."""
    from tuner.cli.describe import config_text

    first = one.problems[0].label()
    count = "1 problem" if len(one.problems) == 1 else f"{len(one.problems)} problems"
    return f"{number}: worth {one.worth:.3f} for {count}, {first} first: {config_text(one.config)}"


def compile_ahead(
    specs: Sequence[KernelSpec], compiler: Compiler, time_limit_s: float | None
) -> int:
    """Compile kernels and the gate's; 1 when some are left or failed."""
    from tuner.cli import DONE, FAILED
    from tuner.gate import REFERENCE

    started = time.monotonic()
    deadline = math.inf if time_limit_s is None else started + time_limit_s
    waiting = {future for _, future in compiler.submit([REFERENCE, *specs])}
    done, said = 0, -math.inf
    failed: list[BaseException] = []
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        found, waiting = wait(waiting, min(left_s, PROGRESS_S), FIRST_COMPLETED)
        done += len(found)
        failed += [exc for future in found if (exc := future.exception()) is not None]
        now = time.monotonic()
        if not waiting or now - said >= PROGRESS_S:
            said = now
            text = f"{done} of {len(specs) + 1} kernels, {now - started:.0f} s"
            say(f"{text}, {len(failed)} failed" if failed else text)
    say_failures(failed)
    if waiting:
        print(f"tuner: {len(waiting)} kernels are left; the same command goes on", file=sys.stderr)
    return FAILED if waiting or failed else DONE


class Progress:
    """Says every `PROGRESS_S` how far it is; nothing of what is done sooner."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_S:
            self._said = now
            say(f"{text}, {now - self._started:.0f} s")


def say_failures(errors: Iterable[BaseException]) -> None:
    """Say on standard error why kernels were not compiled: one line for each reason, the
    most frequent first.
    """
    from tuner.outcome import first_line

    reasons = Counter(first_line(str(exc)) or type(exc).__name__ for exc in errors)
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        say(f"tuner: {'1 kernel' if count == 1 else f'{count} kernels'} failed: {reason}")


def say(text: str) -> None:
    """Tell a person, at once, how far it is."""
    print(text, file=sys.stderr, flush=True)
