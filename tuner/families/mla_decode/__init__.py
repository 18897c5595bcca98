"""Decoding of multi-head latent attention over a paged cache: queries of 576 columns, values the
first 512 columns of the same cache row, one latent head.

Sizes, strides and lengths are arguments of a launch, so few kernels serve all calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import ClassVar, get_args

from tuner.config import Config, Value
from tuner.families.arguments import Arguments
from tuner.families.base import LSE, Domain, Family, KernelSpec, Launch, Ref, Strides
from tuner.hardware import GRAPH_LAUNCH_US, HOPPER, Gpu
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem, Problem
from tuner.problem.attention import LATENT_DIM, LATENT_VALUE_DIM, as_attention
from tuner.problem.attention_masks import Cache

KERNEL = "mla_decode"
"""Name of the one kernel."""
WORDS = {"dtype": ("float16", "bfloat16"), "cache": get_args(Cache)[1:]}
"""Text that the template takes, by variable."""
ARGUMENTS = Arguments(
    tensors=("query", "cache", "block_table", "lengths", "out", "lse"),
    integers=(
        *("batch", "queries", "heads", "page_size", "pages"),
        *("query_batch", "query_row", "query_head", "cache_page", "cache_slot", "table_row"),
        *("out_batch", "out_row", "out_head", "lse_batch", "lse_head"),
        *("tile_overhead", "cut_overhead", "pdl"),
    ),
    scalars=("scale",),
)
DESCALED = replace(ARGUMENTS, tensors=(*ARGUMENTS.tensors, "descale"))
"""Arguments of a kernel over a cache with one factor."""
MAX_BATCH, MAX_QUERIES, MAX_HEADS = 65536, 64, 4096
VECTOR_BYTES = 16
"""Strides are multiples of this, as TMA wants them."""
COPY_CLOCKS: Mapping[Cache, int] = {"": 0, "e4m3": 91, "e4m3_blocks": 110}
"""Clocks in which threads copy and convert a quantised row for a block of rows: 128 sequences of
4096 rows, 16 to 128 heads (an H200, 29 November 2026)."""
ROWS = 64
"""Rows of a block: heads of one query after those of another."""
LATENT = f"HKV=1,D={LATENT_DIM},DV={LATENT_VALUE_DIM}"
"""Text of a problem's latent rows."""
LEVERS = ("whole_rows", "cluster")
"""Parameters that are compiled in."""


