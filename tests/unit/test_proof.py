"""`tuner prove` without a GPU: a worker that is not there judges; verdicts are kept at once."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tuner import settings
from tuner.base import resources
from tuner.cli import main
from tuner.compile import prebuilt
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measure import device, worker_client
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Resources, Status
from tuner.problem import AttentionProblem
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import Lists, path_of, targets, update, users
from tuner.selection.portfolio import shipped
from tuner.tuning import proof as proofs
from tuner.tuning.proof import MAX_STACK_BYTES, Prover, adopt, carry, export, plan

NVCC = "13.0.88"
TARGETS = targets(shipped()[0])[:3]
OK = CandidateOutcome(Status.OK)
Judge = Callable[[Ask], CandidateOutcome]


class Worker:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, judge: Judge = lambda ask: OK) -> None:
        self.judge, self.asks = judge, list[Ask]()

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        self.asks.append(ask)
        return [self.judge(ask)]

    def renew(self) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...
    def facts(self) -> dict[str, str]:
        return {}


def put(key: str, text: str, used: Resources | None = None) -> Artifact:
    """An artifact whose library holds a text."""
    cache = ArtifactCache()
    cache.root.mkdir(parents=True, exist_ok=True)
    library = settings.cache_dir() / f"{key}-{len(text)}.so"
    library.write_text(text)
    facts = {"nvcc": NVCC}
    return cache.put(key, library, resources=used, compile_cpu_s=1.0, source="", facts=facts)


@pytest.fixture
def built() -> Path:
    """A list of three kernels and the gate's."""
    found = []
    specs = [REFERENCE, *(spec for target in TARGETS for spec in target.kernels.values())]
    for number, spec in enumerate(specs):
        artifact = put(f"key{number}", f"library {number}")
        found.append(Kernel.of(spec, artifact))
    known = KernelList(NVCC, "4.2.0", "9.0")
    path = path_of(NVCC, "9.0")
    path.parent.mkdir(parents=True, exist_ok=True)
    known.with_kernels(found).write(path)
    return path


def enter(path: Path, *kernels: Kernel) -> None:
    update(path, lambda known: known.with_kernels(kernels))


def prover(*workers: Worker, **more: object) -> Prover:
    return Prover(DEFAULT_GPU, "580.1", workers, problems=64, **more)  # type: ignore[arg-type]


def verdicts(path: Path) -> list[tuple[bool, str]]:
    known = KernelList.read(path)
    found = [known.find(spec) for target in TARGETS for spec in target.kernels.values()]
    return [(one.proof is not None, one.fault) for one in found if one is not None]


def wrong_at_one_query(ask: Ask) -> CandidateOutcome:
    """A kernel that is wrong where there is one query."""
    if isinstance(ask.problem, AttentionProblem) and ask.problem.seqlen_q == 1:
        return CandidateOutcome(Status.WRONG_RESULT, log="relative error 1.0")
    return OK


def test_what_passed_is_proven(built: Path) -> None:
    worker = Worker()
    progress = prover(worker, seed=3).run(plan(built, TARGETS))
    assert (progress.kernels, progress.done, progress.faults) == (3, 3, [])
    assert verdicts(built) == [(True, "")] * 3
    kernel = KernelList.read(built).find(TARGETS[0].kernels["attention"])
    assert kernel is not None and kernel.proof is not None
    assert (kernel.proof.problems, kernel.proof.seed, kernel.proof.gpu) == (64, 3, "NVIDIA H200")
    assert kernel.proof.driver == "580.1"
    modes = {ask.mode for ask in worker.asks}
    assert modes == {"probe", "probe_lse"} and len(worker.asks) == 3 * 64
    assert len({ask.seed for ask in worker.asks}) > 64


def test_a_wrong_kernel_is_caught_and_named_with_its_problem(built: Path) -> None:
    first = TARGETS[0].kernels["attention"]

    def judge(ask: Ask) -> CandidateOutcome:
        [(config, _)] = ask.candidates
        is_first = TARGETS[0].family.kernels(ask.problem, config)["attention"] == first
        return wrong_at_one_query(ask) if is_first else OK

    progress = prover(Worker(judge)).run(plan(built, TARGETS))
    (fault,) = progress.faults
    assert "wrong_result at" in fault and "SQ=1" in fault and "relative error 1.0" in fault
    (is_proven, kept), *others = verdicts(built)
    assert not is_proven and "SQ=1" in kept and others == [(True, "")] * 2
    assert "failed its proof" in str(Lists().proven(TARGETS[0].kernels, "9.0"))
    assert Lists().proven(TARGETS[1].kernels, "9.0") == {"attention": "key2"}


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.WORKER_DIED, Status.ILLEGAL_ACCESS])
def test_a_kernel_that_hangs_or_strays_has_a_fault(built: Path, status: Status) -> None:
    progress = prover(Worker(lambda ask: CandidateOutcome(status, log="gone"))).run(
        plan(built, TARGETS)
    )
    assert len(progress.faults) == 3 and str(status) in progress.faults[0]


