"""The shipped recordings, each read once a run."""

from __future__ import annotations

import functools
from pathlib import Path

from tuner.runners import recording

FILES = sorted(recording.folder().glob(f"*{recording.SUFFIX}"))


@functools.cache
def read_once(path: Path) -> recording.Recording:
    """One of `FILES`, shared by all tests that ask for it."""
    return recording.read(path)
