"""The portfolio's hottest kernels, each by several compilers.

A kernel's share is the time that it is expected to take of drawn calls of models that make
selections. Every kernel is timed at the call that has most of its time. ``--compile-only --nvcc
PATH,PATH`` builds all of them by each compiler, and ``--compilers VERSION,...`` names those whose
builds are timed beside the default one's. Errors are relative to the default build's output.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks import harness, rows
from benchmarks.harness import Contender, Row
from benchmarks.own_plans import compile_specs, compiler
from benchmarks.population_kernels import bound_call
from tuner.cli import Parser
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.problem.population import draw, subset
from tuner.selection.portfolio import serving, shipped
from tuner.selection.reader import find_gpu

CALLS = 2000
"""Drawn calls, whose expected times make the shares."""
DEFAULT = "tuner"
"""The default compiler's build."""


@dataclass(frozen=True)
class Hot:
    """A kernel at one problem.

    Args:
        problem: the problem with most of its time.
        config: the kernel and its launch.
        share: part of the expected time of all calls, 0 to 1.
    """

    problem: Problem
    config: Config
    share: float = 1.0

    @property
    def group(self) -> str:
        return self.config.family

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()} {self.config.digest[:6]}"

    @property
    def specs(self) -> Mapping[str, KernelSpec]:
        """Kernels to compile, by name."""
        return families()[self.config.family].kernels(self.problem, self.config)


SMOKE = Hot(
    GemmProblem(128, 128, 64, dtype="bfloat16"),
    next(iter(families()["gemm"].space(GemmProblem(128, 128, 64, dtype="bfloat16"), DEFAULT_GPU))),
)


def options(parser: Parser) -> None:
    """Options of the preset."""
    parser.add_argument("--nvcc", metavar="PATH,...", help="compilers: build by these")
    parser.add_argument("--compilers", metavar="VERSION,...", default="", help="compilers: time")
    parser.add_argument("--hottest", type=int, default=60, help="compilers: kernels (60)")


def hottest(args: Namespace) -> list[Hot]:
    """The kernels with the largest shares, first the hottest."""
    from benchmarks.population_tensors import posed

    portfolios = {one.op: one for one in serving(shipped(), find_gpu(args.gpu))}
    longest: dict[tuple[KernelSpec, ...], tuple[float, Hot]] = {}
    totals: dict[tuple[KernelSpec, ...], float] = {}
    for call in draw(args.seed, CALLS, subset("making")):
        try:
            problem = posed(call)
        except ConfigError:
            continue
        portfolio = portfolios.get(problem.op)
        selection = None if portfolio is None else portfolio.select(problem)
        us, config = next(iter(selection.own() if selection else ()), (0.0, None))
        if config is None:
            continue
        case = Hot(problem, config)
        kernels = tuple(case.specs.values())
        totals[kernels] = totals.get(kernels, 0.0) + us
        longest[kernels] = max(longest.get(kernels, (0.0, case)), (us, case), key=lambda p: p[0])
    every = sum(totals.values())
    order = sorted(totals, key=totals.__getitem__, reverse=True)[: args.hottest]
    return [replace(longest[kernels][1], share=totals[kernels] / every) for kernels in order]


def compile_all(args: Namespace) -> int:
    """Build the kernels by the compilers of ``--nvcc``; 0.

    Raises:
        ConfigError: without ``--nvcc``.
    """
    if not args.nvcc:
        raise ConfigError("--compile-only of compilers wants --nvcc PATH,... (a compiler each)")
    specs = [spec for case in hottest(args) for spec in case.specs.values()]
    for path in args.nvcc.split(","):
        os.environ["TUNER_NVCC"] = path
        compile_specs(specs)
    return 0


@cache
def _by(version: str) -> Compiler:
    """Finds builds of one version; it compiles nothing."""
    usual = compiler()
    tools = usual.toolchain
    return Compiler(replace(tools, nvcc_version=version or tools.nvcc_version), usual.artifacts)


def compilers_measured(case: Hot, args: Namespace) -> Row:
    """Times of a kernel's builds."""
    import torch

    problem, failed = case.problem, dict[str, str]()
    scale = 1 / math.sqrt(problem.head_dim) if isinstance(problem, AttentionProblem) else 1.0
    torch.manual_seed(0)
    inputs = {}
    for o in problem.inputs:
        dtype = getattr(torch, o.dtype)
        tensor = torch.empty_strided(o.shape, o.strides, dtype=dtype, device="cuda")
        inputs[o.name] = tensor.normal_() if dtype.is_floating_point else tensor.fill_(1)
    contenders = []
    for version in ("", *filter(None, args.compilers.split(","))):
        name = f"nvcc {version}" if version else DEFAULT
        artifacts = {kernel: _by(version).cached(spec) for kernel, spec in case.specs.items()}
        built = {kernel: found for kernel, found in artifacts.items() if found is not None}
        if len(built) < len(artifacts):
            failed[name] = "not built"
            continue
        call = bound_call(problem, case.config, built, inputs, scale)
        contenders.append(Contender(name, call))
    first = next(iter(inputs.values()))
    source = first.clone()
    with torch.no_grad():
        calls = {one.name: one.call for one in contenders}
        outputs, reasons = harness.first_outputs(calls, lambda out: out.clone())
        failed |= reasons
        wanted = outputs.get(DEFAULT)
        errors = (
            {}
            if wanted is None
            else {name: harness.distance(out, wanted) for name, out in outputs.items()}
        )
        fit = [one for one in contenders if one.name in outputs]
        times = harness.time_calls(fit, lambda _: torch.add(source, 0.0, out=first), 1)
    return {"us": times.us, "errors": errors, "failed": {**failed, **times.failed},
            "share": case.share}  # fmt: skip


def compilers_table(measured: Sequence[Row]) -> list[str]:
    """The default build's time over each compiler's: mean, by share, least, most."""
    names = dict.fromkeys(name for row in measured for name in row.get("us", {}))
    lines = [("build", "kernels", "gain", "by share", "worst", "best", "gain 1 %")]
    for name in names:
        mine = [row for row in measured if {name, DEFAULT} <= row.get("us", {}).keys()]
        if not name.startswith("nvcc ") or not mine:
            continue
        gains = [row["us"][DEFAULT] / row["us"][name] for row in mine]
        whole = sum(row["share"] for row in mine)
        parts = zip(mine, gains, strict=True)
        shared = math.exp(sum(row["share"] * math.log(gain) for row, gain in parts) / whole)
        lines.append((
            *(name, str(len(mine)), rows.figures(gains)[0], f"{shared:.3f}"),
            *(f"{min(gains):.3f}", f"{max(gains):.3f}", str(sum(g >= 1.01 for g in gains))),
        ))  # fmt: skip
    return rows.markdown(lines)
