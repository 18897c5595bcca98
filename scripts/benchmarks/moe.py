"""Layers of experts by `tuner.moe`, beside the fastest compositions of peers.

``scripts/bench moe`` times layers of public mixtures with random weights, each behind an ordinary
kernel that writes the tokens. Experts are drawn evenly or by Zipf's law. Peers of bf16 are
PyTorch's operations around `torch._grouped_mm`, as they are and through `torch.compile`. Peers of
e4m3 are compiled operations around DeepGEMM's grouped kernels, in both of its layouts. They compile
at the first case of a layer and a number of rows. Errors are distances from the first peer.

The preset ``products`` times both grouped products of a layer alone, by each proven kernel of the
rule and by DeepGEMM's. There ``tuner`` is the rule's first kernel, and ``tuner TILE`` any of them.
The preset ``tables`` draws points of vLLM's tables, beside its Triton kernel with their entries.
With ``--forced`` it times the grouped products and each tile of `EXPERT_PRODUCTS` too.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import harness, moe_layers, moe_products, moe_tables
from benchmarks.harness import Bench, Contender, Preset, Row
from benchmarks.moe_layers import ROWS, Case, Product, Sizes, counts_of, routed, weights_of
from benchmarks.moe_peers import Peers, peers_of
from benchmarks.own_plans import build_problems
from tuner.cli import Parser

BUDGET_US = 2e5
"""All rounds of a case take about so long; the layers take milliseconds, and there are many."""


def measure(case: Case, args: Namespace) -> Row:
    """Times of a case beside the compositions."""
    return measured(case, args, peers_of(case.dtype))


def beside_tables(case: Case, args: Namespace) -> Row:
    """Times of a case beside vLLM's Triton kernel with its table's entry."""
    return measured(case, args, moe_tables.peers_of(case.dtype))


def measured(case: Case, args: Namespace, peers: Peers) -> Row:
    """Times of a case, and how far the results are from the first peer's."""
    import torch

    import tuner

    with torch.inference_mode():
        matrices, scales = weights_of(case.sizes, case.dtype)
        torch.manual_seed(3)
        source = torch.randn(case.tokens, case.sizes.hidden, device="cuda").bfloat16()
        hidden, (experts, by) = source.clone(), routed(case)
        factors = dict(zip(("gate_up_scale", "down_scale"), scales, strict=True))
        served = partial(tuner.moe, hidden, experts, by, *matrices, **factors)
        calls = {"tuner": harness.every_copy(served)}
        for name, peer in peers.items():
            composed = partial(peer, hidden, experts, by, *matrices, *scales)
            calls[name] = harness.every_copy(composed)
        for rows in (0, 16, 32, 64) if args.forced and case.dtype == "bf16" else ():
            way = partial(forced, rows, served)
            calls[f"tuner {rows or 'grouped'}"] = harness.every_copy(way)
        tuner.stats(reset=True)
        outs, failed = harness.first_outputs(calls, lambda out: out.float())
        answered = tuner.stats()
        names = [name for name in outs if not name.startswith("tuner")]
        ways = [Contender(name, calls[name]) for name in outs]
        before = harness.every_copy(partial(torch.add, source, 0.0, out=hidden))
        times = harness.time_calls(ways, before, 1, BUDGET_US)
    return {
        **counts_of(case, experts)[1],
        "us": {name: round(us, 2) for name, us in times.us.items()},
        "errors": {
            name: round(harness.distance(out, outs[names[0]]), 5)
            for name, out in outs.items()
            if names and name != names[0]
        },
        "failed": {**failed, **times.failed},
        "hits": answered.hits,
        "fallbacks": dict(answered.fallbacks),
    }


def forced(rows: int, call: Callable[[], Any]) -> Any:
    """Return value of a call by tiles of so many rows, or by grouped products if there are none."""
    from tuner.runtime.products import expert_products

    choice = expert_products.tile_rows
    expert_products.tile_rows = lambda *_: rows
    try:
        return call()
    finally:
        expert_products.tile_rows = choice


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--forced", action="store_true", help="also by grouped products, and by each tile")
    numbers = "rows of all experts (default 128 1024 8192)"
    add("--rows", type=int, nargs="+", default=ROWS, metavar="N", help=numbers)
    add("--unproven", action="store_true", help="products: also kernels that are only built")


BENCH = Bench(
    "moe",
    __doc__,
    {
        "layers": Preset(
            "layers of experts, from the router's choice on",
            moe_layers.cases,
            measure,
            smoke=Case("small", Sizes(4, 2, 256, 128), "bf16", 16, "zipf"),
        ),
        "products": Preset(
            "both grouped products alone, by each kernel of the rule",
            moe_layers.products,
            moe_products.measure,
            table=moe_products.table,
            smoke=Product("small", Sizes(4, 2, 256, 128), "bf16", 16, "zipf", "up"),
        ),
        "tables": Preset(
            "200 points of vLLM's tables for its Triton kernel, beside that kernel",
            moe_tables.cases,
            beside_tables,
            smoke=Case("small", Sizes(4, 2, 256, 128), "bf16", 16, "uniform"),
            compile=lambda args: build_problems(moe_tables.problems(args)),
        ),
    },
    _options,
)
