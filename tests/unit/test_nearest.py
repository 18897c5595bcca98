"""What serves a shape that nobody tuned: the rule itself, and what `lookup` makes of it."""

from __future__ import annotations

import fnmatch
import importlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lenders import OWN, Toy, ToyProduct, toy_family

from tuner.cli import main
from tuner.config import Config
from tuner.families import families
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import (
    E4M3,
    LAYOUTS,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Layout,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.selection import nearest
from tuner.selection.nearest import (
    LEAST_PASSED,
    REACH,
    Loans,
    distance,
    drawn,
    is_enclosed,
    sizes,
)
from tuner.selection.reader import lookup
from tuner.store import Entry, Store, open_store
from tuner.store.exchange import to_text

MODULE = importlib.import_module("tuner.selection.reader")
H200, WARM = GPUS["H200"], Regime("stream", "warm")
PROBLEM = AttentionProblem.parse("S=1024,D=64")
NEAR = AttentionProblem.parse("S=1100,D=64")
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})

toy = toy_family  # for every test here


def measured(config: Config, us: float, problem: Problem = PROBLEM, **changes: Any) -> Measurement:
    return Measurement(
        problem=problem,
        config=config,
        gpu=H200,
        regime=WARM,
        status=Status.OK,
        environment=Environment({"driver": "1"}),
        latency_us=us,
        is_final=problem == PROBLEM,
        artifacts={} if config.family.startswith("vendor") else {"attention": "a" * 32},
    ).but(**changes)


def around(config: Config, us: float = 10.0, **changes: Any) -> list[Measurement]:
    """`config` at the shapes drawn around the problem, then PyTorch's kernel there, slower."""
    return at(drawn(PROBLEM), config, us, **changes)


def at(shapes: Iterable[Problem], config: Config, us: float = 10.0, **changes: Any) -> Any:
    shapes = list(shapes)
    own = [measured(config, us, p, is_final=False, **changes) for p in shapes]
    return [*own, *(measured(CUDNN, 15.0, p, is_final=False) for p in shapes)]


def failed(m: Measurement, status: Status) -> Measurement:
    return m.but(status=status, latency_us=None)


ENTRY = Entry.of([measured(OWN[0], 12.0), measured(OWN[1], 12.1), measured(CUDNN, 14.0)])


def lent(entry: Entry, evidence: list[Measurement], problem: Problem = NEAR) -> list[Config]:
    return [m.config for m in Loans(entry, evidence).to(problem)]


class TestDistance:
    def test_it_is_octaves_over_the_axes(self) -> None:
        assert distance(PROBLEM, AttentionProblem.parse("S=2048,D=64")) == 2
        assert distance(PROBLEM, AttentionProblem.parse("SQ=1024,SKV=512,D=64")) == 1
        assert distance(PROBLEM, AttentionProblem.parse("S=1024,D=64,HKV=4")) == 2
        assert distance(GemmProblem(64, 64, 64), GemmProblem(64, 128, 16)) == 3
        assert distance(SoftmaxProblem(64, 64, 2), SoftmaxProblem(128, 64, 1)) == 0

    def test_batch_and_heads_are_one(self) -> None:
        assert distance(PROBLEM, AttentionProblem.parse("B=2,H=8,S=1024,D=64")) == 0

    def test_another_layout_is_half_an_octave_away(self) -> None:
        turned = AttentionProblem.parse("S=2048,D=64,layout=bshd")
        assert distance(PROBLEM, turned) == 2.5
        assert distance(turned, replace(turned, layout="bshd_bhsd")) == 0.5
        assert fnmatch.fnmatchcase(turned.key, nearest.class_pattern(PROBLEM))

    @pytest.mark.parametrize("other", ["D=128", "D=64,causal=1", "D=64,dtype=bf16"])
    def test_classes_are_apart(self, other: str) -> None:
        assert distance(PROBLEM, AttentionProblem.parse(f"S=1024,{other}")) == math.inf

    def test_operations_are_apart(self) -> None:
        assert distance(GemmProblem(64, 64, 64), SoftmaxProblem(64, 64)) == math.inf

    def test_the_pattern_finds_the_class_and_nothing_else(self) -> None:
        pattern = nearest.class_pattern(PROBLEM)
        assert fnmatch.fnmatchcase(AttentionProblem.parse("B=3,H=6,HKV=2,S=7,D=64").key, pattern)
        for other in ("S=64,D=128", "S=1024,D=64,causal=1", "S=1024,D=64,dtype=bf16"):
            assert not fnmatch.fnmatchcase(AttentionProblem.parse(other).key, pattern)
        plain, fused = (GemmProblem(8, 64, 8, epilogue=epilogue) for epilogue in ("", "bias"))
        assert fnmatch.fnmatchcase(GemmProblem(9, 8, 7).key, nearest.class_pattern(plain))
        assert fnmatch.fnmatchcase(
            GemmProblem(9, 8, 7, epilogue="bias").key, nearest.class_pattern(fused)
        )
        assert not fnmatch.fnmatchcase(fused.key, nearest.class_pattern(plain))
        assert not fnmatch.fnmatchcase(plain.key, nearest.class_pattern(fused))
        assert distance(plain, fused) == math.inf
        fast = GemmProblem(16, 16, 16, dtype=E4M3)
        summed, rows = replace(fast, fast_accum=False), replace(fast, scales="row")
        for one in (fast, summed, rows):
            pattern_of = nearest.class_pattern(one)
            for other in (fast, summed, rows):
                found = fnmatch.fnmatchcase(replace(other, m=99).key, pattern_of)
                assert found == (one == other)
                assert (distance(one, other) == 0) == (one == other)
        longer = PROBLEM.key.replace('"head_dim":64', '"head_dim":640')
        assert not fnmatch.fnmatchcase(longer, pattern)


