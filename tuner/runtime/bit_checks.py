"""Bits of proven kernels, compared in a process of its own (`tuner prove --invariance`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from tuner.base import document
from tuner.base.printable import one_line
from tuner.config import Config
from tuner.errors import TunerError
from tuner.families import family
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GroupedGemmProblem, Problem, problem_from_json
from tuner.runtime.bits import Planner, ProductRows, Recorded, Sequences, outcome
from tuner.runtime.call import devices
from tuner.runtime.call.plan import Plan, Posed, plan_of

LAYERS = ((1024, 4096), (512, 2880))
"""N and K that a kernel of products is compared at; 2880 ends within a tile of 128."""
COUNTS = ("views", "compared", "differing", "crossed", "crossed_differing")
"""Calls of a kernel; its rows that were seen before, and those that differ; the same of rows of
its class's kernels."""


def schedules(problem: Problem, config: Config) -> list[Config]:
    """A kernel's config with the parameters of each schedule that divides no sum, or always at the
    same keys.
    """
    params = {name: value for name, value in config.params.items() if name != "combine"}
    undivided = family(config.family).called(problem, Config(config.family, params), 1)
    if "split_keys" not in params or params["persistent"]:
        return [undivided]
    return [undivided, Config(config.family, {**undivided.params, "combine": "kernel"})]


class Checks:
    """Kernels one after the other, each compared with itself and with those of its class before."""

    def __init__(self) -> None:
        self._subjects: dict[Any, ProductRows | Sequences] = {}
        self._of_classes: dict[Any, Recorded] = {}

    def check(self, problem: Any, config: Config, artifacts: Mapping[str, str]) -> dict[str, Any]:
        """The `COUNTS` of a kernel, its class, and calls in which rows differ.

        Args:
            problem: small problem of the kernel's domain.
            config: the kernel.
            artifacts: keys of its libraries, by their names.
        """
        configs, gpu = schedules(problem, config), devices.gpu_of(devices.current())
        reduction = family(config.family).reduction_class(problem, configs[0])
        counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        if reduction is None or (isinstance(problem, AttentionProblem) and problem.modifiers):
            return counts
        is_grouped, at = int(config.get("packed_heads", 1)) > 1, list[str]()
        for small, scheduled in product(_sizes(problem), configs):
            key = small, is_grouped
            if key not in self._subjects:
                self._subjects[key] = (
                    Sequences(small, is_grouped=is_grouped)
                    if isinstance(small, AttentionProblem)
                    else ProductRows(small)
                )
            bits = outcome(scheduled, self._subjects[key].views(), _planner(artifacts), gpu)
            record = self._of_classes.setdefault((_kind(small), reduction), Recorded())
            added = bits.views, bits.compared, bits.differing, *record.merge(bits.recorded)
            counts = {name: counts[name] + n for name, n in zip(COUNTS, added, strict=True)}
            at += bits.at
        return {**counts, "class": reduction.label(), "at": at[:3]}


def _sizes(problem: Any) -> list[Any]:
    if isinstance(problem, AttentionProblem):
        return [problem]
    more = {"groups": 4} if isinstance(problem, GroupedGemmProblem) else {}
    return [replace(problem, m=64, n=n, k=k, **more) for n, k in LAYERS]


def _kind(problem: Any) -> Any:
    """Kernels of equal kinds compute the same rows; dense, packed and paged attention do."""
    if not isinstance(problem, AttentionProblem):
        return problem
    extras = problem.window_left, problem.window_right, problem.softcap, problem.has_sinks
    return problem.op, problem.head_dim, problem.dtype, extras


def _planner(artifacts: Mapping[str, str]) -> Planner:
    def planned(posed: Posed, config: Config) -> Plan | str:
        device = devices.current()
        facts = Regime(), Status.OK, Provenance.PREDICTED
        gpu = devices.gpu_of(device)
        planned = Measurement(posed.problem, config, gpu, *facts, artifacts=dict(artifacts))
        plan = plan_of(posed, planned, device)
        return plan if isinstance(plan, Plan) else plan.detail

    return planned


def main() -> int:
    """Check the kernels of lines of JSON on standard input; a line of JSON answers each."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print goes to the errors
    checks = Checks()
    for line in sys.stdin:
        request = document.parse(line)
        problem, config = problem_from_json(request["problem"]), Config.from_json(request["config"])
        try:
            with torch.inference_mode():
                result = checks.check(problem, config, request["artifacts"])
                torch.cuda.synchronize()
        except (TunerError, RuntimeError) as exc:
            result = {"error": one_line(f"{type(exc).__name__}: {exc}", 300)}
        print(json.dumps(result), file=answers, flush=True)
        if "error" in result:
            return 1  # the device may be of no use to this process
    return 0


if __name__ == "__main__":
    sys.exit(main())
