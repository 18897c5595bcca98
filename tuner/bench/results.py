"""Results of a comparison: rows of timed kernels, derived figures, JSON both ways."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from tuner.base import document, output
from tuner.bench.contenders import Contender, Role
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measure import kernel_times
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Regime,
    Resources,
    Status,
    speedup_text,
    within_noise,
)
from tuner.problem import AttentionProblem, Problem, problem_from_json
from tuner.tuning.outcome import first_line

FORMAT = 1
MEASURED = (
    *("config", "status", "latency_us", "std_us", "rounds", "error", "workspace_bytes", "flags"),
    *("resources", "log"),
)
"""Fields that a kernel of a row has of its measurement."""
#: Keys of attention, or rows of a product: largest small problem, largest middle one.
SMALL, MIDDLE = 1024, 4096
#: Half the width of a median's 95 % confidence interval in standard errors of the mean: 1.96 for
#: normally distributed rounds, and a median spreads sqrt(pi / 2) as wide as a mean.
_MEDIAN_95 = 1.96 * math.sqrt(math.pi / 2)


def half_width_us(std_us: float | None, rounds: int) -> float | None:
    """Half the width of the median's 95 % confidence interval, microseconds; None for fewer than
    two rounds.
    """
    if std_us is None or rounds < 2:
        return None
    return _MEDIAN_95 * std_us / math.sqrt(rounds)


@dataclass(frozen=True)
class TimedKernel:
    """One kernel of a row."""

    role: Role
    name: str
    config: Config
    status: Status
    latency_us: float | None = None
    """Median over the rounds, microseconds; None if it was not timed."""
    std_us: float | None = None
    rounds: int = 0
    error: float | None = None
    """Relative Frobenius error against the fp64 reference, the worst kind of inputs."""
    workspace_bytes: int = 0
    flags: tuple[str, ...] = ()
    resources: Mapping[str, Resources] = field(default_factory=dict)
    log: str = ""
    stages_us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds of each kernel of a call alone, in their order."""
    again_us: float | None = None
    """The same kernel's time as a second participant of the same pass: the control."""
    kernel_us: float | None = None
    """Duration of its kernels by the profiler, in a separate run; overlapping kernels are summed.
    The latency also includes the launch, and the predecessor's effect on the caches."""

    @classmethod
    def of(cls, contender: Contender, run: Measurement) -> Self:
        return cls(
            role=contender.role,
            name=contender.name,
            stages_us=kernel_times.read(run.log) if run.ok else {},
            again_us=kernel_times.read_again(run.log) if run.ok else None,
            **{name: getattr(run, name) for name in MEASURED},
        )

    @property
    def deviation(self) -> float:
        """Standard deviation over the rounds relative to the median."""
        return (self.std_us or 0.0) / (self.latency_us or math.inf)

    @property
    def half_width_us(self) -> float | None:
        """As the function of this name."""
        return half_width_us(self.std_us, self.rounds)

    @property
    def reason(self) -> str:
        """Reason why it has no time; empty if it has one."""
        if self.latency_us is not None:
            return ""
        return f"{self.status}: {line}" if (line := first_line(self.log)) else str(self.status)


