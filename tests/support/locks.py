"""A process that holds an artifact's lock: in a module that a spawned Python can import."""

from __future__ import annotations

from multiprocessing.synchronize import Event
from pathlib import Path

from tuner.compile.artifacts import ArtifactCache


def hold(root: Path, held: Event, release: Event) -> None:
    """Lock ``k1`` in the cache at `root`, say so, and keep it until `release`."""
    with ArtifactCache(root).lock("k1"):
        held.set()
        release.wait()
