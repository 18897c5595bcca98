"""NVTX ranges: opened and closed where they are wanted, nothing where they are not."""

from __future__ import annotations

import contextlib
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tuner import settings
from tuner.base import ranges


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a library of ranges was asked for, in the place of the package nvtx."""
    found: list[str] = []
    library = SimpleNamespace(push_range=found.append, pop_range=lambda: found.append("end"))
    monkeypatch.setitem(sys.modules, "nvtx", library)
    ranges._functions.cache_clear()
    yield found
    ranges._functions.cache_clear()


def test_off_is_nothing(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "ON", False)
    with ranges.named("a"):
        pass
    assert calls == []
    assert ranges.named("a") is ranges.named("b"), "no object a call"


def test_on_a_range_ends_whatever_happens(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "ON", True)
    with contextlib.suppress(ValueError), ranges.named("outer"):
        with ranges.named("inner"):
            raise ValueError
    assert calls == ["tuner", "end", "outer", "inner", "end", "end"]


def test_without_a_library_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranges, "ON", True)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(ranges.importlib, "import_module", missing)
    ranges._functions.cache_clear()
    with caplog.at_level(logging.WARNING, "tuner.ranges"):
        for _ in range(2):
            with ranges.named("a"):
                pass
    ranges._functions.cache_clear()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("1", True)])
def test_the_setting(value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_NVTX", value)
    assert settings.nvtx() is wanted


def test_the_runtime_s_calls_are_marked(
    calls: list[str], on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "ON", True)
    plan = SimpleNamespace(
        run=lambda: "out",
        config=SimpleNamespace(family="toy"),
        problem=SimpleNamespace(label=lambda: "S=1"),
    )
    assert on_cpu.table.table.run(plan) == "out"
    assert calls[2:] == ["tuner toy S=1", "end"]
