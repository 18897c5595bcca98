"""Vendor families: their space, their reasons, and the adapters, against PyTorch on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.families import families, family
from tuner.families.vendor import (
    BESIDE_PYTORCH,
    MAX_AUTOTUNE,
    ListedVendor,
    Vendor,
    compiled,
    peers,
    tried,
)
from tuner.families.vendor import sdpa as sdpa
from tuner.families.vendor.blas import (
    addmm,
    addmm_activation,
    as_in_a_model,
    matmul,
    scaled_mm,
    unfused,
)
from tuner.families.vendor.grouped_gemm import grouped, in_turn
from tuner.families.vendor.softmax import softmax
from tuner.families.vendor.swiglu import swiglu
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    E4M3,
    EPILOGUE_SCALES,
    EPILOGUES,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

PROBLEMS: dict[str, Problem] = {
    "sdpa_backward": AttentionBackwardProblem.parse("S=1024,D=64"),
    "vendor_sdpa": AttentionProblem.parse("S=1024,D=64"),
    "vendor_blas": GemmProblem.parse("M=4096,N=4096,K=4096"),
    "vendor_cublaslt_search": GemmProblem.parse("M=4096,N=4096,K=4096"),
    "vendor_cudnn_plans": AttentionProblem.parse("S=1024,D=64"),
    "vendor_softmax": SoftmaxProblem.parse("M=1024,N=1024,B=16"),
    "vendor_swiglu": SwigluProblem.parse("M=4096,N=14336,K=4096"),
    "vendor_grouped_gemm": GroupedGemmProblem.parse("G=8,M=4096,N=14336,K=4096,dtype=bf16"),
}
PEER_MODULES = ("flash_attn_interface", "flash_attn", "flash_attn.cute")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.fixture(autouse=True)
def forget_peers() -> Iterator[None]:
    """No test sees a peer that another one made, nor one that is installed."""
    path = list(sys.path)
    modules = {name: sys.modules.pop(name, None) for name in PEER_MODULES}
    for cached in (peers._load, peers._version):
        cached.cache_clear()
    yield
    sys.path[:] = path
    for name, module in modules.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    for cached in (peers._load, peers._version):
        cached.cache_clear()


def tensors(problem: Problem) -> list[Any]:
    """Random inputs with the problem's shapes and strides."""
    import torch

    made = []
    for operand in problem.operands[:-1]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype)
        )
        made.append(tensor.copy_(torch.randn(operand.shape)))
    return made


def test_vendors_are_registered() -> None:
    found = {name for name, member in families().items() if member.is_vendor}
    assert found == set(PROBLEMS)
    assert all(isinstance(family(name), Vendor) for name in found)


@pytest.mark.parametrize("name", PROBLEMS)
def test_space_is_legal_and_priced(name: str) -> None:
    member, problem = family(name), PROBLEMS[name]
    space = member.space(problem, DEFAULT_GPU)
    offered = [k for k in member.offered if not member.refusal(problem, k)]  # type: ignore[attr-defined]
    assert [config["kernel"] for config in space] == offered
    for config in space:
        assert member.violations(problem, config, DEFAULT_GPU) == []
        floor = DEFAULT_GPU.floor_us(problem.flops, problem.bytes)
        assert floor < member.predict_us(problem, config, DEFAULT_GPU) < 1e4


@pytest.mark.parametrize("name", PROBLEMS)
def test_violations_name_what_is_wrong(name: str) -> None:
    member, problem = family(name), PROBLEMS[name]
    other = next(p for p in PROBLEMS.values() if p.op != problem.op)
    good = Config(name, {"kernel": member.offered[0]})  # type: ignore[attr-defined]
    assert f"serves {problem.op}" in member.violations(other, good, DEFAULT_GPU)[0]
    assert member.space(other, DEFAULT_GPU) == []
    wrong = Config(name, {"kernel": "flash9", "tile_x": 128})
    text = "; ".join(member.violations(problem, wrong, DEFAULT_GPU))
    assert "kernel='flash9'" in text and member.offered[0] in text and "tile_x" in text  # type: ignore[attr-defined]
    assert isinstance(member.vendor_call(problem, wrong, 1.0), str)


def test_predictions_follow_the_measured_order() -> None:
    """The fastest and the slowest of (16,16,2048,64) and (4,16,2048,128) on the H200."""
    member = family("vendor_sdpa")
    for shape, first in (("B=16,S=2048,D=64", "flash4"), ("B=4,S=2048,D=128,causal=1", "flash3")):
        problem = AttentionProblem.parse(shape)
        space = member.space(problem, DEFAULT_GPU)
        ranked = sorted(space, key=lambda c: member.predict_us(problem, c, DEFAULT_GPU))
        assert ranked[0]["kernel"] == first
        assert ranked[-1]["kernel"] == "efficient"


