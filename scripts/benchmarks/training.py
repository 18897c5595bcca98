"""Attention of training calls, and of sequences that are split over the GPUs of a host.

- ``calls``: forward and backward together. `tuner.problem.population.draw_training` draws calls of
  ten public models, 1 to 16 sequences of 1024 to 8192 tokens. ``tuner`` is PyTorch's function under
  `tuner.enable`, ``tuner attention`` is `tuner.attention`. First output and gradients of one
  sequence and one KV head are compared with float64, each error beside PyTorch's.
- ``context_parallel``: `tuner.attention` of a whole sequence on one GPU, and `ring_attention` on
  all that torch sees, at least two. It also times the computation without transfers, and the
  transfers without computation. Transfers add the time with them less the time without.
  The ranks share this host's store and kernels, so each call is served as in a program of one GPU.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import FAILURES, Bench, Contender, Preset, Row, first_line
from benchmarks.rows import PYTORCH, TUNER, markdown, ratio_line
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.problem import AttentionBackwardProblem, AttentionProblem
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
SHAPE = "H=32,HKV=8,S=131072,D=128,dtype=bf16,causal=1"
ROUNDS, TIMEOUT_S = 7, 300


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


@dataclass(frozen=True)
class Split:
    """A pass over a whole sequence."""

    problem: AttentionProblem
    group: str
    """``forward`` or ``backward``."""

    @property
    def label(self) -> str:
        """Sizes and pass."""
        return f"{self.problem.label()}, {self.group}"


def splits(args: Namespace) -> list[Split]:
    """Both passes over the sequence."""
    problem = AttentionProblem.parse(args.shape)
    return [Split(problem, name) for name in ("forward", "backward")]


@contextmanager
def without_transfers() -> Iterator[None]:
    """Every rank computes with the keys that it has, as if they had come."""
    from tuner.runtime.parallel.ring import Passing, Ring

    start = Ring.start
    Ring.start = lambda self, *tensors: Passing(self, [], tensors)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ring.start = start  # type: ignore[method-assign]


def transfers(ring: Any, packed: Any, sums: Any | None) -> None:
    """The transfers of a forward pass, or with `sums` of a backward pass."""
    last = ring.size - 1
    for step in range(ring.size):
        sent = [packed] if step < last else []
        sent += [sums] if step and sums is not None else []
        if sent:
            received = ring.start(*sent).wait()
            packed, sums = received[0], sums if sums is None else received[-1]
    if sums is not None:
        ring.start(sums).wait()


def split_calls(split: Split, device: Any) -> Mapping[str, Callable[[], Any]]:
    """Timed calls by name; ranks but the first have nothing to do for one GPU."""
    import torch

    import tuner
    from tuner.runtime.parallel.context_parallel import ring_attention, split_sequence
    from tuner.runtime.parallel.ring import Ring

    torch.manual_seed(0)
    problem, ring = split.problem, Ring(None)
    is_causal, is_forward = problem.is_causal, split.group == "forward"
    operands = {operand.name: operand for operand in problem.inputs}
    whole = [
        torch.randn(operands[name].shape, dtype=getattr(torch, problem.dtype), device=device)
        for name in ("query", "key", "value")
    ]
    parts = [split_sequence(t, is_causal=is_causal).requires_grad_() for t in whole]
    packed = torch.stack([part.detach() for part in parts[1:]])
    sums = None if is_forward else torch.zeros_like(packed, dtype=torch.float32)

    def passes(attend: Callable[..., Any], tensors: Sequence[Any]) -> Callable[[], Any]:
        if is_forward:

            def forward() -> Any:
                with torch.no_grad():
                    return attend(*tensors, is_causal=is_causal)

            return forward
        leaves = [tensor.requires_grad_() for tensor in tensors]
        out = attend(*leaves, is_causal=is_causal)
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    all_gpus = passes(ring_attention, parts)
    one_gpu = passes(partial(tuner.attention, enable_gqa=True), whole) if ring.rank == 0 else list
    return {
        "one GPU": one_gpu,
        TUNER: all_gpus,
        "still": without_transfers()(all_gpus),
        "transfers": lambda: transfers(ring, packed, sums),
    }


def elapsed_us(call: Callable[[], Any], device: Any) -> float:
    """Microseconds of a call that all ranks begin together, in the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        took = 1e3 * start.elapsed_time(end)
    else:
        before = time.perf_counter()
        call()
        took = 1e6 * (time.perf_counter() - before)
    longest = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def split_us(split: Split, device: Any, rounds: int) -> dict[str, float]:
    """Medians of each call over rounds in a shuffled order; the same in every rank."""
    timed = split_calls(split, device)
    times: dict[str, list[float]] = {name: [] for name in timed}
    for call in timed.values():
        elapsed_us(call, device)
    for number in range(rounds):
        for name in random.Random(number).sample(list(timed), len(timed)):
            times[name].append(elapsed_us(timed[name], device))
    return {name: statistics.median(us) for name, us in times.items()}


