"""Compiles the kernel that quantises activations for block-scaled products, and keeps it like any.

It has neither a problem nor parameters, so that its key needs no template and no compiler: the
runtime finds it by its source alone.
"""

from __future__ import annotations

import hashlib
import json
import shlex

from tuner.base import resources
from tuner.base.processes import ProcessPool
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import CompileError

SOURCE = "block_quantiser.cu"
"""Under ``templates/``."""
HEADERS = ("ptx.h",)
"""Headers there that it includes."""
FLAGS = (
    *("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-cudart=static"),
    *("-Xcompiler=-fPIC", "-Xlinker=-s"),
)
TIMEOUT_S = 300.0
_LOG_LIMIT = 4000


def key() -> str:
    """The artifact's key: a hash of source, headers and flags."""
    folder = resources.templates()
    digests = [hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in (SOURCE, *HEADERS)]
    return hashlib.sha256(json.dumps([digests, FLAGS]).encode()).hexdigest()[:32]


def find(artifacts: ArtifactCache) -> Artifact | None:
    """The kernel, where it is built already."""
    return artifacts.find(key())


def build(artifacts: ArtifactCache) -> Artifact:
    """Find the kernel or compile it; one process of the machine does, the others wait.

    Raises:
        CompileError: when there is no compiler, or it refuses.
        StoreError: when the cache cannot be written.
    """
    from tuner.compile.toolchain import find_toolchain  # only a build needs it

    name = key()
    with artifacts.lock(name):
        if found := artifacts.find(name):
            return found
        tools = find_toolchain()
        folder = resources.templates()
        with artifacts.workspace() as made:
            library = made / "kernel.so"
            command = [str(tools.nvcc), *FLAGS, f"-ccbin={tools.host_compiler}", f"-I{folder}"]
            command += [*(f"-L{path}" for path in tools.library_dirs), f"-DTUNER_KERNEL={name}"]
            command += [str(folder / SOURCE), "-o", str(library)]
            done = ProcessPool(TIMEOUT_S).run(command, made)
            if done.returncode != 0:
                lines = [line for line in done.log.splitlines() if "error" in line]
                reason = (lines or ["no message"])[0].strip()
                raise CompileError(
                    f"{SOURCE}: {'stopped: too slow' if done.timed_out else reason}",
                    command=shlex.join(command),
                    log=done.log[:_LOG_LIMIT],
                )
            return artifacts.put(
                name,
                library,
                resources=None,
                compile_cpu_s=done.cpu_s,
                source=(folder / SOURCE).read_text(encoding="utf-8"),
                facts={"template": SOURCE, "nvcc": tools.nvcc_version},
            )
