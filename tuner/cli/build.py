"""``tuner build``: compile the kernels of decisions, so that the runtime can launch them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import add_result, gpu_of, problem_of, url_of, within
from tuner.cli.model import add_model, engine_of, refuse_options, steps_of
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import ConfigError, NoValidConfigError, StoreError, TunerError
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance
from tuner.problem import PROBLEMS, AttentionProblem, GroupedGemmProblem, Problem
from tuner.selection import describe
from tuner.selection.shipped import in_use, with_shipped
from tuner.store import Entry, open_store
from tuner.store.entry import is_vendor

if TYPE_CHECKING:
    from tuner.compile.compiler import Compiler
    from tuner.problem.steps import ModelStep
    from tuner.store import Store


_NOTICE_AFTER_S = 1.0
_OF_CALLS = "--portfolio, --model or --problems"
_NICE = 15
"""Priority that a build in the background gives up."""


@dataclass
class BuildTarget:
    """Own config of an entry, and the kernels it needs."""

    measurement: Measurement
    speed: str
    """Speed of the entry's best own kernel against the fastest vendor's."""
    kernels: dict[str, Future[Artifact]] = field(default_factory=dict)
    cached: int = 0
    reason: str = ""
    """Reason why it cannot be built; empty if it can."""

    @property
    def capability(self) -> str:
        """Target compute capability."""
        return self.measurement.gpu.compute_capability

    @property
    def label(self) -> str:
        answer = self.measurement
        place = f"{answer.problem.op} {answer.problem.label()} on {answer.gpu.name}"
        time = f"{describe.microseconds(answer.latency_us)} us"
        return f"{place}, {answer.regime}: {answer.config.family}, {time}, {self.speed}"


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "build",
        help="compile the kernels of stored and shipped decisions",
        description=(
            "Compiles the best own kernel of every measured entry with this machine's compiler, "
            "imported and shipped entries included. For a --shape without an entry it compiles "
            "the portfolio's choice. With --model it compiles what answers the model's calls, "
            "those with the largest share of the time first. A program that serves takes each "
            "kernel up as it is done. After an interruption the same command goes on. Nothing is "
            "timed. A second build on a machine waits."
        ),
    )
    parser.add_argument(
        "--op",
        choices=sorted(PROBLEMS),
        help="only this operation; of --shape, default attention",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="only this problem")
    what.add_argument(
        "--problems", type=Path, metavar="FILE", help="a list as `tuner shapes` writes it, in order"
    )
    add_model(parser, what)
    what.add_argument(
        "--portfolio",
        action="store_true",
        help="the kernels of the shipped portfolio, which serve shapes that nobody tuned",
    )
    parser.add_argument(
        "--gpu", help="only entries, or the portfolio, that serve on this GPU, as in H200"
    )
    parser.add_argument(
        "--stored",
        action="store_true",
        help="only the store's entries, imported ones among them, not those that ship",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="with --portfolio: only kernels whose line of --dry-run holds each of these, as in "
        "paged,D=64,bfloat16",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --portfolio, --model or --problems: list the kernels, compile nothing",
    )
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="with --portfolio: group kernels by their list only, so that equal builds are equal "
        "bytes; kernels of other libraries are compiled again",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="with --portfolio, --model or --problems: replace proven kernels in the list by "
        "builds without a proof",
    )
    about = "nvcc processes (default: the cores)"
    parser.add_argument("--jobs", type=within(1), metavar="N", help=about)
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    add_result(parser, run)


def run(args: argparse.Namespace) -> int:
    """Build. Returns 0 if every kernel is present at the end, else 1.

    Raises:
        ConfigError: when the shape or the GPU cannot be parsed.
        NoValidConfigError: when no decision has a kernel to build.
        CompileError: without a compiler.
        StoreError: when the store or the artifact cache cannot be opened or written.
    """
    refuse_options(args)
    of_problems = args.model is not None or args.problems is not None
    if args.stored and (args.portfolio or of_problems):
        raise ConfigError("--stored is for entries (allowed: with --shape, --op or --gpu)")
    if args.portfolio:
        return _portfolio(args)
    for option in ("reproducible", "only", *(() if of_problems else ("dry_run", "force"))):
        if getattr(args, option):
            name = option.replace("_", "-")
            places = "--portfolio" if option in {"reproducible", "only"} else _OF_CALLS
            raise ConfigError(f"--{name} is not for stored winners (allowed: with {places})")
    return _answers(args) if of_problems else _build_entries(args)


def _build_entries(args: argparse.Namespace) -> int:
    """Build the kernels of entries; those of a problem without one as `_answers` does."""
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain

    with open_store(args.store) as store:
        entries = list(_entries(store, args))
        if args.shape and not (entries or args.stored):
            return _answers(args)
        targets = [BuildTarget(m, describe.against_fastest(e)) for e in entries for m in _own(e)]
        if not targets:
            raise NoValidConfigError(
                "nothing to build: the cache names no measured own kernel"
                + (f" for {args.shape}" if args.shape else f" for {args.op}" if args.op else "")
                + (f" on {args.gpu}" if args.gpu else "")
            )
        artifacts = ArtifactCache()
        with _alone(artifacts), contextlib.ExitStack() as compilers:
            tools = find_toolchain()
            _refuse_second_gpus(targets)
            for capability in sorted({target.capability for target in targets}):
                compiler = Compiler(tools, artifacts, jobs=args.jobs, capability=capability)
                compilers.enter_context(compiler)
                _submit([t for t in targets if t.capability == capability], compiler)
            missing = sum(not f.done() for t in targets for f in t.kernels.values())
            names = ", ".join(sorted({target.measurement.gpu.name for target in targets}))
            print(
                f"{describe.counted(len(targets), 'configuration')} for {names}; "
                f"compiling {describe.counted(missing, 'kernel')}",
                file=sys.stderr,
            )
            for target in targets:
                _finish(target, store)
                if not args.json:
                    print(f"{target.label}: {_said(target)}")
            _build_libraries(artifacts, [target.measurement.problem for target in targets])
    failed = [target for target in targets if target.reason]
    if args.json:
        rows = [
            {"label": t.label, "config": t.measurement.config.to_json(), "reason": t.reason}
            for t in failed
        ]
        print(json.dumps({"built": len(targets) - len(failed), "failed": rows}))
    return 1 if failed else 0


def _answers(args: argparse.Namespace) -> int:
    """Build the kernels that answer the calls of a model or a list, or the problem of --shape."""
    from tuner.base.limits import cpu_count
    from tuner.cli import answering_kernels
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain
    from tuner.measure.device import detect
    from tuner.selection.answering import ModelAnswers
    from tuner.store.reading import sqlite_file

    started = time.monotonic()
    if args.background:
        os.nice(_NICE)
        args.jobs = max(1, cpu_count() // 2)
    gpu = gpu_of(args) or detect() or DEFAULT_GPU
    path = sqlite_file(url_of(args))
    answers = ModelAnswers.of(_steps(args), gpu, path, engine_of(args))
    artifacts = ArtifactCache()
    with contextlib.ExitStack() as stack:
        if not args.dry_run:
            stack.enter_context(_alone(artifacts))
        store = stack.enter_context(open_store(args.store))
        tools, capability = find_toolchain(), gpu.compute_capability
        compiler = Compiler(tools, artifacts, jobs=args.jobs, capability=capability)
        built = answering_kernels.build(
            answers.rows(),
            gpu,
            stack.enter_context(compiler),
            store,
            dry_run=args.dry_run,
            force=args.force,
            libraries=lambda: _build_libraries(artifacts, list(answers.answers)),
            started=started,
        )
    if args.dry_run:
        _build_libraries(artifacts, list(answers.answers), dry_run=True)
    if args.json:
        print(json.dumps(built._asdict()))
    return 1 if built.failed else 0


def _steps(args: argparse.Namespace) -> list[ModelStep]:
    """The model's steps; of a list or a shape one step. An entry counts as often as it is listed.

    Raises:
        ConfigError: when the model, the list or the shape cannot be read.
    """
    from tuner.problem.steps import ModelStep
    from tuner.tuning.job import DEFAULT_OP, read_problems

    if args.model is not None:
        return steps_of(args)
    if args.problems is not None:
        return [ModelStep("list", Counter(read_problems(args.problems, args.op or DEFAULT_OP)), ())]
    return [ModelStep("shape", {problem_of(args): 1}, ())]


def _build_libraries(
    artifacts: ArtifactCache,
    problems: Sequence[Problem] | None = None,
    op: str | None = None,
    *,
    dry_run: bool = False,
) -> None:
    """Build the runtime's dispatcher and kernels without a template. Standard error says how each
    ended.

    Args:
        artifacts: cache for the libraries.
        problems: problems whose kernels are built; None: all of `op`.
        op: operation; None: all.
        dry_run: True to list them without compiling.
    """
    from tuner.compile import dispatcher, single

    def build(text: str, library: Any) -> None:
        if dry_run:
            print(f"{'compiled' if _is_built(library, artifacts) else 'missing '}  {text}")
        else:
            print(f"{text}: {_beside(library, artifacts)}", file=sys.stderr)

    build("the runtime's dispatcher", dispatcher)
    grouped, attention = GroupedGemmProblem.op, AttentionProblem.op
    append = "the kernel that appends to paged caches"
    for text, library, of, fact, value in (
        ("the kernel of experts' rows", single.EXPERT_ROWS, grouped, "op", grouped),
        ("the products of experts' few rows", single.EXPERT_PRODUCTS, grouped, "op", grouped),
        ("the quantiser of activations", single.BLOCK_QUANTISER, grouped, "scales", "block"),
        (append, single.PAGED_APPEND, attention, "is_paged", True),
    ):
        needed = any(getattr(p, fact, None) == value for p in problems or ())
        if needed or (problems is None and op in (None, of)):
            build(text, library)


def _portfolio(args: argparse.Namespace) -> int:
    """Build the kernels of the shipped portfolio."""
    from tuner.cli.portfolio import build

    if args.json:
        raise ConfigError("--json is not for --portfolio (allowed: for entries)")
    artifacts = ArtifactCache()
    with contextlib.nullcontext() if args.dry_run else _alone(artifacts):
        code = build(
            artifacts,
            args.op,
            args.gpu,
            args.jobs,
            only=tuple(args.only.split(",")) if args.only else (),
            dry_run=args.dry_run,
            reproducible=args.reproducible,
            force=args.force,
        )
        _build_libraries(artifacts, op=args.op, dry_run=args.dry_run)
    return code


@contextlib.contextmanager
def _alone(artifacts: ArtifactCache) -> Iterator[None]:
    """Hold the machine's lock for builds. Says so if another process holds it."""
    notice = threading.Timer(
        _NOTICE_AFTER_S, print, ["waiting for another build of this machine"], {"file": sys.stderr}
    )
    notice.daemon = True
    notice.start()
    try:
        with artifacts.lock("build"):
            notice.cancel()
            yield
    finally:
        notice.cancel()


