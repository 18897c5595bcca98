"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
from typing import Any


def ran(*command: Any, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended with a code, and what it printed; None: with any code."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert code in (None, done.returncode), done.stdout[-8000:] + done.stderr[-8000:]
    return done
