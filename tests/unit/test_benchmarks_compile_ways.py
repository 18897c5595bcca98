"""`scripts/bench compile_ways`: its kernels, and what it refuses."""

from __future__ import annotations

import pytest

from benchmarks import compile_ways
from tuner.compile.render import render
from tuner.errors import ConfigError


def test_the_kernels_are_distinct_and_begin_with_the_smallest_tile() -> None:
    eight = compile_ways.specs(8)
    assert len(set(eight)) == 8 and compile_ways.specs(1) == eight[:1]
    first = eight[0].variables
    tile = tuple(first[name] for name in ("tile_m", "tile_n", "tile_k"))
    assert (*tile, first["cluster_m"], first["cluster_n"]) == (128, 64, 64, 1, 1)
    assert '#include "host_half.h"' in render(eight[0], "k"), "it has two halves to time"


@pytest.mark.parametrize("batch", ["0", "9"])
def test_a_batch_out_of_range_is_refused(batch: str) -> None:
    with pytest.raises(ConfigError, match=f"--batch {batch} "):
        compile_ways.main(["--batch", batch])
