"""Times within an engine's decoding steps, for ``scripts/bench engines --steps``.

A *step* is one call of the engine's ``step`` that replays a CUDA graph. Its parts:

- wall time
- CPU time of the engine's thread
- time in which the thread sleeps until the GPU has finished
- time in the builder of the attention's metadata
- garbage collection
- GPU time of the replayed graph, between two events

The last pass records kernels by torch.profiler and functions by cProfile, which slow the step.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.selection.describe import table

BUILDERS = (
    ("tuner.runtime.engines.vllm.backend", "TunerMetadataBuilder"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder"),
)
"""Modules and classes that build the attention's metadata; the first that is loaded is timed."""
FUNCTIONS = 40
"""Functions and kernels that a profile keeps."""
HEADING = (
    *("shape", "requests", "way", "steps", "wall ms", "thread ms", "sleep ms", "builder ms"),
    *("collect ms", "graph ms", "busy ms"),
)


@dataclass
class Step:
    """One step, in milliseconds."""

    wall: float = 0.0
    thread: float = 0.0
    """CPU time of the engine's thread."""
    sleep: float = 0.0
    """Time in ``Event.synchronize``."""
    builder: float = 0.0
    collect: float = 0.0
    """Time of Python's garbage collections."""
    graph: float = 0.0
    """GPU time of the graphs that it replayed, with the gaps between their kernels."""
    graphs: int = 0


class Recorder:
    """Records the steps of an engine while it is entered.

    Args:
        engine: vLLM's ``LLMEngine``, or an object with its ``step``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._steps: list[Step] = []
        self._pairs: list[tuple[Step, Any, Any]] = []
        self._now = Step()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the engine's step and the parts that are timed; undo it at the end."""
        import torch

        step, begun = self._engine.step, [0.0]

        def collected(phase: str, info: Mapping[str, int]) -> None:
            if phase == "start":
                begun[0] = time.perf_counter()
            else:
                self._now.collect += (time.perf_counter() - begun[0]) * 1e3

        def stepped() -> Any:
            self._now = Step()
            wall, thread = time.perf_counter(), time.thread_time()
            try:
                return step()
            finally:
                self._now.wall = (time.perf_counter() - wall) * 1e3
                self._now.thread = (time.thread_time() - thread) * 1e3
                self._steps.append(self._now)

        def replayed(replay: Callable[[Any], None]) -> Callable[[Any], None]:
            def run(graph: Any) -> None:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                replay(graph)
                events[1].record()
                self._now.graphs += 1
                self._pairs.append((self._now, *events))

            return run

        builder = next((getattr(sys.modules[m], c) for m, c in BUILDERS if m in sys.modules), None)
        gc.callbacks.append(collected)
        self._engine.step = stepped
        try:
            with _wrapped(torch.cuda.CUDAGraph, "replay", replayed):
                with _wrapped(torch.cuda.Event, "synchronize", self._timed("sleep")):
                    if builder is None:
                        yield
                    else:
                        with _wrapped(builder, "build", self._timed("builder")):
                            yield
        finally:
            gc.callbacks.remove(collected)
            self._engine.step = step
        torch.cuda.synchronize()
        for one, first, last in self._pairs:
            one.graph += first.elapsed_time(last)
        self._pairs.clear()

    def take(self) -> list[Step]:
        """The recorded steps that replayed a graph."""
        found, self._steps = [one for one in self._steps if one.graphs], []
        return found

    def _timed(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*args, **options)
                finally:
                    took = (time.perf_counter() - start) * 1e3
                    setattr(self._now, part, getattr(self._now, part) + took)

            return run

        return wrap


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a class by its wrapped self for a while."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before) if is_own else delattr(owner, name)


