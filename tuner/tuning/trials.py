"""Trials for a kernel's proof: problems drawn by a seed from its whole domain, with planted edge
cases.

Sizes, strides and head counts are launch arguments, so a kernel's domain covers all of them. Each
*axis* has values at which errors are likely:

- attention: one query, one key, lengths beside a tile's edge
- heads: dimensions below the compiled one, odd counts, every legal ratio; the most splits
- gradients of attention: as attention
- products: one row, extents beside a tile's edge, odd multiples of the alignment, a vocabulary's
  columns, rows that lie apart
- grouped products: one group, more than a warp's lanes and than rows, groups of unlike rows, empty
  ones

Each value is in at least one trial, and the other values are drawn. A trial is bounded in memory
and time.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast, get_args

from tuner.config import Config, Value
from tuner.families import product_work
from tuner.families.base import Family, Strides
from tuner.families.fused_attention_backward import GROUP_KEYS, sharing_groups
from tuner.families.gemv import MAX_ROWS
from tuner.hardware import Gpu
from tuner.problem import (
    DTYPE_BYTES,
    LAYOUTS,
    SCALE_BLOCK,
    SIZES,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)
from tuner.problem.attention import BLOCK_AXES, MAX_HEAD_DIM, Axes
from tuner.problem.swiglu import STEP as SWIGLU_STEP
from tuner.selection.kernels import Target

MAX_FLOPS = 1 << 32
"""Maximum FLOPs of a trial's problem without its mask. The fp64 reference takes four times as
many."""
MAX_BYTES = 96 << 20
"""Maximum bytes of a trial's operands, and of the outputs of its splits."""
MAX_LENGTH = 4096
"""Maximum length of drawn sequences; planted ones may be longer."""
MAX_LSE_ROWS = 1 << 15
"""Maximum rows of a log-sum-exp, which is compared on the host."""
MAX_MASK_PAIRS = 1 << 23
"""Maximum queries times keys of all block-sparse masks of a trial, which the host draws."""
_ATTEMPTS = 1000
_BATCHES = (1, 2, 3, 5, 8, 17, 32)
#: Query and KV heads of public models: Falcon's 71 on 1, Qwen2.5's 14 on 2 and 28 on 4, GPT-2 XL's
#: 25 on 25.
_HEADS = ((71, 1), (14, 2), (28, 4), (25, 25), (1, 1), (16, 16))
#: Further ratios: multiples of the heads that share a tile, with each of these KV heads.
_RATIOS, _KEY_HEADS = (1, 2, 3, 5, 7), (1, 2, 5)
#: Values to try of a run-time parameter whose domain is a range, beside its last.
_OF_RANGE = (1, 2, 3, 7, 16, 17, 64)
_SOFTCAPS = (50.0, 5.0)
#: Page sizes in slots: those of engines, and sizes that powers of two do not divide well.
_PAGES = (16, 32, 48, 64, 80, 128, 192, 256)
#: Length of the longest planted sequence of keys.
_LONG = 16384 + 1
#: Alignment of a GEMM's rows in 16-bit elements.
_ALIGNED = 8
MAX_EXTENT = 8192
"""Maximum N and K of drawn GEMMs; planted ones may be larger."""
#: Groups: one, few, a warp's lanes and one more, public models' experts.
_GROUPS = (1, 2, 5, 8, 32, 33, 128, 384)
MAX_GROUPED_EXTENT = 2048
"""Maximum rows, N and K of drawn grouped products; planted ones may be larger."""
#: N of a public model's logits, and a K longer than every pipeline.
_VOCABULARY, _DEEP = 128256, 16384 + 8
#: Padding elements between the rows of A, and between those of the weights.
_APART = ((0, 0), (8, 0), (0, 8), (72, 1024))

Fact = tuple[str, Hashable]
"""Value on an axis."""


