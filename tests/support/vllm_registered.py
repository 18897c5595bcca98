"""Load vLLM's plug-ins as its processes do, with this package's entry point as the only one.

Prints one JSON object: `lines`, what was logged, and `registered`: the path of the backend, and the
quantisation's classes that are made of vLLM's. Needs `engine_unpacked`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_unpacked  # noqa: F401  (makes vLLM importable)
import torch

GROUP = "vllm.general_plugins"
TRITON = "vllm.v1.attention.backends.mla.triton_mla"


def own_entry_point(group: str) -> list[importlib.metadata.EntryPoint]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"][GROUP].items()
    points = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in named]
    return points if group == GROUP else []


def registered() -> list[Any]:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        return []
    backend = custom.get_class()
    flash_attn = importlib.import_module("vllm.v1.attention.backends.flash_attn")
    assert issubclass(backend, flash_attn.FlashAttentionBackend)
    quantization = importlib.import_module("vllm.model_executor.layers.quantization")
    config = quantization.get_quantization_config("tuner")()
    products = importlib.import_module("tuner.runtime.engines.vllm.products")
    fp8 = products.TunerFp8Config.from_config({
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    })  # fmt: skip
    found = [custom.get_path(), config.get_name(), fp8.weight_block_size]
    return [*found, *linear_kernels(), latent_layer(registry)]


def latent_layer(registry: Any) -> list[Any]:
    """Path of the backend of latent attention, and shapes of a step by a kernel that does nothing.
    The step has two queries of each of three sequences; the last sequence is padding.
    """
    backend = registry.AttentionBackendEnum.TRITON_MLA
    own, base = backend.get_class(), importlib.import_module(TRITON)
    assert issubclass(own, base.TritonMLABackend)
    assert issubclass(own.get_builder_cls(), base.TritonMLAMetadataBuilder)
    module = importlib.import_module("tuner.runtime.engines.vllm.latent")
    base.TritonMLAImpl.__init__ = lambda self, **facts: vars(self).update(facts)
    facts = {"num_heads": 16, "head_size": 576, "kv_lora_rank": 512, "scale": 0.1}
    layer = own.get_impl_cls()(kv_cache_dtype="auto", **facts)
    common = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    fields = {f.name for f in dataclasses.fields(common.MLACommonMetadata)}
    assert {"decode", "num_decode_tokens", "num_prefills", "max_query_len"} <= fields
    calls: list[Any] = []

    def answered(call: Any) -> Any:
        calls.append(call)
        return call.out

    module.answer = answered
    decode = SimpleNamespace(
        block_table=torch.zeros(3, 4).int(), seq_lens=torch.tensor([5, 2, 0]).int()
    )
    facts = {"num_prefills": 0, "max_query_len": 2, "causal": True}
    step = SimpleNamespace(decode=decode, num_decode_tokens=6, **facts)
    query = torch.zeros(6, 16, 512).bfloat16(), torch.zeros(6, 16, 64).bfloat16()
    out, lse = layer.forward_mqa(query, torch.zeros(9, 64, 576).bfloat16(), step, None)
    return [backend.get_path(), list(calls[0].query.shape), list(out.shape), list(lse.shape)]


def linear_kernels() -> list[Any]:
    """vLLM's choice for a layer of e4m3 weights: without proven kernels, and with them."""
    own = importlib.import_module("tuner.runtime.engines.vllm.linear_kernel")
    kernels = importlib.import_module("vllm.model_executor.kernels.linear")
    platforms = importlib.import_module("vllm.platforms")
    quant = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    shape = quant.GroupShape
    config = kernels.FP8ScaledMMLinearLayerConfig(
        weight_quant_key=quant.create_fp8_quant_key(static=True, group_shape=shape(128, 128)),
        activation_quant_key=quant.create_fp8_quant_key(static=False, group_shape=shape(1, 128)),
        weight_shape=(384, 256),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )
    first = kernels._POSSIBLE_FP8_BLOCK_KERNELS[platforms.PlatformEnum.CUDA][0]
    assert first is own.TunerFp8BlockKernel
    reasons = [first.is_supported(80)[1], first.can_implement(config)[1]]
    assert not all(first.can_implement(replace(config, out_dtype=torch.float16)))
    own.unproven = lambda weight, scale: ""
    chosen = kernels.is_supported_and_can_implement_kernel(first, config, 90)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(384, 256).to(torch.float8_e4m3fn), False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(3, 2), False)
    calls: list[tuple[int, ...]] = []

    def product(x: Any, weight: Any, scale: Any, bias: Any) -> Any:
        calls.append((*x.shape, *weight.shape, *scale.shape))
        return x

    own.scaled_linear = product
    configs = importlib.import_module("vllm.config")
    device = configs.DeviceConfig(device="cpu")
    with configs.set_current_vllm_config(configs.VllmConfig(device_config=device)):
        kernel = first(config)
    kernel.apply_weights(layer, torch.ones(2, 5, 256), None)
    return [*reasons, list(chosen), calls]


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tuner.runtime").addHandler(handler)
    os.environ |= {"TUNER_VLLM_LINEAR": "1", "TUNER_VLLM_MLA": "1"}
    importlib.metadata.entry_points = own_entry_point  # type: ignore[assignment]
    importlib.import_module("vllm.plugins").load_general_plugins()
    print(json.dumps({"lines": lines, "registered": [] if lines else registered()}))


if __name__ == "__main__":
    sys.exit(main())
