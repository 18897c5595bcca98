"""`tuner.moe` behind Transformers' experts, by the name that attention has there.

::

    import tuner.runtime.transformers
    model.set_experts_implementation("tuner")

It serves experts of SwiGLU as in Mixtral, Qwen3-MoE, DeepSeek-V3 and GLM-4.5, and fine-grained fp8
with blocks of 128 x 128. Transformers' own ``grouped_mm`` answers for all others, and where
`tuner.moe` would leave a layer to PyTorch's operations. Each reason is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import finegrained_fp8
from transformers.integrations import moe as experts

from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK
from tuner.runtime import counters
from tuner.runtime.experts import Layer, answer
from tuner.runtime.refusal import Kind, Refusal

_OWN = "grouped_mm"
"""Name of Transformers' function for what is not served."""
_BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
#: Attributes of a module of experts, and the values that are served. One that is missing has it.
_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
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
    reason = _unlike(self, _PLAIN)
    is_gated_so = type(self)._apply_gate is experts._default_apply_gate
    if not (reason or is_gated_so):
        reason = "a gate of its own"
    if not reason:
        layer = Layer(*tensors, self.gate_up_proj, self.down_proj, None, None, "zipf")
        if (out := _answer(layer, self)) is not None:
            return out
    return _transformers(experts.ALL_EXPERTS_FUNCTIONS, reason, self, *tensors)


def fp8_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `experts_forward`, of e4m3 weights with factors of blocks."""
    tensors = hidden_states, top_k_index, top_k_weights
    reason = _unlike(self, _PLAIN_FP8)
    if not reason and tuple(self.block_size or ()) != _BLOCK:
        reason = f"blocks of {self.block_size}"
    if not reason:
        scales = self.gate_up_proj_scale_inv, self.down_proj_scale_inv
        layer = Layer(*tensors, self.gate_up_proj, self.down_proj, *scales, "zipf")
        if (out := _answer(layer, self)) is not None:
            return out
    return _transformers(finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, reason, self, *tensors)


def _unlike(module: Any, plain: dict[str, Any]) -> str:
    """Reason why `tuner.moe` does not compute these experts; empty if it does."""
    for name, value in plain.items():
        if (found := getattr(module, name, value)) != value:
            return f"{name}={found}"
    is_silu = type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return "" if is_silu else f"the activation {type(module.act_fn).__name__}"


def _answer(layer: Layer, module: Any) -> torch.Tensor | None:
    """The output by own kernels; None, and a counted reason, where there are none."""
    try:
        return answer(layer)
    except ConfigError as exc:
        _count(module, str(exc))
        return None


def _count(module: Any, reason: str) -> None:
    if not torch.compiler.is_compiling():
        refusal = Refusal(Kind.EXPERTS, f"{type(module).__name__}: {reason}")
        counters.count_fallback(refusal.reason, by="Transformers")


def _transformers(functions: Any, reason: str, module: Any, *tensors: torch.Tensor) -> torch.Tensor:
    if reason:
        _count(module, reason)
    out: torch.Tensor = functions[_OWN](module, *tensors)
    return out


def register(name: str) -> None:
    """Make the functions known to Transformers."""
    experts.ExpertsInterface.register(name, experts_forward)
    finegrained_fp8.FP8ExpertsInterface.register(name, fp8_experts_forward)
