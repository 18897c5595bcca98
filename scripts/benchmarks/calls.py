"""Cost of a call of `tuner.attention`: on the host beyond its launch, and in an eager loop."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tuner.compile.toolchain import find_host_compiler
from tuner.errors import BenchmarkError
from tuner.families.peers.sdpa import peer
from tuner.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("S=1024,D=64")
REFUSED = AttentionProblem.parse("H=3,S=200,D=192")
"""Sizes of a call that PyTorch answers, in single precision, which no kernel takes."""
HOST_LIMIT_US, TABLE_LIMIT_US = 5.0, 0.5
REFUSED_LIMIT_US = 1.0
"""Beyond PyTorch's own call, also under `tuner.enable` and over a growing cache."""
ENABLED_LIMIT = 0.75
"""A served call of PyTorch's function under `tuner.enable`, over one without it."""
GROWING = "H=8,HKV=2,SQ=1,D=64,SKV={},dtype=bf16"
LENGTHS = range(1100, 1200)
"""Keys of a cache, one length a call."""
WALL_LIMIT, GRAPH_LIMIT = 0.7, 1.15
"""Wall time over SDPA's, and over the kernel's in a graph."""
BURST = 100
"""Calls between two waits for the device: the launch queue holds 1024."""
ROUNDS = 50
WALL_CALLS, WALL_ROUNDS = 1000, 15

Call = Callable[[], Any]

_BURST_SOURCE = """
#include <chrono>
#include <cstdint>
using Launch = int (*)(void* const*, int64_t const*, double const*, void*, void*);
// Nanoseconds a call of `count` launches, or minus the error of the first that is refused.
extern "C" int64_t burst(Launch launch, void* const* tensors, int64_t const* integers,
                         double const* scalars, void* workspace, void* stream, int64_t count) {
  auto const start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i)
    if (int const code = launch(tensors, integers, scalars, workspace, stream))
      return code > 0 ? -code : code;
  auto const spent = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count() / count;
}
"""


def host() -> dict[str, Any]:
    """Host microseconds a call of `PROBLEM`, medians of bursts; the Python path's come last."""
    import torch

    import tuner
    from tuner.runtime.call import dispatch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    tensors, others = _inputs(), [tensor.float() for tensor in _inputs(REFUSED)]
    plan = _serving(tensors)
    calls: dict[str, Call] = {
        "attention": lambda: tuner.attention(*tensors),
        "sdpa": lambda: sdpa(*tensors),
        "refused": lambda: tuner.attention(*others),
        "refused_sdpa": lambda: sdpa(*others),
        **_peers(tensors),
    }
    module = dispatch._module
    times: dict[str, list[float]] = {name: [] for name in ("bare", *calls)}
    for call in calls.values():
        _burst(call)
    answered = _dispatched(module)
    hits = tuner.stats().hits
    calls["refused"]()
    if tuner.stats().hits != hits:
        raise BenchmarkError(f"{REFUSED.label()} is served (wanted: a call that PyTorch answers)")
    for turn in range(ROUNDS):
        times["bare"].append(_bare(plan, tensors))
        # What a call finds in the processor's caches is the burst's before it.
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            calls[name]()
            times[name].append(_burst(calls[name]))
    found: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    found["beyond_launch"] = found["attention"] - found["bare"]
    found["beyond_refused"] = _beyond(times["refused"], times["refused_sdpa"])
    found["has_dispatcher"] = module is not None
    found["dispatched"] = (_dispatched(module) - answered) / (ROUNDS * (BURST + 1))
    found |= _under_enable(calls["sdpa"], calls["refused_sdpa"]) | _growing(module)
    if module is not None:
        found["table"] = _table_share(module, calls["attention"], tensors)
    # Last: a dispatcher that comes back is told of its plans at the next look only.
    dispatch.use(None)
    found["python"] = statistics.median(_burst(calls["attention"]) for _ in range(ROUNDS))
    dispatch.use(module)
    return found


def _under_enable(served: Call, refused: Call) -> dict[str, float]:
    """Host microseconds of PyTorch's function with the switch on beside those with it off, in
    turns: what lies between two moments cancels.
    """
    import tuner

    times: dict[str, list[float]] = {"enabled": [], "off": [], "refused": [], "refused_off": []}
    off = contextlib.nullcontext(), times["off"], times["refused_off"]
    for turn in range(ROUNDS):
        on = tuner.enabled(), times["enabled"], times["refused"]
        for context, of_served, of_refused in (on, off) if turn % 2 else (off, on):
            with context:
                for call, values in ((served, of_served), (refused, of_refused)):
                    call()
                    values.append(_burst(call))
    enabled, without = (statistics.median(times[name]) for name in ("enabled", "off"))
    return {
        "enabled": enabled,
        "enabled_over_sdpa": enabled / without,
        "beyond_refused_enabled": _beyond(times["refused"], times["refused_off"]),
    }


