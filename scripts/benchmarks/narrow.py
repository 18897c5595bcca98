"""Products of 64 to 256 rows by own kernels, beside every algorithm of cuBLASLt.

``scripts/bench narrow`` times ten layers of public models, bf16, each call behind an ordinary
kernel that writes its rows, weights rotated. cuBLASLt's time is that of the fastest algorithm that
its heuristic lists; cuBLAS's is `torch.mm`'s own choice. Own kernels are compiled first. They are
checked against fp32 before they are timed.

``--kernels`` is how many kernels of `cluster_gemm` take part, by its estimates: a small sweep.
Kernels of `gemm` take part where they are compiled already, with ``--built`` the first ones by the
family's estimates. ``--served`` also times what `tuner.linear` launches.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, exp, log
from pathlib import Path
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.moe import environment
from benchmarks.own_plans import own_plan
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.problem import GemmProblem
from tuner.selection.describe import microseconds, table

LAYERS: Mapping[str, tuple[int, int]] = {
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
ROWS = (64, 96, 128, 192, 256)
FAMILY, BUILT_FAMILY = "cluster_gemm", "gemm"
"""Own kernels that are compiled here, and those that take part where they are built."""
ALGORITHMS = 16
"""Algorithms of cuBLASLt that are timed, the first of its list."""
BUDGET_US = 1e5
"""All rounds of a product take about so long, of the fastest once more as long."""
FINALISTS = 4
"""Fastest of either side that are timed again, for longer."""
ROTATED_BYTES = 128 << 20
"""Weights of all copies: over twice the L2."""
MAX_COPIES = 16
MAX_ERROR = 1e-2
"""Largest relative error of a result, in the Frobenius norm: bf16 rounds to 2e-3."""
CUBLAS, CUBLASLT, SERVED = "cublas", "cublaslt", "served"


def problems(rows: Sequence[int]) -> Iterator[GemmProblem]:
    """The products, a layer after the other."""
    for n, k in LAYERS.values():
        for m in rows:
            yield GemmProblem(m, n, k, dtype="bfloat16")


def ranked(name: str, problem: GemmProblem, gpu: Any) -> list[Config]:
    """A family's kernels by its estimates, one config each."""
    from tuner.families import families

    family = families()[name]
    kernels: dict[str, Config] = {}
    space = family.space(problem, gpu)
    for config in sorted(space, key=lambda one: family.predict_us(problem, one, gpu)):
        kernels.setdefault(family.compile_digest(config), config)
    return [family.overlapped(config) for config in kernels.values()]


Kernels = Mapping[Config, Mapping[str, str]]
"""Artifacts of each config."""


def compiled(
    products: Sequence[GemmProblem], count: int, most_built: int, gpu: Any, limit_s: float
) -> dict[GemmProblem, Kernels]:
    """Kernels of each product that are built, or were compiled in time.

    Args:
        products: products to compute.
        count: kernels of `FAMILY` a product.
        most_built: most kernels of `BUILT_FAMILY` a product.
        gpu: that they run on.
        limit_s: seconds.
    """
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain
    from tuner.errors import TunerError
    from tuner.families import families

    found: dict[GemmProblem, dict[Config, Mapping[str, str]]] = {one: {} for one in products}
    built: dict[str, str] = {}
    deadline = time.monotonic() + limit_s
    compiler = Compiler(find_toolchain(), ArtifactCache(), jobs=os.cpu_count())
    try:
        under_way = []
        for problem in products:
            for config in ranked(FAMILY, problem, gpu)[:count]:
                [(name, spec)] = families()[FAMILY].kernels(problem, config).items()
                [(_, future)] = compiler.submit([spec])
                under_way.append((problem, config, name, future))
            family = families()[BUILT_FAMILY]
            for config in ranked(BUILT_FAMILY, problem, gpu):
                if len(found[problem]) >= most_built:
                    break
                [(name, spec)] = family.kernels(problem, config).items()
                if spec.key not in built:
                    artifact = compiler.cached(spec)
                    built[spec.key] = "" if artifact is None else artifact.key
                if built[spec.key]:
                    found[problem][config] = {name: built[spec.key]}
        for problem, config, name, future in under_way:
            try:
                artifact = future.result(max(0.0, deadline - time.monotonic()))
                found[problem][config] = {name: artifact.key}
            except (TunerError, TimeoutError) as exc:
                print(f"{problem.label()}: not compiled: {first_line(exc)}", file=sys.stderr)
    finally:
        compiler.close(cancel=True)
    return dict(found)


