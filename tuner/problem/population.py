"""Calls drawn from public models: attention and GEMMs with the models' sizes, types, strides and
masks.

Rules of drawing a call. Each choice has its own random number, from a hash of seed, index and name:

- the model: each equally likely; its tensor-parallel ranks: each that the model names.
- its layer: by how many of the model's layers are of its kind. Half of the calls are attention.
- the type: the checkpoint's; float32 ones are run in float16 or bfloat16, each half of the time.
- a decoder: half prompts, half decoding. Prompts have 128 to 16384 tokens (at most the model's) at
  batch 1 to 32, `MAX_TOKENS` together. Decoding has batch 1 to 128 and 128 to 32768 cached tokens.
  Three in four have one query, the others 2 to 16. Half of these verify drafts: each query sees the
  keys up to its own (``lower_right``).
- lengths and batches are drawn by octaves, each equally likely, and within one by whole numbers.
  Half of the lengths are rounded to a multiple of 64, and half of the batches are 1.
- half of the prompts fill a cache, which holds keys and values heads first. Caches that are decoded
  from are heads first (half), tokens first, or a beginning of a longer allocation, tokens first.
- a quarter of the text encoders' batches come with a mask of padding.
- products: each linear layer of the stack equally likely, its rows the tokens of such a call, at
  most `MAX_ROWS` or one sequence's.

Training calls (`draw_training`) are attention over itself, with 1024 to 8192 tokens at batch 1 to
16. Their stacks have no window, no soft cap and no bias of positions: PyTorch's operator has their
gradients.

Calls beyond `MAX_BYTES` or `MAX_FLOPS` are drawn again, and so are those that were drawn before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tuner.errors import ConfigError
from tuner.problem import LAYOUTS, AttentionProblem, GemmProblem, Operand, Problem, SwigluProblem
from tuner.problem.architecture import VOCAB_STEP
from tuner.problem.base import DTYPE_BYTES, DType
from tuner.problem.models import (
    BHSD,
    BSHD,
    GATED,
    JOINED,
    OTHER,
    TENSORS,
    PublicModel,
    Stack,
    public_models,
)
from tuner.problem.swiglu import STEP

MIN_TOKENS, MAX_PROMPT, MAX_CACHE = 128, 16384, 32768
MAX_TOKENS = 65536
"""Tokens of a batch of prompts."""
MAX_ROWS = 16384
TRAINING = "training"
"""Kind of the calls that `draw_training` draws."""
MIN_TRAINING, MAX_TRAINING, MAX_TRAINING_BATCH = 1024, 8192, 16
"""Tokens of a sequence, and sequences, of training calls."""
MAX_BATCH, MAX_DECODING_BATCH, MAX_QUERIES = 32, 128, 16
MAX_BYTES, MAX_FLOPS = 12 << 30, 4e13
"""Maximum bytes of a call's operands and mask, and maximum FLOPs."""
HELD_OUT_OF = 4
"""One group of models in this many is held out."""
HELD_OUT_SALT = 3
"""First whole number that holds out a fifth to a third of the models, with models of every field on
both sides. It was chosen before anything was measured.
"""
HALF_TYPES: tuple[DType, ...] = ("float16", "bfloat16")
"""Types in which a float32 checkpoint is run."""
TRIES = 20
"""Draws for each requested call before a small population counts as exhausted."""

PADDING, LOWER_RIGHT, POSITIONS = "padding", "lower_right", "positions"
"""Masks, in this order:

- (B, 1, 1, SKV) booleans of real keys
- (SQ, SKV) booleans along the diagonal that ends at the last query and key
- (1, H, SQ, SKV) of the query's type, added to the scores"""

_T = TypeVar("_T")


