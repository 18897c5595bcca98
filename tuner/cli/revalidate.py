"""``tuner entries revalidate``: measure stored decisions again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.aot import compile_aot, say
from tuner.cli.arguments import (
    add_inputs,
    add_launch,
    add_result,
    gpu_of,
    problem_of,
    url_of,
    within,
)
from tuner.cli.entries import known_entries
from tuner.errors import BenchmarkError, ConfigError, NoValidConfigError, StoreError, TunerError
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection.describe import against_fastest, microseconds, short_name
from tuner.selection.reader import differences
from tuner.store import Entry, open_store
from tuner.store.entry import ratios_json

if TYPE_CHECKING:
    from tuner.runners.base import Runner
    from tuner.runners.choose import Runners
    from tuner.store import Store
    from tuner.tuning.revalidate import Revalidation

    Work = Callable[[Entry, Runner, Store], dict[str, Any]]

REVALIDATE = """Times the best configs of stored entries again, beside the portfolio's most
promising kernels and the vendors', and decides anew. Nothing is searched; an entry takes seconds.
By default it takes entries from another environment (driver, torch, cuDNN, ...) or with other
machine code than is compiled now. They are served meanwhile. --regime takes problems without a
decision under it. --problems takes a list, in its order, also decisions that another GPU shares.
The same command goes on where it stopped."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "revalidate", help="time stored winners again, after an update", description=REVALIDATE
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", metavar="KEY=VALUE,...", help="only this problem")
    which.add_argument(
        "--problems",
        type=Path,
        metavar="FILE",
        help="YAML or JSON list of shapes, as of `tuner sweep --problems`, in this order",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every entry of this GPU, or of the list, decided ones too",
    )
    parser.add_argument(
        "--op",
        choices=sorted(PROBLEMS),
        help="only this operation; of --shape, default attention",
    )
    add_launch(parser, "decide under this regime, whatever the entry's own is")
    add_inputs(parser, "only entries with the inputs in this state")
    parser.add_argument(
        "--more",
        type=within(0),
        default=0,
        metavar="N",
        help="time the configs of the problem's other entries too, and N further kernels by the "
        "cost model; the fastest of a quick pass take part",
    )
    ahead = parser.add_mutually_exclusive_group()
    ahead.add_argument(
        "--compile", action="store_true", help="compile the own kernels; needs and uses no GPU"
    )
    ahead.add_argument(
        "--compiled-only", action="store_true", help="leave out kernels that are not compiled yet"
    )
    parser.add_argument("--gpu", help="with --compile: entries of this GPU (default H200)")
    seconds, some = within(0, kind=float), within(1)
    parser.add_argument(
        "--time-limit", type=seconds, metavar="SECONDS", help="begin no entry after this"
    )
    parser.add_argument("--device", type=within(0), default=0, help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=some, metavar="N", help="nvcc processes at a time")
    add_result(parser, revalidate)


def revalidate(args: argparse.Namespace) -> int:
    """Revalidate. Returns 1 if an entry could not be decided again."""
    from tuner.tuning import revalidate as tuning

    if args.compile:
        return _compile(args)
    if args.gpu:
        raise ConfigError("--gpu is for --compile (allowed elsewhere: --device)")

    def work(entry: Entry, runner: Runner, store: Store) -> dict[str, Any]:
        print(f"{_label(entry)}: timing", file=sys.stderr, flush=True)
        result = tuning.revalidate(
            entry,
            runner,
            store,
            compiled_only=args.compiled_only,
            beside=_beside(args, entry, runner.gpu),
            more=args.more,
        )
        if not args.json:
            print("\n".join(_revalidated_lines(result)), flush=True)
        return {
            **_entry_json(result.after),
            "replaced": result.is_replaced,
            "pinned": result.after.pinned,
            "before": _config_json(result.before.ranking[0]),
            "after": _config_json(result.after.ranking[0]),
            **ratios_json(result.after),
            "failed": [{**_config_json(m), "status": m.status.value} for m in result.failed],
        }

    return _each(args, work)


def _compile(args: argparse.Namespace) -> int:
    """Compile the own kernels of the selected entries. Returns 1 if one failed."""
    from tuner.families import families
    from tuner.runners.choose import Machine, Runners
    from tuner.tuning.revalidate import candidates

    gpu = gpu_of(args) or DEFAULT_GPU
    with Runners(Machine(jobs=args.jobs, replay=True), say) as runners:
        compiler = runners.compiler()
        specs = [
            spec
            for entry in _known(args, _problems(args), gpu)
            for config in candidates(entry, gpu, _beside(args, entry, gpu), args.more)
            for spec in families()[config.family].kernels(entry.problem, config).values()
        ]
        return compile_aot(list(dict.fromkeys(specs)), compiler, args.time_limit)


def _each(args: argparse.Namespace, work: Work) -> int:
    """Call `work` for every selected entry. A failure does not stop the others.

    Raises:
        ConfigError: when the shape or an option cannot be parsed.
        BenchmarkError: when there is no GPU to measure on.
        NoValidConfigError: when no entry matches.
    """
    from tuner.runners.choose import Machine, Runners

    if args.all and args.shape:
        raise ConfigError("--all is for every entry (allowed with --shape: nothing, it is timed)")
    done: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    started, remaining = time.monotonic(), 0
    with (
        open_store(url_of(args)) as store,
        Runners(Machine((args.device,), args.jobs), say) as runners,
    ):
        for entry in list(_chosen(args, runners)):
            if args.time_limit is not None and time.monotonic() - started > args.time_limit:
                remaining += 1
                continue
            try:
                done.append(work(entry, runners.of(entry.problem, _wanted(args, entry)), store))
            except StoreError:
                raise
            except TunerError as exc:
                print(f"tuner: {_label(entry)}: {exc}", file=sys.stderr)
                failed.append({**_entry_json(entry), "error": str(exc)})
    if args.json:
        print(json.dumps({"entries": done, "failed": failed}))
    elif not done and not failed and not remaining:
        print("every entry was measured in this environment")
    if remaining:
        print(f"tuner: {remaining} entries are left; the same command goes on", file=sys.stderr)
    return 1 if failed or remaining else 0


