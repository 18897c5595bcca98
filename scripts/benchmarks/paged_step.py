"""Steps of decoding as an engine's captured graph has them, for `scripts/bench paged`.

A step has a product, the copy of new keys and values to their slots, attention, and a product of
its output. All but the attention are PyTorch's kernels, which start when the kernel before has
ended.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from itertools import product
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.paged_batches import Case
from benchmarks.paged_calls import PEER, Batch, answer, timed
from tuner.families.peers import installed

#: Copies of the weights: together no less than twice the L2.
WEIGHTS = 8
#: Keys of a sequence that the graphs are made for.
ROOM = 8192


def cases() -> list[Case]:
    """One query of 1, 4 and 16 sequences, with the heads of an 8B model and of a 1B model."""
    return [
        Case("step", (1,) * batch, (keys,) * batch, head_dim=width, room=ROOM)
        for width, batch, keys in product((64, 128), (1, 4, 16), (128, 1024, 4096))
    ]


class Step:
    """A batch's step; its queries are the first product's.

    Args:
        batch: tensors and calls, whose queries become a view of this step's.
    """

    def __init__(self, batch: Batch) -> None:
        import torch

        self.batch, case = batch, batch.case
        heads, width = case.heads_q + 2 * case.heads_kv, case.head_dim
        hidden, tokens = case.heads_q * width, len(case.queries)
        scale = hidden**-0.5
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.source = torch.randn(tokens, hidden, **options)
        self.x, self.out = self.source.clone(), torch.empty_like(self.source)
        self.first = torch.randn(WEIGHTS, hidden, heads * width, **options) * scale
        self.last = torch.randn(WEIGHTS, hidden, hidden, **options) * scale
        self.rows = torch.empty(tokens, heads * width, **options)
        parts = self.rows.view(tokens, heads, width)
        counts = case.heads_q, case.heads_kv, case.heads_kv
        batch.query, self.key, self.value = parts.split(counts, 1)
        self.slots = [self._slots(table) for table in batch.tables]

    def _slots(self, table: Any) -> Any:
        """Places of the last keys in the caches."""
        used, size = self.batch.used.long() - 1, self.batch.case.page_size
        pages = table.gather(1, (used // size).unsqueeze(1)).squeeze(1)
        return pages.long() * size + used % size

    def before(self, _: int) -> Any:
        """Write the input."""
        import torch

        return torch.add(self.source, 0, out=self.x)

    def with_attention(self, attention: Callable[[int], Any] | None) -> Callable[[int], Any]:
        """A step whose attention is this call's; None: one without it."""
        import torch

        caches = self.batch.key.flatten(0, 1), self.batch.value.flatten(0, 1)

        def call(index: int) -> Any:
            torch.mm(self.x, self.first[index % WEIGHTS], out=self.rows)
            slots = self.slots[index % self.batch.copies]
            for cache, rows in zip(caches, (self.key, self.value), strict=True):
                cache.index_copy_(0, slots, rows)
            out = self.batch.out if attention is None else attention(index)
            return torch.mm(out.view(self.out.shape), self.last[index % WEIGHTS], out=self.out)

        return call


def measure(case: Case, args: Namespace) -> Row:
    """Times that attention adds to a step of decoding in a captured graph."""
    batch = Batch(case)
    step = Step(batch)
    calls, failed = {"tuner": batch.tuner(batch.tables, case.longest)}, dict[str, str]()
    module = installed.module_of(PEER)
    if isinstance(module, str):
        failed["flash3"] = module
    else:
        calls["flash3"] = batch.flash3(module)
    steps = {name: step.with_attention(call) for name, call in calls.items()}
    steps["without"] = step.with_attention(None)
    outs, us, missing = timed(batch, steps, args.us, step.before)
    without_us = us.pop("without", 0.0)
    errors = {}
    if "tuner" in outs and "flash3" in outs:
        errors["tuner"] = harness.distance(outs["tuner"][0], outs["flash3"][0])
    return {
        "bytes": case.bytes,
        "flops": case.flops,
        "us": {name: time - without_us for name, time in us.items()},
        "without_us": without_us,
        "answered": {"tuner": answer(outs["tuner"][1])} if "tuner" in outs else {},
        "chosen": batch.selected(),
        "best": "",
        "errors": errors,
        "failed": failed | missing,
    }
