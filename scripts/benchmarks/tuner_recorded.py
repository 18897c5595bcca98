"""Recorded sweeps through the real search, without a GPU: losses by compiles, and seconds.

A problem's own results never reach its search. The cost models are fitted again without them, and
`model` learns from the recordings of other problems. A seed decides the sampler's draws, and draws
each timing anew from its recorded deviation.

Three things are replayed:

- each sampler, a group at a time: the recorded time of the candidate that looks best after so many
  compiles, over the recorded best, less 1
- a sweep's search on simulated cores and one simulated GPU, by effort and by the price of a second
  of waiting. A group alone compiles for its recorded seconds, else for a duration drawn from those
  of its family. The loss is that of the final pass's choice
- what the surrogate expects all groups without a result to save, and what the best of them saves

The rows make expected seconds and losses (``tuner fit stopping``).
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.rows import markdown
from benchmarks.search_machine import Compilers
from tuner.config import Config
from tuner.families import families
from tuner.families.base import Family, KernelSpec, group_by_kernels, without_fallbacks
from tuner.measurement import Measurement
from tuner.runners import recording_archive
from tuner.runners.recording import Recording, read
from tuner.search import ranking
from tuner.search.family_search import FamilySearch
from tuner.search.fits import cost_fit
from tuner.search.fits.cost_fit import CostFits
from tuner.search.stopping import FALLBACK_S, CompileTimes, Stopping
from tuner.search.study import DEFAULT_TRIALS, EFFORTS, Place, Search, sampler_name

COMPILED = (1, 2, 4, 8, 12, 16, 40)
"""Compiled groups after which the regret is read."""
EFFORT, SIMULATED_CORES = "quick", (4, 16)
STOPPED = "model-stopping"
"""The sampler `model` as a sweep uses it: it ends when no gain is expected."""
SAMPLERS = f"model,{STOPPED},cost,tpe,random"
PRICES = (0.0, 5e-4, 1e-3, 2e-3)
"""Prices of a second that are compared; 0 waits for everything that was requested."""
MAX_DEVIATION = 0.1
"""Largest deviation of a timing, as a share. A larger one is an interrupted round, which moves no
median (28 of 9,400 recorded quick timings).
"""
POLL_S, TIMING_S = 2.0, 0.4
"""Between two looks at the rule; and of the GPU for a candidate: reference, check and quick timing
of a call below 1 ms."""


@dataclass(frozen=True)
class Recorded:
    """A recorded problem, and the recordings that its search learns from."""

    label: str
    group: str
    """Operation."""
    folder: Path
    names: tuple[str, ...] = ()
    """Recordings of the folder; none: all."""


SMOKE = Recorded(
    "gemm M=512,N=11008,K=4096,dtype=fp16,epilogue=bias_gelu on H200",
    "gemm",
    recording_archive.folder(),
    tuple(
        f"gemm-M512_N11008_K4096_dtypefp16_epilogue{one}-H200-graph-cold.json.gz"
        for one in ("bias_gelu", "bias_gelu_tanh")
    ),
)


@cache
def _recordings(folder: Path, names: Sequence[str]) -> list[Recording]:
    if not names:
        return cost_fit.recordings([folder])
    return [read(source) for source in recording_archive.sources(folder) if source.name in names]


@cache
def fits_of(folder: Path, names: Sequence[str] = ()) -> CostFits:
    """Fits to the recordings of a folder, or to some of them."""
    return CostFits(_recordings(folder, names))


def cases(args: Namespace) -> list[Recorded]:
    """Recorded problems of enough kernels; stages are history only.

    Raises:
        ConfigError: when a sampler is not known, or the recording is missing.
    """
    for name in args.samplers.split(","):
        sampler_name("model" if name == STOPPED else name)
    whole = {one.problem for one in _recordings(args.recordings, ())}
    return [
        Recorded(label_of(part), part.problem.op, args.recordings)
        for part in fits_of(args.recordings).parts
        if part.problem in whole
        and len(part.measurements) >= args.least_groups <= _kernels(part)
        and any(m.ok for m in part.measurements)
    ]


def label_of(part: Recording) -> str:
    """Operation, problem and GPU of a recording."""
    return f"{part.problem.op} {part.problem.label()} on {part.gpu.name.split()[-1]}"


def _kernels(part: Recording) -> int:
    members = families()
    configs = [m.config for m in part.measurements]
    return len({(c.family, members[c.family].compile_digest(c)) for c in configs})


class Replayed:
    """A recorded problem and all that may be known when it is searched.

    Args:
        part: its recording, the quick pass only.
        fits: fits to the recordings that are learnt from.
    """

    def __init__(self, part: Recording, fits: CostFits) -> None:
        self.problem, self.gpu = part.problem, part.gpu
        self.recorded = {m.config: m for m in part.measurements}
        self.families = {one.name: one for one in without_fallbacks(fits.without(part))}
        """Families that compete in a sweep, with the constants of a fit without the problem."""
        self.history = [
            m
            for other in fits.parts
            if other.problem != part.problem
            and (other.gpu.identity, other.regime) == (part.gpu.identity, part.regime)
            for m in other.measurements
        ]
        """Quick passes of the other problems on this chip in this regime."""
        self.best_us = min(m.latency_us for m in part.measurements if m.latency_us is not None)
        self._begun: dict[str, list[FamilySearch]] = {}
        """Searches that know nothing, by a sampler that draws nothing."""

    def space(self, family: Family) -> list[Config]:
        """Recorded configs of a family."""
        return [config for config in self.recorded if config.family == family.name]

    def digest(self, config: Config) -> str:
        """A config's compiled kernel."""
        return self.families[config.family].compile_digest(config)

    def search(self, method: str, seed: int, total: int) -> Search:
        """A search that knows nothing of the results, of at most so many groups."""
        effort = EFFORTS[EFFORT]
        sampler = "model" if method == STOPPED else method
        if sampler in ("model", "cost"):  # beginning one takes longer than replaying it
            if sampler not in self._begun:
                self._begun[sampler] = self._begin(sampler, seed)
            members = [_copied(member) for member in self._begun[sampler]]
        else:
            members = self._begin(sampler, seed)
        min_gain = effort.min_gain if method == STOPPED else 0.0
        return Search(members, total, effort.seeds, min_gain)

    def _begin(self, sampler: str, seed: int) -> list[FamilySearch]:
        effort = EFFORTS[EFFORT]
        return [
            FamilySearch(
                family,
                self.problem,
                self.gpu,
                self.space(family),
                seeds=effort.seeds,
                sampler=sampler,
                seed=seed,
                raced=effort.raced,
                history=self.history,
            )
            for family in self.families.values()
        ]

    def timed_again(self, group: Sequence[Config], rng: random.Random) -> list[Measurement]:
        """Timings drawn from the recorded medians and deviations."""
        return [_drawn(self.recorded[config], rng) for config in group]

    def loss(self, seen: Sequence[Measurement]) -> float:
        """Recorded time of the fastest finalist over the recorded best, less 1; infinity where no
        candidate passed.
        """
        finalists = ranking.finalists(seen, EFFORTS[EFFORT].finalists, self.digest)
        times = [self.recorded[m.config].latency_us or math.inf for m in finalists]
        return min(times, default=math.inf) / self.best_us - 1


