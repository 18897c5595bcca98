"""Block-sparse masks of the fused attention kernel, as far as no GPU is needed.

Which keys each query sees: the template's own tiles, tables and loops, built by the host compiler
and run over masks as the numerics gate draws them.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from emulated_scores import PREAMBLE
from fused_configs import maker
from rendered import clean, part, run_on_host

from tuner.compile.compiler import Compiler
from tuner.compile.render import render
from tuner.config import Config
from tuner.families.fused_attention import FusedAttention
from tuner.hardware import DEFAULT_GPU
from tuner.measure import block_masks
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = FusedAttention()
make = maker(ping_pong=True)

#: Axes, heads and lengths of a mask, and a config.
CASES = [
    ("B=2,H=2,SQ=300,SKV=700,block_mask=bh", make(2, 128)),
    ("B=2,H=3,SQ=130,SKV=513,block_mask=b", make(1, 64, persistent=True)),
    ("B=1,H=2,SQ=1,SKV=1,block_mask=h", make(2, 32, 2)),
    ("B=2,H=8,HKV=2,SQ=257,SKV=384,block_mask=b", make(2, 64, 2, packed_heads=4)),
    ("B=1,H=4,HKV=1,SQ=500,SKV=200,block_mask=1", make(4, 128, packed_heads=4)),
]
#: Two and one score buffers, tiles of a whole block and of a part, for the whole way through nvcc.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        ("S=1000,D=64,dtype=bf16,block_mask=bh", make(2, 128, 2, persistent=True)),
        (
            "H=8,HKV=2,S=1000,D=64,softcap=20,block_mask=b",
            make(1, 64, packed_heads=4, early_exp=50, blocks_per_sm=2),
        ),
    )
]
ALL = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]
#: Compiled in every run; the other with ``scripts/test --long``.
USUAL = {0}
DEVICE_SPECS = [ALL[number] for number in sorted(USUAL)]

#: What a file of tables holds.
TABLES = """
struct int2 { int x, y; };
template <class T>
std::vector<T> numbers(std::ifstream& file) {
  int64_t count;
  file.read(reinterpret_cast<char*>(&count), sizeof(count));
  std::vector<T> found(count);
  file.read(reinterpret_cast<char*>(found.data()), count * sizeof(T));
  return found;
}
"""

#: Pairs that a launch sees otherwise than the dense mask, by its tiles or when rows are computed
#: anew.
CHECK = """
@blocks@
struct Params {
  int batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim, splits, m_blocks, tiles, section;
  cutlass::FastDivmod by_m_blocks, by_splits, by_heads;
  Blocks blocks;
};
@tile@
int wrong(char const* path) {
  std::ifstream file(path, std::ios::binary);
  auto const n = numbers<int>(file);
  auto const counts = numbers<int2>(file);
  auto const indices = numbers<int>(file);
  auto const bits = numbers<uint32_t>(file);
  auto const dense = numbers<uint8_t>(file);
  int const batch = n[0], heads = n[1], queries = n[2], keys = n[3], steps[2] = {n[4], n[5]};
  Params p{batch, heads, 1, queries, keys, 64, 1};
  p.blocks = {counts.data(), indices.data(), bits.data(), n[6], n[7], n[8]};
  p.m_blocks = (queries * kPack + kTileM - 1) / kTileM, p.section = 3;
  p.tiles = p.m_blocks * batch * heads / kPack;
  p.by_m_blocks = cutlass::FastDivmod(p.m_blocks), p.by_heads = cutlass::FastDivmod(heads / kPack);
  std::vector<int> seen(int64_t(batch) * heads * queries * keys), again(seen.size());
  int faults = 0;
  for (int index = 0; index < p.tiles; ++index) {
    Tile const t = Tile::at(p, index);
    int const first = t.first;
    int const& unmasked = t.whole;
    auto place_of = [&](int row, int key) {
      int64_t const head = int64_t(t.batch) * heads + t.head * kPack + row % kPack;
      return (head * queries + row / kPack) * keys + key;
    };
    for (int group = 0; group < kGroups && first < t.last; ++group) {
      int const group_row = t.m_block * kTileM + group * 64;
      std::vector<BlockBits> threads;
      auto row0_of = [&](int tid) { return group_row + tid / 32 * 16 + tid % 32 / 4; };
      for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
        threads.emplace_back(p.blocks, t.list, row0_of(threadIdx.x));
      }
      int n = t.last - 1;
      for (auto& block_bits : threads) {
        if (n >= unmasked) block_bits.load(n);
      }
      auto visit = [&](bool is_masked) {
        Scores scores(kTileN);
        for (threadIdx.x = 0; is_masked && threadIdx.x < 128; ++threadIdx.x) {
          threads[threadIdx.x].apply(scores, n - kKeyGroups, unmasked);
        }
        for (int r = 0; r < 64; ++r) {
          for (int c = 0; c < kTileN; ++c) {
            int const row = group_row + r, key = p.blocks.tile(t.list, n) * kTileN + c;
            if (row >= queries * kPack || scores.at[r * kTileN + c] != 0.f) continue;
            if (key >= keys) ++faults; else ++seen[place_of(row, key)];
          }
        }
      };
      visit(n >= unmasked);
      auto step = [&](auto is_masked) {
        n -= kKeyGroups;
        visit(@stepped@);
      };
      @loop@
      faults += n != first;
    }
    for (int r = 0; r < kTileM; ++r) {
      int const row = t.m_block * kTileM + r;
      if (row >= queries * kPack) continue;
      for (int place = 0; place < t.last * kTileN; ++place) {
        int const key = p.blocks.key(t.list, place / 32 * 32) + place % 32;
        if (!p.blocks.is_seen(t.list, row / kPack, place)) continue;
        if (key >= keys) ++faults; else ++again[place_of(row, key)];
      }
    }
  }
  for (int b = 0; b < batch; ++b) for (int h = 0; h < heads; ++h)
    for (int64_t i = 0; i < int64_t(queries) * keys; ++i) {
      int const wanted = dense[int64_t(b) * steps[0] + int64_t(h) * steps[1] + i];
      int64_t const at = (int64_t(b) * heads + h) * queries * keys + i;
      faults += (seen[at] != wanted) + (again[at] != wanted);
    }
  return faults;
}
"""


def source(number: int, text: str, config: Config) -> str:
    """One kernel's tables, tiles and loops in a namespace of its own."""
    problem = AttentionProblem.parse(f"{text},D=64")
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    body = render(FAMILY.kernels(problem, config)["attention"], "x").split("namespace k_x {")[1]
    blocks = part(body, r"^constexpr int kBlock = .*?^struct BlockBits \{.*?^\};")
    head = body.split("constexpr int kBlock = ")[0]
    constants = [line for line in head.splitlines() if line.startswith("constexpr")]
    loop, stepped = "while (n > first) step(true_type{});", "n >= unmasked"
    if config["score_buffers"] == 1:
        loop = part(body, r"if constexpr \(true\) \{\n *while.*?(?=^      \} else \{)")
        stepped = "decltype(is_masked)::value"
    pieces = {
        "blocks": blocks,
        "tile": part(body, r"^struct Tile \{.*?^\};"),
        "loop": loop,
        "stepped": stepped,
    }
    checked = CHECK
    for name, piece in pieces.items():
        checked = checked.replace(f"@{name}@", piece)
    return f"namespace k_{number} {{\n" + "\n".join(constants) + f"\n{checked}\n}}\n"


