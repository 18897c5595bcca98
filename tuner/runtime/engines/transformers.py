"""`attn_implementation="tuner"` for Hugging Face Transformers; importing this module registers it.

::

    import tuner.runtime.engines.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tuner")

Masks are made as for `sdpa`: none if the causal flag suffices, else a tensor, which is an operand
of the tuned kernel. These need a tensor:

- a sliding window, once there are more keys than it is wide;
- several queries after a filled cache;
- packed sequences, which position_ids describe.

In a graph of torch.compile a mask is left out if sizes alone determine it. Without a mask a single
query sees all keys, and query i of several sees keys 0..i. A static cache is longer than the prompt
that fills it.

In continuous batching (`generate_batch`) the module `continuous_batching` serves the cache's pages.
Transformers 5.17 calls this ``paged|tuner``; later versions accept that name also. Other versions
than `versions.TRANSFORMERS` have Transformers' own attention there, which is counted.

The module `transformers_experts` serves the experts of a mixture by the same name.

Transformers passes all keywords of its caller to an attention function. Each keyword is used, is
known to have no effect (`WITHOUT_EFFECT`), or raises an error with its name. A model's own
`eager_attention_forward` defines the meaning.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.comptime import comptime

from tuner.base.install import extra_command

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as exc:
    raise ImportError(
        f"tuner.runtime.engines.transformers needs Transformers 5 ({exc}): "
        f"`{extra_command('transformers')}`"
    ) from exc

from tuner.runtime.attention.attention_call import AttentionCall
from tuner.runtime.attention.bias import as_operand
from tuner.runtime.attention.composed import NONE
from tuner.runtime.attention.dense import attention
from tuner.runtime.attention.operators import operate
from tuner.runtime.call import (
    counters,
    devices,
    dispatch,
    finite_gradients,
    guards,
    handed_over,
    invariance,
    native,
    serving,
)
from tuner.runtime.call.refusal import Kind, Refusal

try:
    from tuner.runtime.engines import continuous_batching
except (ImportError, AttributeError):  # a Transformers with other internals
    continuous_batching = None  # type: ignore[assignment]
try:
    from tuner.runtime.engines import transformers_experts
except ImportError:
    transformers_experts = None  # type: ignore[assignment]

NAME = "tuner"
"""The value of `attn_implementation`."""

WITHOUT_EFFECT: set[str] = {
    # Contained in the mask that was made from it; and options of FlashAttention.
    *("position_ids", "cache_position", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"),
    *("deterministic", "layer_idx", "token_type_ids", "mm_token_type_ids", "query_length"),
    # The cache, which the layer has used already, and options of the model's results.
    *("use_cache", "past_key_values", "cache", "cache_params", "padding_cache"),
    *("shared_kv_states",),
    *("return_dict", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    *("labels", "shift_labels", "num_items_in_batch", "is_first"),
    # Inputs of the model and of its other parts.
    *("input_ids", "inputs_embeds", "hidden_state", "hidden_states", "position_embeddings"),
    *("encoder_hidden_states", "encoder_attention_mask", "encoder_outputs", "key_value_states"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
    *("decoder_position_ids", "pixel_values", "pixel_values_videos", "pixel_mask", "image_sizes"),
    *("image_grid_thw", "video_grid_thw", "grid_thw", "video_second_per_grid"),
    *("image_position_ids", "video_position_ids", "num_frames_per_video", "visual_pos_masks"),
    *("image_embeds", "image_embeds_position_mask", "deepstack_visual_embeds"),
    *("mm_encoder_outputs", "interpolate_pos_encoding", "flattened_patches"),
    *("input_features", "input_features_mask", "feature_attention_mask"),
    *("audio_feature_lengths", "audio_input_ids", "audio_input_ids_mask", "use_audio_in_video"),
    *("chunk_sample_lengths", "sub_sampled_lengths", "conv_attention_mask", "conv_mask"),
    *("protein_input_ids", "protein_attention_mask", "t_cond", "freqs_ci"),
    *("spatial_position_embeddings", "object_queries_position_embeddings"),
    *("query_position_embeddings", "relative_position_embeddings", "reference_points"),
    *("spatial_shapes", "spatial_shapes_list", "level_start_index"),
}
"""Keywords without effect that Transformers 5.17 to 5.24 passes on. Code of your own models may add
to them.
"""
_REFUSED: Mapping[str, str] = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"})
_OF_STEPS = "read_index"
"""Keyword of every layer's call in a step of continuous batching."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a Transformers layer by a tuned kernel, else by Transformers' `sdpa`.

    Args:
        module: the layer; its `is_causal` applies when the argument is None.
        query: (B, H, SQ, D)
        key: (B, HKV, SKV, D)
        value: (B, HKV, SKV, D)
        attention_mask: as `sdpa_mask` makes it, or None.
        dropout: probability.
        scaling: factor of the scores; 1/sqrt(D) when None.
        is_causal: overrides the module's.
        position_bias: (B or 1, H or 1, SQ, SKV), added to the scores; not allowed with a softcap.
        cache: in a step of continuous batching, the cache that this function updates.
        softcap: as in `tuner.attention`: cap of the scaled scores, before the mask.
        kwargs: other keywords of the model.

    Returns:
        (B, SQ, H, D), and None for the weights.

    Raises:
        ValueError: on a keyword that may change the result and is not supported. Also when neither
            the module nor the argument defines `is_causal`.
    """
    arguments = module, query, key, value, attention_mask, dropout, scaling
    if _OF_STEPS in kwargs:
        return _batched(*arguments, softcap, position_bias, cache, kwargs)
    for name, given in kwargs.items():
        if given is not None and name not in WITHOUT_EFFECT:
            _check(name, given, attention_mask, key)
    causal = _is_causal(module, query, attention_mask, is_causal)
    if position_bias is not None:
        if softcap is not None:
            raise ValueError(_refusal("position_bias beside softcap"))
        attention_mask = _with_positions(position_bias, attention_mask, causal, query, key)
        causal = False
        arguments = module, query, key, value, attention_mask, dropout, scaling
    if softcap is None:
        out = _tuned(query, key, value, attention_mask, dropout, causal, scaling)
    else:
        options = attention_mask, dropout, causal, scaling, True
        out = attention(query, key, value, *options, softcap=softcap)
    if out is None:
        options = attention_mask, dropout, causal, scaling, True
        plain: tuple[Any, ...] = *guards.autocast(devices.TYPE, query, key, value), *options
        if finite_gradients.is_needed(*plain) or handed_over.is_changed(*plain[:4]):
            out = native.attend(*plain)
    if out is None:
        return _sdpa(*arguments, causal)
    return out.transpose(1, 2).contiguous(), None


def _batched(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    position_bias: torch.Tensor | None,
    cache: Any,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, None]:
    """A layer's attention in a step of continuous batching.

    Raises:
        ValueError: on a keyword that is not supported.
    """
    if position_bias is not None or dropout:
        named = "dropout" if position_bias is None else "position_bias"
        raise ValueError(_refusal(f"{named} in continuous batching"))
    if continuous_batching is None or continuous_batching.UNSERVED or cache is None:
        arguments = module, query, key, value, mask
        return _by_transformers(*arguments, scaling, softcap, cache, options)
    for name in options:
        if options[name] is not None and name not in WITHOUT_EFFECT | continuous_batching.KEYWORDS:
            _check(name, options[name], None, key)
    tensors = query, key, value
    return continuous_batching.forward(module, *tensors, scaling, softcap, cache, options), None


def _by_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    cache: Any,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, None]:
    """Transformers' own attention in a step that is not served, and a counted reason.

    Raises:
        ValueError: when it would leave out a mask or a soft cap.
    """
    reason = "its internals are unknown here" if continuous_batching is None else ""
    reason = reason or continuous_batching.UNSERVED or "layers that share keys and values"
    invariance.forbid(reason)
    counters.count_fallback(Refusal(Kind.BATCHING, reason).reason, by="Transformers' own attention")
    if mask is None or (cache is not None and softcap is not None):
        raise ValueError(_refusal(f"continuous batching of such layers ({reason})"))
    is_plain = softcap is None and options.get("s_aux") is None
    own: Callable[..., tuple[torch.Tensor, None]] = sdpa_attention_forward
    if cache is not None:  # of a version in which the function updates it
        name = "paged|sdpa" if is_plain else "paged|eager"
        own = AttentionInterface._global_mapping.get(name) or own
        options = {**options, "cache": cache}
    elif not is_plain:
        own = sys.modules[type(module).__module__].eager_attention_forward
        options = options if softcap is None else {**options, "softcap": softcap}
    out, *_ = native.call(own, module, query, key, value, mask, scaling=scaling, **options)
    return out, None


def paged_attention_forward(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """`attention_forward` under Transformers 5.17's name for continuous batching.

    Raises:
        ValueError: outside of continuous batching: models make no masks under this name.
    """
    if _OF_STEPS not in options:
        raise ValueError(
            f"attn_implementation='paged|{NAME}' is for generate_batch: use '{NAME}' elsewhere"
        )
    return attention_forward(*arguments, **options)


def _refusal(what: str) -> str:
    return f"attn_implementation='{NAME}' has no {what}: use 'eager'"


def _check(name: str, value: Any, mask: torch.Tensor | None, key: torch.Tensor) -> None:
    """Refuse a keyword that would be ignored although it changes the result.

    Raises:
        ValueError: names the keyword.
    """
    if name in _REFUSED:
        raise ValueError(_refusal(f"{_REFUSED[name]} ({name})"))
    if name == "output_attentions":
        if value:
            raise ValueError(_refusal(f"attention weights to return ({name})"))
    elif name in _PACKED:
        if mask is None and len(value) > 2:  # several sequences
            raise ValueError(
                f"attn_implementation='{NAME}' tells packed sequences by their mask, and {name} "
                "comes without one: pass position_ids, or use 'flash_attention_2'"
            )
    elif name == "sliding_window":
        if mask is None and isinstance(value, int) and 0 < value < key.shape[2]:
            raise ValueError(
                f"attn_implementation='{NAME}' knows a window by its mask, and {name}={value} "
                f"comes without one for {key.shape[2]} keys: use 'eager'"
            )
    else:
        raise ValueError(
            f"attn_implementation='{NAME}' does not know the keyword {name}: use 'sdpa' or 'eager' "
            f"(where it changes nothing, add it to {__name__}.WITHOUT_EFFECT)"
        )


def _is_causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
) -> bool:
    """True if query i sees keys 0..i: several queries of a causal layer without a mask.

    Raises:
        ValueError: when neither the module nor the argument defines `is_causal`.
    """
    if mask is not None or not query.shape[2] > 1:
        return False
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"attn_implementation='{NAME}' has no mask from {type(module).__name__}, which does "
            "not say is_causal: use 'eager'"
        )
    return bool(causal)


def _with_positions(
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """A position bias merged with the mask, as by `sdpa`: hidden keys have the type's lowest
    number.
    """
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return bias + mask
    return torch.where(mask, bias, torch.finfo(key.dtype).min)


def _sdpa(*arguments: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Transformers' own attention, with PyTorch's attention not overridden."""
    invariance.forbid("Transformers' own attention")
    result: tuple[torch.Tensor, None]
    if torch.compiler.is_compiling():
        result = sdpa_attention_forward(*arguments, **kwargs)
    else:
        result = native.call(sdpa_attention_forward, *arguments, **kwargs)
    return result


