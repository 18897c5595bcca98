"""vLLM's plug-in: which calls of its attention layers a tuned kernel is given, and how."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_scheduled
from paged_kernels import paged_kernels
from vllm_fakes import LONGEST, engine, installed

from tuner.errors import BenchmarkError, ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

served = paged_kernels
__all__ = ["engine"]
PAGES, SIZE, HEADS, HEADS_KV, WIDTH, COLUMNS = 40, 16, 8, 2, 64, 300
SCALE = 0.125
FACTORS = {"q": 0.5, "k": 2.0, "v": 3.0}


@pytest.fixture(autouse=True)
def never_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is never answered by PyTorch's operations, which wait for the device."""

    def composed(call: Any) -> Any:
        raise AssertionError("composed of PyTorch's operations")

    paged = importlib.import_module("tuner.runtime.attention.paged")
    monkeypatch.setattr(paged, "composed", composed)


def layer(engine: SimpleNamespace, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": WIDTH,
        "scale": SCALE,
        "num_kv_heads": HEADS_KV,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        **changes,
    }
    return engine.backend.TunerImpl(**given)


def step(engine: SimpleNamespace, queries: tuple[int, ...], keys: int, **changes: Any) -> Any:
    """Metadata of sequences with so many queries."""
    given: dict[str, Any] = {
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "query_start_loc": torch.tensor([0, *queries]).cumsum(0).int(),
        "max_seq_len": keys,
        "seq_lens": torch.full((len(queries),), keys).int(),
        "block_table": torch.zeros(len(queries), COLUMNS).int(),
        "slot_mapping": None,
        "use_cascade": False,
        "common_prefix_len": 0,
        "cu_prefix_query_lens": None,
        "prefix_kv_lens": None,
        "suffix_kv_lens": None,
        **changes,
    }
    kind = engine.flash_attn.FlashAttentionMetadata
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in given.items() if name in known or name in changes}
    return kind(**given)


