"""Listed calls where a selection answered far from the fastest kernel of the machine.

Each is timed as served, by every built kernel that may answer it, and by the peers. Kernels are
those of the call's domain in the portfolio, and `CANDIDATES`, which may join it. ``tuner NAME`` is
one of them, named by its config; the fastest is `BEST`. ``--list`` has the kernels' parameters.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks import rows
from benchmarks.cliffs_draws import dense
from benchmarks.harness import Contender, Row
from benchmarks.own_plans import built_artifacts, compile_specs, own_plan
from tuner.config import Config, Value
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.by_operation import AttentionDomain, domain_of
from tuner.families.peers import sdpa
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem
from tuner.problem.population import Chance, ModelCall
from tuner.search import pool
from tuner.selection.portfolio import serving, shipped
from tuner.store.entry import is_vendor

BEST = f"{rows.TUNER} best"
BUDGET_US = 3e5
FAMILY = family("fused_attention")
#: Batch, query heads, KV heads, queries, keys, D of calls that decode, by the group of the table.
DECODING: Mapping[str, Sequence[tuple[int, ...]]] = {
    "decoding, D=80": (
        (96, 32, 8, 1, 3333, 80),
        (2, 32, 8, 1, 5000, 80),
        (32, 32, 32, 1, 600, 80),
        (8, 32, 8, 1, 256, 80),
        (8, 32, 8, 5, 2000, 80),
        (16, 32, 8, 3, 900, 80),
        (4, 20, 5, 2, 300, 80),
    ),
    "decoding, D=160": (
        (8, 32, 8, 1, 2000, 160),
        (8, 32, 32, 1, 2000, 160),
        (1, 40, 8, 1, 8000, 160),
        (64, 16, 2, 1, 300, 160),
        (16, 32, 8, 4, 900, 160),
        (4, 24, 24, 5, 1500, 160),
    ),
    "decoding, D=256": (
        (24, 16, 2, 1, 61, 256),
        (16, 8, 1, 1, 700, 256),
        (4, 10, 1, 1, 3333, 256),
        (48, 16, 2, 5, 61, 256),
        (4, 10, 1, 5, 3333, 256),
        (16, 8, 1, 4, 1024, 256),
        (32, 16, 2, 2, 500, 256),
    ),
    "short caches": (
        (16, 32, 8, 1, 61, 128),
        (64, 16, 4, 1, 128, 128),
        (1, 32, 32, 1, 300, 128),
        (16, 32, 32, 1, 200, 64),
        (48, 12, 12, 1, 100, 64),
        (2, 16, 4, 1, 3333, 128),
    ),
}
#: Batch, query heads, KV heads, tokens, D, and 1 for a causal mask, of prompts.
PROMPTS: Mapping[str, Sequence[tuple[int, ...]]] = {
    "one wave": (
        (1, 32, 32, 384, 128, 0),
        (1, 32, 32, 384, 128, 1),
        (2, 24, 24, 512, 128, 0),
        (1, 40, 40, 640, 128, 1),
        (2, 20, 20, 200, 128, 0),
        (2, 32, 32, 300, 128, 1),
        (1, 24, 24, 640, 128, 0),
        (1, 28, 4, 500, 128, 1),
        (6, 40, 40, 3120, 128, 0),
        (24, 25, 25, 1025, 128, 0),
    ),
    "prompts, D=160": (
        (2, 32, 8, 2000, 160, 1),
        (1, 24, 24, 4096, 160, 0),
        (8, 16, 16, 512, 160, 1),
        (4, 32, 8, 1000, 160, 0),
    ),
}


@dataclass(frozen=True)
class Hole:
    """A listed call, or one near it."""

    group: str
    problem: AttentionProblem

    @property
    def call(self) -> ModelCall:
        """The call with tensors as the problem's layout says, cold where it decodes."""
        return dense(self.problem, "decoding" if self.problem.is_decoding else "prompt")

    @property
    def label(self) -> str:
        return self.problem.label()


def _holes() -> Iterator[Hole]:
    for group, calls in DECODING.items():
        for batch, heads, heads_kv, queries, keys, head_dim in calls:
            heads_text = f"B={batch},H={heads},HKV={heads_kv}"
            text = f"{heads_text},SQ={queries},SKV={keys},D={head_dim},dtype=bf16"
            yield Hole(group, AttentionProblem.parse(text))
    for group, calls in PROMPTS.items():
        for batch, heads, heads_kv, tokens, head_dim, causal in calls:
            text = f"B={batch},H={heads},HKV={heads_kv},S={tokens},D={head_dim},causal={causal}"
            yield Hole(group, AttentionProblem.parse(f"{text},dtype=bf16"))


HOLES = tuple(_holes())
"""The listed calls."""


