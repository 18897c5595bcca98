"""The plug-in beside the real classes of SGLang, over CPU tensors.

``TUNER_TEST_SGLANG`` names a folder with a sub-folder for each version, named after it: what
``pip install --no-deps --target FOLDER sglang==VERSION`` and then the same with ``dill msgspec
orjson psutil pybase64 pillow pyzmq`` unpack. SGLang's other dependencies, its compiled kernels and
Triton among them, are empty (`engine_unpacked`). Each version has processes of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from programs import ran

from tuner.runtime.engines.versions import SGLANG

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDER = os.environ.get("TUNER_TEST_SGLANG")
UNPACKED = sorted(path for path in Path(FOLDER).iterdir() if path.is_dir()) if FOLDER else [None]
MIN_CASES = 15
"""Cases of SGLang's own harness with pages that are served."""
TOLERANCE = 4e-3
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER, reason="TUNER_TEST_SGLANG names no folder of unpacked SGLang"),
]


def named(folder: Path | None) -> str:
    return folder.name if folder else "none"


@pytest.mark.parametrize("folder", UNPACKED, ids=named)
def test_its_classes_load_the_plug_in_and_serve_its_own_cases(folder: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT))),
        "ENGINE_UNPACKED": str(folder),
        "TORCHDYNAMO_DISABLE": "1",  # it would look into an empty Triton
    }
    done = ran(sys.executable, "-P", str(SUPPORT / "sglang_real.py"), cwd=ROOT, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    if reason := SGLANG.refusal(folder.name):
        assert found == {"lines": [f"SGLang keeps its own kernels: {reason}"]}
        return
    package = "tuner.runtime.engines.sglang"
    (line,) = found["lines"]
    assert line.startswith("pages have 64 slots")
    assert found["choices"] == {
        "attention_backend": "tuner",
        "page_size": {"page_size": 64},
        "quantization": "tuner",
        "created_by": package,
        "config": f"{package}.quantization",
    }
    assert found["methods"] == ["SglangLinearMethod", "SglangFp8LinearMethod", "tuner"]
    errors = found["errors"]
    assert len(errors) >= MIN_CASES
    assert {name for name, error in errors.items() if not 0 <= error < TOLERANCE} == set()
