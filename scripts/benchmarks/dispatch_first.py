"""The first call after `import tuner`, in fresh processes; the deferred imports count."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness import Row
from tuner import settings
from tuner.base.processes import python_command, python_environment
from tuner.bundle.wheel import without_newer_glibc, write_package
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.prebuilt import KERNELS, PACKAGE
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import GemmProblem
from tuner.selection.kernel_list import KernelList
from tuner.selection.kernels import users
from tuner.selection.reader import store_file
from tuner.store import open_store
from tuner.store.backup import back_up
from tuner.store.exchange import Decision, write

RUNS = 5
"""Processes whose median is a figure."""
ENTRIES = 10_000
"""Decisions in the store, beside the user's."""

_FIRST_CALL = """
import json, time, torch
tensors = [torch.randn(1, 16, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
torch.cuda.synchronize()
import tuner
start = time.perf_counter()
tuner.attention(*tensors)
returned = time.perf_counter()
torch.cuda.synchronize()
done = time.perf_counter()
hits = tuner.stats().hits
# The libraries of the call once more, from copies: the process keeps what it has loaded.
import shutil, tempfile
from pathlib import Path
from tuner.compile import artifacts, loading
load, keys = 0.0, list(loading._loaded)
with tempfile.TemporaryDirectory() as folder:
    for key in keys:
        artifact = artifacts.ArtifactCache().find(key)
        copy = Path(folder) / f"{key}.so"
        shutil.copyfile(artifact.library, copy)
        at = time.perf_counter()
        loading.verify(artifact)
        loading.LoadedKernel(key, copy)
        load += time.perf_counter() - at
print(json.dumps({
    "returned, ms": (returned - start) * 1e3, "done, ms": (done - start) * 1e3,
    "of it hashing and loading, ms": load * 1e3, "libraries": len(keys), "served": hits,
}))
"""


@dataclass(frozen=True)
class Case:
    """A first call: of a full store, or of a wheel on a machine without a compiler."""

    label: str
    limit_ms: float
    group = "first call"


CASES = (Case("full store", 100.0), Case("wheel", 150.0))


def measure(case: Case, args: Namespace) -> Row:
    """Medians of fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        measured = wheel if case.label == "wheel" else full_store
        figures = measured(Path(folder), args.package)
    return {"figures": figures, "goals": {"returned, ms": f"at most {case.limit_ms:g}"}}


def full_store(cache: Path, _: Path | None) -> dict[str, Any]:
    """With this machine's kernels, and `ENTRIES` decisions beside those of the user's store."""
    settings.artifacts_dir().mkdir(parents=True, exist_ok=True)
    (cache / "artifacts").symlink_to(settings.artifacts_dir().resolve())
    store = cache / "store.sqlite"
    if store_file().exists():
        back_up(store_file(), store)
    with open_store(f"sqlite:///{store}") as opened:
        opened.import_(document(ENTRIES))
    return _medians(cache) | {"entries": ENTRIES}


def wheel(folder: Path, package: Path | None) -> dict[str, Any]:
    """With prebuilt kernels, no compiler and an empty cache.

    Args:
        folder: empty.
        package: folder with an unpacked wheel; None: one is packed of the kernels here. Those that
            a wheel refuses for their glibc are left out, and counted.

    Raises:
        BenchmarkError: when no kernel list is there, every kernel is left out, or a call fails.
        ConfigError: when a kernel of the list is missing, or none is proven.
    """
    packages, cache = (package or folder / "packages").resolve(), folder / "cache"
    cache.mkdir()
    left_out = 0
    if package is None:
        lists = users()
        if not lists:
            raise BenchmarkError("no kernel is built: tuner build --portfolio")
        every, artifacts = KernelList.read(lists[-1]), ArtifactCache()
        packed = without_newer_glibc(every, artifacts)
        left_out = len(every.kernels) - len(packed.kernels)
        if left_out and not packed.kernels:
            raise BenchmarkError(f"all {left_out} kernels need a newer glibc than a wheel allows")
        write_package(packed, artifacts, packages)
    file = packages / PACKAGE / KERNELS
    if not file.is_file():
        raise BenchmarkError(f"{packages} has no prebuilt kernels (wanted: an unpacked wheel)")
    variables = {"CXX": str(cache / "no-compiler"), "PYTHONPATH": str(packages)}
    kernels = len(KernelList.read(file).kernels)
    return _medians(cache, variables) | {"kernels": kernels, "left out for glibc": left_out}


def _medians(cache: Path, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Medians of fresh processes.

    Raises:
        BenchmarkError: when one fails.
    """
    variables = {**python_environment(), "TUNER_CACHE_DIR": str(cache)}
    paths = more.get("PYTHONPATH"), variables.get("PYTHONPATH")
    variables |= {**more, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables.pop("TUNER_STORE", None)
    # An installed package has its bytecode: here the first process writes it for the others.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    answers = []
    for _ in range(RUNS):
        command = python_command("-c", _FIRST_CALL)
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            raise BenchmarkError(f"the first call failed: {last}")
        answers.append(json.loads(done.stdout))
    return {name: statistics.median(answer[name] for answer in answers) for name in answers[0]}


def document(count: int) -> dict[str, Any]:
    """Decisions that look like real ones: an own kernel and two vendors' each."""
    configs = [
        Config("gemm", {"tile_m": 128, "tile_n": 256, "tile_k": 64, "cluster_m": 2}),
        *(Config("vendor_blas", {"kernel": name}) for name in ("cublaslt", "cublas")),
    ]
    measured = [
        Measurement(
            GemmProblem(8 * (number + 1), 4096, 4096),
            config,
            DEFAULT_GPU,
            Regime.default("gemm"),
            Status.OK,
            environment=Environment({"driver": "580.159.04", "cuda": "13.0", "torch": "2.11.0"}),
            latency_us=10.0 + number / 7 + place,
            std_us=0.1,
            rounds=20,
            is_final=True,
            error=2.1e-4,
            sweep=f"{number:016x}",
        )
        for number in range(count)
        for place, config in enumerate(configs)
    ]
    decisions = [
        Decision([n, n + 1, n + 2], None, f"{n:016x}", "2026-01-01T00:00:00.000+00:00")
        for n in range(0, len(measured), len(configs))
    ]
    return write(dict(enumerate(measured)), decisions)
