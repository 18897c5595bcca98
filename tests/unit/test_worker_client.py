"""The driver's side of the worker process: time-outs, faults, signals and what each costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worker_fakes
from living import until_dead
from worker_fakes import (
    KERNEL,
    PROBLEM,
    WHEN_TIMED,
)

from tuner.base.processes import ENDING_SIGNALS
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.measure import worker as worker_room
from tuner.measure import worker_client
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask, WorkerClient
from tuner.measurement import Clocks, Regime, Status

#: A process that speaks the protocol; what a candidate does is its parameter `act`.
SCRIPT = """
import json, os, signal, subprocess, sys, time
requests, answers = (int(sys.argv[sys.argv.index(f) + 1]) for f in ("--requests", "--answers"))

def say(**event):
    os.write(answers, (json.dumps(event) + "\\n").encode())

def result(index, fatal=False, **outcome):
    outcome = {"status": "ok", "latency_us": 1.0 + index, "log": str(os.getpid()), **outcome}
    say(event="result", index=index, outcome=outcome, fatal=fatal)

def hang(index):  # with --hasty it may last 0.7 s, where anything else may last a minute
    allow_s = -59.3 if "--hasty" in sys.argv else 0
    say(event="phase", index=index, what="check, random", allow_s=allow_s)
    time.sleep(60)

if "--broken" in sys.argv:
    print("no such library")
    sys.exit(3)
if "--mute" in sys.argv:
    time.sleep(60)
