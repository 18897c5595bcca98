"""Other tuners on recorded spaces: the regret after so many evaluations, by replay.

A space has the recorded configs of one family at one problem, each with its quick time. Every way
evaluates configs of the space only, each counts once, and repeats are free. Each way has ten seeds:

- ``tuner``: the search of this project, whose cost models and history leave the problem out
- ``optuna NAME``: a sampler of Optuna over the parameters, without any model of the kernels
- ``kernel_tuner NAME``: a strategy of Kernel Tuner in its simulation mode (``--kernel-tuner``)
- ``nvMatmulHeuristics``: its list for a product in its own order; ``sorted``: as this project reads
  it. Each tile and cluster stands for the fastest recorded config that has both

Recorded configs are those that earlier sweeps chose to measure, so that a random draw does better
than it would over all legal ones.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

import optuna

from benchmarks import tuner_recorded
from benchmarks.harness import Row
from benchmarks.rows import markdown
from benchmarks.tuner_recorded import Replayed
from benchmarks.tuner_sweeps import TIE
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.gemm import cost
from tuner.hardware import Gpu
from tuner.problem import GemmProblem
from tuner.runners.recording import Recording
from tuner.search.fits.cost_fit import CostFits
from tuner.search.samplers import ABSENT, choices_of
from tuner.search.study import Search

EVALUATIONS = (1, 2, 4, 8, 16, 32, 64)
"""Evaluations after which the regret is read."""
MIN_SPACE = 96
"""Fewest configs of a recorded space."""
STRATEGIES = ("random_sample", "greedy_mls", "bayes_opt", "dual_annealing", "genetic_algorithm")
"""Strategies of Kernel Tuner: random, greedy local search, Bayesian, annealing, genetic."""
SAMPLERS = ("RandomSampler", "TPESampler")
"""Samplers of Optuna by default; its GPSampler takes a third of a second for each proposal."""
MAX_REPEATS = 10
"""Proposals of one run for each evaluation, those that repeat a config among them."""
CHILD = Path(__file__).with_name("tuner_kernel_tuner.py")
CHILD_S = 3000.0
HEURISTICS = "nvMatmulHeuristics"


@dataclass(frozen=True)
class Space:
    """A recorded space."""

    label: str
    group: str
    """Family of its configs."""
    name: str
    """Label of its recording."""
    files: tuple[str, ...] = ()
    """Recordings that are read; none: all."""


SMOKE = Space(
    f"gemm at {tuner_recorded.SMOKE.label}",
    "gemm",
    tuner_recorded.SMOKE.label,
    tuner_recorded.SMOKE.names,
)


def spaces(args: Namespace) -> list[Space]:
    """Recorded spaces of enough configs, in an order by hash, so that ``--limit`` is a sample."""
    cases = []
    for part in tuner_recorded.fits_of(args.recordings).parts:
        for family in dict.fromkeys(m.config.family for m in part.measurements):
            own = _of_family(part, family)
            if len(own.measurements) >= MIN_SPACE:
                name = tuner_recorded.label_of(part)
                cases.append(Space(f"{family} at {name}", family, name))
    return sorted(cases, key=lambda case: hashlib.sha256(case.label.encode()).hexdigest())


def _of_family(part: Recording, family: str) -> Recording:
    """The recording with the passed configs of one family, which has no stages."""
    own = tuple(m for m in part.measurements if m.ok and m.config.family == family)
    return replace(part, measurements=tuple(m for m in own if not m.config.stages))


def measure(case: Space, args: Namespace) -> Row:
    """Regrets of each way by seed, after `EVALUATIONS`."""
    fits: CostFits = tuner_recorded.fits_of(args.recordings, case.files)
    part = next(p for p in fits.parts if tuner_recorded.label_of(p) == case.name)
    space = _of_family(part, case.group)
    times = {m.config: float(m.latency_us or 0.0) for m in space.measurements}
    seeds, most = range(args.times), min(EVALUATIONS[-1], len(times))
    replayed = Replayed(space, fits)
    orders: dict[str, list[list[Config]]] = {
        "tuner": [_own(replayed.search("model", seed, most), replayed, most) for seed in seeds]
    }
    for name in args.optuna.split(",") if args.optuna else ():
        orders[f"optuna {name}"] = [_optuna(name, seed, times, most) for seed in seeds]
    lost: dict[str, str] = {}
    for name, runs in _kernel_tuner(times, args, most).items():
        orders[f"kernel_tuner {name}"] = [run for run in runs if not isinstance(run, str)]
        lost |= {f"kernel_tuner {name}": run for run in runs if isinstance(run, str)}
    if isinstance(part.problem, GemmProblem) and case.group == "gemm":
        orders |= _heuristics(part.problem, part.gpu, times)
    return {
        "candidates": len(times),
        "best_us": min(times.values()),
        "regrets": {way: [regrets(run, times) for run in runs] for way, runs in orders.items()},
        "ended": {way: statistics.fmean(map(len, runs)) for way, runs in orders.items() if runs},
        "errors": lost,
    }


def regrets(order: Sequence[Config], times: Mapping[Config, float]) -> list[float | None]:
    """The least time of the first configs over the space's, less 1, after each of `EVALUATIONS`;
    None before the first.
    """
    best = min(times.values())
    firsts = (order[:count] for count in EVALUATIONS)
    return [min(map(times.__getitem__, some)) / best - 1 if some else None for some in firsts]


def _own(search: Search, replayed: Replayed, most: int) -> list[Config]:
    """Configs in the order of this project's search, one group at a time."""
    order: dict[Config, None] = {}
    while len(order) < most and (group := search.ask()) is not None:
        search.tell([replayed.recorded[config] for config in group])
        order |= dict.fromkeys(group)
    return list(order)


