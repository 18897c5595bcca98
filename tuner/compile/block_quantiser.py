"""Compilation of the kernel that quantises activations for block-scaled GEMMs.

The kernel has neither a problem nor parameters. So its key needs neither a template nor a compiler:
the runtime finds it by its source alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tuner.base import resources
from tuner.compile import single
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.families.arguments import Arguments

SOURCE = "block_quantiser.cu"
"""Under ``templates/``."""
HEADERS = ("arguments.h", "ptx.h")
"""Headers under ``templates/`` that it includes."""
ARGUMENTS = Arguments(
    tensors=("rows", "elements", "factors"),
    integers=("m", "k", "row_stride", "block_stride", "pdl"),
)
"""Declaration of a launch's arguments. The source is not a template, and repeats it."""
FLAGS = (
    *("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-cudart=static"),
    *("-Xcompiler=-fPIC", "-Xlinker=-s"),
)


def key() -> str:
    """Artifact key: a hash of source, headers and flags."""
    folder = resources.templates()
    digests = [hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in (SOURCE, *HEADERS)]
    return hashlib.sha256(json.dumps([digests, FLAGS]).encode()).hexdigest()[:32]


def find(artifacts: ArtifactCache) -> Artifact | None:
    """Return the kernel if it is already built, else None."""
    return artifacts.find(key())


def build(artifacts: ArtifactCache) -> Artifact:
    """Find the kernel or compile it.

    Raises:
        CompileError: when there is no compiler, or it rejects the source.
        StoreError: when the cache cannot be written.
    """
    name = key()

    def recipe(library: Path) -> tuple[list[str], dict[str, str]]:
        from tuner.compile.toolchain import find_toolchain  # only a build needs it

        tools, folder = find_toolchain(), resources.templates()
        command = [str(tools.nvcc), *FLAGS, f"-ccbin={tools.host_compiler}", f"-I{folder}"]
        command += [*(f"-L{path}" for path in tools.library_dirs), f"-DTUNER_KERNEL={name}"]
        command += [str(folder / SOURCE), "-o", str(library)]
        return command, {"nvcc": tools.nvcc_version}

    return single.build(artifacts, name, SOURCE, recipe)
