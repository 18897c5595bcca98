"""An operator for vLLM's compiled graphs: products with e4m3 weights and factors of blocks."""

from __future__ import annotations

import torch

from tuner.runtime.engines.products import plain
from tuner.runtime.products.matmul import linear

_library = torch.library.Library("tuner_vllm", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")


def _scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return linear(x, plain(weight), bias, weight_scale=plain(scale))


def _scaled_linear_shape(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_library.impl("linear", _scaled_linear, "CUDA")
torch.library.register_fake("tuner_vllm::linear", _scaled_linear_shape, lib=_library)


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """(..., K) in bf16 to (..., N); see `tuner.linear`."""
    out: torch.Tensor = torch.ops.tuner_vllm.linear(x, weight, scale, bias)
    return out
