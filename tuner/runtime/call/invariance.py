"""The mode of `tuner.deterministic`: a row has the same bits whatever else is in its call.

Own kernels of one class a layer answer (`tuner.selection.invariant`), and nobody else: a call
without such a kernel is an error. The mode is the process's: threads share the plans of calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tuner import settings
from tuner.errors import ConfigError, NotInvariantError

KINDS = ("batch",)
"""Kinds of determinism that `deterministic` knows."""

_lock = threading.Lock()
_entered = 0
switched: list[Callable[[], None]] = []
"""Functions to call when the mode begins or ends."""
was_on = settings.batch_invariant()
"""True if the mode was on at its last switch, or at the table's last look. Reading the variable
takes a microsecond, which each call would pay."""


def is_on() -> bool:
    """True in the mode."""
    return _entered > 0 or settings.batch_invariant()


@contextmanager
def deterministic(kind: str) -> Iterator[None]:
    """Results that do not depend on what else is computed with them, in all threads.

    Under ``"batch"`` a row of `linear`, `matmul`, `swiglu` and `moe` has the same bits in any call.
    So has one of `scaled_mm` with factors of blocks or rows, and a query of `attention`,
    `attention_varlen` and `paged_attention`. The page on batch-invariant results says
    what is guaranteed. ``TUNER_BATCH_INVARIANT=1`` is the same for a whole program.

    A switch forgets the plans of calls, which are looked up again. Enter once a phase of a program,
    not once a call.

    Args:
        kind: ``"batch"``.

    Raises:
        ConfigError: on another kind.
        NotInvariantError: within, by calls that no kernel of their layer's class serves.
    """
    global _entered
    if kind not in KINDS:
        raise ConfigError(f"deterministic({kind!r}) is not known (allowed: {', '.join(KINDS)})")
    _switch(1)
    try:
        yield
    finally:
        _switch(-1)


def _switch(step: int) -> None:
    global _entered
    with _lock:
        before = is_on()
        _entered += step
        is_changed = look() != before
    if is_changed:
        for tell in switched:
            tell()


def look() -> bool:
    """`is_on`, kept in `was_on`."""
    global was_on
    was_on = is_on()
    return was_on


def forbid(reason: str, rows: Any = None) -> None:
    """Nothing outside of the mode; to be called before another kernel than a class's answers.

    Calls that are made often ask `was_on` first.

    Args:
        reason: why no kernel of the class answers.
        rows: the call's rows, a tensor; without an element they have no bits.

    Raises:
        NotInvariantError: in the mode.
    """
    if is_on() and (rows is None or rows.numel()):
        raise NotInvariantError(
            f"no kernel gives this call the same bits in any batch: {reason} (outside of "
            "tuner.deterministic('batch') and without TUNER_BATCH_INVARIANT PyTorch may answer)"
        )