def _tuned(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor | None:
    options = mask, dropout, is_causal, scale, True
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        out = dispatch.attention(query, key, value, *options)
        if out is not None:
            return None if out is dispatch.REFUSED else out
    elif is_causal and query.shape[2] != key.shape[2]:  # a static cache: `sdpa` truncates it
        return None
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    if is_compiling:
        return operate(query, key, value, *options)
    operand = None if mask is None else as_operand(mask, query, key, is_causal)
    return serving.answer(AttentionCall(query, key, value, *options, NONE, operand))


def attention_mask(*arguments: Any, config: Any = None, **options: Any) -> torch.Tensor | None:
    """`sdpa_mask`, with a tensor where the causal flag would be wrong.

    Models whose last layers share keys and values drop queries after they made their masks. The
    remaining queries do not start at key 0, so these models always get a tensor.
    """
    if getattr(config, "num_kv_shared_layers", None):
        options["allow_is_causal_skip"] = False
    if torch.compiler.is_dynamo_compiling() and _is_told_by_shape(**options):
        return None
    make: Callable[..., torch.Tensor | None] = sdpa_mask
    return make(*arguments, config=config, **options)


def _is_told_by_shape(
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """True if sizes alone say that `sdpa_mask` may leave out the mask.

    Before PyTorch 2.14 `torch.compiler.is_exporting` is true in every graph, so `sdpa_mask` makes a
    tensor, which no tuned kernel takes there. A padding mask is data that a graph cannot inspect.
    """
    if attention_mask is not None or q_length is None or kv_length is None:
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    if allow_is_bidirectional_skip:
        return True
    if not allow_is_causal_skip or isinstance(q_offset, torch.Tensor):
        return False
    return bool(q_length == 1 or kv_length == q_length or q_offset == 0)


class _Found(threading.local):
    is_counted = False


_found = _Found()
"""Result of `_look` at compile time, read by the next line of the graph."""


def _look(context: Any) -> None:
    """Note at compile time if ``position_ids``, a local of the caller, counts up from a number."""
    _found.is_counted = _counts_up(context.get_local("position_ids").as_proxy().node)


def _counts_up(node: Any) -> bool:
    """True if a node of the graph is a `torch.arange` of step 1, perhaps shifted and expanded."""
    while node.op in ("call_function", "call_method"):
        before, *ends = node.args
        if node.target is torch.arange:
            return len(node.args) < 3 and "step" not in node.kwargs
        if node.target in (operator.add, torch.add):
            numbers = [n for n in ends if not isinstance(_value(n), torch.Tensor)]
            if node.kwargs or len(numbers) != 1:
                return False
        elif (node.target, *ends) != ("unsqueeze", 0) and node.target != "expand":
            return False
        node = before
    return False


def _value(argument: Any) -> Any:
    """The example value of a graph's node; a constant is returned as it is."""
    return argument.meta.get("example_value") if hasattr(argument, "meta") else argument


_is_counted: Callable[[], bool] = torch.compiler.assume_constant_result(lambda: _found.is_counted)


def _packed_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Transformers' `find_packed_sequence_indices`; None for a graph that counts its positions.

    Such a graph holds one sequence, but Transformers takes all positions in a graph for packed
    ones.
    """
    if torch.compiler.is_dynamo_compiling():
        comptime(_look)
        if _is_counted():
            return None
    lengths: torch.Tensor | None = _find_packed(position_ids)
    return lengths


_find_packed = masking_utils.find_packed_sequence_indices
masking_utils.find_packed_sequence_indices = _packed_sequences
AttentionInterface.register(NAME, attention_forward)
AttentionInterface.register(f"paged|{NAME}", paged_attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
if transformers_experts is not None:
    transformers_experts.register(NAME)
