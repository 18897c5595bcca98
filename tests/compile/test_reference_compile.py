"""The numerics gate's kernels compile, and their C interface refuses what it does not know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.compile.toolchain import find_toolchain
from tuner.errors import BenchmarkError
from tuner.measure.gate import REFERENCE

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

SPECS = [REFERENCE]


def test_the_reference_compiles(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    assert kernel.workspace_bytes([7]) == 0
    for integers in ([99, 0], [0, 99]):  # no such command, no such type
        with pytest.raises(BenchmarkError, match="cudaError 1"):
            kernel.launch([0, 0], integers, [0.0], 0, 0)


#: Rows of 40 columns under windows of every width: what is planted in one by many random numbers.
PLANTED = """
#include <cstdint>
#include <cstdio>
#define __device__
@hash@
@planted@
int main() {
  for (int64_t cols = 1; cols <= 40; cols += 39) {
    for (int64_t first = 0; first <= cols; ++first) {
      for (int64_t last = first - 1; last < cols; ++last) {
        int inside = 0, at_first = 0, at_last = 0, before = 0, after = 0;
        for (int seed = 0; seed < 4000; ++seed) {
          int64_t const column = planted_column(hash(seed), first, last, cols);
          if (column < -1 || column >= cols) return 1;
          inside += column >= first && column <= last;
          at_first += column == first, at_last += column == last;
          before += column >= 0 && column < first, after += column > last;
        }
        bool const is_empty = first > last;
        if (is_empty != (inside == 0) || (!is_empty && (!at_first || !at_last))) return 2;
        if (is_empty && (before || after)) return 3;
        if (!is_empty && (first > 0) != (before > 0)) return 4;
        if (!is_empty && (last + 1 < cols) != (after > 0)) return 5;
      }
    }
  }
  return 0;
}
"""


def test_keys_are_planted_inside_the_window_and_just_outside(tmp_path: Path) -> None:
    text = render(REFERENCE, "x")
    hashed = re.search(r"^__device__ inline uint64_t hash.*?^}", text, re.MULTILINE | re.DOTALL)
    planted = re.search(
        r"^__device__ inline int64_t planted_column.*?^}", text, re.MULTILINE | re.DOTALL
    )
    assert hashed is not None and planted is not None
    source = PLANTED.replace("@hash@", hashed[0]).replace("@planted@", planted[0])
    (tmp_path / "planted.cpp").write_text(source)
    program = tmp_path / "planted"
    command = [str(find_toolchain().host_compiler), "-std=c++17", "-O2", "-o", str(program)]
    subprocess.run([*command, str(tmp_path / "planted.cpp")], check=True, timeout=100)
    assert subprocess.run([str(program)], check=False).returncode == 0
