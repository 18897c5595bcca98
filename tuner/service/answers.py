"""Response models for the OpenAPI document. Objects may have more keys than are named here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tuner.service.bodies import Op

TaskState = Literal["queued", "running", "done", "failed", "cancelled"]


class ApiModel(BaseModel):
    """An answer; new keys may be added to it."""

    model_config = ConfigDict(extra="allow")


class Error(ApiModel):
    """Why there is no other answer: one line that names what was wrong and what is allowed."""

    error: str


class Configuration(ApiModel):
    """One decision."""

    op: Op
    shape: str
    problem: dict[str, Any]
    gpu: str
    regime: str
    provenance: Literal["measured", "replayed", "predicted"]
    passed: Literal["final", "quick"] | None = Field(alias="pass")
    """The pass that decided; null of estimates."""
    origin: str
    pinned: bool
    config: dict[str, Any]
    config_digest: str
    latency_us: float | None
    own_us: float | None
    vendors_us: dict[str, float | None]
    vendor_over_own: dict[str, float]
    """Each vendor kernel's time over the best own one's: above 1 ours is faster."""
    own_over_vendor: dict[str, float]
    """The inverse of `vendor_over_own`, for programs that read it."""
    environment: dict[str, str | int | float]
    sweep: str
    decided_at: str


class Configurations(ApiModel):
    """Some of the decisions that match, and how many do."""

    total: int
    entries: list[Configuration]


class ServedConfiguration(Configuration):
    """Configuration that serves a problem."""

    exact: bool
    notes: list[str]


class Lookups(ApiModel):
    """In the order of the questions; null where nothing is known."""

    answers: list[ServedConfiguration | None]


class Snapshot(ApiModel):
    """The document that `tuner store export` writes and `tuner store import` reads."""

    format: Literal["cutlass-tuner-entries"]
    version: int
    measurements: list[dict[str, Any]]
    entries: list[dict[str, Any]]


class JobSummary(ApiModel):
    """One job."""

    id: str
    state: TaskState
    priority: int
    attempts: int
    options: dict[str, Any]
    created_at: str
    counts: dict[TaskState, int]


class JobList(ApiModel):
    """Some of the jobs, and how many there are."""

    total: int
    jobs: list[JobSummary]


class Result(ApiModel):
    """Decision for a problem of a job."""

    winner: str
    is_vendor: bool
    config_digest: str
    latency_us: float
    provenance: Literal["measured", "replayed", "predicted"]
    launch: str = "stream"
    """Way of timing: stream, chained or eager."""
    passed: Literal["final", "quick"] | None = Field(alias="pass")
    own_us: float | None
    fastest_vendor: str | None
    fastest_vendor_us: float | None
    vendor_over_own: float | None
    """The fastest vendor's time over the best own kernel's: above 1 ours is faster."""
    is_tie: bool = False
    """True when the two are equal within their noise."""


class JobProblem(ApiModel):
    """One problem of a job."""

    op: Op
    shape: str
    problem: dict[str, Any]
    state: TaskState
    attempt: int
    reason: str
    holder: str
    sweep: str
    trials: int
    progress: dict[str, Any]
    result: Result | None


class JobMeasurement(ApiModel):
    """One measurement of a job."""

    id: int
    op: Op
    shape: str
    config: dict[str, Any]
    config_digest: str
    status: str
    provenance: str
    latency_us: float | None
    is_final: bool
    reason: str
    created_at: str


class JobDetail(JobSummary):
    """A job with its problems and trials."""

    problems: list[JobProblem]
    trials: list[JobMeasurement]


class Cancelled(ApiModel):
    """How many problems were open."""

    cancelled: int


class Health(ApiModel):
    """True when the store could be read a moment ago."""

    status: Literal["ok", "stale"]
    age_s: float
