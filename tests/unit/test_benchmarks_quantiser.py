"""`scripts/bench quantiser`: its lines, and a machine without a GPU."""

from __future__ import annotations

import pytest

from benchmarks import quantiser
from tuner.errors import BenchmarkError


def test_a_line_has_both_times_and_what_is_wrong() -> None:
    row = {"m": 16, "k": 7168, "us": {"kernel": 3.4}, "failed": {}, "same_bits": True}
    assert quantiser.line(row).split() == ["16", "x", "7168", "kernel", "3.4", "us"]
    said = quantiser.line({**row, "failed": {"pytorch": "no memory"}, "same_bits": False})
    assert said.endswith("pytorch: no memory  the bits differ")


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BenchmarkError, match="no GPU found"):
        quantiser.main([])
