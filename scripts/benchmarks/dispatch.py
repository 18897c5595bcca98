"""``scripts/bench dispatch``: cost of a call of `tuner.attention` beside its kernel.

Five parts, each a process of its own with a time-out, on one GPU:

- host: host time a call in bursts that the launch queue holds. It stands beside the bare launch (a
  loop in C over the kernel's entry point), and PyTorch's and FlashAttention-4's own calls. Also the
  table's share, and the calls that the C++ dispatcher answered.
- wall: time a call in an eager loop, beside the same kernel's in a CUDA graph.
- decoder: tokens a second of a decoder with the shapes of Llama-3-8B and random weights. By
  PyTorch's kernels, with attention tuned, and with the whole block tuned.
- first-call: the first call after `import tuner`, with 10,000 entries in the store. It includes the
  deferred imports.
- wheel: the same with an empty cache, no compiler, and the wheel of prebuilt kernels that
  `scripts/build-kernels` makes, or an unpacked one (``--package``). The time of loading the kernels
  is shown.

Limits stand beside their figures; no part fails for being slow. Own kernels run where they are
tuned. Shipped decisions have the shapes of `host` and `wall`. The decoder's are tuned by
``scripts/bench dispatch --list-problems > p.yaml`` and ``scripts/tuner sweep --problems p.yaml``.
An untuned part says so, and has no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import calls, decoder, file_head
from benchmarks.gpu import need_gpu
from benchmarks.service import document, problem
from tuner import settings
from tuner.base.output import check_place
from tuner.base.processes import python_command, python_environment
from tuner.bench.results import write_json
from tuner.bundle.wheel import without_newer_glibc, write_package
from tuner.cli import Parser
from tuner.compile import dispatcher
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.prebuilt import KERNELS, PACKAGE
from tuner.errors import BenchmarkError, ConfigError, TunerError
from tuner.families.peers import installed
from tuner.measure import device
from tuner.measurement import Provenance
from tuner.problem import Problem, problem_from_json
from tuner.selection.describe import table
from tuner.selection.kernel_list import KernelList
from tuner.selection.kernels import users
from tuner.selection.reader import lookup, store_file
from tuner.store import exchange, open_store
from tuner.store.entry import digest_of, is_vendor

PARTS: Mapping[str, float] = {
    "host": 180,
    "wall": 120,
    "first-call": 180,
    "wheel": 180,
    "decoder": 300,
}
"""Each part's time-out, seconds."""
BUILD_TIMEOUT_S = 300.0
FIRST_CALL_LIMIT_MS, WHEEL_LIMIT_MS = 100.0, 150.0
RUNS = 5
"""Processes whose median is the time of a first call."""
ENTRIES = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or one in this process; 0 when every part gave figures."""
    args = _parser().parse_args(argv)
    if args.part:
        write_json(args.json, _measured(args.part, args.layers, args.runs, args.package))
        return 0
    for name, value in (("layers", args.layers), ("runs", args.runs)):
        if value < 1:
            raise ConfigError(f"{name}={value} is out of range (allowed: 1 or more)")
    if args.list_problems:
        for problem in called(args.parts):
            print(f"- op={problem.op},{problem.label()}")
        return 0
    check_place(args.json)
    results: dict[str, Any] = {"environment": environment(), "parts": {}}
    if set(args.parts) != {"wheel"}:  # whose machine has neither a compiler nor a dispatcher
        _build(called(args.parts), args.built_only)
    for name in args.parts:
        _note(f"{name} ...")
        results["parts"][name] = _in_child(name, args.layers, args.runs, args.package)
        if args.json:
            write_json(args.json, results)
    print(report(results))
    return int(any("failed" in part for part in results["parts"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    parser.add_argument("--parts", type=_names, default=list(PARTS), help="as in host,wall")
    parser.add_argument(
        "--list-problems",
        action="store_true",
        help="only print what the parts call, as YAML for `tuner sweep --problems`",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=decoder.LAYERS,
        help="layers of the decoder (Llama-3-8B has 32)",
    )
    parser.add_argument(
        "--built-only", action="store_true", help="compile no kernel: the portfolio's serve instead"
    )
    parser.add_argument(
        "--runs", type=int, default=RUNS, help=f"processes of a first call (default {RUNS})"
    )
    parser.add_argument(
        "--package", type=Path, metavar="FOLDER", help="unpacked wheel of prebuilt kernels"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"'{name}' is no part (allowed: {', '.join(PARTS)})")
    return names


def called(parts: Sequence[str]) -> list[Problem]:
    """Calls of the parts: own kernels where they are tuned, else PyTorch's."""
    return [calls.PROBLEM, *(decoder.problems() if "decoder" in parts else ())]


