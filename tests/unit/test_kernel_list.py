"""Kernel lists: built kernels by spec, and the proofs that stay with a library alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.errors import ConfigError
from tuner.families.base import KernelSpec
from tuner.selection.kernels import Kernel, KernelList, Lists, Proof, shipped_kernels

SPEC = KernelSpec("toy.cu.j2", {"tile": 64})
PROOF = Proof(64, 0, "NVIDIA H200", "580.159.04", "2026-11-23")
BUILT = Kernel(SPEC.key, "toy_1", "ab" * 32)
EMPTY = KernelList("13.0.88", "4.2.0", "9.0", "ef" * 32)


def test_a_kernel_is_found_by_its_spec() -> None:
    known = EMPTY.with_kernels([BUILT])
    assert known.find(KernelSpec("toy.cu.j2", {"tile": 64})) == BUILT
    assert known.find(KernelSpec("toy.cu.j2", {"tile": 128})) is None


def test_a_proof_stays_with_the_library() -> None:
    proven = EMPTY.with_kernels([Kernel(SPEC.key, "toy_1", "ab" * 32, PROOF)])
    again = proven.with_kernels([BUILT]).find(SPEC)
    assert again is not None and again.proof == PROOF
    changed = proven.with_kernels([Kernel(SPEC.key, "toy_2", "cd" * 32)]).find(SPEC)
    assert changed is not None and changed.proof is None


def test_a_fault_takes_the_proof_s_place() -> None:
    proven = EMPTY.with_kernels([Kernel(SPEC.key, "toy_1", "ab" * 32, PROOF)])
    failed = proven.with_kernels([Kernel(SPEC.key, "toy_1", "ab" * 32, None, "wrong at S=1")])
    found = failed.find(SPEC)
    assert found is not None and found.proof is None and found.fault == "wrong at S=1"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proof of one artifact that ships."""
    (tmp_path / "proofs").mkdir()
    proven = EMPTY.with_kernels([Kernel("another spec", "toy_1", "cd" * 32, PROOF)])
    proven.write(tmp_path / "proofs" / "a.json")
    monkeypatch.setattr(resources, "cache", lambda: tmp_path)
    shipped_kernels.cache_clear()
    yield
    shipped_kernels.cache_clear()


def test_a_built_kernel_has_the_shipped_proof_of_its_artifact(shipped: None) -> None:
    """Whatever compiled the host's half, and whatever its spec is called."""
    found = EMPTY.with_built([BUILT, replace(BUILT, spec="b", artifact="toy_2")])
    assert [one.proof for _, one in sorted(found.kernels.items())] == [None, PROOF]


def test_a_verdict_of_this_machine_is_kept(shipped: None) -> None:
    failed = EMPTY.with_kernels([replace(BUILT, fault="wrong at S=1")])
    found = failed.with_built([BUILT]).find(SPEC)
    assert found is not None and (found.proof, found.fault) == (None, "wrong at S=1")


def test_verdicts_of_another_machine_are_of_equal_artifacts() -> None:
    known = EMPTY.with_kernels([BUILT, replace(BUILT, spec="b", artifact="toy_2")])
    proven = replace(BUILT, spec="elsewhere", sha256="cd" * 32, proof=PROOF)
    found = known.with_verdicts([replace(proven, proof=None), proven])
    assert [one.proof for _, one in sorted(found.kernels.items())] == [None, PROOF]
    failed = replace(proven, proof=None, fault="wrong at S=1")
    for verdicts in ([failed], [failed, proven], [proven, failed]):
        after = found.with_verdicts(verdicts).find(SPEC)
        assert after is not None and (after.proof, after.fault) == (None, "wrong at S=1")


def test_it_is_what_was_written(tmp_path: Path) -> None:
    known = EMPTY.with_kernels([Kernel(SPEC.key, "toy_1", "ab" * 32, PROOF)])
    known.write(tmp_path / "kernels.json")
    assert KernelList.read(tmp_path / "kernels.json") == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a kernel list"),
        ({"version": 2}, "version 2 is not known"),
        ({"nvcc": 13}, "nvcc=13 is not text"),
        ({"kernels": [{}]}, "cannot be read"),
        ({"kernels": [{"spec": "a", "artifact": "../x", "sha256": ""}]}, "not the key"),
    ],
)
def test_another_document_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({**EMPTY.with_kernels([BUILT]).to_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        KernelList.read(path)


def test_a_proof_without_machine_code_is_read() -> None:
    """As those of before it was recorded."""
    data = EMPTY.with_kernels([replace(BUILT, proof=PROOF)]).to_json()
    for name in ("code", "carried"):
        del data["kernels"][0]["proof"][name]
    assert KernelList.from_json(data).kernels[SPEC.key].proof == PROOF


def test_a_damaged_row_costs_its_kernel_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are checked when a kernel is asked for; a fault counts wherever it stands."""
    other = KernelSpec("toy.cu.j2", {"tile": 128})
    failed = Kernel("failed", "toy_3", "cd" * 32, None, "wrong at S=1")
    current = replace(EMPTY, templates=resources.templates_digest())
    known = current.with_kernels([BUILT, Kernel(other.key, "toy_2", "cd" * 32, PROOF), failed])
    data = known.to_json()
    (damaged,) = (row for row in data["kernels"] if row["spec"] == SPEC.key)
    damaged["artifact"] = "../x"
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(data))
    monkeypatch.setattr("tuner.selection.kernels.places", lambda: [path])
    asked = Lists()
    assert "'../x' is not the key" in str(asked.proven({"main": SPEC}, "9.0"))
    assert "failed its proof: wrong at S=1" in str(asked.proven({"main": other}, "9.0"))
    assert "not built" in str(asked.proven({"main": KernelSpec("no.cu.j2", {})}, "9.0"))
    with pytest.raises(ConfigError, match="not the key"):
        KernelList.read(path)
