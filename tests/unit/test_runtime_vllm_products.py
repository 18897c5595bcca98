"""vLLM's quantisation ``tuner``: which layers it takes over, and which calls it leaves to vLLM.

vLLM's own classes are stand-ins here; `tests/gpu/test_vllm_gpu.py` has the engine.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS = "vllm.model_executor.layers"
T, H, INNER, G, TOP_K = 3, 256, 128, 4, 2


class Linear(torch.nn.Module):
    weight_block_size = None


class Experts(torch.nn.Module):
    pass


class Head(torch.nn.Module):
    pass


class EmbeddingMethod:
    def apply(self, layer: Any, x: Any, bias: Any = None) -> str:
        return "vLLM's logits"


class LinearMethod:
    def apply(self, layer: Any, x: Any, bias: Any = None) -> str:
        return "vLLM's product"


class ExpertsMethod:
    unquantized_backend = SimpleNamespace(name="TRITON")

    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def apply(self, layer: Any, x: Any, *tensors: Any, **named: Any) -> str:
        return "vLLM's experts"


class Fp8LinearMethod(LinearMethod):
    marlin_input_dtype: Any = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.is_processed = True


class Fp8MoEMethod(ExpertsMethod):
    fp8_backend = SimpleNamespace(name="TRITON")

    def __init__(self, config: Any, layer: Any) -> None:
        super().__init__(layer.moe_config)


class Fp8Config:
    def __init__(self, block: Any) -> None:
        self.weight_block_size = block

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        return cls(config.get("weight_block_size"))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, Head):
            return None
        if prefix == "ignored":
            return LinearMethod() if isinstance(layer, Linear) else ExpertsMethod(layer.moe_config)
        return Fp8LinearMethod(self) if isinstance(layer, Linear) else Fp8MoEMethod(self, layer)


def shared() -> Any:
    """The module of products for both engines."""
    return importlib.import_module("tuner.runtime.engines.products")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module under test, over stand-ins."""
    registered: dict[str, Any] = {}

    def register(name: str) -> Any:
        return lambda one: registered.setdefault(name, one)

    given: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        LAYERS: {},
        f"{LAYERS}.fused_moe": {"RoutedExperts": Experts},
        f"{LAYERS}.fused_moe.unquantized_fused_moe_method": {
            "UnquantizedFusedMoEMethod": ExpertsMethod
        },
        f"{LAYERS}.linear": {"LinearBase": Linear, "UnquantizedLinearMethod": LinearMethod},
        f"{LAYERS}.vocab_parallel_embedding": {
            "ParallelLMHead": Head,
            "UnquantizedEmbeddingMethod": EmbeddingMethod,
        },
        f"{LAYERS}.quantization": {"register_quantization_config": register},
        f"{LAYERS}.quantization.base_config": {"QuantizationConfig": object},
        f"{LAYERS}.quantization.fp8": {
            "Fp8Config": Fp8Config,
            "Fp8LinearMethod": Fp8LinearMethod,
            "Fp8MoEMethod": Fp8MoEMethod,
        },
    }
    for name, values in given.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("quantization", "products"):
        monkeypatch.delitem(sys.modules, f"tuner.runtime.engines.vllm.{name}", raising=False)
    found = importlib.import_module("tuner.runtime.engines.vllm.products")
    found.registered = registered
    yield found
    for name in ("quantization", "products"):
        sys.modules.pop(f"tuner.runtime.engines.vllm.{name}", None)


