"""Linear layers of Transformers' fine-grained fp8, as `tune_linear_` replaces them."""

from __future__ import annotations

import torch
from transformers.integrations.finegrained_fp8 import FP8Linear

from tuner.problem import SCALE_BLOCK
from tuner.runtime.products.matmul import linear

_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)


class TunedFP8Linear(FP8Linear):  # type: ignore[misc]  # Transformers is skipped
    """An `FP8Linear` that calls `tuner.linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), as `FP8Linear`, whose own forward computes other types than bf16
        and graphs of `torch.compile`.
        """
        if input.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            out: torch.Tensor = super().forward(input)
            return out
        return linear(input, self.weight, self.bias, weight_scale=self.weight_scale_inv)


def unserved(module: FP8Linear) -> str:
    """Reason why `tuner.linear` does not serve a layer; empty when it does."""
    if tuple(module.block_size or ()) != _BLOCK:
        return f"its factors are of blocks of {module.block_size}, not {_BLOCK}"
    if module.activation_scheme != "dynamic":
        return f"its activations are quantised by a {module.activation_scheme} scheme"
    types = module.weight.dtype, module.weight_scale_inv.dtype
    if types != (torch.float8_e4m3fn, torch.float32):
        return f"its weights and factors are {types[0]} and {types[1]}"
    return ""
