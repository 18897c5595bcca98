"""The contract of `tuner.families.base.Family`, run over every family that is registered."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tuner.compile.render import render
from tuner.config import Config
from tuner.families import families, family
from tuner.families.arguments import Arguments
from tuner.families.base import LSE, SCRATCH, Family, group_by_kernels
from tuner.hardware import DEFAULT_GPU
from tuner.problem import PROBLEMS, Problem

SHAPES: dict[str, tuple[str, ...]] = {
    "attention": (
        "S=1024,D=64",
        "S=1024,D=64,causal=1,dtype=bf16",
        "B=2,H=4,S=1000,D=128,layout=bshd",
        "B=2,H=8,HKV=2,SQ=384,SKV=1536,D=128",
        "B=2,H=4,S=640,D=256",
        "H=8,HKV=2,S=500,D=128,dtype=e4m3",
        "B=2,H=4,S=640,D=64,causal=1,bias=h",
        "B=2,H=4,S=640,D=192,DV=128,causal=1",
        "B=2,H=64,HKV=1,SQ=3,SKV=900,D=576,DV=512,causal=1,page_size=64,dtype=bf16",
    ),
    "attention_backward": (
        "S=1024,D=64",
        "B=2,H=8,HKV=2,S=1000,D=128,causal=1,dtype=bf16,layout=bshd",
        "H=4,SQ=384,SKV=100,D=80",
        "H=4,S=2048,D=128,deterministic=1,window=300",
    ),
    "gemm": (
        "M=4096,N=4096,K=4096",
        "M=512,N=768,K=256,layout_a=col,layout_b=row,B=4,dtype=bf16",
        "M=1024,N=1024,K=64,B=16,dtype_d=fp32",
        "M=16,N=4096,K=4096",
        "M=3,N=1000,K=4104,B=2,epilogue=bias_silu",
        "M=1024,N=768,K=512,epilogue=bias_gelu",
        "M=64,N=768,K=512,dtype_d=fp32,epilogue=bias_residual",
        "M=1024,N=768,K=512,scales=row",
        "M=2048,N=1536,K=1024,dtype=e4m3,fast_accum=1",
        "M=16,N=4096,K=4096,dtype=e4m3,scales=row,fast_accum=0",
        "M=2048,N=1544,K=1040,dtype=e4m3,scales=block",
        "M=3,N=4096,K=4096,dtype=e4m3,scales=block",
    ),
    "swiglu": ("M=4096,N=14336,K=4096", "M=200,N=96,K=136,dtype=bf16"),
    "grouped_gemm": (
        "G=8,M=4096,N=14336,K=4096,dtype=bf16",
        "G=64,M=300,N=1408,K=2048,sizes=zipf",
        "G=16,M=2000,N=1408,K=2048,sizes=zipf,dtype=e4m3",
    ),
    "softmax": ("M=1024,N=1024,B=16", "M=333,N=1000,B=3,causal=1"),
}
PAIRS = [
    pytest.param(member, PROBLEMS[member.op].parse(shape), id=f"{name}-{shape}")
    for name, member in families().items()
    for shape in SHAPES[member.op]
]
OWN = [pair for pair in PAIRS if not pair.values[0].is_vendor]  # type: ignore[union-attr]


@functools.cache
def space_of(member: Family, problem: Problem) -> Sequence[Config]:
    """The space, enumerated once for all tests."""
    return tuple(member.space(problem, DEFAULT_GPU))


def sample(member: Family, problem: Problem, count: int = 40) -> list[Config]:
    space = space_of(member, problem)
    return random.Random(1).sample(space, min(count, len(space)))


@pytest.mark.parametrize(("member", "problem"), PAIRS)
def test_space_is_legal_distinct_and_repeatable(member: Family, problem: Problem) -> None:
    space = space_of(member, problem)
    reason = member.supports(problem, DEFAULT_GPU)
    assert bool(space) != bool(reason), "either a space or a reason for having none"
    assert len({config.digest for config in space}) == len(space)
    assert all(config.family == member.name for config in space)
    assert list(member.space(problem, DEFAULT_GPU)) == list(space)
    for config in sample(member, problem):
        assert member.violations(problem, config, DEFAULT_GPU) == []
        assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(("member", "problem"), PAIRS)
def test_predictions_and_seeds(member: Family, problem: Problem) -> None:
    space = space_of(member, problem)
    for config in sample(member, problem):
        predicted = member.predict_us(problem, config, DEFAULT_GPU)
        # Attention's inputs may be in the L2, as may all of softmax.
        moved = problem.bytes if member.op in ("gemm", "swiglu", "grouped_gemm") else 0
        flops = 0 if member.op == "softmax" else problem.flops // problem.tensor_rate
        assert DEFAULT_GPU.floor_us(flops, moved) < predicted < 1e6
    seeds = member.seeds(problem, DEFAULT_GPU, space, 8)
    assert len(seeds) == min(8, len(space))
    assert set(seeds) <= set(space)
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("member", "problem"), OWN)
def test_kernels_render_and_launches_name_what_exists(member: Family, problem: Problem) -> None:
    for config in sample(member, problem, 6):
        kernels = member.kernels(problem, config)
        for spec in kernels.values():
            text = render(spec, "0123456789abcdef")
            if spec.template.endswith(".py.j2"):  # Triton's, whose library is made around it
                assert "BUILD_0123456789abcdef = {" in text
                continue
            assert "tuner_0123456789abcdef_launch" in text
            assert "tuner_0123456789abcdef_workspace" in text
        launches = member.launches(problem, config, 0.125)
        assert {launch.kernel for launch in launches} == set(kernels)
        for launch in launches:
            declared = kernels[launch.kernel].arguments
            assert isinstance(declared, Arguments)
            given = (launch.tensors, launch.integers, launch.scalars)
            names = (declared.tensors, declared.integers, declared.scalars)
            assert [*map(len, given)] == [*map(len, names)]
            assert len({*names[0], *names[1], *names[2]}) == sum(map(len, names))
        sizes = {operand.name: operand.bytes for operand in problem.operands}
        sizes[SCRATCH] = member.scratch_bytes(problem, config)
        if member.writes_lse:
            sizes[LSE] = 4 * math.prod(problem.output.shape[:-1])
        named = [ref for launch in launches for ref in launch.tensors]
        assert all(0 <= ref.offset_bytes < sizes[ref.operand] for ref in named)
        assert (LSE in {ref.operand for ref in named}) == member.writes_lse


@pytest.mark.parametrize(("member", "problem"), OWN)
def test_run_time_parameters_share_kernels(member: Family, problem: Problem) -> None:
    groups = group_by_kernels(member, sample(member, problem, 60))
    for group in groups:
        specs = {tuple(sorted(s.key for s in member.kernels(problem, c).values())) for c in group}
        assert len(specs) == 1
    compiled = {
        tuple(sorted(s.key for s in member.kernels(problem, group[0]).values())) for group in groups
    }
    assert len(compiled) == len(groups)


@pytest.mark.parametrize(("member", "problem"), OWN)
def test_draws_are_judged_without_raising(member: Family, problem: Problem) -> None:
    if member.supports(problem, DEFAULT_GPU):
        pytest.skip(member.supports(problem, DEFAULT_GPU))
    rng = random.Random(7)
    members = space_of(member, problem)
    verdicts = [
        bool(
            member.violations(problem, member.draw(problem, DEFAULT_GPU, members, rng), DEFAULT_GPU)
        )
        for _ in range(200)
    ]
    assert any(verdicts), "no illegal config drawn: the domains are too narrow"
    assert not all(verdicts), "no legal config drawn"


@pytest.mark.parametrize(("member", "problem"), OWN)
def test_what_a_store_may_hold_is_judged_without_raising(member: Family, problem: Problem) -> None:
    """A config of another version: parameters that are missing, or that say something else."""
    if member.supports(problem, DEFAULT_GPU):
        pytest.skip(member.supports(problem, DEFAULT_GPU))
    config = space_of(member, problem)[0]
    assert member.accepts(problem, config, DEFAULT_GPU)
    for name in config.params:
        less = {k: v for k, v in config.params.items() if k != name}
        for params in (less, {**less, name: 0}, {**less, name: "x"}):
            member.accepts(problem, Config(member.name, params, config.stages), DEFAULT_GPU)
    assert not member.accepts(problem, Config(member.name), DEFAULT_GPU)


@pytest.mark.parametrize(("member", "problem"), PAIRS)
def test_gpus_that_a_family_is_not_written_for(member: Family, problem: Problem) -> None:
    for capability in ("7.5", "8.0", "8.9", "10.0", "12.0"):
        gpu = replace(DEFAULT_GPU, name="another", compute_capability=capability)
        reason = member.supports(problem, gpu)
        if capability in member.capabilities or (not member.capabilities and gpu.is_served):
            assert "capability" not in reason
        else:
            assert f"not {capability}" in reason
        assert bool(member.space(problem, gpu)) != bool(reason)
        for config in sample(member, problem, 3):
            assert bool(member.violations(problem, config, gpu)) >= bool(reason)


@pytest.mark.parametrize("member", list(families().values()), ids=list(families()))
def test_other_operations_are_refused_with_a_reason(member: Family) -> None:
    for op, shapes in SHAPES.items():
        if op != member.op:
            other = PROBLEMS[op].parse(shapes[0])
            assert op in member.supports(other, DEFAULT_GPU)
            assert list(member.space(other, DEFAULT_GPU)) == []


def test_unknown_family_is_one_line_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gem' is not known \(allowed: .*gemm"):
        family("gem")
