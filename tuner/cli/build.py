"""``tuner build``: compile the kernels of decisions, so that the runtime can launch them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import add_store
from tuner.errors import ConfigError, NoValidConfigError, TunerError
from tuner.problem import PROBLEMS

if TYPE_CHECKING:
    from tuner.compile.artifacts import Artifact, ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.families.base import KernelSpec
    from tuner.measurement import Measurement
    from tuner.store import Entry, Store


_NOTICE_AFTER_S = 1.0
_QUANTISER, _ROWS = "the quantiser of activations", "the kernel of experts' rows"
_APPEND = "the kernel that appends to paged caches"


@dataclass
class BuildTarget:
    """Own config of an entry, and the kernels it needs."""

    measurement: Measurement
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
        found = self.measurement
        place = f"{found.problem.op} {found.problem.label()} on {found.gpu.name}"
        return f"{place}, {found.regime}: {found.config.family}"


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "build",
        help="compile the kernels of stored and shipped decisions",
        description=(
            "Compiles the best own kernel of every measured entry with this machine's compiler, "
            "imported and shipped entries included. For a --shape without an entry it compiles "
            "the portfolio's choice. Nothing is timed. A second build on a machine waits."
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
        "--portfolio",
        action="store_true",
        help="the kernels of the shipped portfolio, which serve shapes that nobody tuned",
    )
    parser.add_argument(
        "--gpu", help="only entries, or the portfolio, that serve on this GPU, as in H200"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="with --portfolio: only kernels whose line of --dry-run holds each of these, as in "
        "paged,D=64,bfloat16",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --portfolio: list the kernels, compile nothing"
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
        help="with --portfolio: replace proven kernels in the list by builds without a proof",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="nvcc processes (default: the cores)")
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build. Returns 0 if every kernel is present at the end, else 1.

    Raises:
        ConfigError: when the shape or the GPU cannot be parsed.
        NoValidConfigError: when no decision has a kernel to build.
        CompileError: when there is no compiler.
        StoreError: when the store or the artifact cache cannot be opened or written.
    """
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain
    from tuner.selection.describe import counted
    from tuner.store import open_store

    if args.portfolio:
        return _portfolio(args)
    for option in ("dry_run", "reproducible", "only", "force"):
        if getattr(args, option):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} is not for entries (allowed: with --portfolio)")
    with open_store(args.store) as store:
        targets = [BuildTarget(m) for e in _entries(store, args) for m in _own(e)]
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
                f"{counted(len(targets), 'configuration')} for {names}; "
                f"compiling {counted(missing, 'kernel')}",
                file=sys.stderr,
            )
            for target in targets:
                _finish(target, store)
                if not args.json:
                    print(f"{target.label}: {_said(target)}")
            _build_sources(targets, artifacts)
    failed = [target for target in targets if target.reason]
    if args.json:
        rows = [
            {"label": t.label, "config": t.measurement.config.to_json(), "reason": t.reason}
            for t in failed
        ]
        print(json.dumps({"built": len(targets) - len(failed), "failed": rows}))
    return 1 if failed else 0


def _build_sources(targets: Sequence[BuildTarget], artifacts: ArtifactCache) -> None:
    """Build the runtime's dispatcher, and the kernels without a template that the problems of
    `targets` need. Standard error says how each ended.
    """
    from tuner.compile.single import BLOCK_QUANTISER, EXPERT_ROWS, PAGED_APPEND
    from tuner.problem import GroupedGemmProblem

    problems = [target.measurement.problem for target in targets]
    print(f"the runtime's dispatcher: {_dispatcher(artifacts)}", file=sys.stderr)
    if any(problem.op == GroupedGemmProblem.op for problem in problems):
        print(f"{_ROWS}: {_beside(EXPERT_ROWS, artifacts)}", file=sys.stderr)
    if any(getattr(problem, "scales", "") == "block" for problem in problems):
        print(f"{_QUANTISER}: {_beside(BLOCK_QUANTISER, artifacts)}", file=sys.stderr)
    if any(getattr(problem, "is_paged", False) for problem in problems):
        print(f"{_APPEND}: {_beside(PAGED_APPEND, artifacts)}", file=sys.stderr)


