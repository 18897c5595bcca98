"""`attn_implementation="tuner"` under torch.compile: small models with random weights, CPU tensors.

A tuned kernel that is exact stands for all; `sdpa`, not compiled, is the reference. Dynamo decides
about masks and caches, so those graphs are run by the backend `eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers_names import cached  # noqa: E402

import tuner.runtime.engines.transformers  # noqa: E402

VOCABULARY, LENGTH = 97, 12
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
VIT = {"image_size": 16, "patch_size": 4, "num_channels": 3}
OFF = {"attention_dropout": 0.0, "attention_probs_dropout_prob": 0.0, "attn_pdrop": 0.0}
#: For the configurations of all architectures.
ONE_LAYER = {"num_hidden_layers": 1, "n_layer": 1}
#: Architecture -> its configuration's class and values.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Phi3ForCausalLM": ("Phi3Config", {**GROUPED, "bos_token_id": 1, "eos_token_id": None}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "BertForMaskedLM": ("BertConfig", SMALL),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, **VIT}),
}


def made(name: str, implementation: str, **more: Any) -> Any:
    config, values = MODELS[name]
    known = getattr(transformers, config)
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(
        known(**{**values, **OFF, **more}), attn_implementation=implementation
    )
    return model.eval().bfloat16()


def arguments(name: str, length: int = LENGTH) -> dict[str, Any]:
    torch.manual_seed(1)
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 16, 16).bfloat16()}
    ids = torch.randint(2, VOCABULARY, (2, length))
    return {"input_ids": ids} if name.startswith("Bert") else {"input_ids": ids, "use_cache": False}


def near(found: Any, wanted: Any, limit: float) -> bool:
    return bool((found.float() - wanted.float()).norm() / wanted.float().norm() < limit)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_layer_is_served_in_one_graph(tuned: SimpleNamespace, name: str) -> None:
    layers = 2 if name.startswith("Llama") else 1
    sizes = {key: layers for key in ONE_LAYER}
    compiled = torch.compile(made(name, "tuner", **sizes), fullgraph=True, backend="aot_eager")
    found = compiled(**arguments(name)).logits
    assert near(found, made(name, "sdpa", **sizes)(**arguments(name)).logits, 1e-2)
    assert len(tuned.problems) == layers and len(set(tuned.problems)) == 1
    assert tuned.counters.stats().fallbacks == {}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_a_layer_is_trained_in_one_graph(tuned: SimpleNamespace, name: str) -> None:
    grads = []
    for implementation in ("tuner", "sdpa"):
        model = made(name, implementation, **ONE_LAYER).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        call = model
        if implementation == "tuner":
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        call(**arguments(name)).logits.float().square().mean().backward()
        grads.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    assert len(tuned.problems) == 1
    assert tuned.counters.stats().fallbacks == {}
    assert grads[0].keys() == grads[1].keys()
    for key, wanted in grads[1].items():
        assert near(grads[0][key], wanted, 8e-2) or wanted.float().norm() < 1e-3, key


@torch.no_grad()
def test_lengths_that_vary_are_one_graph(tuned: SimpleNamespace) -> None:
    model, reference = (
        made("LlamaForCausalLM", way, num_hidden_layers=1) for way in ("tuner", "sdpa")
    )
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (LENGTH, 20, 33):
        given = arguments("LlamaForCausalLM", length)
        assert near(compiled(**given).logits, reference(**given).logits, 1e-2)
    assert [p.seqlen_q for p in tuned.problems] == [LENGTH, 20, 33]


@pytest.mark.parametrize(
    ("name", "side"), [("LlamaForCausalLM", "left"), ("BertForMaskedLM", "right")]
)
@torch.no_grad()
def test_padding_is_masked(tuned: SimpleNamespace, name: str, side: str) -> None:
    """It is data, which a graph cannot look at: it goes along as an operand."""
    given = arguments(name)
    mask = torch.ones_like(given["input_ids"])
    mask[0, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    model, reference = (made(name, way, num_hidden_layers=1) for way in ("tuner", "sdpa"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = compiled(**given, attention_mask=mask).logits
    wanted = reference(**given, attention_mask=mask).logits
    assert near(found[mask > 0], wanted[mask > 0], 1e-2)
    assert [bool(p.mask) for p in tuned.problems] == [True]


@torch.no_grad()
def test_windows_are_masked_where_they_hide_keys(tuned: SimpleNamespace) -> None:
    config = transformers.MistralConfig(**{**GROUPED, "num_hidden_layers": 1}, sliding_window=8)
    for length, is_masked in ((6, False), (LENGTH, True)):
        torch._dynamo.reset()
        tuned.problems.clear()
        torch.manual_seed(0)
        model = transformers.MistralForCausalLM._from_config(config, attn_implementation="tuner")
        given = arguments("MistralForCausalLM", length)
        compiled = torch.compile(model.eval().bfloat16(), fullgraph=True, backend="eager")
        found = compiled(**given).logits
        model.set_attn_implementation("sdpa")
        assert near(found, model(**given).logits, 1e-2)
        assert [bool(p.mask) for p in tuned.problems] == [is_masked]


@torch.no_grad()
def test_a_cache_that_grows(tuned: SimpleNamespace) -> None:
    """A prompt, then token by token: no mask is made for one query over all keys."""
    model, reference = (  # each step is another graph: of as few operations as there may be
        made("LlamaForCausalLM", way, num_hidden_layers=1) for way in ("tuner", "sdpa")
    )
    compiled = torch.compile(model, backend="eager")
    ids = arguments("LlamaForCausalLM")["input_ids"]
    found = []
    for call in (compiled, reference):
        kept = transformers.DynamicCache(config=model.config)
        logits = [call(ids[:, :8], **cached(kept)).logits]
        logits += [call(ids[:, i : i + 1], **cached(kept)).logits for i in range(8, 11)]
        found.append(torch.cat(logits, 1))
    assert near(*found, 1e-2)
    sizes = [(p.seqlen_q, p.seqlen_kv, p.is_causal) for p in tuned.problems]
    assert sizes == [(8, 8, True), (1, 9, False), (1, 10, False), (1, 11, False)]


@torch.no_grad()
def test_packed_sequences_are_masked(tuned: SimpleNamespace) -> None:
    """Positions that are handed over may start anew: they are data."""
    positions = torch.tensor([[*range(5), *range(7)]])
    given = {**arguments("LlamaForCausalLM"), "position_ids": positions}
    given["input_ids"] = given["input_ids"][:1]
    model, reference = (
        made("LlamaForCausalLM", way, num_hidden_layers=1) for way in ("tuner", "sdpa")
    )
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = compiled(**given).logits
    assert near(found, reference(**given).logits, 1e-2)
    assert [bool(p.mask) for p in tuned.problems] == [True]


#: Positions of a batch of (2, 6) from what a graph is given, and whether they count up.
POSITIONS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "counted": (lambda x: torch.arange(x.shape[1]).unsqueeze(0), True),
    "counted from 4": (lambda x: (torch.arange(x.shape[1]) + 4).unsqueeze(0).expand(2, -1), True),
    "from 2 to 8": (lambda x: torch.arange(2, 8).unsqueeze(0), True),
    "two by two": (lambda x: torch.arange(0, 12, 2).unsqueeze(0), False),
    "by a step": (lambda x: torch.arange(0, 12, step=2).unsqueeze(0), False),
    "anew": (lambda x: (torch.arange(6) % 3).unsqueeze(0), False),
    "back": (lambda x: torch.arange(6).flip(0).unsqueeze(0), False),
    "shifted by data": (lambda x: (torch.arange(6) + x[0]).unsqueeze(0), False),
    "along the batch": (lambda x: torch.arange(2).unsqueeze(1).expand(2, 6), False),
    "data": (lambda x: x, False),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_a_graph_counts_are_one_sequence(name: str) -> None:
    make, is_counted = POSITIONS[name]

    def find(x: Any) -> Any:
        positions = make(x)
        return tuner.runtime.engines.transformers._packed_sequences(positions), positions

    x = torch.arange(12).view(2, 6)
    found, positions = torch.compile(find, fullgraph=True, backend="eager")(x)
    if is_counted:
        assert found is None
        assert torch.equal(positions.diff(dim=-1), torch.ones_like(positions)[:, 1:])
    else:
        wanted = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
        assert torch.equal(found, wanted.cumsum(-1))
