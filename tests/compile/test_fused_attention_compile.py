"""The fused attention template through nvcc, and its shared memory through the host compiler."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tuner.artifacts import load
from tuner.compiler import Compiler
from tuner.config import Config, Value
from tuner.families.fused_attention import FusedAttention, launch_registers
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
        "score_buffers": 1,
        "q_in_registers": False,
        "lazy_rescale": 0,
        "persistent": False,
        "blocks_per_sm": 1,
        "splits": 1,
        "pdl": False,
        **more,
    }
    if params["score_buffers"] == 1:
        params.setdefault("early_exp", 0)
        if groups > 1:
            params.setdefault("ping_pong", True)
    return Config("fused_attention", params)


#: Between them both values of every lever; the second one hands out its tiles by a counter.
KERNELS = [
    (AttentionProblem.parse(text), config)
    for text, config in (
        ("S=1024,D=128", make(2, 128, q_in_registers=True, early_exp=50, lazy_rescale=8)),
        (
            "B=2,H=16,HKV=4,S=1000,D=64,causal=1,dtype=bf16",
            make(2, 128, score_buffers=2, packed_heads=4, persistent=True),
        ),
    )
]
SPECS = [FAMILY.kernels(problem, config)["attention"] for problem, config in KERNELS]
#: Instances, groups, rings and blocks at an SM, to be counted by the compiler.
SIZES = [
    *KERNELS,
    (AttentionProblem.parse("S=1024,D=40"), make(1, 176, kv_stages=1)),
    (AttentionProblem.parse("S=1024,D=96"), make(2, 112, kv_stages=3)),
    (AttentionProblem.parse("S=1024,D=192"), make(1, 64)),
    (AttentionProblem.parse("S=1024,D=256"), make(2, 80)),
    (AttentionProblem.parse("S=1024,D=64"), make(3, 96, kv_stages=5)),
]

INCLUDES = """
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cstdio>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>
"""


def test_a_sample_compiles_without_spills_or_advice(compiler: Compiler) -> None:
    """ptxas advises where it serializes WGMMAs or ignores setmaxnreg: C7504 to C7515."""
    for (problem, config), (_, future) in zip(KERNELS, compiler.submit(SPECS), strict=True):
        assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
        artifact = future.result()
        used = artifact.resources
        assert used is not None
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), config
        assert artifact.facts["advice"] == [], config


def test_a_block_is_launched_with_the_registers_that_setmaxnreg_shares_out(
    compiler: Compiler,
) -> None:
    for (_, config), (spec, future) in zip(KERNELS, compiler.submit(SPECS), strict=True):
        used = future.result().resources
        assert used is not None
        groups = config["warp_groups"]
        launched = used.registers * 128 * (groups + 1)
        assert launched <= launch_registers(groups, config["blocks_per_sm"])
        of_groups = groups * spec.variables["consumer_registers"]
        assert 128 * (spec.variables["producer_registers"] + of_groups) <= launched


def test_workspace_is_the_counter_and_the_partial_results(compiler: Compiler) -> None:
    splits: tuple[dict[str, Value], ...] = (
        {},
        {"splits": 3, "combine": "kernel"},
        {"splits": 3, "combine": "cluster"},
    )
    for (problem, config), (_, future) in zip(KERNELS, compiler.submit(SPECS), strict=True):
        kernel = load(future.result())
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        counter = 256 if config["persistent"] and problem.is_causal else 0
        for more in splits[:1] if config["persistent"] else splits:
            split = Config(config.family, {**config.params, **more})
            assert FAMILY.violations(problem, split, DEFAULT_GPU) == []
            (launch,) = FAMILY.launches(problem, split, 0.125)
            is_partial = more.get("combine") == "kernel"
            partial = 4 * 3 * rows * (problem.head_dim + 1) if is_partial else 0
            assert kernel.workspace_bytes(launch.integers) == counter + partial


def test_shared_memory_is_what_the_predicate_counts(tmp_path: Path) -> None:
    """`Storage` needs no CUDA compiler: its layouts are plain templates."""
    parts, expected = [], []
    for number, (problem, config) in enumerate(SIZES):
        text = render(FAMILY.kernels(problem, config)["attention"], str(number))
        _, body = text.split(f"namespace k_{number} {{")
        # Of a tile only its members: what it is computed from needs CUDA.
        tile = re.search(r"^struct Tile \{\n.*?;$", body, re.MULTILINE)
        storage = re.search(r"^struct Storage \{.*?^\};$", body, re.MULTILINE | re.DOTALL)
        assert tile is not None
        assert storage is not None
        layouts = body.split("using SmemLayoutVt")[0]
        parts.append(f"namespace k_{number} {{{layouts}{tile[0]} }};\n{storage[0]}}}\n")
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
