"""The kernels of latent attention's decoding: their texts, and the choice among them."""

from __future__ import annotations

import pytest
from goldens import Goldens

from tuner.base import resources
from tuner.compile.render import render
from tuner.families.mla_decode import KERNELS, PARTS, MlaKernel, kernel_of, row_blocks


def test_golden_texts(goldens: Goldens) -> None:
    texts = {" ".join(map(str, one)): render(one.spec, "golden") for one in reversed(KERNELS)}
    goldens.check("mla_decode", texts)


@pytest.mark.parametrize(
    ("heads", "queries", "blocks"),
    [
        (1, 1, 1),
        (16, 4, 1),
        (16, 5, 2),
        (64, 1, 1),
        (65, 1, 2),
        (128, 4, 8),
        (20, 3, 2),
        (40, 1, 1),
    ],
)
def test_blocks_of_rows_work_in_pairs(heads: int, queries: int, blocks: int) -> None:
    assert row_blocks(heads, queries) == blocks
    kernel = kernel_of("bfloat16", heads, queries)
    assert kernel in KERNELS and kernel.dtype == "bfloat16"
    assert blocks % kernel.cluster == 0 and (kernel.cluster > 1) == (blocks % 2 == 0)


def test_the_parts_are_named() -> None:
    folder = resources.templates()
    assert {f"mla_decode/{path.name}" for path in (folder / "mla_decode").iterdir()} == {*PARTS}


def test_specs_differ() -> None:
    assert len({kernel.spec.key for kernel in KERNELS}) == len(KERNELS)
    shared = MlaKernel("bfloat16", False, 1, registers=False)
    assert shared.spec.key != MlaKernel("bfloat16", False, 1).spec.key
