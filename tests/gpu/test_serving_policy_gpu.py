"""From a sweep to a shape that nobody tuned, a revalidation and a machine without a compiler.

Every step is a process of its own, as users run them, over a store of the test's own; what other
tests compiled is not compiled again.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tuner.base.processes import python_command, python_environment

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

#: One head: out of reach of all that ships.
TUNED, UNTUNED = "S=512,D=64,H=1", "S=520,D=64,H=1"
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
print(json.dumps([error, stats.hits, stats.nearest_hits, dict(stats.fallbacks)]))
"""


def run(cache: Path, *arguments: str, **variables: str) -> str:
    """Standard output of a command that has to end well."""
    inherited = {k: v for k, v in python_environment().items() if k != "TUNER_STORE"}
    done = subprocess.run(
        python_command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**inherited, "TUNER_CACHE_DIR": str(cache), **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tuner(cache: Path, *arguments: str, **variables: str) -> Any:
    return json.loads(run(cache, "-m", "tuner", *arguments, "--json", **variables))


def call(cache: Path, length: int) -> tuple[float, int, int, dict[str, int]]:
    error, hits, nearest, fallbacks = json.loads(run(cache, "-c", CALL, str(length)))
    return error, hits, nearest, fallbacks


@pytest.fixture(scope="module")
def cache(
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
    missing_gpu: str,
    missing_compiler: str,
) -> Path:
    """A cache in which one shape was swept, and what it decided checked around it."""
    if reason := missing_gpu or missing_compiler:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("serving")
    (shared_cache / "artifacts").mkdir(parents=True, exist_ok=True)
    (folder / "artifacts").symlink_to((shared_cache / "artifacts").resolve())
    tuner(folder, "sweep", "--shape", TUNED, "--family", "fused_attention", "--trials", "4")
    return folder


@pytest.fixture(scope="module")
def lender(cache: Path) -> dict[str, Any]:
    """What a second widening says; it measures nothing that the sweep's end did not."""
    (entry,) = tuner(cache, "widen", "--shape", TUNED)["entries"]
    assert entry["lenders"], "the sweep decided without an own config"
    best: dict[str, Any] = entry["lenders"][0]
    assert best["passed"] >= 4, best
    assert best["failed"] == []
    assert best["lends"]
    return best


def test_a_shape_that_nobody_tuned(cache: Path, lender: dict[str, Any]) -> None:
    answer = tuner(cache, "lookup", "--shape", UNTUNED)
    error, hits, nearest, fallbacks = call(cache, 520)
    assert error < 1e-3
    assert answer["kind"] == "nearest", f"{answer['notes']}; the lender: {lender}"
    assert (hits, nearest, fallbacks) == (1, 1, {})


def test_a_shape_out_of_reach_is_pytorchs(cache: Path, lender: dict[str, Any]) -> None:
    error, hits, nearest, fallbacks = call(cache, 4096)
    assert error < 1e-3
    assert (hits, nearest) == (0, 0)
    assert sum(fallbacks.values()) == 1


def test_revalidating_takes_no_search(cache: Path, lender: dict[str, Any]) -> None:
    (entry,) = tuner(cache, "revalidate", "--shape", TUNED)["entries"]
    assert entry["failed"] == []
    assert entry["own_over_vendor"]
    assert tuner(cache, "lookup", "--shape", TUNED)["kind"] == "exact"


def test_a_machine_without_a_compiler(cache: Path, lender: dict[str, Any], tmp_path: Path) -> None:
    packed = tuner(cache, "bundle", str(tmp_path / "b.tar"), "--shape", TUNED)
    other = tmp_path / "other"
    none = {"TUNER_NVCC": "/nonexistent/nvcc"}
    install = ("bundle", "install", str(tmp_path / "b.tar"), "--sha256", packed["sha256"])
    done = tuner(other, *install, **none)
    assert (done["entries_added"], done["kernels_added"]) == (1, packed["kernels"])
    for length, is_nearest in ((512, 0), (520, 1)):
        error, hits, nearest, fallbacks = call(other, length)
        assert error < 1e-3
        assert (hits, nearest, fallbacks) == (1, is_nearest, {})
