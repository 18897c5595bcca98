"""``tuner develop survey``: measure random samples of problems' kernels, as recordings."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import resources
from tuner.base.processes import exit_code
from tuner.cli import DONE, FAILED
from tuner.cli.aot import compile_aot, say
from tuner.cli.arguments import add_inputs, add_launch, add_op, within
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.base import KernelSpec
from tuner.families.by_operation import DOMAINS
from tuner.hardware import DEFAULT_GPU, Gpu, gpu_by_name
from tuner.problem import Problem
from tuner.selection.describe import counted

if TYPE_CHECKING:
    from tuner.tuning.survey import Sample, SurveyProgress, SurveySize

DESCRIPTION = """Samples kernels of each problem at random, compiles, checks and times them, and
keeps one recording a problem, written as it goes. Equal arguments draw equal samples. The same
command goes on where it stopped. Samplers, cost models and rules should be judged by these
recordings: those of sweeps are biased by the search."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "survey",
        help="measure random samples of kernels, for cost models and portfolios",
        description=DESCRIPTION,
    )
    parser.add_argument("out", type=Path, metavar="FOLDER", help="folder of the recordings")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="one problem, as S=1024,D=64")
    what.add_argument(
        "--problems", type=Path, metavar="FILE", help="YAML or JSON list (default: the one shipped)"
    )
    parser.add_argument(
        "--portfolio",
        action="store_true",
        help="measure the kernels that a portfolio may be made of, and PyTorch's, at problems of "
        "public models; with --shape or --problems those that serve these",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help="with --portfolio: only domains whose name holds each of these, as in D=128,one query",
    )
    add_op(
        parser,
        "operation of the shape or of the portfolio (default attention); with neither "
        "and another one: only its problems of the shipped list",
    )
    parser.add_argument(
        "--kernels", type=int, default=120, help="kernels of each problem (default 120)"
    )
    parser.add_argument(
        "--variants", type=int, default=4, help="run-time variants of each kernel (default 4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default 0)")
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="own family to sample; may be repeated"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="with --list or --compile: for which GPU, as H100 (default H200)",
    )
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--list", action="store_true", help="print the sample, measure nothing")
    less.add_argument(
        "--compile", action="store_true", help="compile the sample; needs and uses no GPU"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end after this time; finished measurements are kept",
    )
    add_launch(parser)
    add_inputs(parser)
    parser.add_argument("--device", default="0", metavar="N,...", help="CUDA devices of one kind")
    parser.add_argument("--jobs", type=within(1), metavar="N", help="nvcc processes at a time")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sample, measure it and print the results. Returns 1 if candidates are left."""
    from tuner.runners.choose import Machine, Runners
    from tuner.runners.gpus import parse_devices
    from tuner.search.sampled_problems import regime
    from tuner.tuning.job import JobOptions
    from tuner.tuning.progress import Interruption
    from tuner.tuning.survey import (
        NO_GPU,
        POOL_REQUEST_KERNELS,
        REQUEST_KERNELS,
        Survey,
        SurveySize,
    )

    how = SurveySize(args.kernels, args.variants, args.seed, tuple(args.family or ()))
    if args.only and (not args.portfolio or args.shape or args.problems):
        raise ConfigError("--only is for --portfolio (allowed elsewhere: --shape, --problems)")
    if args.portfolio and (args.regime or args.l2):
        raise ConfigError("--regime and --l2 are not for --portfolio (allowed: neither)")
    if args.gpu and not (args.list or args.compile):
        raise ConfigError("--gpu is for --list and --compile (allowed elsewhere: --device)")
    other = gpu_by_name(args.gpu) if args.gpu else DEFAULT_GPU
    if args.list:
        _list(_samples(args, other, how), how, other, print)
        return 0
    machine = Machine(parse_devices(args.device), args.jobs, replay=args.compile)
    with Runners(machine, say) as runners:
        if runners.gpu is None and not args.compile:
            raise BenchmarkError(NO_GPU)
        gpu = runners.gpu if runners.gpu and not args.gpu else other
        samples = _samples(args, gpu, how)
        specs = _list(samples, how, gpu, say)
        if args.compile:
            compiler = runners.compiler()
            if args.portfolio:
                compiler.batch = 1  # as `tuner build --portfolio`: equal builds give equal bytes
            return compile_aot(specs, compiler, args.time_limit)
        with Interruption() as interruption:
            survey = Survey(
                samples,
                regime if args.portfolio else JobOptions(launch=args.regime, l2=args.l2).regime,
                runners.of,
                args.out,
                together=POOL_REQUEST_KERNELS if args.portfolio else REQUEST_KERNELS,
                changed=lambda progress: say(progress_text(progress)),
                interruption=interruption,
                time_limit_s=args.time_limit,
            )
            results = survey.run()
    for progress in results:
        best = min((m.latency_us for m in progress.seen if m.latency_us), default=None)
        shown = "nothing passed" if best is None else f"best {best:.4g} us"
        print(f"{progress_text(progress)}, {shown}, {progress.path}")
    return _code(results, interruption.number)


def _code(found: Sequence[SurveyProgress], interrupted_by: int | None) -> int:

    left = sum(not progress.is_complete for progress in found)
    if left:
        print(f"tuner: {left} of {len(found)} problems are not complete; the same command goes on",
              file=sys.stderr)  # fmt: skip
    if interrupted_by is not None:
        return exit_code(interrupted_by)
    return FAILED if left else DONE


def _samples(args: argparse.Namespace, gpu: Gpu, how: SurveySize) -> list[Sample]:
    """Candidates to measure for each problem."""
    from tuner.selection.portfolio import serving, shipped
    from tuner.tuning.survey import draw, listed, pooled

    if args.portfolio and args.op not in DOMAINS:
        raise ConfigError(f"--op {args.op} has no portfolio (allowed: {', '.join(DOMAINS)})")
    if not args.portfolio:
        return [draw(problem, gpu, how) for problem in _problems(args)]
    portfolios = (portfolio for portfolio in serving(shipped(), gpu) if portfolio.op == args.op)
    portfolio = next(portfolios, None)
    if args.shape or args.problems:
        if portfolio is None:
            raise ConfigError(f"no portfolio of {args.op} serves on {gpu.name}")
        return listed(_problems(args), gpu, portfolio)
    only = args.only.split(",") if args.only else ()
    samples = pooled(args.op, gpu, portfolio, only)
    if not samples:
        raise ConfigError(f"--only {args.only}: no domain of {args.op} has this in its name")
    return samples


def _problems(args: argparse.Namespace) -> list[Problem]:
    from tuner.tuning.job import DEFAULT_OP, parse_problem, read_problems

    if args.shape is not None:
        return [parse_problem(args.shape, args.op)]
    if args.problems is not None:
        return read_problems(args.problems, args.op)
    shipped = read_problems(resources.cache() / "survey.yaml")
    if args.op == DEFAULT_OP:
        return shipped
    if not (problems := [problem for problem in shipped if problem.op == args.op]):
        named = ", ".join(dict.fromkeys(problem.op for problem in shipped))
        raise ConfigError(f"the shipped list has no problem of {args.op} (it has {named})")
    return problems


def _list(
    samples: Sequence[Sample], how: SurveySize, gpu: Gpu, tell: Callable[[str], None]
) -> list[KernelSpec]:
    """Print the sample of each problem and the total number of kernels. Returns the kernels."""
    from tuner.families import families

    members = families()
    kernels: dict[KernelSpec, None] = {}
    for sample in samples:
        own = {
            spec: None
            for group in sample.groups
            for spec in members[group[0].family].kernels(sample.problem, group[0]).values()
        }
        tell(f"{sample_text(sample)}; {len(own.keys() - kernels)} kernels not drawn before")
        kernels |= own
    tell(
        f"{counted(len(samples), 'problem')} on {gpu.name}, seed {how.seed}: "
        f"{len(kernels)} distinct kernels, "
        f"{sum(sample.candidates for sample in samples)} candidates"
    )
    return list(kernels)


def sample_text(sample: Sample) -> str:
    """Sample of a problem as text: counts by family, and values of parameters."""
    kernels = sum(of_family for of_family, _ in sample.spaces.values())
    candidates = sum(of_family for _, of_family in sample.spaces.values())
    lines = [
        f"{sample.problem.op} {sample.problem.label()}: {len(sample.groups)} of {kernels} kernels, "
        f"{sample.candidates} of {candidates} candidates"
    ]
    for family, (of_family, _) in sample.spaces.items():
        values = (
            f"{name} " + " ".join(f"{value}:{count}" for value, count in counts.items())
            for name, counts in sample.values(family).items()
        )
        lines.append(f"  {family} {sample.drawn(family)} of {of_family}: {', '.join(values)}")
    return "\n".join(lines)


def progress_text(progress: SurveyProgress) -> str:
    """One line, as ``attention S=1024,D=64: 48 of 390 candidates, 30 resumed: 46 ok, ...``."""
    measurements, problem = progress.seen, progress.sample.problem
    counts = Counter(m.status.value for m in measurements).most_common()
    statuses = ", ".join(f"{count} {status}" for status, count in counts)
    of = f"{len(measurements)} of {progress.sample.candidates} candidates"
    text = f"{problem.op} {problem.label()}: {of}"
    text += f" ({progress.resumed} resumed)" if progress.resumed else ""
    return f"{text}, {progress.elapsed_s:.0f} s: {statuses or 'none yet'}"
