"""The families' estimates: constants, their fit, and the order that they give recorded sweeps."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bare_family import BareFamily
from fused_configs import maker
from shipped_recordings import FILES, read_once

from tuner import cli
from tuner.base import resources
from tuner.config import Config
from tuner.families import families, families_of
from tuner.families.base import Domain
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import (
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    Problem,
    SoftmaxProblem,
)
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.search.fits import cost_fit as cost
from tuner.search.fits.cost_fit import CostFits

FITTED = {name: f for name, f in families().items() if f.cost_constants}
PROBLEMS: dict[str, list[Problem]] = {
    "attention": [
        AttentionProblem.parse(text)
        for text in (
            "S=1024,D=64",
            "S=4096,D=128,causal=1",
            "B=4,H=32,HKV=8,SQ=1,SKV=8192,D=128",
            "B=64,H=128,HKV=1,SQ=1,SKV=4096,D=576,DV=512,page_size=64",
            "B=64,H=16,HKV=1,SQ=1,SKV=4096,D=576,DV=512,page_size=64",
        )
    ],
    "attention_backward": [
        AttentionBackwardProblem.parse(text)
        for text in ("S=1024,D=64", "B=4,H=32,HKV=8,S=2048,D=128,causal=1")
    ],
    "gemm": [GemmProblem(4096, 4096, 4096), GemmProblem(16, 14336, 4096)],
    "softmax": [SoftmaxProblem(1024, 1024, 16)],
}
WIDE, SPREAD = 100, 1.3


@pytest.mark.parametrize("name", FITTED)
def test_every_constant_counts_somewhere(name: str) -> None:
    """A constant that changes no estimate is not one of the estimate's."""
    family = FITTED[name]
    samples = [
        (problem, config)
        for problem in [*PROBLEMS[family.op], *MORE.get(family.op, ())]
        for config in family.space(problem, DEFAULT_GPU)
    ]
    assert all(value > 0 for value in family.constants.values())
    for constant, value in family.constants.items():
        other = family.refitted({**family.constants, constant: 100 * value})
        less = family.refitted({**family.constants, constant: value / 100})
        assert any(
            len({f.predict_us(p, c, DEFAULT_GPU) for f in (family, other, less)}) > 1
            for p, c in samples
        ), constant


#: A call a batch, which grouped heads of a strided layout need.
MORE: dict[str, list[Problem]] = {
    "attention_backward": [AttentionBackwardProblem.parse("S=1024,D=64,deterministic=1")],
    "attention": [
        AttentionProblem.parse("B=3,H=8,HKV=2,S=1024,D=64,layout=bshd"),
        AttentionProblem.parse("S=1000,D=64"),
    ],
    "gemm": [
        GemmProblem(512, 512, 16384),
        GemmProblem(8192, 8192, 128, dtype_d="float32"),
        GemmProblem(1, 4096, 4096),
    ],
    "softmax": [SoftmaxProblem(64, 65536, 1), SoftmaxProblem(512, 999, 1)],
}


def test_shipped_fits_name_the_constants_that_there_are() -> None:
    files = sorted((resources.cache() / "cost").glob("*.json"))
    assert files
    for file in files:
        document = json.loads(file.read_text())
        assert set(document["constants"]) == set(FITTED[file.stem].cost_constants), file.name


