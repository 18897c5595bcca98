"""Long causal attention with grouped heads beside FlashAttention-3, in bursts and sustained.

``scripts/bench sustained`` times the own kernels that are compiled and every build of
FlashAttention-3 that is here, each under two loads:

- in bursts: some calls behind copies, during which the chip cools to its highest clock;
- sustained: the same calls for half a second, of which the second half counts. The clock is then
  the one at which the chip stays within its power limit.

Each call follows an element-wise kernel that writes the queries, whose time is taken off.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import own_kernels
from benchmarks.call_times import FAILURES, Contender, first_line, time_calls
from tuner.base.output import check_place
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.measure.device import read_clocks
from tuner.problem import AttentionProblem

SHAPES = tuple(
    f"B=1,H={heads},HKV={heads // 8},S={seqlen},D=128,causal=1,dtype=bf16,layout=bshd"
    for heads, seqlen in ((64, 8192), (32, 16384), (16, 32768))
)
PEERS = ("flash3", "flash3_splits", "flash3_serving")
OWN = 2
"""Own kernels that take part under both loads: the fastest of a first pass."""
CHECKED = 64
"""Last queries, whose outputs are compared with float64."""
MAX_ERROR = {"float16": 1e-3, "bfloat16": 8e-3}
"""Relative Frobenius error from which on a kernel is left out: the gate's limits."""
BURST_US = 4000.0
"""Calls of a graph take about this long; two calls at least."""
COOLING_S = 0.02
"""Copies before each burst."""
COPIED_BYTES = 1 << 28
BURSTS = 15
SUSTAINED_S = 0.5
SUSTAINED_ROUNDS = 3


class Tensors:
    """Inputs of a problem, the kernels that answer it, and what the right output is.

    Args:
        problem: problem to compute.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        import torch

        torch.manual_seed(0)
        self.problem, self.scale = problem, 1 / math.sqrt(problem.head_dim)
        dtype = getattr(torch, problem.dtype)
        self.inputs = [
            torch.empty_strided(o.shape, o.strides, dtype=dtype, device="cuda").normal_()
            for o in problem.inputs
        ]
        self.source = self.inputs[0].clone()
        query, key, value = self.inputs
        self.wanted = own_kernels.exact(
            query,
            key,
            value,
            self.scale,
            is_causal=problem.is_causal,
            first=max(0, problem.seqlen_q - CHECKED),
        )

    def before(self, _: int) -> Any:
        """Writes the queries."""
        import torch

        return torch.add(self.source, 0.0, out=self.inputs[0])

    def own(self) -> list[Contender]:
        """Own kernels that are compiled."""
        named = dict(zip((o.name for o in self.problem.inputs), self.inputs, strict=True))
        return list(own_kernels.contenders(self.problem, named, self.scale))

    def peers(self, refused: dict[str, str]) -> list[Contender]:
        """Builds of FlashAttention-3; why others are missing goes to `refused`."""
        found = []
        for name in PEERS:
            config = Config("vendor_sdpa", {"kernel": name})
            call = family("vendor_sdpa").vendor_call(self.problem, config, self.scale)
            if isinstance(call, str):
                refused[name] = call
            else:
                found.append(Contender(name, partial(self._called, call)))
        return found

    def _called(self, call: Callable[..., Any], _: int) -> Any:
        return call(*self.inputs)

    def right(self, every: Sequence[Contender], refused: dict[str, str]) -> list[Contender]:
        """Kernels whose last queries are right. The errors of the others go to `refused`."""
        import torch

        found = []
        for one in every:
            try:
                error = own_kernels.relative_error(one.call(0), self.wanted)
            except FAILURES as exc:
                torch.cuda.synchronize()
                refused[one.name] = first_line(exc)
                continue
            if error <= MAX_ERROR[self.problem.dtype]:
                found.append(one)
            else:
                refused[one.name] = f"relative error {error:.1e}"
        return found


def compared(problem: AttentionProblem) -> dict[str, Any]:
    """Microseconds of each kernel under both loads, and the clocks of the sustained one."""
    import torch

    refused: dict[str, str] = {}
    with torch.no_grad():
        tensors = Tensors(problem)
        own, peers = (
            tensors.right(ones, refused) for ones in (tensors.own(), tensors.peers(refused))
        )
        first = time_calls(own, tensors.before, 1).us if own else {}
        fastest = sorted(first, key=lambda name: first[name])[:OWN]
        chosen = [*(one for one in own if one.name in fastest), *peers]
        loads = loaded(chosen, tensors.before, first)
    return {
        "problem": problem.to_json(),
        "label": problem.label(),
        "flops": problem.flops,
        "own": fastest,
        "first_us": first,
        **loads,
        "no": refused,
    }


def loaded(
    chosen: Sequence[Contender], before: Callable[[int], Any], known: Mapping[str, float]
) -> dict[str, Any]:
    """Both loads.

    Args:
        chosen: contenders, each called before.
        before: enqueues the element-wise kernel.
        known: microseconds of a call, where they are known.
    """
    usual = statistics.median(known.values()) if known else BURST_US
    count = max(2, round(BURST_US / usual))
    graphs = {one.name: captured(before, one, count) for one in chosen}
    alone = captured(before, None, count)
    cool, chance = cooler(), random.Random(0)
    for graph in graphs.values():
        graph.replay()
    lead_us = statistics.median(_behind(cool, alone) for _ in range(BURSTS))
    bursts: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(BURSTS):
        for name in chance.sample(sorted(graphs), len(graphs)):
            bursts[name].append(_behind(cool, graphs[name]) - lead_us)
    lead_us, _ = _held(alone)
    held: dict[str, list[float]] = {name: [] for name in graphs}
    clocks: dict[str, Any] = {}
    for _ in range(SUSTAINED_ROUNDS):
        for name in chance.sample(sorted(graphs), len(graphs)):
            us, clocks[name] = _held(graphs[name])
            held[name].append(us - lead_us)
    return {
        "bursts_us": {name: statistics.median(times) / count for name, times in bursts.items()},
        "sustained_us": {name: statistics.median(times) / count for name, times in held.items()},
        "spread": {
            name: (max(times) - min(times)) / statistics.median(times)
            for name, times in held.items()
        },
        "clocks": clocks,
    }


def cooler() -> Callable[[], None]:
    """A function that copies for a while: the chip draws little power meanwhile."""
    import torch

    made = [torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def cool() -> None:
        until = time.monotonic() + COOLING_S
        while time.monotonic() < until:
            made[0].copy_(made[1])
            torch.cuda.synchronize()

    return cool


def captured(before: Callable[[int], Any], one: Contender | None, count: int) -> Any:
    """A graph of some calls, each behind the element-wise kernel; of that alone without a call."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            before(0)
            if one is not None:
                one.call(0)
    return graph


