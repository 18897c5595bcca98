"""Documents of the tuner that a bad disk, another version or another user left changed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from damage import KINDS

_DIGITS, _DEEP = "a number of many digits", "many lists in one another"
_TEXTS = {_DIGITS: "9" * 5000, _DEEP: "[" * 50_000 + "]" * 50_000}
"""JSON of values that Python's `json` does not write."""
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 2**31, 2**63, -(2**63), 10**400, 1e308),
    *("", "x", "\0", "../../x", "a" * 5000, "\ud800", "1", "ä", _DIGITS, _DEEP),
    *(float("nan"), float("inf"), float("-inf"), [], {}, [[]], [{}], {"": None}, [1, 2]),
)
"""Values that no field of a document expects."""


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a document with each of its keys."""
    keys = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(keys):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _change(document: Any, draw: random.Random) -> None:
    """Change one value of a document, or remove, rename, copy or wrap it."""
    places = list(_places(document))
    if not places:
        return
    node, key = draw.choice(places)
    match draw.randrange(8):
        case 0 if isinstance(node, dict):
            del node[key]
        case 1 if isinstance(node, dict):
            node[f"{key}_"] = node.pop(key)
        case 2 if isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        case 3:
            other, elsewhere = draw.choice(places)
            if elsewhere in (other if isinstance(other, dict) else range(len(other))):
                node[key] = copy.deepcopy(other[elsewhere])
        case 4:
            node[key] = [node[key]]
        case _:
            node[key] = copy.deepcopy(draw.choice(HOSTILE))


def mutated(document: Any, draw: random.Random) -> bytes:
    """JSON of a document after one to three changes, of its values or of its bytes."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 3))):
        _change(document, draw)
    text = json.dumps(document)
    for name, value in _TEXTS.items():
        text = text.replace(f'"{name}"', value)
    content = bytearray(text.encode())
    if draw.random() < 0.3:
        draw.choice(KINDS)(content, draw)
    return bytes(content)
