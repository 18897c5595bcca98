"""`scripts/bench cliffs --preset holes`: listed calls, their neighbours and the kernels of each."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest
from bench_device import fake_device, fake_gpu  # noqa: F401

from benchmarks import cliffs_holes, rows
from benchmarks.cliffs_holes import CANDIDATES, HOLES, further, neighbours, own_configs
from tuner.config import Config
from tuner.families import family
from tuner.families.by_operation import domain_of
from tuner.hardware import DEFAULT_GPU

NONE = Namespace(seed="0")


def test_neighbours_are_of_the_same_domains_and_depend_on_the_seed() -> None:
    near, other = neighbours(NONE), neighbours(Namespace(seed="1"))
    assert [hole.group for hole in near] == [hole.group for hole in HOLES]
    assert neighbours(NONE) == near
    moved = 0
    for hole, first, second in zip(HOLES, near, other, strict=True):
        assert domain_of(first.problem) == domain_of(hole.problem)
        keys = [hole.problem.seqlen_kv for hole in (hole, first, second)]
        assert all(0.6 * keys[0] - 1 <= each <= 1.6 * keys[0] for each in keys)
        moved += len(set(keys)) == 3
    assert moved > len(HOLES) * 0.8


def test_every_candidate_may_answer_a_listed_call_without_spills() -> None:
    used = set[tuple[object, Config]]()
    for hole in HOLES:
        problem, configs = hole.problem, own_configs(hole.problem)
        assert configs
        for config in configs:
            assert family(config.family).accepts(problem, config, DEFAULT_GPU)
        for one in further(problem):
            if any(one.params.items() <= config.params.items() for config in configs):
                used.add((domain_of(problem), one))
    wanted = {(domain_of(hole.problem), one) for hole in HOLES for one in further(hole.problem)}
    assert used == wanted and sum(map(len, CANDIDATES.values())) > 4


@pytest.mark.usefixtures("fake_device")
def test_the_fastest_own_kernel_is_named_and_has_a_table(monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    hole = next(one for one in HOLES if one.group == "decoding, D=256")
    problem = hole.problem
    first, second = own_configs(problem)[:2]

    def own_call(_: Any, config: Config) -> Any:
        if config == first:
            return lambda *tensors: sdpa(*tensors, enable_gqa=True)
        return (lambda *tensors: torch.zeros_like(tensors[0])) if config == second else None

    monkeypatch.setattr(cliffs_holes, "_own_call", own_call)
    from bench_device import on_the_cpu

    with on_the_cpu():
        row = cliffs_holes.measured(hole, NONE)
    assert Config.from_json(row["best"]) == first and row["us"][cliffs_holes.BEST] == 8.0
    assert row["wrong"] == [f"{rows.TUNER} {second.digest[:6]}"], "zeros are not timed"
    row |= {"case": hole.label, "group": hole.group}
    text = "\n".join(cliffs_holes.table([json.loads(json.dumps(row))]))
    assert text.count("decoding, D=256") == 2 and "the fastest own kernel" in text
