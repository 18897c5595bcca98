"""The worker's requests on fakes of its device, gate and stopwatch."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from worker_fakes import (
    FAKES,
    KERNEL,
    PROBLEM,
    WHEN_TIMED,
    FakeDevice,
    FakeGate,
    FakeStopwatch,
    Toy,
)

from tuner.base import resources
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.hardware import DEFAULT_GPU
from tuner.measure import worker as worker_room
from tuner.measure.request import CandidateOutcome
from tuner.measure.tolerance import Verdict
from tuner.measure.worker import Worker
from tuner.measure.worker_client import Ask
from tuner.measurement import Regime, Status
from tuner.problem import E4M3, AttentionProblem, GemmProblem, Problem


class Vendor(Toy):
    name, is_vendor = "vendor", True

    def environment(self) -> dict[str, str]:
        return {"cudnn": "9.19"}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    FakeGate.verdicts = []
    FakeGate.opened = []
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


def results(events: list[dict[str, Any]]) -> list[CandidateOutcome]:
    return [CandidateOutcome.from_json(e["outcome"]) for e in events if e["event"] == "result"]


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


@pytest.mark.parametrize("mode", ["quick", "final", "probe"])
@pytest.mark.parametrize("extent", [8192, 32768])
def test_a_final_pass_checks_a_sample_of_what_takes_long(
    events: list[dict[str, Any]], mode: str, extent: int
) -> None:
    answer(events, "ok", mode=mode, problem=GemmProblem(extent, extent, extent))
    assert FakeGate.opened == [mode == "final" and extent == 32768]


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


@pytest.mark.parametrize("mode", ["quick", "final", "probe"])
@pytest.mark.parametrize("fast_accum", [True, False])
def test_the_loss_of_all_positive_sums_is_a_flag_where_no_limit_judges_it(
    events: list[dict[str, Any]], mode: str, fast_accum: bool
) -> None:
    """As documents and the store take flags; elsewhere it is a part of the error."""
    FakeGate.verdicts = [Verdict(Status.OK, error) for error in (1e-4, 0.096, 2e-4)]
    problem = GemmProblem(512, 512, 512, dtype=E4M3, fast_accum=fast_accum)
    answer(events, "ok", mode=mode, problem=problem)
    (outcome,) = results(events)
    assert outcome.status is Status.OK
    assert outcome.flags == (("positive_sums_off_9.6e-02",) if fast_accum else ())
    assert outcome.error == (2e-4 if fast_accum else 0.096)
    schema = json.loads((resources.cache() / "schema" / "entries.schema.json").read_text())
    assert all(re.match(schema["$defs"]["name"]["pattern"], flag) for flag in outcome.flags)


@pytest.mark.parametrize(
    ("extent", "waits"),
    [
        (512, ["check, random"]),
        (
            8192,
            ["reference, planted", "check, planted", "reference, random", "check, random"],
        ),
    ],
    ids=["short", "long"],
)
def test_the_worker_waits_once_for_all_kinds_of_short_problems(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, extent: int, waits: list[str]
) -> None:
    """For a long reference it waits within that reference's allowance."""
    collected = list[str]()
    monkeypatch.setattr(FakeGate, "collect", lambda gate: collected.append(events[-1]["what"]))
    answer(events, "ok", mode="probe", problem=GemmProblem(extent, extent, extent))
    assert collected == waits


def test_a_candidate_that_overwrote_a_reference_runs_again_on_each_kind_alone(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, kinds = FakeGate.load, list[str]()

    def loading(gate: FakeGate, kind: str, with_lse: bool = False) -> None:
        kinds.append(kind)
        load(gate, kind, with_lse)

    monkeypatch.setattr(FakeGate, "load", loading)
    monkeypatch.setattr(FakeGate, "is_sound", False)
    answer(events, "ok", mode="probe")
    assert kinds == ["planted", "random"] * 2
    assert [r.status for r in results(events)] == [Status.OK]


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
    assert "CUDA error 700" in results(events)[1].log  # not only the launch that met it
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


def test_vendors_tell_their_versions(events: list[dict[str, Any]]) -> None:
    device: Any = FakeDevice()
    served = Worker(device, DEFAULT_GPU, {"v": Vendor()}, lambda e: events.append(dict(e)))
    assert served.answer({"mode": "environment"})
    assert {"event": "facts", "facts": {"cudnn": "9.19"}} in events


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
