"""Problem of attention's gradients: `AttentionBackwardProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from tuner.errors import ConfigError
from tuner.problem.attention import AttentionProblem
from tuner.problem.attention_masks import Layout
from tuner.problem.base import E4M3, DType, Meaning, Operand, Problem

#: Keys shared with attention, and the key for deterministic gradients.
_SHARED = (
    *("B", "H", "HKV", "S", "SQ", "SKV", "D"),
    *("causal", "window", "left", "right", "softcap", "varlen", "dtype", "layout"),
)

STARTS = ("cu_seqlens_q", "cu_seqlens_kv")
"""Operands that hold where packed sequences start."""


@dataclass(frozen=True)
class AttentionBackwardProblem(Problem):
    """Gradients of query, key and value from that of attention's output.

    Inputs are query, key, value, out, the log-sum-exp of attention, and the gradient of out. The
    log-sum-exp is fp32 (B, H, SQ), with ``varlen=1`` (H, total_q), a natural logarithm, -inf for a
    query that sees no key.

    Shapes, masks, soft caps, variable lengths, layouts and the scale are those of
    `AttentionProblem`, whose biases, pages and e4m3 have no gradients here. Each gradient lies as
    its tensor does; those of a KV head are sums over its query heads.

    With ``deterministic=1`` equal inputs have equal gradients to the bit in every run.
    """

    op: ClassVar[str] = "attention_backward"
    keys: ClassVar[Mapping[str, str]] = {
        **{key: AttentionProblem.keys[key] for key in _SHARED},
        "deterministic": "is_deterministic",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        **{key: AttentionProblem.meanings[key] for key in _SHARED},
        "dtype": Meaning("type of all tensors: fp16 or bf16"),
        "deterministic": Meaning("1: the same bits in every run"),
    }
    required: ClassVar[tuple[str, ...]] = AttentionProblem.required
    omitted: ClassVar[Mapping[str, Any]] = {"softcap": 0.0, "is_varlen": False}

    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    batch: int = 1
    heads_q: int = 16
    heads_kv: int = 0
    is_causal: bool = False
    dtype: DType = "float16"
    layout: Layout = "bhsd"
    window_left: int = -1
    window_right: int = -1
    is_deterministic: bool = False
    softcap: float = 0.0
    is_varlen: bool = False

    def __post_init__(self) -> None:
        if self.dtype == E4M3:
            raise ConfigError("dtype=e4m3 has no gradients (allowed: fp16, bf16)")
        forward = self.forward  # which refuses what is out of range, and reduces equal masks
        for field in fields(self):
            if field.name != "is_deterministic":
                object.__setattr__(self, field.name, getattr(forward, field.name))

    @cached_property
    def forward(self) -> AttentionProblem:
        """Attention problem whose gradients these are."""
        shared = {f.name: getattr(self, f.name) for f in fields(self)}
        del shared["is_deterministic"]
        return AttentionProblem(**shared)

    @classmethod
    def of(
        cls, forward: AttentionProblem, is_deterministic: bool = False
    ) -> AttentionBackwardProblem:
        """Problem of the gradients of an attention.

        Raises:
            ConfigError: when its gradients are not supported.
        """
        shared = {f.name: getattr(forward, f.name) for f in fields(cls) if hasattr(forward, f.name)}
        problem = cls(**shared, is_deterministic=is_deterministic)
        if problem.forward != forward:
            raise ConfigError(
                f"{forward.label()} has no gradients (allowed: masks, windows, soft caps, varlen=1)"
            )
        return problem

    def label(self) -> str:
        return self.forward.label() + (",deterministic=1" if self.is_deterministic else "")

    @property
    def is_windowed(self) -> bool:
        """As for the attention."""
        return self.forward.is_windowed

    @property
    def visible(self) -> tuple[int, int]:
        """(left, right), as for the attention."""
        return self.forward.visible

    @property
    def flops(self) -> int:
        """Five products; attention has two."""
        return self.forward.flops * 5 // 2

    @property
    def operands(self) -> tuple[Operand, ...]:
        query, key, value, out = self.forward.matrices
        batch, heads, rows, _ = out.shape
        starts = [o for o in self.forward.operands if o.name in STARTS]
        return (
            *(query, key, value, replace(out, is_output=False)),
            Operand("logsumexp", (batch, heads, rows), (heads * rows, rows, 1), "float32"),
            replace(out, name="grad_out", is_output=False),
            *starts,
            *(replace(o, name=f"grad_{o.name}", is_output=True) for o in (query, key, value)),
        )