class TestDrawn:
    @given(
        st.builds(
            AttentionProblem,
            seqlen_q=st.integers(1, 20000),
            seqlen_kv=st.integers(1, 20000),
            head_dim=st.sampled_from((64, 128)),
            batch=st.integers(1, 40),
            heads_q=st.sampled_from((8, 12)),
            heads_kv=st.sampled_from((1, 4)),
            is_causal=st.booleans(),
        )
        | st.builds(GemmProblem, *[st.integers(1, 2000).map(lambda n: 8 * n)] * 3)
        | st.builds(
            GemmProblem,
            st.integers(1, 2000),
            *[st.integers(1, 1000).map(lambda n: 16 * n)] * 2,
            dtype=st.just(E4M3),
        )
        | st.builds(
            SwigluProblem,
            st.integers(1, 2000),
            st.integers(1, 500).map(lambda n: 32 * n),
            st.integers(1, 2000).map(lambda n: 8 * n),
        )
        | st.builds(
            GroupedGemmProblem,
            st.integers(1, 128),
            st.integers(1, 9000),
            *[st.integers(1, 2000).map(lambda n: 8 * n)] * 2,
        )
        | st.builds(SoftmaxProblem, st.integers(1, 3000), st.integers(1, 3000))
    )
    def test_shapes_of_the_class_within_reach(self, problem: Problem) -> None:
        shapes = drawn(problem)
        alike = [s for s in shapes if nearest.layout_of(s) == nearest.layout_of(problem)]
        assert LEAST_PASSED <= len(alike) == len(set(alike)) <= nearest.DRAWN
        assert alike == list(shapes[: len(alike)]) and len(set(shapes)) == len(shapes)
        assert problem not in shapes
        assert all(distance(problem, shape) <= REACH for shape in shapes)
        assert drawn(problem) == shapes

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_layout(self, layout: Layout) -> None:
        """What a model hands over lies as its projections wrote it."""
        problem = replace(PROBLEM, layout=layout)
        found = Counter(map(nearest.layout_of, drawn(problem)))
        others = {other: nearest.DRAWN_ELSEWHERE for other in LAYOUTS if other != layout}
        assert found == {layout: nearest.DRAWN, **others}
        assert {replace(problem, layout=other) for other in others} < set(drawn(problem))

    def test_packed_sequences_have_one_layout(self) -> None:
        packed = AttentionProblem.parse("B=4,S=1024,D=64,varlen=1")
        assert {nearest.layout_of(shape) for shape in drawn(packed)} == {"bshd"}

    def test_tiles_divide_some_and_others_not(self) -> None:
        shapes = [s for s in drawn(PROBLEM) if isinstance(s, AttentionProblem)]
        rest = [shape.seqlen_kv % 128 for shape in shapes]
        assert 0 in rest
        assert any(rest)
        assert any(s.heads_q != s.heads_kv for s in shapes)
        assert any(s.seqlen_q != s.seqlen_kv for s in shapes)


