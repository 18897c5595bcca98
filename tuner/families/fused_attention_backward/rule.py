"""Gradients of attention for shapes that nobody tuned: a few kernels, and a rule that chooses.

Sizes, strides and heads are arguments of a launch, so a proven kernel serves any. The rule expects
of each kernel a fixed time, its products at the rate of a long loop, and its bytes. Grouped heads
make few and long blocks of an own kernel, which the longest of them bounds.

The candidates are the own kernel of the head dimension and mask, if there is one, and
FlashAttention-3's where the user has it. PyTorch's own kernels set the bound: the rule has no
answer where they are expected to be as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.attention_instances import INSTANCES, instance
from tuner.families.fused_attention_backward import (
    GROUP_KEYS,
    MAX_COLUMNS,
    MAX_HEADS,
    FusedAttentionBackward,
)
from tuner.families.peers.sdpa_backward import SdpaBackward
from tuner.families.rule import RuleSelection
from tuner.families.target import DTYPES, Target
from tuner.hardware import GPUS, HOPPER, Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionBackwardProblem

MARGIN = 0.99
"""Share of the time of PyTorch's kernel that a candidate is expected to stay below."""
#: FLOPs from which an own kernel replaces PyTorch's: the smallest problem that was timed has 1.3e9.
MIN_FLOPS = 1e9
#: Bytes that the vendors' kernels move for each element of a grouped key, beside the others: sums
#: over the query heads of dK and dV in fp32.
GROUPED_BYTES = 40
#: Tile in which all kernels are taken to compute, queries and keys.
_TILE = 128


USUAL: Mapping[str, Value] = {
    **{"warp_groups": 2, "tile_m": 64, "stages": 2, "ds_stages": 2, "swap_dq": False, "dq": "bulk"},
    **{"late_dq": False, "early_exp": 0, "v_registers": 0, "transpose_ds": False, "rotate": False},
    **{"persistent": False, "section_heads": 8, "pdl": True},
}
"""Parameters of a kernel, where a target has no others."""


def _own(**params: Value) -> Config:
    return Config(FusedAttentionBackward.name, {**USUAL, **params})


class BackwardKind(NamedTuple):
    """Facts that are compiled into an own kernel, beside the type."""

    columns: int
    """Columns of the template's instance."""
    is_causal: bool
    is_deterministic: bool
    is_windowed: bool = False
    has_softcap: bool = False
    is_varlen: bool = False

    @property
    def is_plain(self) -> bool:
        """False for gradients that PyTorch has no fused kernel for."""
        return not (self.is_windowed or self.has_softcap or self.is_varlen)

    def label(self) -> str:
        """Short text for people."""
        named = (
            *(("causal", self.is_causal), ("windowed", self.is_windowed)),
            *(("soft cap", self.has_softcap), ("varlen", self.is_varlen)),
        )
        mask = ", ".join(name for name, is_on in named if is_on) or "full"
        return f"D={self.columns}, {mask}"


#: Levers of kernels by columns, and of deterministic ones.
_COLUMNS: Mapping[int, Mapping[str, Value]] = {
    64: {"tile_m": 128, "transpose_ds": True},
    96: {},
    128: {"transpose_ds": True},
    192: {"dq": "direct"},
    256: {"dq": "direct"},
}
_ORDERED: Mapping[int, Mapping[str, Value]] = {
    64: {"tile_m": 128, "dq": "ordered"},
    96: {"dq": "ordered"},
    128: {"dq": "ordered", "transpose_ds": True},
    192: {"dq": "ordered", "stages": 1},
    256: {"dq": "ordered", "stages": 1},
}


def _kernels() -> Iterator[tuple[BackwardKind, Config]]:
    for is_causal in (False, True):
        for columns, levers in _COLUMNS.items():
            yield BackwardKind(columns, is_causal, False), _own(**levers)
        for columns, levers in _ORDERED.items():
            rotates = columns == 64 and not is_causal
            yield BackwardKind(columns, is_causal, True), _own(**levers, rotate=rotates)
        for columns in (64, 128):
            levers = _COLUMNS[columns]
            yield BackwardKind(columns, is_causal, False, is_varlen=True), _own(**levers)
    for columns, is_causal in ((64, False), (64, True), (128, True), (256, True)):
        windowed = BackwardKind(columns, is_causal, False, is_windowed=True)
        yield windowed, _own(**_COLUMNS[columns])
    for columns, is_windowed in product((128, 256), (False, True)):
        capped = BackwardKind(columns, True, False, is_windowed, has_softcap=True)
        yield capped, _own(**_COLUMNS[columns])