def algorithms(
    problem: GemmProblem, rows: Any, weights: Sequence[Any], *factors: Any
) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Calls of the algorithms that cuBLASLt's heuristic lists first, by the copy of the weights.

    Args:
        problem: product.
        rows: (M, K).
        weights: copies of (N, K).
        factors: factors of the sums, one axis each.
    """
    from tuner.families import families

    family = families()["vendor_cublaslt_search"]
    for index, config in enumerate(family.listing(problem, None)[:ALGORITHMS]):
        call = family.vendor_call(problem, config, 1.0)
        if not isinstance(call, str):

            def run(i: int, call: Any = call) -> Any:
                return call(rows.unsqueeze(0), weights[i].t().unsqueeze(0), *factors)

            yield f"{CUBLASLT} {index}", run


class Calls:
    """A product's tensors.

    Args:
        problem: the product.
    """

    def __init__(self, problem: GemmProblem) -> None:
        import torch

        m, n, k = problem.m, problem.n, problem.k
        self.problem = problem
        self.copies = min(MAX_COPIES, ceil(ROTATED_BYTES / (2 * n * k)) + 1)
        self.source = torch.randn(m, k, device="cuda").bfloat16()
        self.rows = self.source.clone()
        self.weights = [
            torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_(std=k**-0.5)
            for _ in range(self.copies)
        ]
        self.wanted = self.rows.float() @ self.weights[0].float().t()

    def before(self, _: int) -> Any:
        """Write the rows."""
        import torch

        return torch.add(self.source, 0.0, out=self.rows)

    def own(self, config: Config, artifacts: Mapping[str, str]) -> Callable[[int], Any]:
        """A kernel's call.

        Raises:
            RuntimeError: when it has no plan.
        """
        plan = own_plan(self.problem, config, artifacts)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        return lambda i: plan.run_uncounted(self.rows, self.weights[i].t())

    def vendors(self) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """CuBLAS's choice, and cuBLASLt's algorithms."""
        import torch

        yield CUBLAS, lambda i: torch.mm(self.rows, self.weights[i].t())
        yield from algorithms(self.problem, self.rows, self.weights)

    def served(self, i: int) -> Any:
        """The kernel that `tuner.linear` launches."""
        import tuner

        return tuner.linear(self.rows, self.weights[i])

    def is_right(self, call: Callable[[int], Any]) -> float:
        """Relative error of the first copy's product."""
        found = call(0).view(self.problem.m, self.problem.n).float()
        return float((found - self.wanted).norm() / self.wanted.norm())


def name_of(config: Config) -> str:
    """Family and parameters of a kernel, short."""
    left = {
        name: value
        for name, value in config.params.items()
        if name not in ("stages", "raster_order", "max_swizzle_size", "pdl", "epilogue_schedule")
    }
    return f"{config.family} " + ",".join(
        f"{name}={value if isinstance(value, str) else int(value)}"
        for name, value in sorted(left.items())
    )


def timed(problem: GemmProblem, kernels: Kernels, *, with_served: bool) -> dict[str, Any]:
    """Times of a product by all ways, the fastest of either side twice."""
    import torch

    calls, failed, ways = Calls(problem), {}, []
    made: list[tuple[str, Callable[[], Callable[[int], Any]]]] = []
    for config, artifacts in kernels.items():
        made.append((name_of(config), lambda c=config, a=artifacts: calls.own(c, a)))  # type: ignore[misc]
    if with_served:
        made.append((SERVED, lambda: calls.served))
    for name, call in calls.vendors():
        made.append((name, lambda call=call: call))  # type: ignore[misc]
    for name, make in made:
        try:
            call = make()
            error = calls.is_right(call)
            torch.cuda.synchronize()
        except FAILURES as exc:
            failed[name] = first_line(exc)
            continue
        if error < MAX_ERROR:
            ways.append(Contender(name, call))
        else:
            failed[name] = f"relative error {error:.2e}"
    first = time_calls(ways, calls.before, calls.copies, BUDGET_US)
    names = {*finalists(first.us, lambda name: name.startswith(CUBLAS)), CUBLAS, SERVED}
    again = [way for way in ways if way.name in names]
    last = time_calls(again, calls.before, calls.copies, 2 * BUDGET_US)
    return {
        **{"m": problem.m, "n": problem.n, "k": problem.k, "copies": calls.copies},
        "us": {name: round(us, 3) for name, us in last.us.items()},
        "quick_us": {name: round(us, 3) for name, us in first.us.items()},
        "failed": {**failed, **first.failed, **last.failed},
    }


