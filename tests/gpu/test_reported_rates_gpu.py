"""Rates that the driver reports, beside those of the GPU's description."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.hardware import GPUS  # noqa: E402
from tuner.measure import device  # noqa: E402
from tuner.runtime.call import devices  # noqa: E402

pytestmark = pytest.mark.gpu


def test_a_driver_reports_nearly_what_is_described() -> None:
    """So a part without a description is rescaled as if it had one."""
    here = devices.gpu_of(0)
    if all(here.identity != gpu.identity for gpu in GPUS.values()):
        pytest.skip(f"{here.name} has no description")
    empty = replace(here, clock_max_mhz=0, memory_gbs=0.0, l2_bytes=0)
    reported = devices._reported(empty, 0)
    assert reported.has_rates
    assert reported.clock_max_mhz == pytest.approx(here.clock_max_mhz, rel=0.01)
    assert reported.memory_gbs == pytest.approx(here.memory_gbs, rel=0.05)
    assert reported.l2_bytes == here.l2_bytes
    detected = device.detect(0)
    assert detected.clock_max_mhz == pytest.approx(reported.clock_max_mhz, rel=0.01)
