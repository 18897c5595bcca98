"""`tuner prove` without a GPU: a worker that is not there judges; verdicts are kept at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from proof_machine import (
    OK,
    TARGETS,
    Worker,
    built_kernels,
    enter,
    prover,
    put,
    verdicts,
    wrong_at_one_query,
)

from tuner.cli import main
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measure import device, worker_client
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Resources, Status
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import Lists, path_of, targets
from tuner.selection.portfolio import shipped
from tuner.tuning import proof as proofs
from tuner.tuning.proof import MAX_STACK_BYTES, Prover, plan

built = built_kernels


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
    worker = Worker(lambda ask: CandidateOutcome(status, log="gone"))
    progress = prover(worker).run(plan(built, TARGETS))
    assert len(progress.faults) == 3 and str(status) in progress.faults[0]
    assert len(worker.asks) == 3, "alone, none is tried again"


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
