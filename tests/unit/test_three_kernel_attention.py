"""Three-kernel attention: its launches are carried out by a numpy interpreter of the two kernels'
interfaces (offsets, strides, chunks, overlap) and compared with attention computed directly."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from tuner.config import Config
from tuner.families.base import SCRATCH, KernelSpec, Launch, Ref, group_by_kernels
from tuner.families.gemm import Gemm
from tuner.families.softmax import Softmax
from tuner.families.three_kernel_attention import (
    MAX_COMBINATIONS,
    ThreeKernelAttention,
    launchable_heads,
)
from tuner.hardware import DEFAULT_GPU
from tuner.problem import DTYPE_BYTES, AttentionProblem, GemmProblem, SoftmaxProblem

FAMILY = ThreeKernelAttention()
GUARD = 64
"""Bytes of NaN before and after each buffer."""


def read(buffer: np.ndarray, offsets: np.ndarray, dtype: str) -> np.ndarray:
    """Elements at byte `offsets` as float64."""
    if dtype == "float32":
        return buffer[offsets[..., None] + np.arange(4)].view(np.float32)[..., 0].astype(float)
    raw = buffer[offsets[..., None] + np.arange(2)]
    if dtype == "float16":
        return raw.view(np.float16)[..., 0].astype(float)
    return (raw.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32).astype(float)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to `dtype`, as bytes along a new last axis."""
    if dtype == "float16":
        return np.ascontiguousarray(values.astype(np.float16))[..., None].view(np.uint8)
    single = np.ascontiguousarray(values.astype(np.float32))
    if dtype == "float32":
        return single[..., None].view(np.uint8)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)[..., None].view(np.uint8)


@dataclass
class Memory:
    """Named buffers between guards; poisoned with NaN, writes counted."""

    sizes: Mapping[str, int]
    buffers: dict[str, np.ndarray] = field(init=False)
    writes: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = {n: np.full(s + 2 * GUARD, 0xFF, np.uint8) for n, s in self.sizes.items()}
        self.writes = {n: np.zeros(s, np.int64) for n, s in self.sizes.items()}

    def offsets(self, ref: Ref, elements: np.ndarray, width: int) -> np.ndarray:
        offsets = ref.offset_bytes + elements * width
        assert offsets.min() >= 0 and offsets.max() + width <= self.sizes[ref.operand], (
            f"{ref} reaches [{offsets.min()}, {offsets.max() + width}) of {self.sizes[ref.operand]}"
        )
        return offsets + GUARD

    def load(self, ref: Ref, elements: np.ndarray, dtype: str) -> np.ndarray:
        return read(
            self.buffers[ref.operand], self.offsets(ref, elements, DTYPE_BYTES[dtype]), dtype
        )

    def store(self, ref: Ref, elements: np.ndarray, values: np.ndarray, dtype: str) -> None:
        width = DTYPE_BYTES[dtype]
        places = self.offsets(ref, elements, width)[..., None] + np.arange(width)
        self.buffers[ref.operand][places] = encode(values, dtype)
        np.add.at(self.writes[ref.operand], places - GUARD, 1)


def run_gemm(memory: Memory, launch: Launch, variables: Mapping[str, object]) -> None:
    """templates/gemm.cu.j2 as its opening comment defines it."""
    m, n, k, batch, lda, ldb, ldd, batch_a, batch_b, batch_d = launch.integers[:10]
    a, b, d = launch.tensors
    index = np.arange(batch)[:, None, None]

    def elements(rows: int, cols: int, leading: int, step: int, layout: object) -> np.ndarray:
        row, col = np.arange(rows)[:, None], np.arange(cols)
        inner = row * leading + col if layout == "row" else row + col * leading
        assert leading >= (cols if layout == "row" else rows)
        return index * step + inner

    for ref, strides, width in (
        (a, (lda, batch_a), 2),
        (b, (ldb, batch_b), 2),
        (d, (ldd, batch_d), 0),
    ):
        width = width or DTYPE_BYTES[str(variables["dtype_d"])]
        sizes = (ref.offset_bytes, *(s * width for s in (strides if batch > 1 else strides[:1])))
        assert all(size % 16 == 0 for size in sizes), f"TMA alignment of {ref}, {strides}"
    dtype = str(variables["dtype"])
    left = memory.load(a, elements(m, k, lda, batch_a, variables["layout_a"]), dtype)
    right = memory.load(b, elements(k, n, ldb, batch_b, variables["layout_b"]), dtype)
    places = elements(m, n, ldd, batch_d, variables["layout_d"])
    memory.store(d, places, launch.scalars[0] * (left @ right), str(variables["dtype_d"]))


