"""Attention of e4m3 by own kernels, FlashAttention-3's serving build and cuDNN.

``scripts/bench fp8_attention`` takes the own kernels that are compiled. All contenders get one
factor a tensor, the only form that cuDNN takes. It prints the time of each in a stream and its
error against float64. cuDNN's outputs are e4m3 on Hopper, scaled to its range; the others' are
bf16. All are timed in one pass (`call_times.time_calls`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import own_kernels
from benchmarks.call_times import Contender, first_line, time_calls
from benchmarks.own_kernels import exact
from tuner.base.output import check_place
from tuner.cli import Parser
from tuner.cli.aot import compile_aot
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_toolchain
from tuner.config import Config
from tuner.families import family
from tuner.families.peers import FAILURES, cudnn_graph, cudnn_plans, stream_of
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem, Operand
from tuner.selection.shipped import shipped

SHAPES = tuple(
    f"B=2,H=16,S={seqlen},D=128,dtype=e4m3,layout=bshd{mask}"
    for seqlen in (2048, 4096, 8192, 16384)
    for mask in ("", ",causal=1")
)
FACTOR = 0.5
"""Descale factor of queries, keys and values."""
NAMES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
"""cuDNN's factors, in the order of their operands behind queries, keys and values."""
SCORES = 256.0
"""cuDNN's factor of probabilities before they are rounded to e4m3: up to 1, the largest is 448."""
LARGEST = 448.0
MIN_TILE_N = 128
"""Narrowest tiles that `--compile` adds to those of shipped decisions, keys."""
Calls = dict[str, Callable[[], Any]]
Before = Callable[[int], Any]


@dataclass
class Fp8Graph(cudnn_graph.CudnnGraph):
    """Attention of e4m3 with cuDNN's factors; its output is e4m3, on Hopper the only one."""

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
        out = replace(self.problem.output, dtype=E4M3)
        return [out, scalar("amax_s"), scalar("amax_o")]


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
                    dtype=torch.float8_e4m3fn,
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


def contenders(
    problem: AttentionProblem,
) -> tuple[Calls, Calls, Any, Before, float, list[str]]:
    """Own calls and peers' by name, the output in float64, and the kernel that writes the queries.
    Then the factor of outputs in e4m3, and the contenders that could not take part.
    """
    import torch

    torch.manual_seed(0)
    scale = 1 / math.sqrt(problem.head_dim)
    tensors = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.float8_e4m3fn, device="cuda").copy_(
            torch.randn(o.shape, device="cuda") / FACTOR
        )
        for o in problem.operands[:3]
    ]
    factors = [torch.full(o.shape, FACTOR, device="cuda") for o in problem.operands[3:-1]]
    query, key, value = tensors
    wanted = exact(query, key, value, scale * FACTOR**2, is_causal=problem.is_causal).mul_(FACTOR)
    given = zip(problem.inputs, [*tensors, *factors], strict=True)
    own: Calls = {
        one.name: partial(one.call, 0)
        for one in own_kernels.contenders(problem, {o.name: t for o, t in given}, scale)
    }
    peers: Calls = {}
    refused = [] if own else ["own kernels: none is compiled (--compile)"]
    config = Config("vendor_sdpa", {"kernel": "flash3_serving"})
    serving = family("vendor_sdpa").vendor_call(problem, config, scale)
    if isinstance(serving, str):
        refused.append(serving)
    else:
        peers["flash3_serving"] = lambda: serving(*tensors, *factors)
    grown = 2.0 ** math.floor(math.log2(LARGEST / float(wanted.abs().max())))
    try:
        values = (*[FACTOR] * 3, 1 / SCORES, SCORES, grown)
        numbers = [torch.full((1, 1, 1, 1), x, device="cuda") for x in values]
        plans, reasons = plans_of(problem, [*tensors, *numbers], scale)
        peers |= plans
        refused += reasons
    except FAILURES as exc:
        refused.append(f"cudnn: {exc}")
    source, written = (tensor.view(torch.uint8) for tensor in (query.clone(), query))
    return own, peers, wanted, lambda _: torch.add(source, 0, out=written), grown, refused


