"""The Triton family on the GPU: through the numerics gate, and served by `tuner.attention`.

Runs on Hopper and on every other GPU that is served; each kernel takes about a CPU-second to
compile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from runtime_gpu import TOLERANCE, forget, fresh_store, inputs, part, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.families.triton_attention import TritonAttention
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure.device import detect
from tuner.measurement import Regime, Status
from tuner.problem import AttentionProblem
from tuner.runners.local import LocalRunner

torch = pytest.importorskip("torch", reason="torch is not installed")
FAMILY = TritonAttention()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(FAMILY.lacks()), reason=FAMILY.lacks() or "Triton is here"),
]
own_store = fresh_store

#: Every head dimension's way (padded, divisible by 8 alone), masks, groups, lengths that fill no
#: tile, one query, layouts, more keys than queries under a mask and fewer.
PROBLEMS = [
    AttentionProblem.parse(text)
    for text in (
        "S=1024,D=64",
        "S=1024,D=64,causal=1,dtype=bf16",
        "B=2,H=4,S=1000,D=128,layout=bshd",
        "B=2,H=4,S=777,D=128,causal=1,layout=bshd_bhsd",
        "B=2,H=8,HKV=2,SQ=333,SKV=1535,D=96",
        "H=3,S=513,D=40,causal=1,dtype=bf16",
        "H=2,S=300,D=8",
        "H=4,S=640,D=256",
        "H=4,S=500,D=192,causal=1",
        "B=3,H=32,HKV=8,SQ=1,SKV=2047,D=128,layout=bshd",
        "B=2,H=14,HKV=2,SQ=5,SKV=700,D=64,dtype=bf16",
        "H=4,SQ=200,SKV=900,D=72,causal=1",
        "H=4,HKV=1,SQ=900,SKV=200,D=64,causal=1",
        "H=2,SQ=1,SKV=1,D=64",
    )
]
SERVED = [PROBLEMS[index] for index in (0, 3, 4, 9)]


def chosen(problem: AttentionProblem, gpu: Gpu) -> list[Config]:
    """The most promising, and two drawn."""
    space = FAMILY.space(problem, gpu)
    first = FAMILY.seeds(problem, gpu, space, 1)
    others = [config for config in space if config not in first]
    return first + random.Random(problem.key).sample(others, min(2, len(others)))


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    gpu = detect() or DEFAULT_GPU
    return [
        spec
        for problem in PROBLEMS
        for config in chosen(problem, gpu)
        for spec in FAMILY.kernels(problem, config).values()
    ]


@pytest.fixture(scope="module")
def gpu(missing_gpu: str) -> Gpu:
    found = detect()
    if found is None:
        pytest.skip(missing_gpu)
    return found


@pytest.fixture(scope="module")
def runner(compiler: Compiler, gpu: Gpu) -> Iterator[LocalRunner]:
    made = LocalRunner(0, Regime.default("attention"), compiler, gpu=gpu)
    yield made
    made.close()


@pytest.mark.compile
@pytest.mark.parametrize("problem", PROBLEMS, ids=[p.label() for p in PROBLEMS])
def test_kernels_pass_the_gate(problem: AttentionProblem, runner: LocalRunner) -> None:
    configs = chosen(problem, runner.gpu)
    runner.submit(problem, configs)
    for measurement in runner.collect():
        params = dict(measurement.config.params)
        assert measurement.status is Status.OK, (params, measurement.log)
        assert measurement.latency_us is not None and measurement.latency_us > 0
        assert measurement.workspace_bytes == 0


@pytest.mark.compile
def test_it_is_timed_beside_a_vendor(runner: LocalRunner) -> None:
    """Interleaved in one pass, as a sweep decides."""
    vendor = Config("vendor_sdpa", {"kernel": "efficient"})
    config = chosen(PROBLEMS[0], runner.gpu)[0]
    own, other = runner.retime(PROBLEMS[0], [config, vendor], rounds=5)
    assert own.status is other.status is Status.OK, (own.log, other.log)
    assert own.is_final and own.rounds > 0


def decide(problem: AttentionProblem, compiler: Compiler) -> None:
    """The family's most promising config won."""
    config = chosen(problem, detect() or DEFAULT_GPU)[0]
    futures = compiler.submit(list(FAMILY.kernels(problem, config).values()))
    store(problem, this_gpu(), config, artifacts={"attention": futures[0][1].result().key})
    forget()


def reference(problem: AttentionProblem, tensors: list[Any], scale: float) -> tuple[Any, Any]:
    """Attention written out in fp64: output and log-sum-exp."""
    query, key, value = (tensor.double() for tensor in tensors)
    group = problem.heads_q // problem.heads_kv
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = scale * query @ key.mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.compile
@pytest.mark.parametrize("problem", SERVED, ids=[p.label() for p in SERVED])
def test_it_serves_attention(
    problem: AttentionProblem, compiler: Compiler, own_store: None
) -> None:
    """Eager, with its log-sum-exp, and from a graph."""
    import tuner

    decide(problem, compiler)
    options = {
        "scale": 0.11,
        "is_causal": problem.is_causal,
        "enable_gqa": problem.heads_q != problem.heads_kv,
    }
    tensors = inputs(problem)
    wanted, of_lse = reference(problem, tensors, 0.11)
    out = tuner.attention(*tensors, **options)
    stats = tuner.stats()
    assert (stats.hits, dict(stats.fallbacks)) == (1, {})
    assert (out.double() - wanted).norm() / wanted.norm() < TOLERANCE[problem.dtype]

    plan = part("attention.attention_call").find_plan(*tensors, problem.is_causal, 0.11)
    assert not isinstance(plan, str), plan
    assert (plan.config.family, plan.has_lse) == (FAMILY.name, True)
    again, lse = plan.run_with_lse(*tensors)
    assert torch.equal(again, out)
    assert torch.allclose(lse.double(), of_lse, atol=2e-3, rtol=1e-4)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tuner.attention(*tensors, **options)
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, out)


@pytest.mark.compile
def test_gradients_come_from_its_log_sum_exp(compiler: Compiler, own_store: None) -> None:
    import tuner

    problem = AttentionProblem.parse("S=1024,D=64")
    decide(problem, compiler)
    tensors = inputs(problem)
    mine = [tensor.clone().requires_grad_() for tensor in tensors]
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    toward = torch.randn(problem.output.shape, device="cuda")
    tuner.attention(*mine).backward(toward.half())
    assert tuner.stats().hits == 1
    wide = torch.nn.functional.scaled_dot_product_attention(*theirs)
    wide.backward(toward.half().double())
    for own, other in zip(mine, theirs, strict=True):
        assert (own.grad.double() - other.grad).norm() / other.grad.norm() < 5e-3


@pytest.mark.compile
def test_threads_that_never_touched_cuda(compiler: Compiler, own_store: None) -> None:
    """The driver's calls need a context, which a new thread does not have."""
    import threading

    import tuner

    problem = PROBLEMS[0]
    decide(problem, compiler)
    tensors = inputs(problem)
    wanted = tuner.attention(*tensors)
    torch.cuda.synchronize()
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(tuner.attention(*tensors))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert tuner.stats().hits == 5
    assert all(torch.equal(out, wanted) for out in found) and len(found) == 4


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2,
    reason="fewer than two GPUs are here",
)
@pytest.mark.compile
def test_two_gpus_of_one_process(compiler: Compiler, own_store: None) -> None:
    import tuner

    problem = PROBLEMS[0]
    decide(problem, compiler)
    for index in (0, 1, 0):
        tensors = [tensor.to(f"cuda:{index}") for tensor in inputs(problem)]
        out = tuner.attention(*tensors)
        wanted = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors))
        assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert tuner.stats().hits == 3
