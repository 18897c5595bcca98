"""vLLM's quantisation ``tuner``: products and experts of a model by tuned kernels.

``LLM(model, quantization="tuner")`` selects it, for a model in bf16 and for one whose checkpoint is
fp8 with factors of blocks. Only the way to multiply changes; weights are loaded and kept as vLLM's
own methods do it. This module imports vLLM's base classes; the methods come when a layer asks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from tuner.runtime.engines.products import MIN_CAPABILITY

NAME = "tuner"


class TunerConfig(QuantizationConfig):  # type: ignore[misc]  # vLLM is skipped
    """Config of a model without quantisation; `from_config` makes that of an fp8 checkpoint."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from tuner.runtime.engines.vllm.products import TunerFp8Config

        tuner_config = TunerFp8Config.from_config(config)
        tuner_config.name = NAME
        return tuner_config

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name, where a user chose it for an fp8 checkpoint."""
        is_fp8 = hf_quant_cfg.get("quant_method") == "fp8"
        return NAME if user_quant == NAME and is_fp8 else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from tuner.runtime.engines.vllm.products import method_of

        return method_of(layer)
