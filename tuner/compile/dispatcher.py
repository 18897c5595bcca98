"""Compilation of the runtime's dispatcher, once for each version of torch and Python.

The dispatcher is a CPython extension module built against torch's headers. It takes 13 CPU-seconds
to compile. A call takes 0.5 us with the output's allocation, and an operator of torch's stable ABI
2.8 us.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tuner.base import resources
from tuner.base.install import extra_command, version_of
from tuner.base.processes import ProcessPool
from tuner.compile import single
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import CompileError

MODULE = "tuner_dispatcher"
SOURCE = "dispatcher/dispatcher.cpp"
"""Path under ``templates/``, beside its headers."""
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")
VERSIONS = "torch", "python"
"""Facts of a dispatcher that its binary interface depends on."""


def find(artifacts: ArtifactCache) -> Artifact | None:
    """Return the dispatcher for the installed torch and this Python if it is already built, else
    None.

    Raises:
        CompileError: when torch is not installed.
    """
    return artifacts.find(_key(_facts()))


def installed() -> dict[str, str] | None:
    """`VERSIONS` of this process; None without torch."""
    try:
        return _facts()
    except CompileError:
        return None


def built(artifacts: ArtifactCache) -> list[Artifact]:
    """Return the intact dispatchers of the present sources, for whatever torch and Python."""
    artifacts_here = []
    for key in artifacts.keys():
        if artifacts.facts(key).get("template") != SOURCE:
            continue
        artifact = artifacts.find(key)
        if artifact and key == _key({name: artifact.facts.get(name) for name in VERSIONS}):
            artifacts_here.append(artifact)
    return artifacts_here


def build(artifacts: ArtifactCache, processes: ProcessPool | None = None) -> Artifact:
    """Find the dispatcher or compile it.

    Args:
        artifacts: cache for the library.
        processes: pool that runs the compiler, so that the caller can kill it.

    Raises:
        CompileError: when torch, Python's headers or a C++ compiler is missing, or the compiler
            rejects the source.
        StoreError: when the cache cannot be written.
    """

    def recipe(library: Path) -> tuple[list[str], dict[str, str]]:
        from tuner.compile.toolchain import find_host_compiler  # only a build needs it

        compiler, version = find_host_compiler()
        source = resources.templates() / SOURCE
        command = [str(compiler), *FLAGS, *_places(), str(source), "-o", str(library), *LIBRARIES]
        return command, {"host_compiler": version, **_facts()}

    return single.build(artifacts, _key(_facts()), SOURCE, recipe, processes)


def _key(versions: Mapping[str, object]) -> str:
    """Artifact key of the dispatcher for `VERSIONS`."""
    folder = (resources.templates() / SOURCE).parent
    sources = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.suffix in (".cpp", ".h")
    }
    ingredients = [sources, FLAGS, LIBRARIES, dict(versions)]
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]


def _facts() -> dict[str, str]:
    """The installed `VERSIONS`."""
    try:
        torch = version_of("torch")
    except importlib.metadata.PackageNotFoundError as exc:
        raise CompileError(f"the dispatcher needs torch: {extra_command('torch')}") from exc
    return {"torch": torch, "python": str(sysconfig.get_config_var("SOABI"))}


def _places() -> list[str]:
    """Compiler options for the paths of headers and libraries."""
    spec = importlib.util.find_spec("torch")
    locations = (spec and spec.submodule_search_locations) or [""]
    torch = Path(locations[0])
    python = Path(sysconfig.get_path("include"))
    for header, help in (
        (torch / "include" / "torch" / "csrc" / "autograd" / "python_variable.h", "pip's torch"),
        (python / "Python.h", "Debian, Ubuntu: apt install python3-dev"),
    ):
        if not header.is_file():
            raise CompileError(f"the dispatcher needs {header}, which was not found ({help})")
    includes = torch / "include", torch / "include/torch/csrc/api/include", python
    return [*(f"-isystem{folder}" for folder in includes), f"-L{torch / 'lib'}"]
