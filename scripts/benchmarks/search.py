"""The search itself: recorded sweeps replayed, repeated and listed sweeps, ways to compile.

Results of ``recorded`` make expected seconds and losses (``tuner fit stopping``). Each sweep of
``repeats`` and ``sweeps`` is a process of its own, ``tuner sweep``.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import search_recorded, search_sweeps
from benchmarks.harness import Bench, Preset, Row
from benchmarks.rows import markdown
from tuner.base import resources
from tuner.base.processes import ProcessPool
from tuner.cli import Parser
from tuner.compile.compiler import HOST_FLAGS, NVCC_TIMEOUT_S, flags
from tuner.compile.render import render
from tuner.compile.toolchain import find_toolchain, include_dirs
from tuner.errors import CompileError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.gemm.shape import PINGPONG
from tuner.hardware import DEFAULT_GPU, HOPPER
from tuner.problem import PROBLEMS, GemmProblem
from tuner.runners import recording_archive

#: Options of nvcc by the name they are shown under; all are added to those of `flags`.
WAYS: Mapping[str, tuple[str, ...]] = {
    "as adopted": (),
    "--split-compile=2": ("--split-compile=2",),
    "-Ofc=min": ("-Ofc=min",),
    "-Ofc=max": ("-Ofc=max",),
}
PRODUCT = GemmProblem(4096, 4096, 4096)
HOUR_S = 3600.0


@dataclass(frozen=True)
class CompileWay:
    """Options of nvcc for one translation unit of so many kernels."""

    way: str
    kernels: int
    group = "compile"

    @property
    def label(self) -> str:
        """Options and kernels."""
        return f"{self.way}, {self.kernels} kernels"


def specs(count: int) -> list[KernelSpec]:
    """A ping-pong kernel of tile 128 x 64, and the next of 128 x 64 and 128 x 128 in other
    clusters.
    """
    member = family("gemm")
    alike = [
        config
        for config in member.space(PRODUCT, DEFAULT_GPU)
        if config["kernel_schedule"] == PINGPONG
        and config.get("tile_scheduler") in (None, "Persistent")
        and (config["tile_m"], config["tile_n"]) in ((128, 64), (128, 128))
        and not config.get("swap_ab")
    ]
    alike.sort(key=lambda config: (config["tile_n"], config["cluster_m"], config["cluster_n"]))
    kernels = [spec for c in alike for spec in member.kernels(PRODUCT, c).values()]
    return list(dict.fromkeys(kernels))[:count]


def compile_ways(case: CompileWay, _: Namespace) -> Row:
    """CPU-seconds of each step for one translation unit.

    Raises:
        CompileError: when a step fails, or the compiler is missing.
    """
    tools, options = find_toolchain(), WAYS[case.way]
    command = [
        *(str(tools.nvcc), *flags(HOPPER), f"-ccbin={tools.host_compiler}"),
        *(f"-I{path}" for path in (*include_dirs(tools.cutlass), resources.templates())),
        *(f"-L{path}" for path in tools.library_dirs),
    ]
    steps = {
        "device": ["unit.cu", "-ptx", "-o", "unit.ptx", *options],
        "fatbin": ["unit.ptx", "-fatbin", "-o", "unit.fatbin", *options],
        "host": ["host.cpp", *HOST_FLAGS, "-o", "kernel.so"],
    }
    seconds: dict[str, float] = {}
    processes = ProcessPool(NVCC_TIMEOUT_S)
    unit = "".join(render(spec, f"kernel_{i}") for i, spec in enumerate(specs(case.kernels)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "unit.cu").write_text(unit, encoding="utf-8")
        (folder / "host.cpp").write_text('#include "unit.cu"\n', encoding="utf-8")
        for step, arguments in steps.items():
            done = processes.run([*command, *arguments], folder)
            if done.returncode:
                raise CompileError(f"{step}: nvcc ended with {done.returncode}", log=done.log)
            seconds[step] = round(done.cpu_s, 1)
    versions = {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}
    return {"cpu_s": seconds, "host_compiler": tools.host_version, **versions}


def way_line(row: Row) -> str:
    """CPU-seconds of a way."""
    return f"{row['case']}: {', '.join(f'{k} {v:.1f}' for k, v in row['cpu_s'].items())} CPU-s"


def ways_table(rows: Sequence[Row]) -> list[str]:
    """CPU-seconds by way and step."""
    done = [row for row in rows if "cpu_s" in row]
    lines = [(row["case"], *(f"{s:.1f}" for s in row["cpu_s"].values())) for row in done]
    return markdown([("way, CPU-seconds", "device", "fatbin", "host"), *lines])


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
    add("--problems", type=Path, metavar="FILE", help="sweeps: in place of the acceptance suite")
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
        "sweeps": Preset(
            "seconds of default sweeps, and the winner's excess over every built kernel",
            search_sweeps.listed,
            search_sweeps.beside,
            search_sweeps.line,
            search_sweeps.sweeps_table,
            limit_s=HOUR_S,
            is_fresh=True,
        ),
        "compile_ways": Preset(
            "CPU-seconds of a product's compilation, by options of nvcc; no GPU",
            lambda _: [CompileWay(way, count) for count in (1, 8) for way in WAYS],
            compile_ways,
            way_line,
            ways_table,
            limit_s=2 * NVCC_TIMEOUT_S,
            needs_gpu=False,
        ),
    },
    options,
)
