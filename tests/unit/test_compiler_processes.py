"""Processes of the compiler: shared, cancelled, released and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from fake_nvcc import Fake, faked, spec
from living import is_alive, until_dead

from tuner.base import scratch
from tuner.compile import compiler
from tuner.errors import CompileError


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return faked(tmp_path, monkeypatch)


PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from tuner.base import resources
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler, Toolchain
from tuner.families.base import KernelSpec
folder, values = Path(sys.argv[1]), sys.argv[2:]
resources.templates = lambda: folder / "templates"
host = Path("/usr/bin/c++")
tools = Toolchain(folder / "nvcc", "13.0.88", host, "c++ 12", folder / "cutlass", "4.2.0")
with Compiler(tools, ArtifactCache(folder / "cache"), jobs=1) as made:
    for _, future in made.submit([KernelSpec("a.cu.j2", {"n": v}, {"n": (v,)}) for v in values]):
        print(future.result().key)
"""


def start(fake: Fake, *values: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(fake.folder), *values],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])},
    )


def test_two_processes_build_a_kernel_once(fake: Fake) -> None:
    first, second = start(fake, "1 SLEEP1", "2"), start(fake, "2", "1 SLEEP1", "3")
    outputs = [process.communicate()[0].split() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs[0] == [outputs[1][1], outputs[1][0]]
    assert sum(fake.runs) == 3
    assert fake.leftovers() == []


def wait_for_a_run(fake: Fake, count: int = 1) -> None:
    for _ in range(1000):
        if len(fake.runs) >= count and list((fake.cache.root / ".building").glob("*/tmpxft")):
            return
        time.sleep(0.01)
    pytest.fail("nvcc was not started")


def test_cancelling_kills_nvcc_and_its_children_and_leaves_nothing(fake: Fake) -> None:
    made = fake.compiler(jobs=1)
    (_, running), (_, waiting) = made.submit([spec("CHILD SLEEP600"), spec(1, "b.cu.j2")])
    wait_for_a_run(fake)
    child = int(Path(f"{fake.log}.child").read_text())
    assert is_alive(child)
    made.close(cancel=True)
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result()
    until_dead(child)
    assert fake.cache.keys() == []
    assert fake.leftovers() == []
    assert made.submit([spec(5)])[0][1].cancelled()


def test_what_its_owner_releases_is_killed_and_not_begun(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        ((_, running),) = made.submit([spec("CHILD SLEEP600")], "mine")
        wait_for_a_run(fake)
        child = int(Path(f"{fake.log}.child").read_text())
        (_, waiting), (_, wanted) = made.submit([spec(1, "b.cu.j2"), spec(2, "b.cu.j2")], "mine")
        made.submit([spec(2, "b.cu.j2")], "theirs")
        made.release("mine")
        for future in (running, waiting):
            with pytest.raises(CancelledError):
                future.result()
        assert wanted.result().key == made.key(spec(2, "b.cu.j2"))
        until_dead(child)
        # Whoever wants it after that begins anew.
        ((_, again),) = made.submit([spec(1, "b.cu.j2")], "mine")
        assert again.result().key == made.key(spec(1, "b.cu.j2"))
    assert fake.runs == [1, 1, 1]
    assert fake.leftovers() == []


def test_a_unit_of_which_one_kernel_is_wanted_goes_on(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        futures = [f for _, f in made.submit([spec("SLEEP0_3"), spec("SLEEP0_4")], "mine")]
        wait_for_a_run(fake)
        made.submit([spec("SLEEP0_4")])
        made.release("mine")
        assert len([future.result() for future in futures]) == 2
    assert fake.runs == [2]


def test_one_can_come_back_while_its_unit_is_killed(fake: Fake) -> None:
    with fake.compiler(jobs=1) as made:
        ((_, first),) = made.submit([spec("SLEEP600")], "mine")
        wait_for_a_run(fake)
        assert [one.kernels for one in made.underway().values()] == [1]
        made.release("mine")
        ((_, second),) = made.submit([spec("SLEEP600")], "mine")
        assert second is not first
        with pytest.raises(CancelledError):
            first.result()
        wait_for_a_run(fake, 2)
        made.release("mine")
        with pytest.raises(CancelledError):
            second.result()
    assert made.underway() == {}


def test_a_killed_process_leaves_nothing_that_counts(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(fake, "SLEEP2")
    wait_for_a_run(fake)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert fake.cache.keys() == []
    monkeypatch.setattr(scratch, "_SWEEP_AGE_S", -1.0)
    with fake.compiler(jobs=1) as made:
        assert made.submit([spec(1)])[0][1].result()
    assert list((fake.cache.root / ".building").glob("*")) == []


def test_nvcc_is_stopped_when_it_takes_too_long(fake: Fake) -> None:
    with fake.compiler(jobs=1, timeout_s=0.5) as made:
        ((_, bad),) = made.submit([spec("SLEEP600")])
        with pytest.raises(CompileError, match=r"nvcc was stopped after \d+ s"):
            bad.result()
