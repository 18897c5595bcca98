"""A portfolio with two kernels and PyTorch's, for the runtime's calls in Python."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fused_configs import maker
from runtime_machine import PATTERN, SDPA, WRITTEN, Machine, inputs, same

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.families import families
from tuner.families.by_operation import AttentionDomain
from tuner.families.peers.sdpa import BACKENDS
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.problem import AttentionProblem
from tuner.selection.candidates import Candidate, DomainModels, Regret, Spread
from tuner.selection.kernels import PROVE
from tuner.selection.portfolio import Portfolio

torch = pytest.importorskip("torch", reason="torch is not installed")

SHAPE = (1, 2, 32, 64)
PROBLEM = AttentionProblem.parse("S=32,D=64,H=2")
FIRST, SECOND = maker()(2, 128), maker()(1, 64)
CUDNN, FLASH = (Config("vendor_sdpa", {"kernel": name}) for name in ("cudnn", "flash2"))
FUSED = families()["fused_attention"]


def candidate(config: Config, us: float) -> Candidate:
    """One whose time is always the same."""
    compiled = {k: v for k, v in config.params.items() if k != "splits"}
    spread = Spread(((1, 1 << 20), (1, 1 << 20)))
    return Candidate(Config(config.family, compiled), {"launch": us}, 20, 0.01, 0.02, spread)


def portfolio_of(*candidates: Candidate, margin: float = 2.0) -> Portfolio:
    domain, regret = AttentionDomain(64, "full", "prompt"), Regret(10, 0.01, 0.05, 1.1, 0.99, 0.9)
    models = DomainModels(domain, Regime(), candidates, margin, regret)
    return Portfolio("attention", DEFAULT_GPU, {domain: models})


class FusedKernel:
    """Writes a pattern to the output."""

    def __init__(self, key: str, launched: list[str]) -> None:
        self.key, self.launched = key, launched

    def workspace_bytes(self, integers: Sequence[int]) -> int:
        return 0

    def bind(self, integers: Sequence[int], scalars: Sequence[float]) -> Callable[..., None]:
        size = 2 * int(torch.tensor(integers[:2]).prod()) * integers[3] * integers[5]

        def launch(tensors: Sequence[int], workspace: int, stream: int) -> None:
            self.launched.append(self.key)
            ctypes.memset(tensors[3], PATTERN, size)

        return launch


class Serving:
    """A machine with a portfolio, and what is said of each of its kernels."""

    def __init__(self, machine: Machine, runtime: SimpleNamespace) -> None:
        self.machine, self.runtime = machine, runtime
        self.portfolio = portfolio_of(
            candidate(FIRST, 10.0), candidate(SECOND, 11.0), candidate(FLASH, 20.0)
        )
        self.proven: dict[str, str] = {}
        """By the tile of the kernel: its artifact, or why there is none."""
        self.launched: list[str] = []
        self.vendors: list[str] = []
        self.peers: set[str] = set()
        """Kernels of peers that are installed."""
        self.factor = 1
        """Factor by which results of vendors' kernels are wrong."""

    def says(self, specs: Any, capability: str) -> dict[str, str] | str:
        tile = str(specs["attention"].variables["tile_n"])
        found = self.proven.get(tile, f"a kernel is not proven ({PROVE})")
        return {"attention": found} if found.startswith("key") else found

    def family(self, name: str) -> Any:
        if name == "fused_attention":
            return FUSED
        if name == "vendor_sdpa":
            facts = {"name": name, "is_vendor": True, "is_listed": False}
            return SimpleNamespace(**facts, vendor_call=self.vendor_call)
        return self.machine.toy

    def load(self, artifact: Artifact) -> Any:
        is_toys = artifact.key in ("key-first", "key-second")
        return self.machine.load(artifact) if is_toys else FusedKernel(artifact.key, self.launched)

    def vendor_call(self, problem: Any, config: Config, scale: float) -> Any:
        if config["kernel"] not in (*BACKENDS, *self.peers):
            return f"{config['kernel']} is not here"

        def call(*tensors: Any) -> Any:
            self.vendors.append(config["kernel"])
            return SDPA(*tensors) * self.factor

        return call

    def call(self, shape: tuple[int, ...] = SHAPE) -> bool:
        """True when an own kernel answered."""
        tensors = inputs(shape)
        out = self.runtime.attention.attention(*tensors)
        own = bool((out == WRITTEN).all())
        assert own or same(out, SDPA(*tensors))
        return own

    @property
    def fallbacks(self) -> list[str]:
        return list(self.machine.stats().fallbacks)


@pytest.fixture
def portfolio_serving(
    machine: Machine, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Serving:
    made = Serving(machine, on_cpu)
    monkeypatch.setattr(on_cpu.proven_kernels, "portfolios", lambda: (made.portfolio,))
    monkeypatch.setattr(on_cpu.proven_kernels.lists, "proven", made.says)
    monkeypatch.setattr(on_cpu.proven_kernels, "pytorchs", lambda problem, device: "flash2")
    monkeypatch.setattr(on_cpu.plan, "family", made.family)
    monkeypatch.setattr(on_cpu.plan, "load", made.load)
    machine.present |= {"key-wide", "key-narrow"}
    made.proven = {"128": "key-wide", "64": "key-narrow"}
    return made


class Stopwatch:
    """The times of calls, and the bursts that were timed."""

    def __init__(self) -> None:
        self.us = {"key-wide": 9.0, "key-narrow": 5.0, "sdpa": 20.0}
        """Microseconds of a call by what it launches; PyTorch's under "sdpa"."""
        self.bursts = 0
        self.states: set[bool] = set()


@pytest.fixture
def portfolio_stopwatch(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """``TUNER_BENCHMARK=1`` without a GPU."""
    made = Stopwatch()

    def call_us(function: Callable[[], object], count: int, *, is_cold: bool) -> float:
        launched = [*serving.launched, *serving.vendors]
        function()
        new = Counter([*serving.launched, *serving.vendors]) - Counter(launched)
        made.bursts += 1
        made.states.add(is_cold)
        return made.us[next(iter(new), "sdpa")]

    monkeypatch.setattr(serving.runtime.devices, "call_us", call_us)
    monkeypatch.setenv("TUNER_BENCHMARK", "1")
    return made
