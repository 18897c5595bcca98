"""Attention as three kernels: Q K^T, softmax, P V, over a few heads a launch.

The scores between the first two kernels are fp32. Scores in fp16 would halve the traffic, but
scores scaled by 30 fail the numerics gate. The spacing of fp16 at 128 is 0.125, an error of 12 %
after the exponential.

Few heads a launch keep the scores in L2, many fill the GPU and save launches. With `pdl` each
kernel after the first starts before its predecessor ends and waits for it on the device.

With `in_place` the softmax writes its 16-bit probabilities over the fp32 scores, so that P V reads
them with twice the row stride. Only the softmax applies the causal mask: both GEMMs are full. With
`streams`, which is not part of the space, launches of different heads are distributed over that
many streams.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product, zip_longest
from typing import ClassVar, NamedTuple, Self

from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families.base import (
    SCRATCH,
    Domain,
    Family,
    KernelSpec,
    Launch,
    Ref,
    group_by_kernels,
    posed,
)
from tuner.families.chip_work import Work
from tuner.families.gemm import Gemm, Matrix, gemm_launch
from tuner.families.softmax import Softmax, softmax_launch
from tuner.hardware import GRAPH_LAUNCH_US, HOPPER, TMA_ALIGNMENT_BYTES, Gpu
from tuner.problem import (
    DTYPE_BYTES,
    E4M3,
    MAX_EXTENT,
    AttentionProblem,
    GemmProblem,
    Operand,
    Problem,
    SoftmaxProblem,
)

STAGES: Mapping[str, Family] = {"qk": Gemm(), "softmax": Softmax(), "pv": Gemm()}
"""The family of each stage, in order of launch."""
#: Best configs of each stage that are combined, and combinations that are compiled at most.
BEST_OF_STAGE = 3
MAX_COMBINATIONS = 12
#: Most launches of each stage worth trying: what follows is bound by launching.
MAX_CHUNKS = 256
#: Streams that launches are dealt over at most.
MAX_STREAMS = 32
#: Share of a launch that programmatic dependent launch hides: an estimate, ranking only.
PDL_HIDDEN_SHARE = 0.6
SCORE_BYTES = 4
#: The probabilities are stored times this and P V divides by it: a power of two, so exact. Rows of
#: 32768 equal keys have probabilities of 3e-5, where fp16 is subnormal and loses digits.
PROBABILITY_FACTOR = 4096.0


class ThreeKernelAttention(Family):
    """Immutable; `with_stages` gives another instance whose space is built from the winners.

    Args:
        winners: best configs of each stage, best first; configs of other families (a vendor's) are
            passed over, and a stage without any takes its family's seeds.
    """

    name: ClassVar[str] = "three_kernel_attention"
    op: ClassVar[str] = AttentionProblem.op
    kind = "three kernels"
    capabilities = (HOPPER,)
    takes_extras = False
    #: Slower than the fused kernel by 3 to 7 at every measured length
    #: (an H200, 22 November 2026), and its stages compile longest.
    is_fallback = True
    runtime_parameters: ClassVar[frozenset[str]] = frozenset(
        {"heads_per_launch", "pdl", "in_place", "streams"}
    )
    domains: ClassVar[Mapping[str, Domain]] = {
        "heads_per_launch": range(1, MAX_EXTENT + 1),
        "pdl": (False, True),
        "in_place": (False, True),
        "streams": range(1, MAX_STREAMS + 1),
    }
    optional = frozenset({"streams"})
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        "heads_per_launch": (1, 2, 3, 4, 8, 16),
        "streams": (),
    }
    stage_families = STAGES

    def __init__(self, winners: Mapping[str, Sequence[Config]] | None = None) -> None:
        self._winners = {
            name: tuple(config for config in configs if config.family == STAGES[name].name)
            for name, configs in (winners or {}).items()
        }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionProblem):
            return reason
        elements = TMA_ALIGNMENT_BYTES // DTYPE_BYTES[problem.dtype]
        if problem.seqlen_kv % elements:
            return (
                f"seqlen_kv={problem.seqlen_kv}: the probabilities are read by TMA, which needs a "
                f"multiple of {elements}"
            )
        try:
            _all_heads(problem)
        except ConfigError as exc:
            return f"the scores of all heads are too many: {exc}"
        return ""

    def stages(self, problem: Problem) -> Mapping[str, Problem]:
        problem = _attention(problem)
        if problem.dtype == E4M3 or problem.is_packed:
            return {}
        return _all_heads(problem)._asdict()

    def with_stages(self, winners: Mapping[str, Sequence[Config]]) -> Self:
        return type(self)(winners)

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem = _attention(problem)
        heads = _heads_violations(problem, config["heads_per_launch"])
        if reasons := heads or _streams_violations(problem, config):
            return reasons
        problems = _chunk_problems(problem, config["heads_per_launch"])._asdict()
        return [
            f"{name}: {violation}"
            for name, family in STAGES.items()
            for violation in family.violations(problems[name], config.stages[name], gpu)
        ]

    def _groups(self, problem: AttentionProblem, gpu: Gpu) -> Iterator[list[Config]]:
        launches: list[dict[str, Value]] = [
            {"pdl": pdl, "in_place": in_place}
            for pdl, in_place in product((True, False), (True, False))
        ]
        for stages in self._combinations(problem, gpu):
            for heads in launchable_heads(problem):
                yield [
                    Config(self.name, {"heads_per_launch": heads, **launch}, stages)
                    for launch in launches
                ]

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """A member of the space with one stage drawn anew by that stage's family."""
        member = rng.choice(members)
        name = rng.choice(list(STAGES))
        stage = self.stages(problem)[name]
        drawn = STAGES[name].draw(stage, gpu, _stage_space(name, stage, gpu), rng)
        return Config(self.name, member.params, {**member.stages, name: drawn})

    def seeds(
        self, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int
    ) -> list[Config]:
        """Each combination's fastest launch by estimate, in the order of `space`: the ranks of
        measured stages say more of a combination than the estimate does.
        """
        ranked = [
            sorted(group, key=lambda config: self.predict_us(problem, config, gpu))
            for group in group_by_kernels(self, space)
        ]
        rounds = chain.from_iterable(zip_longest(*ranked))
        return [config for config in rounds if config is not None][:count]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problems = self.stages(problem)
        return {
            f"{name}.{kernel}": spec
            for name, family in STAGES.items()
            for kernel, spec in family.kernels(problems[name], config.stages[name]).items()
        }

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        problem = _attention(problem)
        return [
            replace(launch, lane=chunk.lane)
            for chunk in _chunks(problem, config["heads_per_launch"], config.get("streams", 1))
            for launch in _chunk_launches(problem, config, scale, chunk)
        ]

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        """The scores of one launch's heads and, if not in place, their probabilities; a set for
        each stream.
        """
        return _lane_bytes(_attention(problem), config) * int(config.get("streams", 1))

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        attention = _attention(problem)
        heads = config["heads_per_launch"]
        chunks = attention.batch * attention.heads_q // heads
        # The heads of one launch, as a problem of their own.
        key_heads = max(1, heads * attention.heads_kv // attention.heads_q)
        chunk = replace(attention, batch=1, heads_q=heads, heads_kv=key_heads)
        works = []
        for name, part in self.stages(chunk).items():
            (work,) = self.stage_families[name].chip_work(part, config.stages[name], gpu)
            works.append(replace(work, kernel=name, launches=chunks))
        return tuple(works)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        problem = _attention(problem)
        heads: int = config["heads_per_launch"]
        problems = _chunk_problems(problem, heads)._asdict()
        chunk_us = sum(
            family.predict_us(problems[name], config.stages[name], gpu)
            for name, family in STAGES.items()
        )
        chunks = problem.batch * problem.heads_q // heads
        hidden_us = PDL_HIDDEN_SHARE * GRAPH_LAUNCH_US * (len(STAGES) * chunks - 1)
        return chunks * chunk_us - (hidden_us if config["pdl"] else 0.0)

    def compile_digest(self, config: Config) -> str:
        stages = {name: STAGES[name].compile_digest(stage) for name, stage in config.stages.items()}
        return Config(self.name, stages).digest

    def _combinations(self, problem: AttentionProblem, gpu: Gpu) -> list[dict[str, Config]]:
        """Combinations of the stages' configs, ordered by the sum of ranks."""
        ranked = []
        for name, stage in self.stages(problem).items():
            best = self._winners.get(name, ())
            if not best:
                space = _stage_space(name, stage, gpu)
                best = tuple(STAGES[name].seeds(stage, gpu, space, BEST_OF_STAGE))
            ranked.append(best[:BEST_OF_STAGE])
        combinations = product(*(range(len(best)) for best in ranked))
        ranks = sorted(combinations, key=lambda combination: (sum(combination), max(combination)))
        return [
            {name: best[rank] for name, best, rank in zip(STAGES, ranked, combination, strict=True)}
            for combination in ranks[:MAX_COMBINATIONS]
        ]


def _attention(problem: Problem) -> AttentionProblem:
    return posed(problem, AttentionProblem, ThreeKernelAttention.name)


class _Stages(NamedTuple):
    """The problem of each stage, in the order of `STAGES`."""

    qk: GemmProblem
    softmax: SoftmaxProblem
    pv: GemmProblem


@dataclass(frozen=True)
class _Chunk:
    """The heads of one launch: `problems` of its stages and where its operands begin."""

    problems: _Stages
    batch_index: int
    head: int
    is_first: bool
    lane: int


def launchable_heads(problem: AttentionProblem) -> list[int]:
    """Query heads a launch worth trying: all that one launch can take, then at most half as many
    each time, down to `MAX_CHUNKS` launches.
    """
    total = problem.batch * problem.heads_q
    counts: list[int] = []
    for heads in range(total, 0, -1):
        if counts and (2 * heads > counts[-1] or heads * MAX_CHUNKS < total):
            continue
        if not _heads_violations(problem, heads):
            counts.append(heads)
    return counts


def _heads_violations(problem: AttentionProblem, heads: int) -> list[str]:
    """A launch's heads are one batch of matrices at constant strides.

    Query heads of one group follow each other in (B, H, S, D), so a group, or a part of one,
    stacks its rows over its key head. With queries in (B, S, H, D) neither stacking nor a step
    from one batch element to the next has a constant stride.
    """
    total, group = problem.batch * problem.heads_q, problem.heads_q // problem.heads_kv
    if total % heads:
        return [f"heads_per_launch={heads} does not divide B x H = {total}"]
    if problem.layout != "bhsd":
        if group > 1 and heads > 1:
            return [
                f"heads_per_launch={heads}: grouped heads in layout {problem.layout} are launched "
                "one by one"
            ]
        if problem.heads_q % heads:
            return [
                f"heads_per_launch={heads} does not divide H={problem.heads_q} "
                f"(layout {problem.layout})"
            ]
    elif heads % group and group % heads:
        return [f"heads_per_launch={heads} neither divides nor is a multiple of a group of {group}"]
    return []


def _streams_violations(problem: AttentionProblem, config: Config) -> list[str]:
    """Each stream has heads of its own, and kernels that start early know of one stream only."""
    streams, chunks = config.get("streams", 1), _count_chunks(problem, config)
    if streams > chunks:
        return [f"streams={streams} is out of range (allowed: 1 to the {chunks} launches)"]
    if streams > 1 and config["pdl"]:
        return [f"streams={streams} with pdl=True: what comes before may be on another stream"]
    return []


def _count_chunks(problem: AttentionProblem, config: Config) -> int:
    return problem.batch * problem.heads_q // int(config["heads_per_launch"])


def _lane_bytes(problem: AttentionProblem, config: Config) -> int:
    heads: int = config["heads_per_launch"]
    width = SCORE_BYTES + (0 if config["in_place"] else DTYPE_BYTES[problem.dtype])
    return heads * problem.seqlen_q * problem.seqlen_kv * width


def _stage_problems(problem: AttentionProblem, batch: int, heads: int) -> _Stages:
    """`batch` matrices of `heads` stacked query heads each."""
    rows, cols, depth = heads * problem.seqlen_q, problem.seqlen_kv, problem.head_dim
    dtype = problem.dtype
    return _Stages(
        qk=GemmProblem(rows, cols, depth, batch, dtype, "float32", "row", "col"),
        softmax=SoftmaxProblem(rows, cols, batch, problem.seqlen_q, problem.is_causal, dtype),
        pv=GemmProblem(rows, depth, cols, batch, dtype, dtype, "row", "row"),
    )


def _all_heads(problem: AttentionProblem) -> _Stages:
    group = problem.heads_q // problem.heads_kv
    return _stage_problems(problem, problem.batch * problem.heads_kv, group)


def _chunk_problems(problem: AttentionProblem, heads: int) -> _Stages:
    stacked = min(heads, problem.heads_q // problem.heads_kv)
    return _stage_problems(problem, heads // stacked, stacked)


def _chunks(problem: AttentionProblem, heads: int, streams: int) -> Iterator[_Chunk]:
    problems = _chunk_problems(problem, heads)
    for number, first in enumerate(range(0, problem.batch * problem.heads_q, heads)):
        place = divmod(first, problem.heads_q)
        yield _Chunk(problems, *place, is_first=first == 0, lane=number % streams)


def _chunk_launches(
    problem: AttentionProblem, config: Config, scale: float, chunk: _Chunk
) -> Iterator[Launch]:
    qk, softmax, pv = chunk.problems
    query, key, value, out = problem.operands
    group = problem.heads_q // problem.heads_kv
    stacked = qk.m // problem.seqlen_q
    key_head = chunk.head // group
    base = chunk.lane * _lane_bytes(problem, config)
    scores = Ref(SCRATCH, base)
    in_place, score_elements = config["in_place"], qk.batch * qk.m * qk.n
    # Rows of 16-bit elements at the stride of the fp32 rows they lie in.
    stride = 2 * qk.n if in_place else qk.n
    probabilities = scores if in_place else Ref(SCRATCH, base + SCORE_BYTES * score_elements)
    yield gemm_launch(
        qk,
        config.stages["qk"],
        (
            Matrix(
                _head(query, chunk.batch_index, chunk.head),
                query.strides[2],
                query.strides[1] * stacked,
            ),
            Matrix(_head(key, chunk.batch_index, key_head), key.strides[2], key.strides[1]),
            Matrix(scores, qk.n, qk.m * qk.n),
        ),
        1.0,
        kernel="qk.gemm",
        # What runs before this call need not know of programmatic launches.
        pdl=config["pdl"] and not chunk.is_first,
    )
    yield softmax_launch(
        softmax,
        scale,
        scores,
        probabilities,
        kernel="softmax.softmax",
        stride_probabilities=stride,
        factor=PROBABILITY_FACTOR,
        pdl=config["pdl"],
    )
    yield gemm_launch(
        pv,
        config.stages["pv"],
        (
            Matrix(probabilities, stride, pv.m * stride),
            Matrix(_head(value, chunk.batch_index, key_head), value.strides[2], value.strides[1]),
            Matrix(
                _head(out, chunk.batch_index, chunk.head), out.strides[2], out.strides[1] * stacked
            ),
        ),
        1.0 / PROBABILITY_FACTOR,
        kernel="pv.gemm",
        pdl=config["pdl"],
    )


def _head(operand: Operand, batch_index: int, head: int) -> Ref:
    offset = batch_index * operand.strides[0] + head * operand.strides[1]
    return Ref(operand.name, offset * DTYPE_BYTES[operand.dtype])


@lru_cache(maxsize=8)
def _stage_space(name: str, stage: Problem, gpu: Gpu) -> Sequence[Config]:
    return STAGES[name].space(stage, gpu)
