"""Products of e4m3 with factors of blocks, untuned, beside DeepGEMM's and cuBLASLt's.

``scripts/bench scaled`` times two layers of each of six models at 1 to 8192 rows, each call behind
an ordinary kernel that writes its rows, weights rotated. The own kernel is the one that the rule of
such products chooses (`families/block_scaled_gemm/rule.py`) among those proven here. The error of
each way is the relative one of the first rows and columns, against fp64 with exact factors.

``--once`` calls each way once and times nothing: ``ncu python -m benchmarks scaled --once`` counts.
It names the ways in the order of their kernels.

DeepGEMM compiles for each layer. A child process for each does that first, all of them side by
side. Then each number of rows is timed, a layer after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from math import ceil, exp, inf, log
from pathlib import Path
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.child import Worker, answer_indices, turn
from benchmarks.moe import environment
from benchmarks.moe_peers import deep_gemm
from benchmarks.own_plans import kernel_name
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.bench.suites import BLOCK_SCALED, BLOCK_SCALED_TOKENS
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.families.block_scaled_gemm import BlockScaledGemm
from tuner.measurement import Regime
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem
from tuner.selection.describe import microseconds, table

BUDGET_US = 2e5
"""All rounds of a product take about so long."""
COMPILE_LIMIT_S, ROWS_LIMIT_S = 120.0, 60.0
"""Seconds for DeepGEMM's kernels of all layers, and for the times of a number of rows."""
MAX_CHILDREN = 64
"""Processes that compile at once, at most."""
ROTATED_BYTES = 128 << 20
"""Weights of all copies: over twice the L2."""
MAX_COPIES = 16
CHECKED_ROWS, CHECKED_COLUMNS = 256, 512
"""First rows and columns that are compared with fp64."""
NEAR_ESTIMATE = 1.7
"""Longest first guess of a kernel of the space that is timed, over the shortest."""
NEAR_EXPECTED = 1.4
"""The same of expected times of the rule's kernels."""
DEEP_GEMM, CUBLASLT = "deep_gemm", "scaled_mm"


