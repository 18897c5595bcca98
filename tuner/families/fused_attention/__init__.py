"""Fused attention, forward: `templates/fused_attention.cu.j2`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tuner.config import Config, Value
from tuner.families import attention_work
from tuner.families.arguments import WINDOW, extents_of, named_strides
from tuner.families.attention_instances import instance
from tuner.families.base import (
    LSE,
    Domain,
    Family,
    KernelSpec,
    Launch,
    Ref,
    Strides,
)
from tuner.families.chip_work import WGMMA_M, Work, attention_launch
from tuner.families.fused_attention import cost, grid, legality, paged_schedule, parts
from tuner.families.fused_attention.arguments import (
    MASK_STRIDES,
    argument,
    arguments_of,
    mask_strides,
)
from tuner.families.fused_attention.grid import MIN_SPLIT_KEYS
from tuner.families.fused_attention.legality import (
    MAX_CLUSTERED,
    MAX_SPLITS,
    MIN_ROW_STEP,
    PAGED_ONLY,
    WHOLE_ROWS,
)
from tuner.families.fused_attention.packing import MAX_PACKED, is_held, may_pad, tile_m
from tuner.families.fused_attention.registers import narrowed, registers, spills
from tuner.families.invariance import ReductionClass
from tuner.families.schedules import PagedBatch
from tuner.families.tape import called, smaller, where
from tuner.families.tma import tma_conflict
from tuner.hardware import HOPPER, WARP_GROUP, WGMMA_K_BYTES, Gpu
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem, DType, Problem, as_attention
from tuner.problem.attention_masks import PAGE_MULTIPLE

KERNEL = "attention"
"""Name of the only kernel. Its library also launches the kernels before and after it."""
#: Least kernels of a unit (`KernelSpec.together`). The first of a search take 27.5 CPU-seconds of
#: nvcc as one, 35.6 as two, 46.5 as four and 62.4 as eight (two busy cores, 29 November 2026).
TOGETHER = 4
#: Variables that decide the layouts, copies and products of CuTe (`KernelSpec.instances`).
INSTANCES = ("dtype", "head_dim", "value_dim", "tile_n", "kv_stages", "warp_groups", "key_groups",
             "q_in_registers", "packed_heads")  # fmt: skip
#: Text that the template takes, by variable.
WORDS = {
    "dtype": ("float16", "bfloat16", E4M3),
    "mask_operand": ("bool", "additive"),
    "skips_masked": ("blocks", "halves"),
    "rescale": ("lazy",),
    "turn_ends": ("scores",),
}
#: Share of the multiprocessors that clusters can be relied on to fill: a cluster's are those of one
#: GPC, of which some are left over. On an H200 42 clusters of three, 16 of eight or 8 of sixteen
#: took two rounds.
CLUSTERED_SHARE = 0.85
#: Clusters of more than `SMALL_CLUSTER` blocks, for each block of a multiprocessor, that take one
#: round: with more of them `SMALL_CLUSTER` splits took a fifth to a third less time (H200, H100).
LARGE_CLUSTERS, SMALL_CLUSTER = 7, 8
#: Levers that a draw leaves out half of the time.
_DRAWN_HALF = (
    *("key_groups", "pads_heads", "stages_output", "skips_masked", "rescale", "turn_ends"),
)
#: Rows of a page that one copy may bring, widest first.
BOXES = (64, PAGE_MULTIPLE)


class FusedAttention(Family):
    """One kernel a call; scores and probabilities stay in registers."""

    name = "fused_attention"
    op = "attention"
    kind = "fused"
    fit = "paged", "fused_attention.paged_fit"
    proof_draws = "fused_attention.draws:AttentionDraw"
    capabilities = (HOPPER,)
    takes_value_dim = True
    takes_wide_heads = True
    writes_lse = True
    cost_constants = cost.CONSTANTS
    runtime_parameters = frozenset({"splits", "pdl", "combine"})
    work_terms = attention_work.TERMS
    amounts = staticmethod(attention_work.work)
    domains: ClassVar[Mapping[str, Domain]] = {
        "warp_groups": (1, 2, 3, 4),
        "key_groups": (2, 4),
        "column_groups": (2,),
        "tile_n": range(16, 257, 16),  # up to the N extent of one WGMMA
        "kv_stages": (1, 2, 3, 4, 5, 8),
        "score_buffers": (1, 2),
        "packed_heads": (1, 2, 4, 8, 16, MAX_PACKED),
        "pads_heads": (True,),
        "ping_pong": (False, True),
        "q_in_registers": (False, True),
        "early_exp": (0, 25, 50, 100),
        "stages_output": (True,),
        "skips_masked": ("blocks", "halves"),
        "rescale": ("lazy",),
        "turn_ends": ("scores",),
        "persistent": (False, True),
        "blocks_per_sm": (1, 2),
        "splits": range(1, MAX_SPLITS + 1),
        "pdl": (False, True),
        "combine": ("cluster", "kernel"),
        "box_rows": BOXES,
        "whole_rows": (True,),
        "copy_warps": (3,),
        "stream_k": (True,),
        "own_first": (True,),
        "leaves_cluster": (True,),
        "longest_first": (True,),
        "fills_rows": (True,),
        "searches": (True,),
        "split_keys": (256, 512, 1024, 2048),
        "carries_parts": (True,),
    }
    optional = frozenset(
        {
            *("key_groups", "packed_heads", "ping_pong", "early_exp", "stages_output", "combine"),
            *("pads_heads", "box_rows", "whole_rows", "copy_warps", "skips_masked"),
            *("stream_k", "longest_first", "rescale", "turn_ends", "split_keys"),
            *("carries_parts", "column_groups", "searches", "fills_rows", "leaves_cluster"),
            "own_first",
        }
    )
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        "tile_n": (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
        "splits": (1, 2, 8, 32),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionProblem):
            return reason
        if problem.is_wide and (problem.modifiers or problem.has_sinks):
            return f"{self.name} has no masks as operands and no sinks with D={problem.head_dim}"
        if not problem.value_dim:
            return ""
        is_wide = problem.is_latent or problem.value_dim > problem.head_dim
        if is_wide or problem.is_paged or problem.modifiers:
            return f"{self.name} has DV for values narrower than keys, without pages and masks"
        return ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return legality.conflicts(as_attention(problem), config)

    def accepts(self, problem: Problem, config: Config, gpu: Gpu) -> bool:
        """As `Family.accepts`, without spills: a config that was chosen at one mask and D may spill
        at another.
        """
        is_legal = super().accepts(problem, config, gpu)
        return is_legal and not spills(as_attention(problem), config)

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        if not isinstance(problem, AttentionProblem) or self.supports(problem, gpu):
            return []
        return [
            config
            for config in grid.candidates(self.name, problem, gpu)
            if not self.violations(problem, config, gpu) and grid.pays(problem, config)
        ]

    def carried(self, problem: Problem, config: Config) -> Config:
        """Without grouped heads `packed_heads` is absent, which means 1 to kernels. With variable
        lengths or paged caches `stages_output` is absent, and `skips_masked` and `searches` where
        they are not legal.
        A mask operand leaves registers for narrower tiles. Nothing is carried to heads whose
        queries fill no tile.
        """
        attention = as_attention(problem)
        if attention.mask_operand:
            config = narrowed(attention, config)
        group = attention.heads_q // attention.heads_kv
        params = dict(config.params)
        if attention.is_packed:
            params.pop("stages_output", None)
        if not attention.is_paged:
            for name in PAGED_ONLY:
                params.pop(name, None)
        if not attention.is_varlen or attention.is_paged:
            params.pop("searches", None)
        packed, pads = int(params.pop("packed_heads", 1)), params.pop("pads_heads", False)
        fills = params.pop("fills_rows", False)
        if pads and is_held(group, packed, True) and may_pad(attention):
            params |= {"pads_heads": True, **({"fills_rows": True} if fills else {})}
        else:
            packed = math.gcd(packed, group)
        if attention.seqlen_q < tile_m(params) and not attention.is_paged:
            return config
        if group > 1:
            params["packed_heads"] = packed
        if not legality.may_skip(attention, params):
            params.pop("skips_masked", None)
        return Config(self.name, params)

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As `Family.draw`, with `ping_pong`, `early_exp` and `combine` only where they apply.
        Optional levers are each off half of the time. Boxes are as wide as possible.
        """
        params = dict(super().draw(problem, gpu, members, rng).params)
        for name in PAGED_ONLY:
            params.pop(name, None)
        for name in ("split_keys", "carries_parts", "searches", "fills_rows"):
            params.pop(name, None)
        for name in _DRAWN_HALF:
            if rng.random() < 0.5:
                params.pop(name, None)
        turn_ends = params.pop("turn_ends", None)
        ping_pong, early = params.pop("ping_pong", False), params.pop("early_exp", 0)
        combine = params.pop("combine", "kernel")
        if params["splits"] != 1:
            params["combine"] = combine
        if params["score_buffers"] == 1:
            params["early_exp"] = early
            if params["warp_groups"] != 1:
                params["ping_pong"] = ping_pong
                params |= {"turn_ends": turn_ends} if ping_pong and turn_ends else {}
        return Config(self.name, params)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = as_attention(problem)
        producer, consumer = registers(attention, config)
        paged: dict[str, Value] = {}
        if attention.is_paged:
            widest = _box_rows(attention.page_size, int(config["tile_n"]))
            rows = config.get("box_rows", widest)
            paged = {"is_paged": True, "box_rows": rows, "has_sinks": attention.has_sinks}
        return {
            KERNEL: KernelSpec(
                "fused_attention.cu.j2",
                {
                    "ping_pong": False,
                    "packed_heads": 1,
                    "early_exp": 0,
                    "key_groups": 1,
                    "stages_output": False,
                    **{k: v for k, v in config.params.items() if k not in self.runtime_parameters},
                    "dtype": attention.dtype,
                    "head_dim": instance(attention.head_dim),
                    **({"value_dim": instance(attention.value_dim)} if attention.value_dim else {}),
                    "is_causal": attention.is_causal,
                    "is_windowed": attention.is_windowed,
                    "has_softcap": attention.softcap > 0,
                    "is_varlen": attention.is_varlen and not attention.is_paged,
                    **_mask_variables(attention),
                    **({"is_sparse": True} if attention.block_mask else {}),
                    "producer_registers": producer,
                    "consumer_registers": consumer,
                    **paged,
                },
                WORDS,
                arguments_of(attention),
                TOGETHER,
                INSTANCES,
            )
        }

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return self._launches(as_attention(problem), config, scale, {})

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        attention = as_attention(problem)
        for matrix in attention.matrices:
            if reason := tma_conflict(matrix, strides.get(matrix.name, matrix.strides)):
                return reason
        if "whole_rows" in config.params:
            for matrix in attention.matrices[1:3]:
                page, head, *_ = strides.get(matrix.name, matrix.strides)
                if math.gcd(page, head) % MIN_ROW_STEP:
                    return f"{matrix.name}: strides of pages and heads are not multiples of 64"
        return self._launches(attention, config, scale, strides)

    def _launches(
        self, attention: AttentionProblem, config: Config, scale: float, own: Strides
    ) -> list[Launch]:
        strides = {m.name: own.get(m.name, m.strides) for m in attention.matrices}
        integers = {
            **extents_of(attention),
            **({"value_dim": attention.value_dim} if attention.value_dim else {}),
            **named_strides(strides),
            "splits": parts.blocks(attention, config),
            "pdl": int(config["pdl"]),
            "clustered": int(config.get("combine", "kernel") == "cluster"),
        }
        if attention.is_windowed:
            integers |= zip(WINDOW, attention.visible, strict=True)
        if attention.is_paged:
            key, table = attention.matrices[1], own.get("page_table", (max(attention.pages), 1))
            integers |= {"total_q": attention.total_q, "page_size": attention.page_size}
            integers |= {"pages": key.shape[0], "table_stride": table[0]}
        elif attention.is_varlen:
            integers |= {"total_q": attention.total_q, "total_kv": attention.total_kv}
        if mask := attention.mask_operand:
            integers |= zip(MASK_STRIDES, mask_strides(attention, mask, own), strict=True)
        if attention.block_mask:
            of_batch, of_heads, of_queries, columns = attention.block_shape
            integers |= {
                "blocks_batch": of_heads * of_queries * (of_batch > 1),
                "blocks_head": of_queries * (of_heads > 1),
                "block_columns": columns,
            }
        tensors = {argument(one.name): Ref(one.name) for one in attention.operands}
        tensors[LSE] = Ref(LSE)
        scalars = {"scale": scale, **({"softcap": attention.softcap} if attention.softcap else {})}
        return [Launch.named(KERNEL, arguments_of(attention), tensors, integers, scalars)]

    def paged_schedule(self, config: Config, batch: PagedBatch) -> Mapping[str, Value]:
        """Never a programmatic dependent: other libraries' kernels before let none begin early.

        As such it took 0.6 us more, and up to 2 us between a layer's products (an H200, 29 November
        2026).
        """
        if config["persistent"] or "stream_k" in config.params:
            return {**self.ordered_schedule(config), "pdl": False}
        splits, combine = paged_schedule.best(paged_schedule.decoding(config, batch))
        combined: Mapping[str, Value] = {"combine": combine} if combine else {}
        return {"splits": splits, **combined, "pdl": False}

    def paged_us(self, config: Config, batch: PagedBatch) -> float | None:
        if config["persistent"] or "stream_k" in config.params:
            return None
        return paged_schedule.best_us(paged_schedule.decoding(config, batch))

    def ordered_schedule(self, config: Config) -> Mapping[str, Value]:
        is_shared = "split_keys" in config.params and "combine" in config.params
        return {"splits": 1, "combine": "kernel"} if is_shared else {"splits": 1}

    def holds(self, config: Config, group: int) -> bool:
        return is_held(group, int(config.get("packed_heads", 1)), "pads_heads" in config.params)

    def joins(self, config: Config) -> bool:
        return "pads_heads" in config.params

    def tile_rows(self, config: Config) -> int:
        return tile_m(config.params)

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        """Blocks of keys begin at multiples of `tile_n`, and parts at those of `split_keys`.

        None with a count of splits, whose parts depend on the number of keys. None under a
        block-sparse mask, whose keys are in its table's order.
        """
        attention, params = as_attention(problem), config.params
        if config["splits"] > 1 or "stream_k" in params or attention.block_mask:
            return None
        return ReductionClass(
            depth=WGMMA_K_BYTES // DTYPE_BYTES[attention.dtype],
            keys=int(config["tile_n"]),
            key_groups=int(config.get("key_groups", 1)),
            rescale=str(config.get("rescale", "")),
            **parts.reduction(config),
        )

    def invariant_kernels(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        """Kernels of fixed parts, which no portfolio has measured: the model's times."""
        attention = as_attention(problem)
        for config in parts.configs(attention, gpu):
            yield self.predict_us(attention, parts.usual(attention, config), gpu), config

    def invariant_builds(self, dtype: DType) -> Iterator[tuple[Config, Problem]]:
        return parts.built(dtype)

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        attention = as_attention(problem)
        groups = config["warp_groups"]
        work = attention_launch(
            attention,
            gpu,
            tile_m=WGMMA_M * groups // config.get("column_groups", 1),
            tile_n=config["tile_n"],
            columns=instance(attention.head_dim),
            threads=WARP_GROUP * (groups + 1),
            smem=legality.smem_bytes(attention, config),
            blocks_per_sm=config.get("blocks_per_sm", 1),
            packed=config.get("packed_heads", 1),
            pads=config.get("pads_heads", False),
            splits=config.get("splits", 1),
        )
        return (work,)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        attention = as_attention(problem).evened
        head_tile = instance(attention.head_dim)
        return cost.predict_us(attention, config, head_tile, gpu, self.constants)

    def tiling(self, config: Config) -> attention_work.AttentionTiling:
        return attention_work.AttentionTiling(
            rows=tile_m(config.params),
            keys=int(config["tile_n"]) * int(config.get("key_groups", 1)),
            resident=int(config["blocks_per_sm"]),
            packed=int(config.get("packed_heads", 1)),
            splits=int(config.get("splits", 1)),
            pads_heads=bool(config.get("pads_heads", False)),
            fills_rows=bool(config.get("fills_rows", False)),
        )

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        packed = int(config.get("packed_heads", 1))
        pads = "pads_heads" in config.params

        def splits(problem: AttentionProblem) -> Sequence[int]:
            group = problem.heads_q // problem.heads_kv
            if not is_held(group, packed, pads):
                return ()
            sizes = attention_work.AttentionSizes.of(problem)
            counts: Sequence[int] = self.traced_splits(config, sizes, gpu)
            return counts

        return splits

    def traced_splits(self, config: Config, sizes: Any, gpu: Gpu) -> Any:
        """For problems that meet `condition`."""
        if not self.is_split(config):
            return (1,)
        params, packed = config.params, int(config.get("packed_heads", 1))
        is_clustered = params["combine"] == "cluster"
        room = gpu.sm_count * int(params["blocks_per_sm"])
        room = int(CLUSTERED_SHARE * room) if is_clustered else room
        held = sizes.heads // sizes.heads_kv if "fills_rows" in params else packed
        tiles = -(-sizes.seqlen_q // (tile_m(params) // held))
        tiles *= sizes.heads_kv if "pads_heads" in params else sizes.heads // packed
        most = smaller(sizes.seqlen_kv // MIN_SPLIT_KEYS, room // tiles)
        limit: Any = MAX_SPLITS
        if is_clustered:
            largest = LARGE_CLUSTERS * int(params["blocks_per_sm"])
            limit = where(tiles, largest, SMALL_CLUSTER, MAX_CLUSTERED)
        return called(grid.split_counts, smaller(limit, most))

    def condition(self, config: Config) -> str:
        """That the group of query heads fits the pack."""
        packed = int(config.get("packed_heads", 1))
        if packed == 1:
            return ""
        if "pads_heads" in config.params:
            return f"1 < heads // heads_kv <= {packed}"
        return f"heads // heads_kv % {packed} == 0"

    def is_scheduled(self, config: Config) -> bool:
        return "combine" in config.params or config.get("packed_heads", 1) != 1

    def is_split(self, config: Config) -> bool:
        return "combine" in config.params

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        """An absent `packed_heads` is 1 for the kernel."""
        attention, params = as_attention(problem), {**config.params, "splits": splits}
        if attention.heads_q > attention.heads_kv:
            params.setdefault("packed_heads", 1)
        return Config(self.name, params)

    def served(self, problem: Problem, config: Config) -> Config:
        attention = as_attention(problem)
        is_divided = int(config["splits"]) > 1 or "combine" in config.params
        has_two_kernels = is_divided and config.get("combine") != "cluster"
        if has_two_kernels or attention.is_paged or attention.block_mask:
            return config
        return Config(self.name, {**config.params, "pdl": False})

    def legality_facts(self, problem: Problem) -> Hashable:
        attention = as_attention(problem)
        facts = attention.dtype, attention.heads_q // attention.heads_kv
        if attention.block_mask:
            return (*facts, "h" in attention.block_mask)
        if attention.is_paged:
            return (*facts, attention.page_size, attention.head_dim in WHOLE_ROWS)
        return facts


def _box_rows(page_size: int, tile_n: int) -> int:
    """Rows of a page that one copy brings: few kernels serve pages of every size."""
    return next(rows for rows in BOXES if page_size % rows == tile_n % rows == 0)


def _mask_variables(problem: AttentionProblem) -> Mapping[str, Value]:
    """Compiled-in part of a mask operand: its presence and kind."""
    kind = "additive" if problem.bias else "bool"
    return {"mask_operand": kind} if problem.mask_operand else {}
