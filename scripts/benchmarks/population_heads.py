"""Products over vocabularies whose size is not a multiple of 8, as `tuner.linear` computes them.

Each stands behind an element-wise kernel that writes the rows; the weights are larger than the L2.
``parts`` is PyTorch's product of the aligned columns, that of the last few, and both side by side.
Outputs, and with ``gradients`` those too, are compared with fp32 products of the same elements.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row

VOCABULARIES = {
    "gpt2-xl": (50257, 1600),
    "whisper-medium": (51865, 1024),
    "whisper-large-v3": (51866, 1280),
    "bart-large": (50265, 1024),
}
"""Columns and depth, of models that make selections."""
MASKED_HEADS = {
    "bert-base": (30522, 768),
    "roberta-base": (50265, 768),
    "deberta-v3-base": (128100, 768),
    "xlm-roberta-large": (250002, 1024),
}
"""The same of heads of masked language models, whose layer has a bias; three sizes are even."""
ROWS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GRADIENT_ROWS = (1024, 4096, 8192)
MAX_OUTPUTS = 6e8
"""Most elements of an output."""
MAX_ERROR = 4e-3
"""Largest relative error of an output in bf16."""


@dataclass(frozen=True)
class Head:
    """A product (m, k) by (n, k), with a bias or not, with all gradients or not."""

    model: str
    m: int
    n: int
    k: int
    has_bias: bool = False
    has_gradients: bool = False

    @property
    def group(self) -> str:
        parts = "a bias" * self.has_bias, "gradients" * self.has_gradients
        return ", ".join(filter(None, ("vocabularies", *parts)))

    @property
    def label(self) -> str:
        return f"{self.model} M={self.m},N={self.n},K={self.k} ({self.group})"


HEADS = Head("smoke", 4, 67, 32)


def heads() -> list[Head]:
    """Vocabularies, heads with and without a bias, and gradients of both."""
    sizes = [(VOCABULARIES, False), (MASKED_HEADS, False), (MASKED_HEADS, True)]
    return [
        Head(model, m, n, k, has_bias, has_gradients)
        for has_gradients in (False, True)
        for models, has_bias in sizes
        for m in (GRADIENT_ROWS if has_gradients else ROWS)
        for model, (n, k) in models.items()
        if m * n <= MAX_OUTPUTS
    ]


def heads_measured(case: Head, _: Namespace) -> Row:
    """Times and errors of every way; the error with gradients is the largest of theirs."""
    import torch
    from torch.nn import functional

    import tuner

    torch.manual_seed(0)
    sizes = (case.m, case.k), (case.n, case.k), (case.n,), (case.m, case.n)
    source, weight, bias, grad = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes
    )
    rows, weight = source.clone(), weight / case.k**0.5
    leaves = [rows, weight, *([bias] if case.has_bias else [])]
    exact = [leaf.float() for leaf in leaves]
    if case.has_gradients:
        for leaf in (*leaves, *exact):
            leaf.requires_grad_()

    def parts(*tensors: Any) -> Any:
        at = case.n // 8 * 8
        ends = slice(at), slice(at, case.n)
        return torch.cat(
            [functional.linear(tensors[0], *(t[end] for t in tensors[1:])) for end in ends], -1
        )

    def step(linear: Any, tensors: Sequence[Any], grad: Any) -> tuple[Any, ...]:
        out = linear(*tensors)
        if not case.has_gradients:
            return (out,)
        return (out, *torch.autograd.grad(out, tensors, grad))

    linears: dict[str, Any] = {"pytorch": functional.linear, "tuner": tuner.linear, "parts": parts}
    ways = [
        Contender(name, lambda _, linear=linear: step(linear, leaves, grad))  # type: ignore[misc]
        for name, linear in linears.items()
        if name != "parts" or not case.has_gradients
    ]
    with torch.inference_mode(not case.has_gradients):
        wanted = step(functional.linear, exact, grad.float())
        tuner.stats(reset=True)
        errors = {way.name: max(map(harness.distance, way.call(0), wanted)) for way in ways}
        served = tuner.stats(reset=True).hits
        del wanted, exact
        times = harness.time_calls(ways, lambda _: torch.add(source, 0.0, out=rows.data), 1)
    return {
        **{"answered": "own" if served else "PyTorch's", "us": times.us, "failed": times.failed},
        "errors": errors,
        "wrong": [name for name, error in errors.items() if not error < MAX_ERROR],
    }
