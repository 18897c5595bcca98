"""The kernels of experts' rows and products, through nvcc: built once, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.single import EXPERT_PRODUCTS, EXPERT_ROWS, Source
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
#: Stage, slots, top k, experts, columns, depth, stride, rows and number of tiles, bytes, is
#: narrow, pdl.
PLACED = (0, 512, 8, 512, 0, 0, 0, 16, 512, 8, 0, 1)
LISTED = (1, 8192, 8, 128, 0, 0, 0, 64, 256, 0, 0, 1)
UP = (2, 128, 8, 128, 768, 2048, 2048, 16, 128, 0, 0, 1)
DOWN = (3, 128, 8, 128, 2048, 768, 768, 32, 128, 0, 1, 1)
NO_PRODUCT = (
    *((PLACED, 1, 513), (PLACED, 9, 2), (PLACED, 3, 513), (PLACED, 0, -1), (PLACED, 7, 8)),
    *((LISTED, 8, 0), (LISTED, 2, 0), (LISTED, 1, 2**30 + 1)),
    *((UP, 4, 764), (UP, 5, 2044), (UP, 6, 2044), (DOWN, 0, 4), (DOWN, 5, 0), (DOWN, 7, 128)),
)
NOT_THERE: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
    *((PLACED, {"experts": 260}), (PLACED, {"places": 0}), (LISTED, {"tiles": 260})),
    *((UP, {"rows": 264}), (UP, {"weights": 0}), (UP, {"order": 0})),
    *((DOWN, {"out": 264}), (DOWN, {"offsets": 258})),
)


@pytest.mark.parametrize(
    ("source", "stages", "wrong", "misaligned"),
    [
        (EXPERT_ROWS, (PLACE, COPY, GATE, COMBINE), WRONG, MISALIGNED),
        (EXPERT_PRODUCTS, (PLACED, LISTED, UP, DOWN), NO_PRODUCT, NOT_THERE),
    ],
    ids=["rows", "products"],
)
def test_it_is_built_once_and_refuses_what_it_would_get_wrong(
    compiler: Compiler, source: Source, stages: Any, wrong: Any, misaligned: Any
) -> None:
    artifact = source.build(compiler.artifacts)
    assert source.build(compiler.artifacts) == artifact
    assert source.find(compiler.artifacts) == artifact
    kernel, addresses = load(artifact), dict.fromkeys(source.arguments.tensors, 256)
    for stage in stages:
        assert kernel.workspace_bytes(stage) == 0
    for stage, position, value in wrong:
        arguments = [*stage]
        arguments[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(arguments)
        with pytest.raises(BenchmarkError):
            kernel.launch([*addresses.values()], arguments, (), 0, 0)
    for stage, other in misaligned:
        with pytest.raises(BenchmarkError, match=r"launch.*716"):
            kernel.launch([*{**addresses, **other}.values()], stage, (), 0, 0)
