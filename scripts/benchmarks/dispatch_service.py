"""Throughput of the HTTP service: lookups, batches and snapshots a second, and the cost of a
mirror.

The service runs as ``tuner serve`` does, in a process of its own on loopback. The requests come
from this process, over connections that stay open, so both share the machine.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row
from tuner.base.processes import python_command, python_environment
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import GemmProblem
from tuner.store import open_store
from tuner.store.exchange import Decision, write
from tuner.store.sync import pull

BATCH = 100
CONNECTIONS = 4
"""Requests at a time."""
REPEATS = 30
"""Repeats of a single timed request; the median is printed."""
#: What the service is meant to reach on loopback with 2 cores.
GOALS = {
    "single lookups a second": "at least 1,000",
    "batched lookups a second": "at least 50,000",
    "snapshot, ms": "under 100",
    "snapshot not changed (304), ms": "under 2",
}


@dataclass(frozen=True)
class Case:
    """A service over so many decisions, asked for so many seconds for each rate."""

    entries: int = 10_000
    seconds: float = 5.0
    group = "service"

    @property
    def label(self) -> str:
        return f"{self.entries} decisions"


class Connection:
    """One connection that stays open; reads no more of an answer than its length."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer."""
        self._socket.sendall(request)
        if not (first := self._answers.readline()):
            raise BenchmarkError("the service closed the connection")
        headers: dict[str, str] = {}
        while line := self._answers.readline().decode("latin-1").strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = self._answers.read(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """The bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(data)}"]
    lines += ["content-type: application/json"] if data else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def problem(number: int) -> GemmProblem:
    """One of the drawn problems; all differ."""
    return GemmProblem(8 * (number + 1), 4096, 4096)


def document(count: int) -> dict[str, Any]:
    """Decisions that look like real ones: an own kernel and two vendors' each."""
    configs = [
        Config("gemm", {"tile_m": 128, "tile_n": 256, "tile_k": 64, "cluster_m": 2}),
        *(Config("vendor_blas", {"kernel": name}) for name in ("cublaslt", "cublas")),
    ]
    measured = [
        Measurement(
            problem(number),
            config,
            DEFAULT_GPU,
            Regime.default("gemm"),
            Status.OK,
            environment=Environment({"driver": "580.159.04", "cuda": "13.0", "torch": "2.11.0"}),
            latency_us=10.0 + number / 7 + place,
            std_us=0.1,
            rounds=20,
            is_final=True,
            error=2.1e-4,
            sweep=f"{number:016x}",
        )
        for number in range(count)
        for place, config in enumerate(configs)
    ]
    decisions = [
        Decision([n, n + 1, n + 2], None, f"{n:016x}", "2026-01-01T00:00:00.000+00:00")
        for n in range(0, len(measured), len(configs))
    ]
    return write(dict(enumerate(measured)), decisions)


@dataclass(frozen=True)
class Service:
    """One that runs."""

    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU up to now."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(store: Path) -> Iterator[Service]:
    """A service over a store."""
    command = python_command("-m", "tuner", "serve", "--port", "0", "--store", str(store))
    # Whatever protects the user's own service is not what is measured.
    environment = {k: v for k, v in python_environment().items() if not k.endswith("_TOKEN")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("serving on "):
            raise BenchmarkError(f"the service did not start: {line + process.stderr.read()}")
        yield Service(int(line.rsplit(":", 1)[1]), process.pid)
    finally:
        process.terminate()
        process.communicate()


def rate(port: int, requests: Sequence[bytes], seconds: float) -> float:
    """Answers a second over `CONNECTIONS` connections, which ask the requests in turn.

    Raises:
        BenchmarkError: when an answer is not 200.
    """

    def asked(number: int) -> float:
        with contextlib.closing(Connection(port)) as connection:
            connection.ask(requests[0])
            count, begun = 0, time.perf_counter()
            while (passed_s := time.perf_counter() - begun) < seconds:
                place = (number + count * CONNECTIONS) % len(requests)
                if (status := connection.ask(requests[place])[0]) != 200:
                    raise BenchmarkError(f"a lookup was answered {status}")
                count += 1
            return count / passed_s

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return sum(pool.map(asked, range(CONNECTIONS)))


def measure(case: Case, _: Namespace) -> Row:
    """Every figure by name, and the goals."""
    decisions, entries = document(case.entries), case.entries
    with tempfile.TemporaryDirectory() as folder:
        served, mirrored = Path(folder, "served.sqlite"), Path(folder, "mirrored.sqlite")
        begun = time.perf_counter()
        with open_store(str(served)) as store:
            store.import_(decisions)
        figures = {"import into an empty store, s": time.perf_counter() - begun}
        with running(served) as service:
            figures |= _lookups(service, entries, case.seconds)
            figures |= _snapshots(service.port)
            address = f"http://127.0.0.1:{service.port}"
            with open_store(str(mirrored)) as store:
                for name in ("first sync, s", "sync of nothing new, s"):
                    begun = time.perf_counter()
                    pull(store, address, lambda measurement: ())
                    figures[name] = time.perf_counter() - begun
    return {"figures": figures, "goals": GOALS, "load": os.getloadavg()}


def _lookups(service: Service, entries: int, seconds: float) -> dict[str, float]:
    port = service.port
    asked = [{"op": "gemm", "shape": problem(n).label()} for n in range(entries)]
    path = "/v1/configs:lookup"
    single = [request("POST", path, {"items": [item]}) for item in asked]
    batches = [
        request("POST", path, {"items": asked[n : n + BATCH]}) for n in range(0, entries, BATCH)
    ]
    # Each question is worked out when it is first asked: that is a figure of its own.
    with contextlib.closing(Connection(port)) as connection:
        begun = time.perf_counter()
        for batch in batches:
            if b"null" in connection.ask(batch)[2]:
                raise BenchmarkError("the service does not know what it was given")
        first = len(asked) / (time.perf_counter() - begun)
    figures = {"lookups a second, each for the first time": first}
    for name, asked_together, requests in (("single", 1, single), ("batched", BATCH, batches)):
        spent_s, begun = service.cpu_s, time.perf_counter()
        figures[f"{name} lookups a second"] = asked_together * rate(port, requests, seconds)
        passed_s, spent_s = time.perf_counter() - begun, service.cpu_s - spent_s
        figures[f"{name} lookups, the service's cores"] = spent_s / passed_s
    return figures


def _snapshots(port: int) -> dict[str, float]:
    with contextlib.closing(Connection(port)) as connection:
        packed = request("GET", "/v1/snapshot", accept_encoding="gzip")
        _, headers, body = connection.ask(packed)
        again = request("GET", "/v1/snapshot", if_none_match=headers["etag"])
        if connection.ask(again)[0] != 304:
            raise BenchmarkError("an unchanged snapshot was sent again")
        requests = {
            "snapshot, ms": packed,
            "snapshot without gzip, ms": request("GET", "/v1/snapshot", accept_encoding="identity"),
            "snapshot not changed (304), ms": again,
        }
        ways = [
            Contender(name, harness.every_copy(partial(connection.ask, asked)))
            for name, asked in requests.items()
        ]
        times = harness.time_host(ways, 1, REPEATS, wait=lambda: None)
    sizes = {"snapshot, MB": gzip.decompress(body), "snapshot under gzip, MB": body}
    return {
        **{name: len(part) / 1e6 for name, part in sizes.items()},
        **{name: times.us[name] / 1e3 for name in requests},
    }
