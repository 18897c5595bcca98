"""Transformers' continuous batching (`generate_batch`) over its own paged cache.

A step's new keys and values are written to the slots that Transformers names. The kernel then reads
the cache's pages; Transformers' own `sdpa` would gather every key and make a dense mask.

- Layers that see all keys: the kernel reads the cache's own pages. In a step that only decodes, the
  page table is Transformers' block table. In other steps it is made on the device, once a step,
  from the indices that Transformers reads and writes.
- Layers with a window: Transformers keeps the last keys in a ring buffer, which new keys overwrite.
  The ring's keys in order and the new keys are copied into temporary pages of the step.

Transformers treats such a model like one with FlashAttention, which needs no dense masks. It then
offers block tables, and captures its steps as CUDA graphs. Calls that no tuned kernel takes go to
Transformers' own `sdpa`, or with sinks to its `eager`. Their mask is made on the device.

Before Transformers 5.24 the attention function is given the cache and updates it. From 5.24 on each
layer does (`PagedAttentionCache.update`); `_hand_over` passes the cache to the function instead.
Models whose layers share keys and values are Transformers' own there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, __version__
from transformers.generation.continuous_batching import (
    cache as paged_cache,
)
from transformers.generation.continuous_batching import (
    continuous_api,
    initialization,
    input_outputs,
)

from tuner.problem.attention_masks import PAGE_MULTIPLE
from tuner.problem.engines import WINDOW_PAGE
from tuner.runtime.attention.attention_call import scale_of
from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged import PagedCall, paged_call
from tuner.runtime.call import counters, invariance, native, serving
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.engines.versions import TRANSFORMERS

UNSERVED = TRANSFORMERS.refusal(__version__)
"""Reason why no step is served; empty when steps are."""
NAMES = ("tuner", "paged|tuner")
"""Values of `attn_implementation`. For continuous batching Transformers 5.17 puts `paged|` before
the name; 5.23 removes it."""

KEYWORDS = frozenset({
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q"),
    *("max_seqlen_k", "read_index", "write_index", "block_table", "logits_indices"),
    *("logits_processor_args", "is_causal", "sliding_window", "s_aux"),
})  # fmt: skip
"""Keywords of a layer's call that are used here, or repeat facts of the cache."""


class _Layer(NamedTuple):
    """Storage of one layer's keys and values in the cache."""

    group: int
    """Index of the layer's block table and indices in a step's lists."""
    keys: torch.Tensor
    """(slots, HKV, D); the step's indices count these slots."""
    values: torch.Tensor
    page_size: int
    window: int
    """Number of keys that a query sees, including its own; 0: all."""
    trash: int
    """Slot for the keys of padding; never read."""
    zeros: int
    """Slot that is never written."""

    @classmethod
    def of(cls, cache: Any, index: int) -> _Layer:
        """Layer `index` of a `PagedAttentionCache`."""
        if (allocators := getattr(cache, "layer_to_allocator", None)) is not None:
            blocks = allocators[index]
            keys, values = blocks._kv_token_views[index]
            size, window = blocks.tokens_per_page, getattr(blocks, "sliding_window", 0)
            trash, zeros = blocks.write_trash_index, blocks.read_trash_index
            return cls(blocks.index, keys, values, size, window, trash, zeros)
        group, place = cache.layer_index_to_group_indices[index]
        keys, values = cache.key_cache[place], cache.value_cache[place]
        window = cache.sliding_windows[index]  # 1: none
        trash, zeros = cache.write_trash_index, cache.read_trash_index
        window = 0 if window == 1 else window
        return cls(group, keys, values, cache.block_size, window, trash, zeros)


