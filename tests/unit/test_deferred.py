"""Mapping whose values are made when they are first read."""

from __future__ import annotations

import pytest

from tuner.base.deferred import Deferred


def test_a_value_is_made_when_it_is_read_and_once() -> None:
    made: list[str] = []

    def make(key: str) -> int:
        made.append(key)
        return len(key)

    found = Deferred({key: (lambda key=key: make(key)) for key in ("a", "bb", "ccc")})
    assert list(found) == ["a", "bb", "ccc"] and len(found) == 3 and "bb" in found
    assert made == []
    assert (found["bb"], found["bb"], found.get("d")) == (2, 2, None)
    assert made == ["bb"]
    assert found == {"a": 1, "bb": 2, "ccc": 3}
    assert made == ["bb", "a", "ccc"]


def test_a_maker_s_error_is_the_reader_s() -> None:
    def fail() -> int:
        raise ValueError("damaged")

    found = Deferred({"a": fail})
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            _ = found["a"]
