"""Every example runs to its end on a machine without a GPU, and says what its page says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from programs import ran

pytest.importorskip("torch", reason="the examples need torch")
pytest.importorskip("transformers", reason="the third example needs transformers")

FOLDER = Path(__file__).parents[2] / "examples"
PAGE = FOLDER.parent / "docs" / "pages" / "examples.md"
#: Lines that the page shows below each example; ``...`` ends a line whose rest differs.
SHOWN = {
    name: shown.splitlines()
    for name, shown in re.findall(
        r'^--8<-- "examples/(.*?)"\n```\n\n```\n(.*?)^```',
        PAGE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
}


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TUNER_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(FOLDER.parent)
    run = ran(sys.executable, "-P", FOLDER / name, env=environment, timeout=240)
    printed = run.stdout.splitlines()
    for line in SHOWN[name]:
        begins = line.removesuffix("...")
        assert any(text.startswith(begins) and (begins != line or text == line) for text in printed)


def test_the_page_lists_each() -> None:
    page = (FOLDER / "README.md").read_text()
    examples = {path.name for path in FOLDER.glob("*.py")}
    assert examples == set(SHOWN)
    assert all(f"`{name}`" in page for name in examples)
    assert all(len((FOLDER / name).read_text().splitlines()) <= 60 for name in examples)
