"""Windows, soft caps and variable lengths of the fused attention kernel, as far as no GPU is
needed.

Which keys each query sees: the template's own tiles, loops and masks, built by the host compiler
and run over small problems, against the definition of the window, in each of several sequences.
"""

from __future__ import annotations

import itertools
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
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = FusedAttention()
LENGTHS = (1, 7, 63, 65, 129, 300)
SIDES = (-1, 0, 1, 7, 64, 100)
make = maker(ping_pong=True)

#: Rendered by (windowed, causal, grouped heads); sizes and sides are arguments of a launch.
CONFIGS = [
    *((windowed, causal, make(2, 48, 1)) for windowed in (0, 1) for causal in (0, 1)),
    *((1, causal, make(1, 64, 2, packed_heads=4)) for causal in (0, 1)),
    (0, 1, make(2, 32, 2, packed_heads=4)),
    (1, 1, make(3, 80, 1, packed_heads=2)),
    # Groups that take the blocks of keys by turns.
    (0, 1, make(4, 48, 1, key_groups=2)),
    (1, 0, make(4, 32, 1, key_groups=4)),
    (1, 1, make(2, 48, 1, key_groups=2, packed_heads=4)),
]

#: Of variable lengths: (causal, config).
VARLEN = [
    *((causal, make(2, 48, 1, persistent=bool(causal))) for causal in (0, 1)),
    (0, make(1, 64, 2, packed_heads=4)),
    (1, make(3, 80, 1, packed_heads=2)),
]

#: A window with a soft cap, and variable lengths, for the whole way through nvcc.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        ("B=2,H=8,HKV=2,S=1000,D=64,left=64,right=7,softcap=30", make(2, 96, 2, packed_heads=4)),
        ("B=3,H=8,HKV=2,S=1000,D=64,varlen=1", make(2, 96, 2, packed_heads=4)),
        ("B=3,H=2,S=1000,D=128,varlen=1,causal=1", make(2, 128, 1, persistent=True)),
    )
]
ALL = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]
#: Compiled in every run; the others with ``scripts/test --long``: a paged kernel of every run has a
#: window and a soft cap.
USUAL = {2}
DEVICE_SPECS = [ALL[number] for number in sorted(USUAL)]

#: What a launch does with one head of each sequence: every tile, every group of it, every block of
#: keys.
CHECK = """
struct Params {
  int batch, heads, heads_kv, seqlen_q, seqlen_kv, head_dim, splits, m_blocks, tiles, section;
  cutlass::FastDivmod by_m_blocks, by_splits, by_heads;
  int const *starts_q, *starts_kv;
  int total_q, total_kv, left, right;
};
@ranges@
@tile@
@mask@
bool holds(std::vector<int> of_queries, std::vector<int> of_keys, int left, int right) {
  int const batch = of_queries.size();
  Params p{batch, kPack, 1, *std::max_element(of_queries.begin(), of_queries.end()),
           *std::max_element(of_keys.begin(), of_keys.end()), 64, 1};
  std::vector<int> starts_q(batch + 1), starts_kv(batch + 1);
  for (int i = 0; i < batch; ++i) {
    starts_q[i + 1] = starts_q[i] + of_queries[i], starts_kv[i + 1] = starts_kv[i] + of_keys[i];
  }
  p.starts_q = starts_q.data(), p.starts_kv = starts_kv.data();
  p.left = left, p.right = right;
  p.m_blocks = (p.seqlen_q * kPack + kTileM - 1) / kTileM, p.section = 1;
  p.tiles = p.m_blocks * batch;
  p.by_m_blocks = cutlass::FastDivmod(p.m_blocks);
  p.by_splits = p.by_heads = cutlass::FastDivmod(1);
  std::vector<std::vector<int>> all_seen(batch);
  for (int i = 0; i < batch; ++i) all_seen[i].resize(of_queries[i] * kPack * of_keys[i]);
  for (int index = 0; index < p.tiles; ++index) {
    Tile const t = Tile::at(p, index);
    int const rows = of_queries[t.batch] * kPack, there = of_keys[t.batch];
    auto& seen = all_seen[t.batch];
    if (t.first < 0 || t.first > t.last || t.last * kTileN >= there + kTileN) return false;
    if (t.m_block * kTileM >= rows && t.first != t.last) return false;  // nothing is left to do
    if (@astray@) return false;
    for (int group = 0; group < kGroups; ++group) {
      int const row_group = group % kRowGroups, key_group = group / kRowGroups;
      int const group_row = t.m_block * kTileM + row_group * 64;
      @edges@
      int const first = t.first;
      int n = t.last - 1 - key_group;
      if (n < first) continue;
      auto visit = [&](bool is_masked) {
        Scores scores(kTileN);
        if (is_masked) {
          for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
            int const tid = threadIdx.x;
            @row@
            mask(scores, p, keys, row0, n * kTileN);
          }
        }
        for (int r = 0; r < 64; ++r) {
          for (int c = 0; c < kTileN; ++c) {
            int const row = group_row + r, key = n * kTileN + c;
            if (row >= rows || scores.at[r * kTileN + c] != 0.f) continue;
            if (key >= there) return false;  // beyond the end, and not masked
            ++seen[row * there + key];
          }
        }
        return true;
      };
      bool good = visit(@cut@);
      auto step = [&](auto is_masked) {
        n -= kKeyGroups;
        good = good && visit(@stepped@);
      };
      @loop@
      if (!good || n < first || n - kKeyGroups >= first) return false;
    }
  }
  for (int i = 0; i < batch; ++i) {
    for (int row = 0; row < of_queries[i] * kPack; ++row) {
      for (int key = 0; key < of_keys[i]; ++key) {
        int const query = row / kPack;
        bool const is_seen = key >= query - left && key <= query + right;
        if (all_seen[i][row * of_keys[i] + key] != is_seen) return false;
      }
    }
  }
  return true;
}
"""