def _behind(cool: Callable[[], None], graph: Any) -> float:
    """Microseconds of a replay behind copies."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cool()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _held(graph: Any) -> tuple[float, dict[str, Any]]:
    """Microseconds of a replay while it is repeated, in the second half of the time, and the clocks
    near its end.
    """
    import torch

    once, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    once.record()
    graph.replay()
    start.record()
    start.synchronize()
    half_s = SUSTAINED_S / 2
    count = max(1, math.ceil(half_s * 1e3 / once.elapsed_time(start)))
    for _ in range(count):
        graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    start.synchronize()
    time.sleep(0.8 * half_s)
    clocks = asdict(read_clocks())
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count, clocks


def leads(found: Mapping[str, Any]) -> dict[str, float]:
    """FlashAttention-3's least time over the least own one, by load."""
    ratios = {}
    for load in ("bursts_us", "sustained_us"):
        own = [us for name, us in found[load].items() if name in found["own"]]
        peers = [us for name, us in found[load].items() if name not in found["own"]]
        if own and peers:
            ratios[load] = min(peers) / min(own)
    return ratios


def text(found: Mapping[str, Any]) -> str:
    """A problem's lines."""
    lines = [found["label"]]
    for name, us in sorted(found["sustained_us"].items(), key=lambda item: item[1]):
        held, burst = (found["flops"] / x / 1e6 for x in (us, found["bursts_us"][name]))
        clocks = found["clocks"][name]
        lines.append(
            f"  bursts {found['bursts_us'][name]:9.1f} us {burst:5.0f} TFLOP/s  "
            f"sustained {us:9.1f} us {held:5.0f} TFLOP/s  "
            f"{clocks['sm_mhz']} MHz {clocks['power_w']:.0f} W  {name}"
        )
    ratios = leads(found)
    if ratios:
        said = ", ".join(f"{load.removesuffix('_us')} {x:.3f}" for load, x in ratios.items())
        lines.append(f"  own speed of FlashAttention-3's: {said}")
    return "\n".join([*lines, *(f"  not measured: {n}: {why}" for n, why in found["no"].items())])


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a shape is wrong.
        BenchmarkError: when torch sees no GPU.
    """
    parser = Parser(prog="scripts/bench sustained", description=__doc__)
    parser.add_argument(
        "--shape", action="append", default=[], help="as H=64,HKV=8,S=8192,D=128,causal=1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    problems = [AttentionProblem.parse(shape) for shape in args.shape or SHAPES]
    for problem in problems:
        if problem.dtype not in MAX_ERROR or not own_kernels.is_dense(problem):
            allowed = "fp16 and bf16, causal or full"
            raise ConfigError(f"{problem.label()} cannot be compared (allowed: {allowed})")
    own_kernels.measured(problems, compared, text, args.json)
    return 0
