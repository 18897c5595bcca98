"""A drawn call beside everything else that the machine has: dense, paged, packed, products."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import tuner
from benchmarks import harness
from benchmarks.cliffs_draws import Call, Packed, Plain
from benchmarks.cliffs_holes import serving_call
from benchmarks.harness import FAILURES, Contender, Row, first_line
from benchmarks.paged_batches import Case as Pages
from benchmarks.paged_calls import PEER, Batch
from benchmarks.population_calls import measured as model_call_measured
from benchmarks.population_ways import ENABLED
from benchmarks.products_ways import Tensors, algorithm_ways, torch_ways
from tuner.families.peers import installed
from tuner.families.peers.sdpa import UNPREPARED
from tuner.problem import E4M3, AttentionProblem, GemmProblem, GroupedGemmProblem
from tuner.problem.grouped_gemm import rows_of
from tuner.problem.population import ModelCall

BUDGET_US, ALGORITHMS = 1.2e5, 8
"""All rounds of a call take about so long; as many algorithms as cuBLASLt's heuristic returns."""
FLASHINFER_WIDTHS = (64, 128, 256)
"""Head dimensions that FlashInfer has prebuilt kernels of."""
MAX_ERRORS = {"float16": 5e-3, "bfloat16": 3e-2, E4M3: 1e-1}
"""Relative errors from which on an output is wrong, from a reference in fp32 or the first peer."""


Further = Callable[[Callable[[int], Sequence[Any]]], Mapping[str, Callable[[int], Any]]]
"""Makes further calls by contender of a call's operands by copy."""


def measured(
    call: Call,
    compiles: bool = False,
    further: Further = lambda operands: {},
    budget_us: float = BUDGET_US,
    peers: bool = True,
) -> Row:
    """Times of all contenders, errors of the tuner's output, and how it was answered.

    Args:
        call: the call.
        compiles: FlexAttention and torch.compile take part, where they can.
        further: makes further contenders, but of paged calls.
        budget_us: all rounds of such a call take about so long.
        peers: False to leave out peers of such a call but PyTorch.
    """
    begin = time.perf_counter()
    row = _measured(call, compiles, further, budget_us, peers)
    seconds = {**row.get("seconds", {}), "all": time.perf_counter() - begin}
    row["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
    return row


def _measured(call: Call, compiles: bool, further: Further, budget_us: float, peers: bool) -> Row:
    with torch.inference_mode():
        torch.manual_seed(0)
        if isinstance(call, ModelCall):

            def ways(inputs: Sequence[Any]) -> list[Contender]:
                calls = dict(further(lambda i: _operands(inputs[i].tensors, bool(call.views))))
                if isinstance(call.problem, AttentionProblem) and peers and not call.mask:
                    serving = serving_call(call.problem)
                    if serving is not None:
                        calls[PEER] = lambda i: serving(*inputs[i].tensors)
                return [Contender(name, one) for name, one in calls.items()]

            row = model_call_measured(call, "cuda", compiles, budget_us, ways, peers, [ENABLED])
            return {**row, "problem": call.problem.to_json()}
        if isinstance(call, Pages):
            return paged(call)
        if isinstance(call, Packed):
            return packed(call, further)
        is_grouped = isinstance(call.problem, GroupedGemmProblem)
        if is_grouped:
            return grouped(call, further, budget_us)
        return product(call, compiles, further, budget_us, peers)


def _operands(tensors: Sequence[Any], is_attention: bool) -> list[Any]:
    """Operands of a call of a model, in the order of its problem."""
    if is_attention:
        return list(tensors)
    x, weight, bias = tensors
    return [x, weight.t(), *([] if bias is None else [bias])]


def timed(
    calls: Mapping[str, Callable[[int], Any]],
    before: Callable[[int], Any],
    copies: int,
    wanted: Any,
    most: float,
    budget_us: float = BUDGET_US,
) -> Row:
    """A row of calls whose outputs are compared; a wrong one is not timed.

    Args:
        calls: by contender, the first one the control.
        before: writes an input of a copy.
        copies: copies of the tensors.
        wanted: makes the error of an output of the first copy.
        most: largest error.
        budget_us: all rounds take about so long.
    """
    tuner.stats(reset=True)
    errors, failed = harness.first_outputs(
        calls, lambda out: (wanted(out), tuner.stats(reset=True))
    )
    wrong = [name for name, (error, _) in errors.items() if not error <= most]
    fit = [Contender(name, calls[name]) for name in errors if name not in wrong]
    times = harness.time_calls(fit, before, copies, budget_us)
    stats = errors["tuner"][1] if "tuner" in errors else None
    return {
        "answered": "" if stats is None else next(iter(stats.answers)),
        "reason": "" if stats is None else ", ".join(stats.fallbacks),
        **{"us": times.us, "failed": {**failed, **times.failed}, "wrong": wrong},
        "errors": {name: error for name, (error, _) in errors.items()},
        "seconds": dict(times.seconds),
    }


def paged(case: Pages) -> Row:
    """`tuner.paged_attention` beside FlashAttention-3's serving build and FlashInfer."""
    batch = Batch(case)
    calls: dict[str, Any] = {}
    module = installed.module_of(PEER)
    missing = {"flash3": module} if isinstance(module, str) else {}
    if not isinstance(module, str):
        calls["flash3"] = batch.flash3(module)
        calls[UNPREPARED] = batch.flash3(module, is_prepared=False)
    calls["tuner"] = batch.tuner(batch.tables, case.longest)
    try:
        calls["flashinfer"] = flashinfer(batch)
    except FAILURES as exc:
        missing["flashinfer"] = first_line(exc)
    reference = _last_query(batch)

    def error(out: Any) -> float:
        return harness.distance(out.view(len(batch.query), case.heads_q, -1)[-1], reference)

    row = timed(calls, batch.before, batch.copies, error, MAX_ERRORS[case.dtype])
    row["failed"] = {**missing, **row["failed"]}
    return {**row, "chosen": batch.selected(), "problem": batch.posed().pose().problem.to_json()}


def flashinfer(batch: Batch) -> Callable[[int], Any]:
    """A call of FlashInfer's prefill of paged caches, which also decodes, planned for each copy.

    Raises:
        ImportError: when the package or its prebuilt kernels are not here: it would compile.
        RuntimeError: when it does not take the batch.
    """
    case = batch.case
    if case.has_sinks or case.dtype == E4M3 or case.head_dim not in FLASHINFER_WIDTHS:
        raise RuntimeError(f"flashinfer is called without sinks, in bf16, at D={FLASHINFER_WIDTHS}")
    importlib.import_module("flashinfer_jit_cache")
    module = importlib.import_module("flashinfer")
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    ends = torch.tensor([0, *case.pages], device="cuda").cumsum(0).int()
    last = (batch.used - 1) % case.page_size + 1
    wrappers = []
    for table in batch.tables:
        pages = [row[:count] for row, count in zip(table, case.pages, strict=True)]
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            *(batch.starts, ends, torch.cat(pages), last),
            *(case.heads_q, case.heads_kv, case.head_dim, case.page_size),
            causal=True,
            window_left=case.window,
            sm_scale=batch.scale,
            q_data_type=batch.query.dtype,
            kv_data_type=batch.key.dtype,
        )
        wrappers.append(wrapper)
    cache = batch.key, batch.value
    return lambda i: wrappers[i % batch.copies].run(batch.query, cache)


