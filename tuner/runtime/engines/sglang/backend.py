"""SGLang's attention backend ``tuner``: its FlashAttention backend, with tuned kernels in front.

Cache, metadata, graphs and all calls that no tuned kernel takes are inherited.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.cp.utils import is_cp_active
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from tuner.problem.attention_masks import PAGE_MULTIPLE
from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged_composed import output_type
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.engines.calls import (
    CacheLayout,
    EngineStep,
    Form,
    ServingEngine,
    masks,
    max_queries,
    refuse,
    run,
)
from tuner.runtime.parallel import distributed

ENGINE = ServingEngine("SGLang")
_TYPES = (torch.float16, torch.bfloat16)
_STEPS = "tuner_steps"
"""Attribute of a metadata object: its `EngineStep` by the layers' pool, sliding-window or not."""
_CAPTURED = "tuner_captured"
"""Attribute of a captured step's metadata object: True."""
_READ = frozenset({
    *("cache_seqlens_int32", "max_seq_len_q", "max_seq_len_k", "cu_seqlens_q", "page_table"),
    *("swa_page_table", "swa_out_cache_loc"),
    # Numbers of keys before each sequence, and what SGLang's own kernels keep for themselves.
    *("cu_seqlens_k", "scheduler_metadata", "rel_bias_prep_cache"),
    *("fa_skip_cu_seqlens_q", "fa_skip_max_seqlen_q"),
    "swa_spec_metadata",  # of trees of drafts, which are refused
})  # fmt: skip
"""Fields of a step's metadata that are used here or change no result."""


