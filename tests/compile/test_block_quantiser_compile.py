"""The kernel that quantises activations, through nvcc: built once, and its refusals."""

from __future__ import annotations

import pytest

from tuner.compile import single
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.single import BLOCK_QUANTISER
from tuner.errors import BenchmarkError, CompileError

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

#: M, K, stride of the rows, stride of the factors' blocks, pdl.
ARGUMENTS = (5, 400, 416, 8, 1)


def test_it_is_built_once_and_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    artifact = BLOCK_QUANTISER.build(compiler.artifacts)
    assert BLOCK_QUANTISER.build(compiler.artifacts) == artifact
    assert BLOCK_QUANTISER.find(compiler.artifacts) == artifact
    kernel = load(artifact)
    assert kernel.workspace_bytes(ARGUMENTS) == 0
    wrong = ((0, 0), (0, 2**30 + 1), (1, 396), (1, 2**25 + 8), (2, 392), (2, 404), (3, 4))
    for position, value in wrong:
        arguments = [*ARGUMENTS]
        arguments[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(arguments)
        with pytest.raises(BenchmarkError):
            kernel.launch((256, 512, 768), arguments, (), 0, 0)
    for tensors in ((264, 512, 768), (256, 516, 768), (256, 512, 770), (0, 512, 768)):
        with pytest.raises(BenchmarkError):
            kernel.launch(tensors, ARGUMENTS, (), 0, 0)


def test_another_source_is_another_kernel(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "FLAGS", (*single.FLAGS, "-DTUNER_WRONG="))
    assert BLOCK_QUANTISER.find(compiler.artifacts) is None
    monkeypatch.setattr(single, "FLAGS", (*single.FLAGS, "-Dkernel=)"))
    with pytest.raises(CompileError, match=r"block_quantiser\.cu: .*error"):
        BLOCK_QUANTISER.build(compiler.artifacts)
