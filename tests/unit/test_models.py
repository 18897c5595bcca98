"""Public models: every row of the shipped file, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tuner.errors import ConfigError
from tuner.problem.models import FIELDS, GATED, PublicModel, Stack, public_models, read

MODELS = public_models()
#: Heads times their dimension is the hidden size in all models but these.
NARROW_OR_WIDE = {
    "mistral-nemo-12b", "mistral-small-24b", "qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b", "qwen3-32b",
    "qwen3-235b-a22b", "gemma-7b", "gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gemma-3-1b",
    "gemma-3-4b", "gemma-3-27b", "gpt-oss-20b", "gpt-oss-120b",
}  # fmt: skip
#: Weights that no stack has: positions, patches and the like, in millions.
BESIDE = {
    "modernbert-base": 0.8, "modernbert-large": 1.3, "siglip-so400m": 19.0, "whisper-tiny": 1.3,
    "whisper-base": 2.0, "whisper-small": 4.0, "clip-vit-large-14": 3.0, "dinov2-giant": 2.0,
}  # fmt: skip
TOLERANCE = 0.02
"""Share of a model's weights: norms, biases and positions are not counted here."""


def weights(stack: Stack) -> int:
    """Elements of a stack's matrices without embeddings."""
    width, keys = stack.heads * stack.head_dim, stack.heads_kv * stack.head_dim
    attention = stack.hidden * 2 * width + stack.context * 2 * keys
    ups = 2 if stack.activation in GATED else 1
    return stack.layers * (attention + (ups + 1) * stack.hidden * stack.intermediate)


def counted(model: PublicModel) -> tuple[float, float]:
    """Millions of weights with one table of tokens, and with another one for the logits."""
    layers = sum(map(weights, model.stacks)) / 1e6 + BESIDE.get(model.name, 0.0)
    tables = {(s.vocab, s.hidden) for s in model.stacks if s.has_logits}
    tables |= {(s.embeddings, s.hidden) for s in model.stacks if s.embeddings}
    shared = sum(rows * columns for rows, columns in tables) / 1e6
    return layers + shared, layers + 2 * shared


def test_the_population_is_wide() -> None:
    assert len(MODELS) >= 40
    assert {model.field for model in MODELS.values()} == set(FIELDS)
    dims = {stack.head_dim for model in MODELS.values() for stack in model.stacks}
    assert {32, 40, 64, 72, 80, 96, 112, 128, 160, 256} <= dims
    sources = [model.source for model in MODELS.values()]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_heads_make_up_the_hidden_size(model: PublicModel) -> None:
    differing = [s.name for s in model.stacks if s.heads * s.head_dim != s.hidden]
    assert bool(differing) == (model.name in NARROW_OR_WIDE)


@pytest.mark.parametrize(
    "model", [m for m in MODELS.values() if m.parameters], ids=lambda model: model.name
)
def test_a_models_matrices_add_up_to_its_parameters(model: PublicModel) -> None:
    nearest = min(counted(model), key=lambda millions: abs(millions - model.parameters))
    assert nearest == pytest.approx(model.parameters, rel=TOLERANCE)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sizes_are_in_range(model: PublicModel) -> None:
    assert model.dtype in ("float16", "bfloat16", "float32")
    assert all(ranks in (1, 2, 4, 8) for ranks in model.shards)
    assert list(model.shards) == sorted(set(model.shards))
    for stack in model.stacks:
        assert 1 <= stack.layers <= 130
        assert stack.hidden % 8 == 0
        assert stack.intermediate % 8 == 0
        assert 0 <= stack.window < max(stack.positions, *stack.lengths, 1)
        assert not (stack.positions and stack.lengths)
        assert stack.is_generating or not stack.has_logits
        assert (stack.experts > 0) <= (stack.intermediate == 0)


BASE = "{source: s, field: language, dtype: float16, layers: 2, hidden: 64, heads: 4, %s}"


def written(folder: Path, row: str) -> Mapping[str, PublicModel]:
    path = folder / "models.yaml"
    path.write_text(f"toy: {row}\n")
    return read(path)


def test_defaults_of_a_row_hold_for_each_stack(tmp_path: Path) -> None:
    row = BASE % "positions: 512, stacks: {local: {window: 8, layers: 3}, global: {heads_kv: 2}}"
    local, rest = written(tmp_path, row)["toy"].stacks
    assert (local.name, local.layers, local.window, local.heads_kv) == ("local", 3, 8, 4)
    assert (rest.name, rest.layers, rest.window, rest.heads_kv) == ("global", 2, 0, 2)
    assert rest.head_dim == 16 and rest.context == 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("positions: 512, heads_kv: 3", "heads_kv=3 does not divide heads=4"),
        ("positions: 512, head_dim: 12", "head_dim=12"),
        ("positions: 512, activation: glu", "activation=glu is not known"),
        ("positions: 512, bias: [ffn]", "bias=ffn is not known"),
        ("positions: 512, keys: [77]", "mask=cross"),
        ("positions: 512, shards: [1, 8]", "8 shards do not divide"),
        ("positions: 512, windows: 3", "windows"),
        ("positions: '512'", "positions='512' is not a whole number"),
        ("positions: 512, hidden: 32", "a key is given twice"),
        ("vocab: 512", "positions or lengths"),
    ],
)
def test_a_wrong_row_is_refused_by_name(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.yaml") as caught:
        written(tmp_path, BASE % change)
    assert said in str(caught.value)
