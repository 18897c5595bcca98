"""Inputs and commands of the numerics gate for masks, packed sequences and paged caches."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import accumulate

import pytest
from gate_fakes import ATTENTION, BIASED, PACKED, PAGED, opened

from tuner.measure import block_masks, pages
from tuner.measure.gate import inputs
from tuner.measure.gate.inputs import KINDS
from tuner.measure.gate.kernels import E4M3_POISON
from tuner.measure.tolerance import floor_work
from tuner.problem import E4M3, AttentionProblem


def test_packed_sequences_are_planted_and_computed_one_by_one() -> None:
    made, device, kernel = opened(PACKED)
    made.load("dominant")
    at = made.pointers
    starts = {name: [0, *accumulate(PACKED.lengths_q)] for name in ("query", "cu_seqlens_q")}
    starts |= {name: [0, *accumulate(PACKED.lengths_kv)] for name in ("key", "cu_seqlens_kv")}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        assert device.written[at[name]] == struct.pack("<4i", *starts[name])
    of_queries, of_keys = 4 * 64, 2 * 64  # elements a row
    for command in (1, 4):
        given = [(t, n) for t, n in kernel.given if n[0] == command]
        for i, (tensors, integers) in enumerate(given):
            assert tensors[0] == at["query"] + 2 * of_queries * starts["query"][i]
            assert tensors[1] == at["key"] + 2 * of_keys * starts["key"][i]
            assert integers[2:8] == [1, 4, 2, PACKED.lengths_q[i], PACKED.lengths_kv[i], 64]
            assert integers[9:11] == [64, of_queries]
            if command == 4:
                assert tensors[2] == at["value"] + 2 * of_keys * starts["key"][i]
                reference = made.reference("dominant")
                assert tensors[3] == reference + 4 * of_queries * starts["query"][i]
    assert floor_work(PACKED) == tuple(
        map(sum, zip(*(floor_work(one) for one in PACKED.sequences), strict=True))
    )


@pytest.mark.parametrize("kind", KINDS["attention"])
def test_a_paged_cache_is_drawn_as_rows_that_are_copied_to_their_pages(kind: str) -> None:
    made, device, kernel = opened(PAGED)
    made.load(kind)
    at, lengths = made.pointers, pages.lengths_of(PAGED, kind)
    if kind == "random":
        assert lengths == PAGED.lengths_kv
    else:  # one sequence has all that it can, one no key, one a key more than a page
        assert lengths == (PAGED.lengths_kv[0], 0, min(17, PAGED.lengths_kv[2]))
    assert device.written[at["seqused_k"]] == struct.pack("<3i", *lengths)
    assert device.written[at["cu_seqlens_q"]] == struct.pack("<4i", 0, *accumulate(PAGED.lengths_q))
    table = struct.unpack("<9i", device.written[at["page_table"]])
    rows = [table[3 * i : 3 * i + 3] for i in range(3)]
    used = [-(-length // 16) for length in lengths]
    assert [sum(page >= 0 for page in row) for row in rows] == used
    assert all(set(row[count:]) <= {pages.UNSET} for row, count in zip(rows, used, strict=True))
    named = [page for page in table if page >= 0]
    assert len(set(named)) == len(named) and max(named) < PAGED.matrices[1].shape[0]
    copies = [(t, n) for t, n in kernel.given if n[0] == 14]
    with_keys = [i for i in range(3) if lengths[i]]
    assert [(t[1], t[2], n[1]) for t, n in copies] == [
        (at[name], at["page_table"] + 12 * i, lengths[i])
        for name in ("key", "value")
        for i in with_keys
    ]
    assert {tuple(n[2:]) for _, n in copies} == {(2, 64, *PAGED.matrices[1].strides[:3], 16)}
    computed = [(t, n) for t, n in kernel.given if n[0] == 4]
    for i, (tensors, integers) in enumerate(computed):
        assert integers[5:7] == [PAGED.lengths_q[i], max(1, lengths[i])]
        assert tensors[0] == at["query"] + 2 * 256 * sum(PAGED.lengths_q[:i])
        # Of a sequence without keys the first row stands in: it is there, and nothing sees it.
        rows_before = 2 * 128 * sum(lengths[:i]) if lengths[i] else 0
        assert tensors[1] == copies[0][0][0] + rows_before
        assert tensors[2] == copies[len(with_keys)][0][0] + rows_before
        assert tensors[10] == at["sinks"]
        left, right = integers[20:22]
        position = lengths[i] - PAGED.lengths_q[i]
        if lengths[i]:  # a query sees all keys to its own place, counted from the end
            assert right == position and left >= 40 - position
        else:
            assert PAGED.lengths_q[i] - 1 + right < 0


def test_a_paged_cache_of_e4m3_is_copied_by_16_bits_and_holds_nans_elsewhere() -> None:
    problem = replace(PAGED, dtype=E4M3, has_sinks=False)
    made, device, kernel = opened(problem)
    made.load("random")
    copies = [n for _, n in kernel.given if n[0] == 14]
    caches = {made.pointers[name] for name in ("key", "value")}
    assert {at for at, one in device.patterns.items() if one == E4M3_POISON} == caches
    halves = [stride // 2 for stride in problem.matrices[1].strides[:3]]
    assert {tuple(n[2:]) for n in copies} == {(2, 32, *halves, 16)}
    wide = [(name, 2 * size) for name, size in pages.row_bytes(problem)]
    assert wide == list(pages.row_bytes(PAGED))
    names = [one.name for one in problem.inputs[3:]]
    assert names[-3:] == ["descale_q", "descale_k", "descale_v"]
    assert [one.shape for one in problem.inputs[-3:]] == [(4,), (2,), (2,)]
    factors = [t for t, n in kernel.given if n[0] == 4]
    assert {tuple(t[5:8]) for t in factors} == {
        tuple(made.pointers[name] for name in names[-3:])
    }, "all sequences have one factor a head"


def test_a_paged_cache_s_floor_counts_no_unused_slot_and_no_hidden_key() -> None:
    whole = AttentionProblem.parse("B=2,H=4,SQ=1,SKV=64,D=64,page_size=16")
    part = AttentionProblem.parse("B=2,H=4,SQ=1,SKV=49,D=64,page_size=16")
    window = AttentionProblem.parse("B=2,H=4,SQ=1,SKV=64,D=64,page_size=16,left=9")
    row = 2 * 2 * 2 * 4 * 64  # keys and values of both sequences, bytes
    assert whole.bytes == part.bytes == floor_work(whole)[1]
    assert floor_work(whole)[1] - floor_work(part)[1] == 15 * row
    assert floor_work(whole)[1] - floor_work(window)[1] == 54 * row


def test_the_reference_is_given_its_bias() -> None:
    made, _, kernel = opened(BIASED)
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    at = made.pointers
    assert tensors[5:] == [0, 0, 0, at["bias"], 0, 0, 0]
    assert integers[-4:] == [0, 70 * 90, 90, 64]  # strides of the bias, columns of values
    made, _, kernel = opened(ATTENTION)
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    assert (tensors[5:], integers[-4:-1]) == ([0] * 7, [0] * 3)


@pytest.mark.parametrize(("axes", "extents"), [("b", (140, 70, 90)), ("bhk", (8, 1, 90))])
def test_a_boolean_mask_is_planted_row_by_row(axes: str, extents: tuple[int, ...]) -> None:
    problem = AttentionProblem.parse(f"B=2,H=4,SQ=70,SKV=90,D=64,mask={axes}")
    made, _, kernel = opened(problem)
    made.load("random")
    at = made.pointers["mask"]
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 17]
    assert tensors == [at] and tuple(integers[1:4]) == extents
    assert not [given for given in kernel.given if given[1][0] == 0 and given[0] == [at]]
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    assert tensors[5:] == [0, 0, 0, 0, 0, 0, at]
    assert tuple(integers[-4:-1]) == problem.mask_strides


@pytest.mark.parametrize("kind", KINDS["attention"])
def test_a_block_sparse_mask_is_written_as_tables_and_dense_for_the_reference(kind: str) -> None:
    problem = AttentionProblem.parse("B=2,H=4,SQ=170,SKV=290,D=64,block_mask=h")
    made, device, kernel = opened(problem)
    made.load(kind)
    tables, at = block_masks.tables(problem, kind, 7), made.pointers
    for name in ("block_counts", "block_indices", "block_bits"):
        assert device.written[at[name]] == getattr(tables, name)
        assert not [given for given in kernel.given if given[1][0] == 0 and given[0] == [at[name]]]
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    *others, dense = tensors[5:]
    assert others == [0] * 6 and device.written[dense] == tables.dense
    assert len(tables.dense) == 4 * 170 * 290
    assert tuple(integers[-4:-1]) == problem.mask_strides == (0, 170 * 290, 290)


def test_a_bias_grows_with_the_scores() -> None:
    assert inputs.moments(BIASED, "large_scores")[1]["bias"] == inputs.LARGE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_the_reference_reads_no_row_that_is_not_there(kind: str, batch: int) -> None:
    """Its kernel reads keys that only rows beyond the last query see, and multiplies them by 0."""
    problem = AttentionProblem.parse(
        f"B={batch},H=12,HKV=1,SQ=31,SKV=128,D=24,varlen=1,page_size=256,layout=bshd"
    )
    sizes = dict(pages.row_bytes(problem))
    hidden = 0
    for one, shift, sides in inputs.parts_of(problem, kind):
        _, key, value, _ = one.matrices
        assert shift["key"] + key.bytes <= sizes["key"]
        assert shift["value"] + value.bytes <= sizes["value"]
        hidden += inputs.sees_nothing(one, sides)
    assert hidden == sum(keys == 0 for keys in pages.lengths_of(problem, kind))
