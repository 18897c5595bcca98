"""The fused attention template through nvcc, and its shared memory through the host compiler."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tuner.artifacts import load
from tuner.compiler import Compiler
from tuner.config import Config, Value
from tuner.families.fused_attention import FusedAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.render import render
from tuner.toolchain import find_toolchain, include_dirs

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = FusedAttention()


def make(groups: int, tile_n: int, **more: Value) -> Config:
    params: dict[str, Value] = {
        "warp_groups": groups,
        "tile_n": tile_n,
        "kv_stages": 2,
        "overlap": True,
        "poly_every": 0,
        "lazy_rescale": 0,
        "blocks_per_sm": 1,
    }
    if groups > 1:
        params["ping_pong"] = True
    return Config("fused_attention", {**params, **more})


#: Both types, both masks; the groups' turns, the polynomial and the lazy rescale on and off.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        ("S=1024,D=64", make(2, 128, poly_every=4, lazy_rescale=8)),
        ("S=1000,D=128,causal=1,dtype=bf16", make(2, 80, overlap=False, ping_pong=False)),
    )
]
SPECS = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]
#: Instances, groups, rings and blocks at an SM, to be counted by the compiler.
SIZES = [
    *KERNELS,
    (AttentionProblem.parse("S=1024,D=40"), make(1, 176, kv_stages=1)),
    (AttentionProblem.parse("S=1024,D=96"), make(2, 112, kv_stages=3)),
    (AttentionProblem.parse("S=1024,D=192"), make(1, 64, kv_stages=2)),
    (AttentionProblem.parse("S=1024,D=256"), make(2, 80)),
    (AttentionProblem.parse("S=1024,D=64"), make(3, 96, kv_stages=5)),
]

INCLUDES = """
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cstdio>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>
"""


def test_a_sample_compiles_without_spills_and_loads(compiler: Compiler) -> None:
    for (problem, config), (_, future) in zip(KERNELS, compiler.submit(SPECS), strict=True):
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        artifact = future.result()
        used = artifact.resources
        assert used is not None
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), config
        threads = 128 * (config["warp_groups"] + 1)
        assert 0 < used.registers * threads <= 65536, config
        launch = FAMILY.launches(problem, config, 0.125)[0]
        assert load(artifact).workspace_bytes(launch.integers) == 0


def test_shared_memory_is_what_the_predicate_counts(tmp_path: Path) -> None:
    """`Storage` needs no CUDA compiler: its layouts are plain templates."""
    parts, expected = [], []
    for number, (problem, config) in enumerate(SIZES):
        text = render(FAMILY.kernels(problem, config)["attention"], str(number))
        _, body = text.split(f"namespace k_{number} {{")
        storage = re.search(r"^struct Storage \{.*?^\};$", body, re.MULTILINE | re.DOTALL)
        assert storage is not None
        layouts = body.split("using SmemLayoutVt")[0]
        parts.append(f"namespace k_{number} {{{layouts}{storage[0]}}}\n")
        expected.append(FAMILY.smem_bytes(problem, config))
    sizes = ", ".join(f"sizeof(k_{number}::Storage)" for number in range(len(SIZES)))
    main = f'int main() {{ for (auto size : {{{sizes}}}) std::printf("%zu\\n", size); }}\n'
    source = tmp_path / "sizes.cpp"
    source.write_text(INCLUDES + "".join(parts) + main)
    tools = find_toolchain()
    command = [str(tools.nvcc), "-x=c++", f"-ccbin={tools.host_compiler}", "-std=c++17", "-w"]
    command += [f"-I{path}" for path in include_dirs(tools.cutlass)]
    command += [f"-L{path}" for path in tools.library_dirs]
    command += ["-o", str(tmp_path / "sizes")]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    done = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True)
    assert [int(size) for size in done.stdout.split()] == expected
