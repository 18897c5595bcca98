#!/usr/bin/env bash
# Kernel Tuner 1.5.0's `dual_annealing` ends after 2 to 6 evaluations in a restricted space, whatever
# `max_fevals` allows (64 here), while random sampling uses all 64 and finds a faster config. Who
# compares strategies at a budget has to count what each really evaluated.
# Exits non-zero if this changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q kernel_tuner==1.5.0
"$folder/venv/bin/python" -W ignore - "$folder/cache.json" <<'PYTHON'
import contextlib
import itertools
import json
import os
import random
import sys
from importlib.metadata import version
from pathlib import Path

import kernel_tuner
import numpy

names, values = ["a", "b", "c", "d"], list(range(8))
space = [c for c in itertools.product(values, repeat=4) if sum(c) % 7 == 0]
zero = ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time")


def row(config):
    time = 1 + sum((x - 3) ** 2 for x in config) / 10
    timed = {"time": time, "times": [time], "timestamp": "", **dict.fromkeys(zero, 0.0)}
    return {**dict(zip(names, config)), **timed}


cache = {
    **{"device_name": "x", "kernel_name": "k", "problem_size": 1, "objective": "time"},
    **{"tune_params_keys": names, "tune_params": {name: values for name in names}},
    "cache": {",".join(map(str, config)): row(config) for config in space},
}
print("kernel_tuner", version("kernel_tuner"), "-", len(space), "configs, 64 evaluations allowed")
counts, best = {}, {}
for strategy in ("random_sample", "dual_annealing"):
    for seed in range(3):
        random.seed(seed)
        numpy.random.seed(seed)
        Path(sys.argv[1]).write_text(json.dumps(cache))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            results, _ = kernel_tuner.tune_kernel(
                *("k", "", 1, [], {name: values for name in names}),
                restrictions=["(a + b + c + d) % 7 == 0"],
                strategy=strategy,
                strategy_options={"max_fevals": 64},
                simulation_mode=True,
                cache=sys.argv[1],
                lang="CUDA",
                quiet=True,
            )
        evaluated = {tuple(r[name] for name in names) for r in results}
        counts.setdefault(strategy, []).append(len(evaluated))
        best.setdefault(strategy, []).append(min(r["time"] for r in results))
    print(strategy, "evaluated", counts[strategy], "best", best[strategy])
assert set(counts["random_sample"]) == {64} and max(counts["dual_annealing"]) < 16
assert max(best["random_sample"]) < min(best["dual_annealing"])
PYTHON
