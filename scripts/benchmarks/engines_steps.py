"""Times within an engine's decoding steps, for ``scripts/bench engines --preset steps``.

A *step* is one call of the engine's ``step`` that replays a CUDA graph. Its parts, in milliseconds:

- ``wall``, and ``thread``, the CPU time of the engine's thread
- ``sleep``, in which the thread waits for the GPU
- ``builder`` of the attention's metadata
- ``collect``, Python's garbage collections
- ``graph``, the GPU's time of the replayed graphs, with the gaps between their kernels
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

BUILDERS = (
    ("tuner.runtime.engines.vllm.backend", "TunerMetadataBuilder"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder"),
)
"""Modules and classes that build the attention's metadata; the first that is loaded is timed."""
PARTS = ("wall", "thread", "sleep", "builder", "collect", "graph")
Step = defaultdict[str, float]


def recorded(engine: Any, generate: Callable[[], object]) -> dict[str, Any]:
    """Medians of each part over the steps of a pass; of garbage collection the mean, as it is rare.

    Args:
        engine: vLLM's ``LLMEngine``, or an object with its ``step``.
        generate: runs the pass.
    """
    with _recording(engine) as steps:
        generate()
    decoding = [step for step in steps if step["graphs"]]
    if not decoding:
        return {"steps": 0}
    figures = {part: statistics.median(step[part] for step in decoding) for part in PARTS}
    figures["collect"] = statistics.fmean(step["collect"] for step in decoding)
    return {**figures, "steps": len(decoding)}


@contextmanager
def _recording(engine: Any) -> Iterator[Sequence[Step]]:
    """Wrap the engine's step and the parts that are timed; undo it at the end."""
    import torch

    steps, begun, step = [Step(float)], [0.0], engine.step
    replays: list[tuple[Step, Any, Any]] = []

    def collected(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            steps[-1]["collect"] += (time.perf_counter() - begun[0]) * 1e3

    def stepped() -> Any:
        steps.append(Step(float))
        thread = time.thread_time()
        try:
            return timed("wall", step)()
        finally:
            steps[-1]["thread"] += (time.thread_time() - thread) * 1e3

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                steps[-1][part] += (time.perf_counter() - start) * 1e3

        return run

    def replayed(replay: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(graph: Any) -> None:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            replay(graph)
            events[1].record()
            steps[-1]["graphs"] += 1
            replays.append((steps[-1], *events))

        return run

    builder = next((getattr(sys.modules[m], c) for m, c in BUILDERS if m in sys.modules), None)
    with ExitStack() as stack:
        gc.callbacks.append(collected)
        stack.callback(gc.callbacks.remove, collected)
        engine.step = stepped
        stack.callback(setattr, engine, "step", step)
        _wrap(stack, torch.cuda.CUDAGraph, "replay", replayed)
        _wrap(stack, torch.cuda.Event, "synchronize", lambda call: timed("sleep", call))
        if builder is not None:
            _wrap(stack, builder, "build", lambda call: timed("builder", call))
        yield steps
    torch.cuda.synchronize()
    for of_step, first, last in replays:
        of_step["graph"] += first.elapsed_time(last)


def _wrap(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute of a class by its wrapped self until the stack ends."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(before))
    undo = (setattr, owner, name, before) if is_own else (delattr, owner, name)
    stack.callback(*undo)
