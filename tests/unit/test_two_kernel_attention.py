"""Attention as two kernels: predicate, space, variables and launches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.families import families_of
from tuner.families.base import group_by_kernels, without_fallbacks
from tuner.families.two_kernel_attention import TwoKernelAttention, chunk_sizes
from tuner.families.two_kernel_attention.shape import (
    STAGES,
    columns,
    smem_bytes,
    smem_limit,
)
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.problem import DTYPE_BYTES, AttentionProblem

FAMILY = TwoKernelAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64")


def make(**more: Value) -> Config:
    """Legal at (1,16,1024,64), everything in one launch."""
    params: dict[str, Value] = {"tile_n": 128}
    for stage, depth in (("scores", 3), ("output", 4)):
        params |= {
            f"{stage}_groups": 2,
            f"{stage}_stages": depth,
            f"{stage}_buffers": 2,
            f"{stage}_blocks_per_sm": 1,
        }
    chunk = {"heads_per_launch": 16, "rows_per_launch": 1024, "splits": 1, "pdl": True}
    return Config(FAMILY.name, params | chunk | more)


ILLEGAL = {
    "tile_n=96 is not known (allowed: 64, 128, 192, 256)": {"tile_n": 96},
    "scores_buffers=3 is not known (allowed: 1, 2)": {"scores_buffers": 3},
    "output_stages=1 is not known": {"output_stages": 1},
    "scores_groups=4 is not known": {"scores_groups": 4},
    "parameter 'colour' is not known": {"colour": 1},
    "output: 302080 bytes of shared memory exceed 232448": {"output_stages": 6, "output_groups": 2},
    "scores: 256 accumulator registers + 40 exceed 240": {"tile_n": 256},
    "heads_per_launch=3 does not divide B x H = 16": {"heads_per_launch": 3},
    "rows_per_launch=100 is not known (allowed: 64 to 4194240 in steps of 64)": {
        "rows_per_launch": 100
    },
    "rows_per_launch=2048 exceed the 1024 of the queries": {"rows_per_launch": 2048},
    "splits=9 exceed the 8 tiles of keys": {"splits": 9},
}
BIASED = AttentionProblem.parse("B=2,H=8,S=1024,D=64,bias=h")


@pytest.mark.parametrize("reason", ILLEGAL)
def test_what_is_illegal(reason: str) -> None:
    assert FAMILY.violations(PROBLEM, make(), DEFAULT_GPU) == []
    found = FAMILY.violations(PROBLEM, make(**ILLEGAL[reason]), DEFAULT_GPU)
    assert any(said.startswith(reason) for said in found), found


def test_every_reason_is_said() -> None:
    wrong = make(tile_n=96, heads_per_launch=0, scores_buffers=0, output_stages=1)
    assert len(FAMILY.violations(PROBLEM, wrong, DEFAULT_GPU)) == 4
    wrong = make(tile_n=256, heads_per_launch=5, rows_per_launch=2048, splits=5)
    assert len(FAMILY.violations(PROBLEM, wrong, DEFAULT_GPU)) >= 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("S=1024,D=64,dtype=e4m3", "no descale factors"),
        ("S=1024,D=64,window=100", "has no sliding window"),
        ("B=2,S=1024,D=64,varlen=1", "has no variable lengths"),
        ("S=1024,D=64,window=100,bias=1", "has no sliding window"),
    ],
)
def test_what_it_does_not_serve(text: str, reason: str) -> None:
    problem = AttentionProblem.parse(text)
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []
    assert FAMILY.violations(problem, make(), DEFAULT_GPU)


def test_a_soft_cap_is_compiled_into_the_scores_alone() -> None:
    problem = AttentionProblem.parse("S=1024,D=64,softcap=30")
    specs = FAMILY.kernels(problem, make())
    assert {name: spec.variables["has_softcap"] for name, spec in specs.items()} == {
        "scores": True,
        "output": False,
    }
    assert specs["output"] == FAMILY.kernels(PROBLEM, make())["output"]
    scalars = {launch.kernel: launch.scalars for launch in FAMILY.launches(problem, make(), 0.5)}
    assert scalars == {"scores": (0.5, 30.0), "output": (pytest.approx(30 / math.log(2)),)}


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ("S=1024,D=64", 0.5 / math.log(2)),
        ("S=1024,D=64,bias=1", 1.0),
        ("S=1024,D=64,softcap=30,bias=h", 1.0),
    ],
)
def test_the_output_kernel_brings_maxima_to_base_2(shape: str, factor: float) -> None:
    problem = AttentionProblem.parse(shape)
    scalars = {launch.kernel: launch.scalars for launch in FAMILY.launches(problem, make(), 0.5)}
    assert scalars["output"] == (pytest.approx(factor),)


def test_a_bias_is_compiled_into_the_scores_alone() -> None:
    """Their sizes and strides are not: all biases share the kernels."""
    specs = FAMILY.kernels(BIASED, make())
    names = ("has_bias", "has_softcap")
    found = {stage: [spec.variables[name] for name in names] for stage, spec in specs.items()}
    assert found == {"scores": [True, False], "output": [False] * 2}
    assert specs["output"] == FAMILY.kernels(PROBLEM, make())["output"]
    for bias in ("1", "b", "bh"):
        assert FAMILY.kernels(replace(BIASED, bias=bias), make()) == specs  # type: ignore[arg-type]
    launches = {launch.kernel: launch for launch in FAMILY.launches(BIASED, make(), 0.5)}
    assert [ref.operand for ref in launches["scores"].tensors[4:]] == ["bias"]
    assert launches["scores"].integers[18:] == (0, 1024 * 1024, 1024)


def test_a_bias_takes_registers() -> None:
    """A tile's, two to a register: 48 beside 96 scores of a thread."""
    config = make(tile_n=192, scores_groups=3, scores_buffers=1)
    reason = "scores: 144 accumulator registers + 40 exceed 160"
    assert reason in FAMILY.violations(BIASED, config, DEFAULT_GPU)
    assert not any("registers" in said for said in FAMILY.violations(PROBLEM, config, DEFAULT_GPU))


