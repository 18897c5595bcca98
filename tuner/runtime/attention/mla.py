"""Decoding of multi-head latent attention over a paged cache: by a tuned kernel, or by PyTorch's
operations.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.library import Library, register_fake

from tuner.errors import ConfigError
from tuner.families.base import LSE
from tuner.problem import AttentionProblem
from tuner.problem.attention import LATENT_DIM, LATENT_VALUE_DIM, rounded
from tuner.problem.attention_masks import PAGE_MULTIPLE
from tuner.runtime.attention.paged import Sized
from tuner.runtime.call import guards
from tuner.runtime.call.plan import KernelPlan, Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, serve
from tuner.runtime.call.table import table


class _Decode(NamedTuple):
    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor | None


class Decode(_Decode, Call):
    """Checked tensors of a call; shapes as of `mla_decode`."""

    __slots__ = ()
    aligned = 2

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The last one stands for starts of queries, which no kernel reads."""
        return self.query, self.cache, self.block_table, self.lengths, self.lengths

    def refusal(self) -> Refusal | None:
        if not all(tensor.numel() for tensor in self.inputs):
            return Refusal(Kind.EMPTY)
        if len({tensor.device for tensor in (*self.inputs, self.out)}) > 1:
            return Refusal(Kind.MIXED)
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences, queries, heads, pages, slots of a page, and the most keys of a sequence."""
        batch, queries, heads, _ = self.query.shape
        pages, size, _ = self.cache.shape
        return batch, queries, heads, pages, size, self.block_table.shape[1] * size

    def kind(self) -> Hashable:
        batch, queries, heads, _, size, longest = self.sizes
        facts = self.query.dtype, self.query.device, self.scale
        return "latent", queries, heads, size, rounded(batch), rounded(longest), *facts

    def pose(self) -> Posed:
        batch, queries, heads, pages, size, longest = self.sizes
        dtype = guards.DTYPES[self.query.dtype]
        whole = rounded(batch), queries, heads, pages, size, rounded(longest)
        return Posed(_sized_problem(AttentionProblem, whole, dtype), self.scale)

    def run(self, plan: Plan) -> Any:
        if not isinstance(plan, KernelPlan):
            return Refusal(Kind.UNAVAILABLE, f"{plan.config.family} reads no pages")
        if guards.is_misaligned((self.out,)):
            return Refusal(Kind.MISALIGNED)
        tensors = self.query, self.cache, self.block_table, self.out
        strides = tuple(tensor.stride() for tensor in tensors)
        sized = _sized(plan, self.sizes, strides, self.scale)
        if isinstance(sized, Refusal):
            return sized
        return table.run_into(sized, self.out, self.lse, *self.inputs)

    def by_pytorch(self) -> Any:
        composed(self)
        return self.out


def _sized_problem(kind: Any, sizes: tuple[int, ...], dtype: str, **more: int) -> Any:
    batch, queries, heads, _, size, longest = sizes
    return kind(
        seqlen_q=queries,
        seqlen_kv=longest,
        head_dim=LATENT_DIM,
        batch=batch,
        heads_q=heads,
        heads_kv=1,
        is_causal=queries > 1,
        dtype=dtype,
        page_size=size,
        value_dim=LATENT_VALUE_DIM,
        **more,
    )


@lru_cache(1024)
def _sized(
    plan: KernelPlan, sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...], scale: float
) -> KernelPlan | Refusal:
    """The plan with a call's sizes and strides, or the reason why its kernel does not take them."""
    batch, queries, heads, pages, *_ = sizes
    query, cache, block_table, out = strides

    def along(row: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of sequences, heads and queries; where there is one, any will do."""
        steps = zip((row[0], row[2], row[1]), (batch, heads, queries), strict=True)
        return (*(step if count > 1 else LATENT_DIM for step, count in steps), row[3])

    own = {
        **{"query": along(query), "out": along(out), LSE: (heads * queries, queries)},
        "key": (cache[0] if pages > 1 else LATENT_DIM, LATENT_DIM, cache[1], cache[2]),
        "page_table": (block_table[0] if batch > 1 else 1, 1),
    }
    dtype = getattr(plan.problem, "dtype", "")
    problem = _sized_problem(Sized, sizes, dtype, rows_q=batch * queries, cached=pages)
    try:
        return plan.sized(problem, scale, own)
    except ConfigError as exc:
        return Refusal(Kind.TENSORS, str(exc))


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """softmax(scale * Q C^T + mask) C[:, :512] of B sequences whose latent rows lie in pages.

    Multi-head latent attention (DeepSeek-V2 and later), with the up-projections absorbed into the
    queries and the output. All heads share a token's row of 512 latent and 64 rotary columns.
    Sequence b has `lengths[b]` rows, the new ones among them, in the order of its row of
    `block_table`. Query i of n sees the first lengths[b] - n + 1 + i of them. A query that sees
    none has zeros for its output and minus infinity for its log-sum-exp.

    Entries of the table behind a sequence's last page are not read. Unused slots reach no result.
    The blocks' work is divided by the lengths on the device, so a captured CUDA graph serves any
    lengths. The first call of a device loads the kernel, and is not to be captured. Equal inputs
    give equal bits. The kernel does not check lengths and pages.

    A measured kernel answers, or the rule's among the proven ones (``tuner build --portfolio``).
    PyTorch's operations answer calls that no kernel serves. They wait for the device. Such calls
    are counted (`tuner.stats`). Gradients are not computed.

    Args:
        query: (B, SQ, H, 576), fp16 or bf16.
        cache: (pages, page size, 576), of `query`'s type, page size a multiple of 16. Views are
            allowed, with contiguous columns and other strides of multiples of 16 bytes.
        block_table: int32 (B, columns), rows contiguous.
        lengths: int32 (B,), contiguous, each at most columns * page size.
        scale: positive factor of the scores: that of the model's heads, such as 192 ** -0.5.
        return_lse: return (out, log-sum-exp).
        out: (B, SQ, H, 512) to write to, as `query` and sharing no memory with it; None: a new
            tensor.

    Returns:
        (B, SQ, H, 512), of `query`'s type: `out` if given. With `return_lse` that and the natural
        logarithm of the sum of the scores' exponentials, fp32 (B, H, SQ).

    Raises:
        ConfigError: before any launch, on tensors that are not as above.
    """
    check(query, cache, block_table, lengths, scale, out)
    if torch.compiler.is_compiling():
        output, lse = torch.ops.tuner.mla_decode(query, cache, block_table, lengths, scale)
        output = output if out is None else out.copy_(output)
        return (output, lse) if return_lse else output
    return _answered(query, cache, block_table, lengths, scale, return_lse, out)


def _answered(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    with_lse: bool,
    out: torch.Tensor | None,
) -> Any:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT_VALUE_DIM)) if out is None else out
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if with_lse else None
    with torch.no_grad():
        serve(Decode(query, cache, block_table, lengths, scale, out, lse))
    return out if lse is None else (out, lse)


def composed(call: Decode, precision: torch.dtype = torch.float32) -> None:
    """The same by PyTorch's operations in `precision`, which wait for the device."""
    queries, size = call.query.shape[1], call.cache.shape[1]
    for b, length in enumerate(call.lengths.tolist()):
        pages = call.block_table[b, : -(-length // size)].long()
        rows = call.cache[pages].reshape(-1, LATENT_DIM)[:length].to(precision)
        scores = torch.einsum("qhd,kd->hqk", call.query[b].to(precision), rows) * call.scale
        visible = torch.arange(1 - queries, 1, device=rows.device)[:, None] + length
        hidden = torch.arange(length, device=rows.device) >= visible
        lse = torch.logsumexp(scores.masked_fill_(hidden, -torch.inf), -1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
        call.out[b] = torch.einsum("hqk,kd->qhd", weights, rows[:, :LATENT_VALUE_DIM]).to(
            call.out.dtype
        )
        if call.lse is not None:
            call.lse[b] = lse


def check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of a call.

    Raises:
        ConfigError: names the given and the allowed values.
    """
    if query.dtype not in guards.DTYPES or cache.dtype != query.dtype:
        raise ConfigError(
            f"query is {query.dtype}, cache {cache.dtype} (allowed: torch.float16 or "
            "torch.bfloat16, one for both)"
        )
    if query.dim() != 4 or cache.dim() != 3 or {query.shape[-1], cache.shape[-1]} != {LATENT_DIM}:
        raise ConfigError(
            f"query {tuple(query.shape)}, cache {tuple(cache.shape)} (allowed: "
            f"(B, SQ, H, {LATENT_DIM}) "
            f"and (pages, page size, {LATENT_DIM}))"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, cache)):
        raise ConfigError(f"the {LATENT_DIM} columns of query and cache are not contiguous")
    if not cache.shape[1] or cache.shape[1] % PAGE_MULTIPLE:
        raise ConfigError(
            f"pages have {cache.shape[1]} slots (allowed: multiples of {PAGE_MULTIPLE})"
        )
    batch = query.shape[0]
    for name, tensor, shape in (
        ("lengths", lengths, (batch,)),
        ("block_table", block_table, (batch, *block_table.shape[1:2])),
    ):
        is_row = shape[-1] < 2 or tensor.stride(-1) == 1
        if tensor.dtype != torch.int32 or tensor.shape != shape or not is_row:
            raise ConfigError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} "
                f"(allowed: torch.int32 {shape}, contiguous rows)"
            )
    if block_table.dim() != 2:
        raise ConfigError(
            f"block_table is {tuple(block_table.shape)} (allowed: ({batch}, columns))"
        )
    if not scale > 0:
        raise ConfigError(f"scale={scale} (allowed: positive)")
    sizes = (*query.shape[:3], LATENT_VALUE_DIM)
    if out is not None and (out.shape, out.dtype, out.device, out.stride(-1)) != (
        *(sizes, query.dtype, query.device),
        1,
    ):
        raise ConfigError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device} "
            f"(allowed: {query.dtype} {sizes} on {query.device}, contiguous columns)"
        )


_library = Library("tuner", "FRAGMENT")
_library.define(
    "mla_decode(Tensor query, Tensor cache, Tensor block_table, Tensor lengths, float scale) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(query, cache, block_table, lengths, scale, None)
    out, lse = _answered(query, cache, block_table, lengths, scale, True, None)
    return out, lse


def _fake(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT_VALUE_DIM))
    return out, query.new_empty((batch, heads, queries), dtype=torch.float32)


_library.impl("mla_decode", _operator, "CompositeExplicitAutograd")
register_fake("tuner::mla_decode", _fake, lib=_library)
