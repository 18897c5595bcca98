"""``scripts/bench layers``: the linear layers of ten public models at 1 to 8192 rows, by the tuner
and by PyTorch.

The models are held out from the selection. Each linear layer is called at every number of `ROWS`,
in the model's type. Weights are cold, and each call stands behind an element-wise kernel
(`benchmarks.population_calls`). Nothing was tuned for them. ``--count N`` measures the first N of
an order by hash, which is the same on every machine. Layers of equal sizes are called once.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.population import listed_or_measured, read
from benchmarks.population_report import report
from tuner.cli import Parser
from tuner.problem import GemmProblem, Problem, SwigluProblem
from tuner.problem.population import (
    HALF_TYPES,
    MAX_BYTES,
    MAX_FLOPS,
    ModelCall,
    linears,
    subset,
)

MODELS = (
    *("bert-base", "bloom-7b1", "gemma-2-9b", "gpt2", "llama-2-13b", "llama-2-7b", "mpt-7b"),
    *("olmo-2-7b", "qwen2.5-7b", "vit-base-16"),
)
"""Held-out models of text and vision."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LIMIT_S = 60.0
"""Seconds for each call."""


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure; 1 when an output was wrong or a call has no time."""
    args = _parser().parse_args(argv)
    if args.report:
        print(report(list(read(args.report).values())))
        return 0
    calls = layers(args.models.split(","), args.rows, args.max_mb * 1e6)[: args.count]
    return listed_or_measured("layers", calls, {"models": args.models}, args, argv, LIMIT_S)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between")
    parser.add_argument(
        "--rows", type=_numbers, default=ROWS, help="numbers with commas between (default: 1..8192)"
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=math.inf,
        metavar="MB",
        help="only layers whose weights have at most so many MB",
    )
    parser.add_argument("--count", type=int, help="only so many calls (default: all)")
    parser.add_argument("--list", action="store_true", help="print the calls and lookup results")
    parser.add_argument("--gpu", default="H100", help="with --list: GPU that is asked about")
    parser.add_argument("--json", type=Path, metavar="OUT", help="JSON lines, gone on with")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print such a file's tables")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no call after this",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def layers(
    names: Sequence[str], rows: Sequence[int] = ROWS, max_bytes: float = math.inf
) -> list[ModelCall]:
    """Calls of the models' linear layers at each number of rows, once each, in an order by hash.

    Args:
        names: models, as `subset` takes them.
        rows: numbers of rows.
        max_bytes: most bytes of a layer's weights, 2 for each element.

    Raises:
        ConfigError: when a model is not known.
    """
    found: dict[str, ModelCall] = {}
    for model in subset(",".join(names)):
        dtype = HALF_TYPES[0] if model.dtype == "float32" else model.dtype
        for stack in model.stacks:
            for name, (n, k, epilogue) in linears(stack).items():
                for m in rows if 2 * n * k <= max_bytes else ():
                    problem: Problem = (
                        SwigluProblem(m, n, k, dtype=dtype)
                        if name == "swiglu"
                        else GemmProblem(m, n, k, dtype=dtype, epilogue=epilogue)
                    )
                    call = ModelCall(model.name, stack.name, name, 1, problem)
                    if call.bytes <= MAX_BYTES and problem.flops <= MAX_FLOPS:
                        found.setdefault(call.key, call)
    return sorted(found.values(), key=lambda one: hashlib.sha256(one.key.encode()).hexdigest())
