"""``scripts/bench stopping``: a simulated clock over recorded sweeps, to judge when a search ends.

A recorded problem is searched as a sweep does, with timings drawn anew from the recorded
deviations. Kernels compile on simulated cores, a group each, in the order of the requests. A group
takes its recorded seconds, else a duration drawn from those of its family. One simulated GPU times
compiled kernels.

Prices of a second of waiting are compared; price 0 waits for everything that was requested. The
times are simulated, the losses replayed. A loss is the recorded time of the fastest finalist,
against the recorded best.
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import search
from benchmarks.arguments import add_recordings
from benchmarks.search import Case
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import DONE, Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Family
from tuner.measurement import Measurement
from tuner.runners import recording
from tuner.search import expectation
from tuner.search.expectation import Expectation
from tuner.search.fits import cost_fit as cost
from tuner.search.stopping import FALLBACK_S, CompileTimes, Stopping, queued
from tuner.search.study import DEFAULT_TRIALS, EFFORTS, Place, Search
from tuner.selection.describe import table

POLL_S = 2.0
"""Between two looks at the rule while nothing is measured."""
CORES = 16
LEARNT_CORES = (4, 16)
SEEDS = 10
MIN_GROUPS = 32
"""Groups from which on a recording is searched: the best of fewer is soon found."""
PRICES = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
TIMING_S = 0.4
"""Seconds of the GPU for a candidate: reference, check and quick timing of a call below 1 ms."""
EFFORT = "quick"

_CASES: list[Case] = []
"""Environment that the child processes inherit."""


@dataclass(frozen=True)
class End:
    """How one simulated search ended."""

    seconds: float
    """Until nothing is waited for; the final pass follows."""
    first_s: float
    """Until a candidate has passed."""
    best_s: float
    """Until the finalist that wins was timed."""
    compiled: int
    cancelled: int
    loss: float
    """Loss of the final pass's choice, as a share over the recorded best."""


