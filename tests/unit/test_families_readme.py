"""The family that `docs/pages/family.md` writes step by step, put together from its blocks."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.cli.legality import draw
from tuner.compile.render import render
from tuner.config import Config
from tuner.families import families, families_in
from tuner.families.base import Family, group_by_kernels
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SoftmaxProblem

README = Path(__file__).parents[2] / "docs" / "pages" / "family.md"
NAME = "warp_softmax"
PROBLEM = SoftmaxProblem(1000, 333, 3, is_causal=True, dtype="bfloat16")


def blocks(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    module = tmp_path / f"{NAME}.py"
    module.write_text("\n".join(blocks("python")))
    (template,) = blocks("cuda")
    (tmp_path / f"{NAME}.cu.j2").write_text(template)
    for shared in ("arguments.cu.j2", "arguments.h"):
        shutil.copy(resources.templates() / shared, tmp_path)
    monkeypatch.setattr(resources, "templates", lambda: tmp_path)
    (family,) = families_in(module).values()
    return family


def test_the_page_writes_a_family(written: Family) -> None:
    assert written.name == NAME and NAME not in families()
    space = list(written.space(PROBLEM, DEFAULT_GPU))
    assert len(space) == len(set(space)) > 1
    assert not any(written.violations(PROBLEM, config, DEFAULT_GPU) for config in space)
    assert len(group_by_kernels(written, space)) == len(space)
    estimates = {written.predict_us(PROBLEM, config, DEFAULT_GPU) for config in space}
    assert len(estimates) > 1 and min(estimates) > DEFAULT_GPU.floor_us(0, PROBLEM.bytes)
    (reason,) = written.violations(PROBLEM, Config(NAME, {"rows_per_block": 33}), DEFAULT_GPU)
    assert reason == "rows_per_block=33 exceeds 32 warps of a block"


def test_its_kernels_render_and_its_launches_name_operands(written: Family) -> None:
    config = written.space(PROBLEM, DEFAULT_GPU)[0]
    (spec,) = written.kernels(PROBLEM, config).values()
    text = render(spec, "abc")
    assert "tuner_abc_launch" in text and "tuner_abc_workspace" in text
    assert "constexpr bool kCausal = true;" in text
    (launch,) = written.launches(PROBLEM, config, 0.5)
    operands = {operand.name for operand in PROBLEM.operands}
    assert {ref.operand for ref in launch.tensors} == operands
    assert launch.integers == (3000, 333, 1000)
    assert "struct Integers { int64_t rows, cols, query_rows; };" in text


def test_its_domains_hold_what_the_page_asks_for(written: Family) -> None:
    legal, rejected = draw(written, DEFAULT_GPU, 10, 40, random.Random(3))
    assert (len(legal), len(rejected)) == (10, 40)
