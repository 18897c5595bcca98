"""``scripts/bench products``: the parts of quantised products, beside PyTorch's and libraries' own.

The preset ``quantiser`` turns activations to e4m3 with a factor for each block of 128, by the
kernel of `templates/block_quantiser.cu` and by PyTorch's operations (`block_scaled.composed`). Both
results must have the same bits.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.harness import Bench, Contender, Preset, Row
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.single import BLOCK_QUANTISER
from tuner.errors import BenchmarkError


@dataclass(frozen=True)
class Rows:
    """Activations (m, k) in bf16."""

    m: int
    k: int
    group = "quantiser"

    @property
    def label(self) -> str:
        return f"M={self.m},K={self.k}"


QUANTISED = tuple(
    Rows(m, k) for m, k in ((1, 7168), (16, 7168), (128, 7168), (4096, 7168), (8192, 4096))
)


def quantised(case: Rows, _: Namespace) -> Row:
    """Times of both ways, and whether their bits are equal.

    Raises:
        BenchmarkError: when the kernel does not serve the rows.
    """
    import torch

    from tuner.runtime.products import block_scaled, quantiser

    torch.manual_seed(0)
    source = torch.randn(case.m, case.k, device="cuda", dtype=torch.bfloat16)
    rows = source.clone()
    own, theirs = quantiser.run(rows, block_scaled.composed), block_scaled.composed(rows)
    if own is None:
        raise BenchmarkError(f"the kernel does not serve {case.label} (tuner build builds it)")
    kinds = (torch.uint8, torch.int32)
    is_same = all(
        torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
        for a, b, kind in zip(own, theirs, kinds, strict=True)
    )
    ways = (
        Contender("pytorch", lambda _: block_scaled.composed(rows)),
        Contender("tuner", lambda _: quantiser.run(rows, block_scaled.composed)),
    )
    times = harness.time_calls(ways, lambda _: torch.add(source, 0.0, out=rows), 1)
    return {"us": times.us, "failed": times.failed, "wrong": [] if is_same else ["tuner"]}


BENCH = Bench(
    "products",
    __doc__,
    {
        "quantiser": Preset(
            "activations to e4m3, beside PyTorch's operations",
            lambda _: QUANTISED,
            quantised,
            smoke=Rows(4, 256),
            compile=lambda _: BLOCK_QUANTISER.build(ArtifactCache()),
        ),
    },
)
