"""Effect of each parameter of a tuned kernel: the winner, and its neighbours in one parameter.

``scripts/bench levers --shape S=1024,D=64`` times the best own kernel of the cache and its
neighbours, interleaved in one run. A neighbour is a legal config that differs in one parameter by
one step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tuner.bench.comparison import ComparisonRun, RowTask
from tuner.bench.results import Results
from tuner.cli import Parser
from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection.reader import Entry
from tuner.store.entry import is_vendor


def neighbours(member: Family, problem: Problem, config: Config, gpu: Gpu) -> dict[str, Config]:
    """Legal configs that differ from `config` in one parameter, by ``name=value``.

    A parameter gets the nearest legal values below and above its own among `Family.tried`. If the
    change removes or adds another parameter, the config comes from the family's space: it agrees in
    all parameters that both have. An optional parameter gets ``name=value`` for each legal value,
    or ``name=off``.
    """
    found: dict[str, Config] = {}
    space = list(member.space(problem, gpu))
    for name, present in config.params.items():
        for value in _steps(member.tried(name), present):
            near = _with(member, problem, config, gpu, space, name, value)
            if near is not None:
                found[f"{name}={value}"] = near
        off = {other: value for other, value in config.params.items() if other != name}
        without = Config(member.name, off, config.stages)
        if member.accepts(problem, without, gpu):
            found[f"{name}=off"] = without
    for name in [name for name in member.domains if name not in config.params]:
        for value in member.tried(name):
            near = _with(member, problem, config, gpu, space, name, value)
            if near is not None:
                found[f"{name}={value}"] = near
    return found


def _steps(domain: Sequence[Value], present: Value) -> Iterator[Value]:
    """The other values, nearest first where they are ordered."""
    if isinstance(present, bool | str):
        yield from (value for value in domain if value != present)
        return
    numbers = [value for value in domain if isinstance(value, int)]
    yield from sorted((n for n in numbers if n < present), reverse=True)[:1]
    yield from sorted(n for n in numbers if n > present)[:1]


def _with(
    member: Family,
    problem: Problem,
    config: Config,
    gpu: Gpu,
    space: Sequence[Config],
    name: str,
    value: Value,
) -> Config | None:
    changed = Config(member.name, {**config.params, name: value}, config.stages)
    if member.accepts(problem, changed, gpu):
        return changed
    for other in space:
        shared = (config.params.keys() & other.params.keys()) - {name}
        if other.get(name) == value and all(other[k] == config[k] for k in shared):
            return other
    return None


def table(results: Results) -> str:
    """One line a lever: its time over the winner's, problem by problem."""
    lines = []
    for row in results.rows:
        if row.failure or row.own is None or not row.own.latency_us:
            lines.append(f"{row.problem.label()}: {row.failure or 'the winner did not pass'}")
            continue
        base = row.own.latency_us
        chosen = f"{row.own.name} {_params(row.own.config)}"
        lines.append(f"{row.problem.label()}: {base:.2f} us, {chosen}")
        named = [t for t in row.timed if t.name != row.own.name]
        for timed in sorted(named, key=lambda t: t.latency_us or float("inf")):
            us = timed.latency_us
            said = f"{us:10.2f} us  {us / base:6.3f}" if us else f"{timed.status:>20}"
            lines.append(f"  {timed.name:24} {said}")
    return "\n".join(lines)


def _params(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(config.params.items()))


def main(argv: Sequence[str]) -> int:
    """Time the neighbours of the cached winners.

    Raises:
        ConfigError: when a shape is wrong, or nothing of its own is tuned for it.
    """
    parser = Parser(prog="scripts/bench levers", description=__doc__)
    parser.add_argument(
        "--op",
        choices=sorted(PROBLEMS),
        default="attention",
        help="operation of the shapes (default attention)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        required=True,
        metavar="KEY=VALUE,...",
        help="problem to time; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default 20)")
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=int, default=None, help="nvcc processes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)

    from tuner.runners.choose import Machine, Runners
    from tuner.selection.reader import entries as decided

    entries = decided()

    def named(problem: Problem, gpu: Gpu) -> dict[str, Config]:
        config = _best_own(entries, problem, gpu)
        return neighbours(family(config.family), problem, config, gpu)

    def save(results: Results) -> None:
        if args.json is not None:
            results.write(args.json)

    problems = [PROBLEMS[args.op].parse(text) for text in args.shape]
    regime = Regime.default(args.op)
    tasks = [RowTask("levers", p, regime, args.rounds, (), named) for p in problems]
    with Runners(Machine((args.device,), args.jobs), _note) as runners:
        if (gpu := runners.gpu) is not None:
            for problem in problems:
                _best_own(entries, problem, gpu)
        comparison = ComparisonRun(tasks, runners, entries, own=1, note=_note)
        results = comparison.run(save)
    save(results)
    print(table(results))
    return 0 if all(row.own is not None for row in results.rows) else 1


def _best_own(entries: Sequence[Entry], problem: Problem, gpu: Gpu) -> Config:
    """The best own config of the decisions that serve a problem on a GPU, its own first."""
    for entry in sorted(entries, key=lambda entry: entry.gpu.identity != gpu.identity):
        if entry.problem == problem and gpu.shares_decisions(entry.gpu):
            for measurement in (entry.winner, *entry.ranking):
                config = measurement.config
                if not is_vendor(config) and family(config.family).accepts(problem, config, gpu):
                    return config
    raise ConfigError(
        f"no own kernel is tuned for {problem.label()} on {gpu.name} (tuner sweep --shape tunes it)"
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
