"""Vendor families: their space, their reasons, and the adapters, against PyTorch on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from peer_cases import (
    forget_peers_fixture,
    needs_torch,
)

from tuner.config import Config
from tuner.families import families, family
from tuner.families.peers import (
    BESIDE_PYTORCH,
    FLEX,
    ListedVendor,
    Vendor,
    installed,
    tried,
)
from tuner.families.peers import sdpa as sdpa
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

forget_peers = forget_peers_fixture  # for every test here


PROBLEMS: dict[str, Problem] = {
    "sdpa_backward": AttentionBackwardProblem.parse("S=1024,D=64"),
    "vendor_sdpa": AttentionProblem.parse("S=1024,D=64"),
    "vendor_blas": GemmProblem.parse("M=4096,N=4096,K=4096"),
    "vendor_cublaslt_search": GemmProblem.parse("M=4096,N=4096,K=4096"),
    "vendor_cudnn_plans": AttentionProblem.parse("S=1024,D=64"),
    "vendor_flex": AttentionProblem.parse("S=1024,D=64,block_mask=1"),
    "vendor_softmax": SoftmaxProblem.parse("M=1024,N=1024,B=16"),
    "vendor_swiglu": SwigluProblem.parse("M=4096,N=14336,K=4096"),
    "vendor_grouped_gemm": GroupedGemmProblem.parse("G=8,M=4096,N=14336,K=4096,dtype=bf16"),
}


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
    named = {
        *sdpa.PEERS,
        *sdpa.VARIANTS,
        *sdpa.TILES,
        *installed.PEERS,
        sdpa.UNPREPARED,
        "torch_compile",
        "inductor",
    }
    named.add(FLEX)
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
    monkeypatch.setattr(installed, "version", lambda name: f"{name} 1.0")
    assert further <= space("vendor_sdpa") | space("vendor_blas")
    facts = {**family("vendor_sdpa").environment(), **family("vendor_blas").environment()}
    assert facts.items() >= {name: f"{name} 1.0" for name in installed.PEERS}.items()


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


@pytest.mark.parametrize("kernel", sdpa.PEERS)
def test_a_missing_peer_is_a_reason(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, installed.PEERS[kernel].package, None)  # as if not installed
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    reason = sdpa.peer(kernel)
    assert isinstance(reason, str) and "TUNER_PEERS_PATH" in reason
    assert installed.version(kernel) == ""
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
        installed._version.cache_clear()
        versions.add(installed.version("flash3"))
    (tmp_path / "fa3.so.xz").write_bytes(b"library")
    installed._version.cache_clear()
    versions.add(installed.version("flash3"))
    (tmp_path / "fa3_serving.py").write_text("another peer's")
    installed._version.cache_clear()
    versions.add(installed.version("flash3"))
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
