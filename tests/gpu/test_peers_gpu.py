"""Adapters of libraries and peers on the GPU: through the gate, captured in a graph, and served."""

from __future__ import annotations

import pytest
from gating import Gated
from runtime_gpu import TOLERANCE, fresh_store, inputs, served_gpu

from tuner.config import Config
from tuner.families import family
from tuner.families.peers import ListedVendor, installed, lt
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure.gate.inputs import scale_of
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

own_store, gpu = fresh_store, served_gpu

ATTENTION = (
    "H=4,S=1000,D=64",
    "B=2,H=8,HKV=2,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "H=4,SQ=128,SKV=640,D=128,dtype=bf16",
    "H=4,S=640,D=256,causal=1",
    "H=4,S=1024,D=64,causal=1,left=100",
    "H=4,S=512,D=64,causal=1,bias=h",
)
EPILOGUE = GemmProblem.parse("M=300,N=768,K=256,epilogue=bias_gelu_tanh")
PRODUCTS = (
    "M=16,N=1024,K=2048,dtype=bf16",
    "M=300,N=768,K=256,layout_a=col,layout_b=row",
    "M=128,N=256,K=512,B=3,dtype=bf16",
    "M=512,N=768,K=256,dtype_d=fp32",
    "M=300,N=768,K=256,epilogue=bias",
    "M=300,N=768,K=256,epilogue=bias_relu,dtype=bf16",
    "M=300,N=768,K=256,epilogue=bias_gelu_tanh",
    "M=300,N=768,K=256,epilogue=bias_residual",
    "M=512,N=768,K=1024,dtype=e4m3,fast_accum=1",
    "M=512,N=768,K=1024,dtype=e4m3,scales=row,fast_accum=1",
)


def refused(gated: Gated, problem: Problem, config: Config) -> str:
    """Reason of a refusal; else the result is right, eager and from a graph."""
    reason = family(config.family).vendor_call(problem, config, scale_of(problem))
    if isinstance(reason, str):
        return reason
    gated.passes(problem, config, ["random"])
    gated.replays(problem, config)
    return ""


def listed(name: str, problem: Problem) -> list[Config]:
    member = family(name)
    if reason := member.lacks():
        pytest.skip(reason)
    found = list(member.listing(problem, None))
    assert found and all(member.accepts(problem, config, DEFAULT_GPU) for config in found)
    return [*member.space(problem, DEFAULT_GPU), *found]


@pytest.mark.parametrize("text", ATTENTION)
def test_every_plan_of_cudnn(text: str, gated: Gated) -> None:
    problem = AttentionProblem.parse(text)
    configs = listed("vendor_cudnn_plans", problem)
    reasons = [refused(gated, problem, config) for config in configs]
    assert not reasons[0], "its first choice"
    assert reasons.count("") > 1, "and one that was rebuilt"


@pytest.mark.parametrize("text", PRODUCTS)
def test_every_algorithm_of_cublaslt(text: str, gated: Gated) -> None:
    problem = GemmProblem.parse(text)
    configs = listed("vendor_cublaslt_search", problem)
    reasons = [refused(gated, problem, config) for config in configs]
    assert not reasons[0], "its first choice"
    assert reasons.count("") > 1, "and one that was rebuilt"
    made = lt.LtDescriptors(lt.library(), problem, torch.cuda.current_device())
    numbers = [made.attributes(one.algorithm) for one in made.heuristics(64, 32 << 20)]
    exact = sum(
        bytes(made.rebuilt(number).algorithm) == bytes(one.algorithm)
        for number, one in zip(numbers, made.heuristics(64, 32 << 20), strict=True)
    )
    print(exact, "of", len(numbers), "are rebuilt byte for byte")


KERNELS: dict[str, tuple[str, Problem]] = {
    **{
        kernel: ("vendor_sdpa", AttentionProblem.parse("S=1024,D=64"))
        for kernel in ("cudnn", "flash2", "efficient", "flash3", "flash4")
    },
    "flash3_serving": (
        "vendor_sdpa",
        AttentionProblem.parse("B=2,H=8,HKV=2,S=512,D=128,causal=1,dtype=bf16,layout=bshd"),
    ),
    "flash3_serving, e4m3": (
        "vendor_sdpa",
        AttentionProblem.parse("B=2,H=4,S=1024,D=128,dtype=e4m3,layout=bshd"),
    ),
    "flash4_128x128": (
        "vendor_sdpa",
        AttentionProblem.parse("B=2,H=4,S=1024,D=128,dtype=bf16,layout=bshd"),
    ),
    "cublas": ("vendor_blas", GemmProblem.parse("M=512,N=768,K=256")),
    "cublaslt": ("vendor_blas", GemmProblem.parse("M=512,N=768,K=256,B=3,dtype_d=fp32")),
    "torch_compile": ("vendor_blas", EPILOGUE),
    "addmm_activation": ("vendor_blas", EPILOGUE),
    "deep_gemm": ("vendor_blas", GemmProblem.parse("M=512,N=1024,K=2048,dtype=bf16")),
    "torch_compile, gated": (
        "vendor_swiglu",
        SwigluProblem(256, 512, 256, weights="concatenated"),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_peers(name: str, gated: Gated) -> None:
    member, problem = KERNELS[name]
    kernel = name.partition(",")[0]
    found = family("vendor_sdpa").found()  # type: ignore[attr-defined]
    is_here = kernel in found if kernel in ("flash3_serving", "flash4_128x128") else True
    if not is_here or (kernel in installed.PEERS and not installed.version(kernel)):
        pytest.skip(f"{kernel} is not installed, nor in TUNER_PEERS_PATH")
    before = torch.backends.cuda.preferred_blas_library()
    assert refused(gated, problem, Config(member, {"kernel": kernel})) == ""
    assert torch.backends.cuda.preferred_blas_library() == before


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
    tensors = inputs(problem)
    with torch.no_grad():
        if isinstance(problem, GemmProblem):
            a, b, bias = tensors
            served = tuner.linear(a[0], b[0].t(), bias)
            wanted = a[0].double() @ b[0].double() + bias.double()
        else:
            served = tuner.attention(*tensors)
            attend = torch.nn.functional.scaled_dot_product_attention
            wanted = attend(*(tensor.double() for tensor in tensors))
    stats = tuner.stats()
    assert stats.hits == 1 and not stats.fallbacks, stats
    assert float((served.double() - wanted).norm() / wanted.norm()) < TOLERANCE["bfloat16"]