@dataclass(frozen=True)
class Row:
    """All kernels of one problem under one regime, timed interleaved in one run."""

    suite: str
    problem: Problem
    regime: Regime
    timed: tuple[TimedKernel, ...] = ()
    clocks: Clocks = field(default_factory=Clocks)
    notes: tuple[str, ...] = ()
    failure: str = ""
    """Reason why no kernel was timed; empty if one was."""
    created_at: str = ""
    """UTC, ISO 8601."""

    @property
    def own(self) -> TimedKernel | None:
        """Fastest own kernel: of the tuned ones, or of the untuned ones if none is tuned."""
        tuned = [t for t in self.timed if t.role is Role.OWN]
        return _fastest(tuned or [t for t in self.timed if t.role is Role.UNTUNED])

    @property
    def peer(self) -> TimedKernel | None:
        """The fastest peer."""
        return _fastest([t for t in self.timed if t.role is Role.PEER])

    @property
    def ratio(self) -> float | None:
        """Time of the fastest peer over that of the fastest own kernel; above 1 the own kernel
        is faster.
        """
        own, peer = self.own, self.peer
        if own is None or peer is None or not own.latency_us or not peer.latency_us:
            return None
        return peer.latency_us / own.latency_us

    @property
    def is_tie(self) -> bool:
        """True if own kernel and peer are equal within the noise of both."""
        own, peer = self.own, self.peer
        if self.ratio is None or own is None or peer is None:
            return False
        return within_noise(self.ratio, own.deviation, peer.deviation)

    @property
    def verdict(self) -> str:
        """The ratio in words, as ``1.29x cudnn``, ``0.99x cudnn, a tie`` or ``1.02x cudnn, noisy``;
        ``-`` without one.
        """
        own, peer = self.own, self.peer
        if self.ratio is None or own is None or peer is None:
            return "-"
        text = speedup_text(self.ratio, peer.name, is_tie=self.is_tie)
        return f"{text}, noisy" if "noisy" in (*own.flags, *peer.flags) else text

    @property
    def control(self) -> float | None:
        """Relative difference of two times of one kernel in this pass."""
        pairs = [(t.again_us, t.latency_us) for t in self.timed if t.again_us and t.latency_us]
        return max((abs(again / us - 1) for again, us in pairs), default=None)

    def figures(self, timed: TimedKernel, gpu: Gpu) -> dict[str, float]:
        """Figures derived from a time, by name; empty without one.

        ``tb_per_s`` counts the keys and values of attention, every operand of other operations;
        ``over_own`` is the time over that of the fastest own kernel (`own`).
        """
        us = timed.latency_us
        if us is None:
            return {}
        problem, memory = self.problem, self.problem.bytes + timed.workspace_bytes
        moved = problem.bytes
        facts: dict[str, float] = {}
        if isinstance(problem, AttentionProblem):
            _, key, value, _ = problem.matrices
            moved = key.bytes + value.bytes
            tokens = problem.total_q * 1e6 / us
            facts = {
                "us_per_head": us / (problem.batch * problem.heads_q),
                "tokens_per_s": tokens,
                "tokens_per_s_per_mb": tokens / (memory / 1e6),
            }
        tflops = problem.flops / us / 1e6
        facts |= {
            "tflops": tflops,
            "share_of_peak": tflops / (gpu.peak_tflops * problem.tensor_rate),
            "tb_per_s": moved / us / 1e6,
            "memory_mb": memory / 1e6,
        }
        if (own := self.own) is not None and own.latency_us:
            facts["over_own"] = us / own.latency_us
        if timed.stages_us:
            # Negative if a kernel starts before its predecessor ends.
            facts["gaps_us"] = us - sum(timed.stages_us.values())
        extra = {"again_us": timed.again_us, "kernel_us": timed.kernel_us}
        facts |= {name: value for name, value in extra.items() if value is not None}
        if timed.half_width_us is not None:
            facts["half_width_us"] = timed.half_width_us
        return facts

    def measurements(self, results: Results) -> list[Measurement]:
        """Measurements as a sweep's final pass would store them."""
        return [
            Measurement(
                problem=self.problem,
                gpu=results.gpu,
                regime=self.regime,
                environment=results.environment,
                is_final=True,
                clocks=self.clocks,
                created_at=self.created_at,
                **{name: getattr(timed, name) for name in MEASURED},
            )
            for timed in self.timed
        ]

    def to_json(self, gpu: Gpu) -> dict[str, Any]:
        """Every field, and derived figures for readers and other programs."""
        own, peer = self.own, self.peer
        return {
            "suite": self.suite,
            "label": self.problem.label(),
            "problem": self.problem.to_json(),
            "regime": str(self.regime),
            "own": own and own.name,
            "own_us": own and own.latency_us,
            "fastest_peer": peer and peer.name,
            "fastest_peer_us": peer and peer.latency_us,
            "peer_over_own": self.ratio,
            "is_tie": self.is_tie,
            "control": self.control,
            "kernels": [
                {
                    **asdict(timed),
                    "role": str(timed.role),
                    "status": str(timed.status),
                    "config": timed.config.to_json(),
                    "figures": self.figures(timed, gpu),
                }
                for timed in self.timed
            ],
            "clocks": asdict(self.clocks),
            "notes": list(self.notes),
            "failure": self.failure,
            "created_at": self.created_at,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        clocks = document.checked(Clocks, data["clocks"])
        return cls(
            suite=data["suite"],
            problem=problem_from_json(data["problem"]),
            regime=Regime.parse(data["regime"]),
            timed=tuple(_timed_from_json(item) for item in data["kernels"]),
            clocks=Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
            notes=tuple(data["notes"]),
            failure=data["failure"],
            created_at=data["created_at"],
        )


def _timed_from_json(data: Mapping[str, Any]) -> TimedKernel:
    fields = document.checked(TimedKernel, data)
    values = {name: value for name, value in fields.items() if name != "figures"}
    return TimedKernel(
        **{
            **values,
            "role": Role(values["role"]),
            "status": Status(values["status"]),
            "config": Config.from_json(values["config"]),
            "flags": tuple(values["flags"]),
            "resources": {
                k: Resources(**document.checked(Resources, v))
                for k, v in values["resources"].items()
            },
        }
    )


def _fastest(timed: Sequence[TimedKernel]) -> TimedKernel | None:
    passed = [t for t in timed if t.latency_us is not None]
    return min(passed, key=lambda t: t.latency_us or 0.0, default=None)


class Size(StrEnum):
    """Size class of a problem, by its keys or rows."""

    SMALL = "up to 1024"
    MIDDLE = "1025 to 4096"
    LARGE = "above 4096"


def size_of(problem: Problem) -> Size:
    """By the keys of attention, the rows of a product, the columns of a softmax."""
    facts = ("seqlen_kv", "m", "cols")
    length = next(getattr(problem, name) for name in facts if hasattr(problem, name))
    if length <= SMALL:
        return Size.SMALL
    return Size.MIDDLE if length <= MIDDLE else Size.LARGE


@dataclass(frozen=True)
class SizeGroup:
    """The problems of one size."""

    size: Size
    count: int
    geometric_mean: float
    """Geometric mean of peer's time over own time."""


@dataclass(frozen=True)
class Summary:
    """A suite under one regime."""

    suite: str
    regime: Regime
    count: int
    """Number of problems with both an own time and a peer's."""
    missing: int
    """Number of problems without one of them."""
    geometric_mean: float | None
    """Geometric mean of peer's time over own time."""
    worst: float | None
    worst_label: str
    ties: int = 0
    """Number of problems whose two times are equal within the noise of both."""
    parts: tuple[SizeGroup, ...] = ()
    """Summaries by size, if there are several sizes."""
    control: float | None = None
    """Largest relative difference of two times of one kernel in one pass."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Args: rows: of one suite and regime, at least one."""
        ratios = {row.problem.label(): row.ratio for row in rows if row.ratio is not None}
        worst = min(ratios, key=lambda label: ratios[label], default="")
        sizes = [(size_of(row.problem), row.ratio) for row in rows if row.ratio is not None]
        sized = {size: [ratio for of, ratio in sizes if of is size] for size in Size}
        parts = [
            SizeGroup(size, len(ratios), statistics.geometric_mean(ratios))
            for size, ratios in sized.items()
            if ratios
        ]
        return cls(
            suite=rows[0].suite,
            regime=rows[0].regime,
            count=len(ratios),
            missing=len(rows) - len(ratios),
            geometric_mean=statistics.geometric_mean(ratios.values()) if ratios else None,
            worst=ratios.get(worst),
            worst_label=worst,
            ties=sum(row.is_tie for row in rows),
            parts=tuple(parts) if len(parts) > 1 else (),
            control=max((row.control for row in rows if row.control is not None), default=None),
        )


@dataclass(frozen=True)
class Results:
    """Results of a `comparison.ComparisonRun`, finished or not."""

    gpu: Gpu
    environment: Environment
    rows: tuple[Row, ...] = ()

    def with_rows(self, numbered: Mapping[int, Row]) -> Results:
        """These results with further rows, in the order of their numbers."""
        return replace(self, rows=(*self.rows, *(numbered[i] for i in sorted(numbered))))

    @property
    def sections(self) -> list[list[Row]]:
        """Rows of one suite and regime each, in the order in which those first came."""
        order = {key: i for i, key in reversed([*enumerate(map(_section, self.rows))])}
        ranked = sorted(self.rows, key=lambda row: order[_section(row)])
        return [list(group) for _, group in groupby(ranked, key=_section)]

    def beside(self, row: Row) -> Row | None:
        """Row of regime `chained` for the same problem and inputs as a row of `stream`."""
        if not row.regime.behind:
            return None
        place = (row.suite, row.problem, row.regime.chained)
        return next((r for r in self.rows if (r.suite, r.problem, r.regime) == place), None)

    @property
    def summaries(self) -> list[Summary]:
        return [Summary.of(rows) for rows in self.sections]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "gpu": asdict(self.gpu),
            "environment": dict(self.environment.facts),
            "summaries": [{**asdict(s), "regime": str(s.regime)} for s in self.summaries],
            "rows": [row.to_json(self.gpu) for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when it is not such a document.
        """
        try:
            if data["format"] != FORMAT:
                raise ConfigError(f"format {data['format']} is not known (allowed: {FORMAT})")
            return cls(
                Gpu(**document.checked(Gpu, data["gpu"])),
                Environment(data["environment"]),
                tuple(Row.from_json(row) for row in data["rows"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"not the results of a bench: {type(exc).__name__} {exc}") from exc

    def write(self, path: Path) -> None:
        """`write_json` of everything.

        Raises:
            StoreError: when it cannot be written.
        """
        write_json(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of `write`.

        Raises:
            ConfigError: when it cannot be read or is not such a document.
        """
        try:
            return cls.from_json(document.parse(path.read_text()))
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise ConfigError(f"{path}: {exc}") from exc


def write_json(path: Path, document: Any) -> None:
    """Write the file atomically, so that a killed run leaves its last state.

    Raises:
        StoreError: when it cannot be written.
    """
    output.write(path, json.dumps(document, indent=1) + "\n")


def _section(row: Row) -> tuple[str, str]:
    return row.suite, str(row.regime)
