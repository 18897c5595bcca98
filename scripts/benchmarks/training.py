"""Attention of training calls, forward and backward together.

`tuner.problem.population.draw_training` draws calls of ten public models, 1 to 16 sequences of 1024
to 8192 tokens. ``tuner`` is PyTorch's function under `tuner.enable`, ``tuner attention`` is
`tuner.attention`. First output and gradients of one sequence and one KV head are compared with
float64, each error beside PyTorch's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import FAILURES, Bench, Contender, Preset, Row, first_line
from benchmarks.rows import PYTORCH, TUNER, ratio_line
from tuner.cli import Parser
from tuner.problem import AttentionProblem
from tuner.problem.population import ModelCall, View, draw_training, subset

MODELS = (
    "llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "phi-4", "olmo-2-7b", "gemma-7b", "smollm2-1.7b",
    "pythia-2.8b", "whisper-large-v3", "flux.1-dev",
)  # fmt: skip
ATTENTION, CUDNN = "tuner attention", "cudnn"
BUDGET_US = 5e5
"""Time of all rounds of a call, if these are more than the fewest."""
MARGIN = 1.2
"""Largest error over PyTorch's."""
SMALL = {"float16": 1e-4, "bfloat16": 8e-4}
"""Added to PyTorch's error: of few elements it varies."""


@dataclass(frozen=True)
class TrainingCall:
    """A drawn call."""

    call: ModelCall

    @property
    def label(self) -> str:
        """Model and sizes."""
        return self.call.label

    @property
    def group(self) -> str:
        """By the width and the heads that share keys."""
        problem = self.call.problem
        assert isinstance(problem, AttentionProblem)
        return f"D = {problem.head_dim}, {problem.heads_q // problem.heads_kv} heads a KV head"


def calls(args: Namespace) -> list[TrainingCall]:
    """The calls that a seed draws."""
    drawn = draw_training(args.seed, args.count, subset(args.models))
    return [TrainingCall(call) for call in drawn]


def measure_call(case: TrainingCall, _: Namespace) -> Row:
    """Microseconds and errors of each way, and the backward kernel that answers."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import tuner
    from benchmarks.population_tensors import made

    problem = case.call.problem
    assert isinstance(problem, AttentionProblem)
    torch.manual_seed(0)
    (inputs,) = made(case.call, "cuda", 1)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    # As a projection behind attention leaves it: token by token.
    like = inputs.tensors[0].transpose(1, 2)
    grad_out = torch.randn(like.shape, dtype=like.dtype, device="cuda").transpose(1, 2)
    is_grouped = problem.heads_q != problem.heads_kv
    options = {"is_causal": problem.is_causal, "enable_gqa": is_grouped}

    def step(attend: Callable[..., Any], _: int = 0) -> tuple[Any, ...]:
        out = attend(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    def before(_: int) -> None:
        with torch.no_grad():
            leaves[0].copy_(inputs.source)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    ways = (
        Contender(PYTORCH, partial(step, sdpa)),
        Contender(TUNER, partial(step, sdpa), tuner.enabled),
        Contender(ATTENTION, partial(step, tuner.attention)),
        Contender(CUDNN, partial(step, sdpa), lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    )
    wanted = exact(problem, inputs.tensors, grad_out)
    errors, failed, timed = dict[str, list[float]](), dict[str, str](), list[Contender]()
    for way in ways:
        try:
            with way.around():
                errors[way.name] = away(problem, way.call(0), wanted)
        except FAILURES as exc:
            failed[way.name] = first_line(exc)
        else:
            timed.append(way)
    backward = served(leaves, grad_out, problem)
    times = harness.time_calls(timed, before, 1, BUDGET_US)
    limits = [MARGIN * error + SMALL[problem.dtype] for error in errors.get(PYTORCH, ())]
    wrong = [
        name
        for name in (TUNER, ATTENTION)
        if not all(e <= limit for e, limit in zip(errors.get(name, ()), limits, strict=False))
    ]
    failed |= times.failed
    return {
        **{"us": times.us, "errors": errors, "failed": failed},
        **{"wrong": wrong, "backward": backward},
    }


def exact(problem: AttentionProblem, tensors: Sequence[Any], grad_out: Any) -> list[Any]:
    """Output and gradients of the last sequence's last KV head in float64, from PyTorch's
    composition of them.

    Args:
        problem: the call's.
        tensors: query, key and value.
        grad_out: gradient of the output.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = [of_last_group(problem, tensor).double().requires_grad_() for tensor in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=problem.is_causal, enable_gqa=True
        )
    grads = torch.autograd.grad(out, parts, of_last_group(problem, grad_out).double())
    return [out.detach(), *grads]


def of_last_group(problem: AttentionProblem, tensor: Any) -> Any:
    """The last sequence's last KV head, or the query heads that share it."""
    group = tensor.shape[1] // problem.heads_kv
    return tensor[-1:, -group:]


def away(problem: AttentionProblem, computed: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Relative Frobenius errors of output and gradients, of the part that `exact` computes."""
    parts = (of_last_group(problem, tensor).detach() for tensor in computed)
    return list(map(harness.distance, parts, wanted))


def served(leaves: Sequence[Any], grad_out: Any, problem: AttentionProblem) -> str:
    """The backward kernel that the runtime chooses: own, a vendor's name, or PyTorch's."""
    import torch

    from tuner.runtime.attention.composed import Attended
    from tuner.runtime.call.plan import Plan
    from tuner.runtime.call.serving import find
    from tuner.runtime.training.autograd import gains_by_cudnn
    from tuner.runtime.training.gradients import GradientsCall

    query, key, value = (leaf.detach() for leaf in leaves)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    options = problem.is_causal, None, False
    plan = find(GradientsCall(query, key, value, torch.empty_like(query), lse, grad_out, *options))
    if isinstance(plan, Plan):
        return str(plan.config.get("kernel", "own"))
    if gains_by_cudnn(Attended(query, key, value, problem.is_causal, None)):
        return "cudnn"
    return f"PyTorch's: {plan.reason}"


def call_line(row: Row) -> str:
    """Times and ratio, and the backward kernel."""
    return f"{ratio_line(row)}; backward {row['backward']}"


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--count", type=int, default=60, help="calls (default 60)")
    add("--models", default=",".join(MODELS), help="names with commas between")


def _small() -> TrainingCall:
    """Grouped heads, token by token."""
    problem = AttentionProblem(24, 24, 16, 2, 4, 2, is_causal=True, dtype="bfloat16", layout="bshd")
    views = tuple(
        View(name, name, (2, heads, 24, 16), (24 * heads * 16, 16, heads * 16, 1))
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    )
    return TrainingCall(ModelCall("small", "layers", "training", 1, problem, views))


BENCH = Bench(
    "training",
    __doc__,
    {
        "calls": Preset(
            "forward and backward of drawn calls",
            calls,
            measure_call,
            call_line,
            limit_s=60.0,
            smoke=_small(),
        ),
    },
    _options,
)
