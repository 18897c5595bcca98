"""Attention of e4m3 by the runtime's kernel, FlashAttention-3's serving build and cuDNN.

``scripts/bench fp8_attention`` gives all of them one factor a tensor, which is what cuDNN takes,
and prints each one's time and its error against float64. Times are medians of rounds in which all
take turns in a shuffled order, each a CUDA graph of several calls.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.vendor import FAILURES, cudnn_graph, cudnn_plans, stream_of
from tuner.problem import AttentionProblem, Operand

SHAPES = tuple(
    f"B=2,H=16,S={seqlen},D=128,dtype=e4m3,layout=bshd{mask}"
    for seqlen in (2048, 4096, 8192, 16384)
    for mask in ("", ",causal=1")
)
FACTOR = 0.5
"""Descale factor of queries, keys and values."""
ROUNDS, CALLS = 20, 10
NAMES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
"""cuDNN's factors, in the order of their operands behind queries, keys and values."""
Calls = dict[str, Callable[[], Any]]


@dataclass
class Fp8Graph(cudnn_graph.CudnnGraph):
    """Attention of e4m3 with cuDNN's factors; its output is bf16."""

    def compose(self) -> None:
        query, key, value = (self.tensor(one, i) for i, one in enumerate(self.inputs[:3], 1))
        factors = {one.name: self.tensor(one, i) for i, one in enumerate(self.inputs[3:], 4)}
        out, _, *largest = self.graph.sdpa_fp8(
            q=query,
            k=key,
            v=value,
            **factors,
            attn_scale=self.scale,
            use_causal_mask=self.problem.is_causal,
            generate_stats=False,
            name="attention",
        )
        for uid, (made, operand) in enumerate(
            zip((out, *largest), self.outputs, strict=True), len(self.inputs) + 1
        ):
            self.deliver(made, operand, uid)

    @property
    def inputs(self) -> list[Operand]:
        """Queries, keys, values, and a number for each factor."""
        return [*self.problem.operands[:3], *map(scalar, NAMES)]

    @property
    def outputs(self) -> list[Operand]:
        """The output, and the largest score and element of it."""
        return [self.problem.output, scalar("amax_s"), scalar("amax_o")]


def scalar(name: str) -> Operand:
    """One fp32 number as cuDNN has it."""
    return Operand(name, (1, 1, 1, 1), (1, 1, 1, 1), "float32")


def plans_of(
    problem: AttentionProblem, tensors: Sequence[Any], scale: float
) -> tuple[Calls, list[str]]:
    """A call of each plan that cuDNN can build, and why others cannot."""
    import torch

    cudnn = cudnn_plans.frontend()
    handle = cudnn_graph.handle_of(cudnn, 0, stream_of(tensors[0].device))
    calls: Calls = {}
    refused: list[str] = []
    errors = (*FAILURES, cudnn.cudnnGraphNotSupportedError)
    for heuristic in cudnn_graph.HEURISTICS:
        try:
            named = Fp8Graph(cudnn, problem, scale, "AUTO", handle).planned(heuristic)
        except errors as exc:
            refused.append(f"heuristic {heuristic}: {exc}")
            continue
        for one in named:
            knobs = ",".join(f"{name}={value}" for name, value in one.knobs)
            label = f"cudnn engine {one.engine} {knobs}"
            if label in calls:
                continue
            try:
                graph = Fp8Graph(cudnn, problem, scale, "AUTO", handle)
                plan = graph.built(one.engine, dict(one.knobs))
            except errors as exc:
                refused.append(f"{label}: {exc}")
                continue
            made = [torch.zeros(1, 1, 1, 1, device="cuda") for _ in range(2)]

            def call(plan: cudnn_graph.CudnnPlan = plan, made: Sequence[Any] = tuple(made)) -> Any:
                out = torch.empty_strided(
                    problem.output.shape,
                    problem.output.strides,
                    dtype=torch.bfloat16,
                    device="cuda",
                )
                workspace = torch.empty(
                    max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda"
                )
                stream = stream_of(out.device)
                operands = dict(enumerate((*tensors, out, *made), 1))
                plan.execute(operands, workspace, cudnn_graph.handle_of(cudnn, 0, stream))
                return out

            calls[label] = call
    return calls, refused


