"""Names that differ between the versions of Transformers that are served."""

from __future__ import annotations

import inspect
from typing import Any

import transformers

_IS_NEW = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters


def cached(cache: Any) -> dict[str, Any]:
    """The keyword by which a model takes a cache: from 5.24 on `cache`."""
    return {"cache" if _IS_NEW else "past_key_values": cache}
