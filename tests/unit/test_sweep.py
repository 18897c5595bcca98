"""Sweeps of toy families, defined here, over synthetic recordings with the replay runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest

from tuner import ranking
from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.job import Job, JobOptions, parse_problem, read_problems
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem, SoftmaxProblem
from tuner.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.store import Store, open_store
from tuner.sweep import Sweep, SweepOptions
from tuner.watch import Interruption, SweepState, Watcher

GEMM = GemmProblem(512, 512, 512)
ATTENTION = AttentionProblem.parse("S=512,D=64")
REGIME = Regime("graph", "warm")
ENVIRONMENT = Environment({"driver": "1"})


class Toy(Family):
    """One file, one template: all that a family is."""

    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"m": m, "n": n, "k": k, "raster": raster})
            for m, n, k, raster in product((64, 128, 256), (64, 128, 256), (16, 32, 64), "mn")
        ]

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return config["m"] * 1000

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0 + config["m"] / 64


class ToyVendor(Family):
    name = "vendor_toy"
    op = "gemm"
    is_vendor = True

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config(self.name, {"library": name}) for name in ("blas", "absent")]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0


class Composite(Family):
    """Two stages, both GEMMs, with one parameter of its own."""

    name = "composite"
    op = "attention"

    def __init__(self, winners: Mapping[str, Sequence[Config]] | None = None) -> None:
        self.winners = winners or {}

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def stages(self, problem: Problem) -> Mapping[str, Problem]:
        return {"qk": GemmProblem(512, 512, 64), "pv": GemmProblem(512, 64, 512)}

    def with_stages(self, winners: Mapping[str, Sequence[Config]]) -> Family:
        return Composite(winners)

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"pdl": pdl}, {"qk": qk, "pv": pv})
            for qk in self.winners.get("qk", ())
            for pv in self.winners.get("pv", ())
            for pdl in (False, True)
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 20.0


TOYS: dict[str, Family] = {f.name: f for f in (Toy(), ToyVendor(), Composite())}


def catalogue(op: str) -> Mapping[str, Family]:
    return {name: family for name, family in TOYS.items() if family.op == op}


def latency(config: Config) -> float:
    """Fastest at m=128, n=256, k=32, raster n: 10 us."""
    slow = {"m": 128, "n": 256, "k": 32}
    factor = sum(abs(config[name] / best - 1) for name, best in slow.items())
    return round(10 * (1 + 0.5 * factor + 0.05 * (config["raster"] == "m")), 4)


BEST = Config("toy", {"m": 128, "n": 256, "k": 32, "raster": "n"})


def ok(config: Config, us: float, problem: Problem = GEMM, **changes: object) -> Measurement:
    return Measurement(
        problem,
        config,
        DEFAULT_GPU,
        REGIME,
        Status.OK,
        environment=ENVIRONMENT,
        latency_us=us,
        std_us=us / 1000,
        rounds=7,
    ).but(**changes)


def failed(config: Config, status: Status, log: str = "", problem: Problem = GEMM) -> Measurement:
    return ok(config, 1.0, problem, status=status, latency_us=None, std_us=None, rounds=0, log=log)


def vendors(us: float = 11.0, problem: Problem = GEMM) -> list[Measurement]:
    present, absent = ToyVendor().space(problem, DEFAULT_GPU)
    return [
        ok(present, us, problem),
        failed(absent, Status.UNAVAILABLE, "not installed", problem),
    ]


def recording(
    problem: Problem = GEMM,
    change: Callable[[Measurement], Measurement] = lambda m: m,
    vendor_us: float = 11.0,
) -> Recording:
    own = [change(ok(c, latency(c), problem)) for c in Toy().space(problem, DEFAULT_GPU)]
    measured = (*own, *vendors(vendor_us, problem))
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, measured)


class CountingRunner(ReplayRunner):
    """Counts what was submitted; calls `after` once a group is collected."""

    def __init__(
        self, recorded: Recording, after: Callable[[CountingRunner], None] = lambda runner: None
    ) -> None:
        super().__init__(recorded)
        self.submitted: Counter[str] = Counter()
        self.prefetched: list[Problem] = []
        self.retimed: list[int] = []
        self.collected = 0
        self.after = after

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.submitted.update(f"{problem.key} {config.digest}" for config in group)
        super().submit(problem, group)

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        self.prefetched.append(problem)

    def collect(self) -> list[Measurement]:
        measured = super().collect()
        self.collected += 1
        self.after(self)
        return measured

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        self.retimed.append(rounds)
        return super().retime(problem, finalists, rounds)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path}/store.sqlite")


def sweep(runner: ReplayRunner, store: Store, problem: Problem = GEMM, **options: object) -> Sweep:
    chosen = SweepOptions(**{"sampler": "tpe", **options})  # type: ignore[arg-type]
    return Sweep(problem, REGIME, runner, store, chosen, catalogue=catalogue)


def test_a_toy_family_is_swept_to_its_optimum(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=27).run()
    assert outcome.ranking[0].config == BEST
    assert outcome.entry is not None
    assert outcome.entry.ratios == {"blas": pytest.approx(10 / 11)}
    assert outcome.unavailable == {"absent": "not installed"}
    assert (outcome.kernels, outcome.candidates, outcome.failures) == (27, 54, {})
    stored = store.best(GEMM, DEFAULT_GPU, REGIME)
    assert stored is not None
    assert stored.winner.config == BEST
    assert stored.provenance is Provenance.REPLAYED


def test_optuna_finds_the_optimum_of_what_does_not_fit(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=20, seed=1).run()
    assert outcome.kernels == 20
    assert outcome.ranking[0].latency_us == pytest.approx(10.0, rel=0.06)


def test_the_cost_models_sampler_ends_early_and_near_the_optimum(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=27, sampler="model").run()
    assert outcome.kernels < 27
    assert outcome.ranking[0].latency_us == pytest.approx(10.0, rel=0.06)


def test_a_hopeless_family_is_left_out_unless_named_or_all_are_wanted(store: Store) -> None:
    class Slow(Toy):
        name = "slow"

        def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
            return 3 * super().predict_us(problem, config, gpu)

    slow = Slow()

    def both(op: str) -> Mapping[str, Family]:
        return {**catalogue(op), **({slow.name: slow} if op == slow.op else {})}

    def left_out(**options: object) -> bool:
        chosen = SweepOptions(**{"sampler": "tpe", "trials": 4, **options})  # type: ignore[arg-type]
        runner = ReplayRunner(recording())
        made = Sweep(GEMM, REGIME, runner, store, chosen, catalogue=both)
        return any("slow is left out: 3.0 times" in note for note in made.run().notes)

    assert left_out()
    assert not left_out(families=("slow", "toy"))
    assert not left_out(effort="full")


def test_nothing_replayed_is_stored_as_measured(store: Store) -> None:
    sweep(ReplayRunner(recording()), store, trials=10).run()
    kinds = {m.provenance for m in store.measurements()}
    assert kinds == {Provenance.REPLAYED}


def test_composite_family_is_built_from_its_stages(store: Store) -> None:
    stages = {name: sub for name, sub in Composite().stages(ATTENTION).items()}
    parts = tuple(recording(sub) for sub in stages.values())
    space = Toy().space(GEMM, DEFAULT_GPU)
    composites = [
        ok(
            Config("composite", {"pdl": pdl}, {"qk": qk, "pv": pv}),
            latency(qk) + latency(pv) - pdl,
            ATTENTION,
        )
        for qk, pv, pdl in product(space, space, (False, True))
        if latency(qk) < 13 and latency(pv) < 13
    ]
    whole = Recording(ATTENTION, DEFAULT_GPU, REGIME, ENVIRONMENT, tuple(composites), stages=parts)
    runner = CountingRunner(whole)
    chosen = SweepOptions(effort="full", sampler="tpe")
    outcome = Sweep(ATTENTION, REGIME, runner, store, chosen, catalogue=catalogue).run()
    winner = outcome.ranking[0]
    assert winner.config.stages == {"qk": BEST, "pv": BEST}
    assert winner.config["pdl"] is True
    assert winner.latency_us == pytest.approx(19.0)
    assert outcome.kernels == 27 * 2 + 4 * 4 * 2
    assert runner.prefetched[:2] == list(stages.values())


def test_composite_family_without_a_stage_is_left_out(store: Store) -> None:
    qk, pv = Composite().stages(ATTENTION).values()
    parts = (
        recording(qk),
        recording(pv, lambda m: failed(m.config, Status.COMPILE_ERROR, "no", pv)),
    )
    whole = Recording(ATTENTION, DEFAULT_GPU, REGIME, ENVIRONMENT, (), stages=parts)
    with pytest.raises(NoValidConfigError, match="compile_error"):
        sweep(ReplayRunner(whole), store, ATTENTION).run()


def test_a_family_that_does_not_serve_the_problem_costs_nothing(store: Store) -> None:
    class Refusing(Composite):
        def supports(self, problem: Problem, gpu: Gpu) -> str:
            return "SKV is odd"

        def stages(self, problem: Problem) -> Mapping[str, Problem]:
            raise AssertionError("its stages are not asked for")

    runner = CountingRunner(Recording(ATTENTION, DEFAULT_GPU, REGIME, ENVIRONMENT, ()))
    run = Sweep(
        ATTENTION,
        REGIME,
        runner,
        store,
        SweepOptions(sampler="tpe"),
        catalogue=lambda op: {"composite": Refusing()},
    )
    with pytest.raises(NoValidConfigError, match="composite does not compete: SKV is odd"):
        run.run()
    assert not runner.submitted


def test_a_second_sweep_repeats_nothing_and_decides_the_same(store: Store) -> None:
    first = sweep(ReplayRunner(recording()), store, trials=15).run()
    runner = CountingRunner(recording())
    second = sweep(runner, store, trials=15).run()
    assert not runner.submitted
    assert second.resumed == 15 + 2  # vendors' too
    assert second.ranking[0].config == first.ranking[0].config
    assert runner.retimed, "the final pass is always run"


def test_another_environment_is_measured_again(store: Store) -> None:
    sweep(ReplayRunner(recording()), store, trials=5).run()
    other = recording()
    changed = tuple(m.but(environment=Environment({"driver": "2"})) for m in other.measurements)
    runner = CountingRunner(
        Recording(GEMM, DEFAULT_GPU, REGIME, Environment({"driver": "2"}), changed)
    )
    sweep(runner, store, trials=5).run()
    assert runner.submitted


KILLED = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("toys", sys.argv[1])
toys = importlib.util.module_from_spec(spec)
sys.modules["toys"] = toys
spec.loader.exec_module(toys)

def after(runner):
    print(runner.collected, flush=True)
    time.sleep(0.05)

runner = toys.CountingRunner(toys.recording(), after)
store = toys.open_store("sqlite:///" + sys.argv[2])
toys.sweep(runner, store, trials=25).run()
"""


