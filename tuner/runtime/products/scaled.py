"""`scaled_mm`: a tuned product of e4m3 if it was measured fastest, else PyTorch's."""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil
from typing import NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.families.base import Strides
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem, Scales
from tuner.runtime.call import guards, handed_over, serving
from tuner.runtime.call.plan import Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`torch._scaled_mm` by the fastest kernel measured on this GPU: scale_a * (a @ b) * scale_b.

    Both accumulations (`GemmProblem.fast_accum`) and all kinds of factors are problems of their
    own. So is an output in e4m3, the operand of a product behind it. PyTorch's `_scaled_mm` answers
    all other calls with the same arguments: a bias, other types or layouts. Each such call is
    counted by its reason (`tuner.stats`).

    Args:
        a: (M, K), float8_e4m3fn, contiguous.
        b: (K, N), float8_e4m3fn, column-major.
        scale_a: fp32: one element, (M, 1) for a factor of each row, or (M, K / 128) for block-wise
            factors, with any strides.
        scale_b: fp32: one element, (1, N), or (K / 128, N / 128).
        bias: as in `torch._scaled_mm`, added before `scale_result`; not tuned.
        scale_result: fp32, one element, by which an output in e4m3 is multiplied, here as in
            kernels. (On CUDA, PyTorch 2.11's own leaves it out.) Magnitudes above 448 become 448.
            Without one such outputs are not tuned.
        out_dtype: bf16, fp16 or e4m3; None is e4m3. That has no block-wise factors.
        use_fast_accum: sums may stay in the tensor cores' accumulators. Long sums of one sign then
            lose a tenth and more, by every kernel.

    Returns:
        (M, N), of `out_dtype`.
    """
    call = ScaledCall(a, b, scale_a, scale_b, bias, scale_result, out_dtype, bool(use_fast_accum))
    return serving.serve(call)


class _Scaled(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    scale_result: torch.Tensor | None
    out_dtype: torch.dtype | None
    fast_accum: bool


class ScaledCall(_Scaled, Call):
    """A call of `scaled_mm`."""

    __slots__ = ()
    aligned = 5

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        factor = self.scale_result
        operands = self.a, self.b, self.scale_a, self.scale_b
        return operands if factor is None else (*operands, factor)

    def refusal(self) -> Refusal | None:
        is_e4m3 = self.out_dtype in (None, torch.float8_e4m3fn)
        if self.bias is not None or is_e4m3 != (self.scale_result is not None):
            return Refusal(Kind.RESULT)
        if guards.wants_gradient(*self.inputs):
            return Refusal(Kind.GRADIENT, "tuned kernels have no backward pass")
        return None

    def kind(self) -> Hashable:
        return self.key(self.out_dtype, self.fast_accum)

    def pose(self) -> Posed:
        operands = self.a, self.b, self.scale_a, self.scale_b
        options = self.out_dtype, self.fast_accum, self.scale_result
        problem = scaled_problem_of(*operands, *options)
        strides = _block_strides(problem, self.scale_a, self.scale_b)
        shape = *self.a.shape[:-1], *self.b.shape[-1:]
        return self.measurable(Posed(problem, shape=shape, strides=strides))

    def by_pytorch(self) -> torch.Tensor:
        """PyTorch's product. `scale_result` is never handed to it: on CUDA, PyTorch 2.11 leaves it
        out. Only outputs of eight bits have one.
        """
        a, b, scale_a, scale_b, bias, factor, *kind = self
        out_dtype = self.out_dtype or a.dtype
        if a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]:
            if not (a.numel() and b.numel()):
                return self._empty(out_dtype)
            turned = b.t()
            a, columns = handed_over.checked(a, turned)
            b = b if columns is turned else columns.t()
        if factor is None or out_dtype.itemsize > 1:
            return torch._scaled_mm(a, b, scale_a, scale_b, bias, None, *kind)
        if bias is None and scale_a.numel() == scale_b.numel() == 1:
            scale_l = scale_a * factor.view(scale_a.shape)
            return torch._scaled_mm(a, b, scale_l, scale_b, None, None, *kind)
        wide_type = torch.bfloat16
        added = None if bias is None else bias.to(wide_type)
        options = added, None, wide_type, self.fast_accum
        wide = torch._scaled_mm(a, b, scale_a, scale_b, *options)
        return _rounded(wide.float() * factor, out_dtype)

    def _empty(self, out_dtype: torch.dtype) -> torch.Tensor:
        """The product of matrices without an element: the bias, if any."""
        m, n = self.a.shape[0], self.b.shape[1]
        wide = self.a.new_zeros((m, n), dtype=torch.float32)
        wide = wide if self.bias is None else wide + self.bias
        return _rounded(wide if self.scale_result is None else wide * self.scale_result, out_dtype)


def _rounded(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of fewer bits; magnitudes above the largest one become it."""
    limit = torch.finfo(dtype).max
    return sums.clamp_(-limit, limit).to(dtype)


def scaled_problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype | None,
    fast_accum: bool,
    scale_result: torch.Tensor | None = None,
) -> GemmProblem:
    """The problem of a call of `scaled_mm`.

    Args:
        a: (M, K), e4m3, by rows.
        b: (K, N), e4m3, by columns.
        scale_a: fp32 factors of A: one element, (M, 1), or (M, K / 128).
        scale_b: fp32 factors of B: one element, (1, N), or (K / 128, N / 128).
        out_dtype: type of the output; None: e4m3.
        fast_accum: False: sums are taken over to fp32 on the way.
        scale_result: one fp32 element, of an output in e4m3; None: of another type.

    Raises:
        ConfigError: on types, sizes or strides that no tuned kernel supports.
    """
    if a.dim() != 2 or b.dim() != 2 or a.numel() == 0 or b.numel() == 0:
        raise ConfigError("they are not two matrices, or are empty")
    guards.check_alike(a, b, dtypes=guards.QUANTISED)
    types = guards.DTYPES if scale_result is None else guards.QUANTISED
    dtype_d = types.get(out_dtype or torch.float8_e4m3fn)
    if dtype_d is None:
        names = ", ".join(types.values())
        raise ConfigError(f"out_dtype={out_dtype} is not tuned (allowed: {names})")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or not (guards.lies(a, (k, 1)) and guards.lies(b, (1, k))):
        raise ConfigError(
            f"{tuple(a.shape)} @ {tuple(b.shape)} (allowed: (M, K) by rows and (K, N) by columns)"
        )
    factors = (scale_a, scale_b, *(() if scale_result is None else (scale_result,)))
    if any(t.dtype != torch.float32 or t.device != a.device for t in factors):
        raise ConfigError("the factors are not fp32 on the matrices' device")
    if factors[2:] and factors[2].numel() != 1:
        raise ConfigError(f"scale_result is {tuple(factors[2].shape)} (allowed: one element)")
    shapes, blocks = [tuple(t.shape) for t in factors[:2]], ceil(k / SCALE_BLOCK)
    of_blocks = [(m, blocks), (blocks, ceil(n / SCALE_BLOCK))]
    scales: Scales
    if scale_a.numel() == scale_b.numel() == 1:
        scales = "tensor"
    elif shapes == [(m, 1), (1, n)] and scale_a.is_contiguous() and scale_b.is_contiguous():
        scales = "row"
    elif shapes == of_blocks:
        scales = "block"
    else:
        raise ConfigError(
            f"the factors are not one each, nor dense ({m}, 1) and (1, {n}), nor of blocks, "
            f"{of_blocks[0]} and {of_blocks[1]}"
        )
    return GemmProblem(
        m=m,
        n=n,
        k=k,
        dtype=E4M3,
        dtype_d=dtype_d,
        scales=scales,
        fast_accum=fast_accum or scales == "block",
    )


def _block_strides(problem: GemmProblem, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Strides:
    """Strides of block-wise factors that differ from the problem's operands."""
    if problem.scales != "block":
        return {}
    _, _, of_a, of_b, *_ = problem.operands
    pairs = ((of_a, scale_a.t()), (of_b, scale_b.t()))
    return {
        operand.name: guards.along(operand, factors.stride())
        for operand, factors in pairs
        if not guards.lies(factors, operand.strides)
    }
