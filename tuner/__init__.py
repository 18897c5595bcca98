"""An autotuner for CUTLASS kernels on Hopper GPUs, and the runtime that uses what it found.

The names below resolve when first used: ``import tuner`` loads nothing heavier than the standard
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.config import Config as Config
    from tuner.errors import BenchmarkError as BenchmarkError
    from tuner.errors import CompileError as CompileError
    from tuner.errors import ConfigError as ConfigError
    from tuner.errors import NotInvariantError as NotInvariantError
    from tuner.errors import NoValidConfigError as NoValidConfigError
    from tuner.errors import RenderError as RenderError
    from tuner.errors import StoreError as StoreError
    from tuner.errors import TunerError as TunerError
    from tuner.hardware import Gpu as Gpu
    from tuner.measurement import Measurement as Measurement
    from tuner.measurement import Provenance as Provenance
    from tuner.measurement import Regime as Regime
    from tuner.measurement import Status as Status
    from tuner.problem import AttentionBackwardProblem as AttentionBackwardProblem
    from tuner.problem import AttentionProblem as AttentionProblem
    from tuner.problem import GemmProblem as GemmProblem
    from tuner.problem import GroupedGemmProblem as GroupedGemmProblem
    from tuner.problem import SoftmaxProblem as SoftmaxProblem
    from tuner.problem import SwigluProblem as SwigluProblem
    from tuner.runtime.attention.append import paged_append as paged_append
    from tuner.runtime.attention.block_mask import prepare_block_mask as prepare_block_mask
    from tuner.runtime.attention.dense import attention as attention
    from tuner.runtime.attention.mla import mla_decode as mla_decode
    from tuner.runtime.attention.paged import paged_attention as paged_attention
    from tuner.runtime.attention.sparse import sparse_attention as sparse_attention
    from tuner.runtime.attention.varlen import attention_varlen as attention_varlen
    from tuner.runtime.call.counters import stats as stats
    from tuner.runtime.call.invariance import deterministic as deterministic
    from tuner.runtime.enable import disable as disable
    from tuner.runtime.enable import enable as enable
    from tuner.runtime.enable import enabled as enabled
    from tuner.runtime.layers import linear_problems as linear_problems
    from tuner.runtime.layers import restore_linear_ as restore_linear_
    from tuner.runtime.layers import tune_linear_ as tune_linear_
    from tuner.runtime.preparing import prepare as prepare
    from tuner.runtime.products.activations import quantise as quantise
    from tuner.runtime.products.experts import moe as moe
    from tuner.runtime.products.gated import interleave as interleave
    from tuner.runtime.products.gated import swiglu as swiglu
    from tuner.runtime.products.grouped import grouped_mm as grouped_mm
    from tuner.runtime.products.matmul import linear as linear
    from tuner.runtime.products.matmul import matmul as matmul
    from tuner.runtime.products.scaled import scaled_mm as scaled_mm
    from tuner.selection.reader import Entry as Entry
    from tuner.selection.reader import LookupResult as LookupResult
    from tuner.selection.reader import lookup as lookup
    from tuner.tuning.sweep import sweep as sweep

__version__ = "0.1.0"

_MODULES = {
    "AttentionBackwardProblem": "tuner.problem",
    "AttentionProblem": "tuner.problem",
    "BenchmarkError": "tuner.errors",
    "CompileError": "tuner.errors",
    "Config": "tuner.config",
    "ConfigError": "tuner.errors",
    "Entry": "tuner.selection.reader",
    "GemmProblem": "tuner.problem",
    "Gpu": "tuner.hardware",
    "GroupedGemmProblem": "tuner.problem",
    "LookupResult": "tuner.selection.reader",
    "Measurement": "tuner.measurement",
    "NotInvariantError": "tuner.errors",
    "NoValidConfigError": "tuner.errors",
    "Provenance": "tuner.measurement",
    "Regime": "tuner.measurement",
    "RenderError": "tuner.errors",
    "SoftmaxProblem": "tuner.problem",
    "Status": "tuner.measurement",
    "StoreError": "tuner.errors",
    "SwigluProblem": "tuner.problem",
    "TunerError": "tuner.errors",
    "attention": "tuner.runtime",
    "attention_varlen": "tuner.runtime",
    "deterministic": "tuner.runtime",
    "disable": "tuner.runtime",
    "enable": "tuner.runtime",
    "enabled": "tuner.runtime",
    "grouped_mm": "tuner.runtime",
    "interleave": "tuner.runtime",
    "linear": "tuner.runtime",
    "linear_problems": "tuner.runtime",
    "lookup": "tuner.selection.reader",
    "matmul": "tuner.runtime",
    "mla_decode": "tuner.runtime",
    "moe": "tuner.runtime",
    "quantise": "tuner.runtime",
    "paged_append": "tuner.runtime",
    "paged_attention": "tuner.runtime",
    "prepare": "tuner.runtime",
    "prepare_block_mask": "tuner.runtime",
    "restore_linear_": "tuner.runtime",
    "scaled_mm": "tuner.runtime",
    "sparse_attention": "tuner.runtime",
    "stats": "tuner.runtime",
    "sweep": "tuner.tuning.sweep",
    "swiglu": "tuner.runtime",
    "tune_linear_": "tuner.runtime",
}

__all__ = ["__version__", *_MODULES]


_FORMER = {"Answer": "LookupResult"}
"""Former names that still work."""


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module 'tuner' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    except ImportError as exc:
        raise ImportError(f"tuner.{name}: {exc}", name=exc.name) from exc
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
