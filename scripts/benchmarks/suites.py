"""PyTorch's and FlashAttention's own tests of attention, by forced kernels and by PyTorch alone.

``scripts/bench suites --pytorch PATH --flash-attention PATH`` runs ``test/test_transformers.py``
(its SDPA classes) and ``tests/test_flash_attn.py`` of two checkouts. Each runs twice: by PyTorch
alone, and with kernels of this project forced onto every shape that they take
(`benchmarks.forced`). Failures that PyTorch alone does not have are what counts. Tests that assert
which backend ran, or dropout's random stream, are listed apart, by name.

The same command goes on where it was stopped, in the folder of ``--work``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.suites_plugin import (
    ALONE,
    BEGIN,
    END,
    FORCED,
    START,
    Share,
    append,
    last,
    read,
    row_of,
)
from tuner.base.install import install_command
from tuner.base.output import check_place
from tuner.base.processes import ProcessGroup, python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError

TOP = Path(__file__).resolve().parents[2]
MODES = (ALONE, FORCED)
POLL_S = 0.2
"""Seconds between two looks at the processes."""
Tests = dict[str, dict[str, Any]]
"""Outcome of each test by its name."""
EXPECTED: Mapping[str, str] = {
    r"sdp_choice|sdp_priority|sdp_backend|backend_(?:selection|priority)|test_dispatch": (
        "asserts which backend answers"
    ),
    r"dropout(?:_p)?_0_[0-9]*[1-9]|dropout_mask|philox|test_dropout": (
        "depends on dropout's random stream"
    ),
}
"""Patterns of tests whose failure by forced kernels says nothing about a result, and why."""
TEST_LIMIT_S = 120.0
"""Default limit of a test; the slowest test of both suites takes seconds."""
MAX_NAMES = 20
"""Longest list on the terminal; the JSON has all."""


@dataclass(frozen=True)
class Suite:
    """Tests of another project."""

    name: str
    checkout: Path
    file: str
    """Path of the tests in the checkout."""
    keyword: str = ""
    """pytest's ``-k``."""
    sample: float = 1.0
    """Part of them that is run."""
    needs: str = "pytest"
    """Package that the tests import, beside torch."""
    forcing: str = Share.forcing
    is_flash_attention: bool = False

    @property
    def path(self) -> Path:
        return self.checkout / self.file

    def check(self) -> None:
        """See that the tests are there.

        Raises:
            ConfigError: when they are not, or a package that they import is missing.
        """
        if not self.path.is_file():
            raise ConfigError(f"{self.path} is not there (wanted: a checkout with {self.file})")
        if find_spec(self.needs) is None:
            raise ConfigError(f"{self.file} needs {self.needs}: `{install_command(self.needs)}`")


@dataclass
class Process:
    """One running share of a suite."""

    suite: Suite
    share: Share
    group: ProcessGroup
    known: int
    """Tests of its record when it began."""
    size: int = 0
    """Bytes of its record at the last look."""
    grown: float = 0.0
    """When the record last grew, of `time.monotonic`."""

    @property
    def record(self) -> Path:
        return Path(self.share.record)

    def is_stuck(self, limit_s: float) -> bool:
        """True if its record has not grown for so long."""
        size = self.record.stat().st_size if self.record.exists() else 0
        if size != self.size or not self.grown:
            self.size, self.grown = size, time.monotonic()
        return time.monotonic() - self.grown > limit_s


def suites_of(args: argparse.Namespace) -> list[Suite]:
    """The suites that were named.

    Raises:
        ConfigError: when none was, or a checkout is another one.
    """
    found = []
    if args.pytorch is not None:
        file = "test/test_transformers.py"
        keyword = args.keyword or "SDPA and CUDA"
        sample = args.pytorch_sample
        found.append(Suite("pytorch", args.pytorch.resolve(), file, keyword, sample, "expecttest"))
    if args.flash_attention is not None:
        found.append(
            Suite(
                "flash-attention",
                args.flash_attention.resolve(),
                "tests/test_flash_attn.py",
                args.keyword or "not kvcache and not paged",
                args.sample,
                needs="einops",
                is_flash_attention=True,
            )
        )
    if not found:
        raise ConfigError("name a checkout: --pytorch PATH, --flash-attention PATH or both")
    for suite in found:
        suite.check()
    return found