def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    database = tmp_path / "killed.sqlite"
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, __file__, str(database)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 9:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    store = open_store(f"sqlite:///{database}")
    kept = {m.config.digest for m in store.measurements()}
    # Two of the vendor's and six of two candidates; the ninth was collected, perhaps not stored.
    assert len(kept) >= 2 + 6 * 2
    runner = CountingRunner(recording())
    outcome = sweep(runner, store, trials=25).run()
    again = {key.split()[-1] for key in runner.submitted}
    assert not again & kept, "no finished trial is repeated"
    assert max(runner.submitted.values()) == 1
    stored = [m.config.digest for m in store.measurements(final=False)]
    assert len(stored) == len(set(stored)), "none is stored twice"
    assert outcome.kernels == 25
    record = store.find_sweep(
        GEMM,
        DEFAULT_GPU,
        REGIME,
        ENVIRONMENT.digest,
        SweepOptions(trials=25, sampler="tpe").digest(Provenance.REPLAYED),
    )
    assert record is not None
    assert (record.id, record.state) == (outcome.sweep, "done")
    assert {m.sweep for m in store.measurements(final=False)} == {record.id}, "one sweep"


def test_failures_are_counted_and_never_win(store: Store) -> None:
    def change(m: Measurement) -> Measurement:
        if m.config["m"] == 128:
            return failed(m.config, Status.WRONG_RESULT, "error 1.3")
        if m.config["k"] == 16:
            return failed(m.config, Status.TIMEOUT)
        return m

    outcome = sweep(ReplayRunner(recording(change=change)), store, trials=27).run()
    assert outcome.failures == {"wrong_result": 18, "timeout": 12}
    own = [m.config for m in outcome.ranking if m.config.family == "toy"]
    assert own
    assert not [c for c in own if c["m"] == 128 or c["k"] == 16]
    assert outcome.candidates == 54


