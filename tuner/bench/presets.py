"""Measurements of this project's design documents, repeated kernel by kernel; and attention
in two kernels, the step that they named as the next one.

They tried tiles of the GEMMs of three-kernel attention and threads of its softmax. They compared
the fused kernels on four workloads, and one GEMM tile with CUTLASS's default. Each named tile takes
the schedule, stages and order of blocks that the cost model likes best with it; the default has
CUTLASS's.

`LENGTHS_NAME` is their other question: which way of computing attention is best at which length.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tuner.bench.suites import Suite
from tuner.config import Config, Value
from tuner.errors import ConfigError
from tuner.families import families_of, family
from tuner.families.base import Family, group_by_kernels
from tuner.families.collective import COOPERATIVE, NO_SMEM
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem, SoftmaxProblem

#: tile_m, tile_n, tile_k.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = (
    (64, 128, 64),
    (64, 64, 32),
    (64, 128, 32),
    (64, 256, 32),
    (128, 64, 32),
    (128, 256, 64),
)
THREADS = (16, 32, 256)
"""Softmax threads a row."""
STREAMS = (1, 4)
"""Number of streams over which heads that are launched one by one are distributed."""
TILED = AttentionProblem(1024, 1024, 64)
"""Workload for the comparison of tiles."""
#: The documents' best GEMM: tile, cluster_m, cluster_n.
GEMM: tuple[Tile, int, int] = ((128, 256, 64), 2, 1)
#: The tile without a cluster that CUTLASS's examples begin with, and what its CollectiveBuilder
#: makes of it where schedules and stages are left to it: a cooperative main loop where tile_m is
#: not 64 (gemm/collective/builders/sm90_gmma_builder.inl, KernelScheduleAuto), an epilogue without
#: shared memory (epilogue/collective/builders/sm90_builder.inl, EpilogueScheduleAuto), all the
#: stages that fit; the scheduler's defaults are no swizzle and, of as many tiles along M as along
#: N, the order along N (gemm/kernel/tile_scheduler_params.h).
DEFAULT = Config(
    "gemm",
    {
        **{"tile_m": 128, "tile_n": 128, "tile_k": 64, "cluster_m": 1, "cluster_n": 1},
        "kernel_schedule": COOPERATIVE,
        "epilogue_schedule": NO_SMEM,
        "swap_ab": False,
        "tile_scheduler": "Persistent",
        "raster_order": "AlongN",
        "max_swizzle_size": 1,
    },
)
NAME = "design-documents"
LENGTHS_NAME = "sequence-lengths"
LENGTHS = tuple(2**power for power in range(7, 16))
"""128 to 32768."""
UNFUSED = "unfused"
#: Parameters of each of the two kernels that name it.
_SHOWN = ("groups", "blocks_per_sm", "buffers")


def three_kernels(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Every tile has 32 softmax threads a row. The first tile also has the other counts, and each
    head launched by itself, on one stream and on several.

    The product with V has tiles no wider than its output, the head dimension.
    """
    if problem != TILED:
        return {}
    variants = [(tile, 32) for tile in TILES] + [(TILES[0], n) for n in THREADS if n != 32]
    configs: dict[str, Config | None] = {}
    for (m, n, k), threads in variants:
        label = f"three kernels {m}x{n}x{k}, softmax {threads}"
        configs[label] = _three_kernels(TILED, gpu, (m, n, k), threads)
    for streams in STREAMS:
        dealt = "one stream" if streams == 1 else f"{streams} streams"
        label = f"three kernels {'x'.join(map(str, TILES[0]))}, a head a launch, {dealt}"
        configs[label] = _three_kernels(TILED, gpu, TILES[0], 32, streams)
    return {label: config for label, config in configs.items() if config is not None}


def _three_kernels(
    problem: AttentionProblem, gpu: Gpu, tile: Tile, threads: int, streams: int = 0
) -> Config | None:
    """All heads a launch, each kernel begun before its predecessor ends, or with `streams` a head
    a launch, dealt over these; None where illegal.
    """
    member = _of_kind(problem, "three kernels")
    stages: dict[str, Config] = {}
    for name, stage in member.stages(problem).items():
        if isinstance(stage, SoftmaxProblem):
            softmax = _cheapest(stage, gpu, {"threads_per_row": threads})
        elif isinstance(stage, GemmProblem):
            m, n, k = tile
            softmax = _cheapest(stage, gpu, _tile((m, min(n, stage.n), k)))
        if softmax is None:
            return None
        stages[name] = softmax
    heads = 1 if streams else problem.batch * problem.heads_q
    params: dict[str, Value] = {"heads_per_launch": heads, "pdl": not streams, "in_place": True}
    if streams > 1:
        params["streams"] = streams
    config = Config(member.name, params, stages)
    return None if member.violations(problem, config, gpu) else config


