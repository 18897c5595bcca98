from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import programs
import pytest
from living import benchmarks_environment, is_alive, pid_in, until_dead

import tuner
from tuner.base import install, processes
from tuner.base.processes import (
    ENDING_SIGNALS,
    EndingSignals,
    Interrupted,
    ProcessPool,
    RaisesInterrupted,
    exit_code,
    python_command,
    python_environment,
)
from tuner.compile import background
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import BenchmarkError, CompileError
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem
from tuner.store import open_store

TOP = Path(__file__).resolve().parents[2]
BURN = "import time\nwhile time.process_time() < 0.3: pass"


class TestForeignCode:
    """A working folder with modules of names that a Python of this package would import."""

    @pytest.fixture
    def ran(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The file that each of the modules would leave."""
        folder, trace = tmp_path / "hostile", tmp_path / "ran"
        (folder / "tuner").mkdir(parents=True)
        for name in ("tuner/__init__", "sitecustomize", "usercustomize", "json", "argparse"):
            code = f"open({str(trace)!r}, 'a').write(__file__ + chr(10))\n"
            (folder / f"{name}.py").write_text(code)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "cache"))
        return trace

    @pytest.fixture
    def empty_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``export PYTHONPATH=$PYTHONPATH:...`` where there was none: the working folder."""
        given = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{given}{os.pathsep}")

    def test_the_worker_runs_none(self, ran: Path, empty_entry: None) -> None:
        client = WorkerClient(device_index=99)
        with pytest.raises(BenchmarkError, match="CUDA device 99 was not found"):
            client.facts()
        client.close()
        assert not ran.exists()

    def test_the_build_in_the_background_runs_none(self, ran: Path, empty_entry: None) -> None:
        said = background.build([AttentionProblem.parse("S=1024,D=64")], "no such GPU")
        assert "no such GPU" in said
        assert not ran.exists()

    def test_the_command_runs_none(self, ran: Path) -> None:
        command = Path(sysconfig.get_path("scripts")) / "tuner"
        if not command.exists():
            pytest.skip("the command is not installed beside this Python")
        said = programs.ran(command, "--version", code=None, env=python_environment())
        assert said.stdout == f"cutlass-tuner {tuner.__version__}\n", said.stderr
        assert not ran.exists()


class TestEnvironment:
    """Where a process finds the package."""

    def test_a_checkout_comes_first_and_relative_entries_stay_where_they_were(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(processes, "_PACKAGES", tmp_path / "checkout")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("/a", "", "b")))
        path = python_environment()["PYTHONPATH"].split(os.pathsep)
        assert path == [str(tmp_path / "checkout"), "/a", str(tmp_path / "b")]

    def test_an_installed_package_needs_no_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        site = Path(sysconfig.get_path("purelib")).resolve()
        monkeypatch.setattr(processes, "_PACKAGES", site)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        assert "PYTHONPATH" not in python_environment()

    def test_it_is_this_same_package(self, tmp_path: Path) -> None:
        code = "import tuner; print(tuner.__file__)"
        said = programs.ran(*python_command("-c", code), cwd=tmp_path, env=python_environment())
        assert said.stdout.strip() == tuner.__file__


class TestStarts:
    """Every Python is started by `python_command`, or by a script with ``-P``."""

    def test_in_the_package(self) -> None:
        """The module `install` names this Python to a person, and starts nothing."""
        files = [*(TOP / "tuner").rglob("*.py"), *(TOP / "scripts").rglob("*.py")]
        named = {path for path in files if "sys.executable" in path.read_text()}
        assert named == {Path(install.__file__), Path(processes.__file__)}
        assert "subprocess" not in Path(install.__file__).read_text()

    def test_in_the_scripts(self) -> None:
        start = re.compile(
            r"""(?:"\$\w+"|"\$\{PYTHON:-python3\}"|\bpython[\d.]*)\s+-[a-zA-Z]\b.*"""
        )
        found = [
            (path.name, line)
            for path in sorted((TOP / "scripts").iterdir())
            if path.is_file() and path.suffix in ("", ".sh")
            for line in start.findall(path.read_text())
        ]
        assert len(found) > 10
        # The probe of the version imports nothing, and has to work in a Python without -P.
        probe = [line for _, line in found if line.startswith('"$candidate" -c \'import sys;')]
        assert len(probe) == 1
        assert [line for _, line in found if " -P" not in line] == probe


