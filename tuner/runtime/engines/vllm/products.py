"""The methods of vLLM's quantisation ``tuner``: each asks for own kernels, then its base's.

They change nothing about weights. A call that is not served is vLLM's own, and its reason is
counted (`tuner.stats`). In vLLM's compiled graphs the experts and products with factors of blocks
are operators of their own; products of bf16 weights are the compiler's there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from tuner import settings
from tuner.runtime.call import invariance
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.engines.products import BLOCK, count, experts, plain, refused, unscaled
from tuner.runtime.engines.vllm.operator import scaled_linear
from tuner.runtime.parallel import distributed
from tuner.runtime.products.matmul import linear

_ENGINE = "vLLM"
_PLAIN_BACKEND = "TRITON"
"""vLLM's kernels of experts that leave the weights as they are loaded."""
_GATE_LIMITS = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")


def method_of(layer: torch.nn.Module) -> Any:
    """The method of a layer in bf16; None where vLLM's own has no other."""
    distributed.agree_in_engine()
    if isinstance(layer, LinearBase):
        return TunerLinearMethod()
    if isinstance(layer, RoutedExperts):
        return TunerExpertsMethod(layer.moe_config)
    if isinstance(layer, ParallelLMHead) and invariance.is_on():
        return TunerHeadMethod()
    return None


class TunerFp8Config(Fp8Config):  # type: ignore[misc]  # vLLM is skipped
    """Config of an fp8 checkpoint. Layers without factors of blocks keep vLLM's methods."""

    name = ""

    def get_name(self) -> str:
        return self.name

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        distributed.agree_in_engine()
        found = super().get_quant_method(layer, prefix)
        if type(found) in (type(None), UnquantizedLinearMethod, UnquantizedFusedMoEMethod):
            return method_of(layer)
        if self.weight_block_size != BLOCK:
            return found
        if type(found) is Fp8LinearMethod:
            method = TunerFp8LinearMethod(self)
            method.marlin_input_dtype = found.marlin_input_dtype
            return method
        return TunerFp8ExpertsMethod(self, layer) if type(found) is Fp8MoEMethod else found


class _ByLinear:
    """`tuner.linear` over a layer's weights; in a compiled graph the method of the next base."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(..., K) to (..., N)."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = super().apply(layer, x, bias)  # type: ignore[misc]
            return out
        return linear(x, plain(layer.weight), bias)


class TunerLinearMethod(_ByLinear, UnquantizedLinearMethod):  # type: ignore[misc]
    """Linear layers in bf16."""


class TunerHeadMethod(_ByLinear, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Logits in the batch-invariant mode, where vLLM's own kernel is one of Triton."""


class TunerFp8LinearMethod(Fp8LinearMethod):  # type: ignore[misc]
    """`tuner.linear` over e4m3 weights with factors of blocks, where kernels are proven."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """As vLLM does it; then look for kernels, once a layer."""
        super().process_weights_after_loading(layer)
        refusal = unscaled(layer)
        if refusal is not None:
            count(refusal, _ENGINE)
        layer.tuner_serves = refusal is None

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(..., K) to (..., N)."""
        is_off = not torch.compiler.is_compiling() and settings.disabled()
        if is_off or not layer.tuner_serves:
            out: torch.Tensor = super().apply(layer, x, bias)
            return out
        return scaled_linear(x, layer.weight, layer.weight_scale_inv, bias)


class TunerExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """`tuner.moe` over weights of bf16."""

    def apply(self, layer: Any, x: torch.Tensor, *tensors: Any, **named: Any) -> torch.Tensor:
        """(T, H) to (T, H)."""
        output = _experts(self, self.unquantized_backend, layer, x, (None, None), *tensors, **named)
        out: torch.Tensor = super().apply(layer, x, *tensors, **named) if output is None else output
        return out


class TunerFp8ExpertsMethod(Fp8MoEMethod):  # type: ignore[misc]
    """`tuner.moe` over e4m3 weights with factors of blocks."""

    def apply(self, layer: Any, x: torch.Tensor, *tensors: Any, **named: Any) -> torch.Tensor:
        """(T, H) to (T, H)."""
        scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        output = _experts(self, self.fp8_backend, layer, x, scales, *tensors, **named)
        out: torch.Tensor = super().apply(layer, x, *tensors, **named) if output is None else output
        return out


def _experts(
    method: Any,
    backend: Any,
    layer: Any,
    x: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *shared: Any,
    **also: Any,
) -> torch.Tensor | None:
    """The experts by own kernels; None, and a counted reason, where vLLM must answer.

    vLLM computes shared experts outside of this method, since layers that exchange rows between
    ranks are refused.
    """
    if refusal := _unlike(method, backend, layer):
        count(refusal, _ENGINE)
        return None
    if layer.expert_map is not None:  # of this rank, or -1
        topk_ids = layer.expert_map[topk_ids.long()]
    return experts(layer, x, scales, topk_ids, topk_weights, _ENGINE)


def _unlike(method: Any, backend: Any, layer: Any) -> Refusal | None:
    """Reason why a layer is not `tuner.moe`'s; else None."""
    if backend.name != _PLAIN_BACKEND:
        return refused(
            layer,
            f"weights as {backend.name} has them (moe_backend='triton' leaves them as loaded)",
        )
    if method.moe.has_bias:
        return refused(layer, "biases")
    if layer.activation.name != "SILU":
        return refused(layer, f"the activation {layer.activation.name}")
    if limits := [name for name in _GATE_LIMITS if getattr(layer, name, None) is not None]:
        return refused(layer, ", ".join(limits))
    if layer.apply_router_weight_on_input:
        return refused(layer, "the router's weights at the input")
    if method.moe.moe_parallel_config.use_all2all_kernels:
        return refused(layer, "experts of several ranks")
    return None
