"""Compiles the runtime's dispatcher, once for a torch and a Python, and keeps it like a kernel.

It is an extension module of CPython against torch's own headers. It takes 13 CPU-seconds to
compile, and 0.5 us a call with the output's allocation; an operator of torch's stable ABI takes
2.8.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sysconfig
from pathlib import Path

from tuner.base import resources
from tuner.base.install import extra_command
from tuner.base.processes import ProcessPool
from tuner.compile import single
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import CompileError

MODULE = "tuner_dispatcher"
SOURCE = "dispatcher/dispatcher.cpp"
"""Under ``templates/``; its headers lie beside it."""
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")


def find(artifacts: ArtifactCache) -> Artifact | None:
    """The dispatcher for the installed torch and this Python, where it is built already.

    Raises:
        CompileError: when torch is not installed.
    """
    return artifacts.find(_key())


def build(artifacts: ArtifactCache, processes: ProcessPool | None = None) -> Artifact:
    """Find the dispatcher or compile it.

    Args:
        artifacts: where it is kept.
        processes: what runs the compiler, so that a caller can end it.

    Raises:
        CompileError: when torch, Python's headers or a C++ compiler is missing, or it refuses.
        StoreError: when the cache cannot be written.
    """

    def recipe(library: Path) -> tuple[list[str], dict[str, str]]:
        from tuner.compile.toolchain import find_host_compiler  # only a build needs it

        compiler, version = find_host_compiler()
        source = resources.templates() / SOURCE
        command = [str(compiler), *FLAGS, *_places(), str(source), "-o", str(library), *LIBRARIES]
        return command, {"host_compiler": version, **_facts()}

    return single.build(artifacts, _key(), SOURCE, recipe, processes)


def _key() -> str:
    folder = (resources.templates() / SOURCE).parent
    sources = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.suffix in (".cpp", ".h")
    }
    ingredients = [sources, FLAGS, LIBRARIES, _facts()]
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]


def _facts() -> dict[str, str]:
    """Versions that the binary interface depends on."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as exc:
        raise CompileError(f"the dispatcher needs torch: {extra_command('torch')}") from exc
    return {"torch": torch, "python": str(sysconfig.get_config_var("SOABI"))}


def _places() -> list[str]:
    """Options that say where headers and libraries are."""
    spec = importlib.util.find_spec("torch")
    locations = (spec and spec.submodule_search_locations) or [""]
    torch = Path(locations[0])
    python = Path(sysconfig.get_path("include"))
    for header, help in (
        (torch / "include" / "torch" / "csrc" / "autograd" / "python_variable.h", "pip's torch"),
        (python / "Python.h", "Debian, Ubuntu: apt install python3-dev"),
    ):
        if not header.is_file():
            raise CompileError(f"the dispatcher needs {header}, which is not there ({help})")
    includes = torch / "include", torch / "include/torch/csrc/api/include", python
    return [*(f"-isystem{folder}" for folder in includes), f"-L{torch / 'lib'}"]
