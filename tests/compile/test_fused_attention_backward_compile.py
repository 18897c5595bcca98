"""The gradients' template through nvcc; its tiles, masks and order through the host compiler."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from backward_configs import BASE
from rendered import clean, part, run_on_host

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.families.attention_instances import instance
from tuner.families.fused_attention_backward import KERNEL, FusedAttentionBackward
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionBackwardProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = FusedAttentionBackward()
LENGTHS = (1, 63, 65, 129, 300)
SIDES = (-1, 0, 7, 64)
#: With ``scripts/test --long``.
ALL_SIDES = (*SIDES, 1, 100)


def make(**changes: Value) -> Config:
    return Config(FAMILY.name, {**BASE, **changes})


#: Between them every value of every lever that is compiled in.
KERNELS = [
    (AttentionBackwardProblem.parse(text), config)
    for text, config in (
        ("S=1024,D=128,dtype=bf16", make(late_dq=True, v_registers=50, transpose_ds=True)),
        ("B=2,H=8,HKV=2,S=1000,D=64,causal=1", make(tile_m=128, dq="direct", early_exp=50)),
        (
            "B=2,H=4,S=1000,D=128,causal=1,dtype=bf16,deterministic=1",
            make(dq="ordered", ds_stages=1, early_exp=100),
        ),
        ("H=4,S=1000,D=96,left=100,right=7", make(stages=3, ds_stages=1, v_registers=100)),
        ("H=4,S=1000,D=64,varlen=1", make(swap_dq=True, tile_m=96)),
        ("H=4,S=1000,D=40,dtype=bf16", make(warp_groups=1, rotate=True)),
        (
            "H=4,S=1000,D=192,left=100,right=7,softcap=20,dtype=bf16",
            make(ds_stages=1),
        ),
        ("H=4,S=1000,D=256", make(dq="direct", transpose_ds=True)),
        (
            "H=4,S=1000,D=256,causal=1,deterministic=1,dtype=bf16",
            make(ds_stages=1, dq="ordered", stages=1),
        ),
        ("B=2,H=8,HKV=2,S=1000,D=128,causal=1,dtype=bf16", make(persistent=True)),
    )
]
#: Kernels whose library is loaded, the smallest. Of the others only the device half is compiled, in
#: 17 CPU-seconds each, about 60 % of the whole.
LOADED = (1,)
#: Compiled in every run; the others with ``scripts/test --long``. dQ is added in order in two.
USUAL = {*LOADED, 2, 8}
ALL = [FAMILY.kernels(problem, config)[KERNEL] for problem, config in KERNELS]
SPECS = [ALL[number] for number in LOADED]
DEVICE_SPECS = [ALL[number] for number in sorted(USUAL.difference(LOADED))]


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_they_compile_without_spills_or_advice(
    number: int, compiler: Compiler, device_compiler: Compiler
) -> None:
    problem, config = KERNELS[number]
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    [(_, future)] = (compiler if number in LOADED else device_compiler).submit([ALL[number]])
    # Of 256 columns a thread has 208 registers of accumulators and operands; the deterministic
    # kernel has one stage.
    wide = 272 if config["stages"] == 1 else 64
    allowed = wide if problem.head_dim == 256 else 16
    clean(future.result(), allowed)


def workspace(problem: AttentionBackwardProblem, config: Config) -> int:
    """Bytes of dQ's sums, each row's statistics, and the counts of an ordered sum."""
    head_dim, tile_m = instance(problem.head_dim), int(config["tile_m"])
    tiles = -(-problem.seqlen_q // tile_m) * problem.batch * problem.heads_q
    counts = 4 if config["dq"] == "ordered" else 0
    return tiles * (4 * (tile_m * (head_dim + 2) + 4) + counts)


def integers_of(problem: AttentionBackwardProblem, config: Config) -> tuple[int, ...]:
    (launch,) = FAMILY.launches(problem, config, 0.125)
    return tuple(launch.integers)


def test_a_library_tells_its_workspace(compiler: Compiler) -> None:
    for number, (_, future) in zip(LOADED, compiler.submit(SPECS), strict=True):
        found = load(future.result()).workspace_bytes(integers_of(*KERNELS[number]))
        assert found == workspace(*KERNELS[number])


def test_workspace_is_the_sums_the_statistics_and_the_counts(tmp_path: Path) -> None:
    """The host compiler alone computes it for every kernel."""
    parts, calls = ["#include <cstdint>\n#include <cstdio>\n"], []
    for number, (problem, config) in enumerate(KERNELS):
        body = render(ALL[number], "x").split("namespace k_x {")[1]
        found = [*CONSTANT.findall(body), part(body, r"^struct Integers \{.*?\};")]
        found.append(part(body, r"^struct Workspace \{.*?^\};"))
        parts.append(f"namespace k_{number} {{\n" + "\n".join(found) + "\n}\n")
        values = ", ".join(map(str, integers_of(problem, config)))
        calls.append(
            f'  std::printf("%lld\\n", (long long)k_{number}::Workspace({{{values}}}).bytes);\n'
        )
    text = "".join(parts) + "int main() {\n" + "".join(calls) + "}\n"
    found = map(int, run_on_host(tmp_path, text).split())
    assert list(found) == [workspace(*kernel) for kernel in KERNELS]


#: The constants of a rendered kernel.
CONSTANT = re.compile(r"^constexpr (?:int|bool) [^;(]*;", re.MULTILINE)

PREAMBLE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>
#define CUTE_DEVICE
#define CUTE_UNROLL
using std::max;
using std::min;
struct Octets { int c, r, j; };
Octets make_coord(int c, int r, int j) { return {c, r, j}; }
// The rows of all warp groups, as the accumulators of their threads hold them.
struct Scores {
  std::vector<float> at;
  int rows, columns, thread = 0;
  Scores(int rows, int columns, float x) : at(rows * columns, x), rows(rows), columns(columns) {}
  float& operator()(Octets o, int, int) {
    int const row = (thread - 128) / 32 * 16 % rows + thread % 32 / 4 + 8 * o.r;
    return at[row * columns + thread % 4 * 2 + 8 * o.j + o.c];
  }
};
"""

