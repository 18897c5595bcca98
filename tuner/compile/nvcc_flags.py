"""Options that nvcc reads from its environment: the ones that can change a kernel."""

from __future__ import annotations

import os
import shlex

VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_HOST_VALUES = frozenset({"-ccbin", "--compiler-bindir", "-t", "--threads"})
"""Options with a value that leave a kernel's code as it is."""
_HOST_SWITCHES = frozenset(
    {"-allow-unsupported-compiler", "--allow-unsupported-compiler", "-v", "--verbose"}
    | {"-w", "--disable-warnings"}
)
"""Options without a value that leave it as it is."""


def code_flags() -> dict[str, str]:
    """Options that can change a kernel's code, by each of `VARIABLES` that has any.

    A host compiler, as conda's shells name one, only compiles the launch.
    """
    flags = {name: _code_flags(os.environ.get(name, "")) for name in VARIABLES}
    return {name: text for name, text in flags.items() if text}


def _code_flags(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:  # nvcc says what is wrong
        return text
    changing = []
    following = iter(words)
    for word in following:
        name, equals, _ = word.partition("=")
        if name in _HOST_VALUES and not equals:
            next(following, None)
        elif name in _HOST_VALUES:
            continue
        elif word not in _HOST_SWITCHES:
            changing.append(word)
    return text if changing == words and changing else shlex.join(changing)
