"""Attention over a sequence that is split over the GPUs of one host, beside one GPU.

``scripts/bench context_parallel`` needs two GPUs. It times `tuner.attention` of the whole sequence
on one GPU and `ring_attention` on all of them, forward and backward. It also times the computation
without transfers, and the transfers without computation. The exposed transfer time is the time with
transfers less the time without. The ranks share this host's store and kernels, so each call is
served as in a program of one GPU.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import file_head
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.problem import AttentionBackwardProblem, AttentionProblem

SHAPE = "H=32,HKV=8,S=131072,D=128,dtype=bf16,causal=1"
ROUNDS, TIMEOUT_S = 11, 300
Calls = Mapping[str, Callable[[], Any]]


def is_splittable(problem: AttentionProblem, chunks: int) -> bool:
    """True if ring attention computes a problem, cut into so many chunks."""
    names = "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "is_causal"
    plain = AttentionProblem(
        dtype=problem.dtype, **{name: getattr(problem, name) for name in names}
    )
    return (
        problem == plain
        and problem.seqlen_q == problem.seqlen_kv
        and problem.seqlen_q % chunks == 0
    )


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


def calls_of(problem: AttentionProblem, device: Any) -> dict[str, Calls]:
    """Timed calls, by pass and name; ranks but the first have nothing to do for ``one``."""
    import torch

    import tuner
    from tuner.runtime.parallel.context_parallel import ring_attention, split_sequence
    from tuner.runtime.parallel.ring import Ring

    torch.manual_seed(0)
    operands = {o.name: o for o in problem.inputs}
    query, key, value = (
        torch.randn(operands[name].shape, dtype=getattr(torch, problem.dtype), device=device)
        for name in ("query", "key", "value")
    )
    ring, is_causal = Ring(None), problem.is_causal
    parts = [split_sequence(t, is_causal=is_causal).requires_grad_() for t in (query, key, value)]
    grad_part = torch.randn_like(parts[0])
    out = ring_attention(*parts, is_causal=is_causal)
    packed = torch.stack([part.detach() for part in parts[1:]])
    sums = torch.zeros_like(packed, dtype=torch.float32)

    def forward() -> Any:
        with torch.no_grad():
            return ring_attention(*parts, is_causal=is_causal)

    def backward() -> Any:
        return torch.autograd.grad(out, parts, grad_part, retain_graph=True)

    def still(call: Callable[[], Any]) -> Any:
        with without_transfers():
            return call()

    def one_forward() -> Any:
        with torch.no_grad():
            return tuner.attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    one_backward: Callable[[], Any] = list
    if ring.rank == 0:
        whole = [t.requires_grad_() for t in (query, key, value)]
        whole_out = tuner.attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        grad_out = torch.randn_like(whole_out)

        def one_backward() -> Any:
            return torch.autograd.grad(whole_out, whole, grad_out, retain_graph=True)

    return {
        "forward": {
            "one": one_forward if ring.rank == 0 else list,
            "ring": forward,
            "still": lambda: still(forward),
            "transfers": lambda: transfers(ring, packed, None),
        },
        "backward": {
            "one": one_backward,
            "ring": backward,
            "still": lambda: still(backward),
            "transfers": lambda: transfers(ring, packed, sums),
        },
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


def measured(problem: AttentionProblem, device: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds by pass and name, medians over rounds in a shuffled order; in every rank."""
    found = {}
    for name, calls in calls_of(problem, device).items():
        times: dict[str, list[float]] = {way: [] for way in calls}
        for call in calls.values():
            elapsed_us(call, device)
        for number in range(rounds):
            for way in random.Random(number).sample(list(calls), len(calls)):
                times[way].append(elapsed_us(calls[way], device))
        found[name] = {way: statistics.median(all_us) for way, all_us in times.items()}
    return found


