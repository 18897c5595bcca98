"""Parts of rendered CUDA text, which the host compiler runs; and what ptxas says of a kernel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from programs import ran

from tuner.compile.artifacts import Artifact
from tuner.compile.toolchain import find_toolchain, include_dirs
from tuner.measurement import Resources


def part(text: str, pattern: str) -> str:
    """The first place that matches; ``^`` is a line's start, and a dot any character."""
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found is not None, pattern
    return found[0]


def run_on_host(
    folder: Path, text: str, *options: str, has_cute: bool = False, arguments: Sequence[str] = ()
) -> str:
    """Output of a program, compiled without CUDA and run in a folder.

    Args:
        folder: folder of the program.
        text: the program.
        options: further options of the host compiler.
        has_cute: True where it includes CuTe's headers, which nvcc compiles for the host.
        arguments: arguments of the program.
    """
    source, program, tools = folder / "program.cpp", folder / "program", find_toolchain()
    source.write_text(text)
    command = [str(tools.host_compiler), "-O2"]
    if has_cute:
        command = [str(tools.nvcc), "-x=c++", f"-ccbin={tools.host_compiler}", "-O1"]
        command += [f"-I{path}" for path in include_dirs(tools.cutlass)]
        command += [f"-L{path}" for path in tools.library_dirs]
    command += ["-std=c++17", "-w", *options, "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=300)
    done = ran(str(program), *arguments, timeout=200, cwd=folder)
    return done.stdout


def clean(artifact: Artifact, spilled: int = 0) -> Resources:
    """Resources of a kernel that spills no more bytes, and without advice of ptxas.

    It advises where it serializes WGMMAs or ignores setmaxnreg: C7504 to C7515.
    """
    used = artifact.resources
    assert max(used.spill_store_bytes, used.spill_load_bytes) <= spilled
    assert not artifact.facts.get("advice")
    return used
