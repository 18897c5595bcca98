"""Measurements for tests of the store."""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Regime,
    Resources,
    Status,
)
from tuner.problem import AttentionProblem, Problem

H200, H100 = GPUS["H200"], GPUS["H100"]
WARM = Regime("stream", "warm")
PROBLEM = AttentionProblem(1024, 1024, 64)
OTHER = AttentionProblem(1024, 1024, 64, is_causal=True)
OWN = Config("cutlass_fmha", {"tile_m": 128, "kernel_schedule": "KernelTma"})
SLOWER = Config("cutlass_fmha", {"tile_m": 64, "kernel_schedule": "KernelTma"})
CUDNN = Config("vendor_sdpa", {"backend": "cudnn"})


def final(config: Config, us: float, problem: Problem = PROBLEM, /, **changes: Any) -> Measurement:
    """A time of a final pass on an H200, in the regime of the problem's operation."""
    regime = Regime.default(problem.op)
    base = Measurement(problem, config, H200, regime, Status.OK, latency_us=us, is_final=True)
    return base.but(**{"std_us": 0.1, "rounds": 20, **changes})


def measured(config: Config = OWN, latency_us: float = 13.0, **changes: Any) -> Measurement:
    return final(
        config,
        latency_us,
        **{
            "environment": Environment({"driver": "580.159", "cuda": 13.0, "power_limit_w": 700}),
            "error": 2.7e-4,
            "artifacts": {}
            if config.family.startswith("vendor_")
            else {"main": "0123456789abcdef" * 2},
            **changes,
        },
    )


def failed(config: Config = OWN, **changes: Any) -> Measurement:
    failure = {"status": Status.TIMEOUT, "latency_us": None, "std_us": None, "log": "hung\n"}
    return measured(config, is_final=False, artifacts={}, **{**failure, **changes})


def full() -> Measurement:
    """Every field away from its default."""
    return measured(
        Config("three_kernel_attention", {"pdl": True}, {"qk": Config("gemm", {"tile_m": 64})}),
        flags=("noisy", "throttled"),
        workspace_bytes=2**40,
        resources={"qk": Resources(168, 4, 8, 16, 1024)},
        compile_cpu_s=23.5,
        clocks=Clocks(1755, 3201, 61, 689.5, ("sw_power_cap",)),
        log="zwei Zeilen\nµs",
        sweep="abc",
        created_at="2026-10-01T12:00:00.000+00:00",
    )
