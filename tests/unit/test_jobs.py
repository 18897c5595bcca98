"""Jobs in a store: one contract over every backend, then the command for people."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from stored import final

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError, LeaseLostError
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import Store, SweepRecord, open_store
from tuner.store.entry import Entry
from tuner.store.jobs import Claim, result_of, result_text
from tuner.store.sql_jobs import Jobs

H200, WARM = GPUS["H200"], Regime("stream", "warm")
ONE, TWO, THREE = (GemmProblem(size, size, size) for size in (128, 256, 512))
ENVIRONMENT = Environment({"driver": "580"})
PAST, FUTURE = 0.0, 1e12
RESULT = {
    "winner": "fused_attention",
    "is_vendor": False,
    "config_digest": "0123456789abcdef",
    "latency_us": 11.5,
    "provenance": "measured",
    "pass": "final",
    "own_us": 11.5,
    "fastest_vendor": "cudnn",
    "fastest_vendor_us": 14.8,
    "vendor_over_own": 14.8 / 11.5,
}


@pytest.fixture(params=["file", "memory", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("create_postgres_url")()
    return str(tmp_path / "s.sqlite") if request.param == "file" else "sqlite://"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as made:
        yield made


def claimed(store: Store, holder: str = "host:1") -> Claim:
    claim = store.jobs.claim(holder)
    assert claim is not None
    return claim


def state(store: Store, job: str) -> list[str]:
    return [task.state for task in store.jobs.tasks(job)]


def change(store: Store, column: str, value: float) -> None:
    """Set a time of every task, as a clock that jumps would."""
    engine: sa.Engine = store._engine  # type: ignore[attr-defined]
    options = {"tuner_write": True}
    with engine.connect().execution_options(**options) as connection, connection.begin():
        connection.execute(sa.text(f"UPDATE tasks SET {column} = :value"), {"value": value})


def measured(sweep: str, tile: int = 64) -> Measurement:
    facts = {"regime": WARM, "environment": ENVIRONMENT, "is_final": False, "sweep": sweep}
    return final(Config("gemm", {"tile_m": tile}), 10.0, ONE, **facts)


class TestContract:
    """What `Jobs` promises, of every backend."""

    def test_a_job_is_its_problems_and_options(self, store: Store) -> None:
        options = {"effort": "full", "families": ["gemm"], "trials": None}
        id = store.jobs.submit([ONE, TWO, ONE], options, priority=3, attempts=2)
        job = store.jobs.find(id)
        assert (job.priority, job.attempts, job.options) == (3, 2, options)
        assert (job.state, job.counts) == ("queued", {"queued": 2})
        assert [task.problem for task in store.jobs.tasks(id)] == [ONE, TWO]
        assert [event.text for event in store.jobs.events(id)] == ["submitted, problems: 2"]

    def test_newest_job_comes_first(self, store: Store) -> None:
        ids = []
        for _ in range(3):
            ids.append(store.jobs.submit([ONE], {}))
            time.sleep(0.002)
        assert [job.id for job in store.jobs.all()] == ids[::-1]

    def test_the_beginning_of_an_id_is_enough(self, store: Store) -> None:
        first = store.jobs.submit([ONE], {})
        found = store.jobs.find(first[:6])
        assert found.id == first
        digits = [store.jobs.submit([ONE], {})[0] for _ in range(17)]  # two begin alike
        with pytest.raises(ConfigError, match=r"names \d+ jobs"):
            store.jobs.find(max(digits, key=digits.count))
        assert store.jobs.find("%") is None

    def test_an_empty_id_names_no_job(self, store: Store) -> None:
        for _ in range(2):
            with pytest.raises(ConfigError, match="the job's id is empty"):
                store.jobs.find("")
            store.jobs.submit([ONE], {})

    def test_an_empty_job_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="problems=0 is out of range"):
            store.jobs.submit([], {})
        with pytest.raises(ConfigError, match="attempts=0 is out of range"):
            store.jobs.submit([ONE], {}, attempts=0)
        assert store.jobs.all() == []

    def test_claims_go_by_priority_then_by_order(self, store: Store) -> None:
        store.jobs.submit([ONE, TWO], {})
        urgent = store.jobs.submit([THREE], {"seed": 7}, priority=1)
        claims = [claimed(store) for _ in range(3)]
        assert [claim.problem for claim in claims] == [THREE, ONE, TWO]
        assert (claims[0].job, claims[0].options, claims[0].attempt) == (urgent, {"seed": 7}, 1)
        assert store.jobs.claim("host:2") is None

    def test_a_problem_is_worked_on_once_at_a_time_whatever_the_jobs(self, store: Store) -> None:
        first = store.jobs.submit([ONE], {})
        second = store.jobs.submit([ONE], {})
        claim = claimed(store)
        assert store.jobs.claim("host:2") is None
        store.jobs.finish(claim.lease, "decided")
        assert claimed(store).job == second
        assert state(store, first) == ["done"]

    def test_a_result_is_kept_with_its_task(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO], {})
        store.jobs.extend((claim := claimed(store)).lease, {"phase": "search"})
        store.jobs.finish(claim.lease, "decided", RESULT)
        store.jobs.finish(claimed(store).lease, "nothing was decided")
        first, second = store.jobs.tasks(job)
        assert (first.result, first.progress) == (RESULT, {})
        assert second.result is None
        assert first.to_json()["result"] == RESULT

    def test_a_lease_that_is_extended_is_kept(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {})
        claim = claimed(store)
        change(store, "expires_at", PAST)
        assert store.jobs.extend(claim.lease, {"phase": "search", "done": 3})
        assert store.jobs.claim("host:2") is None
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.holder, task.progress["done"]) == ("running", "host:1", 3)

    def test_nothing_is_written_where_nothing_is_due(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {})
        claim = claimed(store)
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]
        written: list[str] = []

        @sa.event.listens_for(engine, "before_cursor_execute")
        def note(connection: sa.Connection, cursor: object, statement: str, *rest: object) -> None:
            if connection.get_execution_options().get("tuner_write"):
                written.append(statement)

        assert store.jobs.claim("host:2") is None
        assert store.jobs.is_held(claim.lease)
        assert not written
        store.jobs.cancel(job)
        assert written
        assert not store.jobs.is_held(claim.lease)

    def test_a_lease_by_a_clock_that_was_read_later_is_kept(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = store.jobs.submit([ONE], {})
        claimed(store)
        late = Jobs._clock
        monkeypatch.setattr(Jobs, "_clock", lambda self, connection: late(self, connection) - 1)
        assert store.jobs.claim("host:2") is None
        assert state(store, job) == ["running"]

    # A time further ahead than any lease lasts: the clock was set back.
    @pytest.mark.parametrize("expires_at", [PAST, FUTURE])
    def test_a_silent_holder_loses_its_lease(self, store: Store, expires_at: float) -> None:
        job = store.jobs.submit([ONE], {})
        old = claimed(store)
        change(store, "expires_at", expires_at)
        assert store.jobs.claim("host:2") is None, "a retry waits"
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.reason) == ("queued", "host:1 stopped answering")
        change(store, "not_before", PAST)
        new = claimed(store, "host:2")
        assert new.attempt == 2
        assert new.lease.token > old.lease.token
        assert not store.jobs.extend(old.lease, {})
        with pytest.raises(LeaseLostError):
            store.jobs.finish(old.lease, "late")
        with pytest.raises(LeaseLostError):
            store.jobs.fail(old.lease, "late")
        with pytest.raises(LeaseLostError):
            store.jobs.release(old.lease, "late")
        with pytest.raises(LeaseLostError):
            store.jobs.begin(old.lease, "late")
        store.jobs.finish(new.lease, "decided")
        assert state(store, job) == ["done"]

    def test_who_lost_the_lease_can_write_nothing(self, store: Store) -> None:
        store.jobs.submit([ONE], {})
        old = claimed(store)
        fenced = store.under(old.lease)
        sweep = SweepRecord("sweep1", ONE, H200, WARM, ENVIRONMENT.digest, "quick")
        fenced.begin_sweep(sweep)
        fenced.add([measured("sweep1")])
        change(store, "expires_at", PAST)
        store.jobs.claim("host:2")
        change(store, "not_before", PAST)
        new = claimed(store, "host:2")
        final = measured("sweep1").but(is_final=True)
        assert store.jobs.is_held(new.lease) and not store.jobs.is_held(old.lease)
        with pytest.raises(LeaseLostError, match="nothing was written"):
            fenced.add([measured("sweep1", tile=128)])
        with pytest.raises(LeaseLostError):
            fenced.decide(ONE, H200, WARM, [final], "sweep1")
        with pytest.raises(LeaseLostError):
            fenced.end_sweep("sweep1", "done")
        assert store.measurements() == [measured("sweep1")]
        assert store.best(ONE, H200, WARM) is None
        store.under(new.lease).decide(ONE, H200, WARM, [final], "sweep1")
        assert store.best(ONE, H200, WARM) is not None

    def test_a_failure_is_tried_again_and_its_reason_kept(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {}, attempts=2)
        assert store.jobs.fail(claimed(store).lease, "no GPU memory")
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.attempt, task.reason) == ("queued", 1, "no GPU memory")
        assert store.jobs.claim("host:1") is None, "not at once"
        change(store, "not_before", FUTURE)
        assert not store.jobs.fail(claimed(store).lease, "still none"), "a clock set back"
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.attempt, task.reason) == ("failed", 2, "still none")
        texts = [event.text for event in store.jobs.events(job)]
        assert texts[2] == "attempt 1 failed: no GPU memory; next in 5 s"
        assert texts[4] == "attempt 2 failed: still none; given up"

    def test_what_cannot_end_otherwise_is_not_tried_again(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {})
        assert not store.jobs.fail(claimed(store).lease, "no candidate passed", is_final=True)
        assert state(store, job) == ["failed"]

    def test_a_holder_that_dies_every_time_is_given_up(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {}, attempts=2)
        for _ in range(2):
            claimed(store)
            change(store, "expires_at", PAST)
            assert store.jobs.claim("host:2") is None
            change(store, "not_before", PAST)
        assert state(store, job) == ["failed"]

    def test_a_released_problem_is_claimed_at_once_and_its_attempt_is_free(
        self, store: Store
    ) -> None:
        store.jobs.submit([ONE], {})
        store.jobs.release(claimed(store).lease, "stopped")
        assert claimed(store).attempt == 1

    def test_cancelling_ends_what_is_open(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO, THREE], {})
        other = store.jobs.submit([ONE], {})
        done, running = claimed(store), claimed(store)
        store.jobs.finish(done.lease, "decided")
        assert store.jobs.cancel(job) == 2
        assert state(store, job) == ["done", "cancelled", "cancelled"]
        assert not store.jobs.extend(running.lease, {})
        with pytest.raises(LeaseLostError):
            store.under(running.lease).add([measured("x")])
        assert store.jobs.cancel(job) == 0
        assert claimed(store).job == other

    def test_retry_queues_what_failed_or_was_cancelled(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO, THREE], {})
        store.jobs.fail(claimed(store).lease, "no", is_final=True)
        store.jobs.finish(claimed(store).lease, "decided")
        store.jobs.cancel(job)
        assert store.jobs.retry(job) == 2
        assert state(store, job) == ["queued", "done", "queued"]
        assert claimed(store).attempt == 1

    def test_trials_are_those_of_the_sweeps_of_the_job(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {})
        claim = claimed(store)
        store.jobs.begin(claim.lease, "sweep1")
        mine = [measured("sweep1", tile) for tile in (64, 128, 256)]
        store.add([measured("other"), *mine, measured("sweep1").but(is_final=True)])
        found = store.jobs.trials(job)
        assert [m for _, m in found] == [*mine, measured("sweep1").but(is_final=True)]
        assert [m for _, m in store.jobs.trials(job, after=found[0][0], limit=1)] == [mine[1]]
        assert [task.trials for task in store.jobs.tasks(job)] == [3]

    def test_events_name_their_problem_and_go_on_after_a_number(self, store: Store) -> None:
        job = store.jobs.submit([ONE], {})
        claim = claimed(store)
        store.jobs.log(job, "compiling", claim.lease.task)
        events = store.jobs.events(job)
        assert [(e.text, e.problem) for e in events] == [
            ("submitted, problems: 1", None),
            ("attempt 1 by host:1", ONE),
            ("compiling", ONE),
        ]
        assert store.jobs.events(job, after=events[1].id) == events[2:]

    def test_counts_are_of_all_jobs(self, store: Store) -> None:
        store.jobs.submit([ONE, TWO], {})
        store.jobs.submit([THREE], {})
        claimed(store)
        assert store.jobs.counts() == {"queued": 2, "running": 1}


@pytest.mark.parametrize("url", ["file", "postgresql"], indirect=True)
def test_many_claim_at_once_and_each_problem_has_one_holder(url: str) -> None:
    problems = [GemmProblem(8 * n, 8, 8) for n in range(1, 41)]
    with open_store(url) as store:
        # Every problem twice: two jobs must not run one problem at a time.
        store.jobs.submit(problems, {})
        store.jobs.submit(problems, {})
    found: list[list[Claim]] = [[] for _ in range(4)]

    def claim_all(number: int) -> None:
        misses = 0
        with open_store(url) as own:
            while misses < 20:
                claim = own.jobs.claim(f"host:{number}")
                misses = 0 if claim else misses + 1
                if claim:
                    found[number].append(claim)

    threads = [threading.Thread(target=claim_all, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claims = [claim for own in found for claim in own]
    assert sorted(claim.problem.key for claim in claims) == sorted(p.key for p in problems)


@pytest.mark.parametrize(
    ("url", "change"),
    [(url, change) for url in ("file", "postgresql") for change in ("decide", "pin", "forget")],
    indirect=["url"],
)
def test_every_change_of_a_decision_raises_the_version(url: str, change: str) -> None:
    first = measured("s").but(is_final=True)
    second = measured("s", 128).but(is_final=True, latency_us=11.0)
    with open_store(url) as store:
        store.decide(ONE, H200, WARM, [first, second], "s")
        before = store.decisions_version()
        store.add([measured("s", 256)])
        store.jobs.submit([ONE], {})
        assert store.decisions_version() == before, "nothing that is served changed"
        if change == "decide":
            store.decide(ONE, H200, WARM, [second, first], "s")
        elif change == "pin":
            store.pin(ONE, H200, WARM, second.config)
        else:
            store.forget(ONE)
        assert store.decisions_version() > before


class TestCommand:
    """``tuner jobs``."""

    def submitted(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["jobs", "submit", *arguments]) == 0
        return capsys.readouterr().out.strip()

    def shown(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
        assert main(["jobs", *arguments, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    def test_a_file_is_submitted_with_its_options(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "p.yaml"
        file.write_text("- S=1024,D=64\n- op=gemm,M=128,N=128,K=128\n")
        arguments = ("--priority", "5", "--effort", "full", "--trials", "7", "--l2", "cold")
        id = self.submitted(capsys, str(file), *arguments)
        job = self.shown(capsys, "show", id[:5])
        assert (job["id"], job["state"], job["priority"]) == (id, "queued", 5)
        options = job["options"]
        assert isinstance(options, dict)
        wanted = {"effort": "full", "trials": 7, "l2": "cold", "skip_tuned": True}
        assert wanted.items() <= options.items()
        problems = job["problems"]
        assert isinstance(problems, list)
        assert [p["op"] for p in problems] == ["attention", "gemm"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shape", "S=1024,D=63"], "D=63 has no tuned kernel"),
            (["--shape", "S=1024,D=64", "--family", "nope"], "family 'nope' does not serve"),
            (["--shape", "S=1024,D=64", "--trials", "0"], "trials=0 is out of range"),
            (["--shape", "S=1024,D=64", "--attempts", "0"], "attempts=0 is out of range"),
            (["--shape", "S=1024,D=64", "--attempts", "9" * 21], r"(allowed: 1 to 100)"),
            (["--shape", "S=1024,D=64", "--priority", "9" * 21], r"(allowed: -1000 to 1000)"),
            (["--shape", "S=1024,D=64", "--priority", "-1001"], "priority=-1001 is out of range"),
            (["absent.yaml"], "problems file absent.yaml cannot be read"),
        ],
    )
    def test_bad_input_is_refused_and_nothing_stored(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
    ) -> None:
        assert main(["jobs", "submit", *arguments]) == 2
        assert message in capsys.readouterr().err
        with open_store() as store:
            assert store.jobs.all() == []

    def test_cancel_says_whether_anything_ended(self, capsys: pytest.CaptureFixture[str]) -> None:
        id = self.submitted(capsys, "--shape", "S=1024,D=64")
        assert main(["jobs", "cancel", id]) == 0
        assert capsys.readouterr().out == f"1 problem of job {id} cancelled\n"
        assert main(["jobs", "cancel", id]) == 1
        capsys.readouterr()
        assert self.shown(capsys, "show", id)["state"] == "cancelled"
        assert main(["jobs", "retry", id]) == 0
        capsys.readouterr()
        assert self.shown(capsys, "show", id)["state"] == "queued"

    def test_logs_follow_until_the_job_ends(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        id = self.submitted(capsys, "--shape", "S=1024,D=64")
        looks = 0

        def wait(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 2:
                with open_store() as store:
                    store.jobs.cancel(id)

        monkeypatch.setattr("tuner.cli.jobs.time", SimpleNamespace(sleep=wait))
        assert main(["jobs", "logs", id, "--follow"]) == 0
        assert looks == 2
        lines = capsys.readouterr().out.splitlines()
        assert [line[21:] for line in lines] == ["submitted, problems: 1", "cancelled, problems: 1"]

    def test_an_unknown_job_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.submitted(capsys, "--shape", "S=1024,D=64")
        for command in ("show", "cancel", "retry", "logs"):
            assert main(["jobs", command, "zz"]) == 2
            assert "job zz is unknown" in capsys.readouterr().err

    def test_a_list_of_jobs(self, capsys: pytest.CaptureFixture[str]) -> None:
        id = self.submitted(capsys, "--shape", "S=1024,D=64", "--priority", "2")
        assert main(["jobs", "list"]) == 0
        row = capsys.readouterr().out.splitlines()[-1].split()
        assert row[:7] == [id, "queued", "2", "0", "0", "1", "quick"]

    def test_problems_and_reasons_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        id = self.submitted(capsys, "--shape", "S=1024,D=64")
        with open_store() as store:
            claim = claimed(store)
            progress = {"phase": "search", "done": 3, "goal": 8, "best_own_us": 12.5}
            store.jobs.extend(claim.lease, progress)
            assert main(["jobs", "show", id]) == 0
            assert "search 3/8, best own 12.5 us on host:1" in capsys.readouterr().out
            store.jobs.fail(claim.lease, "the compiler is missing", is_final=True)
        assert main(["jobs", "show", id]) == 0
        label = AttentionProblem.parse("S=1024,D=64").label()
        assert f"attention {label}: the compiler is missing" in capsys.readouterr().out

    def test_a_finished_problem_shows_what_was_decided(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        id = self.submitted(capsys, "--shape", "S=1024,D=64")
        with open_store() as store:
            store.jobs.finish(claimed(store).lease, "decided", RESULT)
        assert main(["jobs", "show", id]) == 0
        (row,) = [t for t in capsys.readouterr().out.splitlines() if " done " in t]
        told = "fused_attention 0123456789abcdef, 11.50 us, measured, own speed 1.29x cudnn"
        assert row.endswith(told)
        assert main(["jobs", "show", id, "--json"]) == 0
        (task,) = json.loads(capsys.readouterr().out)["problems"]
        assert task["result"] == RESULT and "result" not in task["progress"]


def test_a_result_is_of_the_winner_and_the_fastest_vendor() -> None:
    own = measured("s").but(is_final=True, latency_us=11.5)
    vendors = {"cudnn": 14.8, "flash": 15.0}
    ranked = [
        own,
        *(
            own.but(config=Config("vendor_sdpa", {"kernel": name}), latency_us=us)
            for name, us in vendors.items()
        ),
    ]
    found = result_of(Entry.of(ranked))
    assert (found["winner"], found["is_vendor"]) == (own.config.family, False)
    assert (found["fastest_vendor"], found["fastest_vendor_us"]) == ("cudnn", 14.8)
    assert found["vendor_over_own"] == pytest.approx(14.8 / 11.5)
    assert result_text(found).endswith("11.50 us, measured, own speed 1.29x cudnn")
    lost = result_of(Entry.of([ranked[1], own.but(latency_us=17.2)]))
    assert (lost["winner"], lost["is_vendor"]) == ("cudnn", True)
    assert result_text(lost) == "cudnn, 14.80 us, measured, own speed 0.86x cudnn, slower"
    alone = result_of(Entry.of([own.but(provenance=Provenance.REPLAYED, is_final=False)]))
    assert (alone["vendor_over_own"], alone["fastest_vendor"]) == (None, None)
    assert result_text(alone).endswith("11.50 us, replayed, quick pass")
    assert ", measured, chained, own speed" in result_text({**found, "launch": "chained"})


def test_provenance_of_a_trial_is_kept() -> None:
    with open_store("sqlite://") as store:
        job = store.jobs.submit([ONE], {})
        store.jobs.begin(claimed(store).lease, "s")
        store.add([measured("s").but(provenance=Provenance.REPLAYED)])
        assert [m.provenance for _, m in store.jobs.trials(job)] == [Provenance.REPLAYED]