class TestEndingSignals:
    """In this process, by real signals."""

    @pytest.mark.parametrize("number", ENDING_SIGNALS)
    def test_each_is_answered_and_then_given_back(self, number: int) -> None:
        before, seen = signal.getsignal(number), []
        with EndingSignals(seen.append):
            os.kill(os.getpid(), number)
        assert seen == [number]
        assert signal.getsignal(number) is before

    def test_nohup_is_left_in_force(self) -> None:
        seen: list[int] = []
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with EndingSignals(seen.append):
                os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)
        assert not seen

    def test_another_thread_changes_nothing(self) -> None:
        found: list[object] = []

        def look() -> None:
            with EndingSignals(lambda number: None):
                found.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found == [signal.getsignal(signal.SIGTERM)]

    def test_only_ctrl_c_ends_what_is_ending(self) -> None:
        with RaisesInterrupted():
            with pytest.raises(Interrupted) as first:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Interrupted) as second:
                os.kill(os.getpid(), signal.SIGINT)
        assert [exit_code(raised.value) for raised in (first, second)] == [143, 143]

    def test_one_that_python_drops_comes_again(self) -> None:
        class Drops:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(1000):  # it is raised between two steps
                    pass

        hook = sys.unraisablehook
        with RaisesInterrupted(), pytest.raises(Interrupted) as raised:
            Drops()
            threading.Event().wait(60)
            pytest.fail("the signal was lost")
        assert raised.value.number == signal.SIGTERM
        assert sys.unraisablehook is hook

    def test_a_forked_child_is_ended_as_by_ctrl_c(self) -> None:
        program = (
            "import os, signal\n"
            "from tuner.base.processes import EndingSignals\n"
            "with EndingSignals(lambda number: None):\n"
            "    child = os.fork()\n"
            "    if child == 0:\n"
            "        try: os.kill(os.getpid(), signal.SIGTERM)\n"
            "        except KeyboardInterrupt: os._exit(7)\n"
            "        os._exit(0)\n"
            "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        command = python_command("-c", program)
        done = programs.ran(*command, env=python_environment())
        assert done.stdout == "7\n"


@contextlib.contextmanager
def commands(count: int, *words: str, **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command in some processes."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(
                subprocess.Popen(
                    python_command("-m", "tuner", *words),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=python_environment() | variables,
                )
            )
            stack.enter_context(made[-1])
            stack.callback(made[-1].kill)
        yield made


def wait_for_line(stream: IO[str] | None, words: str) -> None:
    assert stream is not None
    said = []
    for line in stream:
        said.append(line)
        if words in line:
            return
    pytest.fail(f"it ended without saying '{words}': {said}")


class TestCommandsEnd:
    """Every command ends by a signal with 128 and its number, never with minus the signal."""

    @staticmethod
    def check(made: Sequence[subprocess.Popen[str]], words: str) -> None:
        for process, number in zip(made, ENDING_SIGNALS, strict=True):
            wait_for_line(process.stdout, words)
            process.send_signal(number)
        said = [process.communicate(timeout=60)[0] for process in made]
        assert [process.returncode for process in made] == [130, 143, 129], said
        assert not any("Traceback" in text for text in said), said

    def test_sync(self, tmp_path: Path) -> None:
        words = ("sync", "http://127.0.0.1:9", "--every", "60", "--store", str(tmp_path / "s"))
        open_store(words[-1]).close()
        with commands(3, *words) as made:
            self.check(made, "does not answer")

    def test_logs(self, tmp_path: Path) -> None:
        url = str(tmp_path / "s.sqlite")
        with open_store(url) as store:
            job = store.jobs.submit([AttentionProblem.parse("S=1024,D=64")], {})
        with commands(3, "jobs", "logs", job, "--follow", "--store", url) as made:
            self.check(made, "submitted")

    def test_serve(self, tmp_path: Path) -> None:
        pytest.importorskip("fastapi", reason="the extra [service] is not installed")
        url = str(tmp_path / "s.sqlite")
        open_store(url).close()
        with commands(3, "serve", "--port", "0", "--store", url) as made:
            self.check(made, "serving on")

    def test_worker(self, tmp_path: Path) -> None:
        """Each takes a problem; by the time of the signal it may be done and wait for another."""
        made: list[subprocess.Popen[str]] = []
        with contextlib.ExitStack() as stack:
            for number in ENDING_SIGNALS:
                url = str(tmp_path / f"{number}.sqlite")
                with open_store(url) as store:
                    store.jobs.submit([AttentionProblem.parse("S=1024,D=64")], {"trials": 3})
                made += stack.enter_context(commands(1, "worker", "--replay", "--store", url))
            self.check(made, " of job ")

    def test_build(self, tmp_path: Path) -> None:
        url = str(tmp_path / "s.sqlite")
        open_store(url).close()
        with (
            ArtifactCache(tmp_path / "artifacts").lock("build"),
            commands(3, "build", "--store", url, TUNER_CACHE_DIR=str(tmp_path)) as made,
        ):
            self.check(made, "waiting for another build")

    def test_signals_that_come_again_and_again_change_nothing(self, tmp_path: Path) -> None:
        url = str(tmp_path / "s.sqlite")
        open_store(url).close()
        words = ("sync", "http://127.0.0.1:9", "--every", "60", "--store", url)
        with commands(1, *words) as (process,):
            wait_for_line(process.stdout, "does not answer")
            while process.poll() is None:
                process.send_signal(signal.SIGHUP)
            assert process.returncode == 129


def python(*lines: str) -> list[str]:
    return [sys.executable, "-SE", "-c", "\n".join(lines)]


def test_what_a_process_says_and_how_it_ends_come_back(tmp_path: Path) -> None:
    command = python("import sys", "print('out', flush=True)", "sys.exit('err')")
    done = ProcessPool(60).run(command, tmp_path)
    assert (done.returncode, done.log, done.timed_out) == (1, "out\nerr\n", False)


def test_the_time_of_children_is_counted(tmp_path: Path) -> None:
    command = python(
        "import subprocess, sys",
        f"subprocess.run([sys.executable, '-SE', '-c', {BURN!r}], check=True)",
    )
    assert ProcessPool(60).run(command, tmp_path).cpu_s >= 0.3


def test_temporary_files_go_into_the_folder(tmp_path: Path) -> None:
    done = ProcessPool(60).run(python("import tempfile", "print(tempfile.mkdtemp())"), tmp_path)
    assert Path(done.log.strip()).parent == tmp_path


def test_a_timeout_kills_it(tmp_path: Path) -> None:
    done = ProcessPool(0.2).run(python("import time", "time.sleep(600)"), tmp_path)
    assert (done.returncode, done.timed_out) == (-9, True)


def test_after_kill_nothing_lives_and_nothing_starts(tmp_path: Path) -> None:
    pool = ProcessPool(600)
    codes: list[int] = []
    command = python("open('started', 'w').close()", "import time", "time.sleep(600)")
    thread = threading.Thread(target=lambda: codes.append(pool.run(command, tmp_path).returncode))
    thread.start()
    while not (tmp_path / "started").exists():
        assert thread.is_alive()
    pool.kill()
    thread.join()
    codes.append(pool.run(command, tmp_path).returncode)
    assert codes == [-9, -9]


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"/no/nvcc cannot be started: No such file"):
        ProcessPool(60).run(["/no/nvcc"], tmp_path)


