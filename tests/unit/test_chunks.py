"""Chunks of a long attention: where they lie, what they see, and what a final pass does of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gate_fakes import FakeDevice, FakeKernel, answer_of

from tuner.errors import BenchmarkError
from tuner.measure.gate import Gate
from tuner.measure.gate import chunks as module
from tuner.measure.gate.chunks import CHUNKS, LONG_REFERENCE_S, ROWS, chunks_of, is_sampled
from tuner.measure.gate.commands import COMMANDS, Command
from tuner.measure.gate.kernels import DTYPES, Answer, attention_integers
from tuner.measure.gate.reference import LANES, reference_seconds
from tuner.measure.tolerance import OutputComparison
from tuner.measurement import Status
from tuner.problem import AttentionProblem, GemmProblem, Operand

ATTENTION = AttentionProblem(seqlen_q=70, seqlen_kv=90, head_dim=64, heads_q=2, layout="bshd")
PROBLEMS = [
    "B=2,H=4,HKV=2,SQ=300,SKV=260,D=8",
    "B=2,H=4,HKV=2,S=300,D=8,causal=1,layout=bshd",
    "B=1,H=2,S=290,D=8,window=100,layout=bshd_bhsd",
    "B=3,H=6,HKV=2,S=260,D=8,causal=1,left=70",
]


def attention(
    memory: dict[str, Any], at: list[int], integers: list[int], out: Any, start: int
) -> None:
    """The reference's attention as the template's opening comment says, in numpy.

    Args:
        memory: elements of query, key and value.
        at: element of each at which it begins.
        integers: extents, strides, left, right, and what a bias would have.
        out: elements that are written.
        start: the first of them.
    """
    batch, heads_q, heads_kv, seqlen_q, seqlen_kv, depth = integers[:6]
    strides = [integers[6 + 3 * i : 9 + 3 * i] for i in range(4)]
    left, right = integers[18:20]
    for b in range(batch):
        for h in range(heads_q):
            heads = (h, h // (heads_q // heads_kv), h // (heads_q // heads_kv))
            rows = (seqlen_q, seqlen_kv, seqlen_kv)
            q, k, v = (
                memory[name][
                    start_at
                    + b * s[0]
                    + head * s[1]
                    + np.arange(count)[:, None] * s[2]
                    + np.arange(depth)
                ]
                for name, start_at, s, head, count in zip(
                    ("query", "key", "value"), at, strides, heads, rows, strict=False
                )
            )
            i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_kv)
            weights = np.exp(q @ k.T / math.sqrt(depth)) * ((j >= i - left) & (j <= i + right))
            sums = weights.sum(axis=1, keepdims=True)
            s = strides[3]
            places = start + b * s[0] + h * s[1] + i * s[2] + np.arange(depth)
            out[places] = (weights @ v) / np.where(sums > 0, sums, 1)


@pytest.mark.parametrize("text", PROBLEMS)
def test_a_chunk_is_computed_as_the_whole_is(text: str) -> None:
    problem = AttentionProblem.parse(text)
    chance = np.random.default_rng(0)
    memory = {o.name: chance.standard_normal(o.elements) for o in problem.matrices[:3]}
    whole = np.full(problem.output.elements, np.nan)
    integers = [*attention_integers(problem, 4).values(), *problem.visible, 0, 0, 0]
    attention(memory, [0, 0, 0], integers, whole, 0)
    seen = np.zeros(whole.size, bool)
    for one in chunks_of(problem, "random", 1):
        shifts, part = one.shifts(problem), np.full(whole.size, np.nan)
        at = [shifts[name] for name in ("query", "key", "value")]
        attention(memory, at, [*one.integers(problem).values()], part, shifts["out"])
        inside = slice(shifts["out"], shifts["out"] + one.output(problem).elements)
        assert np.allclose(part[inside], whole[inside])
        assert np.isnan(np.delete(part, np.arange(inside.start, inside.stop))).all()
        seen[inside] = True
    assert seen.all(), "of so small a problem every chunk is taken"


def test_chunks_are_drawn_anew_by_kind_and_seed() -> None:
    problem = AttentionProblem.parse("B=1,H=8,S=65536,D=128,causal=1")
    drawn = chunks_of(problem, "random", 1)
    assert len(set(drawn)) == CHUNKS and {one.rows for one in drawn} == {ROWS}
    assert drawn == chunks_of(problem, "random", 1)
    assert drawn != chunks_of(problem, "random", 2)
    assert drawn != chunks_of(problem, "dominant", 1)
    firsts = [one.first for one in drawn]
    assert min(firsts) < 8192 and max(firsts) > 57344, "early and late queries"


def test_a_fault_is_missed_as_seldom_as_the_module_says() -> None:
    problem = AttentionProblem.parse("B=1,H=8,S=65536,D=128")
    number = {one: one.head * 512 + one.first // ROWS for one in chunks_of(problem, "random", 0)}
    assert all(0 <= n < 8 * 512 for n in number.values())
    for share, told in ((20, 0.0073), (100, 0.381)):
        assert (1 - 1 / share) ** CHUNKS == pytest.approx(told, abs=1e-3)
        missed = 0
        for seed in range(400):
            places = {one.head * 512 + one.first // ROWS for one in chunks_of(problem, "x", seed)}
            missed += not any(place % share == 0 for place in places)
        assert missed / 400 <= told + 0.06


@pytest.mark.parametrize(
    "text",
    ["S=256,D=64,bias=h", "S=256,D=64,dtype=e4m3", "S=256,D=64,varlen=1"],
)
def test_others_are_checked_whole(text: str) -> None:
    assert not is_sampled(AttentionProblem.parse(text))
    assert not is_sampled(GemmProblem(512, 512, 512))


class TestGate:
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, FakeKernel]:
        monkeypatch.setattr(module, "ROWS", 16)
        device, kernel = FakeDevice(), FakeKernel()
        made = Gate(device, kernel, 0)  # type: ignore[arg-type]
        made.open(ATTENTION, 7, is_sampled=True)
        made.load("random")
        return made, kernel

    def test_chunks_are_computed_and_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, kernel = self.opened(monkeypatch)
        drawn = chunks_of(ATTENTION, "random", 7)
        assert len(drawn) > 1
        given = [(t, n) for t, n in kernel.given if n[0] == Command.ATTENTION]
        out = ATTENTION.output.name
        for one, (tensors, integers) in zip(drawn, given, strict=True):
            shifts = one.shifts(ATTENTION)
            names = COMMANDS[Command.ATTENTION].integers
            wanted = one.integers(ATTENTION) | {"command": 4, "dtype": DTYPES[ATTENTION.dtype]}
            assert dict(zip(names, integers, strict=True)) == wanted
            assert len(integers) == 26 and len(tensors) == 12
            assert tensors[0] == made.pointers["query"] + 2 * shifts["query"]
            assert tensors[3] == made.reference("random") + 4 * shifts[out]
        device: Any = made._device
        streams = [s for s, (_, n) in zip(kernel.streams, kernel.given, strict=True) if n[0] == 4]
        assert len(set(streams)) == min(len(drawn), LANES) > 1 and device.joined == LANES
        places = {
            (s, t[4]) for s, (t, n) in zip(kernel.streams, kernel.given, strict=True) if n[0] == 4
        }
        assert len({at for _, at in places}) == len(places), "streams share no statistics"
        compared: list[tuple[int, int, int]] = []

        def compare(written: int, reference: int, operand: Operand, _: Any) -> Answer:
            compared.append((written, reference, operand.elements))
            return answer_of(OutputComparison(operand.elements, reference_squares=1.0))

        monkeypatch.setattr(made._kernels, "compare", compare)
        assert made.examine().status is Status.OK
        assert compared == [
            (
                made.pointers[out] + 2 * one.shifts(ATTENTION)[out],
                made.reference("random") + 4 * one.shifts(ATTENTION)[out],
                one.output(ATTENTION).elements,
            )
            for one in drawn
        ]

    def test_a_whole_check_of_the_same_seed_computes_the_whole(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, kernel = self.opened(monkeypatch)
        kernel.given.clear()
        made.open(ATTENTION, 7)
        made.load("random")
        [integers] = [n for _, n in kernel.given if n[0] == Command.ATTENTION]
        assert list(integers[2:8]) == [*attention_integers(ATTENTION, 4).values()][:6]

    def test_a_sampled_pass_keeps_the_whole_references_and_another_seed_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, kernel = self.opened(monkeypatch)

        def computed(seed: int, *, is_sampled: bool) -> int:
            kernel.given.clear()
            made.open(ATTENTION, seed, is_sampled=is_sampled)
            made.load("random")
            return sum(n[0] == Command.ATTENTION for _, n in kernel.given)

        assert computed(3, is_sampled=False) == 1
        whole = made.reference("random")
        assert computed(8, is_sampled=True) > 1, "the samples of another seed"
        assert made.reference("random") != whole
        assert computed(3, is_sampled=False) == 0
        assert made.reference("random") == whole
        assert computed(8, is_sampled=True) == 0
        assert computed(9, is_sampled=False) == 1
        masked = AttentionProblem.parse("S=256,D=64,bias=h")
        made.open(masked, 1)
        made.open(masked, 1, is_sampled=True)
        assert len(made._known) == 1, "it is never sampled, so nothing is kept twice"

    def test_memory_that_is_short_keeps_one_pass_s_references(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, _ = self.opened(monkeypatch)
        device: Any = made._device
        allocate, refused = device.allocate, []

        def full(size: int) -> int:
            if True in made._known and False in made._known:
                refused.append(size)
                raise BenchmarkError("no memory", status=Status.OUT_OF_MEMORY)
            return int(allocate(size))

        monkeypatch.setattr(device, "allocate", full)
        made.open(ATTENTION, 3)
        made.load("random")
        assert refused and list(made._known) == [False]
        assert made._known[False].references.outputs("random")

        def none(size: int) -> int:
            raise BenchmarkError("no memory", status=Status.OUT_OF_MEMORY)

        monkeypatch.setattr(device, "allocate", none)
        with pytest.raises(BenchmarkError, match="no memory"):
            made.load("dominant")


@pytest.mark.parametrize(
    ("text", "is_long"),
    [("B=1,H=40,HKV=8,S=16384,D=128", True), ("B=1,H=40,HKV=8,S=16384,D=128,causal=1", True),
     ("B=1,H=16,S=16384,D=128", False), ("B=2,H=16,S=8192,D=128,causal=1", False)],
)  # fmt: skip
def test_references_of_problems_of_eight_milliseconds_are_long(text: str, is_long: bool) -> None:
    assert (reference_seconds(AttentionProblem.parse(text)) > LONG_REFERENCE_S) is is_long
