"""GEMM of few rows: a product that is bound by reading its weights from memory.

For M up to 16 and weights with K contiguous, as `torch.nn.Linear` has them. Blocks own rows of the
weights, and their warps divide K and add their sums in a fixed order. Tensor cores multiply, so the
time hardly depends on M. A config sets the bytes in flight, the length of the copies, and the
overlap with the neighbouring kernels of the stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import product
from math import ceil
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families import product_work
from tuner.families.arguments import Arguments
from tuner.families.base import Domain, KernelSpec, Launch, Ref, Strides
from tuner.families.chip_work import Work
from tuner.families.invariance import ReductionClass
from tuner.families.strided_product import StridedProduct, as_gemm
from tuner.hardware import (
    GRAPH_LAUNCH_US,
    HOPPER,
    REGISTERS_PER_SM,
    REGISTERS_PER_THREAD,
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP,
    Gpu,
)
from tuner.problem import ACTIVATIONS, E4M3, GemmProblem, Problem

KERNEL = "gemv"
"""Name of the one kernel."""
TEMPLATE = "gemv.cu.j2"
#: Text that it takes, by variable.
WORDS = {
    "dtype": ("float16", "bfloat16"),
    "dtype_d": ("float16", "bfloat16", "float32"),
    "activation": ("", *ACTIVATIONS),
}
#: Rows of an instruction of the tensor cores; with up to half of them it needs one read of A less.
MAX_ROWS = 16
#: Elements of 16 bits in a 16-byte load, in the loads of four lanes, and weight rows of a warp's.
VECTOR, PIECE, TILE_ROWS = 8, 32, 8
MAX_BLOCK_THREADS = 1024
MAX_THREADS_PER_SM = 2048
#: Of shared memory that a block may use the barriers' part is fixed.
BARRIER_BYTES = 1024
#: Registers of a thread beside what it multiplies and the sums, as compiled with nvcc 13.0.
OTHER_REGISTERS = 40
#: Rows of a grid, one a batch [CUDA C++ Programming Guide].
MAX_BATCH = 65535
#: K below which steps that reach beyond it are no waste worth avoiding.
SMALL_K = 2048
#: Bytes in flight on a multiprocessor that are worth trying, and bytes of a row in one copy: of 28
#: kernels timed at M = 1 on one H200 those with fewer were never near the best.
MIN_IN_FLIGHT, MIN_COPY = 48 << 10, 1 << 10
#: Elements of K of a block's first rows that are worth having in the L2 when it may begin: 2 KB a
#: row, about what the multiprocessors have in flight. More would only wait there.
LEAD = 1024

#: Rows of A that a thread reads at a time, and fewest rows for which that is worth a kernel.
ROW_LOADS, MIN_LOADED = 8, 3

#: Start of the fit by `tuner develop fit cost`.
CONSTANTS: Mapping[str, float] = {
    # Bandwidth reached over the data sheet's, and how long a byte is in flight with memory busy.
    "memory_efficiency": 0.95,
    "latency_us": 3.5,
    # What copies lose that are a KB long: half of it those of 2 KB.
    "short_copy": 0.13,
    # The kernel's two ends where nothing hides them; what is left of them behind a kernel in front,
    # and of that where the L2 has the first rows already.
    "ends_us": 2.1,
    "hidden": 0.8,
    "led": 0.45,
    # Start of a further block that is alone on its multiprocessor: A, barriers, the first bytes.
    "start_us": 1.3,
    # What the L2 gives over what memory does: blocks read A anew.
    "l2_speedup": 1.5,
}


class Gemv(StridedProduct):
    """One kernel; whether its blocks are persistent and how it is launched are run-time choices."""

    name: ClassVar[str] = "gemv"
    op: ClassVar[str] = GemmProblem.op
    proof_draws: ClassVar[str] = "gemm.draws:ProductDraw"
    capabilities = (HOPPER,)
    cost_constants = CONSTANTS
    work_terms: ClassVar[tuple[str, ...]] = product_work.ROW_TERMS
    rated_apart = frozenset({"row_loads"})
    amounts = staticmethod(product_work.row_work)
    runtime_parameters: ClassVar[frozenset[str]] = frozenset({"persistent", "pdl", "lead"})
    tried_calls = (
        {"persistent": True, "pdl": True, "lead": LEAD},
        {"persistent": True, "pdl": False, "lead": 0},
        {"persistent": False, "pdl": False, "lead": 0},
    )
    domains: ClassVar[Mapping[str, Domain]] = {
        "warps": (1, 2, 4, 8, 16, 32),
        "k_warps": (1, 2, 4, 8, 16, 32),
        "row_tiles": (1, 2, 4),
        "pieces": (1, 2, 4, 8, 16),
        "stages": (2, 3, 4, 6, 8),
        "blocks_per_sm": (1, 2, 3, 4, 6, 8),
        "persistent": (False, True),
        "pdl": (False, True),
        "lead": (0, 512, 1024, 2048, 4096),
        "row_loads": (2, 4, 8),
        "whole_copies": (True,),
    }
    optional = frozenset({"row_loads", "whole_copies"})

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, GemmProblem):
            return reason
        if problem.dtype == E4M3 or problem.scales:
            return f"{self.name} takes no factors: only fp16 and bf16, without scales"
        if problem.m > MAX_ROWS:
            return f"{self.name} serves M up to {MAX_ROWS}, not {problem.m}"
        if problem.layout_a != "row" or problem.layout_b != "col":
            return f"{self.name} wants K contiguous in both operands"
        if problem.k % VECTOR:
            return f"K={problem.k} is not a multiple of {VECTOR} (16-byte loads)"
        if problem.batch > MAX_BATCH:
            return f"batch {problem.batch} exceeds {MAX_BATCH}"
        if smem_bytes(problem, _SMALLEST) > SMEM_PER_BLOCK_BYTES:
            return f"{problem.m} rows of K={problem.k} exceed a block's shared memory"
        return ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        gemm = as_gemm(problem, Gemv.name)
        reasons = [*_block_violations(config), *_room_violations(gemm, config)]
        if "whole_copies" in config.params and gemm.k > step_k(config):
            reasons.append(f"whole_copies are of one step: K={gemm.k} exceeds {step_k(config)}")
        return reasons

    def stride_conflict(self, problem: GemmProblem, config: Config, strides: Strides) -> str:
        reason = super().stride_conflict(problem, config, strides)
        b = problem.operands[1]
        if not reason and "whole_copies" in config.params and b.name in strides:
            stride = strides[b.name][-1]
            return "" if stride == problem.k else f"b's rows lie {stride} apart (whole_copies)"
        return reason

    def _groups(self, problem: GemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
        for compiled in _compiled(problem):
            yield [Config(self.name, params) for params in _launched(problem, compiled, gpu)]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = as_gemm(problem, Gemv.name)
        variables = {
            **{k: v for k, v in config.params.items() if k not in self.runtime_parameters},
            "dtype": problem.dtype,
            "dtype_d": problem.dtype_d,
            "wide": _is_wide(problem),
            "bias": problem.has_bias,
            "activation": problem.activation,
            "residual": problem.has_residual,
        }
        return {KERNEL: KernelSpec(TEMPLATE, variables, WORDS, arguments_of(problem))}

    def _launches(
        self, problem: GemmProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        a, b, *more, d = problem.operands
        along_a, along_b = (strides.get(o.name, o.strides) for o in (a, b))
        integers = {
            **{"m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch},
            **{"lda": along_a[1], "ldb": along_b[2], "ldd": problem.n},
            **{"batch_a": along_a[0], "batch_b": along_b[0], "batch_d": d.strides[0]},
            **{name: int(config[name]) for name in ("persistent", "pdl", "lead")},
        }
        tensors = {operand.name: Ref(operand.name) for operand in (a, b, d, *more)}
        scalars = {"alpha": scale, **({"beta": 1.0} if problem.has_residual else {})}
        return [Launch.named(KERNEL, arguments_of(problem), tensors, integers, scalars)]

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        gemm = as_gemm(problem, self.name)
        rows, depth = block_rows(config), padded_k(gemm, config)
        tiles = ceil(gemm.n / rows) * gemm.batch
        resident = config["blocks_per_sm"]
        slots = gpu.sm_count * resident
        a, *more = gemm.operands
        # A block reads A once, and is one block of rows unless it is persistent.
        blocks = min(tiles, slots) if config["persistent"] else tiles
        work = Work(
            kernel="gemv",
            launches=1,
            tiles=tiles,
            slots=slots,
            is_even=True,
            threads=block_threads(config),
            smem_bytes=smem_bytes(gemm, config),
            blocks_per_sm=resident,
            tensor_flops=2.0 * MAX_ROWS * rows * depth * tiles,
            wgmma=0,
            exponentials=0.0,
            l2_bytes=a.bytes / gemm.batch * blocks + sum(operand.bytes for operand in more),
        )
        return (work,)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Bytes over the bandwidth that the bytes in flight and the copies' length allow; the
        kernel's two ends; the starts of further blocks.
        """
        problem, constants = as_gemm(problem, Gemv.name), self.constants
        tiles = ceil(problem.n / block_rows(config)) * problem.batch
        rounds = ceil(tiles / gpu.sm_count)
        resident = min(int(config["blocks_per_sm"]), rounds)
        memory = gpu.memory_gbs * constants["memory_efficiency"] * 1e3
        reached = resident * in_flight_bytes(config) / constants["latency_us"] * gpu.sm_count
        bandwidth = (memory**-4 + reached**-4) ** -0.25
        bandwidth /= 1 + constants["short_copy"] * MIN_COPY / (2 * step_k(config))
        # Multiprocessors with fewer rows leave their part of the memory to the others, in part; a
        # step beyond K costs time and no bytes.
        uneven = (rounds * gpu.sm_count / tiles) ** 0.25
        uneven *= (padded_k(problem, config) / problem.k) ** 0.25
        blocks = min(tiles, gpu.sm_count * resident) if config["persistent"] else tiles
        crossing = problem.bytes + blocks * 2 * problem.m * problem.k
        crossing_us = crossing / (memory * constants["l2_speedup"])
        stream_us = ((problem.bytes / bandwidth) ** 4 + crossing_us**4) ** 0.25 * uneven
        ends_us = constants["ends_us"] * (constants["hidden"] if config["pdl"] else 1.0)
        if config["lead"]:
            ends_us *= constants["led"]
        further = 0 if config["persistent"] else ceil(rounds / resident) - 1
        starts_us = constants["start_us"] * further / resident**1.5
        return float(GRAPH_LAUNCH_US + ends_us + stream_us + starts_us)

    def tiling(self, config: Config) -> product_work.FewRowsTiling:
        resident, is_persistent = int(config["blocks_per_sm"]), bool(config["persistent"])
        in_flight = resident * int(config["stages"])
        return product_work.FewRowsTiling(
            block_rows(config), step_k(config), resident, is_persistent, in_flight
        )

    def overlapped(self, config: Config) -> Config:
        """An early launch with `LEAD`, and persistent blocks, at most one for each tile.

        The early launch saves up to 5 % in the median: 162 pairs in ``cache/recordings``.
        """
        launch = {"pdl": True, "lead": LEAD, "persistent": True}
        return Config(self.name, {**config.params, **launch})

    def served(self, problem: Problem, config: Config) -> Config:
        return Config(self.name, {**config.params, "pdl": False, "lead": 0})

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        """Warps take the pieces of a step, and add their sums one after the other."""
        gemm = as_gemm(problem, Gemv.name)
        has_own = gemm.has_residual or gemm.activation not in ("", "relu")
        return ReductionClass(
            depth=MAX_ROWS,
            unit="mma",
            splits=int(config["k_warps"]),
            step=PIECE * int(config["pieces"]),
            merge="warps",
            epilogue=f"{self.name} {gemm.epilogue}" if has_own else "",
        )

    def legality_facts(self, problem: Problem) -> Hashable:
        """Padded K: shared memory holds all rows of A."""
        product = as_gemm(problem, Gemv.name)
        return product.dtype, product.m, -(-product.k // PIECE), product.k % VECTOR


def block_rows(config: Config) -> int:
    """Rows of the weights that a block owns at a time."""
    warps_n = int(config["warps"]) // int(config["k_warps"])
    return TILE_ROWS * warps_n * int(config["row_tiles"])


def step_k(config: Config) -> int:
    """Elements of K that a block takes a step."""
    return PIECE * int(config["pieces"] * config["k_warps"])


def padded_k(problem: GemmProblem, config: Config) -> int:
    """K as the kernel runs over it: whole steps."""
    return ceil(problem.k / step_k(config)) * step_k(config)


def in_flight_bytes(config: Config) -> int:
    """Bytes of weights that a block keeps in flight."""
    return 2 * block_rows(config) * step_k(config) * int(config["stages"])


def smem_bytes(problem: GemmProblem, config: Config) -> int:
    """Shared memory of a block: the ring of steps, A, two sets of the warps' sums, barriers."""
    rows = block_rows(config)
    ring = int(config["stages"]) * rows * _odd_pitch(2 * step_k(config))
    rows_a = MAX_ROWS if _is_wide(problem) else problem.m
    sums = 2 * 4 * int(config["k_warps"]) * problem.m * rows
    return ring + rows_a * _odd_pitch(2 * padded_k(problem, config)) + sums + BARRIER_BYTES


def block_threads(config: Config) -> int:
    """Threads of a block: the consumer warps and one producer warp."""
    return WARP * (int(config["warps"]) + 1)


def _odd_pitch(size: int) -> int:
    """Bytes between rows of shared memory, so that two neighbours begin in different banks."""
    return ceil(size / 128) * 128 + 64


def _is_wide(problem: GemmProblem) -> bool:
    return problem.m > product_work.FEW_ROWS


def arguments_of(problem: GemmProblem) -> Arguments:
    """Declaration of a launch's arguments."""
    extra = {"bias": problem.has_bias, "residual": problem.has_residual}
    return Arguments(
        tensors=("a", "b", "d", *(name for name, is_there in extra.items() if is_there)),
        integers=(
            *("m", "n", "k", "batch"),
            *("lda", "ldb", "ldd"),
            *("batch_a", "batch_b", "batch_d"),
            *("persistent", "pdl", "lead"),
        ),
        scalars=("alpha", "beta") if problem.has_residual else ("alpha",),
    )


def _block_violations(config: Config) -> list[str]:
    reasons = []
    warps, threads = config["warps"], block_threads(config)
    if config["k_warps"] > warps:
        reasons.append(f"k_warps={config['k_warps']} do not divide {warps} warps")
    if threads > MAX_BLOCK_THREADS:
        reasons.append(f"{threads} threads exceed {MAX_BLOCK_THREADS}")
    if threads * config["blocks_per_sm"] > MAX_THREADS_PER_SM:
        reasons.append(
            f"{config['blocks_per_sm']} blocks of {threads} threads exceed {MAX_THREADS_PER_SM}"
        )
    if config["lead"] and not config["pdl"]:
        reasons.append(f"lead={config['lead']} needs pdl=True")
    return reasons


def _room_violations(problem: GemmProblem, config: Config) -> list[str]:
    """Registers and shared memory of a block, and of as many as are to share a multiprocessor."""
    if config["k_warps"] > config["warps"]:
        return []
    reasons, blocks = [], int(config["blocks_per_sm"])
    threads, used = block_threads(config), smem_bytes(problem, config)
    needed = registers(config)
    # Allocated in units of 8 a thread [CUDA C++ Programming Guide 13.0, "Compute Capabilities"].
    allowed = min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // (threads * blocks) // 8 * 8)
    if needed > allowed:
        reasons.append(f"{needed} registers a thread exceed {allowed}")
    if used > SMEM_PER_BLOCK_BYTES:
        reasons.append(f"{used} bytes of shared memory exceed {SMEM_PER_BLOCK_BYTES}")
    elif blocks * (used + SMEM_RESERVED_PER_BLOCK_BYTES) > SMEM_PER_SM_BYTES:
        reasons.append(f"{blocks} blocks of {used} bytes exceed {SMEM_PER_SM_BYTES}")
    return reasons


def registers(config: Config) -> int:
    """Registers a thread needs: pieces of the weights, sums, addresses."""
    return 14 * int(config["row_tiles"]) + OTHER_REGISTERS


#: Warps that multiply, and those of them that divide K.
_WARPS = ((4, 4), (8, 8), (16, 16), (8, 4), (4, 2))
#: Of the space, what needs the least shared memory beside A.
_SMALLEST = Config(Gemv.name, {"warps": 4, "k_warps": 4, "row_tiles": 1, "pieces": 4, "stages": 6})


def _compiled(problem: GemmProblem) -> Iterator[dict[str, Value]]:
    """Compile-time parameters worth a kernel, in a fixed order."""
    steps = product((1, 2), (4, 8, 16), (2, 3, 4, 6))
    for (row_tiles, pieces, stages), (warps, k_warps), blocks in product(steps, _WARPS, (1, 2)):
        params: dict[str, Value] = {
            "warps": warps,
            "k_warps": k_warps,
            "row_tiles": row_tiles,
            "pieces": pieces,
            "stages": stages,
            "blocks_per_sm": blocks,
        }
        config = Config(Gemv.name, params)
        enough = blocks * in_flight_bytes(config) >= MIN_IN_FLIGHT
        whole = 4 * padded_k(problem, config) <= 5 * max(problem.k, SMALL_K)
        if enough and whole and 2 * step_k(config) >= MIN_COPY:
            yield params | ({"row_loads": ROW_LOADS} if problem.m >= MIN_LOADED else {})


def _launched(
    problem: GemmProblem, compiled: dict[str, Value], gpu: Gpu
) -> Iterator[dict[str, Value]]:
    """The run-time choices of one kernel that differ from one another for this shape."""
    tiles = ceil(problem.n / block_rows(Config(Gemv.name, compiled)))
    resident = gpu.sm_count * int(compiled["blocks_per_sm"])
    for persistent in (False, True) if tiles > resident else (False,):
        for pdl, lead in ((True, LEAD), (True, 0), (False, 0)):
            yield {**compiled, "persistent": persistent, "pdl": pdl, "lead": lead}
