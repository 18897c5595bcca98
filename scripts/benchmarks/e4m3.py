"""Products of e4m3 with factors of operands or of rows, beside `torch._scaled_mm` and cuBLASLt.

``scripts/bench e4m3`` times both sums, fast and promoted, and outputs of e4m3 with a factor of
their own. Each call stands behind an ordinary kernel that writes its rows, weights rotated. Own
kernels are those that are built here and expected near the best. cuBLASLt's time is that of the
fastest algorithm that its heuristic lists, where it takes the call.

The error of each way is the relative one of the first rows and columns, against fp64 with exact
factors. An own kernel with a larger one than the peers is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import ceil, exp, inf, isfinite, log
from pathlib import Path
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.moe import environment
from benchmarks.narrow import MAX_COPIES, ROTATED_BYTES, algorithms, finalists, name_of, ranked
from benchmarks.own_plans import built_artifacts, own_plan
from benchmarks.scaled import CHECKED_COLUMNS, CHECKED_ROWS
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.problem import E4M3, GemmProblem
from tuner.selection.describe import microseconds, table

SIZES = ((8192, 8192, 8192), (4096, 14336, 4096), (8192, 4096, 4096), (512, 14336, 4096))
"""M, N, K."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "fast, tensors": {"scales": "tensor"},
    "fast, rows": {"scales": "row"},
    "promoted, tensors": {"scales": "tensor", "fast_accum": False},
    "promoted, rows": {"scales": "row", "fast_accum": False},
    "e4m3 output, tensors": {"scales": "tensor", "dtype_d": E4M3},
}
FAMILIES = ("gemm", "block_scaled_gemm")
KERNELS, NEAR_ESTIMATE = 6, 1.15
"""Most kernels of a family that are timed, and their longest expected time, over the shortest."""
BAND = 8
"""Tiles of the other side that are walked together when a kernel is launched once more."""
BUDGET_US = 2e5
"""All rounds of a product take about so long, of the fastest once more twice as long."""
TORCH, CUBLASLT = "scaled_mm", "cublaslt"
MAX_ERROR_RATIO = 1.1
"""Largest error of an own kernel that is timed, over the least of a peer."""


def name_with_band(config: Config) -> str:
    """As `name_of`, with the tiles that are walked together."""
    return f"{name_of(config)},max_swizzle_size={config.get('max_swizzle_size', 1)}"


def problem_of(kind: str, size: tuple[int, int, int]) -> GemmProblem:
    """A product of one of `KINDS`."""
    return GemmProblem(*size, dtype=E4M3, **KINDS[kind])


def built(problem: GemmProblem, gpu: Any) -> Iterator[tuple[Config, dict[str, str]]]:
    """Built kernels and their artifacts, a family after the other, in the order of estimates."""
    from tuner.families import families

    for family in (families()[name] for name in FAMILIES):
        if family.supports(problem, gpu):
            continue
        configs, found = ranked(family.name, problem, gpu), 0
        limit = NEAR_ESTIMATE * family.predict_us(problem, configs[0], gpu)
        for config in configs:
            if found == KERNELS or family.predict_us(problem, config, gpu) > limit:
                break
            artifacts = built_artifacts(family.kernels(problem, config))
            if isinstance(artifacts, str):
                continue
            found += 1
            yield config, artifacts
            banded = Config(family.name, {**config.params, "max_swizzle_size": BAND})
            if not family.violations(problem, banded, gpu) and banded != config:
                yield banded, artifacts


class Calls:
    """A product's tensors.

    Args:
        problem: the product.
    """

    def __init__(self, problem: GemmProblem) -> None:
        import torch

        m, n, k = problem.m, problem.n, problem.k
        self.problem = problem
        self.copies = min(MAX_COPIES, ceil(ROTATED_BYTES / (n * k)) + 1)
        self.source = _elements(m, k)
        self.rows = self.source.clone()
        self.weights = [_elements(n, k) for _ in range(self.copies)]
        sides = (m, n) if problem.scales == "row" else (1, 1)
        # Sums of about one; outputs of e4m3 of about four, as the gate's.
        wanted = k**-0.25 / 64
        self.scale_a = (torch.rand(sides[0], 1, device="cuda") + 0.5) * wanted
        self.scale_b = (torch.rand(1, sides[1], device="cuda") + 0.5) * wanted
        self.factors = [self.scale_a, self.scale_b]
        if problem.has_output_scale:
            self.factors.append(torch.full((1,), 4.0, device="cuda"))
        rows, columns = min(m, CHECKED_ROWS), min(n, CHECKED_COLUMNS)
        left = self.rows[:rows].double() * self.scale_a[:rows].double()
        right = self.weights[0][:columns].double() * self.scale_b[:, :columns].t().double()
        self.wanted = left @ right.t() * (4.0 if problem.has_output_scale else 1.0)

    def before(self, _: int) -> Any:
        """Write the rows."""
        import torch

        words = self.rows.view(torch.int16)
        return torch.bitwise_or(self.source.view(torch.int16), 0, out=words)

    def own(self, config: Config, artifacts: Mapping[str, str]) -> Callable[[int], Any]:
        """A kernel's call.

        Raises:
            RuntimeError: when it has no plan.
        """
        plan = own_plan(self.problem, config, artifacts)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        return lambda i: plan.run_uncounted(self.rows, self.weights[i].t(), *self.factors)

    def vendors(self) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """PyTorch's choice, and cuBLASLt's algorithms."""
        import torch

        from tuner.families import families
        from tuner.runtime.call import devices

        # On CUDA, PyTorch 2.11 leaves `scale_result` out: the output's factor is one of the rows'.
        left = self.scale_a * self.factors[2] if self.problem.has_output_scale else self.scale_a
        out_dtype = getattr(torch, self.problem.dtype_d)

        def torch_s(i: int) -> Any:
            return torch._scaled_mm(
                self.rows,
                self.weights[i].t(),
                left,
                self.scale_b,
                out_dtype=out_dtype,
                use_fast_accum=self.problem.fast_accum,
            )

        yield TORCH, torch_s
        family = families()["vendor_cublaslt_search"]
        if family.supports(self.problem, devices.gpu_of(0)):
            return
        flat = [one.view(-1) for one in self.factors]
        yield from algorithms(self.problem, self.rows, self.weights, *flat)

    def error(self, call: Callable[[int], Any]) -> float:
        """Relative error of the first rows and columns of the first copy's product."""
        rows, columns = self.wanted.shape
        found = call(0).view(self.problem.m, self.problem.n)[:rows, :columns].double()
        return float((found - self.wanted).norm() / self.wanted.norm())


