"""What serves a shape that nobody tuned: the nearest tuned problem's kernels, where they passed.

The rule. Problems of one *class* differ in their sizes only, and in how attention's tensors lie in
memory: operation, types, mask and head dimension are equal. Between two of a class lies a
`distance` in octaves. A tuned problem lends an own config to a shape within `REACH` of it if

1. the config is legal there and needs the very kernels that were compiled for the tuned problem;
2. these kernels passed the gate at `LEAST_PASSED` or more of the shapes that `drawn` names around
   the tuned problem, in that layout too, and failed at none (`tuner sweep` and `tuner widen` run
   them there);
3. measured shapes enclose the asked one, and there they were faster than PyTorch's own kernels
   (`is_enclosed`), which answer where nothing is lent.

Of several configs the one with the least estimated time comes first: its time at the nearest
measured shape, scaled by what the family's cost estimate makes of the difference. From the recorded
GEMM of 4096 to that of 8192 this is 0.6 % off and puts the best of three first; the estimate alone
is 8 % off and calls them equal. Nothing is lent farther than `REACH`: what is best at
(16,16,2048,64) takes 1.25 times the best time at (1,16,1024,64), six octaves away, and longer than
cuDNN (cache/recordings).
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, KernelSpec
from tuner.families.vendor import BESIDE_PYTORCH
from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.measurement import Measurement
from tuner.problem import (
    DTYPE_BYTES,
    LAYOUTS,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.store.entry import Entry, is_vendor
from tuner.store.evidence import comparable, newest

Sizes = tuple[float, ...]
"""What a kernel sees of a problem's sizes, in octaves; batch and heads are one."""

REACH = 2.0
"""Octaves: sequences twice as long, or four times as many heads."""
DRAWN = 16
"""Shapes of the tuned problem's layout that `drawn` names."""
DRAWN_ELSEWHERE = 2
"""Shapes of each other layout."""
ANOTHER_LAYOUT = 0.5
"""Octaves between attention's layouts: a kernel reads the same bytes in another order."""
LEAST_PASSED = 4
"""A config whose kernels fit fewer of the drawn shapes stays where it was tuned."""
NEIGHBOURS = 2
"""Measured shapes that must be wins on either side of each size."""
MARGIN: Mapping[str, float] = {AttentionProblem.op: 0.02}
"""Share by which a win is faster than PyTorch's kernels, by operation."""
MARGIN_OF_OTHERS = 0.05
"""Of products, whose quick times vary by 2 to 4 % at the power limit."""

ASKED = 8
"""Tuned problems that are asked in turn whether they lend something."""