class Layer:
    """A child process: the weights of a layer.

    Args:
        n: columns.
        k: columns of the weights.
        rows: numbers of rows to time.
        with_all: also the rule's other kernels that are expected near (`NEAR_EXPECTED`).
        unproven: True to include kernels without a proof.
        with_space: also the kernels of the space that are built (`built`).
    """

    def __init__(
        self,
        n: int,
        k: int,
        rows: Sequence[int],
        *,
        with_all: bool,
        unproven: bool,
        with_space: bool = False,
    ) -> None:
        self._n, self._k, self._rows = n, k, rows
        self._with_all, self._unproven = with_all or with_space, unproven
        self._with_space = with_space
        self._weights: list[tuple[Any, Any]] = []

    def answer(self, index: int) -> dict[str, Any]:
        """Compile DeepGEMM's kernels (index 0), or time a number of rows."""
        import torch

        with torch.inference_mode():
            if index:
                return self._timed(self._rows[index - 1])
            said = []
            for m in self._rows:
                for name, _, _, failure in self._ways(m, copies=1, with_own=False):
                    if failure:
                        said.append(f"M={m},N={self._n},K={self._k}: {name}: {failure}")
            self._weights = []
            return {"said": said}

    def _ways(
        self, m: int, copies: int, *, with_own: bool = True
    ) -> Iterator[tuple[str, Callable[[int], Any], Any, str]]:
        """Name, call and result of each way, or why it failed; rows first, under no name."""
        import torch

        from tuner.runtime.products import block_scaled

        n, k = self._n, self._k
        problem = GemmProblem(m, n, k, dtype=E4M3, scales="block")
        if len(self._weights) < copies:
            self._weights = [_weights(n, k) for _ in range(copies)]
        weights = self._weights
        a, scale_a = block_scaled.quantised(torch.randn(m, k, device="cuda").bfloat16())
        yield "", lambda _: None, a, ""
        made = {DEEP_GEMM: _of_deep_gemm, CUBLASLT: _of_cublaslt}
        for name, make in made.items():
            try:
                call = make(a, scale_a, weights, n)
                yield name, call, self._error(call(0), a, scale_a), ""
            except FAILURES as exc:
                yield name, lambda _: None, None, first_line(exc)
        most = NEAR_EXPECTED if self._with_all else inf
        own_plans = plans(problem, unproven=self._unproven, most=most) if with_own else iter(())
        if with_own and self._with_space:
            own_plans = chain(own_plans, built(problem))
        for name, plan in own_plans:

            def own(i: int, plan: Any = plan) -> Any:
                b, scale_b = weights[i]
                return plan.run_uncounted(a, b.t(), scale_a, scale_b.t())

            try:
                yield name, own, self._error(own(0), a, scale_a), ""
            except FAILURES as exc:
                yield name, lambda _: None, None, first_line(exc)
            if not self._with_all:
                return

    def once(self, m: int) -> Iterator[str]:
        """A line for each way, which was called once."""
        import torch

        with torch.inference_mode():
            for name, _, _, failure in self._ways(m, copies=1):
                if name:
                    yield f"M={m},N={self._n},K={self._k}: {name}{': ' * bool(failure)}{failure}"

    def _error(self, out: Any, a: Any, scale_a: Any) -> float:
        """Relative error of the first rows and columns."""
        rows, columns = min(CHECKED_ROWS, len(a)), min(CHECKED_COLUMNS, self._n)
        b, scale_b = self._weights[0]

        def wide(factors: Any) -> Any:
            return factors.double().repeat_interleave(SCALE_BLOCK, 1)[:, : self._k]

        left = a[:rows].double() * wide(scale_a[:rows])
        of_columns = scale_b[: ceil(columns / SCALE_BLOCK)].repeat_interleave(SCALE_BLOCK, 0)
        right = b[:columns].double() * wide(of_columns[:columns])
        wanted = left @ right.t()
        found = out.view(-1, self._n)[:rows, :columns].double()
        return float((found - wanted).norm() / wanted.norm())

    def _timed(self, m: int) -> dict[str, Any]:
        import torch

        copies = min(MAX_COPIES, ceil(ROTATED_BYTES / (self._n * self._k)) + 1)
        ways, errors, failed = [], {}, {}
        rows: Any = None
        for name, call, found, failure in self._ways(m, copies):
            if not name:
                rows = found
            elif failure:
                failed[name] = failure
            else:
                errors[name] = float(f"{found:.3e}")
                ways.append(Contender(name, call))
        source, words = rows.clone().view(torch.int16), rows.view(torch.int16)

        def before(_: int) -> Any:
            return torch.bitwise_or(source, 0, out=words)

        times = time_calls(ways, before, copies, BUDGET_US)
        problem = GemmProblem(m, self._n, self._k, dtype=E4M3, scales="block")
        return {
            **{"m": m, "n": self._n, "k": self._k, "copies": copies},
            "us": {name: round(us, 2) for name, us in times.us.items()},
            "errors": errors,
            "failed": {**failed, **times.failed},
            "estimates": estimates(problem),
        }


def _weights(n: int, k: int) -> tuple[Any, Any]:
    """e4m3 elements, and factors that make sums of about one."""
    import torch

    drawn = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for part in drawn.split(8192):
        made = torch.randn(part.shape, device="cuda", dtype=torch.bfloat16)
        part.copy_(made.mul_(100.0).clamp_(-448, 448))
    shape = ceil(n / SCALE_BLOCK), ceil(k / SCALE_BLOCK)
    return drawn, (torch.rand(shape, device="cuda") + 0.5) * (k**-0.5 / 100)


def _of_deep_gemm(a: Any, scale_a: Any, weights: Sequence[tuple[Any, Any]], n: int) -> Any:
    import torch

    module = deep_gemm()
    if module is None:
        raise ImportError("DeepGEMM is not here")

    def call(i: int) -> Any:
        out = torch.empty(len(a), n, dtype=torch.bfloat16, device=a.device)
        module.fp8_gemm_nt((a, scale_a), weights[i], out)
        return out

    return call


def _of_cublaslt(a: Any, scale_a: Any, weights: Sequence[tuple[Any, Any]], n: int) -> Any:
    from torch.nn import functional

    kinds = functional.ScalingType
    if len(a) == 1:  # cuBLASLt's factors lie side by side along the rows
        scale_a = scale_a.contiguous().as_strided(scale_a.shape, (1, 1))

    def call(i: int) -> Any:
        b, scale_b = weights[i]
        return functional.scaled_mm(
            a, b.t(), scale_a, kinds.BlockWise1x128, scale_b.t(), kinds.BlockWise128x128
        )

    return call


