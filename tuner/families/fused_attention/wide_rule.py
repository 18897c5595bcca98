"""Head dimensions of 264 to 512: two kernels for each mask, and the faster by estimate.

Two warp groups share 64 rows of queries. Each computes the scores of every second tile of keys,
and half of the output's columns. One instance of 512 columns serves all: TMA fills the others with
zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from tuner.config import Config, Value
from tuner.families.fused_attention import FusedAttention
from tuner.families.fused_attention.legality import BY_COLUMNS
from tuner.families.rule import RuleSelection
from tuner.families.target import DTYPES, Target
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem
from tuner.problem.attention_masks import PAGE_MULTIPLE

_FAMILY = FusedAttention()
_TILE: Mapping[str, Value] = {
    **{**BY_COLUMNS, "column_groups": 2, "kv_stages": 5, "blocks_per_sm": 1, "pdl": True},
}
Levers = Mapping[str, Value]
_HEADS: Levers = {"packed_heads": 16, "pads_heads": True}
"""The 2 to 16 query heads of a KV head share the rows of a tile."""
_SMALL = AttentionProblem.parse("SQ=256,SKV=512,D=512,H=1,layout=bshd")
_MASKS: tuple[Mapping[str, Any], ...] = ({}, {"window_left": 64}, {"softcap": 50.0})
"""Masks and features of calls with and without a causal mask, as fields of a problem."""


def serves(problem: AttentionProblem, gpu: Gpu) -> bool:
    """True for heads of these dimensions that the family's kernels take."""
    return problem.is_wide and not _FAMILY.supports(problem, gpu)


def select(problem: AttentionProblem, gpu: Gpu) -> RuleSelection | None:
    """The kernels that take a problem, of the least expected time first; None without any."""
    timed = (_timed(problem, config, gpu) for config in _configs(problem))
    expected = (pair for pair in timed if _FAMILY.accepts(problem, pair[1], gpu))
    return RuleSelection.of(expected, "chosen by the rule of wide heads")


def _configs(problem: AttentionProblem) -> Iterator[Config]:
    """The kernels for a problem, legal or not, without splits."""
    return (_config(problem, levers) for levers in ({}, _HEADS))


def _config(problem: AttentionProblem, levers: Levers) -> Config:
    pages: Levers = {"box_rows": PAGE_MULTIPLE} if problem.is_paged else {}
    return _FAMILY.called(problem, Config(_FAMILY.name, {**_TILE, **pages, **levers}), 1)


def _timed(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[float, Config]:
    """Least expected time with any number of splits, and that schedule. Over pages each call
    chooses its own.
    """
    schedules = [config]
    if not (problem.is_windowed or problem.is_varlen):
        split = Config(config.family, {**config.params, "combine": "kernel"})
        counts = _FAMILY.splitter(split, gpu)(problem)
        schedules += [_FAMILY.called(problem, split, count) for count in counts]
    us, _, fastest = min(
        (_FAMILY.predict_us(problem, schedule, gpu), index, schedule)
        for index, schedule in enumerate(schedules)
    )
    return us, config if problem.is_paged else fastest


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven: those of prompts, then those of decoding."""
    return tuple(
        Target(_config(problem, levers), replace(problem, dtype=dtype), "wide heads")
        for dtype in DTYPES
        for problem, levers in _kinds()
    )


def _kinds() -> Iterator[tuple[AttentionProblem, Levers]]:
    """A small problem and the levers of each kernel. Over pages one query has no causal mask."""
    grouped = replace(_SMALL, heads_q=16, heads_kv=1, seqlen_q=1)
    yield grouped, _HEADS
    for is_causal, fields in product((False, True), (*_MASKS, {"is_varlen": True})):
        yield replace(_SMALL, is_causal=is_causal, **fields), {}
    for is_causal, fields in product((False, True), _MASKS):
        queries = 8 if is_causal else 1
        paged = replace(grouped, seqlen_q=queries, is_causal=is_causal, page_size=64, **fields)
        yield paged, _HEADS
        if not fields:
            yield paged, {}
