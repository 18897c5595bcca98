"""Measurements: status, latencies, error against the reference, log, environment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.problem import Problem, problem_from_json


class Status(StrEnum):
    """How an evaluation ended. Only OK has a latency that may win."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    LAUNCH_ERROR = "launch_error"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    WORKER_DIED = "worker_died"
    ILLEGAL_ACCESS = "illegal_access"
    WRONG_RESULT = "wrong_result"
    NOT_FINITE = "not_finite"
    OUT_OF_BOUNDS = "out_of_bounds"
    TOO_FAST = "too_fast"
    UNAVAILABLE = "unavailable"
    """A vendor kernel that this machine does not have or that refuses the problem."""


#: driver_types.h, enum cudaError, and cuda.h, enum CUresult: the same numbers in both. Memory
#: allocation; launch timeout; and what a bad access or instruction on the device leaves behind, of
#: which an earlier kernel of the same context may be the cause: illegal address, hardware stack,
#: illegal instruction, misaligned address, invalid address space, invalid program counter, launch
#: failed.
_CUDA_STATUS = {
    2: Status.OUT_OF_MEMORY,
    702: Status.TIMEOUT,
    **dict.fromkeys((700, 714, 715, 716, 717, 718, 719), Status.ILLEGAL_ACCESS),
}


def status_of(cuda_error: int) -> Status:
    """Status for an error code of CUDA's runtime or driver."""
    return _CUDA_STATUS.get(cuda_error, Status.LAUNCH_ERROR)


class Provenance(StrEnum):
    """Origin of a latency. The runtime launches MEASURED entries only."""

    MEASURED = "measured"
    REPLAYED = "replayed"
    PREDICTED = "predicted"


LAUNCHES = ("stream", "chained", "eager")
"""Ways to launch what is timed, see `Regime`."""
BEHIND = {"stream": "elementwise", "stream_gemm": "gemm"}
"""Predecessor of each call, by launch; ``stream_gemm`` is a bench's only."""
#: Earlier names: `chained` was `graph`, and is still stored under it.
_STORED = {"chained": "graph"}
_READ = {old: new for new, old in _STORED.items()}
_COLD_OPS = ("gemm", "swiglu", "grouped_gemm")


def launch_named(text: str) -> str:
    """One of `LAUNCHES`, also by its earlier name."""
    return _READ.get(text, text)


@dataclass(frozen=True)
class Regime:
    """How a kernel is timed.

    `launch`:

    - ``stream``: a CUDA graph of n times [predecessor; call], less the same graph of predecessors
      alone. The predecessor is an ordinary element-wise kernel, without programmatic launch, which
      writes the call's first operand (the query, the activations).
    - ``chained``: a CUDA graph of n calls, each behind the one before it. Kernels launched as
      programmatic dependents overlap there. Stored, exported and recorded as ``graph``.
    - ``eager``: n calls launched one by one.
    - ``stream_gemm``: as ``stream``, behind a GEMM of PyTorch's; only of ``tuner bench``.

    `l2`, the state of the inputs in the L2 cache:

    - ``warm``: one set of buffers; what fits in the cache stays there. So are a prompt's keys and
      values, which a projection has just written.
    - ``cold``: the calls rotate over sets of buffers that hold three times the cache: weights,
      scales, biases, key and value caches and outputs. Under ``stream`` the first operand of each
      set is rotated also, yet warm: its predecessor has just written it.
    """

    launch: str = "stream"
    l2: str = "warm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "launch", launch_named(self.launch))
        if self.launch not in (*LAUNCHES, *BEHIND):
            raise ConfigError(f"regime={self.launch} is not known (allowed: {', '.join(LAUNCHES)})")
        if self.l2 not in ("warm", "cold"):
            raise ConfigError(f"l2={self.l2} is not known (allowed: warm, cold)")

    @classmethod
    def default(cls, op: str) -> Regime:
        """``stream``; warm for attention and softmax, whose inputs were just written; cold for
        products, whose weights were not.
        """
        return cls("stream", "cold" if op in _COLD_OPS else "warm")

    @classmethod
    def choices(
        cls, op: str, launch: str | None = None, l2: str | None = None
    ) -> tuple[Regime, ...]:
        """Regimes that may answer for an operation, the preferred one first.

        Without a launch, decisions of ``stream`` come before ``chained`` ones of the same inputs.
        Without a state of the inputs, the operation's usual one comes first.

        Args:
            op: the operation.
            launch: only this launch.
            l2: only this state of the inputs.
        """
        usual = cls.default(op)
        states = [l2] if l2 else [usual.l2, usual.other_inputs.l2]
        launches = [launch] if launch else ["stream", "chained"]
        if launch and not l2:
            states = states[:1]
        return tuple(cls(launch, state) for state in states for launch in launches)

    @classmethod
    def preferred(cls, wanted: Regime) -> tuple[Regime, ...]:
        """`wanted`, and where that is ``stream`` the chained one of the same inputs after it."""
        return (wanted, wanted.chained) if wanted.launch == "stream" else (wanted,)

    @property
    def behind(self) -> str:
        """The predecessor of each timed call, a value of `BEHIND`; empty where there is none."""
        return BEHIND.get(self.launch, "")

    @property
    def other_inputs(self) -> Regime:
        """The same launch with the inputs in the other state."""
        return replace(self, l2="cold" if self.l2 == "warm" else "warm")

    @property
    def chained(self) -> Regime:
        """The same inputs behind copies of the call."""
        return replace(self, launch="chained")

    @classmethod
    def parse(cls, text: str) -> Regime:
        """Read ``stream-warm`` or ``graph-warm``: the text of `str(regime)` or its `key`."""
        launch, _, l2 = text.partition("-")
        return cls(launch, l2)

    @property
    def key(self) -> str:
        """The text in stores, exports, recordings and rules: ``graph-warm`` for chained-warm."""
        return f"{_STORED.get(self.launch, self.launch)}-{self.l2}"

    def __str__(self) -> str:
        return f"{self.launch}-{self.l2}"


