"""Request bodies and queries: names and numbers within bounds, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Depends, Query
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.store.jobs import MAX_PRIORITY

MAX_BATCH = 1000
MAX_PROBLEMS = 10_000

Op = Literal["attention", "attention_backward", "gemm", "grouped_gemm", "softmax", "swiglu"]
Launch = Literal["stream", "chained", "eager", "graph"]
"""`graph` is the earlier name of `chained`."""
L2 = Literal["warm", "cold"]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,64}$")]
GpuName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 ._()-]{1,64}$")]
Shape = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_=,.+ -]{1,256}$")]
JobId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
RunKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Words = Annotated[str, StringConstraints(max_length=200)]


class Body(BaseModel):
    """Refuses unknown keys, and does not convert types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lookup(Body):
    """One question."""

    op: Op = "attention"
    shape: Shape = Field(examples=["S=1024,D=64"])
    gpu: GpuName | None = Field(None, description="As H200; the default is noted in the answer.")
    regime: Launch | None = None
    l2: L2 | None = None
    allow_other_gpu: bool = False


class Place(NamedTuple):
    """A problem, and the GPU and the regimes that a query leaves; None: any."""

    problem: Problem
    gpu: str | None
    regimes: tuple[Regime, ...] | None


def _place(
    shape: Annotated[Shape, Query()],
    op: Annotated[Op, Query()] = "attention",
    gpu: Annotated[GpuName | None, Query()] = None,
    regime: Annotated[Launch | None, Query()] = None,
    l2: Annotated[L2 | None, Query()] = None,
) -> Place:
    regimes = Regime.choices(op, regime, l2) if regime or l2 else None
    return Place(PROBLEMS[op].parse(shape), gpu, regimes)


PlaceOf = Annotated[Place, Depends(_place)]


class LookupBatch(Body):
    """Questions; the answers come in the same order."""

    items: Annotated[list[Lookup], Field(min_length=1, max_length=MAX_BATCH)]


ShapeWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]{1,32}$")]
ShapeValue = ShapeWord | int | bool | FiniteFloat
ShapeKeys = Annotated[dict[Name, ShapeValue], Field(min_length=1, max_length=16)]


def _in_one_line(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """One message instead of one for each branch of the union."""
    try:
        return check(value)
    except ValidationError as exc:
        raise ValueError(_NO_PROBLEM) from exc


_NO_PROBLEM = 'not a problem (allowed: text as "S=1024,D=64", or keys as {"S": 1024, "D": 64})'
ProblemText = Annotated[Shape | ShapeKeys, WrapValidator(_in_one_line)]


class JobRequest(Body):
    """Problems to be tuned with the same options, as ``tuner jobs submit`` takes them."""

    problems: Annotated[
        list[ProblemText],
        Field(
            min_length=1,
            max_length=MAX_PROBLEMS,
            examples=[["S=1024,D=64", {"op": "gemm", "M": 4096, "N": 4096, "K": 4096}]],
        ),
    ]
    op: Op = Field("attention", description="Of problems that name none.")
    families: Annotated[list[Name], Field(max_length=32)] = []
    effort: Name = "quick"
    trials: Annotated[int, Field(ge=1, le=100_000)] | None = None
    time_limit_s: Annotated[float, Field(gt=0, le=604_800, strict=False)] | None = None
    max_workspace: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    sampler: Name | None = None
    compiled_only: bool = False
    regime: Launch | None = None
    l2: L2 | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