class TestLend:
    def test_what_passed_around_is_lent(self) -> None:
        assert lent(ENTRY, around(OWN[0])) == [OWN[0]]

    def test_only_in_a_layout_in_which_it_passed(self) -> None:
        turned = replace(NEAR, layout="bshd")
        assert lent(ENTRY, around(OWN[0]), turned) == [OWN[0]]
        alike = [m for m in around(OWN[0]) if nearest.layout_of(m.problem) == PROBLEM.layout]
        assert lent(ENTRY, alike) == [OWN[0]] and lent(ENTRY, alike, turned) == []
        assert lent(ENTRY, around(OWN[0]), turned) == [OWN[0]]
        other = replace(PROBLEM, layout="bshd")
        slower = [*around(OWN[0]), measured(CUDNN, 9.9, other, is_final=False)]
        assert lent(ENTRY, slower, turned) == [] and lent(ENTRY, slower) == [OWN[0]]

    def test_nothing_is_lent_without_evidence(self) -> None:
        assert lent(ENTRY, []) == []
        # The same size on both sides, but for the last: the problem itself encloses it.
        shapes = [replace(NEAR, batch=2), replace(NEAR, batch=3), replace(NEAR, batch=4)]
        assert lent(ENTRY, at(shapes, OWN[0])) == []
        assert lent(ENTRY, at([*shapes, replace(NEAR, batch=5)], OWN[0])) == [OWN[0]]
        assert LEAST_PASSED == 4

    def test_three_shapes_that_passed_are_too_few(self) -> None:
        shapes = drawn(PROBLEM)[:LEAST_PASSED]
        assert lent(ENTRY, at(shapes, OWN[0])) == [OWN[0]]
        assert lent(ENTRY, at(shapes[:-1], OWN[0])) == []

    @pytest.mark.parametrize("status", [Status.WRONG_RESULT, Status.TIMEOUT, Status.TOO_FAST])
    def test_one_fault_anywhere_is_enough(self, status: Status) -> None:
        evidence = around(OWN[0])
        assert lent(ENTRY, [*evidence, failed(evidence[0], status)]) == []

    @pytest.mark.parametrize("status", [Status.OUT_OF_MEMORY, Status.UNAVAILABLE])
    def test_a_full_machine_says_nothing(self, status: Status) -> None:
        evidence = around(OWN[0])
        assert lent(ENTRY, [*evidence, failed(evidence[0], status)]) == [OWN[0]]

    def test_the_newest_measurement_counts(self) -> None:
        evidence = around(OWN[0])
        fault = failed(evidence[0], Status.TIMEOUT)
        assert lent(ENTRY, [fault, *evidence]) == [OWN[0]]

    def test_other_kernels_prove_nothing(self) -> None:
        assert lent(ENTRY, around(OWN[0], artifacts={"attention": "b" * 32})) == []

    def test_beyond_reach(self) -> None:
        evidence = around(OWN[0])
        assert lent(ENTRY, evidence, AttentionProblem.parse("S=2048,D=64")) == [OWN[0]]
        assert lent(ENTRY, evidence, AttentionProblem.parse("S=2056,D=64")) == []

    def test_where_pytorch_was_not_timed_nothing_is_known(self) -> None:
        own = [m for m in around(OWN[0]) if m.config == OWN[0]]
        assert lent(ENTRY, own) == []

    @pytest.mark.parametrize(("us", "is_lent"), [(14.71, False), (14.70, True)])
    def test_a_win_is_by_two_percent(self, us: float, is_lent: bool) -> None:
        """Of attention; of products it is five."""
        assert lent(ENTRY, around(OWN[0], us)) == ([OWN[0]] if is_lent else [])

    @pytest.mark.parametrize(("us", "is_lent"), [(14.29, False), (14.28, True)])
    def test_a_win_of_a_product_is_by_five(self, us: float, is_lent: bool) -> None:
        problem = GemmProblem(1024, 4096, 4096)
        own = Config(ToyProduct.name, OWN[0].params)
        cublas = Config("vendor_blas", {"kernel": "cublas"})
        shapes = [problem, *(p for p in drawn(problem))]
        evidence = [measured(own, us, p, is_final=False) for p in shapes]
        evidence += [measured(cublas, 15.0, p, is_final=False) for p in shapes]
        entry = Entry.of([evidence[0], evidence[len(shapes)]])
        assert lent(entry, evidence, replace(problem, m=1030)) == ([own] if is_lent else [])

    @pytest.mark.parametrize("kernel", ["flash3", "flash3_splits", "flash4"])
    def test_a_peer_is_no_rival(self, kernel: str) -> None:
        peer = Config("vendor_sdpa", {"kernel": kernel})
        faster = [measured(peer, 5.0, p, is_final=False) for p in drawn(PROBLEM)]
        assert lent(ENTRY, [*around(OWN[0]), *faster]) == [OWN[0]]

    def test_vendors_are_not_lent(self) -> None:
        entry = Entry.of([measured(CUDNN, 9.0), measured(OWN[0], 12.0)])
        assert lent(entry, around(CUDNN)) == []

    def test_the_least_estimate_comes_first(self) -> None:
        shape: Any = drawn(PROBLEM)[0]
        beside = replace(shape, seqlen_kv=shape.seqlen_kv + 1)
        evidence = [*around(OWN[0], 10.0), *around(OWN[1], 5.0)]
        assert lent(ENTRY, evidence, beside) == [OWN[1], OWN[0]]
        assert lent(ENTRY, evidence, PROBLEM) == [OWN[0], OWN[1]]

    def test_a_pin_lends_alone(self) -> None:
        entry = Entry.of(ENTRY.ranking, pin=ENTRY.ranking[1])
        evidence = [*around(OWN[0]), *around(OWN[1])]
        assert lent(entry, evidence) == [OWN[1]]

    def test_a_config_that_needs_another_kernel_there(self) -> None:
        """CUTLASS's kernel without the residual mask is right only where no tile is cut."""
        member = families()["cutlass_fmha"]
        config = next(
            c for c in member.space(PROBLEM, H200) if PROBLEM.seqlen_kv % c["tile_n"] == 0
        )
        whole = AttentionProblem.parse("SQ=1100,SKV=2048,D=64")
        entry = Entry.of([measured(config, 12.0)])
        assert lent(entry, around(config), whole) == [config]
        assert lent(entry, around(config), NEAR) == []

    def test_a_config_of_another_version(self) -> None:
        odd = Config(Toy.name, {"size": 3})
        assert lent(Entry.of([measured(odd, 12.0)]), around(odd)) == []
        gone = Config("family_that_was", {})
        assert lent(Entry.of([measured(gone, 12.0)]), around(gone)) == []