Regimes = Regime | Sequence[Regime]
"""One regime or several."""


def listed(regimes: Regimes) -> tuple[Regime, ...]:
    """One regime or several as several."""
    return (regimes,) if isinstance(regimes, Regime) else tuple(regimes)


def regime_keys(regimes: Regimes) -> list[str]:
    """Stored texts of one regime or of several."""
    return [regime.key for regime in listed(regimes)]


@dataclass(frozen=True)
class Environment:
    """The measuring machine: versions and limits by name (driver, cuda, torch, cudnn,
    cublas, nvcc, cutlass, clock_max_mhz, power_limit_w, peers). Equal facts, equal `digest`.
    """

    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        text = json.dumps(dict(self.facts), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Resources:
    """Report of ptxas on one kernel."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes: int = 0
    """Static shared memory; dynamic shared memory is the launch's."""
    code: str = ""
    """Hash of the kernel's machine code (`compile.device_code`); empty where it is not known."""

    def to_json(self) -> dict[str, int | str]:
        """Every field; no code where it is not known."""
        return {name: value for name, value in vars(self).items() if value != ""}


@dataclass(frozen=True)
class Clocks:
    """State of the chip while timing, read through NVML."""

    sm_mhz: int = 0
    memory_mhz: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    throttle: tuple[str, ...] = ()
    """Names of the throttle reasons seen during the accepted rounds."""


@dataclass(frozen=True)
class Measurement:
    """One evaluation of one config on one problem, GPU, environment and regime. Immutable."""

    problem: Problem
    config: Config
    gpu: Gpu
    regime: Regime
    status: Status
    provenance: Provenance = Provenance.MEASURED
    environment: Environment = field(default_factory=Environment)
    latency_us: float | None = None
    """Median of the rounds, microseconds a call; None unless `status` is OK."""
    std_us: float | None = None
    rounds: int = 0
    is_final: bool = False
    """True for the interleaved pass beside the baselines; only final ones are served. Times of
    the two passes do not compare (`speedup`)."""
    flags: tuple[str, ...] = ()
    """Doubts that survived re-timing: ``noisy`` (deviation >= 2 %), ``throttled``. Also the loss of
    e4m3 sums under fast accumulation, ``positive_sums_off_9.6e-02``: the relative error on
    all-positive operands, which no limit judges."""
    error: float | None = None
    """Relative Frobenius error against the reference, worst over the inputs that limits judge."""
    workspace_bytes: int = 0
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Kernel name within the family -> artifact key. Empty for vendor kernels."""
    resources: Mapping[str, Resources] = field(default_factory=dict)
    compile_cpu_s: float | None = None
    """CPU-seconds spent compiling for this evaluation; 0 when every artifact was cached."""
    clocks: Clocks = field(default_factory=Clocks)
    log: str = ""
    sweep: str = ""
    """Identity of the sweep that made it."""
    created_at: str = ""
    """UTC, ISO 8601."""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK and self.latency_us is not None

    @property
    def tflops(self) -> float | None:
        return None if self.latency_us is None else self.problem.flops / self.latency_us / 1e6

    def speedup(self, other: Measurement) -> float | None:
        """Time of another kernel over this one's: above 1 this one is faster.

        None unless both passed, in the same pass. Quick times and final times do not compare: a
        final pass runs at the clocks that its neighbours leave.
        """
        if not self.ok or not other.ok or self.is_final != other.is_final:
            return None
        return (other.latency_us or 0.0) / (self.latency_us or math.inf)

    def but(self, **changes: Any) -> Measurement:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        # Not `asdict`, which copies in depth: a controller writes every trial through here.
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "problem": self.problem.to_json(),
            "config": self.config.to_json(),
            "gpu": dict(vars(self.gpu)),
            "regime": self.regime.key,
            "status": self.status.value,
            "provenance": self.provenance.value,
            "environment": dict(self.environment.facts),
            "flags": list(self.flags),
            "artifacts": dict(self.artifacts),
            "resources": {name: used.to_json() for name, used in self.resources.items()},
            "clocks": {**vars(self.clocks), "throttle": list(self.clocks.throttle)},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when a field is missing, unknown or of the wrong type.
        """
        try:
            values = dict(data)
            clocks = dict(values.pop("clocks", {}))
            clocks["throttle"] = tuple(clocks.get("throttle", ()))
            return cls(
                problem=problem_from_json(values.pop("problem")),
                config=Config.from_json(values.pop("config")),
                gpu=Gpu(**values.pop("gpu")),
                regime=Regime.parse(values.pop("regime")),
                status=Status(values.pop("status")),
                provenance=Provenance(values.pop("provenance", "measured")),
                environment=Environment(values.pop("environment", {})),
                flags=tuple(values.pop("flags", ())),
                resources={k: Resources(**v) for k, v in values.pop("resources", {}).items()},
                clocks=Clocks(**clocks),
                **values,
            )
        except (KeyError, TypeError, ValueError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"not a measurement: {type(exc).__name__} {exc}") from exc


_EVEN = 0.995
"""Smallest ratio that two decimals show as 1.00."""


TIE = 0.01
"""Largest relative difference of two times that can be a tie."""


def within_noise(ratio: float, one: float, other: float) -> bool:
    """True when two times of a ratio are equal within their noise, at most `TIE`.

    Args:
        ratio: ratio of the two times, in either direction.
        one: standard deviation of the first time, relative to its median.
        other: standard deviation of the second, relative to its median.
    """
    return max(ratio, 1 / ratio) <= 1 + min(TIE, math.hypot(one, other))


def is_tie(one: Measurement, other: Measurement) -> bool:
    """True when two times are equal within their measured noise, at most `TIE`."""
    fast, slow = sorted((latency(one), latency(other)))
    return within_noise(slow / fast, deviation(one), deviation(other))


def deviation(measurement: Measurement) -> float:
    """Standard deviation over the rounds, relative to the median."""
    return (measurement.std_us or 0.0) / latency(measurement)


def latency(measurement: Measurement) -> float:
    """Latency in microseconds; infinite for a measurement that did not pass."""
    return math.inf if measurement.latency_us is None else measurement.latency_us


def versus(own: Measurement, other: Measurement, name: str = "") -> str:
    """Two times of one pass as all outputs show them: ``1.29x cudnn``, ``0.99x cudnn, a tie`` or
    ``0.86x cudnn, slower``; empty where they do not compare.

    Args:
        own: measurement whose speed is stated.
        other: measurement to compare with.
        name: name of the other kernel; empty if a heading has it.
    """
    ratio = own.speedup(other)
    if ratio is None:
        return ""
    return speedup_text(ratio, name, is_tie=is_tie(own, other))


def speedup_text(
    ratio: float, than: str = "", *, is_slower: bool | None = None, is_tie: bool = False
) -> str:
    """A ratio of times as all outputs show it: ``1.29x cudnn``, or ``0.86x cudnn, slower``.

    Args:
        ratio: the other kernel's time over the own one's, as `Measurement.speedup`.
        than: name of the other kernel; empty if a heading has it.
        is_slower: True to call it slower, for callers that know the noise of the two times;
            by default if two decimals show less than 1.
        is_tie: True if the two times are equal within their noise; the text then says so.
    """
    text = f"{ratio:.2f}x {than}".rstrip()
    if is_tie:
        return f"{text}, a tie"
    return f"{text}, slower" if (ratio < _EVEN if is_slower is None else is_slower) else text
