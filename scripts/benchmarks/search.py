"""``scripts/bench search``: results of each sampler on recorded sweeps, by the number of compiles.

Every recorded sweep is replayed through the real search (`tuner.search.study`). A problem's own
results never reach its search. The cost models are fitted again without them, and `model` learns
from the recordings of other problems.

A seed decides the sampler's draws, and draws each timing anew from its recorded deviation. Regret
is the recorded time of the candidate that looks best, against the recorded best.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.arguments import add_recordings
from tuner.base.output import check_place
from tuner.base.processes import exit_code
from tuner.bench.results import write_json
from tuner.cli import DONE, Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families_of
from tuner.families.base import Family, group_by_kernels, without_fallbacks
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.runners import recording
from tuner.search import ranking
from tuner.search.family_search import FamilySearch
from tuner.search.fits import cost_fit as cost
from tuner.search.study import EFFORTS, SAMPLERS, Search, sampler_name
from tuner.selection.describe import table

COMPILED = (1, 2, 4, 8, 12, 16, 40)
"""Compiled groups after which the regret is read."""
SEEDS = 30
EFFORT = "quick"
TOGETHER = "all operations"
STOPPED = "model-stopping"
"""The sampler `model` as a sweep uses it: it ends when no gain is expected."""
METHODS = (*SAMPLERS, STOPPED)
MAX_DEVIATION = 0.1
"""Largest deviation of a timing, as a share. A larger one is an interrupted round, which moves no
median (28 of 9,400 recorded quick timings).
"""
WIDE = COMPILED[-1] + 1
"""Groups from which on a recording counts in the summary: no budget enumerates it."""


@dataclass(frozen=True)
class Case:
    """One recorded problem and all that may be known when it is searched."""

    problem: Problem
    gpu: Gpu
    recorded: Mapping[Config, Measurement]
    """The quick pass, own candidates that are legal still."""
    families: tuple[Family, ...]
    """Those that compete in a sweep, with the constants of a fit that left this problem out."""
    history: tuple[Measurement, ...]
    """Quick passes of the other problems on this chip in this regime."""
    prepared: dict[str, list[FamilySearch]] = field(default_factory=dict, compare=False)
    """Searches that have begun with nothing, by a sampler that draws nothing."""

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()}"

    @property
    def groups(self) -> int:
        return sum(len(group_by_kernels(f, self.space(f))) for f in self.families)

    @property
    def best_us(self) -> float:
        return min(m.latency_us for m in self.recorded.values() if m.latency_us is not None)

    def space(self, family: Family) -> list[Config]:
        return [config for config in self.recorded if config.family == family.name]


def cases(recordings: Sequence[recording.Recording], least_groups: int = 1) -> list[Case]:
    """A case for each recorded problem that own kernels passed for; stages are history only.

    Args:
        recordings: recordings to search and to learn from.
        least_groups: problems of fewer are learnt from alone.
    """
    fit = cost.CostFits(recordings)
    found = []
    for one in fit.parts:
        recorded = {m.config: m for m in one.measurements}
        is_stage = one.problem not in {whole.problem for whole in recordings}
        if is_stage or not any(m.ok for m in recorded.values()):
            continue
        if _groups(one.problem, recorded) < least_groups:
            continue
        history = tuple(
            m
            for other in fit.parts
            if other.problem != one.problem
            and (other.gpu.identity, other.regime) == (one.gpu.identity, one.regime)
            for m in other.measurements
        )
        families = tuple(without_fallbacks(fit.without(one)))
        found.append(Case(one.problem, one.gpu, recorded, families, history))
        say(f"fitted without {found[-1].label}")
    return found


def _groups(problem: Problem, configs: Iterable[Config]) -> int:
    known = families_of(problem.op)
    digests = {(c.family, known[c.family].compile_digest(c)) for c in configs}
    return len(digests)


@dataclass(frozen=True)
class Run:
    """One replay."""

    regrets: list[float]
    """After each compiled group, as a share of the recorded best."""
    timed: int
    """Candidates that were timed."""
    winner: float = math.inf
    """Time of the final pass's choice among the leaders of the end, as a share over the best."""


@dataclass(frozen=True)
class Pace:
    """How a replay goes on, and when it ends."""

    in_flight: int = 1
    """Groups that are asked for before the first one's result is told."""
    trials: int | None = None
    """Groups at most, a family; None: `COMPILED`'s last in all."""


def replay(case: Case, method: str, seed: int, pace: Pace = Pace()) -> Run:
    """Search a recorded problem.

    Args:
        case: recording and problem to search.
        method: one of `METHODS`.
        seed: seed of the sampler and of the timings' noise.
        pace: number of groups at a time, and the end.
    """
    rng = random.Random(seed)
    search = started(case, method, seed, pace)
    families = {family.name: family for family in case.families}
    leader: tuple[float, float] = (math.inf, math.inf)
    regrets: dict[int, float] = {}
    compiled: set[str] = set()
    seen: list[Measurement] = []
    queue: deque[list[Config]] = deque()
    while True:
        while len(queue) < pace.in_flight and (group := search.ask()) is not None:
            queue.append(group)
        if not queue:
            return Run(list(regrets.values()), len(seen), won(case, seen)[1])
        told = [timed_again(case.recorded[config], rng) for config in queue.popleft()]
        search.tell(told)
        seen += told
        compiled.add(families[told[0].config.family].compile_digest(told[0].config))
        for m in told:
            recorded_us = case.recorded[m.config].latency_us
            if m.latency_us is not None and recorded_us is not None:
                leader = min(leader, (m.latency_us, recorded_us))
        regrets[len(compiled)] = leader[1] / case.best_us - 1


