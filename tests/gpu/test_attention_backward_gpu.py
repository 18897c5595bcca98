"""Our own gradients of attention on the GPU: proofs of kernels with every lever; equal bits; the
gate's own reference; the vendors' adapters; `tuner.attention` and packed sequences.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gating import Gated
from proving import faults
from sanitizer.targets import fused_attention_backward

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import KINDS, offsets, scale_of
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionBackwardProblem, Operand

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
]

TARGETS = {
    one.name: Target(config, problem)
    for one in fused_attention_backward(DEFAULT_GPU)
    for problem, config in one.launches[:1]
}
"""A kernel of every lever."""


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec for one in TARGETS.values() for spec in one.kernels.values())]


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    assert faults(compiler, worker, tmp_path / "kernels.json", TARGETS[name]) == []


@pytest.mark.parametrize("name", TARGETS)
def test_equal_inputs_have_equal_gradients(name: str, gated: Gated) -> None:
    """Those of keys and values always; those of queries where they are added in order."""
    target = TARGETS[name]
    is_ordered = target.config["dq"] == "ordered"
    same = [o.name for o in target.problem.outputs if is_ordered or o.name != "grad_query"]
    gated.repeats(target.problem, target.config, count=5, same=same)


REFERENCES = (
    "B=2,H=4,HKV=2,SQ=200,SKV=300,D=72",
    "H=2,S=190,D=128,causal=1,dtype=bf16,layout=bshd",
    "H=2,SQ=130,SKV=60,D=8,causal=1",
    "B=2,H=4,HKV=2,SQ=300,SKV=200,D=64,left=70,right=9",
    "H=2,S=100,D=256,dtype=bf16",
)


def tensor(device: Device, pointer: int, operand: Operand, dtype: str | None = None) -> Any:
    """An operand as float64 on the CPU."""
    kind = getattr(torch, dtype or operand.dtype)
    width = torch.empty((), dtype=kind).element_size()
    flat = torch.frombuffer(bytearray(device.read(pointer, operand.elements * width)), dtype=kind)
    return flat.as_strided(operand.shape, operand.strides).double()


@pytest.mark.parametrize("label", REFERENCES)
def test_the_gate_s_reference_is_autograd_s(device: Device, gate: Gate, label: str) -> None:
    problem = AttentionBackwardProblem.parse(label)
    gate.open(problem, 5)
    for kind in KINDS[problem.op]:
        gate.load(kind)
        at = {o.name: tensor(device, gate.pointers[o.name], o) for o in problem.inputs}
        leaves = [at[name].requires_grad_() for name in ("query", "key", "value")]
        group = problem.heads_q // problem.heads_kv
        query, key, value = leaves
        keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
        left, right = problem.visible
        rows = torch.arange(problem.seqlen_q)[:, None]
        columns = torch.arange(problem.seqlen_kv)
        hidden = (columns < rows - left) | (columns > rows + right)
        scores = (query @ keys.mT * scale_of(problem, kind)).masked_fill(hidden, -math.inf)
        is_seen = ~hidden.all(-1, keepdim=True)
        weights = scores.masked_fill(~is_seen, 0).softmax(-1) * is_seen
        out = weights @ values
        # Gradients of a row as functions of its rounded output: autograd has the exact one, whose
        # difference takes its part of each score's derivative.
        lost = ((at["out"] - out.detach()) * at["grad_out"]).sum(-1, keepdim=True)
        rounded = (weights.detach() * scores.masked_fill(hidden, 0) * lost).sum()
        wanted = torch.autograd.grad((out * at["grad_out"]).sum() - rounded, leaves)
        assert (at["out"] - out).norm() < 4e-3 * out.norm()
        seen = is_seen[:, 0].expand_as(at["logsumexp"])
        lse = scores.logsumexp(-1)
        # Stored in fp32: of huge scores, which are up to 1e12, half a unit in the last place.
        limits = 1e-4 + 2.0**-24 * lse[seen].abs()
        assert ((at["logsumexp"][seen] - lse[seen]).abs() <= limits).all()
        assert (at["logsumexp"][~seen] == -math.inf).all()
        for operand, gradient in zip(problem.outputs, wanted, strict=True):
            made = tensor(device, gate.reference(kind, operand.name), operand, "float32")
            # Products are summed in fp32, 32 at a time, whose error grows with the scores.
            limit = 2e-5 * max(offsets(problem, kind)) * float(gradient.norm())
            assert float((made - gradient).norm()) <= limit + 1e-9, operand.name


VENDORS = (
    "H=4,S=1000,D=64",
    "B=2,H=8,HKV=2,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "H=4,SQ=128,SKV=640,D=128,dtype=bf16",
    "H=4,S=1024,D=64,causal=1,left=100",
    "H=4,S=512,D=64,causal=1,dtype=bf16,deterministic=1",
)


@pytest.mark.parametrize("label", VENDORS)
@pytest.mark.parametrize("kernel", ["cudnn", "flash2", "flash3"])
def test_vendors_gradients_pass_the_gate(gated: Gated, kernel: str, label: str) -> None:
    """From the log-sum-exp of another forward pass."""
    problem, config = (
        AttentionBackwardProblem.parse(label),
        Config("sdpa_backward", {"kernel": kernel}),
    )
    if kernel == "cudnn" and (problem.window_left >= 0 or problem.is_deterministic):
        assert family("sdpa_backward").violations(problem, config, DEFAULT_GPU)
        return
    gated.passes(problem, config, ["random"])


EXTRAS: dict[str, tuple[int, dict[str, Any]]] = {
    "window": (64, {"is_causal": True, "window": (100, 0)}),
    "window on both sides": (64, {"window": (64, 64)}),
    "soft cap": (128, {"is_causal": True, "softcap": 5.0}),
    "soft cap and window": (256, {"is_causal": True, "softcap": 30.0, "window": (500, 0)}),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", EXTRAS)
def test_gradients_of_windows_and_soft_caps_are_as_near_as_pytorch_s(
    missing_gpu: str, name: str, is_compiled: bool
) -> None:
    """By whatever kernels are proven, eager and in a training graph; grouped heads."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    import tuner

    torch._dynamo.reset()
    head_dim, options = EXTRAS[name]
    torch.manual_seed(0)
    made = [torch.randn(2, heads, 700, head_dim, device="cuda") for heads in (8, 2, 2, 8)]
    *leaves, grad_out = (t.bfloat16().requires_grad_() for t in made)

    def gradients(inputs: list[Any], grad: Any, attend: Any = tuner.attention) -> list[Any]:
        out = attend(*inputs, **options, enable_gqa=True)
        return list(torch.autograd.grad(out, inputs, grad))

    attend = tuner.attention
    if is_compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    before = tuner.stats().hits
    found = gradients(leaves, grad_out, attend)
    hits = tuner.stats().hits - before
    wide = [t.detach().double().requires_grad_() for t in leaves]  # which no kernel takes
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradients(wide, grad_out.double())
        single = [t.detach().float().requires_grad_() for t in leaves]
        near = [t.bfloat16() for t in gradients(single, grad_out.float())]
    errors = [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True)]
        for made in (found, near)
    ]
    way = "compiled" if is_compiled else "eager"
    print(f"{name}, {way}: {hits} kernels, errors {errors[0]} beside rounding alone {errors[1]}")
    assert all(a < 8e-3 for a in errors[0])


