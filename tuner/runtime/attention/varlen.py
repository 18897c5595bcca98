"""Attention over packed sequences of different lengths."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.problem import AttentionBackwardProblem, AttentionProblem
from tuner.problem.attention import rounded
from tuner.problem.packed import PackedProblem, stepped
from tuner.runtime.attention import flash2
from tuner.runtime.attention.attention_call import scale_of
from tuner.runtime.call import devices, guards, native
from tuner.runtime.call.plan import KernelPlan, Plan, Posed, VendorPlan
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, PlannedCall, find, serve, writing_lse
from tuner.runtime.call.table import table
from tuner.runtime.training.recorded import Tensors, recorded


class _Packed(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    starts_q: torch.Tensor
    starts_kv: torch.Tensor
    longest_q: int
    longest_kv: int
    is_causal: bool
    scale: float
    enable_gqa: bool
    needs_lse: bool = False


class VarlenCall(_Packed, Call):
    """Attention over packed sequences."""

    __slots__ = ()
    aligned = 3
    copied = "query", "key", "value"

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value, self.starts_q, self.starts_kv

    @property
    def batch(self) -> int:
        """Sequences, B."""
        return int(self.starts_q.numel()) - 1

    def refusal(self) -> Refusal | None:
        query, key, value = tensors = self.query, self.key, self.value
        if guards.wants_gradient(query, key, value):
            return Refusal(Kind.GRADIENT, "kernels of variable lengths have no backward pass")
        if refusal := guards.unscaled(self.scale):
            return refusal
        if not all([t.numel() for t in tensors]) or not (
            self.batch and self.longest_q and self.longest_kv
        ):
            return Refusal(Kind.EMPTY)
        if len({t.device for t in self.inputs}) > 1 or len({t.dtype for t in tensors}) > 1:
            return Refusal(Kind.MIXED)
        if not all([t.is_contiguous() for t in self.inputs]):
            return Refusal(Kind.NOT_CONTIGUOUS)
        if query.shape[1] != key.shape[1] and not self.enable_gqa:
            return Refusal(Kind.GROUPED_HEADS)
        return None

    def kind(self) -> Hashable:
        query = self.query
        return (
            *("varlen", query.shape[1:], self.value.shape[1:], query.dtype, query.device),
            *(self.is_causal, self.scale),
            *map(stepped, self._sizes),
            *(self._is_alike, self.needs_lse),
        )

    @property
    def _sizes(self) -> tuple[int, int, int, int, int]:
        """`SIZES` of the sequences."""
        rows = self.query.shape[0], self.key.shape[0]
        return self.batch, self.longest_q, self.longest_kv, *rows

    def pose(self) -> Posed:
        query, key, value = self.query, self.key, self.value
        guards.check_alike(query, key, value)
        problem = AttentionProblem(
            seqlen_q=rounded(self.longest_q),
            seqlen_kv=rounded(self.longest_kv),
            head_dim=query.shape[2],
            batch=rounded(self.batch),
            heads_q=query.shape[1],
            heads_kv=key.shape[1],
            is_causal=self.is_causal,
            dtype=guards.DTYPES[query.dtype],
            is_varlen=True,
            value_dim=value.shape[2],
        )
        estimated = PackedProblem.sized(problem, *self._sizes).stepped
        estimated = replace(estimated, is_alike=self._is_alike)
        return Posed(problem, self.scale, estimated, needs_lse=self.needs_lse)

    @property
    def _is_alike(self) -> bool:
        """True where a causal mask of FlashAttention's, bottom-right, is top-left as well."""
        return self.starts_q is self.starts_kv or not self.is_causal

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        out = table.run(*self._launch(plan))
        return out if isinstance(out, Refusal) else out[0].transpose(0, 1)

    def run_with_lse(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        """As `run`, with the log-sum-exp, fp32 (1, H, total_q)."""
        answer = table.run_with_lse(*self._launch(plan))
        if isinstance(answer, Refusal):
            return answer
        out, lse = answer
        return out[0].transpose(0, 1), lse

    def _launch(self, plan: Plan) -> tuple[Any, ...]:
        """The plan with this call's sizes, and its inputs: the problem's have a batch of one."""
        query, key, value, *starts = self.inputs
        if isinstance(plan, KernelPlan):
            sizes = self.batch, self.longest_q, self.longest_kv
            plan = _sized(plan, sizes, query.shape, value.shape, self.scale)
        elif isinstance(plan, VendorPlan):
            # FlashAttention-2 takes a longest length of one as a query of each sequence.
            lengths = max(2, self.longest_q), self.longest_kv
            plan = replace(plan, call=partial(plan.call, lengths=lengths))
        return (plan, *[t.transpose(0, 1)[None] for t in (query, key, value)], *starts)

    @property
    def _fits_flash2(self) -> bool:
        """Its causal mask is bottom-right, so queries and keys must have the same lengths there."""
        query, key, value = self.query, self.key, self.value
        is_grouped = query.shape[1] != key.shape[1]
        is_empty = not (self.batch and self.longest_q and self.longest_kv)
        starts = self.starts_q, self.starts_kv
        return (
            self._is_alike
            and not is_empty
            and flash2.are_together(query, *starts)
            and all(t.is_contiguous() for t in starts)
            and query.dtype == key.dtype == value.dtype
            and (self.enable_gqa or not is_grouped)
            and flash2.takes(query, key, value, query.dtype)
        )

    def by_pytorch(self) -> torch.Tensor:
        """PyTorch's FlashAttention-2 of all sequences, or PyTorch's attention of each where it does
        not take the call. The latter reads the lengths on the host.
        """
        query, key, value = self.query, self.key, self.value
        if self._fits_flash2:
            # It takes longest lengths of one as a query of each sequence: some may have none.
            lengths = (self.starts_q, self.starts_kv), (max(2, self.longest_q), self.longest_kv)
            return flash2.packed(query, key, value, *lengths, self.is_causal, self.scale)[0]
        needs = ", under a causal mask one tensor as cu_seqlens_q and cu_seqlens_kv"
        flash2.check_uncaptured("tuner.attention_varlen", needs)
        of_queries = _ends(self.starts_q, "cu_seqlens_q", query.shape[0], self.longest_q)
        of_keys = _ends(self.starts_kv, "cu_seqlens_kv", key.shape[0], self.longest_kv)
        done = []
        for (first, last), keys in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
            rows, span = query[first:last], slice(*keys)
            if len(rows) and keys[0] < keys[1]:
                row, keys_of, values_of = (
                    t.transpose(0, 1)[None] for t in (rows, key[span], value[span])
                )
                options = None, 0.0, self.is_causal, self.scale, self.enable_gqa
                out = native.attend(row, keys_of, values_of, *options)
                done.append(out[0].transpose(0, 1))
            else:
                done.append(rows.new_zeros(*rows.shape[:2], value.shape[2]))
        behind = query.shape[0] - of_queries[-1]
        return torch.cat([*done, query.new_zeros(behind, query.shape[1], value.shape[2])])


@dataclass(frozen=True)
class _SizedBackward(AttentionBackwardProblem):
    """As `PackedProblem`, for gradients."""

    rows_q: int = 0
    rows_kv: int = 0

    @property
    def forward(self) -> AttentionProblem:
        return PackedProblem(
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            head_dim=self.head_dim,
            batch=self.batch,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            is_causal=self.is_causal,
            dtype=self.dtype,
            is_varlen=True,
            rows_q=self.rows_q,
            rows_kv=self.rows_kv,
        )


class _PackedGradients(NamedTuple):
    call: VarlenCall
    """The call whose gradients these are, without a recorded gradient."""
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    is_deterministic: bool


class PackedGradientsCall(_PackedGradients, PlannedCall):
    """Gradients of attention over packed sequences."""

    __slots__ = ()
    aligned = 6

    @property
    def inputs(self) -> Tensors:
        query, key, value, *starts = self.call.inputs
        return (query, key, value, self.out, self.lse, self.grad_out, *starts)

    def kind(self) -> Hashable:
        return "varlen gradients", self.is_deterministic, self.call.kind()

    def pose(self) -> Posed:
        posed = self.call.pose()
        assert isinstance(posed.problem, AttentionProblem)
        problem = AttentionBackwardProblem.of(posed.problem, self.is_deterministic)
        return Posed(problem, posed.scale)

    def run(self, plan: Plan) -> Tensors | Refusal:
        """Gradients of query, key and value."""
        call, known = self.call, plan.problem
        query, key = call.query, call.key
        assert isinstance(known, AttentionBackwardProblem)
        if isinstance(plan, KernelPlan):
            problem = _SizedBackward(
                seqlen_q=call.longest_q,
                seqlen_kv=call.longest_kv,
                head_dim=query.shape[2],
                batch=call.batch,
                heads_q=query.shape[1],
                heads_kv=key.shape[1],
                is_causal=known.is_causal,
                dtype=known.dtype,
                is_deterministic=known.is_deterministic,
                is_varlen=True,
                rows_q=query.shape[0],
                rows_kv=key.shape[0],
            )
            plan = plan.sized(problem, call.scale)
        *tensors, lse, grad_out, starts_q, starts_kv = self.inputs
        laid = [t.transpose(0, 1)[None] for t in (*tensors, grad_out)]
        answer = table.run_all(plan, *laid[:4], lse, laid[4], starts_q, starts_kv)
        if isinstance(answer, Refusal):
            return answer
        return tuple(grad[0].transpose(0, 1) for grad in answer)


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V of each of B packed sequences.

    Sequence b has the queries cu_seqlens_q[b]..cu_seqlens_q[b + 1] and the keys and values
    cu_seqlens_kv[b]..cu_seqlens_kv[b + 1]; either range may be empty. Queries without keys have
    zeros for their output.

    PyTorch's FlashAttention-2 answers calls that no tuned kernel serves. It takes fp16 and bf16
    without gradients, D a multiple of 8 to 256, and a causal mask where `cu_seqlens_kv` is the
    tensor `cu_seqlens_q`. Others are answered one sequence after the other, by lengths that are
    read on the host, which cannot be captured in a CUDA graph. Each such call is counted by its
    reason (`tuner.stats`).

    Kernels are selected by B, the longest lengths and the numbers of rows, all rounded up. They do
    not check the lengths on the device. cu_seqlens must begin with 0, never decrease, and end
    within the tensors, and no sequence may exceed the given longest lengths.
    Values behind a sequence, up to the next whole tile, are multiplied by zero. An infinity or a
    NaN there would reach the output, so all of `value` must be finite.

    Args:
        query: (total_q, H, D), fp16 or bf16; a tuned kernel needs contiguous tensors.
        key: (total_kv, HKV, D), as `query`.
        value: (total_kv, HKV, DV), as `query`.
        cu_seqlens_q: int32 (B + 1), on the tensors' device; B may be 0.
        cu_seqlens_kv: int32 (B + 1), as `cu_seqlens_q`.
        max_seqlen_q: queries of the longest sequence, or more.
        max_seqlen_kv: keys of the longest sequence, or more.
        is_causal: query i of a sequence sees its keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.

    Returns:
        (total_q, H, DV), of the inputs' type. Rows beyond the last sequence's end are undefined,
        and so are their gradients.

    Raises:
        ConfigError: on tensors that are not as above, or longest lengths below 0. Calls whose
            lengths are read on the host raise it in a capture, and on lengths that do not fit the
            tensors.
        Exception: an error of `scaled_dot_product_attention` on arguments that it refuses, or of an
            earlier kernel.
    """
    _check(query, key, value, cu_seqlens_q, cu_seqlens_kv)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if longest < 0:
            raise ConfigError(f"{name}={longest} is out of range (allowed: 0 or more)")
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    lengths = cu_seqlens_q, cu_seqlens_kv, int(max_seqlen_q), int(max_seqlen_kv)
    options = bool(is_causal), scale_of(query, scale), enable_gqa
    call = VarlenCall(query, key, value, *lengths, *options)
    if guards.wants_gradient(query, key, value) and not torch.compiler.is_compiling():
        out = _attend_recorded(call)
        if out is not None:
            return out
    return serve(call)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_kv: torch.Tensor,
) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(t.dim() != 3 for t in (query, key, value)) or key.shape[:2] != value.shape[:2]:
        raise ConfigError(
            f"{shapes} (allowed: (total_q, H, D), (total_kv, HKV, D) and (total_kv, HKV, DV))"
        )
    if query.shape[2] != key.shape[2]:
        raise ConfigError(f"{shapes} differ in D (allowed: one D)")
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_kv", starts_kv)):
        if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.numel():
            raise ConfigError(
                f"{name} is {starts.dtype} {tuple(starts.shape)} (allowed: torch.int32 (B + 1,))"
            )
    if starts_q.shape != starts_kv.shape:
        raise ConfigError(
            f"cu_seqlens_q has {starts_q.numel()} entries, cu_seqlens_kv {starts_kv.numel()} "
            "(allowed: B + 1 both)"
        )


@lru_cache(256)
def _sized(
    plan: KernelPlan,
    sizes: tuple[int, int, int],
    shape_q: torch.Size,
    shape_kv: torch.Size,
    scale: float,
) -> KernelPlan:
    """The plan with a call's B, longest lengths and numbers of rows."""
    known = plan.problem
    if not isinstance(known, AttentionProblem):
        raise ConfigError(f"{known.op} has no packed sequences")
    batch, longest_q, longest_kv = sizes
    problem = PackedProblem(
        seqlen_q=longest_q,
        seqlen_kv=longest_kv,
        head_dim=shape_q[2],
        batch=batch,
        heads_q=shape_q[1],
        heads_kv=shape_kv[1],
        is_causal=known.is_causal,
        dtype=known.dtype,
        is_varlen=True,
        rows_q=shape_q[0],
        rows_kv=shape_kv[0],
        value_dim=shape_kv[2],
    )
    return plan.sized(problem, scale)


def _ends(starts: torch.Tensor, name: str, rows: int, longest: int) -> list[int]:
    """`starts` as integers on the host, checked; waits for the device."""
    ends: list[int] = starts.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    falls = min(lengths, default=0) < 0
    if ends[0] != 0 or falls or ends[-1] > rows:
        raise ConfigError(
            f"{name} runs from {ends[0]} to {ends[-1]}{', not in order' if falls else ''} "
            f"(allowed: from 0, never decreasing, to {rows} at most)"
        )
    if max(lengths, default=0) > longest:
        raise ConfigError(
            f"{name} has a sequence of {max(lengths)} (allowed: up to max_seqlen, {longest})"
        )
    return ends


def _attend_recorded(call: VarlenCall) -> torch.Tensor | None:
    """A tuned kernel's output whose gradients have a kernel too; None where PyTorch is to compute
    both.
    """
    tensors = call.query, call.key, call.value
    bare = call._replace(**_named([t.detach() for t in tensors]))
    plan = writing_lse(bare, find(bare))
    if not isinstance(plan, Plan) or not plan.has_lse:
        return None
    lse = torch.empty(0, dtype=torch.float32, device="meta")
    if not isinstance(find(_gradients_of(bare, bare.query, lse, bare.query)), Plan):
        return None

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        return call._replace(**_named(inputs)).run_with_lse(plan)

    def backward(inputs: Tensors, out: Any, lse: Any, grad_out: Any) -> Tensors | Refusal:
        posed = _gradients_of(call._replace(**_named(inputs)), out, lse, grad_out.contiguous())
        plan = find(posed)
        return posed.run(plan) if isinstance(plan, Plan) else plan

    def compose(*inputs: torch.Tensor) -> torch.Tensor:
        return call._replace(**_named(inputs)).by_pytorch()

    return recorded(tensors, forward, backward, compose)


def _named(tensors: Any) -> dict[str, torch.Tensor]:
    return dict(zip(("query", "key", "value"), tensors, strict=True))


def _gradients_of(call: VarlenCall, out: Any, lse: Any, grad_out: Any) -> PackedGradientsCall:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return PackedGradientsCall(call, out, lse, grad_out, is_deterministic)
