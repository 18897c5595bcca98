"""The softmax template through nvcc: no spills, wide accesses, and refusals before any launch."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError
from tuner.families.base import KernelSpec
from tuner.families.softmax import Softmax
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SoftmaxProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = Softmax()
PROBLEMS = [
    SoftmaxProblem.parse(text)
    for text in (
        "M=1024,N=1024,B=16",
        "M=1024,N=1024,B=16,causal=1,dtype=bf16",
        "M=64,N=1001,causal=1",
        "M=4096,N=49152",
        "M=16,N=8",
    )
]
#: The fullest registers of a block of 1024, 512 and 256 threads: see softmax.OTHER_REGISTERS.
TIGHTEST = [(49152, 1024, 8, 1), (57344, 512, 8, 1), (32768, 256, 8, 1), (768, 16, 8, 64)]


def config(threads: int = 32, width: int = 4, rows: int = 4, passes: int = 1) -> Config:
    names = ("threads_per_row", "vector_width", "rows_per_block", "passes")
    return Config("softmax", dict(zip(names, (threads, width, rows, passes), strict=True)))


def spec_of(problem: SoftmaxProblem, chosen: Config) -> KernelSpec:
    return FAMILY.kernels(problem, chosen)["softmax"]


def sample() -> list[tuple[SoftmaxProblem, Config]]:
    rng = random.Random(2)
    drawn = [
        (problem, chosen)
        for problem in PROBLEMS
        for chosen in rng.sample(FAMILY.space(problem, DEFAULT_GPU), 2)
    ]
    tightest = [(SoftmaxProblem(64, cols, is_causal=True), config(*p)) for cols, *p in TIGHTEST]
    return drawn + tightest


LOADED = spec_of(SoftmaxProblem(8, 64, is_causal=True), config())
SPECS = [LOADED]
DEVICE_SPECS = [spec_of(problem, chosen) for problem, chosen in sample()]


def test_a_sample_of_the_space_compiles_without_spills(device_compiler: Compiler) -> None:
    for problem, chosen in sample():
        assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
    for spec, future in device_compiler.submit(DEVICE_SPECS):
        resources = future.result().resources
        assert resources is not None, spec.key
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), spec.key
        block = spec.variables["threads_per_row"] * spec.variables["rows_per_block"]
        assert resources.registers * block <= 65536, spec.key


@pytest.mark.parametrize(
    ("chosen", "cols", "reason"),
    [
        (config(threads=256, rows=8), 64, "a block is 1 to 32 whole warps"),
        (config(threads=16, rows=1), 64, "a block is 1 to 32 whole warps"),
        (config(threads=1024, width=8, rows=1), 53248, "16 others fit its registers"),
        (config(threads=32), 4608, "16 others fit its registers"),
    ],
)
def test_what_the_predicate_rejects_does_not_compile(
    device_compiler: Compiler, chosen: Config, cols: int, reason: str
) -> None:
    problem = SoftmaxProblem(8, cols)
    assert FAMILY.violations(problem, chosen, DEFAULT_GPU)
    ((_, future),) = device_compiler.submit([spec_of(problem, chosen)])
    with pytest.raises(CompileError) as caught:
        future.result()
    assert reason in caught.value.log


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    ((_, future),) = compiler.submit(SPECS)
    kernel = load(future.result())
    fine = {"rows": 8, "cols": 64, "scores": 64, "probabilities": 64, "query_rows": 8, "pdl": 0}
    assert kernel.workspace_bytes(tuple(fine.values())) == 0
    wrong: list[tuple[dict[str, int], tuple[int, int]]] = [
        ({"rows": 0}, (256, 512)),
        ({"rows": 2**31}, (256, 512)),
        ({"cols": 132, "scores": 132, "probabilities": 132}, (256, 512)),
        ({"scores": 66}, (256, 512)),
        ({"probabilities": 60}, (256, 512)),
        ({"query_rows": 0}, (256, 512)),
        ({}, (264, 512)),
        ({}, (256, 516)),
        ({}, (256, 0)),
        ({}, (256, 256)),
    ]
    for changes, tensors in wrong:
        with pytest.raises(BenchmarkError):
            kernel.launch(tensors, tuple({**fine, **changes}.values()), (1.0, 1.0), 0, 0)


def test_accesses_are_as_wide_as_the_vectors(compiler: Compiler, tmp_path: Path) -> None:
    source = tmp_path / "softmax.cu"
    for width, wanted in (
        (8, ("ld.global.v4.f32", "st.global.v4.u32")),
        (2, ("ld.global.v2.f32", "st.global.u32")),
    ):
        spec = spec_of(SoftmaxProblem(8, 1024), config(width=width))
        source.write_text(render(spec, "wide"))
        command = [str(compiler.toolchain.nvcc), "-std=c++17", "-O3", "-ptx", "-arch=sm_90a"]
        command.append(f"-I{resources.templates()}")
        subprocess.run([*command, "-o", str(tmp_path / "out.ptx"), str(source)], check=True)
        text = (tmp_path / "out.ptx").read_text()
        for instruction in wanted:
            assert instruction in text, f"vector_width={width}: no {instruction}"
        assert "ld.global.f32" not in text