def tensors(tokens: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    """Queries that are a slice of a projection, a cache that lies slot by slot, an output."""
    projected = torch.zeros(tokens, (HEADS + 2 * HEADS_KV) * WIDTH, dtype=dtype)
    query = projected[:, : HEADS * WIDTH].view(tokens, HEADS, WIDTH)
    cache = torch.zeros(PAGES, SIZE, HEADS_KV, 2 * WIDTH, dtype=dtype).transpose(1, 2)
    return query, cache, torch.zeros(tokens, HEADS, WIDTH, dtype=dtype)


def call(impl: Any, metadata: Any, given: tuple[Any, Any, Any], **options: Any) -> Any:
    query, cache, out = given
    return impl.forward(None, query, query, query, cache, metadata, output=out, **options)


def paged(given: tuple[Any, Any, Any], metadata: Any, keys: int, **options: Any) -> Any:
    query, cache, out = given
    halves = (cache.transpose(1, 2)[..., half] for half in (slice(WIDTH), slice(WIDTH, None)))
    return importlib.import_module("tuner.runtime.attention.paged").paged_attention(
        query, *halves, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        metadata.max_query_len, keys, scale=SCALE, out=out, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "options"),
    [
        ((1, 1, 1), {}),
        ((1, 9, 0, 1), {}),
        ((4, 4), {"sliding_window": 33, "logits_soft_cap": 20.0}),
        ((1, 1), {"sinks": torch.ones(HEADS).bfloat16()}),
    ],
)
def test_a_layer_launches_what_paged_attention_launches(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    queries: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    impl, metadata = layer(engine, **options), step(engine, queries, 100)
    given = tensors(sum(queries) + 2)  # a batch that is padded for a graph
    assert call(impl, metadata, given) is given[2]
    wanted: dict[str, Any] = {}
    if "sliding_window" in options:
        wanted = {"window": (32, 0), "softcap": 20.0}
    if "sinks" in options:
        wanted = {"sinks": impl._wide_sinks}
        assert impl._wide_sinks.dtype == torch.float32
    paged(given, metadata, 104, **wanted)
    assert served.launched[0] == served.launched[1]
    assert served.posed[0] == served.posed[-1]
    query, cache, out = given
    starts = query.data_ptr(), cache.data_ptr(), cache.data_ptr() + 2 * WIDTH, out.data_ptr()
    assert served.launched[0][0][:4] == list(starts)
    assert on_cpu.counters.stats().hits == 2 and not engine.own


def test_a_cache_of_e4m3_comes_with_its_factors(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TUNER_VLLM_QUERIES", "1000")
    impl, metadata = layer(engine, kv_cache_dtype="fp8"), step(engine, (1, 2), 100)
    query, cache, out = tensors(3)
    query, cache = query.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn)
    of_bytes = query, cache.view(torch.uint8), out
    owner = SimpleNamespace(
        **{f"_{name}_scale": torch.tensor(value) for name, value in FACTORS.items()}
    )
    impl.load(SimpleNamespace(kv_cache=of_bytes[1], **vars(owner)), metadata)
    given = query, query, query, of_bytes[1], metadata
    assert impl.forward(owner, *given, output=out) is out
    factors = {f"{name}_scale": getattr(owner, f"_{name}_scale") for name in "qkv"}
    paged((query, cache, out), metadata, 104, **factors)
    own, wanted = (one[0] for one in served.launched)
    assert own[:-3] == wanted[:-3]
    held = [scale.tolist() for scale in impl._scales]
    counts = HEADS, HEADS_KV, HEADS_KV
    assert held == [[f] * count for f, count in zip(FACTORS.values(), counts, strict=True)]
    assert own[-3:] == [scale.data_ptr() for scale in impl._scales]
    # Weights that are loaded again: a captured graph reads the same memory.
    owner._k_scale.fill_(4.0)
    impl.process_weights_after_loading(torch.bfloat16)
    impl.forward(owner, *given, output=out)
    assert impl._scales[1].tolist() == [4.0] * HEADS_KV
    assert served.launched[-1][0][-3:] == own[-3:]
    assert on_cpu.counters.stats().hits == 3 and not engine.own


def test_a_layer_s_rank_agrees_with_the_others(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed: list[str] = []
    monkeypatch.setattr(engine.backend.distributed, "agree_in_engine", lambda: agreed.append("yes"))
    layer(engine)
    assert agreed == ["yes"]


def test_layers_of_a_step_share_one_decision(
    engine: SimpleNamespace, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, given = step(engine, (1, 2), 100), tensors(3)
    for impl in (layer(engine), layer(engine)):
        call(impl, metadata, given)
    assert len(served.posed) == 1 and len(served.launched) == 2
    call(layer(engine, sliding_window=8), metadata, given)
    call(layer(engine), dataclasses.replace(metadata, max_query_len=5), given)
    problems = [problem for _, problem in served.posed]
    assert [p.window_left for p in problems] == [-1, 7, -1]
    assert [p.seqlen_q for p in problems] == [2, 2, 2] and len(served.launched) == 4


def test_a_copy_of_the_metadata_for_another_group_is_another_step(
    engine: SimpleNamespace, served: SimpleNamespace
) -> None:
    metadata, given, impl = step(engine, (1, 2), 100), tensors(3), layer(engine)
    call(impl, metadata, given)
    metadata.block_table = torch.zeros(2, COLUMNS).int()  # as update_block_table has it
    call(impl, metadata, given)
    tables = [addresses[5] for addresses, _, _ in served.launched]
    assert tables[1] == metadata.block_table.data_ptr() != tables[0]


def test_a_window_of_the_step_goes_before_that_of_the_layer(
    engine: SimpleNamespace, served: SimpleNamespace
) -> None:
    if "sliding_window" not in engine.fields:
        pytest.skip("steps of this vLLM have no window")
    impl = layer(engine, sliding_window=8)
    for changes in ({"sliding_window": (15, 0)}, {"sliding_window": (15, 15), "causal": False}):
        call(impl, step(engine, (2, 40), 100, **changes), tensors(42))
    windows = [(p.window_left, p.window_right, p.is_causal) for _, p in served.posed]
    assert windows == [(15, -1, True), (15, 15, False)]


def test_a_layer_s_window_is_on_both_sides_of_queries_that_are_not_causal(
    engine: SimpleNamespace, served: SimpleNamespace
) -> None:
    if "sliding_window" in engine.fields:
        pytest.skip("steps of this vLLM have a window")
    impl = layer(engine, sliding_window=16)
    for is_causal in (True, False):
        call(impl, step(engine, (2, 40), 100, causal=is_causal), tensors(42))
    call(layer(engine), step(engine, (2, 40), 100, causal=False), tensors(42))
    windows = [(p.window_left, p.window_right, p.is_causal) for _, p in served.posed]
    assert windows == [(15, -1, True), (15, 15, False), (-1, -1, False)]


def test_memory_is_profiled_by_vllm(engine: SimpleNamespace, served: SimpleNamespace) -> None:
    assert call(layer(engine), None, tensors(4)) == "vLLM's own"
    assert not served.launched and len(engine.own) == 1


ALIBI = [1.0] * HEADS
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"alibi_slopes": ALIBI}, {}, "ALiBi"),
    ({"attn_type": "encoder_only"}, {}, "attention without a growing cache"),
    ({"kv_cache_dtype": "fp8_e5m2"}, {}, "the cache has another type than the queries"),
    ({}, {"use_cascade": True}, "cascade attention"),
    (
        {},
        {"causal": torch.ones(2).int()},
        "the engine asks for a mask that no tuned kernel has",
    ),
    (
        {},
        {"mm_prefix_range_tensor": torch.zeros(2, 1, 2).int()},
        "the engine asks for a mask that no tuned kernel has",
    ),
    (
        {},
        {"mm_prefix_query_range_tensor": torch.zeros(2, 2).int()},
        "the engine asks for a mask that no tuned kernel has",
    ),
    (
        {},
        {"rswa_prefix_lens": torch.zeros(2).int()},
        "the engine asks for a mask that no tuned kernel has",
    ),
    ({}, {"seq_lens": torch.zeros(2)}, "no kernel takes such tensors"),
]


