"""Layers of models as they are listed, against the real modules of Transformers: small models with
random sizes run on CPU, and their linear layers, experts, attention and masks are recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
#: Transformers 5.17 under torch 2.13.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

from transformers import masking_utils  # noqa: E402
from transformers.integrations import moe  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from tuner.cli import main  # noqa: E402
from tuner.errors import ConfigError  # noqa: E402
from tuner.problem import (  # noqa: E402
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    shapes,
    traced,
    written,
)
from tuner.problem.architecture import COLUMNS, HEAD, ROWS, Attention, Model  # noqa: E402

BATCH, LENGTH, WINDOW = 2, 9, 5
_FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"
"""Keyword of the cache, from Transformers 5.24 on and before."""


PLAIN = """
afmoe apertus arcee bert bitnet camembert cohere cohere2 cwm electra ernie4_5 ernie4_5_moe
exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode
gpt_neox gpt_oss granite granitemoe hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 jais2 laguna
lfm2 llama mellum minimax_m2 ministral ministral3 mistral mixtral modernbert nanochat nemotron
nomic_bert olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
roberta seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xlm-roberta qwen3_next
qwen3_5_text qwen3_5_moe_text
"""
#: Kinds of models that are checked, and what their small configurations need beside `small`.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    "dots1": {"n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"qk_rope_head_dim": 16, "head_dim": 16},
    "helium": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    "qwen2 windows on some layers": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2 without a soft cap": {"attn_logit_softcapping": None},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral without a window": {"sliding_window": None},
}


def small(name: str) -> dict[str, Any]:
    """A small configuration of a kind of model: random sizes in place of those that it has."""
    kind = name.partition(" ")[0]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} does not have {kind}")
    chance = random.Random(name)
    keys = chance.choice((1, 2))
    heads = keys * chance.choice((2, 4))
    width = chance.choice((16, 24, 32))
    hidden = heads * chance.choice((16, 32))
    sizes: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd"), hidden),
        **dict.fromkeys(("num_attention_heads", "n_head"), heads),
        "num_key_value_heads": keys,
        "head_dim": width,
        "intermediate_size": 8 * chance.randrange(9, 20),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
        "vocab_size": 8 * chance.randrange(20, 40),
        "sliding_window": WINDOW,
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), chance.choice((1, 2, 3))),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
        **dict.fromkeys(("n_group", "topk_group"), 1),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    default = transformers.CONFIG_MAPPING[kind]()
    values = {name: value for name, value in sizes.items() if hasattr(default, name)}
    return {"model_type": kind, "dtype": "bfloat16", **values, **KINDS[name]}


class Recorder:
    """Calls of a small model, as they happen."""

    def __init__(self) -> None:
        self.attentions: set[Any] = set()
        self.products: set[tuple[int, int, int, bool, str]] = set()
        self.experts: set[tuple[int, int, int, int]] = set()

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
    ) -> Any:
        _, heads, tokens, width = query.shape
        seen = torch.ones(tokens, key.shape[2], dtype=torch.bool)
        if attention_mask is not None:
            assert attention_mask.dtype == torch.bool
            (seen,) = attention_mask[0]
        elif tokens > 1 and more.get("is_causal", module.is_causal):
            seen = seen.tril()
        order = "bhsd" if query.stride(1) > query.stride(2) else "bshd"
        sinks = more.get("s_aux") is not None or more.get("sinks") is not None
        widths = width, value.shape[3]
        sizes = heads, key.shape[1], *widths, more.get("softcap") or 0.0, sinks
        shape = None if 1 in query.shape[1:3] else order
        self.attentions.add((*sizes, shape, tuple(map(tuple, seen.tolist()))))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    @contextlib.contextmanager
    def recording(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        linear, grouped = torch.nn.functional.linear, moe._grouped_mm

        def recorded(input: Any, weight: Any, bias: Any = None) -> Any:
            self._add(input, *weight.shape, bias is not None, "col", weight.dtype)
            return linear(input, weight, bias)

        def recorded_experts(input: Any, weight: Any, offs: Any) -> Any:
            groups, k, n = weight.shape
            self.experts.add((groups, len(input), n, k))
            return grouped(input, weight, offs)

        def hook(module: Any, arguments: Any, _: Any) -> None:
            k, n = module.weight.shape
            self._add(arguments[0], n, k, True, "row", module.weight.dtype)

        hooks = [
            module.register_forward_hook(hook)
            for module in model.modules()
            if isinstance(module, Conv1D)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", recorded)
            patch.setattr(moe, "_grouped_mm", recorded_experts)
            yield
        for one in hooks:
            one.remove()

    def _add(self, input: Any, n: int, k: int, has_bias: bool, layout: str, dtype: Any) -> None:
        if dtype == torch.bfloat16:
            self.products.add((input.numel() // k, n, k, has_bias, layout))


def made(values: dict[str, Any], recorder: Recorder) -> Any:
    """The model of a configuration, whose attention and masks are recorded."""

    def mask(*arguments: Any, **options: Any) -> Any:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*arguments, **options)

    transformers.AttentionInterface.register("recorder", recorder.attend)
    transformers.AttentionMaskInterface.register("recorder", mask)
    kind = values["model_type"]
    options = {name: value for name, value in values.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **options).get_text_config(decoder=True)
    torch.manual_seed(0)
    is_decoder = kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    model = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    config._attn_implementation = "recorder"
    made = model.from_config(config, dtype=torch.bfloat16).eval()
    with contextlib.suppress(ValueError):  # a model without experts
        made.set_experts_implementation("grouped_mm")
    return made


def seen_by(attention: Attention, queries: int, keys: int) -> tuple[tuple[bool, ...], ...]:
    """Keys that each query sees, by an attention of the listing."""
    left, right = (keys if side < 0 else side for side in (attention.left, attention.right))
    return tuple(
        tuple(query - left <= key <= query + right for key in range(keys))
        for query in range(queries)
    )


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_what_is_listed_is_what_the_model_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, recorder = small(name), Recorder()
    listed = shapes.architecture(values)
    model = made(values, recorder)
    options = {"use_cache": True} if listed.is_causal and listed.attentions else {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    with recorder.recording(model, monkeypatch):
        out = model(torch.ones(BATCH, LENGTH, dtype=torch.long), **options)
    compare(listed, recorder, LENGTH, decode=False)
    if not listed.is_causal or not listed.attentions or listed.is_latent:
        return  # a step expands every latent vector of the cache anew
    after = Recorder()
    transformers.AttentionInterface.register("recorder", after.attend)
    with after.recording(model, monkeypatch):
        cache = {CACHE: getattr(out, CACHE)}
        model(torch.ones(BATCH, 1, dtype=torch.long), **cache, **options)
    compare(listed, after, LENGTH + 1, decode=True)


def compare(listed: Model, recorder: Recorder, length: int, *, decode: bool) -> None:
    """Problems and layers of the listing against the recorded calls of one pass."""
    ops = ("gemm", "grouped_gemm")
    found = shapes.problems(listed, [BATCH], [length], decode=decode, ops=ops)
    products = {
        (one.m, one.n, one.k, one.epilogue == "bias", one.layout_b)
        for one in found.problems
        if isinstance(one, GemmProblem)
    }
    assert products == recorder.products
    experts = {
        (one.groups, one.m, one.n, one.k)
        for one in found.problems
        if isinstance(one, GroupedGemmProblem)
    }
    assert experts == {(g, 1 << (m - 1).bit_length(), n, k) for g, m, n, k in recorder.experts}
    queries = 1 if decode else length
    attentions = set()
    for one in listed.attentions:
        keys = min(length, one.left + 1) if decode and one.left >= 0 else length
        order = "bhsd" if one.is_query_heads_first else "bshd"
        seen = ((True,) * keys,) if decode else seen_by(one, queries, keys)
        shape = None if decode or one.heads_q == 1 else order
        widths = one.head_dim, one.value_dim or one.head_dim
        sizes = one.heads_q, one.heads_kv, *widths, one.softcap, one.has_sinks
        attentions.add((*sizes, shape, seen))
    if any("attention" in reason for reason in listed.left_out):
        assert attentions < recorder.attentions
    else:
        assert attentions == recorder.attentions


#: Configurations that both ways read, beside the sizes of `small`.
WRITTEN: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in written.KINDS},
    **{name: KINDS[name] for name in KINDS if name.partition(" ")[0] in written.KINDS},
    "qwen3 with biases": {"attention_bias": True},
    "qwen3 windows": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2 layers": {"use_sliding_window": True, "layer_types": ["full_attention"] * 4},
    "llama swish": {"hidden_act": "swish"},
    "llama gelu": {"hidden_act": "gelu"},
    "gemma with biases": {"attention_bias": True},
    "gpt2 inner": {"n_inner": 72},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_alone_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, name, WRITTEN[name])
    values = small(name)
    assert unordered(written.architecture(values)) == unordered(traced.architecture(values))


GAPS = {
    *("num_key_value_heads", "head_dim", "sliding_window", "vocab_size", "intermediate_size"),
    *("hidden_size", "n_embd", "n_positions", "max_position_embeddings"),
}


@pytest.mark.parametrize("kind", written.KINDS)
def test_a_file_with_gaps_says_the_same_or_is_refused(kind: str) -> None:
    values = small(kind)
    refused = []
    for name in sorted(values.keys() & GAPS):
        fewer = {key: value for key, value in values.items() if key != name}
        try:
            found = written.architecture(fewer)
        except ConfigError as exc:
            assert f"lacks {name}" in str(exc)
            refused.append(name)
            continue
        wanted = traced.architecture(fewer)
        if not found.positions:  # it does not say
            wanted = replace(wanted, positions=0)
        assert unordered(found) == unordered(wanted), name
    assert refused


def unordered(model: Model) -> tuple[Any, ...]:
    sets = (model.attentions, model.groups, model.gates, model.experts)
    layers = [*model.attentions, *itertools.chain.from_iterable(model.groups), *model.experts]
    counts = Counter({layer: layer.count for layer in layers})
    return (model.kind, *map(set, sets), counts, model.positions, model.dtype)


def test_ranks_share_layers_as_transformers_plans_it() -> None:
    """Names of a plan's layers, by whether their outputs or their inputs are shared."""
    planned: dict[str, set[str]] = {}
    for name in KINDS:
        if name not in transformers.CONFIG_MAPPING:
            continue
        config = transformers.CONFIG_MAPPING[name]
        for path, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
            planned.setdefault(path.rpartition(".")[2], set()).add(style)
    shared = {HEAD: {"colwise"}} | {key: planned[key] for key in planned if key in COLUMNS | ROWS}
    assert len(shared) > 8
    for key, styles in shared.items():
        wanted = "colwise" if key in COLUMNS else "rowwise"
        assert all(style.removeprefix("packed_").startswith(wanted) for style in styles), key


