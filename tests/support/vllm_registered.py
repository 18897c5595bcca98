"""Load vLLM's plug-ins as its processes do, with this package's entry point as the only one.

Prints one JSON object: `lines`, what was logged, and `registered`: the path of the backend, and the
quantisation's classes that are made of vLLM's. Needs `engine_unpacked`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
import tomllib
from pathlib import Path
from typing import Any

import engine_unpacked  # noqa: F401  (makes vLLM importable)

GROUP = "vllm.general_plugins"


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
    return [custom.get_path(), config.get_name(), fp8.weight_block_size]


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tuner.runtime").addHandler(handler)
    importlib.metadata.entry_points = own_entry_point  # type: ignore[assignment]
    importlib.import_module("vllm.plugins").load_general_plugins()
    print(json.dumps({"lines": lines, "registered": [] if lines else registered()}))


if __name__ == "__main__":
    sys.exit(main())
