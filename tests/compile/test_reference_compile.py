"""The numerics gate's kernels compile, and their C interface refuses what it does not know."""

from __future__ import annotations

import pytest

from tuner.artifacts import load
from tuner.compiler import Compiler
from tuner.errors import BenchmarkError
from tuner.gate import REFERENCE

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

SPECS = [REFERENCE]


def test_the_reference_compiles(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    assert kernel.workspace_bytes([7]) == 0
    for integers in ([99, 0], [0, 99]):  # no such command, no such type
        with pytest.raises(BenchmarkError, match="cudaError 1"):
            kernel.launch([0, 0], integers, [0.0], 0, 0)
