"""Prompts whose values are narrower than their keys: a few kernels, and the fastest by estimate.

Multi-head latent attention computes prompts with keys of 192 columns and values of 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from tuner.config import Config, Value
from tuner.families.attention_instances import instance
from tuner.families.fused_attention import FusedAttention
from tuner.families.rule import RuleSelection
from tuner.families.target import DTYPES, Target
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem

_FAMILY = FusedAttention()
_WIDTHS = 192, 128
"""Instances of keys and of values."""
_LONG: Mapping[str, Value] = {
    **{"warp_groups": 2, "tile_n": 128, "kv_stages": 2, "score_buffers": 1, "ping_pong": True},
    **{"early_exp": 0, "q_in_registers": False, "persistent": True, "blocks_per_sm": 1},
    **{"rescale": "lazy", "splits": 1, "pdl": True},
}
_SHORT: Mapping[str, Value] = {
    **{name: value for name, value in _LONG.items() if name != "rescale"},
    **{"tile_n": 64, "kv_stages": 4, "key_groups": 2, "ping_pong": False, "persistent": False},
}


def _kernels(is_causal: bool, is_varlen: bool) -> Iterator[Config]:
    """Two groups of 64 rows, and of few tiles two groups that share 64 rows and divide the keys."""
    skips: dict[str, Value] = {"skips_masked": "halves"} if is_causal and not is_varlen else {}
    yield Config(_FAMILY.name, {**_LONG, **skips})
    if not is_varlen:
        yield Config(_FAMILY.name, _SHORT)


def serves(problem: AttentionProblem, gpu: Gpu) -> bool:
    """True for prompts of these widths, full or causal, that the family's kernels take."""
    widths = tuple(map(instance, (problem.head_dim, problem.value_width)))
    is_plain = not (problem.is_windowed or problem.softcap)
    is_prompt = problem.seqlen_q >= 64
    return not _FAMILY.supports(problem, gpu) and widths == _WIDTHS and is_plain and is_prompt


def select(problem: AttentionProblem, gpu: Gpu) -> RuleSelection | None:
    """The kernels that take a problem, of the least expected time first; None without any."""
    timed = []
    for config in _kernels(problem.is_causal, problem.is_varlen):
        config = _FAMILY.carried(problem, config)
        if _FAMILY.accepts(problem, config, gpu):
            timed.append((_FAMILY.predict_us(problem, config, gpu), config))
    timed.sort(key=lambda row: row[0])
    doubts = ("chosen by the rule of values narrower than keys",)
    return RuleSelection(tuple(timed), Regime.default(problem.op), doubts) if timed else None


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    small = AttentionProblem.parse("SQ=256,SKV=512,D=192,DV=128,H=1")
    kinds = [
        replace(small, dtype=dtype, is_causal=is_causal, is_varlen=is_varlen)
        for dtype in DTYPES
        for is_varlen in (False, True)
        for is_causal in (False, True)
    ]
    return tuple(
        Target(config, problem, "D=192, DV=128")
        for problem in kinds
        for config in _kernels(problem.is_causal, problem.is_varlen)
    )