@dataclass(frozen=True)
class View:
    """A tensor (B, H, S, D) of a call over a buffer that several may share."""

    name: str
    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int = 0

    @property
    def end(self) -> int:
        """Elements of the buffer up to its last one."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


@dataclass(frozen=True)
class ModelCall:
    """One call of a model."""

    model: str
    stack: str
    kind: str
    """Prompt, decoding, encoding or cross; of a product the linear layer's name."""
    ranks: int
    problem: Problem
    """The operation and its sizes. Its layout is the one of `views` if that has a name, else the
    nearest one. A `mask` other than ``positions`` is not a part of it.
    """
    views: tuple[View, ...] = ()
    """Query, key and value; empty for a product, whose operands are dense."""
    mask: str = ""

    @property
    def label(self) -> str:
        """Line that identifies the call."""
        parts = [f"{self.model}/{self.stack} {self.kind}: {self.problem.op}", self.problem.label()]
        parts += [f"ranks={self.ranks}"] if self.ranks > 1 else []
        parts += [f"mask={self.mask}"] if self.mask else []
        parts += [f"strides={self._lies}"] if self.views else []
        return " ".join(parts)

    @property
    def _lies(self) -> str:
        return "/".join(",".join(map(str, view.strides[:3])) for view in self.views)

    @property
    def key(self) -> str:
        """Hash of the computation and its memory layout, independent of the model."""
        text = repr((self.problem.key, self.views, self.mask))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def buffers(self) -> Mapping[str, int]:
        """Elements of each buffer of `views`."""
        sizes: dict[str, int] = {}
        for view in self.views:
            sizes[view.buffer] = max(sizes.get(view.buffer, 0), view.end)
        return sizes

    @property
    def bytes(self) -> int:
        """Memory of the call's tensors, mask and output."""
        if not isinstance(self.problem, AttentionProblem):
            return self.problem.bytes
        width = DTYPE_BYTES[self.problem.dtype]
        more = sum(operand.bytes for operand in self.problem.operands[3:])
        return width * sum(self.buffers.values()) + more


class Chance:
    """Random numbers that depend only on a seed and a name, equal on every platform and Python.

    Args:
        seed: seed of all calls.
        index: index of the call.
    """

    def __init__(self, seed: int | str, index: int) -> None:
        self._prefix = f"{seed}/{index}"

    def below(self, count: int, name: str) -> int:
        """Integer from 0 to `count` - 1, each equally likely to within 2^-32."""
        text = f"{self._prefix}/{name}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") * count >> 64

    def one_of(self, items: Sequence[_T], name: str) -> _T:
        """One of several."""
        return items[self.below(len(items), name)]

    def size(self, low: int, high: int, name: str) -> int:
        """A size from `low` to `high`, octaves equally likely, and all sizes within one."""
        octaves = 1
        while low << octaves < high:
            octaves += 1
        start = low << self.below(octaves, f"{name} octave")
        return start + self.below(min(high, 2 * start) - start + 1, name)


def is_held_out(model: PublicModel) -> bool:
    """True for a model whose calls judge selections, and never make one.

    Decided by a hash of the heads of its largest stack. Models of equal attention are on one side,
    so that a selection is not made from a held-out model's twin.
    """
    largest = max(model.stacks, key=lambda stack: stack.layers * stack.hidden**2)
    text = f"{HELD_OUT_SALT}: {largest.heads}/{largest.heads_kv}/{largest.head_dim}"
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_OF == 0


def subset(names: str) -> tuple[PublicModel, ...]:
    """Models by ``all``, ``held-out``, ``making`` or their names with commas between.

    Raises:
        ConfigError: when a name is not known.
    """
    models = public_models()
    if names == "all":
        return tuple(models.values())
    if names in ("held-out", "making"):
        return tuple(m for m in models.values() if is_held_out(m) == (names == "held-out"))
    for name in names.split(","):
        if name not in models:
            allowed = ", ".join(("all", "held-out", "making", *models))
            raise ConfigError(f"model {name} is not known (allowed: {allowed})")
    return tuple(models[name] for name in dict.fromkeys(names.split(",")))


def draw(seed: int | str, count: int, models: Collection[PublicModel]) -> list[ModelCall]:
    """First `count` distinct calls of a seed. A smaller count gives a prefix of a larger one.

    Args:
        seed: any text, for example a commit's hash.
        count: number of calls.
        models: models to draw from.

    Raises:
        ConfigError: when the models have fewer distinct calls.
    """
    return _distinct(seed, count, tuple(models), _drawn)


