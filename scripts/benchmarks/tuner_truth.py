"""A problem's choice beside every built kernel of every family, in one interleaved pass.

A first pass times all kernels that are built here and take the problem, with the run-time variants
of least estimate. The final pass has the fastest `FINALISTS` of them, the choice, PyTorch and
peers. Neighbours of the problem are timed by the choice's kernel and by the finalists. Nothing is
compiled.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.harness import Row
from benchmarks.own_plans import built_artifacts, own_plan
from benchmarks.tuner_problems import Judged, neighbours
from tuner import settings
from tuner.base import document
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families, families_of
from tuner.families.base import Family, KernelSpec
from tuner.families.by_operation import rule_of
from tuner.families.rule import RuleSelection
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.search import pool
from tuner.selection.choice import Selection
from tuner.selection.portfolio import serving, shipped
from tuner.store.entry import is_vendor

VARIANTS, FINALISTS, NEAR_FINALISTS = 2, 5, 2
"""Variants of a kernel, and fastest kernels of the final pass and of the neighbours' passes."""
MAX_FINALISTS = 8
"""Most kernels that need no first pass."""
MAX_KERNELS, MAX_ESTIMATE = 20, 2.5
"""Kernels of a problem that are timed, and their longest estimate over the shortest."""
FIRST_US, SURVEYED_US, FINAL_US = 3e4, 1e5, 3e5
"""Microseconds of all rounds of a pass, if these are more than the fewest."""
INDUCTOR, HELION = "inductor", "helion"
"""Tuners whose kernel a product is timed beside."""
RANKED = 3
"""Own kernels of a selection that are compiled for a run."""
ENABLED = f"{rows.TUNER} enabled"
"""PyTorch's operator under `tuner.enable`: the tuner's answer once more."""
Operands = Callable[[int], Sequence[Any]]
"""Operands of the copies of a call, in the problem's order."""


def own_name(config: Config) -> str:
    """Name of an own kernel's contender."""
    return f"{rows.TUNER} {config.digest[:6]}"


def selection_of(problem: Problem, gpu: Gpu) -> Selection | RuleSelection | None:
    """The shipped data's selection for a problem, whatever is decided or built here."""
    if rule := rule_of(problem):
        return rule.select(problem, gpu) if rule.serves(problem, gpu) else None
    mine = next((one for one in serving(shipped(), gpu) if one.op == problem.op), None)
    return None if mine is None else mine.select(problem)


def kernels_of(problem: Problem, config: Config) -> Mapping[str, KernelSpec]:
    """Specs of a config's kernels."""
    return families()[config.family].kernels(problem, config)


def launched(problem: Problem, gpu: Gpu) -> Config | None:
    """Config of the kernel that an untuned call launches here; None: PyTorch's."""
    from tuner.selection.kernels import lists

    selection = selection_of(problem, gpu)
    for _, config in selection.own() if selection is not None else ():
        if not isinstance(lists.proven(kernels_of(problem, config), gpu.compute_capability), str):
            return config
    return None


def wanted(case: Judged, gpu: Gpu) -> list[KernelSpec]:
    """Kernels that a run without sweeps needs: those that the selection ranks first, here and at
    the neighbours.
    """
    specs: dict[KernelSpec, None] = {}
    for place in (case, *neighbours(case)):
        selection = selection_of(place.problem, gpu)
        for config in ranked(selection, RANKED if place is case else 1):
            specs |= dict.fromkeys(kernels_of(place.problem, config).values())
    return list(specs)


def ranked(selection: Selection | RuleSelection | None, count: int) -> list[Config]:
    """The own kernels that a selection ranks first."""
    if selection is None:
        return []
    every = selection.own() if isinstance(selection, RuleSelection) else selection.ranked()
    return [config for _, config in islice(every, count)]


def _built_keys() -> frozenset[str | None]:
    """Keys of the specs whose kernels lie in the cache, also those of other versions."""
    return frozenset(map(_key_of, settings.artifacts_dir().glob("*/meta.json")))


@cache
def _key_of(meta: Path) -> str | None:
    """Key of an artifact's spec; None of a library without one."""
    facts = document.parse(meta.read_bytes())["facts"]
    return KernelSpec(facts["template"], facts["variables"]).key if "variables" in facts else None


