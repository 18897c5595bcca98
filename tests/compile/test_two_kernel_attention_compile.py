"""Both kernels of the two-kernel attention through nvcc."""

from __future__ import annotations

import pytest

from tuner.compiler import Compiler
from tuner.config import Config
from tuner.families.fused_attention import launch_registers
from tuner.families.two_kernel_attention import TwoKernelAttention
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

FAMILY = TwoKernelAttention()
PROBLEM = AttentionProblem.parse("S=1024,D=64,causal=1,softcap=30")
CONFIG = Config(
    FAMILY.name,
    {
        "tile_n": 128,
        "scores_groups": 2,
        "scores_stages": 3,
        "scores_buffers": 2,
        "scores_blocks_per_sm": 1,
        "output_groups": 1,
        "output_stages": 3,
        "output_buffers": 2,
        "output_blocks_per_sm": 2,
        "heads_per_launch": 16,
        "rows_per_launch": 1024,
        "splits": 1,
        "pdl": True,
    },
)


def test_both_kernels_compile_without_spills_or_advice(compiler: Compiler) -> None:
    """ptxas advises where it serializes WGMMAs or ignores setmaxnreg: C7504 to C7515."""
    assert FAMILY.violations(PROBLEM, CONFIG, DEFAULT_GPU) == []
    specs = FAMILY.kernels(PROBLEM, CONFIG)
    futures = dict(compiler.submit(list(specs.values())))
    for stage, spec in specs.items():
        artifact = futures[spec].result()
        used = artifact.resources
        assert used is not None
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), stage
        assert artifact.facts["advice"] == [], stage
        groups, resident = (CONFIG[f"{stage}_{name}"] for name in ("groups", "blocks_per_sm"))
        launched = used.registers * 128 * (groups + 1)
        assert launched <= launch_registers(groups, resident)
        of_groups = groups * spec.variables["consumer_registers"]
        assert 128 * (spec.variables["producer_registers"] + of_groups) <= launched
