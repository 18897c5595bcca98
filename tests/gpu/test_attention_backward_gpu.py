"""Our own gradients of attention on the GPU: drawn problems against float64, beside
FlashAttention-2's error; equal bits; the gate's own reference; the vendors' adapters.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from backward_configs import BASE, LEVERS
from drawn_children import lines_of

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.attention_instances import instance
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, detect
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import KINDS, offsets, scale_of
from tuner.problem import AttentionBackwardProblem, Operand

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
]

CHILD = Path(__file__).with_name("attention_backward_child.py")
CHILD_S = 180.0
"""Limit of a child, torch's import and float64 references among it."""
CHILDREN, SHARE = 4, 5
"""Children at a time, and kernels of each: torch's import takes longer than a kernel."""
DRAWN, SEED = 128, 0
Case = tuple[AttentionBackwardProblem, Config]
MARGIN = 1.2
"""Largest error over FlashAttention-2's, and over that of rounding alone."""
SMALL = {"float16": 5e-5, "bfloat16": 4e-4}
"""Added to the other's error: of few elements it varies."""


def draw(rng: random.Random) -> AttentionBackwardProblem:
    """Any sizes, masks and layouts; more often near the edges of tiles."""
    head_dim = rng.choice((64, 64, 128, 128, 96, 32, 72, 120, 192, 256, 136))
    heads_kv = rng.choice((1, 2, 3))
    length = rng.choice((rng.randint(1, 200), rng.randint(200, 1500), 64 * rng.randint(1, 12)))
    other = length if rng.random() < 0.6 else max(1, length + rng.choice((-63, -1, 1, 64, 300)))
    mask = rng.choice(("full", "causal", "causal", "window", "left"))
    sides = {"window_left": -1, "window_right": -1}
    if mask in ("window", "left"):
        sides["window_left"] = rng.choice((0, 1, 63, 100, 400))
    if mask == "window":
        sides["window_right"] = rng.choice((1, 64, 130))
    return AttentionBackwardProblem(
        seqlen_q=length,
        seqlen_kv=other,
        head_dim=head_dim,
        batch=rng.choice((1, 1, 2)),
        heads_q=heads_kv * rng.choice((1, 1, 2, 4)),
        heads_kv=heads_kv,
        is_causal=mask in ("causal", "left"),
        dtype=rng.choice(("bfloat16", "float16")),
        layout=rng.choice(("bhsd", "bshd", "bshd_bhsd")),
        **sides,
    )


@cache
def cases() -> tuple[Case, ...]:
    """Drawn problems, each with a config. Problems that compile alike share two configs: the legal
    ones that the fewest others have, so that there are few kernels, and in all of them every lever.
    """
    rng = random.Random("backward")
    member, gpu = family("fused_attention_backward"), detect() or DEFAULT_GPU
    configs = [Config(member.name, {**BASE, **lever}) for lever in LEVERS]
    uses: Counter[Config] = Counter()
    shared: dict[tuple[Any, ...], list[Config]] = {}
    found = []
    for problem in (draw(rng) for _ in range(DRAWN)):
        facts = instance(problem.head_dim), problem.dtype, problem.is_causal, problem.is_windowed
        if facts not in shared:
            legal = [one for one in configs if not member.violations(problem, one, gpu)]
            shared[facts] = sorted(legal, key=uses.__getitem__)[:2]
            uses.update(shared[facts])
        legal = [one for one in shared[facts] if not member.violations(problem, one, gpu)]
        found.append((problem, rng.choice(legal)))
    return tuple(found)


def test_every_lever_is_drawn() -> None:
    used = {tuple(config.params.items()) for _, config in cases()}
    assert used == {tuple({**BASE, **lever}.items()) for lever in LEVERS}


def spec_of(problem: AttentionBackwardProblem, config: Config) -> KernelSpec:
    (spec,) = family("fused_attention_backward").kernels(problem, config).values()
    return spec


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *dict.fromkeys(spec_of(*case) for case in cases())]


