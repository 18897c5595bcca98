"""Builds that do not depend on where and when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.bundle.wheel import MAX_GLIBC, newest_glibc
from tuner.compile import dispatcher, single
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_host_compiler, find_toolchain
from tuner.families import families
from tuner.families.arguments import Arguments
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SoftmaxProblem
from tuner.selection.kernels import shipped_kernels, targets
from tuner.selection.portfolio import everywhere as portfolios

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]


WHOLE = """
#include <cuda_runtime.h>
namespace { __device__ int calls_{{ id }} = 0; }
__global__ void count_{{ id }}(int* out) { *out = atomicAdd(&calls_{{ id }}, 1); }
extern "C" int tuner_{{ id }}_launch(int* out) {
  count_{{ id }}<<<1, 1>>>(out);
  return cudaGetLastError();
}
"""
HALVES = """
#include <cuda_runtime.h>
#if defined(__CUDA_ARCH__)
namespace { __device__ int calls_{{ id }} = 0; }
template <int> __global__ void count_{{ id }}(int* out) { *out = atomicAdd(&calls_{{ id }}, 1); }
template __global__ void count_{{ id }}<0>(int*);
#else
#include "host_half.h"
extern "C" int tuner_{{ id }}_launch(int*) { return image[0]; }
#endif
"""
IMAGE = """
asm(".pushsection .nv_fatbin, \\"a\\"\\nimage: .incbin \\"unit.fatbin\\"\\n.popsection\\n");
extern "C" unsigned char const image[];
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactCache]:
    """Caches in unlike places, each for builds from a copy of the same templates beside it."""

    def places() -> Iterator[ArtifactCache]:
        for name in ("a", "another"):
            folder = tmp_path / name / "templates"
            folder.mkdir(parents=True)
            for file, text in (("whole", WHOLE), ("halves", HALVES)):
                (folder / f"{file}.cu.j2").write_text(text)
            (folder / "host_half.h").write_text(IMAGE)
            (folder / "source.cu").write_text(WHOLE.replace("{{ id }}", "KERNEL"))
            monkeypatch.setattr(resources, "templates", lambda folder=folder: folder)
            yield ArtifactCache(tmp_path / name / "cache")

    return places()


@pytest.mark.parametrize("template", ["whole.cu.j2", "halves.cu.j2"])
def test_a_unit_with_internal_symbols_is_equal_bytes_in_another_folder(
    template: str, elsewhere: Iterator[ArtifactCache]
) -> None:
    """The names of internal symbols have hashes of a unit's place, of the time, of a process."""
    libraries = []
    for cache in elsewhere:
        with Compiler(find_toolchain(), cache, jobs=1) as compiler:
            ((_, future),) = compiler.submit([KernelSpec(template, {})])
            libraries.append(future.result().library.read_bytes())
    assert b"_INTERNAL_" in libraries[0]
    assert libraries[0] == libraries[1]


def test_a_source_with_internal_symbols_is_equal_bytes_in_another_folder(
    elsewhere: Iterator[ArtifactCache],
) -> None:
    source = single.Source("source.cu", Arguments(tensors=("out",), integers=()), headers=())
    libraries = [source.build(cache).library.read_bytes() for cache in elsewhere]
    assert b"_INTERNAL_" in libraries[0]
    assert libraries[0] == libraries[1]


def test_a_shipped_kernel_is_the_one_that_was_proven(compiler: Compiler) -> None:
    """Its key and its machine code are those of the proof that ships."""
    tools = compiler.toolchain
    proven = {one.artifact: one for one in shipped_kernels()}
    every = (target for one in portfolios() for target in targets(one))
    specs = {spec for one in every for spec in one.kernels.values()}
    cheap = sorted((spec for spec in specs if spec.template == "gemv.cu.j2"), key=lambda s: s.key)
    spec = next((spec for spec in cheap if compiler.key(spec) in proven), None)
    if spec is None:
        pytest.skip(f"no kernel of nvcc {tools.nvcc_version} and {tools.cutlass_version} ships")
    ((_, future),) = compiler.submit([spec])
    assert future.result().code == proven[future.result().key].code


def test_a_compiler_that_links_its_runtime_statically_makes_portable_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a static libstdc++ need the newest glibc, which a wheel does not allow."""
    compiler, _ = find_host_compiler()
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" -static-libstdc++\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(wrapper))
    family, problem = families()["softmax"], SoftmaxProblem.parse("M=1024,N=1024")
    config = family.space(problem, DEFAULT_GPU)[0]
    (spec,) = family.kernels(problem, config).values()
    with Compiler(find_toolchain(), ArtifactCache(tmp_path / "a"), jobs=1, batch=1) as building:
        ((_, future),) = building.submit([spec])
        library = future.result().library.read_bytes()
    assert b"libstdc++.so.6\0" in library
    assert newest_glibc(library) <= MAX_GLIBC


def test_a_dispatcher_is_equal_bytes_too(
    tmp_path: Path, shared_cache: Path, long_mode: bool
) -> None:
    """One of the two is what the runtime's tests use, in the folder where they look for it."""
    pytest.importorskip("torch")
    if not long_mode:
        pytest.skip("scripts/test --long compiles the second one")
    places = shared_cache / "tests" / "dispatchers", tmp_path / "another"
    one, other = (dispatcher.build(ArtifactCache(place)) for place in places)
    if one.facts["host_compiler"] != other.facts["host_compiler"]:
        pytest.skip(f"the one in {places[0]} is of another compiler")
    assert one.sha256 == other.sha256
