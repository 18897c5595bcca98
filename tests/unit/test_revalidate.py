"""Timing stored entries again; the runner is scripted."""

from __future__ import annotations

import importlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored import final
from toy_attention import OWN, Toy, toy_family

from tuner.cli import main
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.families.base import KernelSpec
from tuner.families.peers.cudnn_plans import VendorCudnnPlans
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime, Resources, Status
from tuner.problem import AttentionProblem, Problem
from tuner.runners import choose
from tuner.selection.reader import close
from tuner.store import Entry, Store, open_store
from tuner.store.entry import is_vendor
from tuner.tuning.revalidate import PROMISING, candidates, recompiled, revalidate

LOOKUP = importlib.import_module("tuner.selection.reader")
H200, WARM = GPUS["H200"], Regime("stream", "warm")
PROBLEM = AttentionProblem.parse("S=1024,D=64")
BEFORE, NOW = Environment({"driver": "1"}), Environment({"driver": "2"})
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})

toy = toy_family  # for every test here


def measured(config: Config, us: float, **changes: Any) -> Measurement:
    artifacts = {} if is_vendor(config) else {"attention": config.digest * 2}
    facts = {"environment": BEFORE, "std_us": us / 1000, "artifacts": artifacts}
    return final(config, us, PROBLEM, **{**facts, **changes})


class FakeRunner:
    """Answers with `latency_us` of each config, None being a fault."""

    gpu, provenance, environment, regime = H200, Provenance.MEASURED, NOW, WARM
    capacity, building = 1, 0
    is_compiled: Callable[[Config], bool] = staticmethod(lambda config: True)

    def __init__(
        self, latency_us: Callable[[Problem, Config], float | None], regime: Regime = WARM
    ) -> None:
        self.latency_us = latency_us
        self.regime = regime
        self.retimed: list[list[Config]] = []
        self.submitted: list[tuple[Problem, list[Config]]] = []
        self.open: deque[tuple[Problem, list[Config]]] = deque()

    def _measure(self, problem: Problem, config: Config, is_final: bool) -> Measurement:
        us = self.latency_us(problem, config)
        found = measured(config, us or 1.0, problem=problem, environment=NOW, is_final=is_final)
        found = found.but(regime=self.regime)
        if us is None:
            return found.but(status=Status.WRONG_RESULT, latency_us=None, log="element 3 is off")
        return found.but(std_us=us * 0.001)

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        self.retimed.append(list(finalists))
        return [self._measure(problem, config, True) for config in finalists]

    def compiled(self, problem: Problem, family: Any, space: Sequence[Config]) -> list[Config]:
        return [config for config in space if self.is_compiled(config)]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.submitted.append((problem, list(group)))
        self.open.append(self.submitted[-1])

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        problem, group = self.open.popleft()
        return [self._measure(problem, config, False) for config in group]

    def close(self) -> None: ...


