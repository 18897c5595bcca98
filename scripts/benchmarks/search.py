"""The search itself: recorded sweeps replayed, repeated sweeps, units of kernels.

Results of ``recorded`` make expected seconds and losses (``tuner fit stopping``). Each sweep of
``repeats`` is a process of its own, ``tuner sweep``.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks import search_recorded, search_sweeps
from benchmarks.harness import Bench, Preset, Row
from benchmarks.rows import markdown
from tuner.cli import Parser
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import NVCC_TIMEOUT_S, UNIT, Compiler
from tuner.compile.toolchain import find_toolchain
from tuner.compile.units import shared
from tuner.families import families_of
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.problem import PROBLEMS, AttentionProblem, GemmProblem, Problem
from tuner.runners import recording_archive

COMPILED: tuple[Problem, ...] = (
    AttentionProblem.parse("S=1024,D=64"),
    GemmProblem.parse("M=4096,N=4096,K=4096"),
)
"""Problems whose kernels are compiled in units."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class CompiledUnit:
    """Kernels of the least estimates that are compiled together."""

    problem: Problem
    kernels: int
    group = "compile"

    @property
    def label(self) -> str:
        """Problem and number of kernels."""
        return f"{self.problem.op} {self.problem.label()}, {self.kernels} kernels"


def specs(case: CompiledUnit) -> list[KernelSpec]:
    """Kernels of a unit: that of the least estimate, and those most like it among the next."""
    problem = case.problem
    member = next(f for f in families_of(problem.op).values() if not f.is_vendor)
    space = sorted(
        member.space(problem, DEFAULT_GPU),
        key=lambda config: member.predict_us(problem, config, DEFAULT_GPU),
    )
    every = dict.fromkeys(spec for c in space for spec in member.kernels(problem, c).values())
    first, *others = islice(every, 2 * UNIT)
    others.sort(key=lambda spec: shared(first, spec), reverse=True)
    return [first, *others][: case.kernels]


def compile_unit(case: CompiledUnit, _: Namespace) -> Row:
    """CPU-seconds of a unit.

    Raises:
        CompileError: when it does not compile, or the compiler is missing.
    """
    tools = find_toolchain()
    with (
        tempfile.TemporaryDirectory() as name,
        Compiler(tools, ArtifactCache(Path(name)), jobs=1, batch=case.kernels) as compiler,
    ):
        built = [future.result() for _, future in compiler.submit(specs(case))]
    versions = {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}
    cpu_s = round(sum(artifact.compile_cpu_s for artifact in built), 1)
    return {"cpu_s": cpu_s, "host_compiler": tools.host_version, **versions}


def unit_line(row: Row) -> str:
    """CPU-seconds of a unit."""
    return f"{row['case']}: {row['cpu_s']:.1f} CPU-s"


def units_table(rows: Sequence[Row]) -> list[str]:
    """CPU-seconds by unit."""
    done = [(row["case"], f"{row['cpu_s']:.1f}") for row in rows if "cpu_s" in row]
    return markdown([("unit", "CPU-seconds"), *done])


def options(parser: Parser) -> None:
    """Options of the presets."""
    add = parser.add_argument
    add("--recordings", type=Path, default=recording_archive.folder(), metavar="DIR",
        help="recorded: folder of recordings (default: the shipped ones)")  # fmt: skip
    samplers = search_recorded.SAMPLERS
    add("--samplers", default=samplers, metavar="NAME,...", help=f"recorded: default {samplers}")
    add("--least-groups", type=int, default=32, metavar="N", help="recorded: kernels (default 32)")
    add("--in-flight", type=int, default=1, metavar="N", help="recorded: compiled at once")
    add("--times", type=int, default=3, metavar="N", help="recorded, repeats: seeds (default 3)")
    add("--op", default="attention", choices=sorted(PROBLEMS), help="repeats: default attention")
    add("--shape", default="S=1024,D=64", help="repeats: problem (default S=1024,D=64)")
    add("--keep-cache", action="store_true", help="repeats: with this machine's compiled kernels")
    add("--sweep", default="", metavar="OPTIONS", help="further options of tuner sweep, quoted")
    add("--device", default="0", metavar="N,...", help="CUDA devices (default 0)")


BENCH = Bench(
    "search",
    __doc__,
    {
        "recorded": Preset(
            "samplers on recorded sweeps by compiles, and simulated seconds; no GPU",
            search_recorded.cases,
            search_recorded.measure,
            search_recorded.line,
            search_recorded.table,
            limit_s=3 * HOUR_S,
            smoke=search_recorded.SMOKE,
            needs_gpu=False,
        ),
        "repeats": Preset(
            "sweeps of one problem with several seeds, their winners in one pass",
            search_sweeps.repeated,
            search_sweeps.repeat,
            search_sweeps.line,
            search_sweeps.repeats_table,
            limit_s=HOUR_S,
            is_fresh=True,
        ),
        "units": Preset(
            "CPU-seconds of units of 1, 2, 4, 8 and 16 kernels; no GPU",
            lambda _: [CompiledUnit(p, count) for p in COMPILED for count in (1, 2, 4, 8, 16)],
            compile_unit,
            unit_line,
            units_table,
            limit_s=2 * NVCC_TIMEOUT_S,
            needs_gpu=False,
        ),
    },
    options,
)
