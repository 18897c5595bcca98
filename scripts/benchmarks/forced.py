"""Kernels for problems that nobody tuned: one config each, compiled on demand.

For benchmarks that check kernels on shapes of other people's choice, where a search would take
hours. The kernel is the portfolio's, even if a vendor's is expected to be faster. Without a
portfolio for the domain it is the first legal config by predicted time at a canonical length. So
many shapes share a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.gpu import no_gpu
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_toolchain
from tuner.config import Config
from tuner.errors import TunerError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure.device import detect
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem, Problem
from tuner.selection import portfolio
from tuner.selection.reader import LookupResult
from tuner.store.entry import Entry

FAMILY = family("fused_attention")
LENGTH = 512
"""Queries and keys that configs are chosen for."""
QUERIES = (LENGTH, 8)
"""Queries of prompts, and of fewer rows than a tile has."""
HEADS_KV = (6, 1)
"""Key heads beside 6 query heads: without groups, and in one."""
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Widths that the fused kernel is compiled for; others are padded to the next one."""
VARIANTS = (
    "",
    "causal=1",
    "left=64,right=20",
    "softcap=50",
    "softcap=50,causal=1,left=64",
    "varlen=1",
    "varlen=1,causal=1",
    "bias=h",
    "mask=b",
)


def is_plain(config: Config) -> bool:
    """True if one config serves every length: its launch alone depends on the sizes."""
    return config.get("splits", 1) == 1 and not config.get("persistent")


def compiled_part(config: Config) -> Config:
    """A config without what is decided when it is launched."""
    at_run_time = FAMILY.runtime_parameters
    params = {name: value for name, value in config.params.items() if name not in at_run_time}
    return Config(config.family, params)


class Forced:
    """Answers any attention problem that the fused kernel takes, as if it had been tuned.

    Args:
        compiler: compiles what is not in the artifact cache yet.
        gpu: device that the kernels run on.
        built_only: compile nothing; PyTorch answers what needs a kernel that is not built.
    """

    def __init__(self, compiler: Compiler, gpu: Gpu, *, built_only: bool = False) -> None:
        self._compiler, self._gpu, self._built_only = compiler, gpu, built_only
        self._orders: dict[Problem, list[Config]] = {}
        self._answers: dict[Problem, LookupResult | None] = {}

    def config(self, problem: AttentionProblem) -> Config | None:
        """The portfolio's kernel, or the first legal config; None where there is none."""
        for shipped in portfolio.serving(portfolio.shipped(), self._gpu):
            selection = shipped.select(problem) if shipped.op == problem.op else None
            own = next((config for _, config in selection.ranked()), None) if selection else None
            if own is not None and own.family == FAMILY.name:
                return own
        if FAMILY.supports(problem, self._gpu):
            return None
        ordered = self._ordered(problem)
        legal = (c for c in ordered if not FAMILY.violations(problem, c, self._gpu))
        if (config := next(legal, None)) is not None:
            return config
        # Run-time parameters may depend on the sizes: the same kernels, launched otherwise.
        places = {compiled_part(c): at for at, c in reversed([*enumerate(ordered)])}
        plain = [c for c in FAMILY.space(problem, self._gpu) if is_plain(c)]
        plain = [c for c in plain if compiled_part(c) in places]
        return min(plain, key=lambda c: places[compiled_part(c)], default=None)

    def _ordered(self, problem: AttentionProblem) -> list[Config]:
        """Configs at the canonical length, the least predicted time first."""
        queries = LENGTH if problem.seqlen_q > 1 or problem.is_causal else 1
        canonical = replace(problem, seqlen_q=queries, seqlen_kv=LENGTH, batch=1)
        if canonical not in self._orders:
            space = [c for c in FAMILY.space(canonical, self._gpu) if is_plain(c)]
            space.sort(key=lambda c: FAMILY.predict_us(canonical, c, self._gpu))
            self._orders[canonical] = space
        return self._orders[canonical]

    def lookup(self, problem: Problem, **_: Any) -> LookupResult | None:
        """In the place of `tuner.selection.reader.lookup`, whatever was tuned.

        Raises:
            CompileError: when a kernel does not compile.
        """
        if not isinstance(problem, AttentionProblem):
            return None
        if problem not in self._answers:
            self._answers[problem] = self._answer(problem)
        return self._answers[problem]

    def _answer(self, problem: AttentionProblem) -> LookupResult | None:
        """The config with its compiled kernels, marked as measured; its time means nothing."""
        config = self.config(problem)
        if config is None:
            return None
        specs = FAMILY.kernels(problem, config)
        if self._built_only and any(self._compiler.cached(spec) is None for spec in specs.values()):
            return None
        built = self._compiler.submit(list(specs.values()))
        keys = {name: future.result().key for name, (_, future) in zip(specs, built, strict=True)}
        measurement = Measurement(
            problem, config, self._gpu, Regime(), Status.OK, latency_us=1.0, artifacts=keys
        )
        return LookupResult(Entry.of([measurement]), exact=True)

    def compile_usual(self) -> int:
        """Compile what most shapes need, all at once; returns the number of kernels.

        Raises:
            CompileError: when a kernel does not compile.
        """
        specs: dict[KernelSpec, None] = {}
        for problem in usual_problems():
            config = self.config(problem)
            if config is not None:
                kernels = FAMILY.kernels(problem, config)
                specs |= dict.fromkeys(kernels.values())
        for _, future in self._compiler.submit(list(specs)):
            future.result()
        return len(specs)


def usual_problems() -> Iterator[AttentionProblem]:
    """Problems of every width, type and variant at the canonical length."""
    every = product(HEAD_DIMS, ("fp16", "bf16"), VARIANTS, QUERIES, HEADS_KV)
    for head_dim, dtype, variant, queries, heads_kv in every:
        text = f"H=6,HKV={heads_kv},SQ={queries},SKV={LENGTH},D={head_dim},dtype={dtype}"
        yield AttentionProblem.parse(f"{text},{variant}" if variant else text)


def made(*, needs_gpu: bool = True, built_only: bool = False) -> Forced:
    """For this machine; its compiler lives as long as the process.

    Raises:
        BenchmarkError: when there is no GPU and one is needed.
        CompileError: without a compiler.
    """
    gpu = detect()
    if gpu is None and needs_gpu:
        raise no_gpu()
    compiler = Compiler(find_toolchain(), ArtifactCache())
    return Forced(compiler, gpu or DEFAULT_GPU, built_only=built_only)


def install(*, built_only: bool = False) -> None:
    """Have the runtime of this process serve every attention call so, PyTorch's own ones too.

    Args:
        built_only: as of `Forced`.

    Raises:
        TunerError: when there is no GPU, no compiler, or no registry of attention providers.
    """
    import tuner
    from tuner.runtime.call import answers, dispatch
    from tuner.runtime.call.table import table

    forced = made(built_only=built_only)

    def lookup(problem: Problem, **options: Any) -> LookupResult | None:
        try:
            return forced.lookup(problem, **options)
        except TunerError as exc:  # a call that PyTorch answers would hide it
            raise RuntimeError(f"{problem.label()}: {exc}") from exc

    vars(answers)["lookup"] = lookup
    dispatch.prepare(then=table.renew).join()  # until it is there, PyTorch answers
    tuner.enable()
