"""Kernel lists: kernels by spec, proofs that stay with a library, failures that outlive it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.base import resources
from tuner.compile.artifacts import Artifact
from tuner.compile.triton_compiler import LIBRARY
from tuner.errors import ConfigError
from tuner.families.arguments import Arguments
from tuner.families.base import KernelSpec
from tuner.measurement import Resources
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import Lists, shipped_kernels

TEMPLATE = "softmax.cu.j2"
SPEC, OTHER = (KernelSpec(TEMPLATE, {"tile": tile}) for tile in (64, 128))
SOURCE = resources.template_digest(TEMPLATE)
PROOF = Proof(64, 0, "NVIDIA H200", "580.159.04", "2026-11-23")
BUILT = Kernel(SPEC.key, "toy_1", "ab" * 32, code="1" * 32, source=SOURCE)
PROVEN, FAILED = replace(BUILT, proof=PROOF), replace(BUILT, fault="wrong at S=1")
EMPTY = KernelList("13.0.88", "4.2.0", "9.0")


def verdict(known: KernelList, spec: KernelSpec = SPEC) -> tuple[Proof | None, str]:
    kernel = known.find(spec)
    return kernel.proof, kernel.fault


def test_a_kernel_is_found_by_its_spec() -> None:
    known = EMPTY.with_kernels([BUILT])
    assert known.find(KernelSpec(TEMPLATE, {"tile": 64})) == BUILT
    assert known.find(OTHER) is None


def test_a_proof_stays_with_the_library() -> None:
    proven = EMPTY.with_kernels([PROVEN])
    assert verdict(proven.with_kernels([BUILT])) == (PROOF, "")
    for change in ({"artifact": "toy_2"}, {"sha256": "cd" * 32}):
        assert verdict(proven.with_kernels([replace(BUILT, **change)])) == (None, "")  # type: ignore[arg-type]


def test_a_fault_takes_the_proof_s_place() -> None:
    failed = EMPTY.with_kernels([PROVEN]).with_kernels([FAILED])
    assert verdict(failed) == (None, "wrong at S=1")


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


def built(known: KernelList, *kernels: Kernel) -> KernelList:
    """A list as `tuner build --portfolio` changes it."""
    return known.with_kernels(kernels).with_verdicts(shipped_kernels())


def test_a_built_kernel_has_the_shipped_proof_of_its_artifact(shipped: None) -> None:
    """Whatever compiled the host's half, and whatever its spec is called."""
    other = replace(BUILT, spec=OTHER.key, artifact="toy_2", code="2" * 32)
    known = built(EMPTY, BUILT, other)
    assert verdict(known) == (PROOF, "") and verdict(known, OTHER) == (None, "")


class TestFaults:
    """A failure belongs to machine code: no build, copy or shipped proof takes it away."""

    @pytest.mark.parametrize(
        "again",
        [
            BUILT,
            replace(BUILT, sha256="cd" * 32),
            replace(BUILT, sha256="cd" * 32, code=""),
            replace(BUILT, sha256="cd" * 32, artifact="toy_2"),
        ],
    )
    def test_a_rebuilt_kernel_has_it(self, shipped: None, again: Kernel) -> None:
        """In the same library or another one, under the same key or another one."""
        shipped_too = replace(again, spec="x", sha256="", proof=PROOF, code="")
        known = built(EMPTY.with_kernels([PROVEN]).with_kernels([FAILED]), again)
        assert verdict(known) == (None, "wrong at S=1")
        assert verdict(known.with_verdicts([shipped_too])) == (None, "wrong at S=1")

    def test_it_outlives_other_builds_of_its_spec(self, shipped: None) -> None:
        edited = replace(BUILT, artifact="toy_9", code="9" * 32)
        known = built(EMPTY.with_kernels([FAILED]), edited)
        assert verdict(known) == (None, "")
        assert verdict(built(known, BUILT)) == (None, "wrong at S=1")

    def test_it_outlives_the_file(self, shipped: None, tmp_path: Path) -> None:
        known = EMPTY.with_kernels([FAILED])
        replace(known, kernels={}).write(tmp_path / "kernels.json")
        assert verdict(built(KernelList.read(tmp_path / "kernels.json"), BUILT))[1]

    def test_a_later_proof_ends_it(self, shipped: None) -> None:
        known = EMPTY.with_kernels([FAILED]).with_kernels([PROVEN])
        assert known.faults == {} and verdict(built(known, BUILT)) == (PROOF, "")

    def test_neighbours_in_its_library_have_none(self) -> None:
        beside = replace(BUILT, spec=OTHER.key, artifact="toy_2", code="2" * 32, proof=PROOF)
        assert verdict(EMPTY.with_kernels([beside, FAILED]), OTHER) == (PROOF, "")

    def test_equal_machine_code_has_it(self) -> None:
        equal = replace(BUILT, spec=OTHER.key, artifact="toy_2", proof=PROOF)
        assert verdict(EMPTY.with_kernels([equal, FAILED]), OTHER) == (None, "wrong at S=1")

    def test_it_spreads_from_an_artifact_to_equal_machine_code(self) -> None:
        """As where another machine names the artifact only."""
        equal = replace(BUILT, spec=OTHER.key, artifact="toy_0", proof=PROOF)
        known = EMPTY.with_kernels([equal, BUILT]).with_verdicts([], {"toy_1": "wrong"})
        assert verdict(known) == verdict(known, OTHER) == (None, "wrong")
        assert verdict(known.with_kernels([replace(BUILT, artifact="toy_9")])) == (None, "wrong")

    def test_equal_kernels_that_are_proven_again_one_by_one_are_served(
        self, tmp_path: Path
    ) -> None:
        equal = replace(BUILT, spec=OTHER.key, artifact="toy_2", proof=PROOF)
        known = EMPTY.with_kernels([equal, FAILED])
        for kernel in (PROVEN, equal):
            known = known.with_kernels([kernel])
            known.write(tmp_path / "kernels.json")
            known = KernelList.read(tmp_path / "kernels.json")
        assert verdict(known) == verdict(known, OTHER) == (PROOF, "") and known.faults == {}


