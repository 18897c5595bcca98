"""The CUTLASS attention template through nvcc, and its mask and scheduler through the host compiler
alone: those are plain arithmetic, so they can be counted out without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.compile.toolchain import find_toolchain
from tuner.config import Config, Value
from tuner.errors import BenchmarkError
from tuner.families.cutlass_fmha import CutlassFmha
from tuner.families.cutlass_fmha.shape import (
    COOPERATIVE,
    INDIVIDUAL,
    PINGPONG,
    TMA,
    FmhaShape,
)
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = CutlassFmha()


def make(schedule: str, tile_m: int, tile_n: int, **more: Value) -> Config:
    params: dict[str, Value] = {"kernel_schedule": schedule, "tile_m": tile_m, "tile_n": tile_n}
    return Config("cutlass_fmha", {**params, **more})


def cooperative(tile_m: int, tile_n: int, groups: int, kv: int, **more: Value) -> Config:
    plain: dict[str, Value] = {
        "warp_groups": groups,
        "kv_stages": kv,
        "is_mainloop_locked": False,
        "tile_scheduler": INDIVIDUAL,
        "loads_q_separately": False,
    }
    return make(COOPERATIVE, tile_m, tile_n, **{**plain, **more})


PINGPONG_CAUSAL = make(
    PINGPONG,
    128,
    128,
    warp_groups=2,
    kv_stages=4,
    q_stages=4,
    is_mainloop_locked=True,
    tile_order="descending",
)
#: Both of CUTLASS's kernels, both masks, both types; an own scheduler and the given one.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        ("S=1000,D=64", make(TMA, 64, 96, kv_stages=4, blocks_per_sm=2)),
        ("S=1000,D=128,causal=1,dtype=bf16", PINGPONG_CAUSAL),
    )
]
SPECS = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]


def test_a_sample_compiles_and_refuses_before_any_launch(compiler: Compiler) -> None:
    for (problem, config), (_, future) in zip(KERNELS, compiler.submit(SPECS), strict=True):
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        artifact = future.result()
        assert artifact.resources is not None
        spilled = artifact.resources.spill_store_bytes + artifact.resources.spill_load_bytes
        assert spilled == 0, config
        library = ctypes.CDLL(str(artifact.library))
        smem = getattr(library, f"tuner_{artifact.key}_smem_bytes")()
        assert smem == FmhaShape.of(problem, config).smem_bytes, config
        launch = FAMILY.launches(problem, config, 0.125)[0]
        kernel = load(artifact)
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        assert kernel.workspace_bytes(launch.integers) == 4 * rows
        good = ([16, 16, 16, 16], launch.integers, (0.125,), 256)
        for bad in (
            ([16, 16, 8, 16], *good[1:]),
            (good[0], (*launch.integers[:5], 512, *launch.integers[6:]), *good[2:]),
            (good[0], (*launch.integers[:2], 3, *launch.integers[3:]), *good[2:]),
            (good[0], (*launch.integers[:8], 60, *launch.integers[9:]), *good[2:]),
            (*good[:2], (-0.125,), 256),
            (*good[:3], 0),
        ):
            with pytest.raises(BenchmarkError):
                kernel.launch(*bad, 0)


STUBS = """
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>
#define CUTLASS_DEVICE inline
#define CUTLASS_HOST_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
struct dim3 { unsigned x, y, z; dim3(unsigned a, unsigned b, unsigned c) : x(a), y(b), z(c) {} };
struct Index { int x; };
static Index blockIdx, gridDim;
namespace cutlass {
struct KernelHardwareInfo { int sm_count; };
namespace fmha::collective { struct DefaultFusion {}; }
}
namespace cute {
using std::get; using std::min; using std::make_tuple;
struct _0 {};
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
template <class... T> auto make_coord(T... values) { return std::make_tuple(values...); }
template <class T> int size(T const& values) { return values.count; }
}
"""
#: For sizes around the tiles: the visited tiles hold all visible keys, the unmasked ones nothing
#: else, and before_softmax leaves exactly the visible keys.
CHECK_MASK = """
struct Row { int row, first, count; float at[512];
  float& operator()(int i) { return at[i]; } };
struct At { int row, first;
  auto operator()(int i) const { return std::make_tuple(row, first + i); } };
