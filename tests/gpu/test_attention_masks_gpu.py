"""Sliding windows and soft caps on the GPU: proofs of our own kernels, the vendors' through the
gate, and `tuner.attention` with and without a tuned kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fused_configs import maker
from gating import Gated
from proving import attention_target, faults
from runtime_gpu import forget, fresh_store, inputs, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]
own_store = fresh_store

FAMILY = family("fused_attention")
make = maker(early_exp=50, ping_pong=True)

#: Heads, head dimension, type and mask of a problem (what a kernel is compiled for), and a config.
WINDOWED = {
    "causal": (
        "B=2,H=3,D=64,causal=1", make(2, 128, 1, persistent=True)
    ),
    "full, packed": (
        "B=2,H=8,HKV=2,D=64,layout=bshd", make(2, 96, 2, packed_heads=4)
    ),
    "full, padded": ("B=2,H=14,HKV=2,D=64", make(1, 64, packed_heads=8, pads_heads=True)),
    "causal, packed, capped": (
        "B=1,H=4,HKV=2,D=128,causal=1,softcap=30,dtype=bf16",
        make(2, 80, 1, packed_heads=2, key_groups=2, ping_pong=False),
    ),
}  # fmt: skip
CAPPED = {
    "full": ("B=2,H=2,D=64", make(2, 128, 2)),
    "causal": ("B=2,H=2,D=128,causal=1", make(2, 128, 1, persistent=True)),
}


TARGETS = {
    **{f"window, {name}": (f"{text},window=9", c) for name, (text, c) in WINDOWED.items()},
    **{f"soft cap, {name}": (f"{text},softcap=9", c) for name, (text, c) in CAPPED.items()},
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec(f"S=512,{text}", config) for text, config in TARGETS.values())]


def spec(text: str, config: Config) -> KernelSpec:
    return FAMILY.kernels(AttentionProblem.parse(text), config)["attention"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    """Also over split keys, some splits of which have no keys of a window."""
    target = attention_target(*TARGETS[name])
    assert faults(compiler, worker, tmp_path / "kernels.json", target) == []


@pytest.mark.parametrize("kernel", ["flash2", "naive"])
@pytest.mark.parametrize("window", ["causal=1,left=100", "left=64,right=7", "right=100"])
def test_vendors_compute_the_same_window(kernel: str, window: str, gated: Gated) -> None:
    problem = AttentionProblem.parse(f"B=2,H=4,HKV=2,S=600,D=64,{window}")
    gated.passes(problem, Config("vendor_sdpa", {"kernel": kernel}), ["random"])


def test_a_model_is_served_with_and_without_a_tuned_kernel(
    own_store: None, compiler: Compiler
) -> None:
    import tuner

    text, config = WINDOWED["causal"]
    problem = AttentionProblem.parse(f"S=1000,{text},window=100")
    tensors = inputs(problem)
    wide = [t.double() for t in tensors]
    attend = torch.nn.functional.scaled_dot_product_attention
    seen = torch.ones(1000, 1000, dtype=torch.bool, device="cuda").tril().triu(-100)
    wanted, plain = attend(*wide, seen), attend(*wide, is_causal=True)

    def error(reference: Any, **options: Any) -> float:
        out = tuner.attention(*tensors, is_causal=True, **options)
        return float((out.double() - reference).norm() / reference.norm())

    assert error(wanted, window=(100, 0)) < 1e-3  # composed
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}

    [(_, future)] = compiler.submit([spec(problem.label(), config)])
    store(problem, this_gpu(), config, artifacts={"attention": future.result().key})
    forget()
    for _ in range(2):
        assert error(wanted, window=(100, 0)) < 1e-3
    assert tuner.stats(reset=True).hits == 2
    assert error(plain) < 1e-3  # a plain call is not given the windowed kernel
