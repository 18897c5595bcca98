"""The problems and inputs that every kernel is proven on: a fixed list, drawn from fixed seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tuner.bench.suites import SUITES
from tuner.problem import AttentionProblem, DType, Layout, problem_from_json

#: Head dimensions that kernels are instantiated for; a case's kernels are those of the smallest
#: that holds its own.
INSTANCES = (64, 96, 128, 192, 256)
MASKS = (False, True)
DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd")
GROUPS = (1, 2, 4, 8)
#: Around the tiles' borders, odd, and one key or query alone.
LENGTHS = (1, 7, 63, 65, 127, 129, 1000, 4097)
#: (B, H, HKV, S, D) of the acceptance suite, each full and causal.
SUITE = tuple(
    (p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.head_dim)
    for p in SUITES["acceptance"].problems
    if isinstance(p, AttentionProblem) and not p.is_causal
)
#: random: normal. dominant: every query is a multiple of one key, or minus it. large_scores:
#: normal, scores 30 times as large. equal_row: one query of each head is zero, so all its scores
#: are equal. infinite_unseen: keys that the causal mask hides from every query are infinite.
KINDS = ("random", "dominant", "large_scores", "equal_row", "infinite_unseen")
#: Outputs have at least this many elements: the error of fewer is chance, and so is its ratio to
#: another kernel's.
FEWEST_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class Case:
    """One problem with one kind of inputs."""

    section: str
    problem: AttentionProblem
    kind: str = "random"
    scale_factor: float = 1.0
    """Of the default scale, 1 / sqrt(D)."""
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.scale_factor / math.sqrt(self.problem.head_dim)

    @property
    def instance(self) -> int:
        return next(d for d in INSTANCES if d >= self.problem.head_dim)

    def label(self) -> str:
        text = f"{self.section} {self.problem.label()} {self.kind}"
        return text if self.scale_factor == 1 else f"{text} scale x{self.scale_factor}"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "problem": self.problem.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        problem = problem_from_json(data["problem"])
        assert isinstance(problem, AttentionProblem)
        return cls(**{**data, "problem": problem})


def drawn() -> list[Case]:
    """All cases, the same in every process; large ones last."""
    sections = {
        "kinds": _kinds(),
        "lengths": _lengths(),
        "head_dims": _head_dims(),
        "random": _random(),
        "decoding": _decoding(),
        "wide_groups": _wide_groups(),
        "suite": _suite(),
        "grid": _grid(),
        "long": _long(),
        "strides": _strides(),
    }
    return [
        Case(section, problem, kind, factor, seed)
        for section, found in sections.items()
        for seed, (problem, kind, factor) in enumerate(found)
    ]


Drawn = Iterator[tuple[AttentionProblem, str, float]]


def _filled(problem: dict[str, Any]) -> AttentionProblem:
    """With as many batch elements as `FEWEST_ELEMENTS` takes."""
    of_one = problem["heads_q"] * problem["seqlen_q"] * problem["head_dim"]
    batch = max(problem.get("batch", 1), min(64, math.ceil(FEWEST_ELEMENTS / of_one)))
    return AttentionProblem(**{**problem, "batch": batch})


def _heads(draw: random.Random) -> dict[str, int]:
    heads_kv, group = draw.choice((1, 2, 3)), draw.choice(GROUPS)
    return {"heads_q": heads_kv * group, "heads_kv": heads_kv}


def _kinds() -> Drawn:
    """Every kind, and a single key, on every instance, mask and type."""
    draw = random.Random("kinds")
    for instance, causal, dtype in product(INSTANCES, MASKS, DTYPES):
        for kind in (*KINDS[1:], "random"):
            if kind == "infinite_unseen" and not causal:
                continue
            queries, keys = draw.randint(100, 700), draw.randint(100, 700)
            if kind == "infinite_unseen":
                queries, keys = draw.randint(100, 300), draw.randint(301, 700)
            if kind == "random":
                keys = 1
            problem = {
                "seqlen_q": queries,
                "seqlen_kv": keys,
                "head_dim": instance - draw.choice((0, 8)),
                "is_causal": causal,
                "dtype": dtype,
                "layout": draw.choice(LAYOUTS),
                **_heads(draw),
            }
            yield _filled(problem), kind, draw.choice((1.0, 0.75))


def _lengths() -> Drawn:
    """Every pair of the odd lengths; each head dimension twice."""
    draw = random.Random("lengths")
    head_dims = list(range(8, 257, 8)) * 2
    draw.shuffle(head_dims)
    for (queries, keys), head_dim in zip(product(LENGTHS, LENGTHS), head_dims, strict=True):
        problem = {
            "seqlen_q": queries,
            "seqlen_kv": keys,
            "head_dim": head_dim,
            "is_causal": draw.choice(MASKS),
            "dtype": draw.choice(DTYPES),
            "layout": draw.choice(LAYOUTS),
            **_heads(draw),
        }
        yield _filled(problem), "random", 1.0


def _head_dims() -> Drawn:
    """Every multiple of 8, full and causal, as long as a few tiles."""
    draw = random.Random("head_dims")
    for head_dim, causal in product(range(8, 257, 8), MASKS):
        length = draw.randint(150, 900)
        problem = {
            "seqlen_q": length,
            "seqlen_kv": length,
            "head_dim": head_dim,
            "is_causal": causal,
            "dtype": draw.choice(DTYPES),
            "layout": draw.choice(LAYOUTS),
            **_heads(draw),
        }
        yield _filled(problem), draw.choice(KINDS[:4]), 1.0


def _random() -> Drawn:
    """Nothing fixed; lengths evenly over their logarithm."""
    draw = random.Random("random")
    for _ in range(60):
        problem = {
            "batch": draw.randint(1, 4),
            "seqlen_q": round(math.exp(draw.uniform(0, math.log(5000)))),
            "seqlen_kv": round(math.exp(draw.uniform(0, math.log(5000)))),
            "head_dim": 8 * draw.randint(1, 32),
            "is_causal": draw.choice(MASKS),
            "dtype": draw.choice(DTYPES),
            "layout": draw.choice(LAYOUTS),
            **_heads(draw),
        }
        yield _filled(problem), draw.choice(KINDS[:4]), draw.choice((1.0, 0.5, 2.0))


def _decoding() -> Drawn:
    """Few queries on many keys: what split-KV and packed heads are for."""
    draw = random.Random("decoding")
    for queries, keys, batch in product((1, 4, 16), (1024, 8192, 32768), (1, 16)):
        problem = AttentionProblem(
            queries, keys, draw.choice((64, 128, 128)), batch, 32, draw.choice((4, 8)),
            dtype=draw.choice(DTYPES), layout=draw.choice(LAYOUTS),
        )  # fmt: skip
        yield problem, draw.choice(("random", "dominant")), 1.0


def _wide_groups() -> Drawn:
    """16 query heads to a KV head: where they are packed, a warp's rows are one query."""
    draw = random.Random("wide_groups")
    for queries, keys in ((1, 63), (7, 4097), (129, 65), (1000, 1000)):
        for head_dim, dtype in product((64, 128), DTYPES):
            problem = AttentionProblem(
                queries, keys, head_dim, draw.choice((1, 3)), 32, 2,
                dtype=dtype, layout=draw.choice(LAYOUTS),
            )  # fmt: skip
            yield problem, "random", 1.0


