"""Compiled FlexAttention as a baseline: masks made of tables, and what it is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tuner.families import families, family
from tuner.families.peers import FLEX, flex
from tuner.hardware import DEFAULT_GPU
from tuner.measure import block_masks
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
PROBLEMS = [
    AttentionProblem.parse(text)
    for text in (
        "H=2,S=300,D=16,block_mask=1",
        "B=2,H=3,SQ=130,SKV=513,D=16,block_mask=bh",
        "B=2,H=4,HKV=2,SQ=1,SKV=129,D=16,softcap=2,block_mask=b",
        "H=7,SQ=400,SKV=1,D=16,block_mask=h",
    )
]
quiet = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def tables(problem: AttentionProblem, kind: str) -> tuple[list[Any], Any]:
    """The operands that hold the mask, and the dense mask."""
    found = block_masks.tables(problem, kind, 3)
    shapes = {operand.name: operand.shape for operand in problem.operands}
    made = [
        torch.frombuffer(bytearray(getattr(found, name)), dtype=torch.int32).view(shapes[name])
        for name in ("block_counts", "block_indices", "block_bits")
    ]
    dense = torch.frombuffer(bytearray(found.dense), dtype=torch.uint8).bool()
    return made, dense.view(*problem.block_shape[:2], problem.seqlen_q, problem.seqlen_kv)


def reference(problem: AttentionProblem, inputs: list[Any], dense: Any, scale: float) -> Any:
    query, key, value = (tensor.double() for tensor in inputs)
    group = problem.heads_q // problem.heads_kv
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * scale
    if cap := problem.softcap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~dense, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.label)
@pytest.mark.parametrize("kind", ["random", "dominant"])
def test_a_mask_by_tables_is_the_dense_mask(problem: AttentionProblem, kind: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    made, dense = tables(problem, kind)
    assert torch.equal(create_mask(flex.seen_by(*made), *dense.shape, "cpu"), dense)
    mask = flex.mask_by(*dense.shape[2:], *made)
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[3] % 128, 0, -dense.shape[2] % 128))
    blocks = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense().bool(), blocks.any(5).any(3))
    assert mask.seq_lengths == tuple(dense.shape[2:])


@quiet
@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.label)
@pytest.mark.parametrize("kind", ["random", "dominant"])
def test_a_call_has_the_mask_of_its_tables(
    problem: AttentionProblem, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    own = flex.mask_by
    monkeypatch.setattr(flex, "mask_by", lambda *tables: looked.append(True) or own(*tables))
    made, dense = tables(problem, kind)
    torch.manual_seed(0)
    inputs = [torch.randn(operand.shape) for operand in problem.matrices[:3]]
    call = flex.MaskedCall(
        problem, flex.flex_call(problem, 0.3), flex.flex_call(problem, 0.3, flex.BY_TABLES)
    )
    out = call.prepared(*inputs, *made)(*inputs, *made)
    torch.testing.assert_close(out, reference(problem, inputs, dense, 0.3).float())
    assert bool(looked) == (kind != "random"), "the timed mask is a function without a table"


@quiet
@pytest.mark.parametrize(
    "text", ["S=200,D=16,causal=1,window=30,softcap=3", "SQ=70,SKV=200,D=16,left=5,right=9"]
)
def test_windows_and_soft_caps(text: str) -> None:
    problem = AttentionProblem.parse(f"H=2,{text}")
    torch.manual_seed(0)
    inputs = [torch.randn(operand.shape) for operand in problem.matrices[:3]]
    mask = flex.mask_of(problem, flex._visible(problem), "cpu")
    out = flex.flex_call(problem, 0.3)(*inputs, mask)
    dense = torch.zeros(problem.seqlen_q, problem.seqlen_kv, dtype=torch.bool)
    for query in range(problem.seqlen_q):
        dense[query, list(problem.keys_of(query, query))] = True
    torch.testing.assert_close(out, reference(problem, inputs, dense, 0.3).float())


OFFERED: Mapping[str, bool] = {
    "S=512,D=64,block_mask=1": True,
    "S=512,D=64,softcap=30": True,
    "SQ=256,SKV=512,D=64,window=30": True,
    "S=512,D=64,window=30": False,
    "S=512,D=64,causal=1": False,
    "S=512,D=64,softcap=30,bias=1": False,
    "S=512,D=64,softcap=30,page_size=16": False,
}


@pytest.mark.parametrize("text", OFFERED)
def test_it_takes_part_where_pytorch_has_nothing_else(text: str) -> None:
    problem, member = AttentionProblem.parse(text), family("vendor_flex")
    space = member.space(problem, DEFAULT_GPU)
    assert [config["kernel"] for config in space] == [FLEX] * OFFERED[text]
    assert bool(member.supports(problem, DEFAULT_GPU)) != OFFERED[text]
    if problem.block_mask:
        vendors = [one for one in families().values() if one.is_vendor and one.op == member.op]
        assert [one for one in vendors if one.space(problem, DEFAULT_GPU)] == [member]
