"""cuBLAS and cuBLASLt through torch, with fused epilogues or separate kernels for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families import product_work
from tuner.families.peers import MAX_AUTOTUNE, Vendor, compiled, installed
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem, Problem

#: TFLOP/s of a large fp16 product and GB/s of one that reads a matrix once (M = 1), both cuBLAS
#: on one H200, CUDA 13.0; the first sits at the power limit.
PEAK_TFLOPS = 640.0
STREAM_GBS = 2400.0
#: A small product's time inside a graph, microseconds: one launch and one wave's latency.
START_US = 3.0
LIBRARIES = ("cublas", "cublaslt")
DEEP_GEMM = "deep_gemm"
#: The argument of `torch._addmm_activation` by epilogue; cuBLASLt's GELU is the one by tanh.
FUSED_ACTIVATIONS = {"bias_relu": False, "bias_gelu_tanh": True}


class VendorBlas(Vendor):
    """Products by the libraries that torch calls; `kernel` is one of these.

    - cublas, cublaslt: the library that torch calls. The epilogue is in kernels of torch behind it,
      and operands with factors of blocks are made bf16 in front
    - addmm: the product with a bias or onto a residual in one call, the rest behind it
    - addmm_activation: cuBLASLt's fused epilogue
    - scaled_mm: torch's product of e4m3, with the problem's accumulation
    - torch_compile: an epilogue compiled by torch.compile
    - inductor, on request: the same when it searches longest
    - deep_gemm, where installed: DeepGEMM's product of bf16, or of e4m3 with factors of blocks
    """

    name: ClassVar[str] = "vendor_blas"
    op: ClassVar[str] = GemmProblem.op
    offered: ClassVar[tuple[str, ...]] = (
        *(*LIBRARIES, "torch_compile", "addmm", "addmm_activation", "scaled_mm"),
    )
    on_request: ClassVar[tuple[str, ...]] = ("inductor", DEEP_GEMM)
    work_terms: ClassVar[tuple[str, ...]] = product_work.CLOSED_TERMS
    amounts = staticmethod(product_work.closed_work)
    takes_scale: ClassVar[bool] = False

    def found(self) -> tuple[str, ...]:
        return (DEEP_GEMM,) if installed.version(DEEP_GEMM) else ()

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), **installed.versions((DEEP_GEMM,))}

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reasons = [self.refusal(problem, kernel) for kernel in (*self.offered, *self.found())]
        return super().supports(problem, gpu) or ("" if "" in reasons else reasons[-1])

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, GemmProblem):
            return ""
        if kernel == "scaled_mm" and problem.dtype != E4M3:
            return f"scaled_mm multiplies {E4M3}"
        if problem.scales == "block" and kernel in LIBRARIES:
            return ""
        if problem.scales == "block" and kernel not in ("scaled_mm", DEEP_GEMM):
            return f"{kernel} has no product with factors of blocks"
        if kernel == "scaled_mm" and problem.scales == "block":
            return _block_refusal(problem)
        if kernel == DEEP_GEMM:
            if problem.scales == "block":
                blocks = problem.k % SCALE_BLOCK or problem.n % 64
                return f"{DEEP_GEMM} takes K in 128s and N in 64s" if blocks else ""
            if problem.dtype != "bfloat16" or problem.scales:
                return f"{DEEP_GEMM} is called with bf16, or with factors of blocks"
            if problem.batch > 1 or problem.epilogue:
                return f"{DEEP_GEMM} makes one matrix and has no epilogue"
            if (problem.layout_a, problem.layout_b) != ("row", "col"):
                return f"{DEEP_GEMM} is called with both matrices along K"
            return ""
        if problem.dtype == E4M3 and kernel not in ("scaled_mm", "inductor"):
            return f"{kernel} does not multiply {E4M3}"
        if problem.has_output_scale and problem.scales == "row":
            return f"{kernel} has no {E4M3} output with factors of rows"
        if kernel == "torch_compile" and not (problem.epilogue or problem.scales):
            return "torch_compile has nothing to fuse: no epilogue"
        if kernel not in ("addmm", "addmm_activation"):
            return ""
        if problem.batch > 1 or problem.dtype_d != problem.dtype:
            return f"{kernel} makes one matrix of its operands' type"
        if kernel == "addmm" and not (problem.has_bias or problem.has_residual):
            return "addmm needs a bias or a residual"
        if kernel == "addmm_activation" and problem.epilogue not in FUSED_ACTIVATIONS:
            return f"addmm_activation is offered for {' and '.join(FUSED_ACTIVATIONS)}"
        return ""

    def connect(self, problem: GemmProblem, kernel: str, scale: float) -> Callable[..., Any] | str:
        import torch

        if kernel in ("torch_compile", "inductor"):
            mode = MAX_AUTOTUNE if kernel == "inductor" else None
            return compiled(as_in_a_model(problem), mode)
        if kernel == DEEP_GEMM:
            return deep_gemm(problem)
        if kernel == "scaled_mm":
            return scaled_mm(problem)
        if kernel not in LIBRARIES:
            return addmm(problem) if kernel == "addmm" else addmm_activation(problem)
        product = unfused(problem)
        library = torch.backends.cuda.preferred_blas_library
        with warnings.catch_warnings():  # torch warns once that the choice is experimental
            warnings.simplefilter("ignore")
            before = library()
            library(kernel)
            library(before)

        def call(*inputs: Any) -> Any:
            previous = library()
            library(kernel)
            try:
                return product(*inputs)
            finally:
                library(previous)

        return call

    def legality_facts(self, problem: Problem) -> Hashable:
        """Every problem of a domain is taken."""
        return ()

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """A fixed part, and the longer of the products and the bytes at cuBLAS's rates. Each kernel
        behind it reads and writes the result once more. 8-bit products count as twice as fast,
        which is not fitted.
        """
        rate = PEAK_TFLOPS * gpu.peak_tflops / DEFAULT_GPU.peak_tflops * problem.tensor_rate
        stream = STREAM_GBS * gpu.memory_gbs / DEFAULT_GPU.memory_gbs
        product = START_US + max(problem.flops / rate / 1e6, problem.bytes / stream / 1e3)
        if not isinstance(problem, GemmProblem):
            return product
        passes = problem.has_bias + problem.has_residual + bool(problem.activation)
        if problem.scales and problem.dtype != E4M3:
            passes += 2
        fused = {"addmm": 1, "addmm_activation": 2, "inductor": passes}
        fused["torch_compile"] = passes - min(1, passes - problem.has_bias)
        passes -= fused.get(config["kernel"], 0)
        return product + passes * (START_US + 2 * problem.output.bytes / stream / 1e3)


def _block_refusal(problem: GemmProblem) -> str:
    """Problems that cuBLASLt's factors of blocks do not take, as torch calls them."""
    blocks, cut = divmod(problem.k, SCALE_BLOCK)
    if cut or blocks % 4 or problem.m % 4:
        return "scaled_mm with factors of blocks takes K in 512s and M in fours"
    return ""


