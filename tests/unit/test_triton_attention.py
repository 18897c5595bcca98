"""The Triton family: its space, legality and launches; when it competes; its library's launch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ran

from tuner.base import triton_release
from tuner.base.install import extra_command
from tuner.base.processes import python_command, python_environment
from tuner.compile import triton_compiler
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.render import render
from tuner.compile.toolchain import Toolchain
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families import families, family
from tuner.families.base import LSE, KernelSpec
from tuner.families.triton_attention import (
    TritonAttention,
    programs,
    smem_bytes,
)
from tuner.hardware import DEFAULT_GPU, Gpu, smem_per_block_bytes
from tuner.measure import device
from tuner.measure.tolerance import floor_work
from tuner.measurement import Provenance, Regime
from tuner.problem import LAYOUTS, AttentionProblem
from tuner.runners.choose import Machine, Runners
from tuner.tuning.sweep import Sweep, SweepOptions

FAMILY = TritonAttention()
A100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410, 2039.0, 40 << 20)
L40S = Gpu("NVIDIA L40S", "8.9", 142, 2520, 864.0, 96 << 20)
B200 = Gpu("NVIDIA B200", "10.0", 148, 1965, 8000.0, 126 << 20)
GPUS = (A100, L40S, DEFAULT_GPU, B200)
PLAIN = AttentionProblem.parse("S=1024,D=64")
GROUPED = AttentionProblem.parse("B=2,H=32,HKV=8,SQ=4,SKV=4096,D=128")


def config(**params: Any) -> Config:
    known = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    return Config(FAMILY.name, {**known, **params})


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    heads_kv = draw(st.sampled_from((1, 2, 3, 8)))
    return AttentionProblem(
        seqlen_q=draw(st.integers(1, 5000)),
        seqlen_kv=draw(st.integers(1, 5000)),
        head_dim=8 * draw(st.integers(1, 32)),
        batch=draw(st.integers(1, 8)),
        heads_q=heads_kv * draw(st.sampled_from((1, 3, 4, 6, 7, 16, 71))),
        heads_kv=heads_kv,
        is_causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(("float16", "bfloat16"))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@settings(max_examples=25)
@given(problems(), st.sampled_from(GPUS), st.randoms(use_true_random=False))
def test_every_problem_has_a_space_and_every_member_covers_it(
    problem: AttentionProblem, gpu: Gpu, rng: random.Random
) -> None:
    space = FAMILY.space(problem, gpu)
    assert space
    drawn = [FAMILY.draw(problem, gpu, space, rng) for _ in range(20)]
    legal = [c for c in drawn if not FAMILY.violations(problem, c, gpu)]
    group = problem.heads_q // problem.heads_kv
    for one in [*space, *legal]:
        packed, block_m = one.get("packed_heads", 1), one["block_m"]
        assert all(one[n] & (one[n] - 1) == 0 for n in ("block_m", "block_n", "num_warps"))
        assert group % packed == 0
        assert smem_bytes(problem, one, gpu) <= smem_per_block_bytes(gpu.compute_capability)
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        assert programs(problem, one) * block_m >= rows
        assert (programs(problem, one) - problem.batch * problem.heads_q // packed) * block_m < rows
    for one in space:
        predicted = FAMILY.predict_us(problem, one, gpu)
        assert gpu.floor_us(*floor_work(problem)) < predicted < math.inf


@pytest.mark.parametrize(
    ("problem", "params", "reason"),
    [
        (PLAIN, {"block_m": 96}, "block_m=96 is not known (allowed: 16, 32, 64, 128, 256)"),
        (PLAIN, {"block_m": 8}, "block_m=8 is not known"),
        (PLAIN, {"block_n": 512}, "block_n=512 is not known"),
        (PLAIN, {"num_warps": 3}, "num_warps=3 is not known (allowed: 1, 2, 4, 8, 16)"),
        (PLAIN, {"num_stages": 0}, "num_stages=0 is not known"),
        (PLAIN, {"colour": 1}, "parameter 'colour' is not known"),
        (PLAIN, {"packed_heads": 1}, "packed_heads is for several query heads"),
        (GROUPED, {}, "packed_heads is for several query heads"),
        (GROUPED, {"packed_heads": 3}, "packed_heads=3 is not known"),
        (GROUPED, {"packed_heads": 8}, "packed_heads=8 does not divide the 4 heads"),
        (GROUPED, {"packed_heads": 0}, "packed_heads=0 is not known"),
        (PLAIN, {"block_n": 256, "num_stages": 6}, "bytes of shared memory exceed 166912"),
        (replace(PLAIN, seqlen_kv=2**31 - 8), {}, "more than 2^31 - 1 rows"),
        (replace(PLAIN, seqlen_q=2**30, heads_q=999, heads_kv=999), {}, "2^31 - 1 programs"),
        (
            replace(PLAIN, heads_q=2**17, heads_kv=2**17, head_dim=256, layout="bshd"),
            {},
            "rows are more than 2^23 elements apart",
        ),
    ],
)
def test_violations_say_what_is_wrong(
    problem: AttentionProblem, params: dict[str, Any], reason: str
) -> None:
    assert [v for v in FAMILY.violations(problem, config(**params), A100) if reason in v]


@pytest.mark.parametrize("extra", ["window=64", "causal=1,left=64", "softcap=30"])
def test_windows_and_soft_caps_are_refused(extra: str) -> None:
    problem = AttentionProblem.parse(f"S=1024,D=64,{extra}")
    wanted = "soft cap" if "softcap" in extra else "sliding window"
    assert FAMILY.supports(problem, A100) == f"triton_attention has no {wanted}"
    assert FAMILY.violations(problem, config(), A100) == [f"triton_attention has no {wanted}"]
    assert FAMILY.space(problem, A100) == []


def test_quantised_tensors_are_refused() -> None:
    problem = AttentionProblem.parse("S=1024,D=64,dtype=e4m3")
    assert "takes no descale factors" in FAMILY.supports(problem, A100)
    assert FAMILY.space(problem, A100) == []


def test_shared_memory_is_the_parts_own() -> None:
    wide = config(block_m=128, block_n=128, num_warps=8, num_stages=3)
    problem = replace(PLAIN, head_dim=128)
    assert smem_bytes(problem, wide, A100) == (128 + 4 * 128) * 128 * 2
    assert FAMILY.violations(problem, wide, A100) == []
    assert FAMILY.violations(problem, wide, L40S) == ["163840 bytes of shared memory exceed 101376"]
    # Where products read shared memory, a stage more is held.
    assert smem_bytes(problem, wide, B200) == (128 + 6 * 128) * 128 * 2
    unknown = replace(A100, compute_capability="8.8")
    assert smem_per_block_bytes(unknown.compute_capability) == 99 << 10


def test_launch_arguments() -> None:
    problem = replace(GROUPED, layout="bshd_bhsd")
    [launch] = FAMILY.launches(problem, config(block_m=16, packed_heads=4), 0.125)
    names = [ref.operand for ref in launch.tensors]
    assert names == ["query", "key", "value", "out", LSE]
    # 4 queries of 4 heads are 16 rows: a program for each of 8 KV heads and 2 batches.
    assert launch.integers[:5] == (16, 32, 8, 4, 4096)
    query, keys = (4 * 32 * 128, 128, 32 * 128), (8 * 4096 * 128, 4096 * 128, 128)
    assert launch.integers[5:] == (*query, *keys, *keys, *query)
    assert launch.scalars == (0.125,)


def test_the_unit_says_types_and_divisors() -> None:
    """The run-time arguments in the order of `launches`, as the library's template reads them."""
    for head_dim, divisor in ((64, 16), (40, 8)):
        problem = replace(PLAIN, head_dim=head_dim, dtype="bfloat16", is_causal=True)
        [spec] = FAMILY.kernels(problem, config()).values()
        text = render(spec, "0123abcd")
        assert "def attention_0123abcd(" in text
        assert text.count('"*bf16", 16)') == 1
        assert f'"i64", {divisor})' in text
        assert '"IS_CAUSAL": True' in text
        compile(text, "unit.py", "exec")


