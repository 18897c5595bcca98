"""The worker process and its client, without a GPU: the client against scripted processes, the
worker's loop against a scripted device."""

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

from tuner.base.processes import ENDING_SIGNALS
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, GateError
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU
from tuner.measure import worker as worker_room
from tuner.measure import worker_client
from tuner.measure.bursts import Entrant
from tuner.measure.request import Outcome
from tuner.measure.stopwatch import Timing
from tuner.measure.tolerance import Verdict
from tuner.measure.worker import Worker
from tuner.measure.worker_client import Ask, WorkerClient
from tuner.measurement import Clocks, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem

PROBLEM = GemmProblem(m=512, n=512, k=512)
KERNEL = Artifact("k" * 32, Path("/nowhere/kernel.so"), "0" * 64, None, 0.0)

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


def gone(pid: int) -> bool:
    """Dead, be it still a zombie that nobody has reaped."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_outcomes_come_in_order_from_one_process(client: WorkerClient) -> None:
    first, second = client.measure(ask("ok", "ok"))
    (third,) = client.measure(ask("ok"))
    assert [first.latency_us, second.latency_us] == [1.0, 2.0]
    assert first.log == second.log == third.log == str(client.pid)


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
    assert gone(int(outcomes[0].log))


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
    assert gone(int((tmp_path / "child").read_text()))


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
    assert gone(pid) and client.pid is None


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
    with pytest.raises(BenchmarkError, match="CUDA device 99 is not there"):
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
    assert gone(pid)


def test_an_outcome_survives_the_pipe() -> None:
    outcome = Outcome(
        Status.OK, 3.5, 0.1, 20, ("noisy",), 1e-4, 512, Clocks(1900, throttle=("a", "b")), "text"
    )
    from dataclasses import asdict

    assert Outcome.from_json(json.loads(json.dumps(asdict(outcome)))) == outcome


class Toy(Family):
    name, op = "toy", "gemm"

    def conflicts(self, problem: Any, config: Any, gpu: Any) -> list[str]:
        return []

    def space(self, problem: Any, gpu: Any) -> list[Config]:
        return []

    def predict_us(self, problem: Any, config: Any, gpu: Any) -> float:
        return 1.0


class Vendor(Toy):
    name, is_vendor = "vendor", True

    def environment(self) -> dict[str, str]:
        return {"cudnn": "9.19"}


class FakeDevice:
    index = 0
    stream = 0

    def __init__(self) -> None:
        self.sticky = False
        self.open: list[Any] = []

    def close(self, what: Any) -> None:
        """As CUDA does: a lost context lets go of nothing."""
        self.synchronize()
        self.open.remove(what)

    def synchronize(self) -> None:
        if self.sticky:
            raise BenchmarkError("CUDA error 700", status=Status.ILLEGAL_ACCESS)

    def healthy(self) -> bool:
        return not self.sticky

    def wait(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        return 1 << 20

    def free(self, pointer: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30


class FakeGate:
    verdicts: list[Verdict]
    broken: tuple[int, ...] = ()
    is_lse_wrong = False

    def __init__(self, device: FakeDevice, kernel: Any) -> None:
        self.device = device
        self.pointers = {"a": 1, "b": 2, "d": 3}
        self.examined = 0

    def open(self, problem: Any, seed: int, strides: Any) -> None:
        pass

    def load(self, kind: str, with_lse: bool = False) -> None:
        self.with_lse = with_lse

    def allocate(self, pool: Any, name: str, size: int) -> Any:
        return worker_room.Guarded(name, 4096, size)

    def arm(self, extra: Any = ()) -> None:
        pass

    def examine(self, extra: Any = ()) -> Verdict:
        self.device.synchronize()
        self.examined += 1
        if self.examined in FakeGate.broken:
            raise GateError("the reference is not finite")
        return FakeGate.verdicts.pop(0) if FakeGate.verdicts else Verdict(Status.OK, 1e-4)

    def examine_lse(self, lse: Any) -> Verdict:
        assert self.with_lse and lse.bytes == 4 * 16 * 64
        log = "log-sum-exp: 1 of 1024 rows are wrong"
        return (
            Verdict(Status.WRONG_RESULT, None, log) if FakeGate.is_lse_wrong else Verdict(Status.OK)
        )


class FakeSubject:
    scratch_bytes, workspace_bytes, temporary_bytes = 64, 256, 16

    def __init__(
        self, device: FakeDevice, family: Any, problem: Any, config: Config, *_: Any
    ) -> None:
        self.device, self.act = device, config.get("act", "ok")
        device.open.append(self)

    def timed(self) -> None:
        """What passes its check and the quick timing may still do beside others."""
        if self.act == "sticky when timed":
            self.device.sticky = True
        if self.act == "refused when timed":
            raise BenchmarkError("CUDA error 1")

    def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Any:
        if self.act == "sticky":
            self.device.sticky = True
        if self.act == "raises":
            raise KeyError("tile_q")
        return lambda: None

    def parts(self) -> dict[str, FakeSubject]:
        return dict.fromkeys(("scores", "output") if self.act == "two" else ("main",), self)

    def close(self) -> None:
        self.device.close(self)


class FakeBurst:
    def __init__(self, entrant: Entrant) -> None:
        self.subject: Any = entrant.subject

        self.subject.device.open.append(self)

    def enqueue(self) -> None:
        pass

    def close(self) -> None:
        self.subject.device.close(self)


class FakeStopwatch:
    latency_us = 50.0

    def __init__(self, device: Any, regime: Any) -> None:
        self.device = device
        device.open.append(self)

    def prepare(self, entrant: Entrant) -> FakeBurst:
        if getattr(entrant.subject, "act", "") == "not captured":
            raise BenchmarkError("CUDA error 900")
        return FakeBurst(entrant)

    def quick(self, burst: Any) -> tuple[Timing, Clocks]:
        return Timing(self.latency_us, 0.1, 7), Clocks(1900)

    def final(self, bursts: Any, rounds: int, progress: Any, *, careful: bool) -> Any:
        progress(-1)
        for index, burst in enumerate(bursts):
            if careful:
                progress(index)
            burst.subject.timed()
            if careful:
                self.device.synchronize()
        self.device.synchronize()
        return [Timing(self.latency_us, 0.1, rounds) for _ in bursts], Clocks(1900)

    def close(self) -> None:
        self.device.close(self)


#: In place of what `worker` imports.
FAKES: dict[str, Any] = {
    "Gate": FakeGate,
    "CompiledSubject": FakeSubject,
    "Stopwatch": FakeStopwatch,
    "load": lambda artifact: None,
    "predecessor": lambda *_: None,
    "device_us": lambda device, burst: 9.0,
    "entrant": lambda subject, *_: Entrant(subject, []),
}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    FakeGate.verdicts = []
    for name, fake in FAKES.items():
        monkeypatch.setattr(worker_room, name, fake)
    return []


def answer(
    events: list[dict[str, Any]],
    *acts: str,
    mode: str = "quick",
    limit: int | None = None,
    careful: bool = False,
    device: FakeDevice | None = None,
    regime: Regime = Regime(),  # noqa: B008
    problem: Problem = PROBLEM,
) -> bool:
    made = Ask(
        problem,
        regime,
        mode,
        1,
        KERNEL,
        [(Config("toy", {"act": act}), {"main": KERNEL}) for act in acts],
        rounds=20,
        max_workspace=limit,
    )
    on: Any = device or FakeDevice()
    members = {"toy": Toy(), "vendor": Vendor()}
    served = Worker(on, DEFAULT_GPU, members, lambda event: events.append(dict(event)))
    return served.answer(made.to_json(range(len(acts)), careful))


def results(events: list[dict[str, Any]]) -> list[Outcome]:
    return [Outcome.from_json(e["outcome"]) for e in events if e["event"] == "result"]


def test_a_quick_request(events: list[dict[str, Any]]) -> None:
    assert answer(events, "ok", "ok")
    assert [r.latency_us for r in results(events)] == [50.0, 50.0]
    assert results(events)[0].workspace_bytes == 336 and results(events)[0].error == 1e-4
    assert events[-1] == {"event": "done"}
    phases = [e["what"] for e in events if e["event"] == "phase" and e["index"] == 1]
    assert phases == [
        "loading",
        *("reference, planted", "check, planted", "reference, random", "check, random"),
        *("timing", "check after timing"),
    ]


def test_kernels_are_profiled_unchecked(events: list[dict[str, Any]]) -> None:
    FakeGate.verdicts = [Verdict(Status.WRONG_RESULT, 0.3, "off")]
    answer(events, "ok", mode="kernels")
    assert [(r.status, r.latency_us) for r in results(events)] == [(Status.OK, 9.0)]
    assert FakeGate.verdicts  # nothing was examined


def test_a_product_before_the_call_leaves_other_inputs_which_are_not_checked_again(
    events: list[dict[str, Any]],
) -> None:
    good = Verdict(Status.OK, 1e-4)
    FakeGate.verdicts = [good, good, Verdict(Status.WRONG_RESULT, 0.3, "off")]
    answer(events, "ok", regime=Regime("stream_gemm", "warm"))
    assert results(events)[0].status is Status.OK


def test_a_probe_is_not_timed(events: list[dict[str, Any]]) -> None:
    answer(events, "ok", mode="probe")
    assert results(events)[0].status is Status.OK and results(events)[0].latency_us is None


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_probe_of_the_log_sum_exp_checks_it_too(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    monkeypatch.setattr(FakeGate, "is_lse_wrong", is_wrong)
    answer(events, "ok", mode="probe_lse", problem=AttentionProblem.parse("S=64,D=64"))
    (outcome,) = results(events)
    assert outcome.status is (Status.WRONG_RESULT if is_wrong else Status.OK)
    assert outcome.latency_us is None and outcome.error == (None if is_wrong else 1e-4)
    assert ("log-sum-exp" in outcome.log) == is_wrong


def test_a_failed_check_ends_a_candidate(events: list[dict[str, Any]]) -> None:
    FakeGate.verdicts = [Verdict(Status.OK, 1e-4), Verdict(Status.WRONG_RESULT, 0.3, "off")]
    answer(events, "ok", "ok")
    assert [r.status for r in results(events)] == [Status.WRONG_RESULT, Status.OK]
    assert (results(events)[0].error, results(events)[0].log) == (0.3, "off")


def test_a_result_that_goes_wrong_under_load_is_wrong(events: list[dict[str, Any]]) -> None:
    good = Verdict(Status.OK, 1e-4)
    FakeGate.verdicts = [good, good, Verdict(Status.WRONG_RESULT, 0.3, "off")]
    answer(events, "ok")
    (outcome,) = results(events)
    assert outcome.status is Status.WRONG_RESULT and outcome.latency_us is None
    assert outcome.log == "when launched repeatedly, off"


def test_too_fast_is_a_failure(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStopwatch, "latency_us", 0.01)
    answer(events, "ok")
    assert results(events)[0].status is Status.TOO_FAST
    assert results(events)[0].latency_us is None


def test_a_sticky_error_ends_the_process(events: list[dict[str, Any]]) -> None:
    assert not answer(events, "ok", "sticky", "ok")
    assert [r.status for r in results(events)] == [Status.OK, Status.ILLEGAL_ACCESS]
    assert events[-1]["fatal"] and {"event": "done"} not in events


def test_any_exception_is_a_status_with_its_trace(events: list[dict[str, Any]]) -> None:
    assert answer(events, "raises", "ok")
    assert [r.status for r in results(events)] == [Status.LAUNCH_ERROR, Status.OK]
    assert "KeyError: 'tile_q'" in results(events)[0].log


def test_workspace_has_a_limit(events: list[dict[str, Any]]) -> None:
    answer(events, "ok", limit=319)
    assert results(events)[0].status is Status.OUT_OF_MEMORY
    assert results(events)[0].log == "320 bytes of workspace are needed, 319 are allowed"


def test_finalists_are_timed_together(events: list[dict[str, Any]]) -> None:
    FakeGate.verdicts = [Verdict(Status.NOT_FINITE, None, "NaN")]
    assert answer(events, "ok", "ok", "ok", mode="final")
    assert [r.status for r in results(events)] == [Status.NOT_FINITE, Status.OK, Status.OK]
    assert [r.rounds for r in results(events)] == [0, 20, 20]
    assert [r.log for r in results(events)[1:]] == ["again 50.0000 us", ""]
    assert events[-1] == {"event": "done"}


def test_kernels_of_a_finalist_are_timed_one_by_one(events: list[dict[str, Any]]) -> None:
    answer(events, "two", mode="final")
    said = "alone scores 50.00 us, output 50.00 us; between launches -50.00 us"
    assert [r.log for r in results(events)] == [f"again 50.0000 us\n{said}"]


@pytest.mark.parametrize("mode", ["quick", "final"])
def test_whatever_becomes_of_a_candidate_it_is_closed(
    events: list[dict[str, Any]], mode: str
) -> None:
    FakeGate.verdicts = [Verdict(Status.NOT_FINITE, None, "NaN")]
    device = FakeDevice()
    assert answer(events, "ok", "not captured", "raises", "ok", mode=mode, device=device)
    said = {e["index"]: e["outcome"]["status"] for e in events if e["event"] == "result"}
    assert said == {0: "not_finite", 1: "launch_error", 2: "launch_error", 3: "ok"}
    assert not device.open


def test_finalists_are_closed_when_the_gate_fails_before_their_timing(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, load = FakeDevice(), FakeGate.load

    def fail(gate: FakeGate, kind: str, with_lse: bool = False) -> None:
        if gate.examined == 4:
            raise BenchmarkError("no inputs")
        load(gate, kind, with_lse)

    monkeypatch.setattr(FakeGate, "load", fail)
    assert answer(events, "ok", "ok", mode="final", device=device)
    assert events[-1]["event"] == "failed" and not device.open


@pytest.mark.parametrize("mode", ["quick", "final"])
@pytest.mark.parametrize("examined", [1, 3], ids=["checked", "timed"])
def test_what_the_gate_cannot_judge_is_not_held_against_a_candidate(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, mode: str, examined: int
) -> None:
    monkeypatch.setattr(FakeGate, "broken", (examined,))
    device = FakeDevice()
    assert answer(events, "ok", mode=mode, device=device)
    said = {"event": "failed", "status": "launch_error", "log": "the reference is not finite"}
    assert events[-1] == said
    assert not results(events) and not device.open


def test_a_lost_context_is_nothing_to_close(events: list[dict[str, Any]]) -> None:
    """Closing would fail, and blame the gate for it."""
    assert not answer(events, "ok", "sticky", "ok", mode="final")
    assert (events[-1]["index"], events[-1]["fatal"]) == (1, True)
    assert {e["event"] for e in events} == {"phase", "result"}


WHEN_TIMED = [
    ("sticky when timed", Status.ILLEGAL_ACCESS, "CUDA error 700"),
    ("refused when timed", Status.LAUNCH_ERROR, "CUDA error 1"),
]


@pytest.mark.parametrize(("act", "status", "words"), WHEN_TIMED)
def test_a_fault_among_finalists_ends_the_process_and_care_names_whose_it_is(
    events: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    act: str,
    status: Status,
    words: str,
) -> None:
    assert not answer(events, "ok", act, "ok", mode="final")
    assert events[-1]["event"] == "phase" and events[-1]["index"] is None
    assert not results(events) and words in capsys.readouterr().err
    assert not answer(events, "ok", act, "ok", mode="final", careful=True)
    assert {e["event"] for e in events} == {"phase", "result"}
    assert (events[-1]["index"], events[-1]["fatal"]) == (1, True)
    [outcome] = results(events)
    assert (outcome.status, outcome.log) == (status, words)


#: The worker's own `main` on the fakes of this file.
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
    client = WorkerClient(command=[sys.executable, str(faked), __file__])
    outcomes = client.measure(replace(ask("ok", act, "ok", mode="final"), rounds=20))
    client.close()
    assert [o.status for o in outcomes] == [Status.OK, status, Status.OK]
    assert [o.rounds for o in outcomes] == [20, 0, 20] and outcomes[1].log == words


def test_signals_to_everybody_leave_the_worker_to_its_driver(tmp_path: Path) -> None:
    """A service manager sends them to each process: no candidate is to be blamed for its end."""
    faked = tmp_path / "faked_worker.py"
    faked.write_text(FAKED)
    client = WorkerClient(command=[sys.executable, str(faked), __file__])
    client.measure(ask("ok"))
    pid = client.pid
    assert pid is not None
    for number in ENDING_SIGNALS:
        os.kill(pid, number)
    assert client.measure(ask("ok"))[0].status is Status.OK
    assert client.pid == pid
    client.close()


def test_vendors_tell_their_versions(events: list[dict[str, Any]]) -> None:
    device: Any = FakeDevice()
    served = Worker(device, DEFAULT_GPU, {"v": Vendor()}, lambda e: events.append(dict(e)))
    assert served.answer({"mode": "environment"})
    assert {"event": "facts", "facts": {"cudnn": "9.19"}} in events


def test_a_library_s_candidates_come_from_the_worker(client: WorkerClient) -> None:
    assert client.listing(PROBLEM, "toy", 7) == [Config("toy", {"most": 7})]
    assert client.listing(PROBLEM, "lost", None) == []
    assert client.listing(PROBLEM, "toy", 8) == [Config("toy", {"most": 8})], "a fresh process"


class Listed(Vendor):
    name = "vendor_listed"

    def listing(self, problem: Any, max_workspace: int | None) -> list[Config]:
        if max_workspace == 0:
            raise OSError("no such library")
        return [Config(self.name, {"kernel": "listed", "n": max_workspace or problem.m})]


@pytest.mark.parametrize(
    ("most", "configs", "reason"), [(None, [512], ""), (3, [3], ""), (0, [], "no such library")]
)
def test_a_worker_lists_what_a_library_has(
    events: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    most: int | None,
    configs: list[int],
    reason: str,
) -> None:
    monkeypatch.setattr(worker_room, "import_torch", lambda device: None)
    device: Any = FakeDevice()
    served = Worker(device, DEFAULT_GPU, {"f": Listed()}, lambda e: events.append(dict(e)))
    request = {"mode": "listing", "family": "f", "problem": PROBLEM.to_json()}
    assert served.answer({**request, "max_workspace": most})
    phase, listing, done = events
    assert phase["allow_s"] == worker_room.VENDOR_ALLOWANCE_S and done == {"event": "done"}
    assert [config["params"]["n"] for config in listing["configs"]] == configs
    assert listing["reason"] == reason
