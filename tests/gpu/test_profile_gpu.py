"""Nsight Compute counts one call of a kernel, where it is installed and may read the counters."""

from __future__ import annotations

import pytest

from tuner.compile.compiler import Compiler
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device, nsight, profile
from tuner.measure.gate import REFERENCE
from tuner.measurement import Environment, Regime
from tuner.problem import AttentionProblem

pytestmark = pytest.mark.gpu

PROBLEM = AttentionProblem.parse("S=1024,D=64")
FAMILY = family("fused_attention")
(CONFIG,) = FAMILY.seeds(PROBLEM, DEFAULT_GPU, FAMILY.space(PROBLEM, DEFAULT_GPU), 1)


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *FAMILY.kernels(PROBLEM, CONFIG).values()]


def test_one_call_is_counted(compiler: Compiler) -> None:
    gpu = device.detect()
    assert gpu is not None
    try:
        ncu = nsight.find_ncu()
    except BenchmarkError as exc:
        pytest.skip(str(exc))
    specs = FAMILY.kernels(PROBLEM, CONFIG)
    (_, gate), *made = compiler.submit([REFERENCE, *specs.values()])
    artifacts = {name: future.result() for name, (_, future) in zip(specs, made, strict=True)}
    regime = Regime.default("attention")
    try:
        found = nsight.profile(
            ncu, PROBLEM, CONFIG, gpu, regime, gate.result(), artifacts, Environment()
        )
    except BenchmarkError as exc:
        if nsight.NOT_PERMITTED in str(exc):
            pytest.skip(str(exc))
        raise
    launches = FAMILY.launches(PROBLEM, CONFIG, 1.0)
    assert len(found.kernels) == len(launches), [k.kernel for k in found.kernels]
    shares = {counter.label: value.value for counter, value in found.main.shown(profile.SHARES)}
    assert 5 < shares["tensor cores"] <= 100
    assert 5 < shares["special-function units"] <= 100
    assert 0 < shares["issue slots"] <= 100
    duration, clock = (found.main.get(name) for name in (profile.DURATION, profile.CLOCK))
    assert duration is not None and 3_000 < duration < 200_000, "nanoseconds"
    assert clock is not None and 2e8 < clock < 3e9, "hertz"
    missing = {c.metric for c in profile.COUNTERS} - set(found.main.counters)
    print(f"counters that this ncu or chip lacks: {sorted(missing) or 'none'}")
    assert len(missing) < len(profile.COUNTERS) / 4