@dataclass(frozen=True)
class Trial:
    """Problem, config of the kernel's call, and whether the optional output is requested."""

    problem: Problem
    config: Config
    with_lse: bool = False
    """True if attention's log-sum-exp is requested."""
    apart: tuple[int, int] = (0, 0)
    """Padding elements between the rows of a GEMM's A, and between those of its weights."""

    @property
    def strides(self) -> Strides:
        """Strides of the tensors that differ from the problem's."""
        found = {}
        for operand, apart in zip(self.problem.operands, self.apart, strict=False):
            if apart:
                row = sorted(operand.strides)[1]
                found[operand.name] = tuple(
                    row + apart if stride == row else stride for stride in operand.strides
                )
        return found

    def facts(self, family: Family, gpu: Gpu) -> set[Fact]:
        """Values on each axis."""
        if isinstance(self.problem, AttentionProblem):
            return self._attention_facts(self.problem, family, gpu)
        if isinstance(self.problem, AttentionBackwardProblem):
            return self._backward_facts(self.problem, family, gpu)
        if isinstance(self.problem, GroupedGemmProblem):
            one = self.problem
            named = {("groups", one.groups), ("sizes", one.sizes)}
            return named | self._scaled_facts(one, family)
        if _has_block_factors(self.problem):
            return self._scaled_facts(self.problem, family)
        return self._product_facts(self.problem, family, gpu)

    def _product_facts(self, problem: Any, family: Family, gpu: Gpu) -> set[Fact]:
        sizes = product_work.ProductSizes.of(problem)
        tile_m, tile_n, _ = tile_of(family.tiling(self.config))
        tiles = -(-sizes.m // tile_m) * -(-sizes.n // tile_n)
        return {
            ("m", problem.m),
            ("n", problem.n),
            ("k", problem.k),
            ("fills_chip", tiles > 2 * gpu.sm_count),
            ("apart", self.apart),
            ("schedule", _schedule(family, self.config)),
        }

    def _scaled_facts(self, problem: Any, family: Family) -> set[Fact]:
        return {
            ("m", problem.m),
            ("n", problem.n),
            ("k", problem.k),
            ("schedule", _schedule(family, self.config)),
        }

    def _backward_facts(
        self, problem: AttentionBackwardProblem, family: Family, gpu: Gpu
    ) -> set[Fact]:
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
            ("schedule", _schedule(family, self.config)),
        }

    def _attention_facts(self, problem: AttentionProblem, family: Family, gpu: Gpu) -> set[Fact]:
        config = self.config
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
            ("schedule", _schedule(family, config)),
            ("with_lse", self.with_lse),
            ("block_mask", problem.block_mask),
            ("page_size", problem.page_size),
            ("is_varlen", problem.is_varlen),
        }

    def label(self) -> str:
        """Short description."""
        runtime = ",".join(f"{k}={v}" for k, v in sorted(self.config.params.items()))
        more = " and log-sum-exp" * self.with_lse
        more += f", rows {self.apart} apart" if any(self.apart) else ""
        return f"{self.problem.label()} with {runtime}{more}"


def trials(target: Target, gpu: Gpu, count: int, seed: int) -> list[Trial]:
    """At least `count` trials of a kernel; more if the planted values need them.

    Args:
        target: kernel to prove.
        gpu: GPU that it runs on.
        count: minimum number of trials.
        seed: random seed; equal seeds draw equal trials.
    """
    # Equal for both types, so that a failure in one can be compared with the other.
    kinds: Mapping[str, type[_Draw]]
    kinds = {
        AttentionProblem.op: _AttentionDraw,
        AttentionBackwardProblem.op: _BackwardDraw,
        GroupedGemmProblem.op: _GroupedDraw,
    }
    kind = kinds.get(target.problem.op, _ProductDraw)
    if _has_block_factors(target.problem):
        kind = _ScaledDraw
    draw = kind(target, gpu, random.Random(f"{seed}:{target.config.digest}"))
    found: dict[Trial, None] = {}
    seen: set[Fact] = set()
    for name, values in draw.axes.items():
        for value in values:
            if (name, value) not in seen and (trial := draw.one({name: value})) is not None:
                found[trial] = None
                seen |= trial.facts(target.family, gpu)
    for _ in range(_ATTEMPTS):
        if len(found) >= count:
            break
        if (trial := draw.one({})) is not None:
            found[trial] = None
    return list(found)


