"""Mutated files of the tuner under a model's calls: none fails, and each fault is counted.

Mutants are drawn with a fixed seed: hundreds in seconds, and ten thousand under ``--long``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import KINDS
from mutated import mutated
from portfolio_machine import (
    FIRST,
    FLASH,
    SECOND,
    Serving,
    Stopwatch,
    candidate,
    portfolio_of,
    portfolio_serving,
    portfolio_stopwatch,
)
from runtime_machine import fake_machine

from tuner import settings
from tuner.compile.artifacts import ArtifactCache
from tuner.selection.kernels import Kernel, KernelList, artifact_of

torch = pytest.importorskip("torch", reason="torch is not installed")
benchmark = importlib.import_module("tuner.runtime.call.benchmark")
portfolio = importlib.import_module("tuner.selection.portfolio")

machine, serving, stopwatch = fake_machine, portfolio_serving, portfolio_stopwatch
SHAPE = (1, 2, 32, 64)


@pytest.fixture
def draws(long_mode: bool) -> Iterator[random.Random]:
    """Sources of chance, one a mutant."""
    return (random.Random(seed) for seed in range(10_000 if long_mode else 300))


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    library = tmp_path / "library.so"
    library.write_bytes(b"library" * 100)
    made = ArtifactCache(tmp_path / "artifacts")
    facts = {"nvcc": "13.0.88", "advice": [], "template": "x.cu.j2", "variables": {"tile_n": 64}}
    made.put("k1", library, resources=None, compile_cpu_s=1.5, source="", facts=facts)
    return made


def test_of_a_mutated_artifact_comes_a_miss_or_the_library_that_it_names(
    cache: ArtifactCache, draws: Iterator[random.Random]
) -> None:
    folder = cache.root / "k1"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    meta = json.loads(files["meta.json"])
    meta["resources"] = {"registers": 128, "code": "ab" * 32}
    kernel = Kernel("spec", "k1", meta["sha256"])
    known = KernelList("13.0.88", "4.4", "9.0", "", {"spec": kernel})
    hits = misses = 0
    for draw in draws:
        folder.mkdir(exist_ok=True)
        library = bytearray(files["kernel.so"])
        if is_cut := draw.random() < 0.2:
            draw.choice(KINDS)(library, draw)
        for name, content in (("kernel.so", bytes(library)), ("meta.json", mutated(meta, draw))):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(content)
        cache.facts("k1")
        artifact = cache.find("k1")
        if artifact is None:
            misses += 1
            assert not folder.exists(), "in quarantine"
            continue
        hits += 1
        digest = hashlib.sha256(artifact.library.read_bytes()).hexdigest()
        assert artifact.sha256 == digest and math.isfinite(artifact.compile_cpu_s)
        assert is_cut or digest == meta["sha256"]
        artifact.facts.get("nvcc")
        if artifact.resources is not None:
            assert isinstance(artifact.resources.code, str)
        artifact_of(known, kernel)
    assert hits and misses


def _served(serving: Serving) -> bool:
    """True where an own kernel answered one call; else PyTorch did, and a reason was counted."""
    runtime = serving.runtime
    runtime.table.table.forget()
    runtime.counters.stats(reset=True)
    own = serving.call(SHAPE)
    stats = serving.machine.stats()
    assert stats.calls == 1 and stats.hits == own
    return own


def test_a_mutated_portfolio_fails_no_call(
    serving: Serving,
    draws: Iterator[random.Random],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = portfolio_of(
        candidate(FIRST, 10.0), candidate(SECOND, 11.0), candidate(FLASH, 20.0)
    ).to_json()
    monkeypatch.setattr(portfolio, "_folder", lambda: tmp_path)
    monkeypatch.setattr(serving.runtime.proven_kernels, "portfolios", portfolio.shipped)
    own = faults = 0
    try:
        for draw in draws:
            (tmp_path / "attention.json").write_bytes(mutated(document, draw))
            portfolio.shipped.cache_clear()
            own += _served(serving)
            faults += bool(serving.machine.stats().errors)
    finally:
        portfolio.shipped.cache_clear()
    assert own and faults


def test_a_mutated_choice_fails_no_call(
    serving: Serving, stopwatch: Stopwatch, draws: Iterator[random.Random]
) -> None:
    """A line of ``TUNER_BENCHMARK``'s journal."""
    assert _served(serving)
    path = settings.cache_dir() / "benchmarked.jsonl"
    row = json.loads(path.read_text())
    faults = 0
    for draw in draws:
        path.write_bytes(mutated(row, draw) + draw.choice((b"\n", b"")))
        benchmark.journal = benchmark.Journal()
        _served(serving)
        faults += bool(serving.machine.stats().errors)
    assert faults
