"""`attn_implementation="tuner"`: real architectures, small and with random weights, on CPU tensors.

Against `sdpa`: the same logits and tokens where PyTorch answers, close ones where a tuned kernel
does. Against `eager` those that `sdpa` does not know, and those whose masks are made otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers_names import cached  # noqa: E402

from tuner.problem import shapes  # noqa: E402
from tuner.runtime.engines import transformers as tuned_attention  # noqa: E402

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
    "MistralForCausalLM": (
        "MistralConfig",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6},
    ),
    "BertForMaskedLM": ("BertConfig", SMALL),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {
            **{**SMALL, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        },
    ),
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


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM", "DeepseekV3ForCausalLM"],
)
@torch.no_grad()
def test_a_tuned_kernel_answers_every_layer(tuned: SimpleNamespace, name: str) -> None:
    model, reference = pair(name, torch.bfloat16)
    ids, mask = tokens()
    options = {} if name == "BertForMaskedLM" else {"use_cache": False}
    assert close(model(ids, **options).logits, reference(ids, **options).logits)
    assert [p.label() for p in tuned.problems] == [tuned.problems[0].label()] * 2
    assert tuned.problems[0].is_causal is (name != "BertForMaskedLM")
    widths = tuned.problems[0].head_dim, tuned.problems[0].value_width
    assert (widths == (192, 128)) is (name == "DeepseekV3ForCausalLM")
    found = model(ids, attention_mask=mask, **options).logits
    wanted = reference(ids, attention_mask=mask, **options).logits
    assert found.isfinite().all() and close(found[mask > 0], wanted[mask > 0])
    assert {p.mask for p in tuned.problems[2:]} == {"b"}
    stats = tuned.counters.stats()
    assert (stats.hits, dict(stats.fallbacks)) == (4, {})


def test_generation_through_tuned_kernels(tuned: SimpleNamespace) -> None:
    """The cache's keys lie head by head, the prompt's queries token by token."""
    model, reference = pair("LlamaForCausalLM", torch.float16)
    ids = torch.arange(2, 2 + LENGTH)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    assert tuned.problems[0].layout == "bshd_bhsd"
    lengths = [(p.seqlen_q, p.seqlen_kv, p.is_causal) for p in tuned.problems[::2]]
    assert lengths == [(LENGTH, LENGTH, True), *((1, LENGTH + n, False) for n in (1, 2, 3))]


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM", "MistralForCausalLM"],
)
@torch.no_grad()
def test_what_a_layer_poses_is_what_shapes_lists(tuned: SimpleNamespace, name: str) -> None:
    """A window's layers pose its mask; the window itself is `tuner.attention`'s."""
    model, _ = pair(name, torch.float16)
    listed = shapes.architecture(model.config.to_dict())
    ids, _ = tokens()
    out = model(ids)
    for decode in (False, True):
        wanted = shapes.problems(
            listed, [2], [LENGTH + decode], decode=decode, dtype="fp16", ops=("attention",)
        ).problems
        assert set(tuned.problems) == {p for p in wanted if listed.window == 0 or p.mask}
        if "BertFor" in name:
            break
        tuned.problems.clear()
        model(ids[:, :1], past_key_values=out.past_key_values)


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
    attend(dropout=0.5)
    assert tuned.problems == []


def test_a_bias_by_positions_is_an_operand(tuned: SimpleNamespace) -> None:
    """With the mask in it, as `sdpa` has it."""
    bias = torch.randn(1, 2, 8, 8).half()
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    query, key, value = (torch.randn(1, 2, 8, 16).half() for _ in range(3))
    for mask, is_causal in (
        (None, False),
        (None, True),
        (seen[None, None], None),
        (bias.flip(-1), None),
    ):
        options = {"position_bias": bias, "attention_mask": mask, "is_causal": is_causal}
        out, _ = attend(query=query, key=key, value=value, **options)
        options["is_causal"] = bool(is_causal)
        wanted, _ = tuned_attention.sdpa_attention_forward(
            torch.nn.Identity(), query, key, value, **options
        )
        assert torch.allclose(out, wanted, atol=4e-3)
    assert [problem.bias for problem in tuned.problems] == ["h"] * 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"s_aux": torch.zeros(2)}, r"no attention sinks \(s_aux\): use 'eager'"),
    "sinks by another name": ({"sinks": torch.zeros(1)}, r"no attention sinks \(sinks\)"),
    "chosen keys": ({"indices": torch.zeros(1, 8, 4)}, r"no sparse attention \(indices\)"),
    "chosen blocks": ({"block_indices": torch.zeros(1)}, r"no sparse attention \(block_indices\)"),
    "weights": ({"output_attentions": True}, r"no attention weights .*output_attentions"),
    "packed": ({"cu_seq_lens_q": torch.tensor([0, 3, 8])}, "cu_seq_lens_q .*pass position_ids"),
    "a window": ({"sliding_window": 7}, "sliding_window=7 comes without one for 8 keys"),
    "both": (
        {"softcap": 5.0, "position_bias": torch.zeros(1, 2, 8, 8)},
        "no position_bias beside softcap",
    ),
    "anything": ({"temperature": 0.7}, "does not know the keyword temperature: use 'sdpa'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_keyword_that_would_be_lost_is_an_error_that_names_it(
    tuned: SimpleNamespace, what: str
) -> None:
    given, words = REFUSED[what]
    with pytest.raises(ValueError, match=words) as caught:
        attend(**given)
    assert "\n" not in str(caught.value) and tuned.problems == []


def test_keywords_that_change_nothing(tuned: SimpleNamespace) -> None:
    nothing = {
        "output_attentions": False,
        "s_aux": None,
        "temperature": None,
        "sliding_window": 8,
        "cu_seq_lens_q": torch.tensor([0, 8]),
        **dict.fromkeys(tuned_attention.WITHOUT_EFFECT, 1),
    }
    attend(**nothing)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    said = {"sliding_window": 3, "cu_seq_lens_q": torch.tensor([0, 3, 8]), "attention_mask": mask}
    attend(**said)
    assert [problem.mask for problem in tuned.problems] == ["", "1"]


def test_a_layer_that_does_not_say_whether_it_is_causal(tuned: SimpleNamespace) -> None:
    """`sdpa` would take it for one that is; `eager` sees all keys."""
    q, k, v = (torch.randn(1, 2, 8, 16).half() for _ in range(3))
    forward = tuned_attention.attention_forward
    with pytest.raises(ValueError, match="no mask from Identity, which does not say is_causal"):
        forward(torch.nn.Identity(), q, k, v, None)
    forward(torch.nn.Identity(), q, k, v, None, is_causal=False)
    forward(torch.nn.Identity(), q[:, :, :1].contiguous(), k, v, None)
    forward(torch.nn.Identity(), q, k, v, torch.ones(1, 1, 8, 8, dtype=torch.bool))
    assert [problem.is_causal for problem in tuned.problems] == [False, False, False]


def sources() -> Iterator[str]:
    """Those of Transformers' models."""
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        yield path.read_text()


