"""Layers of public mixtures of experts that `scripts/bench moe` times: sizes, weights, routes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tuner.problem import E4M3, SCALE_BLOCK, DType, GroupedGemmProblem


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer of experts."""

    experts: int
    top_k: int
    hidden: int
    inner: int


LAYERS: Mapping[str, Sizes] = {
    "mixtral-8x7b": Sizes(8, 2, 4096, 14336),
    "olmoe-1b-7b": Sizes(64, 8, 2048, 1024),
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "qwen3-235b-a22b": Sizes(128, 8, 4096, 1536),
    "deepseek-v3": Sizes(256, 8, 7168, 2048),
}
"""The models' config.json: routed experts, experts of a token, hidden and expert's inner size."""
ROWS = (128, 1024, 8192)
"""Rows of all experts: tokens times experts of a token."""
ROUTES = ("uniform", "zipf")
DTYPES: Mapping[str, DType] = {"bf16": "bfloat16", "e4m3": E4M3}


@dataclass(frozen=True)
class Case:
    """A layer, its rows and how the router chooses."""

    layer: str
    rows: int
    route: str
    dtype: str

    @property
    def sizes(self) -> Sizes:
        return LAYERS[self.layer]

    @property
    def tokens(self) -> int:
        return max(1, self.rows // self.sizes.top_k)

    def label(self) -> str:
        return f"{self.layer} {self.dtype} {self.rows} rows, {self.route}"

    def products(self) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
        """Problems of both products."""
        one, dtype = self.sizes, DTYPES[self.dtype]
        rows = self.tokens * one.top_k
        return (
            GroupedGemmProblem(one.experts, rows, 2 * one.inner, one.hidden, "zipf", dtype),
            GroupedGemmProblem(one.experts, rows, one.hidden, one.inner, "zipf", dtype),
        )


class Weights:
    """Random weights of a layer.

    Args:
        sizes: sizes of the layer.
        dtype: bf16 or e4m3.
        is_empty: leave the memory as it is, where only sizes matter.
    """

    def __init__(self, sizes: Sizes, dtype: str, *, is_empty: bool = False) -> None:
        import torch

        shapes = (
            (sizes.experts, 2 * sizes.inner, sizes.hidden),
            (sizes.experts, sizes.hidden, sizes.inner),
        )
        self.scales: tuple[Any, ...] = (None, None)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
        self.matrices = [torch.empty(shape, dtype=kind, device="cuda") for shape in shapes]
        if dtype == "e4m3":
            self.scales = tuple(
                torch.rand(
                    (s[0], math.ceil(s[1] / SCALE_BLOCK), math.ceil(s[2] / SCALE_BLOCK)),
                    device="cuda",
                )
                * (s[2] ** -0.5 / 100)
                + s[2] ** -0.5 / 100
                for s in shapes
            )
        if not is_empty:
            for matrix, shape in zip(self.matrices, shapes, strict=True):
                factor = shape[2] ** -0.5 if dtype == "bf16" else 100.0
                for expert in matrix:
                    drawn = torch.randn(expert.shape, device="cuda", dtype=torch.bfloat16)
                    expert.copy_(drawn.mul_(factor).clamp_(-448, 448))


def routed(case: Case) -> tuple[Any, Any]:
    """Experts int64 and weights bf16, (T, top_k): each token's experts are unlike."""
    import torch

    sizes, generator = case.sizes, torch.Generator("cuda").manual_seed(7)
    chances = torch.ones(sizes.experts, device="cuda")
    if case.route == "zipf":
        ranks = torch.randperm(sizes.experts, generator=generator, device="cuda")
        chances = 1 / (ranks + 1.0)
    every = chances.expand(case.tokens, -1)
    experts = torch.multinomial(every, sizes.top_k, generator=generator)
    weights = torch.rand(experts.shape, generator=generator, device="cuda").softmax(-1)
    return experts, weights.bfloat16()


Key = tuple[str, str, int]
"""Layer, type and number of rows of a child process."""


def cases(
    layers: Sequence[str], rows: Sequence[int], routes: Sequence[str], dtypes: Sequence[str]
) -> Iterator[tuple[Key, list[Case]]]:
    """The cases of each child process, which share weights and peers."""
    for layer, dtype, count in product(layers, dtypes, rows):
        yield (layer, dtype, count), [Case(layer, count, route, dtype) for route in routes]
