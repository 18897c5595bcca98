"""Parts of an engine's time: its first tokens, and the GPU's graph of a step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.call_times import replayed

FIRSTS, FEW = 5, 16
"""Times that the first tokens of up to so many requests are asked for; of more, once."""
REPLAYS = 20
"""Replays of a step's graph that are timed."""


def first_token_ms(count: int, seconds: Callable[[], float]) -> float:
    """Median of the milliseconds until the first tokens.

    Args:
        count: requests. All ranks of an engine ask equally often.
        seconds: asks for them, and tells how long it took.
    """
    return statistics.median(seconds() for _ in range(FIRSTS if count <= FEW else 1)) * 1e3


@contextmanager
def replays() -> Iterator[Counter[Any]]:
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

    Requests end at unlike steps where their prompts were read in several, so the last is of few.
    """
    took = [replayed(graph) / 1e3 for graph, _ in graphs.most_common(1) * REPLAYS]
    return {"graph_ms": statistics.median(took)} if took else {}