def estimates(problem: GemmProblem) -> dict[str, float]:
    """The rule's expected times, best first, microseconds."""
    from tuner.families.block_scaled_gemm import rule as block_scaled
    from tuner.runtime.call import devices

    selection = block_scaled.select(problem, devices.gpu_of(0))
    found = selection.own() if selection is not None else ()
    return {scaled_name(config): round(us, 2) for us, config in found}


def plans(problem: GemmProblem, *, unproven: bool, most: float = inf) -> Iterator[tuple[str, Any]]:
    """The rule's kernels that are proven here, as plans, in the rule's order.

    Args:
        problem: the product.
        unproven: also kernels without a proof.
        most: longest expected time, over the shortest.
    """
    from benchmarks.own_plans import plans_of
    from tuner.families.block_scaled_gemm import rule as block_scaled
    from tuner.families.rule import RuleSelection
    from tuner.runtime.call import devices

    selection = block_scaled.select(problem, devices.gpu_of(0))
    if selection is not None:
        found = tuple(selection.own())
        near = tuple(one for one in found if one[0] <= most * found[0][0])
        selection = RuleSelection(near, Regime(), ())
    for config, plan in plans_of(problem, selection, unproven=unproven):
        yield scaled_name(config), plan


def built(problem: GemmProblem) -> Iterator[tuple[str, Any]]:
    """Built kernels of the space that are not the rule's, as plans. They have unrolled loops and
    factors by TMA, one raster each, and expected times near the shortest.
    """
    from benchmarks.own_plans import plans_of
    from tuner.families import families
    from tuner.families.block_scaled_gemm import rule as block_scaled
    from tuner.families.rule import RuleSelection
    from tuner.runtime.call import devices

    gpu = devices.gpu_of(0)
    family = families()[BlockScaledGemm.name]
    found: dict[str, tuple[float, Any]] = {}
    known = {scaled_name(config) for config in block_scaled.KERNELS}
    for config in family.space(problem, gpu):
        name = scaled_name(config)
        if "tma_factors" not in config.params or config["pdl"] or name in known:
            continue
        found.setdefault(name, (family.predict_us(problem, config, gpu), config))
    nearest = sorted(found.values(), key=lambda one: one[0])
    near = [one for one in nearest if one[0] <= NEAR_ESTIMATE * nearest[0][0]]
    selection = RuleSelection(tuple(near), Regime(), ())
    for config, plan in plans_of(problem, selection, unproven=True):
        yield scaled_name(config), plan


def scaled_name(config: Any) -> str:
    """As `kernel_name`, with the parts that K is divided into and the blocks of a cluster."""
    parts = f" k{config['split_k']}" * (config["split_k"] > 1)
    cluster = config["cluster_m"], config["cluster_n"]
    parts += f" c{cluster[0]}x{cluster[1]}" * (cluster != (1, 1))
    parts += " uniform" * ("uniform_branch" in config.params)
    parts += " ahead" * ("ahead" in config.params)
    return f"{kernel_name(config)}{parts}"


def report(document: Mapping[str, Any]) -> str:
    """A line a product, and means and worst by rows."""
    lines: list[Sequence[str]] = [
        ("M", "N", "K", "rule", "us", "best", "us", "peer", "us", "speed", "error")
    ]
    ratios: dict[str, list[float]] = {}
    for row in document["products"]:
        peer = {name: us for name, us in row["us"].items() if name in (DEEP_GEMM, CUBLASLT)}
        own = {name: us for name, us in row["us"].items() if name not in peer}
        if not own or not peer:
            continue
        first = next(name for name in row["estimates"] if name in own)
        best, fastest = min(own, key=own.__getitem__), min(peer, key=peer.__getitem__)
        ratio = peer[fastest] / own[first]
        part = "M up to 64" if row["m"] <= 64 else "M over 64"
        for name in (part, "all"):
            ratios.setdefault(name, []).append(ratio)
            ratios.setdefault(f"{name}, best kernel", []).append(peer[fastest] / own[best])
        if DEEP_GEMM in peer:
            ratios.setdefault("over DeepGEMM", []).append(peer[DEEP_GEMM] / own[first])
        error = row["errors"][first] / row["errors"].get(DEEP_GEMM, row["errors"][first])
        us = [microseconds(found) for found in (own[first], own[best], peer[fastest])]
        sizes = [str(row[name]) for name in "mnk"]
        lines.append(
            (*sizes, first, us[0], best, us[1], fastest, us[2], f"{ratio:.3f}", f"{error:.3f}")
        )
    said = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    means = [
        f"{name}: mean {exp(sum(map(log, found)) / len(found)):.3f}, "
        f"worst {min(found):.3f} of {len(found)}"
        for name, found in ratios.items()
    ]
    columns = frozenset((0, 1, 2, 4, 6, 8, 9, 10))
    note = "error: over DeepGEMM's, against fp64"
    return "\n".join([said, "", table(lines, columns), note, *means])


