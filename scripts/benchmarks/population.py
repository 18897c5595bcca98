"""``scripts/bench population``: calls drawn from public models, by the tuner, PyTorch and peers.

`tuner.problem.population` draws the calls and says how. Each is made as its model makes it, behind
an element-wise kernel. Contenders are `tuner.attention`, `tuner.linear` or `tuner.swiglu`;
PyTorch's own choice, twice, as a control; PyTorch under `tuner.enable`; and cuDNN, FlashAttention-3
and -4, cuBLAS and cuBLASLt. Outputs are compared before the timing.

``--json OUT`` appends a line for each call and goes on where it stopped. Each call runs in a child
process with a time limit. A call that fails or hangs is a row with its reason, and stays in every
count. ``--list`` needs no GPU: it prints the calls, and the answer of `tuner lookup` for each of
them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.child import Worker, answer_indices
from benchmarks.gpu import no_gpu
from benchmarks.population_report import report
from tuner.base import document, resources
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.cli import Parser
from tuner.errors import ConfigError, StoreError
from tuner.families.peers import installed, installed_versions
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure import device
from tuner.problem import listing as problem_listing
from tuner.problem.population import ModelCall, draw, subset
from tuner.selection.describe import table
from tuner.selection.reader import find_gpu, lookup
from tuner.store.entry import is_vendor

FORMAT = "cutlass-tuner population 1"
LIMIT_S = 120.0
"""For one call, compiling FlexAttention and loading kernels among it."""
NOT_POSED = "not posed"
"""The runtime reads no problem off such tensors, and asks for no lookup."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, then list or measure; 1 when an output was wrong or a call has no time."""
    args = _parser().parse_args(argv)
    if args.report:
        print(report(list(read(args.report).values())))
        return 0
    seed = commit() if args.seed == "commit" else args.seed
    calls = draw(seed, args.count, subset(args.models))
    if args.op:
        calls = [call for call in calls if call.problem.op in args.op.split(",")]
    if args.worker:
        return answer_indices(lambda index: measure_on_gpu(calls[index]))
    if args.gpu and not args.list:
        raise ConfigError("--gpu is for --list: measured is what this machine has")
    if args.list or args.problems:
        gpu = find_gpu(args.gpu) if args.gpu else device.detect() or DEFAULT_GPU
        print(listing(calls, gpu) if args.list else problem_list(calls), end="")
        return 0
    if args.json:
        check_place(args.json)
    heading = {"format": FORMAT, "seed": seed, "models": args.models, **surroundings()}
    heading |= {"op": args.op} if args.op else {}
    command = _command("population", argv)
    rows = measured(calls, heading, args.json, command, args.limit)
    return _reported(rows)


def listed_or_measured(
    name: str,
    calls: Sequence[ModelCall],
    about: Mapping[str, Any],
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    limit_s: float,
) -> int:
    """List or measure the calls of another bench; 1 when an output was wrong or a call has no time.

    Args:
        name: the bench.
        calls: calls in the order in which they are measured.
        about: its part of the file's heading.
        args: its `worker`, `list`, `gpu`, `json` and `time_limit`.
        argv: its arguments; None: those of the command line.
        limit_s: seconds for each call.

    Raises:
        BenchmarkError: when there is no GPU to measure on.
        ConfigError: on an unknown name of a GPU.
    """
    if args.worker:
        return answer_indices(lambda index: measure_on_gpu(calls[index]))
    if args.list:
        print(listing(calls, find_gpu(args.gpu)), end="")
        return 0
    if args.json:
        check_place(args.json)
    heading = {"format": f"cutlass-tuner {name.replace('_', ' ')} 1", **about, **surroundings()}
    rows = measured(calls, heading, args.json, _command(name, argv), limit_s, args.time_limit)
    print(f"{len(rows)} of {len(calls)} calls")
    return _reported(rows)


