"""The grid that ships: what its lists of problems say they cover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.base import resources
from tuner.problem import AttentionProblem, GemmProblem, Problem, written
from tuner.problem.shapes import problems
from tuner.tuning.job import read_problems

#: As in the models' config.json: hidden, intermediate, query and key heads, vocabulary.
MODELS = {
    "Llama-2-7B": ("llama", 4096, 11008, 32, 32, 32000),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 8, 128256),
    "Mistral-7B": ("mistral", 4096, 14336, 32, 8, 32768),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 4, 152064),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 40, 8, 152064),
    "Llama-3-70B": ("llama", 8192, 28672, 64, 8, 128256),
}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def listed(name: str) -> list[Problem]:
    return read_problems(resources.cache() / "grid" / f"{name}.yaml")


def attention() -> list[AttentionProblem]:
    found = [*listed("attention"), *listed("decoding")]
    return [p for p in found if isinstance(p, AttentionProblem)]


def gemms_of(name: str) -> set[Problem]:
    """Without the biases of Qwen's projections: the grid has plain products."""
    kind, hidden, inner, heads, keys, vocabulary = MODELS[name]
    model = written.architecture(
        {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "vocab_size": vocabulary,
            "sliding_window": None,
        }
    )
    return {
        replace(p, epilogue="")
        for decode in (False, True)
        for p in problems(
            model, TOKENS, [1], decode=decode, dtype="bfloat16", ops=("gemm",)
        ).problems
        if isinstance(p, GemmProblem)
    }


@pytest.mark.parametrize(("name", "least"), [("attention", 55), ("decoding", 15), ("gemm", 40)])
def test_no_problem_is_there_twice(name: str, least: int) -> None:
    found = listed(name)
    assert least <= len(found) == len(set(found))


def test_attention_covers_the_range() -> None:
    found = attention()
    assert {p.head_dim for p in found} == {64, 128, 256}
    heads = {p.heads_q for p in found}
    assert (min(heads), max(heads)) == (8, 96)
    assert {1, 4, 8} <= {p.heads_q // p.heads_kv for p in found}
    keys = {p.seqlen_kv for p in found}
    assert (min(keys), max(keys)) == (128, 131072)
    assert {p.batch for p in found} >= {1, 32}
    # Both masks at each head dimension, both types at those that models have in both.
    assert {(p.head_dim, p.is_causal) for p in found} == {
        (d, mask) for d in (64, 128, 256) for mask in (False, True)
    }
    kinds = {(p.head_dim, p.is_causal, p.dtype) for p in found if p.head_dim < 256}
    assert len(kinds) == 8
    assert all((p.seqlen_q == 1) for p in listed("decoding") if isinstance(p, AttentionProblem))


def test_what_is_cut_off_covers_every_class() -> None:
    """Kernels depend on head dimension, mask, type and grouping."""
    found = [p for p in listed("attention") if isinstance(p, AttentionProblem)]

    def classes(some: list[AttentionProblem]) -> set[object]:
        return {(p.head_dim, p.is_causal, p.dtype) for p in some}

    assert classes(found[:12]) == classes(found)
    assert max(p.flops for p in found[:40]) < max(p.flops for p in found[40:])


def test_some_shapes_are_there_in_both_types() -> None:
    found = {p.label() for p in attention()}
    twins = [one for one in found if one.replace("bf16", "fp16") in found - {one}]
    assert len(twins) >= 4


def test_products_are_those_of_public_models() -> None:
    found = set(listed("gemm"))
    of_models = {name: gemms_of(name) for name in MODELS}
    assert not [p.label() for p in found - set().union(*of_models.values())]
    for name, theirs in of_models.items():
        assert len(found & theirs) >= 5, name
    tokens = {p.m for p in found if isinstance(p, GemmProblem)}
    assert (min(tokens), max(tokens)) == (1, 8192)
    first = [p for p in listed("gemm")[:16] if isinstance(p, GemmProblem)]
    assert all(set(first) & theirs for theirs in of_models.values())