def _beyond(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the differences of two ways in the same rounds."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))


def _growing(module: Any) -> dict[str, float]:
    """Host microseconds a call over a cache that grows with every call, beyond PyTorch's own; the
    share of the calls that passed no Python but the function's own.
    """
    import torch

    import tuner

    caches = [_inputs(AttentionProblem.parse(GROWING.format(length))) for length in LENGTHS]
    functions = tuner.attention, torch.nn.functional.scaled_dot_product_attention
    times: tuple[list[float], list[float]] = ([], [])
    before, answered = 0, 0
    for i in range(ROUNDS + 1):  # the first round is a generation that nobody has seen
        pairs = list(zip(functions, times, strict=True))
        for function, found in pairs if i % 2 else reversed(pairs):
            given = itertools.cycle(caches)
            if function is tuner.attention:
                before = _dispatched(module, with_refused=True)
            spent = _burst(lambda: function(*next(given), enable_gqa=True))  # noqa: B023
            if function is tuner.attention:
                answered += _dispatched(module, with_refused=True) - before
            if i:
                found.append(spent)
    share = answered / ((ROUNDS + 1) * BURST)
    return {
        "growing": statistics.median(times[0]),
        "beyond_growing": _beyond(*times),
        "growing_dispatched": share,
    }


def _dispatched(module: Any, with_refused: bool = False) -> int:
    """Calls that the dispatcher has answered: those that were served, or refused ones too."""
    if module is None:
        return 0
    *hits, refused = module.take_counts(False)
    return int(sum(hits)) + (sum(refused) if with_refused else 0)


def _inputs(problem: AttentionProblem = PROBLEM) -> list[Any]:
    import torch

    return [
        torch.randn(operand.shape, dtype=getattr(torch, operand.dtype), device="cuda")
        for operand in problem.operands[:3]
    ]


def _serving(tensors: Sequence[Any]) -> Any:
    """The plan that serves, kernels and dispatcher loaded.

    Raises:
        BenchmarkError: when no own kernel serves; says why.
    """
    import importlib

    import torch

    import tuner
    from tuner.runtime.call import dispatch

    find_plan = importlib.import_module("tuner.runtime.attention.attention_call").find_plan
    plan = find_plan(*tensors, False, None)
    steps = getattr(plan, "steps", ())
    if not steps:
        raise BenchmarkError(f"{PROBLEM.label()} is not served by an own kernel: {plan}")
    if dispatch._thread is not None:
        dispatch._thread.join()
    for _ in range(10):
        tuner.attention(*tensors)
    torch.cuda.synchronize()
    return plan


def _peers(tensors: Sequence[Any]) -> dict[str, Call]:
    """FlashAttention-3 and -4 over (B, S, H, D), the layout that they are written for."""
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    found: dict[str, Call] = {}
    for name in ("flash3", "flash4"):
        attend = peer(name)
        if not isinstance(attend, str):
            scale = PROBLEM.head_dim**-0.5
            found[name] = partial(attend, query, key, value, causal=False, scale=scale)
    return found


def _burst(call: Call) -> float:
    """Host microseconds a call."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(BURST):
        call()
    spent = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return spent / BURST / 1e3


def _bare(plan: Any, tensors: Sequence[Any]) -> float:
    """Host microseconds of the plan's launches alone."""
    import torch

    from tuner.runtime.call import devices

    where = tensors[0].device
    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=where)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=where)
    base = workspace.data_ptr() if plan.workspace_bytes else 0
    addresses = [*(tensor.data_ptr() for tensor in tensors), out.data_ptr(), base, 0]
    stream, burst = devices.stream_of(plan.device), _burst_function()
    torch.cuda.synchronize()
    spent = 0
    for step in plan.steps:
        pointers = [addresses[i] + at if addresses[i] else 0 for i, at in step.tensors]
        ns = burst(
            step.kernel.address,
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(step.integers))(*step.integers),
            (ctypes.c_double * len(step.scalars))(*step.scalars),
            base + step.workspace_at,
            stream,
            BURST,
        )
        if ns < 0:
            raise BenchmarkError(f"the bare launch was refused: {-ns}")
        spent += ns
        torch.cuda.synchronize()
    return spent / 1e3


