"""The HTTP service, in this process: configurations, snapshots, jobs, state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from fastapi import FastAPI, HTTPException
from serving import LOCAL, PROBLEM, SHAPE, decide, error, eventually, measured, served_store
from starlette.testclient import TestClient

from tuner.config import Config
from tuner.errors import StoreError
from tuner.measurement import Provenance, Status
from tuner.problem import PROBLEMS, GemmProblem
from tuner.service import app, bodies
from tuner.service.app import create_app
from tuner.service.tokens import Tokens
from tuner.store import Entry, Store, open_store
from tuner.store.jobs import result_of
from tuner.store.sql_jobs import Jobs

store = served_store


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, Tokens()), base_url=LOCAL) as made:
        yield made


class TestConfigs:
    """Looking up, one by one, in batches and by filters."""

    def look_up(self, client: TestClient, *items: dict[str, Any]) -> list[Any]:
        answer = client.post("/v1/configs:lookup", json={"items": list(items)})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["answers"])

    def test_a_batch_is_answered_in_order(self, client: TestClient) -> None:
        known = {"shape": SHAPE, "gpu": "H200"}
        first, miss, again = self.look_up(client, known, {"shape": "S=648,D=64"}, known)
        assert miss is None
        assert first == again
        assert first["latency_us"] == 12.0
        assert first["config"]["params"] == {"kernel": "cudnn"}
        assert (first["provenance"], first["exact"]) == ("measured", True)

    def test_what_ships_is_known_too(self, client: TestClient) -> None:
        (answer,) = self.look_up(client, {"shape": "S=1024,D=64"})
        assert answer["origin"] == "shipped"
        assert "no GPU named: this is the answer for NVIDIA H200" in answer["notes"]

    def test_gpu_and_regime_are_heeded(self, client: TestClient) -> None:
        other, allowed, cold = self.look_up(
            client,
            {"shape": SHAPE, "gpu": "H100-PCIe"},
            {"shape": SHAPE, "gpu": "H100-PCIe", "allow_other_gpu": True},
            {"shape": SHAPE, "l2": "cold"},
        )
        assert other is None
        assert cold is None
        assert allowed["exact"] is False

    def test_a_new_decision_is_served_without_a_restart(
        self, client: TestClient, store: Store
    ) -> None:
        assert self.look_up(client, {"shape": SHAPE})[0]["latency_us"] == 12.0
        decide(store, measured(11.0))
        eventually(lambda: self.look_up(client, {"shape": SHAPE})[0]["latency_us"] == 11.0)
        store.forget(PROBLEM)
        eventually(lambda: self.look_up(client, {"shape": SHAPE}) == [None])

    def test_filters_and_pages(self, client: TestClient, store: Store) -> None:
        answer = client.get("/v1/configs", params={"shape": SHAPE, "gpu": "H200"}).json()
        assert answer["total"] == 1
        assert answer["entries"][0]["latency_us"] == 12.0
        everything = client.get("/v1/configs", params={"limit": 1000}).json()["entries"]
        gemms = client.get("/v1/configs", params={"op": "gemm", "limit": 1000}).json()["entries"]
        assert gemms == [e for e in everything if e["op"] == "gemm"] != []
        page = client.get("/v1/configs", params={"limit": 2, "offset": 1}).json()
        assert (page["total"], page["entries"]) == (len(everything), everything[1:3])
        wanted = {"l2": "cold", "op": "attention", "limit": 1000}
        cold = client.get("/v1/configs", params=wanted).json()["entries"]
        attention = [e for e in everything if e["op"] == "attention"]
        assert cold == [e for e in attention if e["regime"].endswith("-cold")] != attention

    @pytest.mark.parametrize("softcap", [0.5, 1e-05, 3e06])
    def test_a_shape_is_asked_for_as_it_is_written(
        self, client: TestClient, store: Store, softcap: float
    ) -> None:
        problem = replace(PROBLEM, window_left=128, softcap=softcap)
        decide(store, measured(problem=problem))
        asked = {"shape": problem.label(), "gpu": "H200"}
        eventually(lambda: self.look_up(client, asked) != [None])
        keys = {"S": 640, "D": 64, "softcap": softcap, "left": 128, "right": -1}
        job = client.post("/v1/jobs", json={"problems": [problem.label(), keys]})
        assert job.status_code == 201, job.text
        (task,) = store.jobs.tasks(job.json()["id"])
        assert task.problem == problem

    def test_operations_are_those_of_the_program(self) -> None:
        assert set(typing.get_args(bodies.Op)) == set(PROBLEMS)


class TestSnapshot:
    """The whole table, and whether it changed."""

    def test_it_is_what_export_writes(self, client: TestClient, store: Store) -> None:
        answer = client.get("/v1/snapshot")
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.json() == json.loads(json.dumps(store.export()))
        plain = client.get("/v1/snapshot", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content

    def test_nothing_is_sent_again_until_a_decision_changes(
        self, client: TestClient, store: Store
    ) -> None:
        etag = client.get("/v1/snapshot").headers["etag"]
        for tag in (etag, f'"other", {etag}', "*"):
            answer = client.get("/v1/snapshot", headers={"if-none-match": tag})
            assert (answer.status_code, answer.content) == (304, b"")
        store.add([measured(13.0, is_final=False)])
        time.sleep(0.1)
        assert client.get("/v1/snapshot", headers={"if-none-match": etag}).status_code == 304
        decide(store, measured(11.0))
        new = lambda: client.get("/v1/snapshot", headers={"if-none-match": etag})  # noqa: E731
        eventually(lambda: new().status_code == 200)
        assert new().headers["etag"] != etag


class TestJobs:
    """Submitting, watching, cancelling."""

    def submitted(self, client: TestClient, **changes: Any) -> dict[str, Any]:
        body = {"problems": [SHAPE, {"op": "gemm", "M": 128, "N": 128, "K": 64}], **changes}
        answer = client.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        job = dict(answer.json())
        assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
        return job

    def test_jobs_and_problems_have_a_limit_an_hour(
        self, client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app, "MAX_JOBS", 3)
        monkeypatch.setattr(app, "MAX_PROBLEMS", 4)
        with TestClient(create_app(store, Tokens()), base_url=LOCAL) as limited:
            self.submitted(limited)
            two = {"problems": ["S=64,D=64", "S=128,D=64"]}
            assert limited.post("/v1/jobs", json={"problems": ["S=1"]}).status_code == 422
            assert limited.post("/v1/jobs", json=two).status_code == 201
            refused = limited.post("/v1/jobs", json=two)
            assert error(refused, 429) == "too many problems (allowed: 4 an hour)"
            assert 1700 < int(refused.headers["retry-after"]) <= 1800
            refused = limited.post("/v1/jobs", json=two)
            assert error(refused, 429) == "too many jobs (allowed: 3 an hour)"
        assert len(store.jobs.all()) == 2

    def test_a_job_is_stored_as_the_command_would(self, client: TestClient, store: Store) -> None:
        options = {"effort": "full", "trials": 9, "families": [], "seed": 3, "l2": "cold"}
        job = self.submitted(client, priority=4, attempts=2, time_limit_s=60, **options)
        found = store.jobs.find(job["id"])
        assert (found.priority, found.attempts) == (4, 2)
        assert {**options, "time_limit_s": 60, "skip_tuned": True}.items() <= found.options.items()
        tasks = store.jobs.tasks(job["id"])
        assert [t.problem for t in tasks] == [PROBLEM, GemmProblem(128, 128, 64)]

    def test_a_job_is_shown_with_problems_and_trials(
        self, client: TestClient, store: Store
    ) -> None:
        id = self.submitted(client)["id"]
        claim = store.jobs.claim("host:1")
        store.jobs.begin(claim.lease, "s")
        store.jobs.extend(claim.lease, {"phase": "search"})
        failed = {"status": Status.TIMEOUT, "latency_us": None, "log": "hung\nfor long"}
        store.add([measured(sweep="s"), measured(sweep="s", is_final=False, **failed)])
        job = client.get(f"/v1/jobs/{id}").json()
        assert (job["state"], job["counts"]["running"]) == ("running", 1)
        assert job["problems"][0]["progress"] == {"phase": "search"}
        first, second = job["trials"]
        assert (first["latency_us"], first["status"], first["reason"]) == (12.0, "ok", "")
        assert (second["latency_us"], second["reason"]) == (None, "hung")
        more = client.get(f"/v1/jobs/{id}", params={"after": first["id"]}).json()["trials"]
        assert more == [second]
        assert client.get(f"/v1/jobs/{id}", params={"trials": 0}).json()["trials"] == []

    def test_a_finished_problem_has_its_result(self, client: TestClient, store: Store) -> None:
        id = self.submitted(client)["id"]
        claim = store.jobs.claim("host:1")
        assert claim is not None
        own = measured(9.0, config=Config("toy", {"m": 1}))
        result = result_of(Entry.of([own, measured()]))
        store.jobs.finish(claim.lease, "decided", result)
        first, second = client.get(f"/v1/jobs/{id}").json()["problems"]
        assert first["result"] == result
        assert first["result"]["vendor_over_own"] == pytest.approx(12 / 9)
        assert (first["progress"], second["result"]) == ({}, None)

    def test_lists_are_paged(self, client: TestClient) -> None:
        ids = []
        for _ in range(3):
            ids.append(self.submitted(client)["id"])
            time.sleep(0.002)
        answer = client.get("/v1/jobs", params={"limit": 2, "offset": 1}).json()
        assert answer["total"] == 3
        assert [job["id"] for job in answer["jobs"]] == ids[1::-1]

    def test_cancel(self, client: TestClient) -> None:
        id = self.submitted(client)["id"]
        assert client.post(f"/v1/jobs/{id}/cancel").json() == {"cancelled": 2}
        assert client.post(f"/v1/jobs/{id}/cancel").json() == {"cancelled": 0}
        assert client.get(f"/v1/jobs/{id}").json()["state"] == "cancelled"

    @pytest.mark.parametrize("path", ["", "/events", "/cancel"])
    def test_unknown_jobs(self, client: TestClient, path: str) -> None:
        ask = client.post if path == "/cancel" else client.get
        assert error(ask(f"/v1/jobs/{'0' * 12}{path}"), 404) == "job 000000000000 is unknown"
        assert error(ask(f"/v1/jobs/x;y{path}"), 422).startswith("path.id")

    def test_events_tell_all_until_the_end(self, client: TestClient, store: Store) -> None:
        id = self.submitted(client)["id"]
        seen = threading.Event()

        def work() -> None:
            claim = store.jobs.claim("host:1")
            store.jobs.extend(claim.lease, {"phase": "search", "done": 3})
            seen.wait(10)
            store.jobs.finish(claim.lease, "cudnn, 12.0 us")
            store.jobs.cancel(id)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.3)
        seen.set()
        text = client.get(f"/v1/jobs/{id}/events").text
        thread.join()
        events = [self.parsed(block) for block in text.split("\n\n") if block]
        logs = [data["text"] for kind, _, data in events if kind == "log"]
        assert logs == [
            "submitted, problems: 2",
            "attempt 1 by host:1",
            "done: cudnn, 12.0 us",
            "cancelled, problems: 1",
        ]
        assert events[-1][0] == "end"
        assert events[-1][2] == {"state": "cancelled"}
        states = [data for kind, _, data in events if kind == "state"]
        assert states[-1]["counts"]["cancelled"] == 1
        last = [number for kind, number, _ in events if kind == "log"][1]
        rest = client.get(f"/v1/jobs/{id}/events", headers={"last-event-id": str(last)}).text
        assert rest.count("event: log") == 2

    def test_no_stream_beyond_the_places_is_begun_in_silence(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where many are asked for before the first one sends anything."""
        monkeypatch.setattr(app, "MAX_STREAMS", 2)
        routes = FastAPI()
        app._add_events_of_jobs(routes, store)
        [events] = [r.endpoint for r in routes.routes if getattr(r, "path", "")[-7:] == "/events"]
        id = store.jobs.submit([PROBLEM], {})
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            raise OSError("the client has gone")

        async def ask() -> None:
            responses = [await events(id, 0) for _ in range(2)]
            with pytest.raises(HTTPException, match="503: 2 streams are open already"):
                await events(id, 0)
            with contextlib.suppress(Exception):
                await responses[0]({"type": "http"}, receive, send)
            await events(id, 0)

        asyncio.run(ask())
        assert [message["status"] for message in sent] == [200]

    def test_a_stream_outlives_a_store_that_does_not_answer(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.01)
        monkeypatch.setattr(app, "EVENT_POLL_S", 0.01)
        answers = threading.Event()
        id = store.jobs.submit([PROBLEM], {})
        find, faults = Jobs.find, iter([StoreError("the store is locked")])

        def find_late(jobs: Jobs, id: str) -> Any:
            answers.wait(60)
            if (fault := next(faults, None)) is not None:
                raise fault
            return find(jobs, id)

        monkeypatch.setattr(Jobs, "find", find_late)

        async def listen() -> list[bytes]:
            stream = app._stream(store, id, 0)
            first = [await anext(stream)]  # nothing answers yet
            answers.set()
            async with asyncio.timeout(60):
                async for (
                    block
                ) in stream:  # keep-alives come while the store's answer is on its way
                    if block != app._ALIVE:
                        return [*first, block]
            return first

        first, *later = asyncio.run(listen())
        assert first == b": still here\n\n"
        assert b"event: log" in b"".join(later)

    def parsed(self, block: str) -> tuple[str, int, Any]:
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        return fields["event"], int(fields.get("id", 0)), json.loads(fields["data"])