def test_what_pytorch_never_calls_is_named() -> None:
    named = {*sdpa.PEERS, *sdpa.VARIANTS, *sdpa.TILES, *peers.PEERS, "torch_compile", "inductor"}
    for member in families().values():
        if isinstance(member, ListedVendor):
            named |= set(member.offered)
    assert named == BESIDE_PYTORCH


def test_what_is_installed_joins_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def space(name: str) -> set[str]:
        return {c["kernel"] for c in family(name).space(PROBLEMS[name], DEFAULT_GPU)}

    half = GemmProblem(512, 512, 512, dtype="bfloat16")
    monkeypatch.setitem(PROBLEMS, "vendor_blas", half)
    further = {"flash3_serving", "deep_gemm", *sdpa.TILES}
    assert not further & (space("vendor_sdpa") | space("vendor_blas"))
    for module in ("fa3_serving", "deep_gemm_peer", "fa4"):
        (tmp_path / f"{module}.py").write_text("")
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    found = space("vendor_sdpa") | space("vendor_blas")
    assert further & found == {"flash3_serving", "deep_gemm"}, "a module has one tile"
    monkeypatch.setattr(peers, "version", lambda name: f"{name} 1.0")
    assert further <= space("vendor_sdpa") | space("vendor_blas")
    facts = {**family("vendor_sdpa").environment(), **family("vendor_blas").environment()}
    assert facts.items() >= {name: f"{name} 1.0" for name in peers.PEERS}.items()


def test_flash2_alone_is_called_with_variable_lengths() -> None:
    member = family("vendor_sdpa")
    problem = AttentionProblem.parse("B=3,S=64,D=64,varlen=1")
    refusals = {k: member.refusal(problem, k) for k in (*member.offered, *member.on_request)}  # type: ignore[attr-defined]
    assert refusals.pop("flash2") == refusals.pop("flash3_serving") == ""
    assert refusals == {k: f"{k} is not called with variable lengths" for k in refusals}
    unequal = AttentionProblem.parse("B=3,SQ=8,SKV=64,D=64,varlen=1,causal=1")
    assert "bottom-right" in member.refusal(unequal, "flash2")  # type: ignore[attr-defined]


def test_flash2_is_given_packed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.families.vendor.sdpa import flash2_varlen_call

    def attend(query: Any, *arguments: Any, **options: Any) -> Any:
        seen.extend((query, *arguments))
        return (query,)

    seen: list[Any] = []
    monkeypatch.setattr(torch.ops.aten._flash_attention_forward, "default", attend)
    problem = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=8,SKV=16,D=64,varlen=1,causal=1")
    inputs = [
        torch.empty_strided(o.shape, o.strides, dtype=getattr(torch, o.dtype))
        for o in problem.operands[:-1]
    ]
    out = flash2_varlen_call(problem, 0.5)(*inputs)
    assert (out.shape, out.stride()[1:]) == (problem.output.shape, problem.output.strides[1:])
    assert [t.shape for t in seen[:3]] == [(10, 4, 64), (20, 2, 64), (20, 2, 64)]
    assert all(t.is_contiguous() for t in seen[:3])
    assert [t.dtype for t in seen[3:5]] == [torch.int32] * 2
    assert seen[5:] == [8, 16, 0.0, True, False]


@needs_torch
def test_flash2_is_given_slopes_and_a_backend_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def attend(*arguments: Any, **options: Any) -> Any:
        given.append((arguments, options))
        return (arguments[0],)

    given: list[Any] = []
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, device=None, **k: empty_strided(*a, **k))
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    for operator in ("_flash_attention_forward", "_scaled_dot_product_efficient_attention"):
        monkeypatch.setattr(getattr(torch.ops.aten, operator), "default", attend)
    problem = AttentionProblem.parse("B=2,H=4,S=16,D=64,causal=1,alibi=1")
    inputs = tensors(problem)
    out = sdpa.flash2_call(problem, 0.5)(*inputs)
    assert out.shape == problem.output.shape
    arguments, options = given.pop()
    assert arguments[3:] == (None, None, 16, 16, 0.0, True, False)
    assert options.pop("alibi_slopes") is inputs[3]
    assert options == {"scale": 0.5, "window_size_left": None, "window_size_right": None}
    problem = AttentionProblem.parse("B=2,H=4,S=16,D=64,causal=1,bias=h")
    inputs = tensors(problem)
    call = sdpa.VendorSdpa().connect(problem, "efficient", 0.5)
    assert not isinstance(call, str), call
    call(*inputs)
    arguments, options = given.pop()
    assert (arguments[3].shape, arguments[3].data_ptr()) == ((2, 4, 16, 16), inputs[3].data_ptr())
    assert (arguments[4:], options) == ((False, 0.0, True), {"scale": 0.5})