def is_between(problem: Problem, won: Mapping[Problem, bool]) -> bool:
    """`is_enclosed` by what was measured at problems."""
    near = sorted(won, key=lambda other: (distance(problem, other), other.key))
    return is_enclosed(sizes(problem), [(sizes(other), won[other]) for other in near])


def product(m: int, n: int = 4096, k: int = 4096, batch: int = 1) -> GemmProblem:
    return GemmProblem(m, n, k, batch)


class TestEnclosed:
    """Faster than PyTorch's kernels at measured shapes on both sides of each size, or not lent."""

    def test_between_two_wins(self) -> None:
        won = {product(256): True, product(1024): True}
        assert all(is_between(product(m), won) for m in (256, 512, 1024))

    @pytest.mark.parametrize("m", [255, 1025])
    def test_outside_it_is_not(self, m: int) -> None:
        assert not is_between(product(m), {product(256): True, product(1024): True})

    def test_in_every_size(self) -> None:
        won = {product(256): True, product(1024): True}
        assert not is_between(product(512, n=4160), won)
        won |= {product(512, n=8192): True}
        assert is_between(product(512, n=4160), won)
        assert not is_between(product(512, n=4160, k=4032), won)

    def test_a_loss_on_one_side_is_enough(self) -> None:
        won = {product(256): True, product(1024): False}
        assert not is_between(product(512), won)
        assert not is_between(product(1024), won)
        # Two wins nearer than the loss, on its side.
        won |= {product(600): True, product(700): True}
        assert nearest.NEIGHBOURS == 2
        assert is_between(product(512), won) and not is_between(product(650), won)

    def test_nothing_measured_encloses_nothing(self) -> None:
        assert not is_between(product(512), {})

    def test_another_layout_says_nothing(self) -> None:
        turned = replace(NEAR, layout="bshd")
        own = at([replace(NEAR, seqlen_q=n, seqlen_kv=n) for n in (1030, 1040, 1200, 2048)], OWN[0])
        assert (lent(ENTRY, own), lent(ENTRY, own, turned)) == ([OWN[0]], [])
        more = at([replace(turned, seqlen_q=n, seqlen_kv=n) for n in (1024, 2048)], OWN[0])
        assert lent(ENTRY, [*own, *more], turned) == [OWN[0]]
        slower = at([replace(turned, seqlen_q=n, seqlen_kv=n) for n in (1024, 2048)], OWN[0], 20.0)
        assert lent(ENTRY, [*own, *slower]) == [OWN[0]]
        assert lent(ENTRY, [*own, *slower], turned) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sqlite"