def run_softmax(memory: Memory, launch: Launch, variables: Mapping[str, object]) -> None:
    """templates/softmax.cu.j2; a tile of a row is read, then written, as between its barriers."""
    rows, cols, stride_scores, stride_probabilities, query_rows, _ = launch.integers
    scores, probabilities = launch.tensors
    scale, factor = launch.scalars
    width, threads, held = (
        int(str(variables[name])) for name in ("vector_width", "threads_per_row", "vectors")
    )
    passes, dtype = variables["passes"], str(variables["dtype"])
    tile = cols if passes == 1 else min(cols, width * threads * held)
    assert passes != 1 or cols <= width * threads * held
    assert cols % width == 0 and stride_scores % width == 0 and stride_probabilities % width == 0
    if scores == probabilities:
        assert stride_probabilities == 2 * stride_scores
    row = np.arange(rows)[:, None]

    def scaled(first: int, last: int) -> np.ndarray:
        columns = np.arange(first, last)
        values = memory.load(scores, row * stride_scores + columns, "float32") * scale
        hidden = columns > row % query_rows if variables["is_causal"] else np.zeros((rows, 1), bool)
        return np.where(hidden, -np.inf, values)

    values = scaled(0, cols)
    maximum = values.max(axis=1, keepdims=True)
    total = np.exp(values - maximum).sum(axis=1, keepdims=True)
    for first in range(0, cols, tile):
        last = min(first + tile, cols)
        written = np.exp(scaled(first, last) - maximum) * (factor / total)
        columns = row * stride_probabilities + np.arange(first, last)
        memory.store(probabilities, columns, written, dtype)


def run(
    problem: AttentionProblem,
    config: Config,
    inputs: Mapping[str, np.ndarray],
    scale: float,
    order=list,
):
    """Carry out `launches`, in the order that `order` puts them in; gives the output as float64
    and the memory.
    """
    sizes = {operand.name: operand.bytes for operand in problem.operands}
    memory = Memory({**sizes, SCRATCH: FAMILY.scratch_bytes(problem, config)})
    for operand in problem.operands[:-1]:
        memory.store(Ref(operand.name), offsets_of(operand), inputs[operand.name], problem.dtype)
        memory.writes[operand.name][:] = 0
    kernels: dict[str, KernelSpec] = FAMILY.kernels(problem, config)
    for launch in order(FAMILY.launches(problem, config, scale)):
        spec = kernels[launch.kernel]
        {"gemm.cu.j2": run_gemm, "softmax.cu.j2": run_softmax}[spec.template](
            memory, launch, spec.variables
        )
    out = memory.load(Ref("out"), offsets_of(problem.output), problem.dtype)
    return out, memory


def offsets_of(operand) -> np.ndarray:
    axes = np.meshgrid(*(np.arange(extent) for extent in operand.shape), indexing="ij")
    return sum(axis * stride for axis, stride in zip(axes, operand.strides, strict=True))


def random_inputs(problem: AttentionProblem, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        operand.name: read_back(rng.standard_normal(operand.shape), problem.dtype)
        for operand in problem.operands[:-1]
    }


def read_back(values: np.ndarray, dtype: str) -> np.ndarray:
    raw = encode(values, dtype).reshape(-1)
    return read(raw, np.arange(values.size) * 2, dtype).reshape(values.shape)


def attention(problem: AttentionProblem, inputs: Mapping[str, np.ndarray], scale: float):
    group = problem.heads_q // problem.heads_kv
    key, value = (inputs[name].repeat(group, axis=1) for name in ("key", "value"))
    scores = scale * inputs["query"] @ key.swapaxes(-1, -2)
    if problem.is_causal:
        visible = np.tril(np.ones((problem.seqlen_q, problem.seqlen_kv), bool))
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value


def gemm(**changes: object) -> Config:
    params: dict[str, object] = {
        "tile_m": 64,
        "tile_n": 64,
        "tile_k": 64,
        "cluster_m": 1,
        "cluster_n": 1,
        "kernel_schedule": "TmaWarpSpecializedPingpong",
        "epilogue_schedule": "TmaWarpSpecialized",
        "raster_order": "AlongM",
        "max_swizzle_size": 1,
        "swap_ab": False,
    }
    return Config("gemm", {**params, **changes})