@pytest.mark.parametrize(("of_layer", "of_step", "kind"), REFUSED)
def test_what_no_kernel_takes_is_vllm_s_own_and_said_once(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    of_layer: dict[str, Any],
    of_step: dict[str, Any],
    kind: str,
) -> None:
    if absent := of_step.keys() - engine.fields:
        pytest.skip(f"steps of this vLLM have no {', '.join(absent)}")
    impl, metadata = layer(engine, **of_layer), step(engine, (1, 1), 100, **of_step)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        for _ in range(3):
            assert call(impl, metadata, tensors(2)) == "vLLM's own"
    assert not served.launched and len(engine.own) == 3
    assert on_cpu.counters.stats().fallbacks == {kind: 3}
    [record] = [r for r in caplog.records if r.name == "tuner.runtime"]
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    assert record.getMessage().startswith(f"answered by vLLM's own FlashAttention: {kind}")


def test_a_cache_that_lies_otherwise_is_vllm_s_own(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    query, cache, out = tensors(2)
    metadata, impl = step(engine, (1, 1), 100), layer(engine)
    for other in (cache.transpose(1, 2), cache[None], cache[..., :WIDTH]):
        assert call(impl, metadata, (query, other, out)) == "vLLM's own"
    assert not served.posed
    assert on_cpu.counters.stats().fallbacks == {"a cache that lies in an unknown way": 3}


def test_a_mask_of_a_later_vllm_is_vllm_s_own(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    """Any field of the metadata that is not known, whatever its name."""
    metadata = step(engine, (1, 1), 100)
    kind = dataclasses.make_dataclass("Later", [("novel_mask", Any, None)], bases=(type(metadata),))
    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    given = tensors(2)
    assert call(layer(engine), kind(**fields), given) is given[2]
    masked = kind(**fields, novel_mask=torch.zeros(2))
    assert call(layer(engine), masked, given) == "vLLM's own"
    [reason] = on_cpu.counters._counts.said - set(on_cpu.counters.stats().fallbacks)
    assert reason.endswith(": novel_mask")


@pytest.mark.parametrize("attribute", ["dcp_world_size", "pcp_world_size"])
def test_a_cache_over_several_ranks_is_vllm_s_own(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    attribute: str,
) -> None:
    impl = layer(engine)
    setattr(impl, attribute, 2)
    assert impl._never().kind == "keys are spread over ranks"


def test_a_quantised_output_and_misaligned_queries_are_vllm_s_own(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    impl, metadata = layer(engine), step(engine, (1, 1), 100)
    query, cache, out = tensors(2)
    assert call(impl, metadata, (query, cache, out), output_scale=torch.ones(1)) == "vLLM's own"
    assert call(impl, metadata, (query, cache, out), output_scale=None) is out
    room = torch.zeros(2 * query.stride(0) + 1, dtype=query.dtype)[1:]
    room = room.as_strided(query.shape, query.stride(), 1)  # as one that is served
    assert call(impl, metadata, (room, cache, out)) == "vLLM's own"
    assert call(impl, metadata, (query, cache, out)) is out
    [kind] = on_cpu.counters.stats().fallbacks
    assert kind.startswith("a tensor does not start at a multiple")


def test_an_fp16_cache_of_bf16_queries_is_vllm_s_own(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    query, cache, out = tensors(2)
    metadata = step(engine, (1, 1), 100)
    assert call(layer(engine), metadata, (query, cache.half(), out)) == "vLLM's own"
    assert on_cpu.counters.stats().fallbacks == {"the cache has another type than the queries": 1}


def test_a_shape_without_a_kernel_is_vllm_s_own(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    refusal = on_cpu.refusal
    served.refusal = refusal.Refusal(refusal.Kind.MISS, "B=2")
    impl, metadata = layer(engine), step(engine, (1, 2), 100)
    for _ in range(2):
        assert call(impl, metadata, tensors(3)) == "vLLM's own"
    assert on_cpu.counters.stats().fallbacks == {"no measured winner": 2}
    assert len(served.posed) == 1


def test_a_launch_that_is_refused_is_vllm_s_own_from_then_on(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*args: Any) -> None:
        tries.append(args)
        raise BenchmarkError("too many resources requested")

    tries: list[Any] = []
    monkeypatch.setattr(on_cpu.plan.KernelPlan, "_launch", launch)
    impl, metadata = layer(engine), step(engine, (1, 2), 100)
    for _ in range(2):
        assert call(impl, metadata, tensors(3)) == "vLLM's own"
    assert len(tries) == 1 and on_cpu.counters.stats().hits == 0


def test_a_setting_leaves_long_chunks_to_vllm(
    engine: SimpleNamespace, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_VLLM_QUERIES", "4")
    given = tensors(6)
    assert call(layer(engine), step(engine, (4, 2), 100), given) is given[2]
    assert call(layer(engine), step(engine, (5, 1), 100), given) == "vLLM's own"


WIDE = 128


def wide_tensors(tokens: int) -> tuple[Any, Any, Any]:
    """As `tensors`, at D = 128."""
    bf16 = {"dtype": torch.bfloat16}
    query, out = (torch.zeros(tokens, HEADS, WIDE, **bf16) for _ in range(2))
    return query, torch.zeros(PAGES, SIZE, HEADS_KV, 2 * WIDE, **bf16).transpose(1, 2), out


@pytest.mark.parametrize("options", [{}, {"sliding_window": 33}, {"logits_soft_cap": 20.0}])
@pytest.mark.parametrize(("queries", "keys"), [((512,), 2000), ((40, 40), 40)])
def test_chunks_above_a_width_are_vllm_s_own_whatever_their_kernel(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    queries: tuple[int, ...],
    keys: int,
) -> None:
    """Kernels of these tests have one warp group."""
    calls = importlib.import_module("tuner.runtime.engines.calls")
    given, impl = wide_tensors(sum(queries)), layer(engine, head_size=WIDE, **options)
    assert call(impl, step(engine, queries, keys), given) == "vLLM's own"
    assert not served.posed
    assert on_cpu.counters.stats().fallbacks == {"chunks are slower by the tuned kernel": 1}
    monkeypatch.setenv("TUNER_VLLM_QUERIES", "1000")
    calls.max_queries.cache_clear()
    assert call(impl, step(engine, queries, keys), given) is given[2]


@pytest.mark.parametrize("queries", [(1, 1), (4, 2), (512, *(1,) * 63)])
def test_decoding_above_a_width_is_served(
    engine: SimpleNamespace, served: SimpleNamespace, queries: tuple[int, ...]
) -> None:
    given = wide_tensors(sum(queries))
    assert call(layer(engine, head_size=WIDE), step(engine, queries, 2000), given) is given[2]


@pytest.mark.parametrize(("measured", "by"), [(True, "vLLM's own"), (False, "tuner")])
def test_measured_ratios_say_who_answers_unless_a_setting_does(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    measured: bool,
    by: str,
) -> None:
    calls = importlib.import_module("tuner.runtime.engines.calls")
    monkeypatch.setattr(calls.proven_kernels, "is_engines", lambda *given: measured)
    given, impl = wide_tensors(512), layer(engine, head_size=WIDE)
    out = call(impl, step(engine, (512,), 2000), given)
    assert ("tuner" if out is given[2] else out) == by
    found = on_cpu.counters.stats().fallbacks
    assert found == ({"the engine's own kernel is faster": 1} if measured else {})
    monkeypatch.setenv("TUNER_VLLM_QUERIES", "1000")
    calls.max_queries.cache_clear()
    assert call(impl, step(engine, (512,), 2000), given) is given[2]


def test_a_cache_of_e4m3_is_vllm_s_own_unless_a_setting_says_otherwise(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    impl, metadata = layer(engine, kv_cache_dtype="fp8"), step(engine, (1, 2), 100)
    query, cache, out = tensors(3)
    query = query.to(torch.float8_e4m3fn)
    cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
    owner = SimpleNamespace(**{f"_{name}_scale": torch.tensor(1.0) for name in "qkv"})
    answer = impl.forward(owner, query, query, query, cache, metadata, output=out)
    assert answer == "vLLM's own" and not served.posed
    [reason] = on_cpu.counters.stats().fallbacks
    assert "slower by the tuned kernel" in reason


@pytest.mark.parametrize("value", ["0", "-1", "few"])
def test_a_wrong_setting_is_said_when_the_model_is_made(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TUNER_VLLM_QUERIES", value)
    with pytest.raises(ConfigError, match=f"TUNER_VLLM_QUERIES={value} is out of range .allowed"):
        layer(engine)


def test_reloaded_sinks_stay_where_a_graph_reads_them(
    engine: SimpleNamespace, served: SimpleNamespace
) -> None:
    sinks = torch.ones(HEADS).bfloat16()
    impl = layer(engine, sinks=sinks)
    impl.process_weights_after_loading(torch.bfloat16)
    call(impl, step(engine, (1, 1), 100), tensors(2))
    sinks.fill_(3.0)
    impl.process_weights_after_loading(torch.bfloat16)
    call(impl, step(engine, (1, 1), 100), tensors(2))
    assert served.launched[0][0][-1] == served.launched[1][0][-1] == impl._wide_sinks.data_ptr()
    assert impl._wide_sinks.tolist() == [3.0] * HEADS


def known_plans(
    served: SimpleNamespace, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table as it is, over the plans of `served`."""
    table = on_cpu.table.table
    plan_of = table.find_out
    for name in ("get", "find_out"):
        monkeypatch.setattr(table, name, getattr(type(table), name).__get__(table))

    def find(pose: Any, device: int, old: Any) -> Any:
        assert not on_cpu.devices.is_capturing(), "found out within a capture"
        return on_cpu.answers.CachedPlan(
            math.inf, pose().problem, plan_of(None, None, pose, device)
        )

    monkeypatch.setattr(table, "_find", find)


def common(metadata: Any, sequences: int, queries: int) -> Any:
    return SimpleNamespace(metadata=metadata, num_reqs=sequences, max_query_len=queries)


def test_a_capture_is_served_without_a_warm_up(
    engine: SimpleNamespace,
    served: SimpleNamespace,
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known_plans(served, on_cpu, monkeypatch)
    given = tensors(4)
    impls = [layer(engine), layer(engine), layer(engine, sliding_window=9)]
    unserved = layer(engine, alibi_slopes=ALIBI)
    layers = {str(i): SimpleNamespace(impl=impl, kv_cache=given[1]) for i, impl in enumerate(impls)}
    layers["alibi"] = SimpleNamespace(impl=unserved, kv_cache=given[1])
    layers["unbound"] = SimpleNamespace(impl=layer(engine), kv_cache=torch.tensor([]))
    layers["mamba"] = SimpleNamespace()
    builder = engine.backend.TunerMetadataBuilder(layers)
    metadata, asked = step(engine, (1,) * 4, LONGEST), list[bool]()
    calls = importlib.import_module("tuner.runtime.engines.calls")
    monkeypatch.setattr(
        calls.proven_kernels, "is_engines", lambda problem, gpu, flag: asked.append(flag)
    )
    builder.build_for_cudagraph_capture(common(metadata, 4, 1))
    monkeypatch.setattr(on_cpu.devices, "is_capturing", lambda: True)
    for impl in impls:
        assert call(impl, metadata, given) is given[2]
    problems = [problem for _, problem in served.posed]
    assert [(p.seqlen_kv, p.window_left) for p in problems] == [(LONGEST, -1), (LONGEST, 8)]
    # A batch that was not announced.
    assert call(impls[0], step(engine, (2, 2), LONGEST), given) == "vLLM's own"
    assert all(asked[:-1]) and not asked[-1], "a graph serves shorter lengths, too"
    assert on_cpu.counters.stats().fallbacks == {
        "a kernel cannot be loaded inside a graph capture": 1
    }


def test_a_schedule_is_made_where_a_graph_reads_one(
    engine: SimpleNamespace, served: SimpleNamespace, on_cpu: SimpleNamespace
) -> None:
    builder, impl = engine.backend.TunerMetadataBuilder({}), layer(engine)
    builder.build(0, common(step(engine, (1, 1), 100), 2, 1))
    # Warmed up and captured with tuned kernels: no schedule from then on.
    for _ in range(2):
        metadata = step(engine, (1, 1), LONGEST)
        builder.build_for_cudagraph_capture(common(metadata, 2, 1))
        call(impl, metadata, tensors(2))
    builder.build(0, common(step(engine, (1, 1), 100), 2, 1))
    builder.build(0, common(step(engine, (1, 1, 1), 100), 3, 1))
    builder.build(0, common(step(engine, (2, 1), 100), 2, 2))
    assert engine.built == [False, False, True, True, False, False]
    # Another graph of such batches in which one layer is vLLM's own.
    metadata = step(engine, (1, 1), LONGEST)
    builder.build_for_cudagraph_capture(common(metadata, 2, 1))
    call(impl, metadata, tensors(2))
    call(layer(engine, alibi_slopes=ALIBI), metadata, tensors(2))
    engine.built.clear()
    builder.build(0, common(step(engine, (1, 1), 100), 2, 1))
    assert engine.built == [False]


def test_graphs_are_of_batches_with_as_many_queries_each(engine: SimpleNamespace) -> None:
    builder = engine.backend.TunerMetadataBuilder
    assert builder._cudagraph_support.name == "UNIFORM_BATCH"
    assert engine.backend.TunerBackend.get_builder_cls() is builder
    assert engine.backend.TunerBackend.get_impl_cls() is engine.backend.TunerImpl
    assert engine.backend.TunerBackend.get_name() == "CUSTOM"


def own_builder(backend: Any, layers: dict[str, Any], window: int | None) -> Any:
    """The plug-in's builder over vLLM's own, for one group of layers."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: HEADS_KV,
        get_head_size=lambda: WIDTH,
        rswa_window=None,
        is_mm_prefix_lm=False,
    )
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, max_cudagraph_capture_size=8, static_forward_context=layers
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    spec = SimpleNamespace(
        dtype=torch.bfloat16,
        block_size=SIZE,
        sliding_window=window,
        num_kv_heads=HEADS_KV,
        head_size=WIDTH,
        dcp_sharded=False,
    )
    return backend.TunerMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def test_steps_of_vllm_s_own_scheduler_are_served(served: SimpleNamespace) -> None:
    """Prompts, a chunk of one beside decoding, then decoding: each by one kernel."""
    installed()
    version = importlib.import_module("vllm").__version__
    if not version.startswith("0.33"):
        pytest.skip(f"batches are those of 0.33's scheduler, not of {version}")
    backend = importlib.import_module("tuner.runtime.engines.vllm.backend")
    builder = own_builder(backend, {}, None)
    impl, seen = layer(SimpleNamespace(backend=backend)), []
    for batch in vllm_scheduled.batches(SIZE, HEADS_KV, WIDTH, COLUMNS):
        metadata, given = builder.build(0, batch), tensors(batch.num_actual_tokens)
        assert call(impl, metadata, given) is given[2]
        *_, (_, problem) = served.posed
        assert served.launched[-1][0][5] == metadata.block_table.data_ptr()
        seen.append((batch.num_reqs, batch.max_query_len, batch.max_seq_len))
        assert problem.batch == 4 and problem.page_size == SIZE
        assert problem.is_causal == (batch.max_query_len > 1)
    assert seen == [(3, 30, 30), (3, 62, 86), (3, 4, 90), (3, 1, 91)]


def test_vllm_s_own_classes_build_metadata_and_accept_the_backend(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn = installed()
    backend = importlib.import_module("tuner.runtime.engines.vllm.backend")
    kinds = importlib.import_module("vllm.v1.attention.backend")
    layers: dict[str, Any] = {}
    builder = own_builder(backend, layers, 17)
    batch = kinds.CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 3]).int(),
        query_start_loc_cpu=torch.tensor([0, 1, 3]).int(),
        seq_lens=torch.tensor([40, 100]).int(),
        num_reqs=2,
        num_actual_tokens=3,
        max_query_len=2,
        max_seq_len=100,
        block_table_tensor=torch.zeros(2, COLUMNS).int(),
        slot_mapping=torch.zeros(3).long(),
    )
    impl, given = layer(SimpleNamespace(backend=backend), sliding_window=17), tensors(3)
    layers["layer"] = SimpleNamespace(impl=impl, kv_cache=given[1])
    metadata = builder.build_for_cudagraph_capture(batch)
    assert isinstance(metadata, flash_attn.FlashAttentionMetadata)
    assert call(impl, metadata, given) is given[2]
    assert {problem.window_left for _, problem in served.posed} == {16}
    assert builder._is_served(batch)
    other = builder.update_block_table(metadata, torch.zeros(2, COLUMNS).int(), None)
    assert call(impl, other, given) is given[2]
    assert served.launched[1][0][5] == other.block_table.data_ptr()
    hopper = importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    plain = False, False, False, False, False  # no MLA, sinks, sparse or prefix masks, no scales
    assert not backend.TunerBackend.validate_configuration(
        WIDTH, torch.bfloat16, "auto", SIZE, *plain, hopper, "decoder"
    )
