"""Attention over packed sequences of unlike lengths: the tuned kernel, or PyTorch's, one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner.errors import ConfigError
from tuner.problem import AttentionProblem
from tuner.runtime import counters, devices, guards, native
from tuner.runtime.plan import KernelPlan, Plan
from tuner.runtime.refusal import Refusal, once
from tuner.runtime.table import table

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Sized(AttentionProblem):
    """A call's problem, whose packed tensors have as many rows as the call's, not as the lengths
    that kernels are measured on.
    """

    rows_q: int = 0
    rows_kv: int = 0

    @property
    def total_q(self) -> int:
        return self.rows_q

    @property
    def total_kv(self) -> int:
        return self.rows_kv


@dataclass(frozen=True)
class _Asked:
    """What a call asks for beside its tensors."""

    batch: int
    longest_q: int
    longest_kv: int
    is_causal: bool
    scale: float
    enable_gqa: bool


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
    """softmax(scale * Q K^T + mask) V of each of B sequences that lie one after the other.

    Sequence b has the queries cu_seqlens_q[b]..cu_seqlens_q[b + 1] and the keys and values
    cu_seqlens_kv[b]..cu_seqlens_kv[b + 1]; either may be none. A query without keys has zeros for
    its output.

    Where no tuned kernel can, PyTorch's attention answers for one sequence after the other, which
    reads the lengths back and so waits for the device, and cannot be captured in a CUDA graph; each
    such call is counted by its reason (`tuner.stats`). Kernels are found by B and the longest
    lengths, each rounded up to a power of two: those tuned there, or near there.

    The tuned kernel cannot look at the lengths before it runs: it trusts that cu_seqlens begin with
    0, never fall, end within the tensors, and that no sequence is longer than said. What follows a
    sequence's values up to the next whole tile is multiplied by zero: an infinity or a NaN there
    would reach its output, so all of `value` must be finite.

    Args:
        query: (total_q, H, D), fp16 or bf16; a tuned kernel takes contiguous ones.
        key: (total_kv, HKV, D), as `query`.
        value: (total_kv, HKV, D), as `query`.
        cu_seqlens_q: int32 (B + 1), on the tensors' device; B may be 0.
        cu_seqlens_kv: int32 (B + 1), as `cu_seqlens_q`.
        max_seqlen_q: queries of the longest sequence, or more.
        max_seqlen_kv: keys of the longest sequence, or more.
        is_causal: query i of a sequence sees its keys 0..i.
        scale: of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.

    Returns:
        (total_q, H, D), of the inputs' type. Rows beyond the last sequence's end are undefined.

    Raises:
        ConfigError: on tensors that are not as above, or longest lengths below 0; where PyTorch
            answers, on lengths that do not fit the tensors.
        Whatever `scaled_dot_product_attention` raises on arguments that it refuses, and what CUDA
        reports of an earlier kernel.
    """
    _check(query, key, value, cu_seqlens_q, cu_seqlens_kv)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if longest < 0:
            raise ConfigError(f"{name}={longest} is out of range (allowed: 0 or more)")
    tensors = guards.autocast(devices.TYPE, query, key, value)
    query, key, value = tensors
    wanted = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else float(scale)
    asked = _Asked(
        cu_seqlens_q.numel() - 1,
        int(max_seqlen_q),
        int(max_seqlen_kv),
        bool(is_causal),
        wanted,
        enable_gqa,
    )
    starts = cu_seqlens_q, cu_seqlens_kv
    if not torch.compiler.is_compiling():
        out = _serve((query, key, value), starts, asked)
        if not isinstance(out, Refusal):
            return out
        counters.count_fallback(out.reason)
    return _one_by_one((query, key, value), starts, asked)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_kv: torch.Tensor,
) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(t.dim() != 3 for t in (query, key, value)) or key.shape != value.shape:
        raise ConfigError(f"{shapes} (allowed: (total_q, H, D) and twice (total_kv, HKV, D))")
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


def _serve(
    tensors: Tensors, starts: tuple[torch.Tensor, torch.Tensor], asked: _Asked
) -> torch.Tensor | Refusal:
    """The tuned kernel's output, or why there is none."""
    if reason := guards.unserved(*tensors, *starts) or _unpacked(tensors, starts, asked):
        return once(reason)
    query, key, _ = tensors
    kind = (
        *("varlen", query.shape[1:], key.shape[1], query.dtype, query.device),
        *(asked.is_causal, asked.scale),
        *map(_rounded, (asked.batch, asked.longest_q, asked.longest_kv)),
    )
    plan = table.get(kind)
    if plan is None:
        plan = table.find_out(
            kind,
            None,
            lambda: _problem(tensors, asked),
            asked.scale,
            query.get_device(),
        )
    if not isinstance(plan, Plan):
        return plan
    if reason := guards.misaligned(*tensors):
        return once(reason)
    if isinstance(plan, KernelPlan):
        plan = _sized(plan, asked, tensors[0].shape, tensors[1].shape, query.dtype)
    # A batch of one, as the problem's operands have it.
    out = table.run(plan, *(t.transpose(0, 1)[None] for t in tensors), *starts)
    return out if isinstance(out, Refusal) else out[0].transpose(0, 1)


