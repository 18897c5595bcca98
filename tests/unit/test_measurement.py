"""Configs, measurements, regimes and the chip's description: equality, JSON, and the floor."""

from __future__ import annotations

import json

import pytest

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU, GPUS, gpu_by_name
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
    is_tie,
    regime_keys,
    speedup_text,
)
from tuner.problem import GemmProblem

CONFIG = Config("outer", {"pdl": True, "heads": 2}, {"qk": Config("gemm", {"tile_m": 64})})
MEASUREMENT = Measurement(
    GemmProblem(4096, 4096, 4096),
    CONFIG,
    DEFAULT_GPU,
    Regime("stream", "cold"),
    Status.OK,
    Provenance.MEASURED,
    Environment({"driver": "580", "power_limit_w": 700}),
    latency_us=200.0,
    std_us=1.0,
    rounds=20,
    is_final=True,
    flags=("noisy",),
    artifacts={"qk.gemm": "ab" * 16},
    resources={"qk.gemm": Resources(168, 0, 0, 0, 1024)},
    clocks=Clocks(1500, 3201, 60, 690.0, ("sw_power_cap",)),
)


def test_a_measurement_survives_json() -> None:
    again = Measurement.from_json(json.loads(json.dumps(MEASUREMENT.to_json())))
    assert again == MEASUREMENT
    assert again.config.stages["qk"]["tile_m"] == 64
    assert again.tflops == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)


def test_a_speedup_is_above_one_where_this_kernel_is_faster() -> None:
    slower = MEASUREMENT.but(latency_us=258.0)
    assert MEASUREMENT.speedup(slower) == pytest.approx(1.29)
    assert slower.speedup(MEASUREMENT) == pytest.approx(200 / 258)


def test_times_of_two_passes_have_no_speedup() -> None:
    quick = MEASUREMENT.but(is_final=False)
    assert MEASUREMENT.speedup(quick) is None and quick.speedup(MEASUREMENT) is None
    assert quick.speedup(quick) == 1.0
    failed = MEASUREMENT.but(status=Status.TIMEOUT, latency_us=None)
    assert MEASUREMENT.speedup(failed) is None and failed.speedup(MEASUREMENT) is None


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.289, "1.29x cudnn"),
        (1.0, "1.00x cudnn"),
        (0.996, "1.00x cudnn"),
        (0.994, "0.99x cudnn, slower"),
        (0.86, "0.86x cudnn, slower"),
    ],
)
def test_a_loss_looks_like_one(ratio: float, text: str) -> None:
    assert speedup_text(ratio, "cudnn") == text


def test_whoever_knows_the_noise_says_what_is_slower() -> None:
    assert speedup_text(0.98, is_slower=False) == "0.98x"
    assert speedup_text(0.98) == "0.98x, slower"


def test_order_of_parameters_does_not_matter_and_values_do() -> None:
    same = Config("outer", {"heads": 2, "pdl": True}, dict(CONFIG.stages))
    assert same == CONFIG and hash(same) == hash(CONFIG)
    assert Config("outer", {"heads": 2, "pdl": 1}, dict(CONFIG.stages)) != CONFIG
    assert Config("outer", dict(CONFIG.params)) != CONFIG


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"params": {}},
        {"family": "gemm", "params": {"tile": 1.5}},
        {"family": "gemm", "params": [], "stages": {}},
        {"family": "gemm", "params": {}, "more": 1},
    ],
)
def test_what_is_no_config_is_refused(data: object) -> None:
    with pytest.raises(ConfigError):
        Config.from_json(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["problem", "config", "gpu", "regime", "status"])
def test_what_is_no_measurement_is_refused(field: str) -> None:
    data = MEASUREMENT.to_json()
    del data[field]
    with pytest.raises(ConfigError):
        Measurement.from_json(data)


def test_regimes() -> None:
    assert str(Regime.default("gemm")) == "stream-cold"
    assert str(Regime.default("attention")) == "stream-warm"
    assert Regime.parse("eager-cold") == Regime("eager", "cold")
    for text in ("stream", "stream-hot", "lazy-warm"):
        with pytest.raises(ConfigError, match="allowed"):
            Regime.parse(text)


def test_environments_are_equal_by_facts() -> None:
    assert Environment({"a": 1, "b": 2}).digest == Environment({"b": 2, "a": 1}).digest
    assert Environment({"a": 1}).digest != Environment({"a": 2}).digest


def test_nothing_beats_the_floor() -> None:
    gpu = GPUS["H200"]
    problem = GemmProblem(4096, 4096, 4096)
    # 137 GFLOP at 1070 TFLOP/s, H200 at 1980 MHz; the fastest measured is 178 us.
    assert gpu.floor_us(problem.flops, problem.bytes) == pytest.approx(128.4, abs=0.1)
    # A gigabyte, less what L2 may hold, at 4.8 TB/s.
    assert gpu.floor_us(0, 10**9) == pytest.approx((10**9 - gpu.l2_bytes) / 4.8e6)
    assert gpu.floor_us(0, gpu.l2_bytes) == 0


def test_gpus_by_name() -> None:
    assert gpu_by_name("h200") is gpu_by_name("NVIDIA H200") is GPUS["H200"]
    assert len({gpu.identity for gpu in GPUS.values()}) == len(GPUS)
    with pytest.raises(ConfigError, match=r"'B200' is not known \(allowed: H200, H100"):
        gpu_by_name("B200")


def test_the_chained_regime_is_stored_under_its_earlier_name() -> None:
    chained = Regime("chained", "warm")
    assert (str(chained), chained.key) == ("chained-warm", "graph-warm")
    assert Regime.parse("graph-warm") == Regime.parse("chained-warm") == Regime("graph") == chained
    assert MEASUREMENT.but(regime=chained).to_json()["regime"] == "graph-warm"
    stream = Regime("stream", "cold")
    assert (str(stream), stream.key) == ("stream-cold", "stream-cold")
    assert regime_keys([stream, chained]) == ["stream-cold", "graph-warm"]


def test_regimes_are_chosen_by_what_is_named() -> None:
    def texts(*arguments: str | None) -> list[str]:
        return [str(one) for one in Regime.choices(*arguments)]  # type: ignore[arg-type]

    assert texts("attention") == ["stream-warm", "chained-warm", "stream-cold", "chained-cold"]
    assert texts("gemm") == ["stream-cold", "chained-cold", "stream-warm", "chained-warm"]
    assert texts("gemm", None, "warm") == ["stream-warm", "chained-warm"]
    assert texts("gemm", "graph", None) == ["chained-cold"]
    assert texts("attention", "eager", "cold") == ["eager-cold"]


@pytest.mark.parametrize(
    ("other", "std", "tie"), [(10.05, 0.05, True), (10.05, 0.01, False), (10.2, 1.0, False)]
)
def test_a_tie_is_within_the_noise_of_both_and_one_percent(
    other: float, std: float, tie: bool
) -> None:
    one = MEASUREMENT.but(latency_us=10.0, std_us=std)
    assert is_tie(one, one.but(latency_us=other)) == tie
    assert is_tie(one.but(latency_us=other), one) == tie
    assert not is_tie(one, one.but(latency_us=None))


def test_a_tie_is_never_called_slower() -> None:
    assert speedup_text(0.992, "cudnn", is_tie=True) == "0.99x cudnn, a tie"
    assert speedup_text(0.992, "cudnn") == "0.99x cudnn, slower"