#: The kernel's own text in Triton's interpreter, on the CPU, against SDPA in fp64. Its argument is
#: the rendered unit; prints the errors of output and log-sum-exp.
INTERPRET = r"""
import importlib.util, json, math, sys, torch
spec = importlib.util.spec_from_file_location("unit", sys.argv[1])
unit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unit)
facts = json.loads(sys.argv[2])
batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim, causal, programs, bshd = facts
build, scale = unit.BUILD_00, 0.75 / math.sqrt(head_dim)

def tensor(heads, rows):
    if bshd:
        return torch.randn(batch, rows, heads, head_dim).half().transpose(1, 2)
    return torch.randn(batch, heads, rows, head_dim).half()

torch.manual_seed(1)
query = tensor(heads, seqlen_q)
key, value = (tensor(heads_kv, seqlen_kv) for _ in range(2))
out = torch.full_like(query, math.nan)
lse = torch.full(query.shape[:3], math.nan)
strides = [s for t in (query, key, value, out) for s in t.stride()[:3]]
build["kernel"][(programs,)](
    query, key, value, out, lse, heads, heads_kv, seqlen_q, seqlen_kv, *strides, scale,
    **build["constants"],
)
key, value = (t.repeat_interleave(heads // heads_kv, 1).double() for t in (key, value))
scores = scale * query.double() @ key.mT
if causal:
    scores.masked_fill_(torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool).triu(1), -math.inf)
wanted = scores.softmax(-1) @ value
error = ((out.double() - wanted).norm() / wanted.norm()).item()
print(json.dumps([error, (lse.double() - scores.logsumexp(-1)).abs().max().item()]))
"""


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ("H=2,S=70,D=64", {"block_n": 32}),
        ("B=2,H=4,HKV=2,SQ=33,SKV=50,D=40", {"block_m": 32, "block_n": 16, "packed_heads": 2}),
        ("H=4,HKV=2,SQ=90,SKV=60,D=32,causal=1", {"block_m": 32, "block_n": 16, "packed_heads": 2}),
        ("H=2,SQ=50,SKV=90,D=96,causal=1,layout=bshd", {"block_m": 16}),
        ("H=4,HKV=1,SQ=1,SKV=90,D=8", {"block_m": 16, "packed_heads": 4}),
    ],
)
def test_the_kernels_text_computes_attention(
    shape: str, params: dict[str, Any], tmp_path: Path
) -> None:
    for module in ("torch", "triton"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    if tuple(map(int, importlib.metadata.version("numpy").split(".")[:2])) >= (2, 4):
        pytest.skip("Triton 3.6's interpreter needs a numpy older than 2.4")
    problem, chosen = AttentionProblem.parse(shape), config(**params)
    assert FAMILY.violations(problem, chosen, A100) == []
    [spec] = FAMILY.kernels(problem, chosen).values()
    unit = tmp_path / "unit.py"
    unit.write_text(render(spec, "00"))
    facts = [
        problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_kv,
        problem.head_dim, problem.is_causal, programs(problem, chosen), problem.layout == "bshd",
    ]  # fmt: skip
    done = ran(
        sys.executable,
        "-c",
        INTERPRET,
        str(unit),
        json.dumps(facts),
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    error, of_lse = json.loads(done.stdout)
    assert error < 1e-3
    assert of_lse < 1e-5


class FakeRunner:
    """A runner that only says where it is."""

    def __init__(self, gpu: Gpu, provenance: Provenance) -> None:
        self.gpu, self.provenance, self.building = gpu, provenance, 0

        class Environment:
            digest = "environment"

        self.environment = Environment()


class NoSweeps:
    def find_sweep(self, *_: object) -> None:
        return None


def competitors(
    gpu: Gpu, *named: str, provenance: Provenance = Provenance.MEASURED
) -> tuple[list[str], list[str]]:
    """Own families that compete, and what the sweep notes."""
    runner: Any = FakeRunner(gpu, provenance)
    store: Any = NoSweeps()
    made = Sweep(PLAIN, Regime.default("attention"), runner, store, SweepOptions(families=named))
    return [member.name for member in made.competition.own], made._notes


def test_it_competes_where_no_other_family_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.base.triton_release.version", lambda: "3.6.0")
    for gpu in (A100, L40S, B200):
        own, notes = competitors(gpu)
        assert own == ["triton_attention"]
        assert any("fused_attention does not compete: needs compute" in note for note in notes)
    own, _ = competitors(DEFAULT_GPU)
    assert "fused_attention" in own
    assert "triton_attention" not in own
    assert competitors(DEFAULT_GPU, "triton_attention")[0] == ["triton_attention"]


def test_without_triton_it_says_so_and_does_not_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.base.triton_release.version", lambda: "")
    own, notes = competitors(A100)
    assert own == []
    assert any(
        f"Triton 3.6 or newer is not installed: {extra_command('triton')}" in note for note in notes
    )
    # What was compiled elsewhere is legal, and what was recorded is replayed.
    assert FAMILY.accepts(PLAIN, config(), A100)
    assert competitors(A100, provenance=Provenance.REPLAYED)[0] == ["triton_attention"]


def test_a_machine_measures_from_capability_8_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its compiler compiles for the GPU that is there."""
    monkeypatch.setattr(device, "occupants", lambda index: [])
    monkeypatch.setattr("tuner.compile.toolchain.find_toolchain", lambda: tools(tmp_path))
    for capability in ("8.0", "9.0", "12.0"):
        gpu = replace(A100, compute_capability=capability)
        monkeypatch.setattr(device, "detect", lambda index, gpu=gpu: gpu)
        notes: list[str] = []
        with Runners(Machine(), notes.append) as runners:
            assert runners.gpu == gpu
            assert runners.compiler().capability == capability
        assert notes == []
    old = replace(A100, name="Tesla T4", compute_capability="7.5")
    monkeypatch.setattr(device, "detect", lambda index: old)
    with Runners(Machine(), notes.append) as runners:
        assert runners.gpu is None
    assert notes == [
        "Tesla T4 has compute capability 7.5, the kernels need 8.0 or newer: "
        "nothing is measured here"
    ]


@pytest.mark.parametrize(
    ("version", "found"),
    [("3.6.0", "3.6.0"), ("3.10.1+git", "3.10.1+git"), ("3.5.1", ""), ("", "")],
)
def test_an_old_triton_is_none(version: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", ask)
    assert triton_release.version() == found


def tools(folder: Path, triton: str = "3.6.0") -> Toolchain:
    return Toolchain(
        folder / "nvcc", "13.0.88", Path("g++"), "g++ 12", folder, "4.2.0", triton_version=triton
    )


def test_a_key_holds_triton_and_the_capability(tmp_path: Path) -> None:
    [spec] = FAMILY.kernels(PLAIN, config()).values()
    cache = ArtifactCache(tmp_path / "cache")
    keys = {
        Compiler(tools(tmp_path, version), cache, capability=capability).key(spec)
        for version in ("3.6.0", "3.7.0")
        for capability in ("8.0", "9.0")
    }
    assert len(keys) == 4
    other = replace(tools(tmp_path), nvcc_version="12.9.1", cutlass_version="4.3.0")
    assert Compiler(other, cache, capability="8.0").key(spec) in keys, "nvcc takes no part"


def test_without_triton_a_build_is_refused_with_the_remedy(tmp_path: Path) -> None:
    [spec] = FAMILY.kernels(PLAIN, config()).values()
    with Compiler(tools(tmp_path, ""), ArtifactCache(tmp_path / "cache")) as made:
        [(_, future)] = made.submit([spec])
        with pytest.raises(CompileError, match=r"Triton is not installed: .* install .*triton\]"):
            future.result()


def test_a_fault_in_the_unit_is_the_builds_reason(tmp_path: Path) -> None:
    """The child's first line with ``error`` is what a person reads."""
    (tmp_path / "unit.py").write_text("BUILD_x = 1 / 0\n")
    done = ran(
        *python_command("-m", "tuner.compile.triton_compiler", "8.0"),
        code=1,
        cwd=tmp_path,
        env=python_environment(),
    )
    assert done.stdout.splitlines()[0] == "error: ZeroDivisionError: division by zero"


#: A driver that writes what it is called with to DRIVER_LOG; DRIVER_FAULT names a function to fail.
DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void* current;
static int said(const char* name) {
  const char* fault = getenv("DRIVER_FAULT");
  FILE* log = fopen(getenv("DRIVER_LOG"), "a");
  fprintf(log, "\"%s\",\n", name);
  fclose(log);
  return fault && !strcmp(fault, name) ? 2 : 0;
}
int cuInit(unsigned f) { return said("cuInit"); }
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
int cuCtxSetCurrent(void* c) { current = c; return said("cuCtxSetCurrent"); }
int cuDevicePrimaryCtxRetain(void** c, int d) { *c = (void*)(uintptr_t)(100 + d); return 0; }
int cuCtxGetDevice(int* d) { *d = (int)(uintptr_t)current - 100; return 0; }
int cuLibraryLoadData(void** l, const void* code, int* a, void** b, unsigned c, int* d, void** e,
                      unsigned f) {
  *l = (void*)7;
  if (memcmp(code, "\1\2\3", 3)) return 200;
  return said("cuLibraryLoadData");
}
int cuLibraryGetKernel(void** k, void* l, const char* name) {
  *k = (void*)8;
  return strcmp(name, "entry") ? 500 : said("cuLibraryGetKernel");
}
int cuKernelSetAttribute(int a, int v, void* k, int d) {
  char text[64];
  snprintf(text, 64, "attribute %d=%d of device %d", a, v, d);
  return said(text);
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned smem, void* stream, void** p, void** extra) {
  FILE* log = fopen(getenv("DRIVER_LOG"), "a");
  fprintf(log, "{\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"smem\":%u,\"stream\":%llu,", gx, gy,
          gz, bx, by, bz, smem, (unsigned long long)(uintptr_t)stream);
  fprintf(log, "\"arguments\":[%llu,%d,%lld,%.9g,%llu,%llu,%llu]},\n",
          *(unsigned long long*)p[0], *(int*)p[1], *(long long*)p[2], (double)*(float*)p[3],
          *(unsigned long long*)p[4], *(unsigned long long*)p[5], *(unsigned long long*)p[6]);
  fclose(log);
  return said("cuLaunchKernel");
}
"""
#: Launches by ctypes in a process of its own, whose libcuda.so.1 is the one above.
LAUNCH = r"""
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
calls = json.loads(sys.argv[2])
codes = []
for tensors, integers, scalars, stream, context in calls:
    if context is not None:
        ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(ctypes.c_void_p(context))
    codes.append(library.tuner_0a_launch(
        (ctypes.c_void_p * len(tensors))(*tensors),
        (ctypes.c_int64 * len(integers))(*integers),
        (ctypes.c_double * len(scalars))(*scalars),
        None, ctypes.c_void_p(stream)))
size = ctypes.c_int64(-1)
codes.append(library.tuner_0a_workspace(None, ctypes.byref(size)))
print(json.dumps([codes, size.value]))
"""

Call = tuple[list[int], list[int], list[float], int, int | None]


class Library:
    """A library around no cubin, and a driver that notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kernel = {
            "id": "0a", "name": "entry", "threads": 256, "shared": 98304, "types": "pilfp",
            "image": "1,2,3",
        }  # fmt: skip
        triton_compiler.link([kernel], folder, "g++")
        (folder / "driver.c").write_text(DRIVER)
        command = ["gcc", "-shared", "-fPIC", "-w", "driver.c", "-o", "libcuda.so.1"]
        subprocess.run(command, cwd=folder, check=True)

    def launch(self, *calls: Call, **environment: str) -> tuple[list[int], int, list[Any]]:
        """Codes of the calls and of the workspace, its bytes, and what the driver was asked."""
        log = self.folder / "log"
        log.write_text("")
        paths = {"LD_LIBRARY_PATH": str(self.folder), "DRIVER_LOG": str(log)}
        done = ran(
            sys.executable,
            "-c",
            LAUNCH,
            str(self.folder / "kernel.so"),
            json.dumps(calls),
            env={**os.environ, **paths, **environment},
        )
        codes, size = json.loads(done.stdout)
        return codes, size, json.loads(f"[{log.read_text()}0]")[:-1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if missing := [name for name in ("gcc", "g++") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not found")
    return Library(tmp_path_factory.mktemp("library"))


CALL: Call = ([4096, 0], [33, -5, 2**40], [0.125], 77, None)


def test_a_launch_hands_over_every_argument_in_order(library: Library) -> None:
    codes, size, said = library.launch(CALL)
    assert (codes, size) == ([0, 0], 0)
    launched = said[-2]
    assert launched["grid"] == [33, 1, 1]
    assert launched["block"] == [256, 1, 1]
    assert (launched["smem"], launched["stream"]) == (98304, 77)
    # A pointer, an int32, an int64, a float, the null pointer; Triton's two of no scratch memory.
    assert launched["arguments"] == [4096, -5, 2**40, 0.125, 0, 0, 0]


def test_it_is_loaded_once_and_prepared_once_a_device(library: Library) -> None:
    first, second = (*CALL[:4], 100), (*CALL[:4], 101)
    codes, _, said = library.launch(first, second, first, second)
    assert codes == [0] * 5
    names = [one for one in said if isinstance(one, str)]
    assert names.count("cuLibraryLoadData") == names.count("cuLibraryGetKernel") == 1
    assert [n for n in names if n.startswith("attribute")] == [
        "attribute 8=98304 of device 0",
        "attribute 8=98304 of device 1",
    ]


def test_a_thread_without_a_context_gets_the_first_devices(library: Library) -> None:
    _, _, said = library.launch(CALL, CALL)
    assert said.count("cuInit") == said.count("cuCtxSetCurrent") == 1


@pytest.mark.parametrize(
    "fault", ["cuInit", "cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernel"]
)
def test_what_the_driver_refuses_is_returned_and_tried_again(library: Library, fault: str) -> None:
    codes, _, said = library.launch(CALL, CALL, DRIVER_FAULT=fault)
    assert codes == [2, 2, 0]
    if fault == "cuLibraryLoadData":
        assert said.count(fault) == 2


@pytest.mark.parametrize("integers", [[0, 1, 1], [2**31, 1, 1], [1, 2**31, 1]])
def test_integers_that_do_not_fit_are_refused(library: Library, integers: list[int]) -> None:
    codes, _, said = library.launch((CALL[0], integers, CALL[2], 0, None))
    assert codes == [1, 0]
    assert "cuLaunchKernel" not in said


def test_without_a_driver_the_library_loads_and_says_so(library: Library) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        codes, size, _ = library.launch(CALL, LD_LIBRARY_PATH="")
        assert (codes, size) == ([35, 0], 0)
    else:
        pytest.skip("this machine has a driver")


def test_the_host_compilers_message_is_kept(tmp_path: Path) -> None:
    kernel = {"id": "0a", "name": "x", "threads": 1, "shared": 0, "types": "p", "image": "oops"}
    if shutil.which("g++") is None:
        pytest.skip("g++ not found")
    with pytest.raises(CompileError, match=r"error: .*oops"):
        triton_compiler.link([kernel], tmp_path, "g++")


def test_it_is_registered_and_its_template_is_tritons() -> None:
    assert family("triton_attention").name in families()
    [spec] = FAMILY.kernels(PLAIN, config()).values()
    assert triton_compiler.compiles(spec.template)
    assert not triton_compiler.compiles(KernelSpec("reference.cu.j2").template)
