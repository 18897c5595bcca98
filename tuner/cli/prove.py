"""``tuner prove``: check the portfolio's built kernels over the range of problems that they
serve.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base.processes import exit_code
from tuner.cli import DONE, FAILED
from tuner.cli.aot import PROGRESS_S, Paced, say
from tuner.cli.arguments import within
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.by_operation import OPERATIONS, rules
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU, HOPPER, Gpu
from tuner.problem import PROBLEMS
from tuner.selection.kernel_list import KernelList
from tuner.selection.kernels import BUILD, PROVE, current, shipped_kernels, targets
from tuner.selection.portfolio import everywhere

if TYPE_CHECKING:
    from tuner.tuning.proof import ProofPlan, ProofProgress, Prover

MAX_PROCESSES = 64
"""Most processes on one GPU."""
DESCRIPTION = """Takes every kernel of `tuner build --portfolio` through the numerics gate, on
problems drawn from its whole domain. Among them are edges of tiles, one query, one key, every ratio
of heads, every layout, splits, and the log-sum-exp. The runtime serves kernels that passed, at any
shape. Nothing is timed. Each verdict is stored at once: the same command goes on where it
stopped."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "prove", help="check the portfolio's kernels over all shapes", description=DESCRIPTION
    )
    parser.add_argument("--op", choices=sorted(PROBLEMS), help="only this operation's portfolio")
    parser.add_argument("--family", metavar="NAME", help="only this family's kernels")
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="only kernels whose line of `tuner build --portfolio --dry-run` holds each of these",
    )
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument(
        "--problems",
        type=within(1),
        default=64,
        metavar="N",
        help="fewest problems for each kernel (default 64)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random problems (default 0)"
    )
    parser.add_argument(
        "--processes",
        type=within(1, MAX_PROCESSES),
        default=1,
        metavar="N",
        help="kernels to check side by side on the GPU, a process each (default 1)",
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--carry",
        action="store_true",
        help="check nothing: take over the shipped proofs of kernels whose text changed and whose "
        "machine code is equal; needs no GPU",
    )
    files.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="check nothing: write the proofs of this machine to files by GPU and compiler, as "
        "cache/proofs has them; proofs that are there already stay",
    )
    files.add_argument(
        "--import",
        dest="lists",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="check nothing: take over proofs and failures of the same compiled kernels from "
        "exported files, or from kernel lists of machines that you trust",
    )
    files.add_argument(
        "--invariance",
        action="store_true",
        help="compare the bits of proven kernels' rows over calls and within classes of equal "
        "orders of additions; those that vary serve no batch-invariant call",
    )
    parser.add_argument("--again", action="store_true", help="also kernels that have a verdict")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the kernels that need a proof, check nothing"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end after this time; finished proofs are kept",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prove. Returns 1 if a kernel failed, now or before, or is left.

    Raises:
        ConfigError: when an argument is out of range, or no kernel is built for this GPU.
        BenchmarkError: when there is no GPU, or the gate itself fails.
        StoreError: when a kernel list cannot be written.
    """
    from tuner.measure import device

    if args.carry:
        return _carry()
    if args.export:
        return _export(args.export)
    if args.lists:
        return _import(args.lists)
    gpu = device.detect(args.device)
    if gpu is None and not args.dry_run:
        raise BenchmarkError(f"CUDA device {args.device} was not found: a proof runs the kernels")
    gpu = gpu or DEFAULT_GPU
    if args.invariance and not args.dry_run:
        return _invariance(args, gpu)
    plans = _plans(args, gpu)
    for todo in plans:
        say(_counts(todo))
    faults = [fault for todo in plans for fault in todo.failed]
    if args.dry_run:
        _name(faults)
        return DONE
    return _prove_lists(args, gpu, plans, faults)


def _prove_lists(
    args: argparse.Namespace, gpu: Gpu, plans: Sequence[ProofPlan], faults: list[str]
) -> int:
    """Prove the kernels of some lists by `--processes` workers, until the time is over."""
    from tuner.measure import device
    from tuner.measure.worker_client import WorkerClient
    from tuner.tuning.progress import Interruption
    from tuner.tuning.proof import Prover

    started, remaining = time.monotonic(), 0
    workers = [WorkerClient(args.device) for _ in range(args.processes)]
    try:
        with Interruption() as interruption:

            def is_over() -> bool:
                spent = time.monotonic() - started
                return interruption.requested or spent > (args.time_limit or float("inf"))

            prover = Prover(
                gpu,
                str(device.environment(args.device).facts.get("driver", "")),
                workers,
                problems=args.problems,
                seed=args.seed,
                changed=_Teller(args.problems * args.processes),
                is_over=is_over,
            )
            remaining = _prove(prover, plans, faults)
    finally:
        for worker in workers:
            worker.close()
    _name(faults)
    if remaining:
        print(f"tuner: {remaining} kernels are left; the same command goes on", file=sys.stderr)
    if interruption.number is not None:
        return exit_code(interruption.number)
    return FAILED if faults or remaining else DONE


def _counts(todo: ProofPlan) -> str:
    """How many kernels of a list are to prove, and the state of the others."""
    carried = f" ({todo.carried} by carried proofs)" if todo.carried else ""
    return (
        f"{todo.path}: {len(todo.waiting)} kernels to prove, {todo.proven} proven{carried}, "
        f"{len(todo.failed)} failed before, {todo.missing} not built"
    )


def _prove(prover: Prover, plans: Sequence[ProofPlan], faults: list[str]) -> int:
    """Prove each list's kernels and add failures to `faults`. Returns the number of kernels
    left.
    """
    remaining = 0
    for todo in plans:
        progress = prover.run(todo)
        faults += progress.faults
        remaining += progress.kernels - progress.done
        passed = progress.done - len(progress.faults)
        spent = time.monotonic() - progress.started
        say(f"{todo.path}: {passed} of {progress.kernels} kernels proven in {spent:.0f} s")
    return remaining


def _invariance(args: argparse.Namespace, gpu: Gpu) -> int:
    """Compare the rows of each list's proven kernels. Returns 1 if some vary.

    Raises:
        ConfigError: when no kernel is built for this GPU.
        StoreError: when a list cannot be written.
    """
    from tuner.tuning.invariance import BitChecker, InvarianceProgress, compare_rows

    started, paced = time.monotonic(), Paced(PROGRESS_S)

    def changed(progress: InvarianceProgress) -> None:
        if paced.is_due():
            say(f"{progress.kernels} kernels, {progress.rows} rows compared")

    faults = []
    with BitChecker(args.device) as checker:
        for path in _current(gpu.compute_capability):
            rows = compare_rows(
                path,
                _wanted(args, gpu),
                checker,
                changed=changed,
                is_over=lambda: time.monotonic() - started > (args.time_limit or float("inf")),
            )
            faults += rows.variant
            say(
                f"{path}: {rows.rows} rows of {rows.kernels} kernels compared, "
                f"{len(rows.variant)} kernels vary, {rows.skipped} have no proof or no class"
            )
    for fault in faults:
        print(f"tuner: serves no batch-invariant call: {fault}", file=sys.stderr)
    return FAILED if faults else DONE


def _carry() -> int:
    """Carry proofs over in each list of these templates.

    Raises:
        ConfigError: when nothing is built.
    """
    from tuner.tuning.proof import carry

    for path in _current(None):
        result = carry(path, shipped_kernels())
        say(
            f"{path}: {result.carried} proofs carried over; left for {PROVE}: {result.other_code} "
            f"kernels with other machine code, {result.unknown} without a known proof"
        )
    return DONE


def _export(folder: Path) -> int:
    """Write the proofs of each list of these templates.

    Raises:
        ConfigError: when the folder is missing, nothing is built, or a file cannot be read.
        StoreError: when a file cannot be written.
    """
    from tuner.tuning.proof import export

    if not folder.is_dir():
        raise ConfigError(f"--export {folder} is not a folder")
    proven = [target for portfolio in everywhere() for target in targets(portfolio)]
    proven += [target for rule in rules() for target in rule.targets()]
    specs = {spec.key for target in proven for spec in target.kernels.values()}
    for kernels in _current(None).values():
        for file in export(folder, kernels, specs):
            say(f"{file.path}: {file.kernels} proofs, {file.added} new, {file.removed} removed")
    return DONE


def _import(files: Sequence[Path]) -> int:
    """Take verdicts over from kernel lists of other machines.

    Raises:
        ConfigError: when nothing is built, or a file cannot be read.
        StoreError: when a list cannot be written.
    """
    from tuner.tuning.proof import adopt

    lists = [KernelList.read(file) for file in files]
    judged = [kernel for kernels in lists for kernel in kernels.kernels.values()]
    faults = {name: text for kernels in lists for name, text in kernels.faults.items()}
    for path in _current(None):
        adopted = adopt(path, judged, faults)
        say(
            f"{path}: {adopted.proofs} proofs and {adopted.faults} failures taken over; "
            f"{adopted.unknown} kernels with a verdict are not built here ({BUILD})"
        )
    return DONE


def _current(capability: str | None) -> dict[Path, KernelList]:
    """The user's lists that have kernels of today's templates. Others' faults are said.

    Args:
        capability: compute capability of the lists; None: any.

    Raises:
        ConfigError: when there is none.
    """
    lists = current(lambda text: say(f"tuner: {text}"))
    fitting = {path: rows for path, rows in lists.items() if capability in (None, rows.capability)}
    if not fitting:
        where = f"compute capability {capability}, " if capability else ""
        raise ConfigError(f"no kernel is built for {where}these templates ({BUILD})")
    return fitting


def _plans(args: argparse.Namespace, gpu: Gpu) -> list[ProofPlan]:
    """Kernels without a proof, for each list of the GPU's compute capability.

    Raises:
        ConfigError: when no kernel is built, or none is as the arguments say.
    """
    from tuner.tuning.proof import plan

    chosen_targets = _wanted(args, gpu)
    lists = _current(gpu.compute_capability)
    return [plan(path, chosen_targets, again=args.again) for path in lists]


def _wanted(args: argparse.Namespace, gpu: Gpu) -> list[Target]:
    """Kernels of the portfolios and rules that the arguments name.

    Raises:
        ConfigError: when none is of the family, or has the texts, that are named.
    """
    known_targets = [
        target
        for portfolio in everywhere()
        if args.op in (None, portfolio.op) and portfolio.gpu.shares_kernels(gpu)
        for target in targets(portfolio)
    ]
    if gpu.compute_capability == HOPPER:
        for rule in rules(OPERATIONS if args.op is None else {args.op}):
            known_targets += rule.targets()
    if args.family is not None:
        named = sorted({target.config.family for target in known_targets})
        if args.family not in named:
            raise ConfigError(
                f"--family {args.family} has no kernels (allowed: {', '.join(named)})"
            )
        known_targets = [t for t in known_targets if t.config.family == args.family]
    if args.only is not None:
        texts = args.only.split(",")
        known_targets = [t for t in known_targets if all(text in t.label() for text in texts)]
        if not known_targets:
            raise ConfigError(f"--only {args.only}: no kernel has this in its line ({BUILD})")
    distinct = {
        tuple(sorted(spec.key for spec in target.kernels.values())): target
        for target in known_targets
    }
    if not distinct:
        capability = gpu.compute_capability
        raise ConfigError(f"no portfolio ships for compute capability {capability} ({BUILD})")
    return list(distinct.values())


def _name(faults: Sequence[str]) -> None:
    """Print each kernel that is not served, and how it failed."""
    for fault in faults:
        print(f"tuner: not served: {fault}", file=sys.stderr)


class _Teller:
    """Prints progress every `PROGRESS_S`."""

    def __init__(self, problems: int) -> None:
        self._problems, self._paced = problems, Paced()

    def __call__(self, progress: ProofProgress) -> None:
        if not self._paced.is_due():
            return
        now, left_s = time.monotonic(), progress.left_s()
        say(
            f"{progress.done} of {progress.kernels} kernels, {sum(progress.at_work.values())} of "
            f"{self._problems} problems of the next, {now - progress.started:.0f} s"
            + ("" if left_s is None else f", about {left_s:.0f} s left")
            + (f", {len(progress.faults)} failed" if progress.faults else "")
        )
