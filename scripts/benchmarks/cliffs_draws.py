"""Calls drawn from everything that is served, by turns over its domains.

A draw depends only on the seed and its index. Lengths and batches are log-uniform from 1, query
heads 1 to 16 a KV head, D, N and K any multiples of 8. A call beyond `MAX_BYTES` or `MAX_FLOPS` is
drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from benchmarks.paged_batches import Case as Pages
from tuner.errors import ConfigError
from tuner.problem import (
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)
from tuner.problem.base import DType
from tuner.problem.population import (
    HALF_TYPES,
    LOWER_RIGHT,
    PADDING,
    POSITIONS,
    Chance,
    ModelCall,
    View,
)

MAX_BYTES, MAX_FLOPS = 2 << 30, 2e12
"""Most bytes and FLOPs of a call, which then takes some milliseconds at most."""
WIDTHS = {"D to 64": (8, 64), "D to 128": (72, 128), "D to 192": (136, 192), "D to 256": (200, 256)}
MAX_KEYS, MAX_PROMPT, MAX_BATCH, MAX_HEADS = 32768, 8192, 128, 128
MAX_RATIO, MAX_FEW, MAX_COLUMNS, MAX_EXPERTS = 16, 16, 32768, 256
PAGE_SIZES = (16, 32, 64, 128)
ROWS = {"M to 16": (1, 16), "M to 256": (17, 256), "M above 256": (257, 16384)}
EPILOGUES = ("bias", "gelu", "bias_gelu", "bias_gelu_tanh", "silu", "relu")
MASKED = {LOWER_RIGHT: "few", PADDING: "encoding", POSITIONS: "prompt"}
"""Phases of the masks."""


@dataclass(frozen=True)
class Packed:
    """Sequences of unlike lengths, one after the other; `lengths` are those of queries and keys."""

    problem: AttentionProblem
    lengths: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.problem.label()} lengths={min(self.lengths)}..{sum(self.lengths)}"


@dataclass(frozen=True)
class Plain:
    """A product without an epilogue, or of groups, which its problem says all of."""

    problem: Problem

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()}"


_Sized = TypeVar("_Sized", Pages, AttentionProblem)
Call = ModelCall | Pages | Packed | Plain


@dataclass(frozen=True)
class Draw:
    """A drawn call and its domain."""

    group: str
    call: Call
    index: int = 0
    run: int = 0
    """Which of several measurements of it this is."""

    @property
    def label(self) -> str:
        again = f" run {self.run}" if self.run else ""
        return f"{self.index} {self.call.label}{again}"


Make = Callable[[Chance], Call]


def dense(problem: AttentionProblem, kind: str, mask: str = "") -> ModelCall:
    """A dense call whose tensors lie as the problem's layout says."""
    named = zip(("query", "key", "value"), problem.matrices, strict=False)
    views = tuple(View(name, name, m.shape, m.strides) for name, m in named)
    return ModelCall("drawn", "call", kind, 1, problem, views, mask)


