"""Repairs of a forked child, in which its parent's other threads are gone."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Owner = TypeVar("_Owner")
_repairs: weakref.WeakKeyDictionary[Any, list[Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def in_child(owner: _Owner, repair: Callable[[_Owner], None]) -> None:
    """Call a function in each forked child, while its owner lives.

    Args:
        owner: object, or module; compared by identity.
        repair: called with the owner. No other thread is there.
    """
    _repairs.setdefault(owner, []).append(repair)


def add_lock(owner: object, make: Callable[[], Any] = threading.Lock, name: str = "_lock") -> None:
    """Give an object a lock, and another one in each forked child.

    A thread of the parent may hold the lock at the fork, and does not exist in the child.

    Args:
        owner: object, or module.
        make: makes the lock.
        name: attribute of the owner.
    """

    def renew(owner: object) -> None:
        setattr(owner, name, make())

    renew(owner)
    in_child(owner, renew)


class Descriptor:
    """An open file that forked children do not keep, so that its lock ends with this process.

    Args:
        number: number of the open file.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        in_child(self, Descriptor.close)

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked child."""
        return self.number >= 0

    def close(self) -> None:
        """Close it, once or more often."""
        if self.is_open:
            os.close(self.number)
            self.number = -1


def _after_fork() -> None:
    for owner, repairs in list(_repairs.items()):
        for repair in repairs:
            repair(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
