"""Every example runs to its end on the GPU, where calls are answered on the device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from programs import ran

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    if path.stem == "03_serve_a_model":
        pytest.importorskip("transformers", reason="the example needs transformers")
    if path.stem == "06_jobs_and_service":
        pytest.importorskip("uvicorn", reason="the example needs the extra `service`")
    search = str(path.parents[1]), os.environ.get("PYTHONPATH", "")
    run = ran(
        sys.executable,
        "-P",
        path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        timeout=380,
    )
    assert "not on a CUDA device" not in run.stdout
