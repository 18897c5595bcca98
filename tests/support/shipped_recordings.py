"""The shipped recordings, each read once a run."""

from __future__ import annotations

from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners import recording, recording_archive

FILES = recording_archive.sources(recording_archive.folder())


_recordings: dict[str, recording.Recording] = {}


def read_once(source: recording.Source) -> recording.Recording:
    """One of `FILES`, shared by all tests that ask for it."""
    if source.name not in _recordings:
        _recordings[source.name] = recording.read(source)
    return _recordings[source.name]


def recording_of(problem: Problem) -> recording.Recording:
    """The recorded sweep of a problem on an H200."""
    answer = recording_archive.find(problem, GPUS["H200"], Regime.choices(problem.op))
    assert answer is not None
    return answer
