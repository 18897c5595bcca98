"""Kernel Tuner's strategies on one recorded space, by its simulation mode.

A program of its own, for a Python that has ``kernel_tuner`` and nothing of this project. It reads
``{"names", "configs", "times", "strategies", "seeds", "evaluations"}`` from standard input. For
each strategy and seed it writes the indices of the configs in the order of their first evaluation.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any


def cache_of(space: dict[str, Any]) -> dict[str, Any]:
    """Kernel Tuner's cache file of a space: each config with its time in milliseconds."""
    names = space["names"]
    timings = ("compile_time", "verification_time", "benchmark_time", "strategy_time")
    return {
        "device_name": "recorded",
        "kernel_name": "recorded",
        "problem_size": 1,
        "tune_params_keys": names,
        "tune_params": values_of(space),
        "objective": "time",
        "cache": {
            ",".join(map(str, config)): {
                **dict(zip(names, config, strict=True)),
                **{"time": us / 1e3, "times": [us / 1e3], "timestamp": ""},
                **dict.fromkeys((*timings, "framework_time"), 0.0),
            }
            for config, us in zip(space["configs"], space["times"], strict=True)
        },
    }


def values_of(space: dict[str, Any]) -> dict[str, list[Any]]:
    """Values of each parameter, in order."""
    columns = zip(*space["configs"], strict=True)
    return {
        name: sorted(set(column), key=lambda value: (str(type(value)), value))
        for name, column in zip(space["names"], columns, strict=True)
    }


def evaluated(space: dict[str, Any], strategy: str, seed: int, path: Path) -> list[int]:
    """Indices of the configs that a strategy evaluates, in order.

    Its own search space is made from the cache: to enumerate millions of combinations that are not
    recorded takes minutes.
    """
    kernel_tuner = importlib.import_module("kernel_tuner")
    interface: Any = importlib.import_module("kernel_tuner.interface")
    made = importlib.import_module("kernel_tuner.searchspace").Searchspace
    numpy = importlib.import_module("numpy")
    recorded = cache_of(space)
    path.write_text(json.dumps(recorded), encoding="utf-8")
    interface.Searchspace = lambda *_, **__: made(None, None, None, from_cache=recorded)
    random.seed(seed)
    numpy.random.seed(seed)
    places = {tuple(config): i for i, config in enumerate(space["configs"])}

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        results, _ = kernel_tuner.tune_kernel(
            *("recorded", "", 1, [], values_of(space)),
            strategy=strategy,
            strategy_options={"max_fevals": space["evaluations"]},
            simulation_mode=True,
            cache=str(path),
            lang="CUDA",
            quiet=True,
        )
    order = [places[tuple(row[name] for name in space["names"])] for row in results]
    return list(dict.fromkeys(order))


def answer_space() -> None:
    """Answer one space."""
    space = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in space["strategies"]:
            for seed in space["seeds"]:
                path = Path(folder) / f"{strategy}-{seed}.json"
                try:
                    order: Any = evaluated(space, strategy, seed, path)
                except Exception as exc:  # another program's: any of them loses this run only
                    order = f"{type(exc).__name__}: {exc}"
                answer.setdefault(strategy, []).append(order)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    answer_space()
