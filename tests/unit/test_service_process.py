"""The service as a process with real sockets."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import READ, SHAPE, WRITE, request, service

from tuner.base.processes import python_command, python_environment
from tuner.service.protocol import MAX_HEAD_BYTES
from tuner.store import open_store


class TestProcess:
    """Over real sockets."""

    def test_it_ends_when_it_is_told_even_while_someone_listens(self, tmp_path: Path) -> None:
        with service(str(tmp_path / "s.sqlite")) as (address, process):
            job = request(address, "POST", "/v1/jobs", {"problems": [SHAPE]})[1]
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
            with contextlib.closing(connection):
                connection.request("GET", f"/v1/jobs/{job['id']}/events")
                assert connection.getresponse().readline().startswith(b"id: ")
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_it_ends_while_the_database_does_not_answer(
        self, tmp_path: Path, number: signal.Signals
    ) -> None:
        """Neither the thread that looks for decisions nor a request ever comes back."""
        path = str(tmp_path / "s.sqlite")
        script = (
            "import sys, threading\n"
            "from tuner.cli import main, serve\n"
            "from tuner.store.sql import Store\n"
            "from tuner.store.sql_jobs import Jobs\n"
            "serve.END_WAIT_S = 0.5\n"
            "read, looked = Store.decisions_version, []\n"
            "def hang(*arguments, **options):\n"
            "    print('hangs', file=sys.stderr, flush=True)\n"
            "    threading.Event().wait()\n"
            "def version(store):\n"
            "    looked.append(store)\n"
            "    return read(store) if len(looked) == 1 else hang()\n"
            "Store.decisions_version, Jobs.all = version, hang\n"
            "sys.argv = ['tuner', 'serve', '--port', '0', '--store', sys.argv[1]]\n"
            "sys.exit(main())\n"
        )
        open_store(path).close()
        process = subprocess.Popen(
            python_command("-c", script, path),
            stderr=subprocess.PIPE,
            text=True,
            env=python_environment(),
        )
        try:
            assert process.stderr is not None
            address = process.stderr.readline().split()[-1].removeprefix("http://")
            connection = http.client.HTTPConnection(address, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", "/v1/jobs")
                assert [process.stderr.readline() for _ in range(2)] == ["hangs\n"] * 2
                process.send_signal(number)
                assert process.wait(60) == 128 + number
        finally:
            process.kill()
            process.communicate()

    def test_a_client_that_says_nothing_holds_up_nobody(self, tmp_path: Path) -> None:
        with service(str(tmp_path / "s.sqlite")) as (address, _):
            host, port = address.removeprefix("http://").split(":")
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    silent = stack.enter_context(socket.create_connection((host, int(port))))
                    silent.sendall(b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n")
                assert request(address, "GET", "/healthz")[0] == 200

    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"GET /v1/jobs/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /v1/jobs/\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /v1/jobs/%ff%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /cache?q=%ff%00&first=%ff HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /static/..%2f..%2fapp.py HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET http://evil.example/v1/jobs HTTP/1.1\r\nhost: evil.example\r\n\r\n",
            b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /v1/jobs HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
            b"GET /v1/jobs HTTP/1.1\r\nhost: \xff\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
            b"content-type: application/json\r\n\r\nzz\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 2\r\n\r\n\xff\xfe",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
            b"\0" * 1000 + b"\r\n\r\n",
        ],
        ids=range(15),
    )
    def test_bytes_that_are_no_request(self, running: str, request_bytes: bytes) -> None:
        """Each is refused with 4xx, and what comes after is answered."""
        host, port = running.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(request_bytes)
            answer = connection.recv(65536)
        assert re.match(rb"HTTP/1\.1 4\d\d ", answer), answer[:200]
        assert request(running, "GET", "/healthz")[0] == 200

    @pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "])
    def test_a_head_without_an_end_is_cut_off(self, running: str, start: bytes) -> None:
        host, port = running.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            sent = connection.send(start)
            # It is closed long before; what was sent into nothing may have thrown the answer away.
            with contextlib.suppress(ConnectionError):
                while sent < 64 << 20:
                    sent += connection.send(b"a" * 65536)
        assert sent < 32 << 20
        assert request(running, "GET", "/healthz")[0] == 200

    def test_a_large_body_is_no_head(self, running: str) -> None:
        """Several requests over one connection, each larger than a head may be."""
        with contextlib.closing(
            http.client.HTTPConnection(running.removeprefix("http://"), timeout=30)
        ) as connection:
            body = json.dumps({"items": [{"shape": SHAPE + " " * 200}] * 1000})
            assert len(body) > MAX_HEAD_BYTES
            for _ in range(3):
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/configs:lookup", body, headers)
                answer = connection.getresponse()
                assert (answer.status, len(json.loads(answer.read())["answers"])) == (200, 1000)

    @pytest.mark.parametrize("is_chunked", [False, True])
    def test_who_sends_too_much_is_told_so(self, running: str, is_chunked: bool) -> None:
        """Though it reads no answer before it has sent everything."""
        body = iter([b" " * 65536] * 64) if is_chunked else b" " * (4 << 20)
        with contextlib.closing(
            http.client.HTTPConnection(running.removeprefix("http://"), timeout=30)
        ) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/jobs", body, headers)
            answer = connection.getresponse()
            assert answer.status == 413
            assert json.loads(answer.read())["error"].startswith("the body is too large")

    def test_requests_may_follow_without_waiting(self, running: str) -> None:
        host, port = running.removeprefix("http://").split(":")
        one = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 1000 + b"\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                one * 400 + one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            )
            with connection.makefile("rb") as answers:
                assert answers.read().count(b"HTTP/1.1 200 ") == 401

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with service(str(tmp_path_factory.mktemp("running") / "s.sqlite")) as (address, _):
            yield address

    def test_nothing_that_the_document_allows_or_forbids_breaks_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schemathesis draws requests from the OpenAPI document, valid and not, with and without
        a token."""
        if importlib.util.find_spec("schemathesis") is None:
            pytest.skip("schemathesis is not installed")
        monkeypatch.setenv("TUNER_READ_TOKEN", READ)
        monkeypatch.setenv("TUNER_WRITE_TOKEN", WRITE)
        with service(str(tmp_path / "s.sqlite")) as (address, _):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json"),
                    *("--header", f"Authorization: Bearer {WRITE}"),
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
