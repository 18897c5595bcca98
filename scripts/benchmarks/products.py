"""``scripts/bench products``: products alone, beside PyTorch's, cuBLASLt's and DeepGEMM's.

Each call stands behind an ordinary kernel that writes its rows, weights rotated. Own kernels are
those that are built here. Results are compared with fp64 before anything is timed, and the fastest
of either side are timed once more. ``tuner`` is the rule's choice in ``scaled``, `tuner.linear` in
``narrow``, `tuner.scaled_mm` in ``rows``, and the fastest own kernel in ``e4m3``. The table also
has the best own kernel of each.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

from benchmarks import harness
from benchmarks.harness import FAILURES, Bench, Contender, Preset, Row, first_line, ratio_table
from benchmarks.moe_tables import TOKENS
from benchmarks.own_plans import build_problems, compile_specs
from benchmarks.products_ways import (
    Call,
    Tensors,
    Way,
    algorithm_ways,
    built_ways,
    ranked,
    rule_ways,
    table_ways,
    torch_ways,
)
from tuner.bench.suites import BLOCK_SCALED, BLOCK_SCALED_TOKENS
from tuner.cli import Parser
from tuner.families import families
from tuner.families.gemm.domains import MAX_FEW
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem

BUDGET_US = 2e5
"""All rounds of a product take about so long, of the finalists twice as long."""
FINALISTS = 4
"""Fastest of either side that are timed again, for longer."""
MAX_ERROR: Mapping[str, float] = {"bfloat16": 1e-2, E4M3: 1e-1}
"""Largest relative error of a result; of e4m3 also `MAX_ERROR_RATIO` times the least peer's."""
MAX_ERROR_RATIO = 1.1
FEW = 64
"""Most rows of the first group of ``scaled``."""
KINDS: Mapping[str, dict[str, Any]] = {
    "fast, tensors": {"scales": "tensor"},
    "fast, rows": {"scales": "row"},
    "promoted, tensors": {"scales": "tensor", "fast_accum": False},
    "promoted, rows": {"scales": "row", "fast_accum": False},
    "e4m3 output, tensors": {"scales": "tensor", "dtype_d": E4M3},
}
E4M3_SIZES = ((8192, 8192, 8192), (4096, 14336, 4096), (8192, 4096, 4096), (512, 14336, 4096))
"""M, N, K."""
NARROW_LAYERS: Mapping[str, tuple[int, int]] = {
    "llama-3-8b qkv": (6144, 4096),
    "llama-3-8b o": (4096, 4096),
    "llama-3-8b down": (4096, 14336),
    "llama-2-13b o": (5120, 5120),
    "llama-2-13b down": (5120, 13824),
    "qwen-2.5-7b down": (3584, 18944),
    "qwen3-32b o": (5120, 8192),
    "qwen3-32b down": (5120, 25600),
    "gemma-2-9b o": (3584, 4096),
    "mistral-nemo gate": (14336, 5120),
}
"""N and K, by the models' config.json."""
NARROW_ROWS = (64, 96, 128, 192, 256)
NARROW_KERNELS, NARROW_BUILT = 16, 64
"""Kernels of `cluster_gemm` and of `gemm`, by estimates, of a narrow product."""


@dataclass(frozen=True)
class Product:
    """A product of one kind."""

    problem: GemmProblem
    group: str

    @property
    def label(self) -> str:
        return f"{self.group}: {self.problem.label()}"


SCALED = tuple(
    Product(
        GemmProblem(m, n, k, dtype=E4M3, scales="block"), f"M {'up to' if m <= FEW else 'over'} 64"
    )
    for (n, k), m in product(BLOCK_SCALED, BLOCK_SCALED_TOKENS)
)
OPERANDS = tuple(
    Product(GemmProblem(m, n, k, dtype=E4M3, **KINDS[kind]), kind)
    for kind, (m, n, k) in product(KINDS, E4M3_SIZES)
)
ROW_FACTORS = tuple(
    Product(GemmProblem(m, n, k, dtype=E4M3, scales="row"), f"M={m}")
    for (n, k), m in product(NARROW_LAYERS.values(), (1, 8, 16, 32, 64, 128, 256))
)
NARROW = tuple(
    Product(GemmProblem(m, n, k, dtype="bfloat16"), f"M={m}")
    for (n, k), m in product(NARROW_LAYERS.values(), NARROW_ROWS)
)
FEW_HOLES = tuple(
    (m, n, k)
    for (n, k), m in product(
        ((5120, 5120), (8192, 3072), (4224, 1408), (3840, 2560)), (1, 4, 8, 16)
    )
)
"""M, N, K of bf16 products of few rows at which cuBLAS was ahead."""
SCALED_HOLES = (
    *((m, 6144, 4096) for m in (64, 96, 128, 200)),
    *((m, 2560, 8192) for m in (96, 200, 256, 2048)),
    *((m, n, k) for n, k in ((7168, 2304), (24576, 1536)) for m in (96, 200)),
    *((128, 7168, 2048), (128, 2112, 7168)),
)
"""The same with factors of blocks, where DeepGEMM was."""
TABLES = (
    *((n, 7168) for n in (512, 576, 1536, 2112, 2304, 3072, 4096, 4608, 12288, 24576, 36864)),
    *((7168, k) for k in (256, 1024, 1152, 2048, 2304, 16384, 18432)),
    *((n, k) for n, k in ((2048, 512), (4096, 512), (32768, 512), (3072, 1536), (24576, 1536))),
)
"""N and K of vLLM's tables for its Triton kernel with factors of blocks on an H200, vLLM 0.26."""
POINTS = 100
NEIGHBOURS = 15
"""Fresh products near those of either list."""


