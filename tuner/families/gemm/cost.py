"""Estimated time of a CollectiveBuilder GEMM, and NVIDIA's proposal of the first candidates.

The estimate ranks candidates. Datasheet constants are in `hardware`; fitted ones start at
`CONSTANTS` (`tuner develop fit cost`).
"""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, inf, log
from typing import Any

from tuner.config import Config
from tuner.families.collective import COOPERATIVE, NO_SMEM, PLAIN, PROMOTED_K
from tuner.families.gemm.shape import (
    GemmShape,
    effective_swizzle,
    instruction_columns,
    oriented,
    smem_bytes,
    tile_blocks,
)
from tuner.hardware import (
    GRAPH_LAUNCH_US,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    TENSOR_FLOPS_PER_CLOCK_SM,
    WGMMA_K_BYTES,
    Gpu,
)
from tuner.problem import DTYPE_BYTES, E4M3, GemmProblem

#: Shared memory that one multiprocessor reads a clock [CUDA C++ Programming Guide 13.0].
SMEM_BYTES_PER_CLOCK = 128
#: Blocks that run at once where they come in clusters of this size, of 132 multiprocessors: a
#: cluster stays within a GPC of at most 18 (hw_info.hpp of CUTLASS 4.2 models it so).
CLUSTERED_BLOCKS = {1: 132, 2: 132, 4: 116, 8: 112}
#: Blocks that share a multiprocessor at most.
MAX_RESIDENT = 4
#: Part of the L2 that inputs can keep.
L2_SHARE = 0.7
#: Memory bandwidth reached over the data sheet's: 4.3 of 4.8 TB/s measured on one H200. Not fitted:
#: the recorded products are bound by tensor cores and power, and would bend it.
MEMORY_EFFICIENCY = 0.9
#: Where the fit starts; clocks and bytes a clock are of one multiprocessor.
CONSTANTS: Mapping[str, float] = {
    # From launch to the first product: descriptors, barriers, one load from memory.
    "startup_clocks": 2500.0,
    # Rate at which products alone would exhaust the power limit, and the energy of what they read
    # of shared memory and of the L2 beside theirs, for a byte a product.
    "power_tflops": 900.0,
    "smem_energy": 3.0,
    "l2_energy": 20.0,
    # Energy of a byte through memory, in products.
    "memory_energy": 50.0,
    # The L2's bytes a clock, all multiprocessors loading; from a free stage to its next tile.
    "l2_bytes_per_clock": 64.0,
    "load_clocks": 900.0,
    # Barriers of one K step.
    "step_clocks": 30.0,
    # Bytes stored a clock, all multiprocessors storing; an epilogue's part that does not grow.
    "store_bytes_per_clock": 14.0,
    "epilogue_clocks": 600.0,
    # A store that skips shared memory writes 8 or 16 bytes a thread in place of whole lines.
    "no_smem_stores": 1.3,
    # Reduction between the blocks of one output tile, besides its traffic.
    "fixup_clocks": 1500.0,
}
#: Instructions of an activation's evaluation, an element: a first guess read off the source, to be
#: replaced by measurements. erff is a polynomial of two ranges; exponential and reciprocal count
#: eight each, the rate of their unit.
ACTIVATION_INSTRUCTIONS = {"": 0, "relu": 1, "gelu": 25, "gelu_tanh": 22, "silu": 19}
#: Of a multiprocessor [CUDA C++ Programming Guide 13.0].
LANES_PER_CLOCK = 128
#: Of the start that is left where it hides behind the kernel in front: a first guess.
PDL_SHARE = 0.5
#: Exponent of the power mean that stands for the maximum of partly overlapping times.
SHARPNESS = 6

#: Answers that nvidia-matmul-heuristics 0.1 is asked for: it has 37 at most.
MAX_SUGGESTIONS = 128
#: Ratio of its estimates below which they are alike. At 46 recorded products the first recorded
#: suggestion took 5.8 % longer than the best. With 1.01 it was 6.7 %, by the lists' own order
#: 6.1 %, strictly by the estimates 8.4 %.
ALIKE = 1.05
Suggestion = tuple[tuple[bool, int, int, int], tuple[int, int]]
"""Orientation and tile, and a cluster."""
_GPU_NAMES = {
    "NVIDIA H200": "H200_SXM",
    "NVIDIA H100 80GB HBM3": "H100_SXM",
    "NVIDIA H100 PCIe": "H100_PCIE",
    "NVIDIA H100 NVL": "H100_NVL",
}


