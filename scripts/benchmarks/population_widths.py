"""Heads wider than 256 columns, and values narrower than their keys: what is served, and the peers.

Peers beside `population`'s own: the plans that cuDNN lists, and FlashAttention-3's serving build.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cliffs_holes import Hole, serving_call
from benchmarks.harness import FAILURES, Contender, Row, first_line
from benchmarks.own_plans import compile_specs
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.fused_attention import values_rule, wide_rule
from tuner.families.peers import cudnn_plans, sdpa
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

BUDGET_US = 1e5
MAX_PLANS = 3
"""CuDNN's first plans that take part."""
RULES = wide_rule, values_rule
#: Problems by the group of the table.
SHAPES: Mapping[str, Sequence[str]] = {
    "prompts, D=192 and 128": (
        "H=128,S=4096,D=192,DV=128,causal=1",
        "H=16,S=4096,D=192,DV=128,causal=1",
        "H=16,S=16384,D=192,DV=128,causal=1",
        "H=128,SQ=2048,SKV=4096,D=192,DV=128",
        "H=16,S=1024,D=192,DV=128,causal=1",
        "B=4,H=32,S=2048,D=192,DV=128,causal=1",
        "H=16,SQ=2048,SKV=16384,D=192,DV=128",
    ),
    "decoding, D=512": (
        "B=16,H=8,HKV=1,SQ=1,SKV=16384,D=512",
        "B=16,H=16,HKV=1,SQ=1,SKV=16384,D=512",
        "B=64,H=16,HKV=2,SQ=1,SKV=4096,D=512",
        "H=32,HKV=4,SQ=1,SKV=65536,D=512",
        "B=8,H=8,HKV=1,SQ=1,SKV=8192,D=512",
    ),
    "prompts, D=512": (
        "H=16,S=4096,D=512",
        "H=16,S=4096,D=512,causal=1",
        "B=4,H=8,S=1024,D=512",
        "B=2,H=8,S=2048,D=512,causal=1",
        "H=8,HKV=4,S=8192,D=512",
        "H=16,HKV=2,S=8192,D=512,causal=1",
        "B=2,H=8,HKV=4,S=4096,D=320,causal=1",
    ),
    "window, D=512": ("H=16,HKV=2,S=8192,D=512,causal=1,left=1024",),
}
CASES = tuple(
    Hole(group, AttentionProblem.parse(f"{shape},dtype=bf16,layout=bshd"))
    for group, shapes in SHAPES.items()
    for shape in shapes
)
SMOKE = Hole("smoke", AttentionProblem.parse("H=2,S=70,D=264,dtype=bf16,layout=bshd"))


def compile_widths(cases: Sequence[Hole]) -> None:
    """Compile every kernel that the rules have for the cases, and enter it in the user's list."""
    specs: list[KernelSpec] = []
    for problem in (case.problem for case in cases):
        (rule,) = (one for one in RULES if one.serves(problem, DEFAULT_GPU))
        selection = rule.select(problem, DEFAULT_GPU)
        for _, config in selection.own() if selection else ():
            specs += family(config.family).kernels(problem, config).values()
    compile_specs(specs, serves=True)


def measured(case: Hole, _: Namespace) -> Row:
    """Times of all, errors, and the kind of answer."""
    from benchmarks.population_calls import measured as call_measured

    failed: dict[str, str] = {}

    def ways(inputs: Sequence[Any]) -> Iterator[Contender]:
        for name, call in _peers(case.problem, failed).items():
            yield Contender(name, lambda i, call=call: call(*inputs[i].tensors))  # type: ignore[misc]

    row = call_measured(case.call, budget_us=BUDGET_US, further=ways)
    return {
        **{**row, "failed": {**failed, **row["failed"]}, "problem": case.problem.to_json()},
        "bytes": case.problem.bytes,
        "flops": case.problem.flops,
    }


def _peers(problem: AttentionProblem, failed: dict[str, str]) -> dict[str, Any]:
    """Calls of cuDNN's plans and of the serving build; why others are not here goes to `failed`."""
    scale, vendor = problem.head_dim**-0.5, cudnn_plans.VendorCudnnPlans()
    calls: dict[str, Any] = {}
    if (call := serving_call(problem)) is not None:
        calls[sdpa.SERVING] = call
    try:
        for index, plan in enumerate(vendor.listing(problem, None)[:MAX_PLANS]):
            name, rebuilt = f"cudnn plan {index}", vendor.rebuilt(problem, plan, scale)
            if isinstance(rebuilt, str):
                failed[name] = rebuilt
            else:
                calls[name] = rebuilt
    except FAILURES as exc:
        failed["cudnn plans"] = first_line(exc)
    return calls
