"""Calls behind an ordinary kernel, and elements against their row's scale, on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tuner.families import families_of
from tuner.families.peers import Vendor
from tuner.measure.bursts import Burst, Entrant, Sets, entrant
from tuner.measure.device import Device, Pool
from tuner.measure.gate import Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measure.kernel_times import device_us
from tuner.measure.predecessor import predecessor
from tuner.measure.stopwatch import Stopwatch
from tuner.measure.subjects import Bound, Subject, VendorSubject
from tuner.measure.tolerance import Limits, OutputComparison, limits_of
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, Operand, Problem, SwigluProblem

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytestmark = pytest.mark.gpu

HEADLINE = AttentionProblem.parse("S=1024,D=64")


@pytest.mark.parametrize("size", [1, 15, 16, 4099, 1 << 20])
def test_the_element_wise_kernel_copies_every_byte(device: Device, gate: Gate, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    with Pool(device) as pool:
        source, target = pool.allocate(size), pool.allocate(size + 64)
        device.write(source, data)
        device.fill8(target, 7, size + 64)
        gate.copying(source, target, size, lambda: device.stream)()
        assert device.read(target, size + 64) == data + b"\x07" * 64


class Copy(Subject):
    """The gate's element-wise kernel over 64 MB: an ordinary kernel, alike behind any other."""

    size = 64 << 20

    def __init__(self, device: Device, gate: Gate) -> None:
        self._device, self._gate = device, gate

    def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Bound:
        source, target = buffers["from"], buffers["to"]
        return Bound(self._gate.copying(source, target, self.size, self.stream), source)

    def capture(self, calls: Iterable[Any]) -> Any:
        return self._device.capture(lambda: [call() for call in calls] and None)

    def stream(self) -> int:
        return self._device.stream


def test_an_ordinary_kernel_takes_as_long_behind_itself_as_behind_another(
    device: Device, gate: Gate
) -> None:
    us = {}
    with Pool(device) as pool:
        buffers = {"from": pool.allocate(Copy.size), "to": pool.allocate(Copy.size)}
        lead = [pool.allocate(2 << 20), pool.allocate(2 << 20)]
        subject = Copy(device, gate)
        call = subject.bind(buffers, 1.0)
        before = gate.copying(lead[0], lead[1], 2 << 20, subject.stream)
        for launch in ("stream", "chained"):
            watch = Stopwatch(device, Regime(launch, "warm"))
            burst = watch.prepare(Entrant(subject, [call], [before] if launch == "stream" else ()))
            [timing], _ = watch.final([burst], 20, lambda index: None, careful=False)
            us[launch] = timing.median_us
            burst.close()
            watch.close()
    assert us["stream"] == pytest.approx(us["chained"], rel=0.1)


@contextmanager
def timed(
    device: Device, gate: Gate, problem: Problem, regime: Regime
) -> Iterator[tuple[Stopwatch, Sets]]:
    """A stopwatch of the regime, and a set of random inputs behind its predecessor."""
    gate.open(problem, 1)
    gate.load("random")
    watch = Stopwatch(device, regime)
    sets = Sets(
        device,
        problem,
        gate.pointers,
        1,
        lambda pool: predecessor(regime, device, gate, problem, pool),
    )
    try:
        yield watch, sets
    finally:
        sets.close()
        watch.close()


@contextmanager
def prepared(
    device: Device, gate: Gate, problem: Problem, regime: Regime, kernel: str
) -> Iterator[tuple[Stopwatch, Burst]]:
    """A vendor's kernel, ready to be timed."""
    pytest.importorskip("torch", reason="torch is not installed")
    members = [m for m in families_of(problem.op).values() if isinstance(m, Vendor)]
    member = next(m for m in members if kernel in m.offered)
    with timed(device, gate, problem, regime) as (watch, sets):
        subject = VendorSubject(device, member, problem, member.preferred(problem, kernel))
        try:
            burst = watch.prepare(entrant(subject, sets, {}, scale_of(problem)))
            yield watch, burst
            burst.close()
        finally:
            subject.close()


@pytest.mark.parametrize("launch", ["chained", "stream", "stream_gemm"])
def test_a_vendor_s_kernel_is_timed_behind_each_predecessor(
    device: Device, gate: Gate, launch: str
) -> None:
    with prepared(device, gate, HEADLINE, Regime(launch, "warm"), "flash2") as (watch, burst):
        timing, _ = watch.quick(burst)
        kernel = device_us(device, burst)
    # Launch and cold instructions are the difference; never less than half of it is the kernel.
    assert 0.5 * timing.median_us < kernel < 1.2 * timing.median_us
    assert 10 < timing.median_us < 100


def test_the_predecessor_leaves_the_inputs_as_they_were(device: Device, gate: Gate) -> None:
    regime, query = Regime("stream", "warm"), HEADLINE.operands[0]
    with prepared(device, gate, HEADLINE, regime, "flash2") as (_, burst):
        before = device.read(gate.pointers["query"], query.bytes)
        burst.enqueue()
        burst.enqueue_alone()
        assert device.read(gate.pointers["query"], query.bytes) == before


def test_a_vendor_s_graph_reads_its_copies_after_another_s_capture(
    device: Device, gate: Gate
) -> None:
    """PyTorch wants the weights in another layout. Before a capture it gives unused memory back to
    the device, so a copy that only a graph's addresses name would be unmapped.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    problem, regime = SwigluProblem(64, 4096, 2048), Regime("stream", "warm")
    (member,) = (m for m in families_of(problem.op).values() if isinstance(m, Vendor))
    kernels = [member.preferred(problem, kernel) for kernel in ("torch", "torch_interleaved")]
    with timed(device, gate, problem, regime) as (watch, sets):
        subjects = [VendorSubject(device, member, problem, kernel) for kernel in kernels]
        bursts = [watch.prepare(entrant(subject, sets, {}, 1.0)) for subject in subjects]
        bursts[0].enqueue()
        device.wait()  # raises on an illegal access
        for burst, subject in zip(bursts, subjects, strict=True):
            burst.close()
            subject.close()


def compared(
    gate: Gate, written: int, reference: int, output: Operand, limits: Limits
) -> OutputComparison:
    answer = gate._kernels.compare(written, reference, output, limits)
    gate.collect()
    return OutputComparison.unpack(answer.data, output.elements)


def test_a_row_that_was_left_out_of_small_outputs_is_seen(device: Device, gate: Gate) -> None:
    problem = AttentionProblem.parse("H=2,SQ=512,SKV=8192,D=64,dtype=e4m3")
    output = problem.output
    assert output.dtype == "bfloat16"
    drawn = np.random.default_rng(3).normal(0, 0.01, output.elements).astype(np.float32)
    bits = drawn.view(np.uint32) & 0xFFFF0000
    halves = (bits >> 16).astype(np.uint16).reshape(-1, 64)
    with Pool(device) as pool:
        reference, written = pool.allocate(4 * output.elements), pool.allocate(output.bytes)
        device.write(reference, bits.astype(np.uint32).tobytes())
        device.write(written, halves.tobytes())
        limits = limits_of(problem)
        assert compared(gate, written, reference, output, limits).beyond == 0
        halves[137] = 0
        device.write(written, halves.tobytes())
        old = Limits(limits.frobenius, 0.25, 0.0)
        assert compared(gate, written, reference, output, old).beyond == 0
        seen = compared(gate, written, reference, output, limits)
        assert seen.beyond > 20 and seen.first // 64 == 137
