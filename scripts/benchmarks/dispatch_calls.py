"""Cost of a call of `tuner.attention`: on the host beyond its launch, and in an eager loop."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, HostTimes, Row
from tuner.compile.toolchain import find_host_compiler
from tuner.errors import BenchmarkError
from tuner.families.peers.sdpa import peer
from tuner.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("S=1024,D=64")
REFUSED = AttentionProblem.parse("H=3,S=200,D=192")
"""Sizes of a call that PyTorch answers, in single precision, which no kernel takes."""
GROWING = "H=8,HKV=2,SQ=1,D=64,SKV={},dtype=bf16"
BURST = 100
"""Calls between two waits for the device: the launch queue holds 1024."""
REPLAYED = 20
"""Calls of a CUDA graph in the eager loop's place."""

_BURST_SOURCE = """
#include <cstdint>
using Launch = int (*)(void* const*, int64_t const*, double const*, void*, void*);
// Enqueues `count` launches; 0, or the error of the first that is refused.
extern "C" int burst(Launch launch, void* const* tensors, int64_t const* integers,
                     double const* scalars, void* workspace, void* stream, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (int const code = launch(tensors, integers, scalars, workspace, stream)) return code;
  return 0;
}
"""


@dataclass(frozen=True)
class Case:
    """A kind of call.

    Args:
        label: name of the kind.
        ways: makes the contenders; the first is the tuner's.
        limits: most of a figure: ``us`` is the tuner's time, ``us beyond X`` its difference from
            another contender's in the same rounds, ``over X`` its ratio.
        calls: calls of a burst.
        rounds: bursts of each contender.
        is_waiting: the device's time counts too.
    """

    label: str
    ways: Callable[[], list[Contender]]
    limits: Mapping[str, float]
    calls: int = BURST
    rounds: int = 50
    is_waiting: bool = False

    @property
    def group(self) -> str:
        return "eager loop" if self.is_waiting else "host"


def measure(case: Case, _: Namespace) -> Row:
    """Microseconds a call of each way, what has a limit, and the share of calls that the C++
    dispatcher has answered without Python.
    """
    contenders = case.ways()
    module = _dispatcher()
    answered = _answered(module)
    times = harness.time_host(contenders, case.calls, case.rounds, case.is_waiting)
    asked = 2 * case.rounds * (case.calls + 1)  # the tuner's calls and the control's
    figures = {name: _figure(times, name) for name in case.limits}
    return {
        "us": times.us,
        "figures": {name: value for name, value in figures.items() if value is not None},
        "goals": {name: f"at most {limit:g}" for name, limit in case.limits.items()},
        "dispatched": (_answered(module) - answered) / asked,
    }


def _figure(times: HostTimes, name: str) -> float | None:
    """A figure of `Case.limits`; None where the other contender has no time."""
    how, _, other = name.rpartition(" ")
    us = times.us
    if not how:
        return us["tuner"]
    if other not in us:
        return None
    if how == "over":
        return us["tuner"] / us[other]
    pairs = zip(times.rounds["tuner"], times.rounds[other], strict=True)
    return statistics.median(own - beside for own, beside in pairs)


def _dispatcher() -> Any:
    """The loaded dispatcher, once the thread that loads it is through; None without one."""
    from tuner.runtime.call import dispatch

    if dispatch._thread is not None:
        dispatch._thread.join()
    return dispatch._module


def _answered(module: Any) -> int:
    """Calls that the dispatcher has answered, served or refused."""
    if module is None:
        return 0
    *hits, refused = module.take_counts(False)
    return int(sum(hits) + sum(refused))


def inputs(problem: AttentionProblem) -> list[Any]:
    """Drawn query, key and value of a problem."""
    import torch

    return [
        torch.randn(operand.shape, dtype=getattr(torch, operand.dtype), device="cuda")
        for operand in problem.operands[:3]
    ]


def _both(tensors: Sequence[Any], **options: Any) -> list[Contender]:
    """The tuner's function and PyTorch's."""
    import torch

    import tuner

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return [
        Contender("tuner", lambda _: tuner.attention(*tensors, **options)),
        Contender("pytorch", lambda _: sdpa(*tensors, **options)),
    ]


def served() -> list[Contender]:
    """A served call beside its bare launch and the peers' own calls."""
    tensors = inputs(PROBLEM)
    plan = serving(tensors)
    bare = Contender("bare", _bare(plan, tensors))
    return [*_both(tensors), bare, *_peers(tensors)]


def refused() -> list[Contender]:
    """A call that PyTorch answers.

    Raises:
        BenchmarkError: when it is served.
    """
    import tuner

    ways = _both([tensor.float() for tensor in inputs(REFUSED)])
    hits = tuner.stats().hits
    ways[0].call(0)
    if tuner.stats().hits != hits:
        raise BenchmarkError(f"{REFUSED.label()} is served (wanted: a call that PyTorch answers)")
    return ways


def enabled(is_served: bool) -> list[Contender]:
    """PyTorch's function with the switch on, and with it off."""
    import tuner

    tensors = inputs(PROBLEM) if is_served else [tensor.float() for tensor in inputs(REFUSED)]
    if is_served:
        serving(tensors)
    _, pytorch = _both(tensors)
    return [Contender("tuner", pytorch.call, tuner.enabled), pytorch]


def growing() -> list[Contender]:
    """Decoding over a cache that grows with every call."""
    caches = [inputs(AttentionProblem.parse(GROWING.format(1100 + i))) for i in range(BURST)]
    own, pytorch = zip(*(_both(cache, enable_gqa=True) for cache in caches), strict=True)
    return [
        Contender("tuner", lambda i: own[i].call(i)),
        Contender("pytorch", lambda i: pytorch[i].call(i)),
    ]


