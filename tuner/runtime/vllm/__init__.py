"""vLLM's plug-in: attention over its paged cache by tuned kernels.

The entry point of ``vllm.general_plugins``. vLLM calls `register` in each of its processes;
``attention_backend="CUSTOM"`` then selects `tuner.runtime.vllm.backend`, which is imported only
there.
"""

from __future__ import annotations

import logging

BACKEND = "tuner.runtime.vllm.backend.TunerBackend"
"""Import path of the class registered as vLLM's ``CUSTOM`` backend."""

_log = logging.getLogger("tuner.runtime")


def register() -> None:
    """Register `BACKEND` as vLLM's ``CUSTOM`` attention backend, unless another package has
    registered one. Repeated calls are harmless.
    """
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