def compared(problem: AttentionProblem) -> dict[str, Any]:
    """Time and error of each for one problem."""
    import torch

    with torch.no_grad():
        own, peers, wanted, before, grown, refused = contenders(problem)
        errors: dict[str, float] = {}
        for name, call in {**own, **peers}.items():
            try:
                out = call()
                factor = grown if out.dtype == torch.float8_e4m3fn else 1.0
                errors[name] = own_kernels.relative_error(out.double() / factor, wanted)
            except FAILURES as exc:
                torch.cuda.synchronize()
                refused.append(f"{name}: {first_line(exc)}")
        del wanted
        passed = [Contender(n, ignoring(c)) for n, c in {**own, **peers}.items() if n in errors]
        times = time_calls(passed, before, 1)
    rows = [
        {
            "name": name,
            "is_own": name in own,
            "us": us,
            "tflops": problem.flops / us / 1e6,
            "error": errors[name],
        }
        for name, us in sorted(times.us.items(), key=lambda item: item[1])
    ]
    refused += [f"{name}: {why}" for name, why in times.failed.items()]
    return {"problem": problem.to_json(), "label": problem.label(), "rows": rows, "no": refused}


def ignoring(call: Callable[[], Any]) -> Callable[[int], Any]:
    """The call as `time_calls` makes it: there is one copy of the tensors."""
    return lambda _: call()


def lead(found: Mapping[str, Any]) -> tuple[float, bool] | None:
    """Time of the fastest peer over that of the fastest own kernel, and True if the own error is
    not larger. None where one of them is missing.
    """
    own = next((row for row in found["rows"] if row["is_own"]), None)
    peer = next((row for row in found["rows"] if not row["is_own"]), None)
    if own is None or peer is None:
        return None
    return peer["us"] / own["us"], own["error"] <= peer["error"]


def text(found: Mapping[str, Any]) -> str:
    """A problem's lines, the fastest first."""
    lines = [found["label"]]
    lines += [
        f"  {row['us']:9.2f} us {row['tflops']:6.0f} TFLOP/s  error {row['error']:.2e}  "
        f"{row['name']}"
        for row in found["rows"]
    ]
    if (standing := lead(found)) is not None:
        ratio, is_right = standing
        lines.append(
            f"  own speed {ratio:.3f} of the fastest peer, "
            f"error {'no larger' if is_right else 'larger'}"
        )
    return "\n".join([*lines, *(f"  not measured: {why}" for why in found["no"])])


def by_tile(problem: AttentionProblem) -> list[Config]:
    """The config of two groups of warps with the least estimate, for each width of tiles from
    `MIN_TILE_N` on, with and without `ping_pong` and `skips_masked`.

    Args:
        problem: problem to compute.
    """
    least: dict[Hashable, tuple[float, Config]] = {}
    for config in own_kernels.FAMILY.space(problem, DEFAULT_GPU):
        is_wide = config["warp_groups"] == 2 and config["tile_n"] >= MIN_TILE_N
        if is_wide and config.get("ping_pong") is not None:
            kind = config["tile_n"], config["ping_pong"], config.get("skips_masked")
            us = own_kernels.FAMILY.predict_us(problem, config, DEFAULT_GPU)
            if kind not in least or us < least[kind][0]:
                least[kind] = us, config
    return [config for _, config in least.values()]


def compile_kernels(problems: Sequence[AttentionProblem]) -> int:
    """Compile own kernels: of each decision in e4m3 that ships, every one that is legal here, and
    `by_tile`.

    Returns:
        1 when one failed.
    """
    decided = [
        m.config
        for entry in shipped()
        if isinstance(entry.problem, AttentionProblem) and entry.problem.dtype == E4M3
        for m in entry.ranked
        if m.config.family == own_kernels.FAMILY.name
    ]
    specs = [
        spec
        for problem in problems
        for config in dict.fromkeys([*decided, *by_tile(problem)])
        if own_kernels.FAMILY.accepts(problem, config, DEFAULT_GPU)
        for spec in own_kernels.FAMILY.kernels(problem, config).values()
    ]
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        return compile_aot(list(dict.fromkeys(specs)), compiler, None)


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a shape is wrong.
        BenchmarkError: when torch sees no GPU.
    """
    parser = Parser(prog="scripts/bench fp8_attention", description=__doc__)
    parser.add_argument("--shape", action="append", default=[], help="as S=1024,D=64,dtype=e4m3")
    parser.add_argument("--compile", action="store_true", help="compile kernels, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    problems = [AttentionProblem.parse(shape) for shape in args.shape or SHAPES]
    if args.compile:
        return compile_kernels(problems)
    every = own_kernels.measured(problems, compared, text, args.json)
    leads = [standing[0] for found in every if (standing := lead(found)) is not None]
    if leads:
        mean, worst = statistics.geometric_mean(leads), min(leads)
        print(
            f"{len(leads)} of {len(every)} problems: own speed {mean:.3f} of the fastest peer in "
            f"the mean, {worst:.3f} at the worst"
        )
    return 0