def runner_of(times: dict[Config, float | None], other: float | None = 20.0) -> Any:
    return FakeRunner(lambda problem, config: times.get(config, other))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The default store, and nothing shipped beside it."""
    caches = (LOOKUP.shipped, LOOKUP.shipped_index)
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "nothing")
    monkeypatch.setattr("tuner.tuning.revalidate.portfolio.promising", lambda problem, gpu: ())
    for cached in caches:
        cached.cache_clear()
    with open_store() as made:
        yield made
    close()
    for cached in caches:
        cached.cache_clear()


def decide(store: Store, *ranking: Measurement) -> Entry:
    store.decide(PROBLEM, H200, WARM, ranking, "sweep")
    found = store.best(PROBLEM, H200, WARM)
    assert found is not None
    return found


class TestRevalidate:
    def test_a_winner_that_lost_is_replaced(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        result = revalidate(entry, runner_of({OWN[0]: 13.0, OWN[1]: 12.5}), store)
        assert result.is_replaced
        best = store.best(PROBLEM, H200, WARM)
        assert (best.winner.config, best.winner.environment) == (OWN[1], NOW)
        assert result.after == best

    def test_one_that_holds_is_kept_with_its_new_time(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        result = revalidate(entry, runner_of({OWN[0]: 11.0, OWN[1]: 12.5}), store)
        assert not result.is_replaced
        assert result.after.winner.latency_us == 11.0

    def test_nothing_but_the_stored_and_the_vendors_is_timed(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(CUDNN, 14.0))
        runner = runner_of({})
        revalidate(entry, runner, store)
        (timed,) = runner.retimed
        assert [c for c in timed if not c.family.startswith("vendor")] == [OWN[0]]
        assert {c["kernel"] for c in timed[1:]} >= {"cudnn", "flash2", "flash3", "flash4"}

    def test_a_library_s_list_is_searched_anew(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def plan(engine: int) -> Config:
            numbers = {"engine": engine, "is_unified": False, "version": 92000}
            return Config("vendor_cudnn_plans", {"kernel": "cudnn_plans", **numbers})

        monkeypatch.setattr(VendorCudnnPlans, "lacks", lambda self: "")
        runner = runner_of({plan(n): 15.0 - n for n in range(8)})
        runner.candidates = lambda problem, family, space: [plan(n) for n in range(8)]
        entry = decide(store, measured(OWN[0], 12.0))
        result = revalidate(entry, runner, store)
        assert [len(group) for _, group in runner.submitted] == [8]
        timed = [c for c in runner.retimed[0] if c.family == "vendor_cudnn_plans"]
        assert timed == [plan(7), plan(6), plan(5)]
        assert result.after.winner.config == plan(7)

    def test_a_vendor_can_win(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0))
        result = revalidate(entry, runner_of({OWN[0]: 12.0, CUDNN: 9.0}), store)
        assert result.after.winner.config == CUDNN

    def test_what_fails_now_is_stored_and_said(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        result = revalidate(entry, runner_of({OWN[0]: None, OWN[1]: 12.5}), store)
        assert [m.config for m in result.failed] == [OWN[0]]
        assert [m.config for m in store.measurements(final=True) if not m.ok] == [OWN[0]]

    def test_the_entry_stays_where_nothing_passes(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0))
        with pytest.raises(NoValidConfigError, match=r"its entry stays: .*wrong_result"):
            revalidate(entry, runner_of({}, other=None), store)
        assert store.best(PROBLEM, H200, WARM) == entry

    def test_another_regime_decides_beside_the_first(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        runner = runner_of({OWN[0]: 13.0, OWN[1]: 12.5})
        runner.regime = WARM.chained
        result = revalidate(entry, runner, store)
        assert (result.after.regime, result.after.winner.config) == (WARM.chained, OWN[1])
        assert store.best(PROBLEM, H200, WARM) == entry

    def test_the_portfolio_s_most_promising_kernels_are_timed_too(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "tuner.tuning.revalidate.portfolio.promising",
            lambda problem, gpu: ((10.0, config) for config in OWN),
        )
        entry = decide(store, measured(OWN[1], 12.0))
        runner = runner_of({})
        revalidate(entry, runner, store)
        own = [c for c in runner.retimed[0] if not is_vendor(c)]
        assert own == [OWN[1], OWN[0], *OWN[2:PROMISING]]

    def test_kernels_that_are_not_compiled_are_left_out(self, store: Store) -> None:
        entry = decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        runner = runner_of({})
        runner.is_compiled = lambda config: config == OWN[1]
        revalidate(entry, runner, store, compiled_only=True)
        assert [c for c in runner.retimed[0] if not is_vendor(c)] == [OWN[1]]

    def test_other_entries_and_the_next_kernels_by_estimate_are_candidates_of_a_wider_one(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Toy, "space", lambda *_: OWN)
        monkeypatch.setattr(Toy, "predict_us", lambda self, problem, config, gpu: -config["tile"])
        entry = decide(store, measured(OWN[5], 12.0))
        h100 = GPUS["H100"]
        store.decide(PROBLEM, h100, WARM, [measured(OWN[1], 11.0, gpu=h100)], "sweep")
        other = store.best(PROBLEM, h100, WARM)
        assert other is not None
        assert candidates(entry, H200) == [OWN[5]]
        assert candidates(entry, H200, [other]) == [OWN[5], OWN[1]]
        assert candidates(entry, H200, [other], more=2) == [OWN[5], OWN[1], OWN[4], OWN[3]]

    def test_a_wider_one_s_final_pass_has_the_fastest_of_a_quick_pass(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuner.tuning.revalidate.MAX_OWN", 2)
        entry = decide(store, *(measured(c, 12.0) for c in OWN[:4]))
        runner = runner_of({OWN[0]: 15.0, OWN[1]: None, OWN[2]: 12.0, OWN[3]: 11.0})
        result = revalidate(entry, runner, store, more=1)
        own = [c for c in runner.retimed[0] if not is_vendor(c)]
        assert own == [OWN[3], OWN[2]]
        assert [m.config for m in result.failed] == [OWN[1]]
        runner = runner_of({})
        revalidate(entry, runner, store)
        assert [c for c in runner.retimed[0] if not is_vendor(c)] == list(OWN[:4])

    def test_a_pin_stays(self, store: Store) -> None:
        decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        pinned = store.pin(PROBLEM, H200, WARM, OWN[1])
        result = revalidate(pinned, runner_of({OWN[0]: 12.0, OWN[1]: 13.0}), store)
        assert result.after.pinned
        assert result.after.winner.latency_us == 13.0


class FakeRunners:
    """Stands in for `Runners`: the GPU is there, and one runner measures all."""

    gpu: Any = H200
    runner = runner_of({})

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> FakeRunners:
        return self

    def __exit__(self, *_: object) -> None: ...

    def of(self, problem: Problem, regime: Regime) -> Any:
        return self.runner

    def compiler(self) -> Any:
        return SimpleNamespace(cached=self.cached)

    @staticmethod
    def cached(spec: KernelSpec) -> Artifact | None:
        return None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunners]:
    monkeypatch.setattr(choose, "Runners", FakeRunners)
    monkeypatch.setattr(FakeRunners, "gpu", H200)
    monkeypatch.setattr(FakeRunners, "runner", runner_of({OWN[0]: 13.0, OWN[1]: 12.5}))
    return FakeRunners


SHAPE = ("--shape", "S=1024,D=64")


def compiled_as(code: str) -> Callable[[KernelSpec], Artifact]:
    """Finds every kernel compiled, with this hash of its machine code."""
    resources = Resources(1, 0, 0, 0, code=code)
    return lambda spec: Artifact("0" * 32, Path("kernel.so"), "", resources, 0.0)


def timed_as(code: str) -> Measurement:
    """Measured in this environment, by a kernel of this machine code; of another artifact."""
    resources = {"attention": Resources(1, 0, 0, 0, code=code)}
    return measured(OWN[0], 12.0, environment=NOW, resources=resources)


class TestMachineCode:
    @pytest.mark.parametrize(
        ("timed", "built", "is_other"), [("a", "a", False), ("a", "b", True), ("", "b", False)]
    )
    def test_only_other_code_makes_a_measurement_invalid(
        self, store: Store, timed: str, built: str, is_other: bool
    ) -> None:
        """Whatever the artifact's key is; code that was not kept says nothing."""
        entry = decide(store, timed_as(timed), measured(CUDNN, 14.0))
        assert recompiled(entry, compiled_as(built)) == [OWN[0].digest] * is_other
        assert recompiled(entry, lambda spec: None) == []

    def test_the_command_takes_entries_of_other_code(
        self, store: Store, machine: type[FakeRunners], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decide(store, timed_as("a"))
        for built, taken in (("a", 0), ("b", 1)):
            monkeypatch.setattr(machine, "cached", staticmethod(compiled_as(built)))
            machine.runner.retimed.clear()
            assert main(["revalidate"]) == 0
            assert len(machine.runner.retimed) == taken


class TestCommands:
    def test_only_what_another_environment_measured(
        self, store: Store, machine: type[FakeRunners], capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        other = AttentionProblem.parse("S=512,D=64")
        fresh = measured(OWN[0], 7.0, problem=other, environment=NOW)
        store.decide(other, H200, WARM, [fresh], "sweep")
        assert main(["revalidate", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (row,) = document["entries"]
        assert (row["shape"], row["replaced"]) == (PROBLEM.label(), True)
        assert row["before"]["config_digest"] == OWN[0].digest
        assert row["after"] == {
            "config": OWN[1].to_json(),
            "config_digest": OWN[1].digest,
            "latency_us": 12.5,
        }

    def test_only_what_has_no_decision_under_the_regime(
        self, store: Store, machine: type[FakeRunners], capsys: pytest.CaptureFixture[str]
    ) -> None:
        chained = WARM.chained
        decide(store, measured(OWN[0], 12.0))
        other = AttentionProblem.parse("S=512,D=64")
        for problem, regime in ((PROBLEM, chained), (other, chained)):
            old = measured(OWN[0], 7.0, problem=problem, regime=regime)
            store.decide(problem, H200, regime, [old], "sweep")
        assert main(["revalidate", "--regime", "stream", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert {e["shape"] for e in document["entries"]} == {PROBLEM.label(), other.label()}

    def test_a_list_s_problems_in_its_order_and_those_of_a_gpu_that_shares(
        self,
        store: Store,
        machine: type[FakeRunners],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """On an H100 an H200's entry counts only where the H100 has none; the same command goes on
        where it stopped, and what nobody measured is counted.
        """
        texts = ("S=512,D=64", "S=1024,D=64", "S=256,D=64")
        first, both, _ = (AttentionProblem.parse(text) for text in texts)
        h100 = GPUS["H100"]
        shared = measured(OWN[0], 7.0, problem=first, regime=WARM.chained)
        store.decide(first, H200, WARM.chained, [shared], "sweep")
        for gpu, regime in ((H200, WARM), (h100, WARM.chained)):
            one = measured(OWN[1], 9.0, problem=both, gpu=gpu, regime=regime)
            store.decide(both, gpu, regime, [one], "sweep")
        machine.gpu = h100
        machine.runner = runner_of({OWN[0]: 13.0, OWN[1]: 12.5})
        machine.runner.gpu = h100
        measure = machine.runner._measure
        machine.runner._measure = lambda *given: measure(*given).but(gpu=h100)
        path = tmp_path / "list.json"
        path.write_text(json.dumps(texts))
        command = ["revalidate", "--problems", str(path), "--regime", "stream", "--json"]
        assert main(command) == 0
        said = capsys.readouterr()
        rows = json.loads(said.out)["entries"]
        assert [row["shape"] for row in rows] == [first.label(), both.label()]
        assert rows[1]["before"]["latency_us"] == 9.0
        assert "1 problems of the list are not measured" in said.err
        assert store.best(first, h100, WARM) and store.best(both, h100, WARM)
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["entries"] == []

    def test_what_changed_is_printed(
        self, store: Store, machine: type[FakeRunners], capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide(store, measured(OWN[0], 12.0), measured(OWN[1], 12.5))
        assert main(["revalidate", *SHAPE]) == 0
        shown = capsys.readouterr().out
        old, new = OWN[0].digest[:6], OWN[1].digest[:6]
        assert f"replaced toy_attention {old}, 12.0 us by toy_attention {new}, 12.5 us" in shown

    def test_one_that_fails_does_not_end_the_others(
        self, store: Store, machine: type[FakeRunners], capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide(store, measured(OWN[0], 12.0))
        other = AttentionProblem.parse("S=512,D=64")
        store.decide(other, H200, WARM, [measured(OWN[0], 7.0, problem=other)], "sweep")
        machine.runner = FakeRunner(lambda problem, c: None if problem == other else 9.0)
        assert main(["revalidate", "--all", "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert [e["shape"] for e in document["failed"]] == [other.label()]
        assert [e["shape"] for e in document["entries"]] == [PROBLEM.label()]

    def test_all_of_a_list_are_those_that_are_decided_too(
        self,
        store: Store,
        machine: type[FakeRunners],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        decide(store, measured(OWN[0], 12.0, environment=NOW))
        old = measured(OWN[1], 7.0, regime=WARM.chained)
        store.decide(PROBLEM, H200, WARM.chained, [old], "sweep")
        path = tmp_path / "list.json"
        path.write_text(json.dumps([PROBLEM.label()]))
        command = ["revalidate", "--problems", str(path), "--regime", "stream", "--json"]
        for more, configs in (([], []), (["--all"], [OWN[0]]), (["--all", "--more", "1"], OWN[:2])):
            machine.runner.retimed.clear()
            assert main([*command, *more]) == 0
            rows = json.loads(capsys.readouterr().out)["entries"]
            assert len(rows) == len(machine.runner.retimed) == bool(more)
            timed = [c for pass_ in machine.runner.retimed for c in pass_ if not is_vendor(c)]
            assert timed == configs

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--all", "--time-limit", "0"], "1 entries are left; the same command goes on"),
            (["--all", "--op", "gemm"], "nothing is measured for gemm on"),
            (["--shape", "S=77,D=64"], "nothing is measured for attention"),
        ],
    )
    def test_nothing_is_timed_but_what_is_named(
        self,
        store: Store,
        machine: type[FakeRunners],
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        reason: str,
    ) -> None:
        decide(store, measured(OWN[0], 12.0))
        assert main(["revalidate", *arguments]) == 1
        assert reason in capsys.readouterr().err
        assert main(["revalidate", "--all", "--op", "attention"]) == 0

    def test_without_a_gpu(
        self, store: Store, machine: type[FakeRunners], capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine.gpu = None
        assert main(["revalidate", "--all"]) == 1
        assert "without a GPU" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["revalidate", "--all", *SHAPE],
            ["revalidate", "--problems", "missing.yaml"],
            ["revalidate", "--shape", "S=0,D=64"],
            ["revalidate", "--jobs", "0"],
            ["revalidate", "--device", "-1"],
            ["revalidate", "--time-limit", "-1"],
            ["revalidate", "--more", "-1"],
            ["revalidate", "--gpu", "H100"],
        ],
    )
    def test_wrong_input(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        try:
            code = main(arguments)
        except SystemExit as exc:
            code = int(str(exc.code))
        assert code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
