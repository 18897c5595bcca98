"""Stand-ins for SGLang's classes that its plug-in builds on."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SRT = "sglang.srt"
REGISTRY = f"{SRT}.layers.attention.attention_registry"
CHOICES = f"{SRT}.arg_groups.choices"
SIZE = 16
"""Slots of a page."""


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclasses.dataclass
class Metadata:
    """As SGLang 0.5.23 has it, but for parts that nothing here reads."""

    cache_seqlens_int32: Any = None
    max_seq_len_q: int = 1
    max_seq_len_k: int = 0
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    image_token_ranges: Any = None
    window_size: tuple[int, int] = (-1, -1)
    page_table: Any = None
    swa_page_table: Any = None
    swa_out_cache_loc: Any = None
    scheduler_metadata: Any = None
    encoder_max_seq_len_k: int = 0


class Backend:
    """SGLang's FlashAttention backend: `own` has each call that it was left."""

    own: list[Any]

    def __init__(self, runner: Any) -> None:
        for name, value in vars(runner).items():
            setattr(self, name, value)
        self.forward_metadata: Any = None

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.forward_metadata = batch.metadata

    def _own(self, *args: Any, **options: Any) -> str:
        self.own.append((args, options))
        return "SGLang's own"

    forward_decode = forward_extend = _own


class Pool:
    """`written` has the arguments of each write of new keys and values."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.buffers = keys, values
        self.written: list[Any] = []

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.buffers

    def set_kv_buffer(self, *given: Any) -> None:
        self.written.append(given)


class WriteLoc:
    @classmethod
    def for_layer(cls, batch: Any, layer: Any, *, swa_loc: Any = None) -> tuple[Any, Any]:
        return batch.out_cache_loc, swa_loc


def paged_kv_view(buffer: Any, size: int, heads: int, width: int) -> Any:
    if buffer.dim() == 4:
        return buffer.permute(0, 2, 1, 3)
    return buffer.view(-1, size, heads, width)


def runner(pool: Pool, **changes: Any) -> SimpleNamespace:
    """A model runner with the options of a plain model, as SGLang resolves them."""
    import torch

    plain: dict[str, Any] = {
        "token_to_kv_pool": pool,
        "page_size": SIZE,
        "use_mla": False,
        "kv_cache_dtype": torch.bfloat16,
        "kv_cache_dtype_str": "auto",
        "num_splits": 0,
        "topk": 0,
        "use_sliding_window_kv_pool": False,
        "is_encoder_decoder": False,
        "local_attn_builder": None,
        "is_prefill_aware_swa": False,
        "_kv_shard_pool": None,
        "fa_skip_kv_cache": False,
    }
    return SimpleNamespace(**{**plain, **changes})


def stand_ins() -> dict[str, ModuleType]:
    """Modules by name."""
    backends: dict[str, Any] = {"fa3": lambda given: "SGLang's backend"}
    attention, quantization = ["fa3"], ["fp8"]

    def register(name: str) -> Any:
        return lambda create: backends.setdefault(name, create)

    names: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        CHOICES: {
            "ATTENTION_BACKEND_CHOICES": attention,
            "add_attention_backend_choices": attention.extend,
            "QUANTIZATION_CHOICES": quantization,
            "add_quantization_method_choices": quantization.extend,
        },
        REGISTRY: {"ATTENTION_BACKENDS": backends, "register_attention_backend": register},
        f"{SRT}.layers.attention.flashattention_backend": {
            "FlashAttentionBackend": type("FlashAttentionBackend", (Backend,), {"own": []})
        },
        f"{SRT}.layers.cp.utils": {"is_cp_active": lambda batch: batch.is_cp_active},
        f"{SRT}.layers.radix_attention": {"AttentionType": AttentionType},
        f"{SRT}.mem_cache.layout.paged_view": {"paged_kv_view": paged_kv_view},
        f"{SRT}.mem_cache.memory_pool": {"KVWriteLoc": WriteLoc},
        f"{SRT}.layers.quantization": {"QUANTIZATION_METHODS": {"fp8": object}},
        f"{SRT}.layers.quantization.base_config": {"QuantizationConfig": object},
        f"{SRT}.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda *hook: None),
            "HookType": SimpleNamespace(AFTER="after"),
        },
        f"{SRT}.arg_groups.overrides": {"use_mla_backend": lambda view: view.has_latents},
    }
    modules: dict[str, ModuleType] = {}
    for name, values in names.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(modules[name]).update(values)
    return modules


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`backend`: the plug-in's module over stand-ins; `own` has each call that SGLang was left."""
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    names = [f"tuner.runtime.engines.sglang.{name}" for name in ("backend", "quantization")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    calls = importlib.import_module("tuner.runtime.engines.calls")
    calls.max_queries.cache_clear()
    backend = importlib.import_module(names[0])
    own = backend.FlashAttentionBackend.own
    yield SimpleNamespace(backend=backend, own=own, registry=sys.modules[REGISTRY])
    calls.max_queries.cache_clear()
    for name in names:
        sys.modules.pop(name, None)