def test_verdicts_of_another_machine_are_of_equal_artifacts() -> None:
    other = replace(BUILT, spec=OTHER.key, artifact="toy_2", code="2" * 32)
    known = EMPTY.with_kernels([BUILT, other])
    proven = replace(BUILT, spec="elsewhere", sha256="cd" * 32, proof=PROOF)
    found = known.with_verdicts([replace(proven, proof=None), proven])
    assert verdict(found) == (PROOF, "") and verdict(found, OTHER) == (None, "")
    failed = replace(proven, proof=None, fault="wrong at S=1")
    for verdicts in ([failed], [failed, proven], [proven, failed]):
        assert verdict(found.with_verdicts(verdicts)) == (None, "wrong at S=1")
    assert verdict(found.with_verdicts([], {"1" * 32: "wrong"})) == (None, "wrong")


def test_a_failure_elsewhere_is_known_before_the_kernel_is_built() -> None:
    known = EMPTY.with_verdicts([replace(FAILED, spec="elsewhere")])
    assert verdict(known.with_kernels([BUILT])) == (None, "wrong at S=1")


def test_it_is_what_was_written(tmp_path: Path) -> None:
    failed = replace(FAILED, spec=OTHER.key, artifact="toy_2", code="2" * 32)
    known = EMPTY.with_kernels([PROVEN, failed])
    known.write(tmp_path / "kernels.json")
    assert KernelList.read(tmp_path / "kernels.json") == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a kernel list"),
        ({"version": 3}, "version 3 is not known"),
        ({"nvcc": 13}, "nvcc=13 is not text"),
        ({"kernels": [{}]}, "cannot be read"),
        ({"kernels": [{"spec": "a", "artifact": "../x", "sha256": ""}]}, "not the key"),
        ({"faults": ["toy_1"]}, "'faults' is not an object of text"),
        ({"faults": {"toy_1": 5}}, "'faults' is not an object of text"),
    ],
)
def test_another_document_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({**EMPTY.with_kernels([BUILT]).to_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        KernelList.read(path)


@pytest.mark.parametrize("problems", [0, -64])
def test_a_proof_of_no_problems_does_not_count(problems: int) -> None:
    data = EMPTY.with_kernels([replace(BUILT, proof=replace(PROOF, problems=problems))]).to_json()
    assert verdict(KernelList.from_json(data)) == (None, "")


def first_version(templates: str) -> dict[str, Any]:
    """A document of version 1 with a proof, a failure, and a proof without machine code."""
    proof = {"problems": 64, "seed": 0, "gpu": "NVIDIA H200", "driver": "1", "date": "2026-11-23"}
    named = {**proof, "code": "1" * 32, "carried": "toy_0"}
    rows = [
        {"spec": SPEC.key, "artifact": "toy_1", "sha256": "ab" * 32, "proof": named, "fault": ""},
        {"spec": OTHER.key, "artifact": "toy_2", "sha256": "", "proof": None, "fault": "wrong"},
        {"spec": "old", "artifact": "toy_3", "sha256": "", "proof": proof, "fault": ""},
    ]
    facts = {"nvcc": "13.0.88", "cutlass": "4.2.0", "capability": "9.0", "templates": templates}
    return {"format": "cutlass-tuner kernels", "version": 1, **facts, "kernels": rows}


class TestFirstVersion:
    """Lists and wheels of version 1, which had one digest over all templates."""

    @pytest.mark.parametrize("deferred", [False, True])
    def test_it_counts_where_no_template_changed(self, deferred: bool) -> None:
        data = first_version(resources.templates_digest())
        known = KernelList.from_json(data, deferred=deferred)
        proof = replace(PROOF, driver="1", carried="toy_0")
        assert known.find(SPEC) == replace(BUILT, proof=proof)
        assert verdict(known, OTHER) == (None, "wrong") and known.faults == {"toy_2": "wrong"}
        old = known.kernels["old"]
        assert (old.proof, old.code, old.is_current) == (replace(PROOF, driver="1"), "", False)

    def test_kernels_of_other_templates_wait_for_a_build(self) -> None:
        known = KernelList.from_json(first_version("ef" * 32))
        assert known.find(SPEC) is None
        assert known.kernels[SPEC.key].proof is not None and known.faults == {"toy_2": "wrong"}

    def test_a_damaged_row_costs_its_kernel_only(self) -> None:
        data = first_version(resources.templates_digest())
        data["kernels"][2]["proof"] = "x"
        assert KernelList.from_json(data, deferred=True).find(SPEC) is not None
        with pytest.raises(ConfigError):
            KernelList.from_json(data)


class TestTemplates:
    """A kernel counts while the files of its own template are those that it was built from."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        files = {
            "a.cu.j2": '{% include "part.cu.j2" %}\n#include "head.h"\n',
            "b.cu.j2": '{% include "b/" ~ ("x" if wide else "y") ~ ".cu.j2" %}\n',
            "part.cu.j2": "part",
            "head.h": '#include "deep.h"\n',
            "deep.h": "deep",
            "b/x.cu.j2": "x",
            "b/y.cu.j2": "y",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(resources, "templates", lambda: tmp_path)
        resources.template_digest.cache_clear()
        yield tmp_path
        resources.template_digest.cache_clear()

    @pytest.mark.parametrize(
        ("edited", "stays"),
        [
            ("a.cu.j2", "b"),
            ("part.cu.j2", "b"),
            ("head.h", "b"),
            ("deep.h", "b"),
            ("b.cu.j2", "a"),
            ("b/x.cu.j2", "a"),
            ("b/y.cu.j2", "a"),
            ("unused.h", "ab"),
        ],
    )
    def test_an_edit_concerns_the_template_s_own_kernels(
        self, folder: Path, edited: str, stays: str
    ) -> None:
        specs = {name: KernelSpec(f"{name}.cu.j2") for name in "ab"}
        known = EMPTY.with_kernels(
            Kernel(spec.key, f"toy_{name}", "", PROOF, source=source(spec))
            for name, spec in specs.items()
        )
        assert all(known.find(spec) for spec in specs.values())
        (folder / edited).write_text("edited")
        resources.template_digest.cache_clear()
        assert "".join(name for name, spec in specs.items() if known.find(spec)) == stays

    def test_other_arguments_of_the_launch_make_another_kernel(self) -> None:
        artifact = Artifact(
            "toy_1", Path("none"), "ab" * 32, Resources(1, 0, 0, 0, code="1" * 32), 1
        )
        known = EMPTY.with_kernels([Kernel.of(SPEC, artifact)])
        assert known.find(SPEC) is not None
        turned = replace(SPEC, arguments=Arguments(integers=("columns", "rows")))
        assert turned == SPEC and known.find(turned) is None

    def test_a_kernel_in_triton_has_the_interface_of_its_library(self) -> None:
        names = {path.name for path in resources.sources("triton_attention.py.j2")}
        assert names == {"triton_attention.py.j2", LIBRARY}

    @pytest.mark.parametrize(
        "template", ["", "gone.cu.j2", "../a.cu.j2", "a\0.cu.j2", "b", "a" * 999]
    )
    def test_what_is_no_template_has_no_digest(self, folder: Path, template: str) -> None:
        assert resources.template_digest(template) == ""
        assert not Kernel(f"{template}{{}}", "toy_1", "", PROOF).is_current


def source(spec: KernelSpec) -> str:
    return resources.template_digest(spec.template)


def test_a_damaged_row_costs_its_kernel_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are checked when a kernel is asked for; a fault counts wherever it stands."""
    other = replace(PROVEN, spec=OTHER.key, artifact="toy_2", code="2" * 32)
    data = EMPTY.with_kernels([BUILT, other]).to_json()
    damaged = next(row for row in data["kernels"] if row["spec"] == SPEC.key)
    damaged["artifact"] = "../x"
    data["kernels"].append({"spec": "failed", "artifact": "toy_2", "fault": "wrong at S=1"})
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(data))
    monkeypatch.setattr("tuner.selection.kernels.places", lambda: [path])
    asked = Lists()
    assert "'../x' is not the key" in str(asked.proven({"main": SPEC}, "9.0"))
    assert "failed its proof: wrong at S=1" in str(asked.proven({"main": OTHER}, "9.0"))
    assert "not built" in str(asked.proven({"main": KernelSpec("no.cu.j2", {})}, "9.0"))
    assert [kernel.spec for kernel in asked.kernels("9.0")] == [OTHER.key]
    with pytest.raises(ConfigError, match="not the key"):
        KernelList.read(path)
