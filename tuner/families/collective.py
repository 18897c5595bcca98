"""CUTLASS's words for the kernels of its CollectiveBuilder."""

from __future__ import annotations

PLAIN = "TmaWarpSpecialized"
PINGPONG = "TmaWarpSpecializedPingpong"
COOPERATIVE = "TmaWarpSpecializedCooperative"
NO_SMEM = "NoSmemWarpSpecialized"
#: Warp groups that share one tile (gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp).
CONSUMERS = {PLAIN: 1, PINGPONG: 1, COOPERATIVE: 2}
#: The epilogue through shared memory that belongs to each schedule. Others either fail (a
#: cooperative mainloop with TmaWarpSpecialized) or compile silently into wrong ones
#: (ping-pong with TmaWarpSpecializedCooperative) [c].
TMA_EPILOGUE = {PLAIN: PLAIN, PINGPONG: PLAIN, COOPERATIVE: COOPERATIVE}
#: K of the partial sums that are added to fp32 ones without `fast_accum`: CUTLASS's
#: mma_promotion_interval (gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp).
PROMOTED_K = 128
