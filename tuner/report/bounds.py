"""Bounds of a call's time by the work of its kernels (`Family.chip_work`).

Reports show only the measurements of families that do not count it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config import Config
from tuner.families import find
from tuner.families.chip_work import Work, total
from tuner.hardware import EXP_PER_CLOCK_SM, GRAPH_LAUNCH_US, Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem, SoftmaxProblem

__all__ = [
    "EXPONENTIAL", "L2", "LAUNCH", "MEMORY", "TENSOR", "Work",
    "floors", "l2_bytes_per_us", "memory_bytes", "total", "works",
]  # fmt: skip

#: Bytes that one multiprocessor takes from the L2 a clock [Jia et al., "Dissecting the NVIDIA Volta
#: GPU Architecture via Microbenchmarking", L2 to L1; taken for Hopper]. The L2 of an A100 reads
#: 5120 bytes a clock [its whitepaper]. That does not bound products: one read answers all
#: neighbours that ask for the same line, and recorded products took up to 11.2 TB/s. The highest
#: clock counts: the L2's own does not fall with the multiprocessors' under a power limit.
L2_BYTES_PER_CLOCK_SM = 64
TENSOR, EXPONENTIAL, L2, MEMORY, LAUNCH = (
    "tensor cores",
    "special-function units",
    "L2 cache",
    "memory",
    "launching",
)


def works(problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    """The kernels of a call in order. Empty for a family that does not count them, and for a config
    of another version that lacks a parameter.
    """
    member = find(config.family)
    try:
        return member.chip_work(problem, config, gpu) if member else ()
    except KeyError:
        return ()


def floors(
    measurement: Measurement, gpu: Gpu, found: Sequence[Work], clock_mhz: int
) -> dict[str, float]:
    """Lower bound of each unit's busy time in microseconds, by name.

    The units can work at the same time, so the largest bound limits the call, and their sum has no
    meaning. Without `found` (a vendor's kernel) the problem's own work is used.

    Args:
        measurement: measurement of the call.
        gpu: GPU that it runs on.
        found: result of `works` for its config.
        clock_mhz: clock of the multiprocessors.
    """
    problem = measurement.problem
    clocks = gpu.sm_count * clock_mhz
    least = 0.0 if isinstance(problem, SoftmaxProblem) else float(problem.flops)
    flops = total(found, "tensor_flops") if found else least
    exponentials = total(found, "exponentials") if found else _least_exponentials(problem)
    moved = total(found, "l2_bytes") if found else problem.bytes
    launches = sum(work.launches for work in found) or 1
    return {
        TENSOR: flops / (gpu.tensor_flops_per_clock_sm * problem.tensor_rate * clocks),
        EXPONENTIAL: exponentials / (EXP_PER_CLOCK_SM * clocks),
        L2: moved / l2_bytes_per_us(gpu),
        MEMORY: memory_bytes(problem, gpu, measurement.regime) / (gpu.memory_gbs * 1e3),
        LAUNCH: launches * GRAPH_LAUNCH_US,
    }


def l2_bytes_per_us(gpu: Gpu) -> float:
    """Maximum bytes a microsecond from the L2 to the multiprocessors."""
    return L2_BYTES_PER_CLOCK_SM * gpu.sm_count * float(gpu.clock_max_mhz)


def memory_bytes(problem: Problem, gpu: Gpu, regime: Regime) -> int:
    """Bytes that must cross the memory bus: all operands, or the part that the L2 cannot hold."""
    return problem.bytes if regime.l2 == "cold" else max(0, problem.bytes - gpu.l2_bytes)


def _least_exponentials(problem: Problem) -> float:
    if isinstance(problem, AttentionProblem):
        return problem.flops / (4 * problem.head_dim)
    return problem.flops / 5 if isinstance(problem, SoftmaxProblem) else 0.0
