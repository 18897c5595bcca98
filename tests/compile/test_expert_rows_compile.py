"""The kernel of experts' rows, through nvcc: built once, and its refusals."""

from __future__ import annotations

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.single import EXPERT_ROWS
from tuner.errors import BenchmarkError

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

#: Stage, rows, parts, columns, stride, block, bytes, pdl: of each stage.
PLACE = (0, 100, 512, 0, 0, 0, 8, 1)
COPY = (1, 100, 32, 256, 264, 3200, 0, 1)
GATE = (2, 100, 512, 256, 0, 100, 0, 1)
COMBINE = (3, 100, 32, 256, 0, 0, 2, 1)
#: A stage's arguments, the position of one, and a value that is wrong there.
WRONG = (
    *((PLACE, 0, 4), (PLACE, 0, -1), (PLACE, 1, 0), (PLACE, 1, 2**30 + 1), (PLACE, 2, 513)),
    *((PLACE, 2, 0), (PLACE, 6, 2)),
    *((COPY, 2, 33), (COPY, 3, 252), (COPY, 3, 0), (COPY, 4, 248), (COPY, 4, 260)),
    *((COPY, 5, 3199), (COPY, 1, 2**26)),
    *((GATE, 2, 513), (GATE, 3, 4), (GATE, 5, 99)),
    *((COMBINE, 6, 8), (COMBINE, 2, 33), (COMBINE, 3, 2**25 + 8)),
)
#: A stage's tensors that it does not take at such addresses.
MISALIGNED: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
    *((PLACE, {"experts": 260}), (PLACE, {"offsets": 514}), (PLACE, {"counts": 0})),
    *(
        (COPY, {"rows": 264}),
        (COPY, {"out": 772}),
        (COPY, {"factors": 1026}),
        (COPY, {"places": 0}),
    ),
    *((GATE, {"offsets": 0}), (GATE, {"factors": 0}), (GATE, {"rows": 8})),
    *((COMBINE, {"weights": 769}), (COMBINE, {"out": 1032}), (COMBINE, {"places": 0})),
)
ADDRESSES = dict.fromkeys(EXPERT_ROWS.arguments.tensors, 256)


def test_it_is_built_once_and_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    artifact = EXPERT_ROWS.build(compiler.artifacts)
    assert EXPERT_ROWS.build(compiler.artifacts) == artifact
    assert EXPERT_ROWS.find(compiler.artifacts) == artifact
    kernel = load(artifact)
    for stage in (PLACE, COPY, GATE, COMBINE):
        assert kernel.workspace_bytes(stage) == 0
    for stage, position, value in WRONG:
        arguments = [*stage]
        arguments[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(arguments)
        with pytest.raises(BenchmarkError):
            kernel.launch([*ADDRESSES.values()], arguments, (), 0, 0)
    for stage, wrong in MISALIGNED:
        with pytest.raises(BenchmarkError, match=r"launch.*716"):
            kernel.launch([*{**ADDRESSES, **wrong}.values()], stage, (), 0, 0)