def _last_query(batch: Batch) -> Any:
    """(H, D): output of the last sequence's last query, from the pages of the first copy."""
    case, factor = batch.case, 0.5 if batch.scales else 1.0
    places = batch.tables[0][len(case.keys) - 1].long()
    width = case.keys[-1] if case.window < 0 else min(case.keys[-1], case.window + 1)
    keys, values = (
        cache[places].flatten(0, 1)[: case.keys[-1]][-width:].float() * factor
        for cache in (batch.key, batch.value)
    )
    ratio = case.heads_q // case.heads_kv
    keys, values = (t.repeat_interleave(ratio, 1).transpose(0, 1) for t in (keys, values))
    query = batch.query[-1].float()[:, None] * factor
    scores = query @ keys.transpose(1, 2) * batch.scale
    if batch.sinks is not None:
        scores = torch.cat([scores, batch.sinks[:, None, None]], -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values)[:, 0]


def packed(case: Packed, further: Further) -> Row:
    """`tuner.attention_varlen` beside FlashAttention-2 and -3 over the same sequences."""
    problem, total = case.problem, sum(case.lengths)
    dtype, scale = getattr(torch, problem.dtype), problem.head_dim**-0.5
    source, key, value = (
        torch.randn(total, heads, problem.head_dim, dtype=dtype, device="cuda")
        for heads in (problem.heads_q, problem.heads_kv, problem.heads_kv)
    )
    query, longest = source.clone(), max(case.lengths)
    starts = torch.tensor([0, *case.lengths], device="cuda").cumsum(0).int()
    tensors, ends = (query, key, value), (starts, starts, longest, longest)
    flash2 = torch.ops.aten._flash_attention_forward.default
    module = installed.module_of(PEER)
    lengths = {"cu_seqlens_q": starts, "max_seqlen_q": longest}
    lengths |= {"cu_seqlens_k": starts, "max_seqlen_k": longest}
    options = {"causal": problem.is_causal, "window": (-1, -1), "scale": scale}
    calls: dict[str, Any] = {
        "flash2": lambda _: flash2(*tensors, *ends, 0.0, problem.is_causal, False, scale=scale)[0],
        "tuner": lambda _: tuner.attention_varlen(
            *tensors, *ends, is_causal=problem.is_causal, enable_gqa=True
        ),
    }
    if not isinstance(module, str):
        calls["flash3"] = lambda _: module.fwd(*tensors, **lengths, **options)
    calls |= further(lambda _: (*tensors, starts))
    reference = _packed_reference(problem, case.lengths, query, key, value)

    def error(out: Any) -> float:
        return harness.distance(out[-min(64, case.lengths[-1]) :], reference)

    def before(_: int) -> Any:
        return torch.mul(source, 1.0, out=query)

    row = timed(calls, before, 1, error, MAX_ERRORS[problem.dtype])
    row["failed"] |= {"flash3": module} if isinstance(module, str) else {}
    return {**row, "problem": problem.to_json(), "lengths": case.lengths}


