"""Every example runs to its end on a machine without a GPU, and says what its page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples need torch")
pytest.importorskip("transformers", reason="the third example needs transformers")

FOLDER = Path(__file__).parents[2] / "examples"
#: A line that each prints, without a GPU.
SAYS = {
    "01_first_call.py": "on an H200: fused_attention",
    "02_tune_a_shape.py": "replayed: 10 kernels",
    "03_serve_a_model.py": "equal tokens: 100%",
    "04_train.py": "losses:",
    "05_own_kernel_family.py": "refused: threads_per_row=128 is not one warp",
    "06_jobs_and_service.py": '"total": 2',
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TUNER_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(FOLDER.parent)
    run = subprocess.run(
        [sys.executable, "-P", FOLDER / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert SAYS[name] in run.stdout


def test_the_page_lists_each() -> None:
    page = (FOLDER / "README.md").read_text()
    examples = {path.name for path in FOLDER.glob("*.py")}
    assert examples == set(SAYS)
    assert all(f"`{name}`" in page for name in examples)
    assert all(len((FOLDER / name).read_text().splitlines()) <= 60 for name in examples)
