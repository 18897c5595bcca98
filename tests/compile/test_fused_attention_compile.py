"""The fused attention template through nvcc, and its shared memory through the host compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fused_configs import maker
from rendered import clean, run_on_host

from tuner.base import resources
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.families.attention_instances import launch_registers
from tuner.families.fused_attention import FusedAttention
from tuner.families.fused_attention.legality import smem_bytes
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = FusedAttention()
make = maker(ping_pong=True)

#: Between them both values of every lever; the last two hand out their tiles by a counter, the
#: others' WGMMAs are of widths that the template writes out.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        (
            "S=1024,D=128",
            make(
                *(2, 80),
                kv_stages=4,
                key_groups=2,
                stages_output=True,
                ping_pong=False,
                q_in_registers=True,
                early_exp=50,
                rescale="lazy",
            ),
        ),
        (
            "B=2,H=16,HKV=4,S=1000,D=64,causal=1,dtype=bf16",
            make(2, 128, score_buffers=2, packed_heads=4, persistent=True),
        ),
        (
            "B=2,H=4,HKV=2,S=1000,D=128,causal=1,dtype=e4m3",
            make(2, 224, early_exp=50, packed_heads=2, persistent=True),
        ),
    )
]
#: Kernels whose library is loaded: every part of a workspace is in one. Of the others only the
#: device half is compiled, 60 % of the whole.
LOADED = (0, 2)
ALL = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]
SPECS = [ALL[number] for number in LOADED]
#: Decoding and chunks over pages, and all that a softmax may have: what it is for, and a config.
PAGED = [
    (
        AttentionProblem.parse(f"B=2,H=8,HKV=2,SKV=1000,page_size=16,{text}"),
        make(packed_heads=4, early_exp=50, **levers),
    )
    for text, levers in (
        ("SQ=1,D=128,dtype=fp16", {"groups": 1, "tile_n": 64, "blocks_per_sm": 2, "kv_stages": 3}),
        (
            "SQ=2,D=128,causal=1,dtype=bf16",
            {"groups": 1, "tile_n": 64, "blocks_per_sm": 2, "persistent": True, "stream_k": True},
        ),
        (
            "SQ=2,D=128,causal=1,dtype=bf16",
            {"groups": 1, "tile_n": 64, "blocks_per_sm": 2, "stream_k": True},
        ),
        ("SQ=600,D=128,causal=1,dtype=bf16", {"groups": 2, "tile_n": 128, "persistent": True}),
        (
            "SQ=600,D=64,causal=1,window=100,softcap=30,sinks=1,dtype=bf16",
            {"groups": 2, "tile_n": 128},
        ),
    )
]
#: A window as wide as its tiles at the largest head dimension.
WIDE = (
    AttentionProblem.parse("S=1024,D=256,causal=1,window=256,dtype=bf16"),
    make(2, 64, persistent=True),
)
#: Groups that leave out masked blocks and halves, with the fewest registers a thread, and the most.
SKIPPING = [
    (
        AttentionProblem.parse("B=16,S=1024,D=64,causal=1"),
        make(3, 128, persistent=True, skips_masked="halves"),
    ),
    (
        AttentionProblem.parse("B=16,S=1024,D=128,causal=1,dtype=bf16"),
        make(
            *(2, 128),
            persistent=True,
            skips_masked="halves",
            stages_output=True,
            rescale="lazy",
            turn_ends="scores",
        ),
    ),
]
#: Of the paged and the skipping ones compiled in every run; the others with
#: ``scripts/test --long``.
USUAL = {1, 4}
DEVICE_ALL = [FAMILY.kernels(*case)["attention"] for case in (*PAGED, *SKIPPING, WIDE)]
DEVICE_SPECS = [ALL[1], *(DEVICE_ALL[number] for number in sorted(USUAL)), DEVICE_ALL[-1]]
#: Instances, groups, rings and blocks at an SM, to be counted by the compiler.
SIZES = [
    *KERNELS,
    (AttentionProblem.parse("S=1024,D=40"), make(1, 176, kv_stages=1)),
    (AttentionProblem.parse("S=1024,D=96"), make(2, 112, kv_stages=3)),
    (AttentionProblem.parse("S=1024,D=192"), make(1, 64)),
    (AttentionProblem.parse("S=1024,D=256"), make(2, 80)),
    (AttentionProblem.parse("S=1024,D=64"), make(3, 96, kv_stages=5)),
    # Groups that share rows, and an output in shared memory.
    (AttentionProblem.parse("S=1024,D=64"), make(4, 64, key_groups=4, kv_stages=8)),
    (AttentionProblem.parse("S=1024,D=96,causal=1"), make(4, 32, key_groups=2, stages_output=True)),
    (AttentionProblem.parse("S=1024,D=256"), make(1, 64, stages_output=True, persistent=True)),
    (AttentionProblem.parse("S=1024,D=96,dtype=e4m3"), make(2, 64, key_groups=2)),
    # What a cluster shares is larger than the operands.
    (AttentionProblem.parse("S=1024,D=64"), make(1, 16)),
    (AttentionProblem.parse("S=1024,D=96,dtype=e4m3"), make(1, 32)),
    # No clusters there.
    (AttentionProblem.parse("B=3,S=1024,D=64,varlen=1"), make(1, 16)),
    (AttentionProblem.parse("S=1024,D=96,dtype=e4m3"), make(1, 32, persistent=True)),
    # Clusters, but for persistent blocks.
    (AttentionProblem.parse("B=3,S=1024,D=64,page_size=16"), make(1, 16)),
    (AttentionProblem.parse("B=3,S=1024,D=64,page_size=16"), make(1, 16, persistent=True)),
    (AttentionProblem.parse("B=3,S=1024,D=128,page_size=64,varlen=1"), make(1, 64, kv_stages=3)),
]

#: The layouts' swizzle, by itself: what else the header holds needs CUDA.
SWIZZLE = re.search(
    r"^template <int kColumns, class T.*?\nusing SmemAtom = .*?;$",
    (resources.templates() / "attention.h").read_text(),
    re.M | re.S,
)
INCLUDES = f"""
#include <cstdio>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>
namespace tuner {{
{SWIZZLE[0]}
}}
"""


@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_a_sample_compiles_without_spills_or_advice(
    number: int, compiler: Compiler, device_compiler: Compiler
) -> None:
    """And its blocks are launched with the registers that setmaxnreg shares out."""
    problem, config = KERNELS[number]
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    which = compiler if number in LOADED else device_compiler
    [(spec, future)] = which.submit([ALL[number]])
    used, groups = clean(future.result()), config["warp_groups"]
    assert used.registers <= launch_registers(groups, config["blocks_per_sm"])
    of_groups = groups * spec.variables["consumer_registers"]
    assert spec.variables["producer_registers"] + of_groups <= used.registers * (groups + 1)


def test_accumulators_of_wide_windows_stay_in_registers(device_compiler: Compiler) -> None:
    """A call that nvcc does not inline has them in local memory, without a spill."""
    assert FAMILY.violations(*WIDE, DEFAULT_GPU) == []
    [(_, future)] = device_compiler.submit(DEVICE_ALL[-1:])
    assert clean(future.result()).stack_bytes == 0


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(PAGED), len(PAGED) + len(SKIPPING)))
def test_products_of_halves_are_not_serialized(number: int, device_compiler: Compiler) -> None:
    """Where a way with half of the keys meets one with all, no product may be in flight."""
    assert FAMILY.violations(*SKIPPING[number - len(PAGED)], DEFAULT_GPU) == []
    [(_, future)] = device_compiler.submit([DEVICE_ALL[number]])
    assert clean(future.result()).stack_bytes == 0


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(PAGED)))
def test_paged_kernels_compile_without_spills_or_advice(
    number: int, device_compiler: Compiler
) -> None:
    problem, config = PAGED[number]
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    [(spec, future)] = device_compiler.submit([DEVICE_ALL[number]])
    used = clean(future.result())
    groups = config["warp_groups"]
    of_groups = groups * spec.variables["consumer_registers"]
    assert spec.variables["producer_registers"] + of_groups <= used.registers * (groups + 1)


def test_workspace_is_the_counter_the_values_and_the_partial_results(compiler: Compiler) -> None:
    splits: tuple[dict[str, Value], ...] = (
        {},
        {"splits": 3, "combine": "kernel"},
    )
    for number, (_, future) in zip(LOADED, compiler.submit(SPECS), strict=True):
        problem, config = KERNELS[number]
        kernel = load(future.result())
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        fixed = 256 if config["persistent"] and problem.is_causal else 0
        if problem.dtype == E4M3:  # tiles of V^T, a byte an element
            fixed += 2 * 2 * 5 * 224 * 128
        for more in splits[:1] if config["persistent"] else splits:
            # A staged output is never split; what it takes is the same.
            params = {k: v for k, v in config.params.items() if not more or k != "stages_output"}
            split = Config(config.family, {**params, **more})
            assert FAMILY.violations(problem, split, DEFAULT_GPU) == []
            (launch,) = FAMILY.launches(problem, split, 0.125)
            is_partial = more.get("combine") == "kernel"
            partial = 4 * 3 * rows * (problem.head_dim + 2) if is_partial else 0
            assert kernel.workspace_bytes(launch.integers) == fixed + partial
            clustered = (*launch.integers[:20], 1)
            assert kernel.workspace_bytes(clustered) == fixed


#: What `transpose` asks of CUDA, a thread after the other; twice, for `__syncthreads`.
EMULATED = """
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
struct Index { unsigned x; } threadIdx, blockIdx;
void __syncthreads() {}
void copy_bytes(uint32_t, void const*, int, uint32_t, uint64_t) {}  // of the producer, not called
uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return result;
}
"""
#: Every probability that WGMMA multiplies, by its register, and the value that it meets.
MEETINGS = """
struct Source { Values images; Matrices value; int heads_kv, seqlen_kv, head_dim; };
int wrong() {
  int const keys = 2 * kTileN - 37, columns = kD - 16, heads = 2;
  std::vector<uint8_t> v(keys * heads * columns), images(heads * 2 * kImageBytes + 2048, 0xAA);
  for (size_t i = 0; i < v.size(); ++i) v[i] = uint8_t(i * 2654435761u >> 13 | 1);
  auto* aligned = images.data() + (1024 - reinterpret_cast<uintptr_t>(images.data()) % 1024);
  Source source{{reinterpret_cast<Element*>(aligned), 2},
                {reinterpret_cast<Element*>(v.data()), 0, columns, heads * columns},
                heads, keys, columns};
  for (blockIdx.x = 0; blockIdx.x < unsigned(heads * 2 * (kD / kColumns)); ++blockIdx.x) {
    for (int pass = 0; pass < 2; ++pass) {
      for (threadIdx.x = 0; threadIdx.x < kTransposeThreads; ++threadIdx.x) transpose(source);
    }
  }
  int faults = 0;
  Tensor scores = make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{});
  for (int image = 0; image < 2 * heads; ++image) {
    auto* data = reinterpret_cast<Element*>(aligned + image * kImageBytes);
    Tensor vt = make_tensor(make_smem_ptr(data), SmemLayoutVt{}(_, _, 0));
    for (int thread = 0; thread < 128 * kGroups; ++thread) {
      Tensor of_s = MmaQK{}.get_slice(thread).partition_C(scores);
      Tensor of_p = MmaPV{}.get_slice(thread).partition_A(scores);
      for (int kk = 0; kk < kTileN / 32; ++kk) for (int half = 0; half < 2; ++half)
        for (int r = 0; r < 2; ++r) for (int i = 0; i < 4; ++i) {
          auto const has = of_s(make_coord(i % 2, r, 4 * kk + 2 * half + i / 2), 0, 0);
          auto const at = of_p(make_coord(i, r, half), 0, kk);
          faults += get<0>(has) != get<0>(at);
          int const key = image % 2 * kTileN + get<1>(has);
          for (int d = 0; d < kD; ++d) {
            int const meets = reinterpret_cast<uint8_t const&>(vt(d, get<1>(at)));
            bool const exists = key < keys && d < columns;
            faults += meets != (exists ? v[(key * heads + image / 2) * columns + d] : 0);
          }
        }
    }
  }
  return faults;
}
"""


def test_probabilities_of_e4m3_meet_their_values(tmp_path: Path) -> None:
    """The order of the keys, and the image of V^T in shared memory, by CuTe's own layouts."""
    operations, parts = [], []
    sizes = [(128, 224), (64, 128), (96, 64), (256, 192)]
    for number, (head_dim, tile_n) in enumerate(sizes):
        problem = AttentionProblem.parse(f"S=1024,D={head_dim},dtype=e4m3")
        text = render(FAMILY.kernels(problem, make(1, tile_n))["attention"], str(number))
        head, body = text.split(f"namespace k_{number} {{")
        layouts = body.split("// Rows of Q:")[0]
        matrices = re.search(r"^struct Matrices \{.*?^\};$", body, re.M | re.S)
        assert matrices is not None
        if "#ifndef" in head:
            operations.append("#ifndef" + head.split("#ifndef")[1])
        parts.append(f"namespace k_{number} {{{layouts}{matrices[0]}{MEETINGS}}}\n")
    say = 'std::printf("%d\\n", k_{}::wrong());\n'
    calls = "".join(say.format(number) for number in range(len(sizes)))
    text = (
        f"{INCLUDES}#include <vector>\n{''.join(operations)}{EMULATED}{''.join(parts)}"
        f"int main() {{\n{calls}}}\n"
    )
    assert run_on_host(tmp_path, text, has_cute=True).split() == ["0"] * len(sizes)


