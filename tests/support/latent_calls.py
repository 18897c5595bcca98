"""Calls of `tuner.mla_decode` whose unused slots are NaN, and limits of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Page size, queries and heads of calls.
SIZES = ((64, 1, 40), (16, 3, 20), (48, 2, 64), (128, 4, 16), (64, 1, 128))
LIMIT = {"float16": 1e-3, "bfloat16": 8e-3}
"""Largest relative Frobenius error of each sequence's output."""
LSE_LIMIT = 1e-3


def drawn(
    dtype: str, device: str, sizes: tuple[int, int, int], lengths: Sequence[int] = ()
) -> dict[str, Any]:
    """Arguments of a call, on pages in a random order.

    Args:
        dtype: name of torch's type.
        device: device of the tensors.
        sizes: page size, queries and heads.
        lengths: rows of each sequence; empty: short, empty and long ones.
    """
    import torch

    size, queries, heads = sizes
    lengths = lengths or (1, 0, size, 64 * 41 + 5, 129, 1000)
    draw, kind = torch.Generator(device).manual_seed(size), getattr(torch, dtype)
    table = torch.full((len(lengths), -(-max(lengths) // size) + 1), 1 << 30, dtype=torch.int32)
    pages = sum(-(-length // size) for length in lengths) + 1
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(size)).int()
    cache = torch.full((pages, size, 576 + 8), torch.nan, dtype=kind, device=device)
    for b, length in enumerate(lengths):
        count = -(-length // size)
        table[b, :count], order = order[:count], order[count:]
        rows = torch.randn(count * size, 576, generator=draw, device=device).to(kind)
        rows[length:] = torch.nan
        cache[table[b, :count].long().to(device), :, :576] = rows.view(count, size, 576)
    query = torch.randn(len(lengths), queries, heads, 576, generator=draw, device=device)
    return {
        **{"query": query.to(kind), "cache": cache[..., :576], "block_table": table.to(device)},
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
        "scale": 576**-0.5,
    }


def quantised(call: dict[str, Any], form: str) -> dict[str, Any]:
    """A call of bf16 whose rows lie in another form of cache. Unused slots stay NaN."""
    import torch

    cache = call["cache"].float()
    if form == "e4m3":
        rows = (cache * 3).to(torch.float8_e4m3fn).view(torch.uint8)
        descale = torch.full((1,), 0.31, device=cache.device)
        return {**call, "cache": _apart(rows).view(torch.float8_e4m3fn), "descale": descale}
    blocks = cache[..., :512].unflatten(-1, (4, 128))
    factors = blocks.abs().amax(-1, keepdim=True) / 448
    latent = (blocks / factors).flatten(-2).to(torch.float8_e4m3fn)
    parts = latent, factors[..., 0], call["cache"][..., 512:]
    return {
        **call,
        "cache": _apart(torch.cat([p.contiguous().view(torch.uint8) for p in parts], -1)),
    }


def _apart(rows: Any) -> Any:
    """The same bytes with some between the rows."""
    import torch

    width = rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, 16), value=0x7F)[..., :width]


def wanted(call: dict[str, Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp by PyTorch's operations, in double precision."""
    import torch

    from tuner.runtime.attention import mla

    batch, queries, heads, _ = call["query"].shape
    device = call["query"].device
    out = torch.empty(batch, queries, heads, 512, device=device, dtype=torch.double)
    lse = torch.empty(batch, heads, queries, device=device, dtype=torch.double)
    mla.composed(mla.Decode(**call, out=out, lse=lse), torch.double)
    return out, lse


def is_close(out: Any, lse: Any, expected: tuple[Any, Any]) -> bool:
    """True when results differ by rounding only, sequence by sequence; None: not compared."""
    import torch

    exact, statistics = expected
    errors = (out.double() - exact).flatten(1).norm(dim=1)
    limit = LIMIT[str(out.dtype).removeprefix("torch.")]
    is_small = bool((errors <= limit * exact.flatten(1).norm(dim=1)).all())
    return is_small and (
        lse is None or torch.allclose(lse.double(), statistics, atol=LSE_LIMIT, rtol=0)
    )
