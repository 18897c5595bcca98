"""Grouped GEMM by PyTorch: its grouped kernel, or a loop over the groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.peers import Vendor
from tuner.families.peers.blas import PEAK_TFLOPS, START_US, STREAM_GBS, widened
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import GroupedGemmProblem, Problem


class VendorGroupedGemm(Vendor):
    """``kernel``: grouped_mm, `torch._grouped_mm`, where this torch has it; mm, a loop of torch.mm
    over the groups that have rows.
    """

    name: ClassVar[str] = "vendor_grouped_gemm"
    op: ClassVar[str] = GroupedGemmProblem.op
    offered: ClassVar[tuple[str, ...]] = ("grouped_mm", "mm")
    takes_scale: ClassVar[bool] = False

    def refusal(self, problem: Problem, kernel: str) -> str:
        if isinstance(problem, GroupedGemmProblem) and kernel == "grouped_mm":
            # Of other types it is a loop that reads the offsets back to the host.
            return "" if problem.dtype == "bfloat16" else "grouped_mm is a kernel for bf16 only"
        return ""

    def connect(
        self, problem: GroupedGemmProblem, kernel: str, scale: float
    ) -> Callable[..., Any] | str:
        import torch

        if kernel == "mm":
            return in_turn(problem)
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no _grouped_mm"
        return grouped

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """CuBLAS's rates; a start for each product that is launched, rows padded to 64 and 128."""
        if not isinstance(problem, GroupedGemmProblem):
            return float("inf")
        rate = PEAK_TFLOPS * gpu.peak_tflops / DEFAULT_GPU.peak_tflops
        stream = STREAM_GBS * gpu.memory_gbs / DEFAULT_GPU.memory_gbs
        is_loop = config["kernel"] == "mm"
        tile = 64 if is_loop else 128
        padded = sum(-(-rows // tile) * tile for rows in problem.rows)
        work = 2 * padded * problem.n * problem.k / rate / 1e6
        # torch's kernel has one in front of it that prepares the groups.
        launches = sum(1 for rows in problem.rows if rows) if is_loop else 2
        return launches * START_US + max(work, problem.bytes / stream / 1e3)


def grouped(a: Any, b: Any, offsets: Any) -> Any:
    """The problem's d by torch's grouped kernel."""
    import torch

    return torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets[1:])


def in_turn(problem: GroupedGemmProblem) -> Callable[..., Any]:
    """call(a, b, offsets) -> d by a torch.mm a group; operands with factors are made bf16 before.

    It needs the offsets on the host: each call reads them back, which waits for the device. While a
    graph is captured they cannot be read, and the last call's stand for them. So a captured call
    times the loop's kernels, as if the host had known. Capture it only for timing.
    """
    import torch

    starts: list[int] = [0] * (problem.groups + 1)

    def call(a: Any, b: Any, offsets: Any, *factors: Any) -> Any:
        if factors:  # e4m3's
            of_rows, of_blocks = factors[0][:, : a.shape[0]].t(), factors[1]
            a = widened(a, of_rows)
            b = [widened(of, scale) for of, scale in zip(b, of_blocks, strict=True)]
        if not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
            starts[:] = offsets.tolist()
        d = torch.empty((a.shape[0], problem.n), dtype=a.dtype, device=a.device)
        for group, (start, end) in enumerate(pairwise(starts)):
            if start < end:
                torch.mm(a[start:end], b[group].t(), out=d[start:end])
        return d

    return call