def contenders(problem: AttentionProblem) -> tuple[Calls, Any, list[str]]:
    """Calls by name, the output in float64, and what could not take part."""
    import torch

    import tuner

    torch.manual_seed(0)
    scale = 1 / math.sqrt(problem.head_dim)
    tensors = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.float8_e4m3fn, device="cuda").copy_(
            torch.randn(o.shape, device="cuda") / FACTOR
        )
        for o in problem.operands[:3]
    ]
    factors = [torch.full(o.shape, FACTOR, device="cuda") for o in problem.operands[3:-1]]
    query, key, value = (FACTOR * tensor.double() for tensor in tensors)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=problem.is_causal, scale=scale, enable_gqa=True
    )
    names = ("descale_q", "descale_k", "descale_v")
    options = dict(zip(names, factors, strict=True))
    query8, key8, value8 = tensors

    def own() -> Any:
        return tuner.attention(query8, key8, value8, is_causal=problem.is_causal, **options)

    calls: Calls = {}
    refused: list[str] = []
    own()
    if tuner.stats(reset=True).hits:
        calls["tuner.attention"] = own
    else:
        refused.append("tuner.attention: no kernel is served: tune the problem first")
    config = Config("vendor_sdpa", {"kernel": "flash3_serving"})
    serving = family("vendor_sdpa").vendor_call(problem, config, scale)
    if isinstance(serving, str):
        refused.append(serving)
    else:
        calls["flash3_serving"] = lambda: serving(*tensors, *factors)
    try:
        numbers = [torch.full((1, 1, 1, 1), x, device="cuda") for x in (*[FACTOR] * 3, 1, 1, 1)]
        plans, reasons = plans_of(problem, [*tensors, *numbers], scale)
        calls |= plans
        refused += reasons
    except FAILURES as exc:
        refused.append(f"cudnn: {exc}")
    return calls, wanted, refused


def timed(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds a call, the median over rounds."""
    import torch

    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            graphs[name].replay()  # untimed: its predecessor's clocks are not its own
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            found[name].append(1e3 * start.elapsed_time(end) / CALLS)
    return {name: statistics.median(times) for name, times in found.items()}


def compared(problem: AttentionProblem) -> dict[str, Any]:
    """Time and error of each for one problem."""
    import torch

    with torch.no_grad():
        calls, wanted, refused = contenders(problem)
        errors = {
            name: ((call().double() - wanted).norm() / wanted.norm()).item()
            for name, call in calls.items()
        }
        times = timed(calls)
    rows = [
        {"name": name, "us": us, "tflops": problem.flops / us / 1e6, "error": errors[name]}
        for name, us in sorted(times.items(), key=lambda item: item[1])
    ]
    return {"problem": problem.to_json(), "label": problem.label(), "rows": rows, "no": refused}


def text(found: dict[str, Any]) -> str:
    """A problem's lines, the fastest first."""
    lines = [found["label"]]
    lines += [
        f"  {row['us']:9.2f} us {row['tflops']:6.0f} TFLOP/s  error {row['error']:.2e}  "
        f"{row['name']}"
        for row in found["rows"]
    ]
    return "\n".join([*lines, *(f"  not measured: {why}" for why in found["no"])])


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a shape is wrong.
        BenchmarkError: when torch sees no GPU.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench fp8_attention", description=__doc__)
    parser.add_argument("--shape", action="append", default=[], help="as S=1024,D=64,dtype=e4m3")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_place(args.json)
    problems = [AttentionProblem.parse(shape) for shape in args.shape or SHAPES]
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError(f"torch {torch.__version__} sees no GPU")
    members = (family("vendor_sdpa"), family("vendor_cudnn_plans"))
    environment = {name: v for member in members for name, v in member.environment().items()}
    every = []
    for problem in problems:
        every.append(compared(problem))
        print(text(every[-1]), flush=True)
        if args.json is not None:
            write_json(args.json, {"environment": environment, "problems": every})
    return 0
