"""The runtime on the GPU under streams, threads, changes of the store and lost contexts."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from programs import ran
from runtime_gpu import (
    OWN,
    SHAPES,
    TOLERANCE,
    call_path,
    compiled,
    error,
    first_kernels,
    fresh_store,
    inputs,
    served_gpu,
    store,
)

from tuner.compile.compiler import Compiler
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measure import device
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

own_store, path, gpu = fresh_store, call_path, served_gpu


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    problem = AttentionProblem.parse(SHAPES[0])
    return [spec for name in (OWN[0], "fused_attention") for spec in first_kernels(problem, name)]


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
    child = ran(sys.executable, "-c", COLD_THREAD, SHAPES[0], path)
    assert "TMA" not in child.stderr, "a descriptor was refused"


COLD_THREAD = """
import importlib, sys, threading
import torch, tuner
from tuner.problem import AttentionProblem
problem = AttentionProblem.parse(sys.argv[1])
table = importlib.import_module("tuner.runtime.call.table").table
dispatch = importlib.import_module("tuner.runtime.call.dispatch")
if sys.argv[2] == "python":
    dispatch.prepare = lambda then: None
else:
    dispatch.prepare(then=table.renew).join(300)
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


def used_bytes() -> int:
    """Memory of this process on its GPU; of all processes where NVML does not tell them apart."""
    index = torch.cuda.current_device()
    name = "device_get_compute_running_processes_v3"
    for process in device._ask(name, device._handle(index), default=()):
        if process.pid == os.getpid() and process.used_gpu_memory < 1 << 60:
            return int(process.used_gpu_memory)
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


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
        before = used_bytes()
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
    assert used_bytes() - before < 64 << 20, "streams of new threads at most"


@pytest.mark.compile
def test_an_update_is_seen_within_a_second(path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    tensors = inputs(problem)
    tuner.attention(*tensors)
    entry = json.dumps([problem.to_json(), asdict(gpu), config.to_json(), artifacts])
    ran(sys.executable, "-c", WRITER, entry)
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
    done = ran(sys.executable, "-c", LOST, code=None, timeout=120)
    assert "seen: " in done.stdout, done.stdout + done.stderr


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