def won(case: Case, seen: Sequence[Measurement]) -> tuple[Config | None, float]:
    """The finalist that is fastest when it is timed again, and its recorded time over the recorded
    best, as a share. None and infinity where no candidate passed.
    """
    families = {family.name: family for family in case.families}
    chosen = ranking.finalists(
        seen, EFFORTS[EFFORT].finalists, lambda c: families[c.family].compile_digest(c)
    )
    times = {m.config: case.recorded[m.config].latency_us or math.inf for m in chosen}
    winner = min(times, key=times.__getitem__, default=None)
    return winner, times[winner] / case.best_us - 1 if winner else math.inf


def _members(case: Case, sampler: str, seed: int) -> list[FamilySearch]:
    effort = EFFORTS[EFFORT]
    return [
        FamilySearch(
            family,
            case.problem,
            case.gpu,
            case.space(family),
            seeds=effort.seeds,
            sampler=sampler,
            seed=seed,
            raced=effort.raced,
            history=case.history,
        )
        for family in case.families
    ]


def _copied(member: FamilySearch) -> FamilySearch:
    """A search of its own: beginning one takes longer than replaying it."""
    shared = (member.family, member.groups)
    return copy.deepcopy(member, {id(one): one for one in shared})


def started(case: Case, method: str, seed: int, pace: Pace) -> Search:
    """A search of a case that knows nothing of its results."""
    effort = EFFORTS[EFFORT]
    sampler = "model" if method == STOPPED else method
    if sampler in ("model", "cost"):
        if sampler not in case.prepared:
            case.prepared[sampler] = _members(case, sampler, seed)
        members = [_copied(member) for member in case.prepared[sampler]]
    else:
        members = _members(case, sampler, seed)
    total = COMPILED[-1] if pace.trials is None else pace.trials * len(members)
    return Search(members, total, effort.seeds, effort.min_gain if method == STOPPED else 0.0)


def timed_again(m: Measurement, rng: random.Random) -> Measurement:
    """A timing drawn from the recorded median and deviation."""
    if m.latency_us is None:
        return m
    deviation = (m.std_us or 0.0) / m.latency_us
    if deviation > MAX_DEVIATION:
        return m
    return m.but(latency_us=m.latency_us * math.exp(rng.gauss(0, deviation)))


Key = TypeVar("Key")
_CASES: list[Case] = []
"""Environment that the child processes inherit."""


