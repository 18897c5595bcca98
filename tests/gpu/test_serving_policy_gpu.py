"""From a sweep to a call, a revalidation and a machine without a compiler.

Every step is a process of its own, as users run them, over a store of the test's own; what other
tests compiled is not compiled again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import ran

from tuner.base.processes import python_command, python_environment

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

TUNED = "S=512,D=64,H=1"
TIMEOUT_S = 540
#: (1, 1, S, 64) through `tuner.attention`, against SDPA in fp64; prints the counters.
CALL = """
import json, sys, torch, tuner
length = int(sys.argv[1])
tensors = [torch.randn(1, 1, length, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
out = tuner.attention(*tensors)
wide = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors))
stats = tuner.stats()
error = ((out.double() - wide).norm() / wide.norm()).item()
print(json.dumps([error, stats.hits, stats.portfolio_hits, dict(stats.fallbacks)]))
"""


def run(cache: Path, *arguments: str, **variables: str) -> str:
    """Standard output of a command that has to end well."""
    inherited = {k: v for k, v in python_environment().items() if k != "TUNER_STORE"}
    done = ran(
        *python_command(*arguments),
        timeout=TIMEOUT_S,
        env={**inherited, "TUNER_CACHE_DIR": str(cache), **variables},
    )
    return done.stdout


def tuner(cache: Path, *arguments: str, **variables: str) -> Any:
    return json.loads(run(cache, "-m", "tuner", *arguments, "--json", **variables))


def call(cache: Path, length: int) -> tuple[float, int, int, dict[str, int]]:
    error, hits, selected, fallbacks = json.loads(run(cache, "-c", CALL, str(length)))
    return error, hits, selected, fallbacks


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
    missing_gpu: str,
    missing_compiler: str,
) -> Path:
    """A cache in which one shape was swept."""
    if reason := missing_gpu or missing_compiler:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("serving")
    (shared_cache / "artifacts").mkdir(parents=True, exist_ok=True)
    (folder / "artifacts").symlink_to((shared_cache / "artifacts").resolve())
    tuner(folder, "sweep", "--shape", TUNED, "--family", "fused_attention", "--trials", "2")
    return folder


def test_a_shape_that_was_tuned_is_served_by_its_decision(cache: Path) -> None:
    error, hits, selected, fallbacks = call(cache, 512)
    assert error < 1e-3
    assert (hits, selected, fallbacks) == (1, 0, {})


def test_revalidating_takes_no_search(cache: Path) -> None:
    (entry,) = tuner(cache, "revalidate", "--shape", TUNED)["entries"]
    assert entry["failed"] == []
    assert entry["own_over_vendor"]
    assert tuner(cache, "lookup", "--shape", TUNED)["kind"] == "exact"


def test_a_machine_without_a_compiler(cache: Path, tmp_path: Path) -> None:
    packed = tuner(cache, "bundle", str(tmp_path / "b.tar"), "--shape", TUNED)
    other = tmp_path / "other"
    none = {"TUNER_NVCC": "/nonexistent/nvcc"}
    install = ("bundle", "install", str(tmp_path / "b.tar"), "--sha256", packed["sha256"])
    done = tuner(other, *install, **none)
    assert (done["entries_added"], done["kernels_added"]) == (1, packed["kernels"])
    error, hits, selected, fallbacks = call(other, 512)
    assert error < 1e-3
    assert (hits, selected, fallbacks) == (1, 0, {})
