"""vLLM's plug-in: attention over its paged cache, products and experts by tuned kernels.

The entry point of ``vllm.general_plugins``. vLLM calls `register` in each of its processes.
``attention_backend="CUSTOM"`` then selects `tuner.runtime.vllm.backend`, and
``quantization="tuner"`` `tuner.runtime.vllm.quantization`.
"""

from __future__ import annotations

import importlib
import logging

BACKEND = "tuner.runtime.vllm.backend.TunerBackend"
"""Import path of the class registered as vLLM's ``CUSTOM`` backend."""
QUANTIZATION = "tuner.runtime.vllm.quantization"
"""Module of the quantisation, which imports vLLM's base class."""

_log = logging.getLogger("tuner.runtime")


def register() -> None:
    """Register the quantisation, and `BACKEND` as vLLM's ``CUSTOM`` attention backend, unless
    another package has registered one. Repeated calls are harmless.
    """
    _register_quantization()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        _log.warning(
            "vLLM's CUSTOM attention backend stays %s, registered before "
            "(VLLM_PLUGINS names the plug-ins that are loaded)",
            custom.get_path(),
        )


def _register_quantization() -> None:
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        own = importlib.import_module(QUANTIZATION)
    except ImportError as exc:
        _log.warning("this vLLM takes no quantisation from outside: %s", exc)
        return
    register_quantization_config(own.NAME)(own.TunerConfig)