int main() {
  for (int sq : {1, 63, 64, 65, 190, 256, 300, 517}) for (int skv : SIZES) {
    auto problem = std::make_tuple(1, 1, sq, skv, 64);
    auto tile = std::make_tuple(TILE_M, TILE_N, 64);
    int widest = 0;
    for (int block = 0; block * TILE_M < sq; ++block) {
      auto coord = std::make_tuple(block, 0, 0);
      int trips = Mask{}.get_trip_count(coord, tile, problem);
      int unmasked = Mask{}.get_unmasked_trip_count(coord, tile, problem);
      int masked = Mask{}.get_masked_trip_count(coord, tile, problem);
      widest = std::max(widest, trips);
      if (trips < 1 || unmasked < 0 || masked < 0 || unmasked + masked != trips) return 1;
      for (int row = block * TILE_M; row < std::min(sq, (block + 1) * TILE_M); ++row)
        for (int j = 0; j * TILE_N < std::max(skv, trips * TILE_N); ++j) {
          Row scores{row, j * TILE_N, TILE_N, {}};
          if (j >= unmasked || j == 0) Mask{}.before_softmax(scores, At{row, j * TILE_N}, problem);
          for (int i = 0; i < TILE_N; ++i) {
            int column = j * TILE_N + i;
            bool visible = column < skv && (!Mask::kCausal || column <= row);
            bool kept = j < trips && scores.at[i] == 0.0f;
            if (visible != kept) {
              std::printf("sq %d skv %d row %d column %d\\n", sq, skv, row, column);
              return 2;
            }
          }
        }
    }
    int columns = Mask::kCausal ? std::min(sq, skv) : skv;
    if (widest != cute::ceil_div(columns, TILE_N)) return 3;
  }
  return 0;
}
"""
#: Every tile once, the last rows first.
CHECK_SCHEDULER = """
int main() {
  for (int first : {1, 3}) for (int second : {1, 5}) for (int rows : {1, 128, 700}) {
    auto params = Scheduler::to_underlying_arguments(std::make_tuple(first, second, rows, 9, 64),
        cutlass::KernelHardwareInfo{7}, 0, std::make_tuple(128, 128, 64));
    int seen[8][5][3] = {}, blocks = (rows + 127) / 128, last = blocks;
    gridDim.x = Scheduler::get_grid_shape(params).x;
    if (IS_PERSISTENT != (gridDim.x == std::min(7, first * second * blocks))
        && gridDim.x != first * second * blocks) return 1;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      for (Scheduler s(params); s.is_valid(); ++s) {
        auto coord = s.get_block_coord();
        auto head = std::get<2>(coord);
        seen[std::get<0>(coord)][std::get<1>(head)][std::get<0>(head)]++;
        if (s.index == blockIdx.x) {
          if (std::get<0>(coord) > last) return 2;
          last = std::get<0>(coord);
        }
      }
    for (int m = 0; m < blocks; ++m) for (int h = 0; h < second; ++h)
      for (int b = 0; b < first; ++b) if (seen[m][h][b] != 1) return 3;
  }
  return 0;
}
"""


def run_struct(folder: Path, text: str, struct: str, main: str, **macros: int | str) -> None:
    """Compile one struct of the rendered template with a `main` that checks it, and run that."""
    body = re.search(rf"^struct {struct}\b.*?^}};$", text, re.MULTILINE | re.DOTALL)
    assert body is not None
    source = folder / f"{struct}.cpp"
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    source.write_text(STUBS + defines + body[0] + main)
    program = source.with_suffix("")
    command = [str(find_toolchain().host_compiler), "-std=c++17", "-O1", "-w", str(source), "-o"]
    subprocess.run([*command, str(program)], check=True, capture_output=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("tile_m", "tile_n", "groups"), [(128, 96, 2), (192, 128, 3), (128, 256, 2)]
)
def test_the_mask_keeps_exactly_the_visible_keys(
    tmp_path: Path, tile_m: int, tile_n: int, groups: int, is_causal: bool
) -> None:
    order: dict[str, Value] = {"tile_order": "ascending"} if is_causal else {}
    for seqlen_kv in (tile_n, tile_n + 1):
        problem = AttentionProblem(
            seqlen_q=512, seqlen_kv=seqlen_kv, head_dim=64, is_causal=is_causal
        )
        config = cooperative(tile_m, tile_n, groups, 4, **order)
        text = render(FAMILY.kernels(problem, config)["attention"], "x")
        sizes = f"{{1, 8, {tile_n - 1}, {tile_n}, {tile_n + 1}, {3 * tile_n}, {5 * tile_n + 7}}}"
        if seqlen_kv == tile_n:
            sizes = f"{{{tile_n}, {3 * tile_n}, {8 * tile_n}}}"
        run_struct(tmp_path, text, "Mask", CHECK_MASK, TILE_M=tile_m, TILE_N=tile_n, SIZES=sizes)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_the_descending_scheduler_visits_every_tile_once(
    tmp_path: Path, is_persistent: bool
) -> None:
    config = PINGPONG_CAUSAL
    if not is_persistent:
        config = cooperative(128, 128, 2, 4, tile_order="descending")
    problem = AttentionProblem.parse("S=1024,D=64,causal=1")
    text = render(FAMILY.kernels(problem, config)["attention"], "x")
    run_struct(tmp_path, text, "Scheduler", CHECK_SCHEDULER, IS_PERSISTENT=int(is_persistent))
