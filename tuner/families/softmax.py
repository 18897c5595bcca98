"""Softmax over rows of fp32 scores, written as 16-bit probabilities: one memory-bound kernel.

The threads of a row read it `passes` times: once into registers, twice with an online maximum and
sum, or three times as in textbooks. Statistics are fp32; the scale is folded with log2(e) into
exp2.

Every config may also be launched in place, with the probabilities over the scores' own memory (see
`softmax_launch`). A row's threads meet at a barrier between reading columns and writing over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import ClassVar

from tuner.config import Config
from tuner.families.arguments import Arguments
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref, posed
from tuner.families.chip_work import WARPS_PER_SM, Work
from tuner.hardware import GRAPH_LAUNCH_US, HOPPER, REGISTERS_PER_SM, WARP, Gpu
from tuner.problem import DTYPE_BYTES, MAX_EXTENT, Problem, SoftmaxProblem

KERNEL = "softmax"
"""Name of the one kernel."""
ARGUMENTS = Arguments(
    tensors=("scores", "probabilities"),
    integers=("rows", "cols", "stride_scores", "stride_probabilities", "query_rows", "pdl"),
    scalars=("scale", "factor"),
)
#: Text that the template takes, by variable.
WORDS = {"dtype": ("float16", "bfloat16")}
#: Most threads of a block [CUDA C++ Programming Guide 13.0, "Compute Capabilities"].
MAX_BLOCK_THREADS = 1024
MAX_THREADS_PER_SM = 2048
#: Elements a thread keeps at most, and the registers it needs besides them. Compiled with nvcc
#: 13.0: 1024 threads hold 48 elements without a spill and spill at 56; 512 threads hold 112.
MAX_ELEMENTS = 128
OTHER_REGISTERS = 16
#: Elements in flight in a thread that reads its row more than once.
ELEMENTS_IN_FLIGHT = 16
#: Columns of a row, so that a 32-bit column index cannot overflow.
MAX_COLS = 2**30
#: Exponentials an element in each way to compute a softmax: with the row in registers, with an
#: online maximum, in three passes.
EXPONENTIALS = {1: 1, 2: 2, 3: 2}

#: Start of the fit by `tuner develop fit cost`.
CONSTANTS: Mapping[str, float] = {
    # Share of the data sheet's bandwidth: a copy of 33.5 MB took 17.7 us on one H200.
    "memory_share": 0.79,
    # Bandwidth of reads that hit the L2 against memory's.
    "l2_speedup": 1.5,
    # Bytes in flight that keep a multiprocessor's share busy: 4.8 TB/s x 0.8 us of latency / 132.
    "bytes_in_flight": 30_000.0,
    # Time of one element in the thread that owns it, which the last wave cannot hide.
    "element_us": 0.005,
    # Least time of a kernel that loads, reduces and stores, besides its launch.
    "latency_us": 1.5,
    # What a later pass over the row reads again from memory, as a share.
    "reread": 0.15,
    # Time that narrow accesses, a barrier of several warps and one of more than 256 threads add.
    "narrow": 0.1,
    "barrier": 0.02,
    "wide_barrier": 0.02,
}


class Softmax(Family):
    """One kernel; every parameter is compiled in."""

    name: ClassVar[str] = "softmax"
    op: ClassVar[str] = SoftmaxProblem.op
    capabilities = (HOPPER,)
    cost_constants = CONSTANTS
    domains: ClassVar[Mapping[str, Domain]] = {
        "threads_per_row": (16, 32, 64, 128, 256, 512, 1024),
        "vector_width": (1, 2, 4, 8),
        "rows_per_block": (1, 2, 4, 8, 16, 32, 64),
        "passes": (1, 2, 3),
    }

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem, reasons = _softmax(problem), []
        if problem.batch * problem.rows > MAX_EXTENT:
            reasons.append(f"{problem.batch * problem.rows} rows exceed {MAX_EXTENT}")
        if problem.cols > MAX_COLS:
            reasons.append(f"{problem.cols} columns exceed {MAX_COLS}")
        return reasons or _geometry_violations(problem, config)

    def _groups(self, problem: SoftmaxProblem, gpu: Gpu) -> Iterator[list[Config]]:
        return ([config] for config in _candidates(problem))

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = _softmax(problem)
        variables = {name: config[name] for name in self.domains}
        variables |= {
            "vectors": vectors_per_thread(problem, config),
            "dtype": problem.dtype,
            "is_causal": problem.is_causal,
        }
        return {KERNEL: KernelSpec("softmax.cu.j2", variables, WORDS, ARGUMENTS)}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return [softmax_launch(_softmax(problem), scale, Ref("scores"), Ref("probabilities"))]

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        softmax = _softmax(problem)
        scores, probabilities = softmax.operands
        part = 0.5 if softmax.is_causal else 1.0
        threads = config["threads_per_row"] * config["rows_per_block"]
        # Registers are the least that hold a row; the compiler's own number is in the measurement.
        per_thread = ceil(softmax.cols / config["threads_per_row"]) if config["passes"] == 1 else 0
        by_registers = REGISTERS_PER_SM // (threads * max(32, per_thread))
        resident = max(1, min(by_registers, WARPS_PER_SM * WARP // threads))
        work = Work(
            kernel="softmax",
            launches=1,
            tiles=ceil(softmax.batch * softmax.rows / config["rows_per_block"]),
            slots=gpu.sm_count * resident,
            is_even=not softmax.is_causal,
            threads=threads,
            smem_bytes=0,
            blocks_per_sm=resident,
            tensor_flops=0.0,
            wgmma=0.0,
            exponentials=part * EXPONENTIALS[config["passes"]] * scores.elements,
            l2_bytes=part * config["passes"] * scores.bytes + probabilities.bytes,
        )
        return (work,)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        problem, constants = _softmax(problem), self.constants
        rows, passes = problem.batch * problem.rows, config["passes"]
        read = 4 * rows * problem.cols // (2 if problem.is_causal else 1)
        written = DTYPE_BYTES[problem.dtype] * rows * problem.cols
        bandwidth = constants["memory_share"] * gpu.memory_gbs * 1e3
        if read + written <= gpu.l2_bytes:
            bandwidth *= constants["l2_speedup"]
        # A later pass finds most of its row in the caches.
        moved_us = (read * (1 + constants["reread"] * (passes - 1)) + written) / bandwidth
        elements = passes * ceil(problem.cols / config["threads_per_row"])
        own_us = constants["latency_us"] + elements * constants["element_us"]
        slowdown = _slowdown(problem, config, gpu, constants)
        return float(GRAPH_LAUNCH_US + own_us + moved_us * slowdown)


def softmax_launch(
    problem: SoftmaxProblem,
    scale: float,
    scores: Ref,
    probabilities: Ref,
    *,
    kernel: str = KERNEL,
    stride_scores: int = 0,
    stride_probabilities: int = 0,
    factor: float = 1.0,
    pdl: bool = False,
) -> Launch:
    """One launch over all matrices of `problem`, whose rows follow each other at one stride.

    In place is `probabilities` equal to `scores` with `stride_probabilities` twice
    `stride_scores`: each row of 16-bit elements then begins where its row of fp32 scores did.

    Args:
        problem: sizes and mask.
        scale: softmax scale.
        scores: fp32 input.
        probabilities: 16-bit output.
        kernel: key of the kernel in the caller's `Family.kernels`.
        stride_scores: elements from row to row; 0 means dense.
        stride_probabilities: elements from row to row of the output; 0 means dense.
        factor: factor of every probability.
        pdl: launch with programmatic stream serialization, after a kernel that allows it.
    """
    integers = {
        "rows": problem.batch * problem.rows,
        "cols": problem.cols,
        "stride_scores": stride_scores or problem.cols,
        "stride_probabilities": stride_probabilities or problem.cols,
        "query_rows": problem.query_rows,
        "pdl": int(pdl),
    }
    tensors = {"scores": scores, "probabilities": probabilities}
    return Launch.named(kernel, ARGUMENTS, tensors, integers, {"scale": scale, "factor": factor})


def vectors_per_thread(problem: SoftmaxProblem, config: Config) -> int:
    """Vectors that a thread holds at once: the whole row when it is read once."""
    width = config["vector_width"]
    needed = ceil(problem.cols / int(config["threads_per_row"] * width))
    return needed if config["passes"] == 1 else min(needed, ELEMENTS_IN_FLIGHT // width)


def _slowdown(
    problem: SoftmaxProblem, config: Config, gpu: Gpu, constants: Mapping[str, float]
) -> float:
    """Estimated time over that of a copy: too little in flight, idle lanes, narrow accesses,
    barriers, too few blocks.
    """
    block, width = _block_threads(config), config["vector_width"]
    elements = vectors_per_thread(problem, config) * width
    registers = elements + 2 * OTHER_REGISTERS
    resident = min(MAX_THREADS_PER_SM, REGISTERS_PER_SM // registers) // block * block
    in_flight = 4 * max(resident, block) * min(elements, problem.cols)
    covered = config["threads_per_row"] * width
    blocks = ceil(problem.batch * problem.rows / config["rows_per_block"])
    starved = max(1.0, constants["bytes_in_flight"] / in_flight)
    idle = ceil(problem.cols / covered) * covered / problem.cols
    narrow = 1 + constants["narrow"] * (16 / min(16, 4 * width) - 1)
    barrier = 1.0
    if config["threads_per_row"] > WARP:
        barrier += constants["barrier"] + constants["wide_barrier"] * (block > 256)
    return float(starved * idle * narrow * barrier * max(1.0, gpu.sm_count / blocks))


def _softmax(problem: Problem) -> SoftmaxProblem:
    return posed(problem, SoftmaxProblem, Softmax.name)


def _block_threads(config: Config) -> int:
    return int(config["threads_per_row"] * config["rows_per_block"])


def _geometry_violations(problem: SoftmaxProblem, config: Config) -> list[str]:
    reasons = []
    block, width = _block_threads(config), config["vector_width"]
    if block > MAX_BLOCK_THREADS:
        reasons.append(f"threads_per_row x rows_per_block = {block} exceeds {MAX_BLOCK_THREADS}")
    if block % WARP:
        reasons.append(f"threads_per_row x rows_per_block = {block} is not a multiple of {WARP}")
    if problem.cols % width:
        reasons.append(f"rows of {problem.cols} columns do not align vectors of {width}")
    elements = vectors_per_thread(problem, config) * width
    registers = REGISTERS_PER_SM // min(block, MAX_BLOCK_THREADS)
    allowed = min(MAX_ELEMENTS, registers - OTHER_REGISTERS)
    if elements > allowed:
        reasons.append(
            f"{elements} elements a thread exceed {allowed} with {block} threads a block"
        )
    return reasons


def _candidates(problem: SoftmaxProblem) -> Iterator[Config]:
    """The domains without what cannot win: narrow vectors where wide ones are aligned, threads
    without a column, blocks under two warps or above 512 threads where one row needs fewer.
    """
    widths = [w for w in Softmax.domains["vector_width"] if problem.cols % int(w) == 0]
    for passes in Softmax.domains["passes"]:
        for threads in map(int, Softmax.domains["threads_per_row"]):
            for width in map(int, widths[-2:]):
                if threads * width > max(problem.cols, 32 * width):
                    continue
                for rows in map(int, Softmax.domains["rows_per_block"]):
                    if 64 <= threads * rows <= max(512, threads):
                        params = {"threads_per_row": threads, "vector_width": width}
                        more = {"rows_per_block": rows, "passes": passes}
                        yield Config(Softmax.name, {**params, **more})
