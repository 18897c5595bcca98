"""Our own fused attention on the GPU, proven: see `fused_attention_proof`.

One fixture compiles a few dozen kernels and computes every case on those that can; the tests say
what must hold of what it found. TUNER_TEST_REPORT names a file for all errors as JSON,
TUNER_TEST_CONFIGS one with further configs (see `plan.given`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from fused_attention_proof import cases, parent, plan
from fused_attention_proof.report import Report

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SECTIONS = list(dict.fromkeys(case.section for case in cases.drawn()))


@cache
def proven() -> list[plan.Kernel]:
    further = os.environ.get("TUNER_TEST_CONFIGS")
    return plan.everything(
        family("fused_attention"),
        detect() or DEFAULT_GPU,
        cases.drawn(),
        Path(further) if further else None,
    )


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    trials = plan.trials(member, gpu, proven(), cases.drawn())
    return plan.specs(member, [(trial.case.problem, trial.config) for trial in trials])


@pytest.fixture(scope="module")
def report(compiler: Compiler) -> Report:
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    found = parent.prove(member, gpu, proven(), cases.drawn(), compiler)
    if path := os.environ.get("TUNER_TEST_REPORT"):
        found.write(Path(path))
    parent.say(found.table())
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_kernel_is_right(report: Report, section: str) -> None:
    assert report.of(section)
    faults = report.faults(section)
    assert not faults, f"{len(faults)} faults, first: {faults[0]}"


def test_nothing_was_left_out(report: Report) -> None:
    """Each case was computed, and each compiled kernel launched with its every lever."""
    done = [trial for trial, found in report.results if found.frobenius is not None]
    assert {trial.case for trial in done} == set(cases.drawn())
    assert len({trial.case.problem for trial in done}) >= 200
    pairs = [(trial.case.problem, trial.config) for trial in done]
    assert set(plan.specs(family("fused_attention"), pairs)) == set(report.artifacts)


def test_most_cases_have_a_peer(report: Report) -> None:
    """FlashAttention-2 was there to be compared with wherever its mask is ours."""
    square = [
        found
        for trial, found in report.results
        if trial.case.problem.seqlen_q == trial.case.problem.seqlen_kv
    ]
    assert square
    assert all(found.peer is not None for found in square)


def test_every_lever_was_repeated(report: Report) -> None:
    """The same bits 100 times, with each value of each lever; split keys among them."""
    often = [trial.config for trial, found in report.results if found.repeats >= 100]
    repeated = {fact for config in often for fact in config.params.items()}
    assert {fact for trial, _ in report.results for fact in trial.config.params.items()} <= repeated


#: Of a chain: one shape, full and causal, for kernels of every kind; times the default scale, at
#: which each output would be nearer to the mean of the values, and soon all the same.
CHAINED = "B=2,H=16,HKV=2,SQ=1000,SKV=777,D=64"
CHAIN_SCALE = 16 / 64**0.5


def test_unlike_kernels_read_each_others_outputs(report: Report) -> None:
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
            loaded = load(report.artifacts[spec])
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
