"""`tuner.moe` behind Transformers' experts, by the name that attention has there.

::

    import tuner.runtime.engines.transformers
    model.set_experts_implementation("tuner")

It serves experts of SwiGLU as in Mixtral, Qwen3-MoE, DeepSeek-V3 and GLM-4.5, and fine-grained fp8
with blocks of 128 x 128. Experts with biases and a gate of their own, as GPT-OSS's, are served once
`turn_experts_` has turned weights that lie along the outputs. Transformers' own ``grouped_mm``
answers for all others, and where `tuner.moe` would leave a layer to PyTorch's operations. Each
reason is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import finegrained_fp8
from transformers.integrations import moe as experts

from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK
from tuner.runtime.call import counters
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.products.experts import Layer, OwnGate, answer

_OWN = "grouped_mm"
"""Name of Transformers' function for what is not served."""
_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
#: Attributes of a module of experts, and the values that are served. One that is missing has it.
_SERVED = {"has_gate": True, "has_post_expert_norm": False}
#: The values without a gate or biases of their own.
_PLAIN = {"has_bias": False, "is_concatenated": True}
_PLAIN_FP8 = {
    "has_gate": True,
    "has_bias": False,
    "activation_scheme": "dynamic",
    "limit": None,
    "swiglu_alpha": None,
    "gate_softcap": None,
}


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a layer, of weights in the type of the tokens.

    Args:
        self: module of experts, as Transformers decorates it.
        hidden_states: (T, H).
        top_k_index: (T, top_k); numbers of G and more are experts of other ranks.
        top_k_weights: (T, top_k).
    """
    tensors = hidden_states, top_k_index, top_k_weights
    refusal = _differing(self, _SERVED)
    if refusal is None:
        gate_up, down = _weights(self)
        if not (gate_up.is_contiguous() and down.is_contiguous()):
            refusal = _refused(self, f"weights along the outputs ({__name__}.turn_experts_)")
    if refusal is None:
        layer = Layer(*tensors, gate_up, down, None, None, "zipf", _gate(self))
        if (out := _answer(layer, self)) is not None:
            return out
    return _transformers(experts.ALL_EXPERTS_FUNCTIONS, refusal, self, *tensors)


def turn_experts_(model: torch.nn.Module) -> int:
    """Lay the experts of a model along their inputs, as kernels read them, where they lie along the
    outputs (GPT-OSS). Shapes, values and names stay; only strides change.

    Saving such a model makes contiguous copies first. Turn it before a CUDA graph is captured.

    Args:
        model: changed in place, a weight at a time.

    Returns:
        Number of weights that were turned.
    """
    turned = 0
    for module in model.modules():
        if not getattr(module, "is_transposed", False):
            continue
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name, None)
            if isinstance(weight, torch.nn.Parameter) and weight.dim() == 3:
                if not weight.data.transpose(1, 2).is_contiguous():
                    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
                    turned += 1
    return turned


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both weights, the outputs' dimension before the inputs'."""
    weights = module.gate_up_proj, module.down_proj
    if getattr(module, "is_transposed", False):
        return weights[0].transpose(1, 2), weights[1].transpose(1, 2)
    return weights


def _gate(module: Any) -> OwnGate | None:
    """The layer's own gate and biases; None for SwiGLU without biases."""
    is_default = type(module)._apply_gate is experts._default_apply_gate
    if is_default and not _unlike(module, _PLAIN):
        return None
    has_bias = getattr(module, "has_bias", False)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if has_bias else (None, None)
    return OwnGate(module._apply_gate, *biases)


def fp8_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `experts_forward`, of e4m3 weights with factors of blocks."""
    tensors = hidden_states, top_k_index, top_k_weights
    refusal = _unlike(self, _PLAIN_FP8)
    if refusal is None and tuple(self.block_size or ()) != _BLOCK:
        refusal = _refused(self, f"blocks of {self.block_size}")
    if refusal is None:
        scales = self.gate_up_proj_scale_inv, self.down_proj_scale_inv
        layer = Layer(*tensors, self.gate_up_proj, self.down_proj, *scales, "zipf")
        if (out := _answer(layer, self)) is not None:
            return out
    return _transformers(finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, refusal, self, *tensors)


def _refused(module: Any, detail: str) -> Refusal:
    return Refusal(Kind.EXPERTS, f"{type(module).__name__}: {detail}")


def _unlike(module: Any, plain: dict[str, Any]) -> Refusal | None:
    """Reason why `tuner.moe` does not compute these experts; else None."""
    if refusal := _differing(module, plain):
        return refusal
    activation = type(module.act_fn).__name__
    is_silu = activation in ("SiLU", "SiLUActivation")
    return None if is_silu else _refused(module, f"the activation {activation}")


def _differing(module: Any, plain: dict[str, Any]) -> Refusal | None:
    for name, value in plain.items():
        if (actual := getattr(module, name, value)) != value:
            return _refused(module, f"{name}={actual}")
    return None


def _answer(layer: Layer, module: Any) -> torch.Tensor | None:
    """The output by own kernels; None, and a counted reason, where there are none."""
    try:
        return answer(layer)
    except ConfigError as exc:
        _count(_refused(module, str(exc)))
        return None


def _count(refusal: Refusal) -> None:
    if not torch.compiler.is_compiling():
        counters.count_fallback(refusal.reason, by="Transformers")


def _transformers(
    functions: Any, refusal: Refusal | None, module: Any, *tensors: torch.Tensor
) -> torch.Tensor:
    if refusal is not None:
        _count(refusal)
    out: torch.Tensor = functions[_OWN](module, *tensors)
    return out


def register(name: str) -> None:
    """Make the functions known to Transformers."""
    experts.ExpertsInterface.register(name, experts_forward)
    finegrained_fp8.FP8ExpertsInterface.register(name, fp8_experts_forward)