#: A tile of packed sequences that is not its sequence's.
ASTRAY = (
    "t.start_q != starts_q[t.batch] || t.start_kv != starts_kv[t.batch] || "
    "t.seqlen_q != of_queries[t.batch] || t.seqlen_kv != of_keys[t.batch]"
)


def source(number: int, windowed: int, causal: int, config: Config, varlen: int = 0) -> str:
    """One kernel's tiles, loops and masks in a namespace of its own."""
    heads = f"H={config.get('packed_heads', 1)},HKV=1"
    text = f"{heads},S=1024,D=64,causal={causal},varlen={varlen}"
    text += ",window=9" if windowed else ""
    rendered = render(FAMILY.kernels(AttentionProblem.parse(text), config)["attention"], "x")
    body = rendered.split("namespace k_x {")[1]
    constants = [line for line in body.splitlines() if line.startswith("constexpr")]
    loop = "while (n > first) step(true_type{});"
    if config["score_buffers"] == 1:
        loop = part(body, r"if constexpr \(kCausal \|\| kWindowed\) \{.*?(?=^      \} else \{)")
    pieces = {
        "ranges": part(body, r"^CUTE_DEVICE int first_key\(.*?^\}\nCUTE_DEVICE int end_key.*?^\}"),
        "tile": part(body, r"^struct Tile \{.*?^\};"),
        "mask": part(body, r"^template <class Scores>\nCUTE_DEVICE void mask\(.*?^\}"),
        "edges": part(body, r"int const& keys = .*?;\n *int const opened = .*?;"),
        "astray": ASTRAY if varlen else "false",
        "row": part(body, r"int const row0 = .*?;"),
        "loop": loop,
        "stepped": "decltype(is_masked)::value" if config["score_buffers"] == 1 else "@cut@",
        "cut": part(body, r"(?<=if \()n >= unmasked \|\| [^;]*?(?=\) mask\(scores)"),
    }
    checked = CHECK
    for name, piece in pieces.items():
        checked = checked.replace(f"@{name}@", piece)
    return f"namespace k_{number} {{\n" + "\n".join(constants) + f"\n{checked}\n}}\n"


def launches(windowed: int, causal: int) -> list[tuple[int, int, int, int]]:
    """(queries, keys, left, right) as a family passes them."""
    found = {}
    for queries, keys in itertools.product(LENGTHS, LENGTHS):
        for left, right in itertools.product(SIDES, (-1,) if causal else SIDES):
            sides = {"window_left": left, "window_right": right}
            problem = AttentionProblem(queries, keys, 64, is_causal=bool(causal), **sides)
            if problem.is_windowed == windowed and problem.is_causal == causal:
                found[queries, keys, *problem.visible] = True
    return list(found)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_they_compile_without_spills_or_advice(number: int, device_compiler: Compiler) -> None:
    problem, config = KERNELS[number]
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    [(_, future)] = device_compiler.submit([ALL[number]])
    clean(future.result())


def test_each_query_sees_the_keys_of_its_window_once(tmp_path: Path) -> None:
    kernels = [source(number, *config) for number, config in enumerate(CONFIGS)]
    calls = []
    for number, (windowed, causal, _) in enumerate(CONFIGS):
        known = launches(windowed, causal)
        assert len(known) >= len(LENGTHS) ** 2
        rows = ", ".join(f"{{{q}, {k}, {left}, {right}}}" for q, k, left, right in known)
        calls.append(
            f"  {{ int cases[][4] = {{{rows}}};\n"
            f"    for (auto& c : cases) if (!k_{number}::holds({{c[0]}}, {{c[1]}}, c[2], c[3]))\n"
            f'      std::printf("{number}: %d queries, %d keys, %d left, %d right\\n", '
            "c[0], c[1], c[2], c[3]); }\n"
        )
    assert said(tmp_path, kernels, calls) == ""


def test_each_query_sees_the_keys_of_its_own_sequence_once(tmp_path: Path) -> None:
    lengths = (0, *LENGTHS)
    turned = [lengths[i:] + lengths[:i] for i in range(len(lengths))]
    kernels = [source(number, 0, *config, 1) for number, config in enumerate(VARLEN)]
    calls = []
    for number, (causal, _) in enumerate(VARLEN):
        for queries, keys in [
            *((lengths, keys) for keys in turned),
            ((5,), (0,)),
            ((1, 1), (9, 300)),
        ]:
            of_queries, of_keys = (", ".join(map(str, sizes)) for sizes in (queries, keys))
            arguments = f"{{{of_queries}}}, {{{of_keys}}}, 300, {0 if causal else 300}"
            calls.append(
                f"  if (!k_{number}::holds({arguments}))\n"
                f'    std::printf("{number}: queries {of_queries}, keys {of_keys}\\n");\n'
            )
    assert said(tmp_path, kernels, calls) == ""


def said(tmp_path: Path, kernels: list[str], calls: list[str]) -> str:
    """What a program of these calls prints."""
    text = PREAMBLE + "".join(kernels) + "int main() {\n" + "".join(calls) + "}\n"
    return run_on_host(tmp_path, text)
