"""What users may rely on: the names of `tuner`, frozen."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

import tuner

NAMES = {
    "Answer",
    "AttentionProblem",
    "BenchmarkError",
    "CompileError",
    "Config",
    "ConfigError",
    "Entry",
    "GemmProblem",
    "Gpu",
    "GroupedGemmProblem",
    "Measurement",
    "NoValidConfigError",
    "Provenance",
    "Regime",
    "RenderError",
    "SoftmaxProblem",
    "Status",
    "StoreError",
    "SwigluProblem",
    "TunerError",
    "__version__",
    "attention",
    "attention_varlen",
    "disable",
    "enable",
    "enabled",
    "grouped_mm",
    "interleave",
    "linear",
    "linear_problems",
    "lookup",
    "matmul",
    "restore_linear_",
    "scaled_mm",
    "stats",
    "sweep",
    "swiglu",
    "tune_linear_",
}


def test_names_are_frozen() -> None:
    assert set(tuner.__all__) == NAMES
    assert set(dir(tuner)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"attention"}))
def test_name_resolves_to_the_thing_itself(name: str) -> None:
    value = getattr(tuner, name)
    assert not inspect.ismodule(value)
    assert getattr(value, "__name__", name) == name


def test_attention_or_how_to_get_it() -> None:
    if importlib.util.find_spec("torch"):
        parameters = inspect.signature(tuner.attention).parameters
        names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
        further = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        assert further == ["window", "softcap", *(f"descale_{name}" for name in "qkv")]
        plain = [name for name in parameters if name not in further]
        assert plain == names.split(), "as PyTorch's scaled_dot_product_attention"
    else:
        with pytest.raises(ImportError, match=r"cutlass-tuner\[torch\]"):
            tuner.attention  # noqa: B018


@pytest.mark.parametrize("name", ["lookup", "sweep"])
def test_a_module_of_the_same_name_does_not_hide_the_function(name: str) -> None:
    module = importlib.import_module(f"tuner.{name}")
    assert inspect.ismodule(module)
    assert getattr(tuner, name) is getattr(module, name)
    setattr(tuner, name, module)  # what an import of the module does to its package
    assert inspect.isfunction(getattr(tuner, name))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        tuner.tune  # noqa: B018
