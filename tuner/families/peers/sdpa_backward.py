"""Backward kernels of PyTorch's fused attention, and of FlashAttention-3 and -4 where installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.base import Domain
from tuner.families.peers import Vendor, installed, rated_us
from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, Layout, Problem

PEERS = ("flash3", "flash4")
#: kernel -> microseconds of a tiny call, then TFLOP/s of a large one: full and causal at D <= 64,
#: full and causal above. One H200, CUDA 13.0, torch 2.11, cuDNN 9.19, bf16: (16,16,2048,64) and
#: (4,16,2048,128), and (1,16,1024,64) for the first. `flash4` was not measured: taken for flash3.
RATES: dict[str, tuple[float, float, float, float, float]] = {
    "cudnn": (13.0, 426, 324, 505, 381),
    "flash2": (17.0, 248, 197, 261, 205),
    "flash3": (9.0, 504, 420, 559, 466),
    "flash4": (9.0, 504, 420, 559, 466),
}
#: Rows that a block of cuDNN's backward kernels steps over, and rows by which it hides what lies
#: behind the last one.
_CUDNN_STEP, _CUDNN_HIDDEN = 128, 64
Differentiate = Callable[..., tuple[Any, Any, Any]]
"""call(query, key, value, out, logsumexp, grad_out) -> gradients of query, key and value. Packed
sequences have two further arguments, their starts of queries and keys."""


def may_be_nan(seqlen_q: int, seqlen_kv: int) -> bool:
    """True for lengths at which cuDNN's gradients may be NaN: they end in the first half of a step.

    The other half of such a step is padding. Padded keys are then read as zeros and not hidden.
    Their probability exp(0 - log-sum-exp) is infinite in rows whose log-sum-exp is below -88.7,
    the logarithm of the largest fp32 number. Infinity times zero is NaN in the gradient of those
    queries.

    Padded queries do the same to the gradients of keys and values, seen with one query. Versions
    9.19 to 9.30 were seen to, on Hopper, with a mask and without, at each head dimension tried.
    """
    return any(0 < n % _CUDNN_STEP <= _CUDNN_HIDDEN for n in (seqlen_q, seqlen_kv))


class SdpaBackward(Vendor):
    """``kernel``: cudnn, flash2, flash3, flash4; each from any forward kernel's log-sum-exp."""

    name: ClassVar[str] = "sdpa_backward"
    op: ClassVar[str] = AttentionBackwardProblem.op
    offered: ClassVar[tuple[str, ...]] = ("cudnn", "flash2", "flash3")
    on_request: ClassVar[tuple[str, ...]] = ("flash4",)
    options: ClassVar[Mapping[str, Domain]] = {"layout": ("bhsd", "bshd")}
    layouts: ClassVar[Mapping[str, Layout]] = dict.fromkeys(RATES, "bshd")

    def found(self) -> tuple[str, ...]:
        return ("flash4",) if installed.is_package("flash4") else ()

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, AttentionBackwardProblem):
            return ""
        if kernel == "cudnn" and problem.is_windowed:
            return "cudnn has no sliding window"
        if problem.softcap and kernel != "flash3":
            return f"{kernel} has no soft cap"
        if problem.is_varlen and kernel in ("cudnn", "flash4"):
            return f"{kernel} has no variable lengths"
        if kernel == "cudnn" and problem.is_deterministic:
            return "cudnn is not deterministic"
        if kernel == "cudnn" and may_be_nan(problem.seqlen_q, problem.seqlen_kv):
            return (
                f"cudnn's gradients may be NaN where SQ or SKV is 1 to {_CUDNN_HIDDEN} above a "
                f"multiple of {_CUDNN_STEP}"
            )
        if kernel == "flash3" and problem.is_deterministic and problem.head_dim > 192:
            return "flash3 is not deterministic with head dimensions above 192"
        is_masked = problem.is_causal or problem.is_windowed
        if is_masked and kernel != "cudnn" and problem.seqlen_q != problem.seqlen_kv:
            mask = "sliding window" if problem.is_windowed else "causal mask"
            return f"{kernel} aligns a {mask} bottom-right: SQ and SKV must be equal"
        return ""

    def connect(
        self, problem: AttentionBackwardProblem, kernel: str, scale: float
    ) -> Differentiate | str:
        if kernel == "cudnn":
            return cudnn_call(problem, scale)
        if kernel == "flash2":
            return flash2_call(problem, scale)
        module = installed.module_of(kernel)
        if isinstance(module, str):
            return module
        return flash3_call(problem, scale) if kernel == "flash3" else flash4_call(problem, scale)

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), **installed.versions(PEERS)}

    def legality_facts(self, problem: Problem) -> Hashable:
        if not isinstance(problem, AttentionBackwardProblem):
            return problem
        return (
            *(problem.seqlen_q == problem.seqlen_kv, problem.is_causal, problem.is_deterministic),
            may_be_nan(problem.seqlen_q, problem.seqlen_kv),
        )

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        if not isinstance(problem, AttentionBackwardProblem):
            return float("inf")
        return rated_us(RATES[config["kernel"]], problem, gpu)