def deep_gemm(problem: GemmProblem) -> Callable[..., Any] | str:
    """call(a, b[, scale_a, scale_b]) -> d by DeepGEMM, which compiles its kernel with nvcc in the
    first call.
    """
    import torch

    module = installed.module_of(DEEP_GEMM)
    if isinstance(module, str):
        return module
    library = getattr(module, "module", module)
    dtype = getattr(torch, problem.dtype_d)

    def call(a: Any, b: Any, *factors: Any) -> Any:
        d = torch.empty(problem.output.shape, dtype=dtype, device=a.device)
        if factors:
            of_rows = factors[0][:, : problem.m].t()
            library.fp8_gemm_nt((a[0], of_rows), (b[0].t(), factors[1]), d[0])
        else:
            library.bf16_gemm_nt(a[0], b[0].t(), d[0], None)
        return d

    return call


def matmul(problem: GemmProblem) -> Callable[[Any, Any], Any]:
    """call(a, b) -> d over the problem's strided (batch, rows, cols) tensors, without copies."""
    import torch

    options: dict[str, Any] = {}
    if problem.dtype_d != problem.dtype:  # torch >= 2.8; older ones refuse the argument
        options["out_dtype"] = getattr(torch, problem.dtype_d)

    def one(a: Any, b: Any) -> Any:
        return torch.mm(a[0], b[0], **options).unsqueeze(0)

    def many(a: Any, b: Any) -> Any:
        return torch.bmm(a, b, **options)

    return one if problem.batch == 1 else many


def unfused(problem: GemmProblem) -> Callable[..., Any]:
    """call(a, b, *others) -> d: the product, and a kernel for each part of the epilogue. Operands
    with factors of blocks are multiplied in bf16.
    """
    if problem.scales == "block":
        return _of_wide_operands(problem)
    if problem.dtype == E4M3:
        return scaled_mm(problem)
    product, finish = matmul(problem), epilogue(problem)

    def call(a: Any, b: Any, *more: Any) -> Any:
        return finish(product(a, b), *more)

    return call


