"""A job on the GPU: its worker killed, another one taking over, a cancelled sweep left at once."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.base.processes import python_command, python_environment
from tuner.problem import AttentionProblem
from tuner.store import Store, open_store
from tuner.tuning.job import JobOptions
from tuner.tuning.sweep import SweepOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

#: Both need the kernels that `test_serving_policy_gpu` compiles too.
FIRST, SECOND = (AttentionProblem.parse(f"S={s},D=64,H=4") for s in (384, 512))
OPTIONS = JobOptions(SweepOptions(families=("fused_attention",), trials=4, sampler="tpe"))


@contextlib.contextmanager
def worker(url: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = python_command("-m", "tuner", "worker", "--store", url, *arguments)
    process = subprocess.Popen(command, env=python_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """How long it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.2)
    return time.monotonic() - started


def trials(store: Store, job: str) -> int:
    return sum(task.trials for task in store.jobs.tasks(job))


def states(store: Store, job: str) -> list[str]:
    return [task.state for task in store.jobs.tasks(job)]


def replaced(store: Store, job: str, condition: Callable[[], bool]) -> str:
    """Cancels a job once the condition holds; gives the one that the worker then turns to."""
    wait_until(condition, 300)
    store.jobs.cancel(job)
    following = store.jobs.submit([FIRST], OPTIONS.to_json())
    assert wait_until(lambda: states(store, following) != ["queued"], 60) < 30
    return following


def test_a_killed_worker_costs_its_running_trial_and_nothing_else(tmp_path: Path) -> None:
    url = str(tmp_path / "s.sqlite")
    with open_store(url) as store:
        job = store.jobs.submit([FIRST, SECOND], OPTIONS.to_json())
        with worker(url) as killed:
            wait_until(lambda: trials(store, job) > 0, 300)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        kept = store.measurements(final=False)
        with worker(url, "--drain") as other:
            wait_until(lambda: other.poll() is not None, 600)
            assert other.returncode == 0
        assert states(store, job) == ["done", "done"]
        found = store.measurements(final=False)
        assert found[: len(kept)] == kept
        counts = Counter((m.problem, m.config.digest) for m in found)
        assert max(counts.values()) == 1
        for problem in (FIRST, SECOND):
            (entry,) = store.entries(problem=problem)
            assert str(entry.provenance) == "measured"


def test_a_cancelled_sweep_is_left_within_seconds_and_the_next_job_is_done(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "s.sqlite")
    with open_store(url) as store:
        first = store.jobs.submit([FIRST], OPTIONS.to_json())
        with worker(url) as process:
            # While it compiles, and while it times: both are waits that must be cut short.
            second = replaced(store, first, lambda: states(store, first) == ["running"])
            third = replaced(store, second, lambda: trials(store, second) > 0)
            wait_until(lambda: states(store, third) == ["done"], 600)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        assert store.entries(problem=FIRST)