def neighbours(args: Namespace) -> list[Hole]:
    """A call near each listed one: sizes between 0.6 and 1.6 times its own, by the seed."""
    found = []
    for index, hole in enumerate(HOLES):
        problem, chance = hole.problem, Chance(f"near {args.seed}", index)

        def near(size: int, name: str, chance: Chance = chance) -> int:
            return max(1, size * (60 + chance.below(101, name)) // 100)

        keys = near(problem.seqlen_kv, "keys")
        queries = keys if problem.seqlen_q == problem.seqlen_kv else problem.seqlen_q
        batch = near(problem.batch, "batch")
        problem = replace(problem, batch=batch, seqlen_q=queries, seqlen_kv=keys)
        found.append(replace(hole, problem=problem))
    return found


def _kernel(tile_n: int, groups: int = 1, blocks: int = 1, **further: Value) -> Config:
    """A kernel of two stages and one tile a block, without what a launch decides."""
    params: dict[str, Value] = {
        "warp_groups": groups,
        "tile_n": tile_n,
        "kv_stages": 2,
        "score_buffers": 1,
        "early_exp": 0,
        "q_in_registers": False,
        "persistent": False,
        "blocks_per_sm": blocks,
        **({"ping_pong": False} if groups > 1 else {}),
        **further,
    }
    return Config(FAMILY.name, params)


_TURNS = {"persistent": True, "ping_pong": True}
#: Kernels that may join the domains, by compiled head dimension, mask and phase: they were faster
#: than the domain's at listed calls, and are not expected to be where they are.
CANDIDATES: Mapping[tuple[int, str, bool], Sequence[Config]] = {
    (128, "full", False): (
        _kernel(128, 2, ping_pong=True, stages_output=True),
        _kernel(64, 2, ping_pong=True, q_in_registers=True, stages_output=True),
        _kernel(176, 2, **_TURNS),
    ),
    (128, "causal", False): (
        _kernel(64, blocks=2, q_in_registers=True, early_exp=50, stages_output=True),
    ),
    **{(192, mask, False): (_kernel(112, 2, **_TURNS),) for mask in ("full", "causal")},
}


def further(problem: AttentionProblem) -> Sequence[Config]:
    """`CANDIDATES` of a problem's domain."""
    domain = domain_of(problem)
    assert isinstance(domain, AttentionDomain)
    return CANDIDATES.get((domain.head_dim, domain.mask, domain.phase != "prompt"), ())


@cache
def own_configs(problem: AttentionProblem, gpu: Gpu = DEFAULT_GPU) -> tuple[Config, ...]:
    """Own kernels that may answer a problem, with their run-time parameters; those without splits
    also as launches that wait for the kernel in front.
    """
    (portfolio,) = (one for one in serving(shipped(), gpu) if one.op == problem.op)
    groups = pool.of_portfolio(problem, gpu, portfolio, further=further(problem))
    own = [config for group in groups for config in group if not is_vendor(config)]
    waiting = [Config(c.family, {**c.params, "pdl": False}) for c in own if c["splits"] == 1]
    return tuple(dict.fromkeys([*own, *waiting]))


def _specs(problem: AttentionProblem, config: Config) -> Mapping[str, KernelSpec]:
    return FAMILY.kernels(problem, config)


def compile_holes(cases: Sequence[Hole]) -> int:
    """Compile every kernel that may answer a call; 0."""
    problems = [case.problem for case in cases]
    compile_specs(s for p in problems for c in own_configs(p) for s in _specs(p, c).values())
    return 0


def _own_call(problem: AttentionProblem, config: Config) -> Callable[..., Any] | None:
    """A call by a kernel; None where it is not built or has no plan."""
    artifacts = built_artifacts(_specs(problem, config))
    if isinstance(artifacts, str):
        return None
    plan = own_plan(problem, config, artifacts, problem.head_dim**-0.5)
    return None if isinstance(plan, str) else plan.run_uncounted


def serving_call(problem: AttentionProblem) -> Callable[..., Any] | None:
    """A call by FlashAttention-3's serving build; None where it is not here."""
    config = Config("vendor_sdpa", {"kernel": sdpa.SERVING})
    call = family("vendor_sdpa").vendor_call(problem, config, problem.head_dim**-0.5)
    return None if isinstance(call, str) else call


def measured(case: Hole, _: Namespace) -> Row:
    """Times of all, errors, the kind of answer, and the config of the fastest own kernel."""
    from benchmarks.population_calls import measured as call_measured

    problem = case.problem
    configs = {f"{rows.TUNER} {one.digest[:6]}": one for one in own_configs(problem)}

    def ways(inputs: Sequence[Any]) -> Iterator[Contender]:
        calls = {name: _own_call(problem, config) for name, config in configs.items()}
        for name, call in {sdpa.SERVING: serving_call(problem), **calls}.items():
            if call is not None:
                yield Contender(name, lambda i, call=call: call(*inputs[i].tensors))  # type: ignore[misc]

    row = call_measured(case.call, "cuda", False, BUDGET_US, ways)
    own = {name: us for name, us in row["us"].items() if name in configs}
    if own:
        first = min(own, key=own.__getitem__)
        row["us"][BEST] = own[first]
        row["best"] = configs[first].to_json()
    return {**row, "problem": problem.to_json()}


def table(measured: Sequence[Row]) -> list[str]:
    """Ratios of what is served, then those of the fastest own kernel, by group."""
    best = [
        {**row, "us": {**row["us"], rows.TUNER: row["us"][BEST]}}
        for row in measured
        if BEST in row.get("us", {})
    ]
    lines = rows.ratio_table(measured)
    return [*lines, "", "the fastest own kernel:", "", *rows.ratio_table(best)] if best else lines


def listing(cases: Sequence[Hole], _: Namespace) -> Iterable[str]:
    """Calls with their own kernels."""
    for case in cases:
        yield f"{case.group}: {case.label}"
        for config in own_configs(case.problem):
            yield f"    {config.digest[:6]} {config.params}"
