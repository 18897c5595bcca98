"""Parts of an engine's time: its first tokens, and the GPU's graph of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
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
def last_replayed() -> Iterator[list[Any]]:
    """A list whose last item is the graph that was replayed last."""
    import torch

    replay, graphs = torch.cuda.CUDAGraph.replay, list[Any]()

    def noted(graph: Any) -> None:
        graphs[:] = [graph]
        replay(graph)

    torch.cuda.CUDAGraph.replay = noted
    try:
        yield graphs
    finally:
        torch.cuda.CUDAGraph.replay = replay


def figures_of(graphs: Sequence[Any]) -> dict[str, float]:
    """Median of the GPU's milliseconds for the last graph; nothing without one."""
    replays = [replayed(graph) / 1e3 for graph in [*graphs[-1:]] * REPLAYS]
    return {"graph_ms": statistics.median(replays)} if replays else {}