KERNELS: Mapping[BackwardKind, Config] = dict(_kernels())
"""Own kernels by kind."""


def _rates(*tflops: float) -> dict[tuple[int, bool], float]:
    """By columns, at each without and with a causal mask."""
    return dict(zip(product(INSTANCES, (False, True)), tflops, strict=True))


class BackwardCost(NamedTuple):
    """Time of a kernel: fixed, by bytes and by products."""

    start_us: float
    gbs: float
    """Rate of the bytes before and after the products."""
    tflops: Mapping[tuple[int, bool], float]
    """Rate of the products by columns and mask, hidden pairs of half-masked tiles among them."""


#: Costs by kernel, and of its deterministic mode, as `tuner develop fit backward` finds them from
#: 27 problems on one H200 (driver 580.159.04, CUDA 13.0, torch 2.11, cuDNN 9.19, bf16, 27 November
#: 2026, ``tests/assets/fits/backward.jsonl.gz``). Fixed times of PyTorch's kernels are those of
#: smaller problems on an H100. Own deterministic kernels of 64, 128 and 256 columns under causal
#: masks have the rates of `placed`'s sections. FlashAttention-3 has no deterministic gradients of
#: 256 columns.
COSTS: Mapping[tuple[str, bool], BackwardCost] = {
    ("own", False): BackwardCost(
        7.0, 3500, _rates(576, 567, 499, 502, 638, 655, 437, 470, 478, 468)
    ),
    ("flash3", False): BackwardCost(
        11.5, 4000, _rates(614, 608, 598, 615, 681, 700, 574, 608, 503, 536)
    ),
    ("cudnn", False): BackwardCost(
        10.5, 2250, _rates(507, 438, 511, 474, 666, 633, 369, 408, 432, 478)
    ),
    ("flash2", False): BackwardCost(
        8.9, 1750, _rates(309, 270, 339, 273, 335, 320, 285, 330, 274, 281)
    ),
    ("own", True): BackwardCost(
        7.0, 3750, _rates(554, 513, 494, 447, 624, 593, 275, 299, 215, 254)
    ),
    ("flash3", True): BackwardCost(
        13.0, 3500, _rates(407, 558, 398, 489, 530, 550, 430, 532, 430, 532)
    ),
    ("flash2", True): BackwardCost(
        8.9, 1750, _rates(308, 270, 338, 271, 333, 320, 285, 329, 274, 281)
    ),
}


def serves(problem: AttentionBackwardProblem, gpu: Gpu) -> bool:
    """True for problems that an instance has the columns of, on a GPU that runs the kernels."""
    return kind_of(problem) is not None and gpu.compute_capability == HOPPER


def kind_of(problem: AttentionBackwardProblem) -> BackwardKind | None:
    """The kind of a problem; None where no instance has its columns."""
    if problem.head_dim > INSTANCES[-1]:
        return None
    return BackwardKind(
        instance(problem.head_dim),
        problem.is_causal,
        problem.is_deterministic,
        problem.is_windowed,
        problem.softcap > 0,
        problem.is_varlen,
    )


def expected_us(name: str, problem: AttentionBackwardProblem, gpu: Gpu) -> float:
    """Expected time of a kernel: ``own``, ``flash3``, ``cudnn`` or ``flash2``."""
    columns, cost = instance(problem.head_dim), COSTS[name, problem.is_deterministic]
    flops, moved = work(name, problem, gpu)
    tflops = cost.tflops[columns, problem.is_causal] * gpu.peak_tflops / GPUS["H100"].peak_tflops
    return cost.start_us + flops / tflops / 1e6 + moved / cost.gbs / 1e3


