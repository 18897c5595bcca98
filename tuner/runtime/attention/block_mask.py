"""Tables of FlexAttention's `BlockMask` that tuned kernels read, made once for each mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from tuner.errors import ConfigError
from tuner.problem import Axes
from tuner.problem.attention_masks import BLOCK_SIZE
from tuner.runtime.call import devices
from tuner.runtime.call.refusal import Kind, Refusal, once

if TYPE_CHECKING:  # all of Dynamo comes with it
    from torch.nn.attention.flex_attention import BlockMask

MAX_BITS_BYTES = 1 << 30
"""Most bytes of a mask's bits: enough for one mask over 92,000 queries and keys."""
#: Pairs of queries and keys, over all batches and heads, evaluated by one call of a mask function.
_PAIRS_AT_ONCE = 1 << 26


class BlockTables(NamedTuple):
    """The operands of a block-sparse mask; see `AttentionProblem`."""

    counts: torch.Tensor
    indices: torch.Tensor
    bits: torch.Tensor


_ATTRIBUTE = "_tuner_tables"
#: Tables of each mask, by the stream that they were made on: the allocator reuses freed memory in
#: the order of that stream.
_known: WeakKeyDictionary[BlockMask, dict[int, BlockTables]] = WeakKeyDictionary()


Mask: TypeAlias = "BlockMask | BlockTables"
"""A mask in both forms."""


def counts_of(mask: Mask) -> torch.Tensor:
    """Counts of blocks, (B or 1, H or 1, blocks of queries, ...)."""
    return mask.counts if isinstance(mask, BlockTables) else mask.kv_num_blocks


def axes_of(mask: Mask) -> Axes:
    """Name of the mask's axes in a problem; see `AttentionProblem`."""
    batches, heads = counts_of(mask).shape[:2]
    by_axes: dict[tuple[bool, bool], Axes] = {
        (False, False): "1",
        (True, False): "b",
        (False, True): "h",
        (True, True): "bh",
    }
    return by_axes[batches > 1, heads > 1]


def misfit(mask: Mask, query: torch.Tensor, key: torch.Tensor) -> Refusal | None:
    """Reason why no kernel takes a mask beside a query (B, H, SQ, D) and a key (B, HKV, SKV, D);
    else None.
    """
    if isinstance(mask, BlockTables):
        return None  # its operator has compared them
    shape = mask.kv_num_blocks.shape
    lengths = query.shape[2], key.shape[2]
    if (
        len(shape) != 3
        or shape[0] not in (1, query.shape[0])
        or shape[1] not in (1, query.shape[1])
    ):
        text = f"its blocks are {tuple(shape)}, not (B or 1, H or 1, blocks of queries)"
    elif tuple(mask.seq_lengths) != lengths:
        text = f"it is for {tuple(mask.seq_lengths)} queries and keys, not {lengths}"
    elif shape[2] * mask.BLOCK_SIZE[0] < lengths[0]:
        text = f"{shape[2]} blocks of {mask.BLOCK_SIZE[0]} hold fewer than {lengths[0]} queries"
    else:
        return _oversize(mask)
    return Refusal(Kind.BLOCK_MASK, text)


