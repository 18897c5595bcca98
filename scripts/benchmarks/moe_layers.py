"""Layers of public mixtures of experts that `scripts/bench moe` times: sizes, weights, routes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
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
DTYPES: Mapping[str, DType] = {"bf16": "bfloat16", "e4m3": E4M3}


@dataclass(frozen=True)
class Case:
    """A layer, its rows and how the router chooses."""

    layer: str
    sizes: Sizes
    dtype: str
    rows: int
    route: str

    @property
    def group(self) -> str:
        return self.dtype

    @property
    def tokens(self) -> int:
        return max(1, self.rows // self.sizes.top_k)

    @property
    def label(self) -> str:
        return f"{self.layer} {self.dtype} {self.rows} rows, {self.route}"


@dataclass(frozen=True)
class Product(Case):
    """One of the two products of a layer: ``up`` or ``down``."""

    part: str

    @property
    def problem(self) -> GroupedGemmProblem:
        sizes, rows = self.sizes, self.tokens * self.sizes.top_k
        n, k = 2 * sizes.inner, sizes.hidden
        n, k = (n, k) if self.part == "up" else (sizes.hidden, sizes.inner)
        return GroupedGemmProblem(sizes.experts, rows, n, k, "zipf", DTYPES[self.dtype])

    @property
    def label(self) -> str:
        return f"{super().label}, {self.part}"


def cases(args: Namespace) -> list[Case]:
    """Every layer; cases that share weights and compiled peers are neighbours."""
    every = product(LAYERS.items(), DTYPES, args.rows, ("uniform", "zipf"))
    return [Case(layer, sizes, dtype, rows, route) for (layer, sizes), dtype, rows, route in every]


def products(args: Namespace) -> list[Product]:
    """Both products of every layer."""
    return [Product(**vars(case), part=part) for case in cases(args) for part in ("up", "down")]


@lru_cache(1)
def weights_of(sizes: Sizes, dtype: str) -> tuple[list[Any], list[Any]]:
    """Random matrices of a layer, and their factors of blocks; None each for bf16."""
    import torch

    matrices, scales = [], []
    for rows, columns in ((2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)):
        scale, factor, kind = None, columns**-0.5, torch.bfloat16
        if dtype == "e4m3":
            shape = sizes.experts, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
            scale = (torch.rand(shape, device="cuda") + 1) * (factor / 100)
            factor, kind = 100.0, torch.float8_e4m3fn
        matrix = torch.empty(sizes.experts, rows, columns, dtype=kind, device="cuda")
        for expert in matrix:
            drawn = torch.randn(expert.shape, device="cuda", dtype=torch.bfloat16)
            expert.copy_(drawn.mul_(factor).clamp_(-448, 448))
        matrices.append(matrix)
        scales.append(scale)
    return matrices, scales


def routed(case: Case) -> tuple[Any, Any]:
    """Experts int64 and weights bf16, (T, top_k): each token's experts are unlike."""
    import torch

    torch.manual_seed(7)
    sizes = case.sizes
    chances = torch.ones(sizes.experts, device="cuda")
    if case.route == "zipf":
        ranks = torch.randperm(sizes.experts, device="cuda")
        chances = 1 / (ranks + 1.0)
    every = chances.expand(case.tokens, -1)
    experts = torch.multinomial(every, sizes.top_k)
    weights = torch.rand(experts.shape, device="cuda").softmax(-1)
    return experts, weights.bfloat16()


def counts_of(case: Case, experts: Any) -> tuple[Any, dict[str, int]]:
    """Rows of each expert, and their largest number and how many have none."""
    import torch

    counts = torch.bincount(experts.view(-1), minlength=case.sizes.experts)
    return counts, {"largest": int(counts.max()), "empty": int((counts == 0).sum())}
