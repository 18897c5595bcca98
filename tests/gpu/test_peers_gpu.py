"""Adapters of libraries and peers on the GPU: against float64, captured in a graph, and served."""

from __future__ import annotations

import math
from typing import Any

import pytest
from runtime_gpu import fresh_store, served_gpu

from tuner.config import Config
from tuner.families import family
from tuner.families.peers import ListedVendor, installed, lt
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import E4M3, AttentionProblem, GemmProblem, Problem, SwigluProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

own_store, gpu = fresh_store, served_gpu

#: Relative Frobenius errors against float64, by the output's type.
LIMITS = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 1e-3}
E4M3_LIMIT = 6e-2
"""Of quantised operands; attention also rounds its probabilities."""
ATTENTION = (
    "H=4,S=1000,D=64",
    "B=2,H=8,HKV=2,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "H=4,SQ=128,SKV=640,D=128,dtype=bf16",
    "H=4,S=640,D=256,causal=1",
    "H=4,S=1024,D=64,causal=1,left=100",
    "H=4,S=512,D=64,causal=1,bias=h",
)
PRODUCTS = (
    "M=16,N=1024,K=2048,dtype=bf16",
    "M=300,N=768,K=256,layout_a=col,layout_b=row",
    "M=128,N=256,K=512,B=3,dtype=bf16",
    "M=512,N=768,K=256,dtype_d=fp32",
    "M=300,N=768,K=256,epilogue=bias",
    "M=300,N=768,K=256,epilogue=bias_relu,dtype=bf16",
    "M=300,N=768,K=256,epilogue=bias_gelu_tanh",
    "M=300,N=768,K=256,epilogue=bias_residual",
    "M=512,N=768,K=1024,dtype=e4m3",
    "M=512,N=768,K=1024,dtype=e4m3,scales=row",
)


def inputs_of(problem: Problem) -> list[Any]:
    torch.manual_seed(0)
    made = []
    for operand in problem.operands[:-1]:
        values = torch.randn(operand.shape, device="cuda")
        if "scale" in operand.name:
            values = values.abs() + 0.5
        dtype = getattr(torch, operand.dtype)
        empty = torch.empty_strided(operand.shape, operand.strides, dtype=dtype, device="cuda")
        made.append(empty.copy_(values))
    return made


def product(problem: GemmProblem, inputs: list[Any]) -> Any:
    a, b, *others = (tensor.double() for tensor in inputs)
    wanted = a @ b
    if problem.scales:
        return wanted * others[0].view(-1, 1) * others[1]
    wanted = wanted + (others[0] if problem.has_bias else 0)
    if problem.activation == "relu":
        wanted = wanted.relu()
    if problem.activation.startswith("gelu"):
        form = "tanh" if problem.activation == "gelu_tanh" else "none"
        wanted = torch.nn.functional.gelu(wanted, approximate=form)
    return wanted + (others[-1] if problem.has_residual else 0)


def attention(problem: AttentionProblem, scale: float, inputs: list[Any]) -> Any:
    query, key, value = (tensor.double() for tensor in inputs[:3])
    if problem.dtype == E4M3:
        query, key, value = (
            tensor * factor.double()[:, :, None, None]
            for tensor, factor in zip((query, key, value), inputs[3:], strict=True)
        )
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT + (inputs[3].double() if problem.bias else 0)
    left, right = problem.visible
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril(right).triu(-left)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def check(problem: Problem, config: Config, scale: float, inputs: list[Any], wanted: Any) -> str:
    """Hold a kernel's result to `wanted`, eager and from a graph; or the reason of its refusal."""
    member = family(config.family)
    with torch.no_grad():
        call = member.vendor_call(problem, config, scale)
        if isinstance(call, str):
            return call
        out = call(*inputs)
        torch.cuda.synchronize()
        assert (out.shape, str(out.dtype)) == (
            problem.output.shape,
            f"torch.{problem.output.dtype}",
        )
        limit = E4M3_LIMIT if problem.operands[0].dtype == E4M3 else LIMITS[problem.output.dtype]
        error = ((out.double() - wanted).norm() / wanted.norm()).item()
        assert error < limit, (config.to_json(), error)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(*inputs)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                captured = call(*inputs)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        error = ((captured.double() - wanted).norm() / wanted.norm()).item()
        assert error < limit, ("captured", config.to_json(), error)
    return ""


def listed(name: str, problem: Problem) -> list[Config]:
    member = family(name)
    if reason := member.lacks():
        pytest.skip(reason)
    found = list(member.listing(problem, None))
    assert found and all(member.accepts(problem, config, DEFAULT_GPU) for config in found)
    return [*member.space(problem, DEFAULT_GPU), *found]


@pytest.mark.parametrize("text", ATTENTION)
def test_every_plan_of_cudnn(text: str) -> None:
    problem = AttentionProblem.parse(text)
    scale = 1 / math.sqrt(problem.head_dim)
    inputs = inputs_of(problem)
    wanted = attention(problem, scale, inputs)
    configs = listed("vendor_cudnn_plans", problem)
    refused = {c.digest: check(problem, c, scale, inputs, wanted) for c in configs}
    for config in configs:
        print(config.params, refused[config.digest] or "ok")
    assert not refused[configs[0].digest], "its first choice"
    assert list(refused.values()).count("") > 1, "and one that was rebuilt"


