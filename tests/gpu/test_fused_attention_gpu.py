"""Our own fused attention on the GPU, proven: see `fused_attention_proof`.

One fixture compiles a few dozen kernels and computes every case on those that can; the tests say
what must hold of what it found. TUNER_TEST_REPORT names a file for all errors as JSON,
TUNER_TEST_CONFIGS one with further configs (see `plan.given`).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from fused_attention_proof import cases, parent, plan
from fused_attention_proof.report import Report

from tuner.compiler import Compiler
from tuner.device import detect
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SECTIONS = list(dict.fromkeys(case.section for case in cases.drawn()))


@cache
def proven() -> list[plan.Kernel]:
    further = os.environ.get("TUNER_TEST_CONFIGS")
    return plan.everything(
        family("fused_attention"),
        detect() or DEFAULT_GPU,
        cases.drawn(),
        Path(further) if further else None,
    )


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    trials = plan.trials(member, gpu, proven(), cases.drawn())
    return plan.specs(member, [(trial.case.problem, trial.config) for trial in trials])


@pytest.fixture(scope="module")
def report(compiler: Compiler) -> Report:
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    found = parent.prove(member, gpu, proven(), cases.drawn(), compiler)
    if path := os.environ.get("TUNER_TEST_REPORT"):
        found.write(Path(path))
    parent.say(found.table())
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_kernel_is_right(report: Report, section: str) -> None:
    assert report.of(section)
    faults = report.faults(section)
    assert not faults, f"{len(faults)} faults, first: {faults[0]}"


def test_nothing_was_left_out(report: Report) -> None:
    """Each case was computed, and each compiled kernel launched with its every lever."""
    done = [trial for trial, found in report.results if found.frobenius is not None]
    assert {trial.case for trial in done} == set(cases.drawn())
    assert len({trial.case.problem for trial in done}) >= 200
    pairs = [(trial.case.problem, trial.config) for trial in done]
    assert set(plan.specs(family("fused_attention"), pairs)) == set(report.artifacts)


def test_most_cases_have_a_peer(report: Report) -> None:
    """FlashAttention-2 was there to be compared with wherever its mask is ours."""
    square = [
        found
        for trial, found in report.results
        if trial.case.problem.seqlen_q == trial.case.problem.seqlen_kv
    ]
    assert square
    assert all(found.peer is not None for found in square)


def test_every_lever_was_repeated(report: Report) -> None:
    """The same bits 100 times, with each value of each lever; split keys among them."""
    often = [trial.config for trial, found in report.results if found.repeats >= 100]
    repeated = {fact for config in often for fact in config.params.items()}
    assert {fact for trial, _ in report.results for fact in trial.config.params.items()} <= repeated