@pytest.fixture
def store(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "nothing shipped")
    monkeypatch.setattr("tuner.selection.portfolio.shipped", lambda: ())
    MODULE.close()
    MODULE.shipped.cache_clear()
    MODULE.shipped_index.cache_clear()
    with open_store(str(path)) as made:
        yield made
    MODULE.close()
    MODULE.shipped.cache_clear()
    MODULE.shipped_index.cache_clear()


def decide(store: Store, entry: Entry = ENTRY) -> None:
    store.decide(entry.problem, H200, WARM, entry.ranking, "s")


class TestLookup:
    def test_the_answer_says_of_which_problem(self, store: Store, path: Path) -> None:
        decide(store)
        assert lookup(NEAR, gpu=H200, path=path) is None
        store.add(around(OWN[0]))
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None
        assert (answer.kind, answer.exact, answer.entry.problem) == ("nearest", False, PROBLEM)
        assert [m.config for m in answer.candidates] == [OWN[0]]
        assert any("nearest: tuned for B=1,H=16,S=1024" in note for note in answer.notes)

    def test_the_command_names_both_shapes_and_whose_time_it_is(
        self, store: Store, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide(store)
        store.add(around(OWN[0]))
        asked = ["lookup", "--store", str(path), "--gpu", "H200", "--shape", "S=1100,D=64"]
        assert main(asked) == 0
        head, neighbour, *rest = capsys.readouterr().out.splitlines()
        assert head == f"attention {NEAR.label()} on NVIDIA H200, stream-warm"
        said = " ".join([neighbour, *rest])
        assert f"answered by its neighbour {PROBLEM.label()}: every time below was" in said
        assert f"at {PROBLEM.label()}: 12.0 us" in said and "1.17x cudnn" in said
        assert "winner" not in said, "what is transferred may be another than the winner there"
        assert main([*asked, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["asked"]["shape"], answer["shape"]) == (NEAR.label(), PROBLEM.label())
        assert main([*asked[:-1], "S=1024,D=64"]) == 0
        assert "neighbour" not in capsys.readouterr().out

    def test_a_miss_looks_at_little(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A generation poses a new length with every token."""
        decide(store)
        seen: list[Problem] = []

        def watched(one: Problem, other: Problem) -> float:
            seen.append(other)
            return distance(one, other)

        monkeypatch.setattr(nearest, "distance", watched)
        monkeypatch.setattr(nearest, "fits", lambda *_: pytest.fail("it passed nowhere around"))
        assert lookup(NEAR, gpu=H200, path=path) is None
        assert PROBLEM in seen and all(distance(NEAR, other) < math.inf for other in seen)

    def test_the_problem_itself_is_exact(self, store: Store, path: Path) -> None:
        decide(store)
        store.add(around(OWN[0]))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert answer is not None
        assert (answer.kind, answer.exact, answer.lent) == ("exact", True, ())
        assert answer.candidates == ENTRY.ranking

    def test_a_pin_that_no_final_pass_ranked_lends_too(self, store: Store, path: Path) -> None:
        decide(store)
        store.add([*around(OWN[0]), measured(OWN[2], 11.0, is_final=False), *around(OWN[2])])
        store.pin(PROBLEM, H200, WARM, OWN[2])
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None and [m.config for m in answer.lent] == [OWN[2]]

    def test_a_measured_neighbour_comes_before_a_prediction(self, store: Store, path: Path) -> None:
        predicted = measured(OWN[2], 1.0, NEAR, provenance=Provenance.PREDICTED, is_final=True)
        decide(store, Entry.of([predicted]))
        exact = lookup(NEAR, gpu=H200, path=path)
        assert exact is not None and exact.kind == "exact"
        decide(store)
        store.add(around(OWN[0]))
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None and answer.kind == "nearest"

    @pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
    def test_what_is_not_measured_lends_nothing(
        self, store: Store, path: Path, provenance: Provenance
    ) -> None:
        decide(store, Entry.of([m.but(provenance=provenance) for m in ENTRY.ranking]))
        store.add(around(OWN[0]))
        assert lookup(NEAR, gpu=H200, path=path) is None
        decide(store)
        store.add([m.but(provenance=provenance) for m in around(OWN[1])])
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None
        assert [m.config for m in answer.lent] == [OWN[0]]

    def test_another_gpu_or_regime_lends_nothing(self, store: Store, path: Path) -> None:
        decide(store)
        store.add(around(OWN[0]))
        assert lookup(NEAR, gpu="H100", path=path) is None
        assert lookup(NEAR, gpu=H200, regime=Regime("eager", "warm"), path=path) is None

    def test_the_nearest_that_can_lends(self, store: Store, path: Path) -> None:
        closer = AttentionProblem.parse("S=1090,D=64")
        decide(store)
        decide(store, Entry.of([m.but(problem=closer) for m in ENTRY.ranking]))
        store.add(around(OWN[0]))
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None and answer.entry.problem == PROBLEM
        store.add(at(drawn(closer), OWN[0]))
        answer = lookup(NEAR, gpu=H200, path=path)
        assert answer is not None and answer.entry.problem == closer

    def test_the_command_says_so(
        self, store: Store, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decide(store)
        store.add(around(OWN[0]))
        arguments = ["lookup", "--shape", "S=1100,D=64", "--gpu", "H200", "--store", str(path)]
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert "nearest: tuned for" in shown
        assert "toy_attention tile=0" in shown


class TestShipped:
    """What ships lends too: with it comes what its kernels did around."""

    @pytest.fixture
    def shipped(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        with open_store("sqlite://") as other:
            decide(other)
            other.add([*around(OWN[0]), *around(OWN[1], 9.0, artifacts={"attention": "b" * 32})])
            text = to_text(other.export(around=drawn))
        (tmp_path / "tuned").mkdir()
        (tmp_path / "tuned" / "a.json").write_text(text)
        monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "tuned")
        MODULE.shipped_index.cache_clear()
        yield

    @pytest.mark.parametrize("problem", [NEAR, replace(NEAR, layout="bshd")], ids=str)
    def test_without_a_store(self, shipped: None, tmp_path: Path, problem: Problem) -> None:
        answer = lookup(problem, gpu=H200, path=tmp_path / "none.sqlite")
        assert answer is not None and answer.entry.origin == "shipped"
        assert (answer.kind, [m.config for m in answer.lent]) == ("nearest", [OWN[0]])
        assert lookup(problem, gpu=GPUS["H100"], path=tmp_path / "none.sqlite") is None

    def test_without_a_store_what_lends_is_read_once(
        self, shipped: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Problem] = []
        monkeypatch.setattr(nearest, "drawn", lambda p: (made.append(p), drawn(p))[1])
        for length in range(1100, 1110):
            problem = replace(NEAR, seqlen_q=length, seqlen_kv=length)
            assert lookup(problem, gpu=H200, path=tmp_path / "none.sqlite") is not None
        assert made == [PROBLEM]

    def test_beside_what_is_stored(self, shipped: None, store: Store, path: Path) -> None:
        assert lookup(NEAR, gpu=H200, path=path) is not None
        store.add([failed(around(OWN[0])[3], Status.WRONG_RESULT)])
        assert lookup(NEAR, gpu=H200, path=path) is None

    def test_what_another_compiler_built_here_proved_nothing(
        self, shipped: None, store: Store, path: Path
    ) -> None:
        store.record_build(PROBLEM, OWN[0], {"attention": "a" * 32})
        assert lookup(NEAR, gpu=H200, path=path) is not None
        store.record_build(PROBLEM, OWN[0], {"attention": "c" * 32})
        assert lookup(NEAR, gpu=H200, path=path) is None
