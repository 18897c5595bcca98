"""cuBLAS and cuBLASLt, called through torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.vendor import Vendor
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import GemmProblem, Problem

#: TFLOP/s of a large fp16 product and GB/s of one that reads a matrix once (M = 1), both cuBLAS
#: on one H200, CUDA 13.0; the first sits at the power limit.
PEAK_TFLOPS = 640.0
STREAM_GBS = 2400.0
#: A small product's time inside a graph, microseconds: one launch and one wave's latency.
START_US = 3.0


class VendorBlas(Vendor):
    """``kernel``: which library torch calls, cublas or cublaslt."""

    name: ClassVar[str] = "vendor_blas"
    op: ClassVar[str] = GemmProblem.op
    offered: ClassVar[tuple[str, ...]] = ("cublas", "cublaslt")

    def connect(self, problem: GemmProblem, kernel: str, scale: float) -> Callable[..., Any] | str:
        import torch

        if scale != 1.0:
            return f"{kernel} is offered with alpha 1, not {scale}"
        product = matmul(problem)
        library = torch.backends.cuda.preferred_blas_library
        with warnings.catch_warnings():  # torch warns once that the choice is experimental
            warnings.simplefilter("ignore")
            before = library()
            library(kernel)
            library(before)

        def call(a: Any, b: Any) -> Any:
            previous = library()
            library(kernel)
            try:
                return product(a, b)
            finally:
                library(previous)

        return call

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """A fixed part, and the longer of the products and the bytes at cuBLAS's rates."""
        rate = PEAK_TFLOPS * gpu.peak_tflops / DEFAULT_GPU.peak_tflops
        stream = STREAM_GBS * gpu.memory_gbs / DEFAULT_GPU.memory_gbs
        return START_US + max(problem.flops / rate / 1e6, problem.bytes / stream / 1e3)


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