def finalists(us: Mapping[str, float], is_peer: Callable[[str], bool]) -> set[str]:
    """The `FINALISTS` fastest of either side."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(us, key=us.__getitem__):
        sides[is_peer(name)].append(name)
    return {*sides[True][:FINALISTS], *sides[False][:FINALISTS]}


def report(document: Mapping[str, Any]) -> str:
    """A line a product, means and worst by rows and of all."""
    lines: list[Sequence[str]] = [
        ("M", "N", "K", "cublaslt", "cublas", "own", "served", "speed", "kernel")
    ]
    ratios: dict[str, list[float]] = {}
    for row in document["products"]:
        us = row["us"]
        listed = [time for name, time in us.items() if name.startswith(f"{CUBLASLT} ")]
        own = {
            name: time
            for name, time in us.items()
            if not name.startswith(CUBLAS) and name != SERVED
        }
        if not listed or not own:
            continue
        best, fastest = min(own, key=own.__getitem__), min(*listed, us.get(CUBLAS, listed[0]))
        for name in (f"M={row['m']}", "all"):
            ratios.setdefault(name, []).append(fastest / own[best])
        if SERVED in us:
            ratios.setdefault("served", []).append(fastest / us[SERVED])
        shown = (min(listed), us.get(CUBLAS), own[best], us.get(SERVED))
        lines.append(
            (
                *(str(row[name]) for name in "mnk"),
                *("" if time is None else microseconds(time) for time in shown),
                f"{fastest / own[best]:.3f}",
                best,
            )
        )
    said = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    means = [
        f"{name}: mean {exp(sum(map(log, found)) / len(found)):.3f}, "
        f"worst {min(found):.3f} of {len(found)}"
        for name, found in ratios.items()
    ]
    return "\n".join([said, "", table(lines, frozenset(range(8))), *means])


def main(argv: Sequence[str]) -> int:
    """Run it; writes the file after each product, and prints the table last.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        CompileError: without a compiler.
        ConfigError: when an option is wrong.
    """
    parser = Parser(prog="scripts/bench narrow", description=__doc__)
    known = ",".join(map(str, ROWS))
    parser.add_argument("--rows", default=known, metavar="M,...", help=f"default: {known}")
    parser.add_argument(
        "--kernels", type=int, default=16, metavar="N", help="own kernels a product (default 16)"
    )
    parser.add_argument(
        "--built", type=int, default=64, metavar="N", help="most built kernels (default 64)"
    )
    parser.add_argument("--served", action="store_true", help="also `tuner.linear`")
    parser.add_argument(
        "--compile", action="store_true", help="only compile the kernels; needs no GPU"
    )
    parser.add_argument(
        "--compile-limit", type=float, default=120.0, metavar="SECONDS", help="default: 120"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    try:
        rows = [int(m) for m in args.rows.split(",")]
    except ValueError as exc:
        raise ConfigError(f"--rows {args.rows}: {exc} (allowed: as 64,128)") from exc
    from tuner.hardware import GPUS

    gpu = GPUS["H100"]
    products = list(problems(rows))
    about = {} if args.compile else environment()  # before the kernels are compiled
    artifacts = compiled(products, args.kernels, args.built, gpu, args.compile_limit)
    if args.compile:
        print(f"{sum(map(len, artifacts.values()))} kernels of {len(artifacts)} products")
        return 0
    document: dict[str, Any] = {"environment": about, "products": []}
    for problem, kernels in artifacts.items():
        document["products"].append(timed(problem, kernels, with_served=args.served))
        if args.json:
            write_json(args.json, document)
    print(report(document))
    return 0