@pytest.mark.parametrize("text", PRODUCTS)
def test_every_algorithm_of_cublaslt(text: str) -> None:
    problem = GemmProblem.parse(text)
    inputs = inputs_of(problem)
    wanted = product(problem, inputs)
    configs = listed("vendor_cublaslt_search", problem)
    refused = [check(problem, config, 1.0, inputs, wanted) for config in configs]
    print(len(configs) - 1, "algorithms, refused:", [reason for reason in refused if reason])
    assert not refused[0], "its first choice"
    assert refused.count("") > 1, "and one that was rebuilt"
    made = lt.LtDescriptors(lt.library(), problem, torch.cuda.current_device())
    numbers = [made.attributes(one.algorithm) for one in made.heuristics(64, 32 << 20)]
    exact = sum(
        bytes(made.rebuilt(number).algorithm) == bytes(one.algorithm)
        for number, one in zip(numbers, made.heuristics(64, 32 << 20), strict=True)
    )
    print(exact, "of", len(numbers), "are rebuilt byte for byte")


@pytest.mark.parametrize("kernel", ["torch_compile", "addmm_activation"])
def test_epilogues_of_torch(kernel: str) -> None:
    problem = GemmProblem.parse("M=300,N=768,K=256,epilogue=bias_gelu_tanh")
    inputs = inputs_of(problem)
    config = Config("vendor_blas", {"kernel": kernel})
    assert check(problem, config, 1.0, inputs, product(problem, inputs)) == ""


def test_swiglu_by_torch_compile() -> None:
    problem = SwigluProblem(256, 512, 256, weights="concatenated")
    inputs = inputs_of(problem)
    a, gate, up = inputs[0].double(), *(h.reshape(512, 256).double() for h in inputs[1])
    wanted = torch.nn.functional.silu(a @ gate.T) * (a @ up.T)
    config = Config("vendor_swiglu", {"kernel": "torch_compile"})
    assert check(problem, config, 1.0, inputs, wanted) == ""


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("flash3_serving", "B=2,H=8,HKV=2,S=512,D=128,causal=1,dtype=bf16,layout=bshd"),
        ("flash3_serving", "B=2,H=4,S=1024,D=128,dtype=e4m3,layout=bshd"),
        ("flash4_128x128", "B=2,H=4,S=1024,D=128,dtype=bf16,layout=bshd"),
    ],
)
def test_attention_of_peers(kernel: str, text: str) -> None:
    problem = AttentionProblem.parse(text)
    if kernel not in family("vendor_sdpa").found():  # type: ignore[attr-defined]
        pytest.skip(f"{kernel} is not installed, nor in TUNER_PEERS_PATH")
    inputs = inputs_of(problem)
    scale = 1 / math.sqrt(problem.head_dim)
    wanted = attention(problem, scale, inputs)
    config = Config("vendor_sdpa", {"kernel": kernel})
    assert check(problem, config, scale, inputs, wanted) == ""


def test_products_of_deep_gemm() -> None:
    if not installed.version("deep_gemm"):
        pytest.skip("DeepGEMM is not installed, nor in TUNER_PEERS_PATH")
    problem = GemmProblem.parse("M=512,N=1024,K=2048,dtype=bf16")
    inputs = inputs_of(problem)
    config = Config("vendor_blas", {"kernel": "deep_gemm"})
    assert check(problem, config, 1.0, inputs, product(problem, inputs)) == ""


@pytest.mark.compile
@pytest.mark.parametrize("name", ["vendor_cublaslt_search", "vendor_cudnn_plans"])
def test_what_a_sweep_of_a_library_found_is_served(own_store: None, gpu: Gpu, name: str) -> None:
    import tuner
    from tuner.tuning.sweep import SweepOptions, sweep

    member = family(name)
    assert isinstance(member, ListedVendor)
    if reason := member.lacks():
        pytest.skip(reason)
    problem: Problem = GemmProblem.parse("M=16,N=1024,K=2048,dtype=bf16,epilogue=bias")
    if name == "vendor_cudnn_plans":
        problem = AttentionProblem.parse("H=4,S=512,D=64,dtype=bf16")
    outcome = sweep(problem, options=SweepOptions(families=(name,)))
    winner = outcome.ranking[0].config
    assert winner.family == name and "version" in winner.params
    print(outcome.notes, winner.params)
    inputs = inputs_of(problem)
    with torch.no_grad():
        if isinstance(problem, GemmProblem):
            a, b, bias = inputs
            served = tuner.linear(a[0], b[0].t(), bias)
            wanted = product(problem, inputs)[0]
        else:
            served = tuner.attention(*inputs)
            wanted = attention(problem, 1 / math.sqrt(problem.head_dim), inputs)  # type: ignore[arg-type]
    stats = tuner.stats()
    assert stats.hits == 1 and not stats.fallbacks, stats
    assert ((served.double() - wanted).norm() / wanted.norm()).item() < LIMITS["bfloat16"]
