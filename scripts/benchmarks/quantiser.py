"""``scripts/bench quantiser``: quantising activations to e4m3 with a factor for each block of 128.

The kernel of `templates/block_quantiser.cu` beside PyTorch's operations (`block_scaled.composed`),
behind an element-wise kernel that writes the rows. Both results must have the same bits.
``tuner build`` or ``--compile-only`` compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.call_times import Contender, time_calls
from benchmarks.single_kernel import run
from tuner.compile.single import BLOCK_QUANTISER
from tuner.errors import BenchmarkError

SIZES = ((1, 7168), (16, 7168), (128, 7168), (4096, 7168), (8192, 4096))
"""(M, K) of the rows."""


def timed(m: int, k: int) -> dict[str, Any]:
    """Microseconds of both ways for rows (m, k) in bf16, and whether their bits are equal.

    Raises:
        BenchmarkError: when the kernel does not serve the rows.
    """
    import torch

    from tuner.runtime import block_scaled, quantiser

    torch.manual_seed(0)
    source = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    rows = source.clone()
    own, theirs = quantiser.run(rows, block_scaled.composed), block_scaled.composed(rows)
    if own is None:
        raise BenchmarkError(f"the kernel does not serve ({m}, {k}) here (tuner build builds it)")
    kinds = (torch.uint8, torch.int32)
    is_same = all(
        torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
        for a, b, kind in zip(own, theirs, kinds, strict=True)
    )
    ways = (
        Contender("kernel", lambda _: quantiser.run(rows, block_scaled.composed)),
        Contender("pytorch", lambda _: block_scaled.composed(rows)),
    )
    times = time_calls(ways, lambda _: torch.add(source, 0.0, out=rows), 1)
    return {"m": m, "k": k, "us": times.us, "failed": times.failed, "same_bits": is_same}


def line(row: dict[str, Any]) -> str:
    """One size: both times, and what differs."""
    us = "  ".join(f"{name} {value:8.1f} us" for name, value in row["us"].items())
    faults = [f"{name}: {why}" for name, why in row["failed"].items()]
    faults += [] if row["same_bits"] else ["the bits differ"]
    return "  ".join([f"{row['m']:>6} x {row['k']:<6}", us, *faults])


def main(argv: Sequence[str]) -> int:
    """Compare and time every size; 1 when bits differ or a time is missing.

    Raises:
        BenchmarkError: when torch sees no GPU, or the kernel is not built.
        CompileError: when ``--compile-only`` finds no compiler.
    """
    sizes = (timed(*size) for size in SIZES)
    rows = run(argv, "quantiser", __doc__, BLOCK_QUANTISER, sizes, line)
    return int(any(row["failed"] or not row["same_bits"] for row in rows))
