"""Tests with other versions of what the tuner stands on, as ``scripts/matrix`` calls them.

A row is one version of one thing: the checkout's environment with that version in front, or a new
environment of another Python. Results go to a file of JSON, a row each with its day, and a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.base.processes import python_command

TOP = Path(__file__).parents[1]
_LIMIT_S = 3600
_PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet")
_PYTEST = ("-P", "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "--timeout", "900")
_COMPILER = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=="
_ENGINE = ("architecture", "continuous_batching", "runtime_transformers", "runtime_versions")
_STORE = ("store", "jobs", "migrate", "backup", "exchange", "optuna_storage", "optuna_journals")
_PLAIN = ("cli", "cli_ends", "document", "fused_attention", "gemm", "kernel_list", "packaging")
_TORCH = (
    *("dispatcher", "", "autograd", "enable", "entries", "layers", "moe", "operators", "paged"),
    *("products", "scaled", "strides", "traced_masks", "varlen"),
)
_ENGINES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": (("0.26.0", "0.28.0", "0.31.0", "0.33.0"), ()),
    "sglang": (("0.5.23",), ("dill", "msgspec", "orjson", "psutil", "pybase64", "pillow", "pyzmq")),
}
"""Versions of engines, whose Python is unpacked, and packages beside it."""
_PYTHONS = (*_PLAIN, *_STORE, "forks", "sweep", "study", "toolchain", "wheel")


@dataclass(frozen=True)
class Row:
    """One version and what is run with it.

    Args:
        thing: software that has the version.
        version: its version, as its package or tag has it.
        tests: test files, without ``test_`` and the ending.
        folder: folder of the tests.
        requirements: packages that are installed in front of the environment.
    """

    thing: str
    version: str
    tests: tuple[str, ...]
    folder: str = "unit"
    requirements: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.thing} {self.version}"


class Missing(Exception):
    """A version that this machine does not have."""


def rows() -> list[Row]:
    """All rows, in the order of the table."""
    found = [Row("Python", version, _PYTHONS) for version in ("3.11", "3.12", "3.13", "3.14")]
    packages: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "transformers": (("5.17.0", "5.20.2", "5.22.2", "5.23.0", "5.24.0"), _ENGINE),
        "sqlalchemy": (("2.0.58", "2.1.0", "2.1.9"), _STORE),
        "optuna": (("5.0.0",), ("study", "optuna_storage", "optuna_journals", "sweep")),
        "ray": (("2.60.0",), ("on_ray",)),
        "torch": (
            ("2.11.0", "2.12.1", "2.14.1", "2.15.0"),
            tuple(f"runtime_{name}".rstrip("_") for name in _TORCH),
        ),
        "cuda-bindings": (("13.2.0", "13.4.4", "13.5.0"), ("device", "gpus", "stopwatch")),
        "cuda-core": (("1.0.1", "1.1.1", "1.2.2"), ("device", "gpus", "stopwatch")),
    }
    for name, (versions, tests) in packages.items():
        more = ("psutil",) if name == "transformers" else ()  # its batches ask for free memory
        for version in versions:
            found.append(Row(name, version, tests, requirements=(f"{name}=={version}", *more)))
    for name, (versions, _) in _ENGINES.items():
        found += [Row(name, version, (f"{name}_versions",)) for version in versions]
    for version in ("13.0.2", "13.1.2.0", "13.2.2", "13.3.1", "13.4.3", "13.5.0"):
        tests = ("compiler", "gemv_compile", "softmax_compile")
        found.append(Row("nvcc of CUDA", version, tests, "compile", (f"{_COMPILER}{version}",)))
    for version in ("4.2.0", "4.3.5", "4.4.3", "4.5.3", "4.6.2", "4.7.0"):
        found.append(Row("CUTLASS's headers", version, ("grouped_gemm_compile",), "compile"))
    return found


def run(row: Row, folder: Path) -> str:
    """Output of a row's tests.

    Args:
        row: version and its tests.
        folder: empty folder for the row's packages.

    Raises:
        Missing: when the version cannot be had here.
        CalledProcessError: when a test fails.
    """
    (python, _), variables = python_command(), dict(os.environ)
    if row.thing == "Python":
        python = _environment(row.version, folder)
        variables["TUNER_TEST_TORCH"] = "0"
    elif row.thing in _ENGINES:
        variables[f"TUNER_TEST_{row.thing.upper()}"] = str(_unpacked(row, python, folder))
    elif row.requirements:
        _install(python, "--target", str(folder), *row.requirements)
        if row.folder == "compile":
            variables["TUNER_NVCC"] = str(folder / "nvidia/cu13/bin/nvcc")
        else:
            variables["PYTHONPATH"] = f"{folder}{os.pathsep}{variables.get('PYTHONPATH', '')}"
    else:
        variables["TUNER_CUTLASS_DIR"] = str(_cutlass(row.version, folder))
    files = [f"tests/{row.folder}/test_{name}.py" for name in row.tests]
    done = subprocess.run(
        [python, *_PYTEST, *files],
        cwd=TOP,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode or f"{row.thing} is not installed" in done.stdout:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout)
    return done.stdout


def _environment(version: str, folder: Path) -> str:
    """A new environment of another Python, with what the tests need but torch."""
    base = shutil.which(f"python{version}")
    if base is None:
        raise Missing(f"no python{version} on this machine")
    _output(base, "-P", "-m", "venv", str(folder))
    python = str(folder / "bin/python")
    needed = ("pytest", "pytest-timeout", "hypothesis", "scipy", "scikit-learn", "setuptools>=77")
    _install(python, "--editable", f"{TOP}[postgres,service]", *needed)
    return python


def _unpacked(row: Row, python: str, folder: Path) -> Path:
    """A folder with an engine, without its libraries, in a sub-folder named after its version."""
    place, wheels = folder / "unpacked" / row.version, folder / "wheels"
    _output(
        *(python, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"),
        *("--dest", str(wheels), f"{row.thing}=={row.version}"),
    )
    for path in wheels.iterdir():
        with zipfile.ZipFile(path) as wheel:
            texts = [name for name in wheel.namelist() if not name.endswith(".so")]
            wheel.extractall(place, texts)
    if beside := _ENGINES[row.thing][1]:
        _install(python, "--no-deps", "--target", str(place), *beside)
    return place.parent


def _cutlass(version: str, folder: Path) -> Path:
    """CUTLASS of a tag of the clone that ``TUNER_CUTLASS_CLONE`` names."""
    clone = os.environ.get("TUNER_CUTLASS_CLONE")
    if not clone:
        raise Missing("TUNER_CUTLASS_CLONE names no clone of CUTLASS")
    archive = folder / "cutlass.tar"
    parts = ("include", "tools/util/include", "examples/common")
    _output("git", "-C", clone, "archive", "-o", str(archive), f"v{version}", *parts)
    shutil.unpack_archive(archive, folder)
    return folder


def _install(python: str, *arguments: str) -> None:
    _output(python, *_PIP, *arguments)


def _output(*command: str) -> str:
    """Standard output of a command.

    Raises:
        Missing: when it fails, with its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing((done.stderr.strip() or done.stdout.strip() or "failed").splitlines()[-1])
    return done.stdout


