"""Calls of every entry of the runtime, each with its output's shape and type.

Some sizes are 0, some tensors start or have rows off 16 bytes, some numbers are huge.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tuner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from unaligned import drawn_view, error  # noqa: E402

E4M3, BF16, HALF = torch.float8_e4m3fn, torch.bfloat16, torch.float16
DEVICE = "cpu"
"""Device of the tensors; tests on a GPU replace it."""
LAID: Callable[[Any], Any] = lambda tensor: tensor  # noqa: E731
"""How a call's tensors lie; `differences` replaces it."""
FACTOR = 1.0
"""Factor of the operands in 16 bits; `differences` replaces it."""


def made(*shape: int, dtype: Any = BF16) -> Any:
    numbers = torch.randn(shape) * (FACTOR if dtype.itemsize == 2 else 1.0)
    return LAID(numbers.to(dtype).to(DEVICE))


def factors(*sizes: int) -> Any:
    """Positive fp32 factors of blocks: the last two sizes are divided by 128."""
    *others, rows, columns = sizes
    return (torch.rand(*others, -(-rows // 128), -(-columns // 128)) + 0.5).to(DEVICE)


def of_rows(rows: int, columns: int) -> Any:
    """Factors of each row and block of 128 columns."""
    return (torch.rand(rows, -(-columns // 128)) + 0.5).to(DEVICE)


def starts(*ends: int) -> Any:
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)


def linear(m: int, n: int, k: int) -> Any:
    return (
        tuner.linear(made(m, k), made(n, k, dtype=E4M3), weight_scale=factors(n, k)),
        (m, n),
        BF16,
    )


def linear_with_bias(m: int, n: int, k: int) -> Any:
    weight, bias = made(n, k, dtype=E4M3), torch.zeros(n, dtype=BF16, device=DEVICE)
    out = tuner.linear(made(2, m, k), weight, bias, activation="silu", weight_scale=factors(n, k))
    return out, (2, m, n), BF16


def matmul(b: int, m: int, n: int, k: int) -> Any:
    return tuner.matmul(made(b, m, k), made(b, k, n)), (b, m, n), BF16


def swiglu(m: int, n: int, k: int) -> Any:
    return tuner.swiglu(made(m, k), tuner.interleave(made(n, k), made(n, k))), (m, n), BF16


def quantise(m: int, k: int) -> Any:
    elements, scales = tuner.quantise(made(m, k))
    assert scales.shape == (m, -(-k // 128)) and (scales > 0).all()
    return elements.float(), (m, k), torch.float32


def quantise_gated(m: int, k: int) -> Any:
    elements, scales = tuner.quantise(made(m, 2 * k), gated=True)
    assert scales.shape == (m, -(-k // 128)) and (scales > 0).all()
    return elements.float(), (m, k), torch.float32


def scaled(m: int, n: int, k: int) -> Any:
    one = torch.ones((), device=DEVICE)
    a, b = made(m, k, dtype=E4M3), made(n, k, dtype=E4M3).t()
    return tuner.scaled_mm(a, b, one, one, out_dtype=BF16), (m, n), BF16


def scaled_by_rows(m: int, n: int, k: int) -> Any:
    a, b = made(m, k, dtype=E4M3), made(n, k, dtype=E4M3).t()
    return (
        tuner.scaled_mm(
            a, b, torch.ones(m, 1, device=DEVICE), torch.ones(1, n, device=DEVICE), out_dtype=BF16
        ),
        (m, n),
        BF16,
    )


def scaled_with_result(m: int, n: int, k: int) -> Any:
    one = torch.ones((), device=DEVICE)
    a, b = made(m, k, dtype=E4M3), made(n, k, dtype=E4M3).t()
    return tuner.scaled_mm(a, b, one, one, scale_result=one), (m, n), E4M3


def grouped(g: int, m: int, n: int, k: int) -> Any:
    ends = starts(*([m] * g))
    return tuner.grouped_mm(made(m, k), made(g, n, k), ends), (m, n), BF16


def grouped_e4m3(g: int, m: int, n: int, k: int) -> Any:
    a, b, ends = made(m, k, dtype=E4M3), made(g, n, k, dtype=E4M3), starts(*([m] * g))
    out = tuner.grouped_mm(a, b, ends, scale_a=of_rows(m, k), scale_b=factors(g, n, k))
    return out, (m, n), BF16


def moe(t: int, top: int, g: int, h: int, i: int) -> Any:
    experts = torch.zeros(t, top, dtype=torch.int32, device=DEVICE)
    weights = torch.rand(t, top).to(DEVICE)
    out = tuner.moe(made(t, h), experts, weights, made(g, 2 * i, h), made(g, h, i))
    return out, (t, h), BF16


def moe_e4m3(t: int, top: int, g: int, h: int, i: int) -> Any:
    experts, weights = (
        torch.zeros(t, top, dtype=torch.int64, device=DEVICE),
        torch.rand(t, top).to(DEVICE),
    )
    gate_up, down = made(g, 2 * i, h, dtype=E4M3), made(g, h, i, dtype=E4M3)
    scales = {"gate_up_scale": factors(g, 2 * i, h), "down_scale": factors(g, h, i)}
    return tuner.moe(made(t, h), experts, weights, gate_up, down, **scales), (t, h), BF16


def attention(b: int, h: int, q: int, kv: int, d: int) -> Any:
    key, value = made(b, h, kv, d), made(b, h, kv, d)
    return tuner.attention(made(b, h, q, d), key, value), (b, h, q, d), BF16


def attention_masked(b: int, h: int, q: int, kv: int, d: int) -> Any:
    mask = torch.ones(b, 1, q, kv, dtype=torch.bool, device=DEVICE)
    key, value = made(b, h, kv, d), made(b, h, kv, d)
    return tuner.attention(made(b, h, q, d), key, value, mask), (b, h, q, d), BF16


def attention_e4m3(b: int, h: int, q: int, kv: int, d: int) -> Any:
    query, key, value = (made(b, h, s, d, dtype=E4M3) for s in (q, kv, kv))
    ones = torch.ones(b, h, device=DEVICE)
    descales = {"descale_q": ones, "descale_k": ones, "descale_v": ones}
    return tuner.attention(query, key, value, **descales), (b, h, q, d), BF16


def varlen(b: int, h: int, q: int, kv: int, d: int) -> Any:
    of_q, of_kv = (
        starts(*[q * (i + 1) for i in range(b)]),
        starts(*[kv * (i + 1) for i in range(b)]),
    )
    query, key, value = made(b * q, h, d), made(b * kv, h, d), made(b * kv, h, d)
    return tuner.attention_varlen(query, key, value, of_q, of_kv, q, kv), (b * q, h, d), BF16


def paged(b: int, h: int, q: int, pages: int, d: int) -> Any:
    cache = made(pages, 16, h, d)
    table = torch.arange(b * pages, dtype=torch.int32, device=DEVICE).view(b, pages) % max(1, pages)
    used = torch.full((b,), 16 * pages, dtype=torch.int32, device=DEVICE)
    out, lse = tuner.paged_attention(made(b * q, h, d), cache, cache, table, used, return_lse=True)
    assert lse.shape == (h, b * q)
    return out, (b * q, h, d), BF16


def sparse(b: int, h: int, q: int, kv: int, d: int) -> Any:
    mask = create_block_mask(lambda b, h, i, j: i >= 0, None, None, q, kv, device=DEVICE)
    key, value = made(b, h, kv, d), made(b, h, kv, d)
    out, lse = tuner.sparse_attention(made(b, h, q, d), key, value, mask, return_lse=True)
    assert lse.shape == (b, h, q)
    return out, (b, h, q, d), BF16


def operator(b: int, h: int, q: int, kv: int, d: int) -> Any:
    query, key, value = made(b, h, q, d), made(b, h, kv, d), made(b, h, kv, d)
    out, lse = torch.ops.tuner.attention_with_lse(query, key, value)
    assert lse.shape == (b, h, q)
    assert torch.equal(torch.ops.tuner.attention(query, key, value), out)
    return out, (b, h, q, d), BF16


def mla(b: int, h: int, q: int, pages: int) -> Any:
    table = torch.arange(b * pages, dtype=torch.int32, device=DEVICE).view(b, pages) % max(1, pages)
    used = torch.full((b,), 16 * pages, dtype=torch.int32, device=DEVICE)
    query, cache = made(b, q, h, 576), made(pages, 16, 576)
    out, lse = tuner.mla_decode(query, cache, table, used, scale=0.07, return_lse=True)
    assert lse.shape == (b, h, q)
    return out, (b, q, h, 512), BF16


def append(b: int, h: int, q: int, pages: int, d: int) -> Any:
    """The queries, as `tuner.paged_append` rotates them, and what it wrote to the caches."""
    keys, values = torch.zeros(2, b * pages, 16, h, d, dtype=BF16, device=DEVICE)
    table = torch.arange(b * pages, dtype=torch.int32, device=DEVICE).view(b, pages)
    used = torch.full((b,), 16 * pages, dtype=torch.int32, device=DEVICE)
    query, key, value = (made(b * q, h, d) for _ in range(3))
    angles = {"cosine": torch.ones(16, d // 2), "sine": torch.zeros(16, d // 2)}
    angles = {name: one.to(DEVICE) for name, one in angles.items()}
    out = torch.zeros_like(query)
    tuner.paged_append(query, key, value, keys, values, table, used, out=out, **angles)
    written = torch.cat([one.flatten() for one in (out, keys, values)])
    return written, (b * q * h * d + 2 * b * pages * 16 * h * d,), BF16


#: Entry -> its sizes, and those that a kernel's answer is a sum over: 0 where one of them is 0.
ENTRIES: dict[Callable[..., Any], tuple[tuple[int, ...], tuple[int, ...]]] = {
    linear: ((3, 8, 256), (2,)),
    linear_with_bias: ((3, 8, 256), (2,)),
    matmul: ((2, 3, 8, 16), (3,)),
    swiglu: ((3, 32, 16), (2,)),
    quantise: ((3, 256), ()),
    quantise_gated: ((3, 256), ()),
    scaled: ((16, 32, 64), (2,)),
    scaled_by_rows: ((16, 32, 64), (2,)),
    scaled_with_result: ((16, 32, 64), (2,)),
    grouped: ((2, 8, 16, 32), (3,)),
    grouped_e4m3: ((2, 8, 128, 128), (3,)),
    moe: ((3, 2, 2, 16, 32), (1, 3, 4)),
    moe_e4m3: ((3, 2, 2, 128, 128), (1, 3, 4)),
    attention: ((2, 2, 5, 7, 8), (3,)),
    attention_masked: ((2, 2, 5, 7, 8), (3,)),
    attention_e4m3: ((2, 2, 5, 7, 16), (3,)),
    varlen: ((2, 2, 5, 7, 8), (3,)),
    paged: ((2, 2, 3, 2, 8), (3,)),
    sparse: ((2, 2, 5, 7, 16), (3,)),
    operator: ((2, 2, 5, 7, 8), (3,)),
    mla: ((2, 3, 2, 2), (3,)),
    append: ((2, 2, 3, 1, 16), (3,)),
}
#: Entries that need one of these sizes, by position: a product of no group has no columns.
NEEDED = {grouped: (0,), grouped_e4m3: (0,), moe: (2,), moe_e4m3: (2,)}


def cases(is_long: bool) -> Iterator[tuple[Callable[..., Any], tuple[int, ...], bool]]:
    """Each size of each entry at 0 alone; in the long mode every set of sizes."""
    for entry, (sizes, summed) in ENTRIES.items():
        for chosen in itertools.product((False, True), repeat=len(sizes)):
            if not any(chosen) or (sum(chosen) > 1 and not is_long):
                continue
            if any(chosen[at] for at in NEEDED.get(entry, ())):
                continue
            given = tuple(0 if zero else size for size, zero in zip(sizes, chosen, strict=True))
            yield entry, given, any(chosen[at] for at in summed)


def faults(is_long: bool) -> list[str]:
    """Calls that raised, or whose output has another shape, type or number than it should."""
    found = []
    for entry, sizes, is_nothing in cases(is_long):
        try:
            out, shape, dtype = entry(*sizes)
        except Exception as exc:
            found.append(f"{entry.__name__}{sizes}: {type(exc).__name__}: {exc}")
            continue
        made_of = tuple(out.shape), out.dtype
        if made_of != (shape, dtype) or (is_nothing and out.float().any()):
            found.append(f"{entry.__name__}{sizes}: {made_of}, not {shape} {dtype} of zeros")
    return found


@contextlib.contextmanager
def tensors_of(device: str, laid: Callable[[Any], Any], factor: float) -> Iterator[None]:
    """Calls have such tensors within."""
    global DEVICE, LAID, FACTOR
    before = DEVICE, LAID, FACTOR
    DEVICE, LAID, FACTOR = device, laid, factor
    try:
        yield
    finally:
        DEVICE, LAID, FACTOR = before


def differences(count: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Drawn calls by name, each with its error against aligned tensors on the CPU.

    Sizes are multiples of the entry's, or 0. Tensors start, or have rows, off 16 bytes, and some
    operands have huge numbers. Some entries are compared on their own device: on a CPU,
    FlexAttention has no log-sum-exp, and PyTorch 2.11 no e4m3 product with factors of rows.
    """
    draw = random.Random(5)
    for index in range(count):
        entry = list(ENTRIES)[index % len(ENTRIES)]
        sizes = [size * draw.choice((1, 1, 2, 3)) for size in ENTRIES[entry][0]]
        if draw.random() < 0.2 and (at := draw.randrange(len(sizes))) not in NEEDED.get(entry, ()):
            sizes[at] = 0
        factor, view = draw.choice((1.0, 1.0, 300.0)), partial(drawn_view, random.Random(index))

        def call(
            entry: Any = entry, sizes: Any = sizes, factor: float = factor, view: Any = view
        ) -> float:
            outs = []
            reference = DEVICE if entry in (sparse, scaled_by_rows) else "cpu"
            for device, laid in ((reference, LAID), (DEVICE, view)):
                torch.manual_seed(len(sizes))
                with tensors_of(device, laid, factor):
                    outs.append(entry(*sizes)[0].double().cpu())
            # Probabilities of one are e4m3, and rows of the others where a kernel serves.
            rounding = 0.4 if entry in (attention_e4m3, linear, linear_with_bias) else 1.0
            return rounding * error(outs[1], outs[0])

        yield f"{index} {entry.__name__}{tuple(sizes)} times {factor}", call