def _rank(rank: int, ranks: int, port: int, split: Split, target: str) -> None:
    """A process of one GPU; the first writes what was measured."""
    import torch
    import torch.distributed as dist

    import tuner

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = {"rank": rank, "world_size": ranks, "device_id": device}
    dist.init_process_group("nccl", store=store, timeout=timedelta(seconds=TIMEOUT_S), **members)
    us = split_us(split, device, ROUNDS)
    if rank == 0:
        stats = tuner.stats()
        answers = {"hits": stats.hits, "refused": dict(stats.fallbacks)}
        Path(target).write_text(json.dumps({"us": us, "answers": answers}))
    dist.barrier()
    dist.destroy_process_group()


def spawned(split: Split, ranks: int) -> Row:
    """Times, and the first rank's counts of served calls.

    Raises:
        BenchmarkError: when a rank fails.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="tuner-ring-") as folder:
        target = Path(folder, "times.json")
        try:
            mp.spawn(_rank, (ranks, store.port, split, str(target)), nprocs=ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as exc:
            raise BenchmarkError(f"a rank failed: {str(exc).strip().splitlines()[-1]}") from exc
        row: Row = json.loads(target.read_text())
    return row


def measure_split(case: Split, _: Namespace) -> Row:
    """Times of a pass on one GPU and on all, and what transfers add."""
    import torch

    ranks, problem = torch.cuda.device_count(), case.problem
    if ranks < 2:
        raise BenchmarkError(f"context_parallel needs two GPUs of one host; torch sees {ranks}")
    chunks = 2 * ranks if problem.is_causal else ranks
    if problem.seqlen_q % chunks or problem.seqlen_q != problem.seqlen_kv:
        raise ConfigError(
            f"{problem.label()} cannot be split (allowed: self-attention of {chunks} N tokens)"
        )
    row = spawned(case, ranks)
    us = row["us"]
    exposed = max(0.0, us[TUNER] - us["still"])
    whole = problem if case.group == "forward" else AttentionBackwardProblem.of(problem, False)
    return {
        **row,
        "gpus": ranks,
        "tflops": whole.flops / us[TUNER] / 1e6,
        "exposed": {"of time": exposed / us[TUNER], "of transfers": exposed / us["transfers"]},
    }


def split_cells(row: Row) -> tuple[str, ...]:
    """Cells of a row that has times."""
    us, exposed = row["us"], row["exposed"]
    return (
        *(row["case"], str(row["gpus"]), f"{us['one GPU']:.0f}", f"{us[TUNER]:.0f}"),
        *(f"{us['one GPU'] / us[TUNER]:.2f}", f"{row['tflops']:.0f}", f"{us['transfers']:.0f}"),
        *(f"{exposed['of transfers']:.1%}", f"{exposed['of time']:.1%}"),
    )


def split_table(rows: Sequence[Row]) -> list[str]:
    """A row for each pass."""
    head = ("pass", "GPUs", "one GPU us", "all us", "speed", "TFLOP/s", "transfers us")
    cells = [split_cells(row) for row in rows if "us" in row]
    return markdown([(*head, "not hidden", "of all"), *cells])


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--count", type=int, default=60, help="calls (default 60)")
    add("--models", default=",".join(MODELS), help="names with commas between")
    add("--shape", default=SHAPE, help=f"sequence of context_parallel (default {SHAPE})")


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
        "context_parallel": Preset(
            "a sequence that is split over the GPUs of this host",
            splits,
            measure_split,
            lambda row: ", ".join(split_cells(row)),
            split_table,
            limit_s=TIMEOUT_S + 60.0,
        ),
    },
    _options,
)