def _copied(member: FamilySearch) -> FamilySearch:
    shared = (member.family, member.groups)
    return copy.deepcopy(member, {id(one): one for one in shared})


def _drawn(m: Measurement, rng: random.Random) -> Measurement:
    deviation = (m.std_us or 0.0) / m.latency_us if m.latency_us else math.inf
    if m.latency_us is None or deviation > MAX_DEVIATION:
        return m
    return m.but(latency_us=m.latency_us * math.exp(rng.gauss(0, deviation)))


def replay(case: Replayed, method: str, seed: int, in_flight: int = 1) -> list[float]:
    """Search a recorded problem; the regret after each compiled group.

    Args:
        case: the problem.
        method: a sampler, or `STOPPED`.
        seed: seed of the sampler and of the timings' noise.
        in_flight: groups that are asked for before the first one's result is told.
    """
    rng, search = random.Random(seed), case.search(method, seed, COMPILED[-1])
    leader: tuple[float, float] = (math.inf, math.inf)
    regrets: dict[int, float] = {}
    compiled: set[str] = set()
    queue: deque[list[Config]] = deque()
    while True:
        while len(queue) < in_flight and (group := search.ask()) is not None:
            queue.append(group)
        if not queue:
            return list(regrets.values())
        told = case.timed_again(queue.popleft(), rng)
        search.tell(told)
        compiled.add(case.digest(told[0].config))
        for m in told:
            recorded_us = case.recorded[m.config].latency_us
            if m.latency_us is not None and recorded_us is not None:
                leader = min(leader, (m.latency_us, recorded_us))
        regrets[len(compiled)] = leader[1] / case.best_us - 1


