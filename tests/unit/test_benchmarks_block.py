"""The block benchmark without a GPU: its arithmetic, its problems, its order and its table."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import block
from benchmarks.block import Block, Pass
from benchmarks.decoder import ROTARY_BASE, Sizes, ways
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.selection.shipped import shipped
from tuner.tuning.job import read_problems

torch = pytest.importorskip("torch", reason="torch is not installed")

SMALL = Sizes(hidden=48, heads=4, heads_kv=2, head_dim=16, inner=96, vocabulary=10)


def plain(x: Any, weights: dict[str, Any], what: Pass, sizes: Sizes = SMALL) -> Any:
    """One block in fp64, head by head and token by token."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def normed(row: Any, weight: Any) -> Any:
        return row / (row.square().mean() + 1e-5).sqrt() * weight

    def turned(row: Any, place: int) -> Any:
        half = sizes.head_dim // 2
        out = row.clone()
        for i in range(half):
            angle = place * ROTARY_BASE ** (-2 * i / sizes.head_dim)
            a, b = row[i], row[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x, width = x.double(), sizes.heads * sizes.head_dim
    kv, group = sizes.heads_kv * sizes.head_dim, sizes.heads // sizes.heads_kv
    start = what.context - what.tokens
    result = torch.empty_like(x)
    keys, values = weights["keys"].clone(), weights["values"].clone()
    for b in range(what.batch):
        mixed = [weights["qkv"] @ normed(x[b, t], weights["norms"][0]) for t in range(what.tokens)]
        for t, row in enumerate(mixed):
            for h in range(sizes.heads_kv):
                at = slice(width + h * sizes.head_dim, width + (h + 1) * sizes.head_dim)
                keys[b, start + t, h] = turned(row[at], start + t)
                values[b, start + t, h] = row[at.start + kv : at.stop + kv]
        for t, row in enumerate(mixed):
            heads = []
            for h in range(sizes.heads):
                query = turned(row[h * sizes.head_dim : (h + 1) * sizes.head_dim], start + t)
                seen = start + t + 1
                scores = keys[b, :seen, h // group] @ query / math.sqrt(sizes.head_dim)
                heads.append(scores.softmax(0) @ values[b, :seen, h // group])
            y = x[b, t] + weights["out"] @ torch.cat(heads)
            gate, up = (weights["up"] @ normed(y, weights["norms"][1])).chunk(2)
            result[b, t] = y + weights["down"] @ (gate / (1 + (-gate).exp()) * up)
    return result


@pytest.mark.parametrize("what", [Pass(2, 7, 7), Pass(3, 1, 9)], ids=["prefill", "decoding"])
@pytest.mark.parametrize("way", ["torch", "attention", "block"])
def test_a_block_is_the_plain_arithmetic(what: Pass, way: str) -> None:
    torch.manual_seed(1)
    model = Block(SMALL, 2, what, torch.float32, "cpu")
    x = torch.randn(what.batch, what.tokens, SMALL.hidden)
    expected = x
    for weights in model.layers:
        expected = plain(expected, weights, what)
    with torch.inference_mode():
        found = model(x, ways()[way])
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_a_block_calls_is_swept_from_a_list(tmp_path: Any, capsys: Any) -> None:
    options = ["--prefill", "512", "--batch", "16", "--list-problems"]
    assert block.main(options) == 0
    (tmp_path / "block.yaml").write_text(capsys.readouterr().out)
    found = read_problems(tmp_path / "block.yaml", "attention")
    assert len(found) == 10
    assert (
        AttentionProblem.parse("B=16,H=32,HKV=8,SQ=1,SKV=4096,D=128,dtype=bf16,layout=bshd")
        in found
    )
    assert GemmProblem(512, 6144, 4096, dtype="bfloat16") in found
    assert SwigluProblem(16, 14336, 4096, dtype="bfloat16") in found


def test_every_round_has_all_in_another_order() -> None:
    order: list[str] = []
    replays = {name: (lambda name=name: order.append(name)) for name in "abc"}

    def timed(replay: Any) -> float:
        replay()
        return float(len(order))

    times = block.interleaved(replays, 8, timed)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 27, 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"} and len(set(rounds)) > 2
    assert all(len(series) == 8 and min(series) > 3 for series in times.values())


def test_kernels_belong_to_the_operations_that_launch_them() -> None:
    """A name that the rotary embedding shares with an operation is told so."""
    called = {"attention": {"fmha": 1}, "linear": {"gemm": 2}, "swiglu": {"gemm": 1, "mul": 1}}
    launched = {"fmha": 1.0, "gemm": 3.0, "mul": 5.0, "norm": 2.0}
    parts = [block.part_of(name, count, called) for name, count in launched.items()]
    assert parts == ["attention", "linear+swiglu", f"swiglu+{block.REST}", block.REST]


def planted() -> dict[str, Any]:
    def way(us: float, attention: float) -> dict[str, Any]:
        kernels = {
            "fmha": {"part": "attention", "count": 4, "us": attention},
            "gemm": {"part": "linear", "count": 12, "us": 50.0},
            "gemv": {"part": "linear", "count": 4, "us": 5.0},
        }
        return {"us": us, "std_us": us / 200, "kernels": kernels}

    ways_ = {
        "torch": way(100.0, 30.0),
        "attention": way(80.0, 10.0),
        "block": way(99.5, 29.0),
        block.CONTROL: {"us": 101.0, "std_us": 0.5},
    }
    return {"environment": {"gpu": "NVIDIA H200"}, "passes": {"prefill 512": {"ways": ways_}}}


def test_the_table_tells_speed_parts_and_ties() -> None:
    lines = block.report(planted()).splitlines()
    assert lines[0] == "gpu NVIDIA H200"
    torch_line, replaced, whole, again = lines[4:]
    assert "100.0" in torch_line and "linear 55.0, attention 30.0" in torch_line
    assert "attention replaced" in replaced and "1.25x" in replaced and "tie" not in replaced
    assert "1.01x, a tie" in whole  # the control differs by one per cent
    assert "PyTorch again" in again and "tie" not in again


@pytest.mark.parametrize(
    "options", [["--layers", "0"], ["--prefill", "x"], ["--batch", "0"], ["--rounds", "1"]]
)
def test_wrong_options_say_what_is_allowed(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        block.main(options)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        block.main(["--rounds", "2"])


@pytest.mark.parametrize(
    "shape",
    [
        "M=1,N=4096,K=4096,dtype=fp16",
        "M=16,N=4096,K=4096,dtype=fp16",
        "B=1,H=16,S=1024,D=64,dtype=fp16",
    ],
)
def test_plain_launches_are_without_programmatic_ones_until_the_end(shape: str) -> None:
    """A plain launch of each shipped config with `pdl` has the same kernels."""
    found = 0
    for entry in shipped():
        if entry.problem.label() != shape:
            continue
        for m in entry.ranking:
            if not m.config.get("pdl"):
                continue
            member, found = family(m.config.family), found + 1
            usual = member.launches(entry.problem, m.config, 1.0)
            with block.plain_launches():
                plain = member.launches(entry.problem, m.config, 1.0)
            assert member.launches(entry.problem, m.config, 1.0) == usual
            assert [one.kernel for one in plain] == [one.kernel for one in usual]
            assert plain != usual
    assert found
