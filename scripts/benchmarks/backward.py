"""Gradients of attention by our own kernels and all that the machine has beside them.

``scripts/bench backward`` compiles the rule's own kernels for each of 22 shapes. It times them
beside cuDNN, FlashAttention-2 and -3, also deterministic, and the runtime's own choice.
All read FlashAttention-2's output and log-sum-exp. Times are medians of rounds in which all take
turns in a shuffled order, each a CUDA graph of several calls. ``--errors N`` compares gradients
with those of float64 instead.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks import backward_errors, file_head
from benchmarks.gpu import need_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.bench.suites import SUITES
from tuner.cli import Parser
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, find_toolchain
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.errors import BenchmarkError, TunerError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.fused_attention_backward.rule import KERNELS, kind_of, placed
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionBackwardProblem, AttentionProblem

ROUNDS, BURST_US = 20, 2000.0
VENDORS = ("cudnn", "flash2", "flash3", "flash4")
SERVED = "served"
"""Name of the runtime's own call."""
Calls = dict[str, Callable[[], Any]]


def acceptance() -> list[AttentionBackwardProblem]:
    """The problems of the acceptance suite, in bf16."""
    known = cast(Sequence[AttentionProblem], SUITES["acceptance"].problems)
    return [
        AttentionBackwardProblem.of(replace(one, dtype="bfloat16", layout="bshd")) for one in known
    ]


def variants(problem: AttentionBackwardProblem) -> dict[str, Config]:
    """The rule's own configs of a problem by name: ``own``, and the deterministic one."""
    named = {"own": problem, "own, ordered": replace(problem, is_deterministic=True)}
    found = {}
    for name, posed in named.items():
        kind = kind_of(posed)
        if kind is not None and kind in KERNELS:
            found[name] = placed(KERNELS[kind], posed, DEFAULT_GPU)
    return found


def specs_of(problem: AttentionBackwardProblem) -> dict[str, KernelSpec]:
    """The kernels of `variants`."""
    member = family("fused_attention_backward")
    return {
        name: next(iter(member.kernels(problem, config).values()))
        for name, config in variants(problem).items()
    }


def own_call(
    problem: AttentionBackwardProblem, config: Config, kernel: LoadedKernel, inputs: Sequence[Any]
) -> Callable[[], Any]:
    """One call of an own kernel on fixed inputs, into outputs of its own."""
    import torch

    (launch,) = family(config.family).launches(problem, config, 1 / math.sqrt(problem.head_dim))
    outs = [
        torch.empty_strided(o.shape, o.strides, dtype=getattr(torch, o.dtype), device="cuda")
        for o in problem.outputs
    ]
    size = kernel.workspace_bytes(launch.integers)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    names = [operand.name for operand in problem.operands]
    tensors = dict(zip(names, (*inputs, *outs), strict=True))
    pointers = [tensors[ref.operand].data_ptr() for ref in launch.tensors]
    launched = kernel.bind(launch.integers, launch.scalars)

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        launched(pointers, workspace.data_ptr(), stream)
        return outs

    return call


def forward(problem: AttentionBackwardProblem) -> list[Any]:
    """Inputs: drawn, and what a forward pass leaves."""
    return backward_errors.inputs_of(problem, 0)


def contenders(
    problem: AttentionBackwardProblem, kernels: Mapping[KernelSpec, LoadedKernel]
) -> tuple[Calls, list[str]]:
    """Calls by name, and what could not take part."""
    inputs, refused = forward(problem), list[str]()
    scale = 1 / math.sqrt(problem.head_dim)
    calls: Calls = {}
    specs = specs_of(problem)
    for name, config in variants(problem).items():
        if specs[name] in kernels:
            calls[name] = own_call(problem, config, kernels[specs[name]], inputs)
        else:
            refused.append(f"{name}: does not compile")
    for kernel in VENDORS:
        for is_deterministic in (False, True):
            name = f"{kernel}, deterministic" if is_deterministic else kernel
            posed = replace(problem, is_deterministic=is_deterministic)
            config = Config("sdpa_backward", {"kernel": kernel})
            call = family("sdpa_backward").vendor_call(posed, config, scale)
            if isinstance(call, str):
                refused.append(f"{name}: {call}")
            else:
                calls[name] = lambda call=call: call(*inputs)  # type: ignore[misc]
    if problem.is_windowed or problem.softcap or problem.is_varlen:
        return calls, refused  # the runtime's call of these is its forward pass's
    calls[SERVED], served = served_call(problem, inputs)
    return calls, [*refused, f"{SERVED} by {served}"]


def served_call(
    problem: AttentionBackwardProblem, inputs: Sequence[Any]
) -> tuple[Callable[[], Any], str]:
    """The runtime's call, and the kernel that it chooses."""
    import torch

    from tuner.runtime.call.plan import Plan
    from tuner.runtime.call.serving import find
    from tuner.runtime.training.gradients import GradientsCall

    query, key, value, out, lse, grad_out = inputs
    tensors = grad_out, query, key, value, out, lse
    options = problem.is_causal, None, problem.is_deterministic
    plan = find(GradientsCall(query, key, value, out, lse, grad_out, *options))
    chosen = plan.config.get("kernel", "own") if isinstance(plan, Plan) else f"PyTorch: {plan}"
    return lambda: torch.ops.tuner.attention_backward(*tensors, problem.is_causal, None), chosen


def timed(
    calls: Mapping[str, Callable[[], Any]], estimate_us: float, rounds: int = ROUNDS
) -> dict[str, float]:
    """Microseconds a call, the median over rounds."""
    import torch

    count = max(2, min(20, round(BURST_US / estimate_us)))
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(count):
                call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(1e3 * start.elapsed_time(end) / count)
    return {name: statistics.median(times) for name, times in found.items()}


