"""Sweeps of toy families over synthetic recordings with the replay runner."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
from toys import (
    ATTENTION,
    BEST,
    ENVIRONMENT,
    GEMM,
    REGIME,
    TOYS,
    Composite,
    CountingRunner,
    Toy,
    ToyVendor,
    catalogue,
    failed,
    latency,
    ok,
    recording,
    sweep,
)

from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError
from tuner.families.base import Domain, Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Environment, Measurement, Provenance, Status
from tuner.problem import Problem
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.store import Store, open_store
from tuner.tuning.sweep import Sweep, SweepOptions


def test_a_toy_family_is_swept_to_its_optimum(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=27).run()
    assert outcome.ranking[0].config == BEST
    assert outcome.entry is not None
    assert outcome.entry.speedups == {"blas": pytest.approx(11 / 10)}
    assert outcome.unavailable == {"absent": "not installed"}
    assert (outcome.kernels, outcome.candidates, outcome.failures) == (27, 54, {})
    stored = store.best(GEMM, DEFAULT_GPU, REGIME)
    assert stored.winner.config == BEST
    assert stored.provenance is Provenance.REPLAYED


def test_of_a_library_s_list_the_best_stands_for_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listing(ToyVendor):
        name = "vendor_listing"
        is_listed = True
        domains: ClassVar[Mapping[str, Domain]] = {
            "kernel": ("plans",),
            "engine": tuple(range(1, 9)),
        }
        runtime_parameters = frozenset({"engine"})

        def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
            return []

    def plan(engine: int) -> Config:
        return Config("vendor_listing", {"kernel": "plans", "engine": engine})

    monkeypatch.setitem(TOYS, "vendor_listing", Listing())
    recorded = recording()
    listed = [
        *(ok(plan(n), 20.0 - n) for n in range(1, 8)),
        failed(plan(8), Status.UNAVAILABLE, "refused"),
    ]
    whole = replace(recorded, measurements=(*recorded.measurements, *listed))
    runner = CountingRunner(whole)
    outcome = sweep(runner, store, trials=27).run()
    assert sum(runner.submitted[f"{GEMM.key} {plan(n).digest}"] for n in range(1, 9)) == 8
    assert "vendor_listing: 8 listed by its library" in outcome.notes
    assert outcome.unavailable == {"absent": "not installed"}, "one of eight is no absence"
    assert outcome.entry is not None
    assert outcome.entry.vendors["plans"].config == plan(7)
    assert outcome.entry.speedups == {"blas": pytest.approx(1.1), "plans": pytest.approx(1.3)}
    assert [m.config["engine"] for m in outcome.ranking if m.config.get("engine")] == [7, 6, 5]


def test_compilers_start_before_the_machine_says_its_environment(store: Store) -> None:
    """Its facts take seconds: a worker process starts for them."""
    events: list[str] = []

    class Slow(ReplayRunner):
        def __init__(self, recorded: Recording) -> None:
            super().__init__(recorded)
            self.provenance = Provenance.MEASURED

        @property
        def environment(self) -> Environment:
            events.append("environment")
            return ENVIRONMENT

        @environment.setter
        def environment(self, value: Environment) -> None: ...

        def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
            events.append("prefetch")

    sweep(Slow(recording()), store, trials=4).run()
    assert events[0] == "prefetch" and "environment" in events


def test_optuna_finds_the_optimum_of_what_does_not_fit(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=20, seed=1).run()
    assert outcome.kernels == 20
    assert outcome.ranking[0].latency_us == pytest.approx(10.0, rel=0.06)


def test_the_cost_models_sampler_ends_early_and_near_the_optimum(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, trials=27, sampler="model").run()
    assert outcome.kernels < 27
    assert outcome.ranking[0].latency_us == pytest.approx(10.0, rel=0.06)


def test_a_family_beyond_the_cutoff_is_left_out_unless_named_or_all_are_wanted(
    store: Store,
) -> None:
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


def recorded_finals(*finals: tuple[Config, float]) -> Recording:
    """The toys' recording with a final pass, a quarter slower than the quick one, of some."""
    whole = recording()
    timed = tuple(ok(config, us, is_final=True, rounds=20) for config, us in finals)
    return replace(whole, measurements=(*whole.measurements, *timed))