GEMMA3_12B = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
}
PALIGEMMA2_3B = {
    "model_type": "paligemma",
    "text_config": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
    },
}


def listed_by(tmp_path: Path, config: dict[str, Any], *words: str) -> tuple[int, list[str]]:
    """Exit code and problems of the command."""
    file, out = tmp_path / "config.json", tmp_path / "problems.json"
    file.write_text(json.dumps(config))
    code = main(["shapes", "--model", str(file), "--output", str(out), *words])
    return code, json.loads(out.read_text()) if code == 0 else []


def test_values_that_a_file_leaves_out_are_the_class_s(tmp_path: Path) -> None:
    """Heads of 256 are not the hidden size over their number."""
    words = ["--seqlen", "4096", "--op", "attention"]
    code, gemma3 = listed_by(tmp_path, GEMMA3_12B, *words)
    head = "op=attention,B=1,H=16,HKV=8,S=4096,D=256"
    tail = "dtype=bf16,layout=bshd_bhsd"
    assert (code, gemma3) == (
        0,
        [
            f"{head},causal=1,window=1023,{tail}",
            f"{head},mask=1,{tail}",
            f"{head},causal=1,{tail}",
        ],
    )
    code, paligemma = listed_by(tmp_path, PALIGEMMA2_3B, *words)
    head = "op=attention,B=1,H=8,HKV=4,S=4096,D=256"
    assert f"{head},causal=1,softcap=50,{tail}" in paligemma
    code, windowed = listed_by(tmp_path, PALIGEMMA2_3B, "--seqlen", "8192", "--op", "attention")
    assert any("window=4095,softcap=50" in label for label in windowed)


