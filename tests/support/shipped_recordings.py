"""The shipped recordings, each read once a run."""

from __future__ import annotations

import functools
from pathlib import Path

from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners import recording

FILES = sorted(recording.folder().glob(f"*{recording.SUFFIX}"))


@functools.cache
def read_once(path: Path) -> recording.Recording:
    """One of `FILES`, shared by all tests that ask for it."""
    return recording.read(path)


def recording_of(problem: Problem) -> recording.Recording:
    """The recorded sweep of a problem on an H200."""
    answer = recording.find(problem, GPUS["H200"], Regime.choices(problem.op))
    assert answer is not None
    return answer
