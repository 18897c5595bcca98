"""Terms of the time model of a matrix product: the amount of each for a call.

As `tuner.families.attention_work`, for products. A tile's K steps follow from the problem and the
kernel's tiles, so they are exact; the rates are measured. When memory or the tensor cores bound a
product, its time is the longer of the two, not their sum. ``bound`` is the longer one at nominal
rates.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from tuner.families.tape import larger, smaller, where
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import DTYPE_BYTES, GemmProblem, SwigluProblem

MEGABYTE, GIGAFLOP = 1e6, 1e9
NOMINAL_GBS, NOMINAL_TFLOPS = 4300.0, 800.0
"""Rates of `bound`: memory bandwidth and tensor-core throughput of one H200 below its power
limit.
"""
STREAM_K = 0
"""`ProductTiling.splits` of stream-K: every multiprocessor has an equal share of all K steps."""
_MIN_TILES = {2: 2, 4: 3, 8: 6}
"""Tiles of each mode from which a swizzle is used (tile_scheduler_params.h of CUTLASS)."""


class ProductTiling(NamedTuple):
    """Blocks of a kernel along its own rows and columns: those of D, or of D^T with swapped
    operands.
    """

    rows: int
    columns: int
    depth: int = 64
    """Elements of K of a step."""
    cluster_rows: int = 1
    cluster_columns: int = 1
    is_swapped: bool = False
    resident: int = 1
    """Blocks of a multiprocessor."""
    spared: float = 0.0
    """Share of the multiprocessors that clusters of this size leave unused."""
    swizzle: int = 1
    """Clusters along the minor mode that the scheduler visits before the next step along the major
    one.
    """
    along_columns: bool = True
    """The major mode is that of the columns."""
    splits: int = 1
    """Blocks that share the K of a tile, or `STREAM_K`."""


class ProductSizes(NamedTuple):
    """Sizes from which the work of all kernels at one product is counted."""

    m: int
    n: int
    k: int
    width: int
    """Bytes of an element of A and B."""
    inputs: float
    """Megabytes of A and B."""
    output: float
    """Megabytes written, and read of a residual."""

    @property
    def megabytes(self) -> float:
        """Read and written at least."""
        return self.inputs + self.output

    @property
    def weights(self) -> float:
        """Megabytes of B."""
        return self.width * self.n * self.k / MEGABYTE

    @classmethod
    def of(cls, problem: GemmProblem | SwigluProblem) -> ProductSizes:
        """The sizes of a product, of a gated one with the columns of both projections."""
        m, n, k, width = problem.m, problem.n, problem.k, DTYPE_BYTES[problem.dtype]
        output = width * m * n / MEGABYTE
        if not isinstance(problem, GemmProblem):
            n *= 2
        elif problem.has_residual:
            output *= 2
        return cls(m, n, k, width, width * k * (m + n) / MEGABYTE, output)


TERMS = (
    "launch",
    "waves",
    "wave_steps",
    "mean_steps",
    "tiles",
    "padding",
    "memory",
    "bound",
    "repeated",
    "output",
    "partials",
    "splits",
    "shallow_output",
)
"""Names of what `work` counts:

