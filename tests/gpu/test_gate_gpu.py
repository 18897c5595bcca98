"""The gate's kernels against numpy in float64, and the stopwatch against a copy of known size."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tuner.families.base import KernelSpec
from tuner.measure import stopwatch
from tuner.measure.bursts import Entrant
from tuner.measure.device import (
    Device,
    Pool,
    detect,
    read_clocks,
)
from tuner.measure.gate import REFERENCE, Gate, inputs
from tuner.measure.gate.inputs import kinds_of, scale_of
from tuner.measure.stopwatch import Stopwatch
from tuner.measure.subjects import Bound, Subject
from tuner.measurement import Regime, Status
from tuner.problem import (
    E4M3,
    EPILOGUES,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Operand,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytestmark = pytest.mark.gpu

PROBLEMS = [
    AttentionProblem(200, 300, 72, batch=2, heads_q=4, heads_kv=2),
    AttentionProblem(190, 190, 128, 1, 4, 1, True, "bfloat16", "bshd"),
    AttentionProblem(130, 60, 8, heads_q=2, is_causal=True, layout="bshd"),
    AttentionProblem(1, 700, 256, heads_q=2),
    AttentionProblem(200, 300, 80, batch=2, heads_q=4, heads_kv=2, dtype=E4M3),
    AttentionProblem(190, 190, 128, heads_q=2, is_causal=True, dtype=E4M3, layout="bshd"),
    AttentionProblem.parse("B=2,H=4,HKV=2,SQ=300,SKV=200,D=64,left=70,right=9,softcap=20"),
    AttentionProblem.parse("H=2,S=190,D=64,causal=1,window=65,dtype=bf16"),
    AttentionProblem.parse("H=2,SQ=300,SKV=60,D=8,left=100"),
    AttentionProblem.parse("B=2,H=4,HKV=2,SQ=130,SKV=203,D=64,bias=b"),
    AttentionProblem.parse("B=2,H=4,S=190,D=64,causal=1,softcap=20,bias=bh,dtype=bf16"),
    AttentionProblem.parse("H=3,SQ=200,SKV=130,D=8,bias=h"),
    GemmProblem(m=200, n=150, k=300, batch=2),
    GemmProblem(200, 150, 300, 2, "bfloat16", "float32", "col", "row"),
    GemmProblem(m=65, n=130, k=33, layout_b="row"),
    GemmProblem(m=1, n=64, k=7, layout_a="col"),
    *(GemmProblem(70, 90, 40, epilogue=epilogue) for epilogue in EPILOGUES),
    GemmProblem(33, 50, 40, 2, "bfloat16", "float32", epilogue="bias_residual"),
    GemmProblem(33, 50, 40, 2, "bfloat16", epilogue="bias_gelu"),
    SwigluProblem(70, 96, 40),
    GroupedGemmProblem(5, 70, 96, 40, sizes="zipf"),
    GroupedGemmProblem(4, 33, 64, 72, sizes="sparse", dtype="bfloat16"),
    SwigluProblem(33, 64, 72, dtype="bfloat16", weights="concatenated"),
    SoftmaxProblem(rows=120, cols=700, batch=2, query_rows=60, is_causal=True),
    SoftmaxProblem(rows=33, cols=1000, dtype="bfloat16"),
]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE]


def read(device: Device, pointer: int, operand: Operand, dtype: str | None = None) -> Any:
    """An operand as float64, in its logical shape."""
    name = dtype or operand.dtype
    raw = {
        "float16": np.float16,
        "bfloat16": np.uint16,
        "float32": np.float32,
        "int32": np.int32,
        E4M3: np.uint8,
    }[name]
    width = np.dtype(raw).itemsize
    flat = np.frombuffer(device.read(pointer, operand.elements * width), raw)
    strides = [stride * width for stride in operand.strides]
    array = np.lib.stride_tricks.as_strided(flat, operand.shape, strides)
    if name == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if name == E4M3:
        array = e4m3_values()[array]
    return array.astype(np.float64)


def e4m3_values() -> Any:
    """Of each byte: sign, 4 bits of exponent biased by 7, 3 of mantissa; no infinity, one NaN."""
    byte = np.arange(256)
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(byte & 127 == 127, np.nan, np.where(sign, -values, values))


def write(device: Device, pointer: int, operand: Operand, values: Any) -> None:
    """The inverse of `read`: rounded to the operand's type."""
    if operand.dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        values = values.astype(operand.dtype)
    memory = np.empty(operand.elements, values.dtype)
    strides = [stride * values.itemsize for stride in operand.strides]
    np.lib.stride_tricks.as_strided(memory, operand.shape, strides)[...] = values
    device.write(pointer, memory.tobytes())


