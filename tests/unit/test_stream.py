"""Calls behind an ordinary kernel: what is captured, and what is taken off; on a clock of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from clocked import FakeDevice

from tuner.errors import BenchmarkError
from tuner.measure import device as device_module
from tuner.measure import predecessor
from tuner.measure.bursts import Burst, Entrant, Replay, Sets, entrant, times_of
from tuner.measure.predecessor import ElementWise, Predecessor, ProductPredecessor, largest_factor
from tuner.measure.stopwatch import Stopwatch
from tuner.measure.subjects import Bound, Subject
from tuner.measurement import Clocks, Regime
from tuner.problem import AttentionProblem, GemmProblem

STREAM = Regime("stream", "warm")
GEMM = GemmProblem(64, 128, 256)


class Memory(FakeDevice):
    """Addresses without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, int, int]] = []
        self.next = 1 << 20

    def allocate(self, size: int) -> int:
        self.next += 1 << 20
        return self.next

    def free(self, pointer: int) -> None:
        return

    def copy(self, target: int, source: int, size: int) -> None:
        self.copied.append((target, source, size))


class Graph:
    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()


class Timed(Subject):
    """A kernel of 11 us behind an ordinary one, and of 4 us behind a copy of itself."""

    def __init__(self, clock: FakeDevice) -> None:
        self.clock, self.last, self.log = clock, "", list[str]()

    def run(self, name: str, us: float) -> None:
        self.clock.now += us
        self.last = name
        self.log.append(name)

    def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Bound:
        def call() -> None:
            self.run("call", 4.0 if self.last == "call" else 11.0)

        return Bound(call, buffers["a"])

    def capture(self, calls: Iterable[Callable[[], Any]]) -> Graph:
        return Graph(list(calls))

    def stream(self) -> int:
        return 77


class Ordinary(Predecessor):
    def __init__(self, subject: Timed) -> None:
        self.subject = subject

    def bind(self, call: Bound, subject: Subject) -> Callable[[], None]:
        return lambda: self.subject.run(f"write {call.first}", 2.5)


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "read_clocks", lambda index: Clocks(1900))


def entered(clock: FakeDevice, buffers: int = 1) -> tuple[Timed, Entrant]:
    subject = Timed(clock)
    calls = [subject.bind({"a": 100 + i}, 1.0) for i in range(buffers)]
    lead = Ordinary(subject)
    return subject, Entrant(subject, calls, [lead.bind(call, subject) for call in calls])


def test_a_call_s_time_is_the_pairs_difference() -> None:
    clock: Any = FakeDevice()
    subject, one = entered(clock)
    chained = Stopwatch(clock, STREAM.chained)
    burst = chained.prepare(Entrant(subject, one.calls))
    assert chained.quick(burst)[0].median_us == 4.0
    watch = Stopwatch(clock, STREAM)
    burst = watch.prepare(one)
    assert watch.quick(burst)[0].median_us == pytest.approx(11.0)
    again = watch.prepare(entered(clock)[1])
    timings, _ = watch.final([burst, again], 20, lambda index: None, careful=False)
    assert [t.median_us for t in timings] == pytest.approx([11.0, 11.0])


def test_each_call_follows_the_kernel_that_writes_its_operand() -> None:
    clock: Any = FakeDevice()
    subject, one = entered(clock, buffers=2)
    burst = Burst(one, 4, "stream")
    burst.enqueue()
    assert subject.log == ["write 100", "call", "write 101", "call"] * 2
    subject.log.clear()
    burst.enqueue_alone()
    assert subject.log == ["write 100", "write 101"] * 2


def test_either_graph_comes_first() -> None:
    clock: Any = FakeDevice()
    burst = Burst(entered(clock)[1], 3, "stream")
    steps = burst.steps(40, random.Random(1))
    pairs = [(a.sign, b.sign) for a, b in zip(steps[::2], steps[1::2], strict=True)]
    assert set(pairs) == {(1, -1), (-1, 1)} and len(pairs) == 40


def test_a_chained_burst_has_no_second_graph() -> None:
    clock: Any = FakeDevice()
    subject, one = entered(clock)
    burst = Burst(Entrant(subject, one.calls), 3, "chained")
    assert [step.sign for step in burst.steps(2, random.Random(1))] == [1, 1]
    burst.enqueue_alone()
    assert subject.log == []


def test_times_of_pairs() -> None:
    def idle() -> None:
        return

    steps = [Replay(1, idle), Replay(-1, idle), Replay(-1, idle), Replay(1, idle)]
    assert times_of(steps, [60.0, 20.0, 30.0, 50.0], 10) == pytest.approx([4.0, 2.0])
    assert times_of(steps[:1], [60.0], 10) == [6.0]


class Gate:
    """The gate's kernel, whose launches are kept."""

    def __init__(self) -> None:
        self.pointers = {"a": 4096, "query": 8192}
        self.launched: list[tuple[int, ...]] = []

    def copying(
        self, source: int, target: int, size: int, stream: Callable[[], int]
    ) -> Callable[[], None]:
        return lambda: self.launched.append((source, target, size, stream()))


def test_the_operand_is_written_from_a_copy_where_the_kernel_reads_it() -> None:
    memory: Any = Memory()
    gate: Any = Gate()

    def behind(pool: Any) -> Predecessor | None:
        return predecessor.predecessor(Regime("stream", "cold"), memory, gate, GEMM, pool)

    first = {"a": 4096, "b": 1, "d": 2}
    sets = Sets(memory, GEMM, first, 3, behind)
    size = GEMM.operands[0].bytes
    source = memory.copied[-1][0]
    assert memory.copied[-1] == (source, 4096, size)
    one = entrant(Timed(memory), sets, {}, 1.0)
    for write in one.before:
        write()
    wrote = [(source, buffers["a"], size, 77) for buffers in sets.buffers]
    assert gate.launched == wrote and len({target for _, target, *_ in wrote}) == 3


def test_only_a_stream_has_a_predecessor() -> None:
    memory: Any = Memory()
    gate: Any = Gate()
    with device_module.Pool(memory) as pool:
        for launch in ("chained", "eager"):
            made = predecessor.predecessor(Regime(launch, "warm"), memory, gate, GEMM, pool)
            assert made is None
        made = predecessor.predecessor(STREAM, memory, gate, GEMM, pool)
        assert isinstance(made, ElementWise)


def test_a_gemm_writes_sixteen_bit_operands_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predecessor, "import_torch", lambda device: None)
    quantised = AttentionProblem.parse("S=64,D=64,dtype=e4m3").operands[0]
    memory: Any = Memory()
    with pytest.raises(BenchmarkError, match="allowed: fp16, bf16"):
        ProductPredecessor(memory, quantised)


@pytest.mark.parametrize(
    ("number", "found"), [(1 << 20, 4096), (7 * 3584, 3584), (4096, 4096), (96, 96), (4099, 1)]
)
def test_the_columns_of_a_product_divide_the_operand(number: int, found: int) -> None:
    assert largest_factor(number, 4096) == found