def written(path: Path, text: str, config: Config, seed: int) -> None:
    """A drawn mask of a case for the program to read."""
    problem = AttentionProblem.parse(f"{text},D=64")
    tables = block_masks.tables(problem, "dominant", seed)
    (launch,) = FAMILY.launches(problem, config, 1.0)
    sizes = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv
    steps = problem.mask_strides[:2]
    integers = struct.pack("<9i", *sizes, *steps, *launch.integers[21:])
    widths = (4, 8, 4, 4, 1)
    with path.open("wb") as file:
        for data, width in zip((integers, *tables), widths, strict=True):
            file.write(struct.pack("<q", len(data) // width) + data)


def test_each_query_sees_the_keys_of_its_mask_once(tmp_path: Path) -> None:
    kernels = [source(number, *case) for number, case in enumerate(CASES)]
    calls = "".join(
        f"  for (int i = 1; i < argc; ++i) if (argv[i][0] == '{number}')\n"
        f'    std::printf("%d ", k_{number}::wrong(argv[i]));\n'
        for number in range(len(CASES))
    )
    program = f"{PREAMBLE}{TABLES}{''.join(kernels)}int main(int argc, char** argv) {{\n{calls}}}\n"
    names = []
    for number, case in enumerate(CASES):
        for seed in range(8):
            names.append(f"{number}-{seed}")
            written(tmp_path / names[-1], *case, seed)
    assert run_on_host(tmp_path, program, arguments=names).split() == ["0"] * len(names)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_they_compile_without_spills_or_advice(number: int, device_compiler: Compiler) -> None:
    problem, config = KERNELS[number]
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    [(_, future)] = device_compiler.submit([ALL[number]])
    clean(future.result())


def test_drawn_masks_hold_every_kind_of_block() -> None:
    """Blocks seen whole, in part and not at all, and queries without any key."""
    problem = AttentionProblem.parse("SQ=1500,SKV=1000,D=64,block_mask=1")
    rows = list(block_masks.drawn(problem, random.Random(3)))
    tables = block_masks.tables_of(rows, 1000)
    counts = struct.unpack(f"<{len(tables.block_counts) // 4}i", tables.block_counts)
    assert min(rows) == 0 and sum(counts[::2]) > 8 and sum(counts[1::2]) > 8
    assert any(whole + some < 8 for whole, some in zip(counts[::2], counts[1::2], strict=True))
