"""``tuner sweep``: tune one problem or many."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base.processes import exit_code
from tuner.cli import DONE, FAILED
from tuner.cli.aot import sweep_aot
from tuner.cli.arguments import OF_LIST, add_inputs, add_launch, add_op, add_result, url_of, within
from tuner.cli.artifacts import parse_size
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Provenance, Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection.shipped import with_shipped
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.runners.choose import ClusterPlace, Machine
    from tuner.store import Store
    from tuner.tuning.job import JobOptions, JobResult
    from tuner.tuning.progress import Interruption

DESCRIPTION = """Searches the fastest kernel of a problem among every family that serves it and the
vendors' kernels, verifies it, and stores the decision. Candidates that the store holds from this
environment are not measured again, so a killed sweep goes on where it stopped. Without a GPU it
replays the recorded sweep of the problem, or ranks candidates by predicted time. Either is stored
and shown as such, and nothing is compiled without --compile."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "sweep", help="tune one problem or many", description=DESCRIPTION
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shape",
        metavar="KEY=VALUE,...",
        help="; ".join(f"{name}: {', '.join(cls.keys)}" for name, cls in PROBLEMS.items()),
    )
    what.add_argument(
        "--problems",
        type=Path,
        metavar="FILE",
        help="YAML or JSON list of shapes; skips what is tuned for this environment",
    )
    add_op(parser, OF_LIST)
    add_budget(parser)
    add_regime(parser)
    add_machine(parser, "all")
    ahead = parser.add_mutually_exclusive_group()
    ahead.add_argument(
        "--compile",
        action="store_true",
        help="compile what the search will ask for first (of each problem --trials sets of "
        "kernels), until --time-limit; needs and uses no GPU, measures nothing",
    )
    ahead.add_argument(
        "--list", action="store_true", help="list the kernels that --compile would compile"
    )
    add_studies(parser)
    add_result(parser, run, "one JSON document on standard output")


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `options_of` reads, those of `add_regime` included."""
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="own family to try; may be repeated"
    )
    parser.add_argument(
        "--effort",
        choices=("quick", "full"),
        default="quick",
        help="quick: about a minute on 16 cores (default); full: 200 kernels a family",
    )
    parser.add_argument(
        "--trials", type=int, metavar="N", help="sets of compiled kernels, those known included"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="for all of it, the final pass included"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default 0)")
    parser.add_argument("--sampler", help="model (default), tpe, gp, cmaes, cost or random")
    parser.add_argument(
        "--compiled-only",
        action="store_true",
        help="only candidates whose kernels are compiled already: the GPU waits for no compiler",
    )


def add_studies(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `open_storage`."""
    parser.add_argument(
        "--optuna-storage",
        metavar="URL",
        help="keep copies of the searches' Optuna studies there: sqlite:///FILE, "
        "postgresql+psycopg://..., or a journal file (default: TUNER_OPTUNA_STORAGE)",
    )


