"""Builds of missing kernels in the background: what is started, where, and what never is."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import ran

from tuner.compile import background, toolchain
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.background import Builder, Miss
from tuner.errors import CompileError
from tuner.problem import AttentionProblem, Problem

PROBLEM = AttentionProblem.parse("S=1024,D=64,causal=1")
OTHER = AttentionProblem.parse("S=512,D=64")
KEY = "a" * 32


def miss(problem: Problem = PROBLEM, *, is_wanted: bool = True) -> Miss:
    return Miss(problem, "NVIDIA H200", lambda: is_wanted)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On, as by default, on a machine with a compiler; no miss waits for further ones."""
    monkeypatch.delenv("TUNER_BUILD_ON_MISS")
    monkeypatch.setattr(background, "GATHER_S", 0.0)
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: None)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Stands in for the interpreter that would run ``tuner build``; gives what it was asked, the
    list of problems last.
    """
    log = tmp_path / "calls"
    log.touch()
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "listed = open(sys.argv[sys.argv.index('--problems') + 1]).read()\n"
        "said = json.dumps([*sys.argv[1:], listed])\n"
        f"with open({str(log)!r}, 'a') as file: print(said, file=file)\n"
        "print('nvcc is missing')\nsys.exit(int(os.environ.get('FAKE_CODE', '0')))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_one_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "0")
    builder = Builder()
    assert not builder.request(miss())
    assert builder._thread is None


def test_a_missing_kernel_is_built_once_beside_the_caller(
    started: Callable[[], list[list[str]]],
) -> None:
    builder = Builder()
    assert builder.request(miss())
    assert not builder.request(miss())
    wait_for(started)
    assert builder.request(miss(OTHER))
    wait_for(lambda: len(started()) == 2)
    for arguments, problem in zip(started(), (PROBLEM, OTHER), strict=True):
        *command, listed = arguments
        assert command[:5] == ["-P", "-m", "tuner", "build", "--problems"]
        assert command[6:] == ["--gpu", "NVIDIA H200", "--background"]
        assert json.loads(listed) == [f"op=attention,{problem.label()}"]


def test_misses_of_a_while_are_one_build(
    started: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "GATHER_S", 0.01)
    builder = Builder()
    builder._queue.put(miss())
    assert builder.request(miss(OTHER))
    wait_for(started)
    ((*_, listed),) = started()
    assert [text.split(",")[3] for text in json.loads(listed)] == ["S=1024", "S=512"]


def test_what_is_here_by_then_is_not_built(started: Callable[[], list[list[str]]]) -> None:
    assert background._build_once([miss(is_wanted=False)], "H200") == ""
    assert background._build_once([miss(is_wanted=False), miss(OTHER)], "H200") == ""
    ((*_, listed),) = started()
    assert json.loads(listed) == [f"op=attention,{OTHER.label()}"]


def test_without_a_compiler_nothing_is_started(
    started: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def none() -> None:
        raise CompileError("nvcc is not installed")

    monkeypatch.setattr(toolchain, "find_toolchain", none)
    builder = Builder()
    with caplog.at_level("INFO"):
        builder.request(miss())
        wait_for(lambda: builder._is_off)
    assert "nvcc is not installed" in caplog.text and not builder.request(miss(OTHER))
    assert not started() and all(one.levelname == "INFO" for one in caplog.records)


def test_a_server_of_ever_new_shapes_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_ASKED", 1)
    monkeypatch.setattr(background, "build", lambda *_: "")
    builder = Builder()
    assert builder.request(miss()) and not builder.request(miss(OTHER))


def test_the_caller_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered = threading.Event(), threading.Event()

    def build(problems: object, gpu: str) -> str:
        entered.set()
        release.wait(20)
        return ""

    monkeypatch.setattr(background, "build", build)
    assert Builder().request(miss())
    assert entered.wait(20)
    release.set()


def test_a_failure_is_logged_with_what_was_said(
    started: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_CODE", "1")
    Builder().request(miss())
    wait_for(lambda: "nvcc is missing" in caplog.text)
    assert "were not built" in caplog.text


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "cannot be started" in background.build([PROBLEM], "H200")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_builds_for_itself() -> None:
    script = (
        "import os\nfrom tuner.compile import background\n"
        "mine = background._builder\nmine._asked.add('something')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if background._builder is not mine else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert background._builder is mine\n"
    )
    ran(sys.executable, "-c", script)


def test_processes_that_miss_the_same_kernel_share_one_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As forked servers do, each with a builder of its own: a file's lock holds between them."""
    library = tmp_path / "kernel.so"
    library.write_bytes(b"library")
    started, release, builds = threading.Event(), threading.Event(), list[str]()

    def build(problems: object, gpu: str) -> str:
        builds.append(gpu)
        started.set()
        assert release.wait(20)
        facts = {"resources": None, "compile_cpu_s": 0.0, "source": "", "facts": {}}
        ArtifactCache().put(KEY, library, **facts)
        return ""

    def serve() -> None:
        absent = Miss(PROBLEM, "H200", lambda: ArtifactCache().find(KEY) is None)
        assert background._build_once([absent], "H200") == ""

    monkeypatch.setattr(background, "build", build)
    servers = [threading.Thread(target=serve) for _ in range(3)]
    for server in servers:
        server.start()
    assert started.wait(20)
    release.set()
    for server in servers:
        server.join(20)
    assert builds == ["H200"]


def test_a_cache_that_cannot_be_written_ends_no_builder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TUNER_CACHE_DIR", str(blocked))
    builder = Builder()
    assert builder.request(miss())
    wait_for(lambda: "cannot be written" in caplog.text)
    assert builder.request(miss(OTHER))
    wait_for(builder._queue.empty)
    assert builder._thread is not None and builder._thread.is_alive()
    assert caplog.text.count("cannot be written") == 1, "each fault is said once"


def test_a_machine_runs_one_build_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner.cli import build

    cache = ArtifactCache()
    order: list[str] = []
    said: list[str] = []

    def second() -> None:
        with build._alone(cache):
            order.append("second")

    def is_told() -> bool:
        said.append(capsys.readouterr().err)
        return "waiting for another build" in "".join(said)

    with build._alone(cache):
        monkeypatch.setattr(build, "_NOTICE_AFTER_S", 0.05)
        thread = threading.Thread(target=second)
        thread.start()
        wait_for(is_told)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