def test_nothing_passes(store: Store) -> None:
    whole = recording(change=lambda m: failed(m.config, Status.COMPILE_ERROR, "error: no\nmore"))
    own = tuple(m for m in whole.measurements if m.config.family == "toy")
    runner = ReplayRunner(Recording(GEMM, DEFAULT_GPU, REGIME, ENVIRONMENT, own))
    with pytest.raises(NoValidConfigError, match=r"32 compile_error \(as: error: no\)"):
        sweep(runner, store, trials=16).run()
    assert store.best(GEMM, DEFAULT_GPU, REGIME) is None
    assert len(store.measurements()) == 32, "what failed is kept"


def test_only_the_vendor_passes(store: Store) -> None:
    whole = recording(change=lambda m: failed(m.config, Status.TIMEOUT))
    outcome = sweep(ReplayRunner(whole), store, trials=4).run()
    assert outcome.ranking[0].config.family == "vendor_toy"
    assert outcome.entry is not None
    assert outcome.entry.best_own is None


def test_max_workspace_narrows_the_space(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=27, max_workspace=64_000).run()
    assert {m.config["m"] for m in outcome.ranking if m.config.family == "toy"} == {64}


def test_families_narrow_and_keep_the_baselines(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, families=("toy",), trials=4).run()
    assert {m.config.family for m in outcome.ranking} == {"toy", "vendor_toy"}
    only = sweep(ReplayRunner(recording()), store, families=("vendor_toy",)).run()
    assert {m.config.family for m in only.ranking} == {"vendor_toy"}
    with pytest.raises(ConfigError, match=r"'fmha' does not serve gemm \(allowed: toy, vendor_toy"):
        sweep(ReplayRunner(recording()), store, families=("fmha",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials=0 is out of range"),
        ({"time_limit_s": 0.0}, "time-limit=0.0 is out of range"),
        ({"time_limit_s": float("nan")}, "time-limit=nan is out of range"),
        ({"effort": "huge"}, "effort=huge is not known"),
        ({"sampler": "cma"}, "sampler=cma is not known"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SweepOptions(**options)  # type: ignore[arg-type]


def test_time_limit_ends_the_search_and_not_the_final_pass(store: Store) -> None:
    runner = CountingRunner(recording(), lambda runner: time.sleep(0.1))
    outcome = sweep(runner, store, trials=27, time_limit_s=0.45).run()
    assert 0 < runner.collected <= 6
    assert not outcome.interrupted
    assert outcome.ranking


class TestInterruption:
    """Ctrl-C through a real signal."""

    def test_the_first_keeps_the_best_so_far(self, store: Store) -> None:
        def after(runner: CountingRunner) -> None:
            if runner.collected == 6:
                os.kill(os.getpid(), signal.SIGINT)

        runner = CountingRunner(recording(), after)
        before = signal.getsignal(signal.SIGINT)
        with Interruption() as interruption:
            run = Sweep(
                GEMM,
                REGIME,
                runner,
                store,
                SweepOptions(trials=27, sampler="tpe"),
                interruption=interruption,
                catalogue=catalogue,
            )
            outcome = run.run()
        assert signal.getsignal(signal.SIGINT) is before
        assert outcome.interrupted
        assert runner.collected == 6
        assert store.best(GEMM, DEFAULT_GPU, REGIME) is not None
        following = CountingRunner(recording())
        ended = sweep(following, store, trials=27).run()
        assert ended.sweep == outcome.sweep, "the same sweep goes on"
        assert ended.kernels == 27

    def test_the_second_ends_at_once(self, store: Store) -> None:
        class Impatient(CountingRunner):
            def retime(self, *arguments: object) -> list[Measurement]:
                os.kill(os.getpid(), signal.SIGINT)
                raise AssertionError("the signal comes first")

        def after(runner: CountingRunner) -> None:
            if runner.collected == 3:
                os.kill(os.getpid(), signal.SIGINT)

        with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
            Sweep(
                GEMM,
                REGIME,
                Impatient(recording(), after),
                store,
                SweepOptions(trials=27, sampler="tpe"),
                interruption=interruption,
                catalogue=catalogue,
            ).run()
        assert store.measurements(), "what was finished is kept"

    def test_one_during_the_final_pass_makes_it_brief(self, store: Store) -> None:
        class Late(CountingRunner):
            def retime(
                self, problem: Problem, finalists: Sequence[Config], rounds: int
            ) -> list[Measurement]:
                if not self.retimed:
                    self.retimed.append(rounds)
                    os.kill(os.getpid(), signal.SIGINT)
                return super().retime(problem, finalists, rounds)

        runner = Late(recording())
        with Interruption() as interruption:
            outcome = Sweep(
                GEMM,
                REGIME,
                runner,
                store,
                SweepOptions(trials=27, effort="full", sampler="tpe"),
                interruption=interruption,
                catalogue=catalogue,
            ).run()
        assert outcome.interrupted
        assert runner.retimed == [40, 20]
        assert outcome.ranking[0].config == BEST

    def test_before_anything_passed(self, store: Store) -> None:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            outcome = Sweep(
                GEMM,
                REGIME,
                CountingRunner(recording()),
                store,
                SweepOptions(sampler="tpe"),
                interruption=interruption,
                catalogue=catalogue,
            ).run()
        assert outcome.interrupted
        assert not outcome.ranking


class NoisyRunner(ReplayRunner):
    """A final pass whose first `bad` runs are unsteady."""

    def __init__(self, recorded: Recording, bad: int) -> None:
        super().__init__(recorded)
        self.bad = bad
        self.runs = 0

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        self.runs += 1
        part = 0.05 if self.runs <= self.bad else 0.001
        assert rounds >= 20
        return [
            m.but(std_us=part * (m.latency_us or 0.0), flags=(), rounds=rounds)
            for m in super().retime(problem, finalists, rounds)
        ]


def test_an_unsteady_winner_is_timed_again(store: Store) -> None:
    runner = NoisyRunner(recording(), bad=1)
    outcome = sweep(runner, store, trials=27).run()
    assert runner.runs == 2
    assert outcome.ranking[0].flags == ()


def test_a_winner_that_stays_unsteady_is_flagged(store: Store) -> None:
    runner = NoisyRunner(recording(), bad=9)
    outcome = sweep(runner, store, trials=27).run()
    assert runner.runs == 3
    assert "noisy" in outcome.ranking[0].flags


class TestRanking:
    """Ties, finalists."""

    def config(self, n: int, family: str = "toy") -> Config:
        return Config(family, {"m": n, "n": 64, "k": 16, "raster": "m"})

    def test_tie_goes_to_own_then_workspace_then_digest_whatever_the_order(self) -> None:
        vendor = ok(Config("vendor_toy", {"library": "blas"}), 10.0, std_us=0.05)
        large = ok(self.config(1), 10.02, std_us=0.05, workspace_bytes=100)
        small = [ok(self.config(n), 10.05, std_us=0.05) for n in (2, 3)]
        small.sort(key=lambda m: m.config.digest)
        slower = ok(self.config(4), 10.2, std_us=0.05)
        wanted = [*small, large, vendor, slower]
        for order in (wanted, wanted[::-1], [slower, vendor, *small, large]):
            assert ranking.rank(order) == wanted

    def test_band_is_the_measured_noise_and_one_percent_at_most(self) -> None:
        one, close, far = (ok(self.config(n), us) for n, us in ((1, 10.0), (2, 10.05), (3, 10.15)))
        assert not ranking.is_tie(one, close), "0.1 % of noise each"
        loud = [m.but(std_us=0.5) for m in (one, close, far)]
        assert ranking.is_tie(loud[0], loud[1])
        assert not ranking.is_tie(loud[0], loud[2])

    def test_failed_finals_have_no_place(self) -> None:
        assert ranking.rank([failed(BEST, Status.WRONG_RESULT)]) == []

    def test_finalists_are_the_best_every_near_family_and_all_vendors(self) -> None:
        near, far = ok(Config("near", {}), 12.9), ok(Config("far", {}), 13.1)
        own = [ok(c, latency(c)) for c in Toy().space(GEMM, DEFAULT_GPU)]
        chosen = ranking.finalists([far, near, *own, *vendors()], 4, lambda c: c.digest)
        assert [m.config.family for m in chosen] == ["toy"] * 4 + ["near", "vendor_toy"]
        assert chosen[0].config == BEST

    def test_finalists_are_three_distinct_kernels_before_variants(self) -> None:
        own = [ok(c, latency(c)) for c in Toy().space(GEMM, DEFAULT_GPU)]
        chosen = ranking.finalists(own, 4, lambda c: str(c["m"]))
        assert [m.config["m"] for m in chosen] == [128, 64, 256, 128]


class OneRunner:
    """Stands for `Runners`: replays each problem's recording, or fails."""

    devices = ()

    def __init__(self, runners: Mapping[Problem, ReplayRunner]) -> None:
        self.runners = runners

    def of(self, problem: Problem, regime: Regime) -> ReplayRunner:
        if problem not in self.runners:
            raise NoValidConfigError(f"no runner for {problem.label()}")
        return self.runners[problem]


class TestJob:
    """Many problems."""

    problems = (GemmProblem(64, 64, 64), GemmProblem(128, 64, 64), GemmProblem(256, 64, 64))

    def job(self, store: Store, runners: Mapping[Problem, ReplayRunner], **changes: object) -> Job:
        options = JobOptions(SweepOptions(trials=5, sampler="tpe"), l2="warm")
        return Job(
            self.problems,
            OneRunner(runners),  # type: ignore[arg-type]
            store,
            options,
            catalogue=catalogue,
            **changes,  # type: ignore[arg-type]
        )

    def test_one_that_fails_does_not_end_the_others(self, store: Store) -> None:
        first, second, third = self.problems
        runners = {p: CountingRunner(recording(p)) for p in (first, third)}
        result = self.job(store, runners).run()
        assert [o.problem for o in result.outcomes] == [first, third]
        assert [p for p, _ in result.failed] == [second]

    def test_the_next_is_prefetched_before_the_final_pass(self, store: Store) -> None:
        runners = {p: CountingRunner(recording(p)) for p in self.problems}
        order: list[str] = []
        for runner in runners.values():
            runner.prefetch = lambda p, groups: order.append(f"prefetch {p.label()}")  # type: ignore[method-assign]
            runner.retime = (  # type: ignore[method-assign]
                lambda p, f, rounds, retime=runner.retime: (
                    order.append(f"final {p.label()}") or retime(p, f, rounds)
                )
            )
        self.job(store, runners).run()
        labels = [p.label() for p in self.problems]
        assert order.index(f"prefetch {labels[1]}") < order.index(f"final {labels[0]}")
        assert order.index(f"prefetch {labels[2]}") < order.index(f"final {labels[1]}")

    def test_what_a_time_limit_leaves_in_flight_is_kept(self, store: Store) -> None:
        first, second, _ = self.problems
        whole = Recording(
            first,
            DEFAULT_GPU,
            REGIME,
            ENVIRONMENT,
            recording(first).measurements,
            (recording(second),),
        )
        shared = CountingRunner(whole, lambda runner: time.sleep(0.06))
        shared.capacity = 4
        options = JobOptions(SweepOptions(time_limit_s=0.3, sampler="tpe"), l2="warm")
        job = Job(
            [first, second],
            OneRunner({first: shared, second: shared}),  # type: ignore[arg-type]
            store,
            options,
            catalogue=catalogue,
        )
        result = job.run()
        assert [o.problem for o in result.outcomes] == [first, second]
        collected = store.measurements(final=False)
        assert len(collected) == sum(shared.submitted.values()) - sum(
            len(group) for group in shared._queue
        )
        assert {m.sweep for m in collected if m.problem == second} == {result.outcomes[1].sweep}

    def test_what_is_tuned_is_skipped(self, store: Store) -> None:
        runners = {p: CountingRunner(recording(p)) for p in self.problems}
        self.job(store, runners).run()
        again = {p: CountingRunner(recording(p)) for p in self.problems}
        result = self.job(store, again).run()
        assert result.skipped == list(self.problems)
        assert not any(runner.submitted or runner.retimed for runner in again.values())

    def test_a_watcher_sees_each_outcome(self, store: Store) -> None:
        class Seen(Watcher):
            def __init__(self) -> None:
                self.phases: set[str] = set()
                self.ended: list[Problem] = []

            def changed(self, state: SweepState) -> None:
                self.phases.add(state.phase.split()[0])
                assert 0 <= state.done <= max(state.goal, state.done_before)
                assert state.in_flight >= 0

            def finished(self, outcome: object) -> None:
                self.ended.append(outcome.problem)  # type: ignore[attr-defined]

        seen = Seen()
        runners = {p: CountingRunner(recording(p)) for p in self.problems}
        self.job(store, runners, watcher=seen).run()
        assert seen.phases == {"baselines", "search", "final"}
        assert seen.ended == list(self.problems)

    def test_interruption_ends_the_job(self, store: Store) -> None:
        def after(runner: CountingRunner) -> None:
            if runner.collected == 4:
                os.kill(os.getpid(), signal.SIGINT)

        runners = {p: CountingRunner(recording(p), after) for p in self.problems}
        with Interruption() as interruption:
            result = self.job(store, runners, interruption=interruption).run()
        assert result.interrupted
        assert len(result.outcomes) == 1


class TestProblems:
    """The list of a job."""

    def test_yaml_and_json_say_the_same(self, tmp_path: Path) -> None:
        yaml = tmp_path / "p.yaml"
        yaml.write_text(
            "- S=1024,D=64\n- {S: 512, D: 128, causal: true}\n"
            "- op=gemm,M=64,N=64,K=64\n- {op: softmax, M: 8, N: 16}\n"
        )
        json = tmp_path / "p.json"
        json.write_text(
            '["S=1024,D=64", {"S": 512, "D": 128, "causal": true},'
            ' "op=gemm,M=64,N=64,K=64", {"op": "softmax", "M": 8, "N": 16}]'
        )
        wanted = [
            AttentionProblem.parse("S=1024,D=64"),
            AttentionProblem.parse("S=512,D=128,causal=1"),
            GemmProblem(64, 64, 64),
            SoftmaxProblem(8, 16),
        ]
        assert read_problems(yaml) == read_problems(json) == wanted

    def test_every_bad_entry_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "p.yaml"
        file.write_text(
            "- S=1024,D=63\n- S=512,D=64\n- {op: conv, M: 1}\n- 7\n- H=10,HKV=3,S=8,D=8\n"
        )
        with pytest.raises(ConfigError) as caught:
            read_problems(file)
        text = str(caught.value)
        assert "4 of the 5 problems" in text
        for part in ("entry 1: D=63", "entry 3: op=conv", "entry 4: 7 is neither", "entry 5: "):
            assert part in text
        assert "entry 2" not in text

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.yaml", "[", "is not YAML"),
            ("a.json", "[", "is not JSON"),
            ("a.yaml", "S: 1", "must hold a list"),
            ("a.yaml", "[]", "must hold a list"),
            ("a.yaml", "- {S: 1, S: 2, D: 8}", "key 'S' is given twice"),
            ("a.json", '[{"S": 1, "S": 2}]', "key 'S' is given twice"),
            ("a.yaml", "- op=gemm,op=gemm,M=1,N=1,K=1", "key 'op' is given twice"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, name: str, text: str, message: str) -> None:
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_problems(file)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            read_problems(tmp_path / "none.yaml")

    def test_operation_of_the_command_is_the_default(self) -> None:
        assert parse_problem("M=8,N=8,K=8", "gemm") == GemmProblem(8, 8, 8)
