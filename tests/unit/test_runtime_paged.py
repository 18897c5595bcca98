"""Attention over paged caches: what a kernel is given, what PyTorch answers, what is refused."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
from fused_configs import maker
from paged_kernels import paged_kernels

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.fused_attention import FusedAttention
from tuner.families.fused_attention.paged_schedule import decoding
from tuner.families.peers import sdpa
from tuner.problem import E4M3, AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
SIZE, HEADS, HEADS_KV, WIDTH = 16, 4, 2, 16
QUERIES, KEYS = (5, 0, 1, 20, 3), (9, 4, 0, 33, 48)
UNUSED = math.inf

served = paged_kernels


@pytest.fixture
def paged(runtime: SimpleNamespace) -> Any:
    return importlib.import_module("tuner.runtime.attention.paged").paged_attention


def batch(dtype: Any = torch.float32, form: str = "slots", spare: int = 0) -> dict[str, Any]:
    """Arguments by name; `spare` queries belong to no sequence."""
    counts = [-(-keys // SIZE) for keys in KEYS]
    shape = (sum(counts) + 2, SIZE, HEADS_KV, WIDTH)
    if form == "halves":  # (pages, HKV, page size, 2 D)
        both = torch.full((shape[0], HEADS_KV, SIZE, 2 * WIDTH), UNUSED, dtype=dtype)
        caches = [both[..., half].transpose(1, 2) for half in (slice(WIDTH), slice(WIDTH, None))]
    else:
        caches = [torch.full(shape, UNUSED, dtype=dtype) for _ in range(2)]
    table = torch.full((len(KEYS), max(counts) + 1), -7, dtype=torch.int32)
    pages = iter(torch.randperm(sum(counts)).tolist())
    for row, keys, count in zip(table, KEYS, counts, strict=True):
        for at in range(count):
            row[at] = page = next(pages)
            for cache in caches:
                slots = min(SIZE, keys - at * SIZE)
                cache[page, :slots] = torch.randn(slots, HEADS_KV, WIDTH).to(dtype)
    return {
        "query": torch.randn(sum(QUERIES) + spare, HEADS, WIDTH).to(dtype),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "page_table": table,
        "seqused_k": torch.tensor(KEYS).int(),
        "cu_seqlens_q": torch.tensor([0, *QUERIES]).cumsum(0).int(),
        "max_seqlen_q": max(QUERIES),
    }


def expected(given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Row by row, head by head."""
    query, cached = given["query"].detach(), given["key_cache"].detach()
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], -math.inf)
    left, right = options.get("window", (-1, -1))
    row = 0
    for queries, keys, pages in zip(QUERIES, KEYS, given["page_table"], strict=True):
        for i in range(queries):
            at = i + keys - queries
            limit = at + 1 if options.get("causal", True) else keys
            limit = min(limit, at + right + 1) if right >= 0 else limit
            seen = range(max(0, at - left) if left >= 0 else 0, max(0, min(keys, limit)))
            for head in range(HEADS):
                places = [(int(pages[k // SIZE]), k % SIZE, head // 2) for k in seen]
                scores = [float(query[row, head] @ cached[p]) for p in places]
                scores = [score * options.get("scale", 0.25) for score in scores]
                if cap := options.get("softcap", 0.0):
                    scores = [cap * math.tanh(score / cap) for score in scores]
                sinks = options.get("sinks")
                every = torch.tensor([*scores, *([] if sinks is None else [float(sinks[head])])])
                if not len(every):
                    continue
                lse[head, row] = every.logsumexp(0)
                for weight, place in zip(every.softmax(0), places, strict=False):
                    out[row, head] += weight * given["value_cache"][place]
            row += 1
    return out, lse


OPTIONS = [
    {},
    {"causal": False},
    {"scale": 0.7, "softcap": 3.0},
    {"window": (6, 0)},
    {"window": (4, 3), "causal": False},
    {"sinks": torch.tensor([0.5, -2.0, 1.0, 3.0])},
    {"sinks": torch.tensor([0.5, -2.0, 1.0, 3.0]).bfloat16(), "window": (3, 0), "softcap": 2.0},
]


@pytest.mark.parametrize("form", ["slots", "halves"])
@pytest.mark.parametrize("options", OPTIONS)
def test_pytorch_answers_one_sequence_after_the_other(
    runtime: SimpleNamespace, paged: Any, options: dict[str, Any], form: str
) -> None:
    given = batch(form=form)
    out, lse = paged(**given, **options, return_lse=True)
    wanted, wanted_lse = expected(given, **options)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert torch.equal(paged(**given, **options), out)
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 2}


def test_a_block_of_rows_at_a_time(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch(spare=2)
    whole = paged(**given)
    monkeypatch.setattr(
        importlib.import_module("tuner.runtime.attention.paged_composed"), "_SCORES_BYTES", 4000
    )
    torch.testing.assert_close(paged(**given), whole)


def test_every_sequence_has_as_many_queries_where_no_starts_are_given(paged: Any) -> None:
    given = batch()
    del given["cu_seqlens_q"], given["max_seqlen_q"]
    given["query"] = torch.randn(2 * len(KEYS), HEADS, WIDTH)
    starts = torch.arange(0, 2 * len(KEYS) + 1, 2).int()
    assert torch.equal(paged(**given), paged(**given, cu_seqlens_q=starts))


def test_gradients_flow_through_pytorch_s_answer(paged: Any) -> None:
    given = batch()
    names = ("query", "key_cache", "value_cache")
    given |= {name: given[name].nan_to_num(posinf=0.0).requires_grad_() for name in names}
    inputs = [given[name] for name in names]
    wanted = torch.autograd.grad(expected(given)[0].square().sum(), inputs[2:])
    found = torch.autograd.grad(paged(**given).square().sum(), inputs)
    torch.testing.assert_close(found[2:], wanted)
    assert all(grad.isfinite().all() for grad in found)


def test_a_kernel_is_given_the_sizes_and_strides_of_the_call(
    served: SimpleNamespace, on_cpu: SimpleNamespace, paged: Any
) -> None:
    given = batch(torch.float16, "halves", spare=1)
    sinks = torch.zeros(HEADS)
    out, lse = paged(**given, window=(6, 0), scale=0.5, sinks=sinks, return_lse=True)
    assert (out.shape, out.is_contiguous(), out.dtype) == (
        given["query"].shape,
        True,
        torch.float16,
    )
    assert (lse.shape, lse.dtype) == ((HEADS, 30), torch.float32)
    # Looked up by powers of two, of queries that of the mean ...
    [(_, problem)] = served.posed
    assert problem == AttentionProblem.parse(
        "B=8,H=4,HKV=2,SQ=8,SKV=64,D=16,causal=1,left=6,page_size=16,sinks=1,layout=bshd"
    )
    # ... and launched with what there is.
    [(tensors, integers, scalars)] = served.launched
    names = ("query", "key_cache", "value_cache", "page_table", "seqused_k", "cu_seqlens_q")
    query, key, value, table, used, starts = (given[name].data_ptr() for name in names)
    addresses = [query, key, value, out.data_ptr(), lse.data_ptr(), table, used, starts]
    assert tensors == [*addresses, sinks.data_ptr()]
    assert integers[:6] == (5, 4, 2, 20, 64, 16)
    assert integers[7:9] == integers[16:18] == (16, 64)
    # Of a page, a head and a slot, in rows of two halves.
    assert integers[9:12] == integers[12:15] == (2 * 16 * 32, 16 * 32, 32)
    columns = given["page_table"].shape[1]
    assert integers[21:] == (6, 0, 30, 16, given["key_cache"].shape[0], columns)
    assert scalars == (0.5,) and on_cpu.counters.stats().hits == 1


def test_an_output_of_the_caller_is_written(
    served: SimpleNamespace, runtime: SimpleNamespace, paged: Any
) -> None:
    given = batch(torch.float16)
    out = torch.empty_like(given["query"])
    assert paged(**given, out=out) is out
    found, lse = paged(**given, out=out, return_lse=True)
    assert found is out and lse.shape == out.shape[1::-1]
    assert [tensors[3] for tensors, _, _ in served.launched] == [out.data_ptr()] * 2


@pytest.mark.parametrize("options", [{}, {"window": (6, 0), "scale": 0.7}, {"equally": True}])
def test_a_peer_answers_with_the_lengths_of_the_call(
    runtime: SimpleNamespace, paged: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("tuner.runtime.attention.paged")
    plans = importlib.import_module("tuner.runtime.call.plan")
    given, lengths = batch(), list[tuple[int, int]]()
    if options.pop("equally", False):
        del given["cu_seqlens_q"], given["max_seqlen_q"]
        given["query"] = given["query"][:10]

    def fwd(q: Any, k: Any, v: Any, starts: Any, most: Any, **more: Any) -> Any:
        lengths.append((most or q.shape[1], more["max_seqlen_k"]))
        call = {"query": q.flatten(0, -3), "key_cache": k, "value_cache": v}
        names = ("page_table", "seqused_k", "causal", "window", "softcap", "scale")
        call |= {name: more[name] for name in names}
        out, lse = paged(**call, cu_seqlens_q=starts, max_seqlen_q=most, return_lse=True)
        out = out.view(q.shape) if more["out"] is None else more["out"].copy_(out.view(q.shape))
        lse = lse if starts is not None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return (out, lse) if more["return_lse"] else out

    wanted, wanted_lse = paged(**given, **options, return_lse=True)
    out, found = torch.empty_like(wanted), []

    def by_peer(call: Any) -> Any:
        left, right, _ = call.extras
        masks = {"is_causal": call.is_causal, "window_left": left, "window_right": right}
        problem = AttentionProblem(32, 64, WIDTH, page_size=SIZE, **masks)
        peer = sdpa.UnpreparedPages(SimpleNamespace(fwd=fwd), problem, call.scale)
        plan = plans.VendorPlan(
            problem, Config("vendor_sdpa", {"kernel": sdpa.UNPREPARED}), 0, call=peer
        )
        monkeypatch.setattr(module, "serve", lambda call: call.by_pytorch())
        found.append(call.run(plan))
        return found[-1]

    monkeypatch.setattr(plans.devices, "current", lambda: 0)
    for more in ({}, {"out": out}, {"return_lse": True}):
        monkeypatch.setattr(module, "serve", by_peer)
        paged(**given, **options, **more)
    torch.testing.assert_close(found[0], wanted)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(found[2], (wanted, wanted_lse))
    longest = 20 if "max_seqlen_q" in given else 2
    assert set(lengths) == {(longest, given["page_table"].shape[1] * SIZE)}


def test_pytorch_s_answer_is_copied_to_an_output_of_the_caller(paged: Any) -> None:
    given = batch()
    out = torch.empty_like(given["query"])
    assert paged(**given, out=out) is out
    wanted, wanted_lse = paged(**given, return_lse=True)
    assert torch.equal(out, wanted)
    found, lse = paged(**given, out=out.zero_(), return_lse=True)
    assert found is out and torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


def test_a_kernel_writes_no_output_that_tma_cannot(
    served: SimpleNamespace, runtime: SimpleNamespace, paged: Any
) -> None:
    given = batch(torch.float16)
    out = torch.empty(given["query"].numel() + 1, dtype=torch.float16)[1:]
    out = out.view(given["query"].shape)
    assert paged(**given, max_seqlen_k=48, out=out) is out
    assert not served.launched and list(runtime.counters.stats().fallbacks.values()) == [1]


def test_one_query_needs_no_mask_and_no_starts(served: SimpleNamespace, paged: Any) -> None:
    given = batch(torch.float16)
    del given["cu_seqlens_q"], given["max_seqlen_q"]
    given["query"] = torch.randn(len(KEYS), HEADS, WIDTH).half()
    paged(**given, max_seqlen_k=50)
    [(_, problem)] = served.posed
    assert problem == AttentionProblem.parse(
        "B=8,H=4,HKV=2,SQ=1,SKV=64,D=16,page_size=16,layout=bshd"
    )
    [(tensors, integers, _)] = served.launched
    assert tensors[7] == 0 and integers[3:5] == (1, 50)


def call_of(counts: list[int]) -> Any:
    """A call of so many queries of each sequence, with eight heads on two."""
    from tuner.runtime.attention.composed import Extras
    from tuner.runtime.attention.paged import paged_call

    half = {"dtype": torch.float16}
    query, cache = torch.empty(sum(counts), 8, 64, **half), torch.empty(4, 16, 2, 64, **half)
    table = torch.zeros(len(counts), 4, dtype=torch.int32)
    used = torch.zeros(len(counts), dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tensors = query, cache, cache, table, used, starts, None
    return paged_call(*tensors, max(counts), 64, True, Extras.of((-1, -1), 0.0), 0.125)


def test_tiles_of_queries_are_counted_by_sequence() -> None:
    """Rows of a tile are one sequence's: five queries have two tiles of four."""
    params = {"warp_groups": 1, "tile_n": 64, "packed_heads": 16, "pads_heads": True}
    config = Config("fused_attention", {**params, "blocks_per_sm": 2})
    assert decoding(config, call_of([5] * 100).lengths()).tiles == 2 * 100 * 2
    assert decoding(config, call_of([4] * 100).lengths()).tiles == 2 * 100


def test_a_kernel_is_selected_for_the_mean_of_the_queries() -> None:
    """Many that decode take longest beside one chunk; but no kernel for one query serves it."""

    def posed(counts: list[int]) -> int:
        call = call_of(counts)
        assert call.kind()[-3] == call.pose().problem.seqlen_q
        return int(call.pose().problem.seqlen_q)

    assert posed([1] * 63 + [512]) == 16
    assert posed([0] * 63 + [5]) == 2
    assert posed([300]) == posed([300] * 3) == 512
    assert posed([1] * 9) == 1


@pytest.mark.parametrize(
    ("counts", "longest", "total", "is_unlike"),
    [
        ([1] * 30, 4096, None, True),  # a captured graph's, which only the device knows
        ([1] * 29, 4096, None, False),  # of two KV heads: too few
        ([1] * 30, 1000, None, False),  # too short
        ([1] * 500, 4096, None, True),
        ([1] * 30, 4096, 30 * 2048, True),
        ([1] * 30, 4096, 30 * 2049, False),  # alike
        ([1] * 30, 4096, 30 * 389, False),  # most are short
        ([1] * 161, 4096, 161 * 2048, False),  # too many
        ([2] * 37, 4096, None, False),
        ([2] * 38, 4096, None, True),
        ([1], 1 << 20, None, False),
    ],
)
def test_unlike_lengths_are_a_kind(
    counts: list[int], longest: int, total: int | None, is_unlike: bool
) -> None:
    call = call_of(counts)._replace(longest_kv=longest, total_kv=total)
    assert call.is_unlike is bool(call.pose().estimated) is call.kind()[-1] is is_unlike


def test_calls_of_like_sizes_are_of_one_kind(served: SimpleNamespace, paged: Any) -> None:
    given = batch(torch.float16)
    for more in ({}, {"max_seqlen_k": 33}, {"max_seqlen_k": 32}, {"scale": 2.0}):
        paged(**given, **more)
    kinds = [kind for kind, _ in served.posed]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3


def test_strides_that_no_copy_reads_are_pytorch_s(
    served: SimpleNamespace, on_cpu: SimpleNamespace, paged: Any
) -> None:
    given = batch(torch.float16)
    wide = torch.zeros(*given["key_cache"].shape[:-1], WIDTH + 1, dtype=torch.float16)
    wide[..., :WIDTH] = given["key_cache"].nan_to_num(posinf=0.0)
    given["key_cache"] = wide[..., :WIDTH]
    given["max_seqlen_k"] = 48
    given["cu_seqlens_q"] = torch.tensor([0, *QUERIES]).cumsum(0).int()
    paged(**given)
    assert on_cpu.counters.stats().fallbacks == {"no kernel takes such tensors": 1}
    assert not served.launched


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(29, 4, 1, 16)}, r"query \(29, 4, 1, 16\).*allowed: \(total_q, H"),
        ({"query": torch.zeros(29, 3, 16)}, "HKV a divisor of H"),
        ({"query": torch.zeros(29, 4, 16).half()}, "query is torch.float16, the caches torch.fl"),
        ({"seqused_k": torch.zeros(5)}, r"seqused_k is torch.float32 \(5,\) .allowed: torch.int32"),
        ({"seqused_k": torch.zeros(4).int()}, r"page_table is torch.int32 \(5, 4\)"),
        (
            {"seqused_k": torch.tensor(48).int()},
            r"seqused_k is torch.int32 \(\) .allowed: torch.int32",
        ),
        ({"page_table": torch.tensor(0).int()}, r"page_table is torch.int32 \(\)"),
        ({"cu_seqlens_q": torch.zeros(5).int()}, r"cu_seqlens_q is torch.int32 \(5,\)"),
        ({"cu_seqlens_q": None}, "29 queries of 5 sequences without cu_seqlens_q"),
        ({"max_seqlen_k": 65}, r"max_seqlen_k=65 is out of range .allowed: 0 to 64, the 4 pages"),
        ({"max_seqlen_q": -1}, "max_seqlen_q=-1 is out of range"),
        ({"max_seqlen_q": 19}, "cu_seqlens_q has a sequence of 20 .allowed: up to 19"),
        ({"max_seqlen_k": 40}, "seqused_k runs from 0 to 48 .allowed: 0 to 40"),
        ({"sinks": torch.zeros(2)}, r"sinks are \(2,\) .allowed: \(4,\)"),
        ({"out": torch.zeros(29, 4, 16).half()}, r"out is torch.float16 .* .allowed: as query"),
        ({"out": torch.zeros(4, 29, 16).transpose(0, 1)}, "strides .16, 464, 1. .allowed: .* cont"),
        ({"softcap": -1.0}, "softcap=-1.0 is out of range"),
        ({"window": (-2, 0)}, "window="),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    paged: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        paged(**{**batch(), **changes})
    assert "\n" not in str(caught.value)


def test_a_page_of_another_size_is_refused(paged: Any) -> None:
    given = batch()
    for name in ("key_cache", "value_cache"):
        given[name] = given[name][:, :12]
    with pytest.raises(ConfigError, match=r"pages have 12 slots .allowed: multiples of 16"):
        paged(**given)


def test_opcheck() -> None:
    importlib.import_module("tuner.runtime")  # defines the operator
    given = batch()
    given |= {name: given[name].nan_to_num(posinf=0.0) for name in ("key_cache", "value_cache")}
    tensors = list(given.values())[:6]
    options = (20, 64, True, 6, -1, 2.0, 0.25)
    operator = torch.ops.tuner.paged_attention.default
    torch.library.opcheck(operator, (*tensors, torch.zeros(HEADS), *options))
    torch.library.opcheck(operator, (*tensors, None, *options))


def test_a_graph_of_torch_compile_holds_the_operator(paged: Any) -> None:
    given, graphs = batch(), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda: paged(**given), backend=keep, fullgraph=True)
    assert torch.equal(compiled(), paged(**given))
    out = torch.empty_like(given["query"])
    into = torch.compile(lambda: paged(**given, out=out), backend=keep, fullgraph=True)
    assert torch.equal(into(), paged(**given)) and torch.equal(out, paged(**given))
    calls = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert "tuner.paged_attention" in calls[0]


def quantised(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch of e4m3 with its factors, and the same in fp32."""
    counts = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
    scales = {f"{name}_scale": torch.rand(count) + 0.5 for name, count in counts.items()}
    names = ("query", "key_cache", "value_cache")
    small = {
        name: given[name].nan_to_num(posinf=math.nan).to(torch.float8_e4m3fn) for name in names
    }
    wide = {
        name: small[name].float() * scale.view(-1, 1)
        for name, scale in zip(names, scales.values(), strict=True)
    }
    return {**given, **small, **scales}, {**given, **wide}


def test_pytorch_answers_e4m3_with_its_factors(paged: Any) -> None:
    given, wide = quantised(batch(spare=1))
    out, lse = paged(**given, return_lse=True)
    assert out.dtype == torch.bfloat16
    wanted, wanted_lse = expected(wide)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted_lse)
    one = {name: scale.mean() for name, scale in given.items() if name.endswith("_scale")}
    every = {name: scale.expand(given[name].shape[0]).contiguous() for name, scale in one.items()}
    assert torch.equal(paged(**given | one), paged(**given | every))
    kept = torch.empty_like(out)
    assert paged(**given, out=kept) is kept and torch.equal(kept[:-1], out[:-1])
    compiled = torch.compile(lambda **named: paged(**named), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given)[:-1], out[:-1])


def test_a_kernel_of_e4m3_is_given_a_factor_of_each_head(
    served: SimpleNamespace, paged: Any
) -> None:
    given, _ = quantised(batch())
    out = paged(**given)
    assert out.dtype == torch.bfloat16
    [(_, problem)] = served.posed
    assert problem.dtype == E4M3
    names = [one.name for one in problem.inputs]
    [(addresses, _, _)] = served.launched
    by_name = dict(zip([*names[:3], "out", "lse", *names[3:]], addresses, strict=True))
    for name in "qkv":
        assert by_name[f"descale_{name}"] == given[f"{name}_scale"].data_ptr()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q_scale": None}, r"q_scale is missing \(allowed: fp32 \(4,\) or one element\)"),
        ({"k_scale": torch.ones(4)}, r"k_scale is torch.float32 \(4,\) \(allowed: .* \(2,\)"),
        ({"v_scale": torch.ones(2).half()}, "v_scale is torch.float16"),
        ({"value_cache": torch.zeros(1)}, "caches"),
    ],
)
def test_factors_that_do_not_fit_are_refused(
    paged: Any, changes: dict[str, Any], text: str
) -> None:
    given, _ = quantised(batch())
    with pytest.raises(ConfigError, match=text):
        paged(**{**given, **changes})


def test_factors_are_of_e4m3_only(paged: Any) -> None:
    with pytest.raises(ConfigError, match="factors are for float8_e4m3fn, query is"):
        paged(**batch(), q_scale=torch.ones(1))


def test_a_selected_kernel_is_launched_with_the_splits_of_the_call(
    served: SimpleNamespace, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that are unlike get more splits, and a tuned kernel keeps its own."""
    given = batch()
    del given["max_seqlen_q"]
    given |= {"cu_seqlens_q": None, "query": torch.randn(len(KEYS), HEADS, WIDTH).half()}
    given |= {name: given[name].half() for name in ("key_cache", "value_cache")}
    given["page_table"] = torch.zeros(len(KEYS), 300, dtype=torch.int32)
    for by_portfolio in (False, True):
        served.by_portfolio = by_portfolio
        paged(**given, total_seqlen_k=sum(KEYS))
    own, spread = (integers for _, integers, _ in served.launched)
    assert own != spread


@pytest.mark.parametrize(
    ("packing", "is_taken"),
    [
        ({"packed_heads": 2}, True),
        ({"packed_heads": 4}, False),
        ({"packed_heads": 32, "pads_heads": True}, True),
    ],
)
def test_a_kernel_whose_packs_do_not_hold_the_heads_is_not_launched(
    served: SimpleNamespace,
    paged: Any,
    monkeypatch: pytest.MonkeyPatch,
    packing: dict[str, Any],
    is_taken: bool,
) -> None:
    """Two query heads to a KV head, by whatever selected the kernel."""
    params = {**maker()(1, 64, persistent=True).params, **packing}
    space = [Config("fused_attention", params)]
    monkeypatch.setattr(FusedAttention, "space", lambda self, problem, gpu: space)
    paged(**batch(torch.float16))
    assert len(served.launched) == is_taken


def test_a_selected_kernel_takes_a_batch_without_a_key(served: SimpleNamespace, paged: Any) -> None:
    """As an engine's warm-up may ask for: 0 is an allowed `max_seqlen_k`."""
    served.by_portfolio = True
    given = batch(torch.float16)
    given["seqused_k"] = torch.zeros_like(given["seqused_k"])
    paged(**given, max_seqlen_k=0)
    assert len(served.launched) == 1
