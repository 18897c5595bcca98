"""Interrupted sweeps: the first interruption keeps the best so far, the second ends at once."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from toys import BEST, GEMM, REGIME, CountingRunner, catalogue, recording, sweep

from tuner.errors import BenchmarkError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement
from tuner.store import Store
from tuner.tuning.progress import Interruption
from tuner.tuning.sweep import Sweep, SweepOptions


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
            sweep(Impatient(recording(), after), store, interruption=interruption, trials=27).run()
        assert store.measurements(), "what was finished is kept"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_second_one_that_nobody_pressed_changes_nothing(
        self, store: Store, number: int
    ) -> None:
        class Twice(CountingRunner):
            def retime(self, *given: Any) -> list[Measurement]:
                os.kill(os.getpid(), number)
                return super().retime(*given)

        def after(runner: CountingRunner) -> None:
            if runner.collected == 6:
                os.kill(os.getpid(), number)

        runner = Twice(recording(), after)
        with Interruption() as interruption:
            outcome = sweep(runner, store, interruption=interruption, trials=27).run()
        assert outcome.interrupted and interruption.number == number
        assert store.best(GEMM, DEFAULT_GPU, REGIME) is not None

    def test_one_during_the_final_pass_makes_it_brief(self, store: Store) -> None:
        class Late(CountingRunner):
            def retime(self, *given: Any) -> list[Measurement]:
                if not self.retimed:
                    self.retimed.append(given[2])
                    os.kill(os.getpid(), signal.SIGINT)
                return super().retime(*given)

        runner = Late(recording())
        with Interruption() as interruption:
            outcome = sweep(
                runner, store, interruption=interruption, trials=27, effort="full"
            ).run()
        assert outcome.interrupted
        assert runner.retimed == [40, 20]
        assert outcome.ranking[0].config == BEST

    def test_a_brief_one_that_a_job_gives_up_late_is_taken_once_more(self, store: Store) -> None:
        class Late(CountingRunner):
            def retime(self, *given: Any) -> list[Measurement]:
                found = super().retime(*given)
                if len(self.retimed) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                return found if len(self.retimed) == 3 else []

        runner = Late(recording())
        with Interruption() as interruption:
            outcome = sweep(
                runner, store, interruption=interruption, trials=27, effort="full"
            ).run()
        assert outcome.interrupted and outcome.ranking[0].config == BEST
        assert runner.retimed == [40, 20, 20]

    @pytest.mark.parametrize("is_interrupted", [False, True])
    def test_a_final_pass_that_somebody_else_gives_up_is_an_error(
        self, store: Store, is_interrupted: bool
    ) -> None:
        class Cancelled(CountingRunner):
            def retime(self, *given: Any) -> list[Measurement]:
                self.retimed.append(given[2])
                if is_interrupted and len(self.retimed) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                return []

        runner = Cancelled(recording())
        with (
            Interruption() as interruption,
            pytest.raises(BenchmarkError, match=f"the final pass of {GEMM.label()} was given up"),
        ):
            sweep(runner, store, interruption=interruption, trials=3).run()
        assert len(runner.retimed) == 1 + 2 * is_interrupted

    def test_a_search_that_somebody_else_gives_up_is_an_error(self, store: Store) -> None:
        class Cancelled(CountingRunner):
            empty = 0

            def collect(self, timeout_s: float | None = None) -> list[Measurement]:
                if self.collected < 6:
                    return super().collect(timeout_s)
                self.empty += 1
                assert self.empty == 1, "it waits for what will never come"
                return []

        runner = Cancelled(recording())
        with pytest.raises(BenchmarkError, match=f"search of {GEMM.label()} was given up"):
            sweep(runner, store, trials=27).run()
        assert store.measurements(), "what was collected is kept"

    def test_before_anything_passed(self, store: Store) -> None:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            outcome = sweep(CountingRunner(recording()), store, interruption=interruption).run()
        assert outcome.interrupted
        assert not outcome.ranking
