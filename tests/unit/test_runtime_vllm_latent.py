"""vLLM's seam of latent attention: what its layers are given, with stand-ins for its classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from noted_kernels import find_kernels

from tuner.families.mla_decode import ARGUMENTS, MlaDecode

torch = pytest.importorskip("torch", reason="torch is not installed")
MODULE = "vllm.v1.attention.backends.mla.triton_mla"
OWN = "tuner.runtime.engines.vllm.latent"
HEADS, SIZE = 16, 64


class Impl:
    def __init__(self, **facts: Any) -> None:
        known: dict[str, Any] = {
            "num_heads": HEADS,
            "head_size": 576,
            "kv_lora_rank": 512,
            "scale": 0.1,
        }
        vars(self).update(known | {"kv_cache_dtype": "auto"} | facts)

    def forward_mqa(self, q: Any, *args: Any) -> Any:
        return "vLLM's own", tuple(q.shape)


class Builder:
    def __init__(self, layers: dict[str, Any]) -> None:
        self.layer_names = list(layers)
        compilation = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return common


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in's module over stand-ins."""
    names = MODULE.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kinds = {"TritonMLABackend": object, "TritonMLAImpl": Impl, "TritonMLAMetadataBuilder": Builder}
    vars(sys.modules[MODULE]).update(kinds)
    sys.modules.pop(OWN, None)
    yield importlib.import_module(OWN)
    sys.modules.pop(OWN, None)


def metadata(lengths: tuple[int, ...], queries: int = 1, causal: bool = True) -> Any:
    decode = SimpleNamespace(
        block_table=torch.zeros(len(lengths), 8).int(), seq_lens=torch.tensor(lengths).int()
    )
    tokens = queries * len(lengths)
    facts = {"num_prefills": 0, "max_query_len": queries, "causal": causal}
    return SimpleNamespace(decode=decode, num_decode_tokens=tokens, **facts)


def tensors(tokens: int) -> tuple[Any, Any]:
    parts = (torch.zeros(tokens, HEADS, width).bfloat16() for width in (512, 64))
    return tuple(parts), torch.zeros(9, SIZE, 576).bfloat16()


def test_a_layer_launches_a_kernel_over_its_rows(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())
    query, cache = tensors(3)
    step = metadata((5, 100, 1))
    out, lse = latent.TunerLatentImpl().forward_mqa(query, cache, step, None)
    assert (out.shape, lse.shape, lse.dtype) == ((3, HEADS, 512), (3, HEADS), torch.float32)
    [(addresses, integers, scalars)] = served.launched
    at = dict(zip(ARGUMENTS.tensors, addresses, strict=True))
    n = dict(zip(ARGUMENTS.integers, integers, strict=True))
    assert (at["out"], at["lse"], at["cache"]) == tuple(t.data_ptr() for t in (out, lse, cache))
    assert (at["lengths"], at["block_table"]) == (
        step.decode.seq_lens.data_ptr(),
        step.decode.block_table.data_ptr(),
    )
    assert (n["queries"], n["query_batch"], n["lse_batch"]) == (1, HEADS * 576, HEADS)
    assert scalars == (0.1,) and not on_cpu.counters.stats().fallbacks


@pytest.mark.parametrize(
    "facts", [{"kv_cache_dtype": "fp8_ds_mla"}, {"head_size": 320, "kv_lora_rank": 256}]
)
def test_other_caches_are_vllm_s(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    served = find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())
    query, cache = tensors(2)
    found = latent.TunerLatentImpl(**facts).forward_mqa(query, cache, metadata((1, 2)), None)
    assert found == ("vLLM's own", (2, HEADS, 576))
    assert not served.launched and sum(on_cpu.counters.stats().fallbacks.values()) == 1


def test_a_layer_reads_rows_of_e4m3_with_its_factor(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())
    (nope, rope), _ = tensors(3)
    cache, step = torch.zeros(9, SIZE, 576, dtype=torch.uint8), metadata((5, 100, 1))
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), kv_cache=cache)
    own = latent.TunerLatentImpl(kv_cache_dtype="fp8")
    own.load(layer, step)
    out, _ = own.forward_mqa((nope, rope), cache, step, layer)
    assert (out.shape, out.dtype) == ((3, HEADS, 512), torch.bfloat16)
    [(addresses, _, _)] = served.launched
    assert (addresses[1], addresses[6]) == (cache.data_ptr(), layer._k_scale.data_ptr())
    assert {problem.cache for _, problem in served.posed} == {"e4m3"}
    assert own.forward_mqa((nope.half(), rope.half()), cache, step, layer)[0] == "vLLM's own"
    assert sum(on_cpu.counters.stats().fallbacks.values()) == 1


def test_drafts_are_queries_of_their_sequences(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())
    query, cache = tensors(6)
    step, own = metadata((50, 9), queries=3), latent.TunerLatentImpl()
    own.load(SimpleNamespace(kv_cache=cache), step)
    out, lse = own.forward_mqa(query, cache, step, None)
    assert (out.shape, lse.shape) == ((6, HEADS, 512), (6, HEADS))
    [(_, integers, _)] = served.launched
    n = dict(zip(ARGUMENTS.integers, integers, strict=True))
    assert (n["batch"], n["queries"], n["query_row"]) == (2, 3, HEADS * 576)
    assert {problem.is_causal for _, problem in served.posed} == {True}
    uneven = metadata((50, 9), queries=5)  # five queries and one
    for others in (metadata((50, 9), 3, causal=False), metadata((1, 2, 3, 4)), uneven):
        assert own.forward_mqa(query, cache, others, None)[0] == "vLLM's own"
    assert len(served.launched) == 1


def test_a_step_without_a_kernel_is_vllm_s(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_kernels(on_cpu, monkeypatch, lambda problem: None)
    query, cache = tensors(2)
    found = latent.TunerLatentImpl().forward_mqa(query, cache, metadata((1, 2)), None)
    assert found[0] == "vLLM's own"


def test_kernels_are_found_before_a_capture(
    latent: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find_kernels(on_cpu, monkeypatch, lambda problem: MlaDecode())
    _, cache = tensors(2)
    layers = {
        "own": SimpleNamespace(impl=latent.TunerLatentImpl(), kv_cache=cache),
        "other": SimpleNamespace(impl=Impl(), kv_cache=cache),
    }
    step = metadata((1, 2))
    assert latent.TunerLatentMetadataBuilder(layers).build_for_cudagraph_capture(step) is step
    [(_, problem)] = served.posed
    assert problem.batch == 2 and problem.heads_q == HEADS and not served.launched


def test_the_setting_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, str] = {}
    registry = SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(TRITON_MLA="triton"),
        register_backend=lambda backend, path: registered.update({backend: path}),
    )
    plugin = importlib.import_module("tuner.runtime.engines.vllm")
    monkeypatch.setattr(plugin.importlib, "import_module", lambda name: registry)
    plugin._register_latent()
    assert registered == {"triton": plugin.LATENT_BACKEND} and OWN in plugin.LATENT_BACKEND
