"""The service under connections that send nothing, too slowly, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [service] is not installed")

from serving import request, service, serving

from tuner.cli import main
from tuner.service import protocol
from tuner.service.connections import SPARE_CONNECTIONS, Admission, ConnectionLimits

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
IDLE, ACTIVE = 2000, 200
MANY = ConnectionLimits(1000, 1000)


@pytest.fixture(scope="module", autouse=True)
def descriptors() -> Iterator[int]:
    """The most descriptors that this process may have, for as long as these tests run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Member:
    """A connection that notes its end."""

    is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True


class TestAdmission:
    """Who is served, who gives way, who is spare."""

    def entered(self, admission: Admission, host: str, count: int) -> list[Member]:
        """Connections of a host, all of which wait."""
        made = [Member() for _ in range(count)]
        for member in made:
            assert admission.enter(member, host)
            admission.wait(member)
        return made

    def test_the_longest_wait_gives_way_at_the_limit(self) -> None:
        admission = Admission(ConnectionLimits(total=3, per_address=3))
        first, second, third = self.entered(admission, "192.0.2.1", 3)
        admission.work(first)
        admission.wait(first)  # from now on: the second waits longer
        self.entered(admission, "192.0.2.2", 1)
        assert [m.is_evicted for m in (first, second, third)] == [False, True, False]

    def test_an_address_at_its_limit_takes_places_of_its_own_only(self) -> None:
        admission = Admission(ConnectionLimits(total=4, per_address=2))
        others = self.entered(admission, "192.0.2.1", 2)
        own = self.entered(admission, "192.0.2.2", 2)
        self.entered(admission, "192.0.2.2", 5)
        assert [m.is_evicted for m in (*others, *own)] == [False, False, True, True]

    def test_hosts_of_one_network_count_together(self) -> None:
        admission = Admission(ConnectionLimits(total=9, per_address=1))
        (one,) = self.entered(admission, "2001:db8::1", 1)
        (far,) = self.entered(admission, "2001:db8:0:1::1", 1)
        self.entered(admission, "2001:db8::ffff:2", 1)
        assert (one.is_evicted, far.is_evicted) == (True, False)

    def test_what_is_worked_on_never_gives_way(self) -> None:
        admission = Admission(ConnectionLimits(total=2, per_address=2, spare=2))
        busy = self.entered(admission, "192.0.2.1", 2)
        for member in busy:
            admission.work(member)
        spare = [Member() for _ in range(3)]
        assert [admission.enter(m, "192.0.2.2") for m in spare] == [False] * 3
        assert [m.is_evicted for m in (*busy, *spare)] == [False, False, True, False, False]
        admission.leave(busy[0])
        assert admission.enter(Member(), "192.0.2.2")

    def test_who_has_left_is_not_counted(self) -> None:
        admission = Admission(ConnectionLimits(total=1, per_address=1, spare=0))
        for _ in range(3):
            (member,) = self.entered(admission, "192.0.2.1", 1)
            admission.leave(member)
            admission.leave(member)
            assert not member.is_evicted

    @pytest.mark.parametrize(
        ("soft", "total"), [(1024, 704), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)]
    )
    def test_limits_stay_below_the_descriptors(
        self, monkeypatch: pytest.MonkeyPatch, soft: int, total: int
    ) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
        limits = ConnectionLimits.of_process()
        assert (limits.total, limits.per_address) == (total, total // 2)

    def test_too_few_descriptors_are_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
        assert main(["serve", "--port", "0"]) == 2
        assert "RLIMIT_NOFILE=256 is too low to serve (allowed: 384 or more" in (
            capsys.readouterr().err
        )


def connected(stack: contextlib.ExitStack, place: tuple[str, int]) -> socket.socket:
    return stack.enter_context(socket.create_connection(place, timeout=60))


def answers(active: Sequence[socket.socket]) -> list[bytes]:
    """The status of each one's answer out of the store, all asked for before any is read."""
    for connection in active:
        connection.sendall(GET.replace(b"/healthz", b"/v1/jobs"))
    found = []
    for connection in active:
        text = b""
        while b'"jobs"' not in text and (more := connection.recv(65536)):
            text += more
        found.append(text[:12])
    return found


def is_open(idle: Sequence[socket.socket]) -> list[bool]:
    """Of each of some connections to which nothing is ever sent: whether it lives."""
    poll = select.poll()
    for connection in idle:
        poll.register(connection, select.POLLIN)
    ended = {number for number, _ in poll.poll(0)}
    return [connection.fileno() not in ended for connection in idle]


class TestFlood:
    """Thousands of connections that say nothing, beside those that ask."""

    @pytest.mark.parametrize("soft", [1024, 8192])
    def test_idle_connections_lock_nobody_out(
        self, tmp_path: Path, descriptors: int, soft: int, long_mode: bool
    ) -> None:
        count = min(IDLE, descriptors - ACTIVE - 200)
        if count < IDLE:
            print(f"RLIMIT_NOFILE={descriptors}: {count} idle connections in place of {IDLE}")
        with service(str(tmp_path / "s.sqlite"), min(soft, descriptors)) as (address, process):
            host, port = address.removeprefix("http://").split(":")
            place = (host, int(port))
            with contextlib.ExitStack() as stack:
                idle = []
                for number in range(count):
                    idle.append(connected(stack, place))
                    if number % 2:
                        idle[-1].sendall(GET[:-2])
                active = [connected(stack, place) for _ in range(ACTIVE)]
                for _ in range(3):
                    assert answers(active) == [b"HTTP/1.1 200"] * ACTIVE
                    assert request(address, "GET", "/healthz")[0] == 200
                held = list(Path(f"/proc/{process.pid}/fd").iterdir())
                assert len(held) < soft - SPARE_CONNECTIONS
                if soft == 1024:
                    assert sum(is_open(idle)) <= 352 - ACTIVE
                for _ in range(100_000 if long_mode else 1000):
                    socket.create_connection(place, timeout=60).close()
                assert request(address, "GET", "/v1/jobs")[0] == 200
            assert process.poll() is None

    def test_health_checks_are_answered_while_all_are_at_work(self) -> None:
        entered, release = threading.Semaphore(0), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            if scope["path"] == "/slow":
                loops.append(asyncio.get_running_loop())
                entered.release()
                await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        def ask(path: str) -> int:
            return request(f"http://{place[0]}:{place[1]}", "GET", path)[0]

        limits = ConnectionLimits(total=4, per_address=4, spare=2)
        with serving(app, limits) as place, contextlib.ExitStack() as stack:
            busy = [connected(stack, place) for _ in range(limits.total)]
            for connection in busy:
                connection.sendall(GET.replace(b"healthz", b"slow"))
            for _ in busy:
                assert entered.acquire(timeout=60)
            for _ in range(10):
                assert (ask("/healthz"), ask("/v1/jobs"), ask("/slow")) == (200, 503, 503)
            loops[0].call_soon_threadsafe(release.set)
            assert [connection.recv(12) for connection in busy] == [b"HTTP/1.1 200"] * len(busy)
            assert ask("/v1/jobs") == 200


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading a body: at /large more than any buffer takes."""
    if scope["type"] != "http":
        return
    body = bytes(64 << 20) if scope["path"] == "/large" else b"{}"
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class TestDeadlines:
    """A connection is ended when its client keeps it waiting, whatever it drips."""

    HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "
    BODY = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"

    @pytest.mark.parametrize(
        ("sent", "drip", "told"),
        [
            (b"", b"", rb""),
            (b"", b"\r\n", rb""),
            (HEAD, b"", rb"HTTP/1.1 400 .*the head did not come within 1 s"),
            (HEAD, b"a", rb"HTTP/1.1 400 .*the head did not come within 1 s"),
            (BODY, b"a", rb"HTTP/1.1 200 .*"),
            (GET * 3, b"", rb"(HTTP/1.1 200 .*){3}"),
            (GET + HEAD, b"a", rb"HTTP/1.1 200 .*HTTP/1.1 400 .*"),
        ],
        ids=["silence", "newlines", "half-head", "dripped-head", "body", "requests", "second-head"],
    )
    def test_of_heads(
        self, monkeypatch: pytest.MonkeyPatch, sent: bytes, drip: bytes, told: bytes
    ) -> None:
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
        answer, is_ended = b"", False
        with serving(echo, MANY) as place, contextlib.ExitStack() as stack:
            connection = connected(stack, place)
            connection.sendall(sent)
            connection.settimeout(0.05)
            while not is_ended:
                try:
                    if drip:
                        connection.sendall(drip)
                    more = connection.recv(65536)
                    answer, is_ended = answer + more, not more
                except TimeoutError:
                    pass
                except ConnectionError:
                    is_ended = True
        assert re.fullmatch(told, answer, re.DOTALL), answer

    @pytest.mark.parametrize("last", [b"", b"connection: close\r\n"])
    def test_of_reading(self, monkeypatch: pytest.MonkeyPatch, last: bytes) -> None:
        monkeypatch.setattr(protocol, "READ_TIMEOUT_S", 0.1)
        with serving(echo, MANY) as place, contextlib.ExitStack() as stack:
            connection = connected(stack, place)
            connection.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n%b\r\n" % last)
            poll = select.poll()
            poll.register(connection, 0)  # told of the end alone
            assert poll.poll(60_000)

    def test_who_reads_something_has_more_time(self) -> None:
        least = protocol.MIN_READ_BYTES
        sizes = [9 * least, 8 * least, 5 * least, 5 * least - 1]
        expired: list[Any] = []
        made = object.__new__(protocol.Protocol)
        made.transport = SimpleNamespace(get_write_buffer_size=lambda: sizes[0])
        made.loop = SimpleNamespace(call_later=lambda s, then: expired.append(then))
        made.evict = lambda: expired.append("evicted")
        made._watch_reading()
        for _ in range(3):
            del sizes[0]
            expired.pop()()
        assert expired == ["evicted"]