class _Batch(NamedTuple):
    """Sequences of one step, for the layers of one kind."""

    starts_q: torch.Tensor
    """int32 (B + 1,): first query of each sequence. A padded step repeats the last end."""
    starts_k: torch.Tensor
    """int32 (B + 1,): as `starts_q`, for the keys that each sequence's queries see."""
    longest_q: int
    longest_kv: int
    rows: int
    """Queries of all sequences, including padding."""
    block_table: torch.Tensor | None
    """int32 (B, blocks), pages of the cache; None: `reads` and `writes` are given."""
    reads: torch.Tensor
    """int64: slots of each sequence's keys, in order; empty when all keys of the step are new."""
    writes: torch.Tensor
    """int64 (rows,): slots of the new keys."""

    @classmethod
    def of(cls, layer: _Layer, rows: int, options: Mapping[str, Any]) -> _Batch:
        """The batch that the keywords of a layer's attention describe."""
        kind = "sliding_attention" if layer.window else "full_attention"
        starts_k, longest_kv = options["cu_seq_lens_k"], _either(options, "max_length_k")
        if isinstance(starts_k, Mapping):
            starts_k, longest_kv = starts_k[kind], longest_kv[kind]
        table, starts_q = options.get("block_table"), options["cu_seq_lens_q"]
        if table is not None:
            table, none = table[layer.group], starts_k.new_empty(0, dtype=torch.int64)
            longest_kv = table.shape[1] * layer.page_size
            return cls(starts_q, starts_k, 1, longest_kv, rows, table, none, none)
        slots = options["read_index"][layer.group], options["write_index"][layer.group]
        # A sequence has at least as many keys as queries; a padded step may claim fewer.
        longest_q = min(_either(options, "max_length_q"), longest_kv)
        return cls(starts_q, starts_k, longest_q, longest_kv, rows, None, *slots)


def _either(options: Mapping[str, Any], name: str) -> Any:
    """A keyword, under its name in Transformers 5.23 or in 5.17."""
    return options[name] if name in options else options[name.replace("length", "seqlen")]


