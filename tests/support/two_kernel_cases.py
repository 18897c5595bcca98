"""The kernels of the family `two_kernel_attention` that its test on a GPU proves."""

from __future__ import annotations

from dataclasses import replace

from tuner.config import Config, Value
from tuner.problem import AttentionProblem


def make(
    tile_n: int, scores: tuple[int, int, int, int], output: tuple[int, int, int, int]
) -> Config:
    """A config from groups, stages, buffers and blocks an SM of each kernel."""
    params: dict[str, Value] = {"tile_n": tile_n}
    for stage, values in (("scores", scores), ("output", output)):
        names = (f"{stage}_{name}" for name in ("groups", "stages", "buffers", "blocks_per_sm"))
        params |= dict(zip(names, values, strict=True))
    chunk = {"heads_per_launch": 1, "rows_per_launch": 64, "splits": 1, "pdl": True}
    return Config("two_kernel_attention", params | chunk)


#: Heads, head dimension, type and mask of a problem (what a kernel is compiled for), and a config.
CASES = {
    "full": ("B=2,H=2,D=64", make(128, (2, 3, 2, 1), (2, 4, 2, 1))),
    "causal": ("B=1,H=4,D=64,causal=1,layout=bshd", make(128, (1, 3, 2, 2), (1, 3, 2, 2))),
    "grouped": (
        "B=2,H=4,HKV=2,D=128,causal=1,dtype=bf16", make(64, (2, 3, 1, 1), (1, 4, 1, 1))
    ),
    "unlike groups": ("B=1,H=2,D=80,causal=1", make(64, (1, 2, 1, 1), (3, 4, 1, 1))),
    "wide, capped": ("B=1,H=2,D=256,softcap=30", make(64, (2, 2, 2, 1), (2, 3, 2, 1))),
    # Their second kernels are those of cases above.
    "bias": ("B=2,H=4,HKV=2,D=64,bias=h", make(128, (1, 3, 2, 2), (2, 4, 2, 1))),
    "all": (
        "B=2,H=4,HKV=2,D=128,causal=1,softcap=30,bias=bh,dtype=bf16",
        make(64, (2, 3, 1, 1), (1, 4, 1, 1)),
    ),
}  # fmt: skip
LENGTHS = [(1, 1), (7, 300), (63, 65), (129, 127), (300, 40), (1000, 1000), (1337, 999)]
#: Of which axes a bias is does not change the kernels.
BIASES = ("1", "b", "h", "bh")


def problems(text: str, lengths: list[tuple[int, int]]) -> list[AttentionProblem]:
    """A case at some lengths; of other axes each time where it has a bias."""
    made = [AttentionProblem.parse(f"SQ={q},SKV={kv},{text}") for q, kv in lengths]
    return [
        replace(problem, bias=BIASES[number % len(BIASES)]) if problem.bias else problem
        for number, problem in enumerate(made)
    ]


def variants(problem: AttentionProblem, config: Config) -> list[Config]:
    """Everything in one launch; a part of the heads and rows; keys shared by several blocks."""
    total, rows = problem.batch * problem.heads_q, -(-problem.seqlen_q // 64) * 64
    tiles = -(-problem.seqlen_kv // config["tile_n"])
    names = ("heads_per_launch", "rows_per_launch", "splits", "pdl")
    wanted = (
        (total, rows, 1, True),
        (1, min(rows, 192), 1, True),
        (total, rows, min(3, tiles), False),
    )
    return [
        Config(config.family, {**config.params, **dict(zip(names, values, strict=True))})
        for values in wanted
    ]
