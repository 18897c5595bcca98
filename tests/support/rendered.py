"""Parts of rendered CUDA text, which the host compiler runs."""

from __future__ import annotations

import re


def part(text: str, pattern: str) -> str:
    """The first place that matches; ``^`` is a line's start, and a dot any character."""
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found is not None, pattern
    return found[0]
