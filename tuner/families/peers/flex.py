"""FlexAttention under torch.compile: PyTorch's only fused attention for block-sparse masks, soft
caps, and windows over unequal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.peers import FLEX, PreparedCall, Vendor, compiled
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem, Problem
from tuner.problem.attention_masks import BLOCK_SIZE

#: Microseconds of a tiny call, not measured: taken for FlashAttention-2's. TFLOP/s of (4,16,4096,D)
#: under a causal mask, D <= 64 and above: an H200, 24 November 2026.
_START_US, _RATES = 7.0, (327.0, 341.0)

BY_TABLES: Mapping[str, int] = {"num_stages": 1}
"""`kernel_options` for a mask of `mask_by`. Triton would keep the table's words of further stages
in shared memory, more than there is."""
Seen = Callable[[Any, Any, Any, Any], Any]
"""True where query q of batch b and head h sees key k: a mask function of FlexAttention."""


class VendorFlex(Vendor):
    """``kernel``: flex."""

    name: ClassVar[str] = "vendor_flex"
    op: ClassVar[str] = AttentionProblem.op
    offered: ClassVar[tuple[str, ...]] = (FLEX,)

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        return super().supports(problem, gpu) or self.refusal(problem, FLEX)

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, AttentionProblem):
            return ""
        if problem.is_packed or problem.mask_operand:
            return f"{kernel} is not called with packed sequences, pages, biases or masks"
        is_square = problem.seqlen_q == problem.seqlen_kv
        if problem.block_mask or problem.softcap or (problem.is_windowed and not is_square):
            return ""
        return "FlexAttention is for block masks, soft caps, and windows with SQ != SKV"

    def connect(
        self, problem: AttentionProblem, kernel: str, scale: float
    ) -> Callable[..., Any] | str:
        attend = compiled(flex_call(problem, scale))
        if problem.block_mask:
            return MaskedCall(problem, attend, compiled(flex_call(problem, scale, BY_TABLES)))
        hides = problem.is_causal or problem.is_windowed
        mask = mask_of(problem, _visible(problem)) if hides else None
        return lambda query, key, value: attend(query, key, value, mask)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """A fixed part plus the work at the rate of a large problem."""
        if not isinstance(problem, AttentionProblem):
            return float("inf")
        rate = _RATES[problem.head_dim > 64] * gpu.peak_tflops / DEFAULT_GPU.peak_tflops
        return _START_US + problem.flops / rate / 1e6


class MaskedCall(PreparedCall):
    """FlexAttention under the mask of the given tables. The mask function is the closed form for
    the timed mask, and a lookup in the tables otherwise.

    Args:
        problem: with a block-sparse mask.
        attend: attend(query, key, value, mask).
        by_tables: as `attend`, for a mask that looks into tables.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        attend: Callable[..., Any],
        by_tables: Callable[..., Any],
    ) -> None:
        self._problem, self._attend, self._by_tables = problem, attend, by_tables

    def prepared(self, *inputs: Any) -> Callable[..., Any]:
        import torch

        problem, tables, visible = self._problem, inputs[3:], seen_by(*inputs[3:])
        batches, heads, *_ = problem.block_shape
        lengths = problem.seqlen_q, problem.seqlen_kv
        device, timed = inputs[0].device, _timed(problem)
        queries, keys = (torch.arange(length, device=device) for length in lengths)
        due = timed(0, 0, queries[:, None], keys)
        is_timed = all(
            torch.equal(visible(*at, queries[:, None], keys), due)
            for at in product(range(batches), range(heads))
        )
        attend = self._attend if is_timed else self._by_tables
        mask = mask_of(problem, timed, device) if is_timed else mask_by(*lengths, *tables)
        return lambda query, key, value, *_: attend(query, key, value, mask)


def flex_call(
    problem: AttentionProblem, scale: float, kernel_options: Mapping[str, int] | None = None
) -> Callable[..., Any]:
    """call(query, key, value, mask) of FlexAttention, not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    options: dict[str, Any] = {"scale": scale, "enable_gqa": problem.heads_q != problem.heads_kv}
    if problem.softcap:
        options["score_mod"] = _capped(problem.softcap)
    if kernel_options:
        options["kernel_options"] = dict(kernel_options)

    def call(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return flex_attention(query, key, value, block_mask=mask, **options)

    return call


def mask_of(problem: AttentionProblem, seen: Seen, device: Any = "cuda") -> Any:
    """The `BlockMask` of a mask function, with the axes of a problem's mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    batches, heads, *_ = problem.block_shape
    lengths = problem.seqlen_q, problem.seqlen_kv
    return create_block_mask(seen, batches, heads, *lengths, device=device)


def seen_by(counts: Any, indices: Any, bits: Any) -> Seen:
    """The mask function that looks into the tables of a block-sparse mask (`AttentionProblem`)."""
    import torch

    columns = indices.shape[-1]
    places = torch.arange(columns, device=indices.device, dtype=torch.int32).expand_as(indices)
    # Places behind a row's last block go to a column that is dropped.
    of_place = torch.where(places < counts.sum(-1, keepdim=True), indices, columns).long()
    place_of = indices.new_full((*indices.shape[:-1], columns + 1), columns)
    place_of = place_of.scatter_(-1, of_place, places)[..., :columns].contiguous()
    has_batch, has_heads = indices.shape[0] > 1, indices.shape[1] > 1

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = b * has_batch, h * has_heads, q // BLOCK_SIZE
        place = place_of[(*row, k // BLOCK_SIZE)]
        word = bits[(*row, place % columns, q % BLOCK_SIZE, k % 8 // 2)]
        bit = word >> (k % BLOCK_SIZE // 8 * 2 + k % 2) & 1
        return (place < columns) & (bit > 0)

    return seen


def mask_by(queries: int, keys: int, counts: Any, indices: Any, bits: Any) -> Any:
    """The `BlockMask` of tables of so many queries and keys."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    columns = indices.shape[-1]
    whole, partly = (counts[..., which].contiguous() for which in (0, 1))
    places = torch.arange(columns, device=indices.device).expand_as(indices)
    behind = (places + whole[..., None]).clamp_max(columns - 1)
    return BlockMask.from_kv_blocks(
        partly,
        indices.gather(-1, behind).clamp_min(0),
        whole,
        indices.clamp_min(0),
        BLOCK_SIZE,
        seen_by(counts, indices, bits),
        (queries, keys),
    )


def _timed(problem: AttentionProblem) -> Seen:
    """`AttentionProblem.keys_of` of a block-sparse mask."""
    prefix, offset = problem.block_prefix, problem.seqlen_kv - problem.seqlen_q

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix) | (k <= q + offset)

    return seen


def _visible(problem: AttentionProblem) -> Seen:
    left, right = problem.visible

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k >= q - left) & (k <= q + right)

    return seen


def _capped(softcap: float) -> Callable[..., Any]:
    import torch

    def capped(score: Any, *_: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return capped
