"""Our own fused attention on the GPU: kernels that together have every value of every lever pass
their proof, leave the same bits, and read one another's outputs; tensors that lie far apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from fused_levers import COMBINATIONS, called, combination_of, covering, hardest
from gating import Gated
from proving import faults

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.target import Target
from tuner.families.trials import trials
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

#: Strides of a batch over 2^31 elements, of queries and outputs, then of keys and values; a key or
#: a query beside many of the others.
FAR = (
    AttentionProblem(131080, 65, 128, 2, 128, 16),
    AttentionProblem(131080, 65, 128, 2, 128, 16, True, "bfloat16", "bshd"),
    AttentionProblem(65, 131080, 128, 2, 128, 128, dtype="bfloat16"),
    AttentionProblem(65, 131080, 128, 2, 128, 128, layout="bshd"),
    AttentionProblem(1, 131072, 128, 2, 8, 1),
    AttentionProblem(131072, 65, 64, 1, 1, 1),
)


@cache
def proven() -> tuple[Target, ...]:
    return covering(detect() or DEFAULT_GPU)


def config_of(problem: AttentionProblem) -> Config:
    return family("fused_attention").space(problem, detect() or DEFAULT_GPU)[0]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    far = [Target(config_of(problem), problem) for problem in FAR]
    return [REFERENCE, *(target.kernels["attention"] for target in (*proven(), *far))]


each_combination = pytest.mark.parametrize(
    "combination", COMBINATIONS, ids=lambda one: f"D={one[0]} {'causal ' * one[1]}{one[2]}"
)


def of(combination: tuple[int, bool, str]) -> list[Target]:
    return [target for target in proven() if combination_of(target) == combination]


@each_combination
def test_every_lever_is_proven(
    combination: tuple[int, bool, str], compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    for target in of(combination):
        assert faults(compiler, worker, tmp_path / "kernels.json", target) == [], target.label()


@each_combination
def test_launches_leave_the_same_bits(combination: tuple[int, bool, str], gated: Gated) -> None:
    """Also over many splits of the keys."""
    for target in of(combination):
        trial = hardest(trials(target, DEFAULT_GPU, 24, 1))
        gated.repeats(trial.problem, trial.config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_that_no_query_sees_may_be_infinite(dtype: str, gated: Gated) -> None:
    infinite = struct.pack("<e", float("inf")) if dtype == "float16" else b"\x80\x7f"
    for target in proven():
        head_dim, is_causal, own_dtype = combination_of(target)
        if not is_causal or own_dtype != dtype:
            continue
        heads = (
            2 * max(2, target.config["packed_heads"])
            if "packed_heads" in target.config.params
            else 2
        )
        text = f"H={heads},HKV=2,SQ=150,SKV=400,D={head_dim},causal=1,dtype={dtype}"
        problem = AttentionProblem.parse(text)

        def hidden(data: bytes, row: int = 2 * head_dim) -> bytes:
            heads = [data[at : at + 150 * row] for at in range(0, len(data), 400 * row)]
            return b"".join(head + infinite * (250 * row // 2) for head in heads)

        for config in called(target, problem, DEFAULT_GPU)[:2]:
            gated.repeats(problem, config, {"key": hidden}, count=2)


@pytest.mark.parametrize("problem", FAR, ids=AttentionProblem.label)
def test_tensors_that_lie_far_apart(problem: AttentionProblem, gated: Gated) -> None:
    gated.passes(problem, config_of(problem), ["random"])
    gated.gate.close()


#: Of a chain: one shape, full and causal, for kernels of every kind; times the default scale, at
#: which each output would be nearer to the mean of the values, and soon all the same.
CHAINED = "B=2,H=16,HKV=2,SQ=1000,SKV=777,D=64"
CHAIN_SCALE = 16 / 64**0.5


def test_unlike_kernels_read_each_others_outputs(compiler: Compiler) -> None:
    """Launched as programmatic dependents in one graph, each kernel's output the next one's query:
    what it is when one waits after each. One begins while another still runs, and must not read,
    nor overwrite, before it has ended.
    """
    generator = torch.Generator("cuda").manual_seed(7)
    calls, kinds = [], set()
    problem = AttentionProblem.parse(CHAINED)
    query, key, value = (
        torch.randn(o.shape, generator=generator, device="cuda").half()
        for o in problem.operands[:3]
    )
    buffers = [query.clone(), torch.empty_like(query)]
    workspace = torch.full((1 << 27,), 0xA5, dtype=torch.uint8, device="cuda")  # of all
    for target in (*of((64, False, "float16")), *of((64, True, "float16"))):
        is_causal = combination_of(target)[1]
        problem = AttentionProblem.parse(f"{CHAINED},causal={is_causal}")
        [(_, future)] = compiler.submit([target.kernels["attention"]])
        loaded = load(future.result())
        dependents = [c for c in called(target, problem, DEFAULT_GPU) if c["pdl"]]
        for config in dict.fromkeys((*dependents[:2], *dependents[-1:])):
            (launch,) = target.family.launches(problem, config, CHAIN_SCALE)
            assert loaded.workspace_bytes(launch.integers) <= len(workspace)
            rest = (launch.integers, launch.scalars, workspace.data_ptr())
            calls.append(partial(_call, loaded.launch, key, value, rest))
            kinds.add((is_causal, config["persistent"], config["splits"] > 1))
    # Clearing a counter, and combining splits, are kernels of their own in between.
    assert {(True, True, False), (False, False, False), (False, False, True)} <= kinds
    ends = []
    for waits in (True, False):
        buffers[0].copy_(query)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if waits:
            with torch.cuda.stream(stream):
                _chain(calls, buffers, stream.synchronize)
        else:
            with torch.cuda.graph(graph, stream=stream):
                _chain(calls, buffers, lambda: None)
            for _ in range(5):
                buffers[0].copy_(query)
                graph.replay()
        torch.cuda.synchronize()
        ends.append(buffers[0].clone())
    assert ends[0].isfinite().all() and float(ends[0].std()) > 0.1
    assert torch.equal(*ends)


def _call(launch: Callable, key, value, rest, query, out) -> None:
    """One launch on the current stream, without a log-sum-exp."""
    addresses = [t.data_ptr() for t in (query, key, value, out)]
    launch([*addresses, 0], *rest, torch.cuda.current_stream().cuda_stream)


def _chain(calls: list[Callable], buffers: list, settle: Callable[[], None]) -> None:
    """Every call twice, there and back, so that the last output is in the first buffer."""
    for call in calls:
        for query, out in (buffers, buffers[::-1]):
            call(query, out)
            settle()
