"""Sweeps and jobs that smoke runs of the bench `tuner` need beside a device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

#: A ``tuner sweep`` whose winner is the first config of the problem's space.
SWEEP = """
import json, os, sys
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.problem import PROBLEMS
given = dict(zip(sys.argv[1:], sys.argv[2:]))
problem = PROBLEMS[given["--op"]].parse(given["--shape"])
name = "gemm" if problem.op == "gemm" else "fused_attention"
config = family(name).space(problem, DEFAULT_GPU)[0]
print("first answer verified after 1 s", file=sys.stderr)
folder = os.environ["TUNER_CACHE_DIR"] + "/artifacts/" + "0" * 32
os.makedirs(folder, exist_ok=True)
json.dump({"compile_cpu_s": 2.5, "facts": {"template": "a"}}, open(folder + "/meta.json", "w"))
open(folder + "/kernel.cu", "w").close()
own = {"config": config.to_json(), "latency_us": 8.0}
rest = ("seconds", "expected_loss")
print(json.dumps({"best_own": own, "winner": own, "kernels": 1, "elapsed_s": 1.0,
                  "first_own_s": 0.5, "given_up": 0, **dict.fromkeys(rest)}))
"""


class Machines:
    """Stands for `Runners`."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None: ...
    def compiler(self) -> Any:
        return SimpleNamespace(key=lambda spec: "0" * 32)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sweeps by a process that measures nothing."""
    from benchmarks import tuner_sweeps

    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    command = lambda *arguments: [sys.executable, "-P", "-c", SWEEP, *arguments[3:]]  # noqa: E731
    monkeypatch.setattr(tuner_sweeps, "python_command", command)
    monkeypatch.setattr(tuner_sweeps, "Runners", Machines)
    monkeypatch.setattr(tuner_sweeps, "replayed", lambda folder: True)