def row_of(name: str, us: Mapping[str, float], flops: float) -> dict[str, Any]:
    """A pass: its times, the speed over one GPU's, and the time that transfers add.

    Args:
        name: name of the pass.
        us: result of `measured`.
        flops: FLOPs of the whole sequence.
    """
    exposed_us = max(0.0, us["ring"] - us["still"])
    return {
        "pass": name,
        "us": dict(us),
        "tflops": flops / us["ring"] / 1e6,
        "speedup": us["one"] / us["ring"],
        "exposed_us": exposed_us,
        "exposed_of_time": exposed_us / us["ring"],
        "exposed_of_transfers": exposed_us / us["transfers"],
    }


def text(label: str, ranks: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = [
        f"{label} on {ranks} GPUs",
        "pass        one GPU us      all us  speed  TFLOP/s  transfers us  not hidden  of all",
    ]
    lines += [
        f"{row['pass']:<10}  {row['us']['one']:10.0f}  {row['us']['ring']:10.0f}  "
        f"{row['speedup']:5.2f}  {row['tflops']:7.0f}  {row['us']['transfers']:12.0f}  "
        f"{row['exposed_of_transfers']:10.1%}  {row['exposed_of_time']:6.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def _rank(rank: int, ranks: int, port: int, shape: str, rounds: int, target: str) -> None:
    """A process of one GPU; the first writes what was measured."""
    import torch
    import torch.distributed as dist

    import tuner

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = {"rank": rank, "world_size": ranks, "device_id": device}
    dist.init_process_group("nccl", store=store, timeout=timedelta(seconds=TIMEOUT_S), **members)
    found = measured(AttentionProblem.parse(shape), device, rounds)
    if rank == 0:
        stats = tuner.stats()
        served = {"hits": stats.hits, "fallbacks": dict(stats.fallbacks)}
        Path(target).write_text(json.dumps({"us": found, "served": served}))
    dist.barrier()
    dist.destroy_process_group()


def _spawned(ranks: int, shape: str, rounds: int) -> dict[str, Any]:
    """Times by pass and name, and the first rank's counts of served calls."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="tuner-ring-") as folder:
        target = Path(folder, "times.json")
        try:
            mp.spawn(_rank, (ranks, store.port, shape, rounds, str(target)), nprocs=ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as exc:
            raise BenchmarkError(f"a rank failed: {str(exc).strip().splitlines()[-1]}") from exc
        found: dict[str, Any] = json.loads(target.read_text())
    return found


def main(argv: Sequence[str]) -> int:
    """Compare, print, write.

    Raises:
        ConfigError: when a shape or a count is wrong.
        BenchmarkError: when torch sees fewer than two GPUs, or a rank fails.
    """
    parser = Parser(prog="scripts/bench context_parallel", description=__doc__)
    parser.add_argument("--shape", default=SHAPE, help=f"the whole sequence (default: {SHAPE})")
    parser.add_argument("--gpus", type=int, default=0, help="how many; default: all of this host")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of the ways in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    problem = AttentionProblem.parse(args.shape)
    import torch

    here = torch.cuda.device_count()
    if here < 2:
        raise BenchmarkError(f"context_parallel needs two GPUs of one host; torch sees {here}")
    ranks = args.gpus or here
    chunks = 2 * ranks if problem.is_causal else ranks
    if not 2 <= ranks <= here or args.rounds < 1 or not is_splittable(problem, chunks):
        raise ConfigError(
            f"--gpus {ranks} --rounds {args.rounds} at {problem.label()} (allowed: 2 to {here} "
            f"GPUs, 1 round or more, plain self-attention of a multiple of {chunks} tokens)"
        )
    found = _spawned(ranks, args.shape, args.rounds)
    flops = {
        "forward": problem.flops,
        "backward": AttentionBackwardProblem.of(problem, False).flops,
    }
    rows = [row_of(name, us, flops[name]) for name, us in found["us"].items()]
    print(text(problem.label(), ranks, rows))
    if args.json is not None:
        cards = [torch.cuda.get_device_name(index) for index in range(ranks)]
        about = file_head.complete(family("sdpa_backward").environment())
        facts = {"environment": about, "gpus": cards}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        document = {**facts, "nccl": nccl, "problem": problem.to_json(), "rows": rows}
        document["served"] = found["served"]
        write_json(args.json, document)
    return 0
