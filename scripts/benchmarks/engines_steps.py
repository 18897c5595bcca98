"""Parts of an engine's time: its first tokens, all tokens, and the GPU's graph of a step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.call_times import replayed

FIRSTS, WHOLES, FEW = 5, 3, 16
"""Times that the first tokens, and all tokens, of up to so many requests are asked for; of more,
once."""
REPLAYS = 20
"""Replays of a step's graph that are timed."""


def median_s(count: int, times: int, seconds: Callable[[], float]) -> float:
    """Median of the seconds that requests take.

    Args:
        count: requests. All ranks of an engine ask equally often.
        times: `FIRSTS` or `WHOLES`.
        seconds: asks, and tells how long it took.
    """
    return statistics.median(seconds() for _ in range(times if count <= FEW else 1))


@contextmanager
def counted_replays() -> Iterator[Counter[Any]]:
    """How often each graph is replayed."""
    import torch

    replay, graphs = torch.cuda.CUDAGraph.replay, Counter[Any]()

    def counted(graph: Any) -> None:
        graphs[graph] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    try:
        yield graphs
    finally:
        torch.cuda.CUDAGraph.replay = replay


def figures_of(graphs: Counter[Any]) -> dict[str, float]:
    """Median of the GPU's milliseconds for the graph that was replayed most; nothing without one.

    At the end fewer requests may be left, which have a graph of their own.
    """
    times = [replayed(graph) / 1e3 for graph, _ in graphs.most_common(1) for _ in range(REPLAYS)]
    return {"graph_ms": statistics.median(times)} if times else {}