@pytest.mark.parametrize(("stack", "is_proven"), [(MAX_STACK_BYTES, True), (1168, False)])
def test_accumulators_in_local_memory_are_a_fault(built: Path, stack: int, is_proven: bool) -> None:
    spec = TARGETS[0].kernels["attention"]
    artifact = put("deep", "a deep stack", Resources(168, 0, 0, stack))
    enter(built, Kernel.of(spec, artifact))
    worker = Worker()
    progress = prover(worker).run(plan(built, TARGETS[:1]))
    kernel = KernelList.read(built).find(spec)
    assert kernel is not None and (kernel.proof is not None) == is_proven
    assert bool(worker.asks) == is_proven, "nothing runs on the GPU"
    assert is_proven or f"{stack} bytes of local memory" in progress.faults[0]


def test_an_ended_run_goes_on_where_it_was(built: Path) -> None:
    worker = Worker()
    stopped = prover(worker, is_over=lambda: len(worker.asks) >= 64 + 10)
    assert stopped.run(plan(built, TARGETS)).done == 1
    assert verdicts(built) == [(True, ""), (False, ""), (False, "")]
    todo = plan(built, TARGETS)
    assert (len(todo.waiting), todo.proven) == (2, 1)
    again = Worker()
    assert prover(again).run(todo).done == 2 and len(again.asks) == 2 * 64
    assert plan(built, TARGETS).waiting == []
    assert len(plan(built, TARGETS, again=True).waiting) == 3


def test_memory_that_is_short_is_no_verdict(built: Path) -> None:
    with pytest.raises(BenchmarkError, match="memory is short"):
        prover(Worker(lambda ask: CandidateOutcome(Status.OUT_OF_MEMORY))).run(plan(built, TARGETS))
    assert verdicts(built) == [(False, "")] * 3


def test_what_is_not_built_is_counted(built: Path) -> None:
    more = targets(shipped()[0])[3:5]
    assert plan(built, [*TARGETS, *more]).missing == 2
    ArtifactCache().remove("key1")
    assert plan(built, TARGETS).missing == 1


def test_without_the_gate_s_kernels_nothing_is_proven(built: Path) -> None:
    ArtifactCache().remove("key0")
    with pytest.raises(ConfigError, match="the numerics gate's kernels are not built"):
        plan(built, TARGETS)


class TestSideBySide:
    """Several workers over one list."""

    def test_all_is_proven_once(self, built: Path) -> None:
        workers = [Worker(), Worker(), Worker()]
        progress = prover(*workers, seed=3).run(plan(built, TARGETS))
        assert (progress.done, progress.faults, progress.at_work) == (3, [], {})
        assert verdicts(built) == [(True, "")] * 3
        digests = [
            {ask.candidates[0][1]["attention"].key for ask in worker.asks} for worker in workers
        ]
        assert sum(len(worker.asks) for worker in workers) == 3 * 64
        assert sorted(key for found in digests for key in found) == ["key1", "key2", "key3"]

    def test_they_work_at_the_same_time(self, built: Path) -> None:
        meeting = threading.Barrier(3, timeout=60)

        def judge(ask: Ask) -> CandidateOutcome:
            if not seen.get(threading.get_ident()):
                seen[threading.get_ident()] = True
                meeting.wait()  # breaks where they come one after the other
            return OK

        seen: dict[int, bool] = {}
        prover(*(Worker(judge) for _ in range(3))).run(plan(built, TARGETS))
        assert verdicts(built) == [(True, "")] * 3

    def test_an_ended_run_keeps_what_is_proven(self, built: Path) -> None:
        workers = [Worker(), Worker()]

        def is_over() -> bool:
            return any(is_proven for is_proven, _ in verdicts(built))

        found = prover(*workers, is_over=is_over).run(plan(built, TARGETS))
        assert 1 <= found.done < 3
        assert sum(is_proven for is_proven, _ in verdicts(built)) == found.done

    def test_a_failure_ends_the_others_and_is_raised(self, built: Path) -> None:
        interrupted = []

        class Failing(Worker):
            def interrupt(self) -> None:
                interrupted.append(self)

        workers = [Failing(), Failing(lambda ask: CandidateOutcome(Status.OUT_OF_MEMORY))]
        with pytest.raises(BenchmarkError, match="memory is short"):
            prover(*workers).run(plan(built, TARGETS))
        assert interrupted == workers

    def test_what_timed_out_beside_others_is_proven_alone(self, built: Path) -> None:
        """A kernel that times out beside others is proven again alone; only then it has a fault."""
        first: list[str] = []

        def judge(ask: Ask) -> CandidateOutcome:
            [(_, artifacts)] = ask.candidates
            key = artifacts["attention"].key
            is_late = key == "key3" or (key == "key2" and not first)
            if key == "key2":
                first.append(key)
            return CandidateOutcome(Status.TIMEOUT, log="too slow") if is_late else OK

        progress = prover(Worker(judge), Worker(judge)).run(plan(built, TARGETS))
        assert progress.done == 3 and len(progress.faults) == 1
        assert [is_proven for is_proven, _ in verdicts(built)] == [True, True, False]
        assert "timeout at" in verdicts(built)[2][1]


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


