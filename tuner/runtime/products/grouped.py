"""The products of a mixture of experts: the tuned grouped kernel, or PyTorch's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from tuner.errors import ConfigError
from tuner.problem import SIZES, DType, GroupedGemmProblem
from tuner.problem.gemm import block_scales
from tuner.problem.grouped_gemm import Sizes
from tuner.runtime.call import devices, guards, handed_over
from tuner.runtime.call.plan import KernelPlan, Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call, serve
from tuner.runtime.call.table import table
from tuner.runtime.products import block_scaled

#: TMA and PyTorch's kernel need dimensions that are multiples of this many elements.
_STEP = 8


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    *,
    sizes: Sizes = "uniform",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped product: a[offsets[g] : offsets[g + 1]] @ b[g]^T for each group g.

    Means ``torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets[1:])``. PyTorch's grouped kernel
    answers bf16 calls that no tuned kernel serves. Other types fall back to one product for each
    group, which reads the offsets on the host and waits for the device. Each fallback is counted by
    its reason (`tuner.stats`).

    A tuned kernel is selected by G, N, K, the type, `sizes`, and the number of rows rounded up to a
    power of two. It reads the offsets on the device, so a captured CUDA graph may be replayed with
    other offsets. It does not check them: they must begin with 0 and never decrease. Offsets beyond
    the rows count as the end of the rows.

    With `scale_a` and `scale_b` the operands are e4m3 elements with block-wise factors. Calls that
    no tuned kernel serves are multiplied in bf16, group after group.

    Args:
        a: (M, K), fp16, bf16 or float8_e4m3fn; a tuned kernel needs contiguous tensors.
        b: (G, N, K), as `a`.
        offsets: int32 (G + 1), on the tensors' device: first row of each group, and the last
            group's end. Groups may be empty.
        sizes: tuned distribution of group sizes that resembles these groups; see
            `GroupedGemmProblem`. The shipped decisions are for zipf.
        scale_a: fp32 (M, K / 128), rounded up. Stride 1 along M, and M rounded up to a multiple of
            4 along the blocks, avoids a copy.
        scale_b: fp32 (G, N / 128, K / 128), rounded up, contiguous.

    Returns:
        (M, N), of the inputs' type; bf16 for e4m3 inputs. Rows beyond the last group's end are
        undefined.

    Raises:
        ConfigError: on tensors or sizes that are not as above. A fallback of one product for each
            group also raises it on offsets that do not fit the rows.
        Exception: an error of PyTorch on types that it refuses, or of an earlier kernel.
    """
    _check(a, b, offsets, sizes)
    if scale_a is None and scale_b is None:
        return serve(GroupedCall(a, b, offsets, sizes))
    return serve(GroupedCall(a, b, offsets, sizes, *_factors(a, b, scale_a, scale_b)))


def _check(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, sizes: str) -> None:
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2] or not b.shape[0]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ConfigError(f"{shapes} cannot be multiplied (allowed: (M, K) and (G, N, K), G > 0)")
    due = (b.shape[0] + 1,)
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != due:
        raise ConfigError(
            f"offsets are {offsets.dtype} {tuple(offsets.shape)} (allowed: torch.int32 {due})"
        )
    if sizes not in SIZES:
        raise ConfigError(f"sizes={sizes} is not known (allowed: {', '.join(SIZES)})")


def _factors(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors, checked, with the strides of the problem's operands."""
    if a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"factors are for float8_e4m3fn, not {a.dtype} and {b.dtype}")
    (m, k), (groups, n, _) = a.shape, b.shape
    (blocks, rows), (columns, _) = block_scales(m, n, k)
    of_rows = _factor("scale_a", scale_a, (m, blocks))
    of_blocks = _factor("scale_b", scale_b, (groups, columns, blocks))
    if of_rows.stride() != (1, rows):
        of_rows = torch.nn.functional.pad(of_rows.t(), (0, rows - m)).contiguous().t()[:m]
    return of_rows, of_blocks.contiguous()


