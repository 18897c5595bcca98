"""Calls drawn from public models: the same everywhere, within bounds, and as models make them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem, population
from tuner.problem.models import FIELDS, TENSORS, public_models
from tuner.problem.population import (
    LOWER_RIGHT,
    PADDING,
    POSITIONS,
    Chance,
    ModelCall,
    View,
    draw,
    draw_training,
    is_held_out,
    linears,
    subset,
)

MODELS = public_models()
CALLS = draw(1, 1500, subset("all"))
ATTENTION = [call for call in CALLS if isinstance(call.problem, AttentionProblem)]


def calls_of(name: str, count: int = 300) -> list[ModelCall]:
    return draw(0, count, subset(name))


def test_the_same_seed_draws_the_same_calls_everywhere() -> None:
    """A change of this hash changes every population: published seeds no longer mean the same."""
    text = "\n".join(call.label for call in draw(1, 100, subset("all")))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0b1642d35d3ea012"


def test_a_longer_draw_begins_as_a_shorter_one() -> None:
    assert draw(1, 50, subset("all")) == CALLS[:50]
    assert draw(2, 50, subset("all")) != CALLS[:50]
    assert draw("1", 50, subset("all")) == CALLS[:50]


def test_training_calls_are_the_same_everywhere_and_in_bounds() -> None:
    """Attention over itself that PyTorch's operator has gradients of."""
    calls = draw_training(1, 200, subset("all"))
    assert draw_training(1, 50, subset("all")) == calls[:50]
    text = "\n".join(call.label for call in calls)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "1217e426d4319a33"
    assert len({call.key for call in calls}) == len(calls)
    for call in calls:
        problem = call.problem
        assert isinstance(problem, AttentionProblem) and call.kind == population.TRAINING
        assert 1024 <= problem.seqlen_q == problem.seqlen_kv <= 8192
        assert 1 <= problem.batch <= 16 and call.bytes <= population.MAX_BYTES
        assert not (problem.is_windowed or problem.softcap or problem.bias or call.mask)
    lengths = {call.problem.to_json()["seqlen_q"] % 64 == 0 for call in calls}
    assert lengths == {False, True}


def test_a_model_without_training_calls() -> None:
    with pytest.raises(ConfigError, match="only 0 distinct calls"):
        draw_training(0, 1, subset("bert-base"))


def test_calls_are_distinct_and_in_bounds() -> None:
    assert len({call.key for call in CALLS}) == len(CALLS)
    for call in CALLS:
        assert call.bytes <= population.MAX_BYTES
        assert call.problem.flops <= population.MAX_FLOPS
        assert call.problem.to_json()["dtype"] in ("float16", "bfloat16")
        model = MODELS[call.model]
        assert model.dtype in (call.problem.to_json()["dtype"], "float32")
        assert call.ranks in model.shards


def test_every_choice_comes_up() -> None:
    assert {MODELS[call.model].field for call in CALLS} == set(FIELDS)
    kinds = Counter(call.kind for call in ATTENTION)
    assert set(kinds) == {"prompt", "decoding", "encoding", "cross"}
    assert {call.mask for call in ATTENTION} == {"", PADDING, LOWER_RIGHT, POSITIONS}
    assert 0.35 < len(ATTENTION) / len(CALLS) < 0.55
    problems = [call.problem for call in ATTENTION]
    assert {type(call.problem) for call in CALLS} == {AttentionProblem, GemmProblem, SwigluProblem}
    decoding = [p for c, p in zip(ATTENTION, problems, strict=True) if c.kind == "decoding"]
    assert {1, 2, 16} <= {problem.seqlen_q for problem in decoding}
    assert 0.6 < sum(problem.seqlen_q == 1 for problem in decoding) / len(decoding) < 0.9
    assert max(problem.batch for problem in decoding) > 64
    assert any(problem.is_windowed for problem in problems)
    assert any(problem.softcap for problem in problems)
    assert {problem.layout for problem in problems} == {"bhsd", "bshd", "bshd_bhsd"}


def test_views_hold_what_their_call_says() -> None:
    for call in ATTENTION:
        query, key, value = call.views
        problem = call.problem
        assert query.shape == problem.matrices[0].shape
        assert key.shape == value.shape == problem.matrices[1].shape
        for view in call.views:
            assert view.strides[3] == 1 and view.offset % 8 == 0
            assert all(stride % 8 == 0 for stride in view.strides[:3])
            assert view.end <= call.buffers[view.buffer]


