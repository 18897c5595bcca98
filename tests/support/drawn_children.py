"""Kernels' draws in a process of its own, which may hang or die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tuner.compile.artifacts import Artifact
from tuner.config import Config

#: A child is killed after so long; importing torch comes first.
LIMIT_S = 240.0


def answers(
    child: Path, artifact: Artifact, config: Config, draws: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A child's line for each draw: the draw and its faults."""
    wanted = {
        "key": artifact.key,
        "library": str(artifact.library),
        "config": config.to_json(),
        "draws": draws,
    }
    return lines_of(child, wanted, draws)


def lines_of(
    child: Path, wanted: Mapping[str, Any], draws: Sequence[Any], limit_s: float = LIMIT_S
) -> list[dict[str, Any]]:
    """A child's line for each draw of what it is given.

    Fails with the draw that hung, or in which the child died.
    """
    try:
        done = subprocess.run(
            [sys.executable, str(child)],
            input=json.dumps(wanted),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as exc:
        said = (exc.stdout or b"").decode().splitlines()
        pytest.fail(f"hung in draw {len(said)}: {draws[len(said) : len(said) + 1]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    at = draws[len(lines) : len(lines) + 1]
    assert done.returncode == 0, f"{len(lines)} draws done; {at}; {done.stderr[-2000:]}"
    assert len(lines) == len(draws)
    return lines
