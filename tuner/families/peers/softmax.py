"""PyTorch's softmax over the score matrix, a baseline for the softmax stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.peers import Vendor
from tuner.hardware import Gpu
from tuner.problem import Problem, SoftmaxProblem

#: Share of the memory bandwidth that an elementwise pass of torch reaches on one H200 (a copy of
#: 33.5 MB of scores read and written in 17.7 us), and the bytes an element that the passes move:
#: scale 4 + 4, softmax 4 + 4, conversion 4 + 2.
BANDWIDTH_SHARE = 0.79
BYTES_PER_ELEMENT = 22


class VendorSoftmax(Vendor):
    """``kernel``: torch, in three passes (scale and mask, softmax, conversion)."""

    name: ClassVar[str] = "vendor_softmax"
    op: ClassVar[str] = SoftmaxProblem.op
    offered: ClassVar[tuple[str, ...]] = ("torch",)

    def connect(self, problem: SoftmaxProblem, kernel: str, scale: float) -> Callable[..., Any]:
        return softmax(problem, scale, "cuda")

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        moved = BYTES_PER_ELEMENT * problem.output.elements
        return 3.0 + moved / (BANDWIDTH_SHARE * gpu.memory_gbs * 1e3)


def softmax(problem: SoftmaxProblem, scale: float, device: str) -> Callable[[Any], Any]:
    """call(scores) -> probabilities; the causal mask is made once, here."""
    import torch

    dtype = getattr(torch, problem.dtype)
    hidden = None
    if problem.is_causal:
        query = torch.arange(problem.rows, device=device) % problem.query_rows
        hidden = torch.arange(problem.cols, device=device) > query[:, None]

    def call(scores: Any) -> Any:
        scaled = scores * scale
        if hidden is not None:
            scaled = scaled.masked_fill_(hidden, float("-inf"))
        return torch.softmax(scaled, -1).to(dtype)

    return call
