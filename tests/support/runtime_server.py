"""The runtime behind its C++ dispatcher over CPU tensors: a real store and artifacts, and kernels
that write a pattern.

The kernel fills the output with a sum, so a result identifies the tensors and the plan. The terms
are the first element of the first operand, the number of its rows, and the keys that attention has
beyond its queries.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bare_family import BareFamily
from stored import final

import tuner
from tuner.compile import dispatcher
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.toolchain import find_host_compiler
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families.base import Launch, Ref
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Measurement
from tuner.problem import AttentionProblem, Problem
from tuner.store import open_store

torch = pytest.importorskip("torch", reason="torch is not installed")

KEY = "0123456789abcdef0123456789abcdef"
KERNEL = """
#include <atomic>
#include <cstdint>
extern "C" {
std::atomic<int64_t> launches{0}, code{0}, unbound{0};
thread_local bool is_bound = false;
int bind(int) { is_bound = true; return 0; }
int tuner_KEY_workspace(int64_t const*, int64_t* bytes) { *bytes = 64; return 0; }
int tuner_KEY_launch(void* const* tensors, int64_t const* n, double const*, void* workspace,
                     void*) {
  ++launches;
  unbound += !is_bound;
  if (code) return int(code);
  *static_cast<char*>(workspace) = 1;
  auto const first = *static_cast<_Float16 const*>(tensors[0]);
  auto* const out = static_cast<_Float16*>(tensors[1]);
  for (int64_t i = 0; i < n[0]; ++i) out[i] = first + static_cast<_Float16>(n[1] + n[2]);
  return 0;
}
}
"""


class Toy(BareFamily):
    """One kernel, the same for all problems."""

    name, op = "toy", "attention"

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config("toy", {"n": 1})]

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        output = problem.output
        tensors = (Ref(problem.operands[0].name), Ref(output.name))
        is_attention = isinstance(problem, AttentionProblem)
        more = problem.seqlen_kv - problem.seqlen_q if is_attention else 0
        return [Launch("main", tensors, (output.elements, output.shape[-2], more), (scale,))]


_built: list[SimpleNamespace] = []


@pytest.fixture(scope="session")
def built_dispatcher(
    tmp_path_factory: pytest.TempPathFactory, shared_cache: Path
) -> SimpleNamespace:
    """The dispatcher (13 CPU-seconds), compiled once for all processes of a run, and the fake
    kernel, once for all modules. A process loads one library of a key.
    """
    if _built:
        return _built[0]
    dispatchers = ArtifactCache(shared_cache / "tests" / "dispatchers")
    try:
        made = dispatcher.build(dispatchers)
    except CompileError as exc:
        if exc.command:
            raise
        pytest.skip(str(exc))
    cache = ArtifactCache(tmp_path_factory.mktemp("artifacts"))
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(KERNEL.replace("KEY", KEY))
    command = [find_host_compiler()[0], "-std=c++20", "-O2", "-shared", "-fPIC", source]
    subprocess.run([*command, "-o", library], check=True)
    cache.put(KEY, library, resources=None, compile_cpu_s=0.0, source="", facts={})
    _built.append(SimpleNamespace(cache=cache, dispatchers=dispatchers, dispatcher=made))
    return _built[0]


class Server:
    """The runtime with its dispatcher, a store of its own, and the counters of the kernel."""

    def __init__(self, runtime: SimpleNamespace, built: SimpleNamespace) -> None:
        self.runtime = runtime
        library = ctypes.CDLL(str(built.cache.find(KEY).library))
        runtime.devices.bind_function = lambda: library.bind
        runtime.dispatch.use(runtime.dispatch.load(built.dispatcher))
        self.unbound = ctypes.c_int64.in_dll(library, "unbound")
        self._launches = ctypes.c_int64.in_dll(library, "launches")
        self.code = ctypes.c_int64.in_dll(library, "code")
        self.code.value = 0
        self._python = 0
        get = runtime.table.table.get

        def counted(kind: Any) -> Any:
            self._python += 1
            return get(kind)

        self.get = counted

    def decide(self, *problems: Problem, latency_us: float = 10.0) -> None:
        with open_store() as store:
            for problem in problems:
                made = measured(problem, latency_us)
                store.decide(problem, DEFAULT_GPU, made.regime, [made], "test")
        self.time_passes()

    def time_passes(self) -> None:
        self.runtime.table.table._look_at = 0.0
        self.runtime.dispatch.serve_until(0.0)

    def attention(self, *arguments: Any, **options: Any) -> Any:
        return self.runtime.attention.attention(*arguments, **options)

    def went(self, call: Callable[[], Any]) -> tuple[Any, bool, bool]:
        """The result of a call, whether Python was asked, and whether the kernel ran."""
        python, launches = self._python, self._launches.value
        out = call()
        return out, self._python > python, self._launches.value > launches


@pytest.fixture
def dispatched_server(
    on_cpu: SimpleNamespace, built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """Looks at its store when `time_passes`."""
    monkeypatch.setattr(on_cpu.table, "LOOK_EVERY_S", 1e6)
    made = Server(on_cpu, built)
    monkeypatch.setattr(on_cpu.plan, "family", lambda name: Toy())
    monkeypatch.setattr(on_cpu.plan, "ArtifactCache", lambda: built.cache)
    monkeypatch.setattr(on_cpu.table.table, "get", made.get)
    yield made


@pytest.fixture
def enabled_server(server: Server) -> Iterator[None]:
    """`tuner.enable`, over a store that decides `PROBLEM`."""
    server.decide(PROBLEM)
    tuner.enable()
    yield
    tuner.disable()


@pytest.fixture
def known_tensors(server: Server) -> list[Any]:
    """Tensors whose plan the dispatcher knows."""
    import torch

    tensors = inputs()
    for _ in range(2):
        _, by_python, launched = server.went(
            lambda: torch.nn.functional.scaled_dot_product_attention(*tensors)
        )
    assert launched and not by_python
    return tensors


def pytorchs(call: Callable[[], Any]) -> Any:
    """The result of a call without `tuner.enable`."""
    tuner.disable()
    try:
        return call()
    finally:
        tuner.enable()


def measured(problem: Problem, latency_us: float = 10.0) -> Measurement:
    facts = {"artifacts": {"main": KEY}, "created_at": "2026-01-01T00:00:00+00:00"}
    return final(Config("toy", {"n": 1}), latency_us, problem, **facts)


PROBLEM = AttentionProblem.parse("S=16,D=8,H=2")


def inputs(problem: Problem = PROBLEM) -> list[Any]:
    return [
        torch.empty_strided(o.shape, o.strides, dtype=torch.float16).normal_()
        for o in problem.operands
        if not o.is_output
    ]


def by_kernel(out: Any, first: Any, rows: int) -> bool:
    return bool((out == first.flatten()[0] + rows).all())