class _Copies(NamedTuple):
    """Temporary pages that a window's keys are copied to."""

    pages: int
    """Number of pages, including one for padding."""
    sources: torch.Tensor
    """int64: for each slot of the pages, the cache's slot; empty when all keys are new."""
    new: torch.Tensor
    """int64 (rows,): slots of the pages for the new keys."""

    def of(self, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """(pages, `WINDOW_PAGE`, HKV, D) of a cache's slots and new rows; unused slots are
        undefined.
        """
        if self.sources.numel():
            copied = slots.index_select(0, self.sources)
        else:
            copied = slots.new_empty(self.pages * WINDOW_PAGE, *slots.shape[1:])
        return copied.index_copy_(0, self.new, new).unflatten(0, (self.pages, WINDOW_PAGE))


@dataclass
class _Group:
    """Tensors of a step that the layers of one kind share, all on the device."""

    batch: _Batch
    lengths: torch.Tensor
    """int32 (B,): keys of each sequence."""
    owner_q: torch.Tensor
    """int64 (rows,): each query's sequence; B for padding."""
    place_q: torch.Tensor
    """int64 (rows,): index of each query's own key within its sequence."""
    table: torch.Tensor
    """int32 (B, columns): pages of each sequence."""
    writes: torch.Tensor
    """As `_Batch.writes`; with block tables also."""
    copies: _Copies | None = None
    """None: the cache's own pages are read."""
    mask: torch.Tensor | None = None
    """Mask that Transformers' own attention adds to the scores; made when it is called."""


@dataclass
class _Step:
    """State of a forward pass, up to the layer called last."""

    starts_q: weakref.ref[torch.Tensor]
    layer: int = -1
    groups: dict[int, _Group] = field(default_factory=dict)


_steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()


def _group(cache: Any, index: int, layer: _Layer, rows: int, options: Mapping[str, Any]) -> _Group:
    """Tensors of the step for the layer's kind.

    Each pass makes them anew, even from the same tensors: a CUDA graph has to capture these
    operations.
    """
    step, starts_q = _steps.get(cache), options["cu_seq_lens_q"]
    if step is None or step.starts_q() is not starts_q or index <= step.layer:
        step = _steps[cache] = _Step(weakref.ref(starts_q))
    step.layer = index
    if layer.group not in step.groups:
        step.groups[layer.group] = _derived(layer, _Batch.of(layer, rows, options))
    return step.groups[layer.group]


def _derived(layer: _Layer, batch: _Batch) -> _Group:
    count = len(batch.starts_q) - 1
    lengths = batch.starts_k[1:] - batch.starts_k[:-1]
    queries = _counted(batch.rows, lengths)
    owner_q = torch.searchsorted(batch.starts_q[1:], queries, right=True)
    mine = owner_q.clamp(max=count - 1)
    place_q = lengths[mine] - (batch.starts_q[mine + 1] - queries)
    group = _Group(batch, lengths, owner_q, place_q.long(), lengths, batch.writes)
    if layer.window:
        invariance.forbid("a window's keys are copied from where those of the step begin")
        _copy_into_pages(group)
    elif batch.block_table is None:
        slots = batch.reads if batch.reads.numel() else batch.writes
        columns = _counted(_pages(batch.longest_kv, layer.page_size), lengths)
        first = batch.starts_k[:-1, None] + columns * layer.page_size
        group.table = (slots[first.clamp(max=len(slots) - 1)] // layer.page_size).int()
    else:
        group.table, place = batch.block_table, group.place_q.clamp(min=0)
        page = batch.block_table[mine, place // layer.page_size].long()
        slots = page * layer.page_size + place % layer.page_size
        group.writes = torch.where(owner_q < count, slots, layer.trash)
    return group


def _copy_into_pages(group: _Group) -> None:
    """Assign pages to a step's keys: each sequence begins a page, and one page is for padding."""
    batch, count = group.batch, len(group.lengths)
    total = batch.reads.numel() or batch.rows
    pages = total // WINDOW_PAGE + count  # at most
    counts = (group.lengths + (WINDOW_PAGE - 1)) // WINDOW_PAGE
    last = counts.cumsum(0, dtype=torch.int32)
    first = last - counts
    every = _counted(pages + 1, last)
    owner = torch.searchsorted(last, every, right=True).clamp(max=count - 1)
    place = (every - first[owner])[:, None] * WINDOW_PAGE + _counted(WINDOW_PAGE, last)
    source = (batch.starts_k[owner, None] + place).flatten().clamp(max=total - 1)
    mine = group.owner_q.clamp(max=count - 1)
    slots = first[mine] * WINDOW_PAGE + group.place_q
    new = torch.where(group.owner_q < count, slots, pages * WINDOW_PAGE)
    sources = batch.reads[source] if batch.reads.numel() else batch.reads
    group.copies = _Copies(pages + 1, sources, new)
    columns = _counted(_pages(batch.longest_kv, WINDOW_PAGE), last)
    group.table = (first[:, None] + columns).clamp(max=pages)


def _pages(slots: int, size: int) -> int:
    return max(1, -(-slots // size))


def _counted(count: int, like: torch.Tensor) -> torch.Tensor:
    """int32 0..count - 1, made on the device, so that a graph can capture it."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    cache: Any,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Write a step's keys and values into the cache, and attend over it.

    Args:
        module: the layer, with its `layer_idx`.
        query: (1, H, rows, D): the queries of all sequences, one after the other.
        key: (1, HKV, rows, D)
        value: (1, HKV, rows, D)
        scaling: factor of the scores; 1/sqrt(D) when None.
        softcap: cap of the scaled scores; none when None.
        cache: Transformers' `PagedAttentionCache`.
        options: the step's keywords, `KEYWORDS`.

    Returns:
        (1, rows, H, D). Rows of padding are undefined.
    """
    index: Any = module.layer_idx
    layer = _Layer.of(cache, index)
    group = _group(cache, index, layer, query.shape[2], options)
    rows = tuple(tensor[0].transpose(0, 1) for tensor in (query, key, value))
    sinks = options.get("s_aux")
    out: torch.Tensor | None = None
    if layer.page_size % PAGE_MULTIPLE and not layer.window:
        slots = f"pages have {layer.page_size} slots (allowed: multiples of {PAGE_MULTIPLE})"
        counters.count_fallback(Refusal(Kind.TENSORS, slots).reason)
    else:
        call = _call(layer, group, rows, scaling, softcap, sinks)
        out = serving.answer(call)
        is_unknown = softcap or (sinks is not None and getattr(module, "sinks", None) is None)
        if out is None and is_unknown:  # for Transformers' own attention
            out = call.by_pytorch()
    if out is None:
        tensors = query, key, value
        return _by_transformers(module, tensors, scaling, cache, layer, group, options)
    if group.copies is not None:
        _write(layer, group, *rows[1:])
    return out[None]


def _write(layer: _Layer, group: _Group, key: torch.Tensor, value: torch.Tensor) -> None:
    layer.keys.index_copy_(0, group.writes, key)
    layer.values.index_copy_(0, group.writes, value)


def _call(
    layer: _Layer,
    group: _Group,
    rows: tuple[torch.Tensor, ...],
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> PagedCall:
    """The call over the cache's pages with the new keys written into them, or over copied pages.

    Copies leave the ring buffer unchanged, in case Transformers' own attention must answer.
    """
    query, key, value = rows
    batch, copies = group.batch, group.copies
    if copies is None:
        _write(layer, group, key, value)
        count = min(len(layer.keys), len(layer.values)) // layer.page_size
        keys, values = (
            slots[: count * layer.page_size].unflatten(0, (count, layer.page_size))
            for slots in (layer.keys, layer.values)
        )
    else:
        keys, values = copies.of(layer.keys, key), copies.of(layer.values, value)
    # The copied keys of a single query begin at its window.
    left = layer.window - 1 if layer.window and batch.longest_q > 1 else -1
    starts_q = batch.starts_q if batch.block_table is None else None
    logits = None if sinks is None else sinks.float()
    tensors = query, keys, values, group.table, group.lengths, starts_q, logits
    extras = Extras(left, -1, float(softcap or 0.0))
    scale = scale_of(query, scaling)
    return paged_call(*tensors, batch.longest_q, batch.longest_kv, True, extras, scale, False)


def _by_transformers(
    module: torch.nn.Module,
    tensors: tuple[torch.Tensor, ...],
    scaling: float | None,
    cache: Any,
    layer: _Layer,
    group: _Group,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Transformers' own attention, with the mask that it would have made on the host."""
    invariance.forbid("Transformers' own attention")
    mapping = AttentionInterface._global_mapping
    name = "paged|sdpa" if given.get("s_aux") is None else "paged|eager"
    own = mapping.get(name) or mapping["sdpa"]
    slots = _every_slot(group, layer)
    if group.mask is None:
        group.mask = _mask(group, layer, tensors[0].dtype)
    options = {name: value for name, value in given.items() if name not in ("s_aux", "is_causal")}
    options["block_table"] = None
    options["read_index"] = {layer.group: slots}
    options["write_index"] = {layer.group: group.writes}
    scale = scale_of(tensors[0], scaling)
    query, key, value = tensors
    if _LAYERS_UPDATE:
        key, value = _update(cache, key, value, module.layer_idx, options)
    arguments = module, query, key, value, group.mask
    out: torch.Tensor = native.call(own, *arguments, scaling=scale, cache=cache, **options)[0]
    return out


def _every_slot(group: _Group, layer: _Layer) -> torch.Tensor:
    """The slots that Transformers gathers: the step's indices, or all slots of the block table."""
    if group.batch.block_table is None:
        return group.batch.reads
    first = group.table.long() * layer.page_size
    slots = (first[..., None] + _counted(layer.page_size, first)).flatten(1)
    is_used = _counted(slots.shape[1], first) < group.lengths[:, None]
    return torch.where(is_used, slots, layer.zeros).flatten()


def _mask(group: _Group, layer: _Layer, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, rows, gathered keys): 0, or the type's lowest number for hidden keys."""
    batch, count = group.batch, len(group.lengths)
    if batch.block_table is None:
        keys = _counted(batch.reads.numel() or batch.rows, group.lengths)
        owner = torch.searchsorted(batch.starts_k[1:], keys, right=True)
        place = keys - batch.starts_k[owner.clamp(max=count - 1)]
    else:
        room = group.table.shape[1] * layer.page_size
        keys = _counted(count * room, group.lengths)
        owner, place = keys // room, keys % room
    mine = group.place_q[:, None]
    visible = (group.owner_q[:, None] == owner) & (place <= mine)
    if layer.window:
        visible &= place > mine - layer.window
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def _is_ours(config: Any) -> bool:
    is_shared = _LAYERS_UPDATE and getattr(config, "num_kv_shared_layers", None)
    is_named = getattr(config, "_attn_implementation", None) in NAMES
    return is_named and not UNSERVED and not is_shared


_LAYERS_UPDATE = tuple(map(int, __version__.split(".")[:2])) >= (5, 24)
"""True when layers update the cache before they call the attention function."""
_update = paged_cache.PagedAttentionCache.update
_makes_masks = input_outputs.attn_mask_is_needed
_is_flash = initialization.is_flash_attention_requested
_check_block_tables = initialization.ensure_decode_fast_path_is_available
_model_kwargs = input_outputs.ContinuousBatchingIOs.get_model_kwargs


def _needs_no_mask(
    config: Any = None,
    requested_attention_implementation: str | None = None,
    version: int | list[int] | None = None,
) -> bool:
    """`is_flash_attention_requested` of continuous batching, which means "needs no masks" there."""
    if config is not None and requested_attention_implementation is None and _is_ours(config):
        return True
    if config is None and requested_attention_implementation in NAMES:
        return True
    return bool(_is_flash(config, requested_attention_implementation, version))


def _needs_masks(config: Any) -> bool:
    """`attn_mask_is_needed` of continuous batching, also where Transformers' `sdpa` answers for
    `tuner`.
    """
    is_named = getattr(config, "_attn_implementation", None) in NAMES
    return bool(_makes_masks(config)) or (is_named and not _is_ours(config))


def _allow_block_tables(config: Any, cb_config: Any, user_requested: bool) -> None:
    """`ensure_decode_fast_path_is_available`: on any device, with pages that a kernel takes."""
    if not _is_ours(config):
        _check_block_tables(config, cb_config, user_requested)
        return
    kinds = paged_cache.group_layers_by_attn_type(config)
    size = cb_config.page_size if hasattr(cb_config, "page_size") else cb_config.block_size
    is_ring = "sliding_attention" in (kinds[1] if isinstance(kinds, tuple) else kinds)
    if is_ring or size % PAGE_MULTIPLE:
        cb_config.max_blocks_per_request = 0


def _with_no_mask(self: Any, *arguments: Any, **options: Any) -> Any:
    """`ContinuousBatchingIOs.get_model_kwargs` with an empty mask, which models pass on unchanged;
    without a mask they would make one from the positions.
    """
    kwargs = _model_kwargs(self, *arguments, **options)
    if _is_ours(self.config):
        kwargs["attention_mask"] = torch.empty(1, 1, 0, 0, device=kwargs["input_ids"].device)
    return kwargs


def _hand_over(
    self: Any, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PagedAttentionCache.update` as layers call it, whose `kwargs` are those of the attention
    function. For a model of ours the function is given the cache, and writes it.
    """
    if not _is_ours(self.config):
        updated: tuple[torch.Tensor, torch.Tensor] = _update(self, key, value, layer_idx, kwargs)
        return updated
    kwargs["cache"] = self
    return key, value


if _LAYERS_UPDATE and not UNSERVED:  # another version may call it otherwise
    paged_cache.PagedAttentionCache.update = torch.compiler.disable(_hand_over)
for _module in (paged_cache, continuous_api, initialization):
    _module.is_flash_attention_requested = _needs_no_mask
input_outputs.attn_mask_is_needed = _needs_masks
initialization.ensure_decode_fast_path_is_available = _allow_block_tables
input_outputs.ContinuousBatchingIOs.get_model_kwargs = _with_no_mask
