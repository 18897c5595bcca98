"""What the service does not let in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import LOCAL, PROBLEM, READ, SHAPE, WRITE, error
from starlette.testclient import TestClient

from tuner.cli import main
from tuner.errors import ConfigError
from tuner.service import bodies, guard
from tuner.service.app import create_app
from tuner.service.tokens import Tokens
from tuner.settings import store_path
from tuner.store import Store, open_store


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
        assert document["paths"]["/healthz"]["get"]["security"] == []

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
            *(
                ('{"items":[{"shape":"S=64,D=64"}]}'.encode(coding), 400)
                for coding in ("utf-16", "utf-16-le", "utf-32", "utf-32-be")
            ),
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

    @pytest.mark.parametrize(
        ("headers", "is_own"),
        [
            ({"origin": "http://evil.example"}, False),
            ({"origin": "http://127.0.0.1.evil.example"}, False),
            ({"origin": "http://127.0.0.1:8266"}, False),
            ({"origin": "null"}, False),
            ({"origin": ""}, False),
            ({"sec-fetch-site": "cross-site"}, False),
            ({"sec-fetch-site": "same-site"}, False),
            ({"sec-fetch-site": "Cross-Site", "origin": "http://127.0.0.1:8265"}, False),
            ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8265"}, True),
            ({"origin": "HTTPS://127.0.0.1:8265"}, True),  # behind a proxy that speaks TLS
            ({"sec-fetch-site": "none"}, True),
            ({}, True),
        ],
    )
    @pytest.mark.parametrize("token", ["", WRITE])
    def test_pages_of_other_origins_change_nothing(
        self, store: Store, headers: dict[str, str], is_own: bool, token: str
    ) -> None:
        """Without a body, as a form or a script of any page can send it."""
        id = store.jobs.submit([PROBLEM], {})
        headers = {**headers, "host": "127.0.0.1:8265"}
        tokens = Tokens(READ, WRITE) if token else Tokens()
        if token:
            headers["authorization"] = f"Bearer {token}"
        client = TestClient(create_app(store, tokens), base_url=LOCAL)
        answer = client.post(f"/v1/jobs/{id}/cancel", headers=headers)
        job = store.jobs.find(id)
        assert (answer.status_code, job.state) == (
            (200, "cancelled") if is_own else (403, "queued")
        )
        assert client.get("/v1/jobs", headers=headers).status_code == 200
        store.jobs.cancel(id)

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
    @pytest.mark.parametrize("path", ["/login", "/logout", "/v1/jobs", "/v1/configs:lookup"])
    def test_every_path_asks_where_a_request_is_from(
        self, guarded: TestClient, method: str, path: str
    ) -> None:
        answer = guarded.request(method, path, headers={"origin": "http://evil.example"})
        assert error(answer, 403) == "a page of another origin may change nothing here"

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

    def test_headers_are_limited_together(self, client: TestClient) -> None:
        many = {f"x-{number}": "a" * 1000 for number in range(60)}
        assert client.get("/v1/jobs", headers=many).status_code == 200
        more = {**many, "y": "a" * 10_000}
        assert error(client.get("/v1/jobs", headers=more), 431).startswith("the headers are")

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
            ({"problems": [SHAPE, {"M": [1]}]}, "body.problems.1: not a problem (allowed: text"),
            ({"problems": [{"M": "../../etc"}]}, "body.problems.0: not a problem"),
            ({"problems": [7]}, "body.problems.0: not a problem"),
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

    @pytest.mark.parametrize(
        ("path", "allowed"),
        [
            ("/v1/configs", "op, shape, gpu, regime, l2, provenance, limit, offset"),
            ("/v1/jobs", "limit, offset"),
            (f"/v1/jobs/{'0' * 12}", "trials, after"),
        ],
    )
    def test_unknown_parameters_of_a_query(
        self, client: TestClient, path: str, allowed: str
    ) -> None:
        answer = client.get(path, params={"limit": 1, "trials": 1, "f\n\u20ac": "1"})
        assert f"(allowed: {allowed})" in error(answer, 422)
        answer = client.get(path, params={"f\n\u20ac": "x" * 99})
        assert error(answer, 422).startswith("unknown query parameter 'f\\n\\u20ac' (allowed: ")

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

    def test_a_store_that_is_named_must_be_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typo = tmp_path / "typo.sqlite"
        assert main(["serve", "--port", "0", "--store", str(typo)]) == 1
        assert capsys.readouterr().err == (
            f"tuner: store {typo} does not exist (a sweep or an import makes it)\n"
        )
        assert not typo.exists()

    def test_the_default_store_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "new"))
        with socket.create_server(("127.0.0.1", 0)) as taken:  # all but listening
            assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
        assert store_path().is_file()

    def test_a_port_that_is_taken(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert main(["serve", "--port", port]) == 2
        assert "cannot be listened on" in capsys.readouterr().err
