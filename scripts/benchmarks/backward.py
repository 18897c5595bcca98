"""Gradients of attention by our own kernels and all that the machine has beside them.

``scripts/bench backward`` times the runtime's call (``tuner``) and the rule's own kernels
(``tuner own``, and ``tuner own, deterministic``) for each of 22 shapes. Beside them stand cuDNN and
FlashAttention-2 to -4, also deterministic. All read FlashAttention-2's output and log-sum-exp.
Errors are distances from FlashAttention-2's gradients, under a soft cap from FlashAttention-3's.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from benchmarks import backward_inputs, harness, rows
from benchmarks.harness import Bench, Contender, Preset, Row
from benchmarks.own_plans import compile_specs, kernel_of
from tuner.bench.suites import SUITES
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.fused_attention_backward.rule import KERNELS, kind_of, placed
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionBackwardProblem, AttentionProblem

FAMILY = family("fused_attention_backward")
VENDORS = family("sdpa_backward")
NAMES = ("flash2", "flash3", "flash4", "cudnn")
"""The vendors' kernels; the first that takes a problem is the measure of errors."""
DETERMINISTIC = ", deterministic"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A problem of a preset."""

    problem: AttentionBackwardProblem

    @property
    def label(self) -> str:
        return self.problem.label()

    @property
    def group(self) -> str:
        return "causal" if self.problem.is_causal else "full"


def acceptance(args: Namespace) -> list[Case]:
    """The problems named, or those of the acceptance suite in bf16."""
    if args.shape:
        return [Case(AttentionBackwardProblem.parse(shape)) for shape in args.shape]
    suite = cast(Sequence[AttentionProblem], SUITES["acceptance"].problems)
    forward = (replace(problem, dtype="bfloat16", layout="bshd") for problem in suite)
    return [Case(AttentionBackwardProblem.of(problem)) for problem in forward]


def own_config(problem: AttentionBackwardProblem) -> Config | None:
    """The rule's own config of a problem; None where its kind has none."""
    kind = kind_of(problem)
    own = None if kind is None else KERNELS.get(kind)
    return None if own is None else placed(own, problem, DEFAULT_GPU)


def spec_of(problem: AttentionBackwardProblem) -> KernelSpec | None:
    """The kernel of `own_config`."""
    config = own_config(problem)
    return next(iter(FAMILY.kernels(problem, config).values())) if config else None


def modes(problem: AttentionBackwardProblem) -> Iterator[tuple[str, AttentionBackwardProblem]]:
    """The problem, and as one that must be deterministic, by the end of a contender's name."""
    yield "", problem
    yield DETERMINISTIC, replace(problem, is_deterministic=True)


