"""What a benchmark found: summaries, figures, files and tables."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_machines import (
    CAUSAL,
    COLD,
    OWN,
    PROBLEM,
    WARM,
    Machines,
    compare,
    entry,
    fake_machines,
    task,
)

from tuner.bench.contenders import Role
from tuner.bench.results import Results, Row, Size, Summary, TimedKernel, size_of
from tuner.cli import bench_tables
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Resources, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem, SoftmaxProblem, SwigluProblem

machines = fake_machines


def timed(role: Role, us: float | None, name: str = "x", **more: Any) -> TimedKernel:
    status = Status.OK if us else Status.TIMEOUT
    return TimedKernel(role, name, OWN[0], status, us, (us or 0) / 50 if us else None, 25, **more)


def row(own: float | None, peer: float | None, problem: Problem = PROBLEM, **more: Any) -> Row:
    parts = (timed(Role.OWN, own, "ours"), timed(Role.PEER, peer, "cudnn"))
    return Row(more.pop("suite", "toy"), problem, more.pop("regime", WARM), parts, **more)


def test_a_summary_is_the_geometric_mean_and_the_worst() -> None:
    rows = [row(10.0, 20.0), row(10.0, 5.0, CAUSAL), row(10.0, 10.0), row(None, 3.0)]
    rows[2] = replace(rows[2], problem=replace(PROBLEM, batch=2))
    found = Summary.of(rows)
    assert (found.count, found.missing) == (3, 1)
    assert found.geometric_mean == pytest.approx(1.0)
    assert (found.worst, found.worst_label) == (0.5, CAUSAL.label())
    assert Summary.of([row(None, 1.0)]).geometric_mean is None


def test_the_tuned_stand_for_own_even_where_the_untuned_is_faster() -> None:
    parts = (timed(Role.UNTUNED, 5.0), timed(Role.OWN, 10.0), timed(Role.OWN, 9.0))
    assert Row("toy", PROBLEM, WARM, parts).own == parts[2]
    assert Row("toy", PROBLEM, WARM, parts[:1]).own == parts[0]


def test_figures_follow_from_the_time() -> None:
    problem = AttentionProblem.parse("B=2,H=8,HKV=2,SQ=16,SKV=1024,D=64")
    shown = row(8.0, 9.0, problem)
    kernel = replace(shown.timed[0], workspace_bytes=1_000_000)
    found = shown.figures(kernel, DEFAULT_GPU)
    keys_and_values = 2 * (2 * 2 * 1024 * 64) * 2
    assert found["tb_per_s"] == pytest.approx(keys_and_values / 8e6)
    assert found["us_per_head"] == 0.5
    assert found["tflops"] == pytest.approx(4 * 2 * 8 * 16 * 1024 * 64 / 8e6)
    assert found["share_of_peak"] == pytest.approx(found["tflops"] / DEFAULT_GPU.peak_tflops)
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / 8e-6)
    assert found["memory_mb"] == pytest.approx((problem.bytes + 1e6) / 1e6)
    assert found["half_width_us"] == pytest.approx(1.96 * 1.2533 * 0.16 / 5, rel=1e-3)
    assert shown.figures(timed(Role.OWN, None), DEFAULT_GPU) == {}


def test_results_survive_json(machines: Machines, tmp_path: Path) -> None:
    machines.worker.failing = {"flash3": Status.TIMEOUT}
    results, *_ = compare(machines, task(), task(regime=COLD), entries=[entry(*OWN[:2])])
    results.write(tmp_path / "bench.json")
    assert Results.read(tmp_path / "bench.json") == results
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["bench.json"]
    (first, _) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert first["peer_over_own"] == 2.0 and first["kernels"][0]["figures"]["tflops"] > 0


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 9}', '{"format": 1, "gpu": {}}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError):
        Results.read(tmp_path / "other.json")


def shown() -> Results:
    rows = (
        row(10.0, 20.0),
        row(10.0, None, CAUSAL, notes=("not tuned",)),
        row(9.0, 8.0, regime=COLD),
    )
    return Results(DEFAULT_GPU, Environment({"driver": "580"}), rows)


def test_tables_say_one_row_a_problem_and_the_mean_last() -> None:
    lines = bench_tables.text(shown(), details=()).splitlines()
    assert lines[0] == "NVIDIA H200: driver 580"
    (line,) = [text for text in lines if text.startswith("B=1,H=8,S=384,D=64 ") and "2.00x" in text]
    assert line.split()[1:5] == ["10.0", "20.0", "2.00x", "cudnn"]
    (loss,) = [text for text in lines if text.startswith("B=1,H=8,S=384,D=64 ") and "8.00" in text]
    assert loss.split()[1:6] == ["9.00", "8.00", "0.89x", "cudnn,", "slower"]
    assert "cudnn: timeout (B=1,H=8,S=384,D=64,causal=1,dtype=fp16)" in lines
    assert lines[-2].startswith("toy, stream-warm: 1 problem, 1 without a ratio")
    assert lines[-1].endswith(
        "own speed: geometric mean 0.89x the fastest peer, slower; "
        "worst 0.89x at B=1,H=8,S=384,D=64,dtype=fp16, slower"
    )


def test_sizes_have_means_of_their_own() -> None:
    lengths = {512: 20.0, 1024: 5.0, 2048: 10.0, 32768: 40.0}
    rows = [row(10.0, us, replace(PROBLEM, seqlen_q=n, seqlen_kv=n)) for n, us in lengths.items()]
    found = Summary.of(rows)
    assert [(part.size, part.count) for part in found.parts] == [
        ("up to 1024", 2),
        ("1025 to 4096", 1),
        ("above 4096", 1),
    ]
    assert [part.geometric_mean for part in found.parts] == pytest.approx([1.0, 1.0, 4.0])
    said = bench_tables.summary_text(found).splitlines()
    assert said[1:] == [
        "  up to 1024 keys or rows: 2, 1.00x",
        "  1025 to 4096 keys or rows: 1, 1.00x",
        "  above 4096 keys or rows: 1, 4.00x",
    ]
    assert Summary.of(rows[:2]).parts == ()


@pytest.mark.parametrize(
    ("problem", "size"),
    [
        (GemmProblem(64, 14336, 4096), Size.SMALL),
        (SwigluProblem(4096, 14336, 4096), Size.MIDDLE),
        (SoftmaxProblem(rows=8, cols=8192), Size.LARGE),
        (AttentionProblem.parse("SQ=1,SKV=8192,D=64"), Size.LARGE),
    ],
)
def test_sizes(problem: Problem, size: Size) -> None:
    assert size_of(problem) is size


def test_a_tie_is_named_and_no_loss() -> None:
    close = row(10.05, 10.0)  # of two per cent deviation each: one per cent at most is a tie
    assert close.is_tie and close.verdict == "1.00x cudnn, a tie"
    behind = row(10.09, 10.0)
    assert behind.verdict == "0.99x cudnn, a tie"
    assert row(10.2, 10.0).verdict == "0.98x cudnn, slower"
    assert Summary.of([close, behind, row(10.0, 20.0)]).ties == 2
    noisy = replace(close, timed=(replace(close.timed[0], flags=("noisy",)), close.timed[1]))
    assert noisy.verdict == "1.00x cudnn, a tie, noisy"
    assert row(10.0, None).verdict == "-"


def test_both_regimes_stand_side_by_side() -> None:
    chained = row(10.0, 20.0, regime=WARM.chained)
    results = Results(
        DEFAULT_GPU, Environment({}), (row(10.0, 12.0), chained, row(9.0, 8.0, CAUSAL))
    )
    stream, apart = bench_tables.text(results, details=()).split("toy, chained-warm, microseconds")
    (heading,) = [line for line in stream.splitlines() if line.startswith("problem")]
    assert heading.split()[-1] == "chained" and "chained" not in apart.splitlines()[1]
    (line,) = [line for line in stream.splitlines() if "1.20x cudnn" in line and "D=64 " in line]
    assert line.endswith("2.00x cudnn")


def test_the_control_and_the_profiler_are_told() -> None:
    timed_twice = row(10.0, 12.0)
    own, peer = timed_twice.timed
    timed_twice = replace(
        timed_twice,
        timed=(replace(own, again_us=10.04, kernel_us=9.1), replace(peer, kernel_us=11.5)),
    )
    results = Results(DEFAULT_GPU, Environment({}), (timed_twice,))
    assert Results.from_json(results.to_json()) == results
    text = bench_tables.text(results, details=())
    assert "9.10 / 11.5" in text
    assert text.splitlines()[-1] == "  one kernel timed twice in a pass: within 0.4 %"
    (first, _) = csv.DictReader(io.StringIO(bench_tables.csv_text(results)))
    assert (first["again_us"], first["kernel_us"]) == ("10.04", "9.1")


def test_a_shape_named_alone_is_shown_kernel_by_kernel() -> None:
    text = bench_tables.text(shown(), details=("toy",))
    assert "attention B=1,H=8,S=384,D=64,dtype=fp16, stream-warm" in text
    (line,) = [t for t in text.splitlines() if t.startswith("cudnn") and "20.0" in t]
    assert line.split()[:3] == ["cudnn", "peer", "20.0"]


def test_the_own_kernel_s_registers_are_told() -> None:
    ours = replace(shown().rows[0].timed[0], resources={"main": Resources(168, 8, 4, 0)})
    results = replace(shown(), rows=(replace(shown().rows[0], timed=(ours,)),))
    assert "  main: 168 registers, 12 bytes spilled" in bench_tables.text(results, details=("toy",))


def test_decoding_is_shown_by_what_it_reads() -> None:
    problem = AttentionProblem.parse("H=32,HKV=8,SQ=1,SKV=8192,D=128")
    decoding = Results(DEFAULT_GPU, Environment({}), (row(15.0, 15.5, problem),))
    assert "TB/s" in bench_tables.text(decoding, details=()) and "2.24" in bench_tables.text(
        decoding, details=()
    )


def test_csv_and_markdown_hold_every_row() -> None:
    found = list(csv.DictReader(io.StringIO(bench_tables.csv_text(shown()))))
    assert [(f["regime"], f["kernel"], f["latency_us"]) for f in found[:2]] == [
        ("stream-warm", "ours", "10.0"),
        ("stream-warm", "cudnn", "20.0"),
    ]
    assert len(found) == 6 and float(found[0]["tflops"]) > 0 and found[3]["tflops"] == ""
    text = bench_tables.markdown(shown())
    assert text.count("| B=1,H=8,S=384") == 3
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "every line of a table has the same cells"