- a launch; waves of tiles over the chip, and the K steps of all waves;
- K steps and tiles of the mean multiprocessor; its K steps of tiles that lie outside of D;
- megabytes through memory; microseconds of memory or of the busiest multiprocessor, the longer;
- megabytes that waves read beyond the first time; megabytes of the output;
- megabytes of partial sums, and splits to combine;
- megabytes of the output over K in thousands: ends of tiles that a short main loop does not hide.
"""


def work(sizes: ProductSizes, tiling: ProductTiling, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `TERMS`; it may be traced (`tuner.families.tape`), where several splits
    are a symbol.
    """
    rows, columns, depth, by_m, by_n, is_swapped, resident, spared, most, along, splits = tiling
    m, n, k, width, inputs, output = sizes
    sm_count = gpu.sm_count
    if is_swapped:
        m, n = n, m
    filled_m, filled_n = -(-m // rows), -(-n // columns)
    tiles_m, tiles_n = -(-filled_m // by_m) * by_m, -(-filled_n // by_n) * by_n
    swizzle = 1
    if most > 1:
        fewest = smaller(tiles_m, tiles_n)
        for mode, least in _MIN_TILES.items():
            swizzle = where(fewest, least - 1, mode, swizzle) if mode <= most else swizzle
        tiles_m = -(-tiles_m // (swizzle * by_m)) * swizzle * by_m
        tiles_n = -(-tiles_n // (swizzle * by_n)) * swizzle * by_n
    tiles, steps = tiles_m * tiles_n, -(-k // depth)
    slots = int(sm_count * (1 - spared)) * resident
    blocks, is_split = tiles, splits not in (STREAM_K, 1)
    if is_split:
        steps = -(-steps // splits)
        blocks = tiles * splits
        waves = -(-blocks // slots)
    else:
        waves = -(-tiles // slots) if splits else larger(1.0, tiles / slots)
    tflops = NOMINAL_TFLOPS * gpu.peak_tflops / DEFAULT_GPU.peak_tflops
    step_us = 2e-6 * rows * columns * depth * sm_count / tflops
    # Tiles of a wave: so many of the minor mode, and of the major one what is left.
    wave = smaller(slots, tiles)
    major, band = (tiles_n, by_m * swizzle) if along else (tiles_m, by_n * swizzle)
    across = larger(band, -(-wave // major))
    beside = -(-wave // across)
    read = across * rows + beside * columns if along else across * columns + beside * rows
    repeated = tiles / wave * read * (width * k / MEGABYTE) - inputs
    wave_steps, memory = waves * steps, inputs + output
    bound, slowest = memory * 1e3 / NOMINAL_GBS, wave_steps * resident * step_us
    return (
        1.0,
        waves,
        wave_steps,
        blocks * steps / sm_count,
        blocks / sm_count,
        (tiles - filled_m * filled_n) * steps / sm_count,
        memory,
        larger(bound, slowest),
        larger(repeated, 0.0),
        output,
        4e-6 * splits * m * n if is_split else 0.0,
        splits if is_split else 0.0,
        output * 1024.0 / k,
    )


class FewRowsTiling(NamedTuple):
    """Tiling of the weights by a kernel of few rows."""

    rows: int
    """Rows of the weights that a block owns at a time."""
    depth: int
    """Elements of K of a step."""
    resident: int
    """Blocks of a multiprocessor."""
    is_persistent: bool
    in_flight: int
    """Steps of a multiprocessor whose bytes are under way."""
    splits: int = 1


FEW_ROWS = 8
"""Rows of A up to which a kernel of few rows keeps no more rows than A has."""
ROW_TERMS = (
    "launch",
    "rounds",
    "waves",
    "round_steps",
    "steps",
    "mean_steps",
    "tiles",
    "memory",
    "uneven",
    "uneven_root",
    "inputs",
    "row_steps",
    "refills",
    "idle_refills",
    "rows",
    "many_rows",
)
"""Names of what `row_work` counts:

- a launch; rounds of tiles over the multiprocessors, waves of blocks, and steps of all rounds;
- K steps of a tile and of the mean multiprocessor, whose tiles are ``tiles``;
- megabytes through memory, times the busiest multiprocessor's share of them, and its fourth root;
- megabytes of A that blocks read anew, and steps of the busiest multiprocessor by rows of A;
- times that the busiest multiprocessor fills its pipeline; and of a tile's, times the share of
  multiprocessors without a tile: latency binds then, not memory;
- kilobytes of A, which a block reads before its first step; 1 with more than `FEW_ROWS` rows.
"""


def row_work(sizes: ProductSizes, tiling: FewRowsTiling, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `ROW_TERMS`."""
    rows, depth, resident, is_persistent, in_flight, _ = tiling
    m, n, k, width, inputs, output = sizes
    sm_count = gpu.sm_count
    tiles, steps = -(-n // rows), -(-k // depth)
    rounds, slots = -(-tiles // sm_count), sm_count * resident
    blocks = smaller(tiles, slots) if is_persistent else tiles
    memory, share = inputs + output, rounds * sm_count / tiles
    return (
        1.0,
        rounds,
        -(-tiles // slots),
        rounds * steps,
        steps,
        tiles * steps / sm_count,
        tiles / sm_count,
        memory,
        memory * share,
        memory * share**0.25,
        width * blocks * m * k / MEGABYTE,
        rounds * steps * m,
        rounds * steps / in_flight,
        larger(0.0, 1 - tiles / sm_count) * (steps / in_flight),
        width * m * k / 1e3,
        where(m, FEW_ROWS, 1.0, 0.0),
    )


TILINGS = {
    "128x256": ProductTiling(128, 256),
    "256x128": ProductTiling(256, 128),
    "128x64": ProductTiling(128, 64),
    "32x64": ProductTiling(32, 64),
}
"""Candidate tiles of a closed-source kernel; the fit chooses among them."""
_OF_TILES = ("waves", "wave_steps", "mean_steps", "bound")
CLOSED_TERMS = (
    "launch",
    "memory",
    "activations",
    "weights",
    "output",
    "depth",
    "gigaflops",
    *(f"{term} of {tiles}" for tiles in TILINGS for term in _OF_TILES),
)
"""Names of what `closed_work` counts. Megabytes of A and of B are terms beside those through
memory: a call finds its activations in the L2, and its weights in memory. The fourth root of K is
its depth: a library divides the sums of a long K.
"""
CONSTANT_TERMS = frozenset(
    {
        *("launch", "memory", "activations", "weights", "bound", "repeated", "output"),
        *("partials", "uneven", "uneven_root", "refills", "idle_refills"),
    }
)
"""Terms whose rates do not follow the clock."""
CHIP_TERMS = frozenset({"gigaflops"})
"""Terms whose rates are the whole chip's: amounts of the others count the multiprocessors."""
_of_tiles = itemgetter(*(TERMS.index(name) for name in _OF_TILES))


def closed_work(sizes: ProductSizes, tiling: None, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `CLOSED_TERMS`, for a closed-source kernel."""
    works = [work(sizes, tiling, gpu) for tiling in TILINGS.values()]
    flops = 2 * sizes.m * sizes.n * sizes.k / GIGAFLOP
    amounts = map(_of_tiles, works)
    memory, weights = sizes.inputs + sizes.output, sizes.weights
    mean = 1.0, memory, sizes.inputs - weights, weights, sizes.output, sizes.k**0.25, flops
    return (*mean, *chain.from_iterable(amounts))
