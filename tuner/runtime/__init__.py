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

from tuner.runtime import former_paths as _former_paths  # noqa: F401  (lets Python find them)
from tuner.runtime.attention import operators as _operators  # noqa: F401  (defines them)
from tuner.runtime.attention.dense import attention
from tuner.runtime.call.counters import Stats, stats
from tuner.runtime.call.invariance import deterministic
from tuner.runtime.enable import disable, enable, enabled

if TYPE_CHECKING:
    from tuner.runtime.attention.append import paged_append
    from tuner.runtime.attention.block_mask import prepare_block_mask
    from tuner.runtime.attention.mla import mla_decode
    from tuner.runtime.attention.paged import paged_attention
    from tuner.runtime.attention.sparse import sparse_attention
    from tuner.runtime.attention.varlen import attention_varlen
    from tuner.runtime.layers import linear_problems, restore_linear_, tune_linear_
    from tuner.runtime.preparing import prepare
    from tuner.runtime.products.activations import quantise
    from tuner.runtime.products.experts import moe
    from tuner.runtime.products.gated import interleave, swiglu
    from tuner.runtime.products.grouped import grouped_mm
    from tuner.runtime.products.matmul import linear, matmul
    from tuner.runtime.products.scaled import scaled_mm

_MODULES = {
    "attention_varlen": "attention.varlen",
    "grouped_mm": "products.grouped",
    "interleave": "products.gated",
    "linear": "products.matmul",
    "linear_problems": "layers",
    "matmul": "products.matmul",
    "mla_decode": "attention.mla",
    "moe": "products.experts",
    "paged_append": "attention.append",
    "paged_attention": "attention.paged",
    "prepare": "preparing",
    "prepare_block_mask": "attention.block_mask",
    "quantise": "products.activations",
    "restore_linear_": "layers",
    "scaled_mm": "products.scaled",
    "sparse_attention": "attention.sparse",
    "swiglu": "products.gated",
    "tune_linear_": "layers",
}

__all__ = [
    "Stats",
    "attention",
    "attention_varlen",
    "deterministic",
    "disable",
    "enable",
    "enabled",
    "grouped_mm",
    "interleave",
    "linear",
    "linear_problems",
    "matmul",
    "mla_decode",
    "moe",
    "paged_append",
    "paged_attention",
    "prepare",
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