def experts(**changes: Any) -> Any:
    layer = Experts()
    parallel = SimpleNamespace(use_all2all_kernels=changes.pop("all2all", False))
    layer.moe_config = SimpleNamespace(
        has_bias=changes.pop("has_bias", False), moe_parallel_config=parallel
    )
    layer.activation = SimpleNamespace(name=changes.pop("activation", "SILU"))
    layer.apply_router_weight_on_input, layer.expert_map = False, None
    layer.w13_weight = torch.zeros(G, 2 * INNER, H, dtype=torch.bfloat16)
    layer.w2_weight = torch.zeros(G, H, INNER, dtype=torch.bfloat16)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def called(method: Any, layer: Any) -> Any:
    """As vLLM's runner does, by names."""
    return method.apply(
        layer=layer,
        x=torch.zeros(T, H, dtype=torch.bfloat16),
        topk_weights=torch.ones(T, TOP_K),
        topk_ids=torch.tensor([[0, 3], [2, 1], [3, 0]], dtype=torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )


def test_the_plug_in_registers_it(products: Any) -> None:
    package = importlib.import_module("tuner.runtime.engines.vllm")
    package._register_quantization()
    config = products.registered["tuner"]
    assert config().get_name() == "tuner" and config.get_config_filenames() == []


@pytest.mark.parametrize(
    ("checkpoint", "chosen", "wanted"),
    [("fp8", "tuner", "tuner"), ("fp8", None, None), ("gptq", "tuner", None)],
)
def test_it_takes_an_fp8_checkpoint_where_a_user_says_so(
    products: Any, checkpoint: str, chosen: str | None, wanted: str | None
) -> None:
    config = importlib.import_module("tuner.runtime.engines.vllm.quantization").TunerConfig
    found = config.override_quantization_method({"quant_method": checkpoint}, chosen)
    assert found == wanted


def test_methods_by_layer(products: Any) -> None:
    config = importlib.import_module("tuner.runtime.engines.vllm.quantization").TunerConfig
    plain, blocks = config(), config.from_config({"weight_block_size": [128, 128]})
    whole = config.from_config({})
    wanted = {
        (plain, Linear, ""): products.TunerLinearMethod,
        (plain, Experts, ""): products.TunerExpertsMethod,
        (plain, torch.nn.Linear, ""): type(None),
        (blocks, Linear, ""): products.TunerFp8LinearMethod,
        (blocks, Experts, ""): products.TunerFp8ExpertsMethod,
        (blocks, Linear, "ignored"): products.TunerLinearMethod,
        (blocks, Experts, "ignored"): products.TunerExpertsMethod,
        (whole, Linear, ""): Fp8LinearMethod,
        (whole, Experts, ""): Fp8MoEMethod,
    }
    for (chosen, kind, prefix), method in wanted.items():
        layer = experts() if kind is Experts else kind(1, 1) if kind is torch.nn.Linear else kind()
        assert type(chosen.get_quant_method(layer, prefix)) is method
    assert blocks.get_name() == "tuner"


def test_logits_in_the_batch_invariant_mode(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tuner

    config = importlib.import_module("tuner.runtime.engines.vllm.quantization").TunerConfig
    every = config(), config.from_config({"weight_block_size": [128, 128]})
    assert [one.get_quant_method(Head(), "") for one in every] == [None, None]
    with tuner.deterministic("batch"):
        methods = [one.get_quant_method(Head(), "") for one in every]
    monkeypatch.setattr(products, "linear", lambda *tensors: tensors)
    layer, x = Linear(), torch.ones(1, H)
    layer.weight = torch.nn.Parameter(torch.ones(2, H))
    for method in methods:
        assert isinstance(method, EmbeddingMethod)
        ours, weight, bias = method.apply(layer, x)
        assert ours is x and type(weight) is torch.Tensor and bias is None
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert method.apply(layer, x) == "vLLM's logits"
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "GELU"},
        {"has_bias": True},
        {"swiglu_limit": 7.0},
        {"apply_router_weight_on_input": True},
        {"all2all": True},
    ],
    ids=str,
)
def test_other_experts_are_vllms(
    products: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared(), "answer", lambda call: pytest.fail("asked"))
    layer = experts(**changes)
    assert called(products.TunerExpertsMethod(layer.moe_config), layer) == "vLLM's experts"


def test_experts_whose_weights_vllm_shuffles_are_vllms(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared(), "answer", lambda call: pytest.fail("asked"))
    layer = experts()
    method = products.TunerExpertsMethod(layer.moe_config)
    method.unquantized_backend = SimpleNamespace(name="FLASHINFER_CUTLASS")
    assert called(method, layer) == "vLLM's experts"


