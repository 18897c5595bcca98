"""The examples of the page on serving, run in their order; without a GPU PyTorch answers them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tuner import settings

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

README = Path(__file__).parents[2] / "docs" / "pages" / "serving.md"


# FlexAttention on a CPU, which is not compiled there.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 10
    names: dict[str, Any] = {}
    calls = 0
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        if isinstance(out := names.pop("out", None), torch.Tensor):
            assert out.isfinite().all()
            calls += 1
    assert calls > 10
    assert not any(tmp_path.glob("*.json")), "a reader runs them in a clone"


def test_the_table_of_variables_is_whole() -> None:
    text = README.read_text()
    table = text[text.index("## Environment variables") :]
    assert set(re.findall(r"TUNER_[A-Z_]+", table)) == set(settings.VARIABLES)
