"""Compilation of a single source to a library in the artifact cache."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from tuner.base import resources
from tuner.base.processes import ProcessPool
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import CompileError

TIMEOUT_S = 300.0
_LOG_LIMIT = 4000

Recipe = Callable[[Path], tuple[list[str], Mapping[str, str]]]
"""Function that finds its tools and returns the command that writes a library to a path, and the
tools' facts."""


def build(
    artifacts: ArtifactCache,
    key: str,
    source: str,
    recipe: Recipe,
    processes: ProcessPool | None = None,
) -> Artifact:
    """Find a library or compile it. One process of the machine compiles, and the others wait.

    Args:
        artifacts: cache for the library.
        key: key of the artifact.
        source: path under ``templates/``.
        recipe: called only if the library is not cached.
        processes: pool that runs the compiler, so that the caller can kill it.

    Raises:
        CompileError: when a tool is missing, or the compiler rejects the source.
        StoreError: when the cache cannot be written.
    """
    with artifacts.lock(key):
        if found := artifacts.find(key):
            return found
        with artifacts.workspace() as folder:
            library = folder / "kernel.so"
            command, facts = recipe(library)
            done = (processes or ProcessPool(TIMEOUT_S)).run(command, folder)
            if done.returncode != 0:
                lines = [line for line in done.log.splitlines() if "error" in line]
                reason = (lines or ["no message"])[0].strip()
                raise CompileError(
                    f"{source}: {'stopped: too slow' if done.timed_out else reason}",
                    command=shlex.join(command),
                    log=done.log[:_LOG_LIMIT],
                )
            return artifacts.put(
                key,
                library,
                resources=None,
                compile_cpu_s=done.cpu_s,
                source=(resources.templates() / source).read_text(encoding="utf-8"),
                facts={"template": source, **facts},
            )