def _beside(library: Any, artifacts: ArtifactCache) -> str:
    """Compile a library that the runtime loads beside the kernels.

    Args:
        library: module with `find` and `build`.
        artifacts: cache for the library.
    """
    if _is_built(library, artifacts):
        return "there already"
    try:
        library.build(artifacts)
    except TunerError as exc:
        return f"not built, {exc}"
    return "compiled"


def _is_built(library: Any, artifacts: ArtifactCache) -> bool:
    try:
        return library.find(artifacts) is not None
    except TunerError:  # no torch, which a dispatcher is for
        return False


def _entries(store: Store, args: argparse.Namespace) -> Iterable[Entry]:
    """Measured decisions of the store, and shipped ones that it lacks unless --stored is given."""
    problem = problem_of(args) if args.shape else None
    gpu, measured = gpu_of(args, store), Provenance.MEASURED
    stored = store.entries()
    entries = [
        entry
        for entry in in_use(stored if args.stored else with_shipped(stored))
        if entry.matches(op=args.op, problem=problem, provenance=measured)
        and (gpu is None or gpu.shares_decisions(entry.gpu))
    ]
    if gpu is not None:  # the GPU's own decisions come before shared ones
        own = {entry.problem for entry in entries if entry.gpu.identity == gpu.identity}
        entries = [e for e in entries if e.gpu.identity == gpu.identity or e.problem not in own]
    return entries


