"""Layers of experts timed: the cases, peers against the layer itself, and the report."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

from benchmarks import moe, moe_layers, moe_peers, moe_products
from tuner.errors import BenchmarkError, ConfigError
from tuner.problem import E4M3, GroupedGemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")


def inputs(tokens: int = 9, top_k: int = 3, count: int = 5, hidden: int = 256) -> tuple[Any, ...]:
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)])
    return torch.randn(tokens, hidden).bfloat16(), experts, torch.rand(tokens, top_k).bfloat16()


def products(a: Any, b: Any, *, offs: Any) -> Any:
    """`torch._grouped_mm`; rows behind the last group's end are NaN."""
    starts = [0, *offs.tolist()]
    out = torch.full((len(a), b.shape[2]), torch.nan, dtype=a.dtype)
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        out[start:end] = a[start:end] @ b[group]
    return out


def test_pytorchs_composition_is_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import tuner

    monkeypatch.setattr(torch, "_grouped_mm", products)
    tensors = inputs()
    gate_up, down = torch.randn(5, 128, 256) / 16, torch.randn(5, 256, 64) / 8
    weights = gate_up.bfloat16(), down.bfloat16()
    found = moe_peers._composed(*tensors, *weights, None, None)
    torch.testing.assert_close(found, tuner.moe(*tensors, *weights), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_deep_gemms_rows_come_to_their_experts(layout: str) -> None:
    hidden, experts, weights = inputs()
    room, each = (768, 0) if layout == "contiguous" else (0, 12)
    functions = moe_peers._placed, moe_peers._moved
    rows, scale, groups, counts, places = moe_peers._scattered(
        *functions, hidden, experts, 5, room, 128, each
    )
    assert counts.tolist() == torch.bincount(experts.view(-1), minlength=5).tolist()
    assert groups[places].view(9, 3).equal(experts.int()) and (groups >= 0).sum() == 27
    assert (places // 128 * 128).unique().numel() <= 5 or layout == "masked"
    assert scale.stride(-2) == 1, "side by side along the rows"
    factors = scale.reshape(-1, 2)[places].unsqueeze(-1)
    wide = (rows[places].float().unflatten(-1, (-1, 128)) * factors).flatten(-2)
    torch.testing.assert_close(wide, hidden.float().repeat_interleave(3, 0), rtol=0.07, atol=0.01)
    sums = moe_peers._gathered(wide.bfloat16()[torch.arange(27)], torch.arange(27), weights)
    assert sums.shape == hidden.shape


def test_cases_share_a_process_by_layer_type_and_rows() -> None:
    found = list(
        moe_layers.cases(["olmoe-1b-7b"], [128, 1024], moe_layers.ROUTES, ["bf16", "e4m3"])
    )
    assert [key[1:] for key, _ in found] == [
        ("bf16", 128),
        ("bf16", 1024),
        ("e4m3", 128),
        ("e4m3", 1024),
    ]
    assert all([case.route for case in every] == list(moe_layers.ROUTES) for _, every in found)
    case = found[2][1][0]
    assert (case.tokens, case.label()) == (16, "olmoe-1b-7b e4m3 128 rows, uniform")
    up, down = case.products()
    assert (up.label(), down.n) == ("G=64,M=128,N=2048,K=2048,sizes=zipf,dtype=e4m3", 2048)


def test_the_report_compares_with_the_fastest_peer() -> None:
    row = {"layer": "mixtral-8x7b", "dtype": "bf16", "rows": 128, "route": "zipf"}
    rows = [
        {**row, "us": {"own": 100.0, "grouped_mm": 150.0, "compiled": 125.0}},
        {**row, "us": {"own": 100.0, "grouped_mm": 80.0}},
        {**row, "us": {"grouped_mm": 80.0}},
        {**row, "us": {}},
    ]
    text = moe.report({"environment": {"gpu": "a GPU"}, "cases": rows})
    assert "compiled" in text and "1.250" in text and "0.800" in text
    assert "bf16: mean 1.000, worst 0.800 of 2" in text


@pytest.mark.parametrize("option", ["layers", "rows", "routes", "dtypes"])
def test_unknown_choices_are_named(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{option} odd is not known \(allowed: "):
        moe.main([f"--{option}", "odd"])


def test_a_layer_may_have_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(moe, "environment", dict)

    def measured(chosen: Any, *_: Any) -> list[Any]:
        asked.append(chosen)
        return []

    monkeypatch.setattr(moe, "measured", measured)
    assert moe.main(["--layers", "olmoe-1b-7b:e4m3,deepseek-v3", "--rows", "128"]) == 0
    keys = [(layer, dtype) for (layer, dtype, _), _ in asked[0]]
    assert keys == [("olmoe-1b-7b", "e4m3"), ("deepseek-v3", "bf16"), ("deepseek-v3", "e4m3")]


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        moe.main([])


def test_without_deep_gemm_e4m3_has_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_peers.installed, "module_of", lambda name: f"{name} is not here")
    assert moe_peers.peers_of("e4m3") == {}
    assert set(moe_peers.peers_of("bf16")) == {"grouped_mm", "compiled"}


CHILD = """
import json, sys
for line in sys.stdin:
    {0}
    print(json.dumps(found), flush=True)
"""


def _child(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    command = [sys.executable, "-c", CHILD.format(text)]
    monkeypatch.setattr(moe, "python_command", lambda *_: command)


def test_cases_are_timed_after_all_peers_have_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = 'dict(said=["NVCC compilation failed"])'
    _child(monkeypatch, f"found = {said} if line == '0\\n' else dict(case=int(line), products=[])")
    wanted = list(
        moe_layers.cases(["olmoe-1b-7b"], [128, 1024], ["zipf", "uniform"], ["bf16", "e4m3"])
    )
    found = list(moe.measured(wanted, []))
    assert [answer["case"] for _, answer in found] == [1] * 4 + [2] * 4
    assert [case.dtype for case, _ in found] == ["bf16", "bf16", "e4m3", "e4m3"] * 2
    assert [case.route for case, _ in found] == ["zipf"] * 4 + ["uniform"] * 4
    errors = capsys.readouterr().err
    assert errors.count("not compiled: NVCC compilation failed") == 4


def test_a_child_that_hangs_costs_its_own_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    _child(monkeypatch, "import time; time.sleep(60)")
    wanted = list(moe_layers.cases(["olmoe-1b-7b"], [128, 1024], ["zipf"], ["bf16"]))
    assert [answer for _, answer in moe.measured(wanted, [], 0.5)] == [
        {"lost": "no answer after 0.5 s"}
    ] * 2


def test_products_are_compared_by_the_rules_first_kernel() -> None:
    row = {
        "problem": "G=8,M=128,N=64,K=64,dtype=e4m3",
        "route": "zipf",
        "us": {"deep_gemm": 20.0, "deep_gemm masked": 16.0, "64x128": 10.0, "128x64": 8.0},
        "estimates": {"256x64": 1.0, "64x128": 2.0, "128x64": 3.0},
    }
    text = moe.report({"environment": {}, "cases": [], "products": [row, {**row, "us": {}}]})
    assert "products, e4m3: mean 1.600, worst 1.600 of 1" in text
    assert "products, e4m3, best kernel: mean 2.000" in text


def test_rows_of_groups_lie_where_each_layout_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("arange", "full", "zeros", "randn", "ones"):
        made = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, made=made, **k: made(*a, **{**k, "device": "cpu"})
        )
    problem = GroupedGemmProblem(3, 140, 64, 256, "zipf", E4M3)
    counts = torch.tensor([130, 0, 10])
    rows = moe_products.Rows(problem, counts, 132)
    assert rows.padded_rows == 384 and rows.offsets.tolist() == [0, 130, 130, 140]
    assert (rows.groups >= 0).sum() == 140 and rows.groups[256:266].tolist() == [2] * 10
    wide = rows.laid(384, rows.contiguous)
    assert wide.float()[rows.contiguous].equal(rows.source.float())
    masked = rows.laid(3 * 132, rows.masked).view(3, 132, 256)
    assert masked.float()[2, :10].equal(rows.source.float()[130:])
    factors = rows.factors_at(384, rows.contiguous)
    assert factors.stride(0) == 1 and factors[rows.contiguous].equal(rows.factors)
    rows.before(0)
    assert rows.laid(140).float().equal(rows.source.float())