def softmax(threads: int = 32, width: int = 4, rows: int = 4, passes: int = 1) -> Config:
    names = ("threads_per_row", "vector_width", "rows_per_block", "passes")
    return Config("softmax", dict(zip(names, (threads, width, rows, passes), strict=True)))


STAGES = {"qk": gemm(), "softmax": softmax(), "pv": gemm()}


def config(heads: int, pdl: bool = True, in_place: bool = True, **stages: Config) -> Config:
    params = {"heads_per_launch": heads, "pdl": pdl, "in_place": in_place}
    return Config("three_kernel_attention", params, {**STAGES, **stages})


PROBLEMS = [
    "S=32,D=16,H=4,B=2",
    "S=32,D=16,H=4,B=2,causal=1",
    "S=32,D=16,H=4,B=2,causal=1,layout=bshd",
    "SQ=24,SKV=40,D=24,H=3,layout=bshd",
    "SQ=7,SKV=16,D=8,H=6,HKV=2,B=2",
    "SQ=7,SKV=16,D=8,H=6,HKV=2,B=2,causal=1",
    "SQ=16,SKV=24,D=8,H=4,HKV=1,B=3,causal=1,dtype=bf16",
    "SQ=16,SKV=24,D=8,H=4,HKV=2,B=2,causal=1,layout=bshd",
    "S=32,D=16,H=4,B=2,causal=1,layout=bshd_bhsd",
    "SQ=16,SKV=24,D=8,H=4,HKV=2,B=2,causal=1,layout=bshd_bhsd",
    "SQ=1,SKV=64,D=32,H=8,HKV=2,B=2",
    "SQ=48,SKV=16,D=16,H=2,causal=1,dtype=bf16",
]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("in_place", [True, False])
def test_the_launches_compute_attention(text: str, in_place: bool) -> None:
    problem = AttentionProblem.parse(text)
    inputs, scale = random_inputs(problem, seed=len(text)), 0.7 / math.sqrt(problem.head_dim)
    expected = attention(problem, inputs, scale)
    tolerance = 1e-3 if problem.dtype == "float16" else 8e-3
    heads = launchable_heads(problem)
    assert heads[-1] == 1
    for count in heads:
        chosen = config(count, in_place=in_place)
        assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
        out, memory = run(problem, chosen, inputs, scale)
        error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
        assert error < tolerance, f"heads_per_launch={count}: relative error {error}"
        assert (memory.writes["out"] == 1).all()
        assert not any(memory.writes[name].any() for name in ("query", "key", "value"))


@pytest.mark.parametrize("in_place", [True, False])
def test_heads_on_several_streams_do_not_meet(in_place: bool) -> None:
    """However the streams run beside each other: the last first, or a launch of each in turn."""
    problem = AttentionProblem.parse("SQ=16,SKV=24,D=8,H=4,HKV=2,B=2,causal=1")
    inputs = random_inputs(problem, seed=11)
    one = config(1, pdl=False, in_place=in_place)
    dealt = Config(one.family, {**one.params, "streams": 3}, one.stages)
    assert FAMILY.violations(problem, dealt, DEFAULT_GPU) == []
    assert FAMILY.scratch_bytes(problem, dealt) == 3 * FAMILY.scratch_bytes(problem, one)
    lanes = [launch.lane for launch in FAMILY.launches(problem, dealt, 1.0)]
    assert lanes == [chunk % 3 for chunk in range(8) for _ in range(3)]
    assert not any(launch.lane for launch in FAMILY.launches(problem, one, 1.0))

    def last_first(launches):
        return sorted(launches, key=lambda launch: -launch.lane)

    def in_turn(launches):
        of = [[x for x in launches if x.lane == lane] for lane in range(3)]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*of))
        return [launch for launch in turns if launch is not None]

    expected = attention(problem, inputs, 1.0)
    for order in (list, last_first, in_turn):
        out, memory = run(problem, dealt, inputs, 1.0, order)
        assert np.linalg.norm(out - expected) < 1e-3 * np.linalg.norm(expected)
        assert (memory.writes["out"] == 1).all()


@pytest.mark.parametrize(
    ("streams", "pdl", "said"),
    [
        (9, False, "streams=9 is out of range"),
        (0, False, "streams=0 is not known"),
        (2, True, "with pdl=True"),
    ],
)
def test_streams_that_cannot_be(streams: int, pdl: bool, said: str) -> None:
    one = config(1, pdl=pdl)
    dealt = Config(one.family, {**one.params, "streams": streams}, one.stages)
    (found,) = FAMILY.violations(AttentionProblem.parse(PROBLEMS[0]), dealt, DEFAULT_GPU)
    assert said in found


