"""Our own fused attention on the GPU, proven: see `fused_attention_proof`.

A few dozen kernels are compiled, and those that can compute a case do so, in children of one kind
of kernels each. The tests say what must hold of what was found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from drawn_children import lines_of
from fused_attention_proof import cases, plan
from fused_attention_proof.binding import libraries
from fused_attention_proof.plan import Trial

from tuner.compile.artifacts import Artifact
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CHILD = Path(__file__).with_name("fused_attention_child.py")
#: Children side by side, fewer on few cores: most of a trial is the CPU's work of small launches.
CHILDREN, LIMIT_S = 8, 900.0
#: Bytes of operands from which a case's trials are all in one child: with its float64 reference the
#: largest takes half of a GPU's memory.
LARGE_BYTES = 1 << 30


def part_of(case: cases.Case) -> str:
    """The child that computes a case."""
    if case.problem.bytes >= LARGE_BYTES:
        return "large"
    head_dim, is_causal, dtype = plan.combination_of(case)
    return f"D={head_dim}, {'causal' if is_causal else 'full'}, {dtype}"


PARTS = sorted(set(map(part_of, cases.drawn())))
Finding = dict[str, Any]
Artifacts = Mapping[KernelSpec, Artifact]


@cache
def proven() -> list[plan.Kernel]:
    return plan.everything(family("fused_attention"), detect() or DEFAULT_GPU, cases.drawn())


@cache
def trials() -> list[Trial]:
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    return plan.trials(member, gpu, proven(), cases.drawn())


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    member = family("fused_attention")
    return plan.specs(member, [(trial.case.problem, trial.config) for trial in trials()])


@pytest.fixture(scope="module")
def artifacts(compiler: Compiler) -> Artifacts:
    return {spec: future.result() for spec, future in compiler.submit(kernels())}


@pytest.fixture(scope="module")
def found(artifacts: Artifacts) -> Iterator[Mapping[str, Future[list[tuple[Trial, Finding]]]]]:
    """Reports of the children, which are all started at once."""
    workers = max(1, min(CHILDREN, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(workers) as pool:
        order = sorted(PARTS, key=lambda part: part != "large")
        yield {part: pool.submit(proved, part, artifacts) for part in order}


def proved(part: str, artifacts: Artifacts) -> list[tuple[Trial, Finding]]:
    mine = [trial for trial in trials() if part_of(trial.case) == part]
    drawn = list(dict.fromkeys(trial.case for trial in mine))
    configs = list(dict.fromkeys(trial.config for trial in mine))
    wanted = {
        "cases": [case.to_json() for case in drawn],
        "configs": [config.to_json() for config in configs],
        "libraries": libraries(artifacts),
        "trials": [(drawn.index(one.case), configs.index(one.config)) for one in mine],
    }
    labels = [f"{trial.case.label()}: {trial.config.params}" for trial in mine]
    return list(zip(mine, lines_of(CHILD, wanted, labels, LIMIT_S), strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_is_right(
    found: Mapping[str, Future[list[tuple[Trial, Finding]]]], part: str
) -> None:
    results = found[part].result()
    faults = [
        f"{trial.case.label()}: {trial.config.params}: {fault}"
        for trial, finding in results
        for fault in finding["faults"]
    ]
    assert results and not faults, f"{len(faults)} faults, first: {faults[:3]}"


def test_nothing_was_left_out() -> None:
    """Each case is computed, on enough problems."""
    assert {trial.case for trial in trials()} == set(cases.drawn())
    assert len({trial.case.problem for trial in trials()}) >= 200


def test_peers_and_repetitions(found: Mapping[str, Future[list[tuple[Trial, Finding]]]]) -> None:
    """FlashAttention-2 was compared with wherever its mask is ours, and each value of each lever
    left the same bits 100 times; split keys among them.
    """
    results = [result for future in found.values() for result in future.result()]
    square = [
        finding["peer"]
        for trial, finding in results
        if trial.case.problem.seqlen_q == trial.case.problem.seqlen_kv
    ]
    assert square and None not in square
    often = [trial.config for trial, finding in results if finding["repeats"] >= 100]
    repeated = {fact for config in often for fact in config.params.items()}
    assert {fact for trial, _ in results for fact in trial.config.params.items()} <= repeated


#: Of a chain: one shape, full and causal, for kernels of every kind; times the default scale, at
#: which each output would be nearer to the mean of the values, and soon all the same.
CHAINED = "B=2,H=16,HKV=2,SQ=1000,SKV=777,D=64"
CHAIN_SCALE = 16 / 64**0.5


def test_unlike_kernels_read_each_others_outputs(artifacts: Artifacts) -> None:
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
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    workspace = torch.full((1 << 27,), 0xA5, dtype=torch.uint8, device="cuda")  # of all
    for kernel in proven():
        head_dim, is_causal, dtype = kernel.combination
        if (head_dim, dtype) != (64, "float16"):
            continue
        problem = AttentionProblem.parse(f"{CHAINED},causal={is_causal}")
        configs = [c for c in kernel.members if not member.violations(problem, c, gpu)]
        for config in [c for c in configs if c["pdl"]][:3]:
            [spec] = member.kernels(problem, config).values()
            loaded = load(artifacts[spec])
            (launch,) = member.launches(problem, config, CHAIN_SCALE)
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
