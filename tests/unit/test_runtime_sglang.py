"""SGLang's plug-in: which calls of its attention layers a tuned kernel is given, and how.

SGLang's own classes are stand-ins here; `test_sglang_versions.py` has the real ones.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paged_kernels import paged_kernels
from sglang_fakes import CHOICES, REGISTRY, SIZE, AttentionType, Metadata, Pool, runner, sglang

from tuner.errors import BenchmarkError, ConfigError, NotInvariantError

torch = pytest.importorskip("torch", reason="torch is not installed")

served = paged_kernels
__all__ = ["sglang"]
PAGES, HEADS, HEADS_KV, WIDTH, COLUMNS, SCALE = 40, 8, 2, 64, 300, 0.125


def pool() -> Pool:
    keys, values = (
        torch.zeros(PAGES * SIZE, HEADS_KV, WIDTH, dtype=torch.bfloat16) for _ in range(2)
    )
    return Pool(keys, values)


class Layer:
    """A key of a dictionary, as a module is."""


def layer(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "layer_id": 3,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": HEADS_KV,
        "tp_v_head_num": HEADS_KV,
        "head_dim": WIDTH,
        "v_head_dim": WIDTH,
        "scaling": SCALE,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "k_scale": None,
        "v_scale": None,
        **changes,
    }
    made = Layer()
    vars(made).update(plain)
    return made


def metadata(queries: tuple[int, ...], keys: int, **changes: Any) -> Metadata:
    given: dict[str, Any] = {
        "cache_seqlens_int32": torch.full((len(queries),), keys).int(),
        "max_seq_len_q": max(queries),
        "max_seq_len_k": keys,
        "cu_seqlens_q": torch.tensor([0, *queries]).cumsum(0).int(),
        "page_table": torch.zeros(len(queries), COLUMNS).int(),
        **changes,
    }
    return Metadata(**given)


def batch(**changes: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "out_cache_loc": "slots",
        "spec_info": None,
        "dcp_kv_mask": None,
        "is_cp_active": False,
        **changes,
    }
    return SimpleNamespace(**plain)


def backend_of(sglang: SimpleNamespace, step: Metadata, **changes: Any) -> Any:
    made = sglang.backend.SglangBackend(runner(pool(), **changes))
    made.forward_metadata = step
    return made


def rows(tokens: int) -> tuple[Any, Any, Any]:
    """Queries that are a slice of a projection, new keys and values."""
    projected = torch.zeros(tokens, (HEADS + 2 * HEADS_KV) * WIDTH, dtype=torch.bfloat16)
    query = projected[:, : HEADS * WIDTH]
    return query, *(torch.ones(tokens, HEADS_KV, WIDTH, dtype=torch.bfloat16) for _ in range(2))


def paged(backend: Any, query: Any, step: Metadata, keys: int, **options: Any) -> Any:
    views = (b.view(-1, SIZE, HEADS_KV, WIDTH) for b in backend.token_to_kv_pool.buffers)
    return importlib.import_module("tuner.runtime.attention.paged").paged_attention(
        query.view(-1, HEADS, WIDTH), *views, step.page_table, step.cache_seqlens_int32,
        step.cu_seqlens_q, step.max_seq_len_q, keys, scale=SCALE, **options,
    )  # fmt: skip


def test_in_the_mode_of_one_order_of_additions_nobody_else_answers(
    sglang: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    from tuner.errors import NotInvariantError
    from tuner.runtime.call import invariance

    step = metadata((1, 1), 100)
    tensors = rows(2)
    with invariance.deterministic("batch"):
        backend = backend_of(sglang, step)
        backend.forward_decode(*tensors, layer(), batch())
        assert not sglang.own
        with pytest.raises(NotInvariantError):
            backend.forward_decode(*tensors, layer(attn_type=AttentionType.ENCODER_ONLY), batch())
    assert not sglang.own


@pytest.mark.parametrize(
    ("queries", "of_layer", "wanted"),
    [
        ((1, 1, 1), {}, {}),
        ((1, 9, 3), {}, {}),
        ((4, 4), {"sliding_window_size": 32, "logit_cap": 20.0}, {"window": (32, 0)}),
        ((1, 1), {}, {"sinks": torch.ones(HEADS)}),
    ],
)
def test_a_layer_launches_what_paged_attention_launches(
    sglang: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    queries: tuple[int, ...],
    of_layer: dict[str, Any],
    wanted: dict[str, Any],
) -> None:
    step = metadata(queries, 100)
    backend, (q, k, v) = backend_of(sglang, step), rows(sum(queries) + 2)  # padded for a graph
    way = backend.forward_decode if max(queries) == 1 else backend.forward_extend
    options = {name: value for name, value in wanted.items() if name == "sinks"}
    of_batch, of_model = batch(), layer(**of_layer)
    out = way(q, k, v, of_model, of_batch, **options)
    assert out.shape == (len(q), HEADS * WIDTH) and not sglang.own
    [(written_layer, at, *tensors, k_scale, v_scale)] = backend.token_to_kv_pool.written
    assert written_layer is of_model and at == ("slots", None) and tensors == [k, v]
    assert k_scale is None and v_scale is None
    softcap = {"softcap": of_layer["logit_cap"]} if "logit_cap" in of_layer else {}
    result = torch.empty(len(q), HEADS, WIDTH, dtype=q.dtype)
    paged(backend, q, step, 104, out=result, **softcap, **wanted)
    own, other = served.launched
    assert served.posed[0] == served.posed[-1] and own[1:] == other[1:]
    own_at, other_at = list(own[0]), list(other[0])
    assert own_at[3] == out.data_ptr() and other_at[3] == result.data_ptr()
    own_at[3] = other_at[3] = None
    assert own_at == other_at
    assert on_cpu.counters.stats().hits == 2


def test_an_output_that_sglang_has_allocated_is_written(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 2), 100)), rows(3)
    out = torch.empty(3, HEADS * WIDTH, dtype=torch.bfloat16)
    found = backend.forward_extend(q, k, v, layer(), batch(_attn_output=out))
    assert found.data_ptr() == out.data_ptr() == served.launched[0][0][3]


def test_keys_that_are_shared_or_kept_are_not_written(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100)), rows(2)
    backend.forward_decode(q, None, None, layer(), batch())
    backend.forward_decode(q, k, v, layer(), batch(), save_kv_cache=False)
    assert len(served.launched) == 2 and not backend.token_to_kv_pool.written


def test_layers_of_a_step_share_one_decision(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    step = metadata((1, 2), 100)
    backend, (q, k, v) = backend_of(sglang, step), rows(3)
    for _ in range(2):
        backend.forward_extend(q, k, v, layer(), batch())
    assert len(served.posed) == 1 and len(served.launched) == 2
    backend.forward_extend(q, k, v, layer(sliding_window_size=7), batch())
    backend.forward_metadata = metadata((1, 2), 100)
    backend.forward_extend(q, k, v, layer(), batch())
    assert [p.window_left for _, p in served.posed] == [-1, 7, -1]


def test_layers_with_a_window_read_the_pool_of_windows(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    step = metadata((1, 1), 100, swa_page_table=torch.ones(2, COLUMNS).int())
    step.swa_out_cache_loc = "slots of windows"
    backend, (q, k, v) = backend_of(sglang, step, use_sliding_window_kv_pool=True), rows(2)
    backend.forward_decode(q, k, v, layer(sliding_window_size=7), batch())
    backend.forward_decode(q, k, v, layer(), batch())
    assert [at[5] for at, _, _ in served.launched] == [
        step.swa_page_table.data_ptr(),
        step.page_table.data_ptr(),
    ]
    assert [at for _, at, *_ in backend.token_to_kv_pool.written] == 2 * [
        ("slots", "slots of windows")
    ]


def test_heads_before_slots_are_read_as_they_lie(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100)), rows(2)
    kept = backend.token_to_kv_pool
    kept.buffers = tuple(b.view(PAGES, HEADS_KV, SIZE, WIDTH) for b in kept.buffers)
    backend.forward_decode(q, k, v, layer(), batch())
    kept.buffers = tuple(b.view(PAGES, SIZE * HEADS_KV, WIDTH) for b in kept.buffers)
    assert backend.forward_decode(q, k, v, layer(), batch()) == "SGLang's own"
    assert len(served.launched) == 1


MASK = "the engine asks for a mask that no tuned kernel has"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"attn_type": AttentionType.ENCODER_ONLY}, {}, {}, {}, "attention without a growing cache"),
    ({"is_cross_attention": True}, {}, {}, {}, "attention without a growing cache"),
    ({"v_head_dim": 32}, {}, {}, {}, "a cache that lies in an unknown way"),
    ({}, {"image_token_ranges": torch.zeros(2)}, {}, {}, MASK),
    ({}, {"window_size": (3, 0)}, {}, {}, MASK),
    ({}, {"encoder_max_seq_len_k": 7}, {}, {}, MASK),
    ({}, {"page_table": None}, {}, {}, "a cache that lies in an unknown way"),
    ({}, {}, {"is_cp_active": True}, {}, "keys are spread over ranks"),
    ({}, {}, {"dcp_kv_mask": torch.zeros(2)}, {}, "keys are spread over ranks"),
    ({}, {}, {}, {"return_lse": True}, MASK),
    ({}, {}, {}, {"rel_bias": torch.zeros(2)}, MASK),
]


@pytest.mark.parametrize(("of_layer", "of_step", "of_batch", "options", "kind"), REFUSED)
def test_what_no_kernel_takes_is_sglang_s_own_and_said_once(
    sglang: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    of_layer: dict[str, Any],
    of_step: dict[str, Any],
    of_batch: dict[str, Any],
    options: dict[str, Any],
    kind: str,
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100, **of_step)), rows(2)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        for _ in range(3):
            out = backend.forward_decode(q, k, v, layer(**of_layer), batch(**of_batch), **options)
            assert out == "SGLang's own"
    assert not served.launched and not backend.token_to_kv_pool.written
    (given, named), *_ = sglang.own
    assert given[:3] == (q, k, v) and given[5] is True and named == options
    assert on_cpu.counters.stats().fallbacks == {kind: 3}
    [record] = [r for r in caplog.records if r.name == "tuner.runtime"]
    assert record.getMessage().startswith(f"answered by SGLang's own FlashAttention: {kind}")


def test_options_that_ask_for_nothing_are_served(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100)), rows(2)
    backend.forward_decode(q, k, v, layer(), batch(), return_lse=False, rel_bias=None)
    assert len(served.launched) == 1 and not sglang.own


def test_a_tree_of_drafts_is_sglang_s_own_and_a_chain_is_served(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    drafts, (q, k, v) = batch(spec_info="drafts"), rows(8)
    chain = backend_of(sglang, metadata((4, 4), 100), topk=1)
    chain.forward_extend(q, k, v, layer(), drafts)
    [(_, problem)] = served.posed
    assert problem.is_causal and problem.seqlen_q == 4
    tree = backend_of(sglang, metadata((4, 4), 100), topk=2)
    assert tree.forward_extend(q, k, v, layer(), drafts) == "SGLang's own"
    tree.forward_metadata = metadata((4, 4), 100)  # of a prompt
    assert tree.forward_extend(q, k, v, layer(), batch()) != "SGLang's own"


def test_factors_of_a_cache_in_another_type_are_sglang_s_own(
    sglang: SimpleNamespace, served: SimpleNamespace
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100)), rows(2)
    scaled = layer(k_scale=torch.ones(1), v_scale=torch.ones(1))
    assert backend.forward_decode(q, k, v, scaled, batch()) != "SGLang's own"
    backend = backend_of(sglang, metadata((1, 1), 100), kv_cache_dtype_str="bf16")
    assert backend.forward_decode(q, k, v, scaled, batch()) == "SGLang's own"


def test_a_call_without_a_kernel_is_sglang_s_own_and_writes_once(
    sglang: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = on_cpu.refusal
    served.refusal = refusal.Refusal(refusal.Kind.MISS, "B=2")
    backend, (q, k, v) = backend_of(sglang, metadata((1, 1), 100)), rows(2)
    for _ in range(2):
        assert backend.forward_decode(q, k, v, layer(), batch()) == "SGLang's own"
    served.refusal = None

    def launch(*args: Any) -> None:
        raise BenchmarkError("too many resources requested")

    monkeypatch.setattr(on_cpu.plan.KernelPlan, "_launch", launch)
    backend.forward_metadata = metadata((1, 1), 100)
    assert backend.forward_decode(q, k, v, layer(), batch()) == "SGLang's own"
    assert len(backend.token_to_kv_pool.written) == 2
    assert [given[5] for given, _ in sglang.own] == [False, True, False]
    assert on_cpu.counters.stats().fallbacks["no measured winner"] == 2


def test_a_captured_step_takes_as_many_keys_as_its_table_holds(
    sglang: SimpleNamespace, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, (q, k, v) = backend_of(sglang, metadata((1,), 1)), rows(1)
    asked = list[bool]()
    calls = importlib.import_module("tuner.runtime.engines.calls")
    monkeypatch.setattr(
        calls.proven_kernels, "is_engines", lambda problem, gpu, flag: asked.append(flag)
    )
    for in_capture, keys in ((True, COLUMNS * SIZE), (False, 1)):
        step = metadata((1,), 1)
        backend.init_forward_metadata_out_graph(batch(metadata=step), in_capture=in_capture)
        backend.forward_decode(q, k, v, layer(), batch())
        assert step.max_seq_len_k == keys
    assert [p.seqlen_kv for _, p in served.posed] == [8192, 2]  # one above its query
    assert asked == [True, False], "a graph serves shorter lengths, too"


def test_a_setting_leaves_long_chunks_to_sglang(
    sglang: SimpleNamespace, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_SGLANG_QUERIES", "4")
    q, k, v = rows(6)
    for queries, is_own in (((4, 2), False), ((5, 1), True)):
        backend = backend_of(sglang, metadata(queries, 100))
        out = backend.forward_extend(q, k, v, layer(), batch())
        assert isinstance(out, str) == is_own


def test_a_wrong_setting_is_said_when_the_model_is_made(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_SGLANG_QUERIES", "few")
    with pytest.raises(ConfigError, match=r"TUNER_SGLANG_QUERIES=few is out of range .allowed"):
        backend_of(sglang, metadata((1,), 1))


def entry_point() -> Callable[[], None]:
    """The function that SGLang calls in each of its processes."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["sglang.srt.plugins"]["tuner"].split(":")
    register: Callable[[], None] = getattr(importlib.import_module(module), name)
    return register