def predict_us(
    problem: GemmProblem, config: Config, gpu: Gpu, constants: Mapping[str, float]
) -> float:
    """Estimated time of one call, microseconds.

    A soft maximum of three times: the cycles of the busiest multiprocessor, memory, and, for long
    calls, the energy at the power limit.
    """
    shape = oriented(problem, config["swap_ab"])
    compute_us = _busy_cycles(problem, shape, config, gpu, constants) / gpu.clock_max_mhz
    bandwidth = gpu.memory_gbs * MEMORY_EFFICIENCY * 1e3
    moved = _memory_bytes(problem, shape, config, gpu)
    memory_us = moved / bandwidth
    # Microseconds for the call's energy at the power limit: products, shared memory, L2, memory.
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    blocks_m, blocks_n = tile_blocks(shape, config)
    flops = 2.0 * blocks_m * tile_m * blocks_n * tile_n * shape.k * shape.batch
    flops /= problem.tensor_rate  # half the bits, taken for half the energy: not measured
    columns = instruction_columns(shape, tile_n)
    operands = (64 + columns) / (64 * columns)
    loads: float = 1 / (tile_m * config["cluster_m"]) + 1 / (tile_n * config["cluster_n"])
    # Relative to a product's energy: bytes a product reads of shared memory, and of the L2.
    relative = 1 + constants["smem_energy"] * operands + constants["l2_energy"] * loads
    energy = flops * relative + constants["memory_energy"] * moved
    power_us = energy / (constants["power_tflops"] * 1e6)
    longest = sum(t**SHARPNESS for t in (compute_us, memory_us, power_us)) ** (1 / SHARPNESS)
    startup_us = constants["startup_clocks"] / gpu.clock_max_mhz
    return float(GRAPH_LAUNCH_US + startup_us * (PDL_SHARE if config.get("pdl") else 1) + longest)


def spared(cluster: int) -> float:
    """Share of the multiprocessors that blocks in clusters of a size leave unused."""
    return 1 - CLUSTERED_BLOCKS[cluster] / CLUSTERED_BLOCKS[1]


def clustered_blocks(cluster: int, gpu: Gpu) -> int:
    """Blocks that run at once on a GPU in clusters of a size."""
    return gpu.sm_count * CLUSTERED_BLOCKS[cluster] // CLUSTERED_BLOCKS[1]


