"""Kernels that answer a model's calls: built from Python, and served alike on two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection.answering import answering

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]

#: Products of few rows, some of which a portfolio leaves to PyTorch.
PRODUCTS = [
    GemmProblem.parse(f"M={m},N={n},K={k},dtype=bf16")
    for m, n, k in ((4, 4096, 14336), (1, 1024, 4096), (1, 4096, 4096), (4, 1024, 4096))
]
PRODUCT = next(one for one in PRODUCTS if answering(one, DEFAULT_GPU).config is not None)
#: Calls of `Block` below.
PROBLEMS = [AttentionProblem.parse("B=2,H=8,S=512,D=128,causal=1,dtype=bf16"), PRODUCT]
RANK = """
import json, os, sys, torch, torch.distributed as dist
import tuner
from tuner.problem import AttentionProblem
from tuner.runtime.parallel.distributed import agree

torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
dist.init_process_group("gloo")
agreement = agree()
generator = torch.Generator().manual_seed(3)
seen = []
for length in range(256, 256 + 20 * 64, 64):
    problem = AttentionProblem.parse(f"H=8,S={length},D=128,causal=1,dtype=bf16")
    tensors = [
        torch.randn(one.shape, generator=generator).bfloat16().cuda()
        for one in problem.operands[:3]
    ]
    before = tuner.stats().portfolio_hits
    out = tuner.attention(*tensors, is_causal=True)
    hit = tuner.stats().portfolio_hits > before
    seen.append([hit, out.float().sum().item(), out.view(torch.int16).long().sum().item()])
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"refusal": agreement.refusal, "proven": len(agreement.proven), "seen": seen}))
"""


class Block(torch.nn.Module):
    """Attention, and a product of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(PRODUCT.k, PRODUCT.n, bias=False)

    def forward(self, query: Any, key: Any, value: Any, x: Any) -> tuple[Any, Any]:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True), self.layer(x)


def test_a_model_is_prepared_and_served() -> None:
    torch.manual_seed(0)
    model = Block().bfloat16().cuda()
    tensors = [torch.randn(2, 8, 512, 128).bfloat16().cuda() for _ in range(3)]
    example = (*tensors, torch.randn(PRODUCT.m, PRODUCT.k).bfloat16().cuda())
    with torch.no_grad():
        wanted = model.double()(*(one.double() for one in example))
        model.bfloat16()
        tuner.tune_linear_(model)
        calls = tuner.prepare(model, example)
        assert list(calls) == PROBLEMS and set(calls.values()) == {1}
        tuner.stats(reset=True)
        with tuner.enabled():
            outputs = model(*example)
    for out, right in zip(outputs, wanted, strict=True):
        assert ((out.double() - right).norm() / right.norm()).item() < 8e-3
    stats = tuner.stats()
    assert stats.hits == 2, stats.fallbacks


def test_two_ranks_answer_alike_by_the_portfolio(tmp_path: Path) -> None:
    """On two GPUs, or both ranks on one; over gloo. The kernels are those of the test above."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(Path(tuner.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    assert first == second and first["refusal"] == "" and first["proven"] > 0
    assert len(first["seen"]) == 20 and any(hit for hit, *_ in first["seen"])
