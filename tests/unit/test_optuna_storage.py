"""Studies in an Optuna storage: what is copied, how it is resumed, and its faults."""

from __future__ import annotations

import math
import signal
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from toys import REGIME, SUBJECT, CountingRunner, failed, finished, recording, sweep

from tuner.errors import ConfigError, StoreError
from tuner.measurement import Measurement, Status
from tuner.search.samplers import KERNEL
from tuner.search.storage import StudyStorage, open_storage
from tuner.store import Store, open_store
from tuner.tuning.progress import Interruption


@pytest.fixture(params=["sqlite", "journal"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    journal = tmp_path / "optuna"
    return str(journal) if request.param == "journal" else f"sqlite:///{journal}"


def opened(url: str) -> RDBStorage | JournalStorage:
    return RDBStorage(url) if "://" in url else JournalStorage(JournalFileBackend(url))


def only_study(url: str) -> optuna.Study:
    """The one study in a storage, with what was read of it in memory."""
    storage = opened(url)
    [summary] = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    copied = optuna.create_study(study_name=study.study_name)
    copied.add_trials(study.trials)
    for name, value in study.user_attrs.items():
        copied.set_user_attr(name, value)
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()
    return copied


def run(
    url: str,
    store: Store,
    runner: CountingRunner | None = None,
    interruption: Interruption | None = None,
    **options: object,
) -> list[str]:
    """Sweep into a storage; the notes."""
    notes: list[str] = []
    with open_storage(url, notes.append) as studies:
        chosen = runner or CountingRunner(recording())
        sweep(chosen, store, interruption=interruption, studies=studies, **options).run()
    return notes


def test_a_sweeps_trials_are_kept_with_times_and_reasons(url: str, store: Store) -> None:
    def change(m: Measurement) -> Measurement:
        if m.config["m"] == 128:
            return failed(m.config, Status.WRONG_RESULT, "error 1.3\nmore")
        return m

    assert run(url, store, CountingRunner(recording(change=change)), trials=27) == []
    study = only_study(url)
    assert study.study_name.startswith("gemm M=")
    assert f"| {REGIME} | toy | replayed " in study.study_name
    assert study.user_attrs["provenance"] == "replayed"
    assert study.user_attrs["environment"] == {"driver": "1"}
    evaluated = [t for t in study.trials if KERNEL in t.user_attrs]
    assert len({t.user_attrs[KERNEL] for t in evaluated}) == len(evaluated) == 27
    assert {t.user_attrs["provenance"] for t in evaluated} == {"replayed"}
    lost = [t for t in evaluated if t.params["m"] == 128]
    assert len(lost) == 9
    assert {(t.state, t.user_attrs["reason"]) for t in lost} == {
        (TrialState.FAIL, "wrong_result: error 1.3")
    }
    passed = [t for t in evaluated if t.params["m"] != 128]
    times = {m.config.digest: m.latency_us for m in store.measurements(final=False) if m.ok}
    assert {t.state for t in passed} == {TrialState.COMPLETE}
    assert all(t.value in times.values() for t in passed), "microseconds, as they were measured"
    assert study.best_value == min(t.value for t in passed)


def test_optunas_own_analysis_reads_a_kept_study(url: str, store: Store) -> None:
    run(url, store, trials=27, sampler="model")
    study = only_study(url)
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    assert set(shares) == set(study.best_params)
    assert math.isfinite(sum(shares.values()))
    assert study.user_attrs["sampler"] == "model"


def test_a_resumed_sweep_goes_on_in_the_same_study(url: str, store: Store) -> None:
    run(url, store, trials=10)
    run(url, store, trials=10)
    first = only_study(url)
    assert len([t for t in first.trials if KERNEL in t.user_attrs]) == 10
    run(url, store, trials=27)
    study = only_study(url)
    kernels = [t.user_attrs[KERNEL] for t in study.trials if KERNEL in t.user_attrs]
    assert len(kernels) == len(set(kernels)) == 27
    assert study.study_name == first.study_name


def test_a_postgresql_database_takes_studies(
    create_postgres_url: Callable[[], str], store: Store
) -> None:
    url = create_postgres_url()
    assert run(url, store, trials=10) == []
    assert run(url, store, trials=12) == []
    assert len([t for t in only_study(url).trials if KERNEL in t.user_attrs]) == 12


def test_what_the_store_told_is_marked(url: str, store: Store) -> None:
    sweep(CountingRunner(recording()), store, trials=10).run()
    run(url, store, trials=15)
    marks = [t.user_attrs["from_store"] for t in only_study(url).trials if KERNEL in t.user_attrs]
    assert marks == [True] * 10 + [False] * 5


def test_interrupted_trials_fail_and_are_done_again(url: str, store: Store) -> None:
    interruption = Interruption()

    def after(runner: CountingRunner) -> None:
        if runner.collected == 6:
            interruption.number = signal.SIGINT

    runner = CountingRunner(recording(), after)
    runner.capacity = 3
    run(url, store, runner, trials=27, interruption=interruption, sampler="cost")
    given_up = [t for t in only_study(url).trials if t.user_attrs.get("reason") == "interrupted"]
    assert given_up
    assert {t.state for t in given_up} == {TrialState.FAIL}
    run(url, store, trials=27, sampler="cost")
    complete = [t for t in only_study(url).trials if t.state is TrialState.COMPLETE]
    assert len({t.user_attrs[KERNEL] for t in complete}) == len(complete) == 27


def test_many_start_together_on_a_new_storage(url: str) -> None:
    ready = threading.Barrier(8)
    faults: list[str] = []

    def start() -> None:
        ready.wait()
        with open_storage(url, faults.append) as studies:
            studies.copy(finished("a"), SUBJECT)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(start) for _ in range(8)]:
            future.result()
    assert faults == []
    assert [t.user_attrs[KERNEL] for t in only_study(url).trials] == ["a"]


def test_two_sweeps_that_share_a_study_copy_a_kernel_once(url: str) -> None:
    """Also where both began before either had copied it."""
    written = threading.Event()
    with open_storage(url, pytest.fail) as slow:
        assert slow is not None
        trials = finished("a")
        slow.copy(trials, SUBJECT)
        slow._writer.put(written.set)
        assert written.wait(60)
        with open_storage(url, pytest.fail) as quick:
            quick.copy(finished("b"), SUBJECT)
        trials.start("b")
        trials.finish("b", 1.0, {"latency_us": 2.5, "variants": 1})
        slow.copy(trials, SUBJECT)
    assert [t.user_attrs[KERNEL] for t in only_study(url).trials] == ["a", "b"]


def test_a_database_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.storage.WAIT_S", 0.0)
    url = f"sqlite:///{tmp_path / 'optuna'}"
    with sqlite3.connect(tmp_path / "optuna") as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="did not answer within 0 s"):
            StudyStorage(url, print)
    database.close()