def _build(problems: Sequence[Problem], built_only: bool) -> None:
    """Compile what would be launched for the problems, and the dispatcher, where they are not here;
    name the problems that nothing was decided for.

    Args:
        problems: calls of the parts.
        built_only: compile the dispatcher only: the portfolio's kernels serve in the others' place.
    """
    gpu, artifacts = device.detect(), ArtifactCache()
    for wanted in problems:
        answer = lookup(wanted, gpu=gpu, with_portfolio=False)
        label = f"{wanted.op} {wanted.label()}"
        if answer is None or answer.entry.provenance is not Provenance.MEASURED:
            _note(f"not tuned: {label}")
            continue
        own = [m for m in answer.candidates if not is_vendor(m.config)]
        keys = list(own[0].artifacts.values()) if own else []
        if own and not built_only and not (keys and all(artifacts.find(key) for key in keys)):
            command = python_command("-m", "tuner", "build", "--op", wanted.op)
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [*command, "--shape", wanted.label()],
                    stdout=sys.stderr,
                    env=python_environment(),
                    timeout=BUILD_TIMEOUT_S,
                    check=False,
                )
    try:
        dispatcher.build(artifacts)
    except TunerError as exc:
        _note(f"no dispatcher, calls go through Python: {exc}")


def _note(text: str) -> None:
    print(f"dispatch: {text}", file=sys.stderr, flush=True)


def _measured(part: str, layers: int, runs: int, package: Path | None) -> dict[str, Any]:
    """A part's figures, in this process."""
    if part == "decoder":
        return decoder.measure(layers)
    if part in ("host", "wall"):
        return calls.host() if part == "host" else calls.wall()
    return first_call(runs) if part == "first-call" else wheel(runs, package)


def _in_child(name: str, layers: int, runs: int, package: Path | None = None) -> dict[str, Any]:
    """A part's figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = python_command("-m", "benchmarks", "dispatch", "--part", name)
        command += ["--json", str(out), "--layers", str(layers), "--runs", str(runs)]
        if package is not None:
            command += ["--package", str(package.resolve())]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=PARTS[name],
                env=python_environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no end after {PARTS[name]:.0f} s"}
        if done.returncode == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        return {"failed": _last_words(done)}


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def environment() -> dict[str, Any]:
    """Versions and clocks behind the figures.

    Raises:
        BenchmarkError: when there is no GPU.
    """
    need_gpu()
    import torch

    facts = {
        "gpu": torch.cuda.get_device_name(),
        **device.environment().facts,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "flash4": installed.version("flash4"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return file_head.complete(facts)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def first_call(runs: int = RUNS) -> dict[str, Any]:
    """Milliseconds of the first call, in fresh processes over a store with `ENTRIES` more."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        settings.artifacts_dir().mkdir(parents=True, exist_ok=True)
        (cache / "artifacts").symlink_to(settings.artifacts_dir().resolve())
        store = cache / "store.sqlite"
        if store_file().exists():
            with (
                contextlib.closing(sqlite3.connect(store_file())) as source,
                contextlib.closing(sqlite3.connect(store)) as target,
            ):
                source.backup(target)
        fill(store, ENTRIES)
        return _first_calls(cache, runs) | {"entries": ENTRIES}


def wheel(runs: int = RUNS, package: Path | None = None) -> dict[str, Any]:
    """As `first_call`, of a machine with prebuilt kernels, no compiler and an empty cache.

    Args:
        runs: processes.
        package: folder with an unpacked wheel; None: one is packed of the kernels here. Those that
            a wheel refuses for their glibc are left out, and counted.

    Raises:
        BenchmarkError: when no kernel list is there, every kernel is left out, or a call fails.
        ConfigError: when a kernel of the list is missing, or none is proven.
    """
    with tempfile.TemporaryDirectory() as folder:
        packages, cache = package or Path(folder) / "packages", Path(folder) / "cache"
        cache.mkdir()
        kernels, left_out = _packed(packages) if package is None else (_kernels_in(package), 0)
        variables = {"CXX": str(cache / "no-compiler"), "PYTHONPATH": str(packages)}
        found = _first_calls(cache, runs, variables)
        return found | {"kernels": kernels, "left_out_for_glibc": left_out}


def _packed(packages: Path) -> tuple[int, int]:
    """Write the package of prebuilt kernels. Returns the numbers of its kernels and of those left
    out.

    Raises:
        BenchmarkError: as in `wheel`.
        ConfigError: as in `wheel`.
    """
    lists = users()
    if not lists:
        raise BenchmarkError("no kernel is built: tuner build --portfolio")
    every, artifacts = KernelList.read(lists[-1]), ArtifactCache()
    packed = without_newer_glibc(every, artifacts)
    left_out = len(every.kernels) - len(packed.kernels)
    if left_out and not packed.kernels:
        raise BenchmarkError(f"all {left_out} kernels need a newer glibc than a wheel allows")
    return write_package(packed, artifacts, packages), left_out


