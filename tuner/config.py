"""Configs: a family's name and its parameters; frozen, hashable, JSON both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tuner.errors import ConfigError

Value = str | int | bool
"""A parameter's value. A parameter that does not apply is absent, never None."""


@dataclass(frozen=True)
class Config:
    """One candidate: `params` of `family`, and for a composite family the config of each stage.

    Two configs are equal exactly if they mean the same kernels and run-time arguments. `digest`
    names that equality in the store, in recordings and in Optuna.
    """

    family: str
    params: Mapping[str, Value] = field(default_factory=dict)
    stages: Mapping[str, Config] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.digest == other.digest

    def __str__(self) -> str:
        """One line: the family and its parameters, with the stages' parameters in brackets."""
        parts = [self.family, *(f"{name}={value}" for name, value in sorted(self.params.items()))]
        parts += [f"{name}[{stage}]" for name, stage in sorted(self.stages.items())]
        return " ".join(parts)

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.params.get(name, default)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"family": self.family, "params": dict(sorted(self.params.items()))}
        if self.stages:
            data["stages"] = {name: c.to_json() for name, c in sorted(self.stages.items())}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when the shape or a value's type is wrong.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("family"), str):
            raise ConfigError("a config needs 'family' (text) and 'params' (object)")
        unknown = set(data) - {"family", "params", "stages"}
        if unknown:
            raise ConfigError(f"unknown field '{sorted(unknown)[0]}' in a config")
        params, stages = data.get("params", {}), data.get("stages", {})
        if not isinstance(params, Mapping) or not isinstance(stages, Mapping):
            raise ConfigError("'params' and 'stages' of a config must be objects")
        for name in (*params, *stages):
            if not isinstance(name, str):
                raise ConfigError(
                    f"{name!r} is not the name of a parameter or stage (wanted: text)"
                )
        for name, value in params.items():
            if not isinstance(value, str | int | bool):
                raise ConfigError(
                    f"parameter {name}={value!r} is not text, a whole number or true/false"
                )
        return cls(data["family"], dict(params), {k: cls.from_json(v) for k, v in stages.items()})

    @cached_property
    def digest(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
