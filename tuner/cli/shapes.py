"""``tuner shapes``: list a model's problems for ``tuner sweep --problems``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.base import output
from tuner.cli.aot import say
from tuner.cli.arguments import within
from tuner.errors import ConfigError
from tuner.problem import engines, shapes
from tuner.problem.architecture import Model
from tuner.problem.engines import ENGINES
from tuner.problem.shapes import OPS, Listed

#: Options that apply only to the dense forward pass, and only to a paged cache.
DENSE, PAGED = ("batch", "decode"), ("concurrency", "page_size", "chunk")

DESCRIPTION = """Lists the problems in the forward pass of a Transformers model: attention, linear
layers, SwiGLU and experts, over ranges of batch sizes and sequence lengths. The output is JSON that
`tuner sweep --problems` reads. Layers are those of Transformers' own class, run without weights.
Without Transformers a few kinds of models are served. With --engine it lists the engine's calls of
`tuner.paged_attention`, or with --op the products of its steps."""


def _of(name: str) -> str:
    """Default of an option for each engine."""
    return ", ".join(f"{engine}: {getattr(defaults, name)}" for engine, defaults in ENGINES.items())


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "shapes", help="list the problems of a model", description=DESCRIPTION
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FILE", help="config.json of Transformers"
    )
    parser.add_argument(
        "--batch", metavar="LIST", help="as 1,8,32, or 1:32 by doubling (default 1)"
    )
    parser.add_argument(
        "--seqlen",
        metavar="LIST",
        help="tokens (default 512:4096; with --engine 1024:16384, those in the cache)",
    )
    parser.add_argument(
        "--decode", action="store_true", help="one new token; seqlen counts those in the cache"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="fp16 or bf16 (default: the model's)")
    parser.add_argument(
        "--op",
        choices=OPS,
        help="only this operation (default: all that the model has; with --engine attention)",
    )
    parser.add_argument(
        "--ranks",
        type=within(1),
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default 1)",
    )
    engine = parser.add_argument_group("paged caches")
    engine.add_argument(
        "--engine", choices=tuple(ENGINES), help="engine whose cache and steps define the problems"
    )
    engine.add_argument(
        "--concurrency", metavar="LIST", help="sequences decoded at a time (default 1,16,64,128)"
    )
    engine.add_argument(
        "--page-size", type=within(1), metavar="N", help=f"keys of a page ({_of('page_size')})"
    )
    engine.add_argument(
        "--chunk", type=within(1), metavar="N", help=f"new tokens of a step ({_of('chunk')})"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the list.

    Raises:
        ConfigError: when the model or a range is wrong.
    """
    from tuner.problem import listing, shapes

    output.check_place(args.output)
    for name in DENSE if args.engine else PAGED:
        if getattr(args, name) is not (False if name == "decode" else None):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {'not for' if args.engine else 'for'} --engine")
    model = shapes.read(args.model)
    seqlens = shapes.numbers("seqlen", args.seqlen or ("1024:16384" if args.engine else "512:4096"))
    listed = (_paged if args.engine else _dense)(args, model, seqlens)
    if not (args.dtype or model.dtype):
        say(f"the model does not say its dtype: {shapes.DEFAULT_DTYPE} is taken (--dtype)")
    if 0 < model.positions < max(seqlens):
        say(f"seqlen={max(seqlens)} is longer than the model's {model.positions} positions")
    for reason in listed.left_out:
        say(f"left out: {reason}")
    text = listing(listed.problems)
    if args.output is None:
        print(text, end="")
    else:
        output.write(args.output, text)
        say(f"{args.output}: {len(listed.problems)} problems")
    return 0


def _paged(args: argparse.Namespace, model: Model, seqlens: Sequence[int]) -> Listed:

    changes = {name: getattr(args, name) for name in ("page_size", "chunk")}
    changed = {name: value for name, value in changes.items() if value is not None}
    engine = replace(engines.ENGINES[args.engine], **changed)
    concurrencies = shapes.numbers("concurrency", args.concurrency or "1,16,64,128")
    ops = (args.op or "attention",)
    sizes = concurrencies, seqlens, args.dtype
    return engines.problems(model, engine, *sizes, ops=ops, ranks=args.ranks)


def _dense(args: argparse.Namespace, model: Model, seqlens: Sequence[int]) -> Listed:

    return shapes.problems(
        model,
        shapes.numbers("batch", args.batch or "1"),
        seqlens,
        decode=args.decode,
        dtype=args.dtype,
        ops=(args.op,) if args.op else OPS,
        ranks=args.ranks,
    )
