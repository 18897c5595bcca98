"""Trials of a rule's kernels, checked as those of any kernel."""

from __future__ import annotations

from typing import Any

from tuner.families.target import Target
from tuner.families.trials import MAX_BYTES, MAX_FLOPS, Trial, trials
from tuner.hardware import DEFAULT_GPU


def checked_trials(target: Target) -> list[Trial]:
    """64 trials or more of a kernel: different, legal, of this kernel, and bounded."""
    found = trials(target, DEFAULT_GPU, 64, 0)
    assert len(found) >= 64 and len(set(found)) == len(found)
    for trial in found:
        assert not target.family.violations(trial.problem, trial.config, DEFAULT_GPU)
        assert target.family.kernels(trial.problem, trial.config) == target.kernels
        assert trial.problem.flops <= MAX_FLOPS and trial.problem.bytes <= MAX_BYTES
    return found


def check_products(target: Target, found: list[Trial], schedules: int) -> None:
    """Rows beside the edges of a tile, depths beside those of a block of factors, and this many
    settings of the run-time parameters.
    """
    problems: list[Any] = [trial.problem for trial in found]
    rows = int(target.config["tile_n" if target.config["swap_ab"] else "tile_m"])
    assert {1, rows - 1, rows, rows + 1, 2 * rows + 1} <= {one.m for one in problems}
    depths = {one.k for one in problems}
    assert max(depths) > 16384 and any(k % 128 for k in depths)
    if target.config.get("serial_parts", target.config.get("split_k", 1)) == 1:
        assert {16, 128, 144} <= depths
    names = sorted(target.family.runtime_parameters)
    assert len({tuple(trial.config[name] for name in names) for trial in found}) == schedules
