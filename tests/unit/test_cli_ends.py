"""Exit codes and signals: how the command ends, and what it keeps."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from cli_softmax import (
    PROBLEM,
    REPLAYED,
    SHAPE,
    recordings_fixture,
)

import tuner
from tuner import cli
from tuner.base.processes import Interrupted, python_command, python_environment
from tuner.errors import CompileError, ConfigError, NoValidConfigError, StoreError
from tuner.measurement import Provenance

recordings = recordings_fixture


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (CompileError("a"), 1),
        (NoValidConfigError("a"), 1),
        (StoreError("a"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGTERM), 143),
        (Interrupted(signal.SIGHUP), 129),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("tuner.cli.sweep.run", fail)
    assert cli.main(["sweep", *SHAPE]) == code
    err = capsys.readouterr().err
    assert err.startswith("tuner: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sweep", *SHAPE, "--trials", "0"], 2, "trials=0 is out of range"),
        (["sweep", *SHAPE, "--effort", "huge"], 2, "invalid choice: 'huge'"),
        (["sweep", *SHAPE, "--absent"], 2, "unrecognized arguments: --absent"),
        (["list", "--store", "/none/s.sqlite"], 1, "store /none/s.sqlite does not exist"),
        (["jobs", "show", "abc", "--store", "/none/s.sqlite"], 1, "does not exist"),
        (["bundle", "b.tar"], 2, "nothing is chosen to pack"),
        (["sync", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9/v1/snapshot does not answer"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_failure_is_json_where_json_was_asked_for(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for wants_json in (True, False):
        try:
            ended = cli.main([*words, "--json"] if wants_json else words)
        except SystemExit as exc:
            ended = int(exc.code or 0)
        out, err = capsys.readouterr()
        assert ended == code
        assert said in err
        if wants_json:
            assert list(json.loads(out)) == ["error"]
            assert said in json.loads(out)["error"]
        else:
            assert out == ""


@pytest.mark.parametrize("printed", ["", "[1]"])
def test_a_command_that_prints_nothing_says_under_json_that_it_failed(
    printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        print(printed, end="") if printed else None
        return 1

    monkeypatch.setattr("tuner.cli.sweep.run", fail)
    assert cli.main(["sweep", *SHAPE, "--json"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out) == ([1] if printed else {"error": "standard error says why"})


def test_a_repeated_pull_prints_its_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tuner.cli.sync._pause", end)
    assert cli.main(["sync", "http://127.0.0.1:9", "--every", "9", "--json"]) == 130
    [line] = capsys.readouterr().out.splitlines()
    assert "does not answer" in json.loads(line)["error"]


PAUSED = """
import contextlib, sys
from pathlib import Path
from tuner import cli
from tuner.measure import device
from tuner.runners import recording_archive
from tuner.runners.replay import ReplayRunner
device.detect = lambda index=0: None
recording_archive.folder = lambda: Path(sys.argv[1])
collect, collected = ReplayRunner.collect, []
def pause(self, timeout_s=None):
    collected.append(collect(self, timeout_s))
    if len(collected) == 8:
        print("collected 8", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a terminal that is closed meanwhile
            sys.stdin.readline()
    return collected[-1]
ReplayRunner.collect = pause
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_with_its_code_and_the_best_so_far(
    recordings: Path, tmp_path: Path, number: int, code: int
) -> None:
    url = f"sqlite:///{tmp_path}/c.sqlite"
    arguments = ["sweep", *SHAPE, "--trials", "400", "--store", url]
    process = subprocess.Popen(
        python_command("-c", PAUSED, str(recordings), *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    assert process.stderr is not None
    while process.stderr.readline() not in ("collected 8\n", ""):
        pass
    process.send_signal(number)
    out, err = process.communicate("go on\n", timeout=60)
    assert process.returncode == code, err
    assert "interrupted: this is the best so far" in out
    assert "tuner: interrupted; the best so far is stored" in err
    assert "Traceback" not in err
    found = tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite")
    assert found.entry.provenance is Provenance.REPLAYED


#: What a login does to a command: a session of its own with a terminal that controls it.
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_terminal_that_is_closed_costs_nothing_of_the_best_so_far(
    recordings: Path, tmp_path: Path
) -> None:
    """Every write fails from then on; the kernel sends SIGHUP."""
    url = f"sqlite:///{tmp_path}/c.sqlite"
    sweeping = python_command("-c", PAUSED, str(recordings), "sweep", *SHAPE, "--trials", "400")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        python_command("-c", ON_TERMINAL, *sweeping, "--store", url),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=python_environment(),
    )
    os.close(theirs)
    said = b""
    while b"collected 8" not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 129, said
    found = tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite")
    assert found is not None


@pytest.mark.parametrize("redirection", ["2>&-", "<&- 2>&-", "2>/dev/full"])
def test_a_sweep_ends_well_whatever_becomes_of_its_notes(
    recordings: Path, tmp_path: Path, redirection: str
) -> None:
    url = f"sqlite:///{tmp_path}/c.sqlite"
    done = subprocess.run(
        [
            *("sh", "-c", f'exec "$@" {redirection}', "sh"),
            *python_command("-c", REPLAYED, str(recordings), "sweep", *SHAPE, "--store", url),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(),
        timeout=120,
    )
    assert done.returncode == 0
    assert "stored as replayed in" in done.stdout
    assert tuner.lookup(PROBLEM, path=tmp_path / "c.sqlite") is not None