def compared(
    problem: AttentionBackwardProblem,
    kernels: Mapping[KernelSpec, LoadedKernel],
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Time of each for one problem, and how far its gradients are from FlashAttention-2's, under a
    soft cap from FlashAttention-3's.
    """
    import torch

    with torch.no_grad():
        calls, refused = contenders(problem, kernels)
        against = next(name for name in ("flash2", "flash3", *calls) if name in calls)
        wanted = [t.double() for t in calls[against]()]
        away = {
            name: max(
                float((made.double() - other).norm() / other.norm())
                for made, other in zip(call(), wanted, strict=True)
            )
            for name, call in calls.items()
        }
        del wanted
        estimate = problem.flops / 5e8
        times = timed(calls, max(30.0, estimate), rounds)
    rows = [
        {"name": name, "us": us, "tflops": problem.flops / us / 1e6, "away": away[name]}
        for name, us in sorted(times.items(), key=lambda item: item[1])
    ]
    facts = {"problem": problem.to_json(), "label": problem.label(), "against": against}
    return {**facts, "rows": rows, "no": refused}


def text(found: dict[str, Any]) -> str:
    """A problem's lines, the fastest first, and how the own kernels stand."""
    lines = [found["label"]]
    lines += [
        f"  {row['us']:9.2f} us {row['tflops']:6.0f} TFLOP/s  from {found['against']} "
        f"{row['away']:.1e}  {row['name']}"
        for row in found["rows"]
    ]
    for mode in ("", "deterministic"):
        own, other = best(found, True, mode), best(found, False, mode)
        if own and other:
            title = f"own {mode} speed".replace("  ", " ")
            lines.append(f"  {title}: {other['us'] / own['us']:.3f} of {other['name']}")
    served = next((row for row in found["rows"] if row["name"] == SERVED), None)
    if served:
        least = min(row["us"] for row in found["rows"] if "deterministic" not in row["name"])
        lines.append(f"  served speed: {least / served['us']:.3f} of the fastest")
    return "\n".join([*lines, *(f"  not measured: {why}" for why in found["no"])])


def best(found: Mapping[str, Any], is_own: bool, mode: str) -> dict[str, Any] | None:
    """The fastest row of the own kernels or of the others.

    Args:
        found: result of `compared`.
        is_own: True for own kernels, False for the others.
        mode: ``deterministic`` for those that are; empty for all others.
    """
    word = "ordered" if is_own else "deterministic"
    named = [row for row in found["rows"] if row["name"] != SERVED]
    rows = [row for row in named if row["name"].startswith("own") == is_own]
    alike = [row for row in rows if (word in row["name"]) == bool(mode)]
    return min(alike, key=lambda row: float(row["us"]), default=None)


def built(problems: Sequence[AttentionBackwardProblem]) -> dict[KernelSpec, LoadedKernel]:
    """The kernels of all problems' variants that compile."""
    wanted = dict.fromkeys(spec for problem in problems for spec in specs_of(problem).values())
    kernels = {}
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        for spec, future in compiler.submit(list(wanted)):
            try:
                kernels[spec] = load(future.result())
            except TunerError as exc:
                print(f"does not compile: {exc}", flush=True)
    return kernels


def errors(
    problems: Sequence[AttentionBackwardProblem], environment: dict[str, Any], args: Any
) -> int:
    """Errors of the rule's own kernels beside FlashAttention-2's. Returns 1 if one is too large.

    Args:
        problems: drawn ones.
        environment: facts for the file.
        args: the command line.
    """
    kernels, rows = built(problems), []
    for number, problem in enumerate(problems):
        (spec,) = family("fused_attention_backward").kernels(problem, own_config(problem)).values()

        def own(inputs: Sequence[Any], problem: Any = problem, spec: Any = spec) -> Any:
            return own_call(problem, own_config(problem), kernels[spec], inputs)

        if spec in kernels:
            rows.append(backward_errors.row(problem, own, number))
        if args.json is not None and (number % 10 == 9 or number + 1 == len(problems)):
            write_json(args.json, {"environment": environment, "seed": args.seed, "rows": rows})
    print(backward_errors.text(rows))
    is_near = len(rows) == len(problems) and all(map(backward_errors.is_near, rows))
    return 0 if is_near else 1


def own_config(problem: AttentionBackwardProblem) -> Config:
    """The rule's own config of a problem whose kind has one."""
    kind = kind_of(problem)
    if kind is None:
        raise BenchmarkError(f"no own kernel has {problem.label()}")
    return placed(KERNELS[kind], problem, DEFAULT_GPU)


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a shape is wrong.
        BenchmarkError: when torch sees no GPU.
    """
    parser = Parser(prog="scripts/bench backward", description=__doc__)
    parser.add_argument("--shape", action="append", default=[], help="as S=1024,D=64,dtype=bf16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--errors",
        type=int,
        metavar="N",
        help="time nothing: errors of N drawn problems beside FlashAttention-2's, against float64",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default {ROUNDS})"
    )
    parser.add_argument("--seed", default="0", help="seed of the drawn problems (default 0)")
    args = parser.parse_args(argv)
    check_place(args.json)
    drawn = [] if args.errors is None else backward_errors.drawn(args.errors, args.seed)
    problems = [AttentionBackwardProblem.parse(shape) for shape in args.shape] or acceptance()
    need_gpu()
    environment = file_head.complete(family("sdpa_backward").environment())
    if args.errors is not None:
        return errors(drawn, environment, args)
    kernels = built(problems)
    every = []
    for problem in problems:
        every.append(compared(problem, kernels, args.rounds))
        print(text(every[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"environment": environment, "problems": every})
    return 0
