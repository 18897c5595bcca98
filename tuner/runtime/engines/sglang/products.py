"""The methods of SGLang's quantisation ``tuner``: each asks for own kernels, then its base's.

They change nothing about weights. A call that is not served is SGLang's own, and its reason is
counted (`tuner.stats`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import (
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.runtime_context import get_forward

from tuner import settings
from tuner.runtime.call.refusal import Refusal
from tuner.runtime.engines.products import (
    BLOCK,
    count,
    experts,
    plain,
    refused,
    unscaled,
)
from tuner.runtime.parallel import distributed
from tuner.runtime.products.matmul import linear

_ENGINE = "SGLang"
_PLAIN_RUNNER = "TRITON"
"""SGLang's kernels of experts that leave the weights as they are loaded."""
_OF_GATE = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
_OF_ROUTER = ("apply_router_weight_on_input", "no_combine", "no_combine_keep_router_weight")


def method_of(layer: torch.nn.Module) -> Any:
    """The method of a layer in bf16; None where SGLang's own has no other."""
    distributed.agree_in_engine()
    if isinstance(layer, LinearBase):
        return SglangLinearMethod()
    if isinstance(layer, FusedMoE):
        return SglangExpertsMethod(
            layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe, layer.use_deep_gemm
        )
    return None


class SglangFp8Config(Fp8Config):  # type: ignore[misc]
    """Config of an fp8 checkpoint. Layers without factors of blocks keep SGLang's methods.

    Its name stays SGLang's, which models ask for.
    """

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        distributed.agree_in_engine()
        own = super().get_quant_method(layer, prefix)
        if type(own) in (UnquantizedLinearMethod, UnquantizedFusedMoEMethod):
            return method_of(layer)
        if self.weight_block_size != BLOCK or self.use_mxfp8:
            return own
        if type(own) is Fp8LinearMethod:
            return SglangFp8LinearMethod(self)
        return SglangFp8ExpertsMethod(self) if type(own) is Fp8MoEMethod else own


class SglangLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """`tuner.linear` over weights of bf16; in a compiled graph SGLang's own."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(..., K) to (..., N)."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = super().apply(layer, x, bias)
            return out
        return linear(x, plain(layer.weight), bias)


class SglangFp8LinearMethod(Fp8LinearMethod):  # type: ignore[misc]
    """`tuner.linear` over e4m3 weights with factors of blocks, where kernels are proven.

    SGLang's own answers in a compiled graph, and rows that a normalisation has quantised before.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """As SGLang does it; then look for kernels, once a layer."""
        super().process_weights_after_loading(layer)
        refusal = refused(layer, "Marlin's layout") if self.use_marlin else unscaled(layer)
        if refusal is not None:
            count(refusal, _ENGINE)
        layer.tuner_serves = refusal is None

    def apply(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(..., K) to (..., N)."""
        is_own = torch.compiler.is_compiling() or settings.disabled() or isinstance(x, tuple)
        if is_own or not layer.tuner_serves:
            out: torch.Tensor = super().apply(layer, x, bias)
            return out
        scale = plain(layer.weight_scale_inv)
        return linear(x, plain(layer.weight), bias, weight_scale=scale)


class SglangExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """`tuner.moe` over weights of bf16."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        out = _experts(self, layer, dispatch_output, (None, None))
        return super().apply(layer, dispatch_output) if out is None else out


class SglangFp8ExpertsMethod(Fp8MoEMethod):  # type: ignore[misc]
    """`tuner.moe` over e4m3 weights with factors of blocks."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        out = _experts(self, layer, dispatch_output, scales)
        return super().apply(layer, dispatch_output) if out is None else out


def _experts(method: Any, layer: Any, dispatched: Any, scales: Any) -> Any:
    """SGLang's result of a layer by own kernels; None, and a counted reason, where it answers."""
    if torch.compiler.is_compiling():
        return None
    if refusal := _unlike(method, layer, dispatched):
        count(refusal, _ENGINE)
        return None
    topk = dispatched.topk_output
    rows = dispatched.hidden_states
    out = experts(layer, rows, scales, topk.topk_ids, topk.topk_weights, _ENGINE)
    return None if out is None else StandardCombineInput(hidden_states=out)


def _unlike(method: Any, layer: Any, dispatched: Any) -> Refusal | None:
    """Reason why a layer is not `tuner.moe`'s; else None."""
    backend, config = method.get_moe_runner_backend(layer), method.moe_runner_config
    if getattr(backend, "name", None) != _PLAIN_RUNNER:
        return refused(
            layer, f"the runner {backend} (--moe-runner-backend triton leaves weights as loaded)"
        )
    if not (dispatched.format.is_standard() and dispatched.topk_output.format.is_standard()):
        return refused(layer, "rows that are exchanged between ranks")
    if config.activation != "silu" or not config.is_gated:
        return refused(layer, f"the activation {config.activation}")
    if names := [name for name in _OF_GATE if getattr(config, name) is not None]:
        return refused(layer, ", ".join(names))
    if names := [name for name in _OF_ROUTER if getattr(config, name)]:
        return refused(layer, ", ".join(names))
    if config.routed_scaling_factor not in (None, 1.0):
        return refused(layer, f"routed_scaling_factor={config.routed_scaling_factor}")
    if any(
        getattr(layer, name, None) is not None for name in ("w13_weight_bias", "w2_weight_bias")
    ):
        return refused(layer, "biases")
    if getattr(method, "w13_swiglu_interleaved", False):
        return refused(layer, "gate and up interleaved")
    if get_forward().moe_output_buffer is not None:
        return refused(layer, "an output that SGLang has allocated")
    return None