_compiled: list[Any] = []


def _burst_function() -> Any:
    """`_BURST_SOURCE`, compiled once."""
    if not _compiled:
        compiler, _ = find_host_compiler()
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "burst.cpp", Path(folder) / "burst.so"
            source.write_text(_BURST_SOURCE)
            command = [str(compiler), "-std=c++17", "-O2", "-shared", "-fPIC", str(source)]
            subprocess.run([*command, "-o", str(library)], check=True, capture_output=True)
            function = ctypes.CDLL(str(library)).burst
        function.restype = ctypes.c_int64
        function.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int64]
        _compiled.append(function)
    return _compiled[0]


def _table_share(module: Any, attention: Call, tensors: Sequence[Any]) -> float:
    """Host microseconds of reading a call and not finding it: the whole way but the launch."""
    unknown = math.pi  # a scale that nobody asked for
    samples = []
    for _ in range(ROUNDS):
        attention()  # a table that is due for a look at the store is not searched
        start = time.perf_counter_ns()
        for _ in range(1000):
            module.attention(*tensors, None, 0.0, False, unknown, False)
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return statistics.median(samples)


def wall() -> dict[str, Any]:
    """Microseconds a call in an eager loop, medians of interleaved rounds, and in a graph."""
    import torch

    import tuner

    tensors = _inputs()
    _serving(tensors)
    calls: dict[str, Call] = {
        "attention": lambda: tuner.attention(*tensors),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(*tensors),
        **_peers(tensors),
    }
    times: dict[str, list[float]] = {name: [] for name in (*calls, "graph")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            calls["attention"]()
    for call in calls.values():
        _wall(call, WALL_CALLS // 5)
    for _ in range(WALL_ROUNDS):
        for name, call in calls.items():
            times[name].append(_wall(call, WALL_CALLS))
        times["graph"].append(_wall(graph.replay, 50) / 20)
    return {name: statistics.median(values) for name, values in times.items()}


def _wall(call: Call, count: int) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def host_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Lines of the report on what `host` found: figure, value, limit, and what is beside it."""
    others = ", ".join(
        f"{name} {part[name]:.2f}" if name in part else f"no {name}"
        for name in ("bare", "python", "sdpa", "flash3", "flash4")
    )
    rows = [("host us a call", f"{part['attention']:.2f}", "", others)]
    if part["has_dispatcher"]:
        through = f"{part['dispatched']:.1%} of the calls by the dispatcher"
    else:
        through = "no dispatcher: through Python"
    rows.append(
        (
            "host us beyond the launch",
            f"{part['beyond_launch']:.2f}",
            f"{HOST_LIMIT_US:.1f}",
            through,
        )
    )
    if "table" in part:
        rows.append(("host us of the table", f"{part['table']:.2f}", f"{TABLE_LIMIT_US:.1f}", ""))
    theirs = f"{part['refused_sdpa']:.2f} of PyTorch's"
    more, enabled = part["beyond_refused"], part["beyond_refused_enabled"]
    rows.append(("host us more, refused", f"{more:.2f}", f"{REFUSED_LIMIT_US:.1f}", theirs))
    limit = f"{REFUSED_LIMIT_US:.1f}"
    rows.append(("host us more, refused, enabled", f"{enabled:.2f}", limit, theirs))
    ratio, under = part["enabled_over_sdpa"], f"{part['enabled']:.2f} us under tuner.enable"
    rows.append(("host, enabled / sdpa", f"{ratio:.2f}", f"{ENABLED_LIMIT:.2f}", under))
    share = f"{part['growing_dispatched']:.1%} of the calls by the dispatcher"
    rows.append(("host us more, growing cache", f"{part['beyond_growing']:.2f}", limit, share))
    return rows


def wall_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """As `host_rows`, of `wall`."""
    others = ", ".join(f"{name} {us:.1f}" for name, us in part.items() if name != "attention")
    mine = part["attention"]
    rows = [("wall us a call", f"{mine:.1f}", "", others)]
    rows.append(("wall / sdpa", f"{mine / part['sdpa']:.2f}", f"{WALL_LIMIT:.2f}", ""))
    if "flash4" in part:
        rows.append(("wall / flash4", f"{mine / part['flash4']:.2f}", "1.00", ""))
    rows.append(("wall / graph", f"{mine / part['graph']:.2f}", f"{GRAPH_LIMIT:.2f}", ""))
    return rows
