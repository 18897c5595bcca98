"""SGLang's quantisation ``tuner``: which layers it takes over, and which calls it leaves to SGLang.

SGLang's own classes are stand-ins here; `test_sglang_versions.py` has the real ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

SRT = "sglang.srt"
LAYERS = f"{SRT}.layers"
T, H, INNER, G, TOP_K = 3, 256, 128, 4, 2


class Linear(torch.nn.Module):
    pass


class Experts(torch.nn.Module):
    use_triton_kernels = use_flashinfer_trtllm_moe = use_deep_gemm = False


class LinearMethod:
    def apply(self, layer: Any, x: Any, bias: Any = None) -> str:
        return "SGLang's product"


class ExpertsMethod:
    w13_swiglu_interleaved = False

    def __init__(self, *flags: Any) -> None:
        self.moe_runner_config = SimpleNamespace(
            activation="silu",
            is_gated=True,
            routed_scaling_factor=None,
            **dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")),
            apply_router_weight_on_input=False,
            no_combine=False,
            no_combine_keep_router_weight=False,
        )
        self.runner = "TRITON"

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return SimpleNamespace(name=self.runner)

    def apply(self, layer: Any, dispatch_output: Any) -> str:
        return "SGLang's experts"


class Fp8LinearMethod(LinearMethod):
    use_marlin = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.is_processed = True


class Fp8MoEMethod(ExpertsMethod):
    pass


class Fp8Config:
    use_mxfp8 = False

    def __init__(self, block: Any) -> None:
        self.weight_block_size = block

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        return cls(config.get("weight_block_size"))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if prefix == "ignored":
            return LinearMethod() if isinstance(layer, Linear) else ExpertsMethod()
        return Fp8LinearMethod(self) if isinstance(layer, Linear) else Fp8MoEMethod(self)


def shared() -> Any:
    """The module of products for both engines."""
    return importlib.import_module("tuner.runtime.engines.products")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module under test, over stand-ins; `forward` is SGLang's state of a forward pass."""
    forward = SimpleNamespace(moe_output_buffer=None)
    given: dict[str, dict[str, Any]] = {
        "sglang": {},
        SRT: {},
        LAYERS: {},
        f"{LAYERS}.linear": {"LinearBase": Linear},
        f"{LAYERS}.moe": {},
        f"{LAYERS}.moe.fused_moe_triton": {"FusedMoE": Experts},
        f"{LAYERS}.moe.token_dispatcher": {"StandardCombineInput": SimpleNamespace},
        f"{LAYERS}.quantization": {},
        f"{LAYERS}.quantization.base_config": {"QuantizationConfig": object},
        f"{LAYERS}.quantization.fp8": {
            "Fp8Config": Fp8Config,
            "Fp8LinearMethod": Fp8LinearMethod,
            "Fp8MoEMethod": Fp8MoEMethod,
        },
        f"{LAYERS}.quantization.unquant": {
            "UnquantizedFusedMoEMethod": ExpertsMethod,
            "UnquantizedLinearMethod": LinearMethod,
        },
        f"{SRT}.runtime_context": {"get_forward": lambda: forward},
    }
    for name, values in given.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    names = [f"tuner.runtime.engines.sglang.{name}" for name in ("quantization", "products")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(names[1])
    vars(module)["forward"] = forward
    yield module
    for name in names:
        sys.modules.pop(name, None)


def config() -> Any:
    return importlib.import_module("tuner.runtime.engines.sglang.quantization").SglangConfig


def experts(**changes: Any) -> Any:
    layer = Experts()
    layer.w13_weight = torch.zeros(G, 2 * INNER, H, dtype=torch.bfloat16)
    layer.w2_weight = torch.zeros(G, H, INNER, dtype=torch.bfloat16)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def dispatched(**changes: Any) -> SimpleNamespace:
    is_standard = SimpleNamespace(is_standard=lambda: True)
    topk = SimpleNamespace(
        topk_weights=torch.ones(T, TOP_K),
        topk_ids=torch.zeros(T, TOP_K, dtype=torch.int32),
        format=is_standard,
    )
    plain = {"hidden_states": torch.zeros(T, H).bfloat16(), "topk_output": topk}
    return SimpleNamespace(**{**plain, "format": is_standard, **changes})


@pytest.mark.parametrize(
    ("checkpoint", "chosen", "wanted"),
    [("fp8", "tuner", "tuner"), ("fp8", None, None), ("awq", "tuner", None), (None, "tuner", None)],
)
def test_an_fp8_checkpoint_is_its_own_where_a_user_chose_it(
    products: Any, checkpoint: str | None, chosen: str | None, wanted: str | None
) -> None:
    of_checkpoint = None if checkpoint is None else {"quant_method": checkpoint}
    assert config().override_quantization_method(of_checkpoint, chosen) == wanted


def test_methods_by_layer(products: Any) -> None:
    plain = config()()
    blocks = config().from_config({"weight_block_size": [128, 128]})
    rows = config().from_config({})
    wanted = {
        (plain, Linear, ""): products.SglangLinearMethod,
        (plain, Experts, ""): products.SglangExpertsMethod,
        (plain, torch.nn.Module, ""): type(None),
        (blocks, Linear, ""): products.SglangFp8LinearMethod,
        (blocks, Experts, ""): products.SglangFp8ExpertsMethod,
        (blocks, Linear, "ignored"): products.SglangLinearMethod,
        (blocks, Experts, "ignored"): products.SglangExpertsMethod,
        (rows, Linear, ""): Fp8LinearMethod,
        (rows, Experts, ""): Fp8MoEMethod,
    }
    for (of_model, kind, prefix), method in wanted.items():
        assert type(of_model.get_quant_method(kind(), prefix)) is method, (kind, prefix)
    blocks.use_mxfp8 = True
    assert type(blocks.get_quant_method(Linear(), "")) is Fp8LinearMethod


@pytest.mark.parametrize(
    ("of_config", "of_layer", "of_rows"),
    [
        ({"activation": "gelu"}, {}, {}),
        ({"is_gated": False}, {}, {}),
        ({"swiglu_limit": 7.0}, {}, {}),
        ({"apply_router_weight_on_input": True}, {}, {}),
        ({"no_combine": True}, {}, {}),
        ({"routed_scaling_factor": 2.5}, {}, {}),
        ({}, {"w13_weight_bias": torch.ones(1)}, {}),
        ({}, {}, {"format": SimpleNamespace(is_standard=lambda: False)}),
    ],
)
def test_other_experts_are_sglang_s(
    products: Any,
    on_cpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_config: dict[str, Any],
    of_layer: dict[str, Any],
    of_rows: dict[str, Any],
) -> None:
    monkeypatch.setattr(shared(), "answer", lambda call: pytest.fail("asked"))
    method = products.SglangExpertsMethod()
    vars(method.moe_runner_config).update(of_config)
    assert method.apply(experts(**of_layer), dispatched(**of_rows)) == "SGLang's experts"
    assert on_cpu.counters.stats().fallbacks == {"such experts are not tuned": 1}


def test_experts_of_another_runner_or_output_are_sglang_s(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared(), "answer", lambda call: pytest.fail("asked"))
    method = products.SglangExpertsMethod()
    method.runner = "DEEP_GEMM"
    assert method.apply(experts(), dispatched()) == "SGLang's experts"
    method = products.SglangExpertsMethod()
    method.w13_swiglu_interleaved = True
    assert method.apply(experts(), dispatched()) == "SGLang's experts"
    products.forward.moe_output_buffer = torch.zeros(1)
    method = products.SglangExpertsMethod()
    assert method.apply(experts(), dispatched()) == "SGLang's experts"


def test_experts_are_asked_for_with_the_layers_tensors(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    out = torch.ones(T, H)

    def answer(call: Any) -> Any:
        seen.append(call)
        return out

    monkeypatch.setattr(shared(), "answer", answer)
    layer, rows = experts(), dispatched()
    found = products.SglangExpertsMethod().apply(layer, rows)
    assert found.hidden_states is out
    scales = {
        "w13_weight_scale_inv": torch.ones(G, 2, 2),
        "w2_weight_scale_inv": torch.ones(G, 2, 1),
    }
    scaled = experts(**scales)
    assert products.SglangFp8ExpertsMethod().apply(scaled, rows).hidden_states is out
    plain, e4m3 = seen
    assert plain[:3] == (
        rows.hidden_states,
        rows.topk_output.topk_ids,
        rows.topk_output.topk_weights,
    )
    assert plain[3:7] == (layer.w13_weight, layer.w2_weight, None, None)
    assert e4m3[5:7] == (scaled.w13_weight_scale_inv, scaled.w2_weight_scale_inv)
    monkeypatch.setattr(shared(), "answer", lambda call: None)
    assert products.SglangExpertsMethod().apply(layer, rows) == "SGLang's experts"


def test_scaled_products_need_proven_kernels(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, method = Linear(), products.SglangFp8LinearMethod(None)
    layer.weight = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    layer.weight_scale_inv = torch.ones(2, 3)
    method.process_weights_after_loading(layer)  # no kernel runs on a CPU
    rows = torch.zeros(2, 384)
    assert layer.is_processed and not layer.tuner_serves
    assert method.apply(layer, rows) == "SGLang's product"

    monkeypatch.setattr(shared().serving, "find", lambda call: "a plan")
    monkeypatch.setattr(products, "linear", lambda *args, **named: (args, named))
    method.process_weights_after_loading(layer)
    (_, weight, _), named = method.apply(layer, rows)
    assert weight.data_ptr() == layer.weight.data_ptr()
    assert named["weight_scale"].data_ptr() == layer.weight_scale_inv.data_ptr()
    assert method.apply(layer, (rows, torch.ones(2, 3))) == "SGLang's product"  # quantised before
    with monkeypatch.context() as patch:
        patch.setenv("TUNER_DISABLE", "1")
        assert method.apply(layer, rows) == "SGLang's product"
    method.use_marlin = True
    method.process_weights_after_loading(layer)
    assert not layer.tuner_serves


class Loaded(torch.nn.Parameter):
    """A parameter as the engine's loaders have it, which `tuner.linear` refuses."""


def test_products_in_bf16(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear()
    layer.weight = Loaded(torch.ones(8, 4), requires_grad=False)
    out = products.SglangLinearMethod().apply(layer, torch.ones(2, 4), torch.ones(8))
    assert torch.equal(out, torch.full((2, 8), 5.0))
    monkeypatch.setattr(products, "linear", lambda rows, weight, bias: type(weight))
    assert products.SglangLinearMethod().apply(layer, torch.ones(2, 4)) is torch.Tensor