class _Draw(ABC):
    """Draws trials of one kernel."""

    axes: dict[str, Sequence[Any]]

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        self._target, self._gpu, self._rng = target, gpu, rng
        family = self._family = target.family
        names = family.runtime_parameters
        compiled = {k: v for k, v in target.config.params.items() if k not in names}
        self._compiled = Config(target.config.family, compiled, target.config.stages)

    def one(self, planted: Mapping[str, Any]) -> Trial | None:
        """Trial with given values on some axes; None if none was found."""
        for _ in range(_ATTEMPTS):
            values = {**{name: self._value(name) for name in self.axes}, **planted}
            if (trial := self._trial(values, planted)) is not None:
                return trial
        return None

    @abstractmethod
    def _value(self, name: str) -> Any:
        """Draw a value of an axis."""

    @abstractmethod
    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        """Trial of these values; None if they cannot be combined."""

    def _config(self, problem: Problem, schedule: Sequence[tuple[str, Value]]) -> Config | None:
        """Config of the kernel for a problem; None if it belongs to another kernel or is not
        legal.
        """
        family, config = self._family, self._carried(problem)
        if config is None:
            return None
        config = Config(config.family, {**config.params, **dict(schedule)}, config.stages)
        if family.violations(problem, config, self._gpu):
            return None
        return config if family.kernels(problem, config) == self._target.kernels else None

    def _carried(self, problem: Problem) -> Config | None:
        """Config of the compiled kernel for a problem, without run-time parameters."""
        found = self._family.scheduled(problem, self._compiled, self._gpu)
        names = self._family.runtime_parameters
        for config in found:
            params = {name: value for name, value in config.params.items() if name not in names}
            return Config(config.family, params, config.stages)
        return None


class _SequenceDraw(_Draw):
    def _value(self, name: str) -> Any:
        """Draw one of an axis's planted values half of the time, and any size the other half."""
        if name in ("seqlen_q", "seqlen_kv") and self._rng.random() < 0.5:
            return round(2 ** self._rng.uniform(0, MAX_LENGTH.bit_length() - 1))
        if name == "batch" and self._rng.random() < 0.5:
            return self._rng.randint(1, 4)
        return self._rng.choice(self.axes[name])


class _AttentionDraw(_SequenceDraw):
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
        self.axes = {
            "head_dim": [d for d in range(step, MAX_HEAD_DIM + 1, step) if self._holds(d)],
            "heads": heads,
            "batch": _BATCHES,
            "seqlen_q": _edges(queries),
            "seqlen_kv": [*_edges(tiling.keys), _LONG],
            "longer": (-1, 0, 1),
            "fills_chip": (False, True),
            "layout": ("bshd",) if target.problem.is_varlen else LAYOUTS,
            "window": self._windows(),
            "softcap": _SOFTCAPS if target.problem.softcap else (0.0,),
            "operand": get_args(Axes)[1:] if target.problem.mask_operand else ("",),
            "schedule": [one for one in _schedules(family) if self._config(usual, one)],
            "with_lse": (False, True),
        }
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
        if problem is None or not _is_small(problem, values["schedule"]):
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
        seqlen_q, seqlen_kv = values["seqlen_q"], values["seqlen_kv"]
        if planted.get("longer") == 0 or (rng.random() < 0.25 and "longer" not in planted):
            if "seqlen_q" in planted:
                seqlen_kv = seqlen_q
            else:
                seqlen_q = seqlen_kv
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
            is_varlen=values.get("is_varlen", self._usual.is_varlen),
        )
        drawn = Trial(problem, self._compiled, values["with_lse"]).facts(self._family, self._gpu)
        wanted = {(name, value) for name, value in planted.items() if name != "schedule"}
        return problem if wanted <= drawn else None

    def _holds(self, head_dim: int) -> bool:
        problem = replace(self._usual, head_dim=head_dim)
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _pages_of(self, size: int) -> bool:
        """True if the kernel's copies divide pages of this size."""
        problem, kernels = replace(self._usual, page_size=size), self._target.kernels
        is_divided = all(size % int(one.variables["box_rows"]) == 0 for one in kernels.values())
        return is_divided and self._family.kernels(problem, self._target.config) == kernels

    def _heads(self) -> Iterator[tuple[int, int]]:
        counts = [n * self._packed for n in _RATIOS]
        if self._target.config.get("pads_heads"):  # every group that a pack holds
            counts = list(range(2, self._packed + 1))
        ratios = [(count * heads, heads) for count in counts for heads in _KEY_HEADS]
        for heads_q, heads_kv in (*_HEADS, *ratios):
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