class Runner:
    """Runs the shares of suites as processes, and goes on after a test that lost its CUDA context,
    ended its process, or did not end.

    Args:
        work: folder of records and logs; what they hold is not run again.
        processes: processes of each suite and mode, all side by side.
        deadline: value of `time.monotonic` at which running tests are ended.
        built_only: as of `Share`.
        test_limit_s: seconds after which a test, or the way to the first one, is ended.

    Attributes:
        broken: shares that could not be run to their end, and why.
    """

    def __init__(
        self,
        work: Path,
        processes: int,
        deadline: float,
        *,
        built_only: bool = False,
        test_limit_s: float = TEST_LIMIT_S,
    ) -> None:
        self._work, self._processes, self._deadline = work, processes, deadline
        self._built_only, self._test_limit_s = built_only, test_limit_s
        self.broken: dict[str, str] = {}

    def run(self, suite: Suite, modes: Sequence[str] = MODES) -> list[Tests]:
        """The tests of a suite by name in each mode, as far as they were run.

        Raises:
            BenchmarkError: as of `run_all`.
        """
        return self.run_all([suite], modes)[0]

    def run_all(self, suites: Sequence[Suite], modes: Sequence[str] = MODES) -> list[list[Tests]]:
        """As `run`, for each suite, all at the same time.

        Raises:
            BenchmarkError: when no test of any suite was run, though there was time.
        """
        self._work.mkdir(parents=True, exist_ok=True)
        shares = [[list(self._shares(suite, mode)) for mode in modes] for suite in suites]
        running: list[Process] = []
        try:
            for suite, of_modes in zip(suites, shares, strict=True):
                running += [self._start(suite, share) for share in chain(*of_modes)]
            while running:
                running = [later for process in running for later in self._next(process)]
                time.sleep(POLL_S)
        finally:
            for process in running:
                process.group.end()
        found = [[_read_all(own) for own in of_modes] for of_modes in shares]
        for suite, tests in zip(suites, found, strict=True):
            if not any(tests) and time.monotonic() < self._deadline:
                self.broken.setdefault(suite.name, f"no test was run (-k '{suite.keyword}')")
        if self.broken and not any(chain(*found)):
            first = {why: name for name, why in reversed(self.broken.items())}
            raise BenchmarkError("; ".join(f"{name}: {why}" for why, name in first.items()))
        return found

    def _shares(self, suite: Suite, mode: str) -> Iterator[Share]:
        checkout = str(suite.checkout) if suite.is_flash_attention else ""
        for number in range(self._processes):
            name = f"{suite.name}-{mode}-{number}-of-{self._processes}"
            yield Share(
                mode,
                str((self._work / f"{name}.jsonl").resolve()),
                number,
                self._processes,
                suite.sample,
                suite.forcing,
                self._built_only,
                checkout,
            )

    def _start(self, suite: Suite, share: Share) -> Process:
        command = python_command("-m", "pytest", "-p", "benchmarks.suites_plugin")
        # Settings and hooks of the checkout want plug-ins that are not here.
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
        command += ["--rootdir", str(suite.path.parent), str(suite.path)]
        command += ["-k", suite.keyword] if suite.keyword else []
        paths = [str(TOP), str(TOP / "scripts"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Plug-ins that happen to be installed change nothing, and take seconds to import.
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        known = len(read(Path(share.record)))
        append(Path(share.record), {START: known})
        with Path(share.record).with_suffix(".log").open("ab") as log:
            group = ProcessGroup(
                command,
                cwd=suite.path.parent,
                env={**environment, **share.environment()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return Process(suite, share, group, known)

    def _next(self, process: Process) -> Iterator[Process]:
        """The process while it runs; the one that goes on after it; nothing after the last."""
        if time.monotonic() >= self._deadline:
            process.group.end()
            return
        code = process.group.process.poll()
        is_stuck = code is None and process.is_stuck(self._test_limit_s)
        if code is None and not is_stuck:
            yield process
            return
        process.group.end()
        record, row = process.record, last(process.record)
        if END in row and not is_stuck:
            return
        why = f"no end in {self._test_limit_s:g} s" if is_stuck else f"its process ended: {code}"
        if BEGIN in row:
            append(record, row_of(row[BEGIN], "failed", why))
        if len(read(record)) == process.known:
            tail = record.with_suffix(".log").read_text(errors="replace").splitlines()[-5:]
            self.broken[record.stem] = f"no test was run ({why}): {' | '.join(tail)}"
            return
        yield self._start(process.suite, process.share)


def _read_all(shares: Iterable[Share]) -> Tests:
    """The tests of all records."""
    return {name: row for share in shares for name, row in read(Path(share.record)).items()}


def compared(
    alone: Mapping[str, Mapping[str, Any]], forced: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Outcome of a suite under the forced kernels.

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
    for row in forced.values():
        fallbacks.update(row["fallbacks"])
    return {
        "tests": len({*alone, *forced}),
        "not_run": sorted({*alone} ^ {*forced}),
        "alone": dict(Counter(row["outcome"] for row in alone.values())),
        "forced": dict(Counter(row["outcome"] for row in forced.values())),
        "skipped": dict(
            Counter(
                row["message"] for row in forced.values() if row["outcome"] == "skipped"
            ).most_common()
        ),
        "hits": sum(row["hits"] for row in forced.values()),
        "tests_with_hits": sum(row["hits"] > 0 for row in forced.values()),
        "fallbacks": dict(fallbacks.most_common()),
        "new_failures": new,
        "expected_failures": expected,
        "failures_of_both": both,
    }


def text_of(name: str, found: Mapping[str, Any]) -> str:
    """Lines about a suite, for people."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found["forced"].items())
    alone = ", ".join(f"{count} {outcome}" for outcome, count in found["alone"].items())
    lines = [
        f"{name}: {found['tests']} tests; forced: {counts}; PyTorch alone: {alone}",
        f"  {found['hits']} calls answered by forced kernels, in {found['tests_with_hits']} tests; "
        f"{sum(found['fallbacks'].values())} by PyTorch",
        f"  failures that PyTorch alone does not have: {len(found['new_failures'])}",
        *_names(f"{row['id']} ({row['message']})" for row in found["new_failures"]),
        f"  besides, tests of backends and of dropout: {len(found['expected_failures'])}",
        *_names(f"{row['id']} ({row['reason']})" for row in found["expected_failures"]),
        f"  in both modes: {len(found['failures_of_both'])}",
        *_names(f"{row['id']} ({row['alone']})" for row in found["failures_of_both"]),
    ]
    if found["not_run"]:
        lines.append(f"  run in one mode only: {len(found['not_run'])} tests")
    return "\n".join(lines)


def _names(names: Iterator[str]) -> list[str]:
    every = list(names)
    lines = [f"    {name}" for name in every[:MAX_NAMES]]
    more = len(every) - MAX_NAMES
    return [*lines, f"    and {more} more"] if more > 0 else lines


def _environment(suites: Sequence[Suite]) -> dict[str, Any]:
    """Versions that the counts stand for."""
    import torch

    files = {one.name: hashlib.sha256(one.path.read_bytes()).hexdigest() for one in suites}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "sha256": files}


def run_suites(suites: Sequence[Suite], runner: Runner) -> dict[str, Any]:
    """Every suite in both modes: the document that ``--json`` writes.

    Raises:
        BenchmarkError: when the tests of one cannot be run.
    """
    found = {}
    for suite, tests in zip(suites, runner.run_all(suites), strict=True):
        found[suite.name] = compared(*tests)
        options = {**asdict(suite), "checkout": suite.checkout.name}
        found[suite.name]["options"] = options
    return {"environment": _environment(suites), "suites": found, "broken": runner.broken}


def main(argv: Sequence[str]) -> int:
    """Run them; 1 when a test fails by forced kernels alone, or was not run, or none was.

    Raises:
        BenchmarkError: when there is no GPU, or tests cannot be run.
        ConfigError: when the options are wrong.
    """
    args = _parser().parse_args(argv)
    samples = (args.sample, args.pytorch_sample)
    if args.test_limit <= 0:
        raise ConfigError("--test-limit must be above 0 seconds")
    if args.processes < 1 or not all(0 < sample <= 1 for sample in samples):
        raise ConfigError("--processes must be 1 or more, samples above 0 and at most 1")
    check_place(args.json)
    from benchmarks import forced

    if args.compile_only:
        print(f"{forced.made(needs_gpu=False).compile_usual()} kernels compiled")
        return 0
    suites = suites_of(args)
    limit_s = float("inf") if args.time_limit is None else args.time_limit
    deadline = time.monotonic() + limit_s
    if not args.built_only:
        forced.made().compile_usual()
    options: dict[str, Any] = {"built_only": args.built_only, "test_limit_s": args.test_limit}
    document = run_suites(suites, runner := Runner(args.work, args.processes, deadline, **options))
    if args.json:
        write_json(args.json, document)
    for name, found in document["suites"].items():
        print(text_of(name, found))
    for name, why in runner.broken.items():
        print(f"{name}: {why}")
    is_clean = not runner.broken and all(
        found["tests"] and not found["new_failures"] and not found["not_run"]
        for found in document["suites"].values()
    )
    return 0 if is_clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scripts/bench suites", description=__doc__)
    parser.add_argument("--pytorch", type=Path, metavar="PATH", help="checkout of torch's version")
    parser.add_argument("--flash-attention", type=Path, metavar="PATH", help="checkout")
    parser.add_argument("--keyword", metavar="TEXT", help="pytest's -k (default: of each suite)")
    parser.add_argument(
        "--sample", type=float, default=0.02, help="part of FlashAttention's tests (default 0.02)"
    )
    parser.add_argument(
        "--pytorch-sample", type=float, default=1.0, help="part of PyTorch's tests (default 1)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="processes of each suite and mode (default 2)"
    )
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="end what runs then")
    parser.add_argument(
        "--test-limit",
        type=float,
        default=TEST_LIMIT_S,
        metavar="SECONDS",
        help=f"a test that takes longer has failed (default {TEST_LIMIT_S:g})",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("suites"), metavar="DIR", help="records (default suites)"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the usual kernels; needs no GPU"
    )
    parser.add_argument(
        "--built-only",
        action="store_true",
        help="compile nothing: PyTorch answers where a forced kernel is not built",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it here")
    return parser
