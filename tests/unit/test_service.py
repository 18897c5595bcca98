"""The HTTP service: in this process, then as a process with real sockets; and what mirrors it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from starlette.testclient import TestClient

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.hardware import GPUS
from tuner.lookup import close, lookup
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import PROBLEMS, AttentionProblem, GemmProblem, Problem
from tuner.service import bodies, guard
from tuner.service.app import create_app
from tuner.service.tokens import Tokens
from tuner.store import Store, open_store

H200, WARM = GPUS["H200"], Regime("graph", "warm")
PROBLEM = AttentionProblem.parse("S=640,D=64")
SHAPE = "S=640,D=64"
READ, WRITE = "r" * 20, "w" * 20
LOCAL = "http://127.0.0.1"


def measured(latency_us: float = 12.0, problem: Problem = PROBLEM, **changes: Any) -> Measurement:
    return Measurement(
        problem,
        Config("vendor_sdpa", {"kernel": "cudnn"}),
        H200,
        WARM,
        Status.OK,
        environment=Environment({"driver": "580"}),
        latency_us=latency_us,
        std_us=0.1,
        rounds=20,
        is_final=True,
        error=1e-4,
    ).but(**changes)


def decide(store: Store, *ranking: Measurement) -> None:
    first = ranking[0]
    store.decide(first.problem, first.gpu, first.regime, ranking, "sweep1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "served.sqlite")) as made:
        decide(made, measured())
        yield made


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, Tokens()), base_url=LOCAL) as made:
        yield made


def error(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
            {"shape": SHAPE, "gpu": "H100"},
            {"shape": SHAPE, "gpu": "H100", "allow_other_gpu": True},
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
        gemms = client.get("/v1/configs", params={"op": "gemm"}).json()["entries"]
        assert gemms == [e for e in everything if e["op"] == "gemm"] != []
        page = client.get("/v1/configs", params={"limit": 2, "offset": 1}).json()
        assert (page["total"], page["entries"]) == (len(everything), everything[1:3])
        assert client.get("/v1/configs", params={"l2": "cold", "op": "attention"}).json() == {
            "total": 0,
            "entries": [],
        }

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

    def test_a_job_is_stored_as_the_command_would(self, client: TestClient, store: Store) -> None:
        options = {"effort": "full", "trials": 9, "families": [], "seed": 3, "l2": "cold"}
        job = self.submitted(client, priority=4, attempts=2, time_limit_s=60, **options)
        found = store.jobs.find(job["id"])
        assert found is not None
        assert (found.priority, found.attempts) == (4, 2)
        assert {**options, "time_limit_s": 60, "skip_tuned": True}.items() <= found.options.items()
        tasks = store.jobs.tasks(job["id"])
        assert [t.problem for t in tasks] == [PROBLEM, GemmProblem(128, 128, 64)]

    def test_a_job_is_shown_with_problems_and_trials(
        self, client: TestClient, store: Store
    ) -> None:
        id = self.submitted(client)["id"]
        claim = store.jobs.claim("host:1")
        assert claim is not None
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
        assert error(ask(f"/v1/jobs/{'0' * 12}{path}"), 404) == "there is no job 000000000000"
        assert error(ask(f"/v1/jobs/x;y{path}"), 422).startswith("path.id")

    def test_events_tell_all_until_the_end(self, client: TestClient, store: Store) -> None:
        id = self.submitted(client)["id"]
        seen = threading.Event()

        def work() -> None:
            claim = store.jobs.claim("host:1")
            assert claim is not None
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

    def parsed(self, block: str) -> tuple[str, int, Any]:
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        return fields["event"], int(fields.get("id", 0)), json.loads(fields["data"])


class TestState:
    def test_health_follows_the_store(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert client.get("/healthz").json()["status"] == "ok"
        monkeypatch.setattr("tuner.service.served.STALE_S", 0.0)
        answer = client.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "stale")

    def test_a_store_that_fails_is_said(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: object) -> None:
            raise StoreError("store x is locked by another program")

        monkeypatch.setattr("tuner.store.sql_jobs.SqlJobs.all", fail)
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


class TestGuard:
    """What does not come in."""

    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
        """One for all: nothing that is refused changes it."""
        with open_store(str(tmp_path_factory.mktemp("guard") / "s.sqlite")) as made:
            yield made

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, store: Store) -> Iterator[TestClient]:
        with TestClient(create_app(store, Tokens()), base_url=LOCAL) as made:
            yield made

    @pytest.fixture(scope="class")
    @classmethod
    def guarded(cls, store: Store) -> Iterator[TestClient]:
        # By any name: with tokens it may be reached from elsewhere.
        with TestClient(create_app(store, Tokens(READ, WRITE)), base_url="http://tuner") as made:
            yield made

    @pytest.mark.parametrize(
        ("method", "path", "body", "writes"),
        [
            ("GET", "/v1/configs", None, False),
            ("POST", "/v1/configs:lookup", {"items": [{"shape": SHAPE}]}, False),
            ("GET", "/v1/snapshot", None, False),
            ("GET", "/v1/jobs", None, False),
            ("GET", "/metrics", None, False),
            ("POST", "/v1/jobs", {"problems": [SHAPE]}, True),
            ("POST", f"/v1/jobs/{'0' * 12}/cancel", None, True),
        ],
    )
    def test_reading_and_writing_need_their_tokens(
        self, guarded: TestClient, method: str, path: str, body: Any, writes: bool
    ) -> None:
        def status(authorization: str | None) -> int:
            given = (authorization or "").encode("latin-1")
            headers = {} if authorization is None else {"authorization": given}
            return guarded.request(method, path, json=body, headers=headers).status_code

        for wrong in (None, "", "Bearer", f"Basic {READ}", f"Bearer {READ}x", READ, "Bearer \xff"):
            assert status(wrong) == 401
        assert (status(f"Bearer {READ}") == 403) == writes
        assert status(f"bearer {WRITE}") in (200, 201, 404)

    def test_health_and_the_document_are_open(self, guarded: TestClient) -> None:
        assert guarded.get("/healthz").status_code == 200
        document = guarded.get("/openapi.json").json()
        assert document["security"] == [{"bearer": []}]

    def test_without_tokens_only_own_names_of_the_machine_are_answered(
        self, client: TestClient
    ) -> None:
        for name in ("evil.example", "evil.example:8265", "127.0.0.1.evil.example", ""):
            answer = client.get("/v1/jobs", headers={"host": name})
            assert "only this machine" in error(answer, 403)
        for name in ("localhost:1", "127.0.0.1:8265", "[::1]:8265", "LOCALHOST"):
            assert client.get("/v1/jobs", headers={"host": name}).status_code == 200

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"\xff\xfe\x00", 400),
            (b'{"items": "\xc3\x28"}', 400),
            (b"[" * 100_000, 400),
            (b'{"items":' * 50_000, 400),
            (b'{"items":' + b"[" * 400 + b"]" * 400 + b"}", 422),
            (b"not json", 422),
            (b'{"items":[{"shape":"\\ud800"}]}', 422),
            (b'{"items":[{"shape":"S=' + b"9" * 5000 + b',D=64"}]}', 422),
            (b'{"items":' + b"9" * 5000 + b"}", 400),
            (b'{"items":[{"shape":"' + b"A" * guard.MAX_BODY_BYTES + b'"}]}', 413),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_bodies_that_are_none(self, client: TestClient, body: bytes, status: int) -> None:
        headers = {"content-type": "application/json"}
        error(client.post("/v1/configs:lookup", content=body, headers=headers), status)

    def test_other_types_of_content(self, client: TestClient) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = client.post(
                "/v1/jobs", content=b'{"problems":["S=64,D=64"]}', headers={"content-type": kind}
            )
            assert error(answer, 415) == "the body must be application/json"

    def test_a_body_without_a_length_is_cut_off(self, client: TestClient) -> None:
        def endless() -> Iterator[bytes]:
            for _ in range(64):
                yield b" " * (guard.MAX_BODY_BYTES // 32)

        headers = {"content-type": "application/json"}
        error(client.post("/v1/configs:lookup", content=endless(), headers=headers), 413)

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            ({"shape": "S=64,D=7"}, "items.1: D=7 has no tuned kernel"),
            ({"shape": "S=64,D=64", "gpu": "H300"}, "items.1: GPU 'H300' is not known"),
            ({"shape": "S=64,D=64", "op": "sort"}, "body.items.1.op"),
            ({"shape": "S=64,D=64", "source": "int main"}, "body.items.1.source"),
            ({"shape": "S=64,D=64;rm -rf /"}, "body.items.1.shape"),
            ({"shape": "S=64,D=64", "regime": "-O3"}, "body.items.1.regime"),
            ({"shape": 7}, "body.items.1.shape"),
            ({}, "body.items.1.shape"),
        ],
    )
    def test_a_wrong_item_is_named(
        self, client: TestClient, item: dict[str, Any], message: str
    ) -> None:
        body = {"items": [{"shape": SHAPE}, item]}
        assert error(client.post("/v1/configs:lookup", json=body), 422).startswith(message)

    def test_sizes_of_a_batch(self, client: TestClient) -> None:
        for count in (0, bodies.MAX_BATCH + 1):
            body = {"items": [{"shape": SHAPE}] * count}
            assert "items" in error(client.post("/v1/configs:lookup", json=body), 422)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"problems": []}, "body.problems"),
            ({"problems": ["S=64,D=7"]}, "problems.0: D=7 has no tuned kernel"),
            ({"problems": [SHAPE, {"M": [1]}]}, "body.problems.1"),
            ({"problems": [{"M": "../../etc"}]}, "body.problems.0"),
            ({"problems": [7]}, "body.problems.0"),
            ({"families": ["nope"]}, "family 'nope' does not serve attention"),
            ({"families": ["a b"]}, "body.families.0"),
            ({"effort": "heroic"}, "effort"),
            ({"sampler": "dice"}, "sampler"),
            ({"trials": 0}, "body.trials"),
            ({"time_limit_s": -1}, "body.time_limit_s"),
            ({"priority": 10**9}, "body.priority"),
            ({"attempts": 99}, "body.attempts"),
            ({"store": "sqlite:////etc/passwd"}, "body.store"),
            ({"flags": ["-O3"]}, "body.flags"),
        ],
    )
    def test_only_names_and_numbers_within_bounds_go_in(
        self, client: TestClient, store: Store, changes: dict[str, Any], message: str
    ) -> None:
        before = store.jobs.all()
        answer = client.post("/v1/jobs", json={"problems": [SHAPE], **changes})
        assert error(answer, 422).startswith(message)
        assert store.jobs.all() == before

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/jobs/..%2f..%2fetc%2fpasswd",
            "/v1/jobs/%00",
            "/v1/jobs/%2e%2e/%2e%2e",
            "/static/../../etc/passwd",
            "//etc/passwd",
            "/v1/configs?shape=../../etc",
            "/v1/configs?limit=1e9",
            "/v1/configs?offset=99999999999999999999",
        ],
    )
    def test_path_tricks(self, client: TestClient, path: str) -> None:
        assert client.get(path).status_code in (404, 422)

    def test_bad_tokens_are_refused(self) -> None:
        for read, write in (
            (READ, ""),
            ("", WRITE),
            ("short", WRITE),
            (READ, READ),
            ("é" * 20, WRITE),
        ):
            with pytest.raises(ConfigError):
                Tokens(read, write)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "gpu-host"])
    def test_elsewhere_than_on_loopback_tokens_are_needed(
        self, host: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["serve", "--host", host, "--port", "0"]) == 2
        assert "set TUNER_READ_TOKEN and TUNER_WRITE_TOKEN" in capsys.readouterr().err

    def test_a_port_that_is_taken(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert main(["serve", "--port", port]) == 2
        assert "cannot be listened on" in capsys.readouterr().err


@contextlib.contextmanager
def service(url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``tuner serve`` as a process, and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", "serve", "--port", "0", "--store", url],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving on http://127.0.0.1:"), line + process.stderr.read()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


def request(address: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")


class TestProcess:
    """Over real sockets."""

    def test_a_killed_service_loses_nothing_and_the_job_ends(self, tmp_path: Path) -> None:
        """Submitted over HTTP, worked off by a process, the service killed in the middle."""
        url = str(tmp_path / "s.sqlite")
        body = {
            "problems": ["M=4096,N=4096,K=4096", "M=8192,N=8192,K=8192"],
            "op": "gemm",
            "trials": 6,
            "sampler": "tpe",
        }
        with service(url) as (address, process):
            status, job = request(address, "POST", "/v1/jobs", body)
            assert status == 201
            worker = subprocess.Popen(
                [sys.executable, "-m", "tuner", "worker", "--drain", "--replay", "--store", url],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            path = f"/v1/jobs/{job['id']}"
            eventually(lambda: request(address, "GET", path)[1]["trials"] != [])
            process.kill()
        with service(url) as (address, _):
            eventually(lambda: request(address, "GET", path)[1]["state"] == "done")
            assert worker.wait(60) == 0
            found = request(address, "GET", f"{path}?trials=1000")[1]["trials"]
        trials = [(t["shape"], t["config_digest"]) for t in found if not t["is_final"]]
        assert len(trials) == len(set(trials)) > 6

    def test_it_ends_when_it_is_told_even_while_someone_listens(self, tmp_path: Path) -> None:
        with service(str(tmp_path / "s.sqlite")) as (address, process):
            job = request(address, "POST", "/v1/jobs", {"problems": [SHAPE]})[1]
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
            with contextlib.closing(connection):
                connection.request("GET", f"/v1/jobs/{job['id']}/events")
                assert connection.getresponse().readline().startswith(b"id: ")
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 130

    def test_a_client_that_says_nothing_holds_up_nobody(self, tmp_path: Path) -> None:
        with service(str(tmp_path / "s.sqlite")) as (address, _):
            host, port = address.removeprefix("http://").split(":")
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    silent = stack.enter_context(socket.create_connection((host, int(port))))
                    silent.sendall(b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n")
                assert request(address, "GET", "/healthz")[0] == 200

    def test_nothing_that_the_document_allows_or_forbids_breaks_it(self, tmp_path: Path) -> None:
        """Schemathesis draws requests from the OpenAPI document, valid and not."""
        if importlib.util.find_spec("schemathesis") is None:
            pytest.skip("schemathesis is not installed")
        with service(str(tmp_path / "s.sqlite")) as (address, _):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json"),
                    *("--max-examples", "5", "--seed", "7", "--no-color"),
                    *("--phases", "examples,coverage,fuzzing"),
                    # A stream does not end; what fits the schema may still be no known shape; the
                    # router answers OPTIONS for one of a path's methods.
                    *("--exclude-path-regex", "events"),
                    *("--exclude-checks", "positive_data_acceptance,allow_header_conformance"),
                ],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PYTHONWARNINGS": "default"},
                timeout=120,
            )
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
            assert request(address, "GET", "/healthz")[0] == 200


class TestSync:
    """``tuner sync``: a service mirrored in the local store."""

    @pytest.fixture
    def served(self, store: Store, tmp_path: Path) -> Iterator[str]:
        with service(str(tmp_path / "served.sqlite")) as (address, _):
            yield address

    def sync(self, capsys: pytest.CaptureFixture[str], address: str) -> dict[str, Any]:
        assert main(["sync", address, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    def found(self, problem: Problem = PROBLEM) -> float | None:
        answer = lookup(problem, gpu=H200)
        close()
        return answer.entry.winner.latency_us if answer else None

    def test_lookup_finds_what_the_service_decided_and_follows_it(
        self, served: str, store: Store, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = AttentionProblem.parse("S=704,D=64")
        assert self.sync(capsys, served)["entries_added"] == 1
        assert self.found() == 12.0
        answer = lookup(PROBLEM, gpu=H200)
        assert answer is not None
        assert answer.entry.origin == served
        close()
        assert self.sync(capsys, served) == {"changed": False}

        slower = measured(13.0, config=Config("vendor_sdpa", {"kernel": "flash2"}))
        decide(store, measured(11.0), slower)
        decide(store, measured(20.0, other))
        store.pin(PROBLEM, H200, WARM, slower.config)
        report: dict[str, Any] = {}
        eventually(lambda: report.update(self.sync(capsys, served)) or self.found() == 13.0)
        assert self.found(other) == 20.0

        store.unpin(PROBLEM, H200, WARM)
        store.forget(other)
        eventually(lambda: report.update(self.sync(capsys, served)) or self.found() == 11.0)
        eventually(lambda: report.update(self.sync(capsys, served)) or self.found(other) is None)

    def test_own_decisions_stand(self, served: str, capsys: pytest.CaptureFixture[str]) -> None:
        with open_store() as own:
            decide(own, measured(99.0))
        report = self.sync(capsys, served)
        assert (report["entries_added"], len(report["entries_kept"])) == (0, 1)
        assert self.found() == 99.0

    def test_what_may_not_be_served_here_is_left_out_and_said(
        self, served: str, store: Store, capsys: pytest.CaptureFixture[str]
    ) -> None:
        foreign = measured(5.0, GemmProblem(64, 64, 64), config=Config("of_the_future", {"x": 1}))
        decide(store, foreign)
        report: dict[str, Any] = {}
        eventually(
            lambda: report.update(self.sync(capsys, served)) or bool(report.get("entries_refused"))
        )
        assert "family 'of_the_future'" in report["entries_refused"][0]
        assert self.found() == 12.0

    def test_on_an_interval_it_outlives_a_service_that_is_away(
        self, served: str, tmp_path: Path
    ) -> None:
        gone = subprocess.Popen(
            [sys.executable, "-m", "tuner", "sync", "http://127.0.0.1:9", "--every", "1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert gone.stderr is not None
        try:
            for _ in range(2):
                assert "does not answer" in gone.stderr.readline()
            gone.send_signal(signal.SIGINT)
            assert gone.wait(10) == 130
        finally:
            gone.kill()
            gone.communicate()

    @pytest.mark.parametrize(
        ("url", "code", "message"),
        [
            ("ftp://host", 2, "is not the URL of a service"),
            ("file:///etc/passwd", 2, "is not the URL of a service"),
            ("http://user:pw@host", 2, "is not the URL of a service"),
            ("http://127.0.0.1:9", 1, "does not answer"),
        ],
    )
    def test_wrong_addresses(
        self, url: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["sync", url]) == code
        assert message in capsys.readouterr().err


class Impostor:
    """Answers one request with given bytes."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.request = b""
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            self.request = connection.recv(65536)
            connection.sendall(self._answer)

    def close(self) -> None:
        self._thread.join(10)
        self._socket.close()


