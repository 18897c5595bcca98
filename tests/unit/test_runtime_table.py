"""Which of the stored kernels a call gets, when it is looked up, and when it is given up."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import (
    OTHER,
    PROBLEM,
    SDPA,
    Machine,
    answer,
    fake_machine,
    inputs,
    measured,
    same,
    was_tuned,
)

from tuner.config import Config
from tuner.errors import BenchmarkError, StoreError
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Provenance, Status
from tuner.problem import AttentionProblem
from tuner.selection.reader import Entry, LookupResult

torch = pytest.importorskip("torch", reason="torch is not installed")

machine = fake_machine


def test_a_pinned_table_asks_its_file_and_launches_nothing_that_is_absent(
    machine: Machine, on_cpu: SimpleNamespace, tmp_path: Path
) -> None:
    machine.decide(measured())
    assert was_tuned(machine.attention(*inputs()))
    absent, *_ = measured().artifacts.values()
    on_cpu.table.table.pin(tmp_path / "agreed.sqlite", [absent])
    assert not was_tuned(machine.attention(*inputs()))
    assert machine.asked[-1] == tmp_path / "agreed.sqlite"
    assert list(machine.stats().fallbacks) == ["nothing of the entry can run here"]
    on_cpu.table.table.pin(None, refusal=on_cpu.refusal.Refusal(on_cpu.refusal.Kind.RANKS))
    assert not was_tuned(machine.attention(*inputs()))
    assert machine.stats().fallbacks["the ranks did not agree"] == 1
    on_cpu.table.table.pin(None)
    assert was_tuned(machine.attention(*inputs())) and machine.asked[-1] is None


def test_a_call_costs_no_look_at_the_store(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    for _ in range(5):
        assert was_tuned(machine.attention(q, k, v))
    assert (machine.loads, len(machine.problems)) == (2, 1)


def test_a_new_decision_is_taken_up(machine: Machine) -> None:
    q, k, v = inputs()
    assert not was_tuned(machine.attention(q, k, v))
    machine.decide(measured())
    assert was_tuned(machine.attention(q, k, v))
    machine.decide()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))


def test_the_store_is_looked_at_within_a_second(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(machine.runtime.table.time, "monotonic", lambda: now)
    machine.attention(*inputs())
    machine.answer, machine.version = answer(measured()), 1
    now += 0.4
    assert not was_tuned(machine.attention(*inputs()))
    now += 0.6
    assert was_tuned(machine.attention(*inputs()))


def test_an_artifact_that_is_built_later_is_taken_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(machine.runtime.table.time, "monotonic", lambda: now)
    machine.present.discard("key-second")
    machine.decide(measured())
    assert not was_tuned(machine.attention(*inputs()))
    machine.present.add("key-second")
    now += machine.runtime.answers.RETRY_EVERY_S
    assert was_tuned(machine.attention(*inputs()))


def test_a_miss_says_what_to_run(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert not was_tuned(machine.attention(*inputs()))
    command = f"(tuner sweep --op attention --shape {PROBLEM.label()})"
    assert any(record.message.endswith(command) for record in caplog.records)


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_only_measured_entries_are_launched(
    machine: Machine, provenance: Provenance, caplog: pytest.LogCaptureFixture
) -> None:
    machine.vendor = lambda q, k, v: torch.zeros_like(q)
    machine.decide(measured(provenance=provenance), measured("vendor_sdpa", provenance=provenance))
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == [] and machine.loads == 0
    assert len(caplog.records) == 1 and f"is {provenance}" in caplog.text
    assert machine.stats().fallbacks == {"nothing of the entry can run here": 3}


def test_a_mixed_ranking_skips_what_was_not_measured(machine: Machine) -> None:
    replayed = measured(provenance=Provenance.REPLAYED, latency_us=1.0).but(
        config=Config("toy", {"n": 2})
    )
    machine.decide(replayed, measured())
    assert was_tuned(machine.attention(*inputs()))


@pytest.mark.parametrize(
    "broken",
    [
        {"status": Status.WRONG_RESULT, "latency_us": None},
        {"problem": AttentionProblem.parse("S=16,D=8,H=2,causal=1")},
        {"artifacts": {"first": "key-first"}},
        {"artifacts": {"first": "key-first", "second": "key-missing"}},
        {"config": Config("nowhere", {})},
    ],
)
def test_what_cannot_run_here_is_passed_over(machine: Machine, broken: dict[str, Any]) -> None:
    q, k, v = inputs()
    machine.decide(measured().but(**broken))
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == []
    machine.decide(
        measured().but(**broken), measured(latency_us=20.0, config=Config("toy", {"n": 3}))
    )
    assert was_tuned(machine.attention(q, k, v))


def test_a_vendor_that_won_is_called(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    ranking = measured("vendor_sdpa", latency_us=5.0), measured()
    machine.decide(*ranking)
    q, k, v = inputs()
    assert (machine.attention(q, k, v) == 3.0).all()
    assert machine.launched == [] and machine.stats().hits == 1
    machine.vendor = "not installed"
    machine.runtime.table.table.forget()
    assert was_tuned(machine.attention(q, k, v))


def test_a_kernel_that_is_measured_only_makes_way(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    serving = Config("vendor_sdpa", {"kernel": "flash3_serving"})
    machine.decide(measured("vendor_sdpa", latency_us=5.0, config=serving), measured())
    assert was_tuned(machine.attention(*inputs()))


def test_where_flex_attention_won_under_a_block_mask_pytorch_answers(
    machine: Machine, on_cpu: SimpleNamespace
) -> None:
    """And not the next of the ranking, which is slower; elsewhere it is measured only."""
    plan, flex = on_cpu.plan, Config("vendor_flex", {"kernel": "flex"})
    found = {}
    for text in ("S=512,D=64,block_mask=1", "S=512,D=64,softcap=30"):
        problem = AttentionProblem.parse(text)
        posed = plan.Posed(problem, 0.125)
        found[text] = plan.plan_of(posed, measured().but(problem=problem, config=flex), 0)
    of_all, of_flex = found.values()
    kinds = on_cpu.refusal.Kind
    assert of_all.kind is kinds.VENDOR and of_flex.kind is kinds.UNAVAILABLE
    assert of_flex.detail == "flex is measured, and not served"


def test_a_pinned_winner_comes_first(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    vendor, own = measured("vendor_sdpa", latency_us=5.0), measured()
    machine.answer = LookupResult(entry=Entry.of([vendor, own], pin=own), exact=True, notes=())
    assert was_tuned(machine.attention(*inputs()))


def test_a_refused_launch_withdraws_the_kernel(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.decide(measured())
    machine.fails = BenchmarkError("launch of key-first: cudaError 701")
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert len(machine.launched) == 1, "it must not be launched again in this process"
    assert "cudaError 701" in caplog.text
    assert machine.stats().errors == {"a launch was refused": 1}
    assert sum(machine.stats().fallbacks.values()) == 3 and machine.stats().hits == 0


def test_a_withdrawn_kernel_makes_way_for_the_next(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    machine.decide(measured(), measured("vendor_sdpa", latency_us=20.0))
    machine.fails = BenchmarkError("cudaError 701")
    machine.attention(*inputs())
    assert (machine.attention(*inputs()) == 3.0).all()


def test_a_vendor_s_kernel_is_tried_as_pytorch_s_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `tuner.enable` would answer the trial by looking for the plan that is being made."""
    native = importlib.import_module("tuner.runtime.call.native")
    seen: list[bool] = []

    def vendor_call(*arguments: Any) -> Any:
        seen.append(native.thread.is_native)
        return lambda q, k, v: torch.full_like(q, 3.0)

    vendor = SimpleNamespace(
        name="vendor_sdpa", is_vendor=True, is_listed=False, vendor_call=vendor_call
    )
    monkeypatch.setattr(machine.runtime.plan, "family", lambda name: vendor)
    machine.decide(measured("vendor_sdpa"))
    assert bool((machine.attention(*inputs()) == 3.0).all())
    assert seen == [True] and not native.thread.is_native