def _step_cycles(
    problem: GemmProblem, config: Config, blocks: int, constants: Mapping[str, float]
) -> float:
    """Cycles of one K step of one tile, `blocks` of which share a multiprocessor."""
    tile_m, tile_n, tile_k = (int(config[f"tile_{mode}"]) for mode in "mnk")
    columns = instruction_columns(oriented(problem, config["swap_ab"]), tile_n)
    width = DTYPE_BYTES[problem.dtype]
    depth = WGMMA_K_BYTES // width
    # One instruction multiplies 64 x depth by depth x columns, and reads both from shared memory.
    multiply = 2 * 64 * columns * depth / (TENSOR_FLOPS_PER_CLOCK_SM * problem.tensor_rate)
    operands = WGMMA_K_BYTES * (64 + columns) / SMEM_BYTES_PER_CLOCK
    instructions = (tile_m // 64) * (tile_n // columns) * (tile_k // depth)
    tensor = instructions * max(multiply, operands)
    if not problem.fast_accum:  # partial sums are waited for and added
        tensor += tile_m * tile_n / LANES_PER_CLOCK * tile_k / PROMOTED_K
    # Multicast: a block loads its share of a tile and gets the rest from its cluster.
    loaded: float = width * tile_k * (tile_m / config["cluster_n"] + tile_n / config["cluster_m"])
    loads = loaded / constants["l2_bytes_per_clock"]
    # A stage that is free again has the others' steps to be loaded in.
    stages, _ = smem_bytes(problem, config)
    refill = (constants["load_clocks"] + loads) / max(1, blocks * stages - 1)
    longest = sum(t**SHARPNESS for t in (tensor, loads, refill)) ** (1 / SHARPNESS)
    return float(longest + constants["step_clocks"])


def _busy_cycles(
    problem: GemmProblem, shape: GemmShape, config: Config, gpu: Gpu, constants: Mapping[str, float]
) -> float:
    """Cycles of the busiest multiprocessor."""
    blocks_m, blocks_n = tile_blocks(shape, config)
    tiles: int = blocks_m * blocks_n * shape.batch
    steps = ceil(shape.k / int(config["tile_k"]))
    area = int(config["tile_m"] * config["tile_n"])
    stores = area * DTYPE_BYTES[problem.dtype_d] / constants["store_bytes_per_clock"]
    if problem.has_residual:  # read as fast as the result is written
        stores *= 2
    epilogue = constants["epilogue_clocks"] + stores * (
        constants["no_smem_stores"] if config["epilogue_schedule"] == NO_SMEM else 1.0
    )
    epilogue += area * ACTIVATION_INSTRUCTIONS[problem.activation] / LANES_PER_CLOCK
    cluster = int(config["cluster_m"] * config["cluster_n"])
    workers = clustered_blocks(cluster, gpu)
    schedule = config["kernel_schedule"]
    # Partial sums cross the L2 once each way.
    fixup = constants["fixup_clocks"] + 2 * 4 * area / constants["store_bytes_per_clock"]
    step = _step_cycles(problem, config, 1, constants)
    if config.get("decomposition_mode") == "SplitK":
        splits = int(config["splits"])
        rounds = ceil(tiles * splits / workers)
        return rounds * (ceil(steps / splits) * step + fixup) + epilogue
    main = steps * step
    if config.get("decomposition_mode") == "StreamK":
        return tiles / workers * main + max(1.0, tiles / workers) * epilogue + 2 * fixup
    if schedule == COOPERATIVE:
        return ceil(tiles / workers) * (main + epilogue)
    if schedule == PLAIN:
        # Blocks that share a multiprocessor hide each other's start and end.
        _, used = smem_bytes(problem, config)
        shared = max(
            1, min(MAX_RESIDENT, SMEM_PER_SM_BYTES // (used + SMEM_RESERVED_PER_BLOCK_BYTES))
        )
        alone = constants["startup_clocks"] / 2 + main + epilogue
        together = steps * _step_cycles(problem, config, shared, constants)
        return ceil(tiles / (workers * shared)) * max(alone, shared * max(together, stores))
    # Ping-pong: one warp group's epilogue runs under the other's products.
    rounds = ceil(tiles / workers)
    return main + epilogue + (rounds - 1) * max(main, stores, (main + epilogue) / 2)


def _memory_bytes(problem: GemmProblem, shape: GemmShape, config: Config, gpu: Gpu) -> float:
    """Bytes through memory: inputs again for each wave of tiles when the L2 cannot hold them."""
    width = DTYPE_BYTES[problem.dtype]
    written = problem.m * problem.n * problem.batch * DTYPE_BYTES[problem.dtype_d]
    written += written if problem.has_residual else 0
    inputs = width * problem.batch * problem.k * (problem.m + problem.n)
    if inputs <= L2_SHARE * gpu.l2_bytes:
        return inputs + written
    blocks_m, blocks_n = tile_blocks(shape, config)
    along_m, along_n = (
        (blocks, int(config[f"cluster_{mode}"]), width * shape.k * int(config[f"tile_{mode}"]))
        for blocks, mode in ((blocks_m, "m"), (blocks_n, "n"))
    )
    is_along_n = config.get("raster_order", "AlongN") == "AlongN"
    major, minor = (along_n, along_m) if is_along_n else (along_m, along_n)
    swizzle = effective_swizzle(blocks_m, blocks_n, int(config.get("max_swizzle_size", 1)))
    loaded = _loaded_bytes(major, minor, swizzle, gpu.sm_count, int(L2_SHARE * gpu.l2_bytes))
    return max(inputs, shape.batch * loaded) + written


@lru_cache(maxsize=4096)
def _loaded_bytes(
    major: tuple[int, int, int], minor: tuple[int, int, int], swizzle: int, blocks: int, l2: int
) -> int:
    """Bytes of A and B that the waves of a persistent kernel load through memory.

    The scheduler walks the major mode, `swizzle` clusters of the minor mode at a time. Blocks of a
    wave share what they load. All that the wave before loaded is in the L2 if it fits.

    Args:
        major: tiles, tiles of a cluster, and bytes of a tile's operand along the major mode.
        minor: the same along the minor mode.
        swizzle: clusters of the minor mode in a band.
        blocks: blocks of a wave.
        l2: bytes of the L2 that inputs can keep.
    """
    tiles, wide, tile_bytes = major
    many, high, other_bytes = minor
    length = tiles // wide
    clusters, wave = length * (many // high), max(1, blocks // (wide * high))
    wide_bytes, band = wide * tile_bytes, swizzle * high * other_bytes
    loaded, before, in_l2 = 0, (range(0), range(0)), False
    for first in range(0, clusters, wave):
        low, position = divmod(first, length * swizzle)
        high_band, end = divmod(min(first + wave, clusters) - 1, length * swizzle)
        bands = range(low, high_band + 1)
        walked = range(length)
        if len(bands) == 1:
            walked = range(position // swizzle, end // swizzle + 1)
        new = whole = len(walked) * wide_bytes + len(bands) * band
        if in_l2:
            new -= _common(walked, before[0]) * wide_bytes + _common(bands, before[1]) * band
        loaded += new
        before, in_l2 = (walked, bands), whole <= l2
    return loaded


def _common(rows: range, other: range) -> int:
    return max(0, min(rows.stop, other.stop) - max(rows.start, other.start))


def heuristic_seeds(
    problem: GemmProblem,
    gpu: Gpu,
    space: Sequence[Config],
    count: int,
    constants: Mapping[str, float],
) -> list[Config]:
    """Members of `space` that nvidia-matmul-heuristics suggests, best first by its own estimate.

    It names a tile and a cluster, seldom a schedule: the cheapest matching member by `predict_us`
    stands for it, with the stages that fit. If the cluster is not in the space, only the tile
    decides. Empty where the package is missing or does not know the GPU.
    """
    by_tile: dict[tuple[object, ...], list[Config]] = {}
    for config in space:
        by_tile.setdefault(suggestion_of(config)[0], []).append(config)
    seeds: dict[Config, None] = {}
    for tile, cluster in suggestions(problem, gpu, {bool(tile[0]) for tile in by_tile}):
        if len(seeds) >= count:
            break
        members = by_tile.get(tile, [])
        exact = [c for c in members if suggestion_of(c)[1] == cluster]
        if members:
            best = min(exact or members, key=lambda c: predict_us(problem, c, gpu, constants))
            seeds.setdefault(best)
    return list(seeds)


def suggestion_of(config: Config) -> Suggestion:
    """A config's tile and cluster, as the library lists them."""
    tile = tuple(config[name] for name in ("swap_ab", "tile_m", "tile_n", "tile_k"))
    return tile, (config["cluster_m"], config["cluster_n"])


def suggestions(problem: GemmProblem, gpu: Gpu, swaps: set[bool]) -> list[Suggestion]:
    """The library's tiles and clusters by its estimate, each once, over the orientations.

    Its lists are not in that order. Kernels that differ in a warp's tile or the order of tiles, or
    in stages that may not fit here, count once. Estimates that are alike keep the lists' order: of
    products that the power bounds, tiles of unlike size have almost one.
    """
    seconds: dict[Suggestion, float] = {}
    places: dict[Suggestion, int] = {}
    for swap_ab in sorted(swaps):
        for place, (suggestion, runtime) in enumerate(listed(problem, gpu, swap_ab)):
            seconds[suggestion] = min(runtime, seconds.get(suggestion, inf))
            places.setdefault(suggestion, place)
    least = min(seconds.values(), default=0.0)

    def rank(suggestion: Suggestion) -> tuple[int, int]:
        return int(log(seconds[suggestion] / least, ALIKE)), places[suggestion]

    return sorted(seconds, key=rank)


def listed(problem: GemmProblem, gpu: Gpu, swap_ab: bool) -> list[tuple[Suggestion, float]]:
    """The library's list for one orientation, in its own order with its estimates in seconds.

    Empty where the library is missing or does not know the GPU.
    """
    interface = _interface(_GPU_NAMES.get(gpu.name, ""))
    if interface is None:
        return []
    library, handle, backend = interface
    letters = {"float16": "H", "bfloat16": "T", "float32": "S", E4M3: "Q"}
    result = letters[problem.dtype_d]
    precision = f"{letters[problem.dtype]}S{result}"
    if problem.dtype == E4M3:  # A, B, C, sums and D
        precision = f"QQ{result}S{result}"
    shape = oriented(problem, swap_ab)
    # The library names layouts as BLAS does: T is a row-major input.
    inputs = "".join("T" if x == "row" else "N" for x in (shape.layout_a, shape.layout_b))
    layout = library.NvMatmulHeuristicsMatmulLayout[f"{inputs}_{shape.layout_d.upper()}_MAJOR"]
    query = handle.makeNvMatmulHeuristicsProblem(shape.m, shape.n, shape.k, layout, shape.batch)
    answers = []
    for answer in handle.getEx(query, MAX_SUGGESTIONS, backend, precision=precision):
        kernel = answer["kernel"]
        tile = swap_ab, kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k
        answers.append(((tile, (kernel.cluster_m, kernel.cluster_n)), answer["runtime"]))
    return answers


@lru_cache(maxsize=4)
def _interface(gpu_name: str) -> tuple[Any, Any, Any] | None:
    """The heuristics library, an interface to it and its CUTLASS 3 backend; None without it."""
    if not gpu_name:
        return None
    try:
        library: Any = importlib.import_module("nvMatmulHeuristics")
        target = library.NvMatmulHeuristicsTarget["CUTLASS3"]
        handle = library.NvMatmulHeuristicsInterfaceEx(
            backend=target,
            flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            load_discovery_implicitly=True,
            gpu=library.NvMatmulHeuristicsNvidiaGpu[gpu_name],
        )
        # Its destructor calls into the library: too late once the interpreter takes modules down.
        atexit.register(_interface.cache_clear)
        return library, handle, handle.createBackend(target)
    except (ImportError, OSError, KeyError, RuntimeError):
        return None
