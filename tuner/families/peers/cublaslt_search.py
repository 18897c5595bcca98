"""Every algorithm that cuBLASLt's heuristic returns for a product, by the attributes that rebuild
it. PyTorch takes the first one without timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.base import Domain
from tuner.families.peers import MAX_INTEGER, ListedVendor, allocated, lt, stream_of
from tuner.families.peers.blas import VendorBlas
from tuner.hardware import Gpu
from tuner.problem import E4M3, GemmProblem, Problem

KERNEL = "cublaslt_search"
COUNT = 64
"""Algorithms asked for."""
WORKSPACE_BYTES = 32 << 20
"""Most that an algorithm may use: what NVIDIA recommends on Hopper, and PyTorch allows there."""


class VendorCublasltSearch(ListedVendor):
    """``kernel``: cublaslt_search. The other parameters are those of `lt.ATTRIBUTES`, numbers of
    cuBLASLt's own, and its `version`. A bias, ReLU, GELU by tanh and a residual are part of the
    product; e4m3 comes with its factors. Each call allocates its workspace from torch.
    """

    name: ClassVar[str] = "vendor_cublaslt_search"
    op: ClassVar[str] = GemmProblem.op
    offered: ClassVar[tuple[str, ...]] = (KERNEL,)
    library: ClassVar[str] = "cublaslt"
    options: ClassVar[Mapping[str, Domain]] = {
        name: range(MAX_INTEGER + 1) for name in (*lt.ATTRIBUTES, "version")
    }
    identity: ClassVar[tuple[str, ...]] = tuple(options)
    takes_scale: ClassVar[bool] = False
    is_tried: ClassVar[bool] = False  # cublasLtMatmulAlgoCheck says it without a launch

    def refusal(self, problem: Problem, kernel: str) -> str:
        if not isinstance(problem, GemmProblem):
            return ""
        if problem.epilogue not in lt.EPILOGUES:
            names = ", ".join(filter(None, lt.EPILOGUES))
            return f"{kernel} has no epilogue {problem.epilogue} (allowed: {names})"
        if problem.scales and problem.dtype != E4M3:
            return f"{kernel} takes factors of {E4M3}, not of {problem.dtype}"
        if problem.scales == "block":
            return f"{kernel} takes factors of operands and of rows, not of blocks"
        if problem.has_output_scale:
            return f"{kernel} is called with outputs of 16 and 32 bits"
        return ""

    def version(self) -> int:
        return lt.library().version

    def listing(self, problem: Problem, max_workspace: int | None) -> Sequence[Config]:
        if not isinstance(problem, GemmProblem):
            return []
        most = WORKSPACE_BYTES if max_workspace is None else min(max_workspace, WORKSPACE_BYTES)
        product, version = _product(problem), self.version()
        listed: dict[Config, None] = {}
        for result in product.heuristics(COUNT, most):
            numbers = product.attributes(result.algorithm)
            if max(numbers.values()) <= MAX_INTEGER:
                listed.setdefault(
                    Config(self.name, {"kernel": KERNEL, **numbers, "version": version})
                )
        return list(listed)

    def rebuilt(
        self, problem: GemmProblem, config: Config, scale: float
    ) -> Callable[..., Any] | str:
        product = _product(problem)
        if "algorithm" in config.params:
            algorithm = product.rebuilt({name: config[name] for name in lt.ATTRIBUTES})
        else:
            algorithm = product.heuristics(1, WORKSPACE_BYTES)[0]
        if algorithm.workspace_bytes > WORKSPACE_BYTES:
            return f"{KERNEL} needs {algorithm.workspace_bytes} bytes (allowed: {WORKSPACE_BYTES})"
        return called(problem, product, algorithm)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """As cuBLAS's product in one kernel."""
        return VendorBlas().predict_us(problem, Config("vendor_blas", {"kernel": "inductor"}), gpu)


def _product(problem: GemmProblem) -> lt.LtDescriptors:
    import torch

    return lt.LtDescriptors(lt.library(), problem, torch.cuda.current_device())


def called(
    problem: GemmProblem, product: lt.LtDescriptors, algorithm: lt.Heuristic
) -> Callable[..., Any]:
    """call(a, b, *others) -> d; looks at the tensors' addresses only."""
    names = [operand.name for operand in problem.operands]

    def run(inputs: Sequence[Any], out: Any, workspace: Any) -> None:
        tensors = zip(names, (*inputs, out), strict=True)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors}
        product.launch(algorithm, addresses, workspace.data_ptr(), stream_of(out.device))

    return allocated(problem, algorithm.workspace_bytes, run)
