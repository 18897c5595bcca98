"""How PyTorch's attention and the FlashAttention packages are called; they agree with fp64."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peer_cases import (
    forget_peers_fixture,
    needs_torch,
    tensors,
)

from tuner.config import Config
from tuner.families import family, peers
from tuner.families.peers import (
    installed,
    off_rows,
    tried,
)
from tuner.families.peers import sdpa as sdpa
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, Problem

forget_peers = forget_peers_fixture  # for every test here


def test_flash2_alone_is_called_with_variable_lengths() -> None:
    member = family("vendor_sdpa")
    problem = AttentionProblem.parse("B=3,S=64,D=64,varlen=1")
    refusals = {k: member.refusal(problem, k) for k in (*member.offered, *member.on_request)}  # type: ignore[attr-defined]
    taking = "flash2", "flash3_serving", "flash3_unprepared"
    assert [refusals.pop(kernel) for kernel in taking] == [""] * 3
    assert refusals == {k: f"{k} is not called with variable lengths" for k in refusals}
    unequal = AttentionProblem.parse("B=3,SQ=8,SKV=64,D=64,varlen=1,causal=1")
    assert "bottom-right" in member.refusal(unequal, "flash2")  # type: ignore[attr-defined]


def test_flash2_is_given_packed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tuner.families.peers.sdpa import flash2_varlen_call

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
def test_flash2_is_given_a_window_and_a_backend_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
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
    problem = AttentionProblem.parse("B=2,H=4,S=16,D=64,causal=1,window=8")
    inputs = tensors(problem)
    out = sdpa.flash2_call(problem, 0.5)(*inputs)
    assert out.shape == problem.output.shape
    arguments, options = given.pop()
    assert arguments[3:] == (None, None, 16, 16, 0.0, True, False)
    assert options == {"scale": 0.5, "window_size_left": 8, "window_size_right": 0}
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
    for name in ("three_kernel_attention", "triton_attention"):
        assert family(name).space(problem, DEFAULT_GPU) == []
        assert family(name).supports(problem, DEFAULT_GPU) == f"{name} has no {problem.extras}"


@pytest.mark.parametrize(
    ("keys", "rows", "is_taken"), [(8, 5, True), (12, 5, False), (2, 1, False)]
)
@pytest.mark.parametrize("name", ["vendor_sdpa", "vendor_cudnn_plans"])
def test_a_bias_whose_rows_are_not_aligned_is_not_read(
    name: str, keys: int, rows: int, is_taken: bool
) -> None:
    """cuDNN's kernel ends in a misaligned address there, also in the run that tries it."""
    problem = AttentionProblem.parse(f"H=4,SQ={rows},SKV={keys},D=64,bias=h,dtype=bf16")
    member = family(name)
    kernel = "cudnn" if name == "vendor_sdpa" else "cudnn_plans"
    refusal = member.refusal(problem, kernel)  # type: ignore[attr-defined]
    assert ("of bias" in refusal) != is_taken
    call = member.vendor_call(problem, Config(name, {"kernel": kernel}), 0.5)
    assert isinstance(call, str) and ("of bias" in call) != is_taken


def test_rows_of_calls_that_a_vendor_is_given() -> None:
    problem = AttentionProblem.parse("H=2,S=16,D=64,bias=h")
    assert off_rows(problem) == off_rows(problem, {"query": (2048, 64, 128, 1)}) == ""
    for name, strides in {
        "query": (2080, 1040, 65, 1),
        "value": (2048, 1024, 1, 16),
        "bias": (0, 17 * 16, 17, 1),
    }.items():
        assert f"of {name} (allowed" in off_rows(problem, {name: strides})
    alone = AttentionProblem.parse("H=1,S=16,D=64,bias=1")
    assert off_rows(alone, {"bias": (17, 3, 16, 1)}) == "", "of one element they say nothing"


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
    module, package = installed.PEERS[kernel].module, installed.PEERS[kernel].package
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
    assert installed.version(kernel)


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
    return installed.module_of("flash3_serving")


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
def test_lengths_without_metadata_are_each_call_s_own(serving: Any) -> None:
    """A graph that captured a call outlives the plan, whose tensors it would read."""
    problem = AttentionProblem.parse("S=48,D=16,H=4,causal=1,B=2,window=8,dtype=bf16")
    call = sdpa.VendorSdpa().connect(problem, sdpa.UNPREPARED, 0.3)
    assert not isinstance(call, str), call
    for _ in range(2):
        call(*tensors(problem))
    first, second = [options["seqused_k"] for _, options in serving.given]
    assert first.tolist() == second.tolist() == [48, 48]
    assert first.data_ptr() != second.data_ptr()


