"""vLLM's plug-in: attention over its paged cache, products and experts by tuned kernels.

The entry point of ``vllm.general_plugins``. vLLM calls `register` in each of its processes, whether
or not it uses the tuner. ``attention_backend="CUSTOM"`` then selects the module `backend`, and
``quantization="tuner"`` the module `quantization`.
"""

from __future__ import annotations

import importlib
import logging
import os

from tuner import settings
from tuner.runtime.engines.versions import VLLM

BACKEND = "tuner.runtime.engines.vllm.backend.TunerBackend"
"""Import path of the class registered as vLLM's ``CUSTOM`` backend."""
QUANTIZATION = "tuner.runtime.engines.vllm.quantization"
"""Module of the quantisation, which imports vLLM's base class."""
LATENT_BACKEND = "tuner.runtime.engines.vllm.latent.TunerLatentBackend"
"""Import path of the class in the place of vLLM's ``TRITON_MLA``, where that is asked for."""
LINEAR_KERNEL = "tuner.runtime.engines.vllm.linear_kernel"
"""Module of the kernel of linear layers, which imports all of vLLM's."""
NORMS = "tuner.runtime.engines.vllm.norms"
"""Module of the norm in vLLM's batch-invariant mode, which imports Triton."""

_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's variable of results that do not depend on the batch, which is the tuner's also."""

_log = logging.getLogger("tuner.runtime")


def register() -> None:
    """Register the quantisation, and `BACKEND` as vLLM's ``CUSTOM`` attention backend, unless
    another package has registered one. In vLLM's batch-invariant mode a norm follows, and a kernel
    of linear layers where it is asked for. Repeated calls are harmless.

    Whatever fails is logged in one line, and vLLM keeps its own kernels. An exception would stop
    each process of vLLM, also those that use nothing of the tuner.
    """
    version = "of an unknown version"
    try:
        version = str(importlib.import_module("vllm").__version__)
        reason = VLLM.refusal(version)
        if not reason:
            is_invariant = os.environ.get(_INVARIANT, "") not in ("", "0")
            if is_invariant:
                os.environ.setdefault("TUNER_BATCH_INVARIANT", "1")
            _register_quantization()
            _register_backend()
            if is_invariant:
                importlib.import_module(NORMS).register()
            if settings.vllm_mla():
                _register_latent()
            if settings.vllm_linear():
                importlib.import_module(LINEAR_KERNEL).register()
    except Exception as exc:  # another vLLM's modules may raise anything
        reason = f"vLLM {version} raised {type(exc).__name__}: {exc} (served: {VLLM})"
    if reason:
        _log.warning("vLLM keeps its own kernels: %s", " ".join(reason.split()))


def _register_backend() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    custom = registry.AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        registry.register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        _log.warning(
            "vLLM's CUSTOM attention backend stays %s, registered before "
            "(VLLM_PLUGINS names the plug-ins that are loaded)",
            custom.get_path(),
        )


def _register_latent() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.TRITON_MLA, LATENT_BACKEND)


def _register_quantization() -> None:
    quantization = importlib.import_module("vllm.model_executor.layers.quantization")
    own = importlib.import_module(QUANTIZATION)
    quantization.register_quantization_config(own.NAME)(own.TunerConfig)
