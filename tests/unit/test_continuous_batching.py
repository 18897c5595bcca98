"""`generate_batch` by `tuner`: real architectures, small and with random weights, on CPU tensors.

No kernel runs here: PyTorch's exact answer to the call over pages stands for it, and the tokens are
those of Transformers' own attention. Prompts are longer than a step takes, so that chunks of them,
short prompts and single queries meet in one step.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from living import exit_of_child

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip(
    "transformers.generation.continuous_batching",
    reason="this Transformers has no continuous batching",
)

from transformers.generation.continuous_batching import model_runner  # noqa: E402

from tuner.runtime.call import serving  # noqa: E402
from tuner.runtime.engines import continuous_batching  # noqa: E402
from tuner.runtime.engines import transformers as tuned_attention  # noqa: E402
from tuner.runtime.engines.versions import TRANSFORMERS  # noqa: E402

VOCABULARY, LAYERS, WINDOW, NEW = 97, 2, 20, 12
CONFIG = transformers.ContinuousBatchingConfig
FIELDS = {field.name for field in dataclasses.fields(CONFIG)}
PAGE_SIZE = "page_size" if "page_size" in FIELDS else "block_size"
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}
#: Architecture -> its values beside `SMALL`, and the attention of Transformers that knows them all.
ARCHITECTURES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "sdpa"),
    "Qwen3": ({}, "sdpa"),
    "Mistral": ({"sliding_window": WINDOW}, "sdpa"),
    "Gemma": ({}, "sdpa"),
    "Gemma2": ({"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}, "eager"),
    "GptOss": ({"sliding_window": WINDOW, **EXPERTS}, "eager"),
}
#: Its last layers have the keys and values of others.
SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}
#: With block tables where all layers can have them, and without.
CASES = [*((name, None) for name in ARCHITECTURES), ("Llama", 0)]
WINDOWED = ("Mistral", "Gemma2", "GptOss")


def made(name: str, implementation: str) -> Any:
    values, _ = ARCHITECTURES[name]
    return drawn(name, getattr(transformers, f"{name}Config")(**SMALL | values), implementation)


def drawn(name: str, config: Any, implementation: str) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():  # of the prefix that later versions take away
        warnings.simplefilter("ignore", FutureWarning)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(
            config, attn_implementation=implementation
        )
    for layer, module in enumerate(m for m in model.modules() if hasattr(m, "sinks")):
        torch.nn.init.uniform_(module.sinks, 1.0 + layer, 4.0)
    return model.eval()


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(1, VOCABULARY, (count,)).tolist() for count in (3, 19, 47, 8, 33)]


def generated(model: Any, page_size: int = 16, **options: Any) -> list[list[int]]:
    """Tokens of each prompt, in steps of 24 tokens at most."""
    sizes = {PAGE_SIZE: page_size, "num_blocks": 64, "max_batch_tokens": 24}
    found = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=CONFIG(**sizes | options),
        progress_bar=False,
    )
    return [found[f"req_{index}"].generated_tokens for index in range(len(prompts()))]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers collects garbage at the end of each batch, which takes longer than the rest."""
    monkeypatch.setattr(continuous_batching.continuous_api.gc, "collect", lambda *_: 0)


_wanted: dict[str, list[list[int]]] = {}


def wanted(name: str) -> list[list[int]]:
    """Tokens of `generate` by Transformers' own attention, one prompt after the other."""
    if name not in _wanted:
        _wanted[name] = one_by_one(made(name, ARCHITECTURES[name][1]))
    return _wanted[name]


