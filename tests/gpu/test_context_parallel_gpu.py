"""Ring attention on the GPU: kernels of our own and PyTorch's for halves of a sequence, merged; all
ranks on one GPU, a thread each. Two GPUs over NCCL, where the machine has them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runtime_gpu import call_path, compiled, first_kernels, fresh_store, served_gpu, store

from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_store"),
    # The first product of a process may run in a thread of the backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

own_store, path, gpu = fresh_store, call_path, served_gpu

LENGTH, HEADS = 2048, "H=8,HKV=2,D=128,dtype=bf16"
#: Largest error of bf16 against fp64, relative, Frobenius: of the output, of gradients.
TOLERANCE = 8e-3, 2e-2
PATIENCE_S = 90
"""Limit of both ranks, from their start to their end."""


def partials(ranks: int, is_causal: bool) -> list[AttentionProblem]:
    """The problems of one rank's steps."""
    part = LENGTH // ranks
    sizes = [f"S={part},causal=1", f"SQ={part},SKV={part // 2}", f"SQ={part // 2},SKV={part}"]
    every = sizes if is_causal else [f"S={part}"]
    return [AttentionProblem.parse(f"{HEADS},{size}") for size in every]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    problems = [*partials(2, True), *partials(2, False)]
    every = [spec for problem in problems for spec in first_kernels(problem, "fused_attention")]
    return list(dict.fromkeys(every))


def drawn() -> list[Any]:
    """Whole query, key, value and gradient of the output."""
    torch.manual_seed(0)
    return [
        torch.randn(1, heads, LENGTH, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2, 8)
    ]


def check(found: list[Any], whole: list[Any], is_causal: bool) -> None:
    """Compare output and gradients with attention of the whole sequence in fp64."""
    *inputs, grad_out = (tensor.double() for tensor in whole)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(*inputs, is_causal=is_causal, enable_gqa=True)
    grads = torch.autograd.grad(out, inputs, grad_out)
    limits = [TOLERANCE[0], *[TOLERANCE[1]] * 3]
    for ours, wanted, limit in zip(found, (out, *grads), limits, strict=True):
        wanted = wanted.detach()
        assert float((ours.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.compile
@pytest.mark.parametrize("is_causal", [True, False])
def test_own_kernels_serve_the_steps_of_each_rank(
    is_causal: bool, path: str, compiler: Compiler, gpu: Gpu
) -> None:
    from threaded_ring import attend

    import tuner

    for problem in partials(2, is_causal):
        config, artifacts = compiled(compiler, problem, gpu, "fused_attention")
        store(problem, gpu, config, artifacts=artifacts)
    whole = drawn()
    tuner.stats(reset=True)
    found = attend(whole, 2, is_causal)
    assert tuner.stats().hits == 4, tuner.stats()
    check(found, whole, is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_pytorch_s_kernels_serve_them_too(ranks: int, is_causal: bool) -> None:
    from threaded_ring import attend

    whole = drawn()
    check(attend(whole, ranks, is_causal), whole, is_causal)


def test_equal_calls_give_equal_bits_under_deterministic_algorithms() -> None:
    from threaded_ring import attend

    whole = drawn()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (attend(whole, 4, True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def ended() -> list[tuple[int, str, str]]:
    """Exit code, output and errors of both ranks of `ring_over_nccl`."""
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        pytest.skip(f"{torch.cuda.device_count()} GPU, two and NCCL are needed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("ring_over_nccl.py")
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Else NCCL's watchdog waits a minute for a dump that nobody reads here.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    limit, said = time.monotonic() + PATIENCE_S, []
    for process in processes:
        try:
            said.append(process.communicate(timeout=max(0.0, limit - time.monotonic())))
        except subprocess.TimeoutExpired:
            for one in processes:
                one.kill()
            out, err = process.communicate()
            said.append((out, f"killed after {PATIENCE_S} s: {err}"))
    codes = [process.returncode for process in processes]
    return [(code, *texts) for code, texts in zip(codes, said, strict=True)]


def test_two_gpus_give_what_one_does(ended: list[tuple[int, str, str]]) -> None:
    for _, out, err in ended:
        assert out, err
        seen = json.loads(out.splitlines()[0])
        assert seen["repeats"] and seen["agreed"]
        assert seen["errors"][0] < TOLERANCE[0] and max(seen["errors"][1:]) < TOLERANCE[1]


def test_a_killed_rank_ends_the_other(ended: list[tuple[int, str, str]]) -> None:
    (code, out, err), (killed, _, _) = ended
    assert killed == -signal.SIGKILL
    assert code not in (0, -signal.SIGKILL) and "unreachable" not in out, err