def test_quantised_attention_is_the_serving_build_s() -> None:
    member, problem = family("vendor_sdpa"), AttentionProblem.parse("S=64,D=64,dtype=e4m3")
    for kernel in ("cudnn", "flash3", "flash3_splits", "naive", "flash4_128x128"):
        config = Config("vendor_sdpa", {"kernel": kernel})
        assert len(member.violations(problem, config, DEFAULT_GPU)) == 1
        assert "float8_e4m3fn" in str(member.vendor_call(problem, config, 0.125))
    config = Config("vendor_sdpa", {"kernel": "flash3_serving"})
    assert member.violations(problem, config, DEFAULT_GPU) == []
    grouped = replace(problem, heads_kv=4)
    assert "a factor a KV head" in member.supports(grouped, DEFAULT_GPU)
    assert len(member.violations(grouped, config, DEFAULT_GPU)) == 1


@pytest.mark.parametrize(
    ("text", "kernels", "reason"),
    [
        (
            "S=1024,D=64,causal=1,window=64",
            {"flash2", "flash3", "flash3_splits", "flash4"},
            "no sl",
        ),
        ("S=1024,D=64,softcap=30", {"flash3", "flash3_splits", "flash4"}, "has no soft cap"),
        ("SQ=512,SKV=1024,D=64,window=64", set(), "bottom-right"),
        ("S=1024,D=64,causal=1,bias=h", {"cudnn", "efficient"}, "has no additive bias"),
        ("S=1024,D=64,bias=1,softcap=30", set(), "has no additive bias"),
        ("S=1024,D=64,alibi=1", {"flash2"}, "has no ALiBi"),
        ("S=1024,D=64,causal=1,window=64,alibi=1", {"flash2"}, "has no ALiBi"),
        ("SQ=512,SKV=1024,D=64,alibi=1", set(), "aligns a diagonal of ALiBi bottom-right"),
        ("S=1024,D=64,bias=1,alibi=1", set(), "has no ALiBi"),
    ],
)
def test_windows_caps_and_biases_go_to_who_has_them(
    text: str, kernels: set[str], reason: str
) -> None:
    problem, member = AttentionProblem.parse(text), family("vendor_sdpa")
    assert {c["kernel"] for c in member.space(problem, DEFAULT_GPU)} == kernels
    refused = [
        member.violations(problem, Config(member.name, {"kernel": kernel}), DEFAULT_GPU)
        for kernel in member.offered
        if kernel not in kernels
    ]
    assert any(reason in found[0] for found in refused)
    assert all(len(found) == 1 for found in refused)
    lacking = ["cutlass_fmha", "three_kernel_attention", "triton_attention"]
    for name in lacking + (["fused_attention"] if problem.is_alibi else []):
        assert family(name).space(problem, DEFAULT_GPU) == []
        has_no = "ALiBi" if name == "fused_attention" else problem.extras
        assert family(name).supports(problem, DEFAULT_GPU) == f"{name} has no {has_no}"


def test_bottom_right_masks_are_kept_out() -> None:
    problem = AttentionProblem.parse("SQ=128,SKV=256,D=64,causal=1")
    kernels = [c["kernel"] for c in family("vendor_sdpa").space(problem, DEFAULT_GPU)]
    assert kernels == ["cudnn", "efficient"]
    for kernel in ("flash3_splits", "flash4"):
        config = Config("vendor_sdpa", {"kernel": kernel})
        assert "bottom-right" in family("vendor_sdpa").violations(problem, config, DEFAULT_GPU)[0]
    call = family("vendor_sdpa").vendor_call(
        problem, Config("vendor_sdpa", {"kernel": "flash3"}), 1.0
    )
    assert isinstance(call, str) and "bottom-right" in call


@pytest.mark.parametrize("name", PROBLEMS)
def test_without_a_gpu_the_reason_is_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member, problem = family(name), PROBLEMS[name]
    if importlib.util.find_spec("torch"):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for config in member.space(problem, DEFAULT_GPU):
        reason = member.vendor_call(problem, config, 0.125)
        assert isinstance(reason, str) and "torch" in reason


@needs_torch
@pytest.mark.parametrize("name", PROBLEMS)
def test_environment_is_text(name: str) -> None:
    facts = family(name).environment()
    assert facts["torch"] == importlib.metadata.version("torch")
    assert all(isinstance(value, str) and value for value in facts.values())


PEER = """
import torch

def fwd(q, k, v, causal=False, scale=None):
    assert q.stride(-1) == 1
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
"""
PACKAGE = (
    PEER.replace("scale=None", "softmax_scale=None")
    .replace("scale=scale", "scale=softmax_scale")
    .replace("def fwd", "def flash_attn_func")
    .replace("return out.transpose(1, 2)", "return out.transpose(1, 2), None")
)


