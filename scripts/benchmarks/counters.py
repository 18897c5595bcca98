"""Counters of own kernels and peers beside one another, by Nsight Compute.

``scripts/bench counters --shape S --call NAME --call NAME`` counts one call of each. Names are
those that `fp8_attention` prints for e4m3 and `sustained` for fp16 and bf16: `flash3`, or the
beginning of another. ``--op attention_backward`` counts gradients, by the names that `backward`
prints. ``--op gemm`` counts products of e4m3 with factors of operands or rows, by the names in the
file that `e4m3` writes. It serves where `tuner profile` cannot: shapes without a decision,
cuDNN's plans and cuBLASLt's algorithms. Clocks are not locked, and nothing is timed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import backward, e4m3, fp8_attention, own_kernels, sustained
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure import nsight
from tuner.measure.profile import CYCLES, CYCLES_ACTIVE, DURATION, SHARES, STALLS, KernelCounters
from tuner.problem import E4M3, AttentionBackwardProblem, AttentionProblem, GemmProblem

MARK = "triu_tril_kernel"
"""Kernel of PyTorch that is launched before each call, and that no contender launches."""
STALLS_SHOWN = 3

Problem = AttentionProblem | AttentionBackwardProblem | GemmProblem


def problem_of(op: str, shape: str) -> Problem:
    """The problem of a shape.

    Raises:
        ConfigError: when it is not one that can be counted.
    """
    if op == AttentionBackwardProblem.op:
        return AttentionBackwardProblem.parse(shape)
    if op != GemmProblem.op:
        return AttentionProblem.parse(shape)
    problem = GemmProblem.parse(shape)
    if problem.dtype != E4M3 or problem.scales not in ("tensor", "row"):
        raise ConfigError(f"{problem.label()} is not counted (allowed: scales=tensor, scales=row)")
    return problem


def calls_of(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Every call that can be counted, by name, on inputs of its own.

    Args:
        problem: problem to compute.
    """
    if isinstance(problem, GemmProblem):
        return _calls_of_product(problem)
    if isinstance(problem, AttentionBackwardProblem):
        return backward.contenders(problem, backward.built([problem]))[0]
    if problem.dtype == E4M3:
        own, peers, *_ = fp8_attention.contenders(problem)
        return {**own, **peers}
    tensors = sustained.Tensors(problem)
    every = [*tensors.own(), *tensors.peers({})]
    return {one.name: partial(one.call, 0) for one in every}


def _calls_of_product(problem: GemmProblem) -> dict[str, Callable[[], Any]]:
    from tuner.runtime.call import devices

    tensors = e4m3.Calls(problem)
    calls = dict(tensors.vendors())
    for config, artifacts in e4m3.built(problem, devices.gpu_of(0)):
        calls[e4m3.name_with_band(config)] = tensors.own(config, artifacts)
    return {name: partial(call, 0) for name, call in calls.items()}


def chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The known name that each given one is, or is the beginning of; the first of several.

    Raises:
        ConfigError: when there is none.
    """
    found = []
    for name in names:
        matching = [one for one in known if one == name] or [
            one for one in known if one.startswith(name)
        ]
        if not matching:
            raise ConfigError(f"call '{name}' is unknown (allowed: {', '.join(known)})")
        found.append(matching[0])
    return found


def child(problem: Problem, names: Sequence[str]) -> None:
    """Run each call between the marks of the CUDA profiler, behind the kernel `MARK`.

    Raises:
        ConfigError: when a name is unknown.
    """
    import torch

    with torch.no_grad():
        calls = calls_of(problem)
        asked = [calls[name] for name in chosen(names, list(calls))]
        square = torch.ones(8, 8, device="cuda")
        torch.triu(square)
        for call in asked * 2:  # loads modules, then brings the inputs into the L2
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for call in asked:
            torch.triu(square)
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parted(
    kernels: Sequence[KernelCounters], names: Sequence[str]
) -> dict[str, list[KernelCounters]]:
    """The launches of each call, in order: those between two marks.

    Raises:
        BenchmarkError: when there are not as many marks as calls, or a call launched nothing.
    """
    parts: list[list[KernelCounters]] = []
    for kernel in kernels:
        if MARK in kernel.kernel:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    if len(parts) != len(names) or not all(parts):
        counts = [len(part) for part in parts]
        raise BenchmarkError(f"{len(names)} calls were made, counted were launches: {counts}")
    return dict(zip(names, parts, strict=True))


def text(label: str, found: Mapping[str, Sequence[KernelCounters]]) -> str:
    """A shape's lines: for each call its longest launch, and the time of all of them."""
    lines = [label]
    for name, kernels in found.items():
        longest = max(kernels, key=lambda kernel: kernel.get(DURATION) or 0.0)
        total = sum(kernel.get(DURATION) or 0.0 for kernel in kernels)
        cycles, active = (longest.get(one) or 0.0 for one in (CYCLES, CYCLES_ACTIVE))
        lines.append(
            f"  {name}: {total / 1e3:.1f} us in {len(kernels)} kernels; {longest.kernel} "
            f"{(longest.get(DURATION) or 0.0) / 1e3:.1f} us, {cycles / 1e3:.0f} thousand cycles, "
            f"{active / 1e3:.0f} active"
        )
        shares = [f"{c.label} {value.value:.1f} %" for c, value in longest.shown(SHARES)]
        stalls = sorted(longest.shown(STALLS), key=lambda one: -one[1].value)[:STALLS_SHOWN]
        lines.append("    " + ", ".join(shares))
        lines.append("    stalls: " + ", ".join(f"{c.label} {v.value:.2f}" for c, v in stalls))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Count, print, write.

    Raises:
        ConfigError: when a shape or a name is wrong.
        BenchmarkError: without ncu, or when its counters cannot be read.
    """
    parser = Parser(prog="scripts/bench counters", description=__doc__)
    ops = [kind.op for kind in (AttentionProblem, AttentionBackwardProblem, GemmProblem)]
    parser.add_argument(
        "--op",
        choices=ops,
        default=AttentionProblem.op,
        help="operation of the shape (default attention)",
    )
    parser.add_argument("--shape", required=True, help="as S=1024,D=64,dtype=e4m3")
    parser.add_argument("--call", action="append", default=[], metavar="NAME", help="a call")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ncu", type=Path, metavar="PATH", help="Nsight Compute's command")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    problem = problem_of(args.op, args.shape)
    if not args.call:
        raise ConfigError("no call is named (--call flash3)")
    if twice := [name for name, count in Counter(args.call).items() if count > 1]:
        raise ConfigError(f"--call {twice[0]} is given twice (allowed: each call once)")
    if args.child:
        child(problem, args.call)
        return 0
    named = [part for name in args.call for part in ("--call", name)]
    asked = "--op", args.op, "--shape", args.shape, *named
    command = python_command("-m", "benchmarks", "counters", "--child", *asked)
    found = parted(nsight.counted(nsight.find_ncu(args.ncu), command, "warm"), args.call)
    print(text(problem.label(), found), flush=True)
    if args.json is not None:
        about = own_kernels.environment()
        counted = {name: [as_json(kernel) for kernel in part] for name, part in found.items()}
        write_json(
            args.json, {"environment": about, "problem": problem.to_json(), "calls": counted}
        )
    return 0


def as_json(kernel: KernelCounters) -> dict[str, Any]:
    """Name and values of a launch."""
    values = {metric: value.value for metric, value in kernel.counters.items()}
    return {"kernel": kernel.kernel, "counters": values}
