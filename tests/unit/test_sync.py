"""``tuner store sync``: a service mirrored in the local store."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import (
    H200,
    PROBLEM,
    READ,
    WARM,
    WRITE,
    decide,
    eventually,
    measured,
    served_store,
    service,
)

from tuner import settings
from tuner.base.processes import python_command, python_environment
from tuner.cli import main
from tuner.config import Config
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.selection.reader import close, lookup
from tuner.store import Store, exchange, open_store, sync

store = served_store


class TestSync:
    """``tuner store sync``: a service mirrored in the local store."""

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
            python_command("-m", "tuner", "sync", "http://127.0.0.1:9", "--every", "1"),
            stderr=subprocess.PIPE,
            text=True,
            env=python_environment(),
        )
        assert gone.stderr is not None
        try:
            for _ in range(2):
                assert "does not answer" in gone.stderr.readline()
            gone.send_signal(signal.SIGINT)
            assert gone.wait(60) == 130
        finally:
            gone.kill()
            gone.communicate()

    def test_no_sleep_is_long(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A signal just before one would have to wait for its end."""
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr("tuner.cli.sync.time.sleep", sleep)
        assert main(["sync", "http://127.0.0.1:9", "--every", "3600"]) == 130
        assert max(slept) <= 0.5

    @pytest.mark.parametrize(
        ("url", "code", "message"),
        [
            ("ftp://host", 2, "is not the URL of a service"),
            ("file:///etc/passwd", 2, "is not the URL of a service"),
            ("http://user:pw@host", 2, "is not the URL of a service"),
            ("http://host/#x", 2, "is not the URL of a service"),
            ("http://a..b", 2, "is not the URL of a service"),
            ("http://h\x1b[2J", 2, r"h\x1b[2J is not the URL of a service"),
            ("http://" + "a" * 9999, 2, "aa... is not the URL of a service"),
            ("http://127.0.0.1:9", 1, "does not answer"),
        ],
    )
    def test_wrong_addresses(
        self, url: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["sync", url]) == code
        assert message in capsys.readouterr().err