#: What a launch does: every block, every head of it, every tile of queries in turn. Each pair that
#: the mask shows is counted once; queries beyond the last have no probability, whatever the mask
#: says. Tiles of keys come to each tile of queries in the order that `before` says.
CHECK = """
struct Params {
  int batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim, m_blocks, n_blocks, section, chunk;
  int left, right;
  int const *starts_q, *starts_kv;
};
@tile@
@mask@
@check@
"""

CHECK_ONE_LENGTH = """
// Whether all blocks end where as many of them as a chunk has run at a time, begun in the order of
// their indices, and each adds to a tile of queries in its turn only.
bool ends(Params const& p) {
  struct Block { Tile tile; int m, steps; };
  std::vector<int> added(p.batch * p.heads * p.m_blocks);
  std::vector<Block> running;
  int const blocks = p.n_blocks * p.batch * p.heads_kv, group = p.heads / p.heads_kv;
  for (int begun = 0, ended = 0; ended < blocks;) {
    bool moves = false;
    while (begun < blocks && int(running.size()) < p.chunk) {
      Tile const t = Tile::at(p, begun++);
      running.push_back({t, t.start, 0}), moves = true;
    }
    for (size_t i = 0; i < running.size();) {
      auto& [t, m, steps] = running[i];
      if (steps == t.steps(p)) {
        running.erase(running.begin() + i), ++ended, moves = true;
        continue;
      }
      int const head = t.head_kv * group + steps / (t.last - t.first);
      int const at = (t.batch * p.heads + head) * p.m_blocks + m;
      if (t.before(p, m) == added[at]) ++added[at], m = t.next(m), ++steps, moves = true;
      ++i;
    }
    if (!moves) return false;
  }
  return true;
}
bool holds(int queries, int keys, int left, int right, int section) {
  int const batch = 2, heads_kv = 2, group = 2, heads = heads_kv * group;
  Params p{batch, heads, heads_kv, queries, keys, 64};
  p.m_blocks = (queries + kTileM - 1) / kTileM, p.n_blocks = (keys + kTileN - 1) / kTileN;
  p.section = min(section, batch * heads_kv), p.left = left, p.right = right;
  p.chunk = min(p.n_blocks, section == 1 ? 2 : 32);
  if (kRotates && kOrdered && !ends(p)) return false;
  std::vector<int> seen(batch * heads * queries * keys), added(batch * heads * p.m_blocks);
  std::vector<int> tiles(batch * heads_kv * p.n_blocks);
  for (int index = 0; index < p.n_blocks * batch * heads_kv; ++index) {
    Tile const t = Tile::at(p, index);
    if (t.first < 0 || t.first > t.last || t.last > p.m_blocks) return false;
    ++tiles[(t.batch * heads_kv + t.head_kv) * p.n_blocks + t.n_block];
    if (t.steps(p) != (t.last - t.first) * group) return false;
    for (int head = t.head_kv * group; head < (t.head_kv + 1) * group; ++head) {
      for (int i = t.first, m = t.start; i < t.last; ++i, m = t.next(m)) {
        int const at = (t.batch * heads + head) * p.m_blocks + m;
        if (row_tile(p, t.batch, head, m) != at) return false;
        if (!kRotates && t.before(p, m) != added[at]++) return false;
        // Where the kernel looks at each logarithm of a probability, none stays above zero.
        bool const is_masked = t.is_masked(p, m);
        Scores scores(kTileN, kTileM, is_masked ? 1.f : 0.f);
        if (is_masked) {
          for (scores.thread = 128; scores.thread < 128 * (kKeyGroups + 1); ++scores.thread) {
            correct(scores, p, t, m, scores.thread);
          }
        }
        for (int n = 0; n < kTileN; ++n) {
          for (int i = 0; i < kTileM; ++i) {
            int const query = m * kTileM + i, key = t.n_block * kTileN + n;
            if (query >= queries || scores.at[n * kTileM + i] == -INFINITY) continue;
            if (key >= keys || scores.at[n * kTileM + i] != 0.f) return false;  // not masked
            ++seen[((t.batch * heads + head) * queries + query) * keys + key];
          }
        }
      }
    }
  }
  for (int count : tiles) if (count != 1) return false;
  for (size_t i = 0; i < seen.size(); ++i) {
    int const key = i % keys, query = i / keys % queries;
    if (seen[i] != (key >= query - left && key <= query + right)) return false;
  }
  return true;
}
"""

