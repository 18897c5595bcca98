"""Kernels for problems that nobody tuned: one config each, compiled on demand.

For benchmarks that check kernels on shapes of other people's choice, where a search would take
hours. The kernel is the portfolio's, even if a vendor's is expected to be faster. Without a
portfolio for the domain it is the first legal config by predicted time at a canonical length. So
many shapes share a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
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

FAMILIES = ("fused_attention", "two_kernel_attention")
"""Tried in this order."""
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


class Forced:
    """Answers any attention problem that a family takes, as if it had been tuned.

    Args:
        compiler: compiles what is not in the artifact cache yet.
        gpu: device that the kernels run on.
        families: names, tried in this order.
        built_only: compile nothing; PyTorch answers what needs a kernel that is not built.
    """

    def __init__(
        self,
        compiler: Compiler,
        gpu: Gpu,
        families: Sequence[str] = FAMILIES,
        *,
        built_only: bool = False,
    ) -> None:
        self._compiler, self._gpu, self._families = compiler, gpu, tuple(families)
        self._built_only = built_only
        self._orders: dict[tuple[str, Problem], list[Config]] = {}
        self._answers: dict[Problem, LookupResult | None] = {}

    def config(self, problem: AttentionProblem) -> Config | None:
        """The portfolio's kernel, or the first legal config of the first family that has one;
        None where no family has.
        """
        for one in portfolio.serving(portfolio.shipped(), self._gpu):
            selection = one.select(problem) if one.op == problem.op else None
            own = (config for _, config in selection.ranked()) if selection else iter(())
            if (found := next(own, None)) is not None and found.family in self._families:
                return found
        for name in self._families:
            member = family(name)
            if member.supports(problem, self._gpu):
                continue
            ordered = self._ordered(name, problem)
            legal = (c for c in ordered if not member.violations(problem, c, self._gpu))
            if (config := next(legal, None)) is not None:
                return config
            # Run-time parameters may depend on the sizes: the same kernels, launched otherwise.
            places = {self._compiled_part(name, c): at for at, c in reversed([*enumerate(ordered)])}
            plain = [c for c in member.space(problem, self._gpu) if is_plain(c)]
            plain = [c for c in plain if self._compiled_part(name, c) in places]
            if plain:
                return min(plain, key=lambda c: places[self._compiled_part(name, c)])
        return None

    def _compiled_part(self, name: str, config: Config) -> Config:
        """A config without what is decided when it is launched."""
        at_run_time = family(name).runtime_parameters
        kept = {name: value for name, value in config.params.items() if name not in at_run_time}
        return Config(config.family, kept)

    def _ordered(self, name: str, problem: AttentionProblem) -> list[Config]:
        """A family's configs at the canonical length, the least predicted time first."""
        queries = LENGTH if problem.seqlen_q > 1 or problem.is_causal else 1
        canonical = replace(problem, seqlen_q=queries, seqlen_kv=LENGTH, batch=1)
        if (name, canonical) not in self._orders:
            member = family(name)
            space = [c for c in member.space(canonical, self._gpu) if is_plain(c)]
            space.sort(key=lambda c: member.predict_us(canonical, c, self._gpu))
            self._orders[name, canonical] = space
        return self._orders[name, canonical]

    def measurement(self, problem: AttentionProblem) -> Measurement | None:
        """The config with its compiled kernels, marked as measured; its time means nothing. None
        where no family takes the problem, or a kernel is not built and only built ones are wanted.

        Raises:
            CompileError: when a kernel does not compile.
        """
        config = self.config(problem)
        if config is None:
            return None
        specs = family(config.family).kernels(problem, config)
        if self._built_only and any(self._compiler.cached(one) is None for one in specs.values()):
            return None
        built = self._compiler.submit(list(specs.values()))
        keys = {name: future.result().key for name, (_, future) in zip(specs, built, strict=True)}
        return Measurement(
            problem, config, self._gpu, Regime(), Status.OK, latency_us=1.0, artifacts=keys
        )

    def lookup(self, problem: Problem, **_: Any) -> LookupResult | None:
        """In the place of `tuner.selection.reader.lookup`, whatever was tuned.

        Raises:
            CompileError: when a kernel does not compile.
        """
        if problem not in self._answers:
            found = self.measurement(problem) if isinstance(problem, AttentionProblem) else None
            answer = None if found is None else LookupResult(Entry.of([found]), exact=True)
            self._answers[problem] = answer
        return self._answers[problem]

    def compile_usual(self) -> int:
        """Compile what most shapes need, all at once; returns the number of kernels.

        Raises:
            CompileError: when a kernel does not compile.
        """
        specs: dict[KernelSpec, None] = {}
        for problem in usual_problems():
            config = self.config(problem)
            if config is not None:
                kernels = family(config.family).kernels(problem, config)
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


def made(
    families: Sequence[str] = FAMILIES, *, needs_gpu: bool = True, built_only: bool = False
) -> Forced:
    """For this machine; its compiler lives as long as the process.

    Raises:
        BenchmarkError: when there is no GPU and one is needed.
        CompileError: without a compiler.
    """
    gpu = detect()
    if gpu is None and needs_gpu:
        raise no_gpu()
    compiler = Compiler(find_toolchain(), ArtifactCache())
    return Forced(compiler, gpu or DEFAULT_GPU, families, built_only=built_only)


def install(families: Sequence[str] = FAMILIES, *, built_only: bool = False) -> None:
    """Have the runtime of this process serve every attention call so, PyTorch's own ones too.

    Args:
        families: as of `Forced`.
        built_only: as of `Forced`.

    Raises:
        TunerError: when there is no GPU, no compiler, or no registry of attention providers.
    """
    import tuner
    from tuner.runtime.call import dispatch

    # The package gives the module's name to the table itself.
    table = importlib.import_module("tuner.runtime.call.table")
    forced = made(families, built_only=built_only)

    def lookup(problem: Problem, **options: Any) -> LookupResult | None:
        try:
            return forced.lookup(problem, **options)
        except TunerError as exc:  # a call that PyTorch answers would hide it
            raise RuntimeError(f"{problem.label()}: {exc}") from exc

    table.lookup = lookup  # type: ignore[attr-defined]
    dispatch.prepare(then=table.table.renew).join()  # until it is there, PyTorch answers
    tuner.enable()
