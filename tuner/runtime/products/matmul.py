"""`linear` and `matmul`: a tuned GEMM if it was measured fastest, else PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.nn import functional

from tuner import settings
from tuner.errors import ConfigError
from tuner.problem import (
    ACTIVATIONS,
    GemmProblem,
    Major,
)
from tuner.runtime.call import counters, devices, dispatch, guards, invariance, serving
from tuner.runtime.call.plan import Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.serving import Call
from tuner.runtime.call.table import DispatchedCall, table
from tuner.runtime.products import block_scaled
from tuner.runtime.products.scaled import ScaledCall
from tuner.runtime.training.linear_gradients import LinearFunction, Products

_PYTORCHS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda product: product,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda product: functional.gelu(product, approximate="tanh"),
    "silu": functional.silu,
}
"""PyTorch's activations by name."""
_FUSED = "relu", "gelu_tanh"
"""Activations of cuBLASLt's epilogues with a bias."""
ALIGNED_COLUMNS, LONG_COLUMNS, MIN_ROWS_IN_PARTS = 8, 16384, 4
"""Columns that rows of an output are aligned by; and the fewest columns and rows of a product in
parts (`_in_parts`)."""
MIN_EVEN_ROWS, MIN_EVEN_WEIGHTS = 256, 1 << 25
"""Fewest rows, or elements of the weights, of such a product with an even number of columns. One of
30522 columns and 64 rows took 1.3 times as long in parts."""
MIN_FLOPS_WITH_GRADIENTS = 4e10
"""Floating-point operations of a product from which a portfolio's kernels serve `linear` where a
gradient is wanted: it takes about 60 us. With gradients a call passes Python, which costs the host
of an eager program about a third of that.
"""


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear` and an activation, by the fastest kernel measured on this GPU.

    Untuned shapes use the kernel that is expected to be fastest (`tuner.selection.portfolio`). Each
    combination of bias and activation is a problem of its own (`GemmProblem.epilogue`), fused into
    one kernel. PyTorch's `linear` and activation answer all other calls: other types, problems for
    which cuBLAS is faster. Each such call is counted by its reason (`tuner.stats`). A vocabulary
    whose size is not a multiple of 8 is multiplied in two parts; with gradients, if it is large.

    With gradients, the output and the gradients of input and weight are three products
    (`tuner.runtime.training.linear_gradients`). Each is served by itself, and an activation is
    PyTorch's. PyTorch's `linear` answers when no kernel serves any of the three.

    With `weight_scale` the weights are e4m3 elements with block-wise factors. Rows of the input are
    quantised in blocks of 128, and multiplied as by `scaled_mm`. Bias and activation are separate
    kernels. If no tuned kernel serves that product, PyTorch multiplies the unquantised input by the
    weights in bf16.

    Args:
        input: (..., K), fp16 or bf16; rows may be strided, as in a slice of a wider tensor.
        weight: (N, K), as `input`.
        bias: (N), contiguous.
        activation: relu, gelu (by erf, PyTorch's default), gelu_tanh or silu.
        weight_scale: fp32 (N / 128, K / 128), rounded up. The input is then bf16, and the weight
            float8_e4m3fn.

    Returns:
        (..., N), of the input's type.

    Raises:
        ConfigError: on an unknown activation, and with `weight_scale` on types or shapes that are
            not as above.
    """
    if activation not in _PYTORCHS:
        allowed = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation={activation} is not known (allowed: {allowed}, None)")
    if weight_scale is not None:
        product = _linear_of_blocks(input, weight, weight_scale)
        return _PYTORCHS[activation](product if bias is None else product + bias)
    if not torch.compiler.is_compiling():
        product = dispatch.linear(input, weight, bias, activation)
        if product is None:
            call = ProductCall("linear", input, weight, bias, activation)
            if guards.wants_gradient(*call.inputs):
                product = _with_gradients(call)
            else:
                product = serving.answer(call)
        if product is not None and product is not dispatch.REFUSED:
            return product
    if invariance.was_on:
        invariance.forbid("PyTorch's linear", input)
    if not torch.compiler.is_compiling() and _gains_by_parts(input, weight, bias):
        # The parts need the output's memory twice.
        with suppress(torch.OutOfMemoryError):
            return _PYTORCHS[activation](_in_parts(input, weight, bias))
    return _linear(input, weight, bias, activation)


def _is_long_unaligned(weight: torch.Tensor) -> bool:
    """True for the (N, K) weights of a vocabulary whose size is not a multiple of 8."""
    columns = weight.shape[0]
    return (
        columns % ALIGNED_COLUMNS != 0
        and columns >= LONG_COLUMNS
        and weight.dim() == 2
        and weight.dtype in guards.DTYPES
        and not settings.disabled()
    )


def _gains_by_parts(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True for a vocabulary whose size is not a multiple of 8, as GPT-2's and Whisper's.

    Rows of the output are not aligned there. cuBLAS takes 2.0 to 5.4 times as long as in two parts
    at odd sizes and 4 to 4096 rows, 1.1 to 1.9 times at even ones, of which small products are left
    (measured on an H200, 27 November 2026).
    """
    return (
        _is_long_unaligned(weight)
        and input.numel() >= MIN_ROWS_IN_PARTS * weight.shape[1]
        and (
            weight.shape[0] % 2 == 1
            or input.numel() >= MIN_EVEN_ROWS * weight.shape[1]
            or weight.numel() >= MIN_EVEN_WEIGHTS
        )
        and weight.device.type == devices.TYPE
        and not guards.wants_gradient(input, weight, *(() if bias is None else (bias,)))
    )


def _in_parts(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """PyTorch's `linear` over the aligned columns and over the last few, side by side."""
    at = weight.shape[0] // ALIGNED_COLUMNS * ALIGNED_COLUMNS
    parts = (
        functional.linear(input, weight[columns], None if bias is None else bias[columns])
        for columns in (slice(at), slice(at, None))
    )
    return torch.cat(tuple(parts), -1)


def _with_gradients(call: ProductCall) -> torch.Tensor | None:
    """The output of `linear` with gradients by tuned kernels, or None and a counted reason."""
    generation = table.refresh(call.a)
    refusal = _refusal_with_gradients(call._replace(activation=None))
    if refusal is not None:
        dispatch.refuse(*call.dispatched, refusal, generation)
        return None
    product = LinearFunction.apply(call.a, call.b, call.bias, Products(linear, matmul))
    return _PYTORCHS[call.activation](product)


def _refusal_with_gradients(call: ProductCall) -> Refusal | None:
    """Reason why PyTorch computes a layer and its gradients; None where a kernel serves one."""
    refusal = guards.unserved(call.inputs) or guards.recast(call.a)
    if refusal is not None:
        return refusal
    answer = serving.find(call)
    # Each of the three products has the same number of operations.
    has_much_work = 2 * call.a.numel() * call.b.shape[0] >= MIN_FLOPS_WITH_GRADIENTS
    if _is_worth_it(answer, has_much_work) or (has_much_work and _is_long_unaligned(call.b)):
        return None
    for gradient in call.gradients():
        kind, device = (call.a.device, gradient.kind()), call.a.get_device()
        plan = table.get(kind) or table.find_out(kind, None, gradient.pose, device)
        if _is_worth_it(plan, has_much_work):
            return None
    return answer if isinstance(answer, Refusal) else Refusal(Kind.GRADIENT, "of little work")


def _is_worth_it(plan: Plan | Refusal, has_much_work: bool) -> bool:
    """True when a kernel serves, and gains more than the way through Python costs the host."""
    return isinstance(plan, Plan) and (has_much_work or not plan.by_portfolio)


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    if bias is not None and activation in _FUSED and _may_fuse(input, weight, bias):
        rows, use_gelu = input.reshape(-1, input.shape[-1]), activation == "gelu_tanh"
        out: torch.Tensor = torch._addmm_activation(bias, rows, weight.t(), use_gelu=use_gelu)
        return out.view(*input.shape[:-1], -1)
    return _PYTORCHS[activation](functional.linear(input, weight, bias))


def _may_fuse(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """True if cuBLASLt's epilogue computes the activation: at drawn calls 0.69 to 0.84 of the time
    of two kernels (an H200, 29 November 2026).
    """
    is_plain = guards.are_plain(input, weight, bias) and not torch.compiler.is_compiling()
    return (
        is_plain
        and input.is_cuda
        and input.dtype == weight.dtype == bias.dtype
        and input.dtype in guards.DTYPES
        and (input.dim() > 0, weight.dim(), bias.dim()) == (True, 2, 1)
        and bool(input.numel() and weight.numel())
        and not guards.wants_gradient(input, weight, bias)
        and not devices.is_autocast()
    )


def _linear_of_blocks(
    input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """`linear` of e4m3 weights with block-wise factors, without a bias or an activation."""
    block_scaled.check(input, weight, scale)
    out: torch.Tensor | None = None
    if not (torch.compiler.is_compiling() or guards.wants_gradient(input, scale)):
        rows = math.prod(input.shape[:-1])
        a, scale_a = block_scaled.quantised(input.reshape(rows, input.shape[-1]))
        call = ScaledCall(a, weight.t(), scale_a, scale.t(), None, None, torch.bfloat16, True)
        out = serving.answer(call)
    if out is None:
        invariance.forbid("PyTorch's linear of dequantised weights", input)
        return functional.linear(input, block_scaled.dequantised(weight, scale))
    return out.view(*input.shape[:-1], weight.shape[0])


def matmul(
    input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.matmul` by the fastest kernel measured on this GPU; PyTorch answers as for `linear`.

    Tuned kernels serve (..., M, K) @ (K, N), and (..., M, K) @ (..., K, N) with equal batch
    dimensions. Each matrix has stride 1 along its rows or its columns.

    Args:
        input: (..., M, K), fp16 or bf16.
        other: (K, N) or (..., K, N), as `input`.
        out: as in `torch.matmul`; such calls are PyTorch's.

    Returns:
        (..., M, N), of the inputs' type.
    """
    if not torch.compiler.is_compiling():
        product = dispatch.matmul(input, other, out)
        if out is not None:
            invariance.forbid(Kind.OUT)
            counters.count_fallback(Kind.OUT)
            return torch.matmul(input, other, out=out)
        if product is None:
            call = ProductCall("matmul", input, other)
            product = serving.answer(call)
        if product is not None and product is not dispatch.REFUSED:
            return product
    if invariance.was_on:
        invariance.forbid("PyTorch's matmul", input)
    return torch.matmul(input, other, out=out)


class _Product(NamedTuple):
    name: str
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    activation: str | None = None


class ProductCall(_Product, Call):
    """A call of `linear` or `matmul`."""

    __slots__ = ()
    aligned = 3

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.a, self.b) if self.bias is None else (self.a, self.b, self.bias)

    @property
    def dispatched(self) -> DispatchedCall:
        return (
            (self.name, (self.a, self.b, self.bias, self.activation))
            if self.name == "linear"
            else (self.name, (self.a, self.b))
        )

    def kind(self) -> Hashable:
        # As `key`, in half the time.
        name, a, b, bias, activation = self
        of_a, of_b = (
            (a.shape, a.stride(), a.dtype, a.device),
            (b.shape, b.stride(), b.dtype, b.device),
        )
        if bias is None:
            return name, activation, of_a, of_b
        return name, activation, of_a, of_b, bias.shape, bias.stride(), bias.dtype, bias.device

    def pose(self) -> Posed:
        b = self.b.t() if self.name == "linear" and self.b.dim() == 2 else self.b
        return self.measurable(pose(self.a, b, self.bias, self.activation))

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        inputs = self.inputs
        return guards.deferred(*inputs) or table.run(plan, *inputs)

    def gradients(self) -> Iterator[ProductCall]:
        """Products of the wanted gradients of `linear`, on tensors without memory. The output's
        gradient and the input are dense.
        """
        rows = self.a.numel() // max(1, self.a.shape[-1])
        grad = self.a.new_empty((rows, self.b.shape[0]), device="meta")
        if self.a.requires_grad:
            b = torch.empty_strided(
                self.b.shape, self.b.stride(), dtype=self.b.dtype, device="meta"
            )
            yield ProductCall("matmul", grad, b)
        if self.b.requires_grad:
            a = self.a.new_empty((rows, self.a.shape[-1]), device="meta")
            yield ProductCall("matmul", grad.t(), a)

    def by_pytorch(self) -> torch.Tensor:
        if self.name == "matmul":
            return torch.matmul(self.a, self.b)
        return _linear(self.a, self.b, self.bias, self.activation)


def pose(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> Posed:
    """The problem of activation(a @ b + bias), and the strides of its matrices.

    Rows or columns of a matrix may be strided, as in slices of wider tensors.

    Args:
        a: (..., M, K), fp16 or bf16.
        b: (K, N), or (..., K, N) with the batch of `a`.
        bias: (N,), contiguous; None: no bias.
        activation: name of an epilogue's activation; None: no activation.

    Raises:
        ConfigError: on types, sizes or strides that no tuned kernel supports.
    """
    if min(a.dim(), b.dim()) < 2 or a.numel() == 0 or b.numel() == 0:
        raise ConfigError("they are not matrices, or are empty")
    guards.check_alike(a, b)
    if bias is not None:
        guards.check_alike(a, bias)
        if bias.shape != b.shape[-1:] or not bias.is_contiguous():
            raise ConfigError("the bias is not a contiguous vector of the output's columns")
    shape = (*a.shape[:-1], *b.shape[-1:])
    if a.shape[-1] != b.shape[-2] or (b.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
        raise ConfigError(f"{tuple(a.shape)} @ {tuple(b.shape)} do not match, or broadcast")
    of_a, two = _folded(a, all_rows=b.dim() == 2), _folded(b)
    batch, m, k = of_a.shape
    problem = GemmProblem(
        m=m,
        n=b.shape[-1],
        k=k,
        batch=batch,
        dtype=guards.DTYPES[a.dtype],
        layout_a=_order(of_a, "row"),
        layout_b=_order(two, "col"),
        epilogue="_".join(filter(None, ("" if bias is None else "bias", activation))),
    )
    strides = {
        operand.name: guards.along(operand, matrix.stride())
        for operand, matrix in zip(problem.operands, (of_a, two), strict=False)
        if not guards.lies(matrix, operand.strides)
    }
    return Posed(problem, shape=shape, strides=strides)


def _folded(tensor: torch.Tensor, all_rows: bool = False) -> torch.Tensor:
    """A view (batch, rows, columns) of a tensor, with all leading dimensions folded into one.

    Args:
        tensor: at least two dimensions.
        all_rows: fold the leading dimensions into the rows, with a batch of one.
    """
    rows, columns = tensor.shape[-2:]
    try:
        return tensor.view((1, -1, columns) if all_rows else (-1, rows, columns))
    except RuntimeError:
        raise ConfigError("the leading dimensions cannot be folded into one stride") from None


def _order(matrices: torch.Tensor, preferred: Major) -> Major:
    """Storage order of (batch, rows, columns); `preferred` when both hold.

    Raises:
        ConfigError: when neither rows nor columns have stride 1.
    """
    _, rows, columns = matrices.shape
    _, between_rows, between_columns = matrices.stride()
    by_rows = between_columns == 1 or columns == 1
    by_columns = between_rows == 1 or rows == 1
    if by_rows and by_columns:
        return preferred
    if not (by_rows or by_columns):
        raise ConfigError("neither rows nor columns have stride 1")
    return "row" if by_rows else "col"
