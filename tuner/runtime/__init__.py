"""The functions that a model calls. They read the store and compiled kernels, and tune nothing.

Attention and its operators are loaded here, the other functions at their first use: the import is
part of a program's first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    from tuner.base.install import extra_command

    raise ImportError(
        f"tuner.runtime needs PyTorch ({exc}): `{extra_command('torch')}`", name="torch"
    ) from exc

from tuner.runtime import operators as _operators  # noqa: F401  (defines them)
from tuner.runtime.attention import attention
from tuner.runtime.counters import Stats, stats
from tuner.runtime.enable import disable, enable, enabled

if TYPE_CHECKING:
    from tuner.runtime.activations import quantise
    from tuner.runtime.append import paged_append
    from tuner.runtime.block_mask import prepare_block_mask
    from tuner.runtime.experts import moe
    from tuner.runtime.gated import interleave, swiglu
    from tuner.runtime.grouped import grouped_mm
    from tuner.runtime.layers import linear_problems, restore_linear_, tune_linear_
    from tuner.runtime.paged import paged_attention
    from tuner.runtime.products import linear, matmul
    from tuner.runtime.scaled import scaled_mm
    from tuner.runtime.sparse import sparse_attention
    from tuner.runtime.varlen import attention_varlen

_MODULES = {
    "attention_varlen": "varlen",
    "grouped_mm": "grouped",
    "interleave": "gated",
    "linear": "products",
    "linear_problems": "layers",
    "matmul": "products",
    "moe": "experts",
    "paged_append": "append",
    "paged_attention": "paged",
    "prepare_block_mask": "block_mask",
    "quantise": "activations",
    "restore_linear_": "layers",
    "scaled_mm": "scaled",
    "sparse_attention": "sparse",
    "swiglu": "gated",
    "tune_linear_": "layers",
}

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
    "moe",
    "paged_append",
    "paged_attention",
    "prepare_block_mask",
    "quantise",
    "restore_linear_",
    "scaled_mm",
    "sparse_attention",
    "stats",
    "swiglu",
    "tune_linear_",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tuner.runtime' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"tuner.runtime.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