def test_the_entry_point_registers_backend_and_quantisation(
    sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    entry_point()(), entry_point()()
    choices = sys.modules[CHOICES]
    assert choices.ATTENTION_BACKEND_CHOICES == ["fa3", "tuner"]
    assert choices.QUANTIZATION_CHOICES == ["fp8", "tuner"]
    methods = sys.modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS
    assert methods["tuner"].get_name() == "tuner"
    create = sys.modules[REGISTRY].ATTENTION_BACKENDS["tuner"]
    assert isinstance(create(runner(pool())), sglang.backend.SglangBackend)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"page_size": 1}, "pages have 1 slots (allowed: multiples of 16); start it with --page-s"),
        ({"page_size": 24}, "pages have 24 slots"),
        ({"use_mla": True}, "latent attention"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "the cache is torch.float8_e4m3fn"),
        ({"num_splits": 1}, "results that must not depend on the batch"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"local_attn_builder": object()}, "attention in chunks"),
        ({"is_prefill_aware_swa": True}, "windows that know the prompt"),
        ({"_kv_shard_pool": object()}, "a cache spread over ranks"),
        ({"fa_skip_kv_cache": True}, "embedding without a cache"),
    ],
)
def test_a_model_that_is_not_served_has_sglang_s_backend_and_one_line_says_why(
    sglang: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    line: str,
) -> None:
    entry_point()()
    create = sys.modules[REGISTRY].ATTENTION_BACKENDS["tuner"]
    made = create(runner(pool(), **changes))
    assert made == "SGLang's backend"
    [record] = caplog.records
    assert record.getMessage().startswith(f"SGLang keeps its own kernels: {line}")


