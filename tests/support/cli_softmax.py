"""Recordings of a softmax problem that the command replays."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored import final

from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Regime, Status
from tuner.problem import SoftmaxProblem
from tuner.runners import recording, recording_archive
from tuner.runners.recording import Recording

PROBLEM = SoftmaxProblem(256, 512)


SHAPE = ["--op", "softmax", "--shape", "M=256,N=512"]


REGIME = Regime.default("softmax")


ENVIRONMENT = Environment({"driver": "580"})


def recorded(problem: SoftmaxProblem = PROBLEM) -> Recording:
    """Every candidate; the last of the space is the fastest; every fifth failed."""
    measured = []
    for position, config in enumerate(Softmax().space(problem, DEFAULT_GPU)):
        failed = position % 5 == 0
        facts = {"regime": REGIME, "environment": ENVIRONMENT, "is_final": False, "std_us": 0.01}
        if failed:
            facts |= {"status": Status.TIMEOUT, "latency_us": None, "std_us": None, "rounds": 0}
        measured.append(final(config, 50.0 - 0.1 * position, problem, **facts))
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, tuple(measured))


@pytest.fixture
def recordings_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the shipped recordings, with one of `PROBLEM`."""
    folder = tmp_path / "recordings"
    recording.write(folder / "one.json.gz", recorded())
    monkeypatch.setattr(recording_archive, "folder", lambda: folder)
    monkeypatch.setenv("TUNER_SAMPLER", "tpe")  # a tenth of the time of gp
    return folder


REPLAYED = """
import sys
from pathlib import Path
from tuner import cli
from tuner.measure import device
from tuner.runners import recording, recording_archive
recordings = Path(sys.argv.pop(1))
device.detect = lambda index=0: None
recording_archive.folder = lambda: recordings
sys.exit(cli.main())
"""
