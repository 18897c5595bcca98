"""Decoding of multi-head latent attention over a paged cache: queries of 576 columns, values the
first 512 columns of the same cache row, one latent head.

Sizes, strides and lengths are arguments of a launch, so few kernels serve all calls.
"""

from __future__ import annotations

from itertools import product
from math import ceil
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
        *(
            "out_batch",
            "out_row",
            "out_head",
            "tile_overhead",
            "cut_overhead",
            "fetch_ahead",
            "pdl",
        ),
    ),
    scalars=("scale",),
)
WIDTH, LATENT = 576, 512
"""Columns of a cache row, and of its values."""
PAGE_MULTIPLE = 16
"""Slots of a page are a multiple of this."""
MAX_BATCH, MAX_QUERIES, MAX_HEADS = 65536, 64, 4096
BLOCK_ROWS = 64
"""Rows of a block: heads of one query after another."""
VECTOR = 8
"""Strides in elements are multiples of this: 16 bytes, as TMA wants them."""
TILE_OVERHEAD = 4
"""Tiles of keys that take as long as a sequence's begin and end in a block."""
CUT_OVERHEAD = 4
"""Tiles that take as long as to add the parts of divided sequences."""
FETCH_AHEAD = 2
"""Tiles that the L2 fetches before they are copied."""


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


KERNELS = tuple(
    MlaKernel(dtype, cluster > 1, cluster) for dtype, cluster in product(WORDS["dtype"], (1, 2))
)


def row_blocks(heads: int, queries: int) -> int:
    """Blocks that the rows of one sequence fill, as the template counts them."""
    packed = min(BLOCK_ROWS, 1 << (heads - 1).bit_length())
    return ceil(heads / BLOCK_ROWS) * ceil(queries / (BLOCK_ROWS // packed))


def kernel_of(dtype: str, heads: int, queries: int) -> MlaKernel:
    """The kernel for a number of rows: an even number of blocks works in pairs."""
    return KERNELS[KERNELS.index(MlaKernel(dtype, False, 1)) + (row_blocks(heads, queries) + 1) % 2]
