"""The process that compute-sanitizer watches: ``python -m fused_attention_proof.tiny PLAN``.

PLAN is a JSON file: ``libraries`` and a list of ``launches``, each a problem, a config and whether
its output is to be half as large as it should be. No torch: every kernel that runs is ours.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.benchmark import WORKSPACE
from tuner.config import Config
from tuner.device import Device, Pool
from tuner.families.base import LSE, SCRATCH
from tuner.problem import AttentionProblem, Operand, problem_from_json

from .binding import Libraries, subject, writes_lse

#: Distinct elements; a tensor repeats them.
PERIOD = 4093


def normal(operand: Operand, draw: random.Random) -> bytes:
    """Normal elements, as an operand's memory."""
    values = [draw.gauss() for _ in range(min(PERIOD, operand.elements))]
    if operand.dtype == "float16":
        data = struct.pack(f"<{len(values)}e", *values)
    else:  # bfloat16 is the upper half of float32
        wide = struct.pack(f"<{len(values)}f", *values)
        data = b"".join(wide[at + 2 : at + 4] for at in range(0, len(wide), 4))
    return (data * (operand.bytes // len(data) + 1))[: operand.bytes]


def launch(device: Device, item: Mapping[str, Any], known: Libraries) -> None:
    """Each buffer an allocation of its own and no larger than it has to be."""
    problem = problem_from_json(item["problem"])
    assert isinstance(problem, AttentionProblem)
    config, scale = Config.from_json(item["config"]), problem.head_dim**-0.5
    bound = subject(device, problem, config, scale, known)
    draw = random.Random(problem.label())
    with Pool(device) as pool:
        buffers = {o.name: pool.allocate(o.bytes) for o in problem.operands[:-1]}
        for operand in problem.operands[:-1]:
            device.write(buffers[operand.name], normal(operand, draw))
        output = problem.output
        buffers[output.name] = pool.allocate(output.bytes // (2 if item["halved"] else 1))
        buffers[SCRATCH] = pool.allocate(bound.scratch_bytes)
        buffers[WORKSPACE] = pool.allocate(bound.workspace_bytes)
        buffers[LSE] = 0
        if writes_lse(problem, config, scale):
            buffers[LSE] = pool.allocate(output.elements // problem.head_dim * 4)
        call = bound.bind(buffers, scale)
        call()
        call()  # on what the first one left in its workspace
        device.synchronize()


def main(path: str) -> None:
    plan = json.loads(Path(path).read_text())
    device = Device()
    for item in plan["launches"]:
        launch(device, item, plan["libraries"])
        print(json.dumps({"event": "launched", "problem": item["problem"]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
