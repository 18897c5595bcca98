"""`tuner.moe` on the GPU: its kernel against PyTorch's operations, the layer against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from runtime_gpu import forget, fresh_store, part, served_gpu, store

from tuner.compile.compiler import Compiler
from tuner.compile.single import BLOCK_QUANTISER, EXPERT_PRODUCTS, EXPERT_ROWS
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.grouped_gemm import rule as grouped
from tuner.hardware import Gpu
from tuner.problem import E4M3, DType, GroupedGemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("own_store"),
]

own_store, gpu = fresh_store, served_gpu

TYPES: dict[str, DType] = {"bf16": "bfloat16", "e4m3": E4M3}
TOLERANCE = {"bf16": 6e-3, "e4m3": 1e-2}
#: Tokens, top k, experts, hidden, inner.
LAYER = (77, 3, 9, 512, 256)
SIZES = (LAYER, (1, 8, 64, 1024, 384), (600, 2, 8, 256, 1152), (40, 6, 200, 128, 128))


def chosen(dtype: DType) -> Config:
    """The kernel of the rule whose tiles are for few rows, and for many as well."""
    return list(grouped.KERNELS[dtype])[3 if dtype == E4M3 else 2]


def specs(dtype: DType) -> dict[str, KernelSpec]:
    config = chosen(dtype)
    problem = GroupedGemmProblem(4, 512, 1024, 1024, dtype=dtype)
    return dict(family(config.family).kernels(problem, config))


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    if not torch.cuda.is_available():
        return []
    return [spec for dtype in TYPES.values() for spec in specs(dtype).values()]


@pytest.fixture
def rows(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tuner.runtime.products.expert_rows` with the kernels of the tests' cache."""
    for source in (EXPERT_ROWS, EXPERT_PRODUCTS, BLOCK_QUANTISER):
        source.build(compiler.artifacts)
    monkeypatch.setattr(part("call.sourced"), "ArtifactCache", lambda: compiler.artifacts)
    monkeypatch.setattr(part("products.expert_products"), "tile_rows", lambda *_: 0)
    for module in SOURCED:
        part(module).kernels.forget()
    yield part("products.expert_rows")
    for module in SOURCED:
        part(module).kernels.forget()


def decide(compiler: Compiler, gpu: Gpu, sizes: tuple[int, ...], dtype: DType) -> None:
    """Both products of a layer are an own kernel's."""
    tokens, top_k, count, hidden, inner = sizes
    config = chosen(dtype)
    wanted = specs(dtype)
    built = compiler.submit(list(wanted.values()))
    keys = [future.result().key for _, future in built]
    m = 1 << (tokens * top_k - 1).bit_length()
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        problem = GroupedGemmProblem(count, m, n, k, sizes="zipf", dtype=dtype)
        store(problem, gpu, config, artifacts=dict(zip(wanted, keys, strict=True)))