def reference(problem: AttentionProblem, scale: float, inputs: list[Any]) -> Any:
    """Attention in float64, written out."""
    import torch

    query, key, value, *modifiers = (t.double() for t in inputs)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT
    if problem.softcap:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    if problem.bias:
        scores = scores + modifiers[0]
    if problem.is_alibi:
        rows, keys = (torch.arange(n) for n in scores.shape[-2:])
        scores = scores - modifiers[-1][:, None, None] * (rows[:, None] - keys).abs()
    left, right = problem.visible
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(right).triu(-left)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0) @ value


def close(out: Any, wanted: Any) -> bool:
    return bool((out.double() - wanted).norm() / wanted.norm() < 2e-3)


@needs_torch
@pytest.mark.parametrize("kind", ["module", "package in the folder"])
@pytest.mark.parametrize("kernel", ["flash3", "flash4"])
@pytest.mark.parametrize(
    "shape", ["S=96,D=64,H=4", "S=64,D=32,H=4,HKV=2,causal=1,layout=bshd", "SQ=32,SKV=80,D=64,H=2"]
)
def test_peers_agree_with_fp64(
    kind: str, kernel: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, package = peers.PEERS[kernel].module, peers.PEERS[kernel].package
    if kind == "module":
        (tmp_path / f"{module}.py").write_text(PEER)
    else:
        file = tmp_path / f"{package.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(PACKAGE)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    attend = sdpa.peer(kernel)
    assert not isinstance(attend, str), attend
    problem = AttentionProblem.parse(shape)
    call = tried(sdpa.peer_call(attend, problem, 0.3), problem, kernel, "cpu")
    assert not isinstance(call, str), call
    inputs = tensors(problem)
    out = call(*inputs)
    assert out.shape == problem.output.shape
    assert close(out, reference(problem, 0.3, inputs))
    assert peers.version(kernel)


@needs_torch
def test_a_variant_is_its_peer_with_further_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = PEER.replace("scale=None", "scale=None, num_splits=1")
    noting = taking.replace("    return", "    fwd.splits = num_splits\n    return")
    (tmp_path / "fa3.py").write_text(noting)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    problem = AttentionProblem.parse("S=32,D=8,H=2")
    splits = []
    for kernel in ("flash3", "flash3_splits"):
        call = sdpa.VendorSdpa().connect(problem, kernel, 0.3)
        assert not isinstance(call, str), call
        call(*tensors(problem))
        splits.append(sys.modules["tuner_peer_fa3"].fwd.splits)
    assert splits == [1, 0]


@needs_torch
def test_a_peer_is_given_the_window_and_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = PEER.replace("scale=None", "scale=None, window_size=(-1, -1), softcap=0.0")
    (tmp_path / "fa3.py").write_text(
        taking.replace("    return", "    fwd.given = window_size, softcap\n    return")
    )
    (tmp_path / "fa4.py").write_text(PEER)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    problem = AttentionProblem.parse("S=32,D=8,H=2,causal=1,window=4,softcap=30")
    call = sdpa.VendorSdpa().connect(problem, "flash3", 0.3)
    assert not isinstance(call, str), call
    call(*tensors(problem))
    assert sys.modules["tuner_peer_fa3"].fwd.given == ((4, 0), 30.0)
    call = sdpa.VendorSdpa().connect(problem, "flash4", 0.3)
    assert not isinstance(call, str), call
    reason = tried(call, problem, "flash4", "cpu")
    assert isinstance(reason, str) and "window_size" in reason


SERVING = """
import torch

given = []

def metadata(used, seqlen_q, seqlen_kv, heads, heads_kv, head_dim, dtype, causal=True, **options):
    given.append(("metadata", used.tolist(), (seqlen_q, seqlen_kv, heads, heads_kv), options))
    return "plan"

def fwd(q, k, v, causal=True, scale=None, **options):
    given.append(("fwd", options))
    if "cu_seqlens_q" in options:
        return q
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    if "q_descale" in options:
        factors = (options[f"{x}_descale"][:, :, None, None] for x in "qkv")
        q, k, v = (t * factor for t, factor in zip((q, k, v), factors, strict=True))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).bfloat16()
"""


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "fa3_serving.py").write_text(SERVING)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    return peers.module_of("flash3_serving")


@needs_torch
@pytest.mark.parametrize(
    "shape", ["S=48,D=16,H=4,HKV=2,causal=1,B=2,dtype=bf16", "S=32,D=16,H=4,B=2,dtype=e4m3"]
)
def test_the_serving_build_is_called_as_a_server_does(serving: Any, shape: str) -> None:
    import torch

    problem = AttentionProblem.parse(shape)
    call = sdpa.VendorSdpa().connect(problem, "flash3_serving", 0.3)
    assert not isinstance(call, str), call
    inputs = [
        t.to(getattr(torch, o.dtype))
        for t, o in zip(
            tensors(replace(problem, dtype="bfloat16"))
            + [torch.rand(o.shape) + 0.5 for o in problem.operands[3:-1]],
            problem.operands[:-1],
            strict=True,
        )
    ]
    out = [call(*inputs) for _ in range(2)][-1]
    assert out.shape == problem.output.shape
    factors = [t.double()[:, :, None, None] for t in inputs[3:]] or [1.0] * 3
    plain = [t.double() * factor for t, factor in zip(inputs, factors, strict=False)]
    wanted = reference(replace(problem, dtype="bfloat16"), 0.3, plain)
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
    kinds = [kind for kind, *_ in serving.given]
    assert kinds == ["metadata", "fwd", "fwd"], "the metadata is made once"
    lengths = (problem.seqlen_q, problem.seqlen_kv, problem.heads_q, problem.heads_kv)
    assert serving.given[0][1:] == ([problem.seqlen_kv] * 2, lengths, {})
    assert serving.given[1][1]["metadata"] == "plan"


