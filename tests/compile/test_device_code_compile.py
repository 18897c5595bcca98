"""Hash of machine code that nvcc made: an edit that changes no instruction leaves it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.device_code import device_code

KEY, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
SOURCE = """
namespace k_KEY {
__global__ void scale(float* x, int n) {
  __shared__ float part[256];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  part[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) x[i] = part[threadIdx.x ^ 1] * FACTOR;
}
}  // namespace k_KEY
extern "C" int tuner_KEY_launch(float* x, int n) {
  k_KEY::scale<<<n / 256, 256>>>(x, n);
  return 0;
}
"""


VARIABLES = """
namespace k_KEY {
__constant__ float table[2] = {1.0f, FIXED};
__device__ float start[2] = {3.0f, FIRST};
static __device__ float scratch[SIZE];
__global__ void scale(float* x, int n) {
  x[n] *= table[n & 1] + start[n & 1];
  scratch[n & 1] = x[n];
}
}  // namespace k_KEY
extern "C" int tuner_KEY_launch(float* x, int n) {
  k_KEY::scale<<<1, 1>>>(x, n);
  return 0;
}
"""
VALUES = {"FIXED": "2.0f", "FIRST": "4.0f", "SIZE": "2"}


def built(compiler: Compiler, folder: Path, key: str, source: str) -> str:
    (folder / "kernel.cu").write_text(source.replace("KEY", key))
    command = [compiler.toolchain.nvcc, "-gencode", "arch=compute_90a,code=sm_90a", "-shared"]
    command += ["-Xcompiler", "-fPIC", "-ccbin", compiler.toolchain.host_compiler]
    command += [f"-L{place}" for place in compiler.toolchain.library_dirs]
    command += ["-o", folder / "kernel.so", folder / "kernel.cu"]
    subprocess.run(command, check=True, capture_output=True)
    return device_code((folder / "kernel.so").read_bytes(), key)


@pytest.mark.usefixtures("shared_cache")
def test_a_name_or_a_comment_changes_no_code_and_a_factor_does(
    compiler: Compiler, tmp_path: Path
) -> None:
    first = built(compiler, tmp_path, KEY, SOURCE.replace("FACTOR", "2.0f"))
    assert first
    renamed = "// renamed\n" + SOURCE.replace("FACTOR", "(1.0f + 1.0f)")
    assert built(compiler, tmp_path, OTHER, renamed) == first
    assert built(compiler, tmp_path, KEY, SOURCE.replace("FACTOR", "3.0f")) not in ("", first)
    larger = SOURCE.replace("FACTOR", "2.0f").replace("part[256]", "part[512]")
    assert built(compiler, tmp_path, KEY, larger) not in ("", first)


@pytest.mark.usefixtures("shared_cache")
def test_values_of_device_and_constant_variables_are_part_of_the_code(
    compiler: Compiler, tmp_path: Path
) -> None:
    def code(key: str, **changes: str) -> str:
        text = VARIABLES
        for name, value in {**VALUES, **changes}.items():
            text = text.replace(name, value)
        folder = tmp_path / "-".join((key, *changes))
        folder.mkdir()
        return built(compiler, folder, key, text)

    first = code(KEY)
    assert first and code(OTHER) == first
    for name, value in {"FIXED": "2.5f", "FIRST": "4.5f", "SIZE": "3"}.items():
        assert code(KEY, **{name: value}) not in ("", first), name