class TestState:
    def test_health_follows_the_store(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert client.get("/healthz").json()["status"] == "ok"
        monkeypatch.setattr("tuner.service.decisions.STALE_S", 0.0)
        answer = client.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "stale")

    def test_a_store_that_fails_is_said(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: object) -> None:
            raise StoreError("store x is locked by another program")

        monkeypatch.setattr("tuner.store.sql_jobs.Jobs.all", fail)
        answer = client.get("/v1/jobs")
        assert error(answer, 503) == "store x is locked by another program"
        assert answer.headers["retry-after"] == "5"

    def test_metrics(self, client: TestClient, store: Store) -> None:
        client.post("/v1/configs:lookup", json={"items": [{"shape": SHAPE}, {"shape": "S=8,D=8"}]})
        client.request("BREW", "/v1/jobs")
        client.get("/nowhere")
        store.jobs.submit([PROBLEM], {})
        text = client.get("/metrics").text
        assert 'tuner_lookups_total{result="hit"} 1.0' in text
        assert 'tuner_lookups_total{result="miss"} 1.0' in text
        assert 'tuner_tasks{state="queued"} 1.0' in text
        assert re.search(r"tuner_entries [1-9]", text)
        requests = 'tuner_requests_total{method="%s",route="%s",status="%s"} 1.0'
        assert requests % ("POST", "/v1/configs:lookup", "200") in text
        assert requests % ("GET", "none", "404") in text
        assert 'method="other"' in text
        assert "BREW" not in text

    def test_the_document_describes_the_routes(self, client: TestClient) -> None:
        document = client.get("/openapi.json").json()
        assert set(document["paths"]) == {
            "/v1/configs",
            "/v1/configs:lookup",
            "/v1/snapshot",
            "/v1/jobs",
            "/v1/jobs/{id}",
            "/v1/jobs/{id}/cancel",
            "/v1/jobs/{id}/events",
            "/healthz",
            "/metrics",
        }
        assert "security" not in document


def test_replayed_answers_stay_replayed(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s.sqlite")) as store:
        decide(store, measured(provenance=Provenance.REPLAYED))
        with TestClient(create_app(store, Tokens()), base_url=LOCAL) as client:
            body = {"items": [{"shape": SHAPE}]}
            (answer,) = client.post("/v1/configs:lookup", json=body).json()["answers"]
    assert answer["provenance"] == "replayed"
    assert "replayed, not measured" in answer["notes"]
