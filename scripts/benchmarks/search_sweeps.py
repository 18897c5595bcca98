"""Sweeps by processes of their own: agreement of seeds, seconds, and excess.

Each sweep is ``tuner sweep`` into an empty store. A case of the last kind of `repeats` reads the
rows before it, and times all winners in one interleaved pass.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.rows import markdown
from tuner import settings
from tuner.base.processes import python_command, python_environment, running
from tuner.cli.imports import unservable
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure import device
from tuner.measurement import Provenance, Regime
from tuner.problem import PROBLEMS, Problem
from tuner.runners import recording_archive
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search.ranking import by_latency
from tuner.selection.reader import lookup
from tuner.store import exchange, open_store
from tuner.tuning.job import JobOptions

ROUNDS, FINALISTS = 40, 6
"""Rounds of a pass over the winners, and recorded kernels beside them."""
TIE = 0.01
"""Distance of times that count as equal."""
FIRST = "verified after"
"""Part of the line with which a sweep tells its first answer."""


@dataclass(frozen=True)
class SeededSweep:
    """A sweep of a problem."""

    problem: Problem
    seed: int = 0
    is_seed_named: bool = False

    @property
    def label(self) -> str:
        """Problem, and the seed where several are swept."""
        seed = f" seed {self.seed}" if self.is_seed_named else ""
        return f"{self.problem.op} {self.problem.label()}{seed}"

    @property
    def group(self) -> str:
        """Kind of the problem."""
        return "attention" if self.problem.op.startswith("attention") else "products"


@dataclass(frozen=True)
class WinnersPass:
    """One pass over the winners of the rows before it."""

    problem: Problem
    label = "all winners"
    group = "pass"


def repeated(args: Namespace) -> list[SeededSweep | WinnersPass]:
    """Sweeps of one problem with several seeds, and with a file a pass over all winners."""
    problem = PROBLEMS[args.op].parse(args.shape)
    first = int(args.seed) if args.seed.isdigit() else 0
    seeds = [SeededSweep(problem, seed, True) for seed in range(first, first + args.times)]
    return [*seeds, *([WinnersPass(problem)] if args.json or args.table else [])]


def swept(
    case: SeededSweep,
    args: Namespace,
    keeps_kernels: bool = False,
    replays: bool = False,
    shares_built: bool = False,
) -> Row:
    """One sweep by a process of its own with an empty store.

    Args:
        case: problem and seed.
        args: the command line, whose ``--sweep`` goes on to ``tuner sweep``.
        keeps_kernels: True to sweep with this machine's cache, its compiled kernels and proofs;
            else the cache is empty.
        replays: True to also say under ``replayed`` whether another store answers alike.
        shares_built: True to add what it compiled into an empty cache to this machine's.

    Raises:
        BenchmarkError: when it failed, or found no own kernel.
    """
    problem, further = case.problem, args.sweep.split()
    with tempfile.TemporaryDirectory() as folder:
        command = python_command(
            *("-m", "tuner", "sweep", "--op", problem.op, "--shape", problem.label()),
            *("--seed", str(case.seed), "--json", "--store", f"{folder}/store.sqlite", *further),
        )
        cache = settings.cache_dir() if keeps_kernels else Path(folder)
        environment = {**python_environment(), "TUNER_CACHE_DIR": str(cache)}
        artifacts = settings.artifacts_dir() if keeps_kernels else cache / "artifacts"
        before = {path.name for path in artifacts.glob("*")}
        output = Path(folder) / "outcome.json"  # a pipe that nobody reads meanwhile may fill
        began, started, cpu_s, load = time.time(), time.monotonic(), _cpu_s(), os.getloadavg()[0]
        with (
            output.open("wb") as file,
            running(
                command, stdout=file, stderr=subprocess.PIPE, text=True, env=environment
            ) as process,
        ):
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append((time.monotonic() - started, line.rstrip()))
                print(f"{said[-1][0]:.1f} s {said[-1][1]}", file=sys.stderr, flush=True)
        seconds = time.monotonic() - started
        outcome = json.loads(output.read_bytes()) if process.returncode == 0 else {}
        own = outcome.get("best_own")
        if own is None:
            last = said[-1][1] if said else "no own kernel passed"
            raise BenchmarkError(f"{problem.label()}: {last}")
        config = Config.from_json(own["config"])
        built = [path for path in artifacts.glob("*/") if path.name not in before]
        units = _units(built, began, _keys(problem, config))
        again = {"replayed": replayed(Path(folder))} if replays else {}
        if shares_built and not keeps_kernels:
            _add_to_cache(built)
    facts = ("kernels", "elapsed_s", "first_own_s", "seconds", "given_up", "expected_loss")
    return {
        "seed": case.seed,
        "winner": config.to_json(),
        "us": {"tuner": own["latency_us"]},
        **{name: outcome[name] for name in facts},
        "is_own": outcome["winner"]["config"] == own["config"],
        "first_answer_s": next((round(at, 1) for at, line in said if FIRST in line), None),
        "process_s": round(seconds, 1),
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        "cores": len(os.sched_getaffinity(0)),
        **units,
        **again,
        "said": [f"{at:.1f} {line}" for at, line in said],
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def _add_to_cache(built: Sequence[Path]) -> None:
    """Move compiled kernels to this machine's cache, where it has no such."""
    own = settings.artifacts_dir()
    own.mkdir(parents=True, exist_ok=True)
    for folder in built:
        if (folder / "meta.json").is_file() and not (own / folder.name).exists():
            shutil.move(folder, own / folder.name)


