"""`tuner prove --invariance` without a GPU: a program that is not there compares the rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.cli import main
from tuner.errors import ConfigError, WorkerLostError
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import Lists, path_of, targets, update
from tuner.selection.portfolio import shipped
from tuner.tuning import invariance
from tuner.tuning.invariance import BitChecker, compare_rows

NVCC = "13.0.88"
TARGETS = targets(shipped()[0])[:3]
PROOF = Proof(64, 0, "NVIDIA H200", "580.1", "2026-11-29")
SAME = {"views": 9, "compared": 900, "differing": 0, "crossed": 90, "crossed_differing": 0}
ANSWERS = {
    "same": {**SAME, "class": "depth=16", "at": []},
    "varies": {**SAME, "differing": 3, "class": "depth=16", "at": ["M=64"]},
    "of another class": {**SAME, "crossed_differing": 90, "class": "depth=16", "at": []},
    "no class": dict.fromkeys(SAME, 0),
    "fails": {"error": "RuntimeError: CUDA error"},
}


class Checker(BitChecker):
    """Answers in turn, and remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        super().__init__(0)
        self.answers, self.asked = list(answers), list[dict[str, str]]()

    def ask(self, target: Any, artifacts: dict[str, str]) -> dict[str, Any]:
        self.asked.append(artifacts)
        found: dict[str, Any] = ANSWERS[self.answers.pop(0)]
        if "error" in found:
            raise WorkerLostError(found["error"])
        return found


def row(number: int, proof: Proof | None = PROOF) -> Kernel:
    spec = TARGETS[number].kernels["attention"]
    artifact = f"{number:032x}"
    one = Kernel(spec.key, artifact, f"{number:064x}", proof)
    from tuner.selection.kernel_list import source_of

    return replace(one, source=source_of(spec))


@pytest.fixture
def path() -> Path:
    """A list of three proven kernels."""
    place = path_of(NVCC, "9.0")
    place.parent.mkdir(parents=True, exist_ok=True)
    KernelList(NVCC, "4.2.0", "9.0").with_kernels(map(row, range(3))).write(place)
    return place


def test_kernels_that_vary_are_noted_in_the_list(path: Path) -> None:
    checker = Checker("same", "varies", "of another class")
    found = compare_rows(path, TARGETS, checker)
    assert (found.kernels, found.rows, found.skipped) == (3, 2970, 0)
    assert [text.split(": ", 2)[-1] for text in found.variant] == [
        "3 of 900 rows differ, at M=64",
        "90 of 90 rows differ from those of the class depth=16",
    ]
    known = KernelList.read(path)
    assert list(known.variant) == [row(1).artifact, row(2).artifact]
    lists = Lists()
    assert lists.variant([row(0).artifact]) == ""
    assert "3 of 900 rows differ" in lists.variant([row(0).artifact, row(1).artifact])
    # A later comparison without a difference takes it back.
    compare_rows(path, TARGETS[1:2], Checker("same"))
    assert list(KernelList.read(path).variant) == [row(2).artifact]
    assert Lists().variant([row(1).artifact]) == ""


def test_what_fails_is_noted_and_what_has_no_class_or_proof_is_not(path: Path) -> None:
    update(path, lambda known: known.with_kernels([replace(row(2, None), sha256="f" * 64)]))
    checker = Checker("fails", "no class")
    found = compare_rows(path, TARGETS, checker)
    assert (found.kernels, found.skipped, len(checker.asked)) == (1, 2, 2)
    assert list(KernelList.read(path).variant.values()) == [
        "not compared: RuntimeError: CUDA error"
    ]


def test_a_run_ends_when_it_is_told_to(path: Path) -> None:
    checker = Checker("same")
    found = compare_rows(path, TARGETS, checker, is_over=lambda: bool(checker.asked))
    assert found.kernels == 1


def test_the_list_keeps_what_varies_through_builds_and_proofs(path: Path) -> None:
    compare_rows(path, TARGETS[:1], Checker("varies"))
    update(path, lambda known: known.with_kernels([row(0)]).with_verdicts([row(1)]))
    data = json.loads(path.read_text())
    assert list(data["variant"]) == [row(0).artifact]
    with pytest.raises(ConfigError, match="'variant' is not an object of text"):
        KernelList.from_json({**data, "variant": {"a": 1}})
    plain = KernelList(NVCC, "", "9.0")
    assert "variant" not in plain.to_json() and plain.variant == {}


def program(*lines: str) -> list[str]:
    """A program that answers each line by the next of these; an empty one hangs."""
    text = (
        "import sys, time\n"
        f"for line, answer in zip(sys.stdin, {list(lines)!r}):\n"
        "    if not answer:\n"
        "        sys.stdin.read()\n"  # until it is killed
        "    print(answer, flush=True)\n"
    )
    return [sys.executable, "-c", text]


def test_a_process_answers_one_kernel_after_the_other() -> None:
    answers = [json.dumps(ANSWERS[name]) for name in ("same", "varies")]
    with BitChecker(0, command=program(*answers)) as checker:
        assert checker.ask(TARGETS[0], {"attention": "a"})["differing"] == 0
        assert checker.ask(TARGETS[1], {"attention": "b"})["differing"] == 3
        with pytest.raises(WorkerLostError, match="no answer"):  # it has ended
            checker.ask(TARGETS[2], {"attention": "c"})
        assert checker.ask(TARGETS[0], {"attention": "a"})["differing"] == 0  # another began


def test_a_kernel_that_hangs_costs_its_process() -> None:
    with BitChecker(0, limit_s=0.2, command=program("")) as checker:
        with pytest.raises(WorkerLostError, match="no answer"):
            checker.ask(TARGETS[0], {})
        assert checker._process is None


def test_the_command_counts_and_fails_where_one_varies(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.dumps(ANSWERS["varies"])
    monkeypatch.setattr(device, "detect", lambda *_: DEFAULT_GPU)
    monkeypatch.setattr(invariance, "python_command", lambda *_: program(*[answer] * 9))
    assert main(["prove", "--invariance", "--op", "attention"]) == 1
    captured = capsys.readouterr()
    assert "2970 rows of 3 kernels compared, 3 kernels vary" in captured.out + captured.err
    assert captured.err.count("serves no batch-invariant call") == 3
