"""Calls of `scripts/bench own_calls`: of models that make selections, answered by own kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import own_calls
from benchmarks.population_tensors import posed
from tuner.hardware import GPUS
from tuner.problem.population import ModelCall, is_held_out, subset
from tuner.selection.domains import AttentionDomain, domain_of
from tuner.selection.portfolio import serving, shipped

H200 = GPUS["H200"]


@pytest.fixture(scope="module", params=["gemm", "attention"])
def found(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[ModelCall]]]:
    return request.param, own_calls.own(request.param, H200)


def test_own_kernels_answer_and_no_model_is_held_out(
    found: tuple[str, dict[str, list[ModelCall]]],
) -> None:
    _, by_label = found
    portfolios = {one.op: one for one in serving(shipped(), H200)}
    making = {model.name for model in subset(own_calls.MODELS) if not is_held_out(model)}
    for label, calls in by_label.items():
        for call in calls[:3]:
            problem = posed(call)
            domain = domain_of(problem)
            selection = portfolios[problem.op].select(problem)
            assert domain is not None and domain.label() == label and call.model in making
            assert selection is not None and next(selection.own(), None) is not None
            if isinstance(domain, AttentionDomain):
                assert not domain.has_softcap and domain.mask != "windowed"


def test_domains_take_turns_and_some_have_more_calls(
    found: tuple[str, dict[str, list[ModelCall]]],
) -> None:
    op, by_label = found
    calls = own_calls.by_turns(op, by_label)
    assert len(calls) == len({call.key for call in calls})
    keys = {label: [call.key for call in some] for label, some in by_label.items()}
    label_of = {key: label for label, some in keys.items() for key in some}
    first = [label_of[call.key] for call in calls[: len(by_label)]]
    often = next(label for label in sorted(by_label) if label.endswith(own_calls.OFTEN[op]))
    assert first.count(often) == min(own_calls.MORE[op], len(by_label[often]))
    for label, some in by_label.items():
        width = own_calls.MORE[op] if label.endswith(own_calls.OFTEN[op]) else 1
        count = sum(label_of[call.key] == label for call in calls)
        assert count == min(len(some), width * own_calls.MOST[op])


def test_the_list_says_who_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert own_calls.main(["--op", "attention", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "own kernel" in lines[0]
