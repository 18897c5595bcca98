"""Shared by the tests of the service: decisions to serve, a process that serves, and waiting."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stored import final

from tuner.base.processes import python_command, python_environment
from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.service.connections import ConnectionLimits
from tuner.service.server import Server, listen
from tuner.store import Store, open_store

H200, WARM = GPUS["H200"], Regime("stream", "warm")
SHAPE = "S=640,D=64"
PROBLEM = AttentionProblem.parse(SHAPE)
READ, WRITE = "r" * 20, "w" * 20
LOCAL = "http://127.0.0.1"
PATIENCE_S = 120.0
"""Longer than anything takes on a busy machine; only a failure waits for it."""


def measured(latency_us: float = 12.0, problem: Problem = PROBLEM, **changes: Any) -> Measurement:
    facts = {"regime": WARM, "environment": Environment({"driver": "580"}), "error": 1e-4}
    config = Config("vendor_sdpa", {"kernel": "cudnn"})
    return final(config, latency_us, problem, **{**facts, **changes})


def decide(store: Store, *ranking: Measurement) -> None:
    first = ranking[0]
    store.decide(first.problem, first.gpu, first.regime, ranking, "sweep1")


@pytest.fixture
def served_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with one decision, in the test's folder. A service of this process sees changes ten
    times as soon as others.
    """
    monkeypatch.setattr("tuner.service.decisions.REFRESH_S", 0.1)
    with open_store(str(tmp_path / "served.sqlite")) as made:
        decide(made, measured())
        yield made


def error(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def service(url: str, descriptors: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``tuner serve`` as a process over a store, made where there is none, and its address. With a
    soft limit of open files where one is named.
    """
    open_store(url).close()
    limited = ["sh", "-c", 'ulimit -Sn "$0"; exec "$@"', str(descriptors)] if descriptors else []
    process = subprocess.Popen(
        [*limited, *python_command("-m", "tuner", "serve", "--port", "0", "--store", url)],
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving on http://127.0.0.1:"), line + process.stderr.read()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def serving(app: Any, limits: ConnectionLimits) -> Iterator[tuple[str, int]]:
    """An application served by a thread over real sockets, and where it listens."""
    with listen("127.0.0.1", 0) as listening:
        server = Server(app, limits)
        thread = threading.Thread(target=server.run_on, args=(listening,))
        place = listening.getsockname()
        thread.start()
        try:
            yield place
        finally:
            server.should_exit = True
            thread.join()


def request(address: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
