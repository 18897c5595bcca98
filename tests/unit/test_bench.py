"""Benches over the local runner, with a compiler and a worker that are scripted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_machines import (
    CAUSAL,
    COLD,
    OWN,
    OWN_CAUSAL,
    PROBLEM,
    WARM,
    Machines,
    RefusingCompiler,
    TimingWorker,
    compare,
    entry,
    fake_machines,
    measured,
    task,
)

from benchmarks import __main__ as bench_main
from tuner.base.processes import Interrupted
from tuner.bench import presets
from tuner.bench.comparison import ComparisonRun, RowTask
from tuner.bench.contenders import Role
from tuner.bench.results import Results
from tuner.cli import bench_tables, main
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure import device
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Status
from tuner.problem import AttentionProblem
from tuner.runners import choose
from tuner.selection.reader import Entry
from tuner.store import open_store

machines = fake_machines


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (
            DEFAULT_GPU,
            {
                "fused_attention",
                *("two_kernel_attention", "three_kernel_attention"),
            },
        ),
        (replace(DEFAULT_GPU, name="A100", compute_capability="8.0"), {"triton_attention"}),
    ],
    ids=["hopper", "ampere"],
)
def test_lengths_are_compared_over_every_way_to_compute_attention(
    gpu: Gpu, expected: set[str]
) -> None:
    found = presets.one_of_each(AttentionProblem.parse("S=2048,D=64"), gpu)
    assert {config.family for config in found.values()} == expected


def test_each_set_of_two_kernels_is_named_with_and_without_pdl() -> None:
    (suite,) = presets.PRESETS["unfused"]
    found = suite.named(presets.TILED, DEFAULT_GPU)
    member = family("two_kernel_attention")
    digests = {member.compile_digest(config) for config in found.values()}
    assert len(found) == 2 * len(digests) > 10
    assert {(c["heads_per_launch"], c["rows_per_launch"]) for c in found.values()} == {(16, 1024)}
    chosen = found["two kernels 128, scores 2/1/2, output 1/2/2, pdl"]
    assert (chosen["scores_groups"], chosen["output_blocks_per_sm"]) == (2, 2)
    assert all(not member.violations(presets.TILED, c, DEFAULT_GPU) for c in found.values())


def test_named_kernels_are_timed_and_no_part_of_a_ratio(machines: Machines) -> None:
    suite = presets.preset("design-documents", "gemm")
    problem = suite.problems[0]
    machines.worker.us = lambda config: 5.0 if config.get("cluster_m") == 2 else 10.0
    wanted = RowTask(suite.name, problem, WARM, 20, ("cublas",), suite.named)
    tuned = family("gemm").space(problem, DEFAULT_GPU)
    first = next(c for c in tuned if c["cluster_m"] == 1)
    decided = Entry.of([measured(first, 9.0, problem)])
    results, *_ = compare(machines, wanted, entries=[decided])
    (row,) = results.rows
    by_name = {t.name: t.latency_us for t in row.timed if t.role is Role.NAMED}
    assert by_name == {
        "gemm 128x256x64 cluster 2x1": 5.0,
        "default 128x128x64 cluster 1x1, Auto": 10.0,
    }
    assert row.own.config == first and row.ratio == 1.0
    text = bench_tables.text(results, details=(suite.name,))
    (line,) = [t for t in text.splitlines() if t.startswith("gemm 128x256x64")]
    assert line.split()[3:9] == ["2x1", "named", "5.00", "0.027", "0.50x,", "slower"]


def test_a_row_is_one_interleaved_request(machines: Machines) -> None:
    results, saved, notes = compare(machines, task(), task(regime=COLD), entries=[entry(*OWN[:3])])
    assert [(a.mode, str(a.regime), a.rounds) for a in machines.worker.asked] == [
        ("final", "stream-warm", 20),
        ("final", "stream-cold", 20),
    ]
    (row, _) = results.rows
    assert [t.config for t in row.timed[:3]] == OWN[:3]
    assert (row.own.config, row.own.latency_us, row.peer.latency_us) == (OWN[0], 10.0, 20.0)
    assert row.ratio == 2.0 and row.clocks.sm_mhz == 1900
    assert results.environment.facts["torch"] == "2.11"
    assert [len(r.rows) for r in saved] == [1, 2]
    assert notes[-1].endswith("2.00x cudnn")


def test_all_is_compiled_before_anything_is_timed(machines: Machines) -> None:
    wanted = set(family("fused_attention").kernels(PROBLEM, OWN[0]).values())
    wanted |= set(family("fused_attention").kernels(CAUSAL, OWN_CAUSAL).values())
    seen: list[bool] = []
    machines.worker.before = lambda ask: seen.append(wanted <= set(machines.made.submitted))
    tuned = [entry(OWN[0]), entry(OWN_CAUSAL, problem=CAUSAL)]
    compare(machines, task(), task(CAUSAL), entries=tuned)
    assert seen == [True, True]


def test_a_kernel_that_fails_costs_its_own_time_only(machines: Machines) -> None:
    machines.worker.failing = {"flash3": Status.TIMEOUT, OWN[0].digest: Status.WORKER_DIED}
    results, *_ = compare(machines, task(), entries=[entry(*OWN[:3])])
    (row,) = results.rows
    assert row.own.config == OWN[1] and row.ratio == pytest.approx(20 / 11)
    lost = {t.name: t.reason for t in row.timed if t.latency_us is None}
    assert lost["flash3"] == "timeout: said why" and len(lost) == 2


def test_a_kernel_that_does_not_compile_costs_its_own_time_only(machines: Machines) -> None:
    machines.made.refused = "fused_attention"
    results, *_ = compare(machines, task(), entries=[entry(*OWN[:3])])
    (row,) = results.rows
    assert row.own is None and row.ratio is None and row.peer.latency_us == 20.0
    assert {t.status for t in row.timed if t.role is Role.OWN} == {Status.COMPILE_ERROR}


def test_a_row_that_fails_does_not_end_the_run(machines: Machines) -> None:
    def refuse(ask: Ask) -> None:
        if ask.problem == PROBLEM:
            raise BenchmarkError("the numerics gate failed")

    machines.worker.before = refuse
    tuned = [entry(OWN[0]), entry(OWN_CAUSAL, problem=CAUSAL)]
    results, *_ = compare(machines, task(), task(CAUSAL), entries=tuned)
    assert [row.failure for row in results.rows] == ["the numerics gate failed", ""]
    assert results.summaries[0].missing == 1


def test_without_a_gpu_nothing_is_timed(machines: Machines, monkeypatch: Any) -> None:
    monkeypatch.setattr(Machines, "gpu", None)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        compare(machines, task())


def test_rows_of_an_earlier_run_are_taken_over(machines: Machines) -> None:
    tuned = [entry(OWN[0]), entry(OWN_CAUSAL, problem=CAUSAL)]
    earlier, *_ = compare(machines, task(), entries=tuned)
    other = replace(earlier.rows[0], suite="another")
    earlier = earlier.with_rows({0: other})
    machines.worker.asked.clear()
    results, saved, _ = compare(machines, task(CAUSAL), task(), entries=tuned, earlier=earlier)
    assert [ask.problem for ask in machines.worker.asked] == [CAUSAL]
    assert [(r.suite, r.problem) for r in results.rows] == [
        ("another", PROBLEM),
        ("toy", CAUSAL),
        ("toy", PROBLEM),
    ]
    assert len(saved[0].rows) == 3, "what was known is kept from the first save on"


@pytest.mark.parametrize("change", ["tuned again", "more rounds", "failed"])
def test_a_row_is_filled_anew_where_it_would_differ(machines: Machines, change: str) -> None:
    earlier, *_ = compare(machines, task(), entries=[entry(OWN[0])])
    if change == "failed":
        earlier = replace(earlier, rows=(replace(earlier.rows[0], failure="the GPU was lost"),))
    machines.worker.asked.clear()
    now = entry(OWN[1 if change == "tuned again" else 0])
    wanted = task(rounds=40 if change == "more rounds" else 20)
    results, *_ = compare(machines, wanted, entries=[now], earlier=earlier)
    assert len(machines.worker.asked) == 1 and len(results.rows) == 1


def test_rows_of_another_environment_are_refused(machines: Machines) -> None:
    earlier, *_ = compare(machines, task(), entries=[entry(OWN[0])])
    old = Environment({**earlier.environment.facts, "torch": "2.10"})
    with pytest.raises(ConfigError, match=r"torch 2\.10, here 2\.11"):
        compare(machines, task(), earlier=replace(earlier, environment=old))


def test_all_regimes_share_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Client(TimingWorker):
        def __init__(self, device_index: int) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("tuner.measure.worker_client.WorkerClient", Client)
    monkeypatch.setattr(device, "detect", lambda index: DEFAULT_GPU)
    monkeypatch.setattr(device, "occupants", lambda index: [])
    monkeypatch.setattr(device, "environment", lambda index: Environment({"driver": "580"}))
    monkeypatch.setattr(choose.Runners, "compiler", lambda self: RefusingCompiler())
    with choose.Runners(choose.Machine(), lambda text: None) as runners:
        for regime in (WARM, COLD):
            (seen,) = runners.of(PROBLEM, regime).retime(PROBLEM, [OWN[0]], 5)
            assert seen.ok and seen.regime == regime
    assert len(made) == 1 and len(made[0].asked) == 2


@pytest.fixture
def command(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`tuner bench` on a machine with a GPU and a store where `PROBLEM` is tuned."""
    monkeypatch.setattr(choose, "Runners", lambda *_: machines)
    with open_store() as store:
        ranking = [measured(c, 10.0 + i) for i, c in enumerate(OWN[:4])]
        store.decide(PROBLEM, DEFAULT_GPU, WARM, ranking, "sweep")
    return lambda *arguments: main(["bench", "attention", *map(str, arguments)])


