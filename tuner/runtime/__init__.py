"""The functions that a model calls. They read the store and compiled kernels, and tune nothing."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    from tuner.base.install import extra_command

    raise ImportError(
        f"tuner.runtime needs PyTorch ({exc}): `{extra_command('torch')}`", name="torch"
    ) from exc

from tuner.runtime import operators as _operators  # noqa: F401  (defines them)
from tuner.runtime.attention import attention
from tuner.runtime.block_mask import prepare_block_mask
from tuner.runtime.counters import Stats, stats
from tuner.runtime.enable import disable, enable, enabled
from tuner.runtime.grouped import grouped_mm
from tuner.runtime.layers import linear_problems, restore_linear_, tune_linear_
from tuner.runtime.paged import paged_attention
from tuner.runtime.products import interleave, linear, matmul, scaled_mm, swiglu
from tuner.runtime.sparse import sparse_attention
from tuner.runtime.varlen import attention_varlen

__all__ = [
    "Stats",
    "attention",
    "attention_varlen",
    "disable",
    "enable",
    "enabled",
    "grouped_mm",
    "interleave",
    "linear",
    "linear_problems",
    "matmul",
    "paged_attention",
    "prepare_block_mask",
    "restore_linear_",
    "scaled_mm",
    "sparse_attention",
    "stats",
    "swiglu",
    "tune_linear_",
]