def epilogue(problem: GemmProblem) -> Callable[..., Any]:
    """finish(d, *others) -> d with the problem's factors or epilogue; changes `d`."""
    from torch.nn import functional

    activations: dict[str, Callable[[Any], Any]] = {
        "": lambda d: d,
        "relu": functional.relu_,
        "gelu": functional.gelu,
        "gelu_tanh": lambda d: functional.gelu(d, approximate="tanh"),
        "silu": lambda d: functional.silu(d, inplace=True),
    }
    activate, has_bias = activations[problem.activation], problem.has_bias

    def finish(d: Any, *more: Any) -> Any:
        if problem.scales:
            return d.mul_(more[0].view(-1, 1)).mul_(more[1])
        if has_bias:
            d = d.add_(more[0])
        d = activate(d)
        return d.add_(more[-1]) if problem.has_residual else d

    return finish


def scaled_mm(problem: GemmProblem) -> Callable[..., Any]:
    """call(a, b, scale_a, scale_b[, scale_d]) -> d: torch's product of e4m3 matrices and their
    factors. On CUDA, PyTorch 2.11 does not apply `scale_result`: an output's factor is one of A's.
    """
    import torch

    out_dtype = getattr(torch, problem.dtype_d)
    if problem.scales == "block":
        return _scaled_by_blocks(problem)

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, scale_d: Any = None) -> Any:
        return torch._scaled_mm(
            a[0],
            b[0],
            (scale_a if scale_d is None else scale_a * scale_d).view(-1, 1),
            scale_b.view(1, -1),
            out_dtype=out_dtype,
            use_fast_accum=problem.fast_accum,
        ).unsqueeze(0)

    return call


def widened(elements: Any, scale: Any) -> Any:
    """(rows, columns) in bf16 of e4m3 elements with a factor for each 128 of both, or for each row
    and 128 columns.
    """
    import torch

    rows, columns = elements.shape
    factor = scale.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    factor = factor if factor.shape[0] == rows else factor.repeat_interleave(SCALE_BLOCK, 0)[:rows]
    return (elements.float() * factor).to(torch.bfloat16)


def _of_wide_operands(problem: GemmProblem) -> Callable[..., Any]:
    import torch

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        of_rows = scale_a[:, : problem.m].t()
        return torch.mm(widened(a[0], of_rows), widened(b[0].t(), scale_b).t()).unsqueeze(0)

    return call


def _scaled_by_blocks(problem: GemmProblem) -> Callable[..., Any]:
    from torch.nn import functional

    kinds = functional.ScalingType

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        return functional.scaled_mm(
            a[0],
            b[0],
            scale_a[:, : problem.m].t(),
            kinds.BlockWise1x128,
            scale_b.t(),
            kinds.BlockWise128x128,
        ).unsqueeze(0)

    return call


def as_in_a_model(problem: GemmProblem) -> Callable[..., Any]:
    """As `unfused`, in the form that torch.compile has patterns for: matrices of two dimensions,
    the bias within the product's call.
    """
    import torch

    if problem.batch > 1 or problem.dtype == E4M3 or problem.dtype_d != problem.dtype:
        return unfused(problem)
    has_bias, finish = problem.has_bias, epilogue(replace(problem, epilogue=_after_bias(problem)))

    def call(a: Any, b: Any, *more: Any) -> Any:
        tail = [other[0] if other.dim() == 3 else other for other in more]
        if has_bias:
            d = torch.addmm(tail.pop(0), a[0], b[0])
        else:
            d = torch.mm(a[0], b[0])
        return finish(d, *tail).unsqueeze(0)

    return call


def _after_bias(problem: GemmProblem) -> str:
    """Part of its epilogue beside a bias."""
    return problem.epilogue.removeprefix("bias").removeprefix("_")


def addmm(problem: GemmProblem) -> Callable[..., Any]:
    """As `unfused`, with the bias (else the residual) added by the product's own call."""
    import torch

    after = _after_bias(problem) if problem.has_bias else ""
    finish = epilogue(replace(problem, epilogue=after))

    def call(a: Any, b: Any, added: Any, *more: Any) -> Any:
        first = added if problem.has_bias else added[0]
        return finish(torch.addmm(first, a[0], b[0]).unsqueeze(0), *more)

    return call


def addmm_activation(problem: GemmProblem) -> Callable[..., Any]:
    """call(a, b, bias) -> d in one kernel: cuBLASLt's epilogue of a bias and an activation."""
    import torch

    use_gelu = FUSED_ACTIVATIONS[problem.epilogue]

    def call(a: Any, b: Any, bias: Any) -> Any:
        return torch._addmm_activation(bias, a[0], b[0], use_gelu=use_gelu).unsqueeze(0)

    return call
