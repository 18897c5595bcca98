"""``tuner revalidate``: measure again what is stored."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tuner.errors import BenchmarkError, ConfigError, NoValidConfigError, StoreError, TunerError
from tuner.problem import PROBLEMS
from tuner.selection.describe import against_fastest, microseconds, short_name
from tuner.store.entry import ratios_json

if TYPE_CHECKING:
    from tuner.measurement import Measurement
    from tuner.runners.base import Runner
    from tuner.runners.choose import Runners
    from tuner.store import Entry, Store
    from tuner.tuning.revalidate import Revalidation

    Work = Callable[[Entry, Runner, Store], dict[str, Any]]

REVALIDATE = """Times the best configs of stored entries and the vendors' kernels again, side by
side, and decides anew: seconds an entry, nothing is searched. Without --shape and --all it takes
the entries that were measured in another environment than this one (driver, torch, cuDNN, ...);
those are served all the while."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "revalidate", help="time stored winners again, after an update", description=REVALIDATE
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", metavar="KEY=VALUE,...", help="only this problem")
    which.add_argument("--all", action="store_true", help="every entry of this GPU")
    parser.add_argument(
        "--op",
        choices=sorted(PROBLEMS),
        help="only this operation; of --shape, default attention",
    )
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="nvcc processes at a time")
    parser.add_argument("--store", metavar="URL", help="SQLAlchemy URL or SQLite file")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=revalidate)


def revalidate(args: argparse.Namespace) -> int:
    """Revalidate; 1 when an entry could not be decided anew."""
    from tuner.tuning import revalidate as room

    def work(entry: Entry, runner: Runner, store: Store) -> dict[str, Any]:
        print(f"{_label(entry)}: timing", file=sys.stderr, flush=True)
        result = room.revalidate(entry, runner, store)
        if not args.json:
            print("\n".join(_revalidated_lines(result)), flush=True)
        return _revalidated_json(result)

    return _each(args, work)


def _each(args: argparse.Namespace, work: Work) -> int:
    """Do `work` for every entry that is asked for; one that fails does not end the others.

    Raises:
        ConfigError: when the shape or an option cannot be read.
        BenchmarkError: when there is no GPU to measure on.
        NoValidConfigError: when no entry matches.
    """
    from tuner import settings
    from tuner.runners.choose import Machine, Runners
    from tuner.store import open_store

    for name, value, least in (("device", args.device, 0), ("jobs", args.jobs, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} is out of range (allowed: {least} or more)")
    done: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    with (
        open_store(args.store or settings.store_url()) as store,
        Runners(Machine((args.device,), args.jobs), _note) as runners,
    ):
        for entry in _chosen(args, runners):
            try:
                done.append(work(entry, runners.of(entry.problem, entry.regime), store))
            except StoreError:
                raise
            except TunerError as exc:
                print(f"tuner: {_label(entry)}: {exc}", file=sys.stderr)
                failed.append({**_entry_json(entry), "error": str(exc)})
    if args.json:
        print(json.dumps({"entries": done, "failed": failed}))
    elif not done and not failed:
        print("every entry was measured in this environment")
    return 1 if failed else 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _chosen(args: argparse.Namespace, runners: Runners) -> Iterator[Entry]:
    """Measured entries of this GPU, shipped ones too: of a shape, all, or the outdated ones."""
    from tuner.cli.entries import known_entries
    from tuner.measurement import Provenance
    from tuner.selection.reader import differences
    from tuner.tuning.job import DEFAULT_OP

    problem = PROBLEMS[args.op or DEFAULT_OP].parse(args.shape) if args.shape else None
    gpu = runners.gpu
    if gpu is None:
        raise BenchmarkError("without a GPU nothing can be timed again")
    known = [
        entry
        for entry in known_entries(args)
        if entry.provenance is Provenance.MEASURED
        and entry.gpu.identity == gpu.identity
        and args.op in (None, entry.problem.op)
        and problem in (None, entry.problem)
    ]
    if not known:
        what = f"{problem.op} {problem.label()}" if problem else args.op or "anything"
        raise NoValidConfigError(
            f"nothing is measured for {what} on {gpu.name}: `tuner sweep` measures it"
        )
    for entry in known:
        runner = runners.of(entry.problem, entry.regime)
        if problem or args.all or differences(entry, runner.environment):
            yield entry


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


def _revalidated_json(result: Revalidation) -> dict[str, Any]:
    return {
        **_entry_json(result.after),
        "replaced": result.is_replaced,
        "pinned": result.after.pinned,
        "before": _config_json(result.before.ranking[0]),
        "after": _config_json(result.after.ranking[0]),
        **ratios_json(result.after),
        "failed": [{**_config_json(m), "status": m.status.value} for m in result.failed],
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