def _optuna(name: str, seed: int, times: Mapping[Config, float], most: int) -> list[Config]:
    """Configs in the order of a sampler of Optuna over their parameters.

    A proposal stands for the config of the space that has most of its values, any of several.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    configs = sorted(times, key=lambda config: config.digest)
    rng = random.Random(seed)
    choices = choices_of([config.params for config in configs])
    rows = {config: values_of(config, list(choices)) for config in configs}
    study = optuna.create_study(sampler=getattr(optuna.samplers, name)(seed=seed))
    order: dict[Config, None] = {}
    for _ in range(MAX_REPEATS * most):
        trial = study.ask()
        proposed = [trial.suggest_categorical(name, values) for name, values in choices.items()]
        config = max(configs, key=lambda c: (sum(map(eq, rows[c], proposed)), rng.random()))
        study.tell(trial, times[config])
        order.setdefault(config)
        if len(order) == most:
            break
    return list(order)


def values_of(config: Config, names: Sequence[str]) -> list[Any]:
    """Values of a config by the names, `ABSENT` where it has none."""
    return [config.params.get(name, ABSENT) for name in names]


def _kernel_tuner(
    times: Mapping[Config, float], args: Namespace, most: int
) -> dict[str, list[list[Config] | str]]:
    """Configs in the order of each strategy and seed, or the error of a run.

    Raises:
        BenchmarkError: when the other Python ends without an answer.
    """
    if args.kernel_tuner is None:
        return {}
    configs = list(times)
    names = sorted({name for config in configs for name in config.params})
    asked = {
        "names": names,
        "configs": [values_of(config, names) for config in configs],
        "times": list(times.values()),
        "strategies": STRATEGIES,
        "seeds": list(range(args.times)),
        "evaluations": most,
    }
    done = subprocess.run(
        [args.kernel_tuner, CHILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise BenchmarkError(f"{args.kernel_tuner}: {last}")
    answer: dict[str, list[list[int] | str]] = json.loads(done.stdout)
    return {
        name: [run if isinstance(run, str) else [configs[i] for i in run] for run in runs]
        for name, runs in answer.items()
    }


def _heuristics(
    problem: GemmProblem, gpu: Gpu, times: Mapping[Config, float]
) -> dict[str, list[list[Config]]]:
    """The library's list in its own order, and as this project reads it. A tile and cluster without
    a recorded config is left out.
    """
    raw = [suggestion for suggestion, _ in cost.listed(problem, gpu, swap_ab=False)]
    read = cost.suggestions(problem, gpu, {False, True})
    orders: dict[str, list[list[Config]]] = {}
    for name, listed in ((HEURISTICS, raw), (f"{HEURISTICS} sorted", read)):
        order: dict[Config, None] = {}
        for suggestion in listed:
            alike = [config for config in times if cost.suggestion_of(config) == suggestion]
            if alike:
                order.setdefault(min(alike, key=times.__getitem__))
        orders[name] = [list(order)]
    return orders


def line(row: Row) -> str:
    """Mean regret of each way after 8 evaluations."""
    at = EVALUATIONS.index(8)
    means = (f"{way} {_mean(runs, at)}" for way, runs in row["regrets"].items())
    return f"{row['case']}: {row['candidates']} configs, after 8: {', '.join(means)}"


def table(rows: Sequence[Row]) -> list[str]:
    """Mean regret of each way by evaluations over the spaces that it was run on."""
    done = [row for row in rows if "regrets" in row]
    lines: list[Sequence[str]] = [("way, mean regret in %", "spaces", *map(str, EVALUATIONS))]
    for way in dict.fromkeys(way for row in done for way in row["regrets"]):
        mine = [row["regrets"][way] for row in done if row["regrets"].get(way)]
        runs = [run for each in mine for run in each]
        cells = (_mean(runs, at) for at in range(len(EVALUATIONS)))
        lines.append((way, str(len(mine)), *cells))
    errors = [f"- {row['case']}: {way}: {e}" for row in done for way, e in row["errors"].items()]
    return [*markdown(lines), "", *figures(done), "", *errors]


def figures(done: Sequence[Row], evaluations: int = 16) -> list[str]:
    """Mean and worst regret, top-1 rate and flips of each way's choices after so many evaluations.
    A flip is another seed's choice that is slower than the first seed's by more than a tie.
    """
    at = EVALUATIONS.index(evaluations)
    lines: list[Sequence[str]] = [
        (f"way, after {evaluations}", "regret", "worst", "top-1 or tie", "flips")
    ]
    for way in dict.fromkeys(way for row in done for way in row["regrets"]):
        spaces = [
            [value for run in row["regrets"].get(way, ()) if (value := run[at]) is not None]
            for row in done
        ]
        every = [value for space in spaces for value in space]
        if not every:
            continue
        pairs = [(space[0], later) for space in spaces for later in space[1:]]
        flips = sum(1 + later > (1 + first) * (1 + TIE) for first, later in pairs)
        lines.append(
            (
                *(way, f"{statistics.fmean(every):.1%}", f"{max(every):.1%}"),
                f"{sum(value <= TIE for value in every) / len(every):.0%}",
                f"{flips} of {len(pairs)}",
            )
        )
    return markdown(lines)


def _mean(runs: Sequence[Sequence[float | None]], at: int) -> str:
    values = [value for run in runs if (value := run[at]) is not None]
    return f"{100 * statistics.fmean(values):.1f}" if values else ""
