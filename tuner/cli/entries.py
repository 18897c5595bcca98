"""``tuner lookup, list, show, export, import, pin, unpin, forget``: entries of the store.

Reading needs only the standard library. Commands that change a store import SQLAlchemy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import output, resources
from tuner.cli.arguments import (
    add_op,
    add_place,
    add_result,
    add_store,
    problem_of,
    regimes_of,
    tell,
    url_of,
)
from tuner.cli.imports import import_file
from tuner.cli.model import add_model, look_up_model, refuse_options
from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError, StoreError
from tuner.families.by_operation import rule_of
from tuner.families.peers import installed_versions
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection import availability, describe
from tuner.selection.reader import (
    Entry,
    LookupResult,
    entries,
    find_gpu,
    lookup,
    shipped,
    with_shipped,
)
from tuner.store import open_store
from tuner.store.entry import is_vendor, vendor_name
from tuner.store.reading import sqlite_file

if TYPE_CHECKING:
    from tuner.store import Store

_MIN_DIGEST = 4
"""Minimum length of a digest's prefix that identifies a config."""


def register(subparsers: Any) -> None:
    """Add the commands."""
    about = "show the kernel that serves a shape, or those of a model's calls"
    parser = _add(subparsers, "lookup", look_up, about)
    add_op(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="as S=1024,D=64")
    add_model(parser, what)
    add_place(parser)
    _other_gpu(parser)
    parser = _add(
        subparsers, "list", list_all, "list the entries of the store, and the shipped ones"
    )
    _filters(parser)
    parser = _add(subparsers, "show", show, "show one entry in full: ranking, resources, source")
    _shape(parser)
    _other_gpu(parser)
    parser.add_argument("--source", action="store_true", help="the winner's rendered CUDA source")
    parser = _add(subparsers, "export", export, "write entries as JSON", has_json=False)
    parser.add_argument("file", nargs="?", type=Path, help="default: standard output")
    _filters(parser)
    parser.add_argument(
        "--trials", action="store_true", help="every measurement, not only the final rankings"
    )
    parser.add_argument(
        "--format",
        choices=("tuner", "t4", "t4-metadata", "t1", "kernel-tuner"),
        default="tuner",
        help="one problem for Kernel Tuner and others. t4: results; t4-metadata: the machine; t1: "
        "the measured space; kernel-tuner: a cache file to simulate with. Default: tuner",
    )
    parser = _add(
        subparsers, "import", import_file, "add the entries of an exported file to the store"
    )
    parser.add_argument(
        "file",
        type=Path,
        help="file of `tuner store export`; a CSV file of CUTLASS's profiler or a table of vLLM "
        "(E=...,N=....json, N=...,K=....json) gives hints, which sweeps try first",
    )
    parser = _add(
        subparsers, "pin", pin, "serve one measured config in place of the decided winner"
    )
    _shape(parser)
    parser.add_argument(
        "--config",
        required=True,
        help="config by its digest, the beginning of one, or JSON; a vendor's by name, as cudnn",
    )
    parser = _add(subparsers, "unpin", unpin, "serve the decided winner again")
    _shape(parser)
    parser = _add(subparsers, "forget", forget, "delete everything stored about a shape")
    _shape(parser)


def _add(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
    *,
    has_json: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=about, description=about)
    if has_json:
        add_result(parser, run, "JSON on standard output")
    else:
        add_store(parser)
        parser.set_defaults(run=run)
    return parser


def _shape(parser: argparse.ArgumentParser) -> None:
    add_op(parser)
    parser.add_argument("--shape", required=True, metavar="KEY=VALUE,...", help="as S=1024,D=64")
    add_place(parser)


def _filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", choices=sorted(PROBLEMS), help="only entries of this operation")
    parser.add_argument(
        "--shape", metavar="KEY=VALUE,...", help="a shape of --op (default: of attention)"
    )
    add_place(parser)
    parser.add_argument(
        "--provenance", choices=[str(p) for p in Provenance], help="only entries with such times"
    )


def _other_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-other-gpu",
        action="store_true",
        help="answer from another GPU of the same compute capability, whatever its count of "
        "multiprocessors, where there is nothing else",
    )


