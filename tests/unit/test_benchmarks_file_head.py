"""Heads of result files: facts that every file has, and headings of one run."""

from __future__ import annotations

import datetime

import pytest

from benchmarks import file_head, population
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import Environment

GPU = next(iter(GPUS.values()))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"cuda": "13.0", "driver": "580.159.04", "power_limit_w": 700}
    monkeypatch.setattr(file_head.device, "detect", lambda: GPU)
    monkeypatch.setattr(file_head.device, "environment", lambda: Environment(facts))
    monkeypatch.setattr(file_head, "installed_versions", lambda: {"torch": "2.11.0"})


@pytest.mark.usefixtures("machine")
def test_a_head_gets_the_facts_that_it_lacks() -> None:
    today = datetime.date.today().isoformat()

    assert file_head.complete({"cudnn": "9.19", "cuda": "12.8"}) == {
        "gpu": GPU.name,
        "driver": "580.159.04",
        "torch": "2.11.0",
        "date": today,
        "cudnn": "9.19",
        "cuda": "12.8",
    }


def test_a_head_without_a_gpu_has_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_head.device, "detect", lambda: None)

    found = file_head.complete({})

    assert set(file_head.KEYS) == set(found)
    assert found["gpu"] == found["driver"] == ""


def test_a_run_goes_on_with_its_file_on_another_day(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"seed": "a", "date": "2026-11-27"}\n{"key": "one"}\n')

    assert list(population.read(path, {"seed": "a", "date": "2026-11-28"})) == ["one"]
    with pytest.raises(ConfigError, match="another population"):
        population.read(path, {"seed": "b", "date": "2026-11-27"})