def arguments(text: str, start: int) -> list[str]:
    """Those of the call or the signature whose parenthesis opens at `start`."""
    depth, found, last = 0, [], start + 1
    for match in re.compile(r"[()\[\]{},]").finditer(text, start):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if (match[0] == "," and depth == 1) or depth == 0:
            found.append(text[last : match.start()].strip())
            last = match.end()
        if depth == 0:
            return found
    raise AssertionError(text[start : start + 80])


#: What `attention_forward` takes, or refuses by name.
DECIDED = {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_bias", "cache", "softcap", "output_attentions", "sliding_window"),
    *tuned_attention._REFUSED,
    *tuned_attention._PACKED,
}


def test_every_keyword_that_a_model_hands_over_is_decided() -> None:
    call = re.compile(r"\b(?:attention|attn)_(?:interface|fn)\(")
    given = {
        found[1]
        for text in sources()
        for match in call.finditer(text)
        for argument in arguments(text, match.end() - 1)
        if (found := re.match(r"(?:#[^\n]*\n\s*)*(\w+)=(?!=)", argument))
    }
    assert len(given) > 15 and {"softcap", "s_aux", "sliding_window", "indices"} <= given
    assert given - DECIDED == given & tuned_attention.WITHOUT_EFFECT


def test_what_the_models_own_attention_reads_is_decided() -> None:
    """The parameters of each `eager_attention_forward`, which is the meaning."""
    signature = re.compile(r"^def eager_attention_forward\(", re.MULTILINE)
    read = {
        re.split(r"[:=]", argument)[0].strip()
        for text in sources()
        for match in signature.finditer(text)
        for argument in arguments(text, match.end() - 1)
        if argument and not argument.startswith("*")
    }
    assert {"softcap", "position_bias"} <= read and read <= DECIDED


GEMMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
WINDOW = {"sliding_window": 5}
#: Against `eager`: the configuration's class and values.
BY_EAGER: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2ForCausalLM": ("Gemma2Config", {**GEMMA, **WINDOW, "attn_logit_softcapping": 0.5}),
    "VaultGemmaForCausalLM": (
        "VaultGemmaConfig",
        {**GEMMA, **WINDOW, "attn_logit_softcapping": 0.5},
    ),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GEMMA, **WINDOW}),
    "MistralForCausalLM": ("MistralConfig", {**SMALL, **WINDOW, "num_key_value_heads": 2}),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
}


def beside_eager(name: str, config: str, values: dict[str, Any]) -> tuple[Any, Any]:
    made = []
    for implementation in ("tuner", "eager"):
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(
            getattr(transformers, config)(**values), attn_implementation=implementation
        )
        made.append(model.eval())
    return made[0], made[1]


def alike(found: Any, wanted: Any) -> bool:
    return bool((found - wanted).norm() / wanted.norm() < 1e-5)


def near(found: Any, wanted: Any) -> bool:
    """Of bf16, whose eager attention rounds its weights."""
    return bool((found.float() - wanted.float()).norm() / wanted.float().norm() < 2e-2)


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("name", BY_EAGER)
@torch.no_grad()
def test_logits_as_eager(request: pytest.FixtureRequest, name: str, is_tuned: bool) -> None:
    """Caps come before masks, windows are as wide, and padding's rows spoil no other."""
    tuned = request.getfixturevalue("tuned") if is_tuned else None
    model, reference = beside_eager(name, *BY_EAGER[name])
    if is_tuned:
        model, reference = model.bfloat16(), reference.bfloat16()
    agree = near if is_tuned else alike
    ids, mask = tokens()
    right = torch.ones_like(ids)
    right[1, -3:] = 0
    for attention_mask in (None, mask, right):
        call = {"attention_mask": attention_mask, "use_cache": False}
        found, wanted = model(ids, **call).logits, reference(ids, **call).logits
        seen = torch.ones_like(ids) > 0 if attention_mask is None else attention_mask > 0
        assert found.isfinite().all() and agree(found[seen], wanted[seen])
    short = model(ids[:, :4], use_cache=False).logits  # within the window: no mask is made
    assert agree(short, reference(ids[:, :4], use_cache=False).logits)
    if tuned is not None:
        assert {problem.softcap for problem in tuned.problems} == {
            BY_EAGER[name][1].get("attn_logit_softcapping", 0.0)
        }


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in BY_EAGER if name not in ARCHITECTURES])
def test_generation_as_eager(name: str, cache: str) -> None:
    """Beyond the window, after padding, and with caches that are longer than what is in them."""
    model, reference = beside_eager(name, *BY_EAGER[name])
    ids, mask = tokens()
    for attention_mask in (torch.ones_like(mask), mask):
        options = {
            "attention_mask": attention_mask,
            "cache_implementation": cache,
            "max_new_tokens": 8,
            "do_sample": False,
            "pad_token_id": 0,
            "disable_compile": True,
        }
        assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", BY_EAGER)
@torch.no_grad()
def test_queries_after_a_filled_cache(tuned: SimpleNamespace, name: str, cache: str) -> None:
    """Query i at place p of the cache sees keys 0..p + i: a tuned kernel is not asked."""
    model, reference = beside_eager(name, *BY_EAGER[name])
    model, reference = model.bfloat16(), reference.bfloat16()
    ids, _ = tokens()
    found = []
    for one in (model, reference):
        kept = (
            transformers.DynamicCache(config=one.config)
            if cache == "dynamic"
            else transformers.StaticCache(config=one.config, max_cache_len=24)
        )
        logits = [one(ids[:, :5], **cached(kept)).logits]
        logits += [one(ids[:, 5:9], **cached(kept)).logits]
        logits += [one(ids[:, 9:10], **cached(kept)).logits]
        found.append(torch.cat(logits, 1))
    assert near(*found)
    assert {p.seqlen_q for p in tuned.problems if p.is_causal} <= {5}


