"""The rule of grouped products that nobody tuned: its kernels, its choice, what it serves."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from rule_trials import check_products, checked_trials

from tuner.families import families
from tuner.families.grouped_gemm import rule as grouped
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.problem import E4M3, SIZES, DType, GroupedGemmProblem
from tuner.selection.kernels import PROVE

DTYPES: tuple[DType, ...] = ("bfloat16", E4M3)


def problem(rows: int, dtype: DType = "bfloat16", groups: int = 64) -> GroupedGemmProblem:
    return GroupedGemmProblem(groups, rows, 2048, 1024, sizes="zipf", dtype=dtype)


@pytest.mark.parametrize("target", grouped.targets(), ids=lambda target: target.label())
def test_a_kernel_is_proven_on_groups_of_every_kind(target: Any) -> None:
    found = checked_trials(target)
    schedules = {"grouped_gemm": 2, "block_scaled_grouped_gemm": 20}
    check_products(target, found, schedules[target.family.name])
    problems: list[Any] = [trial.problem for trial in found]
    assert {one.sizes for one in problems} == set(SIZES)
    assert {1, 32, 33, 384} <= {one.groups for one in problems}
    assert any(one.m < one.groups for one in problems)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_grow_with_the_groups(dtype: DType) -> None:
    chosen = []
    for rows in (64, 1024, 1 << 16):
        selection = grouped.select(problem(rows, dtype), DEFAULT_GPU)
        times = [us for us, _ in selection.own()]
        assert times == sorted(times) and len(times) == len(grouped.KERNELS[dtype])
        assert selection.source == f"expected {times[0]:.1f} us"
        config = selection.expected[0][1]
        chosen.append(config["tile_n" if config["swap_ab"] else "tile_m"])
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1]


def test_what_the_rule_does_not_serve() -> None:
    assert grouped.serves(problem(64), GPUS["H100"])
    assert not grouped.serves(problem(64, "float16"), DEFAULT_GPU)
    assert not grouped.serves(problem(64), Gpu("NVIDIA A100", "8.0", 108, 0, 0.0, 0))
    assert grouped.select(problem(64, "float16"), DEFAULT_GPU) is None
    odd = GroupedGemmProblem(4, 64, 20, 64, dtype="bfloat16")
    assert grouped.select(odd, DEFAULT_GPU) is None


@pytest.fixture
def serving(
    on_cpu: SimpleNamespace, noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """A runtime whose kernel lists say `proven` of a kernel by its tile's columns."""
    import torch

    made = SimpleNamespace(runtime=on_cpu, launched=noted, proven={}, torch=torch)

    def proven(specs: Any, capability: str) -> dict[str, str] | str:
        [(name, spec)] = specs.items()
        key = made.proven.get(spec.variables["tile_n"])
        return {name: key} if key else f"a kernel is not proven ({PROVE})"

    monkeypatch.setattr(on_cpu.proven_kernels.lists, "proven", proven)
    return made


def call(serving: SimpleNamespace, rows: int) -> Any:
    torch = serving.torch
    a, b = torch.randn(rows, 256).bfloat16(), torch.randn(4, 128, 256).bfloat16()
    ends = [0, 0, rows // 2, rows, rows]
    grouped_mm = importlib.import_module("tuner.runtime.products.grouped").grouped_mm
    return grouped_mm(a, b, torch.tensor(ends, dtype=torch.int32), sizes="zipf")


def test_proven_kernels_serve_shapes_that_nobody_tuned(serving: SimpleNamespace) -> None:
    tiles = {config["tile_n"]: f"key-{config['tile_n']}" for config in grouped.KERNELS["bfloat16"]}
    serving.proven = tiles
    for rows in (9, 12, 60000):
        call(serving, rows)
    keys = [key for key, _ in serving.launched]
    assert keys[0] == keys[1] != keys[2], "the rows are rounded to a power of two"
    assert [integers[0] for _, integers in serving.launched] == [9, 12, 60000]
    stats = serving.runtime.counters.stats()
    assert (stats.hits, stats.portfolio_hits) == (3, 3)
    assert keys[0] in tiles.values()


def test_the_next_kernel_serves_where_the_first_is_not_proven(serving: SimpleNamespace) -> None:
    last = list(grouped.KERNELS["bfloat16"])[-1]
    serving.proven = {last["tile_n"]: "key"}
    call(serving, 9)
    assert [key for key, _ in serving.launched] == ["key"]


def test_without_a_proof_pytorch_answers(
    serving: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tuner"):
        assert call(serving, 9).shape == (9, 128)
    fallbacks = serving.runtime.counters.stats().fallbacks
    assert fallbacks == {serving.runtime.refusal.Kind.UNSERVED: 1} and PROVE in caplog.text


def test_a_kernel_that_failed_here_is_not_launched_again(serving: SimpleNamespace) -> None:
    configs = list(grouped.KERNELS["bfloat16"])
    serving.proven = {config["tile_n"]: "key" for config in configs}
    asked = GroupedGemmProblem(4, 16, 128, 256, sizes="zipf", dtype="bfloat16")
    serving.runtime.table.table._answers.withdrawn[asked.key] = set(configs)
    call(serving, 9)
    assert not serving.launched


def test_every_family_is_known() -> None:
    assert {config.family for kernels in grouped.KERNELS.values() for config in kernels} <= set(
        families()
    )