#: Runs a command that starts another and ends before it, as nvcc's shells do.
STARTER = """
import sys
from pathlib import Path
from tuner.base.processes import ProcessPool
folder = Path(sys.argv[1])
child = "echo $$ >child && mv child pid && exec sleep 600"
ProcessPool(600).run(["sh", "-c", f"sh -c '{child}'; true"], folder)
"""


def test_what_a_compiler_started_ends_with_whoever_started_the_compiler(tmp_path: Path) -> None:
    """By SIGKILL, so that nothing but the kernel can tell."""
    starter = subprocess.Popen(
        python_command("-c", STARTER, str(tmp_path)), env=python_environment()
    )
    child = pid_in(tmp_path / "pid")
    assert is_alive(child)
    starter.kill()
    starter.wait()
    until_dead(child)


def test_a_signal_to_all_processes_of_a_service_is_no_fault_of_the_compiler(tmp_path: Path) -> None:
    lines = ("import os, signal", "os.kill(0, signal.SIGTERM)", "os.kill(0, signal.SIGHUP)")
    assert ProcessPool(60).run(python(*lines), tmp_path).returncode == 0


@pytest.mark.parametrize("code", [0, 3, 127, 128, 255])
def test_every_exit_code_comes_back(tmp_path: Path, code: int) -> None:
    done = ProcessPool(60).run(["sh", "-c", f"exit {code}"], tmp_path)
    assert (done.returncode, done.log) == (code, "")


def test_a_command_that_a_signal_ended_says_which(tmp_path: Path) -> None:
    done = ProcessPool(60).run(python("import os", "os.kill(os.getpid(), 9)"), tmp_path)
    assert done.returncode == -9


#: Runs a bench's sweep whose command starts another and waits for it.
SWEEPING = """
import sys
from pathlib import Path
from benchmarks import tuner_sweeps
from tuner.base.processes import RaisesInterrupted
from tuner.problem import AttentionProblem
child = f"echo $$ >child && mv child {sys.argv[1]}/pid && exec sleep 600"
tuner_sweeps.python_command = lambda *_: ["sh", "-c", f"sh -c '{child}'; true"]
with RaisesInterrupted():
    tuner_sweeps.swept(AttentionProblem.parse("S=512,D=64"), 0, [], is_fresh=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_a_sweep_started_ends_with_the_bench(tmp_path: Path, number: int) -> None:
    environment = {**benchmarks_environment(), "TUNER_CACHE_DIR": str(tmp_path / "cache")}
    bench = subprocess.Popen(
        python_command("-c", SWEEPING, str(tmp_path)),
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        child = pid_in(tmp_path / "pid")
        assert is_alive(child)
        bench.send_signal(number)
        assert bench.wait(60) != 0
        until_dead(child)
    finally:
        if bench.poll() is None:
            bench.kill()
            bench.wait()


def test_a_command_that_is_run_says_how_it_ended() -> None:
    with processes.running(["sh", "-c", "echo said; exit 3"], stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b"said\n"
    assert process.returncode == 3
