"""Agreement of repeated sweeps of one problem: their winners, timed in one pass.

``scripts/bench repeats --shape S=1024,D=64`` sweeps with several seeds, each into an empty store.
Compiled kernels are kept. With ``--empty-cache`` each sweep is a process of its own, ``tuner
sweep``, with an empty cache: it compiles, and its seconds count from its start.

Then all own winners are timed in one interleaved final pass, beside the best recorded kernels
(``--beside``). That pass shows the distance of the worst from the best. With ``--seconds`` no sweep
begins that is expected to end later, and the pass follows.

``--json FILE`` is written after each sweep. Another run goes on with it: known seeds are not swept
again, and all winners share the pass. A seed whose sweep failed is tried again by the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import file_head, json_file
from benchmarks.gpu import no_gpu
from tuner import settings
from tuner.base.output import check_place
from tuner.base.processes import python_command, python_environment, running
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.runners import recording_archive
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search.ranking import by_latency
from tuner.store import open_store
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.sweep import SweepOptions

FORMAT = "cutlass-tuner repeats 1"
TIMES = 10
ROUNDS = 40
"""Rounds of the pass that compares the winners."""
FIRST = "verified after"
"""Part of the line with which a sweep tells its first answer."""


@dataclass(frozen=True)
class Swept:
    """Result of one sweep: its best own kernel, and its cost."""

    winner: Config
    own_us: float
    kernels: int
    elapsed_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def swept(problem: Problem, runners: Runners, options: JobOptions) -> Swept:
    """One sweep into an empty store.

    Raises:
        BenchmarkError: when it failed, or found no own kernel.
    """
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/store.sqlite") as store:
        result = Job([problem], runners, store, options).run()
    for _, error in result.failed:
        raise BenchmarkError(f"{problem.label()}: {error}")
    if result.interrupted:
        raise KeyboardInterrupt
    (outcome,) = result.outcomes
    own = None if outcome.entry is None else outcome.entry.best_own
    if own is None or own.latency_us is None:
        raise BenchmarkError(f"{problem.label()}: no own kernel passed")
    return Swept(own.config, own.latency_us, outcome.kernels, outcome.elapsed_s)


def swept_anew(
    problem: Problem, seed: int, arguments: Sequence[str], keeps_kernels: bool = False
) -> Swept:
    """One sweep by a process of its own with an empty store. Its compiled kernels are kept.

    Args:
        problem: problem of the sweep.
        seed: seed of the search.
        arguments: further arguments of ``tuner sweep``.
        keeps_kernels: True to sweep with this machine's cache, its compiled kernels and proofs;
            else the cache is empty.

    Raises:
        BenchmarkError: when it failed, or found no own kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = python_command(
            *("-m", "tuner", "sweep", "--op", problem.op, "--shape", problem.label()),
            *("--seed", str(seed), "--json", "--store", f"{folder}/store.sqlite", *arguments),
        )
        kept = settings.artifacts_dir()
        kept.mkdir(parents=True, exist_ok=True)
        cache = settings.cache_dir() if keeps_kernels else Path(folder)
        environment = {**python_environment(), "TUNER_CACHE_DIR": str(cache)}
        artifacts = kept if keeps_kernels else cache / "artifacts"
        before = {path.name for path in kept.iterdir()} if keeps_kernels else set()
        output = Path(folder) / "outcome.json"  # a pipe that nobody reads meanwhile may fill
        began, started, cpu_s = time.time(), time.monotonic(), _cpu_s()
        with (
            output.open("wb") as file,
            running(
                command, stdout=file, stderr=subprocess.PIPE, text=True, env=environment
            ) as process,
        ):
            assert process.stderr is not None
            said = [(time.monotonic() - started, line.rstrip()) for line in process.stderr]
        seconds = time.monotonic() - started
        found = json.loads(output.read_bytes()) if process.returncode == 0 else {}
        own = found.get("best_own")
        if own is None:
            last = said[-1][1] if said else "no own kernel passed"
            raise BenchmarkError(f"{problem.label()}: {last}")
        units = _units([p for p in artifacts.glob("*/") if p.name not in before], began)
        if not keeps_kernels:
            keep(artifacts, kept)
    facts = {
        "seed": seed,
        "first_answer_s": next((round(at, 1) for at, line in said if FIRST in line), None),
        "first_own_s": found.get("first_own_s"),
        "process_s": round(seconds, 1),
        "seconds": found["seconds"],
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        **units,
        "given_up": found["given_up"],
        "expected_loss": found["expected_loss"],
        "own_over_vendor": found["own_over_vendor"],
        "finals_us": _finals_us(found.get("ranking", ())),
        "said": [f"{at:.1f} {line}" for at, line in said],
    }
    config = Config.from_json(own["config"])
    return Swept(config, own["latency_us"], found["kernels"], found["elapsed_s"], facts)


