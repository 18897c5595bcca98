"""`attn_implementation="tuner"`: real architectures, small and with random weights, on CPU tensors.

Against `sdpa`: the same logits and tokens where PyTorch answers, close ones where a tuned kernel
does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tuner import shapes  # noqa: E402
from tuner.runtime import transformers as tuned_attention  # noqa: E402

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
VOCABULARY = 97
LENGTH = 12
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
#: Architecture -> its configuration's class and values, and whether it generates.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SMALL, "num_key_value_heads": 2}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SMALL, "num_key_value_heads": 1, "head_dim": 16}),
    "GPT2LMHeadModel": ("GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": None}),
    "BertForMaskedLM": ("BertConfig", SMALL),
}
CAUSAL = [name for name in ARCHITECTURES if name != "BertForMaskedLM"]


def pair(name: str, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """The same model twice, by `tuner` and by `sdpa`."""
    config, values = ARCHITECTURES[name]
    made = []
    for implementation in ("tuner", "sdpa"):
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(
            getattr(transformers, config)(**values), attn_implementation=implementation
        )
        made.append(model.eval().to(dtype))
    assert made[0].config._attn_implementation == "tuner"
    return made[0], made[1]


def tokens(batch: int = 2) -> tuple[Any, Any]:
    """Tokens, and a mask under which the first row starts with padding."""
    ids = torch.randint(2, VOCABULARY, (batch, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


def close(found: Any, wanted: Any) -> bool:
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    return bool(error < 5e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_logits_where_pytorch_answers(name: str) -> None:
    model, reference = pair(name)
    ids, mask = tokens()
    for attention_mask in (None, mask):
        found = model(ids, attention_mask=attention_mask).logits
        assert torch.equal(found, reference(ids, attention_mask=attention_mask).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation_where_pytorch_answers(name: str, cache: str) -> None:
    model, reference = pair(name)
    ids, mask = tokens()
    for attention_mask in (torch.ones_like(mask), mask):
        options = {
            "attention_mask": attention_mask,
            "cache_implementation": cache,
            "max_new_tokens": 6,
            "do_sample": False,
            "pad_token_id": 0,
        }
        found = model.generate(ids, **options)
        assert found.shape == (2, LENGTH + 6)
        assert torch.equal(found, reference.generate(ids, **options))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM"])
@torch.no_grad()
def test_a_tuned_kernel_answers_every_layer(tuned: SimpleNamespace, name: str) -> None:
    model, reference = pair(name, torch.bfloat16)
    ids, mask = tokens()
    options = {} if name == "BertForMaskedLM" else {"use_cache": False}
    assert close(model(ids, **options).logits, reference(ids, **options).logits)
    assert [p.label() for p in tuned.problems] == [tuned.problems[0].label()] * 2
    assert tuned.problems[0].is_causal is (name != "BertForMaskedLM")
    found = model(ids, attention_mask=mask, **options).logits
    assert torch.equal(found, reference(ids, attention_mask=mask, **options).logits)
    stats = tuned.counters.stats()
    assert (stats.hits, dict(stats.fallbacks)) == (2, {"attn_mask is given": 2})


def test_generation_through_tuned_kernels(tuned: SimpleNamespace) -> None:
    """The cache's keys lie head by head, the prompt's queries token by token."""
    model, reference = pair("LlamaForCausalLM", torch.float16)
    ids = torch.arange(2, 2 + LENGTH)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    assert tuned.problems[0].layout == "bshd_bhsd"
    lengths = [(p.seqlen_q, p.seqlen_kv, p.is_causal) for p in tuned.problems[::2]]
    assert lengths == [(LENGTH, LENGTH, True), *((1, LENGTH + n, False) for n in (1, 2, 3))]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM"])
@torch.no_grad()
def test_what_a_layer_poses_is_what_shapes_lists(tuned: SimpleNamespace, name: str) -> None:
    model, _ = pair(name, torch.float16)
    listed = shapes.Model.of(model.config.to_dict())
    ids, _ = tokens()
    model(ids)
    wanted = shapes.problems(listed, [2], [LENGTH], dtype="fp16", ops=("attention",))
    assert set(tuned.problems) == set(wanted)


def attend(**changes: Any) -> Any:
    layer = torch.nn.Identity()
    layer.is_causal = True
    q, k, v = (torch.randn(1, 2, 8, 16).half() for _ in range(3))
    arguments = {"query": q, "key": k, "value": v, "attention_mask": None, **changes}
    return tuned_attention.attention_forward(layer, **arguments)


def test_the_causal_flag(tuned: SimpleNamespace) -> None:
    one = torch.randn(1, 2, 1, 16).half()
    attend()
    attend(is_causal=False)
    attend(query=one)
    assert [problem.is_causal for problem in tuned.problems] == [True, False, False]


def test_a_static_cache_is_longer_than_the_prompt(tuned: SimpleNamespace) -> None:
    """Query i sees keys 0 to i of all that the cache holds, without a mask and without a copy."""
    long = [torch.randn(1, 2, 32, 16).half() for _ in range(2)]
    query = torch.randn(1, 2, 8, 16).half()
    out, weights = attend(query=query, key=long[0], value=long[1], scaling=0.3)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, *(t[:, :, :8] for t in long), is_causal=True, scale=0.3
    )
    assert weights is None and torch.allclose(out.transpose(1, 2), wanted, atol=2e-3)
    assert (tuned.problems[0].seqlen_q, tuned.problems[0].seqlen_kv) == (8, 32)


def test_what_changes_the_result_is_left_to_sdpa(tuned: SimpleNamespace) -> None:
    bias = torch.randn(1, 2, 8, 8).half()
    attend(position_bias=bias)
    attend(dropout=0.5)
    with pytest.raises(ValueError, match="softcap"):
        attend(softcap=30.0)
    with pytest.raises(ValueError, match="no attention sinks"):
        attend(s_aux=torch.zeros(2))
    assert tuned.problems == []


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
@torch.no_grad()
def test_compiled_into_one_graph(tuned: SimpleNamespace, name: str) -> None:
    torch._dynamo.reset()
    model, reference = pair(name, torch.bfloat16)
    ids, _ = tokens()
    options = {} if name == "BertForMaskedLM" else {"use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert close(compiled(ids, **options).logits, reference(ids, **options).logits)
    # Before PyTorch 2.14 Transformers makes a tensor of a compiled model's causal mask.
    assert len(tuned.problems) == (2 if name == "BertForMaskedLM" or TORCH >= (2, 14) else 0)


def test_training(tuned: SimpleNamespace) -> None:
    model, reference = pair("LlamaForCausalLM", torch.bfloat16)
    ids, _ = tokens()
    for m in (model, reference):
        m.train()(ids, labels=ids, use_cache=False).loss.backward()
    found, wanted = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (model, reference))
    assert (found.float() - wanted.float()).norm() / wanted.float().norm() < 5e-2
    assert tuned.counters.stats().hits == 2
