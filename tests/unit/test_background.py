"""TUNER_BUILD_ON_MISS: what is started, where, and what never is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.compile import background
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.background import Builder
from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem

MISSING = Measurement(
    AttentionProblem.parse("S=1024,D=64,causal=1"),
    Config("fused_attention", {"tile_n": 128}),
    GPUS["H200"],
    Regime(),
    Status.OK,
    latency_us=12.0,
    is_final=True,
    artifacts={"attention": "a" * 32},
)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Stands in for the interpreter that would run ``tuner build``; gives what it was asked."""
    log = tmp_path / "calls"
    log.touch()
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(log)!r}, 'a') as file: print(json.dumps(sys.argv[1:]), file=file)\n"
        "print('nvcc is missing')\nsys.exit(int(os.environ.get('FAKE_CODE', '0')))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_off_unless_it_is_asked_for(
    started: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder()
    assert not builder.request(MISSING)
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "0")
    assert not builder.request(MISSING)
    assert builder._thread is None


def test_a_missing_kernel_is_built_once_beside_the_caller(
    started: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "1")
    builder = Builder()
    assert builder.request(MISSING)
    assert not builder.request(MISSING)
    other = MISSING.but(problem=AttentionProblem.parse("S=512,D=64"))
    assert builder.request(other)
    wait_for(lambda: len(started()) == 2)
    build = ["-P", "-m", "tuner", "build", "--op", "attention", "--shape"]
    assert started() == [
        [*build, "B=1,H=16,S=1024,D=64,causal=1,dtype=fp16", "--gpu", "NVIDIA H200"],
        [*build, "B=1,H=16,S=512,D=64,dtype=fp16", "--gpu", "NVIDIA H200"],
    ]


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_what_is_never_launched_is_never_built(
    provenance: Provenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "1")
    assert not Builder().request(MISSING.but(provenance=provenance))


def test_the_caller_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "1")
    release, entered = threading.Event(), threading.Event()

    def build(problem: object, gpu: str) -> str:
        entered.set()
        release.wait(20)
        return ""

    monkeypatch.setattr(background, "build", build)
    assert Builder().request(MISSING)
    assert entered.wait(20)
    release.set()


def test_a_failure_is_logged_with_what_was_said(
    started: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "1")
    monkeypatch.setenv("FAKE_CODE", "1")
    Builder().request(MISSING)
    wait_for(lambda: "nvcc is missing" in caplog.text)
    assert "were not built" in caplog.text


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "cannot be started" in background.build(MISSING.problem, "H200")


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_processes_that_miss_the_same_kernel_share_one_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As forked servers do, each with a builder of its own: a file's lock holds between them."""
    library, (key,) = tmp_path / "kernel.so", MISSING.artifacts.values()
    library.write_bytes(b"library")
    started, release, builds = threading.Event(), threading.Event(), list[str]()

    def build(problem: object, gpu: str) -> str:
        builds.append(gpu)
        started.set()
        assert release.wait(20)
        facts = {"resources": None, "compile_cpu_s": 0.0, "source": "", "facts": {}}
        ArtifactCache().put(key, library, **facts)
        return ""

    def miss() -> None:
        assert background._build_once(MISSING.problem, "H200", [key]) == ""

    monkeypatch.setattr(background, "build", build)
    servers = [threading.Thread(target=miss) for _ in range(3)]
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
    monkeypatch.setenv("TUNER_BUILD_ON_MISS", "1")
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TUNER_CACHE_DIR", str(blocked))
    builder = Builder()
    assert builder.request(MISSING)
    wait_for(lambda: "cannot be written" in caplog.text)
    assert builder._thread is not None and builder._thread.is_alive()


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
