"""Benches over the local runner, with a compiler and a worker that are scripted."""

from __future__ import annotations

import csv
import importlib
import io
import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner import device
from tuner.artifacts import Artifact
from tuner.bench import __main__ as bench_main
from tuner.bench import presets
from tuner.bench.compare import Comparison, Task
from tuner.bench.contenders import Role, line_up, peers_named
from tuner.bench.results import Results, Row, Summary, Timed
from tuner.bench.suites import ALL, SUITES, suites_named
from tuner.cli import bench_tables, main
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.job import read_problems
from tuner.lookup import Entry
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
)
from tuner.problem import E4M3, PROBLEMS, AttentionProblem, GemmProblem, Problem
from tuner.runners import choose
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool
from tuner.store import open_store
from tuner.worker import Outcome
from tuner.worker_client import Ask

PROBLEM = AttentionProblem.parse("H=8,S=384,D=64")
CAUSAL = replace(PROBLEM, is_causal=True)
WARM, COLD = Regime("graph", "warm"), Regime("graph", "cold")
PEERS = ("cudnn", "flash3", "flash3_splits")
OWN = family("fused_attention").space(PROBLEM, DEFAULT_GPU)
OWN_CAUSAL = family("fused_attention").space(CAUSAL, DEFAULT_GPU)[0]

Us = Callable[[Config], float]


class FakeCompiler:
    """Has everything at once, but for templates that it refuses."""

    jobs, batch = 8, 2
    toolchain = SimpleNamespace(nvcc_version="13.0.88", cutlass_version="4.2.0")

    def __init__(self) -> None:
        self.refused = ""
        self.submitted: list[KernelSpec] = []

    def submit(self, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Future[Artifact]]]:
        self.submitted += specs
        made = []
        for spec in specs:
            future: Future[Artifact] = Future()
            if self.refused and spec.template.startswith(self.refused):
                future.set_exception(CompileError("nvcc refused", command="nvcc", log=""))
            else:
                future.set_result(Artifact(spec.key, Path("/k.so"), "0" * 64, None, 2.0))
            made.append((spec, future))
        return made

    def close(self, cancel: bool = False) -> None:
        pass


