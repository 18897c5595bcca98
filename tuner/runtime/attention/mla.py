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
from tuner.problem.attention import (
    LATENT_BLOCK,
    LATENT_BLOCKS_BYTES,
    LATENT_DIM,
    LATENT_VALUE_DIM,
    rounded,
)
from tuner.problem.attention_masks import PAGE_MULTIPLE, Cache
from tuner.runtime.attention.paged import Sized
from tuner.runtime.call import guards
from tuner.runtime.call.plan import KernelPlan, Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, serve
from tuner.runtime.call.table import table

_FACTOR_BYTES = LATENT_VALUE_DIM // LATENT_BLOCK * 4
_ROTARY_BYTES = LATENT_BLOCKS_BYTES - LATENT_VALUE_DIM - _FACTOR_BYTES
_BYTES = (torch.uint8, torch.float8_e4m3fn)
"""Types that rows of 656 bytes may have."""


class _Decode(NamedTuple):
    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor | None
    descale: torch.Tensor | None = None


class Decode(_Decode, Call):
    """Checked tensors of a call; shapes as of `mla_decode`."""

    __slots__ = ()
    aligned = 2

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Lengths also stand for starts of queries, which no kernel reads."""
        factors = () if self.descale is None else (self.descale,)
        return self.query, self.cache, self.block_table, self.lengths, self.lengths, *factors

    def refusal(self) -> Refusal | None:
        if not all(tensor.numel() for tensor in self.inputs):
            return Refusal(Kind.EMPTY)
        if len({tensor.device for tensor in (*self.inputs, self.out)}) > 1:
            return Refusal(Kind.MIXED)
        return None

    @property
    def form(self) -> Cache:
        """Form of the cache, as of `AttentionProblem`."""
        if self.cache.shape[-1] == LATENT_BLOCKS_BYTES:
            return "e4m3_blocks"
        return "" if self.cache.dtype == self.query.dtype else "e4m3"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences, queries, heads, pages, slots of a page, and the most keys of a sequence."""
        batch, queries, heads, _ = self.query.shape
        pages, size, _ = self.cache.shape
        return batch, queries, heads, pages, size, self.block_table.shape[1] * size

    def kind(self) -> Hashable:
        batch, queries, heads, _, size, longest = self.sizes
        facts = self.query.dtype, self.query.device, self.scale, self.form
        return "latent", queries, heads, size, rounded(batch), rounded(longest), *facts

    def pose(self) -> Posed:
        batch, queries, heads, pages, size, longest = self.sizes
        dtype = guards.DTYPES[self.query.dtype]
        whole = rounded(batch), queries, heads, pages, size, rounded(longest)
        return Posed(_sized_problem(AttentionProblem, whole, dtype, self.form), self.scale)

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


