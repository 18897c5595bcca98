"""One compiler for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, find_toolchain


@pytest.fixture(scope="session")
def compiler(
    request: pytest.FixtureRequest, shared_cache: Path, missing_compiler: str
) -> Iterator[Compiler]:
    """Builds from the start what the modules of this run name in `SPECS`: no core waits."""
    if missing_compiler:
        pytest.skip(missing_compiler)
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    compiler = Compiler(find_toolchain(), ArtifactCache(shared_cache / "artifacts"))
    compiler.submit([spec for module in modules for spec in getattr(module, "SPECS", ())])
    try:
        yield compiler
    finally:
        compiler.close(cancel=True)