class FakeWorker:
    """Times by rule: peers 20 us, own kernels 10 us and up by their place in `OWN`."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.us: Us = lambda config: (
            20.0 if "kernel" in config.params else 10.0 + [*OWN, config].index(config) % len(OWN)
        )
        self.failing: dict[str, Status] = {}
        self.before: Callable[[Ask], None] = lambda ask: None

    def measure(self, ask: Ask) -> list[Outcome]:
        self.asked.append(ask)
        self.before(ask)
        return [self._outcome(config, ask.rounds) for config, _ in ask.candidates]

    def _outcome(self, config: Config, rounds: int) -> Outcome:
        status = self.failing.get(config.get("kernel", config.digest))
        if status is not None:
            return Outcome(status, log="said why\nand more")
        us = self.us(config)
        return Outcome(Status.OK, us, us / 100, rounds, (), 3e-4, 4096, Clocks(1900, power_w=600.0))

    def facts(self) -> dict[str, str]:
        return {"torch": "2.11"}

    def close(self) -> None:
        pass


class Machines:
    """What `Runners` is on a machine with a GPU."""

    gpu = DEFAULT_GPU

    def __init__(self, *_: Any) -> None:
        self.made, self.worker = FakeCompiler(), FakeWorker()
        self.runners: dict[str, LocalRunner] = {}

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compiler(self) -> Any:
        return self.made

    def of(self, problem: Problem, regime: Regime) -> LocalRunner:
        parts: Any = (self.made, self.worker)
        if str(regime) not in self.runners:
            self.runners[str(regime)] = LocalRunner(
                0, regime, parts[0], gpu=DEFAULT_GPU, pool=WorkerPool([parts[1]])
            )
        return self.runners[str(regime)]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(device, "environment", lambda index: Environment({"driver": "580"}))
    return Machines()


def measured(config: Config, us: float, problem: Problem = PROBLEM, **but: Any) -> Measurement:
    base = Measurement(
        problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=us, std_us=0.01, is_final=True
    )
    return base.but(**but)


def entry(*configs: Config, problem: Problem = PROBLEM, **but: Any) -> Entry:
    return Entry.of([measured(c, 10.0 + i, problem, **but) for i, c in enumerate(configs)])


def task(problem: Problem = PROBLEM, regime: Regime = WARM, rounds: int = 20) -> Task:
    return Task("toy", problem, regime, rounds, PEERS)


def compare(machines: Machines, *tasks: Task, entries: Sequence[Entry] = (), **more: Any) -> Any:
    saved: list[Results] = []
    notes: list[str] = []
    made = Comparison(tasks, machines, entries, own=more.pop("own", 3), note=notes.append)
    return made.run(saved.append, **more), saved, notes


# Suites


def test_suites_hold_what_they_are_named_for() -> None:
    assert {name: len(suite.problems) for name, suite in SUITES.items()} == {
        "acceptance": 22,
        "decoding": 27,
        "long": 6,
        "plain": 16,
        "mlp": 12,
        "gated": 8,
    }
    acceptance = SUITES["acceptance"].problems
    assert len(set(acceptance)) == 22
    assert AttentionProblem.parse("B=2,H=32,HKV=8,S=4096,D=128,causal=1") in acceptance
    assert sum(getattr(p, "is_causal", False) for p in acceptance) == 11
    assert all(p.is_causal for p in SUITES["long"].problems if isinstance(p, AttentionProblem))
    assert [s.name for s in suites_named(ALL, "attention")] == ["acceptance", "decoding", "long"]
    assert [s.name for s in suites_named(ALL, "gemm")] == ["plain", "mlp"]
    assert [s.name for s in suites_named("", "gemm")] == ["plain"]
    assert GemmProblem(512, 14336, 4096, epilogue="bias_gelu") in SUITES["mlp"].problems


@pytest.mark.parametrize(
    ("name", "op"), [("nope", "attention"), ("acceptance", "gemm"), ("", "softmax")]
)
def test_a_wrong_suite_is_told(name: str, op: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        suites_named(name, op)


@pytest.mark.parametrize("suite", SUITES)
def test_a_listed_suite_can_be_swept(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op = SUITES[suite].op
    assert main(["bench", op, "--suite", suite, "--list-problems"]) == 0
    file = tmp_path / "problems.yaml"
    file.write_text(capsys.readouterr().out)
    assert read_problems(file) == list(SUITES[suite].problems)


def test_every_suite_names_peers_that_exist() -> None:
    for suite in SUITES.values():
        known = peers_named(suite.op, suite.against)
        wanted = {"attention": "flash3_splits", "gemm": "cublaslt", "swiglu": "inductor"}
        assert wanted[suite.op] in known
    assert {"addmm_activation", "inductor"} < set(peers_named("gemm", SUITES["mlp"].against))


# Contenders


def names(problem: Problem, entries: Sequence[Entry], **options: Any) -> list[tuple[Role, Config]]:
    values: dict[str, Any] = {"own": 3, "with_untuned": False, **options}
    found = line_up(problem, DEFAULT_GPU, WARM, entries, PEERS, **values)
    return [(c.role, c.config) for c in found.contenders if c.role is not Role.PEER]


def test_the_cache_s_best_take_part_in_their_order() -> None:
    vendor = Config("vendor_sdpa", {"kernel": "cudnn"})
    assert names(PROBLEM, [entry(vendor, *OWN[:5])]) == [(Role.OWN, c) for c in OWN[:3]]


def test_the_asked_regime_comes_first_and_others_follow() -> None:
    cold = Entry.of([measured(OWN[7], 9.0, regime=COLD)])
    found = names(PROBLEM, [cold, entry(OWN[1], OWN[7])], own=2)
    assert [config for _, config in found] == [OWN[1], OWN[7]]


def test_a_pinned_kernel_takes_part() -> None:
    pinned = replace(entry(*OWN[:4]), winner=measured(OWN[9], 12.0), pinned=True)
    assert [config for _, config in names(PROBLEM, [pinned], own=2)] == [OWN[9], OWN[0]]


@pytest.mark.parametrize(
    "other",
    [
        entry(*OWN[:2], problem=CAUSAL),
        entry(*OWN[:2], provenance=Provenance.REPLAYED),
        entry(*OWN[:2], gpu=replace(DEFAULT_GPU, name="NVIDIA H100 PCIe")),
    ],
)
def test_only_what_was_measured_for_the_problem_here_counts_as_tuned(other: Entry) -> None:
    assert {role for role, _ in names(PROBLEM, [other])} == {Role.UNTUNED}


def test_what_is_not_tuned_is_told_and_the_cost_model_picks() -> None:
    found = line_up(PROBLEM, DEFAULT_GPU, WARM, [], PEERS, own=2, with_untuned=False)
    own = [c.config for c in found.contenders if c.role is Role.UNTUNED]
    assert len(own) == 2 and "not tuned" in found.notes[0]
    prices = [family(c.family).predict_us(PROBLEM, c, DEFAULT_GPU) for c in own]
    assert prices == sorted(prices)


def test_one_untuned_kernel_stands_beside_the_tuned_when_asked() -> None:
    tuned = entry(*OWN[-3:])
    roles = [role for role, _ in names(PROBLEM, [tuned], with_untuned=True)]
    assert roles == [Role.OWN] * 3 + [Role.UNTUNED]


@pytest.mark.parametrize("params", [{}, {**OWN[0].params, "tile_n": 17}])
def test_a_stored_config_that_is_illegal_today_is_left_out(params: dict[str, Any]) -> None:
    stale = Config("fused_attention", params)
    found = line_up(
        PROBLEM, DEFAULT_GPU, WARM, [entry(stale, OWN[0])], (), own=3, with_untuned=False
    )
    assert [c.config for c in found.contenders] == [OWN[0]]
    assert stale.digest[:6] in found.notes[0]


def test_each_peer_gets_the_layout_it_likes() -> None:
    def layouts(problem: Problem) -> dict[str, Any]:
        against = peers_named("attention", ("cudnn", "flash2", "flash3", "naive"))
        found = line_up(problem, DEFAULT_GPU, WARM, [], against, own=1, with_untuned=False)
        peers = [c for c in found.contenders if c.role is Role.PEER]
        return {c.name: c.config.get("layout") for c in peers}

    flash = dict.fromkeys(("flash2", "flash3", "flash3_splits"), "bshd")
    assert layouts(PROBLEM) == {"cudnn": None, "naive": None, **flash}
    other = dict.fromkeys(("cudnn", "naive"), "bhsd")
    assert layouts(replace(PROBLEM, layout="bshd")) == {**other, **dict.fromkeys(flash)}


def test_quantised_attention_has_own_kernels_and_no_peer() -> None:
    problem = replace(PROBLEM, dtype=E4M3)
    against = peers_named("attention")
    found = line_up(problem, DEFAULT_GPU, WARM, [], against, own=3, with_untuned=False)
    assert [c.config.family for c in found.contenders] == ["fused_attention"] * 3


def test_peers_by_name() -> None:
    assert peers_named("gemm") == ["cublas", "cublaslt", "addmm", "addmm_activation"]
    assert "naive" not in peers_named("attention")
    assert peers_named("attention", ["naive", "flash3"]) == ["flash3", "flash3_splits", "naive"]
    with pytest.raises(ConfigError, match=r"'flash9' is no peer of attention \(allowed: cudnn"):
        peers_named("attention", ["flash9"])


# Presets


def test_the_tiles_of_the_design_documents_are_legal_and_as_named() -> None:
    found = presets.three_kernels(presets.TILED, DEFAULT_GPU)
    assert len(found) == len(presets.TILES) + len(presets.THREADS) - 1
    member = family("three_kernel_attention")
    for config in found.values():
        assert member.violations(presets.TILED, config, DEFAULT_GPU) == []
    config = found["three kernels 128x256x64, softmax 32"]
    assert [config.stages["qk"][f"tile_{x}"] for x in "mnk"] == [128, 256, 64]
    assert [config.stages["pv"][f"tile_{x}"] for x in "mnk"] == [128, 64, 64]
    assert config.stages["softmax"]["threads_per_row"] == 32
    assert presets.three_kernels(PROBLEM, DEFAULT_GPU) == {}


def test_named_kernels_are_timed_and_no_part_of_a_ratio(machines: Machines) -> None:
    suite = presets.preset("design-documents", "gemm")
    problem = suite.problems[0]
    machines.worker.us = lambda config: 5.0 if config.get("cluster_m") == 2 else 10.0
    wanted = Task(suite.name, problem, WARM, 20, ("cublas",), suite.named)
    tuned = family("gemm").space(problem, DEFAULT_GPU)
    first = next(c for c in tuned if c["cluster_m"] == 1)
    decided = Entry.of([measured(first, 9.0, problem)])
    results, *_ = compare(machines, wanted, entries=[decided])
    (row,) = results.rows
    by_name = {t.name: t.latency_us for t in row.timed if t.role is Role.NAMED}
    assert by_name["gemm 128x256x64 cluster 2x1"] == 5.0 and len(by_name) == 2
    assert row.own.config == first and row.ratio == 1.0


@pytest.mark.parametrize(("name", "op"), [("nope", "gemm"), ("design-documents", "softmax")])
def test_a_wrong_preset_is_told(name: str, op: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        presets.preset(name, op)


# Running


def test_a_row_is_one_interleaved_request(machines: Machines) -> None:
    results, saved, notes = compare(machines, task(), task(regime=COLD), entries=[entry(*OWN[:3])])
    assert [(a.mode, str(a.regime), a.rounds) for a in machines.worker.asked] == [
        ("final", "graph-warm", 20),
        ("final", "graph-cold", 20),
    ]
    (row, _) = results.rows
    assert [t.config for t in row.timed[:3]] == OWN[:3]
    assert (row.own.config, row.own.latency_us, row.peer.latency_us) == (OWN[0], 10.0, 20.0)
    assert row.ratio == 2.0 and row.clocks.sm_mhz == 1900
    assert results.environment.facts["torch"] == "2.11"
    assert [len(r.rows) for r in saved] == [1, 2]
    assert "ratio 2.000" in notes[-1]


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
    with pytest.raises(BenchmarkError, match="there is none here"):
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


# Results


def timed(role: Role, us: float | None, name: str = "x", **more: Any) -> Timed:
    status = Status.OK if us else Status.TIMEOUT
    return Timed(role, name, OWN[0], status, us, (us or 0) / 50 if us else None, 25, **more)


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
    (line,) = [text for text in lines if text.startswith("B=1,H=8,S=384,D=64 ") and "2.000" in text]
    assert line.split()[1:4] == ["10.0", "20.0", "2.000"]
    assert "cudnn: timeout (B=1,H=8,S=384,D=64,causal=1,dtype=fp16)" in lines
    assert lines[-2].startswith("toy, graph-warm: 1 problem, 1 without a ratio")
    assert "geometric mean 0.889, worst 0.889 at B=1,H=8,S=384,D=64" in lines[-1]


def test_a_shape_named_alone_is_shown_kernel_by_kernel() -> None:
    text = bench_tables.text(shown(), details=("toy",))
    assert "attention B=1,H=8,S=384,D=64,dtype=fp16, graph-warm" in text
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
        ("graph-warm", "ours", "10.0"),
        ("graph-warm", "cudnn", "20.0"),
    ]
    assert len(found) == 6 and float(found[0]["tflops"]) > 0 and found[3]["tflops"] == ""
    text = bench_tables.markdown(shown())
    assert text.count("| B=1,H=8,S=384") == 3
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "every line of a table has the same cells"


# The command


def test_all_regimes_share_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Client(FakeWorker):
        def __init__(self, device_index: int) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("tuner.worker_client.WorkerClient", Client)
    monkeypatch.setattr(device, "detect", lambda index: DEFAULT_GPU)
    monkeypatch.setattr(device, "occupants", lambda index: [])
    monkeypatch.setattr(device, "environment", lambda index: Environment({"driver": "580"}))
    monkeypatch.setattr(choose.Runners, "compiler", lambda self: FakeCompiler())
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
    (warm, cold) = machines.worker.asked
    assert [c for c, _ in warm.candidates][:3] == OWN[:3] and warm.rounds == 5
    assert str(cold.regime) == "graph-cold"
    shown = capsys.readouterr()
    assert "geometric mean 2.000" in shown.out.splitlines()[-1]
    assert "1/2 attention" in shown.err and all(file.stat().st_size for file in files)


def test_an_interrupted_run_keeps_its_rows_and_goes_on(
    command: Callable[..., int],
    machines: Machines,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(ask: Ask) -> None:
        if str(ask.regime) == "graph-cold":
            raise KeyboardInterrupt

    machines.worker.before = interrupt
    given = ("--shape", "H=8,S=384,D=64", "--l2", "both", "--json", tmp_path / "b.json")
    assert command(*given) == 130
    shown = capsys.readouterr()
    assert "interrupted after 1 rows" in shown.err and "geometric mean" in shown.out
    machines.worker.before = lambda ask: None
    machines.worker.asked.clear()
    assert command(*given, "--resume") == 0
    assert [str(ask.regime) for ask in machines.worker.asked] == ["graph-cold"]
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
        (("--rounds", "1"), "rounds=1 is out of range"),
        (("--own", "0"), "own=0 is out of range"),
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


@pytest.mark.parametrize(
    ("epilogue", "further"),
    [
        ("", []),
        ("gelu", []),
        ("bias_gelu", ["addmm"]),
        ("bias_relu", ["addmm", "addmm_activation"]),
    ],
)
def test_the_peers_of_a_gemm_are_those_of_its_epilogue(epilogue: str, further: list[str]) -> None:
    problem = GemmProblem(512, 512, 512, epilogue=epilogue)
    against = peers_named("gemm", ["cublas", "cublaslt", "addmm"])
    found = line_up(problem, DEFAULT_GPU, COLD, [], against, own=1, with_untuned=False)
    peers = [c.name for c in found.contenders if c.role is Role.PEER]
    assert peers == ["cublas", "cublaslt", *further]
    assert found.contenders[0].config.family == "gemm"


def test_the_script_names_what_it_can_run() -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench"
    done = subprocess.run([script, "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("there is no benchmark 'nope'")
    offered = done.stderr.partition("one of: ")[2].split()
    assert offered[: len(PROBLEMS)] == sorted(PROBLEMS)
    modules = [importlib.import_module(f"tuner.bench.{name}") for name in offered[len(PROBLEMS) :]]
    assert all(callable(module.main) for module in modules)


def test_a_benchmark_s_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(argv: Sequence[str]) -> int:
        raise ConfigError(f"{argv[0]} is not known")

    module = SimpleNamespace(main=wrong)
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    assert bench_main.main(["planted", "--fast"]) == 2
    assert capsys.readouterr().err == "planted: --fast is not known\n"
