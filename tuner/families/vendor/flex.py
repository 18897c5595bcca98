"""FlexAttention as torch.compile makes it: PyTorch's only kernel under block-sparse masks, with soft
caps, and of windows over unlike lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.vendor import FLEX, PreparedCall, Vendor, compiled
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem, Problem
from tuner.problem.attention import BLOCK_SIZE

#: Microseconds of a tiny call, not measured: taken for FlashAttention-2's. TFLOP/s of (4,16,4096,D)
#: under a causal mask, D <= 64 and above: ``scripts/benchmarks/evidence/block-masks.json``.
_START_US, _RATES = 7.0, (327.0, 341.0)

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
        if problem.is_packed or problem.mask_operand or problem.is_alibi:
            return f"{kernel} is not called with packed sequences, pages, biases, masks or ALiBi"
        is_square = problem.seqlen_q == problem.seqlen_kv
        if problem.block_mask or problem.softcap or (problem.is_windowed and not is_square):
            return ""
        return f"{kernel} is for block masks, soft caps, and windows with SQ != SKV: others have more"

    def connect(
        self, problem: AttentionProblem, kernel: str, scale: float
    ) -> Callable[..., Any] | str:
        attend = compiled(flex_call(problem, scale))
        if problem.block_mask:
            return MaskedCall(problem, attend)
        mask = mask_of(problem, _visible(problem)) if _hides(problem) else None
        return lambda query, key, value: attend(query, key, value, mask)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """A fixed part plus the work at the rate of a large problem."""
        if not isinstance(problem, AttentionProblem):
            return float("inf")
        rate = _RATES[problem.head_dim > 64] * gpu.peak_tflops / DEFAULT_GPU.peak_tflops
        return _START_US + problem.flops / rate / 1e6


class MaskedCall(PreparedCall):
    """FlexAttention under the mask that the tables hold. A mask function is made of them for each
    set: as a program writes it where it is the timed mask, else a look into the dense mask.

    Args:
        problem: with a block-sparse mask.
        attend: attend(query, key, value, mask).
    """

    def __init__(self, problem: AttentionProblem, attend: Callable[..., Any]) -> None:
        self._problem, self._attend = problem, attend

    def prepared(self, *inputs: Any) -> Callable[..., Any]:
        import torch

        dense = dense_of(self._problem, *inputs[3:])
        timed = _timed(self._problem)
        queries, keys = (torch.arange(n, device=dense.device) for n in dense.shape[2:])
        is_timed = torch.equal(dense, timed(0, 0, queries[:, None], keys).expand(dense.shape))
        mask = mask_of(self._problem, timed if is_timed else _looked_up(dense), dense.device)
        return lambda query, key, value, *_: self._attend(query, key, value, mask)


def flex_call(problem: AttentionProblem, scale: float) -> Callable[..., Any]:
    """call(query, key, value, mask) of FlexAttention, not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    options: dict[str, Any] = {"scale": scale, "enable_gqa": problem.heads_q != problem.heads_kv}
    if problem.softcap:
        options["score_mod"] = _capped(problem.softcap)

    def call(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return flex_attention(query, key, value, block_mask=mask, **options)

    return call


def mask_of(problem: AttentionProblem, seen: Seen, device: Any = "cuda") -> Any:
    """The `BlockMask` of a mask function, with the axes of a problem's mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    batches, heads, *_ = problem.block_shape
    lengths = problem.seqlen_q, problem.seqlen_kv
    return create_block_mask(seen, batches, heads, *lengths, device=device)


def dense_of(problem: AttentionProblem, counts: Any, indices: Any, bits: Any) -> Any:
    """(B or 1, H or 1, SQ, SKV), true where a query sees a key, from a problem's tables."""
    import torch

    batches, heads, rows, columns = problem.block_shape
    key = torch.arange(BLOCK_SIZE, device=bits.device)
    places = torch.arange(columns, device=bits.device)
    listed = torch.where(places < counts.sum(-1, keepdim=True), indices, columns).long()
    size = rows * BLOCK_SIZE, columns * BLOCK_SIZE
    found = torch.zeros((batches, heads, *size), dtype=torch.bool, device=bits.device)
    every = torch.arange(rows, device=bits.device)[:, None]
    for batch in range(batches):
        for head in range(heads):  # all at once would hold four bytes a query and key
            words = bits[batch, head][..., key % 8 // 2]
            # Places behind a row's last block go to a column that is dropped.
            blocks = torch.zeros(
                (rows, columns + 1, BLOCK_SIZE, BLOCK_SIZE), dtype=torch.bool, device=bits.device
            )
            blocks[every, listed[batch, head]] = (words >> (key // 8 * 2 + key % 2) & 1).bool()
            found[batch, head] = blocks[:, :columns].transpose(1, 2).reshape(size)
    return found[:, :, : problem.seqlen_q, : problem.seqlen_kv]


def _looked_up(dense: Any) -> Seen:
    has_batch, has_heads = dense.shape[0] > 1, dense.shape[1] > 1

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return dense[b * has_batch, h * has_heads, q, k]

    return seen


def _timed(problem: AttentionProblem) -> Seen:
    """`AttentionProblem.keys_of` of a block-sparse mask."""
    prefix, offset = problem.block_prefix, problem.seqlen_kv - problem.seqlen_q

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < prefix) | (k <= q + offset)

    return seen


def _hides(problem: AttentionProblem) -> bool:
    return problem.is_causal or problem.is_windowed


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
