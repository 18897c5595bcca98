"""The benchmark of block-sparse masks: its cases, the kernels that it tries, and what it prints."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import masks
from benchmarks.call_times import Contender, Times
from tuner.errors import BenchmarkError, ConfigError


@pytest.mark.parametrize("head_dim", masks.HEAD_DIMS)
def test_some_kernels_are_tried_and_each_has_a_name_of_its_own(head_dim: int) -> None:
    problem = masks.Case("causal", head_dim).problem
    tried = masks.configs(problem)
    names = {masks.short(config) for config in tried}
    assert len(names) == len(tried) >= 4 and "128/1/2 persistent" in names
    kernels = {masks.FAMILY.kernels(problem, config)["attention"] for config in tried}
    assert len(kernels) == len(tried)


def test_masks_show_each_query_its_own_key_and_not_all() -> None:
    last = masks.LENGTH - 1
    for name, seen in masks.MASKS.items():
        assert all(seen(at, at) for at in (0, 511, 512, 1024, last)), name
        assert not seen(0, last), name
    assert not masks.MASKS["window"](1024, 0) and masks.MASKS["window"](1023, 0)
    assert masks.MASKS["prefix"](0, 511) and not masks.MASKS["prefix"](0, 512)


def test_cases_are_chosen_by_mask() -> None:
    assert len(list(masks.cases())) == 8
    assert [case.label() for case in masks.cases(["prefix"])] == ["prefix D=64", "prefix D=128"]


def test_a_row_and_the_means_say_who_was_faster() -> None:
    found = {
        "case": "causal D=64", "us": {"own": 100.0, "flex": 150.0, "sdpa": 300.0},
        "config": "128/1", "difference": 2e-3,
    }  # fmt: skip
    row = masks.line(found)
    assert "100.0 us" in row and "1.500" in row and "3.000" in row and "2.0e-03" in row
    slower = {**found, "us": {"own": 100.0, "flex": 90.0}}
    lines = masks.means([found, slower, {**found, "case": "causal D=128"}])
    assert lines[0] == f"D= 64 over flex: mean {math.sqrt(1.5 * 0.9):.3f}, least 0.900"
    assert len(lines) == 4


@pytest.mark.parametrize(("one_pass", "passes"), [(False, 2), (True, 1)])
def test_all_own_kernels_may_be_timed_beside_the_others(
    one_pass: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def contender(name: str) -> Contender:
        return Contender(name, lambda _: torch.ones(2))

    class Fakes:
        before = None
        tables = types.SimpleNamespace(counts=torch.ones(1, 1, 1, 2, dtype=torch.int32))

        def __init__(self, case: masks.Case) -> None:
            self.flex, self.sdpa = (lambda name=name: contender(name) for name in ("flex", "sdpa"))

        def own(self, kernel: str, config: str) -> Contender:
            return contender(kernel)

    timed: list[list[str]] = []

    def times(contenders: Sequence[Contender], *_: object) -> Times:
        timed.append([one.name for one in contenders])
        return Times(
            {name: {"a": 3.0, "b": 2.0, "flex": 1.0}.get(name, 4.0) for name in timed[-1]}, {}
        )

    monkeypatch.setattr(masks, "Tensors", Fakes)
    monkeypatch.setattr(masks, "time_calls", times)
    monkeypatch.setattr(masks, "short", str)
    kernels: Any = {"a": "a", "b": "b"}
    found = masks.compared(masks.Case("causal", 64), kernels, one_pass)
    assert found["us"] == {"own": 2.0, "flex": 1.0, "sdpa": 4.0} and found["config"] == "b"
    assert found["tried_us"] == {"a": 3.0, "b": 2.0} and len(timed) == passes
    assert timed[0] == (["a", "b", "flex", "sdpa"] if one_pass else ["a", "b"])


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--mask tree is not known .allowed: causal, documents"):
        masks.main(["--mask", "tree"])
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        masks.main(["--json", str(tmp_path / "found.json")])