def _reported(rows: Sequence[dict[str, Any]]) -> int:
    print(report(rows))
    return int(any(row["wrong"] or "tuner" not in row["us"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench population",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", default="0", help="any text; commit: the hash of HEAD")
    parser.add_argument("--count", type=int, default=400, help="calls to draw")
    parser.add_argument(
        "--models", default="held-out", help="held-out, making, all, or names with commas between"
    )
    parser.add_argument(
        "--problems", action="store_true", help="print the problems for `tuner sweep --problems`"
    )
    parser.add_argument("--op", help="only the drawn calls of these operations, as gemm,swiglu")
    parser.add_argument("--list", action="store_true", help="print the calls and lookup results")
    parser.add_argument(
        "--gpu", help=f"with --list: GPU that is asked about (default: this, or {DEFAULT_GPU.name})"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="JSON lines, gone on with")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print such a file's tables")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each call")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _command(name: str, argv: Sequence[str] | None) -> list[str]:
    given = list(sys.argv[2:] if argv is None else argv)
    return python_command("-m", "benchmarks", name, *given, "--worker")


def commit() -> str:
    """Hash of the checkout's HEAD.

    Raises:
        ConfigError: when the package does not run from a checkout of git.
    """
    command = ["git", "rev-parse", "HEAD"]
    root = resources.checkout()
    if root is not None:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    raise ConfigError("--seed commit needs a checkout of git (allowed elsewhere: any other text)")


def problem_list(calls: Sequence[ModelCall]) -> str:
    """The distinct problems of the calls, as a file for ``tuner sweep --problems``."""
    return problem_listing(dict.fromkeys(call.problem for call in calls))


def surroundings() -> dict[str, Any]:
    """GPU and versions that the rows depend on.

    Raises:
        BenchmarkError: without a GPU.
    """
    gpu = device.detect()
    if gpu is None:
        raise no_gpu("--list")
    builds = installed.versions(installed.PEERS)
    facts = {"gpu": gpu.name, **device.environment().facts, **installed_versions(), **builds}
    return file_head.complete(facts)


def listing(calls: Sequence[ModelCall], gpu: Gpu = DEFAULT_GPU) -> str:
    """Every call with what lookup answers on a GPU, then the counts."""
    lines, counts, reasons = [], Counter[tuple[str, str]](), Counter[str]()
    for call in calls:
        kind, detail = looked_up(call, gpu)
        lines.append(f"{call.label}  [{kind}{': ' + detail if detail else ''}]")
        counts[("attention" if call.views else "products", kind)] += 1
        if kind == NOT_POSED:
            reasons[detail] += 1
    said = [f"{count:5d}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join([*lines, "", _counted(counts), "", f"{NOT_POSED}:", *said, ""])


def looked_up(call: ModelCall, gpu: Gpu) -> tuple[str, str]:
    """Kind of lookup result for the problem that the runtime reads off the call's tensors, and a
    reason or a source.
    """
    from benchmarks.population_tensors import posed

    try:
        problem = posed(call)
    except ConfigError as exc:
        return NOT_POSED, str(exc)
    answer = lookup(problem, gpu=gpu)
    if answer is None:
        return "nothing known", ""
    chosen = answer.candidates[0].config
    by = f"PyTorch's {chosen.get('kernel')}" if is_vendor(chosen) else "own kernel"
    return f"{answer.kind}, {by}", "" if answer.exact else answer.entry.problem.label()


def _counted(counts: Mapping[tuple[str, str], int]) -> str:
    rows = [("operation", "lookup result", "calls", "share")]
    for operation in ("attention", "products"):
        part = {kind: n for (op, kind), n in counts.items() if op == operation}
        total = sum(part.values())
        for kind, n in sorted(part.items(), key=lambda item: -item[1]):
            rows.append((operation, kind, str(n), f"{n / total:.1%}"))
        rows.append((operation, "all", str(total), ""))
    return table(rows, frozenset({2, 3}))


def measured(
    calls: Sequence[ModelCall],
    heading: Mapping[str, Any],
    path: Path | None,
    command: Sequence[str],
    limit_s: float,
    whole_s: float = math.inf,
) -> list[dict[str, Any]]:
    """A row for each call, those of the file as they are; the others are measured and appended.

    Args:
        calls: drawn calls.
        heading: first line of the file; one with another is refused.
        path: the file; None keeps nothing.
        command: command of the child process, which answers indices of `calls`.
        limit_s: seconds that a call may take.
        whole_s: seconds after which no further call is begun.

    Raises:
        ConfigError: when the file is another population's, or its name that of a compressed one.
    """
    if path and path.suffix == ".gz":
        raise ConfigError(f"{path}: rows are appended to plain files (allowed: {path.stem})")
    started = time.monotonic()
    known = read(path, heading) if path and path.exists() else {}
    if path and not known:
        path.write_text(json.dumps(heading) + "\n")
    with Worker(command, limit_s) as worker:
        for index, call in enumerate(calls):
            if call.key in known:
                continue
            if time.monotonic() - started > whole_s:
                break
            row = known[call.key] = {**described(call), **_completed(worker.ask(index))}
            if path:
                _append(path, row)
            us = row["us"].get("tuner")
            said = f"{us:.1f} us" if us else row["failed"].get("tuner", "no time")
            place = f"{index + 1}/{len(calls)}"
            print(f"{place} {call.label}: {row['answered']}, {said}", file=sys.stderr, flush=True)
    return [known[call.key] for call in calls if call.key in known]


def described(call: ModelCall) -> dict[str, Any]:
    """Columns of a row that the draw decides."""
    return {
        "key": call.key,
        "call": call.label,
        "model": call.model,
        "kind": call.kind,
        "operation": "attention" if call.views else "products",
        "problem": call.problem.to_json(),
        "mask": call.mask,
    }


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    return failure(found["lost"]) if "lost" in found else found


def failure(reason: str) -> dict[str, Any]:
    """Columns of a row whose call could not be measured."""
    nothing: dict[str, Any] = {"us": {}, "errors": {}, "wrong": [], "copies": 0}
    return {"answered": "failed", "reason": reason, "failed": {"tuner": reason}, **nothing}


def read(path: Path, heading: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Rows of a file by the key of their calls; a last line that is cut off is left out.

    Args:
        path: the file; compressed if its name ends in ``.gz``.
        heading: its first line, where rows are to be appended; then what is cut off is removed.

    Raises:
        ConfigError: when it is of another population, or not such a file.
        StoreError: when it cannot be read.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            text = str(file.read())
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise StoreError(f"{path} cannot be read: {exc}") from exc
    whole, _, rest = text.rpartition("\n")
    try:
        first, *rows = [document.parse(line) for line in whole.splitlines()] or [None]
        found = {row["key"]: row for row in rows}
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"{path} is not a file of scripts/bench population: {exc}") from exc
    if heading is None:
        return found
    if first is not None and not file_head.is_same(first, heading):
        raise ConfigError(f"{path} holds another population, {first} (wanted: {dict(heading)})")
    if rest:
        path.write_text(whole + "\n" if whole else "")
    return found


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def measure_on_gpu(call: ModelCall) -> dict[str, Any]:
    """The row of a call, timed beside PyTorch and peers on this process's GPU."""
    from benchmarks.call_times import time_calls
    from benchmarks.population_calls import measure

    return measure(call, "cuda", time_calls)
