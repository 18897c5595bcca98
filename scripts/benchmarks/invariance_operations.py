"""PyTorch's operations beside products: whose rows have the same bits in any batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Row
from benchmarks.rows import markdown

WIDTHS = (128, 2048, 4096, 14336, 128256)
"""Elements of a row."""
ROWS = (1, 2, 3, 8, 17, 64, 100, 256, 1000, 4096)
"""Rows of a call; of rows over `WIDE` elements up to 256."""
WIDE, MAX_WIDE_ROWS = 20000, 256
KEYS, HEADS, HEAD_DIM = 777, 8, 128


@dataclass(frozen=True)
class Operation:
    """One operation by its name in `OPERATIONS`."""

    name: str
    group = "PyTorch"

    @property
    def label(self) -> str:
        return self.name


def _functional() -> Any:
    import torch

    return torch.nn.functional


def _named(x: Any, name: str) -> Any:
    """A parameter of the width of the rows, the same for every number of rows."""
    import torch

    seed = {"weight": 1, "bias": 2}[name]
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape[-1], generator=generator, device=x.device).to(x.dtype)


def _gated(x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return _functional().silu(gate) * up


def _rotated(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    import torch

    return torch.cat((first * 0.8 - second * 0.6, second * 0.8 + first * 0.6), -1)


def _linear(x: Any, columns: int) -> Any:
    import torch

    generator = torch.Generator(x.device).manual_seed(3)
    weight = torch.randn(columns, x.shape[-1], generator=generator, device=x.device).to(x.dtype)
    return _functional().linear(x, weight)


def _embedded(x: Any) -> Any:
    table = _named(x, "weight").view(-1, 64)
    return _functional().embedding(x[:, 0].float().abs().mul(100).long() % len(table), table)


def _attended(x: Any) -> Any:
    """A row is a query; keys are the same for every row and number of rows."""
    import torch

    heads = HEADS if x.shape[-1] >= HEADS * HEAD_DIM else 1
    query = x[:, : heads * HEAD_DIM].view(len(x), heads, 1, HEAD_DIM)
    generator = torch.Generator(x.device).manual_seed(4)
    key, value = (
        torch.randn(1, heads, KEYS, HEAD_DIM, generator=generator, device=x.device)
        .to(x.dtype)
        .expand(len(x), heads, KEYS, HEAD_DIM)
        for _ in range(2)
    )
    return _functional().scaled_dot_product_attention(query, key, value).flatten(1)


OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "layer_norm": lambda x: _functional().layer_norm(
        x, x.shape[-1:], _named(x, "weight"), _named(x, "bias")
    ),
    "rms_norm": lambda x: _functional().rms_norm(x, x.shape[-1:], _named(x, "weight")),
    "rms_norm in fp32, by operations": lambda x: (
        x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    ).to(x.dtype),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax in fp32": lambda x: x.float().log_softmax(-1),
    "logsumexp in fp32": lambda x: x.float().logsumexp(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean in fp32": lambda x: x.float().mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "argmax": lambda x: x.argmax(-1, keepdim=True),
    "topk": lambda x: x.topk(8, -1).values,
    "sort": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x.float().cumsum(-1),
    "silu and a product": _gated,
    "gelu": lambda x: _functional().gelu(x),
    "rotary embedding": _rotated,
    "embedding": _embedded,
    "cross_entropy": lambda x: _functional().cross_entropy(
        x.float(), x.argmin(-1), reduction="none"
    ),
    "linear (N=1024)": lambda x: _linear(x, 1024),
    "linear (N=64)": lambda x: _linear(x, 64),
    "attention, one query": _attended,
}
"""Functions of (rows, width) in bf16 to (rows, ..), by name."""


def operations(_: Namespace) -> list[Operation]:
    """All, in the order of `OPERATIONS`."""
    return [Operation(name) for name in OPERATIONS]


def compare(case: Operation, _: Namespace) -> Row:
    """Rows that differ from the same rows of the largest call."""
    import torch

    from tuner.runtime.bits import as_bits
    from tuner.runtime.call import devices

    generator = torch.Generator(devices.TYPE).manual_seed(0)
    compared, differing, widths = 0, 0, []
    for width in WIDTHS:
        sizes = [rows for rows in ROWS if width < WIDE or rows <= MAX_WIDE_ROWS]
        drawn = torch.randn(max(sizes), width, generator=generator, device=devices.TYPE).bfloat16()
        wanted = as_bits(OPERATIONS[case.name](drawn).contiguous()).view(max(sizes), -1)
        wrong = 0
        for rows in sizes:
            out = as_bits(OPERATIONS[case.name](drawn[:rows].contiguous()).contiguous())
            wrong += int((out.view(rows, -1) != wanted[:rows]).any(1).sum())
            compared += rows
        differing += wrong
        widths += [width] if wrong else []
    return {"figures": {"compared": compared, "differing": differing, "widths": widths}}


def line(row: Row) -> str:
    """One operation."""
    one = row["figures"]
    where = f" at widths {', '.join(map(str, one['widths']))}" if one["widths"] else ""
    return f"{row['case']}: {one['differing']} of {one['compared']} rows differ{where}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each operation."""
    lines = [["operation", "rows", "differ", "at widths"]]
    for row in rows:
        if one := row.get("figures"):
            widths = ", ".join(map(str, one["widths"]))
            lines.append([row["case"], str(one["compared"]), str(one["differing"]), widths])
    return markdown(lines)