def _portfolio(args: argparse.Namespace) -> int:
    """Build the kernels of the shipped portfolio."""
    from tuner.cli.portfolio import build
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.single import BLOCK_QUANTISER, EXPERT_ROWS, PAGED_APPEND
    from tuner.problem import AttentionProblem, GroupedGemmProblem

    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} is out of range (allowed: 1 and more)")
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
        if not args.dry_run:
            print(f"the runtime's dispatcher: {_dispatcher(artifacts)}", file=sys.stderr)
            if args.op in (None, GroupedGemmProblem.op):
                for text, source in ((_QUANTISER, BLOCK_QUANTISER), (_ROWS, EXPERT_ROWS)):
                    print(f"{text}: {_beside(source, artifacts)}", file=sys.stderr)
            if args.op in (None, AttentionProblem.op):
                print(f"{_APPEND}: {_beside(PAGED_APPEND, artifacts)}", file=sys.stderr)
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


def _dispatcher(artifacts: ArtifactCache) -> str:
    """Compile the dispatcher of the runtime. Without it calls go through Python."""
    from tuner.compile import dispatcher

    return _beside(dispatcher, artifacts)


def _beside(library: Any, artifacts: ArtifactCache) -> str:
    """Compile a library that the runtime loads beside the kernels.

    Args:
        library: module with `find` and `build`.
        artifacts: cache for the library.
    """
    try:
        if library.find(artifacts):
            return "there already"
        library.build(artifacts)
    except TunerError as exc:
        return f"not built, {exc}"
    return "compiled"


def _entries(store: Store, args: argparse.Namespace) -> Iterable[Entry]:
    """Measured decisions of the store, and shipped ones that it lacks. For one problem without a
    decision, the portfolio's choice.
    """
    from tuner.measurement import Provenance
    from tuner.selection.reader import find_gpu, lookup, shipped
    from tuner.selection.shipped import in_use
    from tuner.store.entry import Entry, sort_key
    from tuner.tuning.job import DEFAULT_OP

    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} is out of range (allowed: 1 and more)")
    problem = PROBLEMS[args.op or DEFAULT_OP].parse(args.shape) if args.shape else None
    stored = store.entries()
    gpu = find_gpu(args.gpu, [e.gpu for e in stored]) if args.gpu else None
    found = {sort_key(entry): entry for entry in [*shipped(), *stored]}
    chosen = [
        entry
        for entry in in_use(entry for _, entry in sorted(found.items()))
        if entry.provenance is Provenance.MEASURED
        and args.op in (None, entry.problem.op)
        and problem in (None, entry.problem)
        and (gpu is None or gpu.shares_decisions(entry.gpu))
    ]
    if gpu is not None:  # the GPU's own decisions come before shared ones
        own = {entry.problem for entry in chosen if entry.gpu.identity == gpu.identity}
        chosen = [e for e in chosen if e.gpu.identity == gpu.identity or e.problem not in own]
    if problem is not None and not chosen:
        answer = lookup(problem, gpu=gpu, among=())
        if answer is not None:
            print(f"no measured decision of {problem.label()}: {answer.notes[0]}", file=sys.stderr)
            chosen = [Entry.of(answer.candidates)]
    return chosen


def _own(entry: Entry) -> Iterator[Measurement]:
    """Configs of an entry that the runtime may launch: a pinned or winning own config, and the best
    own one.
    """
    from tuner.store.entry import is_vendor

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
        found = target.measurement
        capability = first.setdefault((found.problem.key, found.config.digest), target.capability)
        if capability != target.capability:
            target.reason = (
                f"built for compute capability {capability} in the same store, which holds one "
                f"build of a config: choose the GPU with --gpu, as in --gpu '{found.gpu.name}'"
            )


def _submit(targets: list[BuildTarget], compiler: Compiler) -> None:
    """Submit the kernels of all targets at once, so that they can share units."""
    from tuner.families import family

    wanted: list[tuple[BuildTarget, str, KernelSpec]] = []
    for target in targets:
        if target.reason:
            continue
        found = target.measurement
        try:
            member = family(found.config.family)
            if reasons := member.violations(found.problem, found.config, found.gpu):
                target.reason = f"not legal here: {'; '.join(reasons)}"
                continue
            kernels = member.kernels(found.problem, found.config)
        except TunerError as exc:
            target.reason = str(exc)
            continue
        wanted += [(target, name, spec) for name, spec in kernels.items()]
    futures = compiler.submit([spec for _, _, spec in wanted])
    for (target, name, _), (_, future) in zip(wanted, futures, strict=True):
        target.kernels[name] = future
        target.cached += future.done()


def _finish(target: BuildTarget, store: Store) -> None:
    """Wait for a target's kernels, and record their artifacts in the store."""
    from tuner.errors import StoreError

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
    found = target.measurement
    if artifacts != dict(found.artifacts):
        store.record_build(found.problem, found.config, artifacts)


def _said(target: BuildTarget) -> str:
    if target.reason:
        return f"failed, {target.reason}"
    made = len(target.kernels) - target.cached
    return f"{made} compiled, {target.cached} there already"
