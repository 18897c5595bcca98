"""The real nvcc: a template of a few lines, built, loaded and asked for its workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.base import resources
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, Toolchain, find_toolchain
from tuner.compile.loading import load
from tuner.compile.toolchain import probe
from tuner.errors import BenchmarkError, CompileError
from tuner.families.base import KernelSpec

pytestmark = pytest.mark.compile

TEMPLATE = """
#include <cstdint>
#include <cuda_runtime.h>
#include "cutlass/version.h"
#include "local.h"
namespace k_{{ id }} {
struct kernel_{{ id }} {};
template <class Tag>
__global__ void fill(float* out, int n) {
  __shared__ float buffer[{{ floats }}];
  int i = threadIdx.x;
  buffer[i % {{ floats }}] = i;
  __syncthreads();
  if (i < n) out[i] = buffer[(i + 1) % {{ floats }}] + STEP;
}
{% if broken %}
this is not C++;
{% endif %}
}  // namespace
extern "C" int tuner_{{ id }}_workspace(const int64_t* integers, int64_t* bytes) {
  if (integers[0] < 0) return -4;
  *bytes = integers[0] * {{ floats }};
  return 0;
}
extern "C" int tuner_{{ id }}_launch(void* const* tensors, const int64_t* integers,
                                     const double*, void*, void* stream) {
  k_{{ id }}::fill<k_{{ id }}::kernel_{{ id }}><<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<float*>(tensors[0]), static_cast<int>(integers[0]));
  return cudaGetLastError();
}
"""


@pytest.fixture
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "fill.cu.j2").write_text(TEMPLATE)
    (folder / "local.h").write_text("#define STEP 1.0f\n")
    monkeypatch.setattr(resources, "templates", lambda: folder)
    return folder


def spec(floats: int, broken: bool = False) -> KernelSpec:
    return KernelSpec("fill.cu.j2", {"floats": floats, "broken": broken})


def test_the_toolchain_compiles(toolchain: Toolchain) -> None:
    assert probe(toolchain) == ""


def test_a_unit_is_built_loaded_and_called(
    toolchain: Toolchain, templates: Path, tmp_path: Path
) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    with Compiler(toolchain, cache, jobs=1) as compiler:
        built = [future.result() for _, future in compiler.submit([spec(64), spec(128)])]
        assert [compiler.cached(spec(n)) for n in (64, 128)] == built

    for artifact, floats in zip(built, (64, 128), strict=True):
        assert load(artifact).workspace_bytes([10]) == 10 * floats
        assert artifact.resources is not None
        assert artifact.resources.registers > 0
        assert artifact.resources.smem_bytes == 4 * floats
        assert artifact.compile_cpu_s > 0
        assert artifact.facts["kernels_in_unit"] == 2
    assert built[0].library.stat().st_ino == built[1].library.stat().st_ino
    with pytest.raises(BenchmarkError, match="kErrorInvalidProblem"):
        load(built[0]).workspace_bytes([-1])


def test_one_broken_kernel_does_not_cost_its_neighbour(
    toolchain: Toolchain, templates: Path, tmp_path: Path
) -> None:
    with Compiler(toolchain, ArtifactCache(tmp_path / "cache"), jobs=1) as compiler:
        (_, good), (_, bad) = compiler.submit([spec(32), spec(32, broken=True)])
        with pytest.raises(CompileError, match="error") as raised:
            bad.result()
        assert good.result().facts["kernels_in_unit"] == 1
    assert str(toolchain.nvcc) in raised.value.command
    assert "this is not C++" in raised.value.log


def test_an_ignored_setmaxnreg_is_advice(
    toolchain: Toolchain, templates: Path, tmp_path: Path
) -> None:
    """The tests that find no advice would find this; ptxas names no kernel here."""
    text = """
struct kernel_{{ id }} {};
template <class Tag>
__global__ void __launch_bounds__({{ bounds }}) split(float* out) {
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  out[threadIdx.x] *= 2.0f;
}
template __global__ void split<kernel_{{ id }}>(float*);
"""
    (templates / "split.cu.j2").write_text(text)
    bounds = ("384", "384, 1")
    with Compiler(toolchain, ArtifactCache(tmp_path / "cache"), jobs=1, batch=1) as compiler:
        submitted = compiler.submit(
            [KernelSpec("split.cu.j2", {"bounds": one}, {"bounds": bounds}) for one in bounds]
        )
        advice = [future.result().facts["advice"] for _, future in submitted]
    assert "'setmaxnreg' ignored" in "".join(advice[0])
    assert advice[1] == []