SHIPPED = sorted((resources.cache() / "proofs").glob("*.json"))


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


class TestCommand:
    @pytest.fixture
    def worker(self, monkeypatch: pytest.MonkeyPatch) -> Worker:
        made = Worker()
        monkeypatch.setattr(worker_client, "WorkerClient", lambda index: made)
        monkeypatch.setattr(device, "detect", lambda index: DEFAULT_GPU)
        monkeypatch.setattr(device, "environment", lambda index: Environment({"driver": "580.1"}))
        return made

    def test_everything_passes(
        self, built: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["prove", "--problems", "8"]) == 0
        assert "3 kernels to prove" in (text := capsys.readouterr().err)
        assert "3 of 3 kernels proven" in text
        assert all(is_proven for is_proven, _ in verdicts(built))

    def test_one_family(
        self, built: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["prove", "--problems", "8", "--family", "fused_attention"]) == 0
        assert verdicts(built) == [(True, "")] * 3
        asked = len(worker.asks)
        assert main(["prove", "--again", "--family", "fused_attention_backward"]) == 0
        assert "0 kernels to prove" in capsys.readouterr().err and len(worker.asks) == asked
        assert main(["prove", "--family", "other"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tuner: --family other has no kernels (allowed: ")
        assert "fused_attention" in line

    def test_only_kernels_whose_line_has_the_texts(
        self, built: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        label = TARGETS[0].label()
        alike = sum(target.label() == label for target in TARGETS)
        assert alike < len(TARGETS)
        assert main(["prove", "--problems", "8", "--only", label]) == 0
        assert f" {alike} kernels to prove" in capsys.readouterr().err
        assert main(["prove", "--only", "no such kernel"]) == 2
        assert "--only no such kernel: no kernel has this" in capsys.readouterr().err

    def test_a_fault_is_said_now_and_the_next_time(
        self, built: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        worker.judge = wrong_at_one_query
        assert main(["prove"]) == 1
        assert capsys.readouterr().err.count("not served: fused_attention D=64, causal") == 3
        worker.judge = lambda ask: OK
        assert main(["prove"]) == 1
        assert "3 failed before" in capsys.readouterr().err
        assert main(["prove", "--again"]) == 0
        assert verdicts(built) == [(True, "")] * 3

    @pytest.mark.parametrize("text", ["{", '{"format": "cutlass-tuner kernels", "version": 9}'])
    def test_a_torn_list_of_another_compiler_is_left_out(
        self, built: Path, worker: Worker, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        torn = path_of("12.8.93", "9.0")
        torn.write_text(text)
        assert main(["prove", "--carry"]) == 0
        assert f"tuner: left out: kernel list {torn}" in capsys.readouterr().err
        assert main(["prove", "--problems", "8"]) == 0
        said = capsys.readouterr().err
        assert "3 of 3 kernels proven" in said and str(torn) in said

    @pytest.mark.parametrize("problems", [0, 1])
    def test_a_proof_has_a_problem(
        self, built: Path, monkeypatch: pytest.MonkeyPatch, problems: int
    ) -> None:
        drawn = proofs.trials
        monkeypatch.setattr(proofs, "trials", lambda *about: drawn(*about)[:problems])
        Prover(DEFAULT_GPU, "580.1", [Worker()], problems=problems).run(plan(built, TARGETS))
        assert {is_proven for is_proven, _ in verdicts(built)} == {problems > 0}

    def test_processes(self, built: Path, worker: Worker) -> None:
        assert main(["prove", "--processes", "3"]) == 0
        assert verdicts(built) == [(True, "")] * 3 and len(worker.asks) == 3 * 64

    def test_a_dry_run_checks_nothing(self, built: Path, worker: Worker) -> None:
        assert main(["prove", "--dry-run"]) == 0 and worker.asks == []

    def test_a_proof_of_another_gpu_holds(
        self,
        built: Path,
        worker: Worker,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A proof of the same compute capability holds; a new one names its own GPU."""
        assert main(["prove", "--problems", "8"]) == 0
        monkeypatch.setattr(device, "detect", lambda index: GPUS["H100"])
        assert main(["prove", "--problems", "8"]) == 0
        assert "0 kernels to prove, 3 proven" in capsys.readouterr().err
        assert main(["prove", "--problems", "8", "--again"]) == 0
        proofs = [one.proof for one in KernelList.read(built).kernels.values() if one.proof]
        assert {one.gpu for one in proofs} == {GPUS["H100"].name}

    @pytest.mark.usefixtures("worker")
    def test_nothing_is_built(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["prove"]) == 2
        assert "no kernel is built" in capsys.readouterr().err