@needs_torch
@pytest.mark.parametrize(
    ("kernel", "options"), [("flash3", ""), ("flash3_splits", ""), (sdpa.UNPREPARED, ",window=8")]
)
def test_one_short_trial_is_for_all_sizes(
    serving: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, options: str
) -> None:
    import torch

    def note(call: Any, problem: Problem, name: str, device: str) -> Any:
        shapes.append((problem.batch, problem.seqlen_q, problem.seqlen_kv))
        return tried(call, problem, name, "cpu")

    shapes: list[Any] = []
    taking = PEER.replace("scale=None", "scale=None, num_splits=1")
    Path(serving.__file__).with_name("fa3.py").write_text(taking)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "_served", set())
    monkeypatch.setattr(peers, "tried", note)
    member, config = sdpa.VendorSdpa(), Config("vendor_sdpa", {"kernel": kernel})
    for size in ("B=64,S=65536", "B=2,S=32768", "B=1,S=16384"):
        problem = AttentionProblem.parse(f"{size},H=2,D=64,causal=1,dtype=bf16{options}")
        assert callable(member.vendor_call(problem, config, 0.3))
    assert shapes == [(1, 256, 256)]
    monkeypatch.setattr(peers, "_MAX_SERVED", 1)
    member.vendor_call(replace(problem, heads_q=4, heads_kv=4), config, 0.3)
    assert len(shapes) == 2 and len(peers._served) == 1, "it does not grow without limit"


@needs_torch
def test_keys_beyond_the_most_are_not_seen() -> None:
    import torch

    def fwd(query: Any, *_: Any, seqused_k: Any, **options: Any) -> Any:
        seen.append(seqused_k.tolist())
        return query

    seen: list[Any] = []
    problem = AttentionProblem.parse("SQ=1,SKV=64,D=16,page_size=16,layout=bshd")
    call = sdpa.UnpreparedPages(SimpleNamespace(fwd=fwd), problem, 0.5)
    query, cache = torch.zeros(2, 8, 16), torch.zeros(8, 16, 8, 16)
    table, used = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([20, 64])
    for most in (32, 64):
        call.run(query, cache, cache, table, used, torch.empty(0), lengths=(1, most))
    assert seen == [[20, 32], [20, 64]]


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("SQ=8,page_size=128,D=64", False),
        ("SQ=8,page_size=64,D=64", True),
        ("SQ=1,page_size=128,D=64", True),
        ("SQ=8,page_size=64,D=256,causal=1,window=32", False),
    ],
)
def test_pages_whose_unused_slots_are_read_are_refused(text: str, is_taken: bool) -> None:
    """An infinity there would reach the output, times zero."""
    problem = AttentionProblem.parse(f"SKV=1024,layout=bshd,{text}")
    refusal = sdpa.VendorSdpa().refusal(problem, sdpa.UNPREPARED)
    assert refusal == "" if is_taken else "unused ones included" in refusal


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
    monkeypatch.setattr(installed, "is_package", lambda name: True)
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
@pytest.mark.parametrize(
    "shape",
    [
        "S=24,D=16,H=4",
        "S=24,D=16,H=4,HKV=2,causal=1,B=2",
        "SQ=40,SKV=24,D=16,H=2,left=3,right=5,softcap=2",
        "SQ=40,SKV=24,D=16,H=2,B=3,bias=b,softcap=2",
        "SQ=24,SKV=40,D=16,H=4,HKV=2,B=2,causal=1,bias=h",
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
