"""Large attention problems by own kernels of several loop orders, beside the fastest peers.

Own kernels vary the selection's first: the shape of tiles, and the orders of `ORDERS`.

The table has each order's fastest kernel over the same without the lever, and over the fastest
peer. Peers are cuDNN by PyTorch's operator, and the builds of FlashAttention-3. Errors are against
float64.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks import harness, population_kernels, rows
from benchmarks.harness import Contender, Row
from benchmarks.own_plans import compile_specs
from benchmarks.population_kernels import FAMILY, MAX_ERROR, ORDERS, Attention
from benchmarks.rows import PYTORCH
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.selection.portfolio import serving, shipped

LONG = tuple(
    Attention(AttentionProblem.parse(f"{shape},dtype=bf16,layout=bshd"))
    for shape in (
        "H=24,S=6000,D=128",
        "B=2,H=16,S=8192,D=128,causal=1",
        "H=64,HKV=8,S=8192,D=128,causal=1",
        "H=32,HKV=8,S=16384,D=128,causal=1",
        "B=4,H=8,S=4096,D=256",
        "B=2,H=16,HKV=8,S=6000,D=256,causal=1",
        "B=8,H=16,S=3000,D=64",
        "B=2,H=32,HKV=8,S=8192,D=64,causal=1",
        "H=40,S=4096,D=128,causal=1",
        "B=3,H=28,HKV=4,S=2500,D=128,causal=1",
    )
)
SMOKE = Attention(AttentionProblem.parse("H=2,S=256,D=64,dtype=bf16,layout=bshd"))
#: Warp groups and keys of a tile that are tried beside the selection's, by head dimension.
SHAPES = {128: ((2, 128), (2, 176)), 256: ((2, 80),)}
LEVERS = frozenset(name for levers in ORDERS.values() for name in levers)


def candidates(problem: AttentionProblem) -> Iterator[tuple[str, Config]]:
    """Orders and configs of a problem: the selection's first, varied.

    Raises:
        ConfigError: when no own kernel takes the problem.
    """
    (portfolio,) = (one for one in serving(shipped(), DEFAULT_GPU) if one.op == problem.op)
    selection = portfolio.select(problem)
    if selection is None:
        return
    _, first = next(selection.ranked())
    mine = int(first["warp_groups"]), int(first["tile_n"])
    shapes = dict.fromkeys((mine, *SHAPES.get(problem.head_dim, ())))
    others = {name: value for name, value in first.params.items() if name not in LEVERS}
    for (groups, tile_n), (order, levers) in product(shapes, ORDERS.items()):
        params = {**others, "warp_groups": groups, "tile_n": tile_n, **levers}
        config = Config(FAMILY.name, params)
        if not FAMILY.accepts(problem, config, DEFAULT_GPU):  # shared memory for outputs
            params.pop("stages_output", None)
            config = Config(FAMILY.name, params)
        if FAMILY.accepts(problem, config, DEFAULT_GPU):
            yield order, config


def compile_long(cases: Sequence[Attention]) -> int:
    """Compile what the cases time; 0."""
    compile_specs(
        spec
        for case in cases
        for _, config in candidates(case.problem)
        for spec in FAMILY.kernels(case.problem, config).values()
    )
    return 0


def long_measured(case: Attention, _: Namespace) -> Row:
    """Times and errors of the orders' kernels and of the peers; ``orders`` has the fastest times of
    each order.
    """
    import torch

    problem, scale, failed = case.problem, 1 / math.sqrt(case.problem.head_dim), dict[str, str]()
    torch.manual_seed(0)
    inputs = [
        torch.empty_strided(
            o.shape, o.strides, dtype=getattr(torch, problem.dtype), device="cuda"
        ).normal_()
        for o in problem.inputs
    ]
    source = inputs[0].clone()
    with torch.no_grad():
        first = max(0, problem.seqlen_q - population_kernels.CHECKED)
        query, key, value = inputs
        wanted = population_kernels.exact(
            query, key, value, scale, is_causal=problem.is_causal, first=first
        )
        named = dict(zip((o.name for o in problem.inputs), inputs, strict=True))
        orders = dict((config.digest[:6], order) for order, config in candidates(problem))
        own = population_kernels.own_contenders(
            problem, named, scale, [config for _, config in candidates(problem)]
        )
        every = [*_pytorch(problem, inputs), *own]
        every += population_kernels.peer_contenders(problem, inputs, scale, failed)
        most = MAX_ERROR[problem.dtype]
        fit, errors = population_kernels.right(
            every, lambda out: population_kernels.relative_error(out, wanted), most, failed
        )
        times = harness.time_calls(fit, lambda _: torch.add(source, 0.0, out=inputs[0]), 1)
    fastest: dict[str, float] = {}
    for name, us in times.us.items():
        if name.startswith("tuner "):
            order = orders[name.split()[1]]
            fastest[order] = min(us, fastest.get(order, math.inf))
    every_us = population_kernels.with_best(times.us, every)
    return {
        "us": every_us,
        "errors": errors,
        "failed": {**failed, **times.failed},
        "orders": fastest,
    }


def _pytorch(problem: AttentionProblem, inputs: Sequence[Any]) -> Iterable[Contender]:
    """PyTorch's operator, which is cuDNN's kernel here."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    query, key, value = inputs
    is_grouped = problem.heads_q != problem.heads_kv

    def call(_: int) -> Any:
        return sdpa(query, key, value, is_causal=problem.is_causal, enable_gqa=is_grouped)

    return [Contender(PYTORCH, call)]


def long_table(measured: Sequence[Row]) -> list[str]:
    """Ratios by mask, then each order over the same without it, and under the fastest peer."""
    lines = [("order", "over plain", "worst", "over the fastest peer", "worst")]
    for order in ORDERS:
        mine = [row for row in measured if order in row.get("orders", {})]
        plain = [one["plain"] / one[order] for row in mine if "plain" in (one := row["orders"])]
        peers = [row["us"]["tuner"] / row["orders"][order] * (rows.over_fastest(row) or math.nan)
                 for row in mine]  # fmt: skip
        lines.append((order, *rows.figures(plain), *rows.figures(peers)))
    return [*rows.ratio_table(measured), "", *rows.markdown(lines)]
