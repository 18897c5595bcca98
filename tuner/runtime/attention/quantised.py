"""Attention of e4m3 tensors with descale factors, by a tuned kernel or by PyTorch in bf16."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import NamedTuple, Self

import torch

from tuner.errors import ConfigError
from tuner.problem import E4M3
from tuner.runtime.attention.attention_call import pose, scale_of
from tuner.runtime.call import guards, handed_over, native
from tuner.runtime.call.plan import Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, serve

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    tensors: Tensors,
    descales: tuple[torch.Tensor | None, ...],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V of dequantised tensors, in bf16.

    Args:
        tensors: query, key and value as of `attention`, float8_e4m3fn.
        descales: positive fp32 factors, (B, H) of the query, (B, HKV) of key and value.
        is_causal: as in `attention`.
        scale: as in `attention`.
        enable_gqa: as in `attention`.

    Raises:
        ConfigError: on a tensor of another type, or a factor that is missing or does not fit.
    """
    factors = _checked(tensors, descales)
    return serve(QuantisedCall(tensors, factors, bool(is_causal), scale, enable_gqa))


class _Quantised(NamedTuple):
    tensors: Tensors
    factors: Tensors
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class QuantisedCall(_Quantised, Call):
    """Attention of e4m3 tensors."""

    __slots__ = ()
    aligned = 3
    copied = ("tensors",)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return *self.tensors, *self.factors

    def refusal(self) -> Refusal | None:
        if guards.wants_gradient(*self.inputs):
            return Refusal(Kind.GRADIENT, "e4m3 kernels have no backward pass")
        return guards.unscaled(self.scale)

    def kind(self) -> Hashable:
        layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in self.tensors]
        devices = [t.device for t in self.factors]
        return E4M3, *layouts, *devices, self.is_causal, self.scale, self.enable_gqa

    def pose(self) -> Posed:
        if len({t.device for t in self.inputs}) > 1:
            raise ConfigError("tensors and factors differ in device")
        scale = scale_of(self.tensors[0], self.scale)
        return pose(*self.tensors, self.is_causal, scale, self.enable_gqa, dtypes=guards.QUANTISED)

    def realigned(self) -> Self | None:
        copies = query, key, value = handed_over.aligned(*self.tensors)
        is_any = any(map(operator.is_not, copies, self.tensors))
        return self._replace(tensors=(query, key, value)) if is_any else None

    def by_pytorch(self) -> torch.Tensor:
        query, key, value = (
            (tensor.float() * factor[..., None, None]).to(torch.bfloat16)
            for tensor, factor in zip(self.tensors, self.factors, strict=True)
        )
        return native.attend(
            query, key, value, None, 0.0, self.is_causal, self.scale, self.enable_gqa
        )


def _checked(tensors: Tensors, descales: tuple[torch.Tensor | None, ...]) -> Tensors:
    factors = []
    for name, tensor, factor in zip("qkv", tensors, descales, strict=True):
        if tensor.dtype not in guards.QUANTISED:
            raise ConfigError(
                f"descale factors are for float8_e4m3fn tensors, {name} is {tensor.dtype}"
            )
        if tensor.dim() != 4:
            raise ConfigError(f"{name} is {tuple(tensor.shape)} (allowed: (B, H, S, D))")
        sizes = tuple(tensor.shape[:2])
        if factor is None:
            raise ConfigError(f"descale_{name} is missing (allowed: fp32 {sizes})")
        if factor.dtype != torch.float32 or tuple(factor.shape) != sizes:
            shape = tuple(factor.shape)
            raise ConfigError(
                f"descale_{name} is {factor.dtype} {shape} (allowed: torch.float32 {sizes})"
            )
        factors.append(factor.contiguous())
    query, key, value = factors
    return query, key, value