def test_a_vendor_s_refusal_withdraws_it(machine: Machine) -> None:
    def refuses(*inputs: Any) -> None:
        raise RuntimeError("No available kernel")

    machine.vendor = refuses
    machine.decide(measured("vendor_sdpa", latency_us=5.0), measured())
    q, k, v = inputs()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert was_tuned(machine.attention(q, k, v))


def test_an_asynchronous_error_is_not_hidden(machine: Machine) -> None:
    machine.decide(measured())
    machine.fails = BenchmarkError("cudaError 700", status=Status.ILLEGAL_ACCESS)
    with pytest.raises(RuntimeError, match="or of an earlier kernel: cudaError 700"):
        machine.attention(*inputs())

    def meets_it(*tensors: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    machine.vendor = meets_it
    machine.decide(measured("vendor_sdpa"))
    with pytest.raises(torch.AcceleratorError):
        machine.attention(*inputs())


def test_out_of_memory_is_for_one_call(machine: Machine) -> None:
    machine.decide(measured())
    machine.fails = torch.OutOfMemoryError("CUDA out of memory")
    q, k, v = inputs()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    machine.fails = None
    assert was_tuned(machine.attention(q, k, v))


def test_a_store_that_breaks_stops_nothing_that_is_known(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    known = machine.attention(q, k, v)
    machine.broken = StoreError("store.sqlite is not a database")
    machine.time_passes()
    assert same(machine.attention(q, k, v), known)
    longer = inputs((1, 2, 32, 8))
    looked = len(machine.problems)
    for _ in range(3):
        assert same(machine.attention(*longer), SDPA(*longer))
    assert len(machine.problems) == looked, "a store that cannot be read is not asked for each call"
    stats = machine.stats()
    assert stats.errors == stats.fallbacks | {"the store cannot be read": 1}
    assert (stats.hits, stats.fallbacks) == (2, {"the store cannot be read": 3})
    machine.broken = None
    machine.decide(measured().but(problem=OTHER))
    assert was_tuned(machine.attention(*longer))


def test_a_store_that_breaks_right_after_a_change(machine: Machine) -> None:
    machine.decide(measured())
    known = machine.attention(*inputs())
    machine.decide(measured(latency_us=9.0))
    machine.runtime.table.table._look()
    machine.broken = StoreError("store.sqlite is not a database")
    assert same(machine.attention(*inputs()), known)


def test_decisions_of_another_version_stop_nothing(machine: Machine) -> None:
    machine.decide(measured())
    machine.attention(*inputs())
    for machine.foreign in ([], ["no JSON", "[1]", '{"op": "fft", "n": 8}']):
        machine.decide(measured(config=Config("toy", {"n": 2})))
        assert was_tuned(machine.attention(*inputs()))
    assert machine.stats().errors == {}


def test_a_store_that_cannot_be_read_from_the_start(machine: Machine) -> None:
    machine.broken = StoreError("store.sqlite is not a database")
    q, k, v = inputs()
    for _ in range(2):
        assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.stats().fallbacks == {"the store cannot be read": 2}


def test_many_shapes_stay_few(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.runtime.table, "_MAX_KNOWN", 8)
    machine.decide(measured())
    for rows in range(1, 40):
        machine.attention(*inputs((1, 2, rows, 8)))
        assert len(machine.runtime.table.table._known) <= 8
    assert was_tuned(machine.attention(*inputs()))


def test_the_gpu_s_identity_is_the_store_s(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    assert runtime.devices.gpu_of(0) == DEFAULT_GPU
    seen.name = "NVIDIA H20"
    assert runtime.devices.gpu_of(1).identity == "NVIDIA H20|9.0|132"


def test_a_part_without_a_description_has_the_rates_that_its_driver_reports(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(name="NVIDIA Hopper", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    values = {13: 1980000, 36: 3201000, 37: 6144, 38: 62914560}
    asked = lambda index, numbers: [values[number] for number in numbers]  # noqa: E731
    monkeypatch.setattr(runtime.devices, "_attributes", asked)
    gpu = runtime.devices.gpu_of(0)
    assert gpu == Gpu("NVIDIA Hopper", "9.0", 132, 1980, 4916.7, 62914560) and gpu.has_rates


def test_without_a_driver_a_part_without_a_description_has_no_rates(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int, numbers: tuple[int, ...]) -> list[int]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    seen = SimpleNamespace(name="NVIDIA Hopper", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    monkeypatch.setattr(runtime.devices, "_attributes", fail)
    assert not runtime.devices.gpu_of(0).has_rates