def test_a_sweep_leaves_it_out() -> None:
    serving = [m for m in families_of("attention").values() if m.space(BIASED, DEFAULT_GPU)]
    own = [member for member in serving if not member.is_vendor]
    assert [m.name for m in own] == ["fused_attention", FAMILY.name]
    assert [m.name for m in without_fallbacks(own)] == ["fused_attention"]
    assert FAMILY.supports(replace(BIASED, bias="", mask="h"), DEFAULT_GPU)


def test_kernels_that_configs_share() -> None:
    one, other = FAMILY.kernels(PROBLEM, make()), FAMILY.kernels(PROBLEM, make(output_stages=3))
    assert one["scores"] == other["scores"]
    assert one["output"] != other["output"]
    chunked = make(heads_per_launch=2, rows_per_launch=512, splits=2, pdl=False)
    assert FAMILY.kernels(PROBLEM, chunked) == one
    assert FAMILY.compile_digest(chunked) == FAMILY.compile_digest(make())


@pytest.mark.parametrize(
    ("head_dim", "of_scores", "of_output"),
    [(8, 64, 64), (80, 96, 96), (128, 128, 128), (136, 192, 96), (256, 256, 128)],
)
def test_columns_of_a_block(head_dim: int, of_scores: int, of_output: int) -> None:
    problem = AttentionProblem(seqlen_q=64, seqlen_kv=64, head_dim=head_dim)
    assert (columns(problem, "scores"), columns(problem, "output")) == (of_scores, of_output)


@pytest.mark.parametrize("text", ["S=1024,D=64", "S=4096,D=128,B=4", "S=640,D=256,causal=1"])
def test_the_space(text: str) -> None:
    problem = AttentionProblem.parse(text)
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert 2 <= len(group_by_kernels(FAMILY, space)) <= 32
    for config in space:
        for stage in STAGES:
            groups, depth, resident = (
                config[f"{stage}_{name}"] for name in ("groups", "stages", "blocks_per_sm")
            )
            used = smem_bytes(problem, stage, config["tile_n"], groups, depth)
            assert used <= smem_limit(resident)


def test_the_shared_memory_limit() -> None:
    """One block may have 227 KiB; two share 228, each beside a KiB of the system's."""
    assert (smem_limit(1), smem_limit(2)) == (232448, 115712)