@dataclass
class Simulation:
    """One problem, seed and price on a simulated machine."""

    case: Case
    seed: int
    price: float
    cores: int
    effort: str
    durations: Mapping[str, Sequence[float]]
    """Recorded seconds of a group, by family, of all recordings."""
    now: float = 0.0
    gpu_free: float = 0.0
    core_free: list[float] = field(default_factory=list)
    compiles: dict[Place, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each group that was asked for."""
    queue: list[tuple[float, int, Place, list[Config]]] = field(default_factory=list)

    def run(self) -> End:
        """Search to the end."""
        case, rng = self.case, random.Random(self.seed)
        families = {family.name: family for family in case.families}
        sought = searched(case, self.seed, self.cores, self.effort)
        times = CompileTimes(case.history)
        stopping = Stopping(sought, self.price, EFFORTS[self.effort].target_s)
        self.core_free = [0.0] * self.cores
        seen: list[Measurement] = []
        passed: dict[Config, float] = {}
        while True:
            while sought.pending < sought.at_once and (group := sought.ask()) is not None:
                self._submit(families[group[0].family], group)
            if not self.queue or self._is_over(times, stopping):
                return self._end(sought, seen, passed)
            if self.queue[0][0] > self.now + POLL_S:
                self.now += POLL_S
                continue
            ready, _, place, group = heapq.heappop(self.queue)
            self.gpu_free = max(self.gpu_free, ready) + TIMING_S * len(group)
            self.now = max(self.now, self.gpu_free)
            told = [search.timed_again(case.recorded[config], rng) for config in group]
            begin, end = self.compiles[place]
            times.observe([told[0].but(compile_cpu_s=end - begin)])
            sought.tell(told)
            seen += told
            passed |= {m.config: self.now for m in told if m.ok}

    def _submit(self, family: Family, group: list[Config]) -> None:
        place = family.name, family.compile_digest(group[0])
        if place not in self.compiles:
            begin = max(self.now, heapq.heappop(self.core_free))
            self.compiles[place] = begin, begin + self._seconds(family, group)
            heapq.heappush(self.core_free, self.compiles[place][1])
        ready = max(self.now, self.compiles[place][1])
        heapq.heappush(self.queue, (ready, len(self.compiles), place, group))

    def _seconds(self, family: Family, group: Sequence[Config]) -> float:
        """Recorded of the group, else drawn; equal for every price."""
        digest = family.compile_digest(group[0])
        for config in self.case.space(family):
            seconds = self.case.recorded[config].compile_cpu_s
            if seconds and family.compile_digest(config) == digest:
                return seconds
        known = self.durations.get(family.name) or [FALLBACK_S]
        return random.Random(f"{self.seed} {digest}").choice(known)

    def _is_over(self, times: CompileTimes, stopping: Stopping) -> bool:
        """The rule, by what a sweep knows: when each compile began, never when it ends. What is
        compiled is always timed.
        """
        running, waiting = [], []
        left: dict[Place, float] = {}
        for _, _, place, _ in sorted(self.queue, key=lambda one: one[1]):
            begin, end = self.compiles[place]
            if end <= self.now:
                return False
            if begin <= self.now:
                left[place] = times.left_s(place[0], self.now - begin)
                running.append(left[place])
            else:
                waiting.append(place)
        ends = queued(running, [times.left_s(place[0]) for place in waiting])
        return stopping.is_over(left | dict(zip(waiting, ends, strict=True)), self.now)

    def _end(
        self, sought: Search, seen: Sequence[Measurement], passed: Mapping[Config, float]
    ) -> End:
        winner, loss = search.won(self.case, seen)
        return End(
            self.now,
            min(passed.values(), default=math.inf),
            passed[winner] if winner else math.inf,
            sum(member.finished for member in sought.members),
            sought.pending,
            loss,
        )


def simulate(
    case: Case,
    seed: int,
    price: float,
    cores: int,
    durations: Mapping[str, Sequence[float]],
    effort: str = EFFORT,
) -> End:
    """One search of a case: see `Simulation`."""
    return Simulation(case, seed, price, cores, effort, durations).run()


def searched(case: Case, seed: int, cores: int, effort: str) -> Search:
    """A sweep's search of a case."""
    trials = EFFORTS[effort].trials.get(case.problem.op, DEFAULT_TRIALS)
    sought = search.started(case, search.STOPPED, seed, search.Pace(cores, trials))
    sought.min_gain = EFFORTS[effort].min_gain
    return sought


def learnt(
    cases: Sequence[Case], seeds: int, durations: Mapping[str, Sequence[float]]
) -> list[Expectation]:
    """Time and loss of each effort on each number of cores, by operation."""
    found = []
    for op in sorted({case.problem.op for case in cases}):
        mine = [case for case in cases if case.problem.op == op]
        for effort in EFFORTS:
            for cores in LEARNT_CORES:
                price = EFFORTS[effort].price
                summary = summarise(
                    [
                        simulate(case, seed, price, cores, durations, effort)
                        for case in mine
                        for seed in range(seeds)
                    ]
                )
                names = ("seconds", "seconds_p90", "loss", "loss_p90")
                values = {name: round(summary[name], 4) for name in names}
                found.append(Expectation(op, effort, cores, len(mine), **values))
                search.say(found[-1].text(cores))
    return found


def recorded_durations(recordings: Iterable[recording.Recording]) -> dict[str, list[float]]:
    """Seconds of the recorded compiles of a group, by family."""
    found: dict[str, list[float]] = {}
    for one in recordings:
        for part in one.walk():
            for m in cost.quick_pass(part):
                if m.compile_cpu_s:
                    found.setdefault(m.config.family, []).append(m.compile_cpu_s)
    return found


def _run(
    position: int, price: float, seeds: int, cores: int, durations: Mapping[str, Sequence[float]]
) -> list[End]:
    return [simulate(_CASES[position], seed, price, cores, durations) for seed in range(seeds)]


def summarise(ends: Sequence[End]) -> dict[str, float]:
    """Medians and tails over the seeds."""
    found: dict[str, float] = {}
    for name in ("seconds", "first_s", "best_s", "compiled", "cancelled", "loss"):
        values = sorted(getattr(end, name) for end in ends)
        found[name] = statistics.median(values)
        found[f"{name}_p90"] = values[math.ceil(0.9 * len(values)) - 1]
        found[f"{name}_worst"] = values[-1]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, write the JSON, print the table.

    Raises:
        ConfigError: when an argument or a recording is wrong.
    """
    args = _parser().parse_args(argv)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the children share the cores
    if args.seeds < 1 or args.cores < 1:
        raise ConfigError("seeds and cores must be 1 or more")
    prices = [_price(text) for text in args.prices.split(",")]
    check_place(args.json)
    recordings = cost.recordings([args.recordings])
    durations = recorded_durations(recordings)
    _CASES[:] = search.cases(recordings, args.least_groups)
    if args.write:
        rows = [one.to_json() for one in learnt(_CASES, args.seeds, durations)]
        what = "seconds simulated, losses replayed: scripts/bench stopping --write"
        expectation.file().parent.mkdir(parents=True, exist_ok=True)
        write_json(expectation.file(), {"what": what, "seeds": args.seeds, "expected": rows})
        return DONE
    ends: dict[float, dict[str, list[End]]] = {price: {} for price in prices}
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        futures = {
            pool.submit(_run, position, price, args.seeds, args.cores, durations): (position, price)
            for position in range(len(_CASES))
            for price in prices
        }
        for future in as_completed(futures):
            position, price = futures[future]
            ends[price][_CASES[position].label] = future.result()
    document = {
        "what": "times simulated, losses replayed",
        "seeds": args.seeds,
        "cores": args.cores,
        "timing_s": TIMING_S,
        "cases": {case.label: {"groups": case.groups, "best_us": case.best_us} for case in _CASES},
        "prices": {
            str(price): {
                "all": summarise([end for ends in by_case.values() for end in ends]),
                "cases": {label: summarise(ends) for label, ends in sorted(by_case.items())},
            }
            for price, by_case in ends.items()
        },
    }
    if args.json is not None:
        write_json(args.json, document)
    _show(document)
    return DONE


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ConfigError(f"prices: '{text}' is not a number from 0 on")
    return price


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench stopping",
        description="Simulates sweeps of recorded problems on so many cores, and says when each "
        "ends and what it loses, for prices of a second of waiting.",
    )
    add_recordings(parser)
    parser.add_argument(
        "--least-groups",
        type=int,
        default=MIN_GROUPS,
        metavar="N",
        help="least kernels of a recording that is used",
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each recording")
    parser.add_argument("--cores", type=int, default=CORES, help="cores of the simulated machine")
    parser.add_argument(
        "--prices",
        default=",".join(map(str, PRICES)),
        metavar="SHARE,...",
        help="prices of a second, between commas",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: the cores)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--write", action="store_true", help="store what each effort takes and loses, as it ships"
    )
    return parser


def _show(document: Mapping[str, Any]) -> None:
    head = ["price, % a second", "end, s", "p90", "best, s", "compiled", "cancelled"]
    rows = [
        [f"{100 * float(price):g}"]
        + [f"{found['all'][name]:.0f}" for name in ("seconds", "seconds_p90", "best_s")]
        + [f"{found['all'][name]:.0f}" for name in ("compiled", "cancelled")]
        + [f"{100 * found['all'][name]:.2f}" for name in ("loss", "loss_p90", "loss_worst")]
        for price, found in document["prices"].items()
    ]
    print("Simulated seconds to the end of the search, and replayed loss")
    print(table([[*head, "loss, %", "p90", "worst"], *rows], frozenset(range(9))))