@dataclass
class Simulation:
    """A sweep's search of one problem, with a seed, on a simulated machine.

    Args:
        case: the problem.
        seed: seed of the search and of the timings' noise.
        durations: recorded seconds of a group, by family.
        cores: cores that compile.
        effort: effort of the sweep.
        price: price of a second; None: the effort's.
    """

    case: Replayed
    seed: int
    durations: Mapping[str, Sequence[float]]
    cores: int
    effort: str = EFFORT
    price: float | None = None

    def run(self) -> tuple[float, float]:
        """Search until nothing is waited for: seconds, and the loss of the final pass's choice."""
        case, rng, effort = self.case, random.Random(self.seed), EFFORTS[self.effort]
        trials = effort.trials.get(case.problem.op, DEFAULT_TRIALS)
        search = case.search(STOPPED, self.seed, trials * len(case.families))
        search.min_gain = effort.min_gain
        times = CompileTimes(case.history)
        price = effort.price if self.price is None else self.price
        stopping = Stopping(search, price, effort.target_s)
        compilers = Compilers(self.cores, _Seconds(self._seconds))
        asked: dict[Place, list[Config]] = {}
        ready: list[tuple[float, Place]] = []
        seen: list[Measurement] = []
        now = 0.0
        while True:
            while search.pending < search.at_once and (group := search.ask()) is not None:
                place = group[0].family, case.digest(group[0])
                asked[place] = group
                if place in compilers.compiled:
                    ready.append((now, place))
                else:
                    compilers.submit(place, _spec(case, group[0]))
            if not ready:
                left_s = compilers.left_s(times)
                if not asked or stopping.is_over(left_s, now):
                    return now, case.loss(seen)
                now = min(max(now, compilers.next_end), now + POLL_S)
            else:
                _, place = ready.pop(0)
                group = asked.pop(place)
                now += TIMING_S * len(group)
                told = case.timed_again(group, rng)
                times.observe([told[0].but(compile_cpu_s=compilers.compiled[place])])
                search.tell(told)
                seen += told
            ready += compilers.until(now)

    def _seconds(self, place: Place) -> float:
        """Recorded of the group, else drawn; equal for every price."""
        family, digest = place
        for config in self.case.space(self.case.families[family]):
            seconds = self.case.recorded[config].compile_cpu_s
            if seconds and self.case.digest(config) == digest:
                return seconds
        durations = self.durations.get(family) or [FALLBACK_S]
        return random.Random(f"{self.seed} {digest}").choice(durations)


class _Seconds(dict[Place, float]):
    """Seconds of a place, asked for once."""

    def __init__(self, seconds: Callable[[Place], float]) -> None:
        super().__init__()
        self._of = seconds

    def __missing__(self, place: Place) -> float:
        return self.setdefault(place, self._of(place))


def _spec(case: Replayed, config: Config) -> KernelSpec:
    """The first kernel of a config."""
    return next(iter(case.families[config.family].kernels(case.problem, config).values()))


