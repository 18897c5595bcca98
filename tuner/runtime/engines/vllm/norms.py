"""vLLM's RMS norms in its batch-invariant mode.

From 256 rows on vLLM 0.26 adds up a row's squares in another order, also in that mode. The blocks
of its kernel have 1024 threads below, and 256 from there on.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNorm

from tuner import settings
from tuner.runtime.engines.norms import add_and_normalise, fits

NAME = RMSNorm.__name__


class TunerRMSNorm(RMSNorm):  # type: ignore[misc]  # vLLM is skipped
    """Norms of sums with a residual by `add_and_normalise`; others are vLLM's."""

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As vLLM has it: the norms, or norms and sums."""
        is_whole = self.variance_size_override is None and self.has_weight
        if residual is None or not is_whole or torch.compiler.is_compiling() or settings.disabled():
            return super().forward_cuda(x, residual)
        weight = self.weight.data
        if not fits(x, residual, weight):
            return super().forward_cuda(x, residual)
        add_and_normalise(x, residual, weight, self.variance_epsilon)
        return x, residual


def register() -> None:
    """Put the norm in the place of vLLM's, once, unless another package has done so."""
    if NAME not in custom_op.op_registry_oot:
        RMSNorm.register_oot(TunerRMSNorm)
        TunerRMSNorm.name = RMSNorm.name  # by which options turn it on