def test_launches_from_everything_to_few() -> None:
    assert chunk_sizes(PROBLEM) == [(16, 1024), (8, 1024)]
    long = chunk_sizes(AttentionProblem.parse("S=32768,D=64,H=8"))
    assert long[0] == (8, 32768)
    assert [rows for heads, rows in long if heads == 1] == [32768 // 2**i for i in range(6)]
    assert all(8 // heads * (32768 // rows) <= 256 for heads, rows in long)
    assert chunk_sizes(AttentionProblem.parse("S=3,D=64,H=3")) == [(3, 64)]


def test_long_rows_fit_where_little_memory_is_allowed() -> None:
    problem = AttentionProblem.parse("S=32768,D=64,H=8")
    sizes = [FAMILY.scratch_bytes(problem, c) for c in FAMILY.space(problem, DEFAULT_GPU)]
    assert min(sizes) < 100 << 20 < 16 << 30 < max(sizes)


def test_predictions_follow_the_work() -> None:
    def best(text: str) -> float:
        problem = AttentionProblem.parse(text)
        space = FAMILY.space(problem, DEFAULT_GPU)
        return min(FAMILY.predict_us(problem, c, DEFAULT_GPU) for c in space)

    assert best("S=1024,D=64,causal=1") < best("S=1024,D=64") < best("S=2048,D=64")
    assert best("S=1024,D=64") < best("S=1024,D=64,bias=1")
    # Where memory binds a bias of each head counts, and one of all stays in the L2.
    bound, whole = FAMILY.refitted({"memory_share": 0.1}), make(rows_per_launch=8192)
    times = [
        bound.predict_us(AttentionProblem.parse(f"S=8192,D=64{bias}"), whole, DEFAULT_GPU)
        for bias in ("", ",bias=1", ",bias=h")
    ]
    assert times[0] < times[1] < 1.1 * times[0] < 1.4 * times[0] < times[2]
    few = make(heads_per_launch=1)
    assert FAMILY.predict_us(PROBLEM, few, DEFAULT_GPU) > FAMILY.predict_us(
        PROBLEM, make(), DEFAULT_GPU
    )
    waiting = make(pdl=False)
    assert FAMILY.predict_us(PROBLEM, waiting, GPUS["H100"]) > FAMILY.predict_us(
        PROBLEM, make(), GPUS["H100"]
    )


@pytest.mark.parametrize("stage", ["scores", "output"])
def test_golden_text(goldens: Goldens, stage: str) -> None:
    """The two kernels have little in common: the text of each is whole."""
    text = "B=2,H=8,HKV=2,S=1000,D=64,causal=1,softcap=30,bias=h"
    problem = AttentionProblem.parse(text)
    config = make(heads_per_launch=16, rows_per_launch=1024)
    rendered = render(FAMILY.kernels(problem, config)[stage], "golden")
    goldens.check(f"two_kernel_attention_{stage}", {"causal": rendered})


def test_scratch_and_launches() -> None:
    config = make(heads_per_launch=4, rows_per_launch=512)
    image = 4 * 512 * 1024
    assert FAMILY.scratch_bytes(PROBLEM, config) == image * 2 + image // 128 * 8
    launches = FAMILY.launches(PROBLEM, config, 1.0)
    assert [launch.kernel for launch in launches] == ["scores", "output"] * 8
    assert [launch.integers[6:10] for launch in launches[::2]] == [
        (head, 4, row, 512) for head in (0, 4, 8, 12) for row in (0, 512)
    ]
    assert {launch.integers[10] for launch in launches} == {1}
    waiting = FAMILY.launches(PROBLEM, make(pdl=False), 1.0)
    assert {launch.integers[10] for launch in waiting} == {0}


def test_bytes_of_a_block() -> None:
    """First kernel: Q, ring of K, two images a group; second: ring of V, P and its statistics."""
    problem = AttentionProblem.parse("S=1024,D=128")
    width = DTYPE_BYTES[problem.dtype]
    q, tile, image = 64 * 128 * width, 128 * 128 * width, 64 * 128 * width
    assert smem_bytes(problem, "scores", 128, 2, 3) == 2 * q + 3 * tile + 4 * image + 1024
    statistics = 64 * 8
    assert smem_bytes(problem, "output", 128, 2, 2) == 2 * (tile + 2 * (image + statistics)) + 1024