say(event="ready")
for line in os.fdopen(requests):
    request = json.loads(line)
    if request["mode"] == "environment":
        say(event="facts", facts={"torch": "2.11"})
    if request["mode"] == "listing" and request["family"] == "lost":
        os._exit(1)
    if request["mode"] == "listing":
        found = {"family": request["family"], "params": {"most": request["max_workspace"]}}
        say(event="phase", index=None, what="candidates", allow_s=30)
        say(event="listing", configs=[found], reason="")
    for candidate in request.get("candidates", ()):
        index, act = candidate["index"], candidate["config"]["params"]["act"]
        say(event="phase", index=index, what="check, random", allow_s=0)
        if act == "hang":
            hang(index)
        if act == "hang with a child":
            child = subprocess.Popen(["sleep", "60"])
            open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
            hang(index)
        if act == "slow":
            say(event="phase", index=index, what="reference", allow_s=30)
        if act == "abort":
            print("kernel printed this", flush=True)
            os.abort()
        if act == "exit":
            os._exit(7)
        if act == "sticky":
            result(index, fatal=True, status="illegal_access", log="CUDA error 700")
            sys.exit(0)
        if act == "gate":
            say(event="failed", status="launch_error", log="bad reference")
            break
        if act == "queues":
            result(index, log=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
            continue
        if act == "full":
            say(event="failed", status="out_of_memory", log="no memory for operands")
            break
        if act == "blameless" and not request["careful"]:
            hang(None)
        if act == "blameless":
            os._exit(1)
        if act != "forget":
            result(index)
    else:
        say(event="done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_worker.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def client(script: Path) -> Iterator[WorkerClient]:
    made = WorkerClient(command=[sys.executable, str(script), "--hasty"], timeout_s=60)
    yield made
    made.close()


def ask(*acts: str, mode: str = "quick") -> Ask:
    candidates = [(Config("toy", {"act": act}), {"main": KERNEL}) for act in acts]
    return Ask(PROBLEM, Regime(), mode, 1, KERNEL, candidates)


def test_outcomes_come_in_order_from_one_process(client: WorkerClient) -> None:
    first, second = client.measure(ask("ok", "ok"))
    (third,) = client.measure(ask("ok"))
    assert [first.latency_us, second.latency_us] == [1.0, 2.0]
    assert first.log == second.log == third.log == str(client.pid)


def test_streams_have_queues_of_their_own(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (found,) = client.measure(ask("queues"))
    assert found.log == "32"


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        ("hang", Status.TIMEOUT, "no sign of life for 1 s during: check, random"),
        ("abort", Status.WORKER_DIED, "killed by SIGABRT during: check, random\nkernel printed"),
        ("exit", Status.WORKER_DIED, "ended with exit code 7"),
        ("sticky", Status.ILLEGAL_ACCESS, "CUDA error 700"),
    ],
)
def test_what_kills_a_worker_costs_its_neighbours_nothing(
    client: WorkerClient, act: str, status: Status, words: str
) -> None:
    outcomes = client.measure(ask("ok", act, "ok"))
    assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
    assert words in outcomes[1].log
    assert outcomes[0].log != outcomes[2].log, "the same process went on"
    until_dead(int(outcomes[0].log))


def test_several_faults_in_one_group(client: WorkerClient) -> None:
    outcomes = client.measure(ask("abort", "sticky", "exit", "ok"))
    wanted = [Status.WORKER_DIED, Status.ILLEGAL_ACCESS, Status.WORKER_DIED, Status.OK]
    assert [o.status for o in outcomes] == wanted


def test_an_announced_phase_may_take_longer(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, waited = worker_client._Process.receive, []

    def noted(process: Any, timeout_s: float) -> Any:
        waited.append(timeout_s)
        return receive(process, timeout_s)

    monkeypatch.setattr(worker_client._Process, "receive", noted)
    assert client.measure(ask("slow"))[0].status is Status.OK
    assert waited[1:] == [60, 60, 90, 60], "ready; begun, check, reference, the end"


def test_a_timeout_kills_the_whole_group(
    client: WorkerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))
    assert client.measure(ask("hang with a child"))[0].status is Status.TIMEOUT
    until_dead(int((tmp_path / "child").read_text()))


def test_nobody_s_fault_is_tried_again_with_care(client: WorkerClient) -> None:
    outcomes = client.measure(ask("ok", "blameless", "ok", mode="final"))
    # Without care nobody was at work; with care the second candidate was.
    assert [o.status for o in outcomes] == [Status.OK, Status.WORKER_DIED, Status.OK]


def test_a_result_that_never_comes_is_a_failure(client: WorkerClient) -> None:
    outcomes = client.measure(ask("ok", "forget"))
    assert [o.status for o in outcomes] == [Status.OK, Status.WORKER_DIED]
    assert "no result" in outcomes[1].log


def test_operands_that_do_not_fit_fail_every_candidate(client: WorkerClient) -> None:
    outcomes = client.measure(ask("full", "ok"))
    assert {o.status for o in outcomes} == {Status.OUT_OF_MEMORY}
    assert outcomes[1].log == "no memory for operands"


def test_a_broken_gate_is_an_error_not_a_status(client: WorkerClient) -> None:
    with pytest.raises(BenchmarkError, match="numerics gate failed: bad reference"):
        client.measure(ask("gate"))


def test_facts(client: WorkerClient) -> None:
    assert client.facts() == {"torch": "2.11"}


@pytest.mark.parametrize(
    ("flag", "limit_s", "words"),
    [
        ("--broken", 60.0, "exit code 3 while starting\nno such library"),
        ("--mute", 0.2, "did not start"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error(
    script: Path, flag: str, limit_s: float, words: str
) -> None:
    command = [sys.executable, str(script), flag]
    client = WorkerClient(command=command, start_timeout_s=limit_s)
    with pytest.raises(BenchmarkError, match=words):
        client.measure(ask("ok"))
    assert client.pid is None


def test_a_missing_program_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="cannot be started"):
        WorkerClient(command=["/nowhere/python"]).measure(ask("ok"))


def test_close_kills(client: WorkerClient) -> None:
    client.measure(ask("ok"))
    pid = client.pid
    assert pid is not None
    client.close()
    client.close()
    until_dead(pid)
    assert client.pid is None


class TestInterrupt:
    """From another thread than the one that asks."""

    @staticmethod
    def interrupted(client: WorkerClient, *acts: str, once: Callable[[], object]) -> None:
        """Ask, and interrupt it as soon as a condition holds."""

        def interrupt() -> None:
            while not once():
                time.sleep(0.01)
            client.interrupt()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(CancelledError):
            client.measure(ask(*acts))
        thread.join()

    def test_a_running_request_ends_at_once_and_no_stale_answer_is_left(
        self, script: Path, child: Path
    ) -> None:
        client = WorkerClient(command=[sys.executable, str(script)], timeout_s=60)
        started = time.monotonic()
        self.interrupted(client, "ok", "hang with a child", "ok", once=child.exists)
        assert time.monotonic() - started < 30 and client.pid is None
        client.renew()
        assert client.measure(ask("ok", "ok"))[1].latency_us == 2.0
        client.close()

    @pytest.fixture(autouse=True)
    def child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Written by a candidate that hangs with a child."""
        monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))
        return tmp_path / "child"

    def test_a_worker_that_is_starting_ends_too(self, script: Path) -> None:
        client = WorkerClient(command=[sys.executable, str(script), "--mute"])
        self.interrupted(client, "ok", once=lambda: client.pid)
        assert client.pid is None

    def test_one_that_comes_too_late_costs_the_next_request_nothing(
        self, client: WorkerClient
    ) -> None:
        client.measure(ask("ok"))
        pid = client.pid
        client.interrupt()
        client.renew()
        assert client.measure(ask("ok"))[0].status is Status.OK
        assert client.pid not in (None, pid)

    def test_one_that_comes_before_the_request_asks_ends_it(self, client: WorkerClient) -> None:
        client.measure(ask("ok"))
        client.interrupt()
        with pytest.raises(CancelledError):
            client.measure(ask("ok"))
        assert client.pid is None

    def test_nothing_is_started_for_a_request_that_is_given_up(self, script: Path) -> None:
        """Between two attempts at its candidates."""
        client = WorkerClient(command=[sys.executable, str(script)], timeout_s=60)
        attempt = client._attempt

        def give_up(*arguments: Any) -> Any:
            ending = attempt(*arguments)
            client.interrupt()
            return ending

        client._attempt = give_up  # type: ignore[method-assign]
        with pytest.raises(CancelledError):
            client.measure(ask("exit", "ok"))
        assert client.pid is None


def test_the_real_worker_says_why_it_cannot_start() -> None:
    client = WorkerClient(device_index=99)
    with pytest.raises(BenchmarkError, match="CUDA device 99 was not found"):
        client.facts()
    client.close()


def test_a_worker_ends_with_its_driver_even_while_busy(tmp_path: Path) -> None:
    """The driver is killed with SIGKILL: nothing tells the worker but the end of the pipe."""
    busy = tmp_path / "busy.py"
    busy.write_text(
        "import os, sys, time\nfrom tuner.measure.worker import read_requests\n"
        "read_requests(int(sys.argv[1]))\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, subprocess, sys, time\nr, w = os.pipe()\n"
        f"subprocess.Popen([sys.executable, {str(busy)!r}, str(r)], pass_fds=[r],"
        " start_new_session=True)\ntime.sleep(60)\n"
    )
    root = str(Path(worker_room.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, str(driver)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    until_dead(pid)


def test_an_outcome_survives_the_pipe() -> None:
    outcome = CandidateOutcome(
        Status.OK, 3.5, 0.1, 20, ("noisy",), 1e-4, 512, Clocks(1900, throttle=("a", "b")), "text"
    )
    from dataclasses import asdict

    assert CandidateOutcome.from_json(json.loads(json.dumps(asdict(outcome)))) == outcome


#: The worker's own `main` on the fakes.
FAKED = """
import importlib.util, sys
from tuner.measure import device, worker
from tuner.hardware import DEFAULT_GPU
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
here = sys.modules["fakes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(here)
here.FakeGate.verdicts = []
vars(worker).update(here.FAKES, Device=lambda index: here.FakeDevice())
worker.families = lambda: {"toy": here.Toy()}
device.detect = lambda index: DEFAULT_GPU
sys.exit(worker.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("act", "status", "words"), WHEN_TIMED)
def test_finalists_are_measured_beside_one_that_faults_when_timed(
    tmp_path: Path, act: str, status: Status, words: str
) -> None:
    faked = tmp_path / "faked_worker.py"
    faked.write_text(FAKED)
    client = WorkerClient(command=[sys.executable, str(faked), worker_fakes.__file__])
    outcomes = client.measure(replace(ask("ok", act, "ok", mode="final"), rounds=20))
    client.close()
    assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
    assert [o.rounds for o in outcomes] == [20, 0, 20] and outcomes[1].log == words


def test_signals_to_everybody_leave_the_worker_to_its_driver(tmp_path: Path) -> None:
    """A service manager sends them to each process: no candidate is to be blamed for its end."""
    faked = tmp_path / "faked_worker.py"
    faked.write_text(FAKED)
    client = WorkerClient(command=[sys.executable, str(faked), worker_fakes.__file__])
    client.measure(ask("ok"))
    pid = client.pid
    assert pid is not None
    for number in ENDING_SIGNALS:
        os.kill(pid, number)
    assert client.measure(ask("ok"))[0].status is Status.OK
    assert client.pid == pid
    client.close()


def test_a_library_s_candidates_come_from_the_worker(client: WorkerClient) -> None:
    assert client.listing(PROBLEM, "toy", 7) == [Config("toy", {"most": 7})]
    assert client.listing(PROBLEM, "lost", None) == []
    assert client.listing(PROBLEM, "toy", 8) == [Config("toy", {"most": 8})], "a fresh process"