def unknown() -> list[Contender]:
    """Reading a call and not finding it in the table: the whole way but the launch.

    Raises:
        BenchmarkError: when the dispatcher is missing.
    """
    tensors = inputs(PROBLEM)
    serving(tensors)
    module, attention = _dispatcher(), _both(tensors)[0].call
    if module is None:
        raise BenchmarkError("no dispatcher: a C++ compiler or Python's headers are missing")
    scale = math.pi  # that nobody asked for

    def call(i: int) -> Any:
        if i == 0:  # a table that is due for a look at the store is not searched
            return attention(i)
        return module.attention(*tensors, None, 0.0, False, scale, False)

    return [Contender("tuner", call)]


def by_python(ways: Callable[[], list[Contender]]) -> list[Contender]:
    """Calls without the dispatcher. One that comes back is told of its plans late."""
    from tuner.runtime.call import dispatch

    own, *others = ways()
    module = _dispatcher()

    @contextlib.contextmanager
    def without() -> Iterator[None]:
        dispatch.use(None)
        try:
            yield
        finally:
            dispatch.use(module)

    return [Contender("tuner", own.call, without), *others]


def linear() -> list[Contender]:
    """A product in single precision, which no kernel takes."""
    import torch

    import tuner

    input, weight, _ = (tensor[0, 0].float() for tensor in inputs(PROBLEM))
    return [
        Contender("tuner", lambda _: tuner.linear(input, weight)),
        Contender("pytorch", lambda _: torch.nn.functional.linear(input, weight)),
    ]


def eager() -> list[Contender]:
    """Calls in an eager loop, beside the same in a CUDA graph."""
    import torch

    tensors = inputs(PROBLEM)
    serving(tensors)
    own, pytorch = _both(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(REPLAYED):
            own.call(i)
    replay = Contender("graph", lambda i: None if i % REPLAYED else graph.replay())
    return [own, pytorch, *_peers(tensors), replay]


CASES = (
    Case("served", served, {"us beyond bare": 5.0}),
    Case("refused", refused, {"us beyond pytorch": 1.0}),
    Case("enabled, served", partial(enabled, True), {"over pytorch": 0.75}),
    Case("enabled, refused", partial(enabled, False), {"us beyond pytorch": 1.0}),
    Case("growing cache", growing, {"us beyond pytorch": 1.0}),
    Case("not in the table", unknown, {"us": 0.5}, calls=1000),
    Case(
        "eager loop",
        eager,
        {"over pytorch": 0.7, "over flash4": 1.0, "over graph": 1.15},
        calls=1000,
        rounds=15,
        is_waiting=True,
    ),
    Case("served by Python", partial(by_python, served), {"us beyond pytorch": 3.0}),
    Case("refused by Python", partial(by_python, refused), {"us beyond pytorch": 3.0}),
    Case("a product, by Python", partial(by_python, linear), {"us beyond pytorch": 3.0}),
)


def serving(tensors: Sequence[Any]) -> Any:
    """The plan that serves, kernels and dispatcher loaded.

    Raises:
        BenchmarkError: when no own kernel serves; says why.
    """
    import tuner

    find_plan = importlib.import_module("tuner.runtime.attention.attention_call").find_plan
    plan = find_plan(*tensors, False, None)
    if not getattr(plan, "steps", ()):
        raise BenchmarkError(f"{PROBLEM.label()} is not served by an own kernel: {plan}")
    _dispatcher()
    for _ in range(10):
        tuner.attention(*tensors)
    return plan


def _peers(tensors: Sequence[Any]) -> list[Contender]:
    """FlashAttention-3 and -4 over (B, S, H, D), the layout that they are written for."""
    laid = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    contenders = []
    for name in ("flash3", "flash4"):
        attend = peer(name)
        if not isinstance(attend, str):
            call = partial(attend, *laid, causal=False, scale=PROBLEM.head_dim**-0.5)
            contenders.append(Contender(name, harness.every_copy(call)))
    for contender in contenders:
        contender.call(0)
    return contenders


def _bare(plan: Any, tensors: Sequence[Any]) -> Callable[[int], None]:
    """The plan's launches alone: the last call of a burst enqueues all in a loop in C."""
    import torch

    from tuner.runtime.call import devices

    where = tensors[0].device
    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=where)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=where)
    base = workspace.data_ptr() if plan.workspace_bytes else 0
    addresses = [*(tensor.data_ptr() for tensor in tensors), out.data_ptr(), base, 0]
    launches = []
    for step in plan.steps:
        pointers = [addresses[i] + at if addresses[i] else 0 for i, at in step.tensors]
        launches.append((
            step.kernel.address,
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(step.integers))(*step.integers),
            (ctypes.c_double * len(step.scalars))(*step.scalars),
            base + step.workspace_at,
        ))  # fmt: skip
    burst, stream = _burst(), devices.stream_of(plan.device)
    held = out, workspace

    def call(i: int) -> None:
        for launch in launches if i == BURST - 1 and held else ():
            if code := burst(*launch, stream, BURST):
                raise BenchmarkError(f"the bare launch was refused: {code}")

    return call


@cache
def _burst() -> Any:
    """`_BURST_SOURCE`, compiled."""
    compiler, _ = find_host_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "burst.cpp", Path(folder) / "burst.so"
        source.write_text(_BURST_SOURCE)
        command = [str(compiler), "-std=c++17", "-O2", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True, capture_output=True)
        function = ctypes.CDLL(str(library)).burst
    function.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int64]
    return function
