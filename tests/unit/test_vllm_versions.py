"""The plug-in beside the real classes of several vLLM versions.

``TUNER_TEST_VLLM`` names a folder with a sub-folder for each version, named after it: what
``unzip vllm-*.whl 'vllm/*.py'`` unpacks. Each version has processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from programs import ran

from tuner.runtime.engines.versions import VLLM

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDER = os.environ.get("TUNER_TEST_VLLM")
UNPACKED = sorted(path for path in Path(FOLDER).iterdir() if path.is_dir()) if FOLDER else [None]
MIN_PASSED = 50
"""Tests of `FILES` that no version skips."""
FILES = "tests/unit/test_runtime_vllm.py", "tests/unit/test_vllm_entry_point.py"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER, reason="TUNER_TEST_VLLM names no folder of unpacked vLLM"),
]


def printed(folder: Path, *arguments: str) -> str:
    """What Python prints with this vLLM importable; fails with it on an error."""
    paths = os.pathsep.join(map(str, (ROOT, SUPPORT)))
    environment = {**os.environ, "PYTHONPATH": paths, "ENGINE_UNPACKED": str(folder)}
    done = ran(sys.executable, "-P", *arguments, cwd=ROOT, env=environment)
    return done.stdout


def named(folder: Path | None) -> str:
    return folder.name if folder else "none"


@pytest.mark.parametrize("folder", UNPACKED, ids=named)
def test_its_plug_ins_load(folder: Path) -> None:
    """By vLLM's own loader, which stops each of its processes when one raises."""
    found = json.loads(printed(folder, str(SUPPORT / "vllm_registered.py")).splitlines()[-1])
    if reason := VLLM.refusal(folder.name):
        wanted = {"lines": [f"vLLM keeps its own kernels: {reason}"], "registered": []}
    else:
        path = "tuner.runtime.engines.vllm.backend.TunerBackend"
        refusals = ["needs a GPU of compute capability 9.0", "the tensors are not on a CUDA device"]
        linear = [*refusals, [True, ""], [[2, 5, 256, 384, 256, 3, 2]]]
        latent = ["tuner.runtime.engines.vllm.latent.TunerLatentBackend", [3, 2, 16, 576]]
        latent += [[6, 16, 512], [6, 16]]
        wanted = {"lines": [], "registered": [path, "tuner", [128, 128], *linear, latent]}
    assert found == wanted


@pytest.mark.parametrize("folder", UNPACKED, ids=named)
def test_its_classes_serve_and_refuse_as_the_stand_ins_do(folder: Path) -> None:
    if reason := VLLM.refusal(folder.name):
        pytest.skip(reason)
    others = "not first and not last"
    options = "-p", "engine_unpacked", "-q", "-k", others, "-p", "no:cacheprovider"
    out = printed(folder, "-m", "pytest", *options, *FILES)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) >= MIN_PASSED and "is not installed" not in out, out