def built(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs of the built kernels that take a problem, with their first variants by estimate.
    Kernels whose estimate is far above the shortest are left out.
    """
    keys, groups = _built_keys(), defaultdict[tuple[str, str], dict[Config, float]](dict)
    for family in families_of(problem.op).values():
        if family.is_vendor or family.is_fallback or family.supports(problem, gpu):
            continue
        for config in [*_portfolios(problem, family, gpu), *family.space(problem, gpu)]:
            group = groups[family.name, family.compile_digest(config)]
            group[config] = family.predict_us(problem, config, gpu)
    estimates = []
    for group in groups.values():
        specs = kernels_of(problem, next(iter(group))).values()
        if all(spec.key in keys for spec in specs):
            variants = sorted((us, config.digest, config) for config, us in group.items())
            estimates.append(variants[:VARIANTS])
    estimates.sort(key=lambda variants: variants[0][0])
    least = estimates[0][0][0] if estimates else 0.0
    near = [variants for variants in estimates if variants[0][0] <= MAX_ESTIMATE * least]
    return [config for variants in near[:MAX_KERNELS] for *_, config in variants]


def _portfolios(problem: Problem, family: Family, gpu: Gpu) -> Iterable[Config]:
    """A portfolio's or a rule's configs, which may lie outside of the family's space."""
    selection = selection_of(problem, gpu)
    if isinstance(selection, RuleSelection):
        return [config for _, config in selection.own() if config.family == family.name]
    (mine,) = (one for one in serving(shipped(), gpu) if one.op == problem.op)
    groups = pool.of_portfolio(problem, gpu, mine, is_whole=True)
    return [config for group in groups for config in group if config.family == family.name]


def surveyed(case: Judged) -> Row:
    """All built kernels of a problem and PyTorch's in one pass. The row has the kernels' configs,
    and the name of the own one that the selection ranks first.
    """
    from tuner.runtime.call import devices

    gpu = devices.gpu_of(0)
    first = ranked(selection_of(case.problem, gpu), RANKED)
    configs = list(dict.fromkeys([*first, *built(case.problem, gpu)]))
    row = timed(case, configs, SURVEYED_US)
    named = {own_name(config): config.to_json() for config in configs}
    return {**row, "configs": named, "kernels": len(configs), "first": next(iter(named), None)}


def own_calls(
    problem: Problem, configs: Iterable[Config], operands: Operands
) -> dict[str, Callable[[int], Any]]:
    """Calls of built kernels by the names of their contenders."""
    scale = problem.head_dim**-0.5 if isinstance(problem, AttentionProblem) else 1.0
    calls: dict[str, Callable[[int], Any]] = {}
    for config in configs:
        if (plan := _plan(problem, config, scale)) is not None:
            calls[own_name(config)] = _call(problem, plan, operands)
    return calls


def _call(problem: Problem, plan: Any, operands: Operands) -> Callable[[int], Any]:
    """A plan's call, whose output has the shape of PyTorch's."""
    if not isinstance(problem, GemmProblem):
        return lambda i: plan.run_uncounted(*operands(i))
    rows_columns = problem.m, problem.n  # a product has its batch before
    return lambda i: plan.run_uncounted(*operands(i)).view(rows_columns)


def _plan(problem: Problem, config: Config, scale: float = 1.0) -> Any:
    """The plan of a config; None where a kernel is not built, or it has no plan."""
    artifacts = built_artifacts(kernels_of(problem, config))
    if isinstance(artifacts, str):
        return None
    plan = own_plan(problem, config, artifacts, scale)
    return None if isinstance(plan, str) else plan


def timed(
    case: Judged,
    configs: Sequence[Config],
    budget_us: float,
    *,
    compiles: bool = False,
    peers: bool = False,
    others: Callable[[Operands], dict[str, Callable[[int], Any]]] = lambda operands: {},
) -> Row:
    """One pass over PyTorch, the tuner's call and some built kernels; also over Inductor where it
    `compiles`, and over `peers` and `others`.
    """
    from benchmarks.cliffs_calls import measured

    def further(operands: Operands) -> dict[str, Callable[[int], Any]]:
        return {**own_calls(case.problem, configs, operands), **others(operands)}

    return measured(case.call, compiles, further, budget_us, peers)


def judged(case: Judged, choice: Config | None, winners: Sequence[Config] = ()) -> Row:
    """The choice beside the finalists of all built kernels, here and at the neighbours.

    Args:
        case: the problem.
        choice: config of the choice; None: PyTorch's kernel, or where the call itself is judged.
        winners: further configs of the final pass.
    """
    from tuner.runtime.call import devices

    gpu, start = devices.gpu_of(0), time.monotonic()
    always = [config for config in (choice, *winners) if config is not None]
    finalists = list(dict.fromkeys([*always, *built(case.problem, gpu)]))
    by_name, first = {own_name(config): config for config in finalists}, dict[str, float]()
    if len(finalists) > MAX_FINALISTS:
        first = _own_times(timed(case, finalists, FIRST_US), by_name)
        fastest = [by_name[name] for name in [*first][:FINALISTS]]
        finalists = list(dict.fromkeys([*always, *fastest]))
    row = timed(case, finalists, FINAL_US, peers=True)
    fastest = [by_name[name] for name in [*_own_times(row, by_name)][:NEAR_FINALISTS]]
    near = {}
    for place in neighbours(case):
        us = timed(place, list(dict.fromkeys([*always, *fastest])), FIRST_US)["us"]
        near[place.problem.label()] = {name: us[name] for name in us if is_truth(name)}
    return {
        **row,
        **{"kernels": len(first or finalists), "near": near, "first_us": first},
        "took_s": round(time.monotonic() - start, 2),
        "choice": None if choice is None else choice.to_json(),
        "artifacts": {} if choice is None else _sha256(case.problem, choice),
        "extra_mib": 0.0 if choice is None else _workspace_mib(case.problem, choice),
    }


def _own_times(row: Row, by_name: Mapping[str, Config]) -> dict[str, float]:
    """Times of a pass by own kernels, the shortest first."""
    own = ((us, name) for name, us in row["us"].items() if name in by_name)
    return {name: us for us, name in sorted(own)}


def is_truth(name: str) -> bool:
    """True for contenders that the tuner may answer with: own kernels and PyTorch's."""
    return name == rows.PYTORCH or (name.split()[0] == rows.TUNER and name != ENABLED)


def _sha256(problem: Problem, config: Config) -> dict[str, str]:
    """Hashes of a config's compiled kernels."""
    artifacts = built_artifacts(kernels_of(problem, config))
    if isinstance(artifacts, str):
        return {}
    folder = settings.artifacts_dir()
    metas = {name: folder / key / "meta.json" for name, key in artifacts.items()}
    return {name: str(json.loads(path.read_bytes())["sha256"]) for name, path in metas.items()}


def _workspace_mib(problem: Problem, config: Config) -> float:
    """Memory of a call beside its operands and output."""
    plan = _plan(problem, config)
    return 0.0 if plan is None else round(plan.workspace_bytes / 2**20, 3)


def beside(case: Judged, name: str) -> Row:
    """The call as served and by another tuner, beside the built kernels; its seconds are nearly
    all the other's: ``torch.compile(mode="max-autotune-no-cudagraphs")``, or Helion.
    """
    from tuner.runtime.call import devices

    def others(operands: Operands) -> dict[str, Callable[[int], Any]]:
        try:
            from benchmarks import tuner_helion
        except ModuleNotFoundError as exc:
            raise BenchmarkError(f"{exc.name} is not installed: pip install helion") from exc
        return {name: tuner_helion.call(operands)}

    start, kernels = time.monotonic(), built(case.problem, devices.gpu_of(0))
    if name == INDUCTOR:
        row = timed(case, kernels, FINAL_US, compiles=True)
    else:
        row = timed(case, kernels, FINAL_US, others=others)
    own = sum(is_truth(name) for name in row["us"])
    return {**row, "kernels": own, "elapsed_s": round(time.monotonic() - start, 1)}


def untuned(case: Judged) -> Row:
    """The call as served without tuning, beside all built kernels."""
    from tuner.runtime.call import devices

    gpu = devices.gpu_of(0)
    config = launched(case.problem, gpu)
    return judged(case, config if config is None or not is_vendor(config) else None)
