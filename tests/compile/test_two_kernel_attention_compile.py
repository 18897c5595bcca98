"""Both kernels of the two-kernel attention through nvcc."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tuner.compiler import Compiler
from tuner.config import Config
from tuner.families.fused_attention import launch_registers
from tuner.families.two_kernel_attention import TwoKernelAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.render import render
from tuner.toolchain import find_toolchain, include_dirs

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = TwoKernelAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64,causal=1,softcap=30")
CONFIG = Config(
    FAMILY.name,
    {
        "tile_n": 128,
        "scores_groups": 2,
        "scores_stages": 3,
        "scores_buffers": 2,
        "scores_blocks_per_sm": 1,
        "output_groups": 1,
        "output_stages": 3,
        "output_buffers": 2,
        "output_blocks_per_sm": 2,
        "heads_per_launch": 16,
        "rows_per_launch": 1024,
        "splits": 1,
        "pdl": True,
    },
)


def test_both_kernels_compile_without_spills_or_advice(compiler: Compiler) -> None:
    """ptxas advises where it serializes WGMMAs or ignores setmaxnreg: C7504 to C7515."""
    assert FAMILY.violations(PROBLEM, CONFIG, DEFAULT_GPU) == []
    specs = FAMILY.kernels(PROBLEM, CONFIG)
    with Compiler(compiler.toolchain, compiler.artifacts, jobs=1) as one_unit:
        futures = dict(one_unit.submit(list(specs.values())))
        artifacts = {stage: futures[spec].result() for stage, spec in specs.items()}
    for stage, spec in specs.items():
        artifact = artifacts[stage]
        used = artifact.resources
        assert used is not None
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), stage
        assert artifact.facts["advice"] == [], stage
        groups, resident = (CONFIG[f"{stage}_{name}"] for name in ("groups", "blocks_per_sm"))
        launched = used.registers * 128 * (groups + 1)
        assert launched <= launch_registers(groups, resident)
        of_groups = groups * spec.variables["consumer_registers"]
        assert 128 * (spec.variables["producer_registers"] + of_groups) <= launched


#: Counts the probabilities that the first kernel's stmatrix puts elsewhere than the second's WGMMA
#: reads: an accumulator's (row, octet) by CuTe's layouts, and the rows of 16 bytes that lanes name.
MISPLACED = """
int main() {
  int wrong = 0;
  Tensor scores = make_identity_tensor(Shape<Int<kRows>, Int<kTileN>>{});
  auto const place = [](int row, int column) {
    SmemLayoutP layout;
    int const plain = get_nonswizzle_portion(layout)(row, column, 0) * int(sizeof(Element));
    return get_swizzle_portion(layout)(plain);
  };
  for (int thread = 0; thread < 128; ++thread) {
    int const lane = thread % 32, warp_row = thread / 32 * 16;
    Tensor mine = Mma{}.get_slice(thread).partition_C(scores);
    for (int j = 0; j < kTileN / 8; j += 2) {
      MATRIX_ROW
      UNIT
      // Lane 8 i + k names row k of matrix i, of which lane 4 k + c holds columns 2 c and 2 c + 1.
      int const row = warp_row + lane % 16, octet = j + lane / 16;
      wrong += int(matrix_row + OFFSET) != place(row, 8 * octet);
      for (int i = 0; i < 4; ++i) {
        auto const has = mine(make_coord(0, i % 2, j + i / 2), 0, 0);
        wrong += get<0>(has) != warp_row + i % 2 * 8 + lane / 4;
        wrong += get<1>(has) != 8 * (j + i / 2) + 2 * (lane % 4);
      }
    }
  }
  std::printf("%d\\n", wrong);
}
"""


def test_probabilities_lie_where_the_second_kernel_reads_them(tmp_path: Path) -> None:
    texts = {stage: render(s, "0") for stage, s in FAMILY.kernels(PROBLEM, CONFIG).items()}

    def found(stage: str, pattern: str) -> str:
        match = re.search(pattern, texts[stage], re.MULTILINE | re.DOTALL)
        assert match is not None, pattern
        return match[1]

    layouts = found("output", r"namespace k_0 \{(.*?)CUTE_HOST_DEVICE auto global_tensor")
    layouts += found("output", r"^(using SmemLayoutP = .*?;)$")
    layouts += found("scores", r"^(using Mma = .*?;)$").replace("kColumns", "64")
    program = MISPLACED
    for name, pattern in (
        ("MATRIX_ROW", r"^ +(uint32_t const matrix_row = .*?;)$"),
        ("UNIT", r"^ +(uint32_t const unit = .*?;)$"),
        ("OFFSET", r"store_matrices\(base \+ (.*?), word"),
    ):
        program = program.replace(name, found("scores", pattern))
    includes = "#include <cstdio>\n#include <cute/tensor.hpp>\n#include <cutlass/numeric_types.h>\n"
    source = tmp_path / "misplaced.cpp"
    source.write_text(f"{includes}{layouts}{program}")
    tools = find_toolchain()
    command = [str(tools.nvcc), "-x=c++", f"-ccbin={tools.host_compiler}", "-std=c++17", "-w"]
    command += [f"-I{path}" for path in include_dirs(tools.cutlass)]
    command += [f"-L{path}" for path in tools.library_dirs]
    subprocess.run(
        [*command, "-O1", "-o", str(tmp_path / "misplaced"), str(source)], check=True, timeout=300
    )
    done = subprocess.run([str(tmp_path / "misplaced")], check=True, capture_output=True, text=True)
    assert done.stdout == "0\n"
