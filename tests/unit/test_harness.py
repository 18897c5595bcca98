"""The benches' harness: cases, children, files that a run goes on with, lines and tables."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench_device import GPU, fake_gpu  # noqa: F401
from living import benchmarks_environment

from benchmarks import harness, rows
from benchmarks.child import Worker
from benchmarks.harness import Bench, Preset
from tuner.base import resources
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure import device


@dataclass(frozen=True)
class Sum:
    """A case of the bench that these tests run."""

    number: int
    group = "sums"

    @property
    def label(self) -> str:
        return f"sum {self.number}"


def answer(case: Sum, args: Namespace) -> dict[str, Any]:
    return {"us": {"pytorch": 10.0, "tuner": float(args.own), "control": 10.0}}


def options(parser: Any) -> None:
    parser.add_argument("--own", default="8", help="microseconds of the tuner")


SUMS = Preset("sums", lambda _: [Sum(n) for n in range(4)], answer, smoke=Sum(9))
BENCH = Bench("sums", "Sums.", {"sums": SUMS}, options)

ANSWERING = """
import json, sys
for line in sys.stdin:
    index = int(line)
    if index == {dies}:
        sys.exit(3)
    if index == {hangs}:
        sys.stdin.read()
    if index == {loses}:
        print(json.dumps({{"lost": "an illegal access"}}), flush=True)
        continue
    print(json.dumps({{"us": {{"pytorch": 3.0, "tuner": 2.0, "control": 3.0}}}}), flush=True)
"""
SHOWING = """
import json, os, sys
for _ in sys.stdin:
    print(json.dumps({"gpu": os.environ["CUDA_VISIBLE_DEVICES"]}), flush=True)