def record(row: Row) -> dict[str, Any]:
    """Day and result of a row."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            said, result = run(row, Path(folder)), "passed"
        except subprocess.CalledProcessError as exc:
            said, result = str(exc.output), "failed"
        except Missing as exc:
            said, result = str(exc), "not run"
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", said)
    faults = re.findall(r"^(?:FAILED|ERROR) tests.*", said, re.M)
    text = said if result == "not run" else ", ".join(counts[-4:])
    day = datetime.date.today().isoformat()
    return {"row": row.label, "day": day, "result": result, "tests": text, "faults": faults[:9]}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Results as Markdown, the last of each row."""
    last = {each["row"]: each for each in records}
    lines = ["| version | day | result | tests |", "|---|---|---|---|"]
    lines += [
        f"| {each['row']} | {each['day']} | {each['result']} | {each['tests']} |"
        for each in last.values()
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the rows that are asked for; 1 when a test failed."""
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this text")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append each row's result")
    args = parser.parse_args()
    chosen = [row for row in rows() if args.only in row.label]
    if args.list:
        print("\n".join(row.label for row in chosen))
        return 0
    records = []
    for row in chosen:
        records.append(record(row))
        print(json.dumps(records[-1]), flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    print(table(records))
    return int(any(each["result"] == "failed" for each in records))


if __name__ == "__main__":
    sys.exit(main())
