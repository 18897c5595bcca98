"""Availability of a lookup's answer on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from stored import final

from tuner.cli import entries
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.families import family
from tuner.families.peers import installed
from tuner.hardware import gpu_by_name
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem
from tuner.selection import availability
from tuner.selection.kernels import Lists
from tuner.selection.reader import Entry, LookupResult, lookup
from tuner.store import open_store

H200 = gpu_by_name("H200")
PROBLEM = AttentionProblem.parse("S=1024,D=64")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    entries.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["lookup", *arguments, "--gpu", "H200"])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_a_decision_whose_kernel_is_not_built(capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(printed(capsys, "--shape", "S=1024,D=64").split())
    assert "served here no: its kernel is not built (`tuner build --shape B=1,H=16" in out


def test_a_decision_whose_kernels_are_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = lookup(PROBLEM, gpu=H200)
    assert answer is not None and answer.kind == "exact"
    config = answer.entry.winner.config
    built = {name: "a" * 32 for name in family(config.family).kernels(PROBLEM, config)}
    with open_store(str(tmp_path / "store.sqlite")) as store:
        measurement = answer.entry.winner.but(artifacts=built)
        store.decide(PROBLEM, H200, answer.entry.regime, [measurement], "sweep")
    answer = lookup(PROBLEM, gpu=H200, path=tmp_path / "store.sqlite")
    assert answer is not None and not availability.of_answer(answer).is_served
    monkeypatch.setattr(ArtifactCache, "find", lambda cache, key: key)
    assert availability.of_answer(answer).text == "yes"


def test_a_choice_of_a_portfolio_and_its_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "--shape", "S=777,D=64"
    missing = "served here  no: no kernel is built (tuner build --portfolio)"
    assert missing in printed(capsys, *shape)
    monkeypatch.setattr(Lists, "proven", lambda lists, specs, capability: dict.fromkeys(specs, "a"))
    assert "served here  yes" in printed(capsys, *shape)
    monkeypatch.setenv("TUNER_DISABLE", "1")
    assert "served here  no: TUNER_DISABLE is set; PyTorch answers" in printed(capsys, *shape)


@pytest.mark.parametrize(
    ("op", "shape", "winner"),
    [
        ("gemm", "M=4096,N=4096,K=4096,dtype=e4m3,scales=block", "block_scaled_gemm"),
        ("grouped_gemm", "G=8,M=4096,N=14336,K=4096,dtype=bf16", "grouped_gemm"),
        ("attention_backward", "S=3000,D=128", "sdpa_backward"),
    ],
)
def test_a_rule_s_kernel_is_an_answer(
    op: str, shape: str, winner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "--op", op, "--shape", shape)
    assert "answer       rule" in out and winner in out and "expected" in out
    data = json.loads(printed(capsys, "--op", op, "--shape", shape, "--json"))
    assert data["kind"] == "rule" and data["expected_us"] > 0
    assert set(data["served_here"]) == {"is_served", "reason", "instead"}


def verdict_of(config: Config, **facts: Provenance) -> availability.Availability:
    """Availability of the kernel that a stored decision names."""
    return availability.of_answer(LookupResult(Entry.of([final(config, 9.0, **facts)]), exact=True))


def test_replayed_times_are_not_served() -> None:
    config = Config("vendor_sdpa", {"backend": "cudnn"})
    verdict = verdict_of(config, provenance=Provenance.REPLAYED)
    assert verdict.text.startswith("no: replayed times are not served (on a GPU: `tuner sweep ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("fused_attention", "another version than the entry's"), ("cutlass_fmha", "was removed")],
)
def test_a_config_that_this_program_cannot_build(name: str, reason: str) -> None:
    config = Config(name, {"of": "another version"})
    verdict = verdict_of(config)
    assert not verdict.is_served and reason in verdict.reason
    assert reason in availability.of_kernel(PROBLEM, config, H200).reason


def test_a_peer_that_is_not_installed_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config("vendor_sdpa", {"kernel": "flash3"})
    monkeypatch.setattr(installed, "build_of", lambda kernel: "")
    verdict = availability.of_kernel(PROBLEM, config, H200)
    assert verdict.text == "no: flash3 is not installed here (`tuner doctor`); PyTorch answers"
    monkeypatch.setattr(installed, "build_of", lambda kernel: "flash-attn-3 3.0")
    assert availability.of_kernel(PROBLEM, config, H200).text == "yes"


def test_a_causal_mask_beside_a_mask_has_no_answer() -> None:
    masked = AttentionProblem.parse("S=1000,D=64,causal=1,mask=1")
    assert lookup(masked, gpu=H200) is None  # the runtime refuses such a call
