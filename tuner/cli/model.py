"""Calls of a model by their share of the time: shared arguments, and ``tuner lookup --model``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import tell, within
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.problem.engines import ENGINES, Engine
from tuner.selection.describe import table, wrapped

if TYPE_CHECKING:
    from tuner.problem.steps import ModelStep
    from tuner.selection.answering import Answering, ModelAnswers

_OPTIONS = ("engine", "tensor_parallel", "batch", "seqlen", "dtype")
"""Options that are for ``--model`` only."""


def add_model(parser: argparse.ArgumentParser, what: Any) -> None:
    """Add ``--model`` to a group of which one option is named, and the options that go with it."""
    what.add_argument("--model", type=Path, metavar="FILE", help="config.json of Transformers")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="engine that runs the model over a paged cache (default: Transformers' generate)",
    )
    group.add_argument("--tensor-parallel", type=within(1), metavar="N", help="ranks (default 1)")
    group.add_argument("--batch", metavar="LIST", help="sequences at a time, as 1,8,32 or 1:32")
    group.add_argument("--seqlen", metavar="LIST", help="keys of a sequence, as 512,2048")
    group.add_argument("--dtype", metavar="TYPE", help="fp16 or bf16 (default: the model's)")


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse options of ``--model`` without it.

    Raises:
        ConfigError: names the first one.
    """
    for name in _OPTIONS:
        if args.model is None and getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for --model (name a config.json)")


def steps_of(args: argparse.Namespace) -> list[ModelStep]:
    """Steps of the model that the arguments name. Says on standard error what has no problem.

    Raises:
        ConfigError: when the model cannot be read, or an option is wrong.
    """
    from tuner.problem import shapes, steps

    ranks = args.tensor_parallel or 1
    model = shapes.read(args.model, without_transformers=True)
    sizes = (
        shapes.numbers(name, text) if (text := getattr(args, name)) else None
        for name in ("batch", "seqlen")
    )
    calls = steps.steps(model, engine_of(args), *sizes, dtype=args.dtype, ranks=ranks)
    for reason in steps.left_out(calls):
        print(f"left out: {reason}", file=sys.stderr)
    return calls


def engine_of(args: argparse.Namespace) -> Engine | None:
    """The named engine."""
    return ENGINES[args.engine] if args.engine else None


def answers_of(args: argparse.Namespace, gpu: Gpu, path: Path | None) -> ModelAnswers:
    """Answers to the calls of the model that the arguments name.

    Args:
        args: arguments of the command.
        gpu: GPU that the times hold for.
        path: the store's SQLite file; None: the user's.
    """
    from tuner.selection.answering import ModelAnswers

    return ModelAnswers.of(steps_of(args), gpu, path, engine_of(args))


def look_up_model(args: argparse.Namespace, gpu: Gpu, path: Path | None) -> int:
    """Print a model's calls by their share of the time, and the model's expected gain; arguments as
    of `answers_of`.
    """
    answers = answers_of(args, gpu, path)
    tell(args, answers_json(answers, gpu), _text(answers, gpu))
    return 0


def _text(answers: ModelAnswers, gpu: Gpu) -> str:
    from tuner.selection import model_table

    rows, further = model_table.shown(answers.rows())
    calls = table([model_table.CALLS, *model_table.calls(rows)], right=frozenset({0, 3}))
    steps = table([model_table.STEPS, *model_table.steps(answers)], right=frozenset({1, 2, 3, 4}))
    lines = [f"calls on {gpu.name}, by their share of the time; every step counts as much", calls]
    lines += [text] if (text := model_table.others_text(further)) else []
    lines += ["", steps, "", *(line for note in model_table.NOTES for line in wrapped(note))]
    return "\n".join(lines)


def answers_json(answers: ModelAnswers, gpu: Gpu) -> dict[str, Any]:
    """Calls, steps and gains as one JSON object."""
    from tuner.selection.model_table import WAYS

    def call(answer: Answering) -> dict[str, Any]:
        return {
            "op": answer.problem.op,
            "shape": answer.problem.label(),
            "answered_by": answer.by,
            "config": None if answer.config is None else answer.config.to_json(),
            "us": answer.us,
            "pytorch": answer.pytorch and answer.pytorch._asdict(),
            "peer": answer.peer and answer.peer._asdict(),
            "source": answer.source,
        }

    ways = dict(zip(("pytorch", "fastest"), WAYS, strict=True))
    return {
        "gpu": gpu.name,
        "calls": [{"share": row.share, **call(row.answer)} for row in answers.rows()],
        "steps": [
            {"step": step.label, **{key: answers.gain(step, way) for key, way in ways.items()}}
            for step in answers.steps
        ],
        "gain": {key: answers.mean_gain(way) for key, way in ways.items()},
    }
