"""Profiling of one call of a config with Nsight Compute, in a process that can be killed.

Clocks are not locked (``--clock-control none``), so the counters are those of an ordinary run. The
call is replayed once for each set of counters that the hardware can hold, so its duration here is
not a measured time. Times come only from the stopwatch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.base.processes import Finished, ProcessPool, python_command
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError
from tuner.hardware import Gpu
from tuner.measure import nsight_child
from tuner.measure.profile import COUNTERS, KernelCounters, Profile, read_csv
from tuner.measurement import Environment, Regime, Status
from tuner.problem import Problem

TIMEOUT_S = 300.0
"""Time-out. Nsight Compute starts in seconds and replays a call about 30 times."""
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute")
#: Error of ncu when the driver restricts counters to administrators.
NOT_PERMITTED = "ERR_NVGPUCTRPERM"


def find_ncu(command: Path | None = None) -> Path:
    """Find Nsight Compute's command: `given`, else in PATH, CUDA_HOME, or the packages' folders.

    Raises:
        BenchmarkError: with status UNAVAILABLE; names the places searched and how to get it.
    """
    for path in [command] if command else _candidates():
        if path.is_file() and os.access(path, os.X_OK):
            return path
    where = str(command) if command else f"PATH, CUDA_HOME, {', '.join(_PLACES)}"
    raise BenchmarkError(
        f"Nsight Compute (ncu) is not in {where}; it comes with the CUDA toolkit, or as the "
        "package nsight-compute of NVIDIA's repositories; --ncu names another place",
        status=Status.UNAVAILABLE,
    )


def _candidates() -> Iterator[Path]:
    if path := shutil.which("ncu"):
        yield Path(path)
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "ncu"
    toolkit, packages = map(Path, _PLACES)
    yield toolkit
    yield from sorted(packages.glob("*/ncu"), reverse=True)


def profile(
    ncu: Path,
    problem: Problem,
    config: Config,
    gpu: Gpu,
    regime: Regime,
    reference: Artifact,
    kernels: Mapping[str, Artifact],
    environment: Environment,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Profile:
    """Profile one call.

    Args:
        ncu: Nsight Compute's command.
        problem: problem to compute.
        config: an own config or a vendor's.
        gpu: model of device 0.
        regime: regime; a cold one flushes the caches before each replay.
        reference: artifact of the numerics gate's kernels, which fill the inputs.
        kernels: artifacts of the config, by kernel name; empty for a vendor's.
        environment: environment of this machine; ncu's version is added.
        timeout_s: seconds after which all started processes are killed.

    Raises:
        BenchmarkError: when the counters may not be read, the time-out passes, the call fails, or
            the table cannot be read. Status UNAVAILABLE means that the machine does not permit
            profiling.
    """
    with tempfile.TemporaryDirectory(prefix="tuner-profile-") as name:
        path = Path(name) / "request.json"
        path.write_text(json.dumps(nsight_child.request(problem, config, reference, kernels)))
        child = python_command("-m", nsight_child.__name__, str(path))
        kernels_seen = counted(ncu, child, regime.l2, timeout_s)
        facts = {**environment.facts, "ncu": _version(ncu, Path(name))}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Profile(problem, gpu, regime, config, Environment(facts), kernels_seen, now)


def counted(
    ncu: Path, child: Sequence[str], l2: str, timeout_s: float = TIMEOUT_S
) -> tuple[KernelCounters, ...]:
    """Counters of the launches of a process between the marks of the CUDA profiler, in their order.

    Args:
        ncu: Nsight Compute's command.
        child: command line of the process.
        l2: ``cold`` flushes the caches before each replay of a launch, ``warm`` does not.
        timeout_s: seconds after which all started processes are killed.

    Raises:
        BenchmarkError: as `profile`.
    """
    with tempfile.TemporaryDirectory(prefix="tuner-profile-") as name:
        folder = Path(name)
        table = folder / "counters.csv"
        metrics = [counter.metric for counter in COUNTERS]
        ended = _run([*command(ncu, table, l2, metrics), *child], folder, timeout_s)
        text = _said(table, ended)
        if refused := _refused(metrics, text) if ended.returncode else []:
            # Metrics that this version of ncu or this chip does not know are left out.
            metrics = [metric for metric in metrics if metric not in refused]
            ended = _run([*command(ncu, table, l2, metrics), *child], folder, timeout_s)
            text = _said(table, ended)
        if NOT_PERMITTED in text:
            raise BenchmarkError(
                "the driver lets only administrators read the GPU's counters "
                f"({NOT_PERMITTED}): run as root, in a container with the capability SYS_ADMIN, "
                "or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
                status=Status.UNAVAILABLE,
            )
        if ended.timed_out:
            raise BenchmarkError(
                f"profiling took longer than {timeout_s:g} s (--timeout)", status=Status.TIMEOUT
            )
        if ended.returncode:
            errors = [line for line in text.splitlines() if "==ERROR==" in line or "Error" in line]
            last = (errors or text.strip().splitlines() or ["it said nothing"])[-1]
            raise BenchmarkError(f"profiling failed with code {ended.returncode}: {last.strip()}")
        return read_csv(_text(table))


def command(ncu: Path, table: Path, l2: str, metrics: Sequence[str]) -> list[str]:
    """Command line of the profiler, up to that of the process."""
    return [
        str(ncu),
        "--clock-control=none",
        f"--cache-control={'all' if l2 == 'cold' else 'none'}",
        "--profile-from-start=off",
        "--target-processes=all",
        "--print-units=base",
        "--print-kernel-base=function",
        "--csv",
        "--page=raw",
        f"--log-file={table}",
        f"--metrics={','.join(metrics)}",
    ]


def _run(arguments: Sequence[str], folder: Path, timeout_s: float) -> Finished:
    try:
        return ProcessPool(timeout_s).run(arguments, folder)
    except CompileError as exc:  # it knows compilers only
        raise BenchmarkError(str(exc), status=Status.UNAVAILABLE) from exc


def _refused(metrics: Sequence[str], output: str) -> list[str]:
    """Metrics named in the profiler's errors."""
    errors = "\n".join(line for line in output.splitlines() if line.startswith("==ERROR=="))
    return [metric for metric in metrics if metric in errors]


def _said(table: Path, ended: Finished) -> str:
    """Output of the profiler and of the call."""
    return f"{_text(table)}\n{ended.log}"


def _text(table: Path) -> str:
    return table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""


def _version(ncu: Path, folder: Path) -> str:
    match: Any = re.search(r"Version ([\d.]+)", _run([str(ncu), "--version"], folder, 60.0).log)
    return match[1] if match else "unknown"