def look_up(args: argparse.Namespace) -> int:
    """Print the lookup result of a shape, which returns 1 if there is none, or a model's calls."""
    refuse_options(args)
    if args.model is not None:
        return look_up_model(args, _gpu(args), _file(args))
    problem, answer = problem_of(args), _found(args)
    if answer is None:
        return 0 if _print_rule(args, problem) else _miss(args, problem)
    served = availability.switched(availability.of_answer(answer))
    data = describe.answer_json(answer, problem, ranking=False)
    text = describe.answer_text(answer, problem, _source(args), _served(args, served))
    tell(args, {**data, "served_here": served._asdict()}, text)
    return 0


def _print_rule(args: argparse.Namespace, problem: Problem) -> bool:
    """Print the kernel that a rule names for a problem without a decision; False if none does."""
    gpu, rule = _gpu(args), rule_of(problem)
    selected = rule.select(problem, gpu) if rule and rule.serves(problem, gpu) else None
    if selected is None:
        return False
    selected = availability.without_absent(problem, selected, gpu)
    expected_us, config = selected.expected[0]
    served = availability.switched(availability.of_kernel(problem, config, gpu))
    place = {"kind": "rule", "op": problem.op, "shape": problem.label(), "gpu": gpu.name}
    kernel = {"config": config.to_json(), "expected_us": expected_us}
    text = describe.rule_text(problem, gpu, selected, _served(args, served))
    tell(args, {**place, **kernel, "served_here": served._asdict()}, text)
    return True


def list_all(args: argparse.Namespace) -> int:
    """Print a table of all entries."""
    entries_here = known_entries(args)
    filters = _wanted(args, entries_here)
    entries_here = sorted((e for e in entries_here if e.matches(**filters)), key=describe.order_of)
    text = describe.list_text(entries_here) if entries_here else f"no entries in {_source(args)}"
    tell(args, [describe.entry_json(entry) for entry in entries_here], text)
    return 0


def show(args: argparse.Namespace) -> int:
    """Print one entry in full. Returns 1 if the shape has none."""
    answer = _found(args)
    if answer is None:
        return _miss(args, problem_of(args))
    winner = answer.entry.winner
    sources = _sources(winner) if args.source else {}
    if args.json:
        data = describe.answer_json(answer, problem_of(args), ranking=True)
        print(json.dumps({**data, "source": sources} if args.source else data))
        return 0
    if args.source:
        print("\n".join(sources.values()))
        return 0
    served = availability.switched(availability.of_answer(answer))
    print(describe.answer_text(answer, problem_of(args), _source(args), _served(args, served)))
    print(f"{'digest':<12} {winner.config.digest}")
    print(f"{'sweep':<12} {answer.entry.sweep or '-'}")
    print(f"{'workspace':<12} {winner.workspace_bytes} bytes")
    clocks = winner.clocks
    throttle = ", ".join(clocks.throttle) or "none"
    state = f"{clocks.sm_mhz} MHz, {clocks.power_w:.0f} W, throttle reasons: {throttle}"
    print(f"{'clocks':<12} {state if clocks.sm_mhz else 'not recorded'}")
    print(f"\n{describe.ranking_text(answer.entry)}")
    if winner.artifacts or winner.resources:
        print(f"\n{describe.kernels_text(winner)}")
    return 0


def _sources(winner: Measurement) -> dict[str, str]:
    """Rendered source of each of the winner's kernels."""
    from tuner.compile.render import render
    from tuner.families import family

    kernels = family(winner.config.family).kernels(winner.problem, winner.config)
    if not kernels:
        raise ConfigError(f"{winner.config} is a vendor's: it has no source")
    return {
        name: render(spec, winner.artifacts.get(name, winner.config.digest))
        for name, spec in kernels.items()
    }


def export(args: argparse.Namespace) -> int:
    """Write entries as JSON to a file or to standard output.

    Raises:
        NoValidConfigError: when there is no entry to write.
    """
    from tuner.store import exchange, t4

    with open_store(url_of(args), create=False) as store:
        stored = store.entries()
        filters = _wanted(args, stored)
        document = store.export(**filters, trials=args.trials)
    if not document["entries"] and not document["measurements"]:
        raise NoValidConfigError(f"nothing to export: no such entry in {_source(args)}")
    if args.format != "tuner":
        document = t4.FORMATS[args.format](exchange.read(document)[0])
        text, what = t4.text(document), args.format
        if "results" in document:
            what = describe.counted(len(document["results"]), "result")
    else:
        counts = (
            describe.counted(len(document[name]), noun)
            for name, noun in (("entries", "entry"), ("measurements", "measurement"))
        )
        text, what = exchange.to_text(document), " with ".join(counts)
    if args.file is None:
        sys.stdout.write(text)
        return 0
    output.write(args.file, text)
    print(f"{what} written to {args.file}")
    return 0