def test_views_of_one_projection_share_no_element() -> None:
    joined = [c for c in ATTENTION if len(set(v.buffer for v in c.views)) < len(c.views)]
    assert joined
    for call in joined:
        views = [view for view in call.views if view.buffer == "projection"]
        starts = [range(v.offset, v.offset + v.shape[3]) for v in views]
        rows = {v.strides[2] for v in views}
        assert len(rows) == 1
        taken = [
            range(at.start + head * view.strides[1], at.stop + head * view.strides[1])
            for view, at in zip(views, starts, strict=True)
            for head in range(view.shape[1])
        ]
        columns = [column for part in taken for column in part]
        assert len(set(columns)) == len(columns) and max(columns) < rows.pop()


@pytest.mark.parametrize("name", ["gpt2", "bloom-560m"])
def test_a_fused_projection_is_seen_by_strides(name: str) -> None:
    found = [c for c in calls_of(name) if c.kind == "prompt"]
    query = found[0].views[0]
    hidden = MODELS[name].stacks[0].hidden
    assert all(c.views[0].strides[2] == 3 * hidden for c in found)
    assert query.buffer == "projection" and found[0].problem.layout in ("bshd", "bshd_bhsd")
    assert {c.views[1].buffer for c in found} == {"projection", "key"}  # without and with a cache


def test_windows_hide_what_the_models_hide() -> None:
    prompts = [c.problem for c in calls_of("mistral-7b-v0.1") if c.kind == "prompt"]
    assert {p.window_left for p in prompts} == {-1, 4095}
    assert all((p.seqlen_kv > 4096) == (p.window_left == 4095) for p in prompts)
    decoding = [c.problem for c in calls_of("mistral-7b-v0.1") if c.kind == "decoding"]
    assert max(p.seqlen_kv for p in decoding) == 4096
    assert not any(p.is_windowed or p.is_causal for p in decoding)
    local = [c.problem for c in calls_of("modernbert-base") if c.kind == "encoding"]
    assert {(p.window_left, p.window_right) for p in local} == {(-1, -1), (64, 64)}


def test_masks_come_from_where_models_have_them() -> None:
    for call in ATTENTION:
        problem = call.problem
        if call.mask == LOWER_RIGHT:
            assert call.kind == "decoding" and problem.seqlen_q > 1 and not problem.is_causal
        if call.mask == PADDING:
            assert MODELS[call.model].field == "encoder" and problem.batch > 1
        assert (call.mask == POSITIONS) == (problem.bias == "h")


def test_a_product_is_a_linear_layer_of_its_model() -> None:
    for call in CALLS:
        if isinstance(call.problem, AttentionProblem):
            continue
        stack = next(s for s in MODELS[call.model].stacks if s.name == call.stack)
        n, k, _ = linears(stack, call.ranks)[call.kind]
        assert (call.problem.n, call.problem.k) == (n, k)
        longest = max(stack.lengths, default=0)
        assert 1 <= call.problem.m <= max(population.MAX_ROWS, longest)


def test_linears_of_a_rank() -> None:
    (llama,) = MODELS["llama-3.1-70b"].stacks
    assert linears(llama, 8) == {
        "query": (1024, 8192, ""), "key": (128, 8192, ""), "out": (8192, 1024, ""),
        "gate": (3584, 8192, ""), "up": (3584, 8192, ""), "swiglu": (3584, 8192, ""),
        "down": (8192, 3584, ""), "logits": (16032, 8192, ""),
    }  # fmt: skip
    (gpt2,) = MODELS["gpt2"].stacks
    assert linears(gpt2) == {
        "qkv": (2304, 768, "bias"), "out": (768, 768, "bias"), "up": (3072, 768, "bias_gelu_tanh"),
        "down": (768, 3072, "bias"), "logits": (50257, 768, ""),
    }  # fmt: skip
    (falcon,) = MODELS["falcon-7b"].stacks
    assert linears(falcon)["qkv"] == (4672, 4544, "")


def is_balanced() -> bool:
    """Both sides have models of every field, and a fifth to a third are held out."""
    sides = [subset("held-out"), subset("making")]
    has_all = all({model.field for model in side} == set(FIELDS) for side in sides)
    return has_all and len(MODELS) / 5 <= len(sides[0]) <= len(MODELS) / 3


def test_the_sides_are_balanced_by_the_first_salt_that_does(monkeypatch: Any) -> None:
    assert is_balanced()
    for salt in range(population.HELD_OUT_SALT):
        monkeypatch.setattr(population, "HELD_OUT_SALT", salt)
        assert not is_balanced()


def test_no_model_has_a_twin_on_the_other_side() -> None:
    held, making = subset("held-out"), subset("making")
    assert len(held) + len(making) == len(MODELS)
    for name in ("llama-2-7b", "opt-6.7b", "mpt-7b"):  # 32 heads of 128 each
        assert is_held_out(MODELS[name]) and MODELS[name] in held
    assert is_held_out(MODELS["gpt2"]) == is_held_out(MODELS["bert-base"])


