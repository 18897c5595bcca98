"""Our own attention kernel: its predicate, its variables and the arguments of its launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.config import Config, Value
from tuner.families.fused_attention import INSTANCES, REGISTERS, FusedAttention, instance
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.render import render

FAMILY = FusedAttention()
GOLDEN = Path(__file__).parents[1] / "golden"
PROBLEM = AttentionProblem.parse("S=1024,D=64")


def make(groups: int, tile_n: int, **more: Value) -> Config:
    """A well-formed config; `ping_pong` off where it applies."""
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
        params["ping_pong"] = False
    return Config("fused_attention", {**params, **more})


def without(config: Config, name: str) -> Config:
    return Config(config.family, {k: v for k, v in config.params.items() if k != name})


def problem_of(head_dim: int) -> AttentionProblem:
    return AttentionProblem(seqlen_q=1024, seqlen_kv=1024, head_dim=head_dim)


@pytest.mark.parametrize(
    ("head_dim", "config", "reason"),
    [
        (64, make(2, 72), "tile_n=72 is not a multiple of 16"),
        (64, make(2, 64, kv_stages=0), "kv_stages=0 is less than 1"),
        (64, make(1, 64, ping_pong=False), "ping_pong is for two warp groups or more"),
        (64, without(make(2, 64), "ping_pong"), "ping_pong is for two warp groups or more"),
        (64, make(2, 128, kv_stages=7), "246784 bytes of shared memory exceed 232448"),
        (64, make(1, 96, kv_stages=5, blocks_per_sm=2), "132096 bytes of shared memory exceed"),
        (64, make(2, 80, blocks_per_sm=2), "92 accumulator registers + 24 exceed 112"),
        (64, make(3, 160), "152 accumulator registers + 24 exceed 160"),
        (128, make(2, 224, kv_stages=1), "232 accumulator registers + 24 exceed 240"),
        (64, make(4, 64), "warp_groups=4 at blocks_per_sm=1 has no register budget"),
        (64, make(1, 64, blocks_per_sm=3), "warp_groups=1 at blocks_per_sm=3 has no register"),
    ],
)
def test_one_violation_at_a_time(head_dim: int, config: Config, reason: str) -> None:
    found = FAMILY.violations(problem_of(head_dim), config, DEFAULT_GPU)
    assert len(found) == 1, found
    assert found[0].startswith(reason)


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        (64, make(2, 128, kv_stages=6)),
        (64, make(1, 80, kv_stages=4, blocks_per_sm=2)),
        (64, make(2, 48, blocks_per_sm=2)),
        (64, make(3, 128, kv_stages=5)),
        (128, make(2, 192)),
        (256, make(2, 80)),
    ],
)
def test_legal_near_the_limits(head_dim: int, config: Config) -> None:
    assert FAMILY.violations(problem_of(head_dim), config, DEFAULT_GPU) == []


def test_every_reason_is_said() -> None:
    found = FAMILY.violations(PROBLEM, make(1, 264, kv_stages=8, ping_pong=True), DEFAULT_GPU)
    assert [text.split()[0] for text in found] == [
        "tile_n=264",
        "tile_n=264",
        "ping_pong",
        "549888",
        "230",
    ]


def test_a_grid_has_its_limits() -> None:
    problem = AttentionProblem(seqlen_q=64, seqlen_kv=64, head_dim=64, batch=65536, heads_q=1)
    assert "65535" in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(8, 64), (64, 64), (72, 96), (96, 96), (104, 128), (136, 192), (200, 256), (256, 256)],
)
def test_a_head_is_padded_to_the_next_instance(head_dim: int, columns: int) -> None:
    problem = problem_of(head_dim)
    assert instance(head_dim) == columns in INSTANCES
    spec = FAMILY.kernels(problem, make(1, 64))["attention"]
    assert spec.variables["head_dim"] == columns
    (launch,) = FAMILY.launches(problem, make(1, 64), 0.5)
    assert launch.integers[5] == head_dim  # TMA pads: it is told the columns that exist


def test_registers_of_the_resident_blocks_fit_the_file() -> None:
    for (groups, blocks), (producer, consumer) in REGISTERS.items():
        assert producer % 8 == consumer % 8 == 0
        assert 24 <= producer <= consumer <= 256
        assert blocks * 128 * (producer + groups * consumer) <= 65536
        spec = FAMILY.kernels(PROBLEM, make(groups, 64, blocks_per_sm=blocks))["attention"]
        assert spec.variables["producer_registers"] == producer
        assert spec.variables["consumer_registers"] == consumer


@pytest.mark.parametrize(
    ("text", "strides"),
    [
        (
            "B=3,H=8,HKV=2,SQ=64,SKV=256,D=40,layout=bhsd",
            ((20480, 2560, 40), (20480, 10240, 40), (20480, 10240, 40), (20480, 2560, 40)),
        ),
        (
            "B=3,H=8,HKV=2,SQ=64,SKV=256,D=40,layout=bshd",
            ((20480, 40, 320), (20480, 40, 80), (20480, 40, 80), (20480, 40, 320)),
        ),
    ],
)
def test_one_launch_with_extents_and_strides(
    text: str, strides: tuple[tuple[int, int, int], ...]
) -> None:
    problem = AttentionProblem.parse(text)
    (launch,) = FAMILY.launches(problem, make(2, 64), 0.125)
    assert launch.kernel == "attention"
    assert [ref.operand for ref in launch.tensors] == ["query", "key", "value", "out"]
    assert all(ref.offset_bytes == 0 for ref in launch.tensors)
    assert launch.integers[:6] == (3, 8, 2, 64, 256, 40)
    assert launch.integers[6:] == tuple(s for group in strides for s in group)
    assert launch.scalars == (0.125,)
    assert FAMILY.scratch_bytes(problem, make(2, 64)) == 0


def test_space_has_different_kernels_of_both_orders() -> None:
    space = FAMILY.space(PROBLEM, DEFAULT_GPU)
    assert len({FAMILY.kernels(PROBLEM, c)["attention"].key for c in space}) == len(space)
    assert {c["warp_groups"] for c in space} == {1, 2, 3}
    assert {c.params.get("ping_pong") for c in space} == {None, False, True}


@pytest.mark.parametrize(
    ("name", "text", "config"),
    [
        ("plain", "S=1024,D=64", make(2, 128, ping_pong=True, poly_every=4, lazy_rescale=8)),
        ("causal", "S=1000,D=128,causal=1,dtype=bf16", make(2, 80, overlap=False)),
    ],
)
def test_golden_text(name: str, text: str, config: Config) -> None:
    problem = AttentionProblem.parse(text)
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    rendered = render(FAMILY.kernels(problem, config)["attention"], "golden")
    assert rendered == (GOLDEN / f"fused_attention_{name}.cu").read_text(encoding="utf-8")
