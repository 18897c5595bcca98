"""``scripts/bench dispatch``: what a call of `tuner.attention` costs beside its kernel.

Four parts, each a process of its own with a time-out, on one GPU:

- host: host time a call in bursts that the launch queue holds, beside the bare launch (a loop in C
  over the kernel's entry point) and PyTorch's and FlashAttention-4's own calls; the table's share.
- wall: time a call in an eager loop, beside the same kernel's in a CUDA graph.
- decoder: a decoder with the shapes of Llama-3-8B and random weights, tokens a second.
- first-call: the first call after `import tuner`, with 10,000 entries in the store; what the import
  put off is in it.

Limits stand beside the figures they are for; nothing here fails for being slow. Own kernels run
where they are tuned: what ships has `host`'s and `wall`'s shape, and the decoder's are tuned by
``scripts/bench dispatch --list-problems > p.yaml`` and ``scripts/tuner sweep --problems p.yaml``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tuner import device, settings
from tuner.bench import decoder
from tuner.bench.results import check_place, write_json
from tuner.bench.service import document
from tuner.cli.describe import table
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.vendor_sdpa import peer, peer_version
from tuner.lookup import lookup
from tuner.problem import AttentionProblem
from tuner.store import open_store
from tuner.toolchain import find_host_compiler

PARTS: Mapping[str, float] = {"host": 180, "wall": 120, "first-call": 180, "decoder": 300}
"""Each part's time-out, seconds."""
BUILD_TIMEOUT_S = 300.0
PROBLEM = AttentionProblem.parse("S=1024,D=64")
HOST_LIMIT_US, TABLE_LIMIT_US, FIRST_CALL_LIMIT_MS = 5.0, 0.5, 100.0
WALL_LIMIT, GRAPH_LIMIT = 0.7, 1.15
"""Wall time over SDPA's, and over the kernel's in a graph."""
ENTRIES = 10_000
BURST = 100
"""Calls between two waits for the device: the launch queue holds 1024."""
ROUNDS = 50

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or one in this process; 0 when every part gave figures."""
    args = _parser().parse_args(argv)
    if args.part:
        measure = {"host": host, "wall": wall, "first-call": first_call}.get(args.part)
        write_json(args.json, measure() if measure else decoder.measure(args.layers))
        return 0
    if args.layers < 1:
        raise ConfigError(f"layers={args.layers} is out of range (allowed: 1 or more)")
    if args.list_problems:
        for problem in called(args.parts):
            print(f"- op={problem.op},{problem.label()}")
        return 0
    check_place(args.json)
    results: dict[str, Any] = {"environment": environment(), "parts": {}}
    _build(called(args.parts))
    for name in args.parts:
        print(f"dispatch: {name} ...", file=sys.stderr, flush=True)
        results["parts"][name] = _in_child(name, args.layers)
        if args.json:
            write_json(args.json, results)
    print(report(results))
    return int(any("failed" in part for part in results["parts"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure there")
    parser.add_argument("--parts", type=_names, default=list(PARTS), help="as in host,wall")
    parser.add_argument(
        "--list-problems",
        action="store_true",
        help="only print what the parts call, as YAML for `tuner sweep --problems`",
    )
    parser.add_argument("--layers", type=int, default=decoder.LAYERS, help="of the decoder's 32")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"'{name}' is no part (allowed: {', '.join(PARTS)})")
    return names


def called(parts: Sequence[str]) -> list[AttentionProblem]:
    """What the parts call: tuned ones run own kernels, others PyTorch's."""
    return [PROBLEM, *(decoder.problems() if "decoder" in parts else ())]


def _build(problems: Sequence[AttentionProblem]) -> None:
    """Compile what is measured for the problems, and the dispatcher, where they are not here."""
    for problem in problems:
        answer = lookup(problem, gpu=device.detect())
        if answer is None or answer.kind != "exact":
            print(f"dispatch: not tuned: {problem.label()}", file=sys.stderr, flush=True)
            continue
        command = [sys.executable, "-m", "tuner", "build", "--shape", problem.label()]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=sys.stderr, timeout=BUILD_TIMEOUT_S, check=False)


