"""What a new problem's search is told of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import final

from tuner.config import Config
from tuner.families import family
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Environment, Measurement, Regime
from tuner.problem import GemmProblem, Problem
from tuner.runners import recording, recording_archive
from tuner.runners.recording import Recording
from tuner.search import history
from tuner.store import Store, open_store

REGIME = Regime.default("gemm")
HERE, BEFORE = Environment({"driver": "2"}), Environment({"driver": "1"})
NEW, NEAR, FAR = (GemmProblem(m, 1024, 1024) for m in (1024, 2048, 65536))
CONFIGS = list(family("gemm").space(NEW, DEFAULT_GPU))[:3]
CUBLAS = Config("vendor_blas", {"kernel": "cublas"})


def measured(problem: Problem, config: Config, environment: Environment = HERE) -> Measurement:
    return final(config, 9.0, problem, environment=environment, is_final=False)


def tuned(store: Store, problem: Problem, environment: Environment = HERE) -> None:
    quick = [measured(problem, config, environment) for config in (*CONFIGS, CUBLAS)]
    store.add(quick)
    store.decide(problem, DEFAULT_GPU, REGIME, [m.but(is_final=True) for m in quick], "sweep")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    folder = tmp_path / "recordings"
    folder.mkdir()
    monkeypatch.setattr(recording_archive, "folder", lambda: folder)
    history._shipped.cache_clear()
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as opened:
        yield opened
    history._shipped.cache_clear()


def ship(problem: Problem, *configs: Config) -> None:
    quick = tuple(measured(problem, config) for config in configs)
    whole = Recording(problem, DEFAULT_GPU, REGIME, HERE, (*quick, quick[0].but(is_final=True)))
    recording.write(recording_archive.folder() / f"{problem.label()}{recording.SUFFIX}", whole)


def told(store: Store) -> list[Measurement]:
    return history.history(NEW, DEFAULT_GPU, REGIME, lambda: HERE.digest, store)


def test_other_problems_of_the_store(store: Store) -> None:
    tuned(store, NEAR)
    tuned(store, FAR)
    found = told(store)
    assert {m.problem for m in found} == {NEAR, FAR}
    assert {m.config for m in found} == set(CONFIGS), "own kernels alone"
    assert not any(m.is_final for m in found)


def test_the_nearest_where_there_are_many(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_PROBLEMS", 1)
    tuned(store, FAR)
    tuned(store, NEAR)
    assert {m.problem for m in told(store)} == {NEAR}


def test_its_own_results_of_another_environment_alone(store: Store) -> None:
    tuned(store, NEW, BEFORE)
    store.add([measured(NEW, config, HERE) for config in CONFIGS])
    found = told(store)
    assert {m.problem for m in found} == {NEW}
    assert {m.environment.digest for m in found} == {BEFORE.digest}


def test_shipped_recordings_of_problems_that_the_store_lacks(store: Store) -> None:
    tuned(store, NEAR)
    for problem in (NEW, NEAR, FAR):
        ship(problem, CONFIGS[0])
    found = told(store)
    assert {m.problem for m in found} == {NEAR, FAR}, "its own recording is never told"
    assert sum(m.problem == NEAR for m in found) == len(CONFIGS)
    assert not any(m.is_final for m in found)


def test_another_chip_or_regime_says_nothing(store: Store) -> None:
    ship(FAR, CONFIGS[0])
    assert history.history(NEW, GPUS["H100"], REGIME, lambda: HERE.digest, store) == []
    warm = Regime("stream", "warm")
    assert history.history(NEW, DEFAULT_GPU, warm, lambda: HERE.digest, store) == []


def test_a_config_of_another_version_of_its_family_is_passed_over(store: Store) -> None:
    ship(FAR, Config("gemm", {"tile": 3}), CONFIGS[0], Config("gone", {"x": 1}))
    assert [m.config for m in told(store)] == [CONFIGS[0]]


def test_a_rule_is_made_from_everything_measured(store: Store) -> None:
    tuned(store, NEW)
    ship(NEW, CONFIGS[0])
    ship(FAR, CONFIGS[0], CUBLAS)
    found = history.measured("gemm", DEFAULT_GPU, REGIME, store)
    assert set(found) == {NEW, FAR}
    assert {m.config for m in found[NEW]} == {*CONFIGS, CUBLAS}
    assert {m.config for m in found[FAR]} == {CONFIGS[0], CUBLAS}


def test_a_problem_s_times_are_of_the_first_regime_that_has_some(store: Store) -> None:
    tuned(store, NEW)
    ship(NEW, CONFIGS[0])
    ship(FAR, CONFIGS[0])
    regimes = (Regime("eager", "cold"), REGIME)
    regime, found = history.measured_in("gemm", DEFAULT_GPU, regimes, store)
    assert regime == REGIME and {NEW, FAR} <= set(found)
    assert all(m.is_final for problem in set(found) - {NEW, FAR} for m in found[problem])
    assert len(found[NEW]) == len(CONFIGS) + 1  # cuBLAS's also


def test_a_search_in_a_stream_is_told_what_was_chained(store: Store) -> None:
    chained = [measured(NEAR, config).but(regime=REGIME.chained) for config in CONFIGS]
    store.add(chained)
    store.decide(NEAR, DEFAULT_GPU, REGIME.chained, [chained[0].but(is_final=True)], "s")
    assert {m.problem for m in told(store)} == {NEAR}
    tuned(store, NEAR)
    assert {m.regime for m in told(store)} == {REGIME}, "once it was timed in a stream"


def test_recordings_of_a_problem_count_together(store: Store) -> None:
    ship(FAR, CONFIGS[0])
    (first,) = recording_archive.folder().iterdir()
    first.rename(first.with_name(f"other{recording.SUFFIX}"))
    ship(FAR, CONFIGS[1])
    found = history.measured("gemm", DEFAULT_GPU, REGIME, store)
    assert {m.config for m in found[FAR]} == set(CONFIGS[:2])
