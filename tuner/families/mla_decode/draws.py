"""Draws of latent attention: lengths, queries, heads, pages."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.families.mla_decode import MAX_QUERIES, ROWS
from tuner.families.sequence_draw import BATCHES, SequenceDraw
from tuner.families.target import Target
from tuner.families.trials import Fact, Trial, edges, is_small, schedule_of, schedules
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem

#: Heads of public models, whole and on up to eight GPUs, and counts that fill no block of rows.
_HEADS = (1, 3, 8, 16, 20, 32, 64, 65, 96, 128, 200)
#: Page sizes in slots: those of engines, and sizes that a tile's rows do not divide.
_PAGES = (16, 32, 48, 64, 80, 128, 256)
_QUERIES = (1, 2, 3, 4, 7, MAX_QUERIES)
_LONG = 16384 + 1
MAX_QUANTISED_ROWS = 1 << 15
"""Maximum rows of a trial's quantised cache, which the host draws."""


class LatentDraw(SequenceDraw):
    """Latent attention: every number of heads and queries, page size and schedule."""

    _usual: AttentionProblem

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        assert isinstance(target.problem, AttentionProblem)
        self._usual = target.problem
        self.axes = {
            "heads": [count for count in _HEADS if self._holds_heads(count)],
            "batch": (*BATCHES, 150),
            "seqlen_q": _QUERIES,
            "seqlen_kv": [*edges(ROWS), _LONG],
            "page_size": _PAGES,
            "is_varlen": (False, True),
            "schedule": list(schedules(self._family)),
            "with_lse": (False, True),
        }

    def _holds_heads(self, heads: int) -> bool:
        """True if the kernel takes so many heads, of some number of queries."""
        single, two = (replace(self._usual, heads_q=heads, seqlen_q=n) for n in (1, MAX_QUERIES))
        named = schedules(self._family)
        schedule = next(iter(named))
        return any(
            self._config(replace(problem, is_causal=problem.seqlen_q > 1), schedule) is not None
            for problem in (single, two)
        )

    def _value(self, name: str) -> Any:
        """As of `SequenceDraw`, but for queries, which are few."""
        if name == "seqlen_q":
            return self._rng.choice(self.axes[name])
        return super()._value(name)

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        queries, keys = values["seqlen_q"], values["seqlen_kv"]
        is_varlen = values["is_varlen"] and queries == 1
        if self._usual.cache and values["batch"] * keys > MAX_QUANTISED_ROWS:
            return None
        if 4 * values["batch"] * values["heads"] * queries * keys * 576 > 1 << 32:
            return None
        problem = replace(
            self._usual,
            batch=values["batch"],
            heads_q=values["heads"],
            seqlen_q=queries,
            seqlen_kv=keys,
            is_causal=queries > 1,
            is_varlen=is_varlen,
            page_size=values["page_size"],
        )
        if not is_small(problem, values["schedule"]):
            return None
        config = self._config(problem, values["schedule"])
        if config is None:
            return None
        trial = Trial(problem, config, values["with_lse"])
        return trial if set(planted.items()) <= self.facts(trial) else None

    def facts(self, trial: Trial) -> set[Fact]:
        problem = trial.problem
        assert isinstance(problem, AttentionProblem)
        return {
            ("heads", problem.heads_q),
            ("batch", problem.batch),
            ("seqlen_q", problem.seqlen_q),
            ("seqlen_kv", problem.seqlen_kv),
            ("page_size", problem.page_size),
            ("is_varlen", problem.is_varlen),
            ("schedule", schedule_of(self._family, trial.config)),
            ("with_lse", trial.with_lse),
        }
