"""``scripts/bench training``: attention of training calls, forward and backward together.

`tuner.problem.population.draw_training` draws calls of ten public models: batch 1 to 16, 1024 to
8192 tokens. Each is timed behind an element-wise kernel, in a CUDA graph, in a shuffled order:

- PyTorch's attention, twice, as a control
- the same under `tuner.enable`
- `tuner.attention`
- PyTorch's with cuDNN's kernels only

First output and gradients of one sequence and one KV head are compared with float64, with each
kernel's error beside PyTorch's. ``--list`` prints the calls, and needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.child import Worker, answer_indices
from benchmarks.gpu import no_gpu
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.measure.device import detect
from tuner.problem import AttentionProblem
from tuner.problem.population import ModelCall, draw_training, subset
from tuner.selection.describe import table

MODELS = (
    "llama-3-8b", "llama-3.2-1b", "qwen2.5-7b", "phi-4", "olmo-2-7b", "gemma-7b", "smollm2-1.7b",
    "pythia-2.8b", "whisper-large-v3", "flux.1-dev",
)  # fmt: skip
COUNT, LIMIT_S = 60, 60.0
BUDGET_US = 5e5
"""Time of all rounds of a call, if these are more than the fewest."""
PYTORCH, CONTROL, ENABLED, TUNER, CUDNN = "pytorch", "pytorch again", "enabled", "tuner", "cudnn"
OURS = (ENABLED, TUNER)
MARGIN = 1.2
"""Largest error over PyTorch's."""
SMALL = {"float16": 1e-4, "bfloat16": 8e-4}
"""Added to PyTorch's error: of few elements it varies."""
WORST = 8
Way = tuple[str, Callable[..., Any], Callable[[], AbstractContextManager[Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, then list or measure; 1 when a gradient was wrong or a call has no time."""
    args = _parser().parse_args(argv)
    calls = draw_training(args.seed, args.count, subset(args.models))
    if args.list:
        print("\n".join(call.label for call in calls))
        return 0
    if args.worker:
        return answer_indices(lambda index: measure(calls[index]))
    if detect() is None:
        raise no_gpu("--list")
    if args.json:
        check_place(args.json)
    from benchmarks.population import surroundings

    given = list(sys.argv[2:] if argv is None else argv)
    command = python_command("-m", "benchmarks", "training", *given, "--worker")
    rows: list[dict[str, Any]] = []
    document = {"seed": args.seed, "models": args.models, **surroundings(), "rows": rows}
    with Worker(command, args.limit) as worker:
        for index, call in enumerate(calls):
            rows.append({"call": call.label, "model": call.model, **worker.ask(index)})
            print(f"{index + 1}/{len(calls)} {line(rows[-1])}", file=sys.stderr, flush=True)
            if args.json:
                write_json(args.json, document)
    print(report(rows))
    return int(any("lost" in row or row["wrong"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", default="0", help="any text")
    parser.add_argument("--count", type=int, default=COUNT, help=f"calls (default {COUNT})")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between")
    parser.add_argument("--list", action="store_true", help="print the calls")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each call")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def ways() -> Iterator[Way]:
    """Name, function and context of each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import tuner

    plain = contextlib.nullcontext
    sdpa = torch.nn.functional.scaled_dot_product_attention
    yield PYTORCH, sdpa, plain
    yield CONTROL, sdpa, plain
    yield ENABLED, sdpa, tuner.enabled
    yield TUNER, tuner.attention, plain
    yield CUDNN, sdpa, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def measure(call: ModelCall, device: str = "cuda") -> dict[str, Any]:
    """Microseconds and errors of each way, and the kernels that answered."""
    import torch

    from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
    from benchmarks.population_tensors import made

    problem = call.problem
    assert isinstance(problem, AttentionProblem)
    torch.manual_seed(0)
    (inputs,) = made(call, device, 1)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    # As a projection behind attention leaves it: token by token.
    like = inputs.tensors[0].transpose(1, 2)
    grad_out = torch.randn(like.shape, dtype=like.dtype, device=device).transpose(1, 2)
    is_grouped = problem.heads_q != problem.heads_kv
    options = {"is_causal": problem.is_causal, "enable_gqa": is_grouped}

    def step(attend: Callable[..., Any], _: int = 0) -> tuple[Any, ...]:
        out = attend(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    wanted = exact(problem, inputs.tensors, grad_out)
    contenders, errors, failed = [], dict[str, list[float]](), dict[str, str]()
    for name, attend, around in ways():
        try:
            with around():
                errors[name] = away(problem, step(attend), wanted)
        except FAILURES as exc:
            failed[name] = first_line(exc)
            continue
        contenders.append(Contender(name, partial(step, attend), around))
    backward = served(leaves, grad_out, problem)

    def before(_: int) -> None:
        with torch.no_grad():
            leaves[0].copy_(inputs.source)

    times = time_calls(contenders, before, 1, BUDGET_US)
    small = SMALL[problem.dtype]
    limits = [MARGIN * error + small for error in errors.get(PYTORCH, [])]
    wrong = [
        name
        for name in OURS
        if name in errors
        and not all(error <= limit for error, limit in zip(errors[name], limits, strict=True))
    ]
    return {
        "us": times.us,
        "failed": failed | times.failed,
        "errors": errors,
        "wrong": wrong,
        "backward": backward,
    }


def exact(problem: AttentionProblem, tensors: Sequence[Any], grad_out: Any) -> list[Any]:
    """Output and gradients of the last sequence's last KV head in float64.

    Args:
        problem: the call's.
        tensors: query, key and value.
        grad_out: gradient of the output.
    """
    import torch

    group = problem.heads_q // problem.heads_kv
    key, value = (tensor[-1, -1].double().requires_grad_() for tensor in tensors[1:])
    found: list[list[Any]] = [[], []]
    sums = [torch.zeros_like(key), torch.zeros_like(value)]
    for head in range(problem.heads_q - group, problem.heads_q):  # all at once need much memory
        query = tensors[0][-1, head].double().requires_grad_()
        scores = query @ key.mT * problem.head_dim**-0.5
        if problem.is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu_(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = scores.softmax(-1) @ value
        grads = torch.autograd.grad(out, (query, key, value), grad_out[-1, head].double())
        for kept, one in zip(found, (out.detach(), grads[0]), strict=True):
            kept.append(one)
        for total, grad in zip(sums, grads[1:], strict=True):
            total += grad
    return [torch.stack(found[0]), torch.stack(found[1]), *sums]


def away(problem: AttentionProblem, made: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Relative Frobenius errors of output and gradients, of the part that `exact` computes."""
    group = problem.heads_q // problem.heads_kv
    out, grad_query, grad_key, grad_value = made
    parts = out[-1, -group:], grad_query[-1, -group:], grad_key[-1, -1], grad_value[-1, -1]
    return [
        float((part.detach().double() - whole).norm() / whole.norm())
        for part, whole in zip(parts, wanted, strict=True)
    ]


def served(leaves: Sequence[Any], grad_out: Any, problem: AttentionProblem) -> str:
    """The backward kernel that the runtime chooses: own, a vendor's name, or PyTorch's."""
    import torch

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
    if gains_by_cudnn(query, key, value, problem.is_causal, None):
        return "cudnn"
    return f"PyTorch's: {plan.reason}"


def line(row: Mapping[str, Any]) -> str:
    """A call's times and ratios."""
    if "lost" in row:
        return f"{row['call']}: {row['lost']}"
    said = ", ".join(f"{name} {us:.0f}" for name, us in row["us"].items())
    ratios = ", ".join(f"{name} {found:.3f}" for name in OURS if (found := ratio(row, name)))
    bad = f"; WRONG: {', '.join(row['wrong'])}" if row["wrong"] else ""
    return f"{row['call']}: {said} us; speed {ratios}; backward {row['backward']}{bad}"


def ratio(row: Mapping[str, Any], name: str, to: str = PYTORCH) -> float | None:
    """Time of `to` over that of another way; None where either has none."""
    us = row.get("us", {})
    return us[to] / us[name] if us.get(name, 0) > 0 and us.get(to, 0) > 0 else None


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means and extremes of each way, by backward kernel too, then the worst calls."""
    lines: list[tuple[str, ...]] = [("way", "backward by", "calls", "over PyTorch", "worst")]
    kinds = dict.fromkeys(str(row.get("backward", "")).partition(":")[0] for row in rows)
    for name in (ENABLED, TUNER, CUDNN, CONTROL):
        lines += _lines(name, "all", rows)
        if name in OURS and len(kinds) > 1:
            for kind in kinds:
                alike = [r for r in rows if str(r.get("backward", "")).partition(":")[0] == kind]
                lines += _lines(name, kind, alike)
    parts = [table(lines, frozenset({2, 3, 4}))]
    for name in OURS:
        timed = [(found, row) for row in rows if (found := ratio(row, name))]
        timed.sort(key=lambda pair: pair[0])
        parts.append(f"\nworst of {name}")
        parts += [f"{found:.3f}  {row['call']}" for found, row in timed[:WORST]]
    lost = [line(row) for row in rows if "lost" in row or row["wrong"]]
    return "\n".join([*parts, *(["", "wrong, or without a time", *lost] if lost else [])])


def _lines(name: str, kind: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    ratios = [found for row in rows if (found := ratio(row, name))]
    if not ratios:
        return []
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return [(name, kind, str(len(ratios)), f"{mean:.3f}", f"{min(ratios):.3f}")]
