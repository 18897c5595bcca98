"""Grouped GEMM through CUTLASS's grouped kernels for Sm90: one launch for all groups.

Tiles, clusters and schedules are those of `gemm`, as far as the grouped kernels have them: both
persistent schedules. Their own tile scheduler reads the groups' extents on the device. It does not
swizzle when the host does not know the extents
(gemm/kernel/tile_scheduler_params.h of CUTLASS 4.2, PersistentTileSchedulerSm90GroupParams).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, gcd, inf
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families.arguments import Arguments
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref, posed
from tuner.families.chip_work import Work, work_of_groups
from tuner.families.collective import CONSUMERS, COOPERATIVE, NO_SMEM, PINGPONG, TMA_EPILOGUE
from tuner.families.gemm import Gemm, cost, reduction_of
from tuner.families.gemm import space as gemm_space
from tuner.families.gemm.chip_work import gemm_work
from tuner.families.gemm.shape import RASTER_ORDERS, round_up
from tuner.families.invariance import ReductionClass
from tuner.hardware import GRAPH_LAUNCH_US, HOPPER, SMEM_PER_BLOCK_BYTES, Gpu
from tuner.problem import DTYPE_BYTES, E4M3, GemmProblem, GroupedGemmProblem, Problem

KERNEL = "grouped_gemm"
TEMPLATE = "grouped_gemm.cu.j2"
ARGUMENTS = Arguments(
    tensors=("a", "b", "offsets", "d"),
    integers=("m", "n", "k", "groups", "raster_order", "sm_count"),
    scalars=("alpha",),
)
SCHEDULES = (PINGPONG, COOPERATIVE)
#: Text that the template takes, by variable.
WORDS = {"dtype": ("float16", "bfloat16"), "kernel_schedule": SCHEDULES}
#: Shared memory of a grouped kernel besides tiles, their barriers and the output's buffers, bytes:
#: descriptors of A, B and C and one of D for each of two warp groups; the barriers of the
#: scheduler's pipeline of 8 stages, and its answers (SharedStorage in
#: gemm/kernel/sm90_gemm_array_tma_warpspecialized_*.hpp).
_DESCRIPTOR, _SCHEDULER, _ANSWERS = 128, 128, 128

#: Parameters that are compiled in.
_COMPILED = (
    *("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n"),
    *("kernel_schedule", "swap_ab"),
)
_GEMM = Gemm()


class GroupedGemm(Family):
    """CUTLASS's grouped kernels: tiles, clusters, schedules, raster orders, swapped operands."""

    name = "grouped_gemm"
    op = GroupedGemmProblem.op
    proof_draws = "grouped_gemm.draws:GroupedDraw"
    capabilities = (HOPPER,)
    runtime_parameters: ClassVar[frozenset[str]] = frozenset({"raster_order"})
    domains: ClassVar[Mapping[str, Domain]] = {
        **{name: Gemm.domains[name] for name in _COMPILED},
        "kernel_schedule": SCHEDULES,
        "raster_order": tuple(RASTER_ORDERS),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if not reason and _grouped(problem).dtype == E4M3:
            return f"{self.name} takes no factors: only fp16 and bf16, not {E4M3}"
        return reason

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem = _grouped(problem)
        if reasons := _GEMM.conflicts(_one_group(problem), as_gemm(config), gpu):
            return reasons
        stages, used = smem_bytes(problem, config)
        if stages < 2:
            return [f"stages={stages} are too few (at least 2 must fit)"]
        if used > SMEM_PER_BLOCK_BYTES:
            limit = SMEM_PER_BLOCK_BYTES
            return [f"{used} bytes of shared memory at {stages} stages exceed {limit}"]
        return []

    def _groups(self, problem: GroupedGemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
        """`gemm`'s tiles for a group of the mean size and for the largest one."""
        busy = [rows for rows in problem.rows if rows]
        for rows in sorted({ceil(problem.m / len(busy)), max(busy)}):
            product = replace(_one_group(problem), m=rows)
            for members in gemm_space.candidates(product, gpu):
                if members and _is_grouped(members[0]):
                    tile = {name: members[0][name] for name in _COMPILED}
                    yield [Config(self.name, {**tile, "raster_order": o}) for o in RASTER_ORDERS]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        variables = {name: config[name] for name in _COMPILED}
        variables["dtype"] = _grouped(problem).dtype
        return {KERNEL: KernelSpec(TEMPLATE, variables, WORDS, ARGUMENTS)}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        problem = _grouped(problem)
        integers = {
            **{"m": problem.m, "n": problem.n, "k": problem.k, "groups": problem.groups},
            **{"raster_order": RASTER_ORDERS[config["raster_order"]], "sm_count": 0},
        }
        tensors = {operand.name: Ref(operand.name) for operand in problem.operands}
        return [Launch.named(KERNEL, ARGUMENTS, tensors, integers, {"alpha": scale})]

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        return reduction_of(_one_group(_grouped(problem)), config)

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        groups = _grouped(problem)
        whole = _one_group(groups)
        works = [
            gemm_work(replace(whole, m=rows), as_gemm(config), gpu) for rows in groups.rows if rows
        ]
        _, smem = smem_bytes(groups, config)
        return (replace(work_of_groups(works, KERNEL), smem_bytes=smem),)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Nearly the longer of two times. The first is `gemm`'s estimate without memory, of a
        product with all groups' rows, each padded to whole tiles. The second is memory's time
        for every group's weights.
        """
        problem, constants = _grouped(problem), _GEMM.constants
        product, endless = _padded(problem, config), replace(gpu, memory_gbs=inf)
        compute = cost.predict_us(product, as_gemm(config), endless, constants)
        start = GRAPH_LAUNCH_US + constants["startup_clocks"] / gpu.clock_max_mhz
        rate = gpu.memory_gbs * cost.MEMORY_EFFICIENCY * 1e3
        times = (compute - start, problem.bytes / rate)
        longest = sum(time**cost.SHARPNESS for time in times) ** (1 / cost.SHARPNESS)
        return float(start + longest)


def smem_bytes(problem: GroupedGemmProblem, config: Config) -> tuple[int, int]:
    """Stages and shared memory of the compiled kernel, bytes.

    As of `gemm_shape.smem_bytes`, and what `_DESCRIPTOR` and its neighbours say; the automatic
    stage count leaves out a part of them (gemm/collective/builders/sm90_gmma_builder.inl). Equal to
    sizeof(SharedStorage) of the 18 kernels that were asked.
    """
    tile_m, tile_n, schedule = config["tile_m"], config["tile_n"], config["kernel_schedule"]
    width = DTYPE_BYTES[problem.dtype]
    rows, columns = min(64 * CONSUMERS[schedule], tile_m), gcd(32, tile_n)
    pieces = (tile_m // rows) * (tile_n // columns)
    alignment = 8 * min(width * (rows if config["swap_ab"] else columns), 128)
    loads = 16 * min(pieces, 4)
    output = round_up(min(pieces, 2) * rows * columns * width + 1, alignment)
    epilogue = round_up(output + 3 * _DESCRIPTOR + loads, alignment)
    stage = width * (tile_m + tile_n) * config["tile_k"]
    free = SMEM_PER_BLOCK_BYTES - 2 * _DESCRIPTOR - _SCHEDULER
    stages = (free // 128 * 128 - round_up(epilogue, 128)) // (round_up(stage, 128) + 16)
    # Barriers that order the loads, and ping-pong's warp groups.
    barriers = _SCHEDULER + 16 * stages + loads + (48 if schedule == PINGPONG else 16)
    used = round_up(stages * stage, alignment) + output
    used = round_up(used + barriers + _ANSWERS, _DESCRIPTOR) + 5 * _DESCRIPTOR
    return stages, round_up(used, max(alignment, 128))


def _grouped(problem: Problem) -> GroupedGemmProblem:
    return posed(problem, GroupedGemmProblem, GroupedGemm.name)


def _one_group(problem: GroupedGemmProblem) -> GemmProblem:
    """One group with all rows: the rules of `gemm` depend only on extents that all groups share."""
    return GemmProblem(problem.m, problem.n, problem.k, dtype=problem.dtype)


def _padded(problem: GroupedGemmProblem, config: Config) -> GemmProblem:
    """A product with as many tiles as all groups have together."""
    along = "n" if config["swap_ab"] else "m"
    step = config[f"tile_{along}"] * config[f"cluster_{along}"]
    rows = sum(round_up(rows, step) for rows in problem.rows)
    return replace(_one_group(problem), m=rows)


def as_gemm(config: Config) -> Config:
    """The config of `gemm` with the same tiles."""
    schedule = config["kernel_schedule"]
    epilogue = TMA_EPILOGUE[schedule]
    added: dict[str, Value] = {"epilogue_schedule": epilogue, "max_swizzle_size": 1}
    if schedule == COOPERATIVE:
        added["tile_scheduler"] = "Persistent"
    return Config(Gemm.name, {**config.params, **added})


def _is_grouped(config: Config) -> bool:
    """True when a config of `gemm` has a counterpart among the grouped kernels."""
    return (
        config["kernel_schedule"] in SCHEDULES
        and config["epilogue_schedule"] != NO_SMEM
        and config.get("tile_scheduler") != "StreamK"
    )
