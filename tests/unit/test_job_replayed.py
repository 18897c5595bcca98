"""A job of many problems, replayed one after the other, and the list that it reads."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from toys import ENVIRONMENT, REGIME, Clock, CountingRunner, catalogue, recording

from tuner.errors import ConfigError, NoValidConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem, SoftmaxProblem
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.store import Store
from tuner.tuning.job import (
    Job,
    JobOptions,
    parse_problem,
    read_problems,
)
from tuner.tuning.progress import Interruption, SweepState, Watcher
from tuner.tuning.sweep import SweepOptions


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
                lambda p, f, rounds, timeout_s, retime=runner.retime: (
                    order.append(f"final {p.label()}") or retime(p, f, rounds)
                )
            )
        self.job(store, runners).run()
        labels = [p.label() for p in self.problems]
        assert order.index(f"prefetch {labels[1]}") < order.index(f"final {labels[0]}")
        assert order.index(f"prefetch {labels[2]}") < order.index(f"final {labels[1]}")

    def test_what_a_time_limit_leaves_in_flight_is_given_up(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch)
        first, second, _ = self.problems
        whole = Recording(
            first,
            DEFAULT_GPU,
            REGIME,
            ENVIRONMENT,
            recording(first).measurements,
            (recording(second),),
        )
        shared = CountingRunner(whole, lambda runner: clock.pass_by(6))
        shared.capacity = 4
        options = JobOptions(SweepOptions(time_limit_s=30, sampler="tpe"), l2="warm")
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
        assert len(collected) < shared.submitted.total() and not shared._queue
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

    @pytest.mark.parametrize(
        ("text", "fast_accum"),
        [
            ("dtype=e4m3", False),
            ("dtype=e4m3,scales=row", False),
            ("dtype=e4m3,scales=row,fast_accum=1", True),
            ("dtype=e4m3, fast_accum = 1", True),
            ("dtype=e4m3,scales=block", True),
            ("dtype=bf16", True),
        ],
    )
    def test_e4m3_has_exact_sums_where_a_text_does_not_say(
        self, tmp_path: Path, text: str, fast_accum: bool
    ) -> None:
        entry = f"op=gemm,M=64,N=128,K=128,{text}"
        keys = {k.strip(): v.strip() for k, _, v in (p.partition("=") for p in entry.split(","))}
        file = tmp_path / "p.yaml"
        file.write_text(f"- {entry}\n")
        for problem in (*read_problems(file), parse_problem(entry), parse_problem(keys)):
            assert isinstance(problem, GemmProblem) and problem.fast_accum is fast_accum