@functools.cache
def wide() -> list[Any]:
    """The recordings of many unlike candidates, in the regime that estimates stand for.

    Searches of several days add up to many, too; but what they measure looked good: the slowest
    tenth of it is hardly slower than two machines differ, and its order says little.
    """
    found = []
    for part in CostFits([read_once(file) for file in FILES]).parts:
        for name in sorted({m.config.family for m in part.measurements} & set(FITTED)):
            measured = cost.measured(name, part)
            times = sorted(m.latency_us for m in measured if m.latency_us)
            if len(times) >= WIDE and times[len(times) * 9 // 10] >= SPREAD * times[0]:
                label = f"{name}-{part.problem.label()}"
                found.append(pytest.param(name, part, measured, id=label))
    return found


@pytest.mark.parametrize(("name", "part", "measured"), wide())
def test_wide_recordings_are_put_in_order(
    name: str, part: Recording, measured: list[Measurement]
) -> None:
    stats = pytest.importorskip("scipy.stats", reason="a rank correlation needs scipy")
    predicted = [FITTED[name].predict_us(part.problem, m.config, part.gpu) for m in measured]
    assert stats.spearmanr(predicted, [m.latency_us for m in measured]).statistic >= 0.75


def test_what_ships_is_the_fit_to_the_recordings() -> None:
    """The family that is fitted fastest stands for all."""
    pytest.importorskip("scipy", reason="fits need scipy")
    fits = CostFits([read_once(file) for file in FILES])
    assert fits.constants(FITTED["gemv"]) == pytest.approx(FITTED["gemv"].constants, rel=0.01)


class Toy(BareFamily):
    name = "toy"
    op = "gemm"
    domains: ClassVar[Mapping[str, Domain]] = {"x": tuple(range(1, 60))}
    cost_constants: ClassVar[Mapping[str, float]] = {"slope": 1.0, "fixed": 1.0}

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config(self.name, {"x": x}) for x in range(1, 60)]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return float(self.constants["fixed"] + self.constants["slope"] * config["x"])


