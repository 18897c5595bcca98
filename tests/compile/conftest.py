"""The compilers of all tests here: one makes libraries, one the device half of kernels alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import UNIT, Compiler, find_toolchain
from tuner.compile.units import Unit


class LibraryCompiler(Compiler):
    """Takes turns with the other compiler of a run: as many units at a time as one of them has."""

    def __init__(self, folder: Path, turns: list[threading.Semaphore], batch: int = UNIT) -> None:
        super().__init__(find_toolchain(), ArtifactCache(folder), batch=batch)
        turns += [] if turns else [threading.Semaphore(self.jobs)]
        self._turns = turns[0]

    def _build(self, unit: Unit) -> None:
        with self._turns:
            super()._build(unit)


class DeviceCompiler(LibraryCompiler):
    """Compiles device code by the same options, for what ptxas says of it: its artifacts cannot be
    loaded. The host's half of an attention kernel takes 40 % of the compile. Most of the rest is
    reading the headers, once a unit.
    """

    def _write(self, folder: Path, template: str, text: str) -> list[list[str]]:
        super()._write(folder, template, text)
        nvcc = self._nvcc(template, text)
        source, ptx, library = (str(folder / name) for name in ("unit.cu", "unit.ptx", "kernel.so"))
        return [[*nvcc, "-ptx", source, "-o", ptx], [*nvcc, "-fatbin", ptx, "-o", library]]


@pytest.fixture(scope="session")
def turns() -> list[threading.Semaphore]:
    """The one that the compilers share, once there is one of them."""
    return []


@pytest.fixture(scope="session")
def compiler(
    request: pytest.FixtureRequest,
    shared_cache: Path,
    missing_compiler: str,
    turns: list[threading.Semaphore],
) -> Iterator[Compiler]:
    """Builds from the start what the modules of this run name in `SPECS`: no core waits."""
    if missing_compiler:
        pytest.skip(missing_compiler)
    yield from _at_work(request, LibraryCompiler(shared_cache / "artifacts", turns), "SPECS")


@pytest.fixture(scope="session")
def device_compiler(
    request: pytest.FixtureRequest,
    shared_cache: Path,
    missing_compiler: str,
    turns: list[threading.Semaphore],
) -> Iterator[Compiler]:
    """Builds what they name in `DEVICE_SPECS`."""
    if missing_compiler:
        pytest.skip(missing_compiler)
    yield from _at_work(
        request, DeviceCompiler(shared_cache / "tests" / "device", turns, 12), "DEVICE_SPECS"
    )


def _at_work(request: pytest.FixtureRequest, compiler: Compiler, wanted: str) -> Iterator[Compiler]:
    here = Path(__file__).parent
    items = (item for item in request.session.items if here in item.path.parents)
    modules = dict.fromkeys(getattr(item, "module", None) for item in items)
    compiler.submit([spec for module in modules for spec in getattr(module, wanted, ())])
    try:
        yield compiler
    finally:
        compiler.close(cancel=True)


@pytest.fixture
def usual(request: pytest.FixtureRequest, long_mode: bool) -> None:
    """Skips cases that are not in a module's `USUAL`, which only a long run compiles."""
    case = next(iter(request.node.callspec.params.values()))
    if not long_mode and case not in request.module.USUAL:
        pytest.skip("scripts/test --long compiles it")
