"""The replay runner answers from a recording and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import stored

from tuner.config import Config
from tuner.families.base import Family
from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import GemmProblem, SoftmaxProblem
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner

PROBLEM, STAGE = SoftmaxProblem(64, 64), SoftmaxProblem(128, 64)
SOFTMAX: Family = Softmax()
SPACE = list(SOFTMAX.space(PROBLEM, DEFAULT_GPU))
BLAS = Config("vendor_softmax", {"kernel": "torch"})
REGIME = Regime()
ENVIRONMENT = Environment({"driver": "1"})


def made(
    config: Config, us: float | None, *, final: bool = False, stage: bool = False
) -> Measurement:
    status = Status.OK if us else Status.TIMEOUT
    facts: dict[str, Any] = {"regime": REGIME, "status": status, "latency_us": us}
    problem = STAGE if stage else PROBLEM
    return stored.final(config, 1.0, problem, environment=ENVIRONMENT, is_final=final, **facts)


def runner(*measurements: Measurement, stages: tuple[Recording, ...] = ()) -> ReplayRunner:
    return ReplayRunner(Recording(PROBLEM, DEFAULT_GPU, REGIME, ENVIRONMENT, measurements, stages))


def test_groups_come_back_in_order_as_replayed() -> None:
    replay = runner(made(SPACE[0], 5.0), made(SPACE[1], None))
    replay.submit(PROBLEM, SPACE[:1])
    replay.submit(PROBLEM, SPACE[1:2])
    (first,), (second,) = replay.collect(), replay.collect()
    assert (first.latency_us, second.status) == (5.0, Status.TIMEOUT)
    assert {first.provenance, second.provenance} == {Provenance.REPLAYED}
    assert replay.environment == ENVIRONMENT
    assert replay.provenance is Provenance.REPLAYED


def test_space_is_what_was_recorded() -> None:
    replay = runner(made(SPACE[2], 5.0), made(SPACE[0], 6.0))
    assert replay.candidates(PROBLEM, SOFTMAX, SPACE) == [SPACE[0], SPACE[2]]
    assert replay.candidates(GemmProblem(8, 8, 8), SOFTMAX, SPACE) == []


def test_recorded_candidates_stand_in_when_the_space_has_none() -> None:
    """As for a composite family whose best stages are others this time; legal ones only."""
    illegal = Config("softmax", {**SPACE[0].params, "threads_per_row": 7})
    replay = runner(made(SPACE[0], 5.0), made(illegal, 4.0))
    assert replay.candidates(PROBLEM, SOFTMAX, SPACE[1:]) == [SPACE[0]]


def test_what_was_not_recorded_does_not_exist() -> None:
    with pytest.raises(KeyError):
        runner(made(SPACE[0], 5.0)).submit(PROBLEM, SPACE[1:2])


def test_a_final_pass_leaves_out_what_the_recorded_one_did_not_time() -> None:
    replay = runner(made(SPACE[0], 5.0), made(SPACE[0], 5.2, final=True), made(SPACE[1], 4.0))
    (only,) = replay.retime(PROBLEM, SPACE[:2], 20)
    assert (only.config, only.latency_us, only.is_final) == (SPACE[0], 5.2, True)


def test_without_a_final_time_of_ours_every_time_is_of_the_quick_pass() -> None:
    replay = runner(
        made(SPACE[0], 5.0), made(SPACE[1], 4.0), made(BLAS, 4.5), made(BLAS, 6.0, final=True)
    )
    timed = replay.retime(PROBLEM, [*SPACE[:2], BLAS], 20)
    assert [(m.latency_us, m.is_final) for m in timed] == [(5.0, False), (4.0, False), (4.5, False)]


def test_own_finals_that_failed_do_not_make_a_final_pass() -> None:
    replay = runner(
        made(SPACE[0], 5.0),
        made(SPACE[0], None, final=True),
        made(BLAS, 4.5),
        made(BLAS, 6.0, final=True),
    )
    timed = replay.retime(PROBLEM, [SPACE[0], BLAS], 20)
    assert [(m.latency_us, m.is_final) for m in timed] == [(5.0, False), (4.5, False)]


def test_vendors_among_themselves_have_their_final_times() -> None:
    replay = runner(made(BLAS, 4.5), made(BLAS, 6.0, final=True))
    (only,) = replay.retime(PROBLEM, [BLAS], 20)
    assert (only.latency_us, only.is_final) == (6.0, True)


def test_a_final_time_does_not_pass_for_a_quick_one() -> None:
    replay = runner(made(SPACE[0], 5.0), made(SPACE[1], 5.2, final=True))
    assert replay.candidates(PROBLEM, SOFTMAX, SPACE) == [SPACE[0]]
    with pytest.raises(KeyError):
        replay.submit(PROBLEM, SPACE[1:2])


def test_a_final_alone_answers_the_quick_pass_too() -> None:
    replay = runner(made(SPACE[0], 5.2, final=True))
    replay.submit(PROBLEM, SPACE[:1])
    (m,) = replay.collect()
    assert (m.latency_us, m.is_final) == (5.2, False)


def test_stages_are_found_by_their_problem() -> None:
    stage = Recording(STAGE, DEFAULT_GPU, REGIME, ENVIRONMENT, (made(SPACE[0], 9.0, stage=True),))
    replay = runner(made(SPACE[0], 5.0), stages=(stage,))
    replay.submit(STAGE, SPACE[:1])
    (m,) = replay.collect()
    assert (m.problem, m.latency_us) == (STAGE, 9.0)