BLAS = Config("vendor_toy", {"library": "blas"})
SECOND = Config("toy", {**BEST.params, "raster": "m"})


def test_a_replay_ranks_its_final_pass_and_names_who_was_not_in_it(store: Store) -> None:
    runner = ReplayRunner(recorded_finals((SECOND, 13.0), (BLAS, 13.75)))
    outcome = sweep(runner, store, trials=27).run()
    assert [m.config for m in outcome.ranking] == [SECOND, BLAS]
    assert all(m.is_final for m in outcome.ranking)
    assert BEST in [m.config for m in outcome.unranked]
    assert not any(m.is_final for m in outcome.unranked)
    quick = outcome.quick_vendor
    assert quick is not None and (quick.config, quick.latency_us) == (BLAS, 11.0)
    assert not quick.is_final
    assert outcome.entry is not None and outcome.to_json()["pass"] == "final"
    assert outcome.entry.speedups == {"blas": pytest.approx(13.75 / 13)}, "not 13.75 / 10"
    assert outcome.to_json()["vendor_over_own"] == outcome.entry.speedups
    assert outcome.to_json()["own_over_vendor"] == {"blas": pytest.approx(13 / 13.75)}


def test_a_replay_without_a_final_time_of_ours_is_of_the_quick_pass(store: Store) -> None:
    outcome = sweep(ReplayRunner(recorded_finals((BLAS, 13.75))), store, trials=27).run()
    assert outcome.entry is not None and outcome.entry.best_own is not None
    assert outcome.entry.best_own.config == BEST
    assert outcome.entry.speedups == {"blas": pytest.approx(11 / 10)}, "not 13.75 / 10"
    assert (outcome.entry.pass_name, outcome.unranked) == ("quick", ())
    stored = store.best(GEMM, DEFAULT_GPU, REGIME)
    assert stored is not None and stored.ranking == outcome.ranking
    ranked = {m.config for m in outcome.ranking}
    again = [m for m in store.measurements() if m.config in ranked]
    assert len(again) == len(ranked), "what is ranked is the quick pass as it was stored"