def cudnn_call(problem: AttentionBackwardProblem, scale: float) -> Differentiate:
    """PyTorch's operator of cuDNN, whose log-sum-exp has a dimension more."""
    import torch

    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    lengths = problem.seqlen_q, problem.seqlen_kv
    state = _random_state(torch)

    def call(query: Any, key: Any, value: Any, out: Any, lse: Any, grad: Any) -> Any:
        none = (None, None, None)  # bias, starts of sequences
        return operator(
            *(grad, query, key, value, out, lse.unsqueeze(-1), *state, *none, *lengths),
            *(0.0, problem.is_causal),
            scale=scale,
        )

    return call


def flash2_call(problem: AttentionBackwardProblem, scale: float) -> Differentiate:
    """FlashAttention-2's. PyTorch's setting for the whole process makes it deterministic."""
    import torch

    operator = torch.ops.aten._flash_attention_backward.default
    lengths = problem.seqlen_q, problem.seqlen_kv
    is_packed = problem.is_varlen
    sides = problem.visible if problem.is_windowed else (None, None)
    window = dict(zip(("window_size_left", "window_size_right"), sides, strict=True))
    state = _random_state(torch)

    def call(query: Any, key: Any, value: Any, out: Any, lse: Any, grad: Any, *starts: Any) -> Any:
        tensors = [_rows(t, is_packed) for t in (grad, query, key, value, out)]
        if is_packed:
            lse = lse[0]
        with _deterministic(torch) if problem.is_deterministic else contextlib.nullcontext():
            grads = operator(
                *(*tensors, lse, *(starts or (None, None)), *lengths, 0.0, problem.is_causal),
                *state,
                scale=scale,
                **window,
            )
        return tuple(_heads(t, is_packed) for t in grads)

    return call


def flash3_call(problem: AttentionBackwardProblem, scale: float) -> Differentiate:
    """FlashAttention-3's operator, registered by its module's import."""
    import torch

    operator = torch.ops.flash_attn_3.bwd
    left, right = problem.visible if problem.is_windowed else (-1, -1)
    is_packed, names = problem.is_varlen, ("cu_seqlens_q", "cu_seqlens_k")

    def call(query: Any, key: Any, value: Any, out: Any, lse: Any, grad: Any, *starts: Any) -> Any:
        tensors = [_rows(t, is_packed) for t in (grad, query, key, value, out)]
        grads = [torch.empty_like(t) for t in tensors[1:4]]
        packed = dict(zip(names, starts, strict=False))
        if is_packed:
            lse = lse[0]
            packed |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_kv}
        operator(
            *(*tensors, lse, *grads),
            **packed,
            softmax_scale=scale,
            is_causal=problem.is_causal,
            window_size_left=left,
            window_size_right=right,
            softcap=problem.softcap,
            deterministic=problem.is_deterministic,
        )
        return tuple(_heads(t, is_packed) for t in grads)

    return call


def flash4_call(problem: AttentionBackwardProblem, scale: float) -> Differentiate:
    """FlashAttention-4's, of the package."""
    module = importlib.import_module("flash_attn.cute.interface")
    left, right = problem.visible if problem.is_windowed else (None, None)

    def call(query: Any, key: Any, value: Any, out: Any, lse: Any, grad: Any) -> Any:
        query, key, value, out, grad = (t.transpose(1, 2) for t in (query, key, value, out, grad))
        grads = module._flash_attn_bwd(
            *(query, key, value, out, grad, lse),
            softmax_scale=scale,
            causal=problem.is_causal,
            window_size_left=left,
            window_size_right=right,
            deterministic=problem.is_deterministic,
        )
        return tuple(t.transpose(1, 2) for t in grads[:3])

    return call


def _rows(tensor: Any, is_packed: bool) -> Any:
    """(B, H, S, D) as (B, S, H, D), and (1, H, total, D) of packed sequences as (total, H, D)."""
    rows = tensor.transpose(1, 2)
    return rows[0] if is_packed else rows


def _heads(tensor: Any, is_packed: bool) -> Any:
    """The inverse of `_rows`."""
    return (tensor[None] if is_packed else tensor).transpose(1, 2)


def _random_state(torch: Any) -> tuple[Any, Any]:
    """Dropout's state, which is not read without dropout."""
    return (
        torch.empty(2, dtype=torch.uint64, device="cuda"),
        torch.empty((), dtype=torch.uint64, device="cuda"),
    )


@contextlib.contextmanager
def _deterministic(torch: Any) -> Iterator[None]:
    """PyTorch's operators as they are where a program wants equal bits in every run, without the
    filling of new memory that comes with it.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