def _suite() -> Drawn:
    for (batch, heads, heads_kv, length, head_dim), causal, dtype in product(SUITE, MASKS, DTYPES):
        problem = AttentionProblem(
            length, length, head_dim, batch, heads, heads_kv, causal, dtype
        )  # fmt: skip
        yield problem, "random", 1.0


def _grid() -> Drawn:
    draw = random.Random("grid")
    for batch, heads, length in product((1, 8, 32), (8, 16, 32), (512, 2048, 8192)):
        problem = AttentionProblem(
            length, length, draw.choice((64, 128)), batch, heads, heads, draw.choice(MASKS),
            draw.choice(DTYPES), draw.choice(LAYOUTS),
        )  # fmt: skip
        yield problem, "random", 1.0


def _long() -> Drawn:
    for head_dim, causal in product((64, 128), MASKS):
        dtype = DTYPES[(head_dim == 64) == causal]
        yield AttentionProblem(131072, 131072, head_dim, 1, 1, 1, causal, dtype), "random", 1.0
    yield AttentionProblem(1, 131072, 128, 2, 8, 1), "random", 1.0
    yield AttentionProblem(131072, 65, 64, 1, 1, 1), "random", 1.0


def _strides() -> Drawn:
    """Batch strides over 2^31 elements: of the queries and the output, then of keys and values."""
    rows = 131072 + 8
    yield AttentionProblem(rows, 65, 128, 2, 128, 16), "random", 1.0
    yield AttentionProblem(rows, 65, 128, 2, 128, 16, True, "bfloat16", "bshd"), "random", 1.0
    yield AttentionProblem(65, rows, 128, 2, 128, 128, dtype="bfloat16"), "random", 1.0
    yield AttentionProblem(65, rows, 128, 2, 128, 128, layout="bshd"), "random", 1.0
