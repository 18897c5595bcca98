"""The process that compute-sanitizer watches: ``python -m sanitizer.watched PLAN``.

PLAN is a JSON file: ``libraries`` and a list of ``launches``, each a problem, a config and the
operand, if any, whose memory is to be half as large as it should be. No torch: every kernel that
runs is ours.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.config import Config
from tuner.families.base import LSE, SCRATCH
from tuner.measure import pages
from tuner.measure.device import Device, Pool
from tuner.measure.gate.inputs import moments, scale_of, starts_of
from tuner.measure.subjects import WORKSPACE
from tuner.problem import E4M3, AttentionProblem, Operand, Problem, problem_from_json

from .binding import Libraries, subject, writes_lse

#: Distinct elements; a tensor repeats them.
PERIOD = 4093
#: What the codes 0 to 126 of e4m3 stand for: 3 bits of mantissa, subnormal below 2^-6.
E4M3_VALUES = [
    (code % 8 + 8 * (code > 7)) / 8 * 2.0 ** (max(code // 8, 1) - 7) for code in range(127)
]
#: Tables of a paged cache.
TABLES = ("page_table", "seqused_k")
_E4M3_BORDERS = [(low + high) / 2 for low, high in pairwise(E4M3_VALUES)]


def _float16(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def _float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _bfloat16(values: Sequence[float]) -> bytes:
    """The upper half of float32."""
    wide = _float32(values)
    return b"".join(wide[at + 2 : at + 4] for at in range(0, len(wide), 4))


def _e4m3(values: Sequence[float]) -> bytes:
    return bytes(bisect(_E4M3_BORDERS, abs(value)) + 128 * (value < 0) for value in values)


PACK: Mapping[str, Callable[[Sequence[float]], bytes]] = {
    "float16": _float16,
    "bfloat16": _bfloat16,
    "float32": _float32,
    E4M3: _e4m3,
}


def contents(problem: Problem, operand: Operand, draw: random.Random) -> bytes:
    """An input's memory: what the numerics gate calls random."""
    if operand.name in TABLES and isinstance(problem, AttentionProblem):
        return pages.written(problem, operand.name, "dominant", 0)  # lengths at edges of pages
    if operand.dtype == "int32":
        return starts_of(problem, operand, "random")
    means, deviations = moments(problem, "random")
    mean, deviation = means.get(operand.name, 0.0), deviations.get(operand.name, 1.0)
    values = [draw.gauss(mean, deviation) for _ in range(min(PERIOD, operand.elements))]
    data = PACK[operand.dtype](values)
    return (data * (operand.bytes // len(data) + 1))[: operand.bytes]


def launch(device: Device, item: Mapping[str, Any], known: Libraries) -> None:
    """Each buffer an allocation of its own and no larger than it has to be."""
    problem, config = problem_from_json(item["problem"]), Config.from_json(item["config"])
    scale = scale_of(problem)
    bound = subject(device, problem, config, scale, known)
    draw = random.Random(problem.label())
    with Pool(device) as pool:
        sizes = {o.name: o.bytes // (1 + (o.name == item["halved"])) for o in problem.operands}
        buffers = {name: pool.allocate(size) for name, size in sizes.items()}
        for operand in problem.operands[:-1]:
            data = contents(problem, operand, draw)
            device.write(buffers[operand.name], data[: sizes[operand.name]])
        buffers[SCRATCH] = pool.allocate(bound.scratch_bytes)
        buffers[WORKSPACE] = pool.allocate(bound.workspace_bytes)
        if isinstance(problem, AttentionProblem) and writes_lse(problem, config, scale):
            buffers[LSE] = pool.allocate(problem.output.elements // problem.output.shape[-1] * 4)
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
