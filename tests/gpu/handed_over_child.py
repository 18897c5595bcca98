"""A child of `test_runtime_handed_over_gpu`: calls that a kernel of PyTorch's may end a process on.

``python handed_over_child.py GROUP WAY COUNT``: a line of JSON for each case, with its name and its
relative error against float64, or the fault in its place. The way of the calls is ``dispatcher`` or
``python``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import entry_calls
import torch
from runtime_gpu import part, store, this_gpu
from unaligned import WAYS, drawn_view, error, exact

import tuner
from tuner.config import Config
from tuner.problem import AttentionProblem

Cases = Iterator[tuple[str, Callable[[], float | str]]]
SDPA = torch.nn.functional.scaled_dot_product_attention


def tensors(*sizes: int, dtype: Any = torch.bfloat16, factor: float = 1.0) -> list[Any]:
    """Query, key and value of sizes (B, H, HKV, SQ, SKV, D)."""
    batch, heads, heads_kv, queries, keys, width = sizes
    shapes = (batch, heads, queries, width), *[(batch, heads_kv, keys, width)] * 2
    q, k, v = (torch.randn(shape, device="cuda") for shape in shapes)
    return [(q * factor).to(dtype), k.to(dtype), v.to(dtype)]


def enabled(*arguments: Any, **options: Any) -> Any:
    with tuner.enabled():
        return SDPA(*arguments, **options)


def compiled(*arguments: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    with tuner.enabled():
        return torch.compile(lambda *given: SDPA(*given, **options))(*arguments)


def compiled_tuner(*arguments: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda *given: tuner.attention(*given, **options))(*arguments)


ATTENDS: dict[str, Callable[..., Any]] = {"tuner": tuner.attention, "enabled": enabled}
COMPILED = {"compiled": compiled, "compiled tuner": compiled_tuner}


def twice(attend: Callable[..., Any], wanted: Any, *arguments: Any, **options: Any) -> float:
    """The larger error of two calls: the second goes the way that the first has made known."""
    return max(error(attend(*arguments, **options), wanted) for _ in range(2))


def once(attend: Callable[..., Any], wanted: Any, *arguments: Any) -> float:
    """The error of one call."""
    return error(attend(*arguments), wanted)


def gradients(attend: Callable[..., Any], given: Any, mask: Any, **options: Any) -> float:
    """The largest error of output and gradients; the output's gradient is unaligned, too.

    Where the operators are overridden, both passes are.
    """
    leaves: Any = [t.detach().requires_grad_() for t in given]
    wanted = exact(*leaves, mask, **options)
    upstream = WAYS["wider rows"](torch.randn_like(wanted).to(given[0].dtype))
    grads = torch.autograd.grad(wanted, leaves, upstream.double())
    with tuner.enabled() if attend is enabled else contextlib.nullcontext():
        out = attend(*leaves, mask, enable_gqa=True, **options)
        found = torch.autograd.grad(out, leaves, upstream)
    pairs = zip((out, *found), (wanted, *grads), strict=True)
    return max(error(one, other.detach()) for one, other in pairs)


def unaligned(count: int) -> Cases:
    """Each tensor in each way, and all three; masks with terms; gradients."""
    for width, (way, view) in itertools.product((64, 128), WAYS.items()):
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            plain = tensors(2, 4, 2, 200, 320, width)
            given: Any = [view(t) if i in which else t for i, t in enumerate(plain)]
            for name, attend in ATTENDS.items():
                label = f"{name} D={width} {way}"
                call = partial(twice, attend, exact(*given), *given, enable_gqa=True)
                yield f"{label} {which}", call
                if which == (0, 1, 2):
                    options = {"is_causal": True, "enable_gqa": True}
                    wanted = exact(*given, is_causal=True)
                    yield f"{label} causal", partial(twice, attend, wanted, *given, **options)
                    yield f"{label} gradients", partial(gradients, attend, given, None)
    plain = tensors(2, 4, 4, 200, 320, 64)
    bias = torch.randn(2, 4, 200, 320, device="cuda").bfloat16()
    for way, view in WAYS.items():
        for name, attend in ATTENDS.items():
            given = [*plain, view(bias)]
            yield f"{name} bias {way}", partial(twice, attend, exact(*given), *given)
    for way, view in WAYS.items():
        given = [view(t) for t in tensors(2, 4, 4, 256, 256, 64)]
        for name, attend in COMPILED.items():
            yield f"{name} {way}", partial(once, attend, exact(*given), *given)


def windows(count: int) -> Cases:
    """Windows, which PyTorch's operations compose, and packed sequences."""
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    for way, view in WAYS.items():
        given = [view(t) for t in tensors(2, 4, 4, 256, 256, 64)]
        packed = [view(t[0].transpose(0, 1).contiguous()) for t in given]

        def window(given: Any = given) -> float:
            return twice(tuner.attention, exact(*given), *given, window=(1000, 1000))

        def varlen(packed: Any = packed) -> float:
            out = tuner.attention_varlen(*packed, starts, starts, 156, 156)
            parts = [
                exact(*(t[first:last].transpose(0, 1)[None] for t in packed))[0].transpose(0, 1)
                for first, last in ((0, 100), (100, 256))
            ]
            return error(out, torch.cat(parts))

        yield f"window {way}", window
        yield f"packed {way}", varlen


def masks(queries: int, keys: int) -> dict[str, Any]:
    """Masks with rows that see no key, by name."""
    seen = torch.rand(queries, keys, device="cuda") < 0.5
    seen[::3] = False
    lengths = torch.tensor([0, keys], device="cuda")
    padding = (torch.arange(keys, device="cuda") < lengths[:, None])[:, None, None]
    return {
        "rows": seen,
        "a sequence": padding,
        "all": torch.zeros(2, 1, queries, keys, dtype=torch.bool, device="cuda"),
        "a head": torch.arange(4, device="cuda")[:, None, None].expand(4, queries, keys) > 1,
        "every row written out": padding.expand(2, 4, queries, keys),
    }