def two_kernels(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """Every set of kernels of the space, all heads and rows a launch, each kernel begun before its
    predecessor ends and after it. Groups, blocks an SM and buffers name a kernel.
    """
    member = _of_kind(problem, "two kernels")
    configs: dict[str, Config] = {}
    for group in group_by_kernels(member, member.space(problem, gpu)):
        whole = [config for config in group if config["splits"] == 1]
        most = max(config["heads_per_launch"] * config["rows_per_launch"] for config in whole)
        for config in whole:
            if config["heads_per_launch"] * config["rows_per_launch"] == most:
                configs[_two_kernels_label(config)] = config
    return configs


def _of_kind(problem: Problem, kind: str) -> Family:
    return next(member for member in families_of(problem.op).values() if member.kind == kind)


def _two_kernels_label(config: Config) -> str:
    stages = [
        name.removesuffix(f"_{_SHOWN[0]}") for name in config.params if name.endswith(_SHOWN[0])
    ]
    parts = [
        f"{stage} " + "/".join(str(config[f"{stage}_{name}"]) for name in _SHOWN)
        for stage in stages
    ]
    return f"two kernels {config['tile_n']}, {', '.join(parts)}{', pdl' if config['pdl'] else ''}"


def gemms(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """The documents' tile and CUTLASS's default, for square problems."""
    tile, cluster_m, cluster_n = GEMM
    cluster = {"cluster_m": cluster_m, "cluster_n": cluster_n}
    label = f"gemm {'x'.join(map(str, tile))} cluster {cluster_m}x{cluster_n}"
    configs = {label: _cheapest(problem, gpu, {**_tile(tile), **cluster})}
    configs["default 128x128x64 cluster 1x1, Auto"] = DEFAULT
    return {label: config for label, config in configs.items() if config is not None}


def _tile(tile: Tile) -> dict[str, Value]:
    return dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True))


def _cheapest(problem: Problem, gpu: Gpu, params: Mapping[str, Value]) -> Config | None:
    """Legal config with the least estimate among those of the space with these parameters set; None
    when none is legal.
    """
    member = family(problem.op)
    changed = {
        Config(member.name, {**config.params, **params})
        for config in member.space(problem, gpu)
        if not config.get("swap_ab", False)
    }
    legal = [config for config in changed if not member.violations(problem, config, gpu)]
    return min(legal, key=lambda c: (member.predict_us(problem, c, gpu), c.digest), default=None)


def one_of_each(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """One kernel of every own family over all lengths, if possible: the one with the least estimate
    at `TILED`, or at the problem. Fallback families also take part; one for any GPU only when no
    family was made for this one.
    """
    configs = {}
    serving = [m for m in families_of(problem.op).values() if not m.supports(problem, gpu)]
    own = [m for m in serving if not m.is_vendor]
    for member in [m for m in own if m.capabilities] or own:
        for place in (TILED, problem):
            config = _first_choice(member.name, place, gpu)
            if config is not None and not member.violations(problem, config, gpu):
                configs[f"{member.name} of {place.label()}"] = config
                break
    return configs


@cache
def _first_choice(name: str, problem: Problem, gpu: Gpu) -> Config | None:
    """Config with a family's least estimate; None for an empty space."""
    member = family(name)
    return next(iter(member.seeds(problem, gpu, member.space(problem, gpu), 1)), None)


_LAUNCHED = (Regime("stream", "warm"), Regime("chained", "warm"), Regime("eager", "warm"))
PRESETS: dict[str, tuple[Suite, ...]] = {
    NAME: (
        Suite(
            NAME,
            "the workloads of the design documents; graphs, plain launches, several streams",
            (
                TILED,
                AttentionProblem(2048, 2048, 64, 16),
                AttentionProblem(512, 512, 64),
                AttentionProblem(8192, 8192, 64, 1, 8),
            ),
            _LAUNCHED,
            against=("cudnn", "flash2", "efficient", "flash3", "flash4", "naive"),
            named=three_kernels,
        ),
        Suite(
            NAME,
            "their GEMM tile, and CUTLASS's default",
            (GemmProblem(4096, 4096, 4096), GemmProblem(8192, 8192, 8192)),
            (Regime("stream", "cold"), Regime("eager", "cold")),
            against=(),
            named=gemms,
        ),
    ),
    LENGTHS_NAME: (
        Suite(
            LENGTHS_NAME,
            "one problem at nine lengths: every way of computing it, the vendors' and ours",
            tuple(AttentionProblem(n, n, TILED.head_dim) for n in LENGTHS),
            _LAUNCHED[:1],
            rounds=10,  # up to a tenth of a second a kernel
            against=("cudnn", "flash2", "efficient", "flash3", "flash4", "naive"),
            named=one_of_each,
        ),
    ),
    UNFUSED: (
        Suite(
            UNFUSED,
            "attention in two kernels, each set of them; alone, together, and between launches",
            (TILED,),
            _LAUNCHED[:1],
            against=("cudnn", "naive"),
            named=two_kernels,
        ),
    ),
}


def preset(name: str, op: str) -> Suite:
    """Part of a preset for an operation.

    Raises:
        ConfigError: when there is none; lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset '{name}' is not known (allowed: {', '.join(PRESETS)})")
    for suite in PRESETS[name]:
        if suite.op == op:
            return suite
    allowed = ", ".join(suite.op for suite in PRESETS[name])
    raise ConfigError(f"preset '{name}' has nothing for {op} (allowed: {allowed})")
