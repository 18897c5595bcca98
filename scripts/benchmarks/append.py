"""``scripts/bench append``: new keys and values of a step, written to a paged cache and rotated.

`tuner.paged_append` beside PyTorch's operations, which are told the slots. They rotate queries and
keys in the rows' type, and copy keys and values by index. A third contender copies as many bytes as
the step reads and writes. Heads are Llama-3-8B's (32 on 8, D = 128), rows bf16, pages
of 16 slots. Each call stands behind an element-wise kernel that writes the queries. ``tuner build``
or ``--compile-only`` compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.call_times import Contender, time_calls
from benchmarks.single_kernel import run
from tuner.compile.single import PAGED_APPEND
from tuner.errors import BenchmarkError

HEADS, HEADS_KV, WIDTH, SIZE = 32, 8, 128, 16
#: Sequences, and new tokens of each.
STEPS = ((1, 1), (16, 1), (128, 1), (64, 4), (1, 2048), (4, 2048))
KEYS = 4096
"""Keys of each sequence before the step, at most."""


def timed(sequences: int, queries: int, is_e4m3: bool) -> dict[str, Any]:
    """Microseconds of each way for one step.

    Raises:
        BenchmarkError: when the kernel does not serve the step.
    """
    import torch

    import tuner
    from tuner.runtime.attention import append

    torch.manual_seed(0)
    device, tokens = torch.device("cuda", torch.cuda.current_device()), sequences * queries
    kind = torch.float8_e4m3fn if is_e4m3 else torch.bfloat16
    used = torch.randint(1, KEYS, (sequences,), device=device).int() + queries
    columns = -(-(KEYS + queries) // SIZE)
    table = torch.randperm(sequences * columns, device=device).int().view(sequences, columns)
    caches = [
        torch.zeros(sequences * columns, SIZE, HEADS_KV, WIDTH, device=device).to(kind)
        for _ in range(2)
    ]
    source = torch.randn(tokens, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    query, key, value = source.clone(), source[:, :HEADS_KV].clone(), source[:, 8:16].clone()
    out = torch.empty(source.shape, device=device).to(kind)
    angles = torch.rand(KEYS + queries, WIDTH // 2, device=device)
    cosine, sine = angles.cos(), angles.sin()
    scales = (torch.full((n,), 0.5, device=device) for n in (HEADS, HEADS_KV, HEADS_KV))
    options = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)) if is_e4m3 else {}

    def kernel(_: int) -> Any:
        given = query, key, value, caches[0], caches[1], table, used
        return tuner.paged_append(*given, cosine=cosine, sine=sine, out=out, **options)

    token = torch.arange(tokens, device=device)
    position = used[token // queries].long() - queries + token % queries
    page = table[token // queries, position // SIZE].long()
    turns = [angle[position].bfloat16().unsqueeze(1) for angle in (cosine, sine)]

    def rotated(rows: Any) -> Any:
        low, high = rows.chunk(2, -1)
        return torch.cat((low * turns[0] - high * turns[1], high * turns[0] + low * turns[1]), -1)

    def pytorch(_: int) -> Any:
        new = rotated(query), rotated(key), value
        if is_e4m3:
            new = tuple((rows * 2).to(kind).view(torch.uint8) for rows in new)
        whole = [cache.view(torch.uint8) if is_e4m3 else cache for cache in caches]
        out.view(new[0].dtype).copy_(new[0])
        whole[0][page, position % SIZE] = new[1]
        whole[1][page, position % SIZE] = new[2]
        return out

    kernel(0)
    if append.kernels.of(device, lambda _: False) is None:
        raise BenchmarkError("the kernel is not served here (tuner build --portfolio builds it)")
    moved = tokens * (HEADS + 2 * HEADS_KV) * WIDTH * (2 + kind.itemsize)
    block = torch.empty(2, moved // 2, dtype=torch.uint8, device=device)
    ways = (
        Contender("kernel", kernel),
        Contender("pytorch", pytorch),
        Contender("copy", lambda _: block[0].copy_(block[1])),
    )
    times = time_calls(ways, lambda _: torch.add(source, 0.0, out=query), 1)
    step = {"sequences": sequences, "queries": queries, "e4m3": is_e4m3, "bytes": moved}
    return {**step, "us": times.us, "failed": times.failed}


def line(row: dict[str, Any]) -> str:
    """One step: all times, and why a way has none."""
    us = "  ".join(f"{name} {value:8.2f} us" for name, value in row["us"].items())
    kind = "e4m3" if row["e4m3"] else "bf16"
    faults = [f"{name}: {why}" for name, why in row["failed"].items()]
    return "  ".join([f"{row['sequences']:>4} x {row['queries']:<5} {kind}", us, *faults])


def main(argv: Sequence[str]) -> int:
    """Time every step; 1 when a time is missing.

    Raises:
        BenchmarkError: when torch sees no GPU, or the kernel is not built.
        CompileError: when ``--compile-only`` finds no compiler.
    """
    steps = (timed(*step, is_e4m3) for is_e4m3 in (False, True) for step in STEPS)
    rows = run(argv, "append", __doc__, PAGED_APPEND, steps, line)
    return int(any(row["failed"] for row in rows))
