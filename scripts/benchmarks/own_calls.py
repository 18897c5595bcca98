"""``scripts/bench own_calls``: calls of models that make selections, answered by own kernels.

Their measured times say how far the selection's expected times are off where models call it. They
also say which margin an own kernel needs (`tuner fit corrections`). Calls at which the
selection chooses PyTorch's kernel are left out. Each call is measured as by
`scripts/bench population`.

``--op gemm`` takes the models' linear layers at `ROWS`, gated ones included. At `FEW` rows it takes
those with more than `SMALL_MB` of weights; `scripts/bench layers --max-mb` measures the others.
``--op attention`` takes drawn calls of one query, of few queries, and causal prompts, without a
window, a soft cap or a mask. Calls follow each other by turns over the domains.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.layers import layers
from benchmarks.population import listed_or_measured
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.problem.population import ModelCall, draw, subset
from tuner.selection.choice import Selection
from tuner.selection.domains import AttentionDomain
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu

MODELS = "making"
FEW = (1, 2, 4, 8, 16)
ROWS = (32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
SMALL_MB = 12.0
SEED, CALLS = "calibration of 27 November", 6000
"""Draw that calls of attention are taken from."""
MOST = {"gemm": 40, "attention": 30}
"""Most calls of a domain."""
OFTEN = {"gemm": ("M to 16", "M to 256", "M above 256"), "attention": ("one query",)}
"""Labels of domains that have more calls: `MORE` times as many a turn."""
MORE = {"gemm": 2, "attention": 3}
MAX_US = 3000.0
"""Longest expected time of a call."""
LIMIT_S = 40.0


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure; 1 when an output was wrong or a call has no time."""
    args = _parser().parse_args(argv)
    calls = by_turns(args.op, own(args.op, find_gpu(args.gpu)))
    return listed_or_measured("own_calls", calls, {"op": args.op}, args, argv, LIMIT_S)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench own_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", choices=tuple(MOST), default="gemm", help="default gemm")
    parser.add_argument("--gpu", default="H200", help="GPU whose selections are asked")
    parser.add_argument("--list", action="store_true", help="print the calls; no GPU")
    parser.add_argument("--json", type=Path, metavar="OUT", help="JSON lines, gone on with")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no call after this",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def own(op: str, gpu: Gpu) -> dict[str, list[ModelCall]]:
    """The calls by the label of their domain.

    Args:
        op: ``gemm`` (gated products among them) or ``attention``.
        gpu: GPU whose selections are asked.
    """
    portfolios = {one.op: one for one in serving(shipped(), gpu)}
    found: dict[str, dict[str, ModelCall]] = defaultdict(dict)
    for call in _products() if op == "gemm" else _attention():
        selection = _chosen(call, portfolios)
        if selection is None or (op == "attention" and not _is_plain(selection)):
            continue
        found[selection.domain.label()].setdefault(call.key, call)
    return {label: list(calls.values()) for label, calls in found.items()}


def by_turns(op: str, found: Mapping[str, Sequence[ModelCall]]) -> list[ModelCall]:
    """At most `MOST` calls of a domain, by turns over the domains."""
    calls = list[ModelCall]()
    for turn in range(MOST[op]):
        for label in sorted(found):
            width = MORE[op] if label.endswith(OFTEN[op]) else 1
            calls += found[label][turn * width : (turn + 1) * width]
    return calls


def _products() -> Iterator[ModelCall]:
    names = [model.name for model in subset(MODELS)]
    yield from layers(names, ROWS)
    small = {call.key for call in layers(names, FEW, SMALL_MB * 1e6)}
    for call in layers(names, FEW):
        if call.key not in small and call.problem.op == "gemm":
            yield call


def _attention() -> Iterator[ModelCall]:
    for call in draw(SEED, CALLS, subset(MODELS)):
        if call.views and not call.mask:
            yield call


def _is_plain(selection: Selection) -> bool:
    domain = selection.domain
    assert isinstance(domain, AttentionDomain)
    if domain.has_softcap or domain.operand or domain.mask == "windowed":
        return False
    return domain.phase != "prompt" or domain.mask == "causal"


def _chosen(call: ModelCall, portfolios: Mapping[str, Portfolio]) -> Selection | None:
    """The selection of an own kernel; None where PyTorch's is chosen or the call is long."""
    from benchmarks.population_tensors import posed

    try:
        problem = posed(call)
    except ConfigError:
        return None
    selection = portfolios[problem.op].select(problem)
    if selection is None or selection.expected_us > MAX_US:
        return None
    return selection if next(selection.own(), None) else None


if __name__ == "__main__":
    sys.exit(main())