#: The same of packed sequences: blocks beyond a sequence's last key have no steps and no keys.
CHECK_PACKED = """
bool holds(std::vector<int> const& queries, std::vector<int> const& keys, int section) {
  int const batch = queries.size(), heads_kv = 2, group = 2, heads = heads_kv * group;
  std::vector<int> starts_q{0}, starts_kv{0};
  for (int q : queries) starts_q.push_back(starts_q.back() + q);
  for (int k : keys) starts_kv.push_back(starts_kv.back() + k);
  int const longest_q = *std::max_element(queries.begin(), queries.end());
  int const longest_kv = *std::max_element(keys.begin(), keys.end());
  Params p{batch, heads, heads_kv, longest_q, longest_kv, 64};
  p.m_blocks = (longest_q + kTileM - 1) / kTileM, p.n_blocks = (longest_kv + kTileN - 1) / kTileN;
  p.section = min(section, batch * heads_kv);
  p.starts_q = starts_q.data(), p.starts_kv = starts_kv.data();
  std::vector<std::vector<int>> seen(batch);
  for (int b = 0; b < batch; ++b) seen[b].resize(heads * queries[b] * keys[b]);
  std::vector<int> added(batch * heads * p.m_blocks), stored(batch * heads_kv * longest_kv);
  for (int index = 0; index < p.n_blocks * batch * heads_kv; ++index) {
    Tile const t = Tile::at(p, index);
    int const length_q = queries[t.batch], length_kv = keys[t.batch];
    if (t.start_kv != starts_kv[t.batch] || t.start_q != starts_q[t.batch]) return false;
    if (t.first < 0 || t.first > t.last || t.last * kTileM > length_q + kTileM - 1) return false;
    for (int thread = 128; thread < 128 * (kKeyGroups + 1); ++thread) {  // as `store` does
      for (int r = 0; r < 2; ++r) {
        int const key = first_key(t, thread) + 8 * r;
        if (key < 0) return false;
        int const at = (t.batch * heads_kv + t.head_kv) * longest_kv + key;
        if (key < t.length_kv && thread % 4 == 0) ++stored[at];
      }
    }
    for (int head = t.head_kv * group; head < (t.head_kv + 1) * group; ++head) {
      for (int i = t.first, m = t.start; i < t.last; ++i, m = t.next(m)) {
        if (t.before(p, m) != added[row_tile(p, t.batch, head, m)]++) return false;
        bool const is_masked = t.is_masked(p, m);
        Scores scores(kTileN, kTileM, is_masked ? 1.f : 0.f);
        if (is_masked) {
          for (scores.thread = 128; scores.thread < 128 * (kKeyGroups + 1); ++scores.thread) {
            correct(scores, p, t, m, scores.thread);
          }
        }
        for (int n = 0; n < kTileN; ++n) {
          for (int i = 0; i < kTileM; ++i) {
            int const query = m * kTileM + i, key = t.n_block * kTileN + n;
            if (query >= length_q || scores.at[n * kTileM + i] == -INFINITY) continue;
            if (key >= length_kv || scores.at[n * kTileM + i] != 0.f) return false;  // not masked
            ++seen[t.batch][(head * length_q + query) * length_kv + key];
          }
        }
      }
    }
  }
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < heads_kv * longest_kv; ++i) {
      if (stored[b * heads_kv * longest_kv + i] != (i % longest_kv < keys[b])) return false;
    }
    for (size_t i = 0; i < seen[b].size(); ++i) {
      int const key = i % keys[b], query = i / keys[b] % queries[b];
      if (seen[b][i] != (!kCausal || key <= query)) return false;
    }
  }
  return true;
}
"""