def own_call(problem: AttentionBackwardProblem, inputs: Sequence[Any]) -> Call:
    """One call of the rule's own kernel on fixed inputs, into outputs of its own.

    Raises:
        BenchmarkError: when there is none.
        CompileError: when it does not compile.
    """
    import torch

    config, spec = own_config(problem), spec_of(problem)
    if config is None or spec is None:
        raise BenchmarkError(f"no own kernel has {problem.label()}")
    kernel = kernel_of(spec)
    (launch,) = FAMILY.launches(problem, config, 1 / math.sqrt(problem.head_dim))
    outs = [backward_inputs.empty(operand) for operand in problem.outputs]
    size = kernel.workspace_bytes(launch.integers)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    names = [operand.name for operand in problem.operands]
    tensors = dict(zip(names, (*inputs, *outs), strict=True))
    pointers = [tensors[ref.operand].data_ptr() for ref in launch.tensors]
    launched = kernel.bind(launch.integers, launch.scalars)

    def call() -> Any:
        launched(pointers, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
        return outs

    return call


def vendor_call(problem: AttentionBackwardProblem, name: str, inputs: Sequence[Any]) -> Call:
    """One call of a vendor's kernel.

    Raises:
        BenchmarkError: when it does not take the problem.
    """
    config = Config(VENDORS.name, {"kernel": name})
    call = VENDORS.vendor_call(problem, config, 1 / math.sqrt(problem.head_dim))
    if isinstance(call, str):
        raise BenchmarkError(call)
    return partial(call, *inputs)


def served_call(
    problem: AttentionBackwardProblem, inputs: Sequence[Any]
) -> tuple[dict[str, Call], str]:
    """The runtime's call, and the kernel that it chooses; none where it is the forward pass's."""
    import torch

    from tuner.runtime.call.plan import Plan
    from tuner.runtime.call.serving import find
    from tuner.runtime.training.gradients import GradientsCall

    if problem.is_windowed or problem.softcap or problem.is_varlen:
        return {}, ""
    query, key, value, out, lse, grad_out = inputs
    tensors = grad_out, query, key, value, out, lse
    options = problem.is_causal, None, problem.is_deterministic
    plan = find(GradientsCall(query, key, value, out, lse, grad_out, *options))
    by = str(plan.config.get("kernel", "own")) if isinstance(plan, Plan) else f"PyTorch: {plan}"
    call = partial(torch.ops.tuner.attention_backward, *tensors, problem.is_causal, None)
    return {"tuner": call}, by


def other_calls(
    problem: AttentionBackwardProblem, inputs: Sequence[Any]
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls of own kernels and vendors' by name, and why others cannot take part."""
    calls, refused = dict[str, Call](), dict[str, str]()
    for mode, posed in modes(problem):
        makers = {f"{name}{mode}": partial(vendor_call, posed, name, inputs) for name in NAMES}
        for name, make in {f"tuner own{mode}": partial(own_call, posed, inputs), **makers}.items():
            try:
                calls[name] = make()
            except harness.FAILURES as exc:
                refused[name] = harness.first_line(exc)
    return calls, refused


def measure(case: Case, _: Namespace) -> Row:
    """Time of each for one problem, and how far its gradients are from FlashAttention-2's."""
    import torch

    problem = case.problem
    with torch.no_grad():
        inputs = backward_inputs.inputs_of(problem, 0)
        served, by = served_call(problem, inputs)
        calls, refused = other_calls(problem, inputs)
        numbered = {name: harness.every_copy(call) for name, call in {**served, **calls}.items()}
        outs, failed = harness.first_outputs(numbered, lambda out: [t.clone() for t in out])
        against = next((name for name in (*NAMES, *outs) if name in outs), "")
        written, source = inputs[5], inputs[5].clone()
        able = [Contender(name, numbered[name]) for name in outs]
        times = harness.time_calls(able, lambda _: torch.add(source, 0.0, out=written), 1)
    return {
        "problem": problem.to_json(),
        "us": times.us,
        "tflops": {name: problem.flops / us / 1e6 for name, us in times.us.items()},
        "against": against,
        "errors": {
            name: max(map(harness.distance, out, outs[against])) for name, out in outs.items()
        },
        "served_by": by,
        "failed": {**refused, **failed, **times.failed},
    }


def own_speed(row: Row, mode: str = "") -> float | None:
    """The fastest peer's time over the own kernel's, of those in a mode."""
    us = row.get("us", {})
    peers = [us[name + mode] for name in NAMES if name + mode in us]
    own = us.get(f"tuner own{mode}")
    return min(peers) / own if peers and own else None


def table(every: Sequence[Row]) -> list[str]:
    """The usual table, of what is served; and how the own kernels stand in both modes."""
    lines = [*rows.ratio_table(every), ""]
    for mode in ("", DETERMINISTIC):
        mean, least = rows.figures(rows.values(every, partial(own_speed, mode=mode)))
        lines.append(f"own kernels{mode}, over the fastest peer: mean {mean}, least {least}")
    return lines


def _options(parser: Parser) -> None:
    text = "as S=1024,D=64,dtype=bf16, not the suite; repeatable"
    parser.add_argument("--shape", action="append", help=text)


def _compile(args: Namespace) -> None:
    posed = [problem for case in acceptance(args) for _, problem in modes(case.problem)]
    compile_specs(spec for problem in posed if (spec := spec_of(problem)) is not None)


_SMALL = AttentionBackwardProblem.parse("S=32,D=64,H=2,dtype=bf16")
BENCH = Bench(
    "backward",
    __doc__,
    {
        "acceptance": Preset(
            "times of the acceptance suite's shapes, or of --shape",
            acceptance,
            measure,
            table=table,
            limit_s=600,
            smoke=Case(_SMALL),
            compile=_compile,
        ),
    },
    _options,
)
