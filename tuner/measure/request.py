"""Requests to a worker, and the outcome of each candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.families.base import Strides
from tuner.measurement import Clocks, Regime, Status
from tuner.problem import Problem, problem_from_json


@dataclass(frozen=True)
class CandidateOutcome:
    """Result of one candidate: the part of a `Measurement` that comes from the GPU."""

    status: Status
    latency_us: float | None = None
    std_us: float | None = None
    rounds: int = 0
    flags: tuple[str, ...] = ()
    error: float | None = None
    workspace_bytes: int = 0
    clocks: Clocks = field(default_factory=Clocks)
    log: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CandidateOutcome:
        """Inverse of `dataclasses.asdict` after JSON."""
        values = dict(data)
        clocks = dict(values.pop("clocks", {}))
        clocks["throttle"] = tuple(clocks.get("throttle", ()))
        return cls(
            status=Status(values.pop("status")),
            flags=tuple(values.pop("flags", ())),
            clocks=Clocks(**clocks),
            **values,
        )


@dataclass(frozen=True)
class RequestedCandidate:
    """Candidate of a request."""

    index: int
    """Index of its config in the driver's list."""
    config: Config
    artifacts: Mapping[str, Artifact]
    """Artifact keys by kernel name within the family; empty for a vendor's."""


@dataclass(frozen=True)
class WorkerRequest:
    """Parsed request."""

    problem: Problem
    regime: Regime
    mode: str
    """- quick: check and time each
    - final: interleave all
    - probe: check only; probe_lse: also attention's log-sum-exp
    - kernels: each one's time by the profiler, unchecked"""
    seed: int
    rounds: int
    careful: bool
    max_workspace: int | None
    reference: Artifact
    candidates: Sequence[RequestedCandidate]
    strides: Strides = field(default_factory=dict)
    """Strides of a GEMM's matrices that differ from the problem's, for requests without timing."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerRequest:
        artifacts = {
            key: Artifact(key, Path(library), sha256, None, 0.0)
            for key, (library, sha256) in data["artifacts"].items()
        }
        return cls(
            problem=problem_from_json(data["problem"]),
            regime=Regime.parse(data["regime"]),
            mode=data["mode"],
            seed=data["seed"],
            rounds=data.get("rounds", 0),
            careful=data.get("careful", False),
            max_workspace=data.get("max_workspace"),
            reference=artifacts[data["reference"]],
            candidates=[
                RequestedCandidate(
                    item["index"],
                    Config.from_json(item["config"]),
                    {name: artifacts[key] for name, key in item["kernels"].items()},
                )
                for item in data["candidates"]
            ],
            strides={name: tuple(along) for name, along in data.get("strides", {}).items()},
        )
