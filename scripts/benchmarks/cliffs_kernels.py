"""Draws of attention by every built kernel of their selections, for fits of rates."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from benchmarks import rows
from benchmarks.cliffs_draws import Draw, Packed
from benchmarks.harness import Row
from benchmarks.own_plans import built_artifacts, own_plan
from tuner.config import Config
from tuner.families import family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem
from tuner.problem.packed import PackedProblem
from tuner.problem.population import ModelCall
from tuner.selection.portfolio import serving, shipped

KERNELS = 10
"""Most kernels of a call, those of the least expected times."""


def takes_part(case: Draw) -> bool:
    """True for calls of attention without a mask operand or pages."""
    call = case.call
    if isinstance(call, ModelCall):
        return isinstance(call.problem, AttentionProblem) and not call.mask
    return isinstance(call, Packed)


def configs(problem: AttentionProblem, gpu: Gpu = DEFAULT_GPU) -> dict[str, Config]:
    """Own kernels of a problem's selection, by their names in rows."""
    (portfolio,) = (one for one in serving(shipped(), gpu) if one.op == problem.op)
    selection = portfolio.select(problem)
    ranked = islice(selection.ranked(), KERNELS) if selection is not None else ()
    return {f"{rows.TUNER} {config.digest[:6]}": config for _, config in ranked}


def _runner(case: Draw, config: Config) -> Callable[..., Any] | None:
    """A call by a kernel; None where it is not built or has no plan."""
    problem: Any = case.call.problem
    artifacts = built_artifacts(family(config.family).kernels(problem, config))
    if isinstance(artifacts, str):
        return None
    scale = problem.head_dim**-0.5
    plan = own_plan(problem, config, artifacts, scale)
    if isinstance(plan, str):
        return None
    if not isinstance(case.call, Packed):
        return plan.run_uncounted  # type: ignore[no-any-return]
    from tuner.runtime.attention.varlen import VarlenCall

    longest = max(case.call.lengths)

    def packed(query: Any, key: Any, value: Any, starts: Any) -> Any:
        options = longest, longest, problem.is_causal, scale, True
        return VarlenCall(query, key, value, starts, starts, *options).run(plan)

    return packed


def measured(case: Draw, _: Namespace) -> Row:
    """The row of a draw, with the times of its kernels and their configs."""
    from benchmarks.cliffs_calls import measured as call_measured

    problem: Any = case.call.problem
    if isinstance(case.call, Packed):
        named = configs(PackedProblem.of(problem, case.call.lengths).stepped)
    else:
        named = configs(problem)
    runners = {name: _runner(case, config) for name, config in named.items()}

    def further(operands: Callable[[int], Sequence[Any]]) -> Mapping[str, Callable[[int], Any]]:
        calls = {}
        for name, run in runners.items():
            if run is not None:
                calls[name] = lambda i, run=run: run(*operands(i))
        return calls

    row = call_measured(case.call, further=further)
    return {**row, "configs": {name: one.to_json() for name, one in named.items()}}
