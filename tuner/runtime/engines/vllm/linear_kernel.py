"""vLLM's list of kernels for linear layers over e4m3 weights with factors of blocks.

``TUNER_VLLM_LINEAR=1`` puts this kernel before vLLM's own, for all checkpoints that vLLM multiplies
so, those of compressed-tensors among them. ``register_linear_kernel`` would put it behind them. A
layer without proven kernels is vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from tuner.problem import SCALE_BLOCK
from tuner.runtime.engines.products import BLOCK, MIN_CAPABILITY, unproven
from tuner.runtime.engines.vllm.operator import scaled_linear
from tuner.runtime.parallel import distributed


class TunerFp8BlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]  # vLLM is skipped
    """`tuner.linear` over weights as they are loaded; it quantises the activations itself."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if compute_capability == MIN_CAPABILITY:
            return True, None
        return False, "needs a GPU of compute capability 9.0"

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        is_possible, reason = super().can_implement(config)
        if not is_possible:
            return False, reason
        types = {config.input_dtype, config.out_dtype}
        if types != {torch.bfloat16}:
            return False, f"takes bfloat16, not {types}"
        if list(config.weight_quant_key.scale.group_shape) != BLOCK:
            return False, f"takes factors of {SCALE_BLOCK} x {SCALE_BLOCK} weights"
        distributed.agree_in_engine()
        rows, columns = config.weight_shape
        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        blocks = -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
        reason = unproven(weight, weight.new_empty(blocks, dtype=torch.float32))
        return not reason, reason or None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """As vLLM does it, with factors in fp32."""
        super().process_weights_after_loading(layer)
        name, scale = _factors(layer)
        if scale.dtype != torch.float32:
            replace_parameter(layer, name, scale.float())

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """(..., K) to (..., N)."""
        return scaled_linear(x, layer.weight, _factors(layer)[1], bias)

    def apply_block_scaled_mm(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse: vLLM's base class asks for it, and `apply_weights` is the whole product."""
        raise TypeError("apply_weights computes the product; vLLM called apply_block_scaled_mm")


def _factors(layer: torch.nn.Module) -> tuple[str, torch.Tensor]:
    """Name and factors of a layer's weights: as of fp8 checkpoints, or of compressed-tensors."""
    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    return name, getattr(layer, name)


def register() -> None:
    """Put the kernel before vLLM's own, once."""
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    if TunerFp8BlockKernel not in kernels:
        kernels.insert(0, TunerFp8BlockKernel)