_ATTEMPTS = 1000
#: Fields in which problems of a class differ: sizes, and attention's layout, whose strides its
#: kernels are told when they run.
_FREE: Mapping[str, frozenset[str]] = {
    AttentionProblem.op: frozenset(
        {"batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "layout"}
    ),
    AttentionBackwardProblem.op: frozenset(
        {"batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "layout"}
    ),
    GemmProblem.op: frozenset({"m", "n", "k", "batch"}),
    SwigluProblem.op: frozenset({"m", "n", "k"}),
    GroupedGemmProblem.op: frozenset({"groups", "m", "n", "k"}),
    SoftmaxProblem.op: frozenset({"rows", "cols", "batch", "query_rows"}),
}


def class_pattern(problem: Problem) -> str:
    """A problem's key with ``*`` for what is free: equal within a class, and a GLOB that finds it.

    The GLOB of plain attention finds problems with a window or a soft cap too, whose keys have
    more fields: `distance` tells them apart. An operation without a rule is a class of its own for
    each problem.
    """
    kept = _kept(type(problem))
    parts = [
        f"{json.dumps(name)}:{json.dumps(value) if name == 'op' or name in kept else '*'}"
        for name, value in sorted(problem.to_json().items())
    ]
    return f"{{{','.join(parts)}}}"


@cache
def _kept(kind: type[Problem]) -> tuple[str, ...]:
    """The fields that are equal within a class."""
    free = _FREE.get(kind.op, frozenset())
    return tuple(field.name for field in fields(kind) if field.name not in free)


def distance(one: Problem, other: Problem) -> float:
    """Octaves between two problems: the sum over the axes; infinite between classes."""
    (class_one, here), (class_other, there) = _place(one), _place(other)
    if class_one != class_other:
        return math.inf
    turned = 0.0 if layout_of(one) == layout_of(other) else ANOTHER_LAYOUT
    return turned + _octaves(here, there)


def sizes(problem: Problem) -> Sizes:
    """A problem's place in its class."""
    return _place(problem)[1]


def _octaves(here: Sizes, there: Sizes) -> float:
    return sum(abs(a - b) for a, b in zip(here, there, strict=True))


def layout_of(problem: Problem) -> str:
    """How attention's tensors lie in memory; empty of other operations."""
    return problem.layout if isinstance(problem, AttentionProblem) else ""


def doublings(one: Problem, other: Problem) -> float:
    """Doublings between two problems' sizes, and one for every other difference: finite between
    the classes of an operation too.
    """
    here, there = _facts(one), _facts(other)

    def between(a: Any, b: Any) -> float:  # None where only one of them has a feature
        if type(a) is int and type(b) is int and a and b:
            return abs(math.log2(a / b))
        return float(a != b)

    return sum(between(here.get(name), there.get(name)) for name in {**here, **there})


@lru_cache(1 << 12)
def _facts(problem: Problem) -> Mapping[str, Any]:
    return problem.to_json()


def class_of(problem: Problem) -> Hashable:
    """Equal for two problems exactly where they are of one class."""
    return _place(problem)[0]


@lru_cache(1 << 16)
def _place(problem: Problem) -> tuple[tuple[Any, ...], Sizes]:
    """A problem's class and its place there, in octaves along each axis."""
    kept = tuple(getattr(problem, name) for name in _kept(type(problem)))
    return (type(problem), *kept), tuple(map(math.log2, _axes(problem)))


def _axes(problem: Problem) -> tuple[float, ...]:
    """What a kernel sees of the sizes; batch and heads are one, its number of matrices."""
    if isinstance(problem, AttentionProblem | AttentionBackwardProblem):
        group = problem.heads_q / problem.heads_kv
        return problem.batch * problem.heads_q, problem.seqlen_q, problem.seqlen_kv, group
    if isinstance(problem, GemmProblem):
        return problem.m, problem.n, problem.k, problem.batch
    if isinstance(problem, SwigluProblem):
        return problem.m, problem.n, problem.k
    if isinstance(problem, GroupedGemmProblem):
        return problem.m, problem.n, problem.k, problem.groups
    if isinstance(problem, SoftmaxProblem):
        return problem.batch * problem.rows, problem.cols
    return ()


def drawn(problem: Problem) -> tuple[Problem, ...]:
    """The shapes at which a tuned problem's kernels are checked before they serve others.

    Up to `DRAWN` of its class and layout within `REACH`: doubled, halved and odd sizes, groups of
    heads and unequal sequences; of attention's other layouts the problem itself and the first of
    these, `DRAWN_ELSEWHERE`. The same for the same problem, so that the store tells who passed.
    """
    rng = random.Random(problem.key)
    draw = _DRAWS.get(problem.op)
    found: dict[Problem, None] = {}
    for _ in range(_ATTEMPTS if draw else 0):
        if len(found) == DRAWN:
            break
        try:
            candidate = replace(problem, **draw(problem, rng)) if draw else problem
        except ConfigError:
            continue
        if candidate != problem and distance(problem, candidate) <= REACH:
            found[candidate] = None
    return *found, *_elsewhere(problem, tuple(found))


def _elsewhere(problem: Problem, found: Sequence[Problem]) -> Iterator[Problem]:
    """Attention's problem and the first of its shapes in the other layouts."""
    if isinstance(problem, AttentionProblem) and not problem.is_packed:
        alike = [p for p in found if isinstance(p, AttentionProblem)]
        near = [p for p in alike if distance(problem, p) <= REACH - ANOTHER_LAYOUT]
        for shape in [problem, *near][:DRAWN_ELSEWHERE]:
            for layout in LAYOUTS:
                if layout != problem.layout:
                    yield replace(shape, layout=layout)


def _size(rng: random.Random, size: int, step: int = 1) -> int:
    """Doubled, halved or kept half of the time, so that tiles still divide it; else anything."""
    if rng.random() < 0.5:
        return max(step, rng.choice((size, 2 * size, size // 2)))
    return max(step, round(size * 2 ** rng.uniform(-1, 1) / step) * step)


def _draw_attention(problem: Any, rng: random.Random) -> dict[str, int]:
    batch, heads_q, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
    match rng.randrange(6):
        case 0:
            batch = _size(rng, batch)
        case 1:
            heads_q, heads_kv = 2 * heads_q, 2 * heads_kv
        case 2:
            heads_q, heads_kv = heads_q // 2, heads_kv // 2
        case 3:
            heads_kv = rng.choice((2 * heads_kv, heads_kv // 2))
    seqlen_q = _size(rng, problem.seqlen_q)
    is_self = problem.seqlen_q == problem.seqlen_kv and rng.random() < 0.5
    seqlen_kv = seqlen_q if is_self else _size(rng, problem.seqlen_kv)
    return {
        "batch": batch,
        "heads_q": heads_q,
        # 0 would mean as many as there are query heads.
        "heads_kv": heads_kv or 1,
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
    }


def _draw_gemm(problem: Any, rng: random.Random) -> dict[str, int]:
    """M counts tokens and is anything; N and K are a model's, multiples of TMA's 16 bytes."""
    step = TMA_ALIGNMENT_BYTES // DTYPE_BYTES[problem.dtype]
    sizes = {"m": _size(rng, problem.m), "n": problem.n, "k": problem.k}
    name = rng.choice(("n", "k"))
    sizes[name] = _size(rng, sizes[name], rng.choice((step, 8 * step)))
    return sizes


def _draw_swiglu(problem: Any, rng: random.Random) -> dict[str, int]:
    """As of a GEMM; N in groups of 32, which are interleaved."""
    sizes = {"m": _size(rng, problem.m), "n": problem.n, "k": problem.k}
    name, step = rng.choice((("n", 32), ("k", 8), ("k", 64)))
    sizes[name] = _size(rng, sizes[name], step)
    return sizes


def _draw_grouped_gemm(problem: Any, rng: random.Random) -> dict[str, int]:
    """Rows and groups are anything; N and K are a model's, as of a GEMM."""
    sizes = _draw_gemm(problem, rng)
    return {**sizes, "groups": _size(rng, problem.groups)} if rng.random() < 0.5 else sizes


def _draw_softmax(problem: Any, rng: random.Random) -> dict[str, int]:
    group = problem.rows // problem.query_rows
    query_rows = _size(rng, problem.query_rows)
    return {
        "rows": group * query_rows,
        "query_rows": query_rows,
        "cols": _size(rng, problem.cols),
        "batch": rng.choice((problem.batch, 2 * problem.batch)),
    }


_DRAWS: Mapping[str, Callable[[Any, random.Random], dict[str, int]]] = {
    AttentionProblem.op: _draw_attention,
    AttentionBackwardProblem.op: _draw_attention,
    GemmProblem.op: _draw_gemm,
    SwigluProblem.op: _draw_swiglu,
    GroupedGemmProblem.op: _draw_grouped_gemm,
    SoftmaxProblem.op: _draw_softmax,
}


def lenders(entry: Entry) -> list[Measurement]:
    """The own kernels that an entry may lend, best first: a pin lets itself alone through."""
    ranked = (entry.winner,) if entry.pinned else entry.ranking
    return [m for m in ranked if not is_vendor(m.config)]


def is_pytorchs(config: Config) -> bool:
    """Whether a vendor's kernel is one that PyTorch calls by itself."""
    return is_vendor(config) and config.get("kernel") not in BESIDE_PYTORCH


def fits(problem: Problem, measurement: Measurement) -> bool:
    """Whether an own config is legal for a problem with the kernels that it was measured with."""
    needed = _kernels(measurement.problem, measurement.config)
    return _fits(problem, measurement, needed)


def _fits(
    problem: Problem, measurement: Measurement, needed: Mapping[str, KernelSpec] | None
) -> bool:
    config = measurement.config
    member = families().get(config.family)
    if member is None or needed is None:
        return False
    try:
        is_legal = not member.violations(problem, config, measurement.gpu)
        return is_legal and member.kernels(problem, config) == needed
    except INCOMPATIBLE_CONFIG_ERRORS:
        return False


def _kernels(problem: Problem, config: Config) -> Mapping[str, KernelSpec] | None:
    """What an own config compiles for a problem; None of a vendor's, and of another version's."""
    member = families().get(config.family)
    if member is None or member.is_vendor:
        return None
    try:
        return member.kernels(problem, config)
    except INCOMPATIBLE_CONFIG_ERRORS:
        return None


def may_serve(passed: int, failed: int) -> bool:
    """Whether a config may serve other shapes, by the number of shapes where its kernels passed
    and failed.
    """
    return passed >= LEAST_PASSED and not failed


class Loans:
    """What one tuned problem's entry lends, made ready to be asked of many problems.

    Args:
        entry: measured.
        evidence: measurements at `drawn(entry.problem)`. What does not count for the entry is left
            out (`tuner.store.evidence`); of one config at one shape the newest counts.
    """

    def __init__(self, entry: Entry, evidence: Iterable[Measurement]) -> None:
        self._problem = entry.problem
        nearby = list(evidence)
        rivals = _fastest_of_pytorchs(nearby, entry)
        self._lent: list[_Lent] = []
        for lender in lenders(entry):
            own = newest(nearby, lender).values()
            passed = sum(m.ok for m in own)
            if may_serve(passed, len(own) - passed):
                self._lent.append(_Lent.of(lender, [lender, *own], rivals))
        #: Shapes where a kernel of these and PyTorch's were timed, by layout: key, sizes, shape.
        self._shapes: dict[str, list[tuple[str, Sizes, Problem]]] = {}
        for shape in dict.fromkeys(shape for lent in self._lent for shape in lent.times):
            self._shapes.setdefault(layout_of(shape), []).append((shape.key, sizes(shape), shape))

    @property
    def configs(self) -> tuple[Config, ...]:
        """Those that passed around."""
        return tuple(lent.measurement.config for lent in self._lent)

    def to(self, problem: Problem) -> tuple[Measurement, ...]:
        """The configs that are lent to `problem`, which nobody tuned, best first.

        Returns:
            Measurements at the entry's problem; empty when it lends nothing.
        """
        if not self._lent or distance(problem, self._problem) > REACH:
            return ()
        here = sizes(problem)
        near = sorted(
            (_octaves(here, there), key, there, shape)
            for key, there, shape in self._shapes.get(layout_of(problem), ())
        )
        estimated = []
        for lent in self._lent:
            known = [(there, lent.times[shape]) for *_, there, shape in near if shape in lent.times]
            # Whether measured shapes enclose it costs less than whether it is legal there.
            m = lent.measurement
            if is_enclosed(here, [(there, time.is_win) for there, time in known]) and lent.fits(
                problem
            ):
                estimate = families()[m.config.family].predict_us(problem, m.config, m.gpu)
                estimated.append((known[0][1].over_estimate * estimate, m.config.digest, m))
        return tuple(m for _, _, m in sorted(estimated, key=lambda item: item[:2]))


def _fastest_of_pytorchs(nearby: Sequence[Measurement], entry: Entry) -> dict[Problem, float]:
    """Microseconds of PyTorch's fastest kernel by problem, the entry's own among them."""
    found = [m for m in nearby if is_pytorchs(m.config) and comparable(m, entry.winner)]
    found = [*sorted(found, key=lambda m: m.created_at), *entry.ranking]
    last = {(m.problem, m.config.digest): m for m in found if is_pytorchs(m.config)}
    fastest: dict[Problem, float] = {}
    for m in last.values():
        if m.latency_us is not None:
            fastest[m.problem] = min(m.latency_us, fastest.get(m.problem, math.inf))
    return fastest


class _Time(NamedTuple):
    """What a config did at a shape where PyTorch's kernels were timed too."""

    is_win: bool
    """It was faster than they by the margin."""
    over_estimate: float
    """Its time over its family's estimate."""


@dataclass(frozen=True)
class _Lent:
    """A config that passed around, and what it did there."""

    measurement: Measurement
    """At the tuned problem."""
    times: Mapping[Problem, _Time]

    @classmethod
    def of(
        cls, lender: Measurement, measured: Iterable[Measurement], rivals: Mapping[Problem, float]
    ) -> _Lent:
        member = families().get(lender.config.family)
        times = {}
        for m in measured:
            rival = rivals.get(m.problem)
            if member is None or m.latency_us is None or rival is None:
                continue
            with contextlib.suppress(*INCOMPATIBLE_CONFIG_ERRORS):
                estimate = member.predict_us(m.problem, m.config, m.gpu)
                margin = MARGIN.get(m.problem.op, MARGIN_OF_OTHERS)
                is_win = rival >= (1 + margin) * m.latency_us
                times[m.problem] = _Time(is_win, m.latency_us / estimate)
        return cls(lender, times)

    def fits(self, problem: Problem) -> bool:
        """As `fits`."""
        return _fits(problem, self.measurement, self._kernels)

    @cached_property
    def _kernels(self) -> Mapping[str, KernelSpec] | None:
        return _kernels(self.measurement.problem, self.measurement.config)


def is_enclosed(asked: Sizes, measured: Sequence[tuple[Sizes, bool]]) -> bool:
    """Whether measurements on both sides of every size say that a kernel wins.

    Of the measured shapes whose size is as large or larger the `NEIGHBOURS` nearest must be wins,
    and as many of those whose size is as small or smaller; at least one on each side, where fewer
    were measured. A shape of the same size is on both sides.

    Args:
        asked: the `sizes` of a problem.
        measured: the sizes of shapes of its class and layout where the kernel and PyTorch's were
            timed, the nearest first, and whether the kernel was the faster one by the margin.
    """
    for axis, size in enumerate(asked):
        above = [is_win for there, is_win in measured if there[axis] >= size]
        below = [is_win for there, is_win in measured if there[axis] <= size]
        if not all(side and all(side[:NEIGHBOURS]) for side in (above, below)):
            return False
    return bool(measured)


def nearest_first(problem: Problem, others: Iterable[Problem]) -> list[Problem]:
    """Of problems of one class the `ASKED` nearest within reach, nearest first; equally near ones
    in the order of keys.
    """
    near = [(away, other) for other in others if (away := distance(problem, other)) <= REACH]
    near = heapq.nsmallest(ASKED, near, key=lambda item: (item[0], item[1].key))
    return [other for _, other in near]