def pin(args: argparse.Namespace) -> int:
    """Pin a measured config."""
    with _opened(args) as store:
        problem, gpu, regime = _one(args, store)
        config = _config(args.config, store, problem, gpu, regime)
        entry = store.pin(problem, gpu, regime, config)
    text = f"pinned for {problem.label()} on {gpu.name} ({regime}): "
    text += f"{config}, {describe.microseconds(entry.winner.latency_us)} us"
    tell(args, describe.entry_json(entry), text)
    return 0


def _opened(args: argparse.Namespace) -> Store:
    """Open an existing store. A wrong shape is reported before a missing store."""
    problem_of(args)
    return open_store(url_of(args), create=False)


def _config(text: str, store: Store, problem: Problem, gpu: Gpu, regime: Regime) -> Config:
    if text.lstrip().startswith("{"):
        from tuner.store.exchange import parse

        try:
            return Config.from_json(parse(text))
        except ConfigError as exc:
            raise ConfigError(f"--config {text}: {exc}") from exc
    measured = store.measurements(
        problem=problem, gpu=gpu, regime=regime, provenance=Provenance.MEASURED
    )
    passed = {m.config.digest: m.config for m in measured if m.ok}
    if not passed:
        raise NoValidConfigError(
            f"nothing to pin: no config is measured for {problem.op} {problem.label()} on "
            f"{gpu.name} ({regime}) in this store{_import_hint(problem)}"
        )
    vendors = [m for m in measured if m.ok and is_vendor(m.config)]
    named = [m for m in vendors if text in (vendor_name(m.config), str(m.config))]
    if named:
        return min(named, key=lambda m: m.latency_us or 0.0).config
    matching = [digest for digest in passed if digest.startswith(text.lower())]
    if len(text) < _MIN_DIGEST or len(matching) != 1:
        kind = "names several" if len(matching) > 1 else "names none"
        own = sorted(digest for digest, config in passed.items() if not is_vendor(config))
        vendors_named = sorted({vendor_name(m.config) for m in vendors})
        digits = f"{_MIN_DIGEST} or more digits of {describe.first_few(own)}" if own else ""
        raise ConfigError(
            f"--config {text} {kind} of the {len(passed)} configs that passed for "
            f"{problem.label()} on {gpu.name} ({regime}) (allowed: "
            f"{' or '.join(filter(None, [digits, ', '.join(vendors_named)]))})"
        )
    return passed[matching[0]]


def _import_hint(problem: Problem) -> str:
    """Advice on pinning a config of a shipped decision; empty if the problem does not ship."""
    if all(entry.problem != problem for entry in shipped()):
        return ""
    folder = resources.cache() / "tuned"
    return f"; to pin what ships, `tuner store import` a file of {folder}"


def unpin(args: argparse.Namespace) -> int:
    """Remove a pin. Returns 1 if there was none."""
    with _opened(args) as store:
        problem, gpu, regime = _one(args, store)
        done = store.unpin(problem, gpu, regime)
    what = "no longer pinned" if done else "nothing was pinned"
    tell(args, {"unpinned": done}, f"{what} for {problem.label()} on {gpu.name} ({regime})")
    return 0 if done else 1


def forget(args: argparse.Namespace) -> int:
    """Delete a shape's decisions, sweeps and measurements. Returns 1 if there were none."""
    with _opened(args) as store:
        # An unreadable row may be the one to delete, so rows are not read unnecessarily.
        filters = _wanted(args, store.entries() if args.gpu else [])
        decisions, measurements = store.forget(
            filters["problem"], filters["gpu"], filters["regime"]
        )
    if args.json:
        print(json.dumps({"entries": decisions, "measurements": measurements}))
    else:
        print(
            f"{describe.counted(decisions, 'entry')} and "
            f"{describe.counted(measurements, 'measurement')} of "
            f"{filters['problem'].label()} deleted"
        )
        if any(entry.problem == filters["problem"] for entry in shipped()):
            print("what ships of this shape goes on being served")
    return 0 if decisions or measurements else 1


def _source(args: argparse.Namespace) -> str:
    path = sqlite_file(url_of(args))
    return "store" if path is None else str(path)


