"""Kernels that a portfolio has and this machine lacks: when they are built in the background, and
when the runtime takes them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from portfolio_machine import FIRST, FUSED, PROBLEM, Serving, portfolio_serving
from runtime_machine import fake_machine, measured

from tuner.compile.artifacts import ArtifactCache
from tuner.errors import ConfigError
from tuner.families import family
from tuner.measurement import Provenance
from tuner.selection import kernels
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import BUILD, Lists, path_of, shipped_kernels

torch = pytest.importorskip("torch", reason="torch is not installed")

machine, serving = fake_machine, portfolio_serving
NVCC, KEY = "13.0.88", "b" * 32


@pytest.fixture
def asked(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the requests to the builder; no kernel is built."""
    found: list[tuple[Any, ...]] = []
    background = serving.runtime.proven_kernels.background
    monkeypatch.setattr(background, "request", lambda *arguments: found.append(arguments))
    serving.proven = dict.fromkeys(("128", "64"), f"a kernel is not built ({BUILD})")
    return found


def test_a_missing_kernel_is_asked_for(
    serving: Serving, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = family(FIRST.family).kernels(PROBLEM, FIRST)

    def lacks(self: Lists, wanted: Any, capability: str) -> bool:
        return (wanted, capability) == (specs, "9.0")

    monkeypatch.setattr(Lists, "lacks", lacks)
    assert not serving.call()
    ((problem, gpu, is_wanted),) = asked
    assert (problem, gpu, is_wanted()) == (PROBLEM, serving.machine.gpu.name, True)


@pytest.mark.parametrize(
    ("provenance", "ranks", "count"),
    [
        (Provenance.MEASURED, 1, 1),
        (Provenance.MEASURED, 2, 0),
        (Provenance.PREDICTED, 1, 0),
        (Provenance.REPLAYED, 1, 0),
    ],
)
def test_kernels_of_a_measured_decision_are_asked_for(
    provenance: Provenance,
    ranks: int,
    count: int,
    serving: Serving,
    asked: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving.runtime.devices, "ranks", lambda: ranks)
    own = {"problem": PROBLEM, "config": FIRST, "artifacts": {"attention": KEY}}
    missing = measured(**own, provenance=provenance)
    with pytest.raises(ConfigError, match="is not in the cache"):
        serving.runtime.plan.own_plan(None, FUSED, missing, 0)
    assert [problem for problem, *_ in asked] == [PROBLEM] * count
    assert all(is_wanted() for *_, is_wanted in asked)


def test_the_first_kernel_is_asked_for_while_another_serves(
    serving: Serving, asked: list[tuple[Any, ...]]
) -> None:
    serving.proven["64"] = "key-narrow"
    assert serving.call() and serving.launched == ["key-narrow"]
    assert len(asked) == 1


@pytest.mark.parametrize(("fact", "value"), [("is_capturing", True), ("ranks", 2)])
def test_captures_and_ranks_that_did_not_agree_ask_for_nothing(
    serving: Serving, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch,
    fact: str, value: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(serving.runtime.devices, fact, lambda: value)
    assert not serving.call() and not asked


def test_a_config_that_failed_here_is_not_asked_for(
    serving: Serving, asked: list[tuple[Any, ...]]
) -> None:
    answers = serving.runtime.table.table._answers
    answers.withdrawn[PROBLEM.key] = {FIRST}
    assert not serving.call() and not asked


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_a_kernel_that_is_built_later_is_taken_up_where_bits_may_change(
    is_repeatable: bool,
    serving: Serving,
    asked: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Callable[[], float] = serving.runtime.answers.time.monotonic
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_repeatable)
    assert not serving.call()
    serving.proven = {"128": "key-wide"}
    now = clock() + 2 * serving.runtime.answers.RETRY_EVERY_S
    monkeypatch.setattr(serving.runtime.answers.time, "monotonic", lambda: now)
    serving.machine.time_passes()
    assert serving.call() is not is_repeatable


class TestLacking:
    """`Lists.lacks`: kernels that are missing here, and whose proofs ship."""

    specs = family(FIRST.family).kernels(PROBLEM, FIRST)

    @pytest.fixture(autouse=True)
    def one_ships(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        (spec,) = self.specs.values()
        proof = next(one.proof for one in shipped_kernels())
        monkeypatch.setattr(kernels, "shipped_kernels", lambda: (Kernel(spec.key, KEY, "", proof),))
        yield

    def listed(self, tmp_path: Path, **changes: Any) -> None:
        """Write a list with the kernel, whose library is in the cache."""
        (spec,) = self.specs.values()
        library = tmp_path / "kernel.so"
        library.write_bytes(b"library")
        facts = {"resources": None, "compile_cpu_s": 0.0, "source": "", "facts": {"nvcc": NVCC}}
        artifact = ArtifactCache().put(KEY, library, **facts)
        row = Kernel.of(spec, artifact)
        made = KernelList(NVCC, "4.2.0", "9.0", {spec.key: row})
        made.write(path_of(NVCC, "9.0"))

    def test_a_kernel_of_no_list(self) -> None:
        assert Lists().lacks(self.specs, "9.0")

    def test_a_kernel_without_a_proof_that_ships(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "shipped_kernels", lambda: ())
        assert not Lists().lacks(self.specs, "9.0")

    def test_a_kernel_that_is_built_is_not_built_again_without_a_proof(
        self, tmp_path: Path
    ) -> None:
        self.listed(tmp_path)
        assert isinstance(Lists().proven(self.specs, "9.0"), str)
        assert not Lists().lacks(self.specs, "9.0")
        assert Lists().lacks(self.specs, "8.0")

    def test_a_library_that_is_gone(self, tmp_path: Path) -> None:
        self.listed(tmp_path)
        ArtifactCache().remove(KEY)
        assert Lists().lacks(self.specs, "9.0")