def measured(
    layers: Sequence[tuple[int, int]],
    rows: Sequence[int],
    options: Sequence[str],
    limit_s: float = COMPILE_LIMIT_S,
    lock: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """The row of each product, once all children have compiled.

    Args:
        layers: N and K.
        rows: numbers of rows.
        options: further options of the children.
        limit_s: seconds for DeepGEMM's kernels of all layers, which compile side by side.
        lock: as of `turn`, for the times.
    """
    options = ["--rows", ",".join(map(str, rows)), *options]

    def command(n: int, k: int) -> list[str]:
        return python_command(
            "-m", "benchmarks", "scaled", "--child", "--layers", f"{n}x{k}", *options
        )

    def compiled(worker: Worker) -> dict[str, Any]:
        return worker.ask(0, limit_s)

    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(command(*one), ROWS_LIMIT_S)) for one in layers]
        with ThreadPoolExecutor(MAX_CHILDREN) as pool:
            answers = list(pool.map(compiled, workers))
        for line in (line for answer in answers for line in answer.get("said", ())):
            print(line, file=sys.stderr, flush=True)
        stack.enter_context(turn(lock))
        for index, m in enumerate(rows, 1):
            for place, (worker, (n, k)) in enumerate(zip(workers, layers, strict=True)):
                if "lost" not in answers[place]:
                    answers[place] = worker.ask(index)
                if "lost" in answers[place]:
                    lost = answers[place]["lost"]
                    print(f"M={m},N={n},K={k}: {lost}", file=sys.stderr, flush=True)
                else:
                    yield answers[place]


def _layer(sizes: tuple[int, int], rows: Sequence[int], args: argparse.Namespace) -> Layer:
    return Layer(
        *sizes,
        rows,
        with_all=args.kernels,
        unproven=args.unproven,
        with_space=args.space,
    )


def main(argv: Sequence[str]) -> int:
    """Run it; writes the file after each product, and prints the table last.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        ConfigError: when an option is wrong.
    """
    args = _parser().parse_args(argv)
    check_place(args.json)
    try:
        rows = [int(m) for m in args.rows.split(",")]
        layers = [(int(n), int(k)) for n, k in (one.split("x") for one in args.layers.split(","))]
    except ValueError as exc:
        raise ConfigError(f"--layers or --rows: {exc} (allowed: as 7168x2048 and 64,128)") from exc
    if args.child:
        return answer_indices(_layer(layers[0], rows, args).answer)
    document: dict[str, Any] = {"environment": environment(), "products": []}
    if args.once:
        for sizes in layers:
            layer = _layer(sizes, rows, args)
            for line in (line for m in rows for line in layer.once(m)):
                print(line, flush=True)
        return 0
    options = ["--kernels"] * args.kernels + ["--unproven"] * args.unproven
    options += ["--space"] * args.space
    for row in measured(layers, rows, options, args.compile_limit, args.turn):
        document["products"].append(row)
        if args.json:
            write_json(args.json, document)
    print(report(document))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="scripts/bench scaled", description=__doc__)
    known = ",".join(f"{n}x{k}" for n, k in BLOCK_SCALED)
    parser.add_argument("--layers", default=known, metavar="NxK,...", help=f"default: {known}")
    tokens = ",".join(map(str, BLOCK_SCALED_TOKENS))
    parser.add_argument("--rows", default=tokens, metavar="M,...", help=f"default: {tokens}")
    parser.add_argument(
        "--kernels", action="store_true", help="also the rule's kernels that are expected near"
    )
    parser.add_argument(
        "--space", action="store_true", help="also the kernels of the family's space that are built"
    )
    parser.add_argument(
        "--unproven", action="store_true", help="also kernels that are built and not proven"
    )
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=COMPILE_LIMIT_S,
        metavar="SECONDS",
        help=f"for the peers of all layers, side by side (default {COMPILE_LIMIT_S:g})",
    )
    parser.add_argument(
        "--turn", type=Path, metavar="FILE", help="take the times under a lock of this file"
    )
    parser.add_argument(
        "--once", action="store_true", help="call each way once, for a profiler; time nothing"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser
