"""`tuner.attention`, `linear` and `matmul` on the GPU: compiled kernels and the vendors', against
float64; through Python and through the C++ dispatcher; under threads, streams, graphs and errors.

The entries are written into a store of the test's own, so the decision is known; the kernels are
real. The compiled one is the cheapest legal candidate by estimate of each own family.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tuner.compiler import Compiler
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families import families_of, family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

SHAPES = [
    "S=1024,D=64",
    "B=2,H=4,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "B=2,H=8,HKV=2,S=512,D=64",
]
VENDORS = ("cudnn", "flash2", "efficient", "flash3", "flash4")
OWN = [
    name
    for name, member in families_of("attention").items()
    if not (member.is_vendor or member.lacks())
]
PRODUCTS = ["M=512,N=768,K=256", "M=256,N=512,K=512,layout_b=row,B=3"]
GATED = SwigluProblem(300, 768, 256)
LAYERS = ["M=300,N=768,K=256,epilogue=bias", "M=300,N=768,K=256,dtype=bf16,epilogue=bias_gelu"]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    needed: list[KernelSpec] = []
    if torch.cuda.is_available():
        for name, shape in itertools.product(OWN, SHAPES):
            problem = AttentionProblem.parse(shape)
            for config in promising(problem, this_gpu(), name)[:1]:
                needed += family(name).kernels(problem, config).values()
        for shape in (*PRODUCTS, *LAYERS):
            product = GemmProblem.parse(shape)
            for config in promising(product, this_gpu(), "gemm")[:1]:
                needed += family("gemm").kernels(product, config).values()
        for config in promising(GATED, this_gpu(), "gemm_swiglu")[:1]:
            needed += family("gemm_swiglu").kernels(GATED, config).values()
    return list(dict.fromkeys(needed))


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of the test's own beside the shared artifacts, and a process that knows nothing."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    monkeypatch.setenv("TUNER_STORE", f"sqlite:///{tmp_path / 'store.sqlite'}")
    monkeypatch.delenv("TUNER_DISABLE", raising=False)
    forget()
    yield
    forget()


def part(name: str) -> Any:
    """A module of the runtime; the package gives some of these names to functions."""
    return importlib.import_module(f"tuner.runtime.{name}")


def forget() -> None:
    part("table").table.forget()
    part("counters").stats(reset=True)
    part("counters")._counts.said.clear()


@pytest.fixture(params=["python", "dispatcher"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Through which of the two ways calls go."""
    dispatch = part("dispatch")
    if request.param == "python":
        monkeypatch.setattr(dispatch, "prepare", lambda then: None)
        dispatch.use(None)
    else:
        dispatch.prepare(then=part("table").table._renew).join(300)
        if dispatch._module is None:
            dispatch._thread = None
            pytest.skip("no dispatcher: a C++ compiler or Python's headers are missing")
    yield request.param
    if request.param == "python":
        dispatch._thread = None  # the next test loads it again


@pytest.fixture
def gpu() -> Gpu:
    return this_gpu()


def this_gpu() -> Gpu:
    return part("devices").gpu_of(torch.cuda.current_device())


def inputs(problem: Problem) -> list[Any]:
    made = []
    for operand in problem.operands[:-1]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="cuda"
        )
        made.append(tensor.copy_(torch.randn(operand.shape, device="cuda")))
    return made


def error(out: Any, problem: AttentionProblem, tensors: list[Any], scale: float) -> float:
    """Relative Frobenius error against attention written out in float64."""
    query, key, value = (t.double() for t in tensors)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ value
    return float((out.double() - wanted).norm() / wanted.norm())


def store(problem: Problem, gpu: Gpu, config: Config, **changes: Any) -> None:
    """Decide that `config` won; the runtime's next call sees it."""
    from tuner.store import open_store

    base = Measurement(
        problem=problem,
        config=config,
        gpu=gpu,
        regime=Regime.default(problem.op),
        status=Status.OK,
        latency_us=1.0,
        rounds=20,
        is_final=True,
        created_at="2026-01-01T00:00:00+00:00",
    ).but(**changes)
    with open_store() as opened:
        opened.decide(problem, gpu, base.regime, [base], "test")
    part("table").table._look_at = 0.0
    part("dispatch").serve_until(0.0)


@cache
def promising(problem: Problem, gpu: Gpu, name: str) -> list[Config]:
    """The three most promising candidates of a family, its stages' own best in them."""
    member = family(name)
    if stages := member.stages(problem):
        best: dict[str, list[Config]] = {}
        for stage, part in stages.items():
            own = [f for f in families_of(part.op).values() if not f.is_vendor]
            best[stage] = own[0].seeds(part, gpu, own[0].space(part, gpu), 1)
        member = member.with_stages(best)
    space = member.space(problem, gpu)
    return member.seeds(problem, gpu, space, 3) if space else []


def compiled(
    compiler: Compiler, problem: Problem, gpu: Gpu, name: str
) -> tuple[Config, dict[str, str]]:
    """The most promising config of a family that compiles, and its artifacts."""
    candidates = promising(problem, gpu, name)
    if not candidates:
        pytest.skip(f"{name} has no candidate for {problem.label()}")
    for config in candidates:
        specs = family(name).kernels(problem, config)
        futures = compiler.submit(list(specs.values()))
        try:
            keys = [future.result().key for _, future in futures]
        except CompileError:
            continue
        return config, dict(zip(specs, keys, strict=True))
    pytest.fail(f"none of {name}'s three most promising candidates compiles")


def grouped(problem: AttentionProblem) -> dict[str, bool]:
    return {"is_causal": problem.is_causal, "enable_gqa": problem.heads_q != problem.heads_kv}


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_an_own_kernel_is_launched_and_right(
    name: str, shape: str, path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, name)
    store(problem, gpu, config, artifacts=artifacts)
    for scale in (problem.head_dim**-0.5, 0.05):
        tensors = inputs(problem)
        for _ in range(2):
            out = tuner.attention(*tensors, scale=scale, **grouped(problem))
        assert tuner.stats(reset=True).hits == 2, tuner.stats()
        assert out.shape == problem.output.shape and out.stride() == problem.output.strides
        seen = error(out, problem, tensors, scale)
        assert seen < TOLERANCE[problem.dtype], f"{config.to_json()}: error {seen}"


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
def test_the_log_sum_exp_is_natural_and_single(shape: str, compiler: Compiler, gpu: Gpu) -> None:
    names = [name for name in OWN if family(name).writes_lse]
    if not names:
        pytest.skip("no family writes the log-sum-exp")
    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, names[0])
    store(problem, gpu, config, artifacts=artifacts)
    query, key, value = inputs(problem)
    plan = part("attention").find_plan(query, key, value, problem.is_causal, 0.1)
    assert not isinstance(plan, str), plan
    assert plan.has_lse
    out, lse = plan.run_with_lse(query, key, value)
    assert torch.equal(out, plan.run(query, key, value))
    repeats = problem.heads_q // problem.heads_kv
    scores = 0.1 * query.double() @ key.double().repeat_interleave(repeats, 1).mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    assert (lse.shape, lse.dtype) == (scores.shape[:3], torch.float32)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=2e-3, rtol=1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("shape", PRODUCTS)
def test_a_product_is_launched_and_right(
    shape: str, path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = GemmProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, "gemm")
    store(problem, gpu, config, artifacts=artifacts)
    a, b = inputs(problem)
    if problem.batch == 1:
        a, b = a[0], b[0]
    for _ in range(2):
        out = tuner.matmul(a, b)
    wanted = a.double() @ b.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    if problem.batch == 1:
        assert torch.equal(tuner.linear(a, b.t()), out)
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
@pytest.mark.parametrize("shape", LAYERS)
def test_a_layer_is_launched_and_right(shape: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = GemmProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, "gemm")
    store(problem, gpu, config, artifacts=artifacts)
    a, b, bias = inputs(problem)
    activation = problem.activation or None
    for _ in range(2):
        out = tuner.linear(a.view(3, 100, -1), b[0].t(), bias, activation=activation)
    wanted = a.double() @ b.double() + bias.double()
    wanted = torch.nn.functional.gelu(wanted) if activation else wanted
    assert out.shape == (3, 100, problem.n)
    error = (out.double() - wanted.view_as(out)).norm() / wanted.norm()
    assert error < (8e-3 if problem.dtype == "bfloat16" else 1e-3)
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
def test_a_gated_layer_is_launched_and_right(compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    config, artifacts = compiled(compiler, GATED, gpu, "gemm_swiglu")
    store(GATED, gpu, config, artifacts=artifacts)
    a = torch.randn(3, 100, GATED.k, device="cuda").half()
    gate, up = (torch.randn(GATED.n, GATED.k, device="cuda").half() / 16 for _ in range(2))
    out = tuner.swiglu(a, tuner.interleave(gate, up))
    wanted = torch.nn.functional.silu(a.double() @ gate.double().T) * (a.double() @ up.double().T)
    assert out.shape == wanted.shape
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
def test_an_own_kernel_inside_a_graph_on_a_stream_of_its_own(
    path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    tensors = inputs(problem)
    tuner.attention(*tensors)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuner.attention(*tensors)
    assert tuner.stats().hits == 2
    for _ in range(3):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert error(out, problem, tensors, 0.125) < TOLERANCE["float16"]


@pytest.mark.compile
def test_streams_and_their_order(path: str, compiler: Compiler, gpu: Gpu) -> None:
    """On the current stream: behind what fills the inputs, before what reads the output."""
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    tensors = inputs(problem)
    tuner.attention(*tensors)
    streams = [torch.cuda.Stream() for _ in range(4)]
    sets = [inputs(problem) for _ in streams]
    torch.cuda.synchronize()
    outs = []
    for stream, mine in zip(streams, sets, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # a millisecond: a launch on another stream overtakes it
            for tensor in mine:
                tensor.mul_(0.5)
            outs.append(tuner.attention(*mine))
    torch.cuda.synchronize()
    for out, mine in zip(outs, sets, strict=True):
        assert error(out, problem, mine, 0.125) < TOLERANCE["float16"]


@pytest.mark.compile
def test_the_first_thing_of_cuda_that_a_thread_does(
    path: str, compiler: Compiler, gpu: Gpu
) -> None:
    """A plan that is known and an output from the allocator's cache: a launch, with no context."""
    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    child = subprocess.run(
        [sys.executable, "-c", COLD_THREAD, SHAPES[0], path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, f"{child.returncode}: {child.stderr}"
    assert "TMA" not in child.stderr, "a descriptor was refused"


COLD_THREAD = """
import importlib, sys, threading
import torch, tuner
from tuner.problem import AttentionProblem
problem = AttentionProblem.parse(sys.argv[1])
table = importlib.import_module("tuner.runtime.table").table
dispatch = importlib.import_module("tuner.runtime.dispatch")
if sys.argv[2] == "python":
    dispatch.prepare = lambda then: None
else:
    dispatch.prepare(then=table._renew).join(300)
    assert dispatch._module is not None
tensors = [torch.randn(o.shape, device="cuda").half() for o in problem.operands[:3]]
wanted = torch.nn.functional.scaled_dot_product_attention(*tensors)
tuner.attention(*tensors)  # the plan is known from here on, and its output's memory is free
torch.cuda.synchronize()
found = []
for _ in range(4):
    table._look_at = float("inf")  # nor does a look at the store touch CUDA
    dispatch.serve_until(float("inf"))
    thread = threading.Thread(target=lambda: found.append(tuner.attention(*tensors)))
    thread.start()
    thread.join()
    torch.testing.assert_close(found.pop(), wanted, atol=5e-3, rtol=0)
assert tuner.stats().hits == 5 and not tuner.stats().fallbacks, tuner.stats()
"""


@pytest.mark.compile
def test_threads_over_many_shapes_with_a_writer_beside_them(
    path: str, compiler: Compiler, gpu: Gpu
) -> None:
    """8 threads, 10,000 calls each, over 200 shapes while the store changes; memory stays flat."""
    import tuner

    shapes = [
        AttentionProblem.parse(f"S={16 * rows},D=64,H={heads}")
        for rows in range(1, 26)
        for heads in range(1, 9)
    ]
    model = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, model, gpu, "fused_attention")
    for problem in shapes:
        assert not family("fused_attention").violations(problem, config, gpu)
        store(problem, gpu, config, artifacts=artifacts)
    sets = [inputs(problem) for problem in shapes]
    wanted = [torch.nn.functional.scaled_dot_product_attention(*tensors) for tensors in sets]
    torch.cuda.synchronize()
    wrong: list[str] = []
    done = threading.Event()

    def serve(seed: int) -> None:
        order = torch.randint(0, 200, (10_000,), generator=torch.Generator().manual_seed(seed))
        with torch.cuda.stream(torch.cuda.Stream()):
            for step, which in enumerate(order.tolist()):
                out = tuner.attention(*sets[which])
                if step % 50 == 0 and not torch.allclose(out, wanted[which], atol=5e-3):
                    wrong.append(shapes[which].label())
            torch.cuda.current_stream().synchronize()

    def write() -> None:
        for step in itertools.count():
            if done.wait(0.2):
                return
            store(shapes[step % 200], gpu, config, artifacts=artifacts, latency_us=2.0 + step)

    def run() -> None:
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        run()
        before = torch.cuda.mem_get_info()[0]
        allocated = torch.cuda.memory_allocated()
        tuner.stats(reset=True)
        run()
    finally:
        done.set()
        writer.join()
    assert not wrong, wrong[:3]
    stats = tuner.stats()
    assert (stats.calls, stats.errors) == (80_000, {})
    assert stats.fallbacks == {}
    assert torch.cuda.memory_allocated() == allocated
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20, "streams of new threads at most"


@pytest.mark.compile
def test_an_update_is_seen_within_a_second(path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    tensors = inputs(problem)
    tuner.attention(*tensors)
    entry = json.dumps([problem.to_json(), asdict(gpu), config.to_json(), artifacts])
    writer = subprocess.run(
        [sys.executable, "-c", WRITER, entry], capture_output=True, text=True, check=False
    )
    assert writer.returncode == 0, writer.stderr
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        tuner.attention(*tensors)
    tuner.stats(reset=True)
    tuner.attention(*tensors)
    assert (tuner.stats().hits, tuner.stats().fallbacks) == (1, {})


WRITER = """
import json, sys
from tuner.config import Config
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import problem_from_json
from tuner.store import open_store
problem, gpu, config, artifacts = json.loads(sys.argv[1])
made = Measurement(
    problem=problem_from_json(problem), config=Config.from_json(config), gpu=Gpu(**gpu),
    regime=Regime.default("attention"), status=Status.OK, latency_us=1.0, rounds=20,
    is_final=True, artifacts=artifacts, created_at="2026-01-01T00:00:00+00:00",
)
with open_store() as store:
    store.decide(made.problem, made.gpu, made.regime, [made], "test")
"""
LOST = """
import torch
import tuner
tensors = [torch.randn(1, 16, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
tuner.attention(*tensors)
assert tuner.stats().hits == 1, tuner.stats()
torch.cuda.synchronize()
index = torch.full((1,), 1 << 40, device="cuda")
bad = torch.empty(4, device="cuda")
torch.ops.aten.index_put_.default(bad, [index], torch.zeros(1, device="cuda"))  # asserts, later
try:
    for _ in range(1000):
        tuner.attention(*tensors)
    torch.cuda.synchronize()
except RuntimeError as exc:
    print("seen:", exc)
"""


@pytest.mark.compile
def test_an_asynchronous_error_is_not_hidden(compiler: Compiler, gpu: Gpu, tmp_path: Path) -> None:
    """An earlier kernel loses the context: the calls after it say so, and none returns as if."""
    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    done = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120, check=False
    )
    assert "seen: " in done.stdout, done.stdout + done.stderr


@pytest.mark.compile
def test_a_refused_launch_is_answered_by_pytorch(
    path: str, compiler: Compiler, gpu: Gpu, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tuner

    problem = GemmProblem.parse(PRODUCTS[0])
    config = planted.faulty("refused")
    monkeypatch.setattr(part("plan"), "family", lambda name: planted.Planted())
    specs = planted.Planted().kernels(problem, config)
    ((_, future),) = compiler.submit(list(specs.values()))
    store(problem, gpu, config, artifacts={"main": future.result().key})
    a, b = (matrix[0] for matrix in inputs(problem))
    for _ in range(3):
        assert torch.equal(tuner.matmul(a, b), torch.matmul(a, b))
    assert tuner.stats().errors == {"a launch was refused": 1}
    torch.cuda.synchronize()


@pytest.mark.compile
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
def test_the_tensors_device_is_used_whatever_is_current(
    path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    tensors = [tensor.to("cuda:1") for tensor in inputs(problem)]
    with torch.cuda.device(0):
        for _ in range(2):
            out = tuner.attention(*tensors)
        assert torch.cuda.current_device() == 0
    assert out.device.index == 1 and tuner.stats().hits == 2
    assert error(out.cpu().cuda(0), problem, [t.cuda(0) for t in tensors], 0.125) < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", VENDORS)
def test_a_vendor_that_won_is_called_and_right(kernel: str, shape: str, gpu: Gpu) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config = Config("vendor_sdpa", {"kernel": kernel})
    call = family("vendor_sdpa").vendor_call(problem, config, 0.1)
    if isinstance(call, str):
        pytest.skip(call)
    store(problem, gpu, config)
    tensors = inputs(problem)
    out = tuner.attention(*tensors, scale=0.1, **grouped(problem))
    assert (tuner.stats().hits, tuner.stats().fallbacks) == (1, {})
    assert error(out, problem, tensors, 0.1) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("kernel", VENDORS)
def test_a_vendor_can_be_captured(kernel: str) -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    config = Config("vendor_sdpa", {"kernel": kernel})
    call = family("vendor_sdpa").vendor_call(problem, config, 0.125)
    if isinstance(call, str):
        pytest.skip(call)
    tensors = inputs(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(*tensors)
    tensors[0].copy_(torch.randn(tensors[0].shape, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, problem, tensors, 0.125) < TOLERANCE["float16"]


@pytest.mark.parametrize("kernel", ["cublas", "cublaslt"])
@pytest.mark.parametrize(
    "shape", ["M=512,N=768,K=256", "M=512,N=768,K=256,layout_a=col,layout_b=row,B=3,dtype_d=fp32"]
)
def test_blas_is_right_in_a_graph(kernel: str, shape: str) -> None:
    problem = GemmProblem.parse(shape)
    call = family("vendor_blas").vendor_call(
        problem, Config("vendor_blas", {"kernel": kernel}), 1.0
    )
    assert not isinstance(call, str), call
    a, b = (
        torch.empty_strided(o.shape, o.strides, dtype=torch.float16, device="cuda").copy_(
            torch.randn(o.shape, device="cuda")
        )
        for o in problem.operands[:2]
    )
    before = torch.backends.cuda.preferred_blas_library()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(a, b)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    wanted = a.double() @ b.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_nothing_unmeasured_is_launched(
    provenance: Provenance, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    import tuner

    problem = AttentionProblem.parse("H=3,S=200,D=64")  # far from everything that ships
    store(problem, gpu, Config("vendor_sdpa", {"kernel": "efficient"}), provenance=provenance)
    tensors = inputs(problem)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        out = tuner.attention(*tensors)
    assert "not measured" in caplog.text
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(*tensors))


def test_environment_names_the_libraries() -> None:
    assert family("vendor_sdpa").environment()["cudnn"].count(".") >= 2
    assert family("vendor_blas").environment()["cublas"].count(".") >= 2
