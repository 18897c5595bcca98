"""The kernels of latent attention's decoding: their texts and parts."""

from __future__ import annotations

from goldens import Goldens

from tuner.base import resources
from tuner.compile.render import render
from tuner.families.mla_decode import KERNELS, PARTS, MlaKernel


def test_golden_texts(goldens: Goldens) -> None:
    texts = {
        " ".join(map(str, one)): render(one.spec, "golden") for one in reversed(KERNELS.values())
    }
    goldens.check("mla_decode", texts)


def test_the_parts_are_named() -> None:
    folder = resources.templates()
    assert {f"mla_decode/{path.name}" for path in (folder / "mla_decode").iterdir()} == {*PARTS}


def test_specs_differ() -> None:
    assert KERNELS["float16"].spec.key != KERNELS["bfloat16"].spec.key
    shared = MlaKernel("bfloat16", False, 1, registers=False)
    assert shared.spec.key != MlaKernel("bfloat16", False, 1).spec.key