def test_experts_are_asked_for_with_the_layers_tensors(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(shared(), "answer", lambda call: seen.append(call))
    layer = experts(expert_map=torch.tensor([0, -1, 1, -1], dtype=torch.int32))
    assert called(products.TunerExpertsMethod(layer.moe_config), layer) == "vLLM's experts"
    [call] = seen
    assert call.experts.tolist() == [[0, -1], [1, -1], [-1, 0]]
    assert call.gate_up is layer.w13_weight and call.down is layer.w2_weight
    assert call.gate_up_scale is None

    out = torch.ones(T, H)
    monkeypatch.setattr(shared(), "answer", lambda call: out)
    scales = {
        "w13_weight_scale_inv": torch.ones(G, 2, 2),
        "w2_weight_scale_inv": torch.ones(G, 2, 1),
    }
    layer = experts(**scales)
    assert called(products.TunerFp8ExpertsMethod(None, layer), layer) is out


def test_scaled_products_need_proven_kernels(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, method = Linear(), products.TunerFp8LinearMethod(None)
    layer.weight = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    layer.weight_scale_inv = torch.ones(2, 3)
    method.process_weights_after_loading(layer)  # no kernel runs on a CPU
    assert layer.is_processed and not layer.tuner_serves
    assert method.apply(layer, torch.zeros(2, 384)) == "vLLM's product"

    monkeypatch.setattr(shared().serving, "find", lambda call: "a plan")
    method.process_weights_after_loading(layer)
    assert layer.tuner_serves
    with monkeypatch.context() as patch:
        patch.setenv("TUNER_DISABLE", "1")
        assert method.apply(layer, torch.zeros(2, 384)) == "vLLM's product"
    layer.weight_scale_inv = torch.ones(3, 2)
    method.process_weights_after_loading(layer)
    assert not layer.tuner_serves


def test_layers_loaded_after_the_variable_is_gone_are_looked_up(
    products: Any,
    on_cpu: Any,
    undecided: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer, method, plans = Linear(), products.TunerFp8LinearMethod(None), on_cpu.table.table
    layer.weight = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    layer.weight_scale_inv = torch.ones(2, 3)
    for value, is_off in (("1", True), ("0", False)):
        monkeypatch.setenv("TUNER_DISABLE", value)
        plans._look_at = 0.0
        caplog.clear()
        on_cpu.counters._counts.said.clear()
        method.process_weights_after_loading(layer)
        assert not layer.tuner_serves and ("TUNER_DISABLE" in caplog.text) == is_off


class Loaded(torch.nn.Parameter):
    """A parameter as vLLM's loaders have it, which `tuner.linear` refuses."""


def test_products_have_weights_without_the_loader_s_class(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = importlib.import_module("tuner.runtime.engines.vllm.operator")
    layer, seen = Linear(), []
    layer.weight = Loaded(torch.ones(8, 4), requires_grad=False)
    out = products.TunerLinearMethod().apply(layer, torch.ones(2, 4), torch.ones(8))
    assert torch.equal(out, torch.full((2, 8), 5.0))
    for module in (products, operator):
        monkeypatch.setattr(module, "linear", lambda *args, **named: seen.extend([*args, named]))
    products.TunerLinearMethod().apply(layer, torch.ones(2, 4))
    operator._scaled_linear(torch.ones(2, 4), layer.weight, layer.weight, None)
    weights = seen[1], seen[5], seen[7]["weight_scale"]
    assert [type(weight) for weight in weights] == [torch.Tensor] * 3
    assert {weight.data_ptr() for weight in weights} == {layer.weight.data_ptr()}


def test_the_operator_has_a_shape_without_a_device(products: Any) -> None:
    x = torch.zeros(2, 5, 384, dtype=torch.bfloat16, device="meta")
    weight = torch.zeros(256, 384, device="meta").to(torch.float8_e4m3fn)
    out = torch.ops.tuner_vllm.linear(x, weight, torch.ones(2, 3, device="meta"), None)
    assert tuple(out.shape) == (2, 5, 256) and out.dtype == torch.bfloat16