def test_a_replay_of_before_is_made_anew() -> None:
    """Its settings' digest is another: older replays ranked times of two passes together."""
    options = SweepOptions(sampler="tpe")

    def before(provenance: Provenance) -> str:
        facts = {**asdict(options), "families": [], "provenance": str(provenance)}
        del facts["compiled_only"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    assert options.digest(Provenance.REPLAYED) != before(Provenance.REPLAYED)
    assert options.digest(Provenance.MEASURED) == before(Provenance.MEASURED)


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


def test_a_family_that_does_not_serve_a_stage_is_named_with_it(store: Store) -> None:
    class Narrow(Toy):
        name = "narrow"

        def supports(self, problem: Problem, gpu: Gpu) -> str:
            return "for few rows"

    def known(op: str) -> Mapping[str, Family]:
        return {**catalogue(op), **({"narrow": Narrow()} if op == "gemm" else {})}

    whole = Recording(ATTENTION, DEFAULT_GPU, REGIME, ENVIRONMENT, ())
    chosen = SweepOptions(sampler="tpe")
    run = Sweep(ATTENTION, REGIME, ReplayRunner(whole), store, chosen, catalogue=known)
    with pytest.raises(NoValidConfigError, match="narrow does not compete for the stage gemm: for"):
        run.run()


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
import signal, sys
from toys import CountingRunner, recording, sweep
from tuner.store import open_store

def after(runner):
    if runner.collected == 9:
        print("killed here", flush=True)
        signal.pause()

runner = CountingRunner(recording(), after)
sweep(runner, open_store("sqlite:///" + sys.argv[1]), trials=25).run()
"""


def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    database = tmp_path / "killed.sqlite"
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "tests" / "support")])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(database)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "killed here\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    store = open_store(f"sqlite:///{database}")
    kept = {m.config.digest for m in store.measurements()}
    # Two of the vendor's and six of two candidates; the ninth was collected and not stored.
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
    assert (record.id, record.state) == (outcome.sweep, "done")
    assert {m.sweep for m in store.measurements(final=False)} == {record.id}, "one sweep"
    store.close()


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


def test_what_is_decided_is_timed_beside_what_a_narrower_sweep_finds(store: Store) -> None:
    whole = sweep(ReplayRunner(recording()), store, trials=27).run()
    narrow = sweep(ReplayRunner(recording()), store, families=("vendor_toy",)).run()
    assert narrow.ranking[0].config == whole.ranking[0].config == BEST
    entry = store.best(GEMM, narrow.gpu, REGIME)
    assert entry is not None and entry.winner.config == BEST and entry.winner.sweep == narrow.sweep

    def slow(m: Measurement) -> Measurement:
        return m.but(latency_us=99.0) if m.config == BEST else m

    again = sweep(ReplayRunner(recording(change=slow)), store, families=("vendor_toy",)).run()
    assert again.ranking[0].config.family == "vendor_toy", "it is timed, not trusted"


def test_what_another_version_decided_is_no_finalist(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(ReplayRunner(recording()), store, trials=27).run()

    def foreign(*args: object) -> list[str]:
        raise LookupError("a parameter is missing")

    monkeypatch.setattr(type(catalogue("gemm")["toy"]), "violations", foreign)
    narrow = sweep(ReplayRunner(recording()), store, families=("vendor_toy",)).run()
    assert {m.config.family for m in narrow.ranking} == {"vendor_toy"}


def test_families_narrow_and_keep_the_baselines(store: Store) -> None:
    outcome = sweep(ReplayRunner(recording()), store, families=("toy",), trials=4).run()
    assert {m.config.family for m in outcome.ranking} == {"toy", "vendor_toy"}
    with open_store("sqlite://") as other:
        only = sweep(ReplayRunner(recording()), other, families=("vendor_toy",)).run()
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


class CompiledRunner(CountingRunner):
    """Has some of the candidates' kernels."""

    def __init__(self, recorded: Recording, tiles: Sequence[int]) -> None:
        super().__init__(recorded)
        self.capacity = 64
        self.tiles = tiles

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        return [c for c in space if family.is_vendor or c["n"] in self.tiles]


def test_only_what_is_compiled_competes(store: Store) -> None:
    runner = CompiledRunner(recording(), (64,))
    outcome = sweep(runner, store, trials=27, compiled_only=True, sampler="model").run()
    own = {m.config["n"] for m in store.measurements() if m.config.family == "toy"}
    assert own == {64} and outcome.kernels <= 9
    # The vendors' in one request, the others in as many as there are bursts and races.
    assert runner.collected < outcome.kernels
    assert len(runner.submitted) == outcome.candidates + 2 == runner.submitted.total()


def test_where_nothing_is_compiled_no_vendor_is_timed(store: Store) -> None:
    runner = CompiledRunner(recording(), ())
    with pytest.raises(NoValidConfigError, match=r"compile some first \(`tuner sweep --compile`"):
        sweep(runner, store, compiled_only=True).run()
    assert not runner.submitted and not runner.retimed


def test_a_sweep_of_what_is_compiled_does_not_stand_for_a_whole_one() -> None:
    whole, part = SweepOptions(), SweepOptions(compiled_only=True)
    digests = [one.digest(Provenance.MEASURED) for one in (whole, part)]
    assert len(set(digests)) == 2
    # Sweeps of a version without the option go on.
    assert digests[0] == "6a48514741fdcd4b"
