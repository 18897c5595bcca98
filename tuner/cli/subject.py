"""Selection of the sweep for ``tuner report`` and ``tuner explain``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import add_op, add_place, add_store, usual_inputs
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import PROBLEMS
from tuner.selection.reader import find_gpu

if TYPE_CHECKING:
    from tuner.report.subject import ReportSubject


def add_subject(parser: argparse.ArgumentParser) -> Any:
    """Add the options that `subject_of` reads. Returns the group of exclusive options that name the
    sweep.
    """
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="as S=1024,D=64")
    what.add_argument("--recording", type=Path, metavar="FILE", help="a recorded sweep")
    add_op(parser)
    add_place(parser, "as H200; default: this machine's, or H200")
    add_store(parser)
    return what


def subject_of(args: argparse.Namespace) -> ReportSubject:
    """Read the sweep named by the options.

    Raises:
        ConfigError: when a name is wrong or the recording cannot be read.
        NoValidConfigError: when the sweep has no measurements.
    """
    from tuner.report import subject

    benches = getattr(args, "bench", None) or ()
    if args.recording is not None:
        return subject.from_file(args.recording, benches)
    problem = PROBLEMS[args.op].parse(args.shape)
    regimes = usual_inputs(args, problem.op)
    return subject.from_known(problem, gpu_of(args), regimes, args.store, benches)


def gpu_of(args: argparse.Namespace) -> Gpu:
    """The named GPU, else this machine's, else the default one."""
    from tuner.measure.device import detect

    return find_gpu(args.gpu) if args.gpu else detect() or DEFAULT_GPU
