"""Proposals of the default sampler on two recordings that ship, group by group.

The estimate of a config is its recorded time to the nearest half doubling, so that a new fit of a
cost model changes nothing here.
"""

from __future__ import annotations

import math
from collections import deque

import pytest
from shipped_recordings import FILES, read_once

from tuner.config import Config
from tuner.families import families_of
from tuner.families.base import Family, group_by_kernels
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.runners import recording
from tuner.search.family_search import FamilySearch
from tuner.search.study import Search
from tuner.store.entry import is_vendor

ATTENTION = "attention-B4_H16_S2048_D128_dtypefp16-H200-graph-warm"
GEMM = "gemm-M512_N512_K512_B64_dtypefp16-H200-graph-cold"
PAST = {
    ATTENTION: "attention-B2_H16_S8192_D128_dtypefp16-H200-graph-warm",
    GEMM: "gemm-M4096_N4096_K4096_dtypefp16-H200-graph-cold",
}
#: Positions of the first 24 groups among the recorded ones, in the order of their results, by
#: recording and groups in flight.
PROPOSED = {
    (ATTENTION, 1): "12 40 71 62 35 34 39 2 50 42 9 28 22 49 59 21 53 60 16 26 78 15 1 25",
    (ATTENTION, 4): "12 40 71 62 35 34 51 3 58 39 42 21 45 36 9 28 59 55 63 49 25 53 26 48",
    (GEMM, 1): "107 100 113 112 57 12 64 98 35 7 0 33 83 40 108 36 110 70 19 118 73 4 90 80",
    (GEMM, 4): "107 70 64 36 100 113 112 98 108 35 19 33 0 110 7 57 83 80 40 4 12 90 118 73",
}


def quick(name: str) -> dict[Config, Measurement]:
    recorded = read_once(next(f for f in FILES if f.name == f"{name}{recording.SUFFIX}"))
    own = [m for m in recorded.measurements if not m.is_final and not is_vendor(m.config)]
    known = families_of(recorded.problem.op)
    return {m.config: m for m in own if known[m.config.family].accepts(m.problem, m.config, m.gpu)}


def rough(us: float | None) -> float:
    return 1e4 if us is None else 2 ** (round(2 * math.log2(us)) / 2)


def proposed(name: str, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    recorded, past = quick(name), quick(PAST[name])
    first = next(iter(recorded.values()))
    times = {(m.problem, m.config): m.latency_us for m in (*recorded.values(), *past.values())}

    def estimate(self: Family, problem: Problem, config: Config, gpu: Gpu) -> float:
        return rough(times[problem, config])

    members, place = [], {}
    for family in families_of(first.problem.op).values():
        space = [config for config in recorded if config.family == family.name]
        for group in group_by_kernels(family, space):
            place[family.name, family.compile_digest(group[0])] = len(place)
        if not space:
            continue
        monkeypatch.setattr(type(family), "predict_us", estimate)
        made = FamilySearch(
            family,
            first.problem,
            first.gpu,
            space,
            seeds=6,
            sampler="model",
            seed=0,
            raced=2,
            history=list(past.values()),
        )
        members.append(made)
    search = Search(members, 24, 6)
    asked: list[int] = []
    queue: deque[list[Config]] = deque()
    while True:
        while len(queue) < in_flight and (group := search.ask()) is not None:
            queue.append(group)
        if not queue:
            return list(dict.fromkeys(asked))
        told = queue.popleft()
        family = families_of(first.problem.op)[told[0].family]
        asked.append(place[family.name, family.compile_digest(told[0])])
        search.tell([recorded[config] for config in told])


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("name", [ATTENTION, GEMM], ids=["attention", "gemm"])
def test_the_model_proposes_what_it_did(
    name: str, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [int(n) for n in PROPOSED[name, in_flight].split()]
    assert proposed(name, in_flight, monkeypatch) == wanted
