"""Ring attention of any number of ranks in one process: a thread a rank, queues for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

from tuner.runtime.parallel.context_parallel import _backward, _chunks, _forward, _Options

PATIENCE_S = 120


class ThreadedRing:
    """A rank's place in the ring, as `tuner.runtime.parallel.ring.Ring`."""

    def __init__(self, rank: int, queues: Sequence[SimpleQueue[Any]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues

    def start(self, *tensors: torch.Tensor) -> ThreadedRing:
        # Copies: what is sent may be written once it was received.
        self._queues[(self.rank + 1) % self.size].put([tensor.clone() for tensor in tensors])
        return self

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._queues[self.rank].get(timeout=PATIENCE_S))


def attend(
    whole: Sequence[torch.Tensor], ranks: int, is_causal: bool, deterministic: bool | None = None
) -> list[torch.Tensor]:
    """Output and gradients of query, key and value of the whole sequence.

    Args:
        whole: query, key, value and the gradient of the output.
        ranks: number of ranks that share the sequence.
        is_causal: as of the attention.
        deterministic: as of `ring_attention`.
    """
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(ranks)]
    orders = [_chunks(rank, ranks, is_causal) for rank in range(ranks)]
    options = _Options(is_causal, None, deterministic)

    def run(rank: int) -> list[torch.Tensor]:
        count = ranks * len(orders[rank])
        parts = []
        for tensor in whole:
            chunks = tensor.detach().chunk(count, 2)
            part = torch.cat([chunks[number] for number in orders[rank]], 2)
            parts.append(torch.empty_like(tensor[:, :, : part.shape[2]]).copy_(part))
        *inputs, grad_out = parts
        ring: Any = ThreadedRing(rank, queues)
        with torch.no_grad():  # of each thread
            out, lse = _forward(*inputs, ring, options)
            return [out, *_backward(grad_out, [*inputs, out, lse], ring, options)]

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    joined = []
    for parts in zip(*results, strict=True):
        chunks = {}
        for order, part in zip(orders, parts, strict=True):
            chunks.update(zip(order, part.chunk(len(order), 2), strict=True))
        joined.append(torch.cat([chunks[number] for number in sorted(chunks)], 2))
    return joined