def _factor(name: str, factor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    if factor is None or factor.dtype != torch.float32 or tuple(factor.shape) != shape:
        came = "missing" if factor is None else f"{factor.dtype} {tuple(factor.shape)}"
        raise ConfigError(f"{name} is {came} (allowed: torch.float32 {shape})")
    return factor


class _Groups(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    offsets: torch.Tensor
    sizes: Sizes
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None


class GroupedCall(_Groups, Call):
    """A call of `grouped_mm`."""

    __slots__ = ()
    aligned = 2

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        if self.scale_a is None or self.scale_b is None:
            return self.a, self.b, self.offsets
        return self.a, self.b, self.offsets, self.scale_a, self.scale_b

    def refusal(self) -> Refusal | None:
        a, b, offsets = self.a, self.b, self.offsets
        if refusal := guards.deferred(a, b):
            return refusal
        if not (a.is_contiguous() and b.is_contiguous() and offsets.is_contiguous()):
            return Refusal(Kind.NOT_CONTIGUOUS)
        if len({tensor.device for tensor in self.inputs}) > 1:
            return Refusal(Kind.MIXED)
        if self.scale_a is not None and guards.is_misaligned((self.scale_a,)):
            return Refusal(Kind.MISALIGNED)  # TMA copies its factors
        return None

    def kind(self) -> Hashable:
        a, b = self.a, self.b
        rows = _rounded(a.shape[0])
        has_factors = self.scale_a is not None
        types = (a.dtype, b.dtype, has_factors)
        return "grouped_mm", rows, b.shape, *types, a.device, self.sizes

    def pose(self) -> Posed:
        dtypes = guards.DTYPES if self.scale_a is None else guards.QUANTISED
        return Posed(problem_of(self.a, self.b, self.sizes, dtypes))

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        if isinstance(plan, KernelPlan):
            plan = _sized(plan, self.a.shape[0])
        return table.run(plan, *self.inputs)

    def by_pytorch(self) -> torch.Tensor:
        if self.scale_a is None or self.scale_b is None:
            return by_pytorch(self.a, self.b, self.offsets)
        a = block_scaled.dequantised_rows(self.a, self.scale_a)
        b = block_scaled.dequantised_all(self.b, self.scale_b)
        return by_pytorch(a, b, self.offsets)


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Sizes,
    dtypes: Mapping[torch.dtype, DType] = guards.DTYPES,
) -> GroupedGemmProblem:
    """The problem that a call is looked up by, its rows rounded up to a power of two.

    Args:
        a: (M, K), rows of all groups.
        b: (G, N, K).
        sizes: way in which rows are shared out when it is measured.
        dtypes: types that kernels take, and their names in a problem.

    Raises:
        ConfigError: when no tuned kernel supports such types or sizes.
    """
    guards.check_alike(a, b, dtypes=dtypes)
    if a.numel() == 0 or b.numel() == 0:
        raise ConfigError("they are empty")
    groups, n, k = b.shape
    rows, dtype = _rounded(a.shape[0]), dtypes[a.dtype]
    return GroupedGemmProblem(groups, rows, n, k, sizes=sizes, dtype=dtype)


def _rounded(rows: int) -> int:
    """Rows rounded up to a power of two; 0 stays 0."""
    return 1 << (rows - 1).bit_length() if rows else 0


@lru_cache(1024)
def _sized(plan: KernelPlan, rows: int) -> KernelPlan:
    """The plan with a call's number of rows."""
    problem = plan.problem
    if not isinstance(problem, GroupedGemmProblem):
        raise ConfigError(f"{problem.op} has no groups")
    groups, n, k = problem.groups, problem.n, problem.k
    return plan.sized(
        GroupedGemmProblem(groups, rows, n, k, sizes=problem.sizes, dtype=problem.dtype), 1.0
    )


def by_pytorch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """PyTorch's grouped kernel if it takes the tensors, else one product for each group.

    Args:
        a: (M, K), rows of all groups.
        b: (G, N, K).
        offsets: int32 (G + 1,), the rows at which groups start, from 0.

    Raises:
        ConfigError: when the offsets decrease, or leave the rows; the grouped kernel does not look.
    """
    n, k = b.shape[1:]
    is_whole = a.is_contiguous() and b.is_contiguous() and n % _STEP == k % _STEP == 0
    if (
        is_whole
        and a.numel()
        and b.numel()
        and a.dtype == b.dtype == torch.bfloat16
        and a.device.type == devices.TYPE == "cuda"
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(a.device) == (9, 0)
    ):
        a, b = handed_over.checked(a, b)
        return torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets[1:])
    starts: list[int] = offsets.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > a.shape[0]:
        raise ConfigError(
            f"offsets run from {starts[0]} to {starts[-1]} "
            f"(allowed: from 0, never decreasing, to {a.shape[0]} at most)"
        )
    done = [a[start:end] @ w.t() for (start, end), w in zip(pairwise(starts), b, strict=True)]
    return torch.cat([*done, a.new_zeros((a.shape[0] - starts[-1], n))])