def _unpacked(tensors: Tensors, starts: tuple[torch.Tensor, torch.Tensor], asked: _Asked) -> str:
    """Why no kernel takes such a call, whatever the store says; else empty."""
    if guards.wants_gradient(*tensors):
        return "a gradient is wanted: kernels of variable lengths have no backward pass"
    if not asked.scale > 0:  # NaN too
        return guards.SCALE
    sizes = asked.batch, asked.longest_q, asked.longest_kv
    if any(t.numel() == 0 for t in tensors) or not all(sizes):
        return "there are no queries or no keys"
    if len({t.device for t in (*tensors, *starts)}) > 1 or len({t.dtype for t in tensors}) > 1:
        return "the tensors differ in device or type"
    if not all(t.is_contiguous() for t in (*tensors, *starts)):
        return "packed tensors are not contiguous"
    if tensors[0].shape[1] != tensors[1].shape[1] and not asked.enable_gqa:
        return "heads are grouped without enable_gqa"
    return ""


def _problem(tensors: Tensors, asked: _Asked) -> AttentionProblem:
    """The problem whose kernels serve calls of such sizes.

    Raises:
        ConfigError: when no tuned kernel has such types or sizes.
    """
    query, key, _ = tensors
    guards.check_alike(*tensors)
    return AttentionProblem(
        seqlen_q=_rounded(asked.longest_q),
        seqlen_kv=_rounded(asked.longest_kv),
        head_dim=query.shape[2],
        batch=_rounded(asked.batch),
        heads_q=query.shape[1],
        heads_kv=key.shape[1],
        is_causal=asked.is_causal,
        dtype=guards.DTYPES[query.dtype],
        is_varlen=True,
    )


def _rounded(size: int) -> int:
    """Up to a power of two: few kinds of call, however lengths vary."""
    return 1 << (size - 1).bit_length()


@lru_cache(256)
def _sized(
    plan: KernelPlan, asked: _Asked, shape_q: torch.Size, shape_kv: torch.Size, dtype: torch.dtype
) -> KernelPlan:
    """The plan with the sizes of a call."""
    problem = _Sized(
        seqlen_q=asked.longest_q,
        seqlen_kv=asked.longest_kv,
        head_dim=shape_q[2],
        batch=asked.batch,
        heads_q=shape_q[1],
        heads_kv=shape_kv[1],
        is_causal=asked.is_causal,
        dtype=guards.DTYPES[dtype],
        is_varlen=True,
        rows_q=shape_q[0],
        rows_kv=shape_kv[0],
    )
    return plan.sized(problem, asked.scale)


def _one_by_one(
    tensors: Tensors, starts: tuple[torch.Tensor, torch.Tensor], asked: _Asked
) -> torch.Tensor:
    """PyTorch's attention of each sequence, which must know the lengths."""
    query, key, value = tensors
    of_queries = _ends(starts[0], "cu_seqlens_q", query.shape[0], asked.longest_q)
    of_keys = _ends(starts[1], "cu_seqlens_kv", key.shape[0], asked.longest_kv)
    done = []
    for (first, last), keys in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
        rows, seen = query[first:last], slice(*keys)
        if len(rows) and keys[0] < keys[1]:
            done.append(_attend(rows, key[seen], value[seen], asked))
        else:
            done.append(torch.zeros_like(rows))
    return torch.cat([*done, torch.zeros_like(query[of_queries[-1] :])])


def _ends(starts: torch.Tensor, name: str, rows: int, longest: int) -> list[int]:
    """`starts` as whole numbers; waits for the device."""
    found: list[int] = starts.tolist()
    lengths = [end - start for start, end in pairwise(found)]
    falls = min(lengths, default=0) < 0
    if found[0] != 0 or falls or found[-1] > rows:
        raise ConfigError(
            f"{name} runs from {found[0]} to {found[-1]}{', falling on the way' if falls else ''} "
            f"(allowed: from 0, never falling, to {rows} at most)"
        )
    if max(lengths, default=0) > longest:
        raise ConfigError(
            f"{name} has a sequence of {max(lengths)} (allowed: up to max_seqlen, {longest})"
        )
    return found


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Asked
) -> torch.Tensor:
    """One sequence's, (S, H, D)."""
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    arguments = query, key, value, None, 0.0, asked.is_causal
    if torch.compiler.is_compiling():
        out = scaled_dot_product_attention(
            *arguments, scale=asked.scale, enable_gqa=asked.enable_gqa
        )
    else:
        out = native.attend(*arguments, asked.scale, asked.enable_gqa)
    return out[0].transpose(0, 1)
