"""Kernels and counters that smoke runs of `benchmarks` need beside a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import backward, backward_inputs

    def near(problem: Any, *others: Any) -> Any:
        return lambda: [t.bfloat16() for t in others[-1][:3]]

    monkeypatch.setattr(backward_inputs, "flash2", backward_inputs.capped)
    monkeypatch.setattr(backward, "own_call", near)
    monkeypatch.setattr(backward, "vendor_call", near)


@pytest.fixture
def first_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import dispatch_first

    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch_first, "ENTRIES", 3)
    monkeypatch.setattr(dispatch_first, "_FIRST_CALL", "print('{\"returned, ms\": 42.0}')")


@pytest.fixture
def latent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.runtime.attention import mla

    monkeypatch.setattr(mla, "serve", mla.composed)


@pytest.fixture
def built_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every paged kernel is built, and does nothing."""
    from benchmarks import paged_calls as paged

    def bind(*_: Any) -> Any:
        return lambda *_: None

    kernel = SimpleNamespace(bind=bind, workspace_bytes=lambda integers: 64)
    monkeypatch.setattr(paged, "compiler", lambda: SimpleNamespace(cached=lambda spec: spec))
    monkeypatch.setattr(paged, "load", lambda artifact: kernel)
    monkeypatch.setattr(paged, "stream_of", lambda device: 0)