def _wanted(args: argparse.Namespace, entry: Entry) -> Regime:
    """Regime to decide an entry under."""
    return Regime(args.regime, entry.regime.l2) if args.regime else entry.regime


def _chosen(args: argparse.Namespace, runners: Runners) -> Iterator[Entry]:
    """Measured entries of this GPU, shipped ones included: those named, all, or the outdated ones;
    those without a decision under the requested regime.
    """
    from tuner.tuning.revalidate import recompiled

    problems, gpu = _problems(args), runners.gpu
    if gpu is None:
        raise BenchmarkError("without a GPU nothing can be timed again")
    measured = _known(args, problems, gpu)
    decided = {(e.problem, e.regime) for e in measured if e.gpu.identity == gpu.identity}
    for entry in measured:
        regime = _wanted(args, entry)
        if regime != entry.regime or entry.gpu.identity != gpu.identity:
            if (entry.problem, regime) not in decided:
                yield entry
            continue
        runner = runners.of(entry.problem, entry.regime)
        if (
            args.shape
            or args.all
            or differences(entry, runner.environment)
            or recompiled(entry, runners.compiler().cached)
        ):
            yield entry


def _problems(args: argparse.Namespace) -> list[Problem]:
    """Problems of ``--shape`` or ``--problems``; empty when neither is given."""
    from tuner.tuning.job import DEFAULT_OP, read_problems

    if args.problems is not None:
        return read_problems(args.problems, args.op or DEFAULT_OP)
    return [problem_of(args)] if args.shape else []


def _known(args: argparse.Namespace, problems: Sequence[Problem], gpu: Gpu) -> list[Entry]:
    """Measured entries of a GPU that the options leave, in the order of `problems`; of a listed
    problem without one those of a GPU whose decisions serve there.

    Args:
        args: parsed options.
        problems: requested problems; empty: all.
        gpu: GPU that times.

    Raises:
        NoValidConfigError: when there is none.
    """
    measured = [
        entry
        for entry in _measured(args, gpu)
        if args.op in (None, entry.problem.op)
        and args.l2 in (None, entry.regime.l2)
        and (not problems or entry.problem in problems)
    ]
    on_gpu = [entry for entry in measured if entry.gpu.identity == gpu.identity]
    if args.problems is not None:
        own = {entry.problem for entry in on_gpu}
        on_gpu += [entry for entry in measured if entry.problem not in own]
        on_gpu.sort(key=lambda entry: problems.index(entry.problem))
        if absent := len(set(problems) - {entry.problem for entry in on_gpu}):
            say(f"tuner: {absent} problems of the list are not measured: `tuner sweep` does that")
    if not on_gpu:
        what = f"{problems[0].op} {problems[0].label()}" if problems else args.op or "anything"
        raise NoValidConfigError(
            f"nothing is measured for {what} on {gpu.name}: `tuner sweep` measures it"
        )
    return on_gpu


def _measured(args: argparse.Namespace, gpu: Gpu) -> list[Entry]:
    """Measured entries whose decisions serve on a GPU, shipped ones included."""
    return [
        entry
        for entry in known_entries(args)
        if entry.provenance is Provenance.MEASURED and gpu.shares_decisions(entry.gpu)
    ]


def _beside(args: argparse.Namespace, entry: Entry, gpu: Gpu) -> list[Entry]:
    """With ``--more``, the problem's other entries that serve on the GPU."""
    if not args.more:
        return []
    return [e for e in _measured(args, gpu) if e.problem == entry.problem and e != entry]


def _label(entry: Entry) -> str:
    return f"{entry.problem.op} {entry.problem.label()} {entry.regime}"


def _entry_json(entry: Entry) -> dict[str, Any]:
    problem = entry.problem
    return {
        "op": problem.op,
        "shape": problem.label(),
        "problem": problem.to_json(),
        "gpu": entry.gpu.name,
        "regime": str(entry.regime),
    }


def _config_json(measurement: Measurement) -> dict[str, Any]:
    return {
        "config": measurement.config.to_json(),
        "config_digest": measurement.config.digest,
        "latency_us": measurement.latency_us,
    }


def _revalidated_lines(result: Revalidation) -> Iterator[str]:
    before, after = result.before.ranking[0], result.after.ranking[0]
    old, new = (f"{short_name(m)}, {microseconds(m.latency_us)} us" for m in (before, after))
    what = f"replaced {old} by {new}" if result.is_replaced else f"kept {new} (was {old})"
    what += f", own speed {against_fastest(result.after)}" if result.after.speedups else ""
    yield f"{_label(result.after)}: {what}"
    if result.after.pinned:
        yield f"  pinned: {short_name(result.after.winner)} is served all the same"
    for m in result.failed:
        yield f"  does not pass any more: {short_name(m)}, {m.status}"