@needs_torch
def test_the_serving_build_takes_packed_tensors(serving: Any) -> None:
    import torch

    problem = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=8,SKV=16,D=64,varlen=1")
    call = sdpa.VendorSdpa().connect(problem, "flash3_serving", 0.5)
    assert not isinstance(call, str), call
    inputs = [
        torch.zeros(o.shape, dtype=getattr(torch, o.dtype)).as_strided(o.shape, o.strides)
        for o in problem.operands[:-1]
    ]
    out = call(*inputs)
    assert out.shape == problem.output.shape
    [(_, options)] = serving.given
    assert options["cu_seqlens_q"] is inputs[3] and options["cu_seqlens_k"] is inputs[4]
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (8, 16)
    assert "metadata" not in options


@needs_torch
def test_a_tile_is_an_argument_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def attend(
        q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: float, **options: Any
    ) -> Any:
        given.append((causal, softmax_scale, options))
        return q, None

    given: list[Any] = []
    problem = AttentionProblem.parse("S=32,D=8,H=2,causal=1")
    call = sdpa.VendorSdpa().connect(problem, "flash4_128x160", 0.3)
    assert call == "flash4 has tiles where the package flash-attn-4 is installed"
    monkeypatch.setattr(peers, "is_package", lambda name: True)
    interface = SimpleNamespace(_flash_attn_fwd=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    call = sdpa.VendorSdpa().connect(problem, "flash4_128x160", 0.3)
    assert not isinstance(call, str), call
    inputs = tensors(problem)
    assert torch.equal(call(*inputs), inputs[0])
    assert given == [(True, 0.3, {"tile_mn": (128, 160)})]
    windowed = replace(problem, window_left=4)
    assert "no sliding window" in sdpa.VendorSdpa().refusal(windowed, "flash4_128x160")


@needs_torch
def test_deep_gemm_agrees_with_fp64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm_peer.py").write_text(
        "class module:\n"
        "    def bf16_gemm_nt(a, b, d, c):\n"
        "        assert a.is_contiguous() and b.is_contiguous() and c is None\n"
        "        d.copy_(a @ b.T)\n"
    )
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    member, problem = family("vendor_blas"), GemmProblem(48, 32, 64, dtype="bfloat16")
    call = member.connect(problem, "deep_gemm", 1.0)  # type: ignore[attr-defined]
    a, b = tensors(problem)
    wanted = a.double() @ b.double()
    out = tried(call, problem, "deep_gemm", "cpu")(a, b)  # type: ignore[operator]
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
    for change in (
        {"dtype": "float16", "dtype_d": ""},
        {"epilogue": "bias"},
        {"layout_b": "row"},
        {"batch": 2},
    ):
        other = replace(problem, **change)  # type: ignore[arg-type]
        config = Config("vendor_blas", {"kernel": "deep_gemm"})
        assert len(member.violations(other, config, DEFAULT_GPU)) == 1


