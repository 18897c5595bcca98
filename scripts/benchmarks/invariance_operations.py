"""PyTorch's operations beside products: whose rows have the same bits in any batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Row
from benchmarks.rows import markdown

WIDTHS = (128, 1024, 2048, 4096, 14336, 128256)
"""Elements of a row."""
ROWS = (1, 2, 3, 8, 17, 64, 100, 255, 256, 1000, 4096)
"""Rows of a call; of rows over `WIDE` elements up to `MAX_WIDE_ROWS`."""
WIDE, MAX_WIDE_ROWS = 20000, 256


@dataclass(frozen=True)
class Operation:
    """One operation by its name in `OPERATIONS`."""

    name: str
    group = "PyTorch"

    @property
    def label(self) -> str:
        """The name."""
        return self.name


def _weight(x: Any) -> Any:
    """A parameter of the rows' width, the same for every number of rows."""
    import torch

    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape[-1], generator=generator, device=x.device).to(x.dtype)


def _functional() -> Any:
    import torch

    return torch.nn.functional


OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "layer_norm": lambda x: _functional().layer_norm(x, x.shape[-1:], _weight(x)),
    "rms_norm": lambda x: _functional().rms_norm(x, x.shape[-1:], _weight(x)),
    "RMS norm by operations in fp32": lambda x: (
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
    "cumsum in fp32": lambda x: x.float().cumsum(-1),
    "silu": lambda x: _functional().silu(x),
    "gelu": lambda x: _functional().gelu(x),
    "cross_entropy": lambda x: _functional().cross_entropy(
        x.float(), x.argmin(-1), reduction="none"
    ),
    "linear, 1024 columns": lambda x: _functional().linear(
        x, _weight(x).expand(1024, -1).contiguous()
    ),
}
"""Functions of (rows, width) in bf16 to (rows, ..), by name."""


def operations() -> list[Operation]:
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
    counts = row["figures"]
    where = f" at widths {', '.join(map(str, counts['widths']))}" if counts["widths"] else ""
    return f"{row['case']}: {counts['differing']} of {counts['compared']} rows differ{where}"


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each operation."""
    lines = [["operation", "rows", "differ", "at widths"]]
    for row in rows:
        if counts := row.get("figures"):
            widths = ", ".join(map(str, counts["widths"]))
            cells = str(counts["compared"]), str(counts["differing"]), widths
            lines.append([row["case"], *cells])
    return markdown(lines)