def recorded(problem: Problem, slope: float, fixed: float) -> Recording:
    regime = Regime.default(problem.op).chained
    return Recording(
        problem,
        DEFAULT_GPU,
        regime,
        Environment({"driver": "1"}),
        tuple(
            Measurement(
                problem, c, DEFAULT_GPU, regime, Status.OK, latency_us=fixed + slope * c["x"]
            )
            for c in Toy().space(problem, DEFAULT_GPU)
        ),
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    pytest.importorskip("scipy", reason="fits need scipy")
    toy = Toy()
    monkeypatch.setattr(cost, "families", lambda: {"toy": toy})
    monkeypatch.setattr(cost, "families_of", lambda op: {"toy": toy})
    return toy


def test_a_fit_finds_what_was_planted(toy: Toy) -> None:
    parts = [recorded(GemmProblem(size, size, size), 2.0, 3.0) for size in (256, 512)]
    found = CostFits(parts).constants(toy)
    assert found["slope"] == pytest.approx(2.0, rel=0.05)
    assert found["fixed"] == pytest.approx(3.0, rel=0.05)


def test_what_is_left_out_has_no_say(toy: Toy) -> None:
    first, second = (recorded(GemmProblem(size, size, size), 2.0, 3.0) for size in (256, 512))
    strange = recorded(second.problem, 9.0, 0.1)
    one, other = CostFits([first, second]), CostFits([first, strange])
    assert one.constants(toy, second) == other.constants(toy, strange)
    assert one.constants(toy) != other.constants(toy)
    (family,) = other.without(strange)
    assert family.constants == other.constants(toy, strange)


def test_the_fit_is_stored_as_it_ships(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (256, 512):
        part = recorded(GemmProblem(size, size, size), 2.0, 3.0)
        recording.write(tmp_path / f"{size}{recording.SUFFIX}", part)
    monkeypatch.setattr(resources, "cache", lambda: tmp_path)
    assert cli.main(["fit", "cost", str(tmp_path), "--only", "toy", "--write"]) == 0
    assert "toy: 2 measured; mean loss as it ships" in (said := capsys.readouterr().out)
    document = json.loads((tmp_path / "cost" / "toy.json").read_text())
    assert f"toy: slope      1   {document['constants']['slope']:.4g}" in said
    assert document["constants"]["slope"] == pytest.approx(2.0, rel=0.05)
    assert document["errors"] in said and "left out 0." in document["errors"]
    assert cli.main(["fit", "cost", str(tmp_path), "--only", "tox"]) == cli.WRONG_INPUT
    assert "family 'tox' has no fit (allowed: toy)" in capsys.readouterr().err


def test_another_regime_is_another_thing(toy: Toy) -> None:
    part = recorded(GemmProblem(256, 256, 256), 2.0, 3.0)
    fit = CostFits([replace(part, regime=Regime("chained", "warm"))])
    assert fit.parts == []
    assert fit.constants(toy) == dict(toy.cost_constants)


def test_decoding_is_estimated_with_cold_caches() -> None:
    decoding = AttentionProblem.parse("B=1,H=32,HKV=8,SQ=1,SKV=1024,D=128")
    assert cost.estimated(decoding) == Regime("chained", "cold")
    assert cost.estimated(AttentionProblem.parse("S=1024,D=64")) == Regime("chained", "warm")
    assert cost.estimated(AttentionProblem.parse("S=32,D=64")) == Regime("chained", "warm")
    assert cost.estimated(GemmProblem(1, 4096, 4096)) == Regime("chained", "cold")


def attention_us(text: str, **params: int | bool | str) -> float:
    problem = AttentionProblem.parse(text)
    if problem.heads_q > problem.heads_kv:
        params.setdefault("packed_heads", problem.heads_q // problem.heads_kv)
    shape = (
        params.pop("warp_groups", 1),
        params.pop("tile_n", 128),
        params.pop("score_buffers", 1),
    )
    config = maker()(*shape, **params)
    assert FITTED["fused_attention"].accepts(problem, config, DEFAULT_GPU)
    return FITTED["fused_attention"].predict_us(problem, config, DEFAULT_GPU)


def test_partial_outputs_cost_by_their_bytes() -> None:
    """Combining 2 splits of one query is a launch; of 1024, megabytes."""
    few = "B=1,H=32,HKV=8,SQ=1,SKV=8192,D=128"
    assert attention_us(few, splits=2, combine="kernel") < 0.6 * attention_us(few)
    assert attention_us("S=1024,D=64", splits=2, combine="kernel") > attention_us("S=1024,D=64")


def test_an_eighth_cluster_of_sixteen_waits() -> None:
    """Recorded: 49.0 us against the 37.7 of as many blocks that are no cluster."""
    text = "B=1,H=32,HKV=8,SQ=1,SKV=32768,D=128"
    clustered = attention_us(text, splits=16, combine="cluster")
    assert clustered > 1.1 * attention_us(text, splits=16, combine="kernel")
    assert attention_us(text, splits=8, combine="cluster") < clustered


def test_queries_in_registers_pay_under_narrow_tiles() -> None:
    """Reading them costs shared memory once a step, however few keys it has; using them from
    registers costs every product.
    """
    text = "B=16,H=16,S=2048,D=64"
    shapes = ({"tile_n": 64}, {"tile_n": 128})
    gains = [
        attention_us(text, **shape) / attention_us(text, q_in_registers=True, **shape)
        for shape in shapes
    ]
    assert gains[0] > 1 > gains[1]


def test_families_of_one_operation_share_no_fit() -> None:
    found = [f.constants for f in families_of("attention").values() if f.cost_constants]
    assert len({id(c) for c in found}) == len(found)
    assert math.isfinite(sum(sum(c.values()) for c in found))


def test_a_family_with_other_constants_leaves_itself_alone() -> None:
    gemm = FITTED["gemm"]
    before = dict(gemm.constants)
    other = gemm.refitted({**before, "load_clocks": 1.0})
    assert other.constants["load_clocks"] == 1.0
    assert dict(gemm.constants) == before


def test_configs_of_another_version_are_not_accepted() -> None:
    gemm, problem = FITTED["gemm"], PROBLEMS["gemm"][0]
    legal = gemm.space(problem, DEFAULT_GPU)[0]
    assert gemm.accepts(problem, legal, DEFAULT_GPU)
    assert not gemm.accepts(problem, Config("gemm", {"tile": 1}), DEFAULT_GPU)

    class Raising(Toy):
        def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
            return ["too large"] if config["y"] > 3 else []

    assert not Raising().accepts(problem, Config("toy", {"x": 1}), DEFAULT_GPU)
