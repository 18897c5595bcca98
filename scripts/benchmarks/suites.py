"""PyTorch's own tests of attention, by forced kernels and by PyTorch alone.

They are the SDPA classes of a checkout's ``test/test_transformers.py``. A case is a slice of them,
drawn by the tests' names. It runs twice: by PyTorch alone, and with kernels of this project forced
onto every shape that they take (`benchmarks.forced`).
Failures that PyTorch alone does not have are what counts. Tests that assert which backend ran, or
dropout's random stream, are listed apart, by name.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.harness import Bench, Preset, Row
from benchmarks.rows import markdown
from benchmarks.suites_plugin import (
    ALONE,
    BEGIN,
    END,
    FORCED,
    Share,
    append,
    row_of,
    rows_of,
    tests_of,
)  # fmt: skip
from tuner.base.install import install_command
from tuner.base.processes import python_command
from tuner.cli import Parser
from tuner.errors import ConfigError

FILE, NEEDS = "test/test_transformers.py", "expecttest"
"""Tests of a checkout, and the package that they import beside torch."""
TOP = Path(__file__).resolve().parents[2]
MODES = (ALONE, FORCED)
EXPECTED: Mapping[str, str] = {
    r"sdp_choice|sdp_priority|sdp_backend|backend_(?:selection|priority)|test_dispatch": (
        "asserts which backend answers"
    ),
    r"dropout(?:_p)?_0_[0-9]*[1-9]|dropout_mask|philox|test_dropout": (
        "depends on dropout's random stream"
    ),
}
"""Patterns of tests whose failure by forced kernels says nothing about a result, and why."""
LIMIT_S = 7200.0
MAX_NAMES = 20
"""Longest list of a table; the file of rows has all."""
Tests = dict[str, Row]
"""Outcome of each test by its name."""


@dataclass(frozen=True)
class Slice:
    """A part of the tests."""

    number: int
    of: int
    keyword: str = "SDPA and CUDA"
    """pytest's ``-k``."""
    group = "pytorch"

    @property
    def label(self) -> str:
        """Suite and place."""
        return f"{self.group}, slice {self.number + 1} of {self.of}"


def slices(args: Namespace) -> list[Slice]:
    """All of them."""
    return [Slice(number, args.slices) for number in range(args.slices)]


def measure(case: Slice, args: Namespace) -> Row:
    """Outcomes of a slice's tests in both modes, in several processes at once.

    Raises:
        ConfigError: when the tests or a package that they import are not there.
    """
    path = Path(args.checkout or "", FILE).resolve()
    if not path.is_file():
        raise ConfigError(f"{path} is not there (wanted: --checkout of PyTorch)")
    if find_spec(NEEDS) is None:
        raise ConfigError(f"{FILE} needs {NEEDS}: `{install_command(NEEDS)}`")
    if not args.built_only:
        from benchmarks import forced

        forced.made().compile_usual()
    with tempfile.TemporaryDirectory() as folder:
        shares = [
            Share(
                mode,
                str(Path(folder, f"{mode}-{number}.jsonl")),
                case.number * args.processes + number,
                case.of * args.processes,
                args.sample,
                built_only=args.built_only,
                limit_s=args.test_limit,
            )
            for mode, number in product(MODES, range(args.processes))
        ]
        with ThreadPoolExecutor(len(shares)) as pool:
            broken = list(pool.map(partial(completed, path, case.keyword), shares))
        tests: dict[str, Tests] = {mode: {} for mode in MODES}
        for share in shares:
            tests[share.mode] |= tests_of(Path(share.record))
    figures = compared(*tests.values())
    wrong = [fact["id"] for fact in figures["new_failures"]]
    return {"figures": figures, "wrong": [*wrong, *filter(None, broken)]}


