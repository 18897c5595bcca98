"""New keys and values of a step, written to a paged cache and rotated, for `scripts/bench paged`.

`tuner.paged_append` beside PyTorch's operations, which are told the slots. They rotate queries and
keys in the rows' type, and copy keys and values by index. A third contender copies as many bytes as
the step reads and writes. Heads are Llama-3-8B's, rows bf16, pages of 16 slots.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row
from tuner.errors import BenchmarkError

HEADS, HEADS_KV, WIDTH, SIZE = 32, 8, 128, 16
KEYS = 4096
"""Keys of each sequence before the step, at most."""


@dataclass(frozen=True)
class Step:
    """Sequences, and new tokens of each."""

    sequences: int
    queries: int
    is_e4m3: bool = False

    @property
    def group(self) -> str:
        return "append, e4m3" if self.is_e4m3 else "append"

    @property
    def label(self) -> str:
        return f"{self.group}: {self.sequences} x {self.queries}"


STEPS = [
    Step(*step, is_e4m3)
    for is_e4m3 in (False, True)
    for step in ((1, 1), (16, 1), (128, 1), (64, 4), (1, 2048), (4, 2048))
]


def measure(step: Step, _: Namespace) -> Row:
    """Microseconds of each way for one step.

    Raises:
        BenchmarkError: when the kernel does not serve the step.
    """
    import torch

    import tuner
    from tuner.runtime.attention import append

    torch.manual_seed(0)
    sequences, queries, tokens = step.sequences, step.queries, step.sequences * step.queries
    kind = torch.float8_e4m3fn if step.is_e4m3 else torch.bfloat16
    used = torch.randint(1, KEYS, (sequences,), device="cuda").int() + queries
    columns = -(-(KEYS + queries) // SIZE)
    table = torch.randperm(sequences * columns, device="cuda").int().view(sequences, columns)
    shape = sequences * columns, SIZE, HEADS_KV, WIDTH
    caches = [torch.zeros(shape, device="cuda").to(kind) for _ in range(2)]
    source = torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    query, key, value = source.clone(), source[:, :HEADS_KV].clone(), source[:, 8:16].clone()
    out = torch.empty(source.shape, device="cuda").to(kind)
    angles = torch.rand(KEYS + queries, WIDTH // 2, device="cuda")
    cosine, sine = angles.cos(), angles.sin()
    scales = (torch.full((n,), 0.5, device="cuda") for n in (HEADS, HEADS_KV, HEADS_KV))
    names = ("q_scale", "k_scale", "v_scale") if step.is_e4m3 else ()
    options = dict(zip(names, scales, strict=False))

    def kernel(_: int) -> Any:
        tensors = query, key, value, *caches, table, used
        return tuner.paged_append(*tensors, cosine=cosine, sine=sine, out=out, **options)

    token = torch.arange(tokens, device="cuda")
    position = used[token // queries].long() - queries + token % queries
    page = table[token // queries, position // SIZE].long()
    turns = [angle[position].bfloat16().unsqueeze(1) for angle in (cosine, sine)]

    def rotated(rows: Any) -> Any:
        low, high = rows.chunk(2, -1)
        return torch.cat((low * turns[0] - high * turns[1], high * turns[0] + low * turns[1]), -1)

    def pytorch(_: int) -> Any:
        new, whole = (rotated(query), rotated(key), value), caches
        if step.is_e4m3:
            new = tuple((rows * 2).to(kind).view(torch.uint8) for rows in new)
            whole = [cache.view(torch.uint8) for cache in caches]
        out.view(new[0].dtype).copy_(new[0])
        whole[0][page, position % SIZE] = new[1]
        whole[1][page, position % SIZE] = new[2]
        return out

    kernel(0)
    if append.kernels.of(query.device, lambda _: False) is None:
        raise BenchmarkError("the kernel is not served here (tuner build --portfolio builds it)")
    moved = tokens * (HEADS + 2 * HEADS_KV) * WIDTH * (2 + kind.itemsize)
    block = torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda")
    ways = (
        Contender("tuner", kernel),
        Contender("pytorch", pytorch),
        Contender("copy", lambda _: block[0].copy_(block[1])),
    )
    times = harness.time_calls(ways, lambda _: torch.add(source, 0.0, out=query), 1)
    copy_us = times.us.pop("copy", None)
    return {"bytes": moved, "us": times.us, "copy_us": copy_us, "failed": times.failed}
