"""What all tests share: no test touches the user's cache, and each skip says its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tuner import settings
from tuner.errors import TunerError

hypothesis.settings.register_profile("tuner", deadline=None, database=None)
hypothesis.settings.load_profile("tuner")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for everything that compiles in this run; the caller's where one is named."""
    given = os.environ.get("TUNER_CACHE_DIR")
    return Path(given) if given else tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def isolated(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shared_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit test sees no TUNER_* variable of the caller's and an empty cache of its own."""
    compiles = any(request.node.get_closest_marker(name) for name in ("compile", "gpu"))
    if not compiles:
        for name in settings.VARIABLES:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNER_CACHE_DIR", str(shared_cache if compiles else tmp_path / "cache"))


@pytest.fixture(scope="session")
def missing_compiler() -> str:
    """Why nothing can be compiled here; empty when it can."""
    from tuner.toolchain import find_toolchain

    try:
        find_toolchain()
    except TunerError as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="session")
def missing_gpu() -> str:
    """Why nothing can be launched here; empty when it can."""
    from tuner.device import detect

    try:
        gpu = detect()
    except TunerError as exc:
        return str(exc)
    return "" if gpu else "no NVIDIA GPU found"


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest, isolated: None) -> Iterator[None]:
    """Skips a marked test where its machine is missing."""
    for marker in ("compile", "gpu"):
        if request.node.get_closest_marker(marker):
            fixture = {"compile": "missing_compiler", "gpu": "missing_gpu"}[marker]
            if reason := request.getfixturevalue(fixture):
                pytest.skip(reason)
    yield