class Hostile:
    """A server that answers one connection after the other, each with what comes next.

    An answer is bytes and what is repeated after them until the client ends the connection; with
    nothing to repeat and `HOLD` it is kept open in silence.
    """

    def __init__(self, *answers: tuple[bytes, bytes | None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.requests: list[bytes] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for begin, repeated in self._answers:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(ConnectionError):
                self.requests.append(connection.recv(65536))
                connection.sendall(begin)
                while repeated:
                    connection.sendall(repeated)
                while repeated is HOLD and connection.recv(65536):
                    pass

    def close(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()


HOLD = b""
"""The connection stays open."""
END = None
"""The connection is closed."""


def response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n"
    return head.encode() + body


def packed(body: bytes) -> bytes:
    return response(body, headers="content-encoding: gzip\r\n")


def entries(measurements: str) -> bytes:
    text = '{"format":"cutlass-tuner-entries","version":2,"measurements":[%s],"entries":[]}'
    return response((text % measurements).encode())


LARGE = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n"
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n\r\n"
FAULTS: dict[str, tuple[bytes, bytes | None, str]] = {
    "other JSON": (response(b"{}"), END, "not a document of entries"),
    "other text": (response(b"\xff"), END, "not UTF-8"),
    "no JSON": (response(b"nonsense"), END, "not JSON"),
    "no gzip": (packed(b"{}"), END, "broke off"),
    "short gzip": (packed(gzip.compress(b"{}" * 999)[:-9]), END, "broke off"),
    "gzip bomb": (packed(gzip.compress(bytes(20 << 20))), END, "larger than 16777216 bytes"),
    "refusal": (response(b'{"error": "a token"}', "401 Unauthorized"), END, "401: a token"),
    "redirect": (response(b"", "302 Found", "location: http://127.0.0.1:9/\r\n"), END, "302"),
    "short body": (response(b"{}" * 9)[:-5], END, "broke off"),
    "short chunk": (b"HTTP/1.1 200 OK" + CHUNKED + b"99\r\nabc", END, "broke off"),
    "short chunk of a refusal": (b"HTTP/1.1 500 no" + CHUNKED + b"99\r\nab", END, "broke off"),
    "no HTTP": (b"junk\r\n\r\n", END, "broke off"),
    "no answer": (b"", END, "broke off"),
    "silence": (b"", HOLD, "did not come within 1 s"),
    "silence in the head": (b"HTTP/1.1 200 OK\r\n", HOLD, "did not come within 1 s"),
    "silence in the body": (response(b"{}")[:-1], HOLD, "did not come within 1 s"),
    "silence in a refusal": (response(b"{}", "500 no")[:-1], HOLD, "did not come within 1 s"),
    "dripped body": (LARGE + b"\r\n", b" ", "did not come within 1 s"),
    "dripped gzip": (
        LARGE + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"")[:10],
        b"\0\0\0\xff\xff",
        "did not come within 1 s",
    ),
    "dripped refusal": (LARGE.replace(b"200 OK", b"500 no") + b"\r\n", b" ", "answered 500: no"),
    "endless headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n", "broke off"),
    "endless 100": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "it is too large"),
    "brackets": (response(b"[" * 4096), END, "nested too deeply (allowed: 32 levels)"),
    "brackets of a refusal": (response(b"[" * 4096, "500 no"), END, "answered 500: no"),
    "deep lists": (response(b"[" * 99 + b"]" * 99), END, "nested too deeply"),
    "quotes": (response(b'"' + b'\\"' * 99_999), END, "not JSON"),
    "many values": (response(b'["",' + b'"",' * 2_000_000), END, "it is too large"),
    "many rows": (entries("{}," * 200_000 + "{}"), END, "holds 200001 measurements"),
    "many faults": (entries("{}," * 99 + "{}"), END, "nothing was imported, 100 rows"),
    "a large number": (response(b'{"a": %b}' % (b"9" * 5000)), END, "not JSON"),
    "control characters": (
        response(b'{"error": "\\u001b[2J\\n\\ud800%b"}' % (b"x" * 9999), "500 no"),
        END,
        r"answered 500: \x1b[2J \ud800xxx",
    ),
    "control characters of a status": (b"HTTP/1.1 500 \x1b[2J\r\n\r\n", END, r"500: \x1b[2J"),
}
"""Begin, what is repeated after it, and what is said of it."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "DEADLINE_S", 1.0)
    monkeypatch.setattr(sync, "MAX_BYTES", 1 << 24)
    monkeypatch.setattr(exchange, "MAX_TOKENS", 1 << 20)


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_answers_nothing_is_stored_but_a_sound_snapshot(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    begin, repeated, message = FAULTS[name]
    if "within" not in message:
        monkeypatch.setattr(sync, "DEADLINE_S", 60.0)
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    with contextlib.closing(Hostile((begin, repeated))) as server:
        assert main(["sync", server.address]) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith(f"tuner: {server.address}")
    assert message in told
    assert (told.count("\n"), told[-1], told[:-1].isprintable()) == (1, "\n", True)
    assert len(told) < 300
    assert f"Bearer {READ}".encode() in server.requests[0]
    with open_store() as store:
        assert store.entries() == []
        assert store.mirrored(server.address) is None


def test_on_an_interval_nothing_that_a_server_does_ends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    pauses = iter([None] * (len(FAULTS) - 1))

    def pause(seconds: float) -> None:
        assert seconds == 60
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("tuner.cli.sync._pause", pause)
    # The faults are what matters here, not which limit each meets.
    monkeypatch.setattr(sync, "DEADLINE_S", 0.1)
    monkeypatch.setattr(sync, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(exchange, "MAX_TOKENS", 1 << 14)
    with contextlib.closing(Hostile(*(fault[:2] for fault in FAULTS.values()))) as server:
        assert main(["sync", server.address, "--every", "60"]) == 130
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == "tuner: interrupted"
    assert len(lines) == len(FAULTS)
    assert all(line.startswith(f"tuner: {server.address}") for line in lines)


def test_a_handshake_has_the_same_deadline(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    with contextlib.closing(Hostile((b"", HOLD))) as server:
        assert main(["sync", server.address.replace("http", "https")]) == 1
    assert "does not answer: " in capsys.readouterr().err


def test_an_etag_that_is_none_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    tags = ['"' + "a" * 80 + '"', "no-quotes", '"\x1b[2J"', '"good"', 'W/"good"']
    kept = []
    for tag in tags:
        answer = entries("").replace(b"\r\n", f"\r\netag: {tag}\r\n".encode(), 1)
        with contextlib.closing(Hostile((answer, END))) as server:
            assert main(["sync", server.address]) == 0
        with open_store() as store:
            kept.append(store.mirrored(server.address))
    assert kept == ["", "", "", '"good"', 'W/"good"']


ECHOES: dict[str, bytes] = {
    "refusal": response(b'{"error": "not Bearer %b"}' % READ.encode(), "401 no"),
    "long refusal": response(b'{"error": "%b"}' % (b"x" * 150 + READ.encode() * 9), "401 no"),
    "status": b"HTTP/1.1 401 no %b\r\n\r\n" % READ.encode(),
    "no HTTP": b"%b\r\n\r\n" % READ.encode(),
    "header": b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\n\r\n" % READ.encode(),
    "snapshot": response(b'{"format": "%b"}' % READ.encode()),
    "row": entries(json.dumps({READ: 1})),
    "repeated key": response(b'{"%b": 1, "%b": 2}' % (READ.encode(), READ.encode())),
}
"""Answers of a service that repeats the token."""


@pytest.mark.parametrize("name", ECHOES)
def test_no_message_holds_the_token(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    with contextlib.closing(Hostile((ECHOES[name], END))) as server:
        assert main(["sync", server.address]) in (1, 2)
    out, err = capfd.readouterr()
    assert err.startswith(f"tuner: {server.address}")
    assert READ[:12] not in out + err


@pytest.mark.parametrize("around", ["{}\n", "{}\r\n", " {}\t", "\n{}"])
def test_white_space_around_a_token_is_not_a_part_of_it(
    around: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_READ_TOKEN", around.format(READ))
    monkeypatch.setenv("TUNER_WRITE_TOKEN", around.format(WRITE))
    assert (settings.read_token(), settings.write_token()) == (READ, WRITE)
    with contextlib.closing(Hostile((entries(""), END))) as server:
        assert main(["sync", server.address]) == 0
    assert f"Bearer {READ}\r\n".encode() in server.requests[0]
    assert READ not in "".join(capfd.readouterr())


@pytest.mark.parametrize("inner", ["\n", "\r\nx: y", " ", "\x7f", "\x1b[2J", "é", "\udcff"])
@pytest.mark.parametrize("name", ["TUNER_READ_TOKEN", "TUNER_WRITE_TOKEN"])
def test_a_token_that_no_header_carries_is_refused_at_the_start(
    name: str, inner: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"{READ}{inner}{WRITE}"
    monkeypatch.setenv("TUNER_READ_TOKEN", READ)
    monkeypatch.setenv("TUNER_WRITE_TOKEN", WRITE)
    monkeypatch.setenv(name, token)
    commands = [["serve", "--port", "0"]]
    if name == "TUNER_READ_TOKEN":
        commands.append(["sync", "http://127.0.0.1:9"])
    for command in commands:
        assert main(command) == 2
        out, err = capfd.readouterr()
        assert err.startswith(f"tuner: {name} holds a character that no HTTP header carries")
        assert READ not in out + err
        assert WRITE not in out + err


@pytest.mark.parametrize("pause", ["inf", "nan", "0", "-1", "1e300", "604801"])
def test_pauses_out_of_range(pause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["sync", "http://127.0.0.1:9", f"--every={pause}"])
    assert "is out of range (allowed: 1 to 604800)" in capsys.readouterr().err
