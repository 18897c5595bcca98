"""What all tests share: no test touches the user's cache, and each skip says its reason."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
from goldens import Goldens

from tuner import settings
from tuner.errors import TunerError

# A shell without job control starts background commands with SIGINT ignored, nohup with SIGHUP, and
# the processes that tests start inherit both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: Numbers of the caches of tests without a folder.
CACHES = itertools.count()

hypothesis.settings.register_profile("tuner", deadline=None, database=None)
hypothesis.settings.load_profile("tuner")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run generators of input for minutes")
    parser.addoption(
        "--write-goldens",
        action="store_true",
        help="write the golden texts anew (tests/golden) in place of comparing with them",
    )


@pytest.fixture(scope="session")
def goldens(request: pytest.FixtureRequest) -> Goldens:
    """The golden texts, which are written under ``--write-goldens`` only."""
    writes = request.config.getoption("--write-goldens")
    return Goldens(Path(__file__).parent / "golden", writes)


@pytest.fixture(scope="session")
def long_mode(request: pytest.FixtureRequest) -> bool:
    """True under ``--long``: generators run for minutes."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for everything that compiles in this run; the caller's where one is named."""
    given = os.environ.get("TUNER_CACHE_DIR")
    return Path(given) if given else tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def isolated(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit test sees no TUNER_* variable of the caller's and an empty cache of its own. No test
    compiles in the background unasked.

    Most tests use neither cache nor folder: one is made only for those that ask for `tmp_path`.
    """
    if any(request.node.get_closest_marker(name) for name in ("compile", "gpu")):
        monkeypatch.setenv("TUNER_CACHE_DIR", str(shared_cache))
        monkeypatch.setenv("TUNER_BUILD_ON_MISS", "0")
        return
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "0")
    if "tmp_path" in request.fixturenames:
        cache = request.getfixturevalue("tmp_path") / "cache"
    else:
        cache = tmp_path_factory.getbasetemp() / f"cache-{next(CACHES)}"
    monkeypatch.setenv("TUNER_CACHE_DIR", str(cache))


@pytest.fixture(scope="session")
def missing_compiler() -> str:
    """Why nothing can be compiled here; empty when it can."""
    from tuner.compile.toolchain import find_toolchain

    try:
        find_toolchain()
    except TunerError as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="session")
def missing_gpu() -> str:
    """Why nothing can be launched here; empty when it can."""
    from tuner.measure.device import detect

    try:
        gpu = detect()
    except TunerError as exc:
        return str(exc)
    return "" if gpu else "no NVIDIA GPU found"


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest, isolated: None) -> Iterator[None]:
    """Skips a marked test where its machine is missing."""
    for marker in ("compile", "gpu"):
        if request.node.get_closest_marker(marker):
            fixture = {"compile": "missing_compiler", "gpu": "missing_gpu"}[marker]
            if reason := request.getfixturevalue(fixture):
                pytest.skip(reason)
    yield


def postgres_program(name: str) -> str | None:
    """A program of PostgreSQL's server; distributions keep them out of PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which(name, path=path)


class PostgresServer:
    """A server of this run's own, reached through a socket in its folder."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tuner-pg-"))
        # The server refuses to run as root: then it runs as a user that may do less.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            names = {entry.pw_name for entry in pwd.getpwall()}
            user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(self._folder, user)
            self._user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        options = ["-D", str(self._data), "-U", "tuner", "-A", "trust", "-E", "UTF8", "--no-sync"]
        self._run([postgres_program("initdb"), *options])
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://tuner@/postgres?host={self._folder}"

    def _run(self, command: list[Any]) -> None:
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder, **self._user)

    def start(self) -> None:
        """After `kill` too: children of the killed server may hold its memory for a moment."""
        quick = ["-c", "fsync=off", "-c", "listen_addresses=", "-k", str(self._folder)]
        command = [str(postgres_program("postgres")), "-D", str(self._data), *quick]
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        deadline = time.monotonic() + 60
        self._process = self._launch(command)
        while True:
            try:
                engine.connect().close()
                return
            except sa.exc.OperationalError:
                if time.monotonic() > deadline:
                    raise
            if self._process.poll() is not None:
                self._process = self._launch(command)
            time.sleep(0.1)

    def _launch(self, command: list[str]) -> subprocess.Popen[bytes]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        options = {**quiet, "cwd": self._folder, "start_new_session": True, **self._user}
        return subprocess.Popen(command, **options)

    def kill(self) -> None:
        """As ``kill -9`` of the server: its children end when they see that it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that the tests start themselves."""
    missing = [name for name in ("initdb", "postgres") if postgres_program(name) is None]
    if missing:
        pytest.skip(f"PostgreSQL's {' and '.join(missing)} not found (Debian: postgresql)")
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def create_postgres_url(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Gives the URL of a fresh, empty schema with each call."""
    engine = sa.create_engine(postgres_server.url, poolclass=sa.NullPool)
    schemas = []

    def create() -> str:
        schemas.append(f"tuner_{uuid.uuid4().hex[:12]}")
        with engine.begin() as connection:
            connection.execute(sa.text(f"CREATE SCHEMA {schemas[-1]}"))
        return f"{postgres_server.url}&options=-csearch_path%3D{schemas[-1]}"

    yield create
    with engine.begin() as connection:
        for schema in schemas:
            connection.execute(sa.text(f"DROP SCHEMA {schema} CASCADE"))
