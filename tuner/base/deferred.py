"""Mapping whose values are made when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Deferred(Mapping[_Key, _Value]):
    """A mapping of which a reader needs few values. Each is made once.

    Args:
        makers: functions that make the values; their errors are raised to the reader.
    """

    def __init__(self, makers: Mapping[_Key, Callable[[], _Value]]) -> None:
        self._makers = makers
        self._made: dict[_Key, _Value] = {}

    def __getitem__(self, key: _Key) -> _Value:
        if key in self._made:
            return self._made[key]
        return self._made.setdefault(key, self._makers[key]())

    def __contains__(self, key: object) -> bool:
        return key in self._makers

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
