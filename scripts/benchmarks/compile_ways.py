"""``scripts/bench compile_ways``: CPU-seconds of compiling one GEMM, with several options of nvcc.

The kernel is `gemm.cu.j2`, ping-pong, tile 128 x 64 x 64, cluster 1 x 1, fp16. nvcc compiles its
device half, and the host compiler the other half (`tuner.compile.compiler`). ``--batch`` compiles
that many kernels as one translation unit, which share instantiations. Needs no GPU.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.base import resources
from tuner.base.output import check_place
from tuner.base.processes import ProcessPool
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.compile.compiler import HOST_FLAGS, NVCC_TIMEOUT_S, UNIT, flags
from tuner.compile.render import render
from tuner.compile.toolchain import Toolchain, find_toolchain, include_dirs
from tuner.errors import CompileError, ConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.gemm.shape import PINGPONG
from tuner.hardware import DEFAULT_GPU, HOPPER
from tuner.problem import GemmProblem
from tuner.selection.describe import table

#: Options by the name they are shown under; all are added to those of `flags`.
WAYS: Mapping[str, tuple[str, ...]] = {
    "as adopted": (),
    "--split-compile=2": ("--split-compile=2",),
    "-Ofc=min": ("-Ofc=min",),
    "-Ofc=max": ("-Ofc=max",),
}
PROBLEM = GemmProblem(4096, 4096, 4096)


def specs(count: int) -> list[KernelSpec]:
    """The kernel, and the next `count - 1` of tiles 128 x 64 and 128 x 128 in other clusters."""
    member = family("gemm")
    alike = [
        config
        for config in member.space(PROBLEM, DEFAULT_GPU)
        if config["kernel_schedule"] == PINGPONG
        and config.get("tile_scheduler") in (None, "Persistent")
        and (config["tile_m"], config["tile_n"]) in ((128, 64), (128, 128))
        and not config.get("swap_ab")
    ]
    alike.sort(key=lambda config: (config["tile_n"], config["cluster_m"], config["cluster_n"]))
    kernels = [spec for c in alike for spec in member.kernels(PROBLEM, c).values()]
    return list(dict.fromkeys(kernels))[:count]


def measured(tools: Toolchain, unit: str, options: Sequence[str]) -> dict[str, float]:
    """CPU-seconds of each step for one translation unit.

    Raises:
        CompileError: when a step fails.
    """
    command = [
        *(str(tools.nvcc), *flags(HOPPER), f"-ccbin={tools.host_compiler}"),
        *(f"-I{path}" for path in (*include_dirs(tools.cutlass), resources.templates())),
        *(f"-L{path}" for path in tools.library_dirs),
    ]
    steps = {
        "device_cpu_s": ["unit.cu", "-ptx", "-o", "unit.ptx", *options],
        "fatbin_cpu_s": ["unit.ptx", "-fatbin", "-o", "unit.fatbin", *options],
        "host_cpu_s": ["host.cpp", *HOST_FLAGS, "-o", "kernel.so"],
    }
    found = {}
    processes = ProcessPool(NVCC_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "unit.cu").write_text(unit, encoding="utf-8")
        (folder / "host.cpp").write_text('#include "unit.cu"\n', encoding="utf-8")
        for step, arguments in steps.items():
            done = processes.run([*command, *arguments], folder)
            if done.returncode:
                raise CompileError(f"{step}: nvcc ended with {done.returncode}", log=done.log)
            found[step] = round(done.cpu_s, 1)
    return found


def main(argv: Sequence[str]) -> int:
    """Compile once for each way, print, and write.

    Raises:
        CompileError: when there is no compiler, or a step fails.
        ConfigError: when `--batch` is out of range.
    """
    parser = Parser(prog="scripts/bench compile_ways", description=__doc__)
    parser.add_argument("--batch", type=int, default=1, help=f"kernels, at most {UNIT}; default 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if not 1 <= args.batch <= UNIT:
        raise ConfigError(f"--batch {args.batch} (allowed: 1 to {UNIT})")
    check_place(args.json)
    tools = find_toolchain()
    unit = "".join(render(spec, f"kernel_{i}") for i, spec in enumerate(specs(args.batch)))
    rows: list[dict[str, Any]] = []
    for way, options in WAYS.items():
        rows.append({"way": way, **measured(tools, unit, options)})
        print(rows[-1], flush=True)
        if args.json is not None:
            document = {
                "date": datetime.date.today().isoformat(),
                "cores": len(os.sched_getaffinity(0)),
                "nvcc": tools.nvcc_version,
                "host_compiler": tools.host_version,
                "cutlass": tools.cutlass_version,
                "kernels": args.batch,
                "ways": rows,
            }
            write_json(args.json, document)
    head = ("way", "device", "fatbin", "host, CPU-seconds")
    lines = [(row["way"], *(f"{row[step]:.1f}" for step in list(row)[1:])) for row in rows]
    print(table([head, *lines], frozenset({1, 2, 3})))
    return 0
