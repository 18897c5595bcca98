"""Attention over a paged cache: a tuned kernel, or PyTorch's operations (`paged_composed`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.library import Library, register_fake

from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Strides
from tuner.families.domain import MAX_SHORT
from tuner.families.peers.sdpa import UnpreparedPages
from tuner.families.schedules import PagedBatch
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.problem.attention import rounded
from tuner.runtime.attention.attention_call import of_one_layer, scale_of, without_lse
from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged_arguments import checked, checked_scales
from tuner.runtime.attention.paged_composed import Paged, composed, output_type
from tuner.runtime.call import guards, invariance
from tuner.runtime.call.plan import KernelPlan, Plan, Posed, VendorPlan
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, find, serve
from tuner.runtime.call.table import table

_DTYPES = {**guards.DTYPES, **guards.QUANTISED}
#: Sequences times KV heads, of one query and of several, from which on and up to which parts of
#: keys by the lengths on the device pay; keys of the mean where it is known, and of the longest
#: where it is not. By 136 drawn batches (an H200, 29 November 2026).
MIN_COUNTED, MAX_COUNTED = (60, 76), 320
MIN_COUNTED_MEAN, MIN_COUNTED_KEYS = 390, 1024
#: Mean over longest length above which lengths count as alike.
ALIKE = 0.5


@dataclass(frozen=True)
class Sized(AttentionProblem):
    """A call's problem, with the call's own numbers of query rows and pages in place of those that
    kernels are measured with.
    """

    rows_q: int = 0
    cached: int = 0

    @property
    def total_q(self) -> int:
        return self.rows_q

    @property
    def pages(self) -> tuple[int, ...]:
        return (self.cached,)


class PagedCall(Paged, Call):
    """Attention over a paged cache."""

    __slots__ = ()
    aligned = 3

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        starts = self.starts_q
        if starts is None:  # a null pointer: all sequences have equally many queries
            starts = self.seqused_k[:0]
        others = () if self.sinks is None else (self.sinks,)
        return (*self._tensors, starts, *others, *self.descales)

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of every call."""
        return self.query, self.key, self.value, self.page_table, self.seqused_k

    def refusal(self) -> Refusal | None:
        query, key, value = self.query, self.key, self.value
        if guards.wants_gradient(query, key, value):
            return Refusal(Kind.GRADIENT, "kernels of paged caches have no backward pass")
        if refusal := guards.unscaled(self.scale):
            return refusal
        if not all([t.numel() for t in (query, key, value, self.page_table)]):
            return Refusal(Kind.EMPTY)
        every = *self._tensors, self.starts_q, self.sinks, *self.descales
        if len({tensor.device for tensor in every if tensor is not None}) > 1:
            return Refusal(Kind.MIXED)
        return None

    @property
    def usual_q(self) -> int:
        """Queries of a sequence that a kernel is selected for, never one where a sequence has more.

        They are the mean: in a batch of a chunk and many that decode these take longest. Few
        queries count by the most of a sequence, where that is at most twice the mean.
        """
        mean: int = -(-self.query.shape[0] // max(1, self.batch))
        most = self.longest_q
        return most if most <= min(2 * mean, MAX_SHORT) else min(most, max(2, mean))

    @property
    def is_unlike(self) -> bool:
        """Kernels of counted parts are for such sequences: many of unlike lengths, or of lengths
        that only the device knows, as in a captured graph.
        """
        tiles, longest = self.batch * self.key.shape[2], self.longest_kv
        if self.batch < 2 or tiles < MIN_COUNTED[self.longest_q > 1]:
            return False
        if self.total_kv is None:
            return longest >= MIN_COUNTED_KEYS
        mean = self.total_kv / self.batch
        return tiles <= MAX_COUNTED and MIN_COUNTED_MEAN <= mean <= ALIKE * longest

    def kind(self) -> Hashable:
        query = self.query
        return (
            *("paged", query.shape[1:], self.key.shape[1:3], query.dtype, self.key.dtype),
            *(query.device, self.is_causal, self.extras, self.scale, self.sinks is None),
            *map(rounded, (self.batch, self.usual_q, self.longest_kv)),
            self.is_unlike,
        )

    @property
    def _least_kv(self) -> int:
        """Keys above few queries, whose short prompts are decoded: their heads share tiles."""
        queries: int = rounded(self.usual_q)
        return queries + 1 if queries <= MAX_SHORT else 1

    def pose(self) -> Posed:
        guards.check_alike(self.query, self.key, self.value, dtypes=_DTYPES)
        left, right, softcap = self.extras
        problem = AttentionProblem(
            seqlen_q=rounded(self.usual_q),
            seqlen_kv=max(rounded(self.longest_kv), self._least_kv),
            head_dim=self.query.shape[2],
            batch=rounded(self.batch),
            heads_q=self.query.shape[1],
            heads_kv=self.key.shape[2],
            is_causal=self.is_causal,
            dtype=_DTYPES[self.query.dtype],
            layout="bshd",
            window_left=left,
            window_right=right,
            softcap=softcap,
            page_size=self.key.shape[1],
            has_sinks=self.sinks is not None,
        )
        problem = of_one_layer(problem, self.extras)
        unlike = replace(problem, is_varlen=True) if self.is_unlike else None
        return Posed(problem, self.scale, unlike)

    def sized(self, plan: Plan) -> KernelPlan | Refusal:
        """The plan's launches for this call's sizes and strides, or the reason why it has none."""
        if not isinstance(plan, KernelPlan):
            return Refusal(Kind.UNAVAILABLE, f"{plan.config.family} reads no pages")
        if self.with_lse and not plan.has_lse:
            return without_lse(plan)
        tensors = self.query, self.key, self.value, self.page_table
        shapes = self.query.shape, self.key.shape
        sizes = self.batch, self.longest_q, self.longest_kv
        strides = tuple(tensor.stride() for tensor in tensors)
        schedule = self.schedule(plan.config) if plan.by_portfolio else ()
        return _sized(plan, sizes, shapes, strides, self.scale, schedule)

    def schedule(self, config: Config) -> tuple[tuple[str, Value], ...]:
        """Run-time parameters of a selected kernel for this call's lengths."""
        member = family(config.family)
        if invariance.is_on():
            return tuple(member.ordered_schedule(config).items())
        return tuple(member.paged_schedule(config, self.lengths()).items())

    def lengths(self) -> PagedBatch:
        """The sequences, as far as the host knows them."""
        rows, heads_q, head_dim = self.query.shape
        seen = max(1, self.longest_kv)
        if self.extras.left >= 0:
            seen = min(seen, self.extras.left + self.longest_q)
        mean = seen
        if self.batch > 1:
            mean = 0 if self.total_kv is None else min(seen, -(-self.total_kv // self.batch))
        sizes = self.batch, rows, heads_q, self.key.shape[2], head_dim
        return PagedBatch(*sizes, seen, mean, self.key.element_size(), DEFAULT_GPU.sm_count)

    def run(self, plan: Plan) -> Any:
        if isinstance(plan, VendorPlan):
            return self._by_peer(plan)
        sized = self.sized(plan)
        if isinstance(sized, Refusal):
            return sized
        query, out, lse = self.query, self.out, None
        if out is None:
            out = query.new_empty(query.shape, dtype=self.dtype)
        elif guards.is_misaligned((out,)):
            return Refusal(Kind.MISALIGNED)
        if self.with_lse:
            lse = query.new_empty(query.shape[1::-1], dtype=torch.float32)
        written = table.run_into(sized, out, lse, *self.inputs)
        return written if isinstance(written, Refusal) or lse is None else (written, lse)

    def _by_peer(self, plan: VendorPlan) -> Any:
        """A peer's answer, of this call's lengths."""
        if not isinstance(plan.call, UnpreparedPages):
            return Refusal(Kind.UNAVAILABLE, f"{plan.config.family} reads no pages")
        lengths = self.longest_q, self.longest_kv
        call = partial(plan.call.run, lengths=lengths, out=self.out, with_lse=self.with_lse)
        written = table.run_all(replace(plan, call=call), *self.inputs)
        return written if isinstance(written, Refusal) or self.with_lse else written[0]

    def by_pytorch(self) -> Any:
        out, lse = composed(self)
        if self.out is not None:
            out = self.out.copy_(out)
        return (out, lse) if self.with_lse else out


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    total_seqlen_k: int | None = None,
) -> Any:
    """softmax(scale * Q K^T + mask) V of B sequences whose keys and values lie in pages.

    Sequence b has the queries cu_seqlens_q[b]..cu_seqlens_q[b + 1]. Its keys are the first
    seqused_k[b] slots of its pages, in the order of its row of `page_table`. The new keys are in
    the cache already. The causal mask is bottom-right: query i of n sees keys up to
    i + seqused_k[b] - n.

    Queries without a visible key have zeros for their output and minus infinity for their
    log-sum-exp. One call may mix decoding, several queries and chunks of prompts, and sequences may
    share pages.

    Entries of the table behind a sequence's last page are not read. The contents of unused slots
    reach no result, infinities included. Lengths, starts and table lie on the device, so a captured
    CUDA graph serves lengths that grow up to `max_seqlen_k`. Keys beyond it are not seen.

    Kernels do not check their inputs on the device:

    - cu_seqlens_q must begin with 0, never decrease, and end within `query`;
    - no sequence may have more than `max_seqlen_q` queries;
    - entries of the table that are read must name pages of the cache.

    PyTorch's FlashAttention-2 answers calls that no tuned kernel serves, over keys and values that
    are copied out of their pages. With a soft cap, with D above 256 or not a multiple of 8, and off
    CUDA, PyTorch's operations answer. They read the lengths on the host, which waits for the device
    and cannot be captured. Each such call is counted by its reason (`tuner.stats`). Kernels are
    selected by B and the longest lengths, each rounded up to a power of two.

    Args:
        query: (total_q, H, D), fp16, bf16 or float8_e4m3fn.
        key_cache: (pages, page size, HKV, D), of `query`'s type, HKV a divisor of H. D is
            contiguous, other strides are multiples of 16 bytes. Views are allowed: heads before
            slots, or keys and values as halves of one tensor.
        value_cache: as `key_cache`.
        page_table: int32 (B, columns), rows contiguous.
        seqused_k: int32 (B,), contiguous: keys of each sequence, at most columns * page size.
        cu_seqlens_q: int32 (B + 1,), contiguous; None: every sequence has total_q / B queries.
        max_seqlen_q: queries of the longest sequence, or more; None: total_q with `cu_seqlens_q`.
        max_seqlen_k: keys of the longest sequence, or more; None: columns * page size.
        causal: hide keys after a query's own position.
        window: (left, right) keys that a query sees before and after its own position, or one
            number for both; -1: no limit.
        softcap: each scaled score s becomes softcap * tanh(s / softcap); 0: none.
        sinks: (H,), a logit for each head that adds to the softmax's denominator only. Converted to
            fp32 if needed.
        scale: factor of the scores; 1/sqrt(D) when None.
        return_lse: return (out, log-sum-exp). The latter is fp32 (H, total_q), the natural
            logarithm of the sum of the exponentials, including the sink's.
        out: tensor for the output: contiguous, of `query`'s shape and the output's type, sharing
            no memory with the inputs. A tuned kernel writes to it; PyTorch's answer is copied to
            it.
        q_scale: positive fp32 factors of e4m3 queries: (H,), or one element for all heads, which
            is copied for each head. Tensors of e4m3 stand for their elements times their factors,
            and come with all three factors.
        k_scale: factors of the keys: (HKV,), or one element.
        v_scale: factors of the values, as `k_scale`.
        total_seqlen_k: keys of all sequences, by which their mean length is known. It only decides
            how many blocks share the keys of a sequence; None: lengths are taken as unlike.

    Returns:
        (total_q, H, D), of `query`'s type, bf16 of e4m3: `out` if given. With `return_lse` that and
        the log-sum-exp. Rows after the last sequence's end are undefined.

    Raises:
        ConfigError: before any launch, on tensors that are not as above, a page size that is not a
            multiple of 16, or lengths beyond the table's row. Calls whose lengths are read on the
            host raise it in a capture, and on lengths that do not fit the tensors.
        Exception: an error of an earlier kernel.
    """
    queries, keys = checked(
        query, key_cache, value_cache, page_table, seqused_k, cu_seqlens_q, sinks,
        max_seqlen_q, max_seqlen_k, out,
    )  # fmt: skip
    extras = Extras.of(window, softcap)
    factor = scale_of(query, scale)
    scales = q_scale, k_scale, v_scale
    descales = checked_scales(query, key_cache, scales)
    if torch.compiler.is_compiling():
        tensors = query, key_cache, value_cache, page_table, seqused_k, cu_seqlens_q, sinks
        given, lse = torch.ops.tuner.paged_attention(
            *tensors, queries, keys, causal, *extras, factor, *scales
        )
        given = given if out is None else out.copy_(given)
        return (given, lse) if return_lse else given
    tensors = query, key_cache, value_cache, page_table, seqused_k, cu_seqlens_q, _wide(sinks)
    call = paged_call(*tensors, queries, keys, causal, extras, factor, return_lse, out)
    return serve(call._replace(descales=descales, total_kv=total_seqlen_k))


def paged_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    starts_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    queries: int,
    keys: int,
    is_causal: bool,
    extras: Extras,
    scale: float,
    with_lse: bool = False,
    out: torch.Tensor | None = None,
) -> PagedCall:
    """The call object of checked arguments.

    A single query sees all earlier keys, so its call has no causal mask: fewer kernels to prove.
    In the mode of `tuner.deterministic` it has one: kernels of chunks answer alone and in a batch.

    Args:
        query: (total_q, H, D).
        key: (pages, page size, HKV, D).
        value: as `key`.
        page_table: int32 (B, columns).
        seqused_k: int32 (B,), keys of each sequence.
        starts_q: int32 (B + 1,); None: equally many queries for each sequence.
        sinks: (H,), in at least single precision; None: no sinks.
        queries: longest queries of a sequence.
        keys: longest keys of a sequence.
        is_causal: bottom-right mask.
        extras: window and soft cap.
        scale: factor of the scores.
        with_lse: also compute the log-sum-exp.
        out: (total_q, H, D) to write to; None: a new tensor.
    """
    if is_causal or queries == 1:
        extras = extras._replace(right=-1)
    masked = bool(is_causal) and (queries != 1 or invariance.is_on())
    tensors = query, key, value, page_table, seqused_k, starts_q, sinks
    return PagedCall(*tensors, queries, keys, masked, extras, scale, with_lse, out)


def prepare(call: PagedCall) -> KernelPlan | Refusal:
    """The launches that serve calls of these sizes and strides, or the reason why none does.

    Runs and counts nothing. A new kernel is loaded; within a graph capture, which forbids loading,
    the result is a refusal. `table.run_into` with the call's `inputs` runs the plan.
    """
    plan = find(call)
    return plan if isinstance(plan, Refusal) else call.sized(plan)


def _wide(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.to(torch.promote_types(sinks.dtype, torch.float32))


@lru_cache(1024)
def _sized(
    plan: KernelPlan,
    sizes: tuple[int, int, int],
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    scale: float,
    schedule: tuple[tuple[str, Value], ...],
) -> KernelPlan | Refusal:
    """The plan with a call's sizes and strides, or the reason why its kernels do not take them."""
    known = plan.problem
    if schedule:
        params = {name: v for name, v in plan.config.params.items() if name != "combine"}
        config = Config(plan.config.family, {**params, **dict(schedule)})
    else:
        config = plan.config
    if not isinstance(known, AttentionProblem):
        raise ConfigError(f"{known.op} has no paged cache")
    batch, longest_q, longest_kv = sizes
    shape_q, shape_kv = shapes
    group = shape_q[1] // shape_kv[2]
    if not family(config.family).holds(config, group):
        packed = config.get("packed_heads", 1)
        return Refusal(Kind.TENSORS, f"packs of {packed} do not hold {group} heads to a KV head")
    problem = Sized(
        seqlen_q=max(1, longest_q),
        seqlen_kv=max(1, longest_kv),
        head_dim=shape_q[2],
        batch=batch,
        heads_q=shape_q[1],
        heads_kv=shape_kv[2],
        is_causal=known.is_causal,
        dtype=known.dtype,
        layout="bshd",
        softcap=known.softcap,
        page_size=shape_kv[1],
        has_sinks=known.has_sinks,
        rows_q=shape_q[0],
        cached=shape_kv[0],
    )
    problem = problem.windowed(known.window_left, known.window_right)
    row, head, _ = strides[0]
    caches = [(page, of_head, slot, 1) for page, slot, of_head, _ in strides[1:3]]
    operands = {operand.name: operand for operand in problem.matrices}
    own: Strides = {
        "query": guards.along(operands["query"], (row * shape_q[0], head, row, 1)),
        "key": guards.along(operands["key"], caches[0]),
        "value": guards.along(operands["value"], caches[1]),
        "page_table": strides[3],
    }
    if any(stride[-1] != 1 for stride in strides[:3]):
        return Refusal(Kind.TENSORS, "D is not contiguous")
    try:
        return plan.sized(problem, scale, own, config)
    except ConfigError as exc:
        return Refusal(Kind.TENSORS, str(exc))


_library = Library("tuner", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor page_table, "
    "Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? sinks, int max_seqlen_q, int max_seqlen_k, "
    "bool causal, int left, int right, float softcap, float scale, Tensor? q_scale=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    starts_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    longest_q: int,
    longest_kv: int,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    *scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = query, key, value, page_table, seqused_k, starts_q, sinks
    queries, keys = checked(*tensors, longest_q, longest_kv)
    extras = Extras(left, right, softcap)
    descales = checked_scales(query, key, scales or (None, None, None))
    call = paged_call(*tensors[:6], _wide(sinks), queries, keys, causal, extras, scale, True)
    out, lse = serve(call._replace(descales=descales))
    return out.contiguous(), lse.contiguous()


def _fake(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = output_type(query)
    wide = torch.promote_types(dtype, torch.float32)
    out = query.new_empty(query.shape, dtype=dtype)
    return out, query.new_empty(query.shape[1::-1], dtype=wide)


_library.impl("paged_attention", _operator, "CompositeExplicitAutograd")
register_fake("tuner::paged_attention", _fake, lib=_library)
