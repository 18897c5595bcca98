"""The Triton family through Triton's compiler, ahead of time and without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from programs import ran

from tuner.compile import triton_compiler
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.compile.toolchain import Toolchain, find_toolchain
from tuner.config import Config, Value
from tuner.errors import CompileError
from tuner.families.triton_attention import TritonAttention, smem_bytes
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem

FAMILY = TritonAttention()
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(bool(FAMILY.lacks()), reason=FAMILY.lacks() or "Triton is here"),
]

GPUS = {
    capability: Gpu(capability, capability, 108, 1410, 2000.0, 40 << 20)
    for capability in ("8.0", "8.6", "9.0", "10.0", "12.0")
}


def make(block_m: int, block_n: int, num_warps: int, num_stages: int, **more: Value) -> Config:
    params: dict[str, Value] = {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **more,
    }
    return Config(FAMILY.name, params)


SAMPLE = [
    (AttentionProblem.parse(shape), config)
    for shape, config in (
        ("S=1024,D=64", make(128, 64, 4, 3)),
        ("S=1000,D=128,causal=1,dtype=bf16,layout=bshd", make(128, 64, 8, 2)),
        ("H=32,HKV=8,SQ=1,SKV=4096,D=128", make(16, 64, 4, 3, packed_heads=4)),
        ("S=1024,D=40", make(64, 32, 4, 2)),
    )
]


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return find_toolchain()


@pytest.mark.parametrize("capability", GPUS)
def test_a_unit_becomes_artifacts(capability: str, tools: Toolchain, shared_cache: Path) -> None:
    """All kernels in one unit; loaded, asked for a workspace, refused for want of a GPU."""
    specs = []
    for problem, config in SAMPLE:
        assert FAMILY.violations(problem, config, GPUS[capability]) == []
        specs += FAMILY.kernels(problem, config).values()
    cache = ArtifactCache(shared_cache / "artifacts")
    with Compiler(tools, cache, jobs=1, capability=capability) as compiler:
        built = [future.result() for _, future in compiler.submit(specs)]
    for (problem, config), artifact in zip(SAMPLE, built, strict=True):
        assert artifact.resources is not None
        assert 32 < artifact.resources.registers <= 255
        assert artifact.resources.spill_store_bytes == 0
        assert artifact.facts["triton"] == tools.triton_version
        assert artifact.facts["capability"] == capability
        assert artifact.compile_cpu_s > 0
        [launch] = FAMILY.launches(problem, config, 0.125)
        assert load(artifact).workspace_bytes(launch.integers) == 0
        done = ran("nm", "-D", "--defined-only", str(artifact.library))
        exported = {line.split()[-1] for line in done.stdout.splitlines()}
        assert {f"tuner_{artifact.key}_launch", f"tuner_{artifact.key}_workspace"} <= exported
        assert all(name.startswith("tuner_") for name in exported), "nothing else is exported"


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_shared_memory_is_at_least_what_legality_says(
    capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at most a quarter more, up to what changing layouts takes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    for head_dim, config in (
        (64, make(64, 64, 4, 4)),
        (64, make(128, 128, 8, 2)),
        (128, make(64, 32, 4, 3)),
        (128, make(32, 64, 2, 2)),
    ):
        problem = AttentionProblem.parse(f"S=1024,D={head_dim}")
        [spec] = FAMILY.kernels(problem, config).values()
        path = tmp_path / f"unit_{config.digest}_{head_dim}.py"
        path.write_text(render(spec, "0"))
        made = triton_compiler.compiled("0", triton_compiler._load(path).BUILD_0, capability)
        least = smem_bytes(problem, config, GPUS[capability])
        assert least <= made["shared"] <= 1.25 * least + 4096, (config.to_json(), made["shared"])
        assert made["threads"] == 32 * config["num_warps"]
        assert made["types"] == "pppppiiii" + 4 * "lli" + "f"


def test_too_much_shared_memory_is_refused_with_its_size(tools: Toolchain, tmp_path: Path) -> None:
    """What the estimate lets through, the compiler's own figure does not."""
    problem, config = AttentionProblem.parse("S=1024,D=256"), make(128, 128, 8, 3)
    assert FAMILY.violations(problem, config, GPUS["8.6"])
    [spec] = FAMILY.kernels(problem, config).values()
    with Compiler(tools, ArtifactCache(tmp_path / "cache"), capability="8.6") as compiler:
        [(_, future)] = compiler.submit([spec])
        with pytest.raises(CompileError, match=r"bytes of shared memory exceed 101376"):
            future.result()


def test_one_bad_kernel_does_not_cost_its_neighbours(tools: Toolchain, tmp_path: Path) -> None:
    problem = AttentionProblem.parse("S=1024,D=256")
    specs = [
        FAMILY.kernels(problem, config)["attention"]
        for config in (make(64, 32, 8, 2), make(128, 128, 8, 3))
    ]
    with Compiler(tools, ArtifactCache(tmp_path / "cache"), jobs=1, capability="8.6") as compiler:
        good, bad = [future for _, future in compiler.submit(specs)]
        assert good.result().facts["kernels_in_unit"] == 1
        with pytest.raises(CompileError, match="shared memory"):
            bad.result()


def test_importing_the_package_does_not_import_triton() -> None:
    assert importlib.util.find_spec("triton") is not None
    code = (
        "import sys, tuner.compile.compiler; from tuner.families import families; families(); "
        "print('triton' in sys.modules)"
    )
    done = ran(sys.executable, "-c", code)
    assert done.stdout.strip() == "False"
