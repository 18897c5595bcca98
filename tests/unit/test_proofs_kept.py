"""Proofs after they were made: carried over, exported, served, and refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from proof_machine import (
    NVCC,
    TARGETS,
    Worker,
    built_kernels,
    enter,
    prover,
    put,
    verdicts,
    wrong_at_one_query,
)

from tuner import settings
from tuner.base import resources
from tuner.cli import main
from tuner.compile import prebuilt
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import StoreError
from tuner.families.target import Target
from tuner.measure import device
from tuner.measure.gate import REFERENCE
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import Lists, path_of, update, users
from tuner.tuning.proof import adopt, carry, export, plan

built = built_kernels
SHIPPED = sorted((resources.cache() / "proofs").glob("*.json"))


class TestCarry:
    """Proofs of other texts with equal machine code."""

    OLD = Proof(64, 0, "NVIDIA H200", "570.1", "2026-11-20")

    @pytest.fixture
    def codes(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """Machine code by the artifact's key."""
        known = {"key1": "a" * 32, "key2": "b" * 32, "old2": "b" * 32, "key3": "c" * 32}
        monkeypatch.setattr(Artifact, "code", property(lambda own: known.get(own.key, "")))
        return known

    def earlier(self, number: int, proof: Proof, code: str = "a" * 32) -> Kernel:
        [spec] = TARGETS[number].kernels.values()
        return Kernel(spec.key, f"old{number + 1}", "ab" * 32, proof, code=code)

    def kernel(self, path: Path, number: int) -> Kernel:
        [spec] = TARGETS[number].kernels.values()
        found = KernelList.read(path).find(spec)
        assert found is not None
        return found

    @pytest.mark.usefixtures("codes")
    def test_equal_code_takes_the_proof_over_and_says_so(self, built: Path) -> None:
        found = carry(built, [self.earlier(0, self.OLD)])
        assert (found.carried, found.other_code, found.unknown) == (1, 0, 2)
        proof = self.kernel(built, 0).proof
        assert proof == replace(self.OLD, carried="old1")
        assert proof.gpu == "NVIDIA H200" and proof.date == "2026-11-20"
        assert self.kernel(built, 0).artifact == "key1"
        assert Lists().proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}
        assert len(plan(built, TARGETS).waiting) == 2

    @pytest.mark.usefixtures("codes")
    def test_a_new_proof_names_the_machine_code(self, built: Path) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        proven = [self.kernel(built, number) for number in range(3)]
        assert [(one.code, one.proof and one.proof.carried) for one in proven] == [
            (letter * 32, "") for letter in "abc"
        ]

    @pytest.mark.usefixtures("codes")
    def test_other_code_is_refused(self, built: Path) -> None:
        found = carry(built, [self.earlier(2, self.OLD)])
        assert (found.carried, found.other_code) == (0, 1)
        assert verdicts(built) == [(False, "")] * 3

    @pytest.mark.usefixtures("codes")
    def test_another_spec_s_proof_is_not_taken(self, built: Path) -> None:
        elsewhere = replace(self.earlier(0, self.OLD), spec="another spec")
        assert carry(built, [elsewhere]).carried == 0

    @pytest.mark.usefixtures("codes")
    def test_code_that_no_proof_names_is_read_from_the_checked_library(self, built: Path) -> None:
        unnamed = self.earlier(1, self.OLD, code="")
        assert carry(built, [unnamed]).unknown == 3  # the library is not there
        put("old2", "the library that was checked")
        assert carry(built, [unnamed]).carried == 1
        assert self.kernel(built, 1).proof == replace(self.OLD, carried="old2")
        assert self.kernel(built, 1).code == "b" * 32

    @pytest.mark.usefixtures("codes")
    def test_machine_code_that_failed_takes_no_proof(self, built: Path) -> None:
        """The code of a row of version 1, which did not name it."""
        known = KernelList.read(built)
        rows = {spec: replace(one, code="") for spec, one in known.kernels.items()}
        replace(known, kernels=rows, faults={"a" * 32: "wrong at S=1"}).write(built)
        assert carry(built, [self.earlier(0, self.OLD)]).carried == 0
        assert self.kernel(built, 0).fault == "wrong at S=1"
        assert KernelList.read(built).faults["a" * 32] == "wrong at S=1"

    def test_what_holds_no_code_takes_no_proof(self, built: Path, codes: dict[str, str]) -> None:
        codes.clear()
        assert carry(built, [self.earlier(0, self.OLD)]).carried == 0

    @pytest.mark.usefixtures("codes")
    def test_a_proof_that_was_carried_names_the_artifact_that_was_checked(
        self, built: Path
    ) -> None:
        assert carry(built, [self.earlier(0, replace(self.OLD, carried="oldest"))]).carried == 1
        proof = self.kernel(built, 0).proof
        assert proof is not None and proof.carried == "oldest"

    @pytest.mark.usefixtures("codes")
    def test_a_verdict_is_kept(self, built: Path) -> None:
        enter(built, replace(self.kernel(built, 0), fault="wrong at S=1"))
        assert carry(built, [self.earlier(0, self.OLD)]).carried == 0
        assert self.kernel(built, 0).fault == "wrong at S=1"

    @pytest.mark.usefixtures("codes")
    def test_the_command_needs_no_gpu(
        self, built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(device, "detect", lambda index: None)
        shipped = (self.earlier(0, self.OLD), self.earlier(2, self.OLD))
        monkeypatch.setattr("tuner.cli.prove.shipped_kernels", lambda: shipped)
        assert main(["prove", "--carry"]) == 0
        text = capsys.readouterr().err
        assert "1 proofs carried over" in text and "1 kernels with other machine code" in text
        assert main(["prove", "--dry-run"]) == 0
        assert "2 kernels to prove, 1 proven (1 by carried proofs)" in capsys.readouterr().err


class TestExport:
    """Files that ship, from a list of this machine."""

    SPECS = frozenset(spec.key for target in TARGETS for spec in target.kernels.values())

    def proven(self, path: Path, gpu: str = "NVIDIA H100 80GB HBM3", first: int = 0) -> KernelList:
        """The list with proofs from the `first` kernel on."""
        proof = Proof(64, 0, gpu, "580.1", "2026-11-25")
        kernels = [KernelList.read(path).find(next(iter(t.kernels.values()))) for t in TARGETS]
        enter(path, *(replace(one, proof=proof) for one in kernels[first:] if one))
        return KernelList.read(path)

    def test_a_file_for_each_gpu_is_merged_with_what_is_there(
        self, built: Path, tmp_path: Path
    ) -> None:
        (first,) = export(tmp_path, self.proven(built, first=1), self.SPECS)
        assert first.path.name == f"nvidia-h100-nvcc-{NVCC}.json"
        assert (first.kernels, first.added, first.removed) == (2, 2, 0)
        text = first.path.read_text()
        other = self.proven(built, "NVIDIA H200", first=2)
        found = {one.path.name.split("-")[1]: one for one in export(tmp_path, other, self.SPECS)}
        assert {name: (one.kernels, one.added, one.removed) for name, one in found.items()} == {
            "h100": (1, 0, 1),
            "h200": (1, 1, 0),
        }
        nothing = replace(other, kernels={})
        assert [one.kernels for one in export(tmp_path, nothing, self.SPECS)] == [1, 1]
        export(tmp_path, self.proven(built, first=1), self.SPECS)
        assert first.path.read_text() == text

    def test_faults_and_unwanted_kernels_are_taken_out(self, built: Path, tmp_path: Path) -> None:
        known = self.proven(built)
        export(tmp_path, known, self.SPECS)
        one, two, _ = (known.kernels[key] for key in sorted(self.SPECS))
        nothing = replace(known, kernels={})
        failed = nothing.with_kernels([replace(one, proof=None, fault="wrong")])
        (found,) = export(tmp_path, failed, {one.spec, two.spec})
        assert (found.kernels, found.removed) == (1, 2)
        assert set(KernelList.read(found.path).kernels) == {two.spec}

    def test_proofs_of_other_templates_are_left_out(self, built: Path, tmp_path: Path) -> None:
        known = self.proven(built)
        export(tmp_path, known, self.SPECS)
        stale = {
            spec: replace(one, artifact="older", source="ef" * 16)
            for spec, one in known.kernels.items()
        }
        (again,) = export(tmp_path, replace(known, kernels=stale), self.SPECS)
        assert (again.kernels, again.added, again.removed) == (3, 0, 0)

    def test_a_shipped_file_is_reproduced(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """From a machine that has all of it, from one that has nothing, and onto itself."""
        lists = [KernelList.read(path) for path in SHIPPED]
        every = lists[0].with_kernels(
            replace(kernel, source=resources.template_digest(kernel.spec.partition("{")[0]))
            for one in lists
            for kernel in one.kernels.values()
        )
        users_list, folder = path_of(every.nvcc, every.capability), tmp_path / "proofs"
        users_list.parent.mkdir(parents=True)
        folder.mkdir()
        source = resources.template_digest(REFERENCE.template)
        gate = {REFERENCE.key: Kernel(REFERENCE.key, "key0", "ab" * 32, source=source)}
        for known in (every, every, replace(every, kernels=gate)):
            known.write(users_list)
            assert main(["prove", "--export", str(folder)]) == 0
            written = {path.name: path.read_text() for path in folder.iterdir()}
            assert written == {path.name: path.read_text() for path in SHIPPED}
        assert f"{len(lists[0].kernels)} proofs, 0 new, 0 removed" in capsys.readouterr().err

    def test_another_machine_takes_it_over(
        self, built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = built.read_text()
        (file,) = export(tmp_path, self.proven(built), self.SPECS)
        built.write_text(before)
        assert main(["prove", "--import", str(file.path)]) == 0
        assert "3 proofs and 0 failures taken over; 0 kernels" in capsys.readouterr().err
        assert verdicts(built) == [(True, "")] * 3
        failed = Kernel("elsewhere", "key1", "", fault="wrong at S=1")
        unknown = Kernel("elsewhere", "key9", "", fault="wrong at S=1")
        found = adopt(built, [failed, unknown, Kernel("elsewhere", "key8", "")])
        assert (found.proofs, found.faults, found.unknown) == (0, 1, 1)
        assert verdicts(built) == [(False, "wrong at S=1"), (True, ""), (True, "")]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--export", "nowhere"], "--export nowhere is not a folder"),
            (["--import", "nowhere"], "kernel list nowhere: "),
            (["--export", "."], "no kernel is built for these templates"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["prove", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tuner: {message}")


class TestLists:
    def served(self, path: Path, target: Target = TARGETS[0]) -> object:
        return Lists().proven(target.kernels, "9.0")

    def test_only_what_is_proven_is_served(self, built: Path) -> None:
        assert "not proven (tuner prove)" in str(self.served(built))
        prover(Worker()).run(plan(built, TARGETS))
        assert self.served(built) == {"attention": "key1"}
        assert "no kernel is built (tuner build --portfolio)" in str(
            Lists().proven(TARGETS[0].kernels, "10.0")
        )

    def test_another_library_is_not_served(self, built: Path) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        ArtifactCache().remove("key1")
        assert "not in the cache" in str(self.served(built))
        put("key1", "another library")
        assert "not in the cache" in str(self.served(built))

    def test_a_list_of_other_templates_is_not_used(
        self, built: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        monkeypatch.setattr(resources, "template_digest", lambda template: "another")
        assert "a kernel is not built" in str(self.served(built))

    def test_a_new_verdict_is_seen(self, built: Path) -> None:
        lists = Lists()
        assert isinstance(lists.proven(TARGETS[0].kernels, "9.0"), str)
        prover(Worker()).run(plan(built, TARGETS))
        assert lists.proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}

    def test_a_library_is_hashed_once(self, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        lists, found = Lists(), list[str]()
        find = ArtifactCache.find
        monkeypatch.setattr(
            ArtifactCache, "find", lambda cache, key: (found.append(key), find(cache, key))[1]
        )
        for _ in range(3):
            assert lists.proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}
        assert found == ["key1"]

    def test_a_damaged_list_serves_nothing(
        self, built: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        built.write_text("{")
        assert "no kernel is built" in str(self.served(built)) and "kernel list" in caplog.text


class TestWheel:
    def test_the_wheel_s_list_serves_beside_the_user_s(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        carried = built.rename(tmp_path / "kernels.json")
        monkeypatch.setattr(prebuilt, "kernel_lists", lambda: [carried])
        assert Lists().proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}
        assert users() == []

    def test_what_failed_here_is_not_served_from_the_wheel(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prover(Worker()).run(plan(built, TARGETS))
        carried = tmp_path / "kernels.json"
        carried.write_text(built.read_text())
        monkeypatch.setattr(prebuilt, "kernel_lists", lambda: [carried])
        prover(Worker(wrong_at_one_query)).run(plan(built, TARGETS, again=True))
        assert "failed its proof" in str(Lists().proven(TARGETS[0].kernels, "9.0"))

    def test_what_failed_here_is_not_served_from_another_library_of_the_wheel(
        self, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prover(Worker(wrong_at_one_query)).run(plan(built, TARGETS[:1]))
        ArtifactCache().remove("key1")
        artifact = put("key1", "the library of the wheel")
        proven = Kernel.of(TARGETS[0].kernels["attention"], artifact)
        proven = replace(proven, proof=Proof(64, 0, "NVIDIA H200", "580.1", "2026-11-25"))
        path = tmp_path / "kernels.json"
        KernelList(NVCC, "4.2.0", "9.0").with_kernels([proven]).write(path)
        monkeypatch.setattr(prebuilt, "kernel_lists", lambda: [path])
        assert "failed its proof" in str(Lists().proven(TARGETS[0].kernels, "9.0"))
        built.unlink()
        assert Lists().proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}


class TestOneLibrary:
    """Kernels that were compiled together, in one library."""

    @pytest.fixture
    def together(self, built: Path) -> Path:
        artifacts = [put(f"unit{number}", "one library") for number in range(3)]
        specs = [spec for target in TARGETS for spec in target.kernels.values()]
        enter(built, *(Kernel.of(*pair) for pair in zip(specs, artifacts, strict=True)))
        return built

    def test_one_that_fails_does_not_stop_the_others(self, together: Path) -> None:
        judged = prover(Worker(wrong_at_one_query)).run(plan(together, TARGETS[:1]))
        assert len(judged.faults) == 1
        prover(Worker()).run(plan(together, TARGETS))
        assert "failed its proof" in str(Lists().proven(TARGETS[0].kernels, "9.0"))
        for number in (1, 2):
            served = Lists().proven(TARGETS[number].kernels, "9.0")
            assert served == {"attention": f"unit{number}"}

    def test_equal_machine_code_is_not_served(
        self, together: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row of version 1 does not name its code."""
        prover(Worker()).run(plan(together, TARGETS))
        enter(together, Kernel("elsewhere", "other", "", fault="wrong at S=1", code="a" * 32))
        monkeypatch.setattr(Artifact, "code", property(lambda own: "a" * 32))
        assert "failed its proof" in str(Lists().proven(TARGETS[0].kernels, "9.0"))


class TestOthers:
    """A list decides which libraries are run: no other user can have written one that is read."""

    @pytest.fixture
    def proven(self, built: Path) -> Path:
        prover(Worker()).run(plan(built, TARGETS))
        return built

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
    @pytest.mark.parametrize("place", ["file", "folder"])
    def test_what_they_can_write_is_not_read(
        self, proven: Path, place: str, mode: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = proven if place == "file" else proven.parent
        before, lists = opened.stat().st_mode, Lists()
        opened.chmod(mode)
        for _ in range(2):
            assert "no kernel is built" in str(lists.proven(TARGETS[0].kernels, "9.0"))
        assert caplog.text.count(f"`chmod -R go-w {opened}`") == 1
        text = proven.read_text()
        for attempt in (
            lambda: plan(proven, TARGETS),
            lambda: adopt(proven, []),
            lambda: carry(proven, []),
            lambda: enter(proven),
        ):
            with pytest.raises(StoreError, match="can be written by others"):
                attempt()
        assert proven.read_text() == text
        opened.chmod(before)
        assert lists.proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}

    def test_another_user_s_list_is_not_read(
        self, proven: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        owner = 54321
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(proven, owner, -1)
        else:
            owner = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        assert isinstance(Lists().proven(TARGETS[0].kernels, "9.0"), str)
        assert f"belongs to another user ({owner})" in caplog.text
        if is_root:
            os.chown(proven, 0, -1)
            assert Lists().proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}

    def test_a_trusted_group_may_write_it(
        self, proven: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for libraries."""
        proven.chmod(0o664)
        assert isinstance(Lists().proven(TARGETS[0].kernels, "9.0"), str)
        monkeypatch.setenv("TUNER_TRUST_CACHE", str(proven.stat().st_gid))
        assert Lists().proven(TARGETS[0].kernels, "9.0") == {"attention": "key1"}

    def test_no_umask_lets_them_write(self, built: Path) -> None:
        known = KernelList.read(built)
        shutil.rmtree(settings.cache_dir())
        before = os.umask(0)
        try:
            update(built, lambda same: same, start=lambda: known)
        finally:
            os.umask(before)
        places = [built, built.parent, settings.cache_dir(), settings.artifacts_dir()]
        assert [place.stat().st_mode & 0o022 for place in places] == [0] * 4

    def test_the_command_leaves_it_out_and_says_so(
        self, proven: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        proven.chmod(0o666)
        assert main(["prove", "--carry"]) == 2
        said = capsys.readouterr().err
        assert f"`chmod -R go-w {proven}`" in said and "no kernel is built" in said
