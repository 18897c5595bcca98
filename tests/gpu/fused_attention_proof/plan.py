"""Which kernels are proven, and on which cases: few to compile, every lever value among them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from tuner.config import Config, Value
from tuner.families.base import Family, KernelSpec, group_by_kernels
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem
from tuner.selection.reader import lookup

from .cases import SUITE, Case

#: Compiled kernels for each head dimension, mask and type.
PER_COMBINATION = 2
#: Problems whose spaces together hold every lever: small and large, heads in groups of each size
#: that cases have, decoding.
PROBES = (
    "B=1,H=16,S=1024",
    "B=16,H=16,S=2048",
    "B=1,H=8,S=8192",
    "B=1,H=16,SQ=1,SKV=8192",
    "B=2,H=32,HKV=16,S=1024",
    "B=2,H=32,HKV=8,S=4096",
    "B=1,H=32,HKV=8,SQ=1,SKV=8192",
    "B=1,H=32,HKV=4,SQ=16,SKV=8192",
    "B=2,H=32,HKV=2,SQ=16,SKV=8192",
)
#: Of some combinations (head dimension, causal, type) what their first kernels have, whatever else
#: is drawn: levers that only mean something together.
TOGETHER: dict[tuple[int, bool, str], tuple[dict[str, Value | None], ...]] = {
    (64, False, "float16"): (
        {"key_groups": 4, "stages_output": True, "packed_heads": None},
        {"key_groups": 2, "warp_groups": 4, "packed_heads": 8, "stages_output": None},
    ),
    (64, False, "bfloat16"): (
        {"stages_output": True, "persistent": True, "packed_heads": None},
        {"key_groups": 4, "packed_heads": 4, "stages_output": None},
    ),
    (64, True, "float16"): (
        {"stages_output": True, "persistent": True, "packed_heads": 2},
        {"key_groups": 4, "packed_heads": None, "stages_output": None},
    ),
    (64, True, "bfloat16"): (
        {"key_groups": 2, "warp_groups": 4, "stages_output": True},
        {"skips_masked": "halves", "warp_groups": 3},
    ),
    (96, False, "bfloat16"): ({"stages_output": True, "persistent": False, "packed_heads": 8},),
    (96, True, "float16"): ({"key_groups": 2, "stages_output": None, "packed_heads": None},),
    (128, False, "float16"): ({"key_groups": 2, "stages_output": None, "packed_heads": 8},),
    (128, False, "bfloat16"): ({"stages_output": True, "persistent": False, "packed_heads": 16},),
    (128, True, "bfloat16"): (
        {"key_groups": 2, "stages_output": True, "packed_heads": None},
        {"skips_masked": "halves", "packed_heads": None},
    ),
    (128, True, "float16"): ({"stages_output": True, "persistent": True, "packed_heads": 2},),
    (192, False, "float16"): ({"stages_output": True, "persistent": False, "packed_heads": 4},),
    (256, True, "float16"): ({"skips_masked": "blocks"},),
    (256, True, "bfloat16"): ({"stages_output": True, "persistent": True, "packed_heads": None},),
}
#: Kernels of a combination among which the first are chosen; a space has a thousand.
MAX_COMPARED = 100
#: Settings of the run-time parameters that one kernel computes one case with.
MAX_SETTINGS = 3
#: Bytes of an output from which a problem is launched only as its own space would.
LARGE_BYTES = 16 << 20

Fact = tuple[str, Value]
Combination = tuple[int, bool, str]
"""Head dimension, causal, type."""


@dataclass(frozen=True)
class Kernel:
    """Configs of one combination that share all their compiled kernels."""

    combination: Combination
    members: tuple[Config, ...]
    origin: str = "chosen"
    """Or `winner`."""

    @property
    def facts(self) -> set[Fact]:
        return {fact for config in self.members for fact in config.params.items()}


@dataclass(frozen=True)
class Trial:
    """One config on one case."""

    case: Case
    config: Config


def combination_of(case: Case) -> Combination:
    return case.instance, case.problem.is_causal, case.problem.dtype


def candidates(family: Family, gpu: Gpu, combination: Combination) -> list[Kernel]:
    """Everything that the family would try for problems of one combination.

    Grouped by what is compiled: one kernel serves configs of different problems.
    """
    head_dim, causal, dtype = combination
    groups: dict[tuple[KernelSpec, ...], dict[Config, None]] = {}
    for probe in PROBES:
        problem = AttentionProblem.parse(f"{probe},D={head_dim},causal={causal},dtype={dtype}")
        for alike in group_by_kernels(family, family.space(problem, gpu)):
            needed = tuple(family.kernels(problem, alike[0]).values())
            groups.setdefault(needed, {}).update(dict.fromkeys(alike))
    return [Kernel(combination, tuple(configs)) for configs in groups.values()]


def with_settings(family: Family, kernel: Kernel) -> Kernel:
    """`kernel` with every setting of the run-time parameters, that of other problems too; one that
    a member lacks may be absent.
    """
    domains = {
        name: (*family.tried(name), *({None} & {c.get(name) for c in kernel.members}))
        for name in sorted(family.runtime_parameters)
    }
    found = dict.fromkeys(kernel.members)
    for config in kernel.members:
        for setting in product(*domains.values()):
            params = {**config.params, **dict(zip(domains, setting, strict=True))}
            present = {name: value for name, value in params.items() if value is not None}
            found[Config(config.family, present, config.stages)] = None
    return Kernel(kernel.combination, tuple(found), kernel.origin)


def choose(
    family: Family, gpu: Gpu, cases: Sequence[Case], each: int = PER_COMBINATION
) -> list[Kernel]:
    """`each` kernels of every combination of the cases, and more until each case can be computed
    and each value of each lever is in one.

    One at a time: the kernel that computes the most cases for which none is chosen; among equals
    with the most values that no chosen one has; then with the most that none has under this mask;
    then at this head dimension; then whichever a shuffle puts first, so that values are mixed and
    not taken in the order of the space.
    """
    waiting: dict[Combination, set[AttentionProblem]] = {}
    for case in cases:
        waiting.setdefault(combination_of(case), set()).add(case.problem)
    pools = {found: candidates(family, gpu, found) for found in waiting}
    for found, pool in pools.items():
        random.Random(str(found)).shuffle(pool)
        pool[:] = [k for k in pool if next(_served(family, gpu, k, waiting[found]), None)]
    seen: set[object] = set()
    chosen: list[Kernel] = []

    def take(
        pool: Sequence[Kernel], having: Mapping[str, Value | None] = MappingProxyType({})
    ) -> None:
        left = [kernel for kernel in pool if kernel not in chosen]
        left = [kernel for kernel in left if _has(kernel, having)][:MAX_COMPARED]
        served = {k: set(_served(family, gpu, k, waiting[k.combination])) for k in left}
        if left:
            best = max(left, key=lambda k: (len(served[k]), *(len(m - seen) for m in _marks(k))))
            waiting[best.combination] -= served[best]
            seen.update(*_marks(best))
            chosen.append(best)

    for number in range(each):
        for found, pool in pools.items():
            together = TOGETHER.get(found, ())[number : number + 1]
            take(pool if together else pool[:MAX_COMPARED], *together)
    for found, pool in pools.items():
        while any(next(_served(family, gpu, k, waiting[found]), None) for k in pool):
            take(pool)
    everything = [kernel for pool in pools.values() for kernel in pool]
    wanted = set().union(*(kernel.facts for kernel in everything))
    while not wanted <= seen:
        take([kernel for kernel in everything if kernel.facts - seen])
    return [with_settings(family, kernel) for kernel in chosen]


def _has(kernel: Kernel, having: Mapping[str, Value | None]) -> bool:
    """Whether a member has these values; None where it lacks the parameter."""
    return any(
        all(config.params.get(name) == value for name, value in having.items())
        for config in kernel.members
    )


def _served(
    family: Family, gpu: Gpu, kernel: Kernel, problems: Iterable[AttentionProblem]
) -> Iterator[AttentionProblem]:
    """The problems that a member is legal for."""
    for problem in problems:
        if any(not family.violations(problem, config, gpu) for config in kernel.members):
            yield problem


def _marks(kernel: Kernel) -> tuple[set[object], ...]:
    head_dim, causal, _ = kernel.combination
    facts = kernel.facts
    return set(facts), {(causal, fact) for fact in facts}, {(head_dim, fact) for fact in facts}


def winners(family: Family, gpu: Gpu, known: Iterable[Kernel]) -> list[Kernel]:
    """The best own config of every suite problem in the store, else in the shipped entries.

    One with other parameters than any `known` kernel is of an older template, and left out.
    """
    names = {frozenset(config.params) for kernel in known for config in kernel.members}
    found: dict[Kernel, None] = {}
    for (batch, heads, heads_kv, length, head_dim), causal in product(SUITE, (False, True)):
        problem = AttentionProblem(length, length, head_dim, batch, heads, heads_kv, causal)
        answer = lookup(problem, gpu=gpu)
        ranking = answer.entry.ranking if answer and answer.kind != "rule" else ()
        best = next((m.config for m in ranking if m.config.family == family.name), None)
        if best is not None and frozenset(best.params) in names:
            found[Kernel((head_dim, causal, problem.dtype), (best,), "winner")] = None
    return list(found)


def everything(family: Family, gpu: Gpu, cases: Sequence[Case]) -> list[Kernel]:
    """The chosen kernels and the winners."""
    chosen = choose(family, gpu, cases)
    return [*chosen, *winners(family, gpu, chosen)]


def trials(
    family: Family, gpu: Gpu, kernels: Sequence[Kernel], cases: Sequence[Case]
) -> list[Trial]:
    """Every case on every kernel of its combination that can compute it, case by case."""
    by_combination: dict[Combination, list[Kernel]] = {}
    for kernel in kernels:
        by_combination.setdefault(kernel.combination, []).append(kernel)
    found: dict[Trial, None] = {}
    for case in cases:
        draw = random.Random(case.label())
        usual = _usual_settings(family, gpu, case.problem)
        for kernel in by_combination.get(combination_of(case), ()):
            legal = [
                config
                for config in kernel.members
                if not family.violations(case.problem, config, gpu)
                and (usual is None or _setting(family, config) in usual)
            ]
            for config in draw.sample(legal, min(len(legal), MAX_SETTINGS)):
                found[Trial(case, config)] = None
    return list(found)


def _usual_settings(
    family: Family, gpu: Gpu, problem: AttentionProblem
) -> set[tuple[Value | None, ...]] | None:
    """Settings of the run-time parameters that a large problem's own space holds; None, for any,
    where the problem is small. 64 splits of a large one would fill the memory with workspace.
    """
    if problem.output.bytes <= LARGE_BYTES:
        return None
    return {_setting(family, config) for config in family.space(problem, gpu)}


def _setting(family: Family, config: Config) -> tuple[Value | None, ...]:
    return tuple(config.get(name) for name in sorted(family.runtime_parameters))


def specs(family: Family, wanted: Iterable[tuple[Problem, Config]]) -> list[KernelSpec]:
    """The distinct kernels that configs need for problems."""
    found: dict[KernelSpec, None] = {}
    for problem, config in wanted:
        found |= dict.fromkeys(family.kernels(problem, config).values())
    return list(found)
