"""Suites of problems for benchmarks, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import (
    E4M3,
    EPILOGUE_SCALES,
    AttentionProblem,
    DType,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)

_K = 1024
_WARM, _COLD = Regime("stream", "warm"), Regime("stream", "cold")

Named = Callable[[Problem, Gpu], Mapping[str, Config]]
"""Function that returns configs to time independently of the store, by the name that they are shown
under."""


def none_named(problem: Problem, gpu: Gpu) -> Mapping[str, Config]:
    """No further configs."""
    return {}


@dataclass(frozen=True)
class Suite:
    """Problems with a common summary."""

    name: str
    about: str
    problems: tuple[Problem, ...]
    regimes: tuple[Regime, ...]
    rounds: int = 20
    """Rounds of the interleaved timing."""
    against: tuple[str, ...] = ("cudnn", "flash2", "flash3", "flash4")
    """Peers to time, those that are fastest for some problem; see `contenders.peers_named`."""
    named: Named = none_named

    @property
    def op(self) -> str:
        """Operation of all its problems."""
        return self.problems[0].op


def _both_masks(problem: AttentionProblem) -> tuple[AttentionProblem, AttentionProblem]:
    return problem, replace(problem, is_causal=True)


#: (batch, query heads, key heads, sequence length, head dimension).
_ACCEPTANCE = (
    (1, 16, 16, 512, 64),
    (1, 16, 16, 1024, 64),
    (16, 16, 16, 2048, 64),
    (1, 8, 8, 8192, 64),
    (4, 16, 16, 4096, 64),
    (1, 32, 32, 1024, 128),
    (4, 16, 16, 2048, 128),
    (2, 16, 16, 8192, 128),
    (1, 32, 32, 4096, 128),
    (4, 8, 8, 4096, 256),
    (2, 32, 8, 4096, 128),
)

#: M, N, K: squares, a model's projections over many and few tokens.
_PLAIN = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (2048, 11008, 4096),
    (8192, 5120, 5120),
    (512, 4096, 4096),
    (128, 14336, 4096),
)
#: Those of them that are multiplied in e4m3.
_QUANTISED = ((8192, 8192, 8192), (4096, 14336, 4096))
#: N and K of two layers of each of six models, which ship or are quantised with factors of blocks,
#: as their published configurations have them.
BLOCK_SCALED = (
    *((2112, 7168), (24576, 1536)),  # DeepSeek-V3: down projections of q and kv; queries
    *((6144, 4096), (4096, 12288)),  # Qwen3-8B: q, k and v; MLP down
    *((9216, 4096), (4096, 8192)),  # Qwen3-235B-A22B: q, k and v; attention's output
    *((57344, 8192), (8192, 28672)),  # Llama 3.1 70B: MLP gate and up; down
    *((14336, 5120), (5120, 12288)),  # GLM-4.5: q, k and v; attention's output
    *((4096, 7168), (7168, 2048)),  # Kimi-K2: shared expert's gate and up; down
)
BLOCK_SCALED_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
_TYPES: tuple[DType, ...] = ("float16", "bfloat16")
#: Hidden and intermediate size of Llama 3 8B and of Llama 2 7B.
_MLPS = ((4096, 14336), (4096, 11008))
#: Experts, N, K: an up and the down projection of Mixtral 8x7B, of DeepSeek-V2-Lite.
_EXPERTS = ((8, 14336, 4096), (8, 4096, 14336), (64, 1408, 2048), (64, 2048, 1408))


def _mlp(tokens: int, hidden: int, between: int) -> tuple[Problem, ...]:
    """Up with a bias and a GELU of either kind, down with a bias and onto the residual."""
    return (
        GemmProblem(tokens, between, hidden, epilogue="bias_gelu"),
        GemmProblem(tokens, between, hidden, epilogue="bias_gelu_tanh"),
        GemmProblem(tokens, hidden, between, epilogue="bias_residual"),
    )


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "acceptance",
            "prefill from small to large, full and causal",
            tuple(
                problem
                for batch, heads, heads_kv, seqlen, head_dim in _ACCEPTANCE
                for problem in _both_masks(
                    AttentionProblem(seqlen, seqlen, head_dim, batch, heads, heads_kv)
                )
            ),
            (_WARM, _COLD),
        ),
        Suite(
            "decoding",
            "few queries against many keys, 32 heads over 8; buffers rotated",
            tuple(
                AttentionProblem(seqlen_q, seqlen_kv, 128, batch, 32, 8)
                for seqlen_q, batch, seqlen_kv in product(
                    (1, 4, 16), (1, 16, 64), (_K, 8 * _K, 32 * _K)
                )
            ),
            (_COLD,),
        ),
        Suite(
            "long",
            "long context, causal; too long to stay in L2",
            tuple(
                AttentionProblem(seqlen, seqlen, head_dim, 1, 8, is_causal=True)
                for head_dim, seqlen in product((64, 128), (32 * _K, 64 * _K, 128 * _K))
            ),
            (_WARM,),
            rounds=6,  # of up to a second a kernel
        ),
        Suite(
            "plain",
            "products of two matrices, as they are; buffers rotated",
            tuple(GemmProblem(*size, dtype=dtype) for dtype in _TYPES for size in _PLAIN),
            (_COLD,),
            against=("cublas", "cublaslt", "deep_gemm"),
        ),
        Suite(
            "mlp",
            "both products of a 7-8 B model's MLP with their epilogues; buffers rotated",
            tuple(
                problem
                for tokens, mlp in product((4096, 512), _MLPS)
                for problem in _mlp(tokens, *mlp)
            ),
            (_COLD,),
            against=("cublas", "cublaslt", "torch_compile", "addmm", "inductor"),
        ),
        Suite(
            "fp8",
            "products of e4m3 with their factors, each accumulation of its own; buffers rotated",
            tuple(
                GemmProblem(*size, dtype=E4M3, scales=scales, fast_accum=fast_accum)
                for fast_accum, scales, size in product((True, False), EPILOGUE_SCALES, _QUANTISED)
            ),
            (_COLD,),
            against=("scaled_mm",),
        ),
        Suite(
            "block_scaled",
            "layers of six models in e4m3 with factors of blocks; buffers rotated",
            tuple(
                GemmProblem(tokens, *layer, dtype=E4M3, scales="block")
                for layer, tokens in product(BLOCK_SCALED, BLOCK_SCALED_TOKENS)
            ),
            (_COLD,),
            against=("scaled_mm", "deep_gemm"),
        ),
        Suite(
            "few",
            "1 to 64 tokens through a 7-8 B model's weights, as in decoding; buffers rotated",
            tuple(
                GemmProblem(tokens, width, 4096)
                for width, tokens in product((14336, 4096), (1, 4, 16, 64))
            ),
            (_COLD,),
            against=("cublas", "cublaslt", "deep_gemm"),
        ),
        Suite(
            "gated",
            "both up projections of a 7-8 B model's MLP and SwiGLU; buffers rotated",
            tuple(
                SwigluProblem(tokens, between, hidden, dtype=dtype)
                for dtype in _TYPES
                for tokens in (4096, 512)
                for hidden, between in _MLPS
            ),
            (_COLD,),
            against=("torch", "inductor"),
        ),
        Suite(
            "moe",
            "projections of experts, their rows as unlike as routed ones; buffers rotated",
            tuple(
                GroupedGemmProblem(groups, rows, n, k, sizes="zipf", dtype="bfloat16")
                for groups, n, k in _EXPERTS
                for rows in (256, 2 * _K, 8 * _K)
            ),
            (_COLD,),
            against=("grouped_mm", "mm"),
        ),
    )
}
ALL = "all"


def suites_named(name: str, op: str) -> list[Suite]:
    """One suite of an operation, or all of them; the first where the name is empty.

    Raises:
        ConfigError: when there is none of that name; lists the known ones.
    """
    suites = {suite.name: suite for suite in SUITES.values() if suite.op == op}
    if not suites:
        raise ConfigError(f"{op} has no suite of its own (allowed: --shape)")
    if name == ALL:
        return list(suites.values())
    name = name or next(iter(suites))
    if name not in suites:
        raise ConfigError(f"suite '{name}' is not known (allowed: {', '.join((*suites, ALL))})")
    return [suites[name]]