def one_by_one(model: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


@pytest.fixture
def calls(runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls over pages that a kernel is asked for; PyTorch's exact answer stands for it."""
    asked: list[Any] = []

    def answer(call: Any) -> Any:
        asked.append(call)
        return call.by_pytorch()

    monkeypatch.setattr(serving, "answer", answer)
    yield asked


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keywords of each forward pass."""
    kept: list[Any] = []
    io = continuous_batching.input_outputs.ContinuousBatchingIOs
    before: Callable[..., Any] = io.get_model_kwargs

    def get_model_kwargs(*arguments: Any, **options: Any) -> Any:
        kept.append(before(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(io, "get_model_kwargs", get_model_kwargs)
    return kept


@pytest.mark.parametrize(("name", "blocks"), CASES)
def test_the_tokens_of_transformers_own(
    calls: list[Any], steps: list[Any], name: str, blocks: int | None
) -> None:
    assert generated(made(name, "tuner"), max_blocks_per_request=blocks) == wanted(name)
    assert len(calls) == LAYERS * len(steps) and len({len(c.query) for c in calls}) > 2
    with_tables = [step for step in steps if step["block_table"] is not None]
    assert bool(with_tables) == (blocks is None and name not in WINDOWED)
    chunked = [call for call in calls if call.longest_q > 1]
    assert any(1 in call.starts_q.diff() for call in chunked), "chunks beside single queries"
    if name in WINDOWED:
        assert {call.extras.left for call in chunked} >= {WINDOW - 1}
        assert {call.extras.left for call in calls if call.longest_q == 1} == {-1}
    assert all((call.sinks is not None) == (name == "GptOss") for call in calls)
    assert {call.extras.softcap for call in calls} == {2.0 if name == "Gemma2" else 0.0}


def test_the_caches_own_pages_are_read(calls: list[Any], steps: list[Any]) -> None:
    """Neither keys nor values are copied: the kernel's pages are the cache's memory."""
    generated(made("Llama", "tuner"), page_size=32)
    cache = steps[0]["cache"]
    kept = getattr(cache, "cache_tensor", None)
    owned = [kept] if kept is not None else [*cache.key_cache, *cache.value_cache]
    memory = {tensor.untyped_storage().data_ptr() for tensor in owned}
    for call in calls:
        assert call.key.shape[1:] == (32, 2, 16)
        assert {t.untyped_storage().data_ptr() for t in (call.key, call.value)} <= memory


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_padded_steps(
    calls: list[Any], steps: list[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are padded where Transformers captures them as graphs."""
    runner = model_runner.ModelRunner
    before: Callable[..., Any] = runner.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        before(self, *arguments, **options)
        self.pad_inputs = True

    monkeypatch.setattr(runner, "__init__", init)
    options = {"q_padding_interval_size": 8, "kv_padding_interval_size": 64}
    assert generated(made(name, "tuner"), **options) == wanted(name)
    assert all(call.longest_q <= call.longest_kv for call in calls)
    assert any(step["cu_seq_lens_q"][-1] < step["input_ids"].shape[1] for step in steps)


@pytest.mark.parametrize(("name", "blocks"), CASES)
def test_transformers_answers_where_no_kernel_does(
    runtime: SimpleNamespace, steps: list[Any], name: str, blocks: int | None
) -> None:
    assert generated(made(name, "tuner"), max_blocks_per_request=blocks) == wanted(name)
    counted = runtime.counters.stats().fallbacks
    assert counted == {runtime.refusal.Kind.DEVICE: LAYERS * len(steps)}


def test_sinks_that_transformers_own_would_not_find(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its eager attention reads the layer's `sinks`, whatever the layer hands over."""
    known = transformers.AttentionInterface._global_mapping
    for name in continuous_batching.NAMES:
        handed = functools.partial(known[name], s_aux=torch.full((4,), 3.0))
        monkeypatch.setitem(known, name, handed)
    refused = generated(made("Llama", "tuner"))
    monkeypatch.setattr(serving, "answer", lambda call: call.by_pytorch())
    assert refused == generated(made("Llama", "tuner")) != wanted("Llama")


def test_pages_that_no_kernel_takes(
    runtime: SimpleNamespace, calls: list[Any], steps: list[Any]
) -> None:
    assert generated(made("Llama", "tuner"), page_size=8) == wanted("Llama")
    assert not calls and all(step["block_table"] is None for step in steps)
    counted = runtime.counters.stats().fallbacks
    assert counted == {runtime.refusal.Kind.TENSORS: LAYERS * len(steps)}


def test_no_masks_are_made(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else models look whether positions are packed, which waits for the device in each step."""
    asked: list[Any] = []
    monkeypatch.setattr(
        transformers.masking_utils, "find_packed_sequence_indices", lambda ids: asked.append(ids)
    )
    generated(made("Llama", "tuner"))
    assert calls and not asked


def test_the_name_with_its_prefix(calls: list[Any]) -> None:
    assert generated(made("Llama", "paged|tuner")) == wanted("Llama")
    assert calls


def derived(window: int, **given: Any) -> Any:
    """Tables of one sequence of 17 keys, two of which are new, and a row of padding."""
    rows = torch.zeros(64, 1, 16)
    layer = continuous_batching._Layer(0, rows, rows, 16, window, trash=63, zeros=62)
    starts = {"cu_seq_lens_q": [0, 2, 2], "cu_seq_lens_k": [0, 17, 17]}
    options = {name: torch.tensor(ends, dtype=torch.int32) for name, ends in starts.items()}
    options |= {"max_length_q": 3, "max_length_k": 17} | given
    batch = continuous_batching._Batch.of(layer, 3, options)
    return continuous_batching._derived(layer, batch)


def test_a_page_that_one_key_begins_and_padding() -> None:
    reads = torch.tensor([*range(16), 40])  # the last key lies in another page than the others
    slots = {"read_index": [reads], "write_index": [torch.tensor([15, 40, 63])]}
    assert derived(0, **slots).table[0].tolist() == [0, 2]
    group = derived(20, **slots)
    copies, page = group.copies, continuous_batching.WINDOW_PAGE
    assert copies.new.tolist() == [15, 16, (copies.pages - 1) * page]
    assert copies.sources[:17].tolist() == reads.tolist()
    assert copies.sources.numel() == copies.pages * page
    table = torch.tensor([[[3, 1], [-1, -1], [-1, -1]]], dtype=torch.int32)
    starts = {"cu_seq_lens_q": [0, 1, 1, 1], "cu_seq_lens_k": [0, 17, 17, 17]}
    ends = {name: torch.tensor(found, dtype=torch.int32) for name, found in starts.items()}
    assert derived(0, **ends, block_table=table).writes.tolist() == [16, 63, 63]


def test_each_pass_derives_its_tables_anew(calls: list[Any], steps: list[Any]) -> None:
    """A second pass over the same tensors, as a graph's capture is, and one derivation a pass."""
    model = made("Llama", "tuner")
    generated(model)
    given = {k: v for k, v in steps[-1].items() if k not in ("logits_processor_args",)}
    calls.clear()
    with torch.no_grad():
        for _ in range(2):
            model(**given)
    first, second, third, fourth = (call.seqused_k for call in calls)
    assert first is second and third is fourth and first is not third


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_other_versions_have_transformers_own(
    runtime: SimpleNamespace,
    steps: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if name == "Gemma2" and not continuous_batching._LAYERS_UPDATE:
        pytest.skip("Transformers' own attention has no soft cap in continuous batching here")
    monkeypatch.setattr(continuous_batching, "UNSERVED", TRANSFORMERS.refusal("5.25.1"))
    assert generated(made(name, "tuner")) == wanted(name)
    kind = runtime.refusal.Kind.BATCHING
    assert runtime.counters.stats().fallbacks == {kind: LAYERS * len(steps)}
    [line] = [r.getMessage() for r in caplog.records if r.name == "tuner.runtime"]
    assert (
        line == f"answered by Transformers' own attention: {kind}: {TRANSFORMERS.refusal('5.25.1')}"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("version", ["5.24.0", "5.25.0"])
def test_the_update_of_another_version_s_cache_is_left_alone(version: str) -> None:
    """It may be called otherwise there, also for models that do not use the tuner."""
    original, name = continuous_batching._update, continuous_batching.__name__
    cache = continuous_batching.paged_cache.PagedAttentionCache
    is_other = version == "5.25.0"

    def import_anew() -> None:
        package: Any = sys.modules["transformers"]  # generation may have put another one there
        package.__version__, cache.update = version, original
        del sys.modules[name]
        imported = importlib.import_module(name)
        assert (cache.update is original) == bool(imported.UNSERVED) == is_other

    assert exit_of_child(import_anew) == 0


def test_layers_that_share_keys(runtime: SimpleNamespace, steps: list[Any]) -> None:
    config = transformers.Gemma3nTextConfig(**SMALL | SHARING)
    model = functools.partial(drawn, "Gemma3n", config)
    assert generated(model("tuner")) == one_by_one(model("sdpa"))
    kinds = runtime.refusal.Kind
    kind = kinds.BATCHING if continuous_batching._LAYERS_UPDATE else kinds.DEVICE
    assert runtime.counters.stats().fallbacks == {kind: 4 * len(steps)}


def test_a_transformers_that_is_built_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_attention, "continuous_batching", None)
    tensors = torch.randn(3, 1, 2, 3, 16).unbind()
    with pytest.raises(ValueError, match=r"continuous batching of such layers .its internals"):
        tuned_attention.attention_forward(SimpleNamespace(), *tensors, None, read_index=[])


def test_what_continuous_batching_does_not_know() -> None:
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    cache = object()
    tensors = (torch.randn(1, 4, 3, 16), *torch.randn(2, 1, 2, 3, 16))
    for options, message in (
        ({"novel": 1}, "novel"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"indices": 1}, "sparse attention"),
    ):
        with pytest.raises(ValueError, match=message):
            tuned_attention.attention_forward(
                layer, *tensors, None, cache=cache, read_index=[], **options
            )
    with pytest.raises(ValueError, match="generate_batch"):
        tuned_attention.paged_attention_forward(layer, *tensors, None)


def test_other_attention_keeps_its_masks() -> None:
    needs_no_mask = continuous_batching.continuous_api.is_flash_attention_requested
    assert not needs_no_mask(SimpleNamespace(_attn_implementation="sdpa"))
    assert needs_no_mask(SimpleNamespace(_attn_implementation="tuner"))
    assert needs_no_mask(requested_attention_implementation="flash_attention_2")
    assert not needs_no_mask(requested_attention_implementation="sdpa")