class SglangBackend(FlashAttentionBackend):  # type: ignore[misc]
    """The attention of all layers of a model."""

    def __init__(self, runner: Any, *args: Any, **options: Any) -> None:
        super().__init__(runner, *args, **options)
        max_queries(ENGINE.setting)  # a wrong setting raises here, not in the first call
        distributed.agree_in_engine()
        self._is_invariant = self.num_splits == 1
        self._forms: dict[Any, Form | Refusal] = {}

    def refusal(self) -> str:
        """Reason why no layer of the model is served; empty where some are."""
        if self.use_mla:
            return "latent attention"
        if self.page_size % PAGE_MULTIPLE:
            return (
                f"pages have {self.page_size} slots (allowed: multiples of {PAGE_MULTIPLE}); "
                "start it with --page-size 16, 32, 64 or 128"
            )
        if self.kv_cache_dtype not in _TYPES:
            return f"the cache is {self.kv_cache_dtype} (allowed: the queries' type)"
        unserved = {
            "an encoder and a decoder": self.is_encoder_decoder,
            "attention in chunks": self.local_attn_builder is not None,
            "windows that know the prompt": self.is_prefill_aware_swa,
            "results that must not depend on the batch": self._is_invariant,
            "a cache spread over ranks": self._kv_shard_pool is not None,
            "embedding without a cache": self.fa_skip_kv_cache,
        }
        return next((reason for reason, is_so in unserved.items() if is_so), "")

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        """As SGLang's; a captured step takes as many keys as its page table holds."""
        super().init_forward_metadata_out_graph(batch, in_capture)
        metadata = self.forward_metadata
        if in_capture and metadata is not None and metadata.page_table is not None:
            metadata.max_seq_len_k = metadata.page_table.shape[1] * self.page_size
            setattr(metadata, _CAPTURED, True)

    def forward_decode(self, q: torch.Tensor, *args: Any, **options: Any) -> Any:
        """The attention of one layer and a step of one query a sequence: (tokens, H * D)."""
        return self._forward(super().forward_decode, q, *args, **options)

    def forward_extend(self, q: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As `forward_decode`, for prompts, chunks of them, and drafts to verify."""
        return self._forward(super().forward_extend, q, *args, **options)

    def _forward(
        self,
        own: Callable[..., Any],
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        step, form = self._step_of(layer, batch), self._form_of(layer)
        sinks = options.get("sinks")
        if isinstance(form, Form):
            sizes = layer.head_dim, layer.tp_k_head_num, q.shape
            kind = form.scale, form.extras, sinks is None, sizes
            refusal = step.refusal or _unserved(options) or step.refusals.get(kind)
            if refusal is None:
                if k is not None and save_kv_cache:
                    self._write(layer, batch, k, v)
                out = self._answer(step, form, kind, layer, batch, q, sinks)
                return own(q, k, v, layer, batch, False, **options) if out is None else out
        else:
            refusal = form
        refuse(refusal, step)
        return own(q, k, v, layer, batch, save_kv_cache, **options)

    def _answer(
        self,
        step: EngineStep,
        form: Form,
        kind: Any,
        layer: Any,
        batch: Any,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The output of a tuned kernel; None, and a counted reason, where there is none."""
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = getattr(batch, "_attn_output", None)
        if out is None:
            out = query.new_empty(query.shape, dtype=output_type(query))
        out = out.view(query.shape)
        if sinks is not None:  # converted in each call, so that a graph reads reloaded weights
            form = form._replace(sinks=sinks.float())
        cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if not run(step, form, kind, query, cache, out):
            return None
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def _write(self, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Write new keys and values to the cache, as SGLang's own backend does it."""
        at = KVWriteLoc.for_layer(batch, layer, swa_loc=self.forward_metadata.swa_out_cache_loc)
        self.token_to_kv_pool.set_kv_buffer(layer, at, k, v, layer.k_scale, layer.v_scale)

    def _form_of(self, layer: Any) -> Form | Refusal:
        """A layer's options, or the reason why none of its calls is served."""
        form = self._forms.get(layer)
        if form is None:
            form = self._forms[layer] = self._new_form(layer)
        return form

    def _new_form(self, layer: Any) -> Form | Refusal:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            return Refusal(Kind.ENCODER, str(layer.attn_type.value))
        heads_kv, width = layer.tp_k_head_num, layer.head_dim
        if (layer.tp_v_head_num, layer.v_head_dim) != (heads_kv, width):
            return Refusal(Kind.CACHE_LAYOUT, "keys and values of unlike widths")
        if self.kv_cache_dtype_str != "auto" and layer.k_scale is not None:
            return Refusal(Kind.CACHE_TYPE, f"{self.kv_cache_dtype_str} with factors")
        window = (layer.sliding_window_size, 0) if _has_window(layer) else None
        extras = Extras.of(window, layer.logit_cap or 0.0)
        layout = CacheLayout(partial(_pages, self.page_size, heads_kv, width), _starts)
        return Form(layer.scaling, extras, None, layout)

    def _step_of(self, layer: Any, batch: Any) -> EngineStep:
        metadata = self.forward_metadata
        is_window = self.use_sliding_window_kv_pool and _has_window(layer)
        table = metadata.swa_page_table if is_window else metadata.page_table
        steps: dict[Any, EngineStep] = metadata.__dict__.setdefault(_STEPS, {})
        key = is_window, metadata.max_seq_len_q, metadata.max_seq_len_k
        step = steps.get(key)
        if step is None or step.table is not table:
            step = steps[key] = self._step(metadata, table, batch)
        return step

    def _step(self, metadata: Any, table: torch.Tensor | None, batch: Any) -> EngineStep:
        refusal: Refusal | None = None
        if self.topk > 1 and batch.spec_info is not None:
            refusal = Refusal(Kind.CASCADE, "trees of drafts")
        elif batch.dcp_kv_mask is not None or is_cp_active(batch):
            refusal = Refusal(Kind.CONTEXT_PARALLEL)
        elif table is None:
            refusal = Refusal(Kind.CACHE_LAYOUT, "no page table")
        elif names := masks(metadata, _READ):
            refusal = Refusal(Kind.ENGINE_MASK, ", ".join(names))
        return EngineStep(
            ENGINE,
            table,
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_q,
            int(metadata.max_seq_len_q),
            int(metadata.max_seq_len_k),
            True,
            refusal,
            getattr(metadata, _CAPTURED, False),
        )


def _unserved(options: dict[str, Any]) -> Refusal | None:
    """Reason why a call with such keywords is SGLang's own; else None."""
    names = [
        name
        for name, value in options.items()
        if value is not None and value is not False and name != "sinks"
    ]
    return Refusal(Kind.ENGINE_MASK, ", ".join(names)) if names else None


def _has_window(layer: Any) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def _pages(
    size: int, heads_kv: int, width: int, *buffers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values (pages, page size, HKV, D) of the pool's two buffers.

    They are (slots, HKV, D), or (pages, HKV, page size, D).
    """
    for buffer in buffers:
        rows = buffer.shape[1:]
        is_slots = rows == (heads_kv, width) and buffer.shape[0] % size == 0
        if not is_slots and rows != (heads_kv, size, width):
            return None
    keys, values = (paged_kv_view(buffer, size, heads_kv, width) for buffer in buffers)
    return keys, values


def _starts(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys, values