class MlaDecode(Family):
    """One kernel, and a second one that adds the parts of divided sequences."""

    name: ClassVar[str] = "mla_decode"
    op: ClassVar[str] = AttentionProblem.op
    capabilities = (HOPPER,)
    takes_value_dim = True
    takes_wide_heads = True
    writes_lse = True
    proof_draws = "mla_decode.draws:LatentDraw"
    runtime_parameters = frozenset({"tile_overhead", "cut_overhead"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "whole_rows": (False, True),
        "cluster": (1, 2),
        "tile_overhead": (0, 1, 4, 8, 16),
        "cut_overhead": (0, 2, 4, 16),
    }
    cost_constants: ClassVar[Mapping[str, float]] = {
        # Shares of the data sheet's bandwidth and tensor rate. On an H200 whole rows and pairs were
        # within 2 % of the others.
        **{"memory_share": 0.84, "tensor_share": 0.6},
        # Tiles' worth of a sequence's ends, and of adding parts, over what a launch was told.
        **{"start_us": 8.0, "imbalance": 0.01},
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        if reason := super().supports(problem, gpu):
            return reason
        attention = as_attention(problem)
        if not (attention.is_latent and attention.is_paged) or attention.dtype == E4M3:
            return f"{self.name} is for D={LATENT_DIM} over pages, of fp16 or bf16"
        if attention.is_windowed or attention.softcap or attention.has_sinks:
            return f"{self.name} has no windows, soft caps and sinks"
        queries = attention.seqlen_q
        if queries > 1 and (attention.is_varlen or not attention.is_causal):
            return f"{self.name} has as many queries of each sequence, under a causal mask"
        limits = (MAX_BATCH, MAX_QUERIES, MAX_HEADS)
        if any(map(int.__gt__, (attention.batch, queries, attention.heads_q), limits)):
            return f"{self.name} has at most {MAX_QUERIES} queries and {MAX_HEADS} heads"
        return ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        if as_attention(problem).cache and (config["whole_rows"] or config["cluster"] > 1):
            return ["rows of e4m3 are copied by threads: whole_rows=0,cluster=1"]
        blocks, cluster = row_blocks(as_attention(problem)), config["cluster"]
        if blocks % cluster:
            return [f"cluster={cluster} does not divide {blocks} blocks of rows"]
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        if self.supports(problem, gpu):
            return []
        configs = [
            Config(self.name, dict(zip(self.domains, values, strict=True)))
            for values in product(*self.domains.values())
        ]
        return [config for config in configs if not self.violations(problem, config, gpu)]

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        usual: dict[str, Value] = {"tile_overhead": 4, "cut_overhead": 4}
        return Config(self.name, {**usual, **config.params})

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = as_attention(problem)
        variables: dict[str, Value] = {name: config[name] for name in LEVERS}
        variables["dtype"] = attention.dtype
        variables |= {"cache": attention.cache} if attention.cache else {}
        return {KERNEL: KernelSpec("mla_decode.cu.j2", variables, WORDS, _arguments(attention))}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return self._launches(as_attention(problem), config, scale, {})

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        """As of `Family`. Strides of the queries and the output begin with a sequence's."""
        attention = as_attention(problem)
        for operand in attention.operands:
            named = strides.get(operand.name, operand.strides)
            vector = VECTOR_BYTES // DTYPE_BYTES[operand.dtype]
            if len(named) == 4 and (
                named[-1] != 1 or any(step % vector or step <= 0 for step in named[:-1])
            ):
                return f"strides {named} of {operand.name} are not multiples of 16 bytes"
        return self._launches(attention, config, scale, strides)

    def _launches(
        self, problem: AttentionProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        queries, heads, rows = problem.seqlen_q, problem.heads_q, problem.total_q
        cache = {operand.name: operand for operand in problem.operands}["key"]
        page, _, slot, _ = strides.get("key", cache.strides)
        (table_row, _) = strides.get("page_table", (max(problem.pages), 1))
        integers = {
            **{"batch": problem.batch, "queries": queries, "heads": heads},
            **{"page_size": problem.page_size, "pages": cache.shape[0]},
            **{"cache_page": page, "cache_slot": slot, "table_row": table_row},
            **dict(zip(("lse_batch", "lse_head"), strides.get(LSE, (queries, rows)), strict=True)),
            "pdl": 1,
            **{name: config[name] for name in self.runtime_parameters},
        }
        for name, width in (("query", problem.head_dim), ("out", problem.value_width)):
            row = heads * width
            usual = (queries * row, width, row, 1)
            batch, head, step, _ = strides.get(name, usual)
            integers |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": step}
        operands = {"cache": "key", "block_table": "page_table", "lengths": "seqused_k"}
        operands |= {"query": "query", "out": "out", "lse": LSE, "descale": "descale_k"}
        arguments = _arguments(problem)
        tensors = {name: Ref(operands[name]) for name in arguments.tensors}
        return [Launch.named(KERNEL, arguments, tensors, integers, {"scale": scale})]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        attention, constants = as_attention(problem), self.constants
        moved_us = attention.bytes / (constants["memory_share"] * gpu.memory_gbs * 1e3)
        rows = row_blocks(attention) * ROWS / (attention.heads_q * attention.seqlen_q)
        rate = constants["tensor_share"] * gpu.peak_tflops * 1e6
        busy_us = attention.flops * rows / rate
        copied = attention.total_kv * row_blocks(attention) * COPY_CLOCKS[attention.cache]
        copied_us = copied / (gpu.sm_count * gpu.clock_max_mhz)
        off = abs(config["tile_overhead"] - 4) + abs(config["cut_overhead"] - 4)
        most = max(moved_us, busy_us, copied_us) * (1 + constants["imbalance"] * off)
        return float(GRAPH_LAUNCH_US + constants["start_us"] + most)


def _arguments(problem: AttentionProblem) -> Arguments:
    return DESCALED if problem.cache == "e4m3" else ARGUMENTS


def row_blocks(problem: AttentionProblem) -> int:
    """Blocks of rows of a sequence."""
    packed = min(ROWS, 1 << (problem.heads_q - 1).bit_length())
    return ceil(problem.heads_q / ROWS) * ceil(problem.seqlen_q / (ROWS // packed))