def test_gpt_oss_is_bf16_with_experts_and_sinks_over_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    code, labels = listed_by(tmp_path, config, "--seqlen", "1024")
    assert code == 0 and all("dtype=bf16" in label for label in labels)
    assert "op=grouped_gemm,G=32,M=4096,N=5760,K=2880,sizes=zipf,dtype=bf16" in labels
    assert "op=gemm,M=1024,N=4096,K=2880,dtype=bf16,epilogue=bias" in labels
    assert "left out: sinks=1 is for paged caches" in capsys.readouterr().err
    code, labels = listed_by(tmp_path, config, "--engine", "vllm", "--seqlen", "1024")
    assert {"left=127" in label or "window=127" in label for label in labels} == {True, False}
    assert all("sinks=1" in label for label in labels)


def test_quantised_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    assert listed_by(tmp_path, config, "--seqlen", "512")[0] == 0
    assert "left out: quantised weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "not_there"}, "model_type=not_there is not known to Transformers"),
        ({"model_type": "t5"}, "model_type=t5 is an encoder with a decoder"),
        ({"model_type": "llama", "hidden_size": "wide"}, "model_type=llama: "),
        ({"model_type": "llama", "dtype": "float32"}, "dtype=float32 has no kernels"),
        ({}, "model_type=None is not known"),
    ],
)
def test_what_is_not_known_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    message: str,
) -> None:
    assert listed_by(tmp_path, config) == (2, [])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_model_that_cannot_be_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called\non meta tensors")

    monkeypatch.setattr(traced, "_run", fail)
    assert listed_by(tmp_path, {"model_type": "llama"}) == (2, [])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model_type=llama cannot be run by Transformers" in line
    assert line.endswith("RuntimeError: Tensor.item() cannot be called on meta tensors")