def _run(position: int, method: str, seeds: Iterable[int], pace: Pace) -> list[Run]:
    if method == "gp":
        import torch

        torch.set_num_threads(1)
    return [replay(_CASES[position], method, seed, pace) for seed in seeds]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Median, 90th percentile and worst of the regret after k groups, over the seeds' runs."""
    regrets: dict[str, dict[str, Any]] = {}
    for k in COMPILED:
        values = sorted(run.regrets[min(k, len(run.regrets)) - 1] for run in runs)
        regrets[str(k)] = {
            "runs": [run.regrets[min(k, len(run.regrets)) - 1] for run in runs],
            "median": statistics.median(values),
            "p90": values[math.ceil(0.9 * len(values)) - 1],
            "worst": values[-1],
        }
    return {
        "seeds": len(runs),
        "compiled": statistics.median(len(run.regrets) for run in runs),
        "timed": statistics.median(run.timed for run in runs),
        "regret": regrets,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, write the JSON after every result, print the table.

    Raises:
        ConfigError: when an argument or a recording is wrong.
    """
    args = _parser().parse_args(argv)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the children share the cores
    methods = _methods(args.samplers)
    if args.seeds < 1 or args.in_flight < 1:
        raise ConfigError("seeds and in-flight must be 1 or more")
    check_place(args.json)
    _CASES[:] = cases(cost.recordings([args.recordings]), args.least_groups)
    document = _resumed(args) or {
        "seeds": args.seeds,
        "in_flight": args.in_flight,
        "cases": {
            case.label: {
                "groups": case.groups,
                "candidates": len(case.recorded),
                "best_us": case.best_us,
                "samplers": {},
            }
            for case in _CASES
        },
    }
    code = DONE
    try:
        for position, method, runs in _results(document, methods, args):
            label = _CASES[position].label
            document["cases"][label]["samplers"][method] = summarise(runs)
            say(f"{method}: {label}")
            if args.json is not None:
                write_json(args.json, document)
    except KeyboardInterrupt as exc:
        code = exit_code(exc)
    document["summary"] = summary(document, methods)
    if args.json is not None:
        write_json(args.json, document)
    _show(document, methods)
    return code


def _methods(named: str | None) -> list[str]:
    """The samplers to compare: those named, else all whose packages are installed.

    Raises:
        ConfigError: when one that was named is not known, or needs a package.
    """
    methods = []
    for method in METHODS if named is None else named.split(","):
        if method not in METHODS:
            raise ConfigError(f"sampler={method} is not known (allowed: {', '.join(METHODS)})")
        try:
            sampler_name("model" if method == STOPPED else method)
        except ConfigError as exc:
            if named is not None:
                raise
            say(f"left out: {exc}")
            continue
        methods.append(method)
    return methods


def _results(
    document: Mapping[str, Any], methods: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[int, str, list[Run]]]:
    """Every case and method that the document lacks, as they end."""
    wanted = [
        (position, method)
        for method in methods
        for position, case in enumerate(_CASES)
        if method not in document["cases"][case.label]["samplers"]
    ]
    pace = Pace(args.in_flight)
    works = {(p, m): partial(_run, p, m, range(args.seeds), pace) for p, m in wanted}
    for (position, method), runs in _together(works, args.jobs):
        yield position, method, runs


def _together(
    works: Mapping[Key, Callable[[], list[Run]]], jobs: int
) -> Iterator[tuple[Key, list[Run]]]:
    """Replays in child processes, as they end."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(work): key for key, work in works.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def summary(document: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Over the wide recordings, together and by operation: median and 90th percentile of all runs,
    and the worst problem's median.
    """
    found: dict[str, Any] = {}
    for label, case in document["cases"].items():
        if case["groups"] < WIDE:
            continue
        for op in (TOGETHER, label.split()[0]):
            for method in methods:
                if method not in case["samplers"]:
                    continue
                rows = found.setdefault(op, {}).setdefault(method, {})
                for k, regret in case["samplers"][method]["regret"].items():
                    rows.setdefault(k, []).append(regret)
    return {
        op: {
            method: {k: _pooled(regrets) for k, regrets in rows.items()}
            for method, rows in by_method.items()
        }
        for op, by_method in found.items()
    }


def _pooled(regrets: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values = sorted(value for regret in regrets for value in regret["runs"])
    return {
        "recordings": len(regrets),
        "median": statistics.median(values),
        "p90": values[math.ceil(0.9 * len(values)) - 1],
        "worst_median": max(regret["median"] for regret in regrets),
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench search",
        description="Replays the recorded sweeps through the search and says how far from the "
        "recorded best each sampler is after how many compiled groups.",
    )
    add_recordings(parser)
    parser.add_argument("--samplers", metavar="NAME,...", help="default: all that are installed")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each sampler")
    parser.add_argument(
        "--least-groups", type=int, default=1, metavar="N", help="search only what has so many"
    )
    parser.add_argument(
        "--in-flight", type=int, default=1, metavar="N", help="groups compiled at once"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: the cores)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--resume", action="store_true", help="keep what FILE holds already")
    return parser


def _resumed(args: argparse.Namespace) -> dict[str, Any] | None:
    if not (args.resume and args.json and args.json.is_file()):
        return None
    try:
        document = json.loads(args.json.read_text())
        same = (document["seeds"], document["in_flight"]) == (args.seeds, args.in_flight)
        labels = set(document["cases"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{args.json} is not a result of this benchmark: {exc}") from exc
    if not same or labels != {case.label for case in _CASES}:
        raise ConfigError(f"{args.json} is of other recordings or settings: run without --resume")
    return dict(document)


def _show(document: Mapping[str, Any], methods: Sequence[str]) -> None:
    after = [*(f"after {k}" for k in COMPILED), "p90 after 16"]
    for label, case in document["cases"].items():
        size = f"{case['candidates']} candidates in {case['groups']} groups"
        print(f"\n{label}: {size}, best {case['best_us']:.4g} us")
        rows = [
            [method, f"{found['compiled']:.0f}", f"{found['timed']:.0f}"]
            + [f"{100 * found['regret'][str(k)]['median']:.1f}" for k in COMPILED]
            + [f"{100 * found['regret']['16']['p90']:.1f}"]
            for method in methods
            if (found := case["samplers"].get(method))
        ]
        print(_table(["median regret, %", "compiled", "timed", *after], rows))
    for op, by_method in document["summary"].items():
        count = max(found["8"]["recordings"] for found in by_method.values())
        print(f"\n{op}, {count} recordings with {WIDE} groups or more, {document['seeds']} seeds")
        rows = [
            [method]
            + [
                f"{100 * found[str(k)]['median']:.1f} / {100 * found[str(k)]['p90']:.1f}"
                for k in COMPILED
            ]
            + [f"{100 * found['16']['worst_median']:.1f}"]
            for method, found in by_method.items()
        ]
        head = ["median / p90 of the regret, %", *(f"after {k}" for k in COMPILED)]
        print(_table([*head, "worst problem after 16"], rows))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([head, *rows], frozenset(range(1, len(head))))


def say(text: str) -> None:
    """Tell a person how far it is, beside the results."""
    print(text, file=sys.stderr, flush=True)
