"""Machines that make and install bundles of softmax kernels."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stored import final

from tuner import bundle
from tuner.bundle import install, pack
from tuner.cli.imports import unservable
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.render import render
from tuner.config import Config
from tuner.families import families
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Regime, Resources
from tuner.problem import SoftmaxProblem
from tuner.selection.reader import close
from tuner.store import Entry, open_store

LOOKUP = importlib.import_module("tuner.selection.reader")


H200, WARM = GPUS["H200"], Regime("stream", "warm")


PROBLEM = SoftmaxProblem(1024, 1024, 4)


MEMBER = families()["softmax"]


SPACE = MEMBER.space(PROBLEM, H200)


OTHER = next(c for c in SPACE if MEMBER.kernels(PROBLEM, c) != MEMBER.kernels(PROBLEM, SPACE[0]))


VENDOR = Config("vendor_softmax", {"kernel": "torch"})


LIBRARY = b"\x7fELF" + b"a library" * 99


KEYS = ("a" * 32, "b" * 32)


def measured(config: Config, us: float, key: str = "", **changes: Any) -> Measurement:
    facts = {"environment": Environment({"driver": "1"}), "created_at": "2026-11-01T00:00:00+00:00"}
    facts |= {"std_us": None, "rounds": 0, "artifacts": {"softmax": key} if key else {}}
    return final(config, us, PROBLEM, **{**facts, **changes})


RANKING = (
    measured(SPACE[0], 5.0, KEYS[0]),
    measured(OTHER, 5.5, KEYS[1]),
    measured(VENDOR, 6.0),
)


@cache
def empty_store() -> bytes:
    """A store's file, made once: its migrations take longer than a test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        open_store(str(path)).close()
        return path.read_bytes()


class Machine:
    """A store and an artifact cache."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "s.sqlite"
        self.path.write_bytes(empty_store())
        self.store = open_store(str(self.path))
        self.cache = ArtifactCache(folder / "artifacts")

    def build(self, m: Measurement, library: bytes = LIBRARY, source: str | None = None) -> None:
        (spec,) = MEMBER.kernels(m.problem, m.config).values()
        (key,) = m.artifacts.values()
        file = self.path.parent / "kernel.so"
        file.unlink(missing_ok=True)
        file.write_bytes(library)
        self.cache.put(
            key,
            file,
            resources=Resources(32, 0, 0, 0),
            compile_cpu_s=1.5,
            source=render(spec, key) if source is None else source,
            facts={"template": spec.template},
        )

    @property
    def content(self) -> tuple[list[Entry], list[str], int]:
        return self.store.entries(), self.cache.keys(), len(self.store.measurements())

    def install(self, path: Path, **options: Any) -> bundle.Installed:
        return install(path, self.store, self.cache, check=unservable, **options)


@pytest.fixture(autouse=True)
def nothing_shipped_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (LOOKUP.shipped, LOOKUP.shipped_index)
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "nothing")
    for cached in caches:
        cached.cache_clear()
    yield
    close()
    for cached in caches:
        cached.cache_clear()


def made(folder: Path) -> Machine:
    """A machine that tuned the problem, with two kernels that share a library."""
    machine = Machine(folder)
    machine.store.decide(PROBLEM, H200, WARM, RANKING, "sweep")
    for m in RANKING[:2]:
        machine.build(m)
    return machine


@pytest.fixture
def maker_fixture(tmp_path: Path) -> Iterator[Machine]:
    machine = made(tmp_path / "maker")
    yield machine
    machine.store.close()


@pytest.fixture
def user_fixture(tmp_path: Path) -> Iterator[Machine]:
    """A machine without anything."""
    machine = Machine(tmp_path / "user")
    yield machine
    machine.store.close()


@pytest.fixture(scope="module")
def packed_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of such a machine; never changed."""
    folder = tmp_path_factory.mktemp("packed")
    machine = made(folder / "maker")
    out = folder / "b.tar"
    pack(machine.store.entries(), machine.cache, out)
    machine.store.close()
    return out


Edit = Callable[[dict[str, bytes]], None]


def manifest_of(members: dict[str, bytes]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(members["manifest.json"])
    return manifest


def said(**facts: Any) -> Edit:
    """The manifest with some facts changed."""

    def edit(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps({**manifest_of(members), **facts}).encode()

    return edit