def recorded(engine: Any, generate: Callable[[], object]) -> dict[str, Any]:
    """Medians of a pass's steps, and each step's parts.

    Args:
        engine: as for `Recorder`.
        generate: runs the pass.
    """
    recorder = Recorder(engine)
    with recorder.recording():
        generate()
    steps = recorder.take()
    return {
        "load": os.getloadavg()[0],
        "median": medians(steps),
        "steps": [{k: round(v, 4) for k, v in asdict(one).items()} for one in steps],
    }


def medians(steps: Sequence[Step]) -> dict[str, float]:
    """Median of each part over steps; of garbage collection the mean, as it is rare."""
    if not steps:
        return {}
    every = [asdict(one) for one in steps]
    found = {name: statistics.median(one[name] for one in every) for name in every[0]}
    found["collect"] = statistics.fmean(one["collect"] for one in every)
    return found | {"count": len(every), "wall_mean": statistics.fmean(s["wall"] for s in every)}


def profiled(engine: Any, generate: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one pass and functions of another.

    Args:
        engine: as for `Recorder`; its steps are counted.
        generate: runs a pass.
    """
    import torch

    recorder = Recorder(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with recorder.recording():
            generate()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    steps = recorder.take()
    python = cProfile.Profile()
    python.runcall(generate)
    return {
        "steps": len(steps),
        "median": medians(steps),
        "kernels": kernels(spans, len(steps)),
        "functions": functions(python),
    }


def kernels(spans: Iterable[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Busy time of the GPU and its largest kernels in the last half of a pass.

    Args:
        spans: start and end in microseconds, and name, of each kernel and copy.
        steps: decoding steps of the pass.

    Returns:
        ``busy_ms`` and ``wall_ms`` in total, and ``largest``: name, milliseconds and count.
    """
    every = sorted(spans)
    if not every:
        return {}
    middle = (every[0][0] + max(end for _, end, _ in every)) / 2
    late = [one for one in every if one[0] >= middle]
    took: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for start, end, name in late:
        took[name[:120]] += end - start
        counts[name[:120]] += 1
    largest = sorted(took.items(), key=lambda one: -one[1])[:FUNCTIONS]
    return {
        "steps": steps,
        "busy_ms": busy(late) / 1e3,
        "wall_ms": (max(end for _, end, _ in late) - late[0][0]) / 1e3,
        "largest": [[name, us / 1e3, counts[name]] for name, us in largest],
    }


def busy(spans: Iterable[tuple[float, float, str]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def functions(profile: cProfile.Profile) -> list[list[Any]]:
    """The functions with the largest own time: place, calls, own and whole milliseconds."""
    stats: Any = pstats.Stats(profile)
    rows = [
        [f"{'/'.join(Path(file).parts[-3:])}:{line} {name}", calls, own * 1e3, whole * 1e3]
        for (file, line, name), (_, calls, own, whole, _) in stats.stats.items()
    ]
    by_own = sorted(rows, key=lambda row: -row[2])[:FUNCTIONS]
    by_whole = [row for row in sorted(rows, key=lambda row: -row[3]) if row not in by_own]
    return by_own + by_whole[:FUNCTIONS]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each pass: medians of its steps. Lost passes follow.

    Args:
        rows: shape, way, and of each concurrency what `recorded` or `profiled` returned; or why the
            pass was ``lost``.
    """
    lines, lost = [HEADING], list[str]()
    for row in rows:
        if "lost" in row:
            lost.append(f"steps, {row['shape']}, {row['way']}: lost: {row['lost']}")
        for count, found in row.get("of", {}).items():
            middle = found.get("median") or {}
            parts = ("wall", "thread", "sleep", "builder", "collect", "graph")
            cells = [f"{middle[part]:.3f}" if part in middle else "" for part in parts]
            gpu = found.get("kernels") or {}
            share = gpu["busy_ms"] / gpu["wall_ms"] if gpu else None
            cells.append("" if share is None else f"{share:.1%} of its time")
            lines.append((row["shape"], count, row["way"], str(middle.get("count", "")), *cells))
    return "\n".join([table(lines, frozenset(range(3, 10))), *lost])