def draw_training(seed: int | str, count: int, models: Collection[PublicModel]) -> list[ModelCall]:
    """First `count` distinct training calls of a seed, as `draw`.

    Raises:
        ConfigError: when the models have fewer distinct calls.
    """
    return _distinct(seed, count, tuple(models), _drawn_training)


def _distinct(
    seed: int | str,
    count: int,
    models: Sequence[PublicModel],
    drawn: Callable[[Chance, Sequence[PublicModel]], ModelCall | None],
) -> list[ModelCall]:
    if count < 1 or not models:
        raise ConfigError(f"count={count} of {len(models)} models (allowed: 1 and more of both)")
    calls: dict[str, ModelCall] = {}
    for index in range(TRIES * count):
        call = drawn(Chance(seed, index), models)
        if call is not None:
            calls.setdefault(call.key, call)
        if len(calls) == count:
            return list(calls.values())
    raise ConfigError(f"only {len(calls)} distinct calls were found (wanted: {count})")


def _drawn(chance: Chance, models: Sequence[PublicModel]) -> ModelCall | None:
    """Draw a call; None if it is too large, or its stack does not make calls of this kind."""
    model = chance.one_of(models, "model")
    ranks = chance.one_of(model.shards, "ranks")
    dtype = _dtype(chance, model)
    layer = chance.below(sum(stack.layers for stack in model.stacks), "layer")
    for stack in model.stacks:
        layer -= stack.layers
        if layer < 0:
            break
    phase = _phase(chance, stack)
    if chance.below(2, "operation") and stack.attention == "plain":
        call = _attention(chance, model, stack, ranks, dtype, phase)
    else:
        call = _product(chance, model, stack, ranks, dtype, phase)
    return call if call is not None and _is_small(call) else None


