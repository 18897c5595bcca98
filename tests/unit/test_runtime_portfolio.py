"""Calls that nobody tuned: proven kernels of the portfolio, PyTorch's where it chose that."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gemm_configs import tile
from portfolio_machine import (
    CUDNN,
    FIRST,
    FLASH,
    PROBLEM,
    SECOND,
    FusedKernel,
    Serving,
    Stopwatch,
    candidate,
    portfolio_of,
    portfolio_serving,
    portfolio_stopwatch,
)
from runtime_machine import PATTERN, WRITTEN, answer, fake_machine, inputs, measured, same, toy_won

from tuner import settings
from tuner.compile import artifacts
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families
from tuner.families.by_operation import ProductDomain
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.measurement import Environment, Regime
from tuner.problem import AttentionProblem
from tuner.selection.candidates import Candidate, DomainModels, Regret, Spread
from tuner.selection.kernels import BUILD, PROVE
from tuner.selection.portfolio import Portfolio, shipped

torch = pytest.importorskip("torch", reason="torch is not installed")
benchmark = importlib.import_module("tuner.runtime.call.benchmark")

machine, serving, stopwatch = fake_machine, portfolio_serving, portfolio_stopwatch


def test_a_proven_kernel_serves_a_shape_that_nobody_tuned(serving: Serving) -> None:
    assert serving.call() and serving.call((2, 4, 40, 56))
    assert serving.launched == ["key-wide"] * 2
    stats = serving.machine.stats()
    assert (stats.hits, stats.portfolio_hits) == (2, 2)


def test_an_h200_s_portfolio_serves_on_an_h100(serving: Serving) -> None:
    """By the same kernels and their proofs, where they are faster by more."""
    serving.machine.gpu = GPUS["H100"]
    assert serving.call() and serving.launched == ["key-wide"]
    serving.portfolio = portfolio_of(candidate(FIRST, 9.95), candidate(FLASH, 10.0), margin=0.0)
    serving.runtime.table.table.forget()
    assert not serving.call()
    serving.machine.gpu = DEFAULT_GPU
    serving.runtime.table.table.forget()
    assert serving.call()


def test_on_a_gpu_without_a_description_pytorch_answers(serving: Serving) -> None:
    serving.machine.gpu = Gpu("NVIDIA GH200 480GB", "9.0", 132, 0, 0.0, 0)
    assert not serving.call() and serving.launched == []


def test_a_candidate_without_a_tile_is_a_counted_error(serving: Serving) -> None:
    """As of a portfolio's row that was cut by hand."""
    params = {name: value for name, value in FIRST.params.items() if name != "tile_n"}
    broken = Candidate(Config(FIRST.family, params), {"launch": 5.0, "steps": 1.0}, 20, 0.01, 0.02,
                       candidate(FIRST, 1.0).spread)  # fmt: skip
    serving.portfolio = portfolio_of(broken, candidate(SECOND, 11.0), candidate(FLASH, 20.0))
    assert not serving.call() and not serving.call()
    stats = serving.machine.stats()
    assert stats.errors == {"a file of the tuner cannot be used": 1}
    assert stats.fallbacks == {"a file of the tuner cannot be used": 2}


def test_what_is_not_proven_is_passed_over_for_the_next_that_wins(serving: Serving) -> None:
    del serving.proven["128"]
    assert serving.call() and serving.launched == ["key-narrow"]