def test_the_command_times_what_the_store_holds(
    command: Callable[..., int],
    machines: Machines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [tmp_path / name for name in ("b.json", "b.csv", "b.md")]
    shape = ("--shape", "H=8,S=384,D=64", "--against", "cudnn,flash3", "--l2", "both")
    given = ("--json", files[0], "--csv", files[1], "--markdown", files[2])
    assert command(*shape, *given, "--rounds", 5) == 0
    (warm, cold, *profiled) = machines.worker.asked
    assert [(ask.mode, len(ask.candidates)) for ask in profiled] == [("kernels", 2)] * 2
    assert [c for c, _ in warm.candidates][:3] == OWN[:3] and warm.rounds == 5
    assert str(cold.regime) == "stream-cold"
    shown = capsys.readouterr()
    assert "geometric mean 2.00x the fastest peer;" in shown.out.splitlines()[-1]
    assert "10.0 / 20.0" in files[2].read_text()  # by the profiler, own and peer
    assert "1/2 attention" in shown.err and all(file.stat().st_size for file in files)


def test_launches_and_the_kernel_before_the_call_are_chosen(
    command: Callable[..., int], machines: Machines
) -> None:
    shape = ("--shape", "H=8,S=384,D=64", "--against", "cudnn", "--no-kernel-times")
    wanted = {
        ("--regime", "both"): ["stream-warm", "chained-warm"],
        ("--regime", "graph"): ["chained-warm"],
        ("--regime", "eager"): ["eager-warm"],
        ("--behind", "gemm"): ["stream_gemm-warm"],
        ("--behind", "gemm", "--l2", "both"): ["stream_gemm-warm", "stream_gemm-cold"],
    }
    for options, regimes in wanted.items():
        machines.worker.asked.clear()
        assert command(*shape, *options) == 0
        assert [str(ask.regime) for ask in machines.worker.asked] == regimes


def test_what_cannot_be_profiled_costs_a_note(machines: Machines) -> None:
    machines.worker.before = lambda ask: fail() if ask.mode == "kernels" else None

    def fail() -> None:
        raise BenchmarkError("the profiler saw no kernel")

    made = ComparisonRun(
        [task()], machines, [entry(*OWN[:2])], with_kernel_times=True, note=lambda text: None
    )
    (row,) = made.run(lambda results: None).rows
    assert row.ratio == 2.0 and "not profiled: the profiler saw no kernel" in row.notes


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)]
)
def test_an_interrupted_run_keeps_its_rows_and_goes_on(
    raised: KeyboardInterrupt,
    code: int,
    command: Callable[..., int],
    machines: Machines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(ask: Ask) -> None:
        if str(ask.regime) == "stream-cold":
            raise raised

    machines.worker.before = interrupt
    given = ("--shape", "H=8,S=384,D=64", "--l2", "both", "--json", tmp_path / "b.json")
    assert command(*given) == code
    shown = capsys.readouterr()
    assert "interrupted after 1 rows" in shown.err and "geometric mean" in shown.out
    machines.worker.before = lambda ask: None
    machines.worker.asked.clear()
    assert command(*given, "--resume") == 0
    asked = [(ask.mode, str(ask.regime)) for ask in machines.worker.asked]
    assert asked == [("final", "stream-cold"), ("kernels", "stream-cold")]
    assert len(Results.read(tmp_path / "b.json").rows) == 2


def test_no_own_kernel_that_passes_ends_in_1(
    command: Callable[..., int], machines: Machines
) -> None:
    machines.worker.failing = dict.fromkeys((c.digest for c in OWN), Status.WRONG_RESULT)
    assert command("--shape", "H=8,S=384,D=64") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "nope"), "allowed: acceptance"),
        (("--against", "flash9"), "allowed: cudnn"),
        (("--preset", "nope"), "allowed: design-documents"),
        (("--shape", "S=7,D=7"), "D=7"),
        (("--resume",), "--resume needs --json"),
        (("--json", "/nowhere/b.json"), "there is no folder /nowhere"),
        (("--csv", "/"), "is a folder"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: tuple[str, ...],
    words: str,
    command: Callable[..., int],
    machines: Machines,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert machines.worker.asked == []


def test_an_operation_without_a_suite_wants_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "softmax"]) == 2
    assert "--shape" in capsys.readouterr().err


def test_a_benchmark_s_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(argv: Sequence[str]) -> int:
        raise ConfigError(f"{argv[0]} is not known")

    module = SimpleNamespace(main=wrong)
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    assert bench_main.main(["models", "--fast"]) == 2
    assert capsys.readouterr().err == "models: --fast is not known\n"


def test_compiling_alone_times_nothing(
    monkeypatch: pytest.MonkeyPatch, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """And needs no GPU: what an H200 would run is built."""
    monkeypatch.setattr(machines, "gpu", None)
    monkeypatch.setattr(choose, "Runners", lambda *_: machines)
    wanted = ["bench", "attention", "--shape", PROBLEM.label(), "--compile-only"]
    assert main([*wanted, "--untuned"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "compiled"
    templates = {spec.template for spec in machines.made.submitted}
    assert "reference.cu.j2" in templates and len(templates) > 1
    assert not machines.worker.asked
    machines.made.refused = min(templates - {"reference.cu.j2"})
    machines.made.futures.clear()
    assert main(wanted) == 1
    *_, reason, end = capsys.readouterr().err.splitlines()
    assert "compiled, but for" in end
    assert reason.startswith("tuner: ") and " failed: " in reason
