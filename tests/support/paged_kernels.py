"""Kernels of paged caches over CPU tensors: launches are noted, and nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from noted_kernels import find_kernels

from tuner.families.fused_attention import FusedAttention


@pytest.fixture
def paged_kernels(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fused attention kernel for every problem."""
    return find_kernels(on_cpu, monkeypatch, lambda problem: FusedAttention())
