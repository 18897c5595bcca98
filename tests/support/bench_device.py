"""A GPU that is not there, for `benchmarks`: torch's tensors lie on the CPU, and times are by rule.

`fake_device` puts it in place of everything that a bench asks of a GPU. A contender is called with
every copy, as the stopwatch would. The tuner takes 8 us, everyone else 10.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.call_times import CONTROL, Contender, HostTimes, Times, first_line
from tuner.hardware import GPUS
from tuner.measure import device
from tuner.measurement import Environment

GPU = GPUS["H200"]
FACTS = {"driver": "580.1", "cuda": "13.0"}
FOLDER = Path(harness.__file__).parent


def us_of(name: str) -> float:
    return 8.0 if name.split()[0] == "tuner" else 10.0


def time_calls(
    contenders: Sequence[Contender], before: Callable[[int], Any], copies: int, budget_us: float = 0
) -> Times:
    us, failed = dict[str, float](), dict[str, str]()
    for contender in contenders:
        try:
            for i in range(copies):
                before(i)
                with contender.around():
                    contender.call(i)
            us[contender.name] = us_of(contender.name)
        except harness.FAILURES as exc:
            failed[contender.name] = first_line(exc)
    if contenders and contenders[0].name in us:
        us[CONTROL] = us[contenders[0].name]
    return Times(us, failed)


def time_host(contenders: Sequence[Contender], calls: int = 1, *_: Any, **__: Any) -> HostTimes:
    us = time_calls(contenders, lambda i: None, 1).us
    return HostTimes({name: [time] * 7 for name, time in us.items()})


class InProcess:
    """Stands for `Worker`: measures in this process, by the arguments of the child's command."""

    def __init__(self, command: Sequence[str], limit_s: float, gpu: str | None = None) -> None:
        _, name, *argv = command[command.index("benchmarks") - 1 :]
        bench = importlib.import_module(f"benchmarks.{argv[0]}").BENCH
        assert name == "benchmarks" and argv[-1] == "--worker"
        args = harness.parser_of(bench).parse_args(argv[1:])
        self._preset = bench.presets[args.preset]
        self._cases, self._args = harness.cases_of(self._preset, args), args

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, index: int) -> dict[str, Any]:
        with on_the_cpu():
            return self._preset.measure(self._cases[index], self._args)

    def end(self) -> None:
        pass


def on_the_cpu() -> Any:
    """Context of a thread in which ``cuda`` names the CPU for torch's functions."""
    import torch
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        kind = value if isinstance(value, str) else getattr(value, "type", None)
        return torch.device("cpu") if kind == "cuda" else value

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if getattr(func, "__name__", "") == "cuda":
                return args[0]
            options = {name: moved(value) for name, value in (kwargs or {}).items()}
            return func(*map(moved, args), **options)

    return OnTheCpu()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's name and facts, without one."""
    monkeypatch.setattr(device, "detect", lambda *_: GPU)
    monkeypatch.setattr(device, "environment", lambda *_: Environment(FACTS))


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch, fake_gpu: None) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("tuner.runtime.call.devices.gpu_of", lambda *_: GPU)
    monkeypatch.setattr(harness, "time_calls", time_calls)
    monkeypatch.setattr(harness, "time_host", time_host)
    monkeypatch.setattr(harness, "Worker", InProcess)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
