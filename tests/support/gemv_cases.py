"""The kernels of the family `gemv` that its test on a GPU proves, and on which problems."""

from __future__ import annotations

from typing import Any

from tuner.config import Config, Value
from tuner.problem import GemmProblem


def config(shape: tuple[int, int, int, int, int, int], **more: Value) -> Config:
    names = ("warps", "k_warps", "row_tiles", "pieces", "stages", "blocks_per_sm")
    params: dict[str, Value] = {
        **dict(zip(names, shape, strict=True)),
        "persistent": False,
        "pdl": False,
        "lead": 0,
    }
    return Config("gemv", {**params, **more})


PERSISTENT: dict[str, Value] = {"persistent": True, "pdl": True, "lead": 1024}
#: Types, epilogue, config, and M, N, K, batch: M = 1 of many steps, rows and K that end anywhere.
CASES: dict[str, tuple[Any, Any, str, Config, tuple[int, int, int, int]]] = {
    "one row": (
        "float16",
        "float16",
        "",
        config((8, 8, 2, 8, 3, 1)),
        (1, 5000, 4104, 1),
    ),
    "groups of warps": (
        "bfloat16",
        "float32",
        "bias",
        config((8, 2, 1, 4, 8, 1), **PERSISTENT),
        (5, 20001, 72, 1),
    ),
    "four row tiles": (
        "float16",
        "float32",
        "bias_residual",
        config((4, 4, 4, 2, 2, 2), **PERSISTENT),
        (8, 33000, 520, 1),
    ),
    "sixteen rows": (
        "bfloat16",
        "bfloat16",
        "bias_gelu",
        config((16, 8, 2, 2, 2, 1)),
        (13, 264, 1544, 3),
    ),
    "one warp": (
        "float16",
        "float16",
        "relu",
        config((1, 1, 1, 4, 2, 8)),
        (3, 9, 8, 2),
    ),
    "rows read together": (
        "bfloat16",
        "bfloat16",
        "bias",
        config((8, 4, 2, 4, 3, 1), row_loads=8, **PERSISTENT),
        (7, 4300, 1416, 1),
    ),
    "sixteen rows, read together": (
        "float16",
        "float16",
        "",
        config((8, 8, 1, 4, 4, 1), row_loads=8),
        (11, 520, 2056, 2),
    ),
    "whole copies": (
        "bfloat16",
        "bfloat16",
        "",
        config((8, 8, 2, 8, 2, 1), row_loads=8, whole_copies=True, **PERSISTENT),
        (5, 8500, 1416, 1),
    ),
    "two blocks": (
        "float16",
        "float16",
        "silu",
        config((8, 8, 2, 4, 3, 2)),
        (1, 5000, 4104, 1),
    ),
    "groups for sixteen rows": (
        "float16",
        "float32",
        "residual",
        config((4, 2, 4, 2, 4, 2), **PERSISTENT),
        (16, 40000, 328, 1),
    ),
    "whole rows": (
        "float16",
        "float16",
        "bias_gelu_tanh",
        config((4, 4, 1, 16, 2, 1), pdl=True, lead=4096),
        (2, 333, 4096, 2),
    ),
}


def problem_of(name: str) -> GemmProblem:
    dtype, dtype_d, epilogue, _, (m, n, k, batch) = CASES[name]
    return GemmProblem(m, n, k, batch, dtype, dtype_d, epilogue=epilogue)
