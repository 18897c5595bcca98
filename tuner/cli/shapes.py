"""``tuner shapes``: the problems of a model, as a list for ``tuner sweep --problems``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tuner.problem.shapes import OPS

DESCRIPTION = """Lists the attention, GEMM and SwiGLU problems of a dense Transformers model's
forward pass for ranges of batch sizes and sequence lengths, as JSON that `tuner sweep --problems`
reads. SwiGLU is both up projections of a gated layer as one kernel (`tuner.swiglu`)."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "shapes", help="list the problems of a model", description=DESCRIPTION
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FILE", help="config.json of Transformers"
    )
    parser.add_argument(
        "--batch", default="1", metavar="LIST", help="as 1,8,32, or 1:32 by doubling (default 1)"
    )
    parser.add_argument(
        "--seqlen", default="512:4096", metavar="LIST", help="tokens (default 512:4096)"
    )
    parser.add_argument(
        "--decode", action="store_true", help="one new token; seqlen counts those in the cache"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="fp16 or bf16 (default: the model's)")
    parser.add_argument(
        "--op", choices=OPS, help="only this operation (default: all that the model has)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the list.

    Raises:
        ConfigError: when the model or a range is wrong.
    """
    from tuner.base import output
    from tuner.problem import listing, shapes

    output.check_place(args.output)
    model = shapes.Model.read(args.model)
    seqlens = shapes.numbers("seqlen", args.seqlen)
    found = shapes.problems(
        model,
        shapes.numbers("batch", args.batch),
        seqlens,
        decode=args.decode,
        dtype=args.dtype,
        ops=(args.op,) if args.op else OPS,
    )
    longest = max(seqlens)
    if 0 < model.positions < longest:
        _note(f"seqlen={longest} is longer than the model's {model.positions} positions")
    if 0 < model.window < longest:
        _note(f"attention over more than its window of {model.window} keys is left out")
    text = listing(found)
    if args.output is None:
        print(text, end="")
    else:
        output.write(args.output, text)
        _note(f"{args.output}: {len(found)} problems")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr)