def replayed(folder: Path) -> bool:
    """True if a sweep's decision answers from another store with the same config, after an export
    and an import.
    """
    with open_store(f"sqlite:///{folder}/store.sqlite", create=False) as store:
        (entry,) = [one for one in store.entries() if one.provenance is Provenance.MEASURED]
        document = exchange.parse(exchange.to_text(store.export()))
    path = folder / "other.sqlite"
    with open_store(f"sqlite:///{path}") as other:
        other.import_(document, check=unservable)
    answer = lookup(entry.problem, gpu=entry.gpu, regime=entry.regime, path=path)
    return answer is not None and answer.candidates[0].config == entry.winner.config


def _keys(problem: Problem, config: Config) -> set[str]:
    """Artifact keys of a config's kernels."""
    with Runners(Machine(replay=False), _note) as runners:
        compiler: Compiler = runners.compiler()
        return {
            compiler.key(spec)
            for spec in families()[config.family].kernels(problem, config).values()
        }


def _cpu_s() -> float:
    """CPU-seconds of the ended child processes and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _units(built: Sequence[Path], began: float, winner: set[str]) -> dict[str, Any]:
    """Facts of compiled kernels: their number, CPU-seconds by template, and when the winner's was
    done (0: before the sweep).

    Args:
        built: folders of their artifacts.
        began: `time.time` at the start of the sweep.
        winner: keys of the winner's artifacts.
    """
    by_template: dict[str, list[float]] = {}
    best_s = 0.0
    for folder in built:
        if not (folder / "meta.json").is_file():
            continue  # a working folder
        meta = json.loads((folder / "meta.json").read_bytes())
        by_template.setdefault(meta["facts"]["template"], []).append(meta["compile_cpu_s"])
        if folder.name in winner:
            best_s = max(best_s, (folder / "kernel.cu").stat().st_mtime - began)
    return {
        "compiled": sum(map(len, by_template.values())),
        "compile_cpu_s": round(sum(map(sum, by_template.values())), 1),
        "cpu_s_a_kernel": {
            name: round(statistics.fmean(each), 2) for name, each in sorted(by_template.items())
        },
        "best_s": round(best_s, 1),
    }


@contextmanager
def _runner(problem: Problem, args: Namespace) -> Iterator[Runner]:
    machine = Machine(parse_devices(args.device), None, replay=False)
    with Runners(machine, _note) as runners:
        yield runners.of(problem, JobOptions().regime(problem))


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def repeat(case: SeededSweep | WinnersPass, args: Namespace) -> Row:
    """A sweep, or the pass over all winners and the fastest recorded kernels.

    Raises:
        BenchmarkError: when a winner fails that passed before, or there is none.
    """
    if isinstance(case, SeededSweep):
        return swept(case, args, args.keep_cache)
    rows = [row for row in harness.read(args.json)[1] if "winner" in row]
    winners = {row["case"]: Config.from_json(row["winner"]) for row in rows}
    if not winners:
        raise BenchmarkError("no sweep has a winner")
    with _runner(case.problem, args) as runner:
        beside = recorded(case.problem, runner.gpu, FINALISTS)
        every = list(dict.fromkeys([*winners.values(), *beside]))
        timed = runner.retime(case.problem, every, ROUNDS)
    us = {m.config: m.latency_us for m in timed if m.ok and m.latency_us}
    for m in timed:
        if m.config in winners.values() and m.config not in us:
            raise BenchmarkError(f"{m.config.digest} failed: {m.log}")
    least = min(us.values())
    return {
        "us": {"tuner": least, **{_named(config): time_us for config, time_us in us.items()}},
        "over_best": {seed: round(us[one] / least, 4) for seed, one in winners.items()},
    }


def _named(config: Config) -> str:
    return f"{config.family} {config.digest[:6]}"


def recorded(problem: Problem, gpu: Gpu, count: int) -> list[Config]:
    """The fastest kernels of the problem's widest recording, each by its fastest variant."""
    regimes = Regime.preferred(Regime.default(problem.op))
    part = recording_archive.find(problem, DEFAULT_GPU, regimes)
    best: dict[str, Config] = {}
    for m in sorted(part.measurements if part else (), key=by_latency):
        family = families().get(m.config.family)
        if m.ok and family and not family.is_vendor and family.accepts(problem, m.config, gpu):
            best.setdefault(family.compile_digest(m.config), m.config)
    return list(best.values())[:count]