def _elements(rows: int, columns: int) -> Any:
    """Normal elements of a deviation of 64, made in parts."""
    import torch

    drawn = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    for part in drawn.split(8192):
        made = torch.randn(part.shape, device="cuda", dtype=torch.bfloat16)
        part.copy_(made.mul_(64.0).clamp_(-448, 448))
    return drawn


def timed(kind: str, size: tuple[int, int, int]) -> dict[str, Any]:
    """Times and errors of a product by all ways, the fastest of either side twice."""
    import torch

    from tuner.runtime.call import devices

    problem = problem_of(kind, size)
    calls, failed, ways, errors = Calls(problem), {}, [], {}
    made = list(calls.vendors())
    for config, artifacts in built(problem, devices.gpu_of(0)):
        try:
            made.append((name_with_band(config), calls.own(config, artifacts)))
        except FAILURES as exc:
            failed[name_with_band(config)] = first_line(exc)
    for name, call in made:
        try:
            errors[name] = float(f"{calls.error(call):.3e}")
            torch.cuda.synchronize()
            ways.append(Contender(name, call))
        except FAILURES as exc:
            failed[name] = first_line(exc)
    wrong = inexact(errors)
    failed.update(wrong)
    ways = [way for way in ways if way.name not in wrong]
    first = time_calls(ways, calls.before, calls.copies, BUDGET_US)
    names = {*finalists(first.us, _is_peer), TORCH}
    again = [way for way in ways if way.name in names]
    last = time_calls(again, calls.before, calls.copies, 2 * BUDGET_US)
    return {
        **{"kind": kind, "m": size[0], "n": size[1], "k": size[2], "copies": calls.copies},
        "us": {name: round(us, 2) for name, us in last.us.items()},
        "quick_us": {name: round(us, 2) for name, us in first.us.items()},
        **{"errors": errors, "failed": {**failed, **first.failed, **last.failed}},
    }


def inexact(errors: Mapping[str, float]) -> dict[str, str]:
    """Own kernels whose error is above `MAX_ERROR_RATIO` times the least of a peer, with it."""
    least = min((e for name, e in errors.items() if _is_peer(name) and isfinite(e)), default=inf)
    return {
        name: f"relative error {error:.2e}, of a peer {least:.2e}"
        for name, error in errors.items()
        if not _is_peer(name) and not (isfinite(error) and error <= MAX_ERROR_RATIO * least)
    }


def _is_peer(name: str) -> bool:
    return name.split()[0] in (TORCH, CUBLASLT)


def report(document: Mapping[str, Any]) -> str:
    """A line a product, and means and worst by kind."""
    lines: list[Sequence[str]] = [("kind", "M", "N", "K", "own", "us", "peer", "us", "speed")]
    ratios: dict[str, list[float]] = {}
    for row in document["products"]:
        peers = {name: us for name, us in row["us"].items() if _is_peer(name)}
        own = {name: us for name, us in row["us"].items() if name not in peers}
        if not own or not peers:
            continue
        best, peer = min(own, key=own.__getitem__), min(peers, key=peers.__getitem__)
        ratio = peers[peer] / own[best]
        ratios.setdefault(row["kind"], []).append(ratio)
        sizes = [str(row[name]) for name in "mnk"]
        us = microseconds(own[best]), microseconds(peers[peer])
        lines.append((row["kind"], *sizes, best.split()[0], us[0], peer, us[1], f"{ratio:.3f}"))
    said = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    means = [
        f"{kind}: mean {exp(sum(map(log, found)) / len(found)):.3f}, "
        f"worst {min(found):.3f} of {len(found)}"
        for kind, found in ratios.items()
    ]
    return "\n".join([said, "", table(lines, frozenset((1, 2, 3, 5, 7, 8))), *means])


def main(argv: Sequence[str]) -> int:
    """Run it; writes the file after each product, and prints the table last.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        ConfigError: when an option is wrong.
    """
    parser = Parser(prog="scripts/bench e4m3", description=__doc__)
    known = ",".join("x".join(map(str, size)) for size in SIZES)
    parser.add_argument("--sizes", default=known, metavar="MxNxK,...", help=f"default: {known}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    try:
        parts = [[int(extent) for extent in one.split("x")] for one in args.sizes.split(",")]
        sizes = [(m, n, k) for m, n, k in parts]
    except ValueError as exc:
        raise ConfigError(f"--sizes {args.sizes}: {exc} (allowed: as 8192x4096x4096)") from exc
    document: dict[str, Any] = {"environment": environment(), "products": []}
    for kind, size in product(KINDS, sizes):
        document["products"].append(timed(kind, size))
        if args.json:
            write_json(args.json, document)
    print(report(document))
    return 0
