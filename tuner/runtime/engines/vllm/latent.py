"""vLLM's backend ``TRITON_MLA`` with tuned decoding of latent attention in front.

``TUNER_VLLM_MLA=1`` registers it in that backend's place. Cache, metadata, prompts and all decoding
that no tuned kernel takes are inherited.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)

from tuner.problem.attention import LATENT_DIM, LATENT_VALUE_DIM
from tuner.runtime.attention.mla import Decode
from tuner.runtime.call import counters
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import answer, find

_PLAIN = ("auto", "float16", "half", "bfloat16")
"""Names for a cache of the queries' type."""
_E4M3 = ("fp8", "fp8_e4m3")
"""Names for a cache of e4m3 with one factor, the layer's `_k_scale`."""


class TunerLatentImpl(TritonMLAImpl):  # type: ignore[misc]
    """One layer of latent attention."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refusal: Refusal | None = None
        self._is_e4m3 = self.kv_cache_dtype in _E4M3
        if self.kv_cache_dtype not in (*_PLAIN, *_E4M3):
            self._refusal = Refusal(Kind.CACHE_TYPE, str(self.kv_cache_dtype))
        elif (self.head_size, self.kv_lora_rank) != (LATENT_DIM, LATENT_VALUE_DIM):
            self._refusal = Refusal(Kind.TENSORS, f"rows of {self.head_size} columns")

    def load(self, layer: Any, metadata: Any) -> None:
        """Load the kernel of a batch before its calls are captured."""
        cache = layer.kv_cache
        if self._refusal is None and metadata.decode is not None and cache.numel():
            kind = torch.bfloat16 if self._is_e4m3 else cache.dtype
            tokens = metadata.num_decode_tokens
            query = cache.new_empty((tokens, self.num_heads, LATENT_DIM), dtype=kind)
            if not self._refused(query, metadata):
                find(self._call(query, cache, metadata, layer))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: torch.nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output (tokens, H, 512) and log-sum-exp (tokens, H) of as many queries of each
        sequence.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if refusal := self._refused(query, attn_metadata):
            counters.count_fallback(refusal.reason)
        else:
            call = self._call(query, kv_c_and_k_pe_cache, attn_metadata, layer)
            if answer(call) is not None:
                assert call.lse is not None
                return call.out.flatten(0, 1), call.lse.transpose(1, 2).flatten(0, 1)
        output: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
            query, kv_c_and_k_pe_cache, attn_metadata, layer
        )
        return output

    def _refused(self, query: torch.Tensor, metadata: Any) -> Refusal | None:
        """Why these tokens are vLLM's own; drafts without a causal mask see all of each other.

        vLLM's builder divides a batch so that its sequences have as many decoded tokens each.
        """
        sequences, tokens = len(metadata.decode.seq_lens), len(query)
        if self._is_e4m3 and query.dtype != torch.bfloat16:
            return Refusal(Kind.CACHE_TYPE, str(self.kv_cache_dtype))
        if not tokens:
            return Refusal(Kind.EMPTY)
        is_alike = metadata.num_prefills or metadata.max_query_len * sequences == tokens
        is_causal = tokens == sequences or getattr(metadata, "causal", True)
        if tokens % sequences or not (is_alike and is_causal):
            return Refusal(Kind.TENSORS, f"{tokens} queries of {sequences} sequences")
        return self._refusal

    def _call(self, query: torch.Tensor, cache: torch.Tensor, metadata: Any, layer: Any) -> Decode:
        tables = metadata.decode.block_table, metadata.decode.seq_lens
        rows = query.unflatten(0, (len(metadata.decode.seq_lens), -1))
        sequences, queries, heads, _ = rows.shape
        out = query.new_empty((sequences, queries, heads, LATENT_VALUE_DIM))
        lse = query.new_empty((sequences, heads, queries), dtype=torch.float32)
        descale = layer._k_scale.view(1) if self._is_e4m3 else None
        cache = cache.view(torch.float8_e4m3fn) if self._is_e4m3 else cache
        return Decode(rows, cache, *tables, self.scale, out, lse, descale)


class TunerLatentMetadataBuilder(TritonMLAMetadataBuilder):  # type: ignore[misc]
    """Builder of vLLM's metadata, which loads kernels before a capture."""

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata for a capture or its warm-up; called before both."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in map(layers.get, self.layer_names):
            if isinstance(impl := getattr(layer, "impl", None), TunerLatentImpl):
                impl.load(layer, metadata)
        return metadata


class TunerLatentBackend(TritonMLABackend):  # type: ignore[misc]
    """vLLM's backend with tuned layers."""

    @staticmethod
    def get_impl_cls() -> type[TunerLatentImpl]:
        return TunerLatentImpl

    @staticmethod
    def get_builder_cls() -> type[TunerLatentMetadataBuilder]:
        return TunerLatentMetadataBuilder
