"""`moe`: a layer of experts by PyTorch's operations, by a stand-in of the kernel, and refusals."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

from expert_rows_fake import FakeProducts, FakeRows  # noqa: E402

SIZES = (13, 3, 5, 32, 24)
"""Tokens, top k, experts, hidden, inner."""


@pytest.fixture
def moe(runtime: SimpleNamespace) -> Any:
    return importlib.import_module("tuner.runtime.products.experts").moe


def inputs(sizes: tuple[int, ...] = SIZES, dtype: Any = torch.float64) -> list[Any]:
    tokens, top_k, count, hidden, inner = sizes
    torch.manual_seed(0)
    return [
        torch.randn(tokens, hidden).to(dtype),
        torch.randint(0, count, (tokens, top_k)),
        torch.rand(tokens, top_k).to(dtype),
        torch.randn(count, 2 * inner, hidden).mul(hidden**-0.5).to(dtype),
        torch.randn(count, hidden, inner).mul(inner**-0.5).to(dtype),
    ]


def wanted(hidden: Any, experts: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """One token and one expert after another."""
    rows = []
    for x, chosen, by in zip(hidden, experts.tolist(), weights, strict=True):
        total = torch.zeros_like(x)
        for expert, weight in zip(chosen, by, strict=True):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ x).chunk(2)
                total = total + weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(hidden)


CHOICES = {
    "drawn": lambda experts: experts,
    "one expert has all": lambda experts: torch.full_like(experts, 3),
    "the last is empty": lambda experts: experts % 4,
    "the first is empty": lambda experts: experts % 4 + 1,
    "twice the same": lambda experts: experts[:, :1].expand_as(experts),
    "of other ranks": lambda experts: experts * 2 - 2,
    "none is here": lambda experts: experts + 5,
    "int32": lambda experts: experts.int(),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_pytorch_answers_with_gradients(runtime: SimpleNamespace, moe: Any, choice: str) -> None:
    tensors = inputs()
    tensors[1] = CHOICES[choice](tensors[1])
    floats = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    out, expected = moe(*tensors), wanted(*tensors)
    torch.testing.assert_close(out, expected)
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 1}
    if choice != "none is here":
        found, known = (torch.autograd.grad(x.square().sum(), floats) for x in (out, expected))
        for one, other in zip(found, known, strict=True):
            torch.testing.assert_close(one, other)


def test_without_tokens_there_is_nothing(moe: Any) -> None:
    assert moe(*inputs((0, 3, 5, 32, 24))).shape == (0, 32)
    assert not moe(*inputs((4, 0, 5, 32, 24))).any()


def test_tensors_may_lie_in_any_way(moe: Any) -> None:
    tensors = inputs()
    expected = moe(*tensors)
    across = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
    assert not any(t.is_contiguous() for t in across)
    torch.testing.assert_close(moe(*across), expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: lambda t: t[0]}, r"are not a layer of experts \(allowed: \(T, H\), twice"),
        ({1: lambda t: t[:5]}, "are not a layer"),
        ({1: lambda t: t[0], 2: lambda t: t[0]}, "are not a layer"),
        ({2: lambda t: t[:, :2]}, "are not a layer"),
        ({3: lambda t: t[:, :20]}, "are not a layer"),
        ({4: lambda t: t[:4]}, "are not a layer"),
        ({3: lambda t: t[:0], 4: lambda t: t[:0]}, "G > 0"),
        ({1: lambda t: t.double()}, r"float64 and torch.float64 \(allowed: int32 or int64, float"),
        ({2: lambda t: t.int()}, "int64 and torch.int32"),
        ({0: lambda t: t.float()}, "float32, float64, float64 .allowed: one floating type"),
        ({4: lambda t: t.float()}, "float64, float64, float32"),
        ({4: lambda t: t.to(torch.float8_e4m3fn)}, "float64, float64, float8_e4m3fn"),
    ],
)
def test_what_is_no_layer(moe: Any, change: Any, reason: str) -> None:
    tensors = inputs()
    for position, changed in change.items():
        tensors[position] = changed(tensors[position])
    with pytest.raises(ConfigError, match=reason):
        moe(*tensors)


def test_sizes_are_known_ones(moe: Any) -> None:
    with pytest.raises(ConfigError, match=r"sizes=odd is not known \(allowed: uniform, zipf"):
        moe(*inputs(), sizes="odd")


def quantised(sizes: tuple[int, ...]) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """A layer of e4m3, its scales, and the layer that it stands for."""
    from tuner.runtime.products.block_scaled import dequantised_all

    tensors = inputs(sizes, torch.bfloat16)
    _, _, count, hidden, inner = sizes
    scales = {
        "gate_up_scale": torch.rand(count, -(-2 * inner // 128), -(-hidden // 128)) + 0.5,
        "down_scale": torch.rand(count, -(-hidden // 128), -(-inner // 128)) + 0.5,
    }
    small = [t.to(torch.float8_e4m3fn) for t in tensors[3:]]
    wide = [dequantised_all(*one) for one in zip(small, scales.values(), strict=True)]
    return [*tensors[:3], *small], scales, [*tensors[:3], *wide]


@pytest.mark.parametrize("sizes", [(7, 2, 3, 256, 128), (5, 2, 3, 144, 80)], ids=str)
def test_e4m3_weights_are_dequantised_by_pytorch(moe: Any, sizes: tuple[int, ...]) -> None:
    tensors, scales, wide = quantised(sizes)
    assert torch.equal(moe(*tensors, **scales), moe(*wide))
    for name in scales:
        with pytest.raises(ConfigError, match=rf"^{name} is missing \(allowed: torch.float32 \(3,"):
            moe(*tensors, **{other: s for other, s in scales.items() if other != name})
        cut = {**scales, name: scales[name][:, :, :0]}
        with pytest.raises(ConfigError, match=rf"^{name} is torch.float32 \(3, ., 0\)"):
            moe(*tensors, **cut)


@pytest.fixture
def kernel(on_cpu: SimpleNamespace, undecided: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runtime where the kernel of rows is built; `rows.kernel` is what is loaded."""
    from tuner.runtime.call import sourced
    from tuner.runtime.products import expert_rows

    made = SimpleNamespace(runtime=on_cpu, kernel=FakeRows())
    monkeypatch.setattr(expert_rows.kernels, "source", SimpleNamespace(find=lambda cache: "there"))
    monkeypatch.setattr(sourced, "load", lambda artifact: made.kernel)
    expert_rows.kernels.forget()
    yield made
    expert_rows.kernels.forget()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_kernel_moves_the_rows(kernel: Any, moe: Any, choice: str) -> None:
    tensors = inputs(dtype=torch.bfloat16)
    tensors[1] = CHOICES[choice](tensors[1])
    out = moe(*tensors)
    stages = [integers[0] for integers in kernel.kernel.launches]
    assert stages[-4:] == [0, 1, 2, 3] and len(stages) == 10, "six prove it"
    exact = wanted(*(t.double() if t.is_floating_point() else t for t in tensors))
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
    # Both products are the runtime's, which has no kernel for them here.
    assert set(kernel.runtime.counters.stats().fallbacks.values()) == {2}
    moe(*tensors)
    assert len(kernel.kernel.launches) == 14


