"""Process to profile, started under ncu: ``python -m tuner.measure.nsight_child REQUEST.json``.

It prepares a call as the numerics gate does (normal inputs) and runs it a few times. Then it runs
the call once between the marks of the CUDA profiler. ncu counts only between them
(``--profile-from-start off``), so neither the gate's own kernels nor the first call's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import SCRATCH
from tuner.measure import device as device_module
from tuner.measure.device import Device, Pool
from tuner.measure.gate import Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measure.subjects import (
    WORKSPACE,
    CompiledSubject,
    Subject,
    VendorSubject,
)
from tuner.problem import Problem, problem_from_json

CALLS_BEFORE = 2
"""Calls before the counted one: the first loads modules, the second brings the inputs into the
L2."""


def request(
    problem: Problem, config: Config, reference: Artifact, kernels: Mapping[str, Artifact]
) -> dict[str, Any]:
    """JSON input of `main`."""
    return {
        "problem": problem.to_json(),
        "config": config.to_json(),
        "reference": _plain(reference),
        "kernels": {name: _plain(artifact) for name, artifact in kernels.items()},
    }


def _plain(artifact: Artifact) -> list[str]:
    return [artifact.key, str(artifact.library), artifact.sha256]


def _artifact(data: Sequence[str]) -> Artifact:
    key, library, sha256 = data
    return Artifact(key, Path(library), sha256, None, 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the call that the request describes."""
    (path,) = sys.argv[1:] if argv is None else argv
    job = json.loads(Path(path).read_text())
    problem, config = problem_from_json(job["problem"]), Config.from_json(job["config"])
    member, scale = family(config.family), scale_of(problem)
    device = Device(0)
    gate = Gate(device, load(_artifact(job["reference"])))
    gate.open(problem, seed=0)
    gate.load("random")
    subject: Subject
    if member.is_vendor:
        subject = VendorSubject(device, member, problem, config)
    else:
        kernels = {name: load(_artifact(data)) for name, data in job["kernels"].items()}
        subject = CompiledSubject(device, member, problem, config, kernels, scale)
    with Pool(device) as pool:
        own = {
            SCRATCH: gate.allocate(pool, SCRATCH, subject.scratch_bytes).pointer,
            WORKSPACE: gate.allocate(pool, WORKSPACE, subject.workspace_bytes).pointer,
        }
        call = subject.bind({**gate.pointers, **own}, scale)
        for _ in range(CALLS_BEFORE):
            call()
        device.synchronize()
        device_module.call("cuProfilerStart")
        call()
        device.synchronize()
        device_module.call("cuProfilerStop")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