@pytest.fixture(scope="module")
def found(compiler: Compiler) -> dict[Case, Any]:
    """Each child's answer for each case, or the fault that ended the child."""
    specs = list(dict.fromkeys(spec_of(*case) for case in cases()))
    submitted = compiler.submit(specs)

    def run(share: Sequence[tuple[KernelSpec, Future[Any]]]) -> dict[Case, Any]:
        keys = {spec: future.result().key for spec, future in share}
        mine = [case for case in cases() if spec_of(*case) in keys]
        draws = [
            {"key": keys[spec_of(*case)], "problem": case[0].to_json(), "config": case[1].to_json()}
            for case in mine
        ]
        wanted = {"artifacts": str(compiler.artifacts.root), "draws": draws}
        try:
            return dict(zip(mine, lines_of(CHILD, wanted, draws, CHILD_S), strict=True))
        except (AssertionError, pytest.fail.Exception) as fault:
            return dict.fromkeys(mine, str(fault))

    shares = [submitted[i : i + SHARE] for i in range(0, len(submitted), SHARE)]
    with ThreadPoolExecutor(CHILDREN) as pool:
        results = {case: one for part in pool.map(run, shares) for case, one in part.items()}
    return {case: results[case] for case in cases()}


def test_gradients_are_as_near_as_a_peer_s(found: dict) -> None:
    faults, peers, worst = [], 0, 0.0
    for (problem, config), result in found.items():
        label = f"{problem.label()} {dict(config.params)}"
        if isinstance(result, str):
            faults.append(f"{label}: {result}")
            continue
        peers += result["has_peer"]
        pairs = list(zip(result["errors"], result["others"], strict=True))
        worst = max([worst, *(a / max(b, 1e-12) for a, b in pairs if b > 1e-4)])
        if not result["finite"] or any(a > MARGIN * b + SMALL[problem.dtype] for a, b in pairs):
            faults.append(f"{label}: {result}")
    print(f"{len(found)} problems, {peers} beside FlashAttention-2, worst ratio {worst:.3f}")
    assert not faults, f"{len(faults)} faults, first: {faults[0]}"
    assert len(found) == DRAWN and peers >= 60


def test_equal_inputs_have_equal_gradients(found: dict) -> None:
    """Those of keys and values always; those of queries where they are added in order."""
    ordered = 0
    for (problem, config), result in found.items():
        if isinstance(result, str):
            continue
        of_query, *others = result["same"]
        assert all(others), problem.label()
        if config["dq"] == "ordered":
            ordered += 1
            assert of_query, problem.label()
    assert ordered >= 10


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
def test_vendors_gradients_are_those_of_float64(missing_gpu: str, kernel: str, label: str) -> None:
    """From the log-sum-exp of another forward pass."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    sys.path.insert(0, str(CHILD.parent))
    import attention_backward_child as child

    problem = AttentionBackwardProblem.parse(label)
    scale = 1 / math.sqrt(problem.head_dim)
    config = Config("sdpa_backward", {"kernel": kernel})
    call = family("sdpa_backward").vendor_call(problem, config, scale)
    if isinstance(call, str):
        pytest.skip(call)
    tensors = child.drawn(problem, 3)
    wanted = child.exact(problem, tensors, scale)
    operands = {operand.name: operand for operand in problem.operands}
    out = child.empty(operands["out"]).copy_(wanted["out"])
    lse = wanted["lse"].float().contiguous()
    inputs = [tensors[name] for name in ("query", "key", "value")]
    grads = call(*inputs, out, lse, tensors["grad_out"])
    limit = {"float16": 1e-3, "bfloat16": 8e-3}[problem.dtype]
    for made, name in zip(grads, ("query", "key", "value"), strict=True):
        assert child.error(made, wanted[name]) < limit, name


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