def test_subsets_by_name() -> None:
    assert [m.name for m in subset("gpt2,bert-base,gpt2")] == ["gpt2", "bert-base"]
    with pytest.raises(ConfigError, match="model gpt5 is not known"):
        subset("gpt5")


def test_a_small_population_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "TRIES", 2)
    with pytest.raises(ConfigError, match="distinct calls were found"):
        draw(0, 1000, subset("vit-base-16"))
    with pytest.raises(ConfigError, match="count=0"):
        draw(0, 0, subset("all"))


def test_sizes_are_drawn_by_octaves() -> None:
    sizes = [Chance(0, i).size(128, 16384, "x") for i in range(4000)]
    assert min(sizes) >= 128 and max(sizes) <= 16384
    octaves = Counter(size.bit_length() for size in sizes)
    assert all(400 < octaves[bits] < 750 for bits in range(8, 15))
    assert {Chance(0, i).size(5, 5, "x") for i in range(9)} == {5}
    assert {Chance(0, i).size(1, 3, "x") for i in range(99)} == {1, 2, 3}


def test_every_lie_of_tensors_is_drawn_somewhere() -> None:
    used = {stack.tensors for model in MODELS.values() for stack in model.stacks}
    assert used == set(TENSORS)


def tiny(name: str) -> Any:
    """A model of Transformers with the architecture of one of the population's, and its input."""
    import transformers as t

    sizes: dict[str, Any] = {
        "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128,
    }  # fmt: skip
    text: dict[str, Any] = {
        **sizes, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    gpt2 = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 128, "bos_token_id": 1}
    separators = {"cls_token_id": 1, "sep_token_id": 2}
    builds = {
        "llama-3-8b": lambda: t.LlamaConfig(num_key_value_heads=2, **text),
        "phi-3-mini": lambda: t.Phi3Config(num_key_value_heads=2, **text),
        "phi-2": lambda: t.PhiConfig(**text),
        "glm-4-9b": lambda: t.GlmConfig(num_key_value_heads=2, head_dim=16, **text),
        "starcoder2-7b": lambda: t.Starcoder2Config(num_key_value_heads=2, **text),
        "pythia-1b": lambda: t.GPTNeoXConfig(**text),
        "gpt2": lambda: t.GPT2Config(**gpt2, eos_token_id=2),
        "bert-base": lambda: t.BertConfig(**text),
        "modernbert-base": lambda: t.ModernBertConfig(**text, **separators),
        "vit-base-16": lambda: t.ViTConfig(image_size=32, patch_size=8, **sizes),
    }
    return builds[name]()


LIES = (
    "llama-3-8b", "phi-3-mini", "phi-2", "glm-4-9b", "starcoder2-7b", "pythia-1b", "gpt2",
    "bert-base", "modernbert-base", "vit-base-16",
)  # fmt: skip


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("use_cache", [False, True])
def test_tensors_lie_as_transformers_has_them(name: str, use_cache: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (stack, *_) = MODELS[name].stacks
    if use_cache and not stack.is_generating:
        pytest.skip("an encoder fills no cache")
    seen: list[tuple[Any, ...]] = []

    def probe(module: Any, *tensors: Any, **options: Any) -> Any:
        seen.append(tensors[:3])
        return torch.zeros_like(tensors[0]).transpose(1, 2), None

    transformers.AttentionInterface.register("population-probe", probe)
    model = transformers.AutoModel.from_config(tiny(name), attn_implementation="population-probe")
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 100, (2, 24))}
    if stack.lengths:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif stack.is_generating:
        inputs["use_cache"] = use_cache
    with torch.no_grad():
        model.eval()(**inputs)
    query, key, value = seen[0]
    phase = population._Phase("prompt" if stack.is_generating else "encoding", 2, 24, 24)
    small = replace(stack, hidden=64, heads=4, heads_kv=key.shape[1], head_dim=16)
    drawn = (
        population._views(Chance(0, i), small, phase, (query.shape[:3], key.shape[:3]))
        for i in range(99)
    )
    views = next(v for v in drawn if not stack.is_generating or is_cached(v) == use_cache)
    assert [view.strides for view in views] == [t.stride() for t in (query, key, value)]
    assert [v.shape for v in views] == [t.shape for t in (query, key, value)]


def is_cached(views: Sequence[View]) -> bool:
    """Keys and values are dense with heads first; only a cache makes both so here."""
    return all(v.strides[2] == v.shape[3] and v.buffer != "projection" for v in views[1:])
