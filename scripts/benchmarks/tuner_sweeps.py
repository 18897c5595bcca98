"""Sweeps by processes of their own, each ``tuner sweep`` into an empty store."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from tuner import settings
from tuner.base.processes import python_command, python_environment, running
from tuner.cli.imports import unservable
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families
from tuner.measurement import Provenance
from tuner.problem import Problem
from tuner.runners.choose import Machine, Runners
from tuner.selection.reader import lookup
from tuner.store import exchange, open_store

TIE = 0.01
"""Distance of times that count as equal."""
INTERVAL_S = 0.2
"""Seconds between two looks at the GPU's memory."""
FIRST = "verified after"
"""Part of the line with which a sweep tells its first answer."""


def swept(problem: Problem, seed: int, further: Sequence[str], *, is_fresh: bool) -> Row:
    """One sweep by a process of its own with an empty store.

    Args:
        problem: problem to tune.
        seed: seed of the search.
        further: further options of ``tuner sweep``.
        is_fresh: True to compile into an empty cache, whose kernels are then added to this
            machine's; else this machine's cache, with its compiled kernels and proofs.

    Raises:
        BenchmarkError: when it failed, or found no own kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = python_command(
            *("-m", "tuner", "sweep", "--op", problem.op, "--shape", problem.label()),
            *("--seed", str(seed), "--json", "--store", f"{folder}/store.sqlite", *further),
        )
        cache = Path(folder) if is_fresh else settings.cache_dir()
        environment = {**python_environment(), "TUNER_CACHE_DIR": str(cache)}
        artifacts = cache / "artifacts" if is_fresh else settings.artifacts_dir()
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
        again = replayed(Path(folder))
        if is_fresh:
            _add_to_cache(built)
    facts = ("kernels", "elapsed_s", "first_own_s", "seconds", "given_up", "expected_loss")
    return {
        "seed": seed,
        "winner": config.to_json(),
        "us": {"tuner": own["latency_us"]},
        **{name: outcome[name] for name in facts},
        "is_own": outcome["winner"]["config"] == own["config"],
        "first_answer_s": next((round(at, 1) for at, line in said if FIRST in line), None),
        "process_s": round(seconds, 1),
        "cpu_s": round(_cpu_s() - cpu_s, 1),
        "cores": len(os.sched_getaffinity(0)),
        **units,
        "replayed": again,
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


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def used_mib() -> Iterator[list[float]]:
    """Memory in use on the first visible GPU in MiB, five values a second; none without a GPU."""
    import torch

    values, ended = list[float](), threading.Event()
    if not torch.cuda.is_available():
        yield values
        return

    def read() -> None:
        free, total = torch.cuda.mem_get_info(0)
        values.append((total - free) / 2**20)

    def watch() -> None:
        while not ended.wait(INTERVAL_S):
            read()

    read()  # this process's own context is in it
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield values
    finally:
        ended.set()
        watching.join()