def _oversize(mask: BlockMask) -> Refusal | None:
    """Refusal of a mask whose bits take too much memory; else None."""
    batches, heads = mask.kv_num_blocks.shape[:2]
    rows, columns = (-(-length // BLOCK_SIZE) for length in mask.seq_lengths)
    needed = batches * heads * rows * columns * BLOCK_SIZE**2 // 8
    if needed <= MAX_BITS_BYTES:
        return None
    return Refusal(Kind.BLOCK_MASK, f"its bits take {needed} bytes (allowed: {MAX_BITS_BYTES})")


def made_of(mask: BlockMask) -> BlockTables | None:
    """Tables of a mask, if a call or `prepare_block_mask` has made them; may be traced."""
    return getattr(mask, _ATTRIBUTE, None)


def prepare_block_mask(block_mask: BlockMask) -> BlockMask:
    """Make the tables of a mask, which graphs of torch.compile and captured CUDA graphs need.

    The first eager call that a tuned kernel serves also makes them.

    Args:
        block_mask: FlexAttention's mask. Its mask function is evaluated for all queries and keys.

    Returns:
        `block_mask`.

    Raises:
        ConfigError: when it is not a `BlockMask`, has other axes than batches and heads, or is too
            large.
    """
    check(block_mask)
    if block_mask.kv_num_blocks.dim() != 3:
        shape = tuple(block_mask.kv_num_blocks.shape)
        raise ConfigError(f"its blocks are {shape} (allowed: of batches, heads, blocks of queries)")
    if refusal := _oversize(block_mask):
        raise ConfigError(refusal.detail)
    tables_of(block_mask)
    return block_mask


def check(block_mask: object) -> None:
    """Raises: ConfigError: when it is not a `BlockMask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise ConfigError(
            f"block_mask is {type(block_mask).__name__} (allowed: BlockMask, which "
            "torch.nn.attention.flex_attention.create_block_mask makes)"
        )


def check_tables(tables: BlockTables, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check tables beside a query (B, H, SQ, D) and a key (B, HKV, SKV, D).

    Raises:
        ConfigError: names the given and the allowed shapes.
    """
    batch, heads = query.shape[:2]
    rows, columns = (-(-t.shape[2] // BLOCK_SIZE) for t in (query, key))
    counts = tuple(tables.counts.shape)
    actual = [(tuple(t.shape), t.dtype, t.is_contiguous()) for t in tables]
    tails = (2,), (columns,), (columns, BLOCK_SIZE, BLOCK_SIZE // 32)
    expected = [((*counts[:2], rows, *tail), torch.int32, True) for tail in tails]
    if actual != expected or counts[0] not in (1, batch) or counts[1] not in (1, heads):
        raise ConfigError(
            f"block_counts {counts} of {tables.counts.dtype} and the other tables are not for "
            f"{rows} blocks of queries and {columns} of keys (allowed: contiguous int32 tables of "
            f"a prepared mask for {batch} or 1 batches and {heads} or 1 heads)"
        )


def tables_of(mask: Mask) -> BlockTables | Refusal:
    """Tables of a mask that fits, on its device: the known ones, or new ones.

    The mask function is evaluated once for each mask and stream, by PyTorch's operations on the
    current stream, without waiting for the device. A graph capture needs tables made before it:
    memory allocated in the capture does not outlive it.
    """
    if isinstance(mask, BlockTables):
        return mask
    tables = _known.setdefault(mask, {})
    stream = devices.stream_of(mask.kv_num_blocks.get_device())
    if stream in tables:
        return tables[stream]
    if devices.is_capturing():  # tables enqueued before the capture are ready in it
        whole = next(iter(tables.values()), None)
        return once(Kind.CAPTURING, "call once before") if whole is None else whole
    with torch.no_grad():
        whole = tables[stream] = tabulated(mask)
    if made_of(mask) is None:
        setattr(mask, _ATTRIBUTE, whole)
    return whole


def tabulated(mask: BlockMask) -> BlockTables:
    """New tables of a mask that fits, on its device."""
    queries, keys = mask.seq_lengths
    batches, heads = mask.kv_num_blocks.shape[:2]
    columns = -(-keys // BLOCK_SIZE)
    listed = _listed(mask.kv_num_blocks, mask.kv_indices, mask)
    whole = torch.zeros_like(listed)
    if mask.full_kv_num_blocks is not None:
        whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, mask)
    step = max(1, _PAIRS_AT_ONCE // (batches * heads * keys * BLOCK_SIZE)) * BLOCK_SIZE
    states, bits = [], []
    for first in range(0, queries, step):
        seen = _seen(mask, listed, whole, first, min(first + step, queries))
        state, of_blocks = _blocks(seen, columns)
        states.append(state)
        bits.append(of_blocks)
    state = torch.cat(states, 2)
    order = state.argsort(dim=-1, stable=True)
    counts = torch.stack([(state == value).sum(-1, dtype=torch.int32) for value in (0, 1)], -1)
    every = torch.cat(bits, 2)
    ordered = every.gather(3, order[..., None, None].expand(every.shape))
    return BlockTables(counts.contiguous(), order.int(), ordered)


def _listed(counts: torch.Tensor, indices: torch.Tensor | None, mask: BlockMask) -> torch.Tensor:
    """(B, H, blocks of queries, blocks of keys) of the mask's own size: true where listed."""
    if indices is None:
        raise TypeError("the BlockMask has counts of blocks and no indices (allowed: both)")
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    places = torch.arange(indices.shape[-1], device=indices.device)
    is_used = places < counts[..., None]
    # Entries behind the last block of a row go to a column that is dropped.
    to = torch.where(is_used, indices, columns).long()
    marked = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return marked.scatter_(-1, to, True)[..., :columns]


def _seen(
    mask: BlockMask, listed: torch.Tensor, whole: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """(B, H, last - first, SKV): true where queries first..last see a key."""
    from torch.nn.attention.flex_attention import create_mask

    device, keys = listed.device, mask.seq_lengths[1]

    def of_rows(b: Any, h: Any, query: Any, key: Any) -> Any:
        return mask.mask_mod(b, h, query + first, key)

    inside = create_mask(of_rows, *listed.shape[:2], last - first, keys, device)
    of_queries = torch.arange(first, last, device=device) // mask.BLOCK_SIZE[0]
    of_keys = torch.arange(keys, device=device) // mask.BLOCK_SIZE[1]
    listed, whole = (blocks[:, :, of_queries][..., of_keys] for blocks in (listed, whole))
    return whole | (listed & inside)


def _blocks(visible: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """State and bits of each block of 128 queries and 128 keys.

    The state is 0 when all pairs are seen, 1 when some are, 2 when none is. The bits are int32 (B,
    H, rows, columns, 128, 4).
    """
    behind_q = -visible.shape[2] % BLOCK_SIZE
    behind_k = columns * BLOCK_SIZE - visible.shape[3]
    pad = torch.nn.functional.pad
    # Rows behind the last query are never stored: they hide nothing.
    visible = pad(pad(visible, (0, behind_k)), (0, 0, 0, behind_q), value=True)
    blocks = visible.unflatten(3, (columns, BLOCK_SIZE)).unflatten(2, (-1, BLOCK_SIZE))
    of_rows = blocks.transpose(3, 4)  # (B, H, rows, columns, 128 queries, 128 keys)
    is_any = of_rows.flatten(-2).any(-1)
    if behind_q:
        last = of_rows[:, :, -1, :, : BLOCK_SIZE - behind_q]
        is_any[:, :, -1] = last.flatten(-2).any(-1)
    state = 2 - is_any.int() - (is_any & of_rows.flatten(-2).all(-1)).int()
    # Eight keys are four pairs; each of the four words of a row holds one pair of every eight keys.
    pairs = of_rows.unflatten(-1, (BLOCK_SIZE // 8, 4, 2)).transpose(-3, -2)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=visible.device)
    bytes_ = (pairs.flatten(-3).unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return state, bytes_.view(torch.int32)