def activated(activation: str, x: Any) -> Any:
    match activation:
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            return x * np.vectorize(statistics.NormalDist().cdf)(x)
        case "gelu_tanh":
            return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case "silu":
            return x / (1 + np.exp(-x))
        case _:
            return x


def expected(problem: Any, inputs: list[Any], scale: float) -> Any:
    if problem.op == "gemm":
        product = inputs[0] @ inputs[1] * scale + (inputs[2] if problem.has_bias else 0)
        residual = inputs[-1] if problem.has_residual else 0
        return activated(problem.activation, product) + residual
    if problem.op == "swiglu":
        gate, up = (inputs[0] @ half.reshape(problem.n, problem.k).T for half in inputs[1])
        return activated("silu", gate) * up
    if problem.op == "grouped_gemm":
        a, b, offsets = inputs
        ends = zip(*(offsets.astype(int)[i : len(offsets) - 1 + i] for i in (0, 1)), strict=True)
        return np.concatenate([a[s:e] @ one.T for (s, e), one in zip(ends, b, strict=True)])
    if problem.op == "softmax":
        scores, columns = inputs[0] * scale, np.arange(problem.cols)
        rows = np.arange(problem.rows) % problem.query_rows
    else:
        *inputs, modifiers = *inputs[:3], inputs[3:]
        if problem.dtype == E4M3:
            inputs = [x * f[..., None, None] for x, f in zip(inputs, modifiers, strict=True)]
        repeat = problem.heads_q // problem.heads_kv
        key, value = (np.repeat(x, repeat, axis=1) for x in inputs[1:])
        scores = inputs[0] @ key.swapaxes(2, 3) * scale
        rows, columns = np.arange(problem.seqlen_q), np.arange(problem.seqlen_kv)
        if problem.softcap:
            scores = problem.softcap * np.tanh(scores / problem.softcap)
        if problem.bias:
            scores = scores + modifiers[0]
        if problem.window_left >= 0:
            scores = np.where(columns < rows[:, None] - problem.window_left, -np.inf, scores)
        if problem.window_right >= 0:
            scores = np.where(columns > rows[:, None] + problem.window_right, -np.inf, scores)
    if problem.is_causal:
        scores = np.where(columns > rows[:, None], -np.inf, scores)
    # A query that sees no key has zeros: not 0 / 0 of infinite scores.
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return weights if problem.op == "softmax" else weights @ value


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.op} {problem.label()}")
def test_the_reference_is_numpy_s(device: Device, gate: Gate, problem: Problem) -> None:
    gate.open(problem, 11)
    output = problem.output
    for kind in kinds_of(problem):
        gate.load(kind)
        given = [read(device, gate.pointers[o.name], o) for o in problem.operands[:-1]]
        wanted = expected(problem, given, scale_of(problem, kind))
        got = read(device, gate.reference(kind), output, "float32")
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, kind

        gate.arm()
        assert "never written" in gate.examine().log
        write(device, gate.pointers[output.name], output, wanted)
        verdict = gate.examine()
        assert verdict.status is Status.OK, verdict.log
        middle = tuple(extent // 2 for extent in output.shape)
        for value, status in ((3e4, Status.WRONG_RESULT), (np.nan, Status.NOT_FINITE)):
            spoiled = wanted.copy()
            spoiled[middle] = value
            write(device, gate.pointers[output.name], output, spoiled)
            verdict = gate.examine()
            assert verdict.status is status
            assert str(middle) in verdict.log


def test_a_stray_byte_is_seen_on_both_sides(device: Device, gate: Gate) -> None:
    problem = GemmProblem(m=64, n=64, k=64)
    gate.open(problem, 3)
    gate.load("random")
    for offset in (-2, problem.output.bytes):
        gate.arm()
        device.write(gate.pointers["d"] + offset, b"\1\1")
        verdict = gate.examine()
        assert verdict.status is Status.OUT_OF_BOUNDS
        assert verdict.log == "random inputs: 2 bytes beside 'd' were written"


def test_inputs_are_normal_fresh_and_repeatable(device: Device, gate: Gate) -> None:
    problem = GemmProblem(m=512, n=512, k=512)
    operand = problem.operands[0]

    def draw(seed: int) -> Any:
        gate.open(problem, seed)
        gate.load("random")
        return read(device, gate.pointers["a"], operand)

    first, second = draw(1), draw(2)
    assert abs(first.mean()) < 0.01 and abs(first.std() - 1) < 0.01
    assert abs((first**4).mean() - 3) < 0.1  # normal, not uniform
    assert abs((first * second).mean()) < 0.01
    assert (draw(1) == first).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_one_of_a_few_consecutive_rows_has_huge_scores(
    device: Device, gate: Gate, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The others are zero, and which one it is differs."""
    problem = AttentionProblem.parse(f"B=2,H=3,SQ=210,SKV=64,D=64,layout={layout}")
    monkeypatch.setattr(inputs, "HUGE_PRODUCTS", problem.flops // 4 // 7)
    assert inputs.huge_every(problem) == 7
    gate.open(problem, 5)
    gate.load("huge_scores")
    query = read(device, gate.pointers["query"], problem.operands[0])
    size = np.abs(query.reshape(-1, 7, 64))  # B, H and 30 times 7 queries
    assert ((size > 0).all(-1).sum(-1) == 1).all()
    assert ((size > 0).any(-1).sum(-1) == 1).all()
    assert len(np.unique(size[..., 0].argmax(-1))) == 7


class Copy(Subject):
    """A copy on the device: bytes and bandwidth are known."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Bound:
        def copy() -> None:
            self._device.copy(buffers["to"], buffers["from"], buffers["bytes"])

        return Bound(copy, buffers["from"])

    def stream(self) -> int:
        return self._device.stream

    def capture(self, calls: Any) -> Any:
        return self._device.capture(lambda: stopwatch._all(calls))


@pytest.mark.parametrize("launch", ["chained", "eager"])
def test_a_copy_takes_as_long_as_its_bytes(device: Device, launch: str) -> None:
    gpu = detect()
    assert gpu is not None
    size = 1 << 30
    with Pool(device) as pool:
        buffers = {"from": pool.allocate(size), "to": pool.allocate(size), "bytes": size}
        subject = Copy(device)
        watch = Stopwatch(device, Regime(launch, "warm"))
        burst = watch.prepare(Entrant(subject, [subject.bind(buffers, 1.0)]))
        quick, _ = watch.quick(burst)
        [final], clocks = watch.final([burst], 20, lambda index: None, careful=False)
        burst.close()
        watch.close()
    for timing in (quick, final):
        rate = 2 * size / timing.median_us / 1e3  # GB/s, read and written
        assert 0.05 * gpu.memory_gbs < rate < 1.02 * gpu.memory_gbs
    assert final.rounds >= 20
    assert clocks.sm_mhz > 0


def test_clocks_are_readable() -> None:
    seen = read_clocks()
    assert 100 < seen.sm_mhz < 4000 and 0 < seen.temperature_c < 120 and seen.power_w > 10
