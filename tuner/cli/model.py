"""Calls of a model by their share of the time: shared arguments, and ``tuner lookup --model``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import ConfigError

if TYPE_CHECKING:
    from tuner.hardware import Gpu
    from tuner.problem.engines import Engine
    from tuner.problem.steps import ModelStep
    from tuner.selection.answering import Answering, AnswerRow, ModelAnswers, Rival

SHOWN = 0.95
"""Share of the calls' time whose calls are listed, the longest first."""
WAYS = ("PyTorch", "peer")
"""Rivals that a step is compared with (`ModelAnswers.gain`)."""
_OPTIONS = ("engine", "tensor_parallel", "batch", "seqlen", "dtype")
"""Options that are for ``--model`` only."""


def add_model(parser: argparse.ArgumentParser, what: Any) -> None:
    """Add ``--model`` to a group of which one option is named, and the options that go with it."""
    from tuner.problem.engines import ENGINES

    what.add_argument("--model", type=Path, metavar="FILE", help="config.json of Transformers")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help="engine that runs the model over a paged cache (default: Transformers' generate)",
    )
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="ranks (default 1)")
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

    ranks = 1 if args.tensor_parallel is None else args.tensor_parallel
    if ranks < 1:
        raise ConfigError(f"--tensor-parallel {ranks} is out of range (allowed: 1 and more)")
    model = shapes.read(args.model, without_transformers=True)
    sizes = (
        shapes.numbers(name, text) if (text := getattr(args, name)) else None
        for name in ("batch", "seqlen")
    )
    found = steps.steps(model, engine_of(args), *sizes, dtype=args.dtype, ranks=ranks)
    for reason in steps.left_out(found):
        print(f"left out: {reason}", file=sys.stderr)
    return found


def engine_of(args: argparse.Namespace) -> Engine | None:
    """The named engine."""
    from tuner.problem.engines import ENGINES

    return ENGINES[args.engine] if args.engine else None


def look_up_model(args: argparse.Namespace, gpu: Gpu, path: Path | None) -> int:
    """Print a model's calls by their share of the time, and the model's expected gain.

    Args:
        args: arguments of the command.
        gpu: GPU that the times hold for.
        path: the store's SQLite file.
    """
    from tuner.selection.answering import ModelAnswers

    found = ModelAnswers.of(steps_of(args), gpu, path, engine_of(args))
    if args.json:
        print(json.dumps(_json(found, gpu)))
    else:
        print(_text(found, gpu))
    return 0


def _text(found: ModelAnswers, gpu: Gpu) -> str:
    from tuner.selection.describe import cut, microseconds, table

    def rival(one: Rival | None) -> str:
        return "-" if one is None else f"{microseconds(one.us)} {one.name}"

    heading = ("share", "call", "answered by", "us", "instead", "fastest peer", "source")
    rows, others = _shown(found.rows())
    lines = [
        (
            f"{100 * row.share:.1f} %",
            cut(f"{row.answer.problem.op} {row.answer.problem.label()}", 90),
            row.answer.by,
            microseconds(row.answer.us),
            rival(row.answer.pytorch),
            rival(row.answer.peer),
            row.answer.source,
        )
        for row in rows
    ]
    text = table([heading, *lines], right=frozenset({0, 3}))
    if others:
        share = 100 * sum(row.share for row in others)
        text += f"\n{len(others)} further calls have {share:.1f} % of the time"
    steps: list[tuple[str, ...]] = [("step", "gain", "over the fastest")]
    for step in found.steps:
        steps.append(
            (step.label, *(f"{found.gain(step, way):.2f}x" for way in ("PyTorch", "peer")))
        )
    steps.append(("mean", *(f"{found.mean_gain(way):.2f}x" for way in ("PyTorch", "peer"))))
    return (
        f"calls on {gpu.name}, by their share of the time; every step counts as much\n{text}\n\n"
        f"{table(steps, right=frozenset({1, 2}))}\n"
        "Instead: PyTorch's kernel, or the engine's own attention. Gains are ratios of the listed "
        "calls' times only; a call without such a time counts with its own.\n"
        "Predicted times are expected ones; peers have times where they, or ratios near the call, "
        "were measured."
    )


def _shown(rows: Sequence[AnswerRow]) -> tuple[list[AnswerRow], list[AnswerRow]]:
    """Rows up to `SHOWN` of the time, and the others."""
    total = 0.0
    for count, row in enumerate(rows, 1):
        total += row.share
        if total >= SHOWN:
            return list(rows[:count]), list(rows[count:])
    return list(rows), []


def _json(found: ModelAnswers, gpu: Gpu) -> dict[str, Any]:
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
        "calls": [{"share": row.share, **call(row.answer)} for row in found.rows()],
        "steps": [
            {"step": step.label, **{key: found.gain(step, way) for key, way in ways.items()}}
            for step in found.steps
        ],
        "gain": {key: found.mean_gain(way) for key, way in ways.items()},
    }
