"""Real forks while other threads of the parent hold locks and run compilers."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from living import exit_of_child, is_alive, pid_in, until_dead
from runtime_server import built_dispatcher

from tuner.base import forks
from tuner.base.processes import ProcessPool, python_command, python_environment
from tuner.compile.artifacts import ArtifactCache

torch = pytest.importorskip("torch", reason="torch is not installed")

built = built_dispatcher
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


class Holder:
    """A thread that holds a lock while the test runs."""

    def __init__(self, lock: Any) -> None:
        self._held, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(lock,))

    def _hold(self, lock: Any) -> None:
        with lock:
            self._held.set()
            self._release.wait(60)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(60)

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._thread.join()


def owners() -> dict[str, tuple[Any, str]]:
    """Everything with a lock that a call of the runtime takes."""
    part = {
        path.rpartition(".")[2]: importlib.import_module(f"tuner.runtime.{path}")
        for path in (
            "attention.append",
            "call.benchmark",
            "call.counters",
            "call.table",
            "enable",
            "products.quantiser",
        )
    }
    return {
        "append": (part["append"].kernels, "_lock"),
        "choices": (part["benchmark"].journal, "_lock"),
        "counters": (part["counters"]._counts, "lock"),
        "plans": (part["table"].table, "_lock"),
        "processes": (ProcessPool(60), "_lock"),
        "quantiser": (part["quantiser"].kernels, "_lock"),
        "switch": (part["enable"]._switch, "_lock"),
    }


@pytest.mark.parametrize(
    "name", ["append", "choices", "counters", "plans", "processes", "quantiser", "switch"]
)
def test_a_lock_that_a_thread_of_the_parent_holds_is_free_in_the_child(name: str) -> None:
    owner, attribute = owners()[name]
    before = getattr(owner, attribute)
    with Holder(before):

        def take() -> None:
            assert getattr(owner, attribute).acquire(timeout=5)

        assert exit_of_child(take) == 0
    assert getattr(owner, attribute) is before, "the parent's own"


def test_a_child_enables_while_a_thread_of_the_parent_switches(
    on_cpu: Any, built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable = importlib.import_module("tuner.runtime.enable")
    on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))

    def switch() -> None:
        with enable.enabled():
            assert enable.native.is_watched
        assert not enable.native.is_watched

    with Holder(enable._switch._lock):
        assert exit_of_child(switch) == 0


def test_a_block_that_a_thread_of_the_parent_opened_ends_with_the_fork(
    on_cpu: Any, built: Any
) -> None:
    enable = importlib.import_module("tuner.runtime.enable")
    on_cpu.dispatch.use(on_cpu.dispatch.load(built.dispatcher))

    def switch() -> None:
        assert enable.native.is_watched
        with enable.enabled():
            assert enable.native.is_watched
        assert not enable.native.is_watched, "of the parent's thread nothing is open here"

    with Holder(enable.enabled()):
        assert exit_of_child(switch) == 0
        assert enable.native.is_watched
    assert not enable.native.is_watched


def test_an_object_that_is_gone_needs_no_repair() -> None:
    class Owner:
        pass

    repaired: list[Owner] = []
    owner = Owner()
    forks.in_child(owner, repaired.append)
    forks.in_child(Owner(), repaired.append)

    def count() -> None:
        assert repaired == [owner]

    assert exit_of_child(count) == 0
    assert repaired == []


#: A server that forks while a thread of it compiles. The child ends as Python ends, or stays.
SERVER = """
import atexit, os, sys, threading, time
from pathlib import Path
from tuner.base.processes import ProcessPool
from tuner.compile.artifacts import ArtifactCache
folder, child_stays = Path(sys.argv[1]), sys.argv[2] == "stays"
pool = ProcessPool(600)
atexit.register(pool.kill)
lock = ArtifactCache(folder / "cache").lock("k1")
lock.__enter__()
compiler = "echo $$ >compiler && mv compiler compiling && exec sleep 600"
threading.Thread(target=pool.run, args=(["sh", "-c", compiler], folder), daemon=True).start()
while not (folder / "compiling").exists():
    time.sleep(0.01)
with pool._lock:
    child = os.fork()
if child == 0:
    if child_stays:
        (folder / "stay").write_text(str(os.getpid()))
        (folder / "stay").rename(folder / "staying")
        time.sleep(600)
    sys.exit()
if not child_stays:
    os.waitpid(child, 0)
(folder / "end").write_text(str(child))
(folder / "end").rename(folder / "ended")
time.sleep(600)
"""


def served(folder: Path, child: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("-c", SERVER, str(folder), child), env=python_environment()
    )


def test_a_child_s_exit_leaves_the_parent_s_compiler_running(tmp_path: Path) -> None:
    server = served(tmp_path, "ends")
    try:
        pid_in(tmp_path / "ended")
        compiler = pid_in(tmp_path / "compiling")
        assert is_alive(compiler)
    finally:
        server.kill()
        server.wait()
    until_dead(compiler)


def test_a_child_that_outlives_the_parent_keeps_neither_its_compiler_nor_its_lock(
    tmp_path: Path,
) -> None:
    server = served(tmp_path, "stays")
    try:
        child, compiler = pid_in(tmp_path / "staying"), pid_in(tmp_path / "compiling")
    finally:
        server.kill()
        server.wait()
    try:
        until_dead(compiler)
        assert is_alive(child)
        with ArtifactCache(tmp_path / "cache").lock("k1", wait_s=0.0) as is_held:
            assert is_held
    finally:
        os.kill(child, signal.SIGKILL)
