"""Attention by every own kernel that is compiled, beside peers: e4m3, and long causal prompts.

``fp8_attention``: all get one factor a tensor, the only form that cuDNN takes. cuDNN's outputs are
e4m3 on Hopper, scaled to its range; the others' are bf16. ``sustained`` times under two loads:

- in bursts: some calls behind copies, during which the chip cools to its highest clock;
- sustained: the same calls for half a second, of which the second half counts. The clock is then
  the one at which the chip stays within its power limit.

Errors are against float64. ``tuner`` is the fastest own kernel.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import harness, rows
from benchmarks.harness import Contender, Row
from benchmarks.population_cudnn import plans_of
from tuner.cli.aot import compile_aot
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.toolchain import find_toolchain
from tuner.config import Config, Value
from tuner.families import families, family
from tuner.families.base import SCRATCH
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect, read_clocks
from tuner.measure.subjects import WORKSPACE, CompiledSubject
from tuner.problem import E4M3, AttentionProblem, Problem
from tuner.selection.shipped import shipped

FAMILY = family("fused_attention")
CHUNK = 512
"""Queries whose scores are held in float64 at once."""
CHECKED = 64
"""Last queries of a long prompt, whose outputs are compared."""
MAX_ERROR = {"float16": 1e-3, "bfloat16": 8e-3, E4M3: 8e-2}
"""Relative Frobenius error from which on a kernel is left out: the gate's limits."""
FACTOR = 0.5
"""Descale factor of queries, keys and values in e4m3."""
LARGEST = 448.0
MIN_TILE_N = 128
"""Narrowest tiles that ``--compile-only`` adds to those of shipped decisions, keys."""
LAZY: dict[str, Value] = {"rescale": "lazy"}
#: Levers of each order of the loop.
ORDERS: Mapping[str, Mapping[str, Value]] = {
    "plain": {},
    "lazy": LAZY,
    "lazy, turns": LAZY | {"turn_ends": "scores"},
}
PEERS = ("flash3", "flash3_splits", "flash3_serving")
OWN = 2
"""Own kernels that take part under both loads: the fastest of a first pass."""
BURST_US, BURSTS = 4000.0, 15
"""Calls of a graph take about this long; two calls at least."""
COOLING_S, COPIED_BYTES = 0.02, 1 << 28
"""Copies before each burst."""
SUSTAINED_S, SUSTAINED_ROUNDS = 0.5, 3


@dataclass(frozen=True)
class Attention:
    """Dense attention, causal or full."""

    problem: AttentionProblem

    @property
    def group(self) -> str:
        return "causal" if self.problem.is_causal else "full"

    @property
    def label(self) -> str:
        return self.problem.label()


FP8 = tuple(
    Attention(AttentionProblem.parse(f"B=2,H=16,S={seqlen},D=128,dtype=e4m3,layout=bshd{mask}"))
    for seqlen in (2048, 4096, 8192, 16384)
    for mask in ("", ",causal=1")
)
SUSTAINED = tuple(
    Attention(
        AttentionProblem.parse(
            f"H={heads},HKV={heads // 8},S={seqlen},D=128,causal=1,dtype=bf16,layout=bshd"
        )
    )
    for heads, seqlen in ((64, 8192), (32, 16384), (16, 32768))
)


FP8_SMOKE = Attention(AttentionProblem.parse("H=2,S=64,D=128,dtype=e4m3,layout=bshd"))
SUSTAINED_SMOKE = Attention(AttentionProblem.parse("H=8,HKV=1,S=64,D=16,causal=1,dtype=bf16"))