class _BackwardDraw(_SequenceDraw):
    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        self._usual = cast(AttentionBackwardProblem, target.problem)
        ratios = [(ratio * heads, heads) for ratio in _RATIOS for heads in _KEY_HEADS]
        sharing = sharing_groups(self._usual.head_dim)
        keys = GROUP_KEYS * int(target.config["warp_groups"]) // sharing
        self.axes = {
            "head_dim": [d for d in range(8, MAX_HEAD_DIM + 1, 8) if self._holds(d)],
            "heads": list(dict.fromkeys((*_HEADS, *ratios))),
            "batch": _BATCHES,
            "seqlen_q": _edges(int(target.config["tile_m"])),
            "seqlen_kv": _edges(keys),
            "longer": (-1, 0, 1),
            "fills_chip": (False, True),
            "layout": ("bshd",) if self._usual.is_varlen else LAYOUTS,
            "schedule": list(_schedules(self._family)),
        }
        if self._usual.is_windowed:
            sides = (True, False), (False, True), (True, True)
            # A causal window hides the first key from the second query, at the earliest.
            is_causal, least = self._usual.is_causal, 2 if self._usual.is_causal else 1
            lengths = sorted({max(least, length) for length in self.axes["seqlen_q"]})
            windows = sides[: 1 if is_causal else 3]
            self.axes = {**self.axes, "seqlen_q": lengths, "window": windows}
        if self._usual.softcap:
            self.axes = {**self.axes, "softcap": _SOFTCAPS}

    def _holds(self, head_dim: int) -> bool:
        problem = replace(self._usual, head_dim=head_dim)
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        rng, (heads_q, heads_kv) = self._rng, values["heads"]
        seqlen_q, seqlen_kv = values["seqlen_q"], values["seqlen_kv"]
        if planted.get("longer") == 0 or (rng.random() < 0.25 and "longer" not in planted):
            if "seqlen_q" in planted:
                seqlen_kv = seqlen_q
            else:
                seqlen_q = seqlen_kv
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
        if not _is_small(problem, values["schedule"]):
            return None
        config = self._config(problem, values["schedule"])
        if config is None:
            return None
        trial = Trial(problem, config)
        is_wanted = set(planted.items()) <= trial.facts(self._family, self._gpu)
        return trial if is_wanted else None