def test_packed_sequences_are_told_by_their_positions() -> None:
    model, reference = beside_eager("LlamaForCausalLM", *BY_EAGER["LlamaForCausalLM"])
    ids, _ = tokens(1)
    positions = torch.tensor([[*range(5), *range(7)]])
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    packed |= {"max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        call = {"position_ids": positions, "use_cache": False}
        found = model(ids, **call, **packed).logits
        wanted = [reference(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])]
        assert alike(found, torch.cat(wanted, 1))
        with pytest.raises(ValueError, match="cu_seq_lens_q comes without one: pass position_ids"):
            model(ids, use_cache=False, **packed)


@torch.no_grad()
def test_a_bidirectional_layer_without_a_mask() -> None:
    """Splinter's says nothing of it, and Transformers refuses it `sdpa`."""
    config = transformers.SplinterConfig(**SMALL)
    model = transformers.SplinterModel._from_config(config, attn_implementation="tuner").eval()
    with pytest.raises(ValueError, match="SplinterSelfAttention, which does not say is_causal"):
        model(tokens()[0])


@torch.no_grad()
def test_sinks_are_refused() -> None:
    values = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2}
    config = transformers.GptOssConfig(**values)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="tuner").eval()
    with pytest.raises(ValueError, match=r"no attention sinks \(s_aux\): use 'eager'$"):
        model(tokens()[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_queries_that_a_model_drops_after_its_masks_were_made(cache: str) -> None:
    """Gemma 4's last layers compute what is wanted alone, and that does not start at key 0."""
    values = {
        **GEMMA,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    model, reference = beside_eager("Gemma4ForCausalLM", "Gemma4TextConfig", values)
    ids, _ = tokens()
    for count in (1, 3):
        found, wanted = (m(ids, logits_to_keep=count).logits for m in (model, reference))
        assert alike(found, wanted)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@torch.no_grad()
def test_a_capped_encoder_and_decoder() -> None:
    half = {**GEMMA, **WINDOW, "attn_logit_softcapping": 0.5, "hidden_activation": "gelu"}
    values = {"encoder": half, "decoder": half, "vocab_size": VOCABULARY}
    model, reference = beside_eager("T5GemmaForConditionalGeneration", "T5GemmaConfig", values)
    ids, mask = tokens()
    for attention_mask in (None, mask):
        call = {"attention_mask": attention_mask, "decoder_input_ids": ids[:, :7]}
        assert alike(model(ids, **call).logits, reference(ids, **call).logits)


@torch.no_grad()
def test_a_capped_model_in_one_graph() -> None:
    torch._dynamo.reset()
    model, reference = beside_eager("Gemma2ForCausalLM", *BY_EAGER["Gemma2ForCausalLM"])
    ids, _ = tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(ids, use_cache=False).logits
    assert alike(found, reference(ids, use_cache=False).logits)


def test_capped_training() -> None:
    model, reference = beside_eager("Gemma2ForCausalLM", *BY_EAGER["Gemma2ForCausalLM"])
    ids, mask = tokens()
    mask = mask.flip(1)  # with padding before them rows see nothing, and eager gives them a mean
    for m in (model, reference):
        m.train()(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    found, wanted = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (model, reference))
    assert found.isfinite().all()
    assert (found - wanted).norm() / wanted.norm() < 1e-4


def test_training(tuned: SimpleNamespace) -> None:
    model, reference = pair("LlamaForCausalLM", torch.bfloat16)
    ids, _ = tokens()
    for m in (model, reference):
        m.train()(ids, labels=ids, use_cache=False).loss.backward()
    found, wanted = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (model, reference))
    assert (found.float() - wanted.float()).norm() / wanted.float().norm() < 5e-2
    assert tuned.counters.stats().hits == 2