class CurrentStream:
    """A device whose stream is PyTorch's current one."""

    @property
    def stream(self) -> int:
        """Handle of the stream that is current now."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)


def own_contenders(
    problem: AttentionProblem,
    tensors: Mapping[str, Any],
    scale: float,
    configs: Sequence[Config] | None = None,
) -> Iterator[Contender]:
    """A call of each legal config whose kernels are compiled; nothing is compiled here.

    Args:
        problem: problem to compute.
        tensors: its inputs by operand.
        scale: factor of the scores.
        configs: legal configs to choose from; None: the whole space.
    """
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        space = FAMILY.space(problem, detect() or DEFAULT_GPU) if configs is None else configs
        for config in compiler.compiled(FAMILY, problem, space):
            artifacts = {}
            for name, spec in FAMILY.kernels(problem, config).items():
                artifacts[name] = compiler.cached(spec)
                assert artifacts[name] is not None, "it was compiled a moment ago"
            call = bound_call(problem, config, artifacts, tensors, scale)
            yield Contender(f"tuner {config.digest[:6]}", call)


def bound_call(
    problem: Problem,
    config: Config,
    artifacts: Mapping[str, Any],
    tensors: Mapping[str, Any],
    scale: float,
) -> Callable[[int], Any]:
    """A call of a config's kernels on PyTorch's current stream; it returns the output.

    Args:
        problem: problem to compute.
        config: a legal config.
        artifacts: its compiled kernels by name.
        tensors: the inputs by operand.
        scale: factor of the scores.
    """
    import torch

    output, device = problem.output, CurrentStream()
    kernels = {name: load(artifact) for name, artifact in artifacts.items()}
    subject = CompiledSubject(device, families()[config.family], problem, config, kernels, scale)  # type: ignore[arg-type]
    out = torch.empty_strided(
        output.shape, output.strides, dtype=getattr(torch, output.dtype), device="cuda"
    )
    memory = [
        torch.zeros(max(1, size), dtype=torch.uint8, device="cuda")
        for size in (subject.scratch_bytes, subject.workspace_bytes)
    ]
    buffers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    buffers |= {output.name: out.data_ptr()}
    buffers |= dict(zip((SCRATCH, WORKSPACE), (t.data_ptr() for t in memory), strict=True))
    bound = subject.bind(buffers, scale)

    def call(_: int, held: Any = memory) -> Any:
        bound()
        return out

    return call


def exact(
    query: Any, key: Any, value: Any, scale: float, *, is_causal: bool, first: int = 0
) -> Any:
    """Attention in float64 of the queries from `first` on, a chunk at a time.

    Args:
        query: (B, H, S, D) of any type.
        key: (B, HKV, S, D).
        value: as `key`.
        scale: factor of the scores.
        is_causal: True if query i sees keys up to i only.
        first: query to begin with.
    """
    import torch

    batch, heads, seqlen, head_dim = query.shape
    groups = heads // key.shape[1]
    out = query.new_empty(batch, heads, seqlen - first, head_dim, dtype=torch.float64)
    for sequence in range(batch):
        for head in range(heads):
            keys, values = (t[sequence, head // groups].double() for t in (key, value))
            for begin in range(first, seqlen, CHUNK):
                end = min(begin + CHUNK, seqlen)
                seen = end if is_causal else seqlen
                scores = query[sequence, head, begin:end].double() @ keys[:seen].T * scale
                if is_causal:
                    places = torch.arange(seen, device=query.device)
                    hidden = places[None] > places[begin:end, None]
                    scores = scores.masked_fill(hidden, float("-inf"))
                part = torch.softmax(scores, -1) @ values[:seen]
                out[sequence, head, begin - first : end - first] = part
    return out


def relative_error(out: Any, wanted: Any) -> float:
    """Distance of the last queries, as many as `wanted` has."""
    return harness.distance(out[:, :, -wanted.shape[2] :], wanted)


def right(
    contenders: Sequence[Contender],
    error: Callable[[Any], float],
    most: float,
    failed: dict[str, str],
) -> tuple[list[Contender], dict[str, float]]:
    """Contenders whose outputs have at most an error, and their errors; reasons go to `failed`."""
    errors, reasons = harness.first_outputs({one.name: one.call for one in contenders}, error)
    reasons |= {
        n: f"relative error {value:.1e}" for n, value in errors.items() if not value <= most
    }
    failed |= reasons
    return [one for one in contenders if one.name not in reasons], errors


def with_best(us: Mapping[str, float], contenders: Sequence[Contender]) -> dict[str, float]:
    """Times with those of ``tuner``, the fastest own kernel, behind the first."""
    own = [us[one.name] for one in contenders if one.name in us and one.name.startswith("tuner ")]
    return {**us, "tuner": min(own)} if own else dict(us)


def peer_contenders(
    problem: AttentionProblem, tensors: Sequence[Any], scale: float, failed: dict[str, str]
) -> Iterator[Contender]:
    """Builds of FlashAttention-3 that are here; why others are not goes to `failed`."""
    for name in PEERS if problem.dtype != E4M3 else PEERS[2:]:
        config = Config("vendor_sdpa", {"kernel": name})
        call = family("vendor_sdpa").vendor_call(problem, config, scale)
        if isinstance(call, str):
            failed[name] = call
        else:
            yield Contender(name, lambda _, call=call: call(*tensors))  # type: ignore[misc]


def fp8_measured(case: Attention, _: Namespace) -> Row:
    """Times and errors of own kernels, FlashAttention-3's serving build, and cuDNN's plans."""
    import torch

    problem, scale, failed = case.problem, 1 / math.sqrt(case.problem.head_dim), dict[str, str]()
    torch.manual_seed(0)
    tensors = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.float8_e4m3fn, device="cuda").copy_(
            torch.randn(o.shape, device="cuda") / FACTOR
        )
        for o in problem.operands[:3]
    ]
    factors = [torch.full(o.shape, FACTOR, device="cuda") for o in problem.operands[3:-1]]
    with torch.no_grad():
        query, key, value = tensors
        wanted = exact(query, key, value, scale * FACTOR**2, is_causal=problem.is_causal)
        wanted.mul_(FACTOR)
        grown = 2.0 ** math.floor(math.log2(LARGEST / float(wanted.abs().max())))
        named = dict(zip((o.name for o in problem.inputs), [*tensors, *factors], strict=True))
        every = list(peer_contenders(problem, [*tensors, *factors], scale, failed))
        every += plans_of(problem, tensors, scale, FACTOR, grown, failed)
        every += own_contenders(problem, named, scale, fp8_configs(problem))

        def error(out: Any) -> float:
            factor = grown if out.dtype == torch.float8_e4m3fn else 1.0
            return relative_error(out.double() / factor, wanted)

        fit, errors = right(every, error, MAX_ERROR[E4M3], failed)
        source, words = (tensor.view(torch.uint8) for tensor in (tensors[0].clone(), tensors[0]))
        times = harness.time_calls(fit, lambda _: torch.add(source, 0, out=words), 1)
    us = with_best(times.us, every)
    return {
        **{"us": us, "errors": errors, "failed": {**_missing(us), **failed, **times.failed}},
        "tflops": {name: problem.flops / time / 1e6 for name, time in us.items()},
    }


def _missing(us: Mapping[str, float]) -> dict[str, str]:
    return {} if "tuner" in us else {"tuner": "no own kernel is compiled (--compile-only)"}


def compile_fp8(cases: Sequence[Attention]) -> int:
    """Compile own kernels, `fp8_configs`.

    Returns:
        1 when one failed.
    """
    specs = [
        spec
        for problem in (case.problem for case in cases)
        for config in fp8_configs(problem)
        for spec in FAMILY.kernels(problem, config).values()
    ]
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        return compile_aot(list(dict.fromkeys(specs)), compiler, None)


def fp8_configs(problem: AttentionProblem) -> list[Config]:
    """Every legal config of the decisions in e4m3 that ship, and `by_tile`."""
    decided = [
        m.config
        for entry in shipped()
        if isinstance(entry.problem, AttentionProblem) and entry.problem.dtype == E4M3
        for m in entry.ranked
        if m.config.family == FAMILY.name
    ]
    every = dict.fromkeys([*decided, *by_tile(problem)])
    return [config for config in every if FAMILY.accepts(problem, config, DEFAULT_GPU)]


def by_tile(problem: AttentionProblem) -> list[Config]:
    """Configs of two groups that take turns: for each width of tiles from `MIN_TILE_N` on that of
    the least estimate, in each of `ORDERS`. Those with `skips_masked` are widths of their own.
    """
    least: dict[Hashable, tuple[float, Config]] = {}
    for config in FAMILY.space(problem, DEFAULT_GPU):
        is_wide = config["warp_groups"] == 2 and config["tile_n"] >= MIN_TILE_N
        if is_wide and config.get("ping_pong"):
            kind = config["tile_n"], config.get("skips_masked")
            us = FAMILY.predict_us(problem, config, DEFAULT_GPU)
            if kind not in least or us < least[kind][0]:
                least[kind] = us, config
    return [
        Config(config.family, {**config.params, **levers})
        for _, config in least.values()
        for levers in ORDERS.values()
    ]


def sustained_measured(case: Attention, _: Namespace) -> Row:
    """Times of the fastest own kernels and FlashAttention-3 under both loads, and the clocks."""
    import torch

    problem, scale, failed = case.problem, 1 / math.sqrt(case.problem.head_dim), dict[str, str]()
    torch.manual_seed(0)
    dtype = getattr(torch, problem.dtype)
    inputs = [
        torch.empty_strided(o.shape, o.strides, dtype=dtype, device="cuda").normal_()
        for o in problem.inputs
    ]
    source = inputs[0].clone()

    def before(_: int) -> Any:
        return torch.add(source, 0.0, out=inputs[0])

    with torch.no_grad():
        first = max(0, problem.seqlen_q - CHECKED)
        query, key, value = inputs
        wanted = exact(query, key, value, scale, is_causal=problem.is_causal, first=first)
        named = dict(zip((o.name for o in problem.inputs), inputs, strict=True))
        every = [*own_contenders(problem, named, scale)]
        every += peer_contenders(problem, inputs, scale, failed)
        most = MAX_ERROR[problem.dtype]
        fit, errors = right(every, lambda out: relative_error(out, wanted), most, failed)
        own = [contender for contender in fit if contender.name.startswith("tuner ")]
        quick = harness.time_calls(own, before, 1).us if own else {}
        fastest = sorted((one for one in own if one.name in quick), key=lambda c: quick[c.name])
        entered = [*(one for one in fit if one not in own), *fastest[:OWN]]
        loads = loaded(entered, before, quick)
    loads["us"] = with_best(loads["us"], entered)
    loads["sustained_us"] = with_best(loads["sustained_us"], entered)
    failed = {**_missing(loads["us"]), **failed}
    return {**loads, "errors": errors, "failed": failed, "flops": problem.flops}


def loaded(
    entered: Sequence[Contender], before: Callable[[int], Any], quick: Mapping[str, float]
) -> dict[str, Any]:
    """Both loads.

    Args:
        entered: contenders, each called before.
        before: enqueues the element-wise kernel.
        quick: microseconds of some calls, which say how many a graph holds.
    """
    usual = statistics.median(quick.values()) if quick else BURST_US
    count = max(2, round(BURST_US / usual))
    graphs = {one.name: captured(before, one, count) for one in entered}
    alone, cool, chance = captured(before, None, count), cooler(), random.Random(0)
    for graph in graphs.values():
        graph.replay()
    lead_us = statistics.median(_behind(cool, alone) for _ in range(BURSTS))
    bursts: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(BURSTS):
        for name in chance.sample(sorted(graphs), len(graphs)):
            bursts[name].append((_behind(cool, graphs[name]) - lead_us) / count)
    lead_us, _ = _held(alone)
    held: dict[str, list[float]] = {name: [] for name in graphs}
    clocks: dict[str, Any] = {}
    for _ in range(SUSTAINED_ROUNDS):
        for name in chance.sample(sorted(graphs), len(graphs)):
            us, clocks[name] = _held(graphs[name])
            held[name].append((us - lead_us) / count)
    return {
        "us": {name: statistics.median(times) for name, times in bursts.items()},
        "sustained_us": {name: statistics.median(times) for name, times in held.items()},
        "spread": {name: (max(t) - min(t)) / statistics.median(t) for name, t in held.items()},
        "clocks": clocks,
    }


def cooler() -> Callable[[], None]:
    """A function that copies for a while: the chip draws little power meanwhile."""
    import torch

    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def cool() -> None:
        until = time.monotonic() + COOLING_S
        while time.monotonic() < until:
            source.copy_(target)
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


def loads_line(row: Row) -> str:
    """A case's bursts, sustained times, and clocks."""
    parts = [
        f"{name} {row['us'][name]:.1f} / {us:.1f} us {row['clocks'][name]['sm_mhz']} MHz"
        for name, us in row["sustained_us"].items()
        if name in row["clocks"]
    ]
    return f"{row['case']}: {', '.join(parts)}"


def loads_table(measured: Sequence[Row]) -> list[str]:
    """Ratios by load."""
    bursts = [{**row, "group": "bursts"} for row in measured]
    held = [{**row, "group": "sustained", "us": row.get("sustained_us", {})} for row in measured]
    return rows.ratio_table([*bursts, *held])[:-1]
