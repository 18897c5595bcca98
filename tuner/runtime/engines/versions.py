"""Versions of engines that the runtime was run with; it serves no others."""

from __future__ import annotations

import re
from typing import NamedTuple


class Versions(NamedTuple):
    """A range of an engine's releases."""

    engine: str
    first: tuple[int, ...]
    """Numbers of the oldest release."""
    last: tuple[int, ...]
    """As `first`, of the newest release, whose later patches are served also."""

    def refusal(self, version: str) -> str:
        """Reason why `version` is not served; empty when it is."""
        numbers = re.match(r"\d+(\.\d+)*", version)
        release = tuple(map(int, numbers[0].split("."))) if numbers else ()
        if self.first <= release[: len(self.first)] <= self.last:
            return ""
        return f"{self.engine} {version} (served: {self})"

    def __str__(self) -> str:
        first, last = (".".join(map(str, ends)) for ends in (self.first, self.last))
        return first if first == last else f"{first} to {last}"


VLLM = Versions("vLLM", (0, 26), (0, 33))
SGLANG = Versions("SGLang", (0, 5, 23), (0, 5, 23))
TRANSFORMERS = Versions("Transformers", (5, 17), (5, 24))
