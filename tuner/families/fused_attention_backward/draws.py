"""Draws of attention's gradients: lengths, heads, masks, layouts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from tuner.families.fused_attention_backward import GROUP_KEYS, sharing_groups
from tuner.families.sequence_draw import (
    BATCHES,
    HEADS,
    KEY_HEADS,
    RATIOS,
    SOFTCAPS,
    SequenceDraw,
)
from tuner.families.target import Target
from tuner.families.trials import Fact, Trial, edges, is_small, schedule_of, schedules
from tuner.hardware import Gpu
from tuner.problem import LAYOUTS, AttentionBackwardProblem
from tuner.problem.attention import NARROW_HEAD_DIM


class BackwardDraw(SequenceDraw):
    """Gradients of attention."""

    _usual: AttentionBackwardProblem

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        self._usual = cast(AttentionBackwardProblem, target.problem)
        ratios = [(ratio * heads, heads) for ratio in RATIOS for heads in KEY_HEADS]
        sharing = sharing_groups(self._usual.head_dim)
        keys = GROUP_KEYS * int(target.config["warp_groups"]) // sharing
        self.axes = {
            "head_dim": [d for d in range(8, NARROW_HEAD_DIM + 1, 8) if self._holds(d)],
            "heads": list(dict.fromkeys((*HEADS, *ratios))),
            "batch": BATCHES,
            "seqlen_q": edges(int(target.config["tile_m"])),
            "seqlen_kv": edges(keys),
            "longer": (-1, 0, 1),
            "fills_chip": (False, True),
            "layout": ("bshd",) if self._usual.is_varlen else LAYOUTS,
            "schedule": list(schedules(self._family)),
        }
        if self._usual.is_windowed:
            sides = (True, False), (False, True), (True, True)
            # A causal window hides the first key from the second query, at the earliest.
            is_causal, least = self._usual.is_causal, 2 if self._usual.is_causal else 1
            lengths = sorted({max(least, length) for length in self.axes["seqlen_q"]})
            windows = sides[: 1 if is_causal else 3]
            self.axes = {**self.axes, "seqlen_q": lengths, "window": windows}
        if self._usual.softcap:
            self.axes = {**self.axes, "softcap": SOFTCAPS}

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        rng, (heads_q, heads_kv) = self._rng, values["heads"]
        seqlen_q, seqlen_kv = self._lengths(values, planted)
        names = "head_dim", "batch", "layout"
        has_left, has_right = values.get("window", (False, False))
        span = max(seqlen_q, seqlen_kv)
        problem = replace(
            self._usual,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            heads_q=heads_q,
            heads_kv=heads_kv,
            window_left=rng.randrange(span) if has_left else -1,
            window_right=rng.randrange(span) if has_right else -1,
            softcap=values.get("softcap", 0.0),
            **{name: values[name] for name in names},
        )
        if not is_small(problem, values["schedule"]):
            return None
        config = self._config(problem, values["schedule"])
        if config is None:
            return None
        trial = Trial(problem, config)
        is_wanted = set(planted.items()) <= self.facts(trial)
        return trial if is_wanted else None

    def facts(self, trial: Trial) -> set[Fact]:
        problem, family, gpu = (
            cast(AttentionBackwardProblem, trial.problem),
            self._family,
            self._gpu,
        )
        longer = problem.seqlen_q - problem.seqlen_kv
        tiles = -(-problem.seqlen_kv // GROUP_KEYS) * problem.batch * problem.heads_kv
        return {
            ("head_dim", problem.head_dim),
            ("heads", (problem.heads_q, problem.heads_kv)),
            ("batch", problem.batch),
            ("seqlen_q", problem.seqlen_q),
            ("seqlen_kv", problem.seqlen_kv),
            ("longer", (longer > 0) - (longer < 0)),
            ("fills_chip", tiles > 2 * gpu.sm_count),
            ("layout", problem.layout),
            ("window", (problem.window_left >= 0, problem.window_right >= 0)),
            ("softcap", problem.softcap),
            ("schedule", schedule_of(family, trial.config)),
        }
