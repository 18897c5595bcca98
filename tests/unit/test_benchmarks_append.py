"""`scripts/bench append`: its lines, and a machine without a GPU."""

from __future__ import annotations

import pytest

from benchmarks import append
from tuner.errors import BenchmarkError


def test_a_line_has_all_times_and_what_is_wrong() -> None:
    row = {"sequences": 16, "queries": 4, "e4m3": True, "us": {"kernel": 3.4}, "failed": {}}
    assert append.line(row).split() == ["16", "x", "4", "e4m3", "kernel", "3.40", "us"]
    said = append.line({**row, "e4m3": False, "failed": {"copy": "no memory"}})
    assert "bf16" in said and said.endswith("copy: no memory")


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BenchmarkError, match="no GPU found"):
        append.main([])