@pytest.fixture
def tiled(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`kernel`, whose `products` multiply few rows; their proof has few as well."""
    from tuner.runtime.call import sourced
    from tuner.runtime.products import expert_products

    kernel.products = FakeProducts()
    kernels = expert_products.kernels
    monkeypatch.setattr(kernels, "source", SimpleNamespace(find=lambda cache: kernels))
    monkeypatch.setattr(expert_products, "_PROVEN", (30, 5, 3, 40, 24))
    monkeypatch.setattr(
        sourced, "load", lambda artifact: kernel.products if artifact is kernels else kernel.kernel
    )
    kernels.forget()
    yield kernel
    kernels.forget()


@pytest.mark.parametrize("choice", CHOICES)
def test_products_of_few_rows_are_one_kernel_s(
    tiled: Any, moe: Any, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(dtype=torch.bfloat16)
    tensors[0] = torch.cat([tensors[0], tensors[0]], 1)[:, : tensors[0].shape[1]]
    tensors[1] = CHOICES[choice](tensors[1])
    out = moe(*tensors)
    exact = wanted(*(t.double() if t.is_floating_point() else t for t in tensors))
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
    stages = [call["stage"] for call in tiled.products.launches]
    assert stages[-3:] == [0, 2, 3] and len(stages) == 3 + 27, "nine by three prove it"
    assert [integers[0] for integers in tiled.kernel.launches][6:] == [3]
    assert tiled.runtime.counters.stats().hits == 2
    monkeypatch.setattr("tuner.runtime.products.expert_products.PLACED", 8)
    assert torch.equal(moe(*tensors), out)
    assert [call["stage"] for call in tiled.products.launches[len(stages) :]] == [1, 2, 3]
    assert [integers[0] for integers in tiled.kernel.launches][7:] == [0, 3]


def test_a_call_of_many_rows_loads_the_kernel_too(
    tiled: Any, moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.runtime.products.expert_products.TILES", {1: 16})
    monkeypatch.setattr("tuner.runtime.products.expert_products.SMALL", 0)
    moe(*inputs(dtype=torch.bfloat16))
    proof = len(tiled.products.launches)
    assert proof == 9 and tiled.runtime.counters.stats().hits == 0


def test_rows_of_a_tile_follow_from_the_mean_of_an_expert() -> None:
    from tuner.runtime.products.expert_products import tile_rows

    means = (1, 2, 11, 25, 35, 48, 61, 160, 161)
    wanted = {
        1 << 20: [16, 16, 32, 32, 64, 64, 0, 0, 0],
        2 << 20: [16, 0, 0, 32, 64, 64, 0, 0, 0],
        1 << 18: [16, 16, 32, 32, 64, 64, 64, 64, 0],
    }
    for size, rows in wanted.items():
        assert [tile_rows(8 * mean, 8, size) for mean in means] == rows
    assert tile_rows(3, 8, 2 << 20) == 16  # one row of each of three


@pytest.mark.parametrize("stage", (2, 3))
def test_products_with_other_results_are_not_served(
    tiled: Any, moe: Any, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    tiled.products = FakeProducts(stage)
    tensors = inputs(dtype=torch.bfloat16)
    exact = wanted(*(t.double() if t.is_floating_point() else t for t in tensors))
    torch.testing.assert_close(moe(*tensors).double(), exact, rtol=3e-2, atol=3e-2)
    assert caplog.text.count("its results are not theirs") == 1
    assert tiled.runtime.counters.stats().hits == 0


def test_in_the_mode_the_same_kernels_multiply_few_rows_and_many(tiled: Any, moe: Any) -> None:
    from tuner.errors import NotInvariantError
    from tuner.runtime.call import invariance

    with invariance.deterministic("batch"), pytest.raises(NotInvariantError):
        moe(*inputs(dtype=torch.bfloat16))  # grouped products have no kernel here
    assert not tiled.products.launches


def test_rows_are_quantised_on_their_way(
    kernel: Any, moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runtime.products import grouped

    products = []

    def grouped_mm(a: Any, b: Any, offsets: Any, **options: Any) -> Any:
        factors = options["scale_a"]
        products.append((a.dtype, None if factors is None else factors.stride(), options["sizes"]))
        return known(a, b, offsets, **options)

    known, found = grouped.grouped_mm, []
    monkeypatch.setattr(grouped, "grouped_mm", grouped_mm)
    serving = SimpleNamespace(find=found.append)
    experts = importlib.import_module("tuner.runtime.products.experts")
    monkeypatch.setattr(experts, "serving", serving)
    tensors, scales, wide = quantised((7, 2, 3, 256, 128))
    torch.testing.assert_close(
        moe(*tensors, **scales, sizes="uniform"), moe(*wide), rtol=0.1, atol=0.3
    )
    assert products[:2] == [(torch.float8_e4m3fn, (1, 16), "uniform")] * 2
    sizes = [(tuple(one.a.shape), one.b.shape[1], one.sizes) for one in found]
    assert sizes == [((14, 256), 256, "uniform"), ((14, 128), 256, "uniform")]


def test_gated_activations_are_quantised_in_one_launch(kernel: Any) -> None:
    import tuner
    from tuner.runtime.products import block_scaled, expert_rows

    torch.manual_seed(0)
    rows = torch.randn(5, 2 * 136).bfloat16()
    wanted = block_scaled.composed(expert_rows.ComposedRows().gate(rows, rows))
    proof = 6  # launches that prove the kernel
    for launches, given in ((proof + 1, rows), (proof + 2, rows), (proof + 2, rows[:, ::2])):
        elements, factors = tuner.quantise(given, gated=True)
        assert len(kernel.kernel.launches) == launches
        assert elements.dtype == torch.float8_e4m3fn and factors.stride(0) == 1
        if given is rows:
            assert torch.equal(elements.view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(factors, wanted[1])
    plain, wanted = tuner.quantise(rows), block_scaled.composed(rows)
    assert torch.equal(plain[0].view(torch.uint8), wanted[0].view(torch.uint8))
    for wrong in (rows.float(), rows[0], rows[:, :271]):
        with pytest.raises(ConfigError, match=r"rows are .* \(allowed: bf16"):
            tuner.quantise(wrong, gated=True)


def test_without_a_kernel_for_e4m3_rows_are_not_quantised(kernel: Any, moe: Any) -> None:
    tensors, scales, wide = quantised((7, 2, 3, 256, 128))
    from tuner.runtime.products.experts import Layer, _composed

    expected = _composed(Layer(*wide, None, None, "zipf"))
    assert torch.equal(moe(*tensors, **scales), expected)
    assert not kernel.kernel.launches
    fallbacks = kernel.runtime.counters.stats().fallbacks
    assert fallbacks == {kernel.runtime.refusal.Kind.UNSERVED: 1}


@pytest.mark.parametrize("stage", range(4))
def test_a_kernel_with_other_results_is_not_served(
    kernel: Any, moe: Any, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.kernel = FakeRows(stage)
    tensors = inputs(dtype=torch.bfloat16)
    for _ in range(2):
        out = moe(*tensors)
    exact = wanted(*(t.double() if t.is_floating_point() else t for t in tensors))
    torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
    assert caplog.text.count("its results are not theirs") == 1
    fallbacks = kernel.runtime.counters.stats().fallbacks
    assert fallbacks == {kernel.runtime.refusal.Kind.EXPERT_ROWS: 2}


REFUSED: dict[str, tuple[dict[int, Any], str]] = {
    "gradient": ({0: lambda t: t.requires_grad_()}, "a gradient is wanted"),
    "gradient of the weights": ({2: lambda t: t.requires_grad_()}, "a gradient is wanted"),
    "fp32": (dict.fromkeys((0, 3, 4), lambda t: t.float()), "no kernel takes such tensors"),
    "columns": ({0: lambda t: t[:, ::2], 3: lambda t: t[..., ::2]}, "takes such tensors"),
    "weights": ({4: lambda t: t.mT.contiguous().mT}, "the tensors are not contiguous"),
    "rows": ({0: lambda t: t.t().contiguous().t()}, "the tensors are not contiguous"),
    "no tokens": (dict.fromkeys((0, 1, 2), lambda t: t[:0]), "no kernel takes such tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_cannot_take_is_pytorch_s(kernel: Any, moe: Any, name: str) -> None:
    change, reason = REFUSED[name]
    tensors = inputs(dtype=torch.bfloat16)
    for position, changed in change.items():
        tensors[position] = changed(tensors[position])
    if name == "columns":
        tensors[0], tensors[3] = tensors[0][:, :12], tensors[3][:, :, :12].contiguous()
        tensors[4] = tensors[4][:, :12].contiguous()
    moe(*tensors)
    [said] = kernel.runtime.counters.stats().fallbacks
    assert reason in said and not kernel.kernel.launches


def test_it_can_be_switched_off(kernel: Any, moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_DISABLE", "1")
    moe(*inputs(dtype=torch.bfloat16))
    assert kernel.runtime.counters.stats().fallbacks == {"switched off": 1}


def test_experts_of_e4m3_are_served_again_once_the_variable_is_gone(
    kernel: Any, moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products are looked up before any call of the runtime checks the variable."""
    plans, counters = kernel.runtime.table.table, kernel.runtime.counters
    tensors, scales, _ = quantised((7, 2, 3, 256, 128))
    monkeypatch.setenv("TUNER_DISABLE", "1")
    plans.refresh(tensors[0])
    monkeypatch.delenv("TUNER_DISABLE")
    plans._look_at = 0.0
    moe(*tensors, **scales)
    assert counters.stats().fallbacks == {kernel.runtime.refusal.Kind.UNSERVED: 1}


def test_too_many_experts_are_pytorch_s(kernel: Any, moe: Any) -> None:
    for sizes in ((2, 2, 513, 8, 8), (2, 33, 3, 8, 8)):
        moe(*inputs(sizes, torch.bfloat16))
    assert kernel.runtime.counters.stats().fallbacks == {"no kernel takes such tensors": 2}


def test_a_first_call_within_a_capture_is_pytorch_s(
    kernel: Any, moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernel.runtime.devices, "is_capturing", lambda: True)
        moe(*inputs(dtype=torch.bfloat16))
    assert not kernel.kernel.launches
    moe(*inputs(dtype=torch.bfloat16))
    assert kernel.kernel.launches


def test_a_graph_of_torch_compile_is_pytorch_s(runtime: SimpleNamespace, moe: Any) -> None:
    tensors = inputs()
    compiled = torch.compile(moe, backend="eager", fullgraph=False)
    torch.testing.assert_close(compiled(*tensors), wanted(*tensors))
    assert runtime.counters.stats().calls == 0


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_transformers_experts(runtime: SimpleNamespace, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tuner.runtime.engines.transformers  # noqa: F401

    torch.manual_seed(0)
    values = {
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_local_experts": 4, "num_experts": 6, "moe_intermediate_size": 24},
        "num_experts_per_tok": 2,
    }
    if name == "DeepseekV3":
        del values["head_dim"]
        values |= {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
        values |= {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
        values |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(0, 61, (2, 9))
    found, grads = {}, {}
    for way in ("eager", "tuner"):
        model.set_experts_implementation(way)
        found[way] = model(ids).logits
        grads[way] = torch.autograd.grad(found[way].square().sum(), list(model.parameters()))
    torch.testing.assert_close(found["tuner"], found["eager"])
    for one, other in zip(grads["tuner"], grads["eager"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 2}


def test_transformers_own_function_answers_for_other_experts(runtime: SimpleNamespace) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tuner.runtime.engines.transformers  # noqa: F401

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2
    )
    module = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden, experts, by = torch.randn(7, 32), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    found = {}
    for way in ("grouped_mm", "tuner"):
        config._experts_implementation = way
        found[way] = module(hidden, experts, by)
    torch.testing.assert_close(found["tuner"], found["grouped_mm"])
    assert runtime.counters.stats().fallbacks == {runtime.refusal.Kind.EXPERTS: 1}


def test_transformers_experts_with_biases_and_a_gate_of_their_own(kernel: Any) -> None:
    """GPT-OSS: turned once, then by the kernel of rows and grouped products."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tuner.runtime.engines.transformers_experts import turn_experts_

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2
    )
    module = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    tensors = torch.randn(7, 32).bfloat16(), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    found = {}
    with torch.no_grad():
        config._experts_implementation = "tuner"
        module(*tensors)
        assert not kernel.kernel.launches
        assert turn_experts_(module) == 2 and turn_experts_(module) == 0
        for name, one in module.named_parameters():
            assert torch.equal(one, before[name]) and one.shape == before[name].shape
        for way in ("eager", "tuner"):
            config._experts_implementation = way
            found[way] = module(*tensors).float()
    assert kernel.kernel.launches
    error = (found["tuner"] - found["eager"]).norm() / found["eager"].norm()
    assert error < 2e-2


def test_transformers_experts_of_fine_grained_fp8(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import use_experts_implementation

    from tuner.runtime.engines import transformers_experts

    layers: list[Any] = []
    monkeypatch.setattr(transformers_experts, "answer", layers.append)
    functions = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    monkeypatch.setitem(functions._local_mapping, "grouped_mm", lambda module, *tensors: tensors)
    kind = use_experts_implementation(
        experts_class=finegrained_fp8.FP8Experts,
        experts_interface=functions,
    )
    config = SimpleNamespace(
        hidden_size=256, moe_intermediate_size=128, num_experts=3, hidden_act="silu",
        _experts_implementation="tuner",
    )  # fmt: skip
    tensors = inputs((7, 2, 3, 256, 128), torch.bfloat16)[:3]
    module = kind(config, block_size=(128, 128))
    assert module(*tensors) == tuple(tensors), "Transformers' own, where there is no kernel"
    [layer] = layers
    assert all(one is other for one, other in zip(layer, tensors, strict=False))
    names = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
    assert all(one is getattr(module, n) for one, n in zip(layer[3:], names, strict=False))
    importlib.import_module("tuner.runtime.products.experts")._check(layer)
    monkeypatch.setattr(transformers_experts, "answer", lambda layer: layer.hidden)
    assert module(*tensors) is tensors[0]
    module.block_size = (64, 128)
    assert module(*tensors) == tuple(tensors)
    assert runtime.counters.stats().fallbacks == {runtime.refusal.Kind.EXPERTS: 1}
