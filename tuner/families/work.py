"""Sizes that `Family.work` counts from, by operation, and the ratio of a term's time between two
GPUs.
"""

from __future__ import annotations

from typing import Any

from tuner.families import attention_work, product_work
from tuner.families.tape import larger
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem

Sizes = attention_work.AttentionSizes | product_work.ProductSizes


def kind_of(problem: Problem) -> type[Sizes]:
    """The kind of sizes that a problem has.

    Raises:
        TypeError: for an operation whose work no family counts.
    """
    if isinstance(problem, AttentionProblem):
        return attention_work.AttentionSizes
    if isinstance(problem, GemmProblem | SwigluProblem):
        return product_work.ProductSizes
    raise TypeError(f"no family counts the work of {problem.op}")


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem.

    Raises:
        TypeError: for an operation whose work no family counts.
    """
    kind: Any = kind_of(problem)
    sizes: Sizes = kind.of(problem)
    return sizes


_CONSTANT_TERMS = attention_work.CONSTANT_TERMS | product_work.CONSTANT_TERMS


def time_ratio(term: str, old: Gpu, new: Gpu) -> float:
    """Microseconds of one unit of a work term on a GPU over those on another one of the same
    compute capability, without `memory_gap_us`. By the rates of their tensor cores; amounts count
    the multiprocessors.

    Args:
        term: one of a family's `work_terms`.
        old: GPU that its rate was measured on.
        new: GPU to estimate for.
    """
    name = term.partition(" of ")[0]
    if name in _CONSTANT_TERMS:
        return 1.0
    if name in product_work.CHIP_TERMS:
        return old.peak_tflops / new.peak_tflops
    tensor_rates = old.tensor_flops_per_clock_sm / new.tensor_flops_per_clock_sm
    return tensor_rates * old.clock_max_mhz / new.clock_max_mhz


FASTEST_SHARE = 0.93
"""Largest share of the datasheet's bandwidth at which a product read its weights: 822 MB in
264.5 us on an H100 (25 November 2026)."""
FASTEST_CACHE_SHARES = {"NVIDIA H100 80GB HBM3": 0.935}
"""The same of decoding that read a cold cache, behind `FIRST_BYTES_US`, by GPU."""
FASTEST_CACHE_SHARE = 0.98
"""Share of other GPUs."""
FIRST_BYTES_US = 3.5
"""Least time of decoding until the bytes arrive at that rate. None of 164 problems on an H100 and
of 141 on an H200 took less than 3.6 and 3.9 us more than its bytes (``cache/recordings``)."""


def floor_us(sizes: Any, gpu: Gpu, is_cold: bool) -> Any:
    """Lower bound of a call's microseconds, for a sum of fitted terms that falls below it. It is
    the time for reading a product's weights, or the keys and values of a cold cache. None for other
    calls. May be traced (`tuner.families.tape`).

    Weights are not in L2: those of a model's other layers come between.

    Args:
        sizes: sizes that work is counted from.
        gpu: GPU that reads them.
        is_cold: True if attention's keys and values are not in L2.
    """
    if isinstance(sizes, product_work.ProductSizes):
        return sizes.weights * (1e3 / (FASTEST_SHARE * gpu.memory_gbs))
    if not is_cold:
        return None
    share = FASTEST_CACHE_SHARES.get(gpu.name, FASTEST_CACHE_SHARE)
    return FIRST_BYTES_US + sizes.megabytes * (1e3 / (share * gpu.memory_gbs))


def memory_gap_us(sizes: Any, old: Gpu, new: Gpu, is_warm: bool) -> Any:
    """Microseconds by which a call's bytes pass through one GPU's memory later than through
    another's; negative where earlier. May be traced (`tuner.families.tape`).

    Args:
        sizes: a problem's.
        old: the other one.
        new: the one.
        is_warm: True when inputs are in L2 as far as it holds them.
    """
    return _memory_us(sizes, new, is_warm) - _memory_us(sizes, old, is_warm)


def _memory_us(sizes: Any, gpu: Gpu, is_warm: bool) -> Any:
    megabytes, us = sizes.megabytes, 1e3 / gpu.reached_gbs
    return larger(0.0, megabytes - gpu.l2_bytes / 1e6) * us if is_warm else megabytes * us
