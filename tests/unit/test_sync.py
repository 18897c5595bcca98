"""``tuner sync``: a service mirrored in the local store."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import H200, PROBLEM, READ, WARM, decide, eventually, measured, served_store, service

from tuner.cli import main
from tuner.config import Config
from tuner.lookup import close, lookup
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.store import Store, open_store

store = served_store


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
        other = AttentionProblem.parse("S=704,D=64,H=1")
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
