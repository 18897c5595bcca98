"""The rule of attention's gradients that nobody tuned: its kernels, its choice, what it serves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rule_trials import checked_trials

from tuner.families import family
from tuner.families.fused_attention_backward import rule as backward
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.problem import LAYOUTS, AttentionBackwardProblem

H100 = GPUS["H100"]


def parse(text: str) -> AttentionBackwardProblem:
    return AttentionBackwardProblem.parse(text)


def chosen(text: str, gpu: Gpu = H100) -> list[str]:
    """Names of the candidates, best first."""
    selection = backward.select(parse(text), gpu)
    return [] if selection is None else [c.get("kernel", "own") for _, c in selection.own()]


@pytest.mark.parametrize("target", backward.targets(), ids=lambda target: target.label())
def test_a_kernel_is_proven_on_heads_and_lengths_of_every_kind(target: Any) -> None:
    assert not target.family.violations(target.problem, target.config, DEFAULT_GPU)
    found = checked_trials(target)
    problems: list[Any] = [trial.problem for trial in found]
    tile = target.config["tile_m"]
    usual = target.problem
    # A causal window needs a second query, which does not see the first key.
    least = 2 if usual.is_causal and usual.is_windowed else 1
    assert {tile - 1, tile, tile + 1, 2 * tile + 1} <= {one.seqlen_q for one in problems}
    assert min(one.seqlen_q for one in problems) == least
    keys = 64 if target.problem.head_dim > 128 else 128
    assert {1, keys - 1, keys, keys + 1, 2 * keys + 1} <= {one.seqlen_kv for one in problems}
    assert {one.layout for one in problems} == ({"bshd"} if usual.is_varlen else set(LAYOUTS))
    sides = {(one.window_left >= 0, one.window_right >= 0) for one in problems}
    of_windows = (
        {(True, False)} if usual.is_causal else {(True, False), (False, True), (True, True)}
    )
    assert sides == (of_windows if usual.is_windowed else {(False, False)})
    assert {one.softcap for one in problems} == ({5.0, 50.0} if usual.softcap else {0.0})
    assert any(one.seqlen_q > one.seqlen_kv for one in problems)
    columns = target.problem.head_dim
    assert {columns, columns - 8} <= {one.head_dim for one in problems}
    assert any(one.heads_q > one.heads_kv for one in problems)
    assert {trial.config["section_heads"] for trial in found} >= {1, 8, 1024}


def test_measured_orders_are_those_of_the_rule() -> None:
    """On one H200, 27 November 2026: the figures of `backward.COSTS`."""
    long = "B=2,H=16,S=4096,D=128,dtype=bf16"
    assert chosen(long) == ["flash3", "own"]
    assert chosen(f"{long},causal=1") == ["flash3", "own"]
    assert chosen("B=8,H=32,HKV=8,S=256,D=128,causal=1,dtype=bf16")[0] == "own"
    wide = "B=4,H=8,S=4096,D=256,dtype=bf16,deterministic=1"
    assert chosen(wide) == [], "FlashAttention-2's is faster"


def test_expected_times_grow_with_the_work() -> None:
    for name, is_deterministic in backward.COSTS:
        times = [
            backward.expected_us(
                name, AttentionBackwardProblem(n, n, 128, is_deterministic=is_deterministic), H100
            )
            for n in (256, 1024, 4096)
        ]
        assert times == sorted(times)
    masked, full = (parse(f"S=8192,D=64,{mask}") for mask in ("causal=1", "causal=0"))
    ratio = backward.expected_us("own", full, H100) / backward.expected_us("own", masked, H100)
    assert 1.5 < ratio < 2.3


def test_few_long_blocks_of_grouped_heads_take_their_longest() -> None:
    """Seven heads share keys: on one H200 own kernels took 2.4 times cuDNN's time (27 November
    2026, drawn training calls).
    """
    grouped, many = (parse(f"B={b},H=28,HKV=4,S=2193,D=128,causal=1,dtype=bf16") for b in (1, 16))
    own, cudnn = (backward.expected_us(name, grouped, H100) for name in ("own", "cudnn"))
    assert own > 1.5 * cudnn
    own, cudnn = (backward.expected_us(name, many, H100) for name in ("own", "cudnn"))
    assert own < cudnn


def test_sections_of_heads() -> None:
    """As many as fill the GPU twice, in order under a causal mask rounded down. Grouped heads and
    columns above 128 fill it once there.
    """
    for text, section in (
        ("B=4,H=16,S=4096,D=128,causal=1", 16),
        ("B=4,H=16,S=4096,D=128,causal=1,deterministic=1", 8),
        ("B=1,H=32,S=1024,D=128,causal=1,deterministic=1", 32),
        ("B=2,H=32,HKV=8,S=4096,D=128,causal=1,deterministic=1", 1),
        ("B=2,H=16,S=8192,D=128,causal=1,deterministic=1", 4),
        ("B=4,H=8,S=4096,D=256,causal=1,deterministic=1", 2),
        ("B=1,H=16,S=100000,D=64,causal=1,deterministic=1", 1),
        ("B=4,H=16,S=4096,D=128,deterministic=1", 16),
    ):
        problem = parse(f"{text},dtype=bf16")
        kind = backward.kind_of(problem)
        assert kind is not None
        assert backward.placed(backward.KERNELS[kind], problem, H100)["section_heads"] == section


def test_what_the_rule_does_not_serve() -> None:
    assert backward.serves(parse("S=1024,D=64"), H100)
    assert backward.serves(parse("S=1024,D=120,causal=1"), H100)
    assert not chosen("S=1024,D=256,softcap=9,deterministic=1"), "no kernel at all"
    assert not backward.serves(parse("S=1024,D=64"), Gpu("NVIDIA A100", "8.0", 108, 0, 0.0, 0))
    assert chosen("B=1,H=16,S=128,D=32,dtype=bf16") in ([], ["flash3"])
    assert chosen("B=4,H=16,S=1024,D=160,window=9,dtype=bf16") == ["flash3"], "no own one"


def test_where_flash3_aligns_masks_otherwise_own_kernels_serve() -> None:
    assert "flash3" not in chosen("B=4,H=16,SQ=2048,SKV=4096,D=128,causal=1,dtype=bf16")


def test_flash3_is_first_without_grouped_heads() -> None:
    """At (1,16,1024,64) the costs expect an own kernel to be faster, which was not."""
    small = "B=1,H=16,S=1024,D=64,dtype=bf16"
    own, flash3 = (
        backward.expected_us(name, parse(small), GPUS["H200"]) for name in ("own", "flash3")
    )
    assert own < flash3 and chosen(small, GPUS["H200"]) == ["flash3", "own"]
    assert chosen(f"{small},deterministic=1", GPUS["H200"])[0] == "own"
    grouped = "B=6,H=32,HKV=8,S=1216,D=128,causal=1,dtype=bf16"
    assert chosen(grouped, GPUS["H200"])[0] == "own"


def test_own_kernels_serve_what_pytorch_has_no_kernel_for() -> None:
    assert "own" in chosen("B=1,H=16,S=300,D=64,window=9,dtype=bf16")
    assert "own" in chosen("B=2,H=16,HKV=8,S=1000,D=256,causal=1,window=512,softcap=50,dtype=bf16")
    assert "own" in chosen("B=4,H=16,S=1000,D=128,varlen=1,dtype=bf16")
    # FlashAttention aligns masks bottom-right, and not every sequence has as many keys as queries.
    assert chosen("B=4,H=16,S=1000,D=128,varlen=1,causal=1,dtype=bf16") == ["own"]
    short, long = (parse(f"S=4096,D=128,causal=1,window={left}") for left in (256, 2048))
    assert backward.expected_us("own", short, H100) < backward.expected_us("own", long, H100)


def test_every_kernel_is_legal_at_any_size() -> None:
    member = family("fused_attention_backward")
    for target in backward.targets():
        problem = dataclasses.replace(target.problem, seqlen_q=1, seqlen_kv=1)
        assert member.accepts(problem, target.config, H100)
