"""The two products of a layer of experts alone, by each own kernel of the rule and by peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from benchmarks.moe_layers import Case, Weights, routed
from benchmarks.moe_peers import MASKED_TOKENS, deep_gemm
from benchmarks.own_plans import own_plan
from tuner.problem import SCALE_BLOCK, GroupedGemmProblem

BUDGET_US = 1e5
"""All rounds of a product take about so long."""
ALIGNMENT = 128
"""Rows at whose multiples a group begins in DeepGEMM's contiguous layout."""

MAX_ESTIMATE = 2.5
"""Longest estimate of a kernel that is timed, over the shortest."""

Call = Callable[[int], Any]


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
        rows = max(problem.m, self.padded_rows, problem.groups * expert_rows)
        drawn = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
        self.factors: Any = None
        self.source: Any = drawn
        if problem.tensor_rate > 1:
            from tuner.runtime.products import block_scaled

            self.source, self.factors = block_scaled.quantised(drawn)
        self._storage = torch.zeros(rows * problem.k, dtype=self.source.dtype, device="cuda")

    def laid(self, rows: int, places: Any = None) -> Any:
        """A of so many rows, the source's at their places."""
        a = self._storage[: rows * self.problem.k].view(rows, self.problem.k)
        wide, narrow = a.view(_word(a)), self.source.view(_word(a))
        if places is None:
            wide.copy_(narrow)
        else:
            wide[places] = narrow
        return a

    def factors_at(self, rows: int, places: Any) -> Any:
        """Factors of so many rows, side by side along the rows."""
        import torch

        made = torch.ones(self.problem.k // SCALE_BLOCK, rows, device="cuda")
        made[:, places] = self.factors.t()
        return made.t()

    def before(self, _: int) -> Any:
        """Write A, as an ordinary kernel in front."""
        import torch

        words = self._storage[: self.problem.m * self.problem.k].view(torch.int16)
        return torch.bitwise_or(self.source.view(torch.int16).view(-1), 0, out=words)


def _word(rows: Any) -> Any:
    """An integer type for whole elements, which every operation takes."""
    import torch

    return torch.int8 if rows.element_size() == 1 else torch.int16


def products_timed(case: Case, weights: Weights, *, unproven: bool) -> list[dict[str, Any]]:
    """Times of both products, and how far the results are from the first peer's."""
    return [_timed(case, *one, unproven=unproven) for one in _products(case, weights)]


def prepared(case: Case, weights: Weights) -> Iterator[str]:
    """Call the peers once, so that they are compiled; what failed."""
    for problem, b, scale_b in _products(case, weights):
        for name, _, _, failure in _ways(case, problem, b, scale_b, unproven=None):
            if failure:
                yield f"{problem.label()}: {name}: {failure}"


def _products(case: Case, weights: Weights) -> Iterator[tuple[GroupedGemmProblem, Any, Any]]:
    yield from zip(case.products(), weights.matrices, weights.scales, strict=True)


def _ways(
    case: Case, problem: GroupedGemmProblem, b: Any, scale_b: Any, *, unproven: bool | None
) -> Iterator[tuple[str, Call, Any, str]]:
    """Name and call of each way, its result with the rows of all groups, or why it failed."""
    import torch

    experts, _ = routed(case)
    counts = torch.bincount(experts.view(-1), minlength=problem.groups)
    tokens = -(-case.tokens // 4) * 4 if case.tokens <= MASKED_TOKENS else 0
    rows = Rows(problem, counts, tokens)
    for name, made in _made(rows, b, scale_b, unproven=unproven):
        try:
            call, out, places = made()
            result = out.flatten(0, -2)[places] if places is not None else out.clone()
            torch.cuda.synchronize()
            yield name, call, (rows, result), ""
        except FAILURES as exc:
            yield name, lambda _: None, None, first_line(exc)


def _made(
    rows: Rows, b: Any, scale_b: Any, *, unproven: bool | None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each way: its A is laid out when it is made, then it is called once. Own kernels are left out
    where `unproven` is None.
    """
    problem, module = rows.problem, deep_gemm()
    if scale_b is None:
        yield "grouped_mm", partial(_pytorchs, rows, b)
    if module is not None:
        yield "deep_gemm", partial(_contiguous, module, rows, b, scale_b)
        if rows.expert_rows:
            yield "deep_gemm masked", partial(_masked, module, rows, b, scale_b)
    for name, plan in () if unproven is None else plans(problem, unproven=unproven):
        yield name, partial(_own, plan, rows, b, scale_b)


def _called(call: Call, places: Any) -> tuple[Call, Any, Any]:
    return call, call(0), places


def _own(plan: Any, rows: Rows, b: Any, scale_b: Any) -> tuple[Call, Any, Any]:
    inputs: tuple[Any, ...] = (rows.laid(rows.problem.m), b, rows.offsets)
    if scale_b is not None:
        inputs = (*inputs, rows.factors, scale_b)
    return _called(lambda _: plan.run_uncounted(*inputs), None)


def _pytorchs(rows: Rows, b: Any) -> tuple[Call, Any, Any]:
    import torch

    a = rows.laid(rows.problem.m)
    ends = rows.offsets[1:]
    return _called(lambda _: torch._grouped_mm(a, b.transpose(-2, -1), offs=ends), None)


def _contiguous(module: Any, rows: Rows, b: Any, scale_b: Any) -> tuple[Call, Any, Any]:
    import torch

    count, places = rows.padded_rows, rows.contiguous
    a = rows.laid(count, places)
    out = torch.empty(count, rows.problem.n, dtype=torch.bfloat16, device="cuda")
    if scale_b is None:
        run = partial(module.m_grouped_bf16_gemm_nt_contiguous, a, b, out, rows.groups)
    else:
        pair = a, rows.factors_at(count, places)
        run = partial(module.m_grouped_fp8_gemm_nt_contiguous, pair, (b, scale_b), out, rows.groups)
    return _called(lambda _: (run(), out)[1], places)


def _masked(module: Any, rows: Rows, b: Any, scale_b: Any) -> tuple[Call, Any, Any]:
    import torch

    problem, high, places = rows.problem, rows.expert_rows, rows.masked
    a = rows.laid(problem.groups * high, places).view(problem.groups, high, problem.k)
    out = torch.empty(problem.groups, high, problem.n, dtype=torch.bfloat16, device="cuda")
    counts, expected = rows.counts.int(), -(-problem.m // problem.groups)
    if scale_b is None:
        run = partial(module.m_grouped_bf16_gemm_nt_masked, a, b, out, counts, expected)
    else:
        blocks = problem.k // SCALE_BLOCK
        made = torch.ones(problem.groups, blocks, high, device="cuda")
        made[places // high, :, places % high] = rows.factors
        pair = a, made.transpose(1, 2)
        run = partial(
            module.m_grouped_fp8_gemm_nt_masked, pair, (b, scale_b), out, counts, expected
        )
    return _called(lambda _: (run(), out)[1], places)


def _timed(
    case: Case, problem: GroupedGemmProblem, b: Any, scale_b: Any, *, unproven: bool
) -> dict[str, Any]:
    ways, failed, far, wanted, rows = [], {}, {}, None, None
    for name, call, found, failure in _ways(case, problem, b, scale_b, unproven=unproven):
        if failure:
            failed[name] = failure
            continue
        rows, result = found
        if wanted is None:
            wanted = result
        else:
            far[name] = float((result.float() - wanted.float()).norm() / wanted.float().norm())
        ways.append(Contender(name, call))
    if rows is None:
        return {"problem": problem.label(), "route": case.route, "us": {}, "failed": failed}
    times = time_calls(ways, rows.before, 1, BUDGET_US)
    return {
        "problem": problem.label(),
        "route": case.route,
        "largest": int(rows.counts.max()),
        "empty": int((rows.counts == 0).sum()),
        "us": {name: round(us, 2) for name, us in times.us.items()},
        "difference": {name: round(value, 5) for name, value in far.items()},
        "failed": {**failed, **times.failed},
        "estimates": estimates(problem),
    }


def estimates(problem: GroupedGemmProblem) -> dict[str, float]:
    """The rule's expected times, best first, microseconds."""
    from tuner.families.grouped_gemm import rule as grouped
    from tuner.runtime.call import devices

    selection = grouped.select(problem, devices.gpu_of(0))
    found = selection.own() if selection is not None else ()
    return {kernel_name(config): round(us, 2) for us, config in found}


def plans(problem: GroupedGemmProblem, *, unproven: bool) -> Iterator[tuple[str, Any]]:
    """The rule's kernels that are proven here, as plans, in the rule's order."""
    from tuner.families.grouped_gemm import rule as grouped
    from tuner.runtime.call import devices

    for config, plan in plans_of(
        problem, grouped.select(problem, devices.gpu_of(0)), unproven=unproven
    ):
        yield kernel_name(config), plan


def plans_of(problem: Any, selection: Any, *, unproven: bool) -> Iterator[tuple[Any, Any]]:
    """Kernels of a rule's selection that are proven here, as plans, in its order.

    Args:
        problem: problem to compute.
        selection: a `RuleSelection`, or None.
        unproven: also kernels that are only built.
    """
    from tuner.families import families
    from tuner.runtime.call import devices
    from tuner.selection.kernels import lists

    gpu, longest = devices.gpu_of(0), math.inf
    for us, config in selection.own() if selection is not None else ():
        longest = min(longest, us * MAX_ESTIMATE)
        if us > longest:
            return
        specs = families()[config.family].kernels(problem, config)
        found = built_artifacts(specs) if unproven else lists.proven(specs, gpu.compute_capability)
        if isinstance(found, str):
            continue
        plan = own_plan(problem, config, found)
        if not isinstance(plan, str):
            yield config, plan


@cache
def _compiler() -> Any:
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain

    return Compiler(find_toolchain(), ArtifactCache(), jobs=1)


def built_artifacts(specs: Mapping[str, Any]) -> dict[str, str] | str:
    """Keys of the built artifacts of kernels, or why there are none."""
    found = {name: _compiler().cached(spec) for name, spec in specs.items()}
    if None in found.values():
        return "a kernel is not built"
    return {name: artifact.key for name, artifact in found.items()}


def kernel_name(config: Any) -> str:
    """Tile of a kernel of the rule, ``u4`` where its loop is unrolled."""
    loop = f" u{config['unroll']}" if "unroll" in config.params else ""
    return f"{'swapped ' * config['swap_ab']}{config['tile_m']}x{config['tile_n']}{loop}"