def _sized_problem(kind: Any, sizes: tuple[int, ...], dtype: str, form: Cache, **more: int) -> Any:
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
        cache=form,
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
    dtype: str = getattr(plan.problem, "dtype", "")
    form: Cache = getattr(plan.problem, "cache", "")
    problem = _sized_problem(Sized, sizes, dtype, form, rows_q=batch * queries, cached=pages)
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
    descale: torch.Tensor | None = None,
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

    Two forms of a quantised cache are served with bf16 queries. Both are read as bf16 where they
    reach the tensor cores; the rest of the arithmetic is that of bf16 rows.

    - rows of e4m3, (pages, page size, 576) of ``torch.float8_e4m3fn``: each element stands for
      itself times `descale`, as in vLLM's ``fp8`` caches.
    - rows of 656 bytes, (pages, page size, 656) of ``torch.uint8`` or ``torch.float8_e4m3fn``, as
      in FlashMLA and vLLM's ``fp8_ds_mla``. A row has 512 elements of e4m3, four fp32 factors of
      128 of them each, and 64 rotary columns of bf16. Products with factors are rounded to bf16.

    A measured kernel answers, or the rule's among the proven ones (``tuner build --portfolio``).
    PyTorch's operations answer calls that no kernel serves. They wait for the device. Such calls
    are counted (`tuner.stats`). Gradients are not computed.

    Args:
        query: (B, SQ, H, 576), fp16 or bf16.
        cache: (pages, page size, 576), of `query`'s type or quantised, page size a multiple of 16.
            Views are allowed, with contiguous columns and other strides of multiples of 16 bytes.
        block_table: int32 (B, columns), rows contiguous.
        lengths: int32 (B,), contiguous, each at most columns * page size.
        scale: positive factor of the scores: that of the model's heads, such as 192 ** -0.5.
        descale: factor of a cache of e4m3 with 576 columns, else None. It is fp32, one positive
            element on the cache's device, which kernels read there.
        return_lse: return (out, log-sum-exp).
        out: (B, SQ, H, 512) to write to, as `query` and sharing no memory with it; None: a new
            tensor.

    Returns:
        (B, SQ, H, 512), of `query`'s type: `out` if given. With `return_lse` that and the natural
        logarithm of the sum of the scores' exponentials, fp32 (B, H, SQ).

    Raises:
        ConfigError: before any launch, on tensors that are not as above.
    """
    inputs = query, cache, block_table, lengths
    check(*inputs, scale, out, descale)
    if torch.compiler.is_compiling():
        output, lse = torch.ops.tuner.mla_decode(*inputs, scale, descale)
        output = output if out is None else out.copy_(output)
        return (output, lse) if return_lse else output
    return _answered(*inputs, scale, return_lse, out, descale)


def _answered(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    with_lse: bool,
    out: torch.Tensor | None,
    descale: torch.Tensor | None,
) -> Any:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT_VALUE_DIM)) if out is None else out
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if with_lse else None
    with torch.no_grad():
        serve(Decode(query, cache, block_table, lengths, scale, out, lse, descale))
    return out if lse is None else (out, lse)


def composed(call: Decode, precision: torch.dtype = torch.float32) -> None:
    """The same by PyTorch's operations in `precision`, which wait for the device."""
    queries, size = call.query.shape[1], call.cache.shape[1]
    for b, length in enumerate(call.lengths.tolist()):
        pages = call.block_table[b, : -(-length // size)].long()
        rows = _rows(call, pages)[:length].to(precision)
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


def _rows(call: Decode, pages: torch.Tensor) -> torch.Tensor:
    """Latent rows of pages, (rows, 576), as a quantised cache means them."""
    slots = call.cache.view(torch.uint8)[pages] if call.form else call.cache[pages]
    slots = slots.reshape(-1, slots.shape[-1])
    if not call.form:
        return slots
    width = LATENT_DIM if call.form == "e4m3" else LATENT_VALUE_DIM
    elements = slots[:, :width].contiguous().view(torch.float8_e4m3fn).float()
    if call.form == "e4m3":
        return elements if call.descale is None else elements * call.descale
    factors, rotary = slots[:, width:].contiguous().split((_FACTOR_BYTES, _ROTARY_BYTES), 1)
    factors = factors.contiguous().view(torch.float32).repeat_interleave(LATENT_BLOCK, 1)
    rotary = rotary.contiguous().view(torch.bfloat16)
    return torch.cat((elements.mul_(factors).to(torch.bfloat16), rotary), 1)


def check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
    descale: torch.Tensor | None = None,
) -> None:
    """Check the arguments of a call.

    Raises:
        ConfigError: names the given and the allowed values.
    """
    width = _width(query, cache)
    if query.shape[3:] != (LATENT_DIM,) or cache.shape[2:] != (width,):
        raise ConfigError(
            f"query {tuple(query.shape)}, cache {tuple(cache.shape)} (allowed: "
            f"(B, SQ, H, {LATENT_DIM}) "
            f"and (pages, page size, {width}))"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, cache)):
        raise ConfigError("the columns of query and cache are not contiguous")
    _check_factor(cache, width, descale)
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


def _width(query: torch.Tensor, cache: torch.Tensor) -> int:
    """Columns that a cache of this type must have."""
    is_plain = query.dtype in guards.DTYPES and cache.dtype == query.dtype
    is_blocks = cache.dtype in _BYTES and cache.shape[-1:] == (LATENT_BLOCKS_BYTES,)
    is_e4m3 = cache.dtype in guards.QUANTISED
    if is_plain or (query.dtype == torch.bfloat16 and (is_blocks or is_e4m3)):
        return LATENT_BLOCKS_BYTES if is_blocks else LATENT_DIM
    raise ConfigError(
        f"query is {query.dtype}, cache {cache.dtype} (allowed: torch.float16 or torch.bfloat16, "
        "one for both; with torch.bfloat16 queries a cache of torch.float8_e4m3fn, or rows of "
        f"{LATENT_BLOCKS_BYTES} bytes)"
    )


def _check_factor(cache: torch.Tensor, width: int, descale: torch.Tensor | None) -> None:
    is_wanted = cache.dtype in guards.QUANTISED and width == LATENT_DIM
    if descale is None and not is_wanted:
        return
    is_right = descale is not None and (descale.dtype, descale.numel()) == (torch.float32, 1)
    if not is_wanted or not is_right:
        text = "None" if descale is None else f"{descale.dtype} {tuple(descale.shape)}"
        allowed = "torch.float32, one element" if is_wanted else "None"
        raise ConfigError(f"descale is {text} (allowed for this cache: {allowed})")


_library = Library("tuner", "FRAGMENT")
_library.define(
    "mla_decode(Tensor query, Tensor cache, Tensor block_table, Tensor lengths, float scale, "
    "Tensor? descale=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    descale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(query, cache, block_table, lengths, scale, None, descale)
    out, lse = _answered(query, cache, block_table, lengths, scale, True, None, descale)
    return out, lse


def _fake(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT_VALUE_DIM))
    return out, query.new_empty((batch, heads, queries), dtype=torch.float32)


_library.impl("mla_decode", _operator, "CompositeExplicitAutograd")
register_fake("tuner::mla_decode", _fake, lib=_library)
