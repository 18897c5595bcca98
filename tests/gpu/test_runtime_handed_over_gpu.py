"""Calls that PyTorch's fused kernels fail on, on the GPU against float64: tensors that start, or
have rows, off 16 bytes; rows that see no key; a vendor's kernel that the selection launches; sizes
of 0; every entry of the runtime; and drawn calls of all kinds, more of them under ``--long``.

Children make them, since a kernel that reads a wrong address ends its process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import ran
from runtime_gpu import (
    TOLERANCE,
    call_path,
    compiled,
    first_kernels,
    fresh_store,
    inputs,
    part,
    served_gpu,
    store,
)
from unaligned import WAYS, error, exact, shifted

import tuner
from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

own_store, path, gpu = fresh_store, call_path, served_gpu
FULL = AttentionProblem.parse("H=16,D=64,S=1024")
MASKED = AttentionProblem.parse("H=16,D=64,S=1024,mask=1")
CHILD = Path(__file__).with_name("handed_over_child.py")
TIMEOUT_S = 600
LIMIT = 2e-2
"""Error that a call may have: rounding of bf16 is below it, a wrong answer has 0.3 and more."""
#: group -> drawn calls, and those of the long mode.
GROUPS = {
    "unaligned": (1, 1),
    "windows": (1, 1),
    "blind": (1, 1),
    "vendors": (1, 1),
    "empty": (1, 2),
    "entries": (110, 4000),
    "drawn": (150, 5000),
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [
        spec for problem in (FULL, MASKED) for spec in first_kernels(problem, "fused_attention")
    ]


@pytest.mark.parametrize("kernels", ["pytorch", "portfolio"])
@pytest.mark.parametrize("way", ["dispatcher", "python"])
@pytest.mark.parametrize("group", GROUPS)
def test_calls_agree_with_float64(
    group: str, way: str, kernels: str, tmp_path: Path, long_mode: bool
) -> None:
    """With PyTorch's kernels alone, and with all that are built and proven here."""
    if group == "vendors" and kernels == "pytorch":
        pytest.skip("the group decides on a kernel itself")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TUNER_STORE": f"sqlite:///{tmp_path / 'child.sqlite'}",
        "TUNER_DISABLE": "1" if kernels == "pytorch" else "0",
    }
    command = [sys.executable, str(CHILD), group, way, str(GROUPS[group][long_mode])]
    limit = TIMEOUT_S * (10 if long_mode else 1)
    done = ran(*command, code=None, env=environment, timeout=limit)
    results: dict[str, Any] = dict(map(json.loads, done.stdout.splitlines()))
    faults = {name: it for name, it in results.items() if isinstance(it, str) or not it < LIMIT}
    assert not faults, json.dumps(faults, indent=1)
    last = list(results)[-1] if results else "none"
    assert done.returncode == 0, f"after {last}: {done.stderr[-2000:]}"
    assert results


def tune(problem: AttentionProblem, compiler: Compiler, gpu: Gpu) -> None:
    config, artifacts = compiled(compiler, problem, gpu, "fused_attention")
    store(problem, gpu, config, artifacts=artifacts)


def served() -> tuple[int, dict[str, int]]:
    stats = part("call.counters").stats(reset=True)
    return stats.hits, dict(stats.fallbacks)


@pytest.mark.compile
@pytest.mark.parametrize("way", WAYS)
def test_an_own_kernel_serves_copies(way: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    tune(FULL, compiler, gpu)
    tensors: Any = inputs(FULL)
    wanted = exact(*tensors)
    assert error(tuner.attention(*tensors), wanted) < TOLERANCE["float16"]
    q, k, v = (WAYS[way](t) for t in tensors)
    one_each = ((q, *tensors[1:]), (tensors[0], k, tensors[2]), (q, k, v))
    served()
    cases: Any = one_each if "tokens first" not in way else ((q, k, v),)
    for given in cases:
        for _ in range(2):
            assert error(tuner.attention(*given), wanted) < TOLERANCE["float16"]
        if path == "dispatcher":  # which overrides PyTorch's operators
            with tuner.enabled():
                out = torch.nn.functional.scaled_dot_product_attention(*given)
            assert error(out, wanted) < TOLERANCE["float16"]
    hits, fallbacks = served()
    if "tokens first" not in way:
        assert (hits, fallbacks) == (9 if path == "dispatcher" else 6, {})


@pytest.mark.compile
def test_a_mask_that_starts_elsewhere_is_served(path: str, compiler: Compiler, gpu: Gpu) -> None:
    tune(MASKED, compiler, gpu)
    tensors: Any = inputs(MASKED)[:3]
    seen = torch.rand(1024, 1024, device="cuda") < 0.5
    seen[::5] = False
    wanted = exact(*tensors, seen)
    for mask in (seen, shifted(seen, 3), shifted(seen, 8)):
        for _ in range(2):
            assert error(tuner.attention(*tensors, mask), wanted) < TOLERANCE["float16"]
    assert served() == (6, {})
