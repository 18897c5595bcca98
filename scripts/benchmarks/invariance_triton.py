"""A product in Triton with one tile for every number of rows, as vLLM's batch-invariant mode has.

Tiles are 128 x 128 x 64 with eight warps and three stages, as vLLM and ``batch_invariant_ops`` have
them for types of 16 bits. The kernel was written for this comparison.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K, GROUP = 128, 128, 64, 8


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a,  # noqa: ANN001
    b,  # noqa: ANN001
    d,  # noqa: ANN001
    m,  # noqa: ANN001
    n,  # noqa: ANN001
    k,  # noqa: ANN001
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """D = A @ B^T of (M, K) and (N, K); programs take tiles in bands of `GROUP` along M."""
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    count, band = tiles_m * tiles_n, GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        first = tile // band * GROUP
        width = min(tiles_m - first, GROUP)
        row = (first + tile % band % width) * TILE_M
        column = tile % band // width * TILE_N
        rows, columns = row + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
        sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for start in tl.range(0, k, TILE_K):
            depth = start + tl.arange(0, TILE_K)
            left = tl.load(
                a + rows[:, None] * k + depth[None, :],
                mask=(rows[:, None] < m) & (depth[None, :] < k),
                other=0.0,
            )
            right = tl.load(
                b + columns[:, None] * k + depth[None, :],
                mask=(columns[:, None] < n) & (depth[None, :] < k),
                other=0.0,
            )
            sums = tl.dot(left, right.T, sums)
        tl.store(
            d + rows[:, None] * n + columns[None, :],
            sums.to(d.dtype.element_ty),
            mask=(rows[:, None] < m) & (columns[None, :] < n),
        )


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(M, K) @ (N, K)^T.

    Args:
        rows: (M, K), contiguous.
        weight: (N, K), contiguous.
    """
    (m, k), n = rows.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=rows.dtype, device=rows.device)
    tiles = triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N)
    places = torch.cuda.get_device_properties(rows.device).multi_processor_count
    grid: Any = (min(tiles, places),)
    _product[grid](
        rows, weight, out, m, n, k, TILE_M, TILE_N, TILE_K, GROUP, num_warps=8, num_stages=3
    )
    return out