class Layer:
    """Tensors of a layer, and its result in float64."""

    def __init__(self, sizes: tuple[int, ...], kind: str, seed: int = 0) -> None:
        tokens, top_k, count, hidden, inner = sizes
        torch.manual_seed(seed)
        self.hidden = torch.randn(tokens, hidden, device="cuda").bfloat16()
        self.experts = torch.randint(0, count, (tokens, top_k), device="cuda")
        self.weights = torch.rand(tokens, top_k, device="cuda").bfloat16()
        shapes = (count, 2 * inner, hidden), (count, hidden, inner)
        self.scales: dict[str, Any] = {}
        self.quantises = kind == "e4m3"
        if kind == "bf16":
            self.matrices = [
                torch.randn(s, device="cuda").mul_(s[2] ** -0.5).bfloat16() for s in shapes
            ]
            return
        self.matrices = [
            torch.randn(s, device="cuda").mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            for s in shapes
        ]
        for name, s in zip(("gate_up_scale", "down_scale"), shapes, strict=True):
            blocks = (s[0], -(-s[1] // 128), -(-s[2] // 128))
            drawn = torch.rand(blocks, device="cuda") + 0.5
            self.scales[name] = drawn * (s[2] ** -0.5 / 100)

    def run(self) -> Any:
        import tuner

        inputs = self.hidden, self.experts, self.weights
        return tuner.moe(*inputs, *self.matrices, **self.scales)

    def exact(self) -> Any:
        """Factors applied exactly; e4m3 activations are quantised as the layer does."""
        gate_up, down = self.matrices
        out = torch.zeros_like(self.hidden, dtype=torch.float64)
        scales = list(self.scales.values()) or [None, None]
        x = self._seen(self.hidden)
        for expert in range(len(down)):
            tokens, slots = (self.experts == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            both = x[tokens] @ self._wide(gate_up[expert], scales[0], expert).T
            if self.quantises:  # else a rounding beside an edge of e4m3 is taken for an error
                both = both.bfloat16().double()
            gate, up = both.chunk(2, -1)
            gated = self._seen(torch.nn.functional.silu(gate) * up)
            each = gated @ self._wide(down[expert], scales[1], expert).T
            out.index_add_(0, tokens, each * self.weights[tokens, slots, None].double())
        return out

    def _seen(self, rows: Any) -> Any:
        if not self.quantises:
            return rows.double()
        elements, factors = part("products.block_scaled").composed(rows.bfloat16())
        each = factors.double().repeat_interleave(128, 1)[:, : rows.shape[1]]
        return elements.double() * each

    @staticmethod
    def _wide(weight: Any, scale: Any, expert: int) -> Any:
        if scale is None:
            return weight.double()
        n, k = weight.shape
        each = scale[expert].double().repeat_interleave(128, 0)[:n]
        return weight.double() * each.repeat_interleave(128, 1)[:, :k]


def error(found: Any, wanted: Any) -> float:
    """Relative Frobenius error."""
    return float((found.double() - wanted).norm() / wanted.norm())


SOURCED = "products.expert_rows", "products.expert_products", "products.quantiser"
CHOICES = {
    "drawn": lambda experts, count: experts,
    "int32": lambda experts, count: experts.int(),
    "one expert has all": lambda experts, count: torch.full_like(experts, count - 1),
    "half are empty": lambda experts, count: experts // 2 * 2,
    "twice the same": lambda experts, count: experts[:, :1].expand_as(experts),
    "of other ranks": lambda experts, count: experts * 2 - 2,
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_layer_has_float64_s_result(
    rows: Any, compiler: Compiler, gpu: Gpu, kind: str, choice: str
) -> None:
    import tuner

    decide(compiler, gpu, LAYER, TYPES[kind])
    layer = Layer(LAYER, kind)
    layer.experts = CHOICES[choice](layer.experts, LAYER[2])
    assert error(layer.run(), layer.exact()) < TOLERANCE[kind]
    stats = tuner.stats()
    assert (stats.hits, stats.fallbacks) == (2, {})


@pytest.mark.parametrize("size", (16, 32, 64))
@pytest.mark.parametrize("choice", CHOICES)
def test_tiles_of_experts_rows_have_float64_s_result(
    rows: Any, monkeypatch: pytest.MonkeyPatch, choice: str, size: int
) -> None:
    import tuner

    monkeypatch.setattr(part("products.expert_products"), "tile_rows", lambda *_: size)
    for sizes in (*SIZES, (7, 4, 512, 1024, 520)):
        layer = Layer(sizes, "bf16")
        layer.experts = CHOICES[choice](layer.experts, sizes[2])
        assert error(layer.run(), layer.exact()) < TOLERANCE["bf16"]
    assert (tuner.stats().hits, tuner.stats().fallbacks) == (2 * (len(SIZES) + 1), {})


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_other_layers(
    rows: Any, compiler: Compiler, gpu: Gpu, kind: str, sizes: tuple[int, ...]
) -> None:
    decide(compiler, gpu, sizes, TYPES[kind])
    layer = Layer(sizes, kind)
    assert error(layer.run(), layer.exact()) < TOLERANCE[kind]
    layer.weights = layer.weights.float()
    wide = torch.zeros(sizes[0], sizes[3] + 64, device="cuda", dtype=torch.bfloat16)
    wide[:, : sizes[3]] = layer.hidden
    layer.hidden = wide[:, : sizes[3]]
    assert error(layer.run(), layer.exact()) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_products_that_nobody_tuned_are_pytorch_s(rows: Any, gpu: Gpu, kind: str) -> None:
    import tuner

    layer = Layer(LAYER, kind)
    out = layer.run()
    assert tuner.stats().hits == 0
    # Both products, or the layer: rows are not quantised to be multiplied in bf16.
    assert sum(tuner.stats().fallbacks.values()) == (2 if kind == "bf16" else 1)
    layer.quantises = False
    assert error(out, layer.exact()) < TOLERANCE["bf16"]


@pytest.mark.parametrize("kind", TYPES)
def test_equal_inputs_give_equal_bits(rows: Any, compiler: Compiler, gpu: Gpu, kind: str) -> None:
    sizes = SIZES[2]
    decide(compiler, gpu, sizes, TYPES[kind])
    layer = Layer(sizes, kind)
    first = layer.run()
    for _ in range(20):
        assert torch.equal(layer.run().view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("kind", TYPES)
def test_a_captured_layer_follows_the_router(
    rows: Any, compiler: Compiler, gpu: Gpu, kind: str
) -> None:
    decide(compiler, gpu, LAYER, TYPES[kind])
    layer = Layer(LAYER, kind)
    layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.run()
    for seed, choice in enumerate(CHOICES.values(), 1):
        other = Layer(LAYER, kind, seed)
        layer.experts.copy_(choice(other.experts, LAYER[2]))
        layer.hidden.copy_(other.hidden)
        layer.weights.copy_(other.weights)
        graph.replay()
        torch.cuda.synchronize()
        wanted = layer.run()
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
        assert error(found, layer.exact()) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_rows_without_a_token_never_reach_a_result(
    rows: Any, compiler: Compiler, gpu: Gpu, kind: str
) -> None:
    """Memory that the layer allocates holds NaN before, and so do tokens of other ranks."""
    decide(compiler, gpu, LAYER, TYPES[kind])
    layer = Layer(LAYER, kind)
    layer.experts[::3] = LAYER[2]
    layer.experts[:, 1] = -1
    wanted = layer.run()
    layer.hidden[::3] = torch.nan
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    planted = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(16)]
    planted += [torch.full((1 << power,), torch.nan, device="cuda") for power in range(7, 20)] * 4
    del planted
    found = layer.run()
    assert not found[::3].any() and torch.isfinite(found).all()
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


STAGES = (
    (1, 1, 1, 8),
    (3, 2, 512, 136),
    (512, 8, 256, 1024),
    (513, 8, 256, 2056),
    (5000, 32, 37, 128),
    (40000, 6, 384, 72),
)
"""Tokens, top k, experts, columns: a chunk of slots and one more, many chunks."""


@pytest.mark.parametrize("sizes", STAGES, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_stages_are_pytorch_s(rows: Any, sizes: tuple[int, ...], kind: Any) -> None:
    tokens, top_k, count, columns = sizes
    torch.manual_seed(1)
    own, theirs = rows.by_kernel(torch.device("cuda", 0)), rows.ComposedRows()
    assert own is not None
    experts = torch.randint(-2, count + 2, (tokens, top_k), device="cuda", dtype=kind)
    offsets, places = own.place(experts, count)
    wanted = theirs.place(experts, count)
    assert torch.equal(offsets, wanted[0]) and torch.equal(places, wanted[1])
    end = int(offsets[-1])
    tensor = torch.randn(tokens, columns, device="cuda").bfloat16()
    copies, _ = own.copy(tensor, places)
    assert torch.equal(copies[:end], theirs.copy(tensor, places)[:end])
    small, factors = own.copy(tensor, places, quantises=True)
    quantised, scale = part("products.block_scaled").composed(copies[:end])
    assert torch.equal(small[:end].view(torch.uint8), quantised.view(torch.uint8))
    assert torch.equal(factors[:end], scale)
    drawn = torch.rand(tokens, top_k, device="cuda")
    for weights in (drawn, drawn.bfloat16()):
        sums = own.combine(copies, places, weights)
        assert torch.allclose(sums, theirs.combine(copies, places, weights), 2**-7, 2**-7)
    half = columns // 16 * 8
    if half:
        both = copies[:, : 2 * half].contiguous()
        gated, _ = own.gate(both, offsets)
        assert torch.allclose(gated[:end], theirs.gate(both, offsets)[:end], 2**-7, 2**-7)
        small, factors = own.gate(both, offsets, quantises=True)
        quantised, scale = part("products.block_scaled").composed(gated[:end])
        assert torch.equal(small[:end].view(torch.uint8), quantised.view(torch.uint8))
        assert torch.equal(factors[:end], scale)


TOKENS, TOP_K, HIDDEN = 80, 2, 256
#: Experts and their inner size, of small models of each layout.
MODELS = {"Mixtral": (8, 384), "Qwen3Moe": (16, 128), "DeepseekV3": (16, 128), "GptOss": (8, 384)}


def model_of(name: str) -> Any:
    """Two layers with random weights, bf16; DeepSeek-V3's first layer is dense by default."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    count, inner = MODELS[name]
    torch.manual_seed(0)
    values: dict[str, Any] = {
        **{"vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 384, "head_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_local_experts": count, "num_experts": count, "moe_intermediate_size": inner},
        "num_experts_per_tok": TOP_K,
    }
    if name == "DeepseekV3":
        del values["head_dim"]
        values |= {"n_routed_experts": count, "n_group": 4, "topk_group": 2}
        values |= {"q_lora_rank": 128, "kv_lora_rank": 128, "num_key_value_heads": 4}
        values |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
        values |= {"first_k_dense_replace": 0, "n_shared_experts": 1}
    config = getattr(transformers, f"{name}Config")(**values)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().cuda().bfloat16()


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(rows: Any, name: str) -> None:
    model = model_of(name)
    import tuner
    import tuner.runtime.engines.transformers
    from tuner.runtime.engines.transformers_experts import turn_experts_

    turned = turn_experts_(model)
    assert turned == (4 if name == "GptOss" else 0)
    ids = torch.randint(0, 512, (2, TOKENS // 2), device="cuda")
    forget()
    found = {}
    with torch.no_grad():
        for way in ("eager", "tuner"):
            model.set_experts_implementation(way)
            found[way] = model(ids).logits.double()
    assert error(found["tuner"], found["eager"]) < 2e-2
    kinds = part("call.refusal").Kind
    assert not {kinds.EXPERT_ROWS, kinds.EXPERTS} & tuner.stats().fallbacks.keys()
    assert tuner.stats().calls == 4  # both products of two layers


def quantised_(module: Any, plain: Any, names: dict[str, str]) -> None:
    """Fill an fp8 module by a plain one's weights, which take the values that it has."""
    for name, scale_name in names.items():
        weight = getattr(plain, name).data
        n, k = weight.shape[-2:]
        wide = torch.nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128))
        blocks = wide.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        scale = blocks.abs().amax((-3, -1)).clamp_min(1e-6) / 448
        each = scale.repeat_interleave(128, -1).repeat_interleave(128, -2)[..., :n, :k]
        small = (weight.float() / each).to(torch.float8_e4m3fn)
        for at, value in ((name, small), (scale_name, scale)):
            setattr(module, at, torch.nn.Parameter(value, requires_grad=False))
        weight.copy_(small.float() * each)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_fine_grained_fp8_of_transformers(
    rows: Any, compiler: Compiler, gpu: Gpu, name: str
) -> None:
    """Beside the model whose weights are the dequantised ones; activations differ by e4m3."""
    model = model_of(name)
    import copy

    from transformers.integrations import finegrained_fp8 as fp8
    from transformers.utils.quantization_config import FineGrainedFP8Config

    import tuner
    import tuner.runtime.engines.transformers

    count, inner = MODELS[name]
    decide(compiler, gpu, (TOKENS, TOP_K, count, HIDDEN, inner), E4M3)
    small = copy.deepcopy(model)
    given = {"quantization_config": FineGrainedFP8Config()}
    small = fp8.replace_with_fp8_linear(small, modules_to_not_convert=["lm_head"], **given)
    experts = {f"{one}_proj": f"{one}_proj_scale_inv" for one in ("gate_up", "down")}
    for path, module in small.named_modules():
        if isinstance(module, fp8.FP8Linear):
            quantised_(module, model.get_submodule(path), {"weight": "weight_scale_inv"})
        elif isinstance(module, fp8.FP8Experts):
            quantised_(module, model.get_submodule(path), experts)
    small.requires_grad_(False)
    tuned = tuner.tune_linear_(small)
    assert len(tuned.replaced) >= 8
    ids = torch.randint(0, 512, (2, TOKENS // 2), device="cuda")
    with torch.no_grad():
        model.set_experts_implementation("eager")
        wanted = model(ids).logits.double()
        forget()
        small.set_experts_implementation("tuner")
        found = small(ids).logits
    assert error(found, wanted) < 0.1
    kinds = part("call.refusal").Kind
    assert not {kinds.EXPERT_ROWS, kinds.EXPERTS} & tuner.stats().fallbacks.keys()
    assert tuner.stats().hits >= 4  # both products of two layers of experts
