"""SGLang's plug-in: attention over its paged cache, products and experts by tuned kernels.

The entry point of ``sglang.srt.plugins``. SGLang calls `register` in each of its processes, whether
or not it uses the tuner. ``--attention-backend tuner`` then selects the module `backend`, and
``--quantization tuner`` the module `quantization`. Without ``--page-size`` pages have `PAGE_SIZE`
slots then, in place of one.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from tuner.runtime.engines.versions import SGLANG

NAME = "tuner"
"""The attention backend and the quantisation, as SGLang's options have them."""
OWN = "fa3"
"""SGLang's backend that takes what is not served."""
REGISTRY = "sglang.srt.layers.attention.attention_registry"
CHOICES = "sglang.srt.arg_groups.choices"
QUANTIZATION = "sglang.srt.layers.quantization"
OVERRIDES = "sglang.srt.arg_groups.overrides"
HOOKS = "sglang.srt.plugins.hook_registry"
PAGE_SIZE = 64

_log = logging.getLogger("tuner.runtime")


def register() -> None:
    """Add the attention backend and the quantisation to SGLang's. Repeated calls are harmless.

    Whatever fails is logged in one line, and SGLang keeps its own kernels. In another version the
    name stays a choice, which stands for SGLang's own backend.
    """
    version = "of an unknown version"
    try:
        version = str(importlib.import_module("sglang").__version__)
        reason = SGLANG.refusal(version)
        choices = importlib.import_module(CHOICES)
        if NAME not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([NAME])
        importlib.import_module(REGISTRY).register_attention_backend(NAME)(create)
        if not reason:
            _register_quantization(choices)
            hooks = importlib.import_module(HOOKS)
            target = f"{OVERRIDES}._page_size_default"
            hooks.HookRegistry.register(target, default_page_size, hooks.HookType.AFTER)
    except Exception as exc:  # another SGLang's modules may raise anything
        reason = f"SGLang {version} raised {type(exc).__name__}: {exc} (served: {SGLANG})"
    _keep(reason)


def create(runner: Any) -> Any:
    """The attention backend of a model runner: ours, or SGLang's own and one line that says why.

    Raises:
        NotInvariantError: in the mode of `tuner.deterministic`, in place of SGLang's own.
    """
    reason = SGLANG.refusal(str(importlib.import_module("sglang").__version__))
    if not reason:
        try:
            module = importlib.import_module(f"{__name__}.backend")
            backend = module.SglangBackend(runner)
            if not (reason := backend.refusal()):
                return backend
        except Exception as exc:  # SGLang's own backend raises it again, if it has the same fault
            reason = f"the plug-in raised {type(exc).__name__}: {exc}"
        _keep(reason)
    importlib.import_module("tuner.runtime.call.invariance").forbid(reason)
    return importlib.import_module(REGISTRY).ATTENTION_BACKENDS[OWN](runner)


def default_page_size(resolved: dict[str, Any], view: Any) -> dict[str, Any] | None:
    """SGLang's answer where no option names the page size; None: as SGLang has it.

    Args:
        resolved: SGLang's own answer.
        view: options of the server.
    """
    backends = view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend
    if NAME not in backends or resolved != {"page_size": 1}:
        return None
    is_tree = (view.speculative_eagle_topk or 1) > 1
    if is_tree or view.uses_mamba_radix_cache or _has_latents(view):
        return None  # SGLang needs pages of one slot, or its own backend answers
    _log.warning("pages have %d slots, for --attention-backend %s (--page-size)", PAGE_SIZE, NAME)
    return {"page_size": PAGE_SIZE}


def _has_latents(view: Any) -> bool:
    return bool(importlib.import_module(OVERRIDES).use_mla_backend(view))


def _register_quantization(choices: Any) -> None:
    methods = importlib.import_module(QUANTIZATION).QUANTIZATION_METHODS
    methods[NAME] = importlib.import_module(f"{__name__}.quantization").SglangConfig
    if NAME not in choices.QUANTIZATION_CHOICES:
        choices.add_quantization_method_choices([NAME])


def _keep(reason: str) -> None:
    if reason:
        _log.warning("SGLang keeps its own kernels: %s", " ".join(reason.split()))
