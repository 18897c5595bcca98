"""Decoding of multi-head latent attention over a paged cache: queries of 576 columns, values the
first 512 columns of the same cache row, one latent head.
"""

from __future__ import annotations

from tuner.config import Value
from tuner.families.arguments import Arguments
from tuner.families.base import KernelSpec

KERNEL = "mla_decode"
"""Name of the one kernel."""
TEMPLATE = "mla_decode.cu.j2"
WORDS = {"dtype": ("float16", "bfloat16")}
"""Text that the template takes, by variable."""
ARGUMENTS = Arguments(
    tensors=("query", "cache", "block_table", "lengths", "out", "lse"),
    integers=(
        *("batch", "queries", "heads", "page_size", "pages"),
        *("query_batch", "query_row", "query_head", "cache_page", "cache_slot", "table_row"),
        *("out_batch", "out_row", "out_head", "tile_overhead", "pdl"),
    ),
    scalars=("scale",),
)


def spec_of(dtype: str, **levers: Value) -> KernelSpec:
    """The kernel of a type and its compile-time parameters."""
    return KernelSpec(TEMPLATE, {"dtype": dtype, **levers}, WORDS, ARGUMENTS)