@needs_torch
@pytest.mark.parametrize(
    "shape",
    [
        "S=24,D=16,H=4",
        "S=24,D=16,H=4,HKV=2,causal=1,B=2",
        "SQ=40,SKV=24,D=16,H=2,left=3,right=5,softcap=2",
        "SQ=40,SKV=24,D=16,H=2,B=3,bias=b,softcap=2",
        "SQ=24,SKV=40,D=16,H=4,HKV=2,B=2,causal=1,bias=h,alibi=1",
    ],
)
def test_naive_agrees_with_fp64(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    plain = torch.bmm

    def bmm(a: Any, b: Any, out_dtype: Any = None) -> Any:  # torch has out_dtype on CUDA alone
        return plain(a, b) if out_dtype is None else plain(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", bmm)
    problem = AttentionProblem.parse(shape)
    call = tried(sdpa.naive_call(problem, 0.3), problem, "naive", "cpu")
    assert not isinstance(call, str), call
    inputs = tensors(problem)
    assert close(call(*inputs), reference(problem, 0.3, inputs))


def test_a_layout_of_its_own_changes_the_strides_alone() -> None:
    problem, member = AttentionProblem.parse("S=1024,D=64,H=8"), family("vendor_sdpa")
    config = Config("vendor_sdpa", {"kernel": "flash3", "layout": "bshd"})
    assert member.violations(problem, config, DEFAULT_GPU) == []
    given = member.handed_over(problem, config)
    assert [o.shape for o in given.operands] == [o.shape for o in problem.operands]
    assert given.operands[0].strides == (64 * 8 * 1024, 64, 64 * 8, 1)
    assert member.handed_over(problem, Config("vendor_sdpa", {"kernel": "flash3"})) == problem
    wrong = Config("vendor_sdpa", {"kernel": "flash3", "layout": "sbhd"})
    assert "allowed: bhsd, bshd" in member.violations(problem, wrong, DEFAULT_GPU)[0]


@pytest.mark.parametrize("kernel", sdpa.PEERS)
def test_a_missing_peer_is_a_reason(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, peers.PEERS[kernel].package, None)  # as if not installed
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    reason = sdpa.peer(kernel)
    assert isinstance(reason, str) and "TUNER_PEERS_PATH" in reason
    assert peers.version(kernel) == ""
    assert kernel not in family("vendor_sdpa").environment()


@pytest.mark.parametrize(
    "text",
    ["import nowhere_to_be_found", "raise OSError('libcudart.so.12')", "x = 1", "next(iter(()))"],
)
def test_a_broken_peer_is_a_reason(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fa3.py").write_text(text)
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    reason = sdpa.peer("flash3")
    assert isinstance(reason, str) and reason.startswith("flash3 cannot be loaded")


def test_a_module_peer_is_named_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    versions = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "fa3.py").write_text(text)
        peers._version.cache_clear()
        versions.add(peers.version("flash3"))
    (tmp_path / "fa3.so.xz").write_bytes(b"library")
    peers._version.cache_clear()
    versions.add(peers.version("flash3"))
    (tmp_path / "fa3_serving.py").write_text("another peer's")
    peers._version.cache_clear()
    versions.add(peers.version("flash3"))
    assert len(versions) == 3 and all(version.startswith("fa3 ") for version in versions)


@needs_torch
def test_a_refusal_is_a_reason_with_torch_s_warnings() -> None:
    import warnings

    def refuse(*inputs: Any) -> Any:
        warnings.warn("Head dims differ (Triggered internally at x.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    problem = AttentionProblem.parse("S=16,D=8,H=1")
    reason = tried(refuse, problem, "cudnn", "cpu")
    assert reason == "cudnn refuses: No available kernel. Aborting execution.; Head dims differ"


@needs_torch
def test_a_wrong_shape_is_a_reason() -> None:
    problem = AttentionProblem.parse("S=16,D=8,H=2")
    reason = tried(lambda q, k, v: q.transpose(1, 2), problem, "flash3", "cpu")
    assert isinstance(reason, str) and "returned float16 (1, 16, 2, 8)" in reason


@needs_torch
@pytest.mark.parametrize(
    "shape",
    [
        "M=48,N=32,K=64",
        "M=48,N=32,K=64,layout_a=col,layout_b=row",
        "M=48,N=32,K=64,layout_a=col,layout_b=col,B=3,dtype=bf16",
        "M=1,N=32,K=64,layout_a=row,layout_b=row,B=2",
    ],
)
def test_matmul_agrees_with_fp64(shape: str) -> None:
    problem = GemmProblem.parse(shape)
    call = tried(matmul(problem), problem, "cublas", "cpu")
    assert not isinstance(call, str), call
    a, b = tensors(problem)
    out = call(a, b)
    wanted = a.double() @ b.double()
    assert out.shape == problem.output.shape
    assert (out.double() - wanted).norm() / wanted.norm() < (8e-3 if "bf16" in shape else 1e-3)


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_way_of_an_epilogue_agrees_with_fp64(epilogue: str, dtype: Any) -> None:
    import torch

    problem = GemmProblem(48, 32, 64, dtype=dtype, epilogue=epilogue)
    member = family("vendor_blas")
    ways = {
        "cublas": unfused,
        "addmm": addmm,
        "addmm_activation": addmm_activation,
        "inductor": as_in_a_model,
        "torch_compile": as_in_a_model,
    }
    offered = {config["kernel"] for config in member.space(problem, DEFAULT_GPU)}
    assert ("addmm" in offered) == (problem.has_bias or problem.has_residual)
    assert ("addmm_activation" in offered) == (epilogue in ("bias_relu", "bias_gelu_tanh"))
    if epilogue == "bias_gelu_tanh":
        offered -= {"addmm_activation"}  # cuBLASLt's GELU is by tanh, that of the CPU by erf
    inputs = tensors(problem)
    before = [tensor.clone() for tensor in inputs]
    a, b, *others = (tensor.double() for tensor in inputs)
    functional = torch.nn.functional
    wanted = a @ b + (others[0] if problem.has_bias else 0)
    wanted = {
        "": lambda x: x,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }[problem.activation](wanted)
    wanted = wanted + (others[-1] if problem.has_residual else 0)
    for kernel in (offered | {"inductor"}) & set(ways):
        call = tried(ways[kernel](problem), problem, kernel, "cpu")
        assert not isinstance(call, str), call
        error = (call(*inputs).double() - wanted).norm() / wanted.norm()
        assert error < (8e-3 if dtype == "bfloat16" else 1e-3), kernel
        assert all(map(torch.equal, inputs, before)), f"{kernel} changes its inputs"
    costs = [member.predict_us(problem, c, DEFAULT_GPU) for c in member.space(problem, DEFAULT_GPU)]
    assert costs == sorted(costs, reverse=True), "the fewer kernels, the less time"


@needs_torch
@pytest.mark.parametrize("scales", EPILOGUE_SCALES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", E4M3])
def test_products_with_factors_agree_with_fp64(dtype: Any, scales: Any) -> None:
    import torch

    problem = GemmProblem(48, 32, 64, dtype=dtype, scales=scales)
    offered = {c["kernel"] for c in family("vendor_blas").space(problem, DEFAULT_GPU)}
    wanted = {"scaled_mm"} if dtype == E4M3 else {"cublas", "cublaslt", "torch_compile"}
    assert offered == wanted
    a, b, *factors = tensors(GemmProblem(48, 32, 64, dtype="bfloat16", scales=scales))
    a, b = (matrix.to(getattr(torch, dtype)) for matrix in (a, b))
    wanted = factors[0].double().view(-1, 1) * (a.double() @ b.double()) * factors[1].double()
    for way in (unfused, as_in_a_model):
        call = tried(way(problem), problem, "torch", "cpu")
        assert not isinstance(call, str), call
        error = (call(a, b, *factors).double() - wanted).norm() / wanted.norm()
        assert error < (1e-3 if dtype == "float16" else 8e-3)


@pytest.mark.parametrize("fast_accum", [True, False])
def test_torch_s_scaled_product_has_the_problem_s_accumulation(
    monkeypatch: pytest.MonkeyPatch, fast_accum: bool
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, *_, **options: given.update(options) or a @ b
    )
    problem = GemmProblem(48, 32, 64, dtype=E4M3, dtype_d="float16", fast_accum=fast_accum)
    scaled_mm(problem)(torch.ones(1, 48, 64), torch.ones(1, 64, 32), *torch.ones(2, 1))
    assert given == {"out_dtype": torch.float16, "use_fast_accum": fast_accum}


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_swiglu_agrees_with_fp64_on_weights_in_its_own_order(dtype: Any) -> None:
    import torch

    problem = SwigluProblem(24, 64, 48, dtype=dtype)
    member, config = family("vendor_swiglu"), Config("vendor_swiglu", {"kernel": "torch"})
    wanted = member.handed_over(problem, config)
    assert wanted == replace(problem, weights="concatenated")
    assert [o.shape for o in wanted.operands] == [o.shape for o in problem.operands]
    a, weights = tensors(problem)
    theirs = torch.empty_strided(
        wanted.operands[1].shape, wanted.operands[1].strides, dtype=weights.dtype
    ).copy_(weights)
    call = tried(swiglu(wanted), wanted, "torch", "cpu")
    assert not isinstance(call, str), call
    out = call(a, theirs)
    gate, up = (half.reshape(64, 48).double() for half in weights)
    exact = torch.nn.functional.silu(a.double() @ gate.T) * (a.double() @ up.T)
    assert (out.double() - exact).norm() / exact.norm() < (8e-3 if dtype == "bfloat16" else 1e-3)


@needs_torch
@pytest.mark.parametrize("shape", ["M=64,N=48,B=2", "M=64,N=32,SQ=32,B=2,causal=1,dtype=bf16"])
def test_softmax_agrees_with_fp64(shape: str) -> None:
    import torch

    problem = SoftmaxProblem.parse(shape)
    call = tried(softmax(problem, 0.25, "cpu"), problem, "torch", "cpu")
    assert not isinstance(call, str), call
    (scores,) = tensors(problem)
    before = scores.clone()
    wanted = scores.double() * 0.25
    if problem.is_causal:
        for row in range(problem.rows):
            wanted[:, row, row % problem.query_rows + 1 :] = -torch.inf
    wanted = wanted.softmax(-1)
    out = call(scores)
    assert (out.double() - wanted).norm() / wanted.norm() < (8e-3 if "bf16" in shape else 1e-3)
    assert torch.equal(scores, before)


@needs_torch
@pytest.mark.parametrize("kernel", ["grouped_mm", "mm"])
def test_grouped_products_agree_with_fp64(kernel: str) -> None:
    import torch

    problem = GroupedGemmProblem(5, 23, 32, 48, sizes="sparse", dtype="bfloat16")
    if kernel == "grouped_mm" and not hasattr(torch, "_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no _grouped_mm")
    calls = {"grouped_mm": grouped, "mm": in_turn(problem)}
    call = tried(calls[kernel], problem, kernel, "cpu")
    assert not isinstance(call, str), call
    a, b, _ = tensors(problem)
    starts = [0, *itertools.accumulate(problem.rows)]
    out = call(a, b, torch.tensor(starts, dtype=torch.int32))
    wanted = torch.cat(
        [
            a[start:end].double() @ one.double().T
            for (start, end), one in zip(itertools.pairwise(starts), b, strict=True)
        ]
    )
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3


@needs_torch
def test_products_with_factors_of_blocks_agree_with_fp64() -> None:
    import torch

    def widened(elements: Any, scale: Any) -> Any:
        return elements.double() * scale.double().repeat_interleave(128, -1)[..., :272]

    problem = GemmProblem(6, 264, 272, dtype=E4M3, scales="block")
    space = family("vendor_blas").space(problem, DEFAULT_GPU)
    assert [config["kernel"] for config in space] == ["cublas", "cublaslt"]
    a, b = torch.randn(1, 6, 272), torch.randn(1, 264, 272)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(3, 8) + 0.5, torch.rand(3, 3) + 0.5
    call = tried(unfused(problem), problem, "cublas", "cpu")
    assert not isinstance(call, str), call
    wide_b = widened(b[0], scale_b.repeat_interleave(128, 0)[:264])
    wanted = widened(a[0], scale_a[:, :6].t()) @ wide_b.t()
    out = call(a, b.mT, scale_a, scale_b)
    assert (out[0].double() - wanted).norm() / wanted.norm() < 8e-3
    groups = GroupedGemmProblem(2, 6, 264, 272, dtype=E4M3)
    loop, offsets = in_turn(groups), torch.tensor([0, 2, 6], dtype=torch.int32)
    both = torch.cat((b, b)), torch.stack((scale_b, 2 * scale_b))
    out = loop(a[0], both[0], offsets, scale_a, both[1])
    wanted[2:] *= 2
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3


def test_the_grouped_kernel_of_torch_is_for_bf16() -> None:
    space = family("vendor_grouped_gemm").space(GroupedGemmProblem(4, 64, 32, 48), DEFAULT_GPU)
    assert [config["kernel"] for config in space] == ["mm"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile without Inductor: graphs run as they were traced; the mode of each."""
    import torch

    compile_with, modes = torch.compile, []

    def compile_lightly(function: Any, *, mode: str, **options: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            modes.append(mode)
            return graph.forward

        return compile_with(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_lightly)
    yield modes
    torch.compiler.reset()


@needs_torch
@pytest.mark.parametrize("name", ["vendor_blas", "vendor_swiglu"])
def test_inductor_compiles_every_problem_of_a_suite(name: str, light: list[str]) -> None:
    """Calls of one function's code in one process: one more than Dynamo compiles by itself."""
    import torch

    member: Any = family(name)
    for k in range(64, 136, 8):
        problem: Problem
        if name == "vendor_blas":
            problem = GemmProblem(16, 32, k, epilogue="bias_gelu")
            eager = as_in_a_model(problem)
        else:
            problem = SwigluProblem(16, 32, k, weights="concatenated")
            eager = swiglu(problem)
        call, inputs = member.connect(problem, "inductor", 1.0), tensors(problem)
        with torch.no_grad():
            assert torch.equal(call(*inputs), eager(*inputs))
            call(*inputs)
    assert light == [MAX_AUTOTUNE] * 9


@needs_torch
def test_compiled_kernels_of_one_request_stay_compiled(light: list[Any]) -> None:
    """Compiling one anew while another is captured would break the capture."""
    import torch

    problem = SwigluProblem(16, 32, 64, weights="concatenated")
    member: Any = family("vendor_swiglu")
    inputs, wanted = tensors(problem), swiglu(problem)
    calls = [member.connect(problem, kernel, 1.0) for kernel in ("torch_compile", "inductor")]
    with torch.no_grad():
        for call in calls * 3:
            assert torch.equal(call(*inputs), wanted(*inputs))
    assert light == [None, MAX_AUTOTUNE]


@needs_torch
def test_what_inductor_cannot_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    problem = GemmProblem(16, 32, 64)

    def in_parts(a: Any, b: Any) -> Any:
        torch._dynamo.graph_break()
        return a @ b

    refused = tried(compiled(in_parts), problem, "inductor", "cpu")
    assert isinstance(refused, str) and refused.startswith("inductor refuses: ")

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compile_with(function, backend=broken)
    )
    refused = tried(compiled(unfused(problem)), problem, "inductor", "cpu")
    assert isinstance(refused, str) and "Failed to find C compiler" in refused
    torch.compiler.reset()
