"""vLLM's entry point: it registers the plug-in, or says why not, and stops no engine."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_fakes import REGISTRY, overrides, stand_ins

pytest.importorskip("torch", reason="torch is not installed")


def entry_point() -> Callable[[], None]:
    """The function that vLLM calls in each of its processes."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["tuner"].split(":")
    register: Callable[[], None] = getattr(importlib.import_module(module), name)
    return register


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The entry point beside stand-ins, whose quantisation `test_runtime_vllm_products` has."""
    for key, value in stand_ins().items():
        monkeypatch.setitem(sys.modules, key, value)
    package = importlib.import_module("tuner.runtime.engines.vllm")
    monkeypatch.setattr(package, "_register_quantization", lambda: None)
    return entry_point()


def test_the_entry_point_registers_the_backend(
    register: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    custom = sys.modules[REGISTRY].AttentionBackendEnum.CUSTOM
    register(), register()
    assert overrides == {custom: "tuner.runtime.engines.vllm.backend.TunerBackend"}
    assert not caplog.records
    overrides[custom] = "another.Backend"
    register()
    assert overrides[custom] == "another.Backend"
    assert "stays another.Backend" in caplog.text


@pytest.mark.parametrize("version", ["0.13.0", "0.25.1", "0.34.0.dev3+g1234", "1.0", "dev"])
def test_other_versions_keep_their_kernels_and_it_is_said_once_in_one_line(
    register: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    register()
    [record] = caplog.records
    wanted = f"vLLM keeps its own kernels: vLLM {version} (served: 0.26 to 0.33)"
    assert record.getMessage() == wanted and not overrides


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False)])
def test_vllm_s_variable_of_the_batch_is_the_tuner_s_also(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool
) -> None:
    from tuner.runtime.call import invariance

    monkeypatch.setenv("TUNER_BATCH_INVARIANT", "")
    monkeypatch.delenv("TUNER_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    norms = SimpleNamespace(register=lambda: registered.append("norms"))
    registered: list[str] = []
    monkeypatch.setitem(sys.modules, "tuner.runtime.engines.vllm.norms", norms)  # type: ignore[arg-type]
    register()
    assert invariance.is_on() == is_on and len(overrides) == 1
    assert registered == ["norms"] * is_on


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1+cu130", "0.33.4rc1"])
def test_versions_that_are_served(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    register()
    assert len(overrides) == 1


def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, REGISTRY, None)  # type: ignore[arg-type]


def no_custom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[REGISTRY], "AttentionBackendEnum", object())


def no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm"], "__version__")


def odd_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    package = importlib.import_module("tuner.runtime.engines.vllm")
    monkeypatch.setattr(package, "_register_quantization", fail)


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (no_registry, "ModuleNotFoundError"),
        (no_custom, "AttributeError"),
        (no_version, "AttributeError"),
        (odd_quantization, "ValueError: two lines"),
    ],
)
def test_the_entry_point_stops_no_engine(
    register: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    named: str,
) -> None:
    break_it(monkeypatch)
    register()
    [record] = caplog.records
    line = record.getMessage()
    assert "\n" not in line and named in line and line.endswith("(served: 0.26 to 0.33)")