@pytest.mark.parametrize(
    "reason",
    [
        f"a kernel is not proven ({PROVE})",
        f"a kernel is not built ({BUILD})",
        "a kernel failed its proof: wrong_result at S=1",
    ],
)
def test_without_a_proof_pytorch_answers_and_the_reason_names_the_command(
    serving: Serving, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving.proven = dict.fromkeys(("128", "64"), reason)
    with caplog.at_level("INFO", "tuner"):
        assert not serving.call() and serving.launched == []
    assert serving.fallbacks == ["the portfolio's kernel cannot run here"]
    assert reason in caplog.text


def test_a_kernel_that_is_proven_later_is_taken_up(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, known = 1000.0, serving.proven
    monkeypatch.setattr(serving.runtime.table.time, "monotonic", lambda: now)
    serving.proven = {}
    assert not serving.call()
    serving.proven = known
    now += serving.runtime.answers.RETRY_EVERY_S
    assert serving.call()


def test_a_kernel_that_does_not_beat_the_vendor_by_the_margin_is_not_launched(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.portfolio = portfolio_of(candidate(FIRST, 19.5), candidate(FLASH, 20.0))
    with caplog.at_level("INFO", "tuner"):
        assert not serving.call() and not serving.call()
    assert serving.fallbacks == ["the portfolio chose PyTorch's"]
    assert "expected 20.0 us, flash2 20.0" in caplog.text
    assert serving.vendors == [] and len(serving.machine.problems) == 1


def test_a_vendor_s_kernel_that_pytorch_would_not_take_is_called(serving: Serving) -> None:
    serving.portfolio = portfolio_of(
        candidate(FIRST, 19.5), candidate(FLASH, 25.0), candidate(CUDNN, 15.0)
    )
    assert not serving.call() and serving.vendors == ["cudnn"]
    stats = serving.machine.stats()
    assert (stats.hits, stats.portfolio_hits, stats.fallbacks) == (1, 1, {})


def test_an_own_decision_comes_first(serving: Serving) -> None:
    serving.machine.answers = toy_won
    assert serving.call() and serving.launched == []
    assert serving.machine.loads == 2 and serving.machine.stats().portfolio_hits == 0


def test_a_decision_whose_kernels_are_not_here_leaves_it_to_the_portfolio(
    serving: Serving,
) -> None:
    serving.machine.answers = toy_won
    serving.machine.present.discard("key-second")
    assert serving.call() and serving.launched == ["key-wide"]
    serving.proven = {}
    assert not serving.call((1, 2, 40, 64))


def test_the_portfolio_s_kernel_comes_before_the_vendor_s_that_the_decided_one_beat(
    serving: Serving,
) -> None:
    """A machine with prebuilt kernels only has none of a shipped decision's own."""
    own = measured().but(problem=PROBLEM)
    found = answer(own, own.but(config=CUDNN, artifacts={}, latency_us=14.0))
    serving.machine.answers = lambda problem: found
    serving.machine.present.discard("key-second")
    assert serving.call() and serving.launched == ["key-wide"]
    serving.runtime.table.table.forget()
    serving.proven = {}
    assert not serving.call() and serving.vendors == ["cudnn"]
    serving.runtime.table.table.forget()
    serving.machine.present.add("key-second")
    assert serving.call(), "the decided kernel is built"
    assert (serving.launched, serving.vendors) == (["key-wide"], ["cudnn"])


def test_a_refused_launch_withdraws_that_kernel_for_the_problem(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(artifact: Any) -> Any:
        kernel = FusedKernel(artifact.key, serving.launched)
        if artifact.key == "key-wide":

            def bind(*_: Any) -> Callable[..., None]:
                def launch(*_: Any) -> None:
                    raise BenchmarkError("refused")

                return launch

            kernel.bind = bind  # type: ignore[method-assign]
        return kernel

    monkeypatch.setattr(serving.runtime.plan, "load", load)
    assert not serving.call()
    assert serving.call() and serving.launched == ["key-narrow"]


def test_kernels_of_a_pinned_table_are_those_that_all_ranks_have(
    serving: Serving, tmp_path: Any
) -> None:
    table, lists = serving.runtime.table.table, serving.runtime.proven_kernels.lists
    table.pin(tmp_path / "agreed.sqlite", proven=["key-wide"])
    assert lists.is_agreed and serving.call() and serving.launched == ["key-wide"]
    table.forget()
    assert not lists.is_agreed


def test_an_artifact_that_a_rank_lacks_is_not_launched(serving: Serving) -> None:
    serving.runtime.table.table.pin(None, ["key-wide"])
    assert serving.call() and serving.launched == ["key-narrow"]


def test_a_kernel_of_block_masks_serves_a_shape_that_nobody_tuned(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    sparse = importlib.import_module("tuner.runtime.attention.sparse")
    monkeypatch.setattr(sparse, "_compiled", lambda: lambda *_, **options: None)
    serving.portfolio = next(one for one in shipped() if one.op == "attention")

    def answered(queries: int, **options: Any) -> bool:
        tensors = inputs((1, 2, queries, 64))
        mask = create_block_mask(
            lambda b, h, q, k: k <= q, None, None, queries, queries, device="cpu"
        )
        out = sparse.sparse_attention(*tensors, mask, **options)
        return out is not None and bool((out == WRITTEN).all())

    assert answered(150) and answered(300, softcap=20) and serving.launched == ["key-wide"] * 2
    stats = serving.machine.stats()
    assert (stats.hits, stats.portfolio_hits, stats.fallbacks) == (2, 2, {})
    assert not answered(127) and serving.fallbacks == ["no measured winner"]
    serving.proven = {}
    assert not answered(151)


def test_pytorch_is_asked_about_small_tensors(on_cpu: SimpleNamespace) -> None:
    problem = AttentionProblem.parse("B=64,S=131072,D=64,H=64,causal=1")
    assert on_cpu.proven_kernels.pytorchs(problem, 0) in ("flash2", "efficient", "cudnn", "")


class TestBenchmark:
    """``TUNER_BENCHMARK=1``: the first call of a shape is timed."""

    def journal(self) -> list[dict[str, Any]]:
        path = settings.cache_dir() / "benchmarked.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_the_kernel_that_is_fastest_here_serves(
        self, serving: Serving, stopwatch: Stopwatch
    ) -> None:
        """The portfolio expects the wide one to be faster."""
        assert serving.call()
        assert serving.launched[-1] == "key-narrow"
        (row,) = self.journal()
        assert (row["us"], row["pytorch_us"]) == (5.0, 20.0)
        stats = serving.machine.stats()
        assert (stats.hits, stats.portfolio_hits) == (1, 1), "what is timed is no hit"
        assert stopwatch.states == {False}, "a prompt's inputs were just written"

    def test_weights_are_timed_cold(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cold = property(lambda _: Regime("stream", "cold"))
        monkeypatch.setattr(serving.runtime.proven_kernels.Selection, "regime", cold)
        assert serving.call() and stopwatch.states == {True}

    def test_pytorch_s_serves_where_no_kernel_gains_enough(
        self, serving: Serving, stopwatch: Stopwatch
    ) -> None:
        stopwatch.us["sdpa"] = 5.05
        assert not serving.call()
        assert serving.fallbacks == ["timed here, PyTorch's own attention was the fastest"]
        (row,) = self.journal()
        assert row["config"] is None

    def test_a_shape_is_timed_once(
        self, serving: Serving, stopwatch: Stopwatch, on_cpu: SimpleNamespace
    ) -> None:
        assert serving.call()
        bursts = stopwatch.bursts
        assert serving.call() and stopwatch.bursts == bursts > 0
        on_cpu.table.table.forget()
        benchmark.journal = benchmark.Journal()  # as another process has it
        assert serving.call() and stopwatch.bursts == bursts
        assert serving.launched[-1] == "key-narrow"

    def test_damaged_lines_are_passed_over(
        self, serving: Serving, stopwatch: Stopwatch, on_cpu: SimpleNamespace
    ) -> None:
        path = settings.cache_dir() / "benchmarked.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b'{"problem": 1}\n\xff\n[]\n{"gpu"')
        assert serving.call() and serving.launched[-1] == "key-narrow"
        kept = benchmark.Journal().find(PROBLEM, DEFAULT_GPU)
        assert kept is not None and kept.us == 5.0

    @pytest.mark.parametrize("us", [f"1{'0' * 400}", f"1{'0' * 5000}", "NaN", "[]", '"9"', "1e999"])
    def test_a_number_that_none_is_counts_as_an_error(
        self, serving: Serving, stopwatch: Stopwatch, us: str
    ) -> None:
        assert serving.call()
        (row,) = self.journal()
        path = settings.cache_dir() / "benchmarked.jsonl"
        path.write_text(json.dumps({**row, "us": "US"}).replace('"US"', us) + "\n")
        benchmark.journal = benchmark.Journal()
        serving.runtime.table.table.forget()
        assert serving.call() and serving.launched[-1] == "key-narrow"
        assert serving.machine.stats().errors == {"a line of benchmarked.jsonl is damaged": 1}

    def test_without_locks_a_process_times_for_itself(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
        opened = set(Path("/proc/self/fd").iterdir())
        assert serving.call() and serving.launched[-1] == "key-narrow"
        assert serving.machine.stats().errors == {"each process times kernels for itself": 1}
        assert set(Path("/proc/self/fd").iterdir()) <= opened

    def test_pytorch_answers_while_another_process_times(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For a fifth of a second at most, and without a wait once one was in vain."""
        waits: list[float] = []
        now = [100.0]

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            now[0] += seconds

        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
        monkeypatch.setattr(artifacts, "time", clock)
        with ArtifactCache().lock("benchmarked"):
            assert not serving.call() and stopwatch.bursts == 0
            assert 0 < sum(waits) < 0.26
            waits.clear()
            serving.runtime.table.table.forget()
            assert not serving.call() and waits == []
        assert serving.fallbacks == ["another process is timing kernels"]
        assert not serving.machine.stats().errors, "waiting is not a fault"
        serving.runtime.table.table.forget()
        assert serving.call() and stopwatch.bursts > 0

    def test_a_choice_ends_when_a_kernel_that_it_did_not_time_is_proven(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In this process and in the next."""
        lists = serving.runtime.proven_kernels.lists
        known = [()]
        monkeypatch.setattr(lists, "known", lambda: known[0])
        del serving.proven["64"]
        assert serving.call() and serving.launched[-1] == "key-wide"
        bursts = stopwatch.bursts
        serving.proven["64"], known[0] = "key-narrow", (object(),)
        serving.machine.time_passes()
        assert serving.call() and serving.launched[-1] == "key-narrow" and stopwatch.bursts > bursts
        assert len(self.journal()) == 2
        bursts = stopwatch.bursts
        benchmark.journal = benchmark.Journal()
        serving.runtime.table.table.forget()
        assert serving.call() and stopwatch.bursts == bursts, "the new choice holds"
        path = settings.cache_dir() / "benchmarked.jsonl"
        path.write_text(path.read_text().splitlines(keepends=True)[0])
        benchmark.journal = benchmark.Journal()
        serving.runtime.table.table.forget()
        assert serving.call() and stopwatch.bursts > bursts and serving.launched[-1] == "key-narrow"

    def test_another_environment_is_timed_anew(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert serving.call()
        bursts = stopwatch.bursts
        environment = Environment({"driver": "another"})
        monkeypatch.setattr(serving.runtime.devices, "environment", lambda: environment)
        serving.runtime.table.table.forget()
        assert serving.call() and stopwatch.bursts > bursts
        assert len(self.journal()) == 2

    def test_a_launch_that_is_refused_loses(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(plan: Any, *inputs: Any) -> Any:
            if plan.config["tile_n"] == 64:
                raise BenchmarkError("refused")
            return plan.run(*inputs)

        monkeypatch.setattr(serving.runtime.plan.Plan, "run_uncounted", refused)
        assert serving.call() and serving.launched[-1] == "key-wide"

    def test_without_the_setting_nothing_is_timed(
        self, serving: Serving, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TUNER_BENCHMARK")
        assert serving.call() and serving.launched == ["key-wide"] and stopwatch.bursts == 0

    def test_nothing_is_timed_where_nothing_is_proven(
        self, serving: Serving, stopwatch: Stopwatch
    ) -> None:
        serving.proven = {}
        assert not serving.call() and stopwatch.bursts == 0


class ProductKernel(FusedKernel):
    """Writes a pattern to the product."""

    def bind(self, integers: Sequence[int], scalars: Sequence[float]) -> Callable[..., None]:
        size = 2 * integers[0] * integers[1]

        def launch(tensors: Sequence[int], workspace: int, stream: int) -> None:
            self.launched.append(self.key)
            ctypes.memset(tensors[2], PATTERN, size)

        return launch


class TestProducts:
    """`linear` of a layer that nobody tuned."""

    GEMM = families()["gemm"]
    CUBLAS = Config("vendor_blas", {"kernel": "cublas"})

    @pytest.fixture
    def linear(self, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
        """Whether an own kernel answered a call of some rows."""
        self.chosen(serving, 10.0)
        serving.proven = {"64": "key-wide"}
        monkeypatch.setattr(
            serving.runtime.proven_kernels.lists,
            "proven",
            lambda specs, capability: (
                {"gemm": serving.proven["64"]}
                if serving.proven
                else f"a kernel is not built ({BUILD})"
            ),
        )
        monkeypatch.setattr(serving.runtime.plan, "family", lambda name: families()[name])
        monkeypatch.setattr(
            serving.runtime.plan, "load", lambda one: ProductKernel(one.key, serving.launched)
        )

        def call(m: int, bias: bool = False) -> bool:
            a, weight = torch.randn(m, 64).half(), torch.randn(128, 64).half()
            added = torch.randn(128).half() if bias else None
            out = serving.runtime.products.linear(a, weight, added)
            own = bool((out == WRITTEN).all())
            assert own or same(out, torch.nn.functional.linear(a, weight, added))
            return own

        return call

    def chosen(self, serving: Serving, own_us: float) -> None:
        spread = Spread((*((1, 1 << 20),) * 3, (1, 1 << 60)))
        own = Candidate(tile(64, 64), {"launch": own_us}, 20, 0.01, 0.02, spread)
        theirs = Candidate(self.CUBLAS, {"launch": 20.0}, 20, 0.01, 0.02, spread)
        regret = Regret(10, 0.01, 0.05, 1.1, 0.99, 0.9)
        models = DomainModels(ProductDomain("narrow"), Regime(), (own, theirs), 1.0, regret)
        serving.portfolio = Portfolio("gemm", DEFAULT_GPU, {models.domain: models})

    def test_a_proven_kernel_serves(self, serving: Serving, linear: Callable[..., bool]) -> None:
        assert linear(33) and linear(200) and serving.launched == ["key-wide"] * 2
        assert serving.machine.stats().portfolio_hits == 2

    def test_with_a_bias_by_the_kernel_of_its_kin(
        self, serving: Serving, linear: Callable[..., bool]
    ) -> None:
        assert linear(33, bias=True) and serving.launched == ["key-wide"]

    def test_pytorch_s_where_it_is_expected_to_be_faster(
        self, serving: Serving, linear: Callable[..., bool]
    ) -> None:
        self.chosen(serving, 19.9)
        assert not linear(33) and not linear(33) and serving.launched == []
        assert serving.fallbacks == ["the portfolio chose PyTorch's"]
        assert len(serving.machine.problems) == 1, "what stays so is not asked for again"

    def test_rows_that_no_domain_holds_are_pytorch_s(
        self, serving: Serving, linear: Callable[..., bool]
    ) -> None:
        assert not linear(300) and serving.launched == []
        assert serving.fallbacks == ["no measured winner"]

    def test_without_its_kernel_pytorch_answers(
        self, serving: Serving, linear: Callable[..., bool]
    ) -> None:
        serving.proven = {}
        assert not linear(33)
        assert serving.fallbacks == ["the portfolio's kernel cannot run here"]


def test_a_proven_kernel_serves_a_paged_cache(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its splits are of the rounded batch and table, whose lengths stay on the device."""
    runtime = importlib.import_module("tuner.runtime.attention.paged")
    serving.portfolio = next(one for one in shipped() if one.op == "attention")
    selected: list[Config] = []

    def says(specs: Any, capability: str) -> dict[str, str] | str:
        rows = specs["attention"].variables["box_rows"]
        return {"attention": "key-narrow"} if rows == 16 else f"a kernel is not proven ({PROVE})"

    artifacts = serving.runtime.proven_kernels._artifacts

    def watched(problem: Any, gpu: Any, config: Config) -> Any:
        selected.append(config)
        return artifacts(problem, gpu, config)

    monkeypatch.setattr(serving.runtime.proven_kernels.lists, "proven", says)
    monkeypatch.setattr(serving.runtime.proven_kernels, "_artifacts", watched)
    batch, pages, heads, heads_kv, width = 3, 40, 32, 8, 64
    cache = torch.zeros(2, pages, 64, heads_kv, width, dtype=torch.float16)
    query = torch.zeros(batch, heads, width, dtype=torch.float16)
    table = torch.zeros(batch, 12, dtype=torch.int32)
    lengths = torch.full((batch,), 700, dtype=torch.int32)
    out = runtime.paged_attention(query, *cache, table, lengths, total_seqlen_k=batch * 700)
    assert bool((out == WRITTEN).all()) and serving.launched == ["key-narrow"]
    assert serving.machine.stats().portfolio_hits == 1
    # Wide boxes were preferred for pages of 64, and are not proven.
    assert selected[0]["box_rows"] == 64 and selected[-1]["box_rows"] == 16
    assert selected[-1]["splits"] > 1
    selected.clear()
    many, long = 16, torch.zeros(16, 32768 // 64, dtype=torch.int32)
    lengths = torch.full((many,), 700, dtype=torch.int32)
    runtime.paged_attention(query[:1].repeat(many, 1, 1), *cache, long, lengths)
    assert selected[0]["stream_k"], "where only the device knows the lengths"
    assert (selected[0]["splits"], selected[0]["persistent"]) == (1, False)
    selected.clear()
    known = {"max_seqlen_k": 700, "total_seqlen_k": many * 700}
    runtime.paged_attention(query[:1].repeat(many, 1, 1), *cache, long, lengths, **known)
    assert "stream_k" not in selected[0].params, "of alike lengths"
    selected.clear()
    runtime.paged_attention(query, *cache, long[:batch], lengths[:batch])
    assert "stream_k" not in selected[0].params, "of few sequences"