def test_a_storage_that_is_lost_is_noted_once_and_the_sweep_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(JournalFileBackend, "append_logs", refuse)
    notes = run(str(tmp_path / "optuna.log"), store, trials=27)
    assert len(notes) == 1
    assert notes[0].endswith("No space left on device; no further trial is copied")
    assert len(store.measurements(final=False)) > 27


def test_proposals_do_not_depend_on_the_storage(url: str, store: Store) -> None:
    with_one, without = CountingRunner(recording()), CountingRunner(recording())
    run(url, store, CountingRunner(recording()), trials=12, seed=3)
    with open_store("sqlite:///:memory:") as empty:
        run(url, empty, with_one, trials=20)
    with open_store("sqlite:///:memory:") as empty:
        sweep(without, empty, trials=20).run()
    assert list(with_one.submitted) == list(without.submitted)


def test_a_storage_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a journal")
    with open_store(f"sqlite:///{tmp_path / 'store.sqlite'}"):
        pass
    cases = {
        f"sqlite:///{tmp_path / 'missing' / 'optuna.db'}": "cannot be opened",
        f"sqlite:///{tmp_path / 'store.sqlite'}": "holds another program's tables",
        f"sqlite:///{tmp_path / 'notes.txt'}": "cannot be opened: file is not a database",
        str(tmp_path): "is a folder",
        str(tmp_path / "notes.txt"): "is not a journal",
        str(tmp_path / "missing" / "optuna.log"): "cannot be opened",
        "fantasy://place": "cannot be opened",
    }
    for url, reason in cases.items():
        with pytest.raises((ConfigError, StoreError), match=reason) as caught:
            StudyStorage(url, print)
        assert "\n" not in str(caught.value)
    with sqlite3.connect(tmp_path / "store.sqlite") as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    database.close()
    assert "studies" not in tables


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreError) as caught:
        StudyStorage("postgresql+psycopg://me:secret@127.0.0.1:1/db", print)
    assert "secret" not in str(caught.value)


def test_no_storage_where_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open_storage(None, print) as studies:
        assert studies is None
    monkeypatch.setenv("TUNER_OPTUNA_STORAGE", str(tmp_path / "optuna.log"))
    with open_storage(None, print) as studies:
        assert studies.name == str(tmp_path / "optuna.log")