def _drawn_training(chance: Chance, models: Sequence[PublicModel]) -> ModelCall | None:
    """Draw a training call; None if it is too large, or the model makes none."""
    model = chance.one_of(models, "model")
    dtype = _dtype(chance, model)
    layers = [
        (stack, lengths)
        for stack in model.stacks
        if (lengths := _training_lengths(stack))
        for _ in range(stack.layers)
    ]
    if not layers:
        return None
    stack, lengths = chance.one_of(layers, "layer")
    if stack.lengths:
        length = chance.one_of(lengths, "length")
    else:
        length = chance.size(lengths[0], lengths[-1], "length")
        length -= length % 64 if chance.below(2, "length rounded") else 0
    batch = chance.size(1, min(MAX_TRAINING_BATCH, MAX_TOKENS // length), "batch")
    phase = _Phase(TRAINING, batch, length, length)
    call = _attention(chance, model, stack, 1, dtype, phase)
    return call if _is_small(call) else None


def _training_lengths(stack: Stack) -> tuple[int, ...]:
    """The possible lengths of a training call, or the first and last; empty if there are none."""
    is_plain = stack.attention == "plain" and stack.mask != "cross"
    if not is_plain or stack.window or stack.softcap or stack.has_position_bias:
        return ()
    if stack.lengths:
        return tuple(n for n in stack.lengths if MIN_TRAINING <= n <= MAX_TRAINING)
    high = min(MAX_TRAINING, stack.positions)
    return (MIN_TRAINING, high) if high >= MIN_TRAINING else ()


def _dtype(chance: Chance, model: PublicModel) -> DType:
    return chance.one_of(HALF_TYPES, "type") if model.dtype == "float32" else model.dtype


def _is_small(call: ModelCall) -> bool:
    return call.bytes <= MAX_BYTES and call.problem.flops <= MAX_FLOPS


@dataclass(frozen=True)
class _Phase:
    """Tokens of one pass."""

    kind: str
    batch: int
    queries: int
    keys: int


def _phase(chance: Chance, stack: Stack) -> _Phase:
    if stack.is_generating and chance.below(2, "decoding"):
        queries = (
            1 if chance.below(4, "one query") else 2 + chance.below(MAX_QUERIES - 1, "queries")
        )
        batch = _batch(chance, MAX_DECODING_BATCH)
        cached = _length(chance, min(MAX_CACHE, stack.positions), "cached")
        return _Phase("decoding", batch, min(queries, cached), cached)
    if stack.lengths:
        length = chance.one_of(stack.lengths, "length")
    else:
        length = _length(chance, min(MAX_PROMPT, stack.positions), "length")
    batch = _batch(chance, max(1, min(MAX_BATCH, MAX_TOKENS // length)))
    return _Phase("prompt" if stack.is_generating else "encoding", batch, length, length)


def _length(chance: Chance, high: int, name: str) -> int:
    size = chance.size(min(MIN_TOKENS, high), high, name)
    return size - size % 64 if chance.below(2, f"{name} rounded") and size > 64 else size


def _batch(chance: Chance, high: int) -> int:
    return chance.size(1, high, "batch") if chance.below(2, "several") else 1


def _attention(
    chance: Chance, model: PublicModel, stack: Stack, ranks: int, dtype: DType, phase: _Phase
) -> ModelCall:
    heads, heads_kv = stack.heads // ranks, stack.heads_kv // ranks
    is_decoding, is_cross = phase.kind == "decoding", stack.mask == "cross"
    queries, keys = phase.queries, phase.keys
    if is_cross:
        keys = chance.one_of(stack.keys, "keys")
    is_windowed = bool(stack.window) and not is_cross
    if is_windowed and is_decoding and keys > stack.window:  # the cache keeps what a query sees
        queries, keys = 1, stack.window
    mask = ""
    if stack.has_position_bias:
        mask = POSITIONS
    elif is_decoding and not is_cross and queries > 1 and chance.below(2, "verifying"):
        mask = LOWER_RIGHT
    elif phase.kind == "encoding" and model.field == "encoder" and phase.batch > 1:
        mask = "" if chance.below(4, "padded") else PADDING
    is_causal = stack.mask == "causal" and not is_decoding and not mask
    side = stack.window - 1 if stack.mask == "causal" else stack.window
    left = side if is_windowed and not is_decoding else -1
    shapes = (phase.batch, heads, queries), (phase.batch, heads_kv, keys)
    views = _views(chance, stack, phase, shapes)
    problem = AttentionProblem(
        queries,
        keys,
        stack.head_dim,
        phase.batch,
        heads,
        heads_kv,
        is_causal=is_causal,
        dtype=dtype,
        softcap=stack.softcap,
        window_left=left,
        window_right=left if stack.mask == "full" else -1,
        bias="h" if mask == POSITIONS else "",
    )
    kind = "cross" if is_cross else phase.kind
    return ModelCall(model.name, stack.name, kind, ranks, _laid_out(problem, views), views, mask)


def _laid_out(problem: AttentionProblem, views: Sequence[View]) -> AttentionProblem:
    """Problem in the first layout that matches the views, or (B, S, H, D) if none does."""
    for layout in LAYOUTS:
        laid = replace(problem, layout=layout)
        if all(map(_lies, views, laid.matrices)):
            return laid
    return replace(problem, layout="bshd")


def _lies(view: View, operand: Operand) -> bool:
    """True if the strides agree along every axis of more than one element."""
    axes = zip(view.shape, view.strides, operand.strides, strict=True)
    return all(size == 1 or stride == step for size, stride, step in axes)


def _views(
    chance: Chance, stack: Stack, phase: _Phase, shapes: tuple[tuple[int, int, int], ...]
) -> tuple[View, ...]:
    """Query, key and value of a call, by `TENSORS` and by the cache."""
    lies = list(TENSORS[stack.tensors])
    longest = shapes[1][2]
    if stack.mask == "cross" and stack.is_generating:  # the encoder's, cached
        lies[1:] = [BHSD, BHSD]
    elif phase.kind == "prompt" and chance.below(2, "cached"):
        lies[1:] = [BHSD, BHSD]
    elif phase.kind == "decoding":
        lies[1:] = [BHSD, BHSD] if chance.below(2, "heads first") else [BSHD, BSHD]
        if lies[1] == BSHD and chance.below(2, "longer"):
            longest = -(-(longest + 1) // 1024) * 1024
    all_heads = shapes[0][1] + 2 * shapes[1][1]
    first_heads = (0, shapes[0][1], shapes[0][1] + shapes[1][1])
    views = []
    for place, (name, lie) in enumerate(zip(("query", "key", "value"), lies, strict=True)):
        batch, heads, tokens = shapes[min(place, 1)]
        width, room = stack.head_dim, tokens if place == 0 else longest
        shape, offset = (batch, heads, tokens, width), 0
        if lie == BHSD:
            strides = (heads * tokens * width, tokens * width, width, 1)
        elif lie == BSHD:
            strides = (room * heads * width, width, heads * width, 1)
        else:
            row = all_heads * width
            is_joined = lie == JOINED
            strides = (tokens * row, width if is_joined else 3 * width, row, 1)
            offset = width * (first_heads[place] if is_joined else place)
        buffer = name if lie in (BHSD, BSHD) else "projection"
        views.append(View(name, buffer, shape, strides, offset))
    return tuple(views)


def _product(
    chance: Chance, model: PublicModel, stack: Stack, ranks: int, dtype: DType, phase: _Phase
) -> ModelCall:
    tokens = phase.queries
    batch = max(1, min(phase.batch, MAX_ROWS // tokens))
    name, (n, k, epilogue) = chance.one_of(list(linears(stack, ranks).items()), "layer kind")
    rows = batch * tokens
    if name == "logits":
        rows = batch  # of each sequence's last token
    elif name == "keys":
        rows = batch * chance.one_of(stack.keys, "keys")
    problem: Problem
    if name == "swiglu":
        problem = SwigluProblem(rows, n, k, dtype=dtype)
    else:
        problem = GemmProblem(rows, n, k, dtype=dtype, epilogue=epilogue)
    return ModelCall(model.name, stack.name, name, ranks, problem)


def linears(stack: Stack, ranks: int = 1) -> dict[str, tuple[int, int, str]]:
    """Linear layers of a stack on one of several ranks, by name: outputs, inputs, epilogue.

    Columns of the projections into a layer are shared out, and rows of those out of it. ``swiglu``
    is both up projections as one `SwigluProblem`, where that has the size; N is the output's.
    """
    layers: dict[str, tuple[int, int, str]] = {}
    hidden, inner = stack.hidden, stack.intermediate // ranks
    heads, keys = (n * stack.head_dim // ranks for n in (stack.heads, stack.heads_kv))
    if stack.attention != "none":
        biased = "bias" if "qkv" in stack.bias else ""
        if stack.mask == "cross":
            layers |= {"query": (heads, hidden, biased), "keys": (keys, stack.context, biased)}
        elif stack.has_joined_projection:
            layers["qkv"] = heads + 2 * keys, hidden, biased
        else:
            layers |= {"query": (heads, hidden, biased), "key": (keys, hidden, biased)}
        layers["out"] = hidden, heads, "bias" if "out" in stack.bias else ""
    if inner:
        layers |= _feed_forward(stack, inner)
    if stack.experts:
        layers["router"] = stack.experts, hidden, "bias" if "router" in stack.bias else ""
    layers |= {name: (n, k, "") for name, (n, k) in (stack.products or {}).items()}
    if stack.has_logits:
        padded = -(-stack.vocab // VOCAB_STEP) * VOCAB_STEP if ranks > 1 else stack.vocab
        layers["logits"] = padded // ranks, hidden, "bias" if "logits" in stack.bias else ""
    return layers


def _feed_forward(stack: Stack, inner: int) -> Iterator[tuple[str, tuple[int, int, str]]]:
    hidden, biased = stack.hidden, "bias" if "mlp" in stack.bias else ""
    if stack.activation not in GATED:
        activation = "" if stack.activation == OTHER else stack.activation
        yield "up", (inner, hidden, "_".join(filter(None, (biased, activation))))
    elif stack.is_up_joined:
        yield "gate and up", (2 * inner, hidden, biased)
    else:
        activation = "" if stack.activation == "swiglu" else GATED[stack.activation]
        yield "gate", (inner, hidden, "_".join(filter(None, (biased, activation))))
        yield "up", (inner, hidden, biased)
    if stack.activation == "swiglu" and not biased and inner % STEP == 0:
        yield "swiglu", (inner, hidden, "")
    yield "down", (hidden, inner, biased)