def _own(entry: Entry) -> Iterator[Measurement]:
    """Configs of an entry that the runtime may launch: a pinned or winning own config, and the best
    own one.
    """
    if not is_vendor(entry.winner.config):
        yield entry.winner
    if entry.best_own is not None and entry.best_own.config != entry.winner.config:
        yield entry.best_own


def _refuse_second_gpus(targets: list[BuildTarget]) -> None:
    """Refuse a second GPU that needs other kernels: the store records the kernels of a problem and
    config once, so the second GPU's would replace the first's.
    """
    first: dict[tuple[str, str], str] = {}
    for target in targets:
        posed = target.measurement
        capability = first.setdefault((posed.problem.key, posed.config.digest), target.capability)
        if capability != target.capability:
            target.reason = (
                f"built for compute capability {capability} in the same store, which holds one "
                f"build of a config: choose the GPU with --gpu, as in --gpu '{posed.gpu.name}'"
            )


def _submit(targets: list[BuildTarget], compiler: Compiler) -> None:
    """Submit the kernels of all targets at once, so that they can share units."""
    from tuner.families import family

    missing: list[tuple[BuildTarget, str, KernelSpec]] = []
    for target in targets:
        if target.reason:
            continue
        posed = target.measurement
        try:
            member = family(posed.config.family)
            if reasons := member.violations(posed.problem, posed.config, posed.gpu):
                target.reason = f"not legal here: {'; '.join(reasons)}"
                continue
            kernels = member.kernels(posed.problem, posed.config)
        except TunerError as exc:
            target.reason = str(exc)
            continue
        missing += [(target, name, spec) for name, spec in kernels.items()]
    futures = compiler.submit([spec for _, _, spec in missing])
    for (target, name, _), (_, future) in zip(missing, futures, strict=True):
        target.kernels[name] = future
        target.cached += future.done()


def _finish(target: BuildTarget, store: Store) -> None:
    """Wait for a target's kernels, and record their artifacts in the store."""
    if target.reason:
        return
    artifacts: dict[str, str] = {}
    for name, future in target.kernels.items():
        try:
            artifacts[name] = future.result().key
        except StoreError:  # the disk is full: the others would fail too
            raise
        except TunerError as exc:
            target.reason = f"{name}: {exc}"
            return
    posed = target.measurement
    if artifacts != dict(posed.artifacts):
        store.record_build(posed.problem, posed.config, artifacts)


def _said(target: BuildTarget) -> str:
    if target.reason:
        return f"failed, {target.reason}"
    fresh = len(target.kernels) - target.cached
    return f"{fresh} compiled, {target.cached} there already"
