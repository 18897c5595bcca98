"""vLLM's seam for attention backends: its own classes where it is installed, and stand-ins."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

REGISTRY = "vllm.v1.attention.backends.registry"
FLASH_ATTN = "vllm.v1.attention.backends.flash_attn"
LONGEST = 4096
"""Keys that the engine takes."""


class CGSupport(enum.Enum):
    ALWAYS, UNIFORM_BATCH, NEVER = 3, 2, 0


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


@dataclasses.dataclass
class Metadata:
    """As of vLLM 0.32 and later."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Any
    max_seq_len: int
    seq_lens: Any
    block_table: Any
    slot_mapping: Any
    causal: Any = True
    mm_prefix_query_range_tensor: Any = None
    rswa_prefix_lens: Any = None


@dataclasses.dataclass
class FirstMetadata(Metadata):
    """As of vLLM 0.26 and 0.27."""

    use_cascade: bool = False
    common_prefix_len: int = 0
    cu_prefix_query_lens: Any = None
    prefix_kv_lens: Any = None
    suffix_kv_lens: Any = None
    sliding_window: Any = None
    mm_prefix_range_tensor: Any = None


class Impl(abc.ABC):
    dcp_world_size = pcp_world_size = 1
    batch_invariant_enabled = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.alibi_slopes, self.sinks = scale, alibi_slopes, sinks
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.logits_soft_cap = logits_soft_cap or 0

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Change nothing."""
        del act_dtype

    @abc.abstractmethod
    def forward(self, *args: Any, **options: Any) -> Any: ...


class Builder(abc.ABC):
    _cudagraph_support = CGSupport.ALWAYS

    def __init__(self, *args: Any) -> None:
        self.given = args

    @abc.abstractmethod
    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any: ...

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


class Registry(enum.Enum):
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in overrides

    def get_path(self) -> str:
        return overrides[self]


overrides: dict[Any, str] = {}


def stand_ins(metadata: type = Metadata) -> dict[str, ModuleType]:
    """Modules by name, with a class of metadata."""
    overrides.clear()
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {"AttentionCGSupport": CGSupport},
        "vllm.v1.attention.backends": {},
        REGISTRY: {
            "AttentionBackendEnum": Registry,
            "register_backend": lambda backend, path: overrides.update({backend: path}),
        },
        FLASH_ATTN: {
            "FlashAttentionBackend": Backend,
            "FlashAttentionImpl": type("FlashAttentionImpl", (Impl,), {}),
            "FlashAttentionMetadata": metadata,
            "FlashAttentionMetadataBuilder": type("FlashAttentionBuilder", (Builder,), {}),
        },
    }
    made = {}
    for name, values in names.items():
        made[name] = module = ModuleType(name)
        vars(module).update(values)
    return made


def installed() -> ModuleType:
    """vLLM's FlashAttention backend; skips where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(FLASH_ATTN)
    except ImportError as exc:
        pytest.skip(f"vllm is not installed ({exc})")


@pytest.fixture(params=["first", "last", "vllm"])
def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """`backend`: the plug-in's classes over those of `flash_attn`, stand-ins for the first and the
    last version that is served, or vLLM's. `own` has the arguments of each call that vLLM's own
    attention was left; `fields` are those of a step's metadata.
    """
    own = "tuner.runtime.engines.vllm.backend"
    monkeypatch.delitem(sys.modules, own, raising=False)
    if request.param == "vllm":
        installed()
    else:
        kind = FirstMetadata if request.param == "first" else Metadata
        for name, module in stand_ins(kind).items():
            monkeypatch.setitem(sys.modules, name, module)
    flash_attn = importlib.import_module(FLASH_ATTN)
    for name in ("flash_attn_supports_sinks", "flash_attn_supports_kv_cache_dtype"):  # on a GPU
        monkeypatch.setattr(flash_attn, name, lambda *_, **__: True, raising=False)
    calls: list[Any] = []

    def forward(self: Any, layer: Any, *args: Any, **options: Any) -> str:
        calls.append(args)
        return "vLLM's own"

    def init(self: Any, layers: dict[str, Any]) -> None:
        compilation = SimpleNamespace(static_forward_context=layers)
        self.layer_names = list(layers)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)

    def build(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        built.append(fast_build)
        return common.metadata

    built: list[bool] = []
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", forward)
    builder = flash_attn.FlashAttentionMetadataBuilder
    monkeypatch.setattr(builder, "__init__", init)
    monkeypatch.setattr(builder, "build", build)
    backend = importlib.import_module(own)
    backend.max_queries.cache_clear()
    fields = {one.name for one in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    yield SimpleNamespace(
        backend=backend, flash_attn=flash_attn, own=calls, built=built, fields=fields
    )
    backend.max_queries.cache_clear()
    sys.modules.pop(own)