def promises(case: Replayed, seed: int) -> list[tuple[int, float, float]]:
    """Number of results, expected saving and true saving after each result of a search.

    The first is the share of the time that the surrogate expects all other groups to save. The
    second is what the best of them saves beside a final pass's choice.

    Args:
        case: the problem.
        seed: seed of the timings' noise.
    """
    rng, search = random.Random(seed), case.search("model", seed, COMPILED[-1])
    seen: list[Measurement] = []
    steps: dict[int, tuple[int, float, float]] = {}
    while (group := search.ask()) is not None:
        told = case.timed_again(group, rng)
        search.tell(told)
        seen += told
        results = sum(member.finished for member in search.members)
        if results and (saving := search.expected_saving()) is not None:
            came = 1 - 1 / (1 + case.loss(seen))
            steps.setdefault(results, (results, round(saving.promised, 5), round(came, 5)))
    return list(steps.values())


@cache
def _durations(folder: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of the recorded compiles of a group, by family."""
    durations: dict[str, list[float]] = {}
    for part in (part for one in _recordings(folder, names) for part in one.walk()):
        for m in cost_fit.quick_pass(part):
            if m.compile_cpu_s:
                durations.setdefault(m.config.family, []).append(m.compile_cpu_s)
    return durations


def measure(case: Recorded, args: Namespace) -> Row:
    """Regrets of each sampler by seed, and the ends of simulated searches."""
    fits = fits_of(case.folder, case.names)
    replayed = Replayed(next(part for part in fits.parts if label_of(part) == case.label), fits)
    regrets: dict[str, list[list[float]]] = {}
    for method in args.samplers.split(","):
        runs = (replay(replayed, method, seed, args.in_flight) for seed in range(args.times))
        regrets[method] = [[run[min(k, len(run)) - 1] for k in COMPILED] for run in runs]

    def ends(**options: Any) -> list[tuple[float, float]]:
        durations = _durations(case.folder, case.names)
        seeds = range(args.times)
        return [Simulation(replayed, seed, durations, **options).run() for seed in seeds]

    return {
        "groups": sum(
            len(group_by_kernels(one, replayed.space(one))) for one in replayed.families.values()
        ),
        "candidates": len(replayed.recorded),
        "best_us": replayed.best_us,
        "regrets": regrets,
        "searches": {
            f"{effort} {cores}": ends(effort=effort, cores=cores)
            for effort in EFFORTS
            for cores in SIMULATED_CORES
        },
        "promises": [promises(replayed, seed) for seed in range(args.times)],
        "prices": {str(price): ends(price=price, cores=SIMULATED_CORES[-1]) for price in PRICES},
    }


def line(row: Row) -> str:
    """Median regret of each sampler after 8 groups."""
    at = COMPILED.index(8)
    medians = (
        f"{method} {statistics.median(run[at] for run in runs):.1%}"
        for method, runs in row["regrets"].items()
    )
    return f"{row['case']}: {row['groups']} kernels, after 8: {', '.join(medians)}"


def table(rows: Sequence[Row]) -> list[str]:
    """Loss of the samplers by compiles, and ends of searches by price; median / 90th percentile."""
    done = [row for row in rows if "regrets" in row]
    methods = dict.fromkeys(method for row in done for method in row["regrets"])
    losses = [("sampler, loss in %", *map(str, COMPILED))]
    for method in methods:
        runs = [run for row in done for run in row["regrets"].get(method, ())]
        losses.append((method, *(_percent([run[i] for run in runs]) for i in range(len(COMPILED)))))
    searches = [("search", "seconds", "loss in %")]
    for kind, title in (("searches", "effort and cores"), ("prices", "price of a second")):
        for name in dict.fromkeys(name for row in done for name in row[kind]):
            ends = [end for row in done for end in row[kind].get(name, ())]
            seconds, lost = ([end[i] for end in ends] for i in range(2))
            searches.append((f"{title} {name}", _quantiles(seconds, "{:.0f}"), _percent(lost)))
    return [*markdown(losses), "", *markdown(searches)]


def _percent(shares: Sequence[float]) -> str:
    return _quantiles([100 * share for share in shares], "{:.1f}")


def _quantiles(values: Sequence[float], form: str) -> str:
    ordered = sorted(values)
    last = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return f"{form.format(statistics.median(ordered))} / {form.format(last)}"