def test_gradients_of_packed_sequences_are_those_of_each(missing_gpu: str) -> None:
    """Sequences without queries, without keys, and of unlike lengths."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    import tuner

    torch.manual_seed(0)
    queries, keys = (700, 0, 65, 1, 300), (300, 64, 0, 129, 300)
    starts = [torch.tensor((0, *n), device="cuda").cumsum(0).int() for n in (queries, keys)]
    rows = sum(queries), sum(keys)
    shapes = (rows[0], 8), (rows[1], 2), (rows[1], 2), (rows[0], 8)
    made = [torch.randn(*shape, 128, device="cuda") for shape in shapes]
    *leaves, grad_out = (t.bfloat16().requires_grad_() for t in made)
    for is_causal in (False, True):

        def gradients(inputs: list[Any], grad: Any, is_causal: bool = is_causal) -> tuple[Any, ...]:
            options = {"is_causal": is_causal, "enable_gqa": True}
            out = tuner.attention_varlen(*inputs, *starts, 700, 300, **options)
            return torch.autograd.grad(out, inputs, grad)

        before = tuner.stats().hits
        found = gradients(leaves, grad_out)
        hits = tuner.stats().hits - before
        wide = [t.detach().double().requires_grad_() for t in leaves]
        exact = gradients(wide, grad_out.double())
        pairs = zip(found, exact, strict=True)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
        print(f"causal={is_causal}: {hits} kernels, errors {errors}")
        assert all(error < 8e-3 for error in errors)
