"""Layers that `tuner.linear` and `tuner.moe` can take, as both engines' quantisations ask."""

from __future__ import annotations

from typing import Any

import torch

from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK
from tuner.runtime.call import counters, invariance, serving
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.products import quantiser
from tuner.runtime.products.experts import Layer, answer
from tuner.runtime.products.scaled import ScaledCall

BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
"""Weights that share a factor, as checkpoints name them."""
MIN_CAPABILITY = 90
_ROWS = (1, 16, 64, 256, 2048)
"""Rows for which a layer must have proven kernels before it is taken over."""


def refused(layer: Any, detail: str) -> Refusal:
    """A layer that the engine computes itself."""
    return Refusal(Kind.EXPERTS, f"{type(layer).__name__}: {detail}")


def plain(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor of an engine's parameter, whose class belongs to the loader: calls refuse it."""
    return parameter.data


def unscaled(layer: Any) -> Refusal | None:
    """Reason why products with a layer's e4m3 weights are not the tuner's; else None."""
    weight, scale = layer.weight, layer.weight_scale_inv
    rows, columns = weight.shape
    blocks = -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
    is_e4m3 = weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    if not (is_e4m3 and weight.is_contiguous() and tuple(scale.shape) == blocks):
        return refused(layer, "weights in another layout")
    reason = unproven(weight, scale)
    return refused(layer, reason) if reason else None


def unproven(weight: torch.Tensor, scale: torch.Tensor) -> str:
    """Reason why products with e4m3 weights lack a kernel for some rows; empty when none does.

    Args:
        weight: (N, K); its values are not read.
        scale: fp32, a factor for each block.
    """
    columns = weight.shape[1]
    for count in _ROWS:
        a = weight.new_empty(count, columns)
        factors = quantiser.empty_factors(count, columns, weight.device)
        arguments = a, weight.t(), factors, scale.t(), None, None, torch.bfloat16, True
        if isinstance(plan := serving.find(ScaledCall(*arguments)), Refusal):
            return plan.reason
    return ""


def experts(
    layer: Any,
    x: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ids: torch.Tensor,
    weights: torch.Tensor,
    engine: str,
) -> torch.Tensor | None:
    """A layer's experts by own kernels; None, and a counted reason, where the engine must answer.

    Args:
        layer: has `w13_weight` (G, 2 I, H) and `w2_weight` (G, H, I).
        x: (T, H).
        scales: factors of both weights' blocks, or None for each.
        ids: (T, top_k), each token's experts; others than 0 to G - 1 add nothing.
        weights: (T, top_k).
        engine: the one that answers otherwise.
    """
    ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.int()
    layer_call = Layer(x, ids, weights, layer.w13_weight, layer.w2_weight, *scales, "zipf")
    try:
        return answer(layer_call)
    except ConfigError as exc:
        count(refused(layer, str(exc)), engine)
        return None


def count(refusal: Refusal, engine: str) -> None:
    """Count a layer or call that an engine answers itself.

    Raises:
        NotInvariantError: in the mode of `tuner.deterministic`.
    """
    invariance.forbid(refusal.reason)
    if not torch.compiler.is_compiling():
        counters.count_fallback(refusal.reason, by=engine)