def add_regime(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the regime and of the memory limit."""
    add_launch(
        parser,
        "stream: behind an ordinary kernel, as in a model (default); chained: behind copies of "
        "itself; eager: without a CUDA graph",
    )
    add_inputs(
        parser, "state of the inputs (default: cold for gemm, swiglu and grouped_gemm, else warm)"
    )
    parser.add_argument(
        "--max-workspace", metavar="SIZE", help="memory beside the operands, as in 512MB"
    )


def add_machine(parser: argparse.ArgumentParser, devices: str) -> None:
    """Add the arguments that `machine_of` reads.

    Args:
        parser: parser of the command.
        devices: default CUDA devices.
    """
    parser.add_argument(
        "--device",
        default=devices,
        metavar="N,...",
        help="CUDA devices of one kind, as in 0 or 0,1, or all: those that are like the first and "
        f"that nobody else uses (default {devices})",
    )
    parser.add_argument(
        "--jobs",
        type=within(1),
        metavar="N",
        help="nvcc processes at a time (default: the cores)",
    )
    parser.add_argument(
        "--replay", action="store_true", help="replay or predict even where a GPU is"
    )
    group = parser.add_argument_group("on a Ray cluster")
    group.add_argument(
        "--runner",
        choices=("local", "ray"),
        default="local",
        help="place of the evaluation: this machine, or a Ray cluster",
    )
    group.add_argument("--ray-address", metavar="HOST:PORT", help="default: RAY_ADDRESS, else auto")
    for name, which in (("gpu", "measure (one actor a GPU)"), ("compile", "compile")):
        group.add_argument(
            f"--{name}-label",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"Ray label of the nodes that {which}; may be repeated",
        )
    about = "GPUs to take at most (default: all)"
    group.add_argument("--gpus", type=within(1), metavar="N", help=about)


def run(args: argparse.Namespace) -> int:
    """Run the sweep. Returns 0 if every problem was decided."""
    from tuner.cli.display import create_display
    from tuner.runners.opening import open_runners
    from tuner.search.storage import open_storage
    from tuner.tuning.job import Job
    from tuner.tuning.progress import Interruption

    # Refuse options that --compile or --list would ignore.
    ahead = "--compile" if args.compile else "--list" if args.list else ""
    for option, value, why in (
        ("--compiled-only", args.compiled_only, "it would leave nothing to compile"),
        ("--replay", args.replay, "a replay needs no kernels"),
        ("--optuna-storage", args.optuna_storage, "nothing is searched"),
    ):
        if ahead and value:
            raise ConfigError(f"{option} contradicts {ahead}: {why}; leave one of them out")
    problems, options = problems_of(args), options_of(args)
    machine = machine_of(args, options.sweep.max_workspace)
    url = url_of(args)
    if args.compile or args.list:
        return sweep_aot(args, problems, options, url)
    with (
        open_store(url) as store,
        create_display(url, show_results=not args.json) as display,
        open_storage(args.optuna_storage, display.note) as studies,
        Interruption() as interruption,
        open_runners(machine, display.note) as kinds,
    ):
        job = Job(
            problems,
            kinds[0],
            store,
            options,
            watcher=display,
            interruption=interruption,
            further=kinds[1:],
            studies=studies,
        )
        if kinds[0].gpu is None and not args.replay:
            _say_known(problems, options, store, url, display.note)
        result = job.run()
    if args.shape and result.failed:
        raise result.failed[0][1]
    if args.json:
        print(json.dumps(_document(args, result, url)))
    return _report(result, interruption)


def _say_known(
    problems: Sequence[Problem],
    options: JobOptions,
    store: Store,
    url: str,
    note: Callable[[str], None],
) -> None:
    """On a machine that cannot measure, print how to see the problems' measurements, or predictions
    from other problems' measurements.
    """
    from tuner.selection.reader import LookupResult, lookup
    from tuner.store.reading import sqlite_file

    path = sqlite_file(url)
    among = None if path else with_shipped(store.entries())
    tuned: list[tuple[Problem, LookupResult]] = []
    for problem in problems:
        regimes = Regime.choices(problem.op, options.launch, options.l2)
        answer = lookup(problem, gpu=DEFAULT_GPU, regime=regimes, path=path, among=among)
        if answer is not None and (
            answer.is_predicted or answer.entry.provenance is Provenance.MEASURED
        ):
            tuned.append((problem, answer))
    if not tuned:
        return
    problem, answer = tuned[0]
    op = "" if problem.op == "attention" else f" --op {problem.op}"
    command = f"`tuner lookup{op} --shape {problem.label()}`"
    if len(problems) > 1:
        predicted = sum(answer.is_predicted for _, answer in tuned)
        note(
            f"of the {len(problems)} problems {len(tuned) - predicted} have measured decisions and "
            f"{predicted} a portfolio's prediction, as {command}"
        )
        return
    source = "a portfolio's prediction" if answer.is_predicted else "measurements of this shape"
    note(f"{command} answers from {source}")


def machine_of(args: argparse.Namespace, max_workspace: int | None) -> Machine:
    """Machine to measure on, from the options.

    Raises:
        ConfigError: when a number or a device is out of range.
    """
    from tuner.runners.choose import Machine
    from tuner.runners.gpus import parse_devices

    devices = parse_devices(args.device)
    return Machine(devices, args.jobs, max_workspace, args.replay, cluster_of(args))


def cluster_of(args: argparse.Namespace) -> ClusterPlace | None:
    """Part of a cluster to evaluate on; None for this machine.

    Raises:
        ConfigError: when an argument is wrong, or belongs to another runner.
    """
    from tuner.runners.choose import ClusterPlace

    texts = {"--gpu-label": args.gpu_label, "--compile-label": args.compile_label}
    if args.runner == "local":
        words = {**texts, "--ray-address": args.ray_address, "--gpus": args.gpus}
        for name, value in words.items():
            if value:
                raise ConfigError(f"{name} belongs to --runner ray")
        return None
    if args.replay:
        raise ConfigError("--replay needs no cluster: leave --runner ray out")
    labels = {name: _labels(name, text) for name, text in texts.items()}
    return ClusterPlace(
        args.ray_address, labels["--gpu-label"], labels["--compile-label"], args.gpus
    )


def _labels(option: str, texts: list[str]) -> dict[str, str]:
    """``["gpu=H200"]`` as a mapping."""
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in labels:
            raise ConfigError(f"{option} {text}: wanted is NAME=VALUE, each name once")
        labels[name] = value
    return labels


def problems_of(args: argparse.Namespace) -> list[Problem]:
    """Problems named by the options.

    Raises:
        ConfigError: names every wrong problem, or a list has none of the named operation.
    """
    from tuner.tuning.job import parse_problem, read_problems

    if args.problems is None:
        return [parse_problem(args.shape, args.op)]
    problems = read_problems(args.problems, args.op)
    if getattr(args, "op_is_named", False):
        problems = [problem for problem in problems if problem.op == args.op]
    if not problems:
        raise ConfigError(f"{args.problems} has no problem of --op {args.op}")
    return problems


def options_of(args: argparse.Namespace) -> JobOptions:
    """Sweep options from the arguments.

    Raises:
        ConfigError: when one is out of range.
    """
    from tuner.tuning.job import JobOptions
    from tuner.tuning.sweep import SweepOptions

    size = args.max_workspace
    sweep = SweepOptions(
        families=tuple(args.family or ()),
        effort=args.effort,
        trials=args.trials,
        time_limit_s=args.time_limit,
        max_workspace=None if size is None else parse_size(size, "--max-workspace"),
        seed=args.seed,
        sampler=args.sampler,
        compiled_only=args.compiled_only,
    )
    return JobOptions(
        sweep,
        args.regime,
        args.l2,
        skip_tuned=args.problems is not None,
    )


def _document(args: argparse.Namespace, result: JobResult, url: str) -> dict[str, Any]:
    """JSON document of one problem's outcome, or of the outcomes of a job or of several GPU
    models.
    """
    outcomes = [{**outcome.to_json(), "store": url} for outcome in result.outcomes]
    if args.shape and len(outcomes) == 1:
        return outcomes[0]
    return {
        "outcomes": outcomes,
        "skipped": [problem.to_json() for problem in result.skipped],
        "failed": [{"problem": p.to_json(), "error": str(exc)} for p, exc in result.failed],
        "interrupted": result.interrupted,
    }


def _report(result: JobResult, interruption: Interruption) -> int:
    """Print failures on standard error. Returns the exit code."""
    for problem in result.skipped:
        print(f"tuner: {problem.op} {problem.label()} is tuned already", file=sys.stderr)
    for problem, exc in result.failed:
        print(f"tuner: {problem.op} {problem.label()}: {exc}", file=sys.stderr)
    if result.interrupted and interruption.number is not None:
        ranked = any(outcome.ranking for outcome in result.outcomes)
        ending = "the best so far is stored" if ranked else "no candidate had passed yet"
        print(f"tuner: interrupted; {ending}", file=sys.stderr)
        return exit_code(interruption.number)
    return FAILED if result.failed else DONE
