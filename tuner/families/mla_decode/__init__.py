"""Decoding of multi-head latent attention over a paged cache: queries of 576 columns, values the
first 512 columns of the same cache row, one latent head.

Sizes, strides and lengths are arguments of a launch, so few kernels serve all calls.
"""

from __future__ import annotations

from typing import NamedTuple

from tuner.families.arguments import Arguments
from tuner.families.base import KernelSpec

TEMPLATE = "mla_decode.cu.j2"
PARTS = tuple(
    f"mla_decode/{name}.cu.j2" for name in ("combine", "consumer", "copies", "launch", "shares")
)
"""Files that the template includes."""
WORDS = {"dtype": ("float16", "bfloat16")}
"""Text that the template takes, by variable."""
ARGUMENTS = Arguments(
    tensors=("query", "cache", "block_table", "lengths", "out", "lse"),
    integers=(
        *("batch", "queries", "heads", "page_size", "pages"),
        *("query_batch", "query_row", "query_head", "cache_page", "cache_slot", "table_row"),
        *("out_batch", "out_row", "out_head", "tile_overhead", "cut_overhead", "pdl"),
    ),
    scalars=("scale",),
)
WIDTH, LATENT = 576, 512
"""Columns of a cache row, and of its values."""
PAGE_MULTIPLE = 16
"""Slots of a page are a multiple of this."""
MAX_BATCH, MAX_QUERIES, MAX_HEADS = 65536, 64, 4096
VECTOR = 8
"""Strides in elements are multiples of this: 16 bytes, as TMA wants them."""
TILE_OVERHEAD = 4
"""Tiles of keys that take as long as a sequence's begin and end in a block."""
CUT_OVERHEAD = 4
"""Tiles that take as long as to add the parts of divided sequences."""


class MlaKernel(NamedTuple):
    """Parameters that are compiled in."""

    dtype: str
    scores_first: bool
    cluster: int
    registers: bool = True

    @property
    def spec(self) -> KernelSpec:
        """The template with these parameters."""
        return KernelSpec(TEMPLATE, dict(self._asdict()), WORDS, ARGUMENTS)


KERNELS = {dtype: MlaKernel(dtype, False, 1) for dtype in WORDS["dtype"]}
"""The kernels that are served, by type. On an H200 (29 November 2026), 64 heads, 128 sequences of
4096 rows: 163 us, and 184 with `scores_first`. Pairs of blocks and more rows were not timed."""
