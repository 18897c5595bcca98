"""vLLM's attention backend ``CUSTOM``: its FlashAttention backend, with tuned kernels in front.

Cache, metadata and all calls that no tuned kernel takes are inherited from FlashAttention's
classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged_composed import output_type
from tuner.runtime.call import invariance
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.engines.calls import (
    CacheLayout,
    EngineStep,
    Form,
    ServingEngine,
    decide,
    masks,
    max_queries,
    refuse,
    run,
)
from tuner.runtime.parallel import distributed

ENGINE = ServingEngine("vLLM")
#: Names for a cache of the queries' type.
_PLAIN = ("auto", "float16", "half", "bfloat16")
#: Names for a cache of e4m3, whose queries vLLM quantises before the layer.
_E4M3 = ("fp8", "fp8_e4m3")
_STEP = "tuner_step"
"""Attribute of a metadata object: its `EngineStep`."""
_CAPTURED = "tuner_captured"
"""Attribute of a capture's metadata object, and of a warm-up's: True."""
_READ = frozenset({
    *("num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens"),
    *("block_table", "causal", "use_cascade", "sliding_window"),
    # Where the new keys lie, which vLLM has written, and the schedule of its own kernels.
    *("slot_mapping", "scheduler_metadata", "prefix_scheduler_metadata", "max_num_splits"),
    # Parts of cascade attention and of keys over several ranks, which are refused.
    *("common_prefix_len", "cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens"),
    *("max_dcp_context_kv_len", "dcp_context_kv_lens", "num_decode_reqs", "num_prefill_reqs"),
    *("num_decode_tokens", "num_prefill_tokens"),
})  # fmt: skip
"""Fields of a step's metadata that are used here or change no result. Any other that is set is a
mask, or may be one: vLLM answers.
"""


class TunerImpl(FlashAttentionImpl):  # type: ignore[misc]
    """One attention layer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        max_queries(ENGINE.setting)  # a wrong setting raises here, not in the first call
        distributed.agree_in_engine()
        self._refusal = self._never()
        self._layout = CacheLayout(
            partial(halves_of, self.num_kv_heads, self.head_size), partial(_starts, self.head_size)
        )
        self._wide_sinks: torch.Tensor | None = None
        self._scales: tuple[torch.Tensor, ...] = ()
        self._are_scales_known = False
        self._form: Form | None = None
        self._kind: Any = None
        self._window: tuple[int, int] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        self._are_scales_known = False
        if self.sinks is None:
            return
        if self._wide_sinks is None:
            self._wide_sinks = _wide(self.sinks)
        else:  # where a captured graph reads them
            self._wide_sinks.copy_(self.sinks.detach())

    def load(self, layer: torch.nn.Module, metadata: Any) -> None:
        """Load the kernel that serves a step of the layer, before its calls are captured."""
        step, cache = _step_of(metadata), layer.kv_cache
        if self._refusal is None and step.refusal is None and cache.numel():
            cache = self._seen(cache)
            query = cache.new_empty(
                (int(metadata.num_actual_tokens), self.num_heads, self.head_size)
            )
            out = query.new_empty(query.shape, dtype=output_type(query))
            decide(step, self._form_of(layer, metadata), self._kind, query, (cache,), out)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """The attention of one layer and step, written to `output` (tokens, H, D)."""
        # Without metadata memory is being profiled. The other arguments quantise the output.
        is_plain = attn_metadata is not None
        if args or options:
            is_plain = is_plain and all(value is None for value in (*args, *options.values()))
        if is_plain and self._answer(layer, query, kv_cache, attn_metadata, output):
            return output
        inputs = query, key, value, kv_cache, attn_metadata, output
        found: torch.Tensor = super().forward(layer, *inputs, *args, **options)
        return found

    def _answer(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> bool:
        """True when a tuned kernel wrote the output."""
        step = _step_of(metadata)
        if (refusal := self._refusal or step.refusal) is not None:
            refuse(refusal, step)
            return False
        form = self._form_of(layer, metadata)
        return run(step, form, self._kind, query, (self._seen(cache),), output)

    def _seen(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache by its elements; vLLM holds e4m3 as bytes."""
        is_e4m3 = self.kv_cache_dtype in _E4M3
        return cache.view(torch.float8_e4m3fn) if is_e4m3 else cache

    def _form_of(self, layer: torch.nn.Module, metadata: Any) -> Form:
        window = self._window_of(metadata)
        if self.kv_cache_dtype in _E4M3 and not self._are_scales_known:
            self._read_scales(layer)
        if self._form is not None and window == self._window:
            return self._form
        if self.sinks is not None and self._wide_sinks is None:
            self._wide_sinks = _wide(self.sinks)
        extras = Extras.of(window, self.logits_soft_cap)
        self._kind = self.scale, extras, self.sinks is None
        self._window = window
        self._form = Form(self.scale, extras, self._wide_sinks, self._layout, self._scales)
        return self._form

    def _window_of(self, metadata: Any) -> tuple[int, int] | None:
        """Keys that a query sees before and after its own, as vLLM has them.

        Before 0.28 the step's window goes before the layer's. From then on the step has none, and
        the layer's is on both sides of queries that are not causal.
        """
        window: tuple[int, int] | None = self.sliding_window
        if hasattr(metadata, "sliding_window"):
            return metadata.sliding_window or window
        if window is not None and window[0] >= 0 == window[1] and metadata.causal is False:
            return window[0], window[0]
        return window

    def _read_scales(self, layer: torch.nn.Module) -> None:
        """Factors of a layer, one a head, where a captured graph reads them."""
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        scales = [
            getattr(layer, f"_{name}_scale").detach().float().reshape(-1).expand(count)
            for name, count in zip("qkv", counts, strict=True)
        ]
        if self._scales:
            for scale, new in zip(self._scales, scales, strict=True):
                scale.copy_(new)
        else:
            with torch.inference_mode(False):  # weights may be loaded again outside of it
                self._scales = tuple(new.clone() for new in scales)
        # Those that vLLM computes of the first tokens are not final.
        self._are_scales_known = not getattr(layer, "calculate_kv_scales", False)

    def _never(self) -> Refusal | None:
        """Reason why a layer is never served; else None."""
        if self.attn_type != "decoder":
            return Refusal(Kind.ENCODER, str(getattr(self.attn_type, "value", self.attn_type)))
        if self.alibi_slopes is not None:
            return Refusal(Kind.ALIBI)
        if self.kv_cache_dtype not in (*_PLAIN, *_E4M3):
            return Refusal(Kind.CACHE_TYPE, str(self.kv_cache_dtype))
        for group in ("dcp_world_size", "pcp_world_size"):
            if getattr(self, group, 1) > 1:
                return Refusal(Kind.CONTEXT_PARALLEL)
        if getattr(self, "batch_invariant_enabled", False) and not invariance.is_on():
            return Refusal(Kind.INVARIANT, "VLLM_BATCH_INVARIANT is set")
        return None


class TunerMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of FlashAttention's metadata.

    Graphs are captured of batches whose sequences all have equally many queries, because a tuned
    kernel is launched for the longest sequence. A graph without a call of FlashAttention leaves out
    its schedule.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._captured: dict[tuple[int, int], list[Any]] = {}
        """Metadata of captures and warm-ups, by numbers of sequences and queries."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        **options: Any,
    ) -> Any:
        is_fast = fast_build or self._is_served(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, is_fast, **options)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata for a capture or its warm-up; called before both."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        setattr(metadata, _CAPTURED, True)
        self._captured.setdefault(_shape_of(common_attn_metadata), []).append(metadata)
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in map(layers.get, self.layer_names):
            if isinstance(impl := getattr(layer, "impl", None), TunerImpl):
                impl.load(layer, metadata)
        return metadata

    def _is_served(self, common: Any) -> bool:
        """True when graphs of such batches hold only tuned kernels.

        FlashAttention in a graph needs its schedule, which each step writes anew.
        """
        steps = [getattr(graph, _STEP, None) for graph in self._captured.get(_shape_of(common), ())]
        return bool(steps) and all(step and step.served and not step.refused for step in steps)


class TunerBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's backend with tuned layers and metadata."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TunerImpl]:
        return TunerImpl

    @staticmethod
    def get_builder_cls() -> type[TunerMetadataBuilder]:
        return TunerMetadataBuilder


def halves_of(
    heads_kv: int, width: int, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values (pages, page size, HKV, D): views of a cache (pages, HKV, page size, 2 D)."""
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (heads_kv, 2 * width):
        return None
    keys, values = cache.transpose(1, 2).split(width, dim=-1)
    return keys, values


def _starts(width: int, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cache, cache.narrow(-1, width, width)


def _shape_of(common: Any) -> tuple[int, int]:
    return common.num_reqs, common.max_query_len


def _wide(sinks: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # weights may be loaded again outside of it
        return sinks.detach().float()


def _step_of(metadata: Any) -> EngineStep:
    step: EngineStep | None = getattr(metadata, _STEP, None)
    if (
        step is None
        or step.table is not metadata.block_table  # a copy for another group of layers
        or step.used is not metadata.seq_lens
    ):
        step = _step(metadata)
        setattr(metadata, _STEP, step)
    return step


def _step(metadata: Any) -> EngineStep:
    causal = metadata.causal
    refusal: Refusal | None = None
    if getattr(metadata, "use_cascade", False):  # until 0.31
        refusal = Refusal(Kind.CASCADE)
    elif not isinstance(causal, bool):
        refusal = Refusal(Kind.ENGINE_MASK, "causal for some sequences")
    elif names := masks(metadata, _READ):
        refusal = Refusal(Kind.ENGINE_MASK, ", ".join(names))
    return EngineStep(
        ENGINE,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        int(metadata.max_query_len),
        int(metadata.max_seq_len),
        causal is True,
        refusal,
        getattr(metadata, _CAPTURED, False),
    )