def blind(count: int) -> Cases:
    """Rows that see no key, in every kind of mask."""
    for keys, dtype in itertools.product((320, 77, 1024), (torch.float16, torch.bfloat16)):
        given: Any = tensors(2, 4, 4, 200, keys, 64, dtype=dtype)
        for mask_name, mask in masks(200, keys).items():
            wanted = exact(*given, mask)
            for name, attend in ATTENDS.items():
                label = f"{name} {mask_name} {keys} {dtype}"
                yield label, partial(twice, attend, wanted, *given, mask)
                yield f"{label} gradients", partial(gradients, attend, given, mask)
    given = tensors(2, 4, 4, 256, 320, 64)
    for mask_name, mask in masks(256, 320).items():
        wanted = exact(*given, mask)
        for name, attend in COMPILED.items():
            yield f"{name} {mask_name}", partial(once, attend, wanted, *given, mask)


def vendors(count: int) -> Cases:
    """cuDNN's kernel is decided for each call: its operands are T5's in a cross attention."""
    longer = torch.randn(1, 8, 512, 512, device="cuda").bfloat16()
    for queries, keys in ((1, 2), (1, 7), (1, 8), (5, 12), (16, 64)):
        problem = AttentionProblem.parse(
            f"H=8,SQ={queries},SKV={keys},D=64,dtype=bf16,bias={'hk' if queries == 1 else 'h'}"
        )
        store(problem, this_gpu(), Config("vendor_sdpa", {"kernel": "cudnn"}))
        q, k, v = tensors(1, 8, 8, queries, keys, 64)
        for row, column in ((0, 0), (511 - queries, 0), (3, 5)):
            bias = longer[:, :, row : row + queries, column : column + keys]
            for name, attend in ATTENDS.items():
                for way, view in (("", torch.clone), *WAYS.items()):
                    given = view(q), k, view(v), bias
                    label = f"{name} {queries}x{keys} at {row},{column} {way}"
                    yield label, partial(twice, attend, exact(*given), *given)


def empty(count: int) -> Cases:
    entry_calls.DEVICE = "cuda"
    yield "entries", lambda: "\n".join(entry_calls.faults(count > 1)) or 0.0
    for sizes in (
        (0, 4, 4, 8, 8, 64),
        (2, 0, 0, 8, 8, 64),
        (2, 4, 4, 0, 8, 64),
        (2, 4, 2, 8, 0, 64),
    ):
        for name, attend in ATTENDS.items():

            def call(attend: Any = attend, sizes: tuple[int, ...] = sizes) -> float:
                given = [t.requires_grad_() for t in tensors(*sizes)]
                out = attend(*given, enable_gqa=True)
                out.sum().backward()
                assert out.shape == given[0].shape and not out.any()
                return float(max(t.grad.abs().sum() for t in given))

            yield f"{name} {sizes}", call


def entries(count: int) -> Cases:
    entry_calls.DEVICE = "cuda"
    yield from entry_calls.differences(count)


def drawn(count: int) -> Cases:
    """Sizes 0 among them, views, masks and large scores."""
    draw = random.Random(11)
    for index in range(count):
        size = draw.choice([0, 1, 2, 3])
        heads_kv = draw.choice([1, 2, 4])
        queries, keys = (draw.choice([0, 1, 2, 7, 64, 65, 200, 513]) for _ in range(2))
        width = draw.choice([8, 40, 64, 65, 72, 128, 256])
        dtype, factor = (
            draw.choice([torch.float16, torch.bfloat16]),
            draw.choice([1.0, 30.0, 300.0]),
        )
        q, k, v = tensors(size, 4, heads_kv, queries, keys, width, dtype=dtype, factor=factor)
        terms = torch.randn(1, draw.choice([1, 4]), queries, keys, device="cuda")
        mask = draw.choice([None, terms.to(dtype), terms > 0, terms > 9])
        is_causal = mask is None and draw.random() < 0.5
        views = [drawn_view(draw, t) if t.numel() else t for t in (q, k, v)]
        if mask is not None and mask.numel():
            mask = drawn_view(draw, mask)
        attend = draw.choice(list(ATTENDS))
        label = f"{index} {attend} {tuple(q.shape)} {tuple(k.shape)} {dtype} {factor}"

        def call(g: Any = views, m: Any = mask, c: bool = is_causal, a: str = attend) -> float:
            wanted = exact(*g, m, c)
            options = {"is_causal": c, "enable_gqa": True}
            return twice(ATTENDS[a], wanted, *g, m, **options)

        yield label, call


GROUPS: dict[str, Callable[[int], Cases]] = {
    each.__name__: each for each in (unaligned, windows, blind, vendors, empty, entries, drawn)
}


def main(group: str, way: str, count: int) -> None:
    faulthandler.enable()  # names the call that a signal ends
    dispatch, table = part("call.dispatch"), part("call.table").table
    if way == "python":  # nothing is overridden without the dispatcher
        del ATTENDS["enabled"], COMPILED["compiled"]
        dispatch.prepare, dispatch.load_built = (lambda then: None for _ in range(2))
    else:
        dispatch.prepare(then=table.renew).join(300)
        assert dispatch.is_loaded(), "no dispatcher: a compiler or Python's headers are missing"
    torch.manual_seed(0)
    for name, call in GROUPS[group](count):
        try:
            result = call()
            torch.cuda.synchronize()
        except Exception as exc:
            result = f"{type(exc).__name__}: {exc}"
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