class _ProductDraw(_Draw):
    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        family, self._usual = self._family, cast(Any, target.problem)
        is_gated = isinstance(target.problem, SwigluProblem)
        self._step = SWIGLU_STEP if is_gated else _ALIGNED
        tile_m, tile_n, depth = tile_of(family.tiling(target.config))
        columns = tile_n // 2 if is_gated else tile_n
        dense = {"a": self._usual.operands[0].strides}
        launches = family.strided_launches(self._usual, target.config, 1.0, dense)
        self.axes = {
            "m": [m for m in _edges(tile_m) if self._holds(m)],
            "n": [*self._edges(columns), _VOCABULARY],
            "k": [*self._edges(depth, _ALIGNED), _DEEP],
            "fills_chip": (False, True),
            "apart": _APART[:1] if isinstance(launches, str) else _APART,
            "schedule": [one for one in _schedules(family) if self._config(self._usual, one)],
        }

    def _edges(self, tile: int, step: int = 0) -> list[int]:
        """One step, and the extents beside the edges of a tile, as multiples of the step."""
        step = step or self._step
        tile = -(-tile // step) * step
        near = (tile - step, tile, tile + step, 2 * tile - step, 2 * tile + step, 5 * tile)
        odd = step * (2 * self._rng.randrange(8, 128) + 1)
        return sorted({step, odd, *(extent for extent in near if extent > 0)})

    def _holds(self, m: int) -> bool:
        """True if this kernel serves and supports so many rows."""
        problem = replace(self._usual, m=m)
        if self._family.supports(problem, self._gpu):
            return False
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _value(self, name: str) -> Any:
        """Draw one of an axis's planted values half of the time, and any extent the other half."""
        rng = self._rng
        if name not in ("m", "n", "k") or rng.random() < 0.5:
            return rng.choice(self.axes[name])
        if name == "m":
            return round(2 ** rng.uniform(0, max(self.axes["m"][-1], 1).bit_length() + 1))
        step = self._step if name == "n" else _ALIGNED
        return step * round(2 ** rng.uniform(0, (MAX_EXTENT // step).bit_length() - 1))

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        m, n, k = values["m"], values["n"], values["k"]
        problem = replace(self._usual, m=m, n=n, k=k)
        if not self._holds(m) or not _is_small(problem, values["schedule"]):
            return None
        apart_a, apart_b = values["apart"]
        apart = (0 if m == 1 else apart_a), (0 if n == 1 else apart_b)
        config = self._config(problem, values["schedule"])
        if config is None or 2 * (m * apart[0] + n * apart[1]) > MAX_BYTES:
            return None
        trial = Trial(problem, config, apart=apart)
        is_wanted = set(planted.items()) <= trial.facts(self._family, self._gpu)
        return trial if is_wanted else None


class _ScaledDraw(_Draw):
    """Products of e4m3 with factors of blocks."""

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        config, self._usual = target.config, cast(Any, target.problem)
        rows, columns = config["tile_m"], config["tile_n"]
        if config["swap_ab"]:
            rows, columns = columns, rows
        self._steps = {"m": 1, "n": _ALIGNED, "k": 2 * _ALIGNED}
        self.axes = {
            # All groups' rows: those of a few whole tiles, and of nearly whole ones.
            "m": sorted({*_edges(rows), 8 * rows + 3, 40 * rows}),
            "n": [self._whole("n", extent) for extent in (1, *_edges(columns)[1:])],
            "k": [self._whole("k", extent) for extent in (1, *_edges(SCALE_BLOCK)[1:], _DEEP)],
            "schedule": list(_schedules(self._family)),
        }

    def _whole(self, name: str, extent: int) -> int:
        step = self._steps[name]
        return -(-extent // step) * step

    def _value(self, name: str) -> Any:
        """One of an axis's values half of the time; of extents anything the other half."""
        rng = self._rng
        if name not in self._steps or rng.random() < 0.5:
            return rng.choice(self.axes[name])
        return self._whole(name, round(2 ** rng.uniform(0, MAX_GROUPED_EXTENT.bit_length() - 1)))

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        sizes = {name: value for name, value in values.items() if name != "schedule"}
        problem = replace(self._usual, **sizes)
        if not _is_small(problem, values["schedule"]):
            return None
        config = self._config(problem, values["schedule"])
        return None if config is None else Trial(problem, config)


class _GroupedDraw(_ScaledDraw):
    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        schedules = self.axes.pop("schedule")
        self.axes = {"groups": _GROUPS, **self.axes, "sizes": SIZES, "schedule": schedules}


def _has_block_factors(problem: Problem) -> bool:
    return isinstance(problem, GemmProblem) and problem.scales == "block"


def tile_of(tiling: Any) -> tuple[int, int, int]:
    """Tile (M, N, K) of a GEMM kernel."""
    if isinstance(tiling, product_work.FewRowsTiling):
        return MAX_ROWS, tiling.rows, tiling.depth
    tile = tiling.rows, tiling.columns
    tile_m, tile_n = tile[::-1] if tiling.is_swapped else tile
    return tile_m, tile_n, tiling.depth


def _is_small(problem: Problem, schedule: Sequence[tuple[str, Value]]) -> bool:
    if isinstance(problem, AttentionProblem) and problem.block_mask:
        batches, heads, *_ = problem.block_shape
        if batches * heads * problem.seqlen_q * problem.seqlen_kv > MAX_MASK_PAIRS:
            return False
    splits = int(dict(schedule).get("splits", 1))
    partial = 4 * splits * problem.output.elements if splits > 1 else 0
    operands = sum(operand.bytes for operand in problem.operands)
    return problem.flops <= MAX_FLOPS and operands + partial <= MAX_BYTES


def _edges(tile: int) -> list[int]:
    """One, and the lengths beside the edges of a tile."""
    near = (tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1, 5 * tile)
    return sorted({1, *(length for length in near if length > 0)})


def _schedules(family: Family) -> Iterator[tuple[tuple[str, Value], ...]]:
    """Every setting of the run-time parameters to try, legal for some problem or not."""
    pools: list[list[Value | None]] = []
    names = sorted(family.runtime_parameters)
    for name in names:
        domain = family.domains[name]
        known: Sequence[Value] = domain
        if isinstance(domain, range):
            known = sorted({value for value in (*_OF_RANGE, domain[-1]) if value in domain})
        pools.append([*known, *([None] if name in family.optional else [])])
    for values in product(*pools):
        named = zip(names, values, strict=True)
        yield tuple((name, value) for name, value in named if value is not None)


def _schedule(family: Family, config: Config) -> tuple[tuple[str, Value], ...]:
    names = sorted(family.runtime_parameters & config.params.keys())
    return tuple((name, config[name]) for name in names)
