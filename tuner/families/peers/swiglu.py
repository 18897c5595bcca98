"""SwiGLU by PyTorch: one product of both projections, then silu and the product of the two."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families import product_work
from tuner.families.peers import MAX_AUTOTUNE, Vendor, compiled
from tuner.families.peers.blas import START_US, STREAM_GBS, VendorBlas
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import GemmProblem, Problem, SwigluProblem

INTERLEAVED = "torch_interleaved"
"""PyTorch's answer for `tuner.swiglu`, whose weights are interleaved."""


class VendorSwiglu(Vendor):
    """``kernel``: torch, three kernels; torch_compile, what torch.compile makes of them; on request
    inductor, the same when it searches longest; these get the weights concatenated. And
    torch_interleaved, three kernels.
    """

    name: ClassVar[str] = "vendor_swiglu"
    op: ClassVar[str] = SwigluProblem.op
    offered: ClassVar[tuple[str, ...]] = ("torch", "torch_compile", INTERLEAVED)
    on_request: ClassVar[tuple[str, ...]] = ("inductor",)
    work_terms: ClassVar[tuple[str, ...]] = product_work.CLOSED_TERMS
    amounts = staticmethod(product_work.closed_work)
    takes_scale: ClassVar[bool] = False

    def handed_over(self, problem: Problem, config: Config) -> Problem:
        if not isinstance(problem, SwigluProblem) or config["kernel"] == INTERLEAVED:
            return problem
        return replace(problem, weights="concatenated")

    def connect(
        self, problem: SwigluProblem, kernel: str, scale: float
    ) -> Callable[..., Any] | str:
        needed = "interleaved" if kernel == INTERLEAVED else "concatenated"
        if problem.weights != needed:
            return f"{kernel} wants the weights {needed}"
        if kernel == INTERLEAVED:
            return interleaved(problem)
        if kernel == "torch":
            return swiglu(problem)
        return compiled(swiglu(problem), MAX_AUTOTUNE if kernel == "inductor" else None)

    def legality_facts(self, problem: Problem) -> Hashable:
        """Every problem of a domain is taken."""
        return ()

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """The product as cuBLAS computes it, and twice a kernel of three passes over a half."""
        if not isinstance(problem, SwigluProblem):
            return float("inf")
        product = GemmProblem(problem.m, 2 * problem.n, problem.k, dtype=problem.dtype)
        blas = VendorBlas().predict_us(product, Config("vendor_blas", {"kernel": "cublas"}), gpu)
        stream = STREAM_GBS * gpu.memory_gbs / DEFAULT_GPU.memory_gbs
        kernels = 2 if config["kernel"] in ("torch", INTERLEAVED) else 1
        return blas + kernels * (START_US + 3 * problem.output.bytes / stream / 1e3)


def swiglu(problem: SwigluProblem) -> Callable[[Any, Any], Any]:
    """call(a, weights) -> d, the weights (2, N / 32, 4, 8, K) and concatenated."""
    from torch.nn import functional

    n, k = problem.n, problem.k

    def call(a: Any, weights: Any) -> Any:
        pair = functional.linear(a, weights.view(2 * n, k))
        return functional.silu(pair[:, :n]).mul_(pair[:, n:])

    return call


def interleaved(problem: SwigluProblem) -> Callable[[Any, Any], Any]:
    """call(a, weights) -> d, the weights (2, N / 32, 4, 8, K) and interleaved."""
    from torch.nn import functional

    def call(a: Any, weights: Any) -> Any:
        rows = weights.permute(1, 3, 2, 0, 4).view(2 * problem.n, problem.k)
        return of_pairs(functional.linear(a, rows))

    return call


def of_pairs(halves: Any) -> Any:
    """silu(gate) * up of a product whose columns lie as `SwigluProblem` interleaves them, by two
    kernels. They record no gradient.
    """
    import torch

    gate, up = pairs(halves)
    out = halves.new_empty((*halves.shape[:-1], halves.shape[-1] // 2))
    torch.mul(torch.nn.functional.silu(gate), up, out=out.unflatten(-1, (-1, 4, 8)))
    return out


def pairs(halves: Any) -> Any:
    """The gate and what it gates, (..., N / 32, 4, 8) each, of such a product."""
    return halves.unflatten(-1, (-1, 8, 4, 2)).transpose(-3, -2).unbind(-1)