def test_chunked_attention_is_left_out_and_latent_prompts_are_not() -> None:
    llama4 = traced.architecture({"model_type": "llama4_text", "num_hidden_layers": 4})
    assert any("not causal, full or a window" in reason for reason in llama4.left_out)
    deepseek = traced.architecture({"model_type": "deepseek_v3", "num_hidden_layers": 4})
    (attention,) = deepseek.attentions
    assert deepseek.is_latent and (attention.head_dim, attention.value_dim) == (192, 128)
    prompt, *_ = shapes.problems(deepseek, [1], [1024]).problems
    assert isinstance(prompt, AttentionProblem) and prompt.is_causal
    assert (prompt.head_dim, prompt.value_dim) == (192, 128)


@pytest.mark.parametrize(
    ("function", "width", "wanted"),
    [
        (masking_utils.causal_mask_function, 0, (-1, 0)),
        (masking_utils.bidirectional_mask_function, 0, (-1, -1)),
        (masking_utils.sliding_window_causal_mask_function(9000), 9000, (8999, 0)),
        (masking_utils.sliding_window_bidirectional_mask_function(65), 65, (65, 65)),
        (masking_utils.chunked_causal_mask_function(64, torch.zeros(1)), 64, None),
        (lambda b, h, q, k: (k <= q) & (k % 2 == 0), 0, None),
    ],
)
def test_masks_are_asked_what_they_show(function: Any, width: int, wanted: Any) -> None:
    assert traced.pattern_of(function, width) == wanted