def _heads(chance: Chance) -> dict[str, Any]:
    ratio = 1 + chance.below(MAX_RATIO, "ratio")
    heads_kv = chance.size(1, MAX_HEADS // ratio, "heads")
    return {"heads_q": ratio * heads_kv, "heads_kv": heads_kv}


def _width(chance: Chance, widths: tuple[int, int], step: int = 8) -> int:
    low, high = widths[0] // -step * -step, widths[1]
    return low + step * chance.below((high - low) // step + 1, "width")


def _attention(chance: Chance, feature: str, widths: tuple[int, int]) -> Call:
    mask = chance.one_of(tuple(MASKED), "mask") if feature == "mask" else ""
    phase = MASKED.get(mask, feature)
    if feature in ("window", "soft cap"):
        phase = chance.one_of(("one", "few", "prompt", "full"), "phase")
        phase = phase if feature == "soft cap" else ("prompt", "full")[phase in ("one", "full")]
    keys = chance.size(1, MAX_KEYS if phase in ("one", "few") else MAX_PROMPT, "keys")
    queries = {"one": 1, "few": min(keys, 2 + chance.below(MAX_FEW - 1, "queries"))}.get(
        phase, keys
    )
    is_causal = phase in ("causal", "prompt") and not mask
    problem = AttentionProblem(
        queries,
        keys,
        _width(chance, widths),
        batch=chance.size(1, MAX_BATCH, "batch"),
        **_heads(chance),
        is_causal=is_causal,
        dtype=chance.one_of(HALF_TYPES, "type"),
        layout=chance.one_of(("bhsd", "bshd"), "layout"),
        softcap=30.0 if feature == "soft cap" else 0.0,
        bias="h" if mask == POSITIONS else "",
    )
    if feature == "window":
        left = chance.size(1, max(1, keys - 1), "window")
        problem = replace(problem, window_left=left, window_right=-1 if is_causal else left)
    kinds = {"one": "decoding", "few": "decoding", "full": "encoding", "encoding": "encoding"}
    return dense(problem, kinds.get(phase, "prompt"), mask)


def _paged(chance: Chance, feature: str, widths: tuple[int, int]) -> Call:
    is_e4m3 = feature == "e4m3"
    count = chance.size(1, MAX_BATCH, "batch")
    longest = chance.size(1, MAX_KEYS, "keys")
    keys = [longest] * count
    if chance.below(2, "unlike"):
        keys = [chance.size(1, longest, f"keys {i}") for i in range(count)]
    most = {"few": MAX_FEW, "chunk": 2048}.get(feature, 1)
    queries = [1] * count
    if most > 1:
        several = 1 + chance.below(count, "several") if feature == "chunk" else count
        drawn = 2 + chance.below(most - 1, "queries")
        queries = [min(k, drawn) if i < several else 1 for i, k in enumerate(keys)]
    window = chance.size(1, longest, "window") if feature == "window" else -1
    return Pages(
        "",
        tuple(queries),
        tuple(keys),
        chance.one_of(PAGE_SIZES, "page"),
        **_heads(chance),
        head_dim=_width(chance, widths, 16 if is_e4m3 else 8),
        window=window,
        has_sinks=feature == "sinks",
        dtype=E4M3 if is_e4m3 else "bfloat16",
        is_halved=bool(chance.below(2, "halved")),
    )


def _packed(chance: Chance, feature: str, widths: tuple[int, int]) -> Call:
    count, longest = chance.size(1, 64, "batch"), chance.size(1, MAX_PROMPT, "longest")
    lengths = (longest, *(chance.size(1, longest, f"length {i}") for i in range(1, count)))
    problem = AttentionProblem(
        longest,
        longest,
        _width(chance, widths),
        batch=count,
        **_heads(chance),
        is_causal=feature == "causal",
        dtype=chance.one_of(HALF_TYPES, "type"),
        layout="bshd",
        is_varlen=True,
    )
    return Packed(problem, lengths)


def _sizes(chance: Chance, rows: tuple[int, int], step: int = 8) -> tuple[int, int, int]:
    n, k = (step * chance.size(1, MAX_COLUMNS // step, name) for name in ("n", "k"))
    return chance.size(*rows, "m"), n, k


def _product(chance: Chance, feature: str, rows: tuple[int, int]) -> Call:
    m, n, k = _sizes(chance, rows)
    dtype: DType = chance.one_of(HALF_TYPES, "type")
    if feature == "gated":
        return ModelCall("drawn", "call", "swiglu", 1, SwigluProblem(m, n, k, dtype=dtype))
    if feature == "plain":
        return Plain(GemmProblem(m, n, k, dtype=dtype))
    epilogue = chance.one_of(EPILOGUES, "epilogue")
    problem = GemmProblem(m, n, k, dtype=dtype, epilogue=epilogue)
    return ModelCall("drawn", "call", feature, 1, problem)


def _quantised(chance: Chance, scales: str, rows: tuple[int, int]) -> Call:
    m, n, k = _sizes(chance, rows, 16)
    return Plain(GemmProblem(m, n, k, dtype=E4M3, scales=scales))  # type: ignore[arg-type]


def _experts(chance: Chance, _: str, rows: tuple[int, int]) -> Call:
    m, n, k = _sizes(chance, rows)
    groups = chance.size(1, MAX_EXPERTS, "experts")
    sizes = chance.one_of(("uniform", "zipf", "sparse"), "sizes")
    return Plain(GroupedGemmProblem(groups, m, n, k, sizes=sizes, dtype="bfloat16"))  # type: ignore[arg-type]


DRAWN: tuple[tuple[str, Any, tuple[str, ...], Mapping[str, tuple[int, int]]], ...] = (
    *(
        ("attention", _attention, (feature,), WIDTHS)
        for feature in ("one", "few", "causal", "full", "window", "soft cap", "mask")
    ),
    ("paged", _paged, ("one", "few", "chunk", "window", "sinks", "e4m3"), WIDTHS),
    ("packed", _packed, ("causal", "full"), WIDTHS),
    ("product", _product, ("plain", "epilogue", "gated"), ROWS),
    ("e4m3", _quantised, ("tensor", "row", "block"), ROWS),
    ("experts", _experts, ("grouped",), ROWS),
)


def strata() -> Iterator[tuple[str, Make]]:
    """Name of each domain that is drawn from, and what draws a call of it."""
    for operation, make, features, sizes in DRAWN:
        for feature, (name, extents) in product(features, sizes.items()):

            def drawn(chance: Chance, make: Any = make, of: Any = (feature, extents)) -> Call:
                return make(chance, *of)  # type: ignore[no-any-return]

            yield f"{operation}, {feature}, {name}", drawn


def draws(seed: str, count: int) -> list[Draw]:
    """The first draws of a seed, by turns over the domains; a smaller count gives a prefix."""
    domains = list(strata())
    made = []
    for index in range(count):
        group, make = domains[index % len(domains)]
        made.append(Draw(group, _small(seed, index, make), index))
    return made


def _small(seed: str, index: int, make: Make) -> Call:
    """The first call of a draw that is legal and small enough."""
    for attempt in range(1000):
        try:
            call = make(Chance(f"{seed}/{attempt}", index))
        except ConfigError:  # as a window that is longer than the keys
            continue
        if is_small(call):
            return call
    raise ConfigError(f"draw {index} of seed {seed} has no call of at most {MAX_BYTES} bytes")


def is_small(call: Call) -> bool:
    """True if a call's bytes and FLOPs are within the limits."""
    if isinstance(call, Pages):
        return call.cached_bytes <= MAX_BYTES and call.flops <= MAX_FLOPS
    if isinstance(call, ModelCall):
        return call.bytes <= MAX_BYTES and call.problem.flops <= MAX_FLOPS
    size = sum(operand.bytes for operand in call.problem.operands)
    return size <= MAX_BYTES and call.problem.flops <= MAX_FLOPS


def smaller(call: Call) -> Iterator[Call]:
    """The call with one of its extents halved, the largest step first; those that are legal."""
    is_product = isinstance(call, Plain) or (isinstance(call, ModelCall) and not call.views)
    for field in ("groups", "m", "n", "k") if is_product else ("batch", "keys", "heads_kv"):
        try:
            halved = _halved(call, field)
        except ConfigError:
            continue
        if halved is not None and halved.label != call.label:
            yield halved


def _halved(call: Call, field: str) -> Call | None:
    """The call with an extent halved; None where it has none or it is 1."""
    if isinstance(call, Pages):
        return _half_pages(call, field)
    if isinstance(call, Packed):
        return _half_packed(call, field)
    problem: Any = call.problem
    if isinstance(problem, AttentionProblem):
        return _half_dense(call, problem, field)
    extent = getattr(problem, field, 0)
    if extent < 2:
        return None
    step = 1 if field in ("m", "groups") else 16 if problem.dtype == E4M3 else 8
    value = max(step, extent // 2 // step * step)
    return replace(call, problem=replace(problem, **{field: value}))


def _half_pages(call: Pages, field: str) -> Call | None:
    if field == "heads_kv":
        return _half_heads(call)
    if field == "keys":
        keys = tuple(max(1, count // 2) for count in call.keys)
        queries = tuple(map(min, call.queries, keys))
        return replace(call, keys=keys, queries=queries)
    count = len(call.keys) // 2
    return replace(call, queries=call.queries[:count], keys=call.keys[:count]) if count else None


def _half_packed(call: Packed, field: str) -> Call | None:
    problem: AttentionProblem | None = call.problem
    lengths = call.lengths
    if field == "heads_kv":
        problem = _half_heads(call.problem)
    elif field == "batch":
        lengths = lengths[: len(lengths) // 2]
    else:
        lengths = tuple(max(1, length // 2) for length in lengths)
    if problem is None or not lengths:
        return None
    longest = max(lengths)
    sized = replace(problem, batch=len(lengths), seqlen_q=longest, seqlen_kv=longest)
    return Packed(sized, lengths)


def _half_dense(call: Any, problem: AttentionProblem, field: str) -> Call | None:
    if field == "batch" and problem.batch > 1:
        problem = replace(problem, batch=problem.batch // 2)
    elif field == "keys" and problem.seqlen_kv > 1 and not problem.is_windowed:
        keys = problem.seqlen_kv // 2
        is_square = problem.seqlen_q == problem.seqlen_kv
        queries = keys if is_square else min(problem.seqlen_q, keys)
        problem = replace(problem, seqlen_kv=keys, seqlen_q=queries)
    elif field == "heads_kv" and (halved := _half_heads(problem)):
        problem = halved
    else:
        return None
    return dense(problem, call.kind, call.mask)


def _half_heads(sized: _Sized) -> _Sized | None:
    """As many query heads a KV head, and half as many of these; None of one."""
    count = sized.heads_kv // 2
    ratio = sized.heads_q // sized.heads_kv
    return replace(sized, heads_kv=count, heads_q=ratio * count) if count else None