def known_entries(args: argparse.Namespace) -> list[Entry]:
    """Every entry. An SQLite file is read with the standard library and is never created."""
    path = _file(args)
    if path is None:
        with open_store(url_of(args)) as store:
            return with_shipped(store.entries())
    return entries(path)


def _file(args: argparse.Namespace) -> Path | None:
    """SQLite file to read; None for another database. A named file must exist."""
    path = sqlite_file(url_of(args))
    if path and args.store and not path.exists():
        raise StoreError(f"store {path} does not exist (a sweep or an import makes it)")
    return path


def _regimes(args: argparse.Namespace, problem: Problem | None) -> tuple[Regime, ...] | None:
    """Regimes that match the options; None if no option names one."""
    if args.regime is None and args.l2 is None:
        return None
    return regimes_of(args, problem.op if problem else (args.op or "attention"))


def _wanted(args: argparse.Namespace, entries: Sequence[Entry]) -> dict[str, Any]:
    """Filters of `Store.entries` and `Store.export` from the options."""
    problem = None if args.shape is None else problem_of(args)
    provenance = getattr(args, "provenance", None)
    return {
        "op": args.op,
        "problem": problem,
        "gpu": find_gpu(args.gpu, [e.gpu for e in entries]) if args.gpu else None,
        "regime": _regimes(args, problem),
        "provenance": Provenance(provenance) if provenance else None,
    }


def _one(args: argparse.Namespace, store: Store) -> tuple[Problem, Gpu, Regime]:
    """Problem, GPU and regime of a command that changes one entry."""
    problem = problem_of(args)
    gpu = find_gpu(args.gpu, [e.gpu for e in store.entries()]) if args.gpu else _detected()
    gpu = gpu or DEFAULT_GPU
    regimes = regimes_of(args, problem.op)
    decided = (regime for regime in regimes if store.best(problem, gpu, regime) is not None)
    return problem, gpu, next(decided, regimes[0])


def _detected() -> Gpu | None:
    from tuner.measure.device import detect

    return detect()


def _environment() -> Environment:
    """Environment that a sweep would record here, as far as is known without torch."""
    from tuner.measure.device import environment

    return Environment({**environment().facts, **installed_versions()})


def _served(args: argparse.Namespace, served: availability.Availability) -> str:
    """Text of an availability; says so where no GPU is named and none could run what is built."""
    is_elsewhere = args.gpu is None and _detected() is None
    return served.text + (" (no GPU is here: of what is built)" if is_elsewhere else "")


def _gpu(args: argparse.Namespace) -> Gpu:
    """The named GPU, else this machine's, else the default."""
    if args.gpu:
        return find_gpu(args.gpu, [entry.gpu for entry in known_entries(args)])
    return _detected() or DEFAULT_GPU


def _found(args: argparse.Namespace, *, allow_other_gpu: bool | None = None) -> LookupResult | None:
    """Look a shape up.

    Args:
        args: arguments of the command.
        allow_other_gpu: as of `lookup`; None: as the command says.
    """
    problem, path = problem_of(args), _file(args)
    gpu = _gpu(args) if args.gpu else _detected()
    return lookup(
        problem,
        gpu=gpu,
        regime=_regimes(args, problem),
        path=path,
        allow_other_gpu=args.allow_other_gpu if allow_other_gpu is None else allow_other_gpu,
        environment=_environment() if gpu and not args.gpu else None,
        among=known_entries(args) if path is None else None,
    )


def _miss(args: argparse.Namespace, problem: Problem) -> int:
    """Say on standard error that nothing is known of a problem. Returns 1."""
    entries_here = known_entries(args)
    places = sorted({f"{e.gpu.name} ({e.regime})" for e in entries_here if e.problem == problem})
    hint = f"; known for {', '.join(places)}" if places else ""
    if _found(args, allow_other_gpu=True) is not None:
        hint += "; --allow-other-gpu answers from another GPU"
    if labels := describe.nearest_labels(problem, entries_here):
        hint += f"; `tuner sweep` measures it (nearest: {describe.first_few(labels)})"
    regime = (_regimes(args, problem) or Regime.choices(problem.op))[0]
    print(
        f"tuner: nothing known for {problem.op} {problem.label()} on {_gpu(args).name} "
        f"({regime}){hint}",
        file=sys.stderr,
    )
    if args.json:
        print("null")
    return 1