def source(number: int, problem: AttentionBackwardProblem, config: Config) -> str:
    """One kernel's tiles and masks in a namespace of its own."""
    rendered = render(FAMILY.kernels(problem, config)[KERNEL], "x")
    body = rendered.split("namespace k_x {")[1]
    constants = CONSTANT.findall(body)
    constants.append(f"constexpr bool kRotates = {str(config['rotate']).lower()};")
    tile = part(body, r"^struct Tile \{.*?^\};")
    row_tile = part(body, r"^CUTE_DEVICE int64_t row_tile\(.*?^\}")
    mask = part(body, r"^CUTE_DEVICE int first_key\(.*?^\}\n")
    mask += part(body, r"^template <[^\n]*class Scores>\nCUTE_DEVICE void correct\(.*?^\}")
    checked = CHECK.replace("@tile@", f"{tile}\n{row_tile}").replace("@mask@", mask)
    checked = checked.replace("@check@", CHECK_PACKED if problem.is_varlen else CHECK_ONE_LENGTH)
    return f"namespace k_{number} {{\n" + "\n".join(constants) + f"\n{checked}\n}}\n"


def test_each_pair_of_the_mask_is_visited_once_and_in_order(
    tmp_path: Path, long_mode: bool
) -> None:
    kernels, calls = [], []
    sides = ALL_SIDES if long_mode else SIDES
    configs = (
        *((64, make()), (64, make(tile_m=96)), (64, make(warp_groups=1)), (256, make())),
        *((64, make(dq="ordered")), (64, make(dq="ordered", tile_m=128))),
        *((64, make(rotate=True)), (64, make(dq="ordered", rotate=True))),
    )
    shapes = itertools.product((0, 1), (0, 1), configs)
    for number, (windowed, causal, (head_dim, config)) in enumerate(shapes):
        if config["rotate"] and config["dq"] == "ordered" and (windowed or causal):
            continue  # which `conflicts` refuses
        text = f"S=1024,D={head_dim},causal={causal}" + (",window=9" if windowed else "")
        kernels.append(source(number, AttentionBackwardProblem.parse(text), config))
        cases = {}
        base = AttentionBackwardProblem.parse(f"S=1,D=64,causal={causal}")
        for queries, keys in itertools.product(LENGTHS, LENGTHS):
            for left, right in itertools.product(sides, (-1,) if causal else sides):
                sizes = {"seqlen_q": queries, "seqlen_kv": keys}
                one = replace(base, **sizes, window_left=left, window_right=right)
                if one.is_windowed == windowed and one.is_causal == causal:
                    cases[queries, keys, *one.visible] = True
        assert len(cases) >= len(LENGTHS) ** 2
        rows = ", ".join(f"{{{', '.join(map(str, case))}}}" for case in cases)
        calls.append(
            f"  {{ int cases[][4] = {{{rows}}};\n"
            "    for (auto& c : cases) for (int section : {1, 4})\n"
            f"      if (!k_{number}::holds(c[0], c[1], c[2], c[3], section))\n"
            f'        std::printf("{number}: %d queries, %d keys, %d left, %d right, %d\\n", '
            "c[0], c[1], c[2], c[3], section); }\n"
        )
    assert output_of(tmp_path, kernels, calls) == ""


def output_of(folder: Path, kernels: Sequence[str], calls: Sequence[str]) -> str:
    """Compile a program of these checks, run it, and return what it prints."""
    text = PREAMBLE + "".join(kernels) + "int main() {\n" + "".join(calls) + "}\n"
    return run_on_host(folder, text)


def test_packed_sequences_are_visited_one_by_one_and_in_order(tmp_path: Path) -> None:
    kernels, calls = [], []
    configs = (make(), make(tile_m=128), make(dq="ordered"), make(warp_groups=1, dq="ordered"))
    lengths = ((300, 1, 129), (1, 300, 64), (0, 128, 5), (257, 0, 63), (77, 77, 300))
    for number, (causal, config) in enumerate(itertools.product((0, 1), configs)):
        problem = AttentionBackwardProblem.parse(f"B=3,S=1024,D=64,varlen=1,causal={causal}")
        kernels.append(source(number, problem, config))
        for queries, keys, section in itertools.product(lengths, lengths, (1, 4)):
            sets = ", ".join(f"{{{', '.join(map(str, one))}}}" for one in (queries, keys))
            calls.append(
                f"  if (!k_{number}::holds({sets}, {section}))\n"
                f'    std::printf("%s\\n", "{number}: {queries}, {keys}, {section}");\n'
            )
    assert output_of(tmp_path, kernels, calls) == ""
