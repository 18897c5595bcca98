"""What the tests on a GPU share: one compiler, with the planted templates beside the real ones, and
the gate on the GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gating import Gated

from tuner.base import resources
from tuner.compile import dispatcher
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.toolchain import find_toolchain
from tuner.errors import CompileError
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, detect
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.worker_client import WorkerClient

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def compiler(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
    missing_gpu: str,
    missing_compiler: str,
) -> Iterator[Compiler]:
    """One for all, at work from the start on what the modules of this run name in `kernels`.

    One after the other, kernels of CUTLASS take most of a minute each; on all cores at once, and
    beside the tests of the earlier modules, their time is that of the slowest.
    """
    if reason := missing_gpu or missing_compiler:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("templates") / "templates"
    shutil.copytree(resources.templates(), folder)
    for template in HERE.glob("*.cu.j2"):
        shutil.copy(template, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "templates", lambda: folder)
        made = Compiler(
            find_toolchain(),
            ArtifactCache(shared_cache / "artifacts"),
            capability=(detect() or DEFAULT_GPU).compute_capability,
        )
        try:
            for module in modules(request.session):
                made.submit(getattr(module, "kernels", list)())
            yield made
        finally:
            made.close(cancel=True)  # nobody waits for what no test asked for


@pytest.fixture(scope="session", autouse=True)
def built_dispatcher(shared_cache: Path, missing_gpu: str) -> None:
    """`tuner.enable` overrides nothing before it is built."""
    if not missing_gpu:
        with contextlib.suppress(CompileError):
            dispatcher.build(ArtifactCache(shared_cache / "artifacts"))


def modules(session: pytest.Session) -> list[Any]:
    """This folder's modules of which a test was selected, in the order in which they run."""
    found = dict.fromkeys(
        item.module
        for item in session.items
        if isinstance(item, pytest.Function) and item.path.parent == HERE
    )
    return list(found)


@pytest.fixture(scope="module")
def device(missing_gpu: str) -> Device:
    """The GPU."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    return Device()


@pytest.fixture(scope="module")
def gate(device: Device, compiler: Compiler) -> Iterator[Gate]:
    """The gate on it."""
    [(_, future)] = compiler.submit([REFERENCE])
    made = Gate(device, load(future.result()))
    yield made
    made.close()


@pytest.fixture(scope="module")
def gated(device: Device, gate: Gate, compiler: Compiler) -> Gated:
    """Candidates before the gate."""
    return Gated(device, gate, compiler)


@pytest.fixture(scope="module")
def worker(missing_gpu: str) -> Iterator[WorkerClient]:
    """The process that measures and judges on it."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    made = WorkerClient(0)
    yield made
    made.close()


@pytest.fixture(scope="session")
def planted() -> Any:
    """The module ``planted.py``, as the worker imports it."""
    spec = importlib.util.spec_from_file_location("planted", HERE / "planted.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