@contextmanager
def gpu_values(name: str) -> Iterator[list[float]]:
    """A quantity of nvidia-smi's at the first visible GPU, five values a second, when the context
    ends.
    """
    query = (f"--query-gpu={name}", "--format=csv,noheader,nounits", "-lms", "200")
    values: list[float] = []
    if device.detect() is None or shutil.which("nvidia-smi") is None:
        yield values
        return
    with tempfile.TemporaryFile("w+") as file:
        command = ["nvidia-smi", "-i", device.pci_address(), *query]
        with running(command, stdout=file, stderr=subprocess.DEVNULL) as process:
            yield values
            process.terminate()
        file.seek(0)
        values += [float(line) for line in file.read().split() if line.isdigit()]


def line(row: Row) -> str:
    """Seconds, kernels and times of a sweep; of the pass its worst winner."""
    if "over_best" in row:
        return f"{row['case']}: the worst {max(row['over_best'].values()):.4f} of the best"
    return (
        f"{row['case']}: {row['elapsed_s']:.1f} s, first own {row['first_own_s']} s, "
        f"{row['kernels']} sets, {row['compiled']} compiled in {row['compile_cpu_s']} CPU-s, "
        f"{row['us']['tuner']:.2f} us"
    )


def repeats_table(rows: Sequence[Row]) -> list[str]:
    """The winners, and how far they are apart."""
    done = [row for row in rows if "winner" in row]
    over = [v for row in rows for v in row.get("over_best", {}).values()]
    winners = {json.dumps(row["winner"], sort_keys=True) for row in done}
    head = ("sweeps", "winners", "within 1 % of the best", "worst over best", "mean s", "longest")
    seconds = [row["elapsed_s"] for row in done]
    cells = (
        str(len(done)),
        str(len(winners)),
        f"{sum(one <= 1 + TIE for one in over)} of {len(over)}" if over else "no pass",
        f"{max(over):.4f}" if over else "",
        f"{statistics.fmean(seconds):.1f}" if seconds else "",
        f"{max(seconds):.1f}" if seconds else "",
    )
    return markdown([head, cells])
