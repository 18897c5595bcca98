"""The two products of a layer of experts alone, by each own kernel of the rule and by peers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import harness, rows
from benchmarks.harness import Contender, Row
from benchmarks.moe_layers import Product, counts_of, routed, weights_of
from benchmarks.moe_peers import MASKED_TOKENS, deep_gemm
from benchmarks.own_plans import plans_of
from tuner.families.block_scaled_gemm.rates_fit import kernel_name
from tuner.problem import SCALE_BLOCK, GroupedGemmProblem

BUDGET_US = 1e5
"""All rounds of a product take about so long."""
ALIGNMENT = 128
"""Rows at whose multiples a group begins in DeepGEMM's contiguous layout."""

Call = Callable[[int], Any]
Way = Callable[[], tuple[Call, Any]]
"""Lays A out; returns the call, and the places of the groups' rows in its result if they have."""


class Rows:
    """A's rows of all groups, in each layout that a way wants; all layouts share one storage.

    Args:
        problem: the product.
        counts: int64 (G): rows of each group.
        expert_rows: rows of each group's matrix in DeepGEMM's masked layout; 0 without it.
    """

    def __init__(self, problem: GroupedGemmProblem, counts: Any, expert_rows: int) -> None:
        import torch

        self.problem, self.counts = problem, counts
        groups = torch.arange(problem.groups, device="cuda").repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        within = torch.arange(problem.m, device="cuda") - first[groups]
        padded = -(-counts // ALIGNMENT) * ALIGNMENT
        self.contiguous = (padded.cumsum(0) - padded)[groups] + within
        self.masked = groups * expert_rows + within
        self.expert_rows, self.padded_rows = expert_rows, int(padded.sum())
        self.groups = torch.full((self.padded_rows,), -1, dtype=torch.int32, device="cuda")
        self.groups[self.contiguous] = groups.int()
        self.offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        height = max(problem.m, self.padded_rows, problem.groups * expert_rows)
        drawn = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
        self.factors: Any = None
        self.source: Any = drawn
        if problem.tensor_rate > 1:
            from tuner.runtime.products import block_scaled

            self.source, self.factors = block_scaled.quantised(drawn)
        self._storage = torch.zeros(height * problem.k, dtype=self.source.dtype, device="cuda")

    def laid(self, height: int, places: Any = None) -> Any:
        """A of so many rows, the source's at their places."""
        import torch

        a = self._storage[: height * self.problem.k].view(height, self.problem.k)
        word = torch.int8 if a.element_size() == 1 else torch.int16  # which every operation takes
        wide, narrow = a.view(word), self.source.view(word)
        if places is None:
            wide.copy_(narrow)
        else:
            wide[places] = narrow
        return a

    def factors_at(self, places: Any, groups: int, height: int) -> Any:
        """Factors of rows of so many groups, side by side along a group's rows."""
        import torch

        blocks = self.problem.k // SCALE_BLOCK
        factors = torch.ones(groups, blocks, height, device="cuda")
        factors[places // height, :, places % height] = self.factors
        return factors.transpose(1, 2)

    def before(self, _: int) -> Any:
        """Write A, as an ordinary kernel in front."""
        import torch

        words = self._storage[: self.problem.m * self.problem.k].view(torch.int16)
        return torch.bitwise_or(self.source.view(torch.int16).view(-1), 0, out=words)


def measure(case: Product, args: Namespace) -> Row:
    """Times of a product by the rule's kernels and peers, and errors from the first peer."""
    import torch

    problem = case.problem
    with torch.inference_mode():
        part = ("up", "down").index(case.part)
        b, scale_b = (pair[part] for pair in weights_of(case.sizes, case.dtype))
        counts, spread = counts_of(case, routed(case)[0])
        expert_rows = -(-case.tokens // 4) * 4 if case.tokens <= MASKED_TOKENS else 0
        a, expected = Rows(problem, counts, expert_rows), _estimates(problem)
        ways, errors, failed, wanted = list[Contender](), {}, {}, None
        for name, way in _ways(a, b, scale_b, unproven=args.unproven):
            try:
                call, places = way()
                out = call(0)
                out = out.flatten(0, -2)[places] if places is not None else out.clone()
                torch.cuda.synchronize()
                ways.append(Contender(name, call))
                wanted = out if wanted is None else wanted
                errors[name] = round(harness.distance(out, wanted), 5)
            except harness.FAILURES as exc:
                failed[name] = harness.first_line(exc)
        times = harness.time_calls(ways, a.before, 1, BUDGET_US)
    us = {name: round(us, 2) for name, us in times.us.items()}
    first = next((f"tuner {name}" for name in expected if f"tuner {name}" in us), None)
    return {
        "problem": problem.to_json() | {"sizes": case.route},
        **spread,
        "us": {"tuner": us[first], **us} if first else us,
        "errors": errors,
        "failed": {**failed, **times.failed},
        "estimates": expected,
    }


def _ways(a: Rows, b: Any, scale_b: Any, *, unproven: bool) -> Iterator[tuple[str, Way]]:
    """Peers, then the rule's kernels that are proven here, in its order."""
    from tuner.families.grouped_gemm import rule as grouped
    from tuner.runtime.call import devices

    problem = a.problem
    if scale_b is None:
        yield "grouped_mm", partial(_pytorchs, a, b)
    if deep_gemm() is not None:
        yield "deep_gemm", partial(_deep_gemms, a, b, scale_b, False)
        if a.expert_rows:
            yield "deep_gemm masked", partial(_deep_gemms, a, b, scale_b, True)
    selection = grouped.select(problem, devices.gpu_of(0))
    for config, plan in plans_of(problem, selection, unproven=unproven):
        yield f"tuner {kernel_name(config)}", partial(_own, plan, a, b, scale_b)


def _estimates(problem: GroupedGemmProblem) -> dict[str, float]:
    """The rule's expected times, best first, microseconds."""
    from tuner.families.grouped_gemm import rule as grouped
    from tuner.runtime.call import devices

    selection = grouped.select(problem, devices.gpu_of(0))
    ranked = selection.own() if selection is not None else ()
    return {kernel_name(config): round(us, 2) for us, config in ranked}


def _own(plan: Any, a: Rows, b: Any, scale_b: Any) -> tuple[Call, Any]:
    scales = () if scale_b is None else (a.factors, scale_b)
    inputs = (a.laid(a.problem.m), b, a.offsets, *scales)
    return lambda _: plan.run_uncounted(*inputs), None


def _pytorchs(a: Rows, b: Any) -> tuple[Call, Any]:
    import torch

    left, ends = a.laid(a.problem.m), a.offsets[1:]
    return lambda _: torch._grouped_mm(left, b.transpose(-2, -1), offs=ends), None


def _deep_gemms(a: Rows, b: Any, scale_b: Any, is_masked: bool) -> tuple[Call, Any]:
    import torch

    problem, module = a.problem, deep_gemm()
    layout = "masked" if is_masked else "contiguous"
    groups, height = (problem.groups, a.expert_rows) if is_masked else (1, a.padded_rows)
    places = a.masked if is_masked else a.contiguous
    shape = (groups, height) if is_masked else (height,)
    ends = (a.counts.int(), -(-problem.m // problem.groups)) if is_masked else (a.groups,)
    left: Any = a.laid(groups * height, places).view(*shape, problem.k)
    out = torch.empty(*shape, problem.n, dtype=torch.bfloat16, device="cuda")
    if scale_b is not None:
        factors = a.factors_at(places, groups, height)
        left, b = (left, factors if is_masked else factors[0]), (b, scale_b)
    kind = "bf16" if scale_b is None else "fp8"
    run = getattr(module, f"m_grouped_{kind}_gemm_nt_{layout}")
    return lambda _: (run(left, b, out, *ends), out)[1], places


def table(every: Sequence[Row]) -> list[str]:
    """The usual table; and how much slower the rule's kernels are than the best ones."""
    best = rows.values(every, _best_over_first)
    mean, worst = rows.figures(best)
    return [*rows.ratio_table(every), "", f"best kernel's time over the rule's: {mean}, {worst}"]


def _best_over_first(row: Row) -> float | None:
    own = [us for name, us in row.get("us", {}).items() if name.startswith("tuner")]
    return min(own) / row["us"]["tuner"] if "tuner" in row.get("us", {}) else None
