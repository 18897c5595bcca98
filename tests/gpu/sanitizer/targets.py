"""The kernels of each family that the GPU tests prove, on tiny problems.

Sizes end in the middle of tiles; where a kernel is persistent, one problem has more tiles than
there are multiprocessors, so that a block takes a second one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import backward_configs
import block_scaled_cases
import cluster_gemm_cases
import gemm_cases
import gemm_swiglu_cases
import gemv_cases
import grouped_gemm_cases
import paged_cases
import two_kernel_cases
from fused_levers import called, combination_of, covering

from tuner.config import Config, Value
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.fused_attention import wide_rule
from tuner.families.mla_decode import LATENT
from tuner.families.mla_decode import rule as latent
from tuner.hardware import Gpu
from tuner.problem import (
    E4M3,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

Pair = tuple[Problem, Config]

#: Calls of a kernel of fused attention on a problem.
MAX_CALLS = 3
#: Floating-point operations of a tiny problem stay below this.
MAX_FLOPS = 10**9
#: Heads come in groups that packings up to 8 divide, one of 16; the last two have twice more tiles
#: than multiprocessors.
FUSED = (
    "B=1,H=2,SQ=200,SKV=330",
    "B=1,H=16,HKV=1,SQ=45,SKV=1100,layout=bshd",
    "B=9,H=128,HKV=16,SQ=6,SKV=130,layout=bshd",
    "B=1,H=136,SQ=70,SKV=130",
)
#: Rows of tiles of a product that has more tiles than multiprocessors.
TILE_ROWS = 7
#: Fewest products of an element: two or three steps of K, the last one cut; of e4m3 a multiple of
#: 16.
SHORT_K, SHORT_K_E4M3 = 72, 80
#: Groups, M, N, K and sizes: a tile or more of every other group for each multiprocessor.
MANY_GROUPS = (70, 2100, 1032, SHORT_K, "sparse")
#: The same of e4m3.
MANY_GROUPS_E4M3 = (70, 2100, 1032, SHORT_K_E4M3, "sparse")
#: A block-scaled product, and one over groups, with more blocks of K than stages, also where eight
#: blocks share K, so that each stage is used twice: M, N, K; groups, rows of all, N, K, sizes.
LONG_K, LONG_K_GROUPS = (130, 136, 8208), (4, 300, 136, 8208, "zipf")
#: Gradients of queries and keys that end in the middle of tiles: grouped heads, more keys than
#: queries, a window; the last ones have more tiles than multiprocessors. A kernel takes the first
#: kind that is legal for it.
BACKWARD: tuple[tuple[str, ...], ...] = (
    (
        "H=4,HKV=2,SQ=200,SKV=330,D=64,causal=1,dtype=bf16",
        "B=5,H=30,HKV=15,S=70,D=56,causal=1,dtype=bf16,layout=bshd",
    ),
    (
        "H=4,HKV=2,SQ=200,SKV=330,D=128,dtype=fp16",
        "B=5,H=30,HKV=15,S=70,D=120,dtype=fp16,layout=bshd",
    ),
    (
        "H=2,S=200,D=256,causal=1,dtype=bf16",
        "B=5,H=30,S=70,D=248,causal=1,dtype=bf16,layout=bshd",
    ),
    ("H=2,S=330,D=64,causal=1,window=100,dtype=bf16",),
)
#: Decoding of latent attention: sequences that end within pages and tiles, one block of rows and
#: several, of which clusters take pairs.
DECODED = (
    "B=3,H=16,SQ=1,SKV=300,page_size=64",
    "B=3,H=128,SQ=2,SKV=333,causal=1,page_size=48",
    "B=7,H=20,SQ=4,SKV=129,causal=1,page_size=16",
    "B=17,H=64,SQ=1,SKV=330,varlen=1,page_size=128",
)
#: Queries and keys in two kernels go no further.
LONGEST = 300
#: A problem, and threads a row, vector width, rows a block and passes. Between them every value of
#: each, causal and not, both types, and rows of which a thread holds most.
SOFTMAX = {
    "M=37,N=330": (16, 2, 8, 1),
    "M=45,N=1001,B=3,causal=1": (32, 1, 4, 1),
    "M=150,N=760,causal=1": (16, 8, 64, 1),
    "M=90,SQ=45,N=700,B=2,causal=1,dtype=bf16": (64, 4, 16, 1),
    "M=33,N=1000,dtype=bf16": (128, 8, 2, 2),
    "M=301,N=524,causal=1": (32, 4, 32, 3),
    "M=7,N=30008": (256, 8, 1, 1),
    "M=141,N=2050": (512, 2, 1, 3),
    "M=5,N=9001,dtype=bf16": (1024, 1, 1, 2),
}


@dataclass(frozen=True)
class Target:
    """A kernel of a family, or the two of `two_kernel_attention`, on tiny problems."""

    family: str
    name: str
    launches: tuple[Pair, ...]

    def label(self) -> str:
        return f"{self.family} {self.name}"

    def specs(self) -> list[KernelSpec]:
        return specs(self.launches)


def specs(launches: Iterable[Pair]) -> list[KernelSpec]:
    """The distinct kernels of some launches."""
    named = (family(config.family).kernels(problem, config) for problem, config in launches)
    return list(dict.fromkeys(spec for one in named for spec in one.values()))


def tiny(chosen: Config, name: str, problems: Iterable[Problem]) -> Target:
    """One config on those of the problems that are small."""
    pairs = tuple((problem, chosen) for problem in problems if problem.flops < MAX_FLOPS)
    return Target(chosen.family, name, pairs)


def over(tiles: int, tile: int, step: int) -> int:
    """The least multiple of `step` that takes as many tiles."""
    return ((tiles - 1) * tile // step + 1) * step


def wave(gpu: Gpu, chosen: Config, gated: bool = False) -> tuple[int, int]:
    """M and N of a product in more tiles than multiprocessors."""
    along_m, along_n = chosen["tile_m"], chosen["tile_n"]
    if chosen["swap_ab"]:
        along_m, along_n = along_n, along_m
    step = 8
    if gated:  # two columns of a tile make one, and columns come in steps of 32
        along_n, step = along_n // 2, 32
    return over(TILE_ROWS, along_m, 1), over(gpu.sm_count // TILE_ROWS + 1, along_n, step)


def gemm(gpu: Gpu) -> Iterator[Target]:
    for name, (*_, chosen) in gemm_cases.EPILOGUES.items():
        sizes = (*gemm_cases.EPILOGUE_SIZES, (*wave(gpu, chosen), SHORT_K, 1))
        yield tiny(chosen, name, (gemm_cases.with_epilogue(name, size) for size in sizes))
    for name, (_, chosen) in gemm_cases.SCALED.items():
        longer = (*gemm_cases.SCALED_SIZES, (*wave(gpu, chosen), SHORT_K_E4M3))
        problems = (gemm_cases.scaled(name, size) for size in longer)
        yield tiny(chosen, f"scaled, {name}", problems)


def gemm_swiglu(gpu: Gpu) -> Iterator[Target]:
    for name, (dtype, chosen) in gemm_swiglu_cases.CASES.items():
        sizes = (*gemm_swiglu_cases.SIZES, (*wave(gpu, chosen, gated=True), SHORT_K))
        yield tiny(chosen, name, (SwigluProblem(*size, dtype=dtype) for size in sizes))


def gemv(gpu: Gpu) -> Iterator[Target]:
    """Their own problems: those of persistent kernels have more rows than blocks take at once."""
    for name, (*_, chosen, _) in gemv_cases.CASES.items():
        yield tiny(chosen, name, [gemv_cases.problem_of(name)])


def grouped_gemm(gpu: Gpu) -> Iterator[Target]:
    for name, (dtype, chosen) in grouped_gemm_cases.CASES.items():
        sizes = (*grouped_gemm_cases.SIZES, MANY_GROUPS)
        yield tiny(chosen, name, (GroupedGemmProblem(*size, dtype=dtype) for size in sizes))


def cluster_gemm(gpu: Gpu) -> Iterator[Target]:
    for name, (chosen, *kind) in cluster_gemm_cases.COMPILED.items():
        sizes = cluster_gemm_cases.SIZES
        yield tiny(chosen, name, (cluster_gemm_cases.problem(size, *kind) for size in sizes))


def block_scaled_gemm(gpu: Gpu) -> Iterator[Target]:
    """A kernel that divides K has no problem with more tiles: it has a cluster for each."""
    kinds = (("block", block_scaled_cases.CASES), ("row", block_scaled_cases.PROMOTED))
    for scales, cases in kinds:
        for name, chosen in cases.items():
            sizes = (*block_scaled_cases.SIZES, LONG_K)
            if chosen["split_k"] == 1:
                depth = 128 * int(chosen.get("serial_parts", 0)) or SHORT_K_E4M3
                sizes = (*sizes, (*wave(gpu, chosen), depth))
            problems = (
                GemmProblem(
                    *size,
                    dtype=E4M3,
                    dtype_d="bfloat16",
                    scales=scales,
                    fast_accum=scales == "block",
                )
                for size in sizes
            )
            yield tiny(chosen, f"{scales}, {name}", problems)


def block_scaled_grouped_gemm(gpu: Gpu) -> Iterator[Target]:
    for name in block_scaled_cases.GROUPED:
        chosen = block_scaled_cases.grouped(block_scaled_cases.CASES[name])
        zipf = ((*size, "zipf") for size in block_scaled_cases.GROUPED_SIZES)
        sizes = (*zipf, LONG_K_GROUPS, MANY_GROUPS_E4M3)
        problems = (GroupedGemmProblem(*size, dtype=E4M3) for size in sizes)
        yield tiny(chosen, name, problems)


def fused_attention_backward(gpu: Gpu) -> Iterator[Target]:
    member = family("fused_attention_backward")
    for number, lever in enumerate(backward_configs.LEVERS):
        chosen = Config(member.name, {**backward_configs.BASE, **lever})
        turn = number % len(BACKWARD)
        for texts in (*BACKWARD[turn:], *BACKWARD[:turn]):
            problems = [AttentionBackwardProblem.parse(text) for text in texts]
            if not any(member.violations(problem, chosen, gpu) for problem in problems):
                words = " ".join(f"{name}={value}" for name, value in lever.items())
                yield tiny(chosen, f"{texts[0]} {words}".strip(), problems)
                break


def softmax(gpu: Gpu) -> Iterator[Target]:
    names = ("threads_per_row", "vector_width", "rows_per_block", "passes")
    for text, values in SOFTMAX.items():
        chosen = Config("softmax", dict(zip(names, values, strict=True)))
        yield tiny(chosen, text, [SoftmaxProblem.parse(text)])


def two_kernel_attention(gpu: Gpu) -> Iterator[Target]:
    lengths = [pair for pair in two_kernel_cases.LENGTHS if max(pair) <= LONGEST]
    for name, (text, chosen) in two_kernel_cases.CASES.items():
        pairs = tuple(
            (problem, variant)
            for problem in two_kernel_cases.problems(text, lengths)
            for variant in two_kernel_cases.variants(problem, chosen)
        )
        yield Target(chosen.family, name, pairs)


def mla_decode(gpu: Gpu) -> Iterator[Target]:
    for number, target in enumerate(latent.targets()):
        member, dtype = target.family, target.problem.dtype
        form = target.problem.cache  # type: ignore[attr-defined]
        posed = [
            replace(AttentionProblem.parse(f"{one},{LATENT},dtype={dtype}"), cache=form)
            for one in DECODED
        ]
        pairs = ((problem, member.called(problem, target.config, 1)) for problem in posed)
        legal = tuple(pair for pair in pairs if not member.violations(*pair, gpu))
        yield Target(member.name, f"{dtype}, {number}", legal)


def paged_attention(gpu: Gpu) -> Iterator[Target]:
    """Batches whose sequences end at the edges of pages, one of them empty; of kernels that split
    the keys in both ways.
    """
    for name, (_, sizes, most, chosen) in paged_cases.KERNELS.items():
        ways: list[dict[str, Value]] = [{}]
        if not (chosen["persistent"] or "stream_k" in chosen.params):
            combine = "cluster" if chosen["warp_groups"] == 1 else "kernel"
            ways.append({"splits": 3, "combine": combine})
        pairs = tuple(
            (replace(paged_cases.posed(name, size, min(most, 70), 400, 7), is_varlen=True), config)
            for size in sizes
            for config in (Config(chosen.family, {**chosen.params, **way}) for way in ways)
        )
        yield Target(chosen.family, f"paged, {name}", pairs)


def wide_heads(gpu: Gpu) -> Iterator[Target]:
    """Sequences that end within tiles and pages; few queries of heads in a tile, with splits."""
    for number, target in enumerate(wide_rule.targets()):
        small, member = target.problem, target.family
        assert isinstance(small, AttentionProblem)
        is_prompt = small.seqlen_q > 64
        heads = {"heads_q": 3, "heads_kv": 3} if is_prompt else {"heads_q": 12, "heads_kv": 2}
        sizes = {"batch": 2, "seqlen_kv": 333, **({"seqlen_q": 135} if is_prompt else {})}
        problems = [replace(small, head_dim=width, **heads, **sizes) for width in (512, 264)]
        splits = () if is_prompt else (3,)
        pairs = (
            (problem, member.called(problem, target.config, count))
            for problem in problems
            for count in (1, *splits)
        )
        legal = tuple(pair for pair in pairs if not member.violations(*pair, gpu))
        yield Target(member.name, f"wide, {small.label()}, {number}", legal)


def fused_attention(gpu: Gpu) -> Iterator[Target]:
    """The tiny problems with some of the calls that compute them."""
    for kernel in covering(gpu):
        head_dim, causal, dtype = combination_of(kernel)
        draw, pairs = random.Random(kernel.label()), list[Pair]()
        for index, text in enumerate(FUSED):
            width = head_dim - 8 * (index % 2)  # the instance's own, and padded
            problem = AttentionProblem.parse(f"{text},D={width},causal={causal},dtype={dtype}")
            legal = called(kernel, problem, gpu)
            calls = draw.sample(legal, min(len(legal), MAX_CALLS))
            pairs += [(problem, config) for config in calls]
        name = f"D={head_dim} {'causal' if causal else 'full'} {kernel.label()}"
        yield Target(DEFAULT, name, tuple(pairs))


DEFAULT = "fused_attention"
FAMILIES: Mapping[str, Callable[[Gpu], Iterator[Target]]] = {
    DEFAULT: fused_attention,
    "block_scaled_gemm": block_scaled_gemm,
    "block_scaled_grouped_gemm": block_scaled_grouped_gemm,
    "cluster_gemm": cluster_gemm,
    "fused_attention_backward": fused_attention_backward,
    "gemm": gemm,
    "gemm_swiglu": gemm_swiglu,
    "gemv": gemv,
    "grouped_gemm": grouped_gemm,
    "mla_decode": mla_decode,
    "paged_attention": paged_attention,
    "softmax": softmax,
    "two_kernel_attention": two_kernel_attention,
    "wide_heads": wide_heads,
}
OF_FUSED = frozenset({"paged_attention", "wide_heads"})
"""Names that stand for kernels of fused attention."""
#: What a control halves, where that is not the output. memcheck does not see stores by TMA (the
#: tensor map bounds them): these kernels' outputs leave so, and such an input is read plainly.
READ_PLAINLY = {
    "block_scaled_gemm": "scale_b",
    "block_scaled_grouped_gemm": "offsets",
    "fused_attention_backward": "out",
    "gemm": "bias",
    "grouped_gemm": "offsets",
}


def halved_of(target: Target) -> str:
    """The operand whose memory a control makes half as large."""
    problem, _ = target.launches[0]
    return READ_PLAINLY.get(target.family, problem.output.name)


def targets(families: Iterable[str], gpu: Gpu) -> list[Target]:
    """Family by family."""
    return [target for name in families for target in FAMILIES[name](gpu)]