def work(name: str, problem: AttentionBackwardProblem, gpu: Gpu) -> tuple[float, float]:
    """Operations of a kernel's products, in whole tiles and columns of an instance, and the bytes
    that it moves before and after them.

    A block of an own kernel has one tile of keys, and the queries of all heads that share them. The
    longest block, on every multiprocessor, is the least work.
    """
    problem = AttentionBackwardProblem.of(problem.forward.evened, problem.is_deterministic)
    columns = instance(problem.head_dim)
    queries, keys = (-(-n // _TILE) * _TILE for n in (problem.seqlen_q, problem.seqlen_kv))
    pairs, rows = float(queries * keys), queries
    if problem.is_windowed:
        pairs = min(pairs, float(problem.forward.pairs + _TILE * queries))
        rows = min(queries, sum(problem.visible) + 2 * _TILE)
    elif problem.is_causal:
        pairs = min(pairs, pairs / 2 + _TILE * max(queries, keys) / 2)
    flops = 10 * problem.batch * problem.heads_q * pairs * columns
    if name == "own":
        group = problem.heads_q // problem.heads_kv
        flops = max(flops, 10.0 * group * rows * block_keys(problem) * columns * gpu.sm_count)
    # The fp32 sums of dQ are written as zeros before, and read at the end.
    moved = problem.bytes + 8 * problem.batch * problem.heads_q * problem.seqlen_q * columns
    if name != "own" and problem.heads_q != problem.heads_kv:
        moved += GROUPED_BYTES * problem.batch * problem.heads_kv * problem.seqlen_kv * columns
    return flops, moved


def block_keys(problem: AttentionBackwardProblem) -> int:
    """Keys of an own kernel's block."""
    return 2 * GROUP_KEYS if instance(problem.head_dim) <= MAX_COLUMNS else GROUP_KEYS


def placed(config: Config, problem: AttentionBackwardProblem, gpu: Gpu) -> Config:
    """An own kernel's config with as many heads side by side as fill the GPU twice.

    Fewer leave the short blocks of a causal mask to the end. More do not share the L2. In order the
    short blocks of a causal mask come first. More heads than fill the GPU twice then leave long
    blocks to the end. Longer blocks, of grouped heads and above 128 columns, fill it once; grouped
    heads count by their number (measured on an H200, 27 November 2026).
    """
    if problem.is_deterministic and problem.is_causal:
        group = problem.heads_q // problem.heads_kv
        fills = 1 if group > 1 or instance(problem.head_dim) > MAX_COLUMNS else 2
        heads = fills * gpu.sm_count * block_keys(problem) // (problem.seqlen_kv * group)
        section = min(MAX_HEADS, 1 << (max(1, heads).bit_length() - 1))
    else:
        heads = -(-2 * gpu.sm_count * block_keys(problem) // problem.seqlen_kv)
        section = max(int(config["section_heads"]), 1 << (heads - 1).bit_length())
        section = min(MAX_HEADS, section)
    return Config(config.family, {**config.params, "section_heads": section})


def select(problem: AttentionBackwardProblem, gpu: Gpu) -> RuleSelection | None:
    """The candidates that are expected to be faster than PyTorch's kernel; None without one."""
    kind = kind_of(problem)
    if kind is None:
        return None
    vendors = families()[SdpaBackward.name]
    bound_us = min(
        (
            expected_us(name, problem, gpu)
            for name in ("cudnn", "flash2")
            if kind.is_plain
            and vendors.accepts(problem, Config(vendors.name, {"kernel": name}), gpu)
        ),
        default=float("inf"),
    )
    candidates = {}
    # FlashAttention aligns a causal mask bottom-right, and packed sequences may have more keys.
    if not (kind.is_varlen and kind.is_causal):
        candidates["flash3"] = Config(vendors.name, {"kernel": "flash3"})
    own = KERNELS.get(kind)
    if own is not None and (not kind.is_plain or problem.flops >= MIN_FLOPS):
        candidates["own"] = placed(own, problem, gpu)
    ranked = []
    for name, config in candidates.items():
        us = expected_us(name, problem, gpu)
        if us < MARGIN * bound_us and families()[config.family].accepts(problem, config, gpu):
            ranked.append((us, config))
    if kind.is_plain and not kind.is_deterministic and problem.heads_q == problem.heads_kv:
        # FlashAttention-3 was faster at every such problem of the fit; the costs miss one by 20 %.
        ranked.sort(key=lambda row: (row[1].family != vendors.name, row[0]))
    else:
        ranked.sort(key=lambda row: row[0])
    doubts = ("chosen by the rule of attention's gradients",)
    return RuleSelection(tuple(ranked), Regime(), doubts) if ranked else None


@cache
def targets() -> tuple[Target, ...]:
    """The own kernels, to be built and proven."""
    return tuple(_targets())


def _targets() -> Iterator[Target]:
    for kind, config in KERNELS.items():
        for dtype in DTYPES:
            small = AttentionBackwardProblem(
                512,
                512,
                kind.columns,
                heads_q=2,
                is_causal=kind.is_causal,
                dtype=dtype,
                is_deterministic=kind.is_deterministic,
                window_left=100 if kind.is_windowed else -1,
                window_right=100 if kind.is_windowed and not kind.is_causal else -1,
                softcap=50.0 if kind.has_softcap else 0.0,
                is_varlen=kind.is_varlen,
            )
            yield Target(config, small, kind.label())