def completed(path: Path, keyword: str, share: Share) -> str:
    """Run a share, and go on behind each test that ends its process; why it has no end, if so.

    The processes belong to this one's group, and end with it.
    """
    record = Path(share.record)
    command = python_command("-m", "pytest", "-p", "benchmarks.suites_plugin")
    # Settings and hooks of the checkout want plug-ins that are not here.
    command += ["-q", "--tb=short", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    command += ["--rootdir", str(path.parent), str(path), *(["-k", keyword] if keyword else [])]
    paths = [str(TOP), str(TOP / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Plug-ins that happen to be installed change nothing, and take seconds to import.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **share.environment()}
    while True:
        before = len(tests_of(record))
        done = subprocess.run(
            command, cwd=path.parent, env=environment, text=True, errors="replace", check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        row = rows_of(record)[-1] if record.exists() else {}
        if END in row:
            return ""
        is_stuck = done.returncode == -signal.SIGALRM
        why = f"its process ended: {done.returncode}"
        why = f"no end in {share.limit_s:g} s" if is_stuck else why
        if BEGIN in row:
            append(record, row_of(row[BEGIN], "failed", why))
        if len(tests_of(record)) == before:
            tail = " | ".join(done.stdout.splitlines()[-5:])
            return f"{record.stem}: no test was run ({why}): {tail}"


def compared(alone: Tests, forced: Tests) -> Row:
    """Outcome of tests under the forced kernels.

    Args:
        alone: tests by name, as PyTorch answers.
        forced: the same with forced kernels.
    """
    new, expected, both = [], [], []
    for name, row in sorted(forced.items()):
        if row["outcome"] != "failed" or name not in alone:
            continue
        fact = {"id": name, "message": row["message"], "hits": row["hits"]}
        reason = next((why for text, why in EXPECTED.items() if re.search(text, name)), "")
        if alone[name]["outcome"] == "failed":
            both.append({**fact, "alone": alone[name]["message"]})
        elif reason:
            expected.append({**fact, "reason": reason})
        else:
            new.append(fact)
    fallbacks: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for row in forced.values():
        fallbacks.update(row["fallbacks"])
        skipped[row["message"]] += row["outcome"] == "skipped"
    return {
        "tests": len({*alone, *forced}),
        "not_run": sorted({*alone} ^ {*forced}),
        ALONE: dict(Counter(row["outcome"] for row in alone.values())),
        FORCED: dict(Counter(row["outcome"] for row in forced.values())),
        "skipped": dict(
            Counter(r["message"] for r in forced.values() if r["outcome"] == "skipped")
        ),
        "hits": sum(row["hits"] for row in forced.values()),
        "tests_with_hits": sum(row["hits"] > 0 for row in forced.values()),
        "fallbacks": dict(fallbacks),
        "new_failures": new,
        "expected_failures": expected,
        "failures_of_both": both,
    }


def line(row: Row) -> str:
    """Counts of a slice, and its new failures."""
    of = row["figures"]
    said = f"{row['case']}: {of['tests']} tests, {len(of['not_run'])} run in one mode only"
    return "; ".join([said, *(f"wrong: {why}" for why in row["wrong"])])


def table(rows: Sequence[Row]) -> list[str]:
    """Counts, then the tests that failed."""
    head = ("tests", "by PyTorch alone", "forced", "calls by forced kernels")
    parts = [row["figures"] for row in rows if "figures" in row]
    new, expected, both, not_run = (
        [fact for of in parts for fact in of[name]]
        for name in ("new_failures", "expected_failures", "failures_of_both", "not_run")
    )
    hits = sum(of["hits"] for of in parts), sum(of["tests_with_hits"] for of in parts)
    cells = (
        *(str(sum(of["tests"] for of in parts)), *(_counts(parts, mode) for mode in MODES)),
        f"{hits[0]} in {hits[1]} tests",
        *(str(len(facts)) for facts in (new, expected, both, not_run)),
    )
    said = _names(f"{fact['id']}, new: {fact['message']}" for fact in new)
    said += _names(f"{fact['id']}: {fact['reason']}" for fact in expected)
    said += _names(f"{fact['id']}, in both: {fact['alone']}" for fact in both)
    named = {fact["id"] for fact in new}
    broken = [why for row in rows for why in row.get("wrong", [row.get("lost")])]
    said += [f"- {why}" for why in broken if why not in named]
    heads = (*head, "new failures", "backends and dropout", "in both", "in one mode only")
    return [*markdown([heads, cells]), "", *said]


def _counts(parts: Sequence[Row], mode: str) -> str:
    whole: Counter[str] = Counter()
    for of in parts:
        whole.update(of[mode])
    return ", ".join(f"{count} {outcome}" for outcome, count in whole.items())


def _names(names: Iterator[str]) -> list[str]:
    every = [f"- {name}" for name in names]
    more = len(every) - MAX_NAMES
    return [*every[:MAX_NAMES], *([f"- and {more} more"] if more > 0 else [])]


def compile_usual(_: Namespace) -> None:
    """Compile what most shapes need; needs no GPU."""
    from benchmarks import forced

    print(f"{forced.made(needs_gpu=False).compile_usual()} kernels compiled")


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--checkout", metavar="PATH", help="checkout of PyTorch's sources")
    add("--sample", type=float, default=1.0, help="part of the tests (default: all)")
    add("--slices", type=int, default=4, help="cases of a suite (default 4)")
    add("--processes", type=int, default=1, help="processes of each mode at once (default 1)")
    add("--test-limit", type=int, default=120, help="seconds of a test; else it has failed")
    add("--built-only", action="store_true", help="PyTorch answers what no built kernel takes")


BENCH = Bench(
    "suites",
    __doc__,
    {
        "pytorch": Preset(
            f"{FILE} of a --checkout",
            slices,
            measure,
            line,
            table,
            LIMIT_S,
            smoke=Slice(0, 1, keyword=""),
            compile=compile_usual,
        )
    },
    _options,
)