def keep(artifacts: Path, kept: Path) -> None:
    """Copy the kernels of a cache that another one lacks, by whole folders.

    An existing folder stays as it is: its library may be loaded, and kernels of one translation
    unit share a file by hard links. So do copies.
    """
    copied: dict[int, str] = {}

    def copy(source: str, target: str) -> None:
        first = copied.setdefault(Path(source).stat().st_ino, target)
        if first == target:
            shutil.copy2(source, target)
        else:
            os.link(first, target)

    with tempfile.TemporaryDirectory(prefix=".taken", dir=kept) as aside:
        for meta in sorted(artifacts.glob("*/meta.json")):
            name = meta.parent.name
            if name.startswith(".") or (kept / name).exists():
                continue
            shutil.copytree(meta.parent, Path(aside) / name, copy_function=copy)
        for made in sorted(Path(aside).iterdir()):
            with contextlib.suppress(OSError):  # another process was first
                made.rename(kept / made.name)


def _finals_us(ranking: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds of the final pass, by family and digest."""
    configs = [(Config.from_json(m["config"]), m["latency_us"]) for m in ranking]
    return {f"{config.family} {config.digest[:6]}": us for config, us in configs}


def _cpu_s() -> float:
    """CPU-seconds of the ended child processes and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _units(built: Sequence[Path], began: float) -> dict[str, Any]:
    """Facts of compiled kernels: their number, CPU-seconds by template, and when each was done.

    Args:
        built: folders of their artifacts.
        began: `time.time` at the start of the sweep.
    """
    by_template: dict[str, list[float]] = {}
    done_s = []
    for folder in built:
        if not (folder / "meta.json").is_file():
            continue  # a working folder
        meta = json.loads((folder / "meta.json").read_bytes())
        by_template.setdefault(meta["facts"]["template"], []).append(meta["compile_cpu_s"])
        done_s.append(round((folder / "kernel.cu").stat().st_mtime - began, 1))
    return {
        "compiled": len(done_s),
        "compile_cpu_s": round(sum(map(sum, by_template.values())), 1),
        "cpu_s_a_kernel": {
            name: round(sum(seconds) / len(seconds), 2)
            for name, seconds in sorted(by_template.items())
        },
        "compiled_after_s": sorted(done_s),
    }


def recorded(problem: Problem, gpu: Gpu, count: int) -> list[Config]:
    """The fastest kernels of the problem's widest recording, each by its fastest variant."""
    found = recording_archive.find(
        problem, DEFAULT_GPU, Regime.preferred(Regime.default(problem.op))
    )
    known, best = families(), dict[str, Config]()
    for m in sorted(found.measurements if found else (), key=by_latency):
        family = known.get(m.config.family)
        if m.ok and family and not family.is_vendor and family.accepts(problem, m.config, gpu):
            best.setdefault(family.compile_digest(m.config), m.config)
    return list(best.values())[:count]


def compared(
    problem: Problem,
    runner: Runner,
    sweeps: Sequence[Swept],
    beside: Sequence[Config] = (),
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """The sweeps' own winners in one interleaved pass, and each sweep's over the best of all.

    Args:
        problem: problem of the sweeps.
        runner: runner that times.
        sweeps: the sweeps.
        beside: further configs of the pass; those that fail do not count.
        rounds: rounds of the pass.

    Raises:
        BenchmarkError: when a winner fails that passed before.
    """
    winners = list(dict.fromkeys(one.winner for one in sweeps))
    timed = list(dict.fromkeys([*winners, *beside]))
    times: dict[str, float] = {}
    for measured in runner.retime(problem, timed, rounds):
        if measured.ok and measured.latency_us is not None:
            times[measured.config.digest] = measured.latency_us
        elif measured.config in winners:
            raise BenchmarkError(f"{measured.config.digest} failed: {measured.log}")
    best = min(times.values())
    rows = [{**_row(one), "over_best": round(times[one.winner.digest] / best, 4)} for one in sweeps]
    return {
        "problem": problem.to_json(),
        "gpu": asdict(runner.gpu),
        "regime": str(runner.regime),
        "environment": dict(runner.environment.facts),
        "cores": runner.compiles,
        "rounds": rounds,
        "winners": [{**config.to_json(), "us": times[config.digest]} for config in winners],
        "beside": [
            {**config.to_json(), "us": times.get(config.digest)}
            for config in timed
            if config not in winners
        ],
        "sweeps": rows,
        "worst_over_best": max(row["over_best"] for row in rows),
    }


def _row(one: Swept) -> dict[str, Any]:
    """A sweep's part of the file."""
    return {
        "winner": one.winner.digest,
        "config": one.winner.to_json(),
        "own_us": one.own_us,
        "kernels": one.kernels,
        "elapsed_s": round(one.elapsed_s, 1),
        **one.facts,
    }


def kept(path: Path | None, head: Mapping[str, Any]) -> list[Swept]:
    """Sweeps of a file, in its order; none without a file.

    Args:
        path: the file.
        head: problem, way and machine of the sweeps to come.

    Raises:
        ConfigError: when it cannot be read, or holds other sweeps.
    """
    if path is None or not path.exists():
        return []
    found = json_file.read(path)
    try:
        is_same, rows = file_head.is_same(found.get("head"), head), found["sweeps"]
        sweeps = [_of(dict(row)) for row in rows]
    except (TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"{path} has no sweeps to go on with: {exc!r}") from exc
    if not is_same:
        raise ConfigError(f"{path} is of other sweeps (wanted: {dict(head)})")
    return sweeps


def _of(row: dict[str, Any]) -> Swept:
    config = Config.from_json(row.pop("config"))
    for name in ("winner", "over_best"):  # of the config, and of a pass
        row.pop(name, None)
    return Swept(config, row.pop("own_us"), row.pop("kernels"), row.pop("elapsed_s"), row)


def text(found: dict[str, Any]) -> str:
    """A line a sweep, then what they come to."""
    lines = [
        f"{number}: {sweep['winner'][:6]} {sweep['own_us']:.2f} us, {sweep['over_best']:.4f} of "
        f"the best, {sweep['kernels']} sets of kernels in {sweep['elapsed_s']:.0f} s{_began(sweep)}"
        for number, sweep in enumerate(found["sweeps"], 1)
    ]
    return "\n".join(
        [
            *lines,
            f"{len(lines)} sweeps, {len(found['winners'])} winners, the worst "
            f"{found['worst_over_best']:.4f} of the best in one pass of {found['rounds']} rounds",
        ]
    )


def _began(sweep: Mapping[str, Any]) -> str:
    first = sweep.get("first_answer_s")
    return (
        "" if first is None else f", {sweep['process_s']:.0f} s of a process, first {first:.0f} s"
    )


def main(argv: Sequence[str]) -> int:
    """Sweep, compare.

    Returns:
        1 where a sweep failed, else 0.

    Raises:
        ConfigError: when the shape, the device or the file is wrong.
        BenchmarkError: when there is no GPU, no sweep has a winner, or a winner fails in the pass.
    """
    args = _parser().parse_args(argv)
    check_place(args.json)
    if args.times < 1:
        raise ConfigError(f"--times {args.times} is out of range (allowed: 1 or more)")
    problem = PROBLEMS[args.op].parse(args.shape)
    sweep = SweepOptions(
        families=tuple(args.family), trials=args.trials, compiled_only=args.compiled_only
    )
    options = JobOptions(sweep)
    given = [f"--family={name}" for name in args.family] + [f"--device={args.device}"]
    given += [f"--trials={args.trials}"] if args.trials else []
    given += [f"--jobs={args.jobs}"] if args.jobs else []
    way = "empty cache" if args.empty_cache else "compiled" if args.compiled_only else "kept cache"
    with Runners(Machine(parse_devices(args.device), args.jobs), _note) as runners:
        if runners.gpu is None:
            raise no_gpu()
        asked = {"problem": problem.to_json(), "way": way, "arguments": given}
        head = {"format": FORMAT, **asked, **file_head.complete({"gpu": runners.gpu.name})}

        def one(seed: int) -> Swept:
            if args.empty_cache:
                return swept_anew(problem, seed, given)
            sweep_options = replace(sweep, seed=seed)
            found = swept(problem, runners, replace(options, sweep=sweep_options))
            return replace(found, facts={"seed": seed, **found.facts})

        seeds = range(args.first_seed, args.first_seed + args.times)
        sweeps, failed = _all(one, seeds, args.json, head, args.seconds)
        if not sweeps:
            raise BenchmarkError("no sweep has a winner")
        runner = runners.of(problem, options.regime(problem))
        beside = recorded(problem, runner.gpu, args.beside)
        found = {"head": head, **compared(problem, runner, sweeps, beside)}
    print(text(found))
    if args.json is not None:
        write_json(args.json, found)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scripts/bench repeats", description=__doc__)
    parser.add_argument("--shape", required=True, help="as S=1024,D=64")
    parser.add_argument(
        "--op",
        default="attention",
        choices=sorted(PROBLEMS),
        help="operation of the shape (default attention)",
    )
    parser.add_argument("--times", type=int, default=TIMES, help=f"sweeps (default {TIMES})")
    parser.add_argument("--trials", type=int, default=None, help="groups a sweep, at most")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help="only this own family; may be repeated",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--compiled-only", action="store_true", help="compile nothing")
    ways.add_argument(
        "--empty-cache", action="store_true", help="a process and an empty cache for each sweep"
    )
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--seconds", type=float, metavar="S", help="for all sweeps; default: any")
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="recorded kernels timed beside"
    )
    parser.add_argument("--device", default="0", metavar="N", help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=int, default=None, help="nvcc processes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser


def _all(
    one: Callable[[int], Swept],
    seeds: Sequence[int],
    path: Path | None,
    head: Mapping[str, Any],
    seconds: float | None,
) -> tuple[list[Swept], bool]:
    """Sweeps of a file and of the seeds that it lacks, written one by one, and True if one failed.

    Args:
        one: sweep with a seed.
        seeds: seeds of the run.
        path: file of the sweeps, if any.
        head: its head.
        seconds: time for the sweeps; none begins that is expected to end later.
    """
    sweeps, failed, ended = kept(path, head), False, 0
    known = {sweep.facts.get("seed") for sweep in sweeps}
    started = time.monotonic()
    for seed in (seed for seed in seeds if seed not in known):
        if seconds and ended and (ended + 1) * (time.monotonic() - started) > seconds * ended:
            break
        ended += 1
        try:
            sweeps.append(one(seed))
        except BenchmarkError as exc:
            _note(f"seed {seed}: {exc}")
            failed = True
            continue
        _note(f"seed {seed}: {sweeps[-1].winner.digest[:6]}, {sweeps[-1].elapsed_s:.1f} s")
        if path is not None:  # a pass that is cut off loses no sweep
            write_json(path, {"head": head, "sweeps": [_row(sweep) for sweep in sweeps]})
    return sweeps, failed


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