"""
SHORT_S = 1.0
"""For a child that never answers: it reads its own input to an end that does not come."""


def child(dies: int = -1, hangs: int = -1, loses: int = -1) -> list[str]:
    """Command of a worker that answers all indices but these."""
    return [sys.executable, "-c", ANSWERING.format(dies=dies, hangs=hangs, loses=loses)]


def use(monkeypatch: pytest.MonkeyPatch, command: Sequence[str]) -> None:
    monkeypatch.setattr(harness, "python_command", lambda *_: list(command))


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    use(monkeypatch, child(dies=1))
    assert harness.main(BENCH, ["--json", str(path), "--limit", "3"]) == 1
    half = path.read_text()
    assert "2/3 sum 1: the worker ended: code 3" in capsys.readouterr().out
    with path.open("a") as file:
        file.write('{"case": "cut o')
    use(monkeypatch, child())
    assert harness.main(BENCH, ["--json", str(path)]) == 1, "the lost case is kept"
    text = path.read_text()
    head, *cases = [json.loads(line) for line in text.splitlines()]
    assert text.startswith(half) and [row["case"] for row in cases] == [
        f"sum {n}" for n in range(4)
    ]
    assert (head["bench"], head["preset"], head["gpu"]) == ("sums", "sums", GPU.name)
    assert head["options"] == {"seed": "0", "own": "8"} and head["driver"] == "580.1"
    assert head["command"] == f"scripts/bench sums --json {path} --limit 3"
    capsys.readouterr()
    use(monkeypatch, ["false"])
    harness.main(BENCH, ["--json", str(path)])
    table = capsys.readouterr().out
    assert table.startswith("4 of 4 cases\n")
    assert harness.main(BENCH, ["--table", str(path)]) == 0
    assert capsys.readouterr().out.split("\n\n")[1] == table.split("\n\n")[1]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    ("argv", "indices"),
    [([], "0123"), (["--only", "2"], "2"), (["--limit", "2"], "01"), (["--smoke"], "9")],
)
def test_options_say_which_cases(
    argv: list[str], indices: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    use(monkeypatch, child())
    labels = [f"sum {index}" for index in indices]
    assert harness.main(BENCH, [*argv, "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == labels
    assert harness.main(BENCH, argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].partition(" ")[2] for line in lines[: len(labels)]] == labels


@pytest.mark.usefixtures("fake_gpu")
def test_lanes_share_the_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, [sys.executable, "-c", SHOWING])
    path = tmp_path / "rows.jsonl"
    harness.main(BENCH, ["--gpus", "0,5", "--json", str(path)])
    _, measured = rows.read(path)
    assert {row["case"] for row in measured} == {f"sum {n}" for n in range(4)}
    assert {row["gpu"] for row in measured} <= {"0", "5"}


@pytest.mark.usefixtures("fake_gpu")
def test_no_case_begins_after_the_time_limit(monkeypatch: Any, capsys: Any) -> None:
    use(monkeypatch, ["false"])
    assert harness.main(BENCH, ["--time-limit", "0"]) == 0
    assert capsys.readouterr().out.startswith("0 of 4 cases\n")


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect", lambda *_: None)
    with pytest.raises(BenchmarkError, match=r"no GPU found.*--list needs none"):
        harness.main(BENCH, [])


def test_a_preset_without_kernels_compiles_nothing() -> None:
    built: list[str] = []
    own = Preset("", SUMS.cases, answer, compile=lambda args: built.append(args.own))
    both = Bench("sums", "", {"own": own, "sums": SUMS}, options)
    assert harness.main(both, ["--compile-only"]) == 0 and built == ["8"]
    with pytest.raises(ConfigError, match="--preset sums has no kernels of its own"):
        harness.main(both, ["--compile-only", "--preset", "sums"])


@pytest.mark.usefixtures("fake_gpu")
def test_a_file_of_another_run_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "rows.jsonl"
    use(monkeypatch, child())
    harness.main(BENCH, ["--json", str(path)])
    before = path.read_text()
    with pytest.raises(ConfigError, match="holds rows of another run: options"):
        harness.main(BENCH, ["--json", str(path), "--own", "9"])
    head = json.loads(before.splitlines()[0])
    for fact, value in (("date", "2026-11-28"), ("command", "another")):
        path.write_text(before.replace(json.dumps(head[fact]), json.dumps(value)))
        harness.main(BENCH, ["--json", str(path)])
    path.write_text("[1]\n[2]\n")
    with pytest.raises(ConfigError, match="is not a file of"):
        rows.read(path)


@pytest.mark.usefixtures("fake_gpu")
def test_compressed_files_are_read_and_not_appended_to(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl.gz"
    head = {"format": rows.FORMAT, "bench": "sums", "preset": "sums", "gpu": "H200"}
    row = {"case": "sum 0", "group": "sums", "us": {"pytorch": 3.0, "tuner": 2.0}}
    path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in (head, row)).encode()))
    assert harness.main(BENCH, ["--table", str(path)]) == 0
    assert "| sums | 1 | 1 | 1.500 |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"appended to plain files .allowed: rows\.jsonl\)"):
        harness.main(BENCH, ["--json", str(path)])
    other = Bench("other", "", {"sums": SUMS})
    with pytest.raises(ConfigError, match="is not a file of scripts/bench other"):
        harness.main(other, ["--table", str(path)])


def row(us: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {"case": "a call", "group": "calls", "us": us, "failed": {}, **changes}


US = {"pytorch": 12.0, "tuner": 10.0, "tuner enabled": 1.0, "cudnn": 11.0, "control": 15.0}


def test_ratios_leave_out_what_is_not_a_peer() -> None:
    assert rows.over(row(US), "pytorch") == 1.2
    assert rows.over_fastest(row(US)) == 1.1
    assert rows.control(row(US)) == 0.8
    assert rows.over_fastest(row({"tuner": 10.0, "control": 9.0})) is None
    assert rows.over({"lost": "hung"}, "pytorch") is None


@pytest.mark.parametrize(
    ("changes", "is_wrong"),
    [
        ({}, False),
        ({"failed": {"flash4": "absent"}}, False),
        ({"failed": {"tuner": "refused"}}, True),
        ({"wrong": ["cudnn"]}, True),
        ({"lost": "no answer"}, True),
    ],
)
def test_a_bench_fails_by_the_tuners_faults(changes: dict[str, Any], is_wrong: bool) -> None:
    assert rows.is_wrong(row(US, **changes)) is is_wrong


def test_a_line_says_times_ratio_and_faults() -> None:
    said = rows.ratio_line(row(US, failed={"flash4": "absent"}, wrong=["cudnn"]))
    assert said.startswith("a call: pytorch 12.0, tuner 10.0, ")
    assert said.endswith("ratio 1.100, flash4: absent, wrong: cudnn")


def test_a_table_leaves_no_case_out() -> None:
    slow = {**US, "tuner": 20.0}
    measured = [row(US), row(slow), {"case": "b", "group": "prompts", "lost": "no answer"}]
    head, _, *lines = rows.ratio_table(measured)
    assert head.count("|") == lines[0].count("|")
    assert lines[0] == "| calls | 2 | 2 | 0.849 | 0.600 | 0.778 | 0.550 | 1 | 0.800 |"
    assert lines[1] == "| prompts | 1 | 0 |  |  |  |  | 0 |  |"
    assert lines[2].startswith("| all | 3 | 2 | 0.849 |")


def test_the_seed_of_a_commit_is_heads(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "checkout", lambda: tmp_path)
    with pytest.raises(ConfigError, match="needs a checkout of git"):
        harness.commit()
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    assert len(harness.commit()) == 40


SERVING = """
import ctypes, signal, sys
from benchmarks.child import answer_indices
def measure(index):
    print("noise of a library")
    if index == 7:
        raise RuntimeError("the device is lost")
    if index == 8:
        culprit()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # as a library does that is loaded by a call
    return {"index": index}
def culprit():
    ctypes.string_at(0)
sys.exit(answer_indices(measure, False))
"""


def test_a_child_keeps_its_answers_apart_from_noise(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", benchmarks_environment()["PYTHONPATH"])
    with Worker([sys.executable, "-P", "-c", SERVING], 120.0) as worker:
        assert worker.ask(3) == {"index": 3}
        assert worker.ask(7) == {"lost": "the device is lost"}
        assert worker.ask(4) == {"index": 4}
        assert worker.ask(8) == {"lost": "the worker ended: code -11"}
    assert "in culprit" in capfd.readouterr().err


def test_a_worker_that_is_lost_costs_its_case() -> None:
    with Worker(child(dies=1, loses=3), 60.0) as worker:
        assert worker.ask(0)["us"]["tuner"] == 2.0
        assert worker.ask(1) == {"lost": "the worker ended: code 3"}
        assert worker.ask(0)["us"]["tuner"] == 2.0
        assert worker.ask(3) == {"lost": "an illegal access"}
        assert worker.ask(4)["us"]["tuner"] == 2.0


def test_a_case_that_never_answers_is_given_up() -> None:
    with Worker(child(hangs=2), SHORT_S) as worker:
        assert worker.ask(2) == {"lost": "no answer after 1 s"}