def test_a_model_that_is_not_served_is_an_error_where_bits_must_not_depend_on_the_batch(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point()()
    create = sys.modules[REGISTRY].ATTENTION_BACKENDS["tuner"]
    monkeypatch.setenv("TUNER_BATCH_INVARIANT", "1")
    with pytest.raises(NotInvariantError, match="pages have 1 slots"):
        create(runner(pool(), page_size=1))
    assert isinstance(create(runner(pool())), sglang.backend.SglangBackend)


def test_a_fault_of_the_plug_in_leaves_sglang_s_backend(
    sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point()()
    create = sys.modules[REGISTRY].ATTENTION_BACKENDS["tuner"]
    other = runner(pool())
    del other.use_mla  # as a later SGLang may rename it
    assert create(other) == "SGLang's backend"
    [record] = caplog.records
    assert "the plug-in raised AttributeError" in record.getMessage()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "0.5", "dev"])
def test_another_version_is_one_line_and_sglang_s_backend(
    sglang: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", version)
    entry_point()()
    assert sys.modules[REGISTRY].ATTENTION_BACKENDS["tuner"](None) == "SGLang's backend"
    [record] = caplog.records
    wanted = f"SGLang keeps its own kernels: SGLang {version} (served: 0.5.23)"
    assert record.getMessage() == wanted
    assert sys.modules[CHOICES].ATTENTION_BACKEND_CHOICES == ["fa3", "tuner"]
    assert sys.modules[CHOICES].QUANTIZATION_CHOICES == ["fp8"]


@pytest.mark.parametrize("name", [REGISTRY, CHOICES, "sglang"])
def test_the_entry_point_stops_no_engine(
    sglang: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    register = entry_point()
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    register()
    [record] = caplog.records
    line = record.getMessage()
    assert "\n" not in line and "ModuleNotFoundError" in line
    assert line.endswith("(served: 0.5.23)")


@pytest.mark.parametrize(
    ("changes", "resolved", "size"),
    [
        ({}, 1, 64),
        ({"attention_backend": "fa3", "decode_attention_backend": "tuner"}, 1, 64),
        ({"attention_backend": "fa3"}, 1, None),
        ({}, 64, None),
        ({"speculative_eagle_topk": 4}, 1, None),
        ({"uses_mamba_radix_cache": True}, 1, None),
        ({"has_latents": True}, 1, None),
    ],
)
def test_pages_without_an_option_have_slots_that_kernels_read(
    sglang: SimpleNamespace, changes: dict[str, Any], resolved: int, size: int | None
) -> None:
    from tuner.runtime.engines.sglang import default_page_size

    plain = {
        **{"attention_backend": "tuner", "speculative_eagle_topk": None, "has_latents": False},
        **{"prefill_attention_backend": None, "decode_attention_backend": None},
        "uses_mamba_radix_cache": False,
    }
    view = SimpleNamespace(**{**plain, **changes})
    answer = default_page_size({"page_size": resolved}, view)
    assert answer == (size and {"page_size": size})
