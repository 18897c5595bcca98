"""Both kernels of the two-kernel attention through nvcc."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rendered import clean, run_on_host

from tuner.base import resources
from tuner.compile.compiler import Compiler
from tuner.compile.render import render
from tuner.config import Config
from tuner.families.attention_instances import launch_registers
from tuner.families.two_kernel_attention import TwoKernelAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = TwoKernelAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64,causal=1,softcap=30,bias=h")
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
DEVICE_SPECS = [*FAMILY.kernels(PROBLEM, CONFIG).values()]


def test_both_kernels_compile_without_spills_or_advice(device_compiler: Compiler) -> None:
    assert FAMILY.violations(PROBLEM, CONFIG, DEFAULT_GPU) == []
    stages = FAMILY.kernels(PROBLEM, CONFIG)
    for stage, (spec, future) in zip(stages, device_compiler.submit(DEVICE_SPECS), strict=True):
        used = clean(future.result())
        groups, resident = (CONFIG[f"{stage}_{name}"] for name in ("groups", "blocks_per_sm"))
        assert used.registers <= launch_registers(groups, resident)
        of_groups = groups * spec.variables["consumer_registers"]
        assert spec.variables["producer_registers"] + of_groups <= used.registers * (groups + 1)


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
      wrong += int(OFFSET) * int(sizeof(Element)) != place(row, 8 * octet);
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

    header = (resources.templates() / "attention.h").read_text()
    atom = re.search(r"^template <int kColumns, class T.*?;\n", header, re.MULTILINE | re.DOTALL)
    layouts = f"namespace tuner {{\n{atom[0]}}}\n"
    layouts += found("output", r"namespace k_0 \{(.*?)CUTE_HOST_DEVICE auto global_tensor")
    layouts += found("output", r"^(using SmemLayoutP = .*?;)$")
    layouts += found("scores", r"^(using Mma = .*?;)$").replace("kColumns", "64")
    program = MISPLACED
    for name, pattern in (
        ("MATRIX_ROW", r"^ +(int const matrix_row = .*?;)$"),
        ("UNIT", r"^ +(int const unit = .*?;)$"),
        ("OFFSET", r"Element\* const octets = image \+ (.*?);"),
    ):
        program = program.replace(name, found("scores", pattern))
    includes = "#include <cstdio>\n#include <cute/tensor.hpp>\n#include <cutlass/numeric_types.h>\n"
    assert run_on_host(tmp_path, f"{includes}{layouts}{program}", has_cute=True) == "0\n"


#: The template's `Modifiers` by four threads, a quad, on a host: every tile of a few rows, against
#: what a score is to become. A load that leaves the bias's own rows is counted too.
MODIFIED = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
#define CUTE_DEVICE
#define CUTE_UNROLL
#define __device__
#define __forceinline__
using std::min;
using Element = _Float16;
constexpr float kLog2E = 1.44269504f;
thread_local struct { int x; } threadIdx;
struct Place { int c, r, j; };
Place make_coord(int c, int r, int j) { return {c, r, j}; }
namespace cutlass {
template <class T, int n> struct Array {
  T at[n];
  T const& operator[](int i) const { return at[i]; }
};
template <class To, class From, int n> struct NumericArrayConverter {
  Array<To, n> operator()(Array<From, n> const& x) const { return {To(x[0]), To(x[1])}; }
};
}  // namespace cutlass
std::barrier quad(4);
uint32_t passed[4];
uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int step) {
  int const lane = threadIdx.x % 4;
  passed[lane] = x;
  quad.arrive_and_wait();
  uint32_t const other = passed[lane ^ step];
  quad.arrive_and_wait();
  return other;
}
char const *first_byte, *last_byte;
std::atomic<int> wrong, loads, wide;
struct uint4 { uint32_t x, y, z, w; };
uint4 load_once(void const* from) {
  char const* const at = static_cast<char const*>(from);
  wrong += at < first_byte || at + 16 > last_byte || reinterpret_cast<uintptr_t>(at) % 16;
  ++wide;
  uint4 words;
  std::memcpy(&words, at, 16);
  return words;
}
struct Narrow {  // 16-bit words, each looked at
  Element const* at;
  uint32_t operator[](int i) const {
    char const* const byte = reinterpret_cast<char const*>(at + i);
    wrong += byte < first_byte || byte + 2 > last_byte;
    ++loads;
    uint16_t word = 0;
    std::memcpy(&word, byte, 2);
    return word;
  }
};
struct Work { int head_index; };
struct Params {
  int first_head, heads, seqlen_q, seqlen_kv;
  float scale_log2;
  Element const* bias;
  int64_t bias_batch, bias_head, bias_row;
  bool is_bias_aligned;
};
TEXT
struct Scores {
  float at[kTileN / 8][2][2];
  float& operator()(Place o, int, int) { return at[o.j][o.r][o.c]; }
};
void check(int queries, int keys, bool is_batched) {
  constexpr int kHeads = 2, kHeadIndex = 3;  // batch 1, head 1: nothing lies behind its bias
  std::vector<Element> bias((is_batched ? 2 : 1) * kHeads * queries * keys);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = Element(float(i * 37 % 101) / 8 - 5);
  int64_t const size = int64_t(queries) * keys;
  bool const is_aligned = keys % 8 == 0 && reinterpret_cast<uintptr_t>(bias.data()) % 16 == 0;
  Params const p{1, kHeads, queries, keys, 0.5f, bias.data(),
                 is_batched ? kHeads * size : 0, size, keys, is_aligned};
  first_byte = reinterpret_cast<char const*>(bias.data());
  last_byte = reinterpret_cast<char const*>(bias.data() + bias.size());
  Element const* const matrix = bias.data() + is_batched * p.bias_batch + p.bias_head;
  auto const lane = [&](int index) {
    threadIdx.x = index;
    for (int row0 = 0; row0 < queries; row0 += 5) {
      Modifiers modifiers(p, Work{kHeadIndex - p.first_head}, row0);
      for (int n = 0; n * kTileN < keys; ++n) {
        Scores scores;
        for (int i = 0; i < kTileN / 2; ++i) (&scores.at[0][0][0])[i] = i - 40 + index;
        Scores const before = scores;
        modifiers.load(n);
        modifiers.apply(scores, n);
        for (int i = 0; i < kTileN / 2; ++i) {
          int const row = row0 + i / 2 % 2 * 8, key = n * kTileN + i / 4 * 8 + 2 * index + i % 2;
          if (row >= queries || key >= keys) continue;
          double const added = matrix[row * keys + key];
          double const wanted = (&before.at[0][0][0])[i] * 0.5 + added * 1.4426950408889634;
          wrong += !(std::abs((&scores.at[0][0][0])[i] * modifiers.scale() - wanted) < 1e-4);
        }
      }
    }
  };
  std::vector<std::thread> lanes;
  for (int index = 0; index < 4; ++index) lanes.emplace_back(lane, index);
  for (auto& thread : lanes) thread.join();
}
int main() {
  check(21, 256, false), check(21, 200, true), check(9, 203, true), check(1, 5, false);
  std::printf("%d %d %d\\n", int(wrong), loads > 0, wide > 0);
}
"""


def test_a_bias_reaches_its_scores(tmp_path: Path) -> None:
    problem = AttentionProblem.parse("S=1024,D=64,bias=h")
    text = (resources.templates() / "warp.h").read_text()
    text += render(FAMILY.kernels(problem, CONFIG)["scores"], "0")

    def found(pattern: str) -> str:
        match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        assert match is not None, pattern
        return match[0]

    parts = [found(r"^constexpr int kTileN = \d+"), ";\n"]
    parts += [
        found(r"^constexpr unsigned kAllLanes.*?\n"),
        found(r"^__device__ __forceinline__ void transpose_quad.*?^}\n"),
        found(r"^struct Modifiers .*?^};\n"),
    ]
    body, narrow = re.subn(
        r"auto const\* const data = reinterpret_cast<uint16_t const\*>\((.*?)\);",
        r"Narrow const data{\1};",
        "".join(parts),
    )
    assert narrow == 1
    text = "#include <atomic>\n" + MODIFIED.replace("TEXT", body)
    assert run_on_host(tmp_path, text, "-std=c++20", "-pthread") == "0 1 1\n"
