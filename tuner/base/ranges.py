"""NVTX ranges, by which Nsight Systems names what it shows; none unless ``TUNER_NVTX=1``.

Read once, when this module is imported: what is off costs a call of the runtime nothing. The ranges
go through the package ``nvtx`` where it is installed, else through torch's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from tuner import settings

_log = logging.getLogger("tuner.ranges")

ON = settings.nvtx()
_NOTHING = contextlib.nullcontext()


def named(text: str) -> AbstractContextManager[None]:
    """A range around what runs in it, of this thread."""
    return _range(text) if ON else _NOTHING


@contextlib.contextmanager
def _range(text: str) -> Iterator[None]:
    push, pop = _functions()
    push(text)
    try:
        yield
    finally:
        pop()


@cache
def _functions() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Opens and closes a range; does nothing when no library offers one."""
    for module, push, pop in (
        ("nvtx", "push_range", "pop_range"),
        ("torch.cuda.nvtx", "range_push", "range_pop"),
    ):
        try:
            library = importlib.import_module(module)
            opened, closed = getattr(library, push), getattr(library, pop)
            opened("tuner")
            closed()
        except (AttributeError, ImportError, OSError, RuntimeError):
            continue
        return opened, closed
    _log.warning("TUNER_NVTX is set, but neither the package nvtx nor a torch with CUDA is there")
    return (lambda text: None), (lambda: None)