def _in_child(name: str, layers: int) -> dict[str, Any]:
    """A part's figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "tuner.bench", "dispatch", "--part", name]
        command += ["--json", str(out), "--layers", str(layers)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PARTS[name], check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no end after {PARTS[name]:.0f} s"}
        if done.returncode == 0 and out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        return {"failed": _last_words(done)}


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def environment() -> dict[str, Any]:
    """What the figures depend on.

    Raises:
        BenchmarkError: where there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError(f"torch {torch.__version__} sees no CUDA GPU")
    return {
        "gpu": torch.cuda.get_device_name(),
        **device.environment().facts,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "flash4": peer_version("flash4"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def host() -> dict[str, Any]:
    """Host microseconds a call of `PROBLEM`, medians of bursts; the Python path's come last."""
    import torch

    import tuner
    from tuner.runtime import dispatch

    tensors = _inputs()
    plan = _serving(tensors)
    calls: dict[str, Call] = {
        "attention": lambda: tuner.attention(*tensors),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(*tensors),
        **_peers(tensors),
    }
    module = dispatch._module
    times: dict[str, list[float]] = {name: [] for name in ("bare", "python", *calls)}
    for _ in range(ROUNDS):
        times["bare"].append(_bare(plan, tensors))
        for name, call in calls.items():
            times[name].append(_burst(call))
    # Not in between: a dispatcher that comes back is told of its plans at the next look only.
    dispatch.use(None)
    times["python"] = [_burst(calls["attention"]) for _ in range(ROUNDS)]
    dispatch.use(module)
    found: dict[str, Any] = {name: statistics.median(times[name]) for name in times}
    found["has_dispatcher"] = module is not None
    found["beyond_launch"] = found["attention"] - found["bare"]
    if module is not None:
        found["table"] = _table_share(module, tensors)
    return found


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
    from tuner.runtime import dispatch

    find_plan = importlib.import_module("tuner.runtime.attention").find_plan
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

    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device="cuda")
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    base = workspace.data_ptr() if plan.workspace_bytes else 0
    addresses = [*(tensor.data_ptr() for tensor in tensors), out.data_ptr(), base, 0]
    stream = torch.cuda.current_stream().cuda_stream
    burst = _burst_function()
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


def _table_share(module: Any, tensors: Sequence[Any]) -> float:
    """Host microseconds of reading a call and not finding it: the whole way but the launch."""
    unknown = math.pi  # a scale that nobody asked for
    samples = []
    for _ in range(ROUNDS):
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
        _wall(call, 200)
    for _ in range(15):
        for name, call in calls.items():
            times[name].append(_wall(call, 1000))
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


def first_call() -> dict[str, Any]:
    """Milliseconds of the first call, in fresh processes over a store with `ENTRIES` more."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        settings.artifacts_dir().mkdir(parents=True, exist_ok=True)
        (cache / "artifacts").symlink_to(settings.artifacts_dir().resolve())
        store = cache / "store.sqlite"
        if settings.store_path().exists():
            with (
                contextlib.closing(sqlite3.connect(settings.store_path())) as source,
                contextlib.closing(sqlite3.connect(store)) as target,
            ):
                source.backup(target)
        with open_store(f"sqlite:///{store}") as opened:
            opened.import_(document(ENTRIES))
        variables = {**os.environ, "TUNER_CACHE_DIR": str(cache)}
        variables.pop("TUNER_STORE", None)
        runs = []
        for _ in range(5):
            command = [sys.executable, "-c", _FIRST_CALL]
            done = subprocess.run(
                command, capture_output=True, text=True, env=variables, check=False
            )
            if done.returncode:
                raise BenchmarkError(f"the first call failed: {_last_words(done)}")
            runs.append(json.loads(done.stdout))
    found: dict[str, Any] = {
        name: statistics.median(run[name] for run in runs) for name in ("returned", "done")
    }
    return found | {"hits": sum(run["hits"] for run in runs), "entries": ENTRIES}


_FIRST_CALL = """
import json, time, torch
tensors = [torch.randn(1, 16, 1024, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
torch.cuda.synchronize()
import tuner
start = time.perf_counter()
tuner.attention(*tensors)
returned = time.perf_counter()
torch.cuda.synchronize()
done = time.perf_counter()
print(json.dumps({
    "returned": (returned - start) * 1e3, "done": (done - start) * 1e3, "hits": tuner.stats().hits,
}))
"""


def report(results: Mapping[str, Any]) -> str:
    """The figures that have a limit, and what they are to be seen beside."""
    rows: list[tuple[str, str, str, str]] = [("figure", "here", "at most", "beside it")]
    for name, part in results["parts"].items():
        if "failed" in part:
            rows.append((name, "failed", "", part["failed"]))
        else:
            rows += _ROWS[name](part)
    facts = results["environment"]
    heading = ", ".join(
        f"{name} {facts[name]}" for name in ("gpu", "driver", "torch") if name in facts
    )
    return f"{heading}\n{table(rows, frozenset({1, 2}))}"


def _host_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    others = ", ".join(
        f"{name} {part[name]:.2f}" for name in ("bare", "python", "sdpa", "flash4") if name in part
    )
    rows = [("host us a call", f"{part['attention']:.2f}", "", others)]
    limit = f"{HOST_LIMIT_US:.1f}"
    rows.append(("host us beyond the launch", f"{part['beyond_launch']:.2f}", limit, ""))
    if "table" in part:
        rows.append(("host us of the table", f"{part['table']:.2f}", f"{TABLE_LIMIT_US:.1f}", ""))
    return rows


def _wall_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    others = ", ".join(f"{name} {us:.1f}" for name, us in part.items() if name != "attention")
    mine = part["attention"]
    rows = [("wall us a call", f"{mine:.1f}", "", others)]
    rows.append(("wall / sdpa", f"{mine / part['sdpa']:.2f}", f"{WALL_LIMIT:.2f}", ""))
    if "flash4" in part:
        rows.append(("wall / flash4", f"{mine / part['flash4']:.2f}", "1.00", ""))
    rows.append(("wall / graph", f"{mine / part['graph']:.2f}", f"{GRAPH_LIMIT:.2f}", ""))
    return rows


def _decoder_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, found in part.items():
        if name == "layers":
            continue
        ratio = found["sdpa"] / found["tuner"]
        beside = (
            f"{found['tuner']:.0f} tokens/s, sdpa {found['sdpa']:.0f}; attention's share "
            f"{found['tuner share']:.0%}, {found['sdpa share']:.0%}; {found['hits']} hits "
            f"({found['nearest_hits']} nearest), {sum(found['fallbacks'].values())} fallbacks"
        )
        rows.append(
            (f"{name} x{part['layers']} layers: time / sdpa", f"{ratio:.3f}", "1.000", beside)
        )
    return rows


def _first_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    beside = f"{part['entries']} entries, {part['hits']} of 5 served, done {part['done']:.1f}"
    return [("first call ms", f"{part['returned']:.1f}", f"{FIRST_CALL_LIMIT_MS:.0f}", beside)]


_ROWS: Mapping[str, Callable[[Mapping[str, Any]], list[tuple[str, str, str, str]]]] = {
    "host": _host_rows,
    "wall": _wall_rows,
    "decoder": _decoder_rows,
    "first-call": _first_rows,
}