def holes(args: Namespace) -> list[Product]:
    """Products at which a peer was ahead, and others near them by the seed."""
    rng = random.Random(f"holes {args.seed}")
    kinds: dict[str, tuple[Sequence[tuple[int, int, int]], dict[str, Any]]] = {
        "few rows": (FEW_HOLES, {"dtype": "bfloat16"}),
        "factors of blocks": (SCALED_HOLES, {"dtype": E4M3, "scales": "block"}),
    }
    cases: dict[Product, None] = {}
    for group, (sizes, facts) in kinds.items():
        cases |= dict.fromkeys(Product(GemmProblem(*one, **facts), group) for one in sizes)
        for _ in range(NEIGHBOURS):
            m, *widths = rng.choice(sizes)
            rows = 2 ** rng.uniform(0, 4) if m <= MAX_FEW else m * rng.uniform(0.7, 1.3)
            n, k = (round(one * rng.uniform(0.75, 1.3) / SCALE_BLOCK) for one in widths)
            near = GemmProblem(round(rows), SCALE_BLOCK * n, SCALE_BLOCK * k, **facts)
            cases[Product(near, f"{group}, neighbours")] = None
    return list(cases)


def hole(case: Product, args: Namespace) -> Row:
    """A row of `scaled` or of `narrow`, by the product's types."""
    return scaled(case, args) if case.problem.scales else narrow(case, args)


def scaled(case: Product, args: Namespace) -> Row:
    """Times and errors with factors of blocks, of the rule's kernel or those expected near."""
    tensors = Tensors(case.problem)
    own = list(rule_ways(tensors, with_near=args.kernels, unproven=args.unproven))
    return measured(tensors, [*torch_ways(tensors), *own], own[0][0] if own else "")


def points(args: Namespace) -> list[Product]:
    """Products drawn from vLLM's tables, whose entries have as many rows as those of experts."""
    every = list(product(TABLES, TOKENS))
    drawn = random.Random(f"tables {args.seed}").sample(every, POINTS)
    return [
        Product(GemmProblem(m, n, k, dtype=E4M3, scales="block"), "tables")
        for (n, k), m in sorted(drawn)
    ]


def point(case: Product, _: Namespace) -> Row:
    """Times and errors of the rule's kernel beside vLLM's with the table's entry."""
    tensors = Tensors(case.problem)
    own = list(rule_ways(tensors, with_near=False, unproven=False))
    return measured(tensors, [*table_ways(tensors), *own], own[0][0] if own else "")


def e4m3(case: Product, _: Namespace) -> Row:
    """Times and errors with factors of operands or rows, of built kernels expected near."""
    tensors = Tensors(case.problem)
    own = built_ways(tensors, ("gemm", "block_scaled_gemm"), 6, 1.15)
    return measured(tensors, [*torch_ways(tensors), *algorithm_ways(tensors), *own])


def narrow(case: Product, _: Namespace) -> Row:
    """Times and errors of up to 256 rows in bf16, of what is served and of built kernels."""
    import tuner

    tensors = Tensors(case.problem)

    def served(i: int) -> Any:
        return tuner.linear(tensors.rows, tensors.weights[i][0])

    ways = [*torch_ways(tensors), ("tuner", lambda: served), *algorithm_ways(tensors)]
    ways += built_ways(tensors, ("gemv", "cluster_gemm"), NARROW_KERNELS)
    ways += built_ways(tensors, ("gemm",), NARROW_BUILT)
    return measured(tensors, ways)


def of_rows(case: Product, _: Namespace) -> Row:
    """Times and errors of up to 256 rows in e4m3 with factors of rows, of what is served."""
    import torch

    import tuner

    tensors = Tensors(case.problem)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def served(i: int) -> Any:
        return tuner.scaled_mm(tensors.rows, tensors.weights[i][0].t(), *tensors.factors, **options)

    return measured(tensors, [*torch_ways(tensors), ("tuner", lambda: served)])


