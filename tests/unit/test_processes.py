from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tuner.errors import CompileError
from tuner.processes import ProcessPool

BURN = "import time\nwhile time.process_time() < 0.3: pass"


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
