"""What users may rely on: the names of `tuner`, frozen."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import sys
from types import ModuleType

import pytest

import tuner
from tuner.base.install import extra_command

#: Names that only an environment with PyTorch has.
TORCH_NAMES = set(
    """
attention attention_varlen deterministic disable enable enabled grouped_mm interleave linear
linear_problems matmul mla_decode moe paged_append paged_attention prepare prepare_block_mask
quantise restore_linear_ scaled_mm sparse_attention stats swiglu tune_linear_
""".split()
)
NAMES = TORCH_NAMES | set(
    """
AttentionBackwardProblem AttentionProblem BenchmarkError CompileError Config ConfigError Entry
GemmProblem Gpu GroupedGemmProblem LookupResult Measurement NoValidConfigError NotInvariantError
Provenance Regime RenderError SoftmaxProblem Status StoreError SwigluProblem TunerError __version__
lookup sweep
""".split()
)
needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason="torch is not installed"
)


def test_a_former_name_still_works() -> None:
    assert tuner.Answer is tuner.LookupResult


def test_names_are_frozen() -> None:
    assert set(tuner.__all__) == NAMES
    assert set(dir(tuner)) >= NAMES


@pytest.mark.parametrize(
    "name",
    [
        *sorted(NAMES - TORCH_NAMES),
        *(pytest.param(n, marks=needs_torch) for n in sorted(TORCH_NAMES)),
    ],
)
def test_name_resolves_to_the_thing_itself(name: str) -> None:
    value = getattr(tuner, name)
    assert not inspect.ismodule(value)
    assert getattr(value, "__name__", name) == name


@pytest.mark.parametrize("name", sorted(TORCH_NAMES))
def test_without_torch_a_name_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "tuner.runtime", raising=False)
    monkeypatch.delitem(vars(tuner), name, raising=False)
    wanted = rf"^tuner\.{name}: .* needs PyTorch .*{re.escape(extra_command('torch'))}"
    with pytest.raises(ImportError, match=wanted):
        getattr(tuner, name)


@needs_torch
def test_attention_is_called_as_pytorch_s() -> None:
    parameters = inspect.signature(tuner.attention).parameters
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    further = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert further == ["window", "softcap", *(f"descale_{name}" for name in "qkv")]
    plain = [name for name in parameters if name not in further]
    assert plain == names.split(), "as PyTorch's scaled_dot_product_attention"


def test_no_module_has_the_name_of_a_public_one() -> None:
    """An import binds a submodule to its package, in the place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(tuner.__path__)}
    assert modules & NAMES == set()
    assert type(tuner) is ModuleType


@needs_torch
def test_former_paths_are_the_modules_that_took_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    paths = importlib.import_module("tuner.runtime.former_paths").PATHS
    # Programs with exported graphs were told to import these.
    assert {"tuner.runtime.paged", "tuner.runtime.sparse"} <= set(paths)
    for former in paths:
        monkeypatch.delitem(sys.modules, former, raising=False)
    for former, today in paths.items():
        module = importlib.import_module(former)
        assert module is importlib.import_module(today)
        assert module.__name__ == module.__spec__.name == today
    former = "tuner.runtime.vllm.versions"
    with pytest.raises(ModuleNotFoundError, match=r"tuner\.runtime\.engines\.vllm\.versions"):
        importlib.import_module(former)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        tuner.tune  # noqa: B018