def response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (response(b"{}"), "not a document of entries"),
        (response(b"\xff"), "not UTF-8"),
        (response(b"nonsense"), "not JSON"),
        (response(b"{}", headers="content-encoding: gzip\r\n"), "broke off"),
        (
            response(gzip.compress(b"{}" * 999)[:-9], headers="content-encoding: gzip\r\n"),
            "broke off",
        ),
        (response(b'{"error": "a bearer token is needed"}', "401 Unauthorized"), "401: a bearer"),
        (response(b"", "302 Found", "location: http://127.0.0.1:9/\r\n"), "answered 302"),
        (response(b"{}" * 9)[:-5], "broke off"),
        (b"junk\r\n\r\n", "broke off"),
    ],
    ids=range(9),
)
def test_whatever_answers_nothing_is_stored_but_a_sound_snapshot(
    answer: bytes, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    with contextlib.closing(Impostor(answer)) as impostor:
        assert main(["sync", impostor.address]) in (1, 2)
    assert message in capsys.readouterr().err
    assert f"Bearer {READ}".encode() in impostor.request
    with open_store() as store:
        assert store.entries() == []
        assert store.mirrored(impostor.address) is None


def test_replayed_answers_stay_replayed(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s.sqlite")) as store:
        decide(store, measured(provenance=Provenance.REPLAYED))
        with TestClient(create_app(store, Tokens()), base_url=LOCAL) as client:
            body = {"items": [{"shape": SHAPE}]}
            (answer,) = client.post("/v1/configs:lookup", json=body).json()["answers"]
    assert answer["provenance"] == "replayed"
    assert "replayed, not measured" in answer["notes"]


def test_the_benchmark_tells_every_figure_that_has_a_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner.bench import service as benchmark

    out = tmp_path / "figures.json"
    arguments = ["--entries", "100", "--seconds", "0.1", "--json", str(out)]
    assert benchmark.main(arguments) == 0
    figures = json.loads(out.read_text())["figures"]
    assert min(figures[name] for name in benchmark.GOALS) > 0
    told = capsys.readouterr().out
    assert all(name in told for name in figures)
    with pytest.raises(ConfigError, match="entries must be"):
        benchmark.main(["--entries", "1"])