def _kernels_in(packages: Path) -> int:
    """Number of kernels in an unpacked wheel.

    Raises:
        BenchmarkError: when there are none.
    """
    file = packages / PACKAGE / KERNELS
    if not file.is_file():
        raise BenchmarkError(f"{packages} has no prebuilt kernels (wanted: an unpacked wheel)")
    return len(KernelList.read(file).kernels)


def _first_calls(
    cache: Path, runs: int, more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
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
    found = []
    for _ in range(runs):
        command = python_command("-c", _FIRST_CALL)
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            raise BenchmarkError(f"the first call failed: {_last_words(done)}")
        found.append(json.loads(done.stdout))
    times = ("returned", "done", "load")
    medians = {name: statistics.median(one[name] for one in found) for name in times}
    hits = sum(one["hits"] for one in found)
    return {**medians, "hits": hits, "runs": runs, "loaded": found[-1]["loaded"], "each": found}


def fill(store: Path, count: int) -> None:
    """Put decisions for `count` problems into a store that look like real ones.

    The first is inserted through the store's interface, the rest as copies of its rows. Checking
    10,000 would take a minute.
    """
    with open_store(f"sqlite:///{store}") as opened:
        opened.import_(document(1))
    copied = {digest_of(m): m for m in exchange.read(document(1))[0]}

    def digest(of: str, key: str) -> str:
        """Digest of the measurement `of` when its problem is the one that `key` describes."""
        return digest_of(copied[of].but(problem=problem_from_json(json.loads(key))))

    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        connection.create_function("digest_for", 2, digest, deterministic=True)
        query = "SELECT id, (SELECT max(id) FROM problems) FROM problems WHERE key = ?"
        first, last = connection.execute(query, (problem(0).key,)).fetchone()
        keys = ((problem(n).key, problem(n).op) for n in range(1, count))
        connection.executemany("INSERT OR IGNORE INTO problems (key, op) VALUES (?, ?)", keys)
        of_winner = f"winner_id IN (SELECT id FROM winners WHERE problem_id = {first})"
        for name, which, changed in (
            ("measurements", f"problem_id = {first}", {"problem_id": "p.id"}),
            ("winners", f"problem_id = {first}", {"problem_id": "p.id"}),
            ("rankings", of_winner, {}),
        ):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            ids = {
                key: f"p.id * 1000000 + t.{key}" for key in ("id", "winner_id", "measurement_id")
            }
            values = {"digest": "digest_for(t.digest, p.key)", **ids, **changed}
            connection.execute(
                f"INSERT INTO {name} SELECT {', '.join(values.get(c, f't.{c}') for c in columns)} "
                f"FROM {name} t, problems p WHERE t.{which} AND p.id > {last}"
            )


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
    "returned": (returned - start) * 1e3, "done": (done - start) * 1e3, "hits": hits,
    "load": load * 1e3, "loaded": len(keys),
}))
"""


def report(results: Mapping[str, Any]) -> str:
    """The figures that have a limit, and what they are to be seen beside."""
    rows: list[tuple[str, str, str, str]] = [("figure", "here", "at most", "beside it")]
    for name, part in results["parts"].items():
        if "failed" in part:
            rows.append((name, "failed", "", part["failed"]))
        else:
            rows += _ROWS[name](part)
    facts = results["environment"]
    heading = ", ".join(
        f"{name} {facts[name]}" for name in ("gpu", "driver", "torch") if name in facts
    )
    return f"{heading}\n{table(rows, frozenset({1, 2}))}"


def _first_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    return [_first_row("first call ms", part, FIRST_CALL_LIMIT_MS, f"{part['entries']} entries")]


def _wheel_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    where = f"{part['kernels']} prebuilt kernels"
    if part["left_out_for_glibc"]:
        where += f" ({part['left_out_for_glibc']} left out for their glibc)"
    return [_first_row("first call ms, wheel", part, WHEEL_LIMIT_MS, where)]


def _first_row(
    name: str, part: Mapping[str, Any], limit: float, where: str
) -> tuple[str, str, str, str]:
    beside = (
        f"{where}, {part['hits']} of {part['runs']} served, done {part['done']:.1f}, "
        f"of it hashing and loading {part['loaded']} {part['load']:.1f}"
    )
    return name, f"{part['returned']:.1f}", f"{limit:.0f}", beside


_ROWS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[tuple[str, str, str, str]]]] = {
    "host": calls.host_rows,
    "wall": calls.wall_rows,
    "decoder": decoder.rows,
    "first-call": _first_rows,
    "wheel": _wheel_rows,
}