def measured(tensors: Tensors, ways: Sequence[Way], served: str = "") -> Row:
    """A row of a product by several ways, the fastest of either side timed twice.

    Args:
        tensors: tensors of the product.
        ways: contenders, PyTorch's first.
        served: contender that is ``tuner``; empty: the fastest own kernel, if none has the name.
    """
    import torch

    calls, failed = dict[str, Call](), dict[str, str]()
    for name, make in ways:
        try:
            calls[name] = make()
        except FAILURES as exc:
            failed[name] = first_line(exc)
    with torch.inference_mode():
        errors, reasons = harness.first_outputs(calls, tensors.error)
        wrong = inexact(errors, tensors.problem.dtype)
        fit = [Contender(name, calls[name]) for name in errors if name not in wrong]
        first = harness.time_calls(fit, tensors.before, tensors.copies, BUDGET_US)
        names = {*finalists(first.us), "pytorch", "tuner", served}
        again = [one for one in fit if one.name in names]
        last = harness.time_calls(again, tensors.before, tensors.copies, 2 * BUDGET_US)
    us = dict(last.us)
    own = [name for name in us if name.split()[0] == "tuner"]
    if own and "tuner" not in us:
        us["tuner"] = us[served] if served else min(us[name] for name in own)
    if not own:
        failed["tuner"] = "no own kernel is built (tuner build, --compile-only)"
    return {
        **{"problem": tensors.problem.to_json(), "us": us, "errors": errors},
        "failed": {**failed, **reasons, **first.failed, **last.failed},
        "wrong": sorted(name for name in wrong if name in (served, "tuner")),
        "inexact": wrong,
    }


def inexact(errors: Mapping[str, float], dtype: str) -> list[str]:
    """Contenders whose error is too large, of own kernels also beside the peers'."""
    peers = [e for name, e in errors.items() if name.split()[0] != "tuner" and e == e]
    near = MAX_ERROR_RATIO * min(peers, default=inf) if dtype == E4M3 else inf
    return [
        name
        for name, error in errors.items()
        if not error <= MAX_ERROR[dtype] or (name.split()[0] == "tuner" and error > near)
    ]


def finalists(us: Mapping[str, float]) -> set[str]:
    """The `FINALISTS` fastest of either side."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(us, key=us.__getitem__):
        sides[name.split()[0] == "tuner"].append(name)
    return {name for side in sides.values() for name in side[:FINALISTS]}


def table(rows: Sequence[Row]) -> list[str]:
    """Ratios of what is served, then of the best own kernel."""
    best = []
    for row in rows:
        own = [us for name, us in row.get("us", {}).items() if name.startswith("tuner")]
        if own:
            us = {**row["us"], "tuner": min(own)}
            best.append({**row, "group": f"{row['group']}, best kernel", "us": us})
    return [*ratio_table(rows), "", *ratio_table(best)]


def compile_narrow(_: Namespace) -> None:
    """Compile the first kernels of `cluster_gemm` of each narrow product."""
    family = families()["cluster_gemm"]
    compile_specs(
        spec
        for case in NARROW
        for config in ranked(family.name, case.problem, DEFAULT_GPU)[:NARROW_KERNELS]
        for spec in family.kernels(case.problem, family.overlapped(config)).values()
    )


def options(parser: Parser) -> None:
    """Options of ``scaled``."""
    parser.add_argument(
        "--kernels", action="store_true", help="scaled: also kernels that are expected near"
    )
    parser.add_argument(
        "--unproven", action="store_true", help="scaled: also kernels that are built, not proven"
    )


def _smoke(group: str, **changes: Any) -> Product:
    return Product(GemmProblem(16, 128, 128, dtype=changes.pop("dtype", E4M3), **changes), group)


BENCH = Bench(
    "products",
    __doc__,
    {
        "scaled": Preset(
            "e4m3 with factors of blocks, untuned: layers of six models at 1 to 8192 rows",
            *(lambda _: SCALED, scaled),
            table=table,
            smoke=_smoke("scaled", scales="block"),
        ),
        "tables": Preset(
            "points of vLLM's tables for its Triton kernel, beside that kernel",
            *(points, point),
            table=table,
            smoke=_smoke("tables", scales="block"),
            compile=lambda args: build_problems(case.problem for case in points(args)),
        ),
        "e4m3": Preset(
            "e4m3 with factors of operands or rows, fast and promoted sums",
            *(lambda _: OPERANDS, e4m3),
            table=table,
            smoke=_smoke("e4m3", scales="row"),
        ),
        "rows": Preset(
            "e4m3 with factors of rows, untuned: ten layers at 1 to 256 rows, beside PyTorch's",
            *(lambda _: ROW_FACTORS, of_rows),
            table=ratio_table,
            smoke=_smoke("rows", scales="row"),
        ),
        "narrow": Preset(
            "64 to 256 rows in bf16, beside every algorithm of cuBLASLt",
            *(lambda _: NARROW, narrow),
            table=table,
            smoke=_smoke("narrow", dtype="bfloat16"),
            compile=compile_narrow,
        ),
        "holes": Preset(
            "bf16 of up to 16 rows and factors of blocks of 64 to 256, where peers were ahead",
            *(holes, hole),
            table=table,
            smoke=_smoke("holes", dtype="bfloat16"),
        ),
    },
    options,
)
