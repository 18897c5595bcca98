"""Attention under FlexAttention's block masks, by a tuned kernel or by FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.library import Library, register_autograd, register_fake

from tuner.errors import ConfigError
from tuner.families.peers.flex import BY_TABLES, mask_by
from tuner.problem import AttentionProblem
from tuner.runtime.attention import block_mask as masks
from tuner.runtime.attention.attention_call import pose, scale_of, without_lse
from tuner.runtime.attention.composed import Extras
from tuner.runtime.call import devices, guards, native
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, answer, serve
from tuner.runtime.call.table import table

if TYPE_CHECKING:  # all of Dynamo comes with it: functions import it where a mask is given
    from torch.nn.attention.flex_attention import BlockMask


class _Sparse(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    block_mask: masks.Mask
    extras: Extras
    scale: float
    with_lse: bool


class SparseCall(_Sparse, Call):
    """Attention under a block mask."""

    __slots__ = ()
    aligned = 3
    copied = "query", "key", "value"

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value; the mask's tables are made once a kernel is found."""
        return self.query, self.key, self.value

    def refusal(self) -> Refusal | None:
        query, key, value = self.inputs
        if guards.wants_gradient(query, key, value):
            return Refusal(Kind.GRADIENT, "kernels of block masks have no backward pass")
        if refusal := guards.unscaled(self.scale):
            return refusal
        if len({t.device for t in (query, key, value, masks.counts_of(self.block_mask))}) > 1:
            return Refusal(Kind.MIXED)
        if any(t.dim() != 4 or not t.numel() for t in (query, key, value)):
            return Refusal(Kind.EMPTY)
        return masks.misfit(self.block_mask, query, key)

    def kind(self) -> Hashable:
        axes = masks.axes_of(self.block_mask)
        return Call.key(self, axes, self.extras, self.scale)

    def pose(self) -> Posed:
        posed = pose(*self.inputs, False, self.scale, extras=self.extras)
        if not isinstance(posed.problem, AttentionProblem):
            raise ConfigError(f"{posed.problem.op} has no block mask")
        axes = masks.axes_of(self.block_mask)
        return replace(posed, problem=replace(posed.problem, block_mask=axes))

    def run(self, plan: Plan) -> Any:
        if self.with_lse and not plan.has_lse:
            return without_lse(plan)
        tables = masks.tables_of(self.block_mask)
        if isinstance(tables, Refusal):
            return tables
        run = table.run_with_lse if self.with_lse else table.run
        return run(plan, *self.inputs, *tables)

    def by_pytorch(self) -> Any:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        query, key, value = self.inputs
        if not all([t.numel() for t in (query, key, value)]):
            return self._of_nothing()
        softcap, mask = self.extras.softcap, self.block_mask
        by_tables: dict[str, Any] = {}
        if isinstance(mask, masks.BlockTables):
            mask = mask_by(query.shape[2], key.shape[2], *mask)
            by_tables = {"kernel_options": dict(BY_TABLES)}
        options: dict[str, Any] = {
            **by_tables,
            "block_mask": mask,
            "scale": self.scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if softcap:
            options["score_mod"] = _capped(softcap)
        if self.with_lse:
            options["return_aux"] = AuxRequest(lse=True)
        is_fused = query.device.type == devices.TYPE and not torch.compiler.is_compiling()
        answer = (_compiled() if is_fused else flex_attention)(query, key, value, **options)
        return (answer[0], answer[1].lse) if self.with_lse else answer

    def _of_nothing(self) -> Any:
        """The answer where there are no queries or no keys, which FlexAttention does not take."""
        query, key, value = self.inputs
        options = None, 0.0, False, self.scale, query.shape[1] != key.shape[1]
        out = native.attend(query, key, value, *options)
        if not self.with_lse:
            return out
        return out, query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * Q K^T + mask) V under a block mask of FlexAttention.

    Means ``torch.nn.attention.flex_attention.flex_attention(query, key, value,
    block_mask=block_mask)``. FlexAttention, compiled on a GPU, answers calls that no tuned kernel
    serves: gradients, graphs of torch.compile, masks of other sizes than the tensors. Each such
    call is counted by its reason (`tuner.stats`). Queries without a visible key have zeros for
    their output and minus infinity for their log-sum-exp.

    In a graph of torch.compile the call is the operator `tuner::sparse_attention`. The mask's
    tables must have been made before, by an eager call or by `prepare_block_mask`.

    A tuned kernel reads tables over blocks of 128 queries and 128 keys. A partially visible block
    has a bit for each pair. The first call with a mask, of any ``BLOCK_SIZE``, makes its tables,
    which live as long as the `BlockMask` object. If tensors of the mask function change, make a new
    `BlockMask`. A captured CUDA graph reads the tables: keep its masks alive, and call once with
    each before the capture.

    Args:
        query: (B, H, SQ, D), fp16 or bf16. TMA needs stride 1 along D, and multiples of 16 bytes
            along the other dimensions.
        key: (B, HKV, SKV, D), as `query`, HKV a divisor of H.
        value: (B, HKV, SKV, D), as `key`.
        block_mask: (B or 1, H or 1, SQ, SKV), on the tensors' device.
        scale: factor of the scores; 1/sqrt(D) when None.
        softcap: each scaled score s becomes softcap * tanh(s / softcap), before the mask; 0: none.
        return_lse: return (out, log-sum-exp). The latter is fp32 (B, H, SQ), the natural logarithm
            of the sum of the exponentials.

    Returns:
        (B, H, SQ, D), of the inputs' type, or with `return_lse` that and the log-sum-exp.

    Raises:
        ConfigError: when `block_mask` is not a `BlockMask`, or `softcap` is out of range.
        Exception: an error of `flex_attention` on arguments that it refuses, or of an earlier
            kernel.
    """
    masks.check(block_mask)
    extras = Extras.of(None, softcap)
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    factor = scale_of(query, scale)
    if torch.compiler.is_compiling() and _is_operable(query, key, value, block_mask):
        tables = masks.made_of(block_mask)
        if tables is not None:
            name = "sparse_attention_with_lse" if return_lse else "sparse_attention"
            operator = getattr(torch.ops.tuner, name)
            return operator(query, key, value, *tables, factor, softcap)
    return serve(SparseCall(query, key, value, block_mask, extras, factor, return_lse))


def _is_operable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: BlockMask
) -> bool:
    """True when a kernel may take such tensors, whatever the store says. May be traced."""
    tensors = query, key, value
    return (
        all(t.dim() == 4 and t.device.type == devices.TYPE for t in tensors)
        and query.dtype in guards.DTYPES
        and not guards.wants_gradient(*tensors)
        and not masks.misfit(block_mask, query, key)
    )


_library = Library("tuner", "FRAGMENT")
_TENSORS = "Tensor query, Tensor key, Tensor value"
_TABLES = "Tensor block_counts, Tensor block_indices, Tensor block_bits"


def _sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_counts: torch.Tensor,
    block_indices: torch.Tensor,
    block_bits: torch.Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    tables = masks.BlockTables(block_counts, block_indices, block_bits)
    out = _served(query, key, value, tables, scale, softcap, with_lse=False)
    return guards.laid_out_as(query, out)


def _sparse_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_counts: torch.Tensor,
    block_indices: torch.Tensor,
    block_bits: torch.Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    tables = masks.BlockTables(block_counts, block_indices, block_bits)
    out, lse = _served(query, key, value, tables, scale, softcap, with_lse=True)
    return guards.laid_out_as(query, out), lse.contiguous()


def _served(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: masks.BlockTables,
    scale: float | None,
    softcap: float,
    *,
    with_lse: bool,
) -> Any:
    """The answer under tables: a tuned kernel's, or FlexAttention's with a mask made of them.

    Raises:
        ConfigError: when the tables are not for such tensors.
    """
    guards.check_heads(query, key, value)
    masks.check_tables(tables, query, key)
    factor = scale_of(query, scale)
    query, key, value = (t.detach() for t in (query, key, value))  # autograd has had the call
    call = SparseCall(query, key, value, tables, Extras.of(None, softcap), factor, with_lse)
    out = answer(call)
    return call.by_pytorch() if out is None else out


def _fake(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(query)


def _fake_with_lse(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _no_gradient(*_: Any) -> Any:
    """Raises: ConfigError: always."""
    raise ConfigError(
        "tuner::sparse_attention has no gradient (allowed: tuner.sparse_attention, which leaves "
        "such calls to FlexAttention)"
    )


for _name, _result, _real, _faked in (
    ("sparse_attention", "Tensor", _sparse_attention, _fake),
    (
        "sparse_attention_with_lse",
        "(Tensor out, Tensor lse)",
        _sparse_attention_with_lse,
        _fake_with_lse,
    ),
):
    _library.define(
        f"{_name}({_TENSORS}, {_TABLES}, float? scale=None, float softcap=0.) -> {_result}",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    register_fake(f"tuner::{_name}", _faked, lib=_library)
    register_autograd(f"tuner::{_name}", _no_gradient, lib=_library)


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention as a fused kernel; called plainly it holds all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


@lru_cache(256)
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    """Score function of a soft cap; one object each, since torch.compile compiles every new one."""

    def capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
