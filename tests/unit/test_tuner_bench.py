"""`scripts/bench tuner`: its list of problems, the kernels beside a choice, and the figures."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from bench_device import fake_device, fake_gpu, on_the_cpu  # noqa: F401

from benchmarks import tuner_figures, tuner_sweeps, tuner_truth
from benchmarks.tuner_problems import PROMPTS
from tuner.config import Config
from tuner.problem import AttentionProblem, GemmProblem

PROBLEM = AttentionProblem.parse("S=512,D=64,H=8,dtype=bf16")
OWN, OTHER = (Config("fused_attention", {"tile_n": tile}) for tile in (64, 128))


def row(us: dict[str, float], **facts: Any) -> dict[str, Any]:
    """A row whose choice is `OWN`, named ``tuner`` as served."""
    base = {"case": "one", "group": PROMPTS, "problem": PROBLEM.to_json(), "near": {}}
    return {**base, "us": us, "choice": OWN.to_json(), "artifacts": {}, "kernels": 2, **facts}


def named(**us: float) -> dict[str, float]:
    names = {"own": tuner_truth.own_name(OWN), "other": tuner_truth.own_name(OTHER)}
    return {names.get(name, name): time for name, time in us.items()}


def test_regret_counts_what_the_tuner_may_answer_with() -> None:
    us = named(pytorch=10.0, tuner=8.4, own=8.5, other=8.0, flash3=7.0, control=1.0)
    us["tuner enabled"] = 2.0
    assert tuner_figures.regret(row(us)) == pytest.approx(8.45 / 8.0 - 1), "the twins' mean"
    assert tuner_figures.over_everything(row(us)) == pytest.approx(8.45 / 7.0 - 1)
    assert tuner_figures.regret(row(named(tuner=8.0, own=8.4, pytorch=8.3))) == 0.0
    assert tuner_figures.regret(row(us, judged="pytorch")) == pytest.approx(0.25)
    assert tuner_figures.regret(row({"pytorch": 1.0})) is None
    assert tuner_figures.regret(row(named(tuner=8.0, own=8.2))) == 0.0, "without others"


def test_transfer_is_what_is_served_at_neighbours_and_a_move_the_chosen_kernel_there() -> None:
    near = {"a": named(pytorch=9.0, own=8.8, other=8.0), "b": named(pytorch=9.0, tuner=9.9)}
    assert tuner_figures.transfers(row({}, near=near)) == [pytest.approx(0.1)]
    assert tuner_figures.moves(row({}, near=near)) == [pytest.approx(0.1)]
    moved = tuner_figures.moves(row({}, near=near, choice=None))
    assert moved == [pytest.approx(1 / 8), pytest.approx(0.0)]


def test_memory_is_read_until_the_sweep_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    read = threading.Event()

    def free_and_total(_: int) -> tuple[int, int]:
        if looks:
            read.set()
        looks.append(1)
        return (8 - len(looks)) << 20, 8 << 20

    looks: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(tuner_sweeps, "INTERVAL_S", 1e-3)
    with tuner_sweeps.used_mib() as values:
        assert values == [1.0] and read.wait(60)
    assert values == [float(n) for n in range(1, len(values) + 1)] and len(values) > 1
    assert not any(thread.name.endswith("(watch)") for thread in threading.enumerate())


def test_a_flip_is_slower_in_the_later_pass_by_more_than_a_tie() -> None:
    first = row(named(own=8.0, other=8.0))
    tied = row(named(own=8.0, other=8.07), choice=OTHER.to_json())
    slower = row(named(own=8.0, other=8.1), choice=OTHER.to_json())
    assert tuner_figures.flips([first, tied]) == (0, 1)
    assert tuner_figures.flips([first, slower, tied]) == (1, 2)
    assert tuner_figures.flips([slower, first]) == (0, 1), "the second one is faster"
    elsewhere = row({}, problem=GemmProblem(8, 8, 8).to_json())
    assert tuner_figures.flips([first, elsewhere]) == (0, 0)


def test_a_replay_is_the_same_kernel_by_the_same_machine_code() -> None:
    first = row(named(own=8.0), artifacts={"attention": "a"})
    changed = row(named(own=8.0), artifacts={"attention": "b"})
    assert tuner_figures.replays([first, first]) == (1, 1)
    assert tuner_figures.replays([first, changed]) == (0, 1)
    assert tuner_figures.replays([{**first, "replayed": True}]) == (1, 1)