def test_shared_memory_is_what_the_predicate_counts(tmp_path: Path) -> None:
    """`Storage` needs no CUDA compiler: its layouts are plain templates."""
    parts, expected = [], []
    for number, (problem, config) in enumerate(SIZES):
        text = render(FAMILY.kernels(problem, config)["attention"], str(number))
        _, body = text.split(f"namespace k_{number} {{")
        # Of a tile only its members: what it is computed from needs CUDA.
        tile = re.search(r"^struct Tile \{\n.*?;$", body, re.MULTILINE)
        storage = re.search(
            r"^struct ClusterPartials \{.*^struct Storage \{.*?^\};$", body, re.M | re.S
        )
        assert tile is not None
        assert storage is not None
        layouts = body.split("using SmemLayoutVt")[0]
        parts.append(f"namespace k_{number} {{{layouts}{tile[0]} }};\n{storage[0]}}}\n")
        expected.append(smem_bytes(problem, config))
    sizes = ", ".join(f"sizeof(k_{number}::Storage)" for number in range(len(SIZES)))
    main = f'int main() {{ for (auto size : {{{sizes}}}) std::printf("%zu\\n", size); }}\n'
    found = run_on_host(tmp_path, INCLUDES + "".join(parts) + main, has_cute=True)
    assert list(map(int, found.split())) == expected
