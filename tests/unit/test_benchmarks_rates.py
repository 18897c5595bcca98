"""Rates of kernels fitted to times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import rates
from tuner.errors import ConfigError
from tuner.families.block_scaled_gemm import Rates, rates_of
from tuner.hardware import GPUS

RULES = rates.rules(GPUS["H100"])


def document(op: str, step: float, end: float) -> dict[str, object]:
    """Times that kernels have whose rates are their first guesses, times two factors."""
    rule = RULES[op]
    rows = []
    for n, k in ((7168, 2048), (4096, 4096), (2112, 7168), (24576, 1536)):
        for m in (128, 1024, 8192):
            row: dict[str, object] = {"m": m, "n": n, "k": k}
            if op == "grouped_gemm":
                text = f"G=64,M={m},N={n},K={k},sizes=zipf,dtype=e4m3"
                row = {"problem": text, "route": "uniform"}
            [one] = rates.rows_of({"products": [{**row, "us": {}}]})
            us = {"deep_gemm": 1.0}
            for name, config in rule.kernels.items():
                guess = rates_of(config)
                true = Rates(guess.step * step, guess.end * end)
                us[name] = rule.estimate(one.problem, config, rule.gpu, true)
            rows.append({**row, "us": us})
    return {"products": rows}


@pytest.mark.parametrize("op", RULES)
def test_rates_are_found_again(op: str) -> None:
    rows = list(rates.rows_of(document(op, 1.3, 2.0)))
    found = rates.fitted(RULES[op], rows)
    errors = [
        abs(RULES[op].estimate(row.problem, config, RULES[op].gpu, found[name]) / row.us[name] - 1)
        for name, config in RULES[op].kernels.items()
        for row in rows
        if row.us[name] <= rates.NEAR * min(row.us[one] for one in RULES[op].kernels)
    ]
    assert fmean(errors) < 0.02
    assert fmean(rates.losses(RULES[op], rows, found)) < 1.02


def test_a_kernel_without_times_moves_as_the_others() -> None:
    rule = RULES["gemm"]
    rows = list(rates.rows_of(document("gemm", 1.3, 1.3)))
    name = "256x128 u8"
    fewer = [
        rates.Row(row.problem, row.layer, {k: v for k, v in row.us.items() if k != name})
        for row in rows
    ]
    found = rates.fitted(rule, fewer)
    assert found[name].step == pytest.approx(1.3 * rates_of(rule.kernels[name]).step, rel=0.1)


def test_the_report_says_what_the_rule_loses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scaled.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document("gemm", 1.3, 2.0)).encode()))
    assert rates.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "fitted: the rule's kernel takes 1.00" in text
    assert "fitted without the layer" in text and "of 12 products" in text


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="has no products"):
        rates.main([str(path)])
    path.write_text("no json")
    with pytest.raises(ConfigError, match=r"other\.json"):
        rates.main([str(path)])
    with pytest.raises(ConfigError, match="--gpu A100 is not known"):
        rates.main([str(path), "--gpu", "A100"])
