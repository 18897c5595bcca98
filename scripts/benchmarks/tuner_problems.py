"""Problems that tuners are judged by, of models that made no selection, each kind in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from benchmarks.cliffs_draws import Call, Plain, dense
from benchmarks.population_tensors import posed
from tuner.errors import ConfigError
from tuner.problem import (
    E4M3,
    SCALE_BLOCK,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
)
from tuner.problem.models import PublicModel
from tuner.problem.population import Chance, ModelCall, draw, linears, subset
from tuner.tuning.job import read_problems

PROMPTS, DECODING, PRODUCTS = "prompts", "decoding", "products"
BLOCK_SCALED, EXPERTS = "block-scaled", "experts"
TURNS = (
    *(PROMPTS, DECODING, PRODUCTS, BLOCK_SCALED),
    *(PROMPTS, DECODING, PRODUCTS, EXPERTS),
)
"""Kinds of eight problems after each other: any number of problems has them in these shares."""
COUNT, CALLS, CALLS_OF_ONE = 40, 400, 10
"""Problems of the list, and calls of models that they are taken from: so many at least, and so many
a problem."""
MAX_FLOPS, MAX_BYTES = 3e11, 1 << 29
"""Largest problems: longer calls cost the GPU's time, and choices among them differ less."""
MAX_ROWS = 4096
EXPERT_SIZES = {"gpt-oss-20b": (32, 4, 2880), "gpt-oss-120b": (128, 4, 2880)}
"""Experts of held-out models, experts of a token, and width of a token and of an expert's inside
(their config.json)."""
NEAR = 8
"""A neighbour's size differs by one in so many."""


@dataclass(frozen=True)
class Judged:
    """A problem of the list, or a neighbour of one."""

    group: str
    problem: Problem
    seed: int | None = None
    """Seed of the search; None without one, or where there is one only."""

    @property
    def label(self) -> str:
        seed = "" if self.seed is None else f" seed {self.seed}"
        return f"{self.problem.op} {self.problem.label()}{seed}"

    @property
    def call(self) -> Call:
        """A call whose tensors lie as the problem's layout says, cold where it decodes."""
        if isinstance(self.problem, AttentionProblem):
            return dense(self.problem, "decoding" if self.group == DECODING else "prompt")
        if self.group == PRODUCTS:
            return ModelCall("drawn", "call", "linear", 1, self.problem)
        return Plain(self.problem)


def drawn(seed: str, count: int = COUNT, names: str = "held-out") -> list[Judged]:
    """The first problems of a seed; a smaller count gives a prefix.

    Args:
        seed: any text.
        count: problems.
        names: models as of `subset`. Experts are of held-out models only.

    Raises:
        ConfigError: when the models have fewer.
    """
    models, calls = subset(names), max(CALLS, CALLS_OF_ONE * count)
    called = _called(seed, models, calls)
    scaled = (_block_scaled(Chance(f"{seed} scaled", i), models) for i in range(calls))
    experts = (_experts(Chance(f"{seed} experts", i)) for i in range(calls))
    kinds = {
        **{kind: iter(problems) for kind, problems in called.items()},
        **{BLOCK_SCALED: _distinct(scaled), EXPERTS: _distinct(experts)},
    }
    turns = [kind for kind in TURNS if kind != EXPERTS or names == "held-out"]
    problems = []
    for kind in islice(cycle(turns), count):
        problem = next(kinds[kind], None)
        if problem is None:
            raise ConfigError(f"--problems {count}: the models have fewer {kind}")
        problems.append(Judged(kind, problem))
    return problems


def of_file(path: Path) -> list[Judged]:
    """Problems of a list for ``tuner sweep``.

    Raises:
        ConfigError: when it cannot be read, or has an operation that is not judged.
    """
    return [Judged(_kind(problem), problem) for problem in read_problems(path)]


def _kind(problem: Problem) -> str:
    if isinstance(problem, AttentionProblem):
        return DECODING if problem.is_decoding else PROMPTS
    if isinstance(problem, GroupedGemmProblem):
        return EXPERTS
    if isinstance(problem, GemmProblem):
        return BLOCK_SCALED if problem.dtype == E4M3 else PRODUCTS
    raise ConfigError(
        f"--file: {problem.op} is not judged (allowed: attention, gemm, grouped_gemm)"
    )


def neighbours(case: Judged) -> list[Judged]:
    """The problem with an eighth fewer and more keys, of products rows."""
    problem = case.problem
    near: list[Problem] = []
    if isinstance(problem, AttentionProblem):
        is_square = problem.seqlen_q == problem.seqlen_kv
        for keys in _near(problem.seqlen_kv):
            queries = keys if is_square else min(problem.seqlen_q, keys)
            near.append(replace(problem, seqlen_kv=keys, seqlen_q=queries))
    else:
        assert isinstance(problem, GemmProblem | GroupedGemmProblem)
        near += [replace(problem, m=rows) for rows in _near(problem.m)]
    return [replace(case, problem=one) for one in near]


def _near(size: int) -> list[int]:
    """Sizes an eighth below and above, one at least."""
    step = max(1, round(size / NEAR))
    return [size - step, size + step] if size > step else [size + step]


def _called(seed: str, models: Sequence[PublicModel], count: int) -> dict[str, list[Problem]]:
    """Problems of the models' calls without a mask's tensor, by kind."""
    problems: dict[str, dict[Problem, None]] = {PROMPTS: {}, DECODING: {}, PRODUCTS: {}}
    for call in draw(seed, count, models):
        if call.mask or not _is_small(call.problem):
            continue
        try:
            problem = posed(call)
        except ConfigError:
            continue
        if problem.op in (AttentionProblem.op, GemmProblem.op):
            problems[_kind(problem)][problem] = None
    return {kind: list(some) for kind, some in problems.items()}


def _block_scaled(chance: Chance, models: Sequence[PublicModel]) -> Problem | None:
    stack = chance.one_of(chance.one_of(models, "model").stacks, "stack")
    layers = {name: size for name, size in linears(stack).items() if name != "logits"}
    if not layers:
        return None
    n, k, _ = chance.one_of(list(layers.values()), "layer")
    if n % SCALE_BLOCK or k % SCALE_BLOCK:
        return None
    return GemmProblem(chance.size(1, MAX_ROWS, "rows"), n, k, dtype=E4M3, scales="block")


def _experts(chance: Chance) -> Problem:
    groups, top_k, width = EXPERT_SIZES[chance.one_of(tuple(EXPERT_SIZES), "model")]
    n = chance.one_of((2 * width, width), "part")
    rows = top_k * chance.size(1, MAX_ROWS, "tokens")
    return GroupedGemmProblem(groups, rows, n, width, "zipf", "bfloat16")


def _distinct(problems: Iterator[Problem | None]) -> Iterator[Problem]:
    seen = set[Problem]()
    for problem in problems:
        if problem is not None and problem not in seen and _is_small(problem):
            seen.add(problem)
            yield problem


def _is_small(problem: Problem) -> bool:
    size = sum(operand.bytes for operand in problem.operands)
    is_wide = isinstance(problem, GroupedGemmProblem)  # experts' weights are large however few rows
    return problem.flops <= MAX_FLOPS and size <= (MAX_BYTES << 3 if is_wide else MAX_BYTES)