def error_of(text: str, chosen: Config, scale: float = 1.0, of_queries: float = 1.0) -> float:
    """Relative error of a config on random inputs."""
    problem = AttentionProblem.parse(text)
    assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
    inputs = random_inputs(problem, seed=3)
    inputs["query"] = inputs["query"] * of_queries
    out, _ = run(problem, chosen, inputs, scale)
    expected = attention(problem, inputs, scale)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("threads, width", [(16, 2), (16, 8), (32, 4), (256, 1)])
def test_softmax_configs_survive_the_overlap(
    passes: int, in_place: bool, threads: int, width: int
) -> None:
    chosen = softmax(threads, width, max(1, 64 // threads), passes)
    text = "SQ=8,SKV=1000,D=8,H=2,causal=1"
    assert error_of(text, config(2, in_place=in_place, softmax=chosen)) < 1e-3


@pytest.mark.parametrize("swap_qk", [True, False])
@pytest.mark.parametrize("swap_pv", [True, False])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_swapped_gemms(swap_qk: bool, swap_pv: bool, layout: str) -> None:
    chosen = config(2, qk=gemm(swap_ab=swap_qk), pv=gemm(swap_ab=swap_pv))
    assert error_of(f"SQ=24,SKV=40,D=16,H=4,B=2,layout={layout}", chosen, 0.3) < 1e-3


def test_long_rows_of_small_probabilities_and_large_scores_keep_their_digits() -> None:
    chosen = config(1, softmax=softmax(256, 8, 1, 2))
    assert error_of("SQ=1,SKV=262144,D=8,H=1", chosen, of_queries=0.25) < 1e-3
    assert error_of("S=64,D=64,H=2", config(2), 30 / 8) < 1e-3


def test_programmatic_launch_follows_only_own_kernels() -> None:
    problem = AttentionProblem.parse("S=32,D=16,H=4")
    for pdl in (True, False):
        launches = FAMILY.launches(problem, config(2, pdl=pdl), 1.0)
        assert [launch.kernel for launch in launches] == [
            "qk.gemm",
            "softmax.softmax",
            "pv.gemm",
        ] * 2
        assert [bool(launch.integers[-1]) for launch in launches] == [False, *[pdl] * 5]


def test_scratch_is_what_the_launches_use() -> None:
    problem = AttentionProblem.parse("S=32,D=16,H=4")
    inputs = random_inputs(problem, seed=0)
    for in_place, size in ((True, 2 * 32 * 32 * 4), (False, 2 * 32 * 32 * 6)):
        chosen = config(2, in_place=in_place)
        assert FAMILY.scratch_bytes(problem, chosen) == size
        _, memory = run(problem, chosen, inputs, 1.0)
        assert (memory.writes[SCRATCH] > 0).all()


def test_stages_are_one_launch_over_all_heads() -> None:
    problem = AttentionProblem.parse("B=2,H=6,HKV=2,SQ=8,SKV=16,D=24,causal=1,dtype=bf16")
    assert FAMILY.stages(problem) == {
        "qk": GemmProblem(24, 16, 24, 4, "bfloat16", "float32", "row", "col"),
        "softmax": SoftmaxProblem(24, 16, 4, 8, True, "bfloat16"),
        "pv": GemmProblem(24, 24, 16, 4, "bfloat16", "bfloat16", "row", "row"),
    }


def test_space_without_winners_is_legal_and_distinct() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert len(set(space)) == len(space)
    assert len(group_by_kernels(FAMILY, space)) <= MAX_COMBINATIONS
    assert {c["heads_per_launch"] for c in space} == {1, 2, 4, 8, 16}
    assert {(c["pdl"], c["in_place"]) for c in space} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    assert not any(FAMILY.violations(problem, c, DEFAULT_GPU) for c in space)


def test_winners_are_combined_best_first() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    gemms = [gemm(tile_n=n) for n in (128, 64, 32, 16)]
    softmaxes = [softmax(passes=passes) for passes in (2, 3, 1)]
    vendor = Config("vendor_softmax", {"kernel": "torch"})
    family = FAMILY.with_stages({"qk": gemms, "softmax": [vendor, *softmaxes], "pv": gemms[:1]})
    groups = group_by_kernels(family, family.space(problem, DEFAULT_GPU))
    ranks = [
        (gemms.index(g[0].stages["qk"]), softmaxes.index(g[0].stages["softmax"])) for g in groups
    ]
    assert ranks == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (2, 2)]
    assert FAMILY.with_stages({}).space(problem, DEFAULT_GPU) == FAMILY.space(problem, DEFAULT_GPU)
    seeds = family.seeds(problem, DEFAULT_GPU, family.space(problem, DEFAULT_GPU), len(groups) + 1)
    firsts = [family.compile_digest(seed) for seed in seeds]
    assert firsts[: len(groups)] == [family.compile_digest(group[0]) for group in groups]
    assert firsts[-1] == firsts[0] and seeds[-1] != seeds[0]


def test_stage_configs_that_share_a_kernel_share_the_digest() -> None:
    one, other = config(1), config(2, pv=gemm(raster_order="AlongN"))
    assert FAMILY.compile_digest(one) == FAMILY.compile_digest(other)
    assert FAMILY.compile_digest(one) != FAMILY.compile_digest(config(1, pv=gemm(tile_n=32)))


@pytest.mark.parametrize(
    "text, heads, reason",
    [
        ("S=32,D=16,H=4", 3, "heads_per_launch=3 does not divide B x H = 4"),
        ("S=32,D=16,H=4", 0, "heads_per_launch=0 is not known (allowed: 1 to 2147483647)"),
        ("S=32,D=16,H=12,HKV=3", 6, "neither divides nor is a multiple of a group of 4"),
        ("S=32,D=16,H=4,B=2,layout=bshd", 8, "does not divide H=4"),
        ("S=32,D=16,H=4,HKV=2,layout=bshd", 2, "are launched one by one"),
        ("S=33,D=16,H=4", 4, "seqlen_kv=33"),
        ("S=32,D=16,H=4,dtype=e4m3", 4, "takes no descale factors"),
        ("SQ=2147483647,SKV=8,D=8,H=2,HKV=1", 1, "M=4294967294 is out of range"),
    ],
)
def test_heads_that_cannot_be_one_launch(text: str, heads: int, reason: str) -> None:
    found = FAMILY.violations(AttentionProblem.parse(text), config(heads), DEFAULT_GPU)
    assert len(found) == 1 and reason in found[0]


def test_violations_name_the_stage_and_malformed_configs_do_not_raise() -> None:
    problem = AttentionProblem.parse("S=32,D=16,H=4")
    bad = config(4, softmax=softmax(threads=1024, rows=4), pv=gemm(tile_m=96))
    found = FAMILY.violations(problem, bad, DEFAULT_GPU)
    assert {text.split(":")[0] for text in found} == {"softmax", "pv"}
    (said,) = FAMILY.violations(problem, config(4, pv=gemm(tile_m=65)), DEFAULT_GPU)
    assert said.startswith("stage pv: tile_m=65 is not known (allowed: 32, 64, ")
    for malformed in (
        Config(FAMILY.name),
        Config(FAMILY.name, config(1).params, {"qk": gemm()}),
        Config(
            FAMILY.name, config(1).params, {**STAGES, "pv": Config("gemm", gemm().params, STAGES)}
        ),
        Config(FAMILY.name, {"heads_per_launch": True, "pdl": 1, "in_place": "yes", "x": 1}),
        Config(FAMILY.name, config(1).params, {**STAGES, "softmax": gemm()}),
    ):
        assert FAMILY.violations(problem, malformed, DEFAULT_GPU)
    assert FAMILY.violations(GemmProblem(8, 8, 8), config(1), DEFAULT_GPU)


def test_draw_changes_one_stage() -> None:
    problem, rng = AttentionProblem.parse("S=1024,D=64"), random.Random(1)
    space = FAMILY.space(problem, DEFAULT_GPU)
    members = {str(c.stages) for c in space}
    drawn = [FAMILY.draw(problem, DEFAULT_GPU, space, rng) for _ in range(30)]
    assert any(str(c.stages) not in members for c in drawn)
    for c in drawn:
        FAMILY.violations(problem, c, DEFAULT_GPU)
        assert set(c.stages) == {"qk", "softmax", "pv"}


def test_estimate_adds_the_stages_and_rewards_programmatic_launch() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    stages, families = FAMILY.stages(problem), {"qk": Gemm(), "softmax": Softmax(), "pv": Gemm()}
    parts = sum(f.predict_us(stages[n], STAGES[n], DEFAULT_GPU) for n, f in families.items())
    plain = FAMILY.predict_us(problem, config(16, pdl=False), DEFAULT_GPU)
    assert plain == pytest.approx(parts)
    assert parts - 2 < FAMILY.predict_us(problem, config(16), DEFAULT_GPU) < plain