def _packed_reference(problem: AttentionProblem, lengths: Any, *tensors: Any) -> Any:
    """(rows, H, D): the last sequence's last rows, at most 64, in fp32."""
    length, rows = lengths[-1], min(64, lengths[-1])
    query, key, value = (tensor[-length:].float().transpose(0, 1) for tensor in tensors)
    ratio = problem.heads_q // problem.heads_kv
    key, value = (tensor.repeat_interleave(ratio, 0) for tensor in (key, value))
    scores = query[:, -rows:] @ key.transpose(1, 2) * problem.head_dim**-0.5
    if problem.is_causal:
        places = torch.arange(length, device=scores.device)
        scores = scores.masked_fill(places[None] > places[-rows:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


def product(
    case: Plain,
    compiles: bool,
    further: Further = lambda operands: {},
    budget_us: float = BUDGET_US,
    peers: bool = True,
) -> Row:
    """`tuner.linear` or `tuner.scaled_mm` beside PyTorch's, DeepGEMM and cuBLASLt's algorithms."""
    problem = case.problem
    assert isinstance(problem, GemmProblem)
    tensors = Tensors(problem)

    def linear(i: int) -> Any:
        return tuner.linear(tensors.rows, tensors.weights[i][0])

    def scaled(i: int) -> Any:
        weight, scale_b = tensors.weights[i]
        factors = tensors.factors if scale_b is None else [tensors.factors[0], scale_b.t()]
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": problem.fast_accum}
        return tuner.scaled_mm(tensors.rows, weight.t(), *factors, **options)

    ways = [way for way in torch_ways(tensors) if peers or way[0] == "pytorch"]
    calls: dict[str, Any] = {name: make() for name, make in ways}
    calls["tuner"] = scaled if tensors.factors else linear
    calls |= {name: make() for name, make in algorithm_ways(tensors, ALGORITHMS) if peers}
    if compiles and not tensors.factors:
        options = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
        compiled = torch.compile(torch.nn.functional.linear, **options)
        calls["inductor"] = lambda i: compiled(tensors.rows, tensors.weights[i][0])
    calls |= further(tensors.operands)
    most = MAX_ERRORS[problem.dtype]
    row = timed(calls, tensors.before, tensors.copies, tensors.error, most, budget_us)
    return {**row, "problem": problem.to_json()}


def grouped(case: Plain, further: Further, budget_us: float) -> Row:
    """`tuner.grouped_mm` beside PyTorch's grouped product, in bf16."""
    problem = case.problem
    assert isinstance(problem, GroupedGemmProblem)
    counts = rows_of(problem.sizes, problem.m, problem.groups)
    sizes = torch.tensor(counts, device="cuda")
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    source = torch.randn(problem.m, problem.k, dtype=torch.bfloat16, device="cuda")
    rows = source.clone()
    shape = problem.groups, problem.n, problem.k
    weights = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=problem.k**-0.5)
    calls = {
        "pytorch": lambda _: torch._grouped_mm(rows, weights.transpose(-2, -1), offs=offsets[1:]),
        "tuner": lambda _: tuner.grouped_mm(rows, weights, offsets, sizes=problem.sizes),
        **further(lambda _: (rows, weights, offsets)),
    }
    last = max(group for group, size in enumerate(counts) if size)
    count = min(64, counts[last])
    end = sum(counts[: last + 1])
    wanted = rows[end - count : end].float() @ weights[last].float().t()

    def error(out: Any) -> float:
        return harness.distance(out[end - count : end], wanted)

    def before(_: int) -> Any:
        return torch.mul(source, 1.0, out=rows)

    row = timed(calls, before, 1, error, MAX_ERRORS["bfloat16"], budget_us)
    return {**row, "problem": problem.to_json()}
