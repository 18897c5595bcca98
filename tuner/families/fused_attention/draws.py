"""Draws of attention: lengths, heads, masks, layouts, pages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from tuner.families.sequence_draw import (
    BATCHES,
    HEADS,
    KEY_HEADS,
    RATIOS,
    SOFTCAPS,
    SequenceDraw,
)
from tuner.families.target import Target
from tuner.families.trials import (
    MAX_FLOPS,
    Fact,
    Trial,
    edges,
    is_small,
    schedule_of,
    schedules,
)
from tuner.hardware import Gpu
from tuner.problem import DTYPE_BYTES, LAYOUTS, AttentionProblem
from tuner.problem.attention import MAX_HEAD_DIM, NARROW_HEAD_DIM
from tuner.problem.attention_masks import BLOCK_AXES, Axes

MAX_LSE_ROWS = 1 << 15
"""Maximum rows of a log-sum-exp, which is compared on the host."""
#: Page sizes in slots: those of engines, and sizes that powers of two do not divide well.
_PAGES = (16, 32, 48, 64, 80, 128, 192, 256)
#: Length of the longest planted sequence of keys.
_LONG = 16384 + 1


class AttentionDraw(SequenceDraw):
    """Attention: every mask, layout, page size and schedule."""

    _usual: AttentionProblem

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        family = self._family
        assert isinstance(target.problem, AttentionProblem)
        self._usual = target.problem
        tiling = family.tiling(target.config)
        self._packed = tiling.packed
        queries = max(1, tiling.rows // tiling.packed)
        heads = list(dict.fromkeys(self._heads()))
        heads_q, heads_kv = heads[0]
        usual = replace(target.problem, heads_q=heads_q, heads_kv=heads_kv)
        step = 16 // DTYPE_BYTES[target.problem.dtype]  # TMA's pitch
        widest = MAX_HEAD_DIM if target.problem.is_wide else NARROW_HEAD_DIM
        self.axes = {
            "head_dim": [d for d in range(step, widest + 1, step) if self._holds(d)],
            "heads": heads,
            "batch": BATCHES,
            "seqlen_q": edges(queries),
            "seqlen_kv": [*edges(tiling.keys), _LONG],
            "longer": (-1, 0, 1),
            "fills_chip": (False, True),
            "layout": ("bshd",) if target.problem.is_varlen else LAYOUTS,
            "window": self._windows(),
            "softcap": SOFTCAPS if target.problem.softcap else (0.0,),
            "operand": get_args(Axes)[1:] if target.problem.mask_operand else ("",),
            "schedule": [one for one in schedules(family) if self._config(usual, one)],
            "with_lse": (False, True),
        }
        if target.problem.value_dim:
            widths = range(step, NARROW_HEAD_DIM + 1, step)
            self.axes["value_dim"] = [v for v in widths if self._holds_values(v)]
        if target.problem.is_paged:  # the gate then fills lengths at the edges of pages, and zero
            self.axes = {
                **self.axes,
                "layout": ("bhsd", "bshd"),
                "page_size": [size for size in _PAGES if self._pages_of(size)],
                "is_varlen": (False, True),
            }
        if target.problem.block_mask:  # the gate then fills a different pattern into each block
            self.axes = {**self.axes, "block_mask": BLOCK_AXES}

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        problem = self._problem(values, planted)
        if problem is None or not is_small(problem, values["schedule"]):
            return None
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        if values["with_lse"] and rows > MAX_LSE_ROWS:
            return None
        config = self._config(problem, values["schedule"])
        return None if config is None else Trial(problem, config, values["with_lse"])

    def _problem(
        self, values: Mapping[str, Any], planted: Mapping[str, Any]
    ) -> AttentionProblem | None:
        rng, (heads_q, heads_kv) = self._rng, values["heads"]
        seqlen_q, seqlen_kv = self._lengths(values, planted)
        elements = values["batch"] * heads_q * seqlen_q * values["head_dim"]
        if 4 * elements * seqlen_kv > MAX_FLOPS:
            return None
        has_left, has_right = values["window"]
        span = max(seqlen_q, seqlen_kv)
        problem = replace(
            self._usual,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim=values["head_dim"],
            batch=values["batch"],
            heads_q=heads_q,
            heads_kv=heads_kv,
            layout=values["layout"],
            window_left=rng.randrange(span) if has_left else -1,
            window_right=rng.randrange(span) if has_right else -1,
            softcap=values["softcap"],
            bias=values["operand"] if self._usual.bias else "",
            mask=values["operand"] if self._usual.mask else "",
            page_size=values.get("page_size", 0),
            block_mask=values.get("block_mask", ""),
            value_dim=values.get("value_dim", 0),
            is_varlen=values.get("is_varlen", self._usual.is_varlen),
        )
        drawn = self.facts(Trial(problem, self._compiled, values["with_lse"]))
        items = {(name, value) for name, value in planted.items() if name != "schedule"}
        return problem if items <= drawn else None

    def _pages_of(self, size: int) -> bool:
        """True if the kernel's copies divide pages of this size."""
        problem, kernels = replace(self._usual, page_size=size), self._target.kernels
        is_divided = all(size % int(one.variables["box_rows"]) == 0 for one in kernels.values())
        return is_divided and self._family.kernels(problem, self._target.config) == kernels

    def _holds_values(self, value_dim: int) -> bool:
        """True if the kernel is compiled for values of this width too."""
        problem = replace(self._usual, value_dim=value_dim)
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _heads(self) -> Iterator[tuple[int, int]]:
        counts = [n * self._packed for n in RATIOS]
        if self._target.config.get("pads_heads"):  # every group that a pack holds
            counts = list(range(2, self._packed + 1))
        ratios = [(count * heads, heads) for count in counts for heads in KEY_HEADS]
        for heads_q, heads_kv in (*HEADS, *ratios):
            problem = replace(self._usual, heads_q=heads_q, heads_kv=heads_kv)
            if self._carried(problem) is not None:
                yield heads_q, heads_kv

    def _windows(self) -> Sequence[tuple[bool, bool]]:
        """Sides on which a window is bounded."""
        if not self._usual.is_windowed:
            return ((False, False),)
        if self._usual.is_causal:
            return ((True, False),)
        return (True, False), (False, True), (True, True)

    def facts(self, trial: Trial) -> set[Fact]:
        problem, config, family, gpu = (
            cast(AttentionProblem, trial.problem),
            trial.config,
            self._family,
            self._gpu,
        )
        longer = problem.seqlen_q - problem.seqlen_kv
        tiling = family.tiling(config)
        tiles = -(-problem.seqlen_q * tiling.packed // tiling.rows) * problem.batch
        return {
            ("head_dim", problem.head_dim),
            ("heads", (problem.heads_q, problem.heads_kv)),
            ("batch", problem.batch),
            ("seqlen_q", problem.seqlen_q),
            ("seqlen_kv", problem.seqlen_kv),
            ("longer", (longer > 0) - (longer < 0)),
            ("fills_chip", tiles * problem.heads_q // tiling.packed > 2 * gpu.sm_count),
            ("layout", problem.layout),
            ("window", (problem.window_left >= 0, problem.window_right >= 0)),
            ("softcap", problem.softcap),
            ("operand", problem.bias or problem.mask),
            ("schedule", schedule_of(family, config)),
            ("with_lse", trial.with_lse),
            ("block_mask", problem.block_mask),
            ("page_size", problem.page_size),
            ("is_varlen", problem.is_varlen),
            ("value_dim", problem.value_dim),
        }
