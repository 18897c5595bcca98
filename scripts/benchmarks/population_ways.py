"""Contenders for a drawn call: the tuner, PyTorch, and its peers where they are installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import tuner
from benchmarks.harness import Contender
from benchmarks.population_tensors import Inputs
from benchmarks.rows import PYTORCH, TUNER
from tuner.families.peers.sdpa import peer
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.problem.population import LOWER_RIGHT, PADDING, POSITIONS, ModelCall

ENABLED, FLEX = f"{TUNER} enabled", "flex"

_Way = tuple[str, Callable[[Inputs], Any], Callable[[], AbstractContextManager[Any]]]


def contenders(
    call: ModelCall, copies: Sequence[Inputs], compiles: bool | None = None
) -> list[Contender]:
    """Everyone who may answer: PyTorch first, as the control.

    Args:
        call: the call.
        copies: its tensors.
        compiles: True to include FlexAttention and torch.compile; None: FlexAttention where
            PyTorch's operator cannot compute the call alone.
    """
    ways = _attention_ways(call, compiles) if call.views else _product_ways(call, compiles)
    return [
        Contender(name, lambda i, run=run: run(copies[i]), around)  # type: ignore[misc]
        for name, run, around in ways
    ]


def _attention_ways(call: ModelCall, compiles: bool | None) -> Iterator[_Way]:
    problem = call.problem
    assert isinstance(problem, AttentionProblem)
    plain = contextlib.nullcontext
    is_grouped = problem.heads_q != problem.heads_kv
    options: dict[str, Any] = {"is_causal": problem.is_causal, "enable_gqa": is_grouped}
    extras: dict[str, Any] = {}
    if problem.is_windowed:
        extras["window"] = problem.window_left, problem.window_right
    if problem.softcap:
        extras["softcap"] = problem.softcap

    def own(at: Inputs) -> Any:
        query, key, value = at.tensors
        return tuner.attention(query, key, value, at.mask, **options, **extras)

    def sdpa(at: Inputs) -> Any:
        attend, (query, key, value) = functional.scaled_dot_product_attention, at.tensors
        mask = at.whole_mask
        if mask is None:
            return attend(query, key, value, **options)
        if is_grouped:  # as Transformers does: few backends take both
            key, value = (_repeated(t, problem.heads_q) for t in (key, value))
        return attend(query, key, value, mask)

    if problem.softcap:  # PyTorch's operator has none
        if compiles is not False:
            yield PYTORCH, _flex(problem), plain
        yield TUNER, own, plain
    else:
        yield PYTORCH, sdpa, plain
        yield TUNER, own, plain
        yield ENABLED, sdpa, tuner.enabled
        yield "cudnn", sdpa, _only_cudnn
        if compiles or (compiles is None and problem.is_windowed):
            yield FLEX, _flex(problem), plain
    yield from _flash_ways(call, problem)


def _repeated(tensor: Any, heads: int) -> Any:
    """(B, HKV, S, D) with each head as often as makes (B, H, S, D)."""
    batch, heads_kv, tokens, width = tensor.shape
    shape = batch, heads_kv, heads // heads_kv, tokens, width
    return tensor[:, :, None].expand(shape).reshape(batch, heads, tokens, width)


def _only_cudnn() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)  # type: ignore[no-any-return]


def _flash_ways(call: ModelCall, problem: AttentionProblem) -> Iterator[_Way]:
    """FlashAttention-3 and -4, which lay a causal mask along the last query and key."""
    variants: list[tuple[str, str, dict[str, Any]]] = [("flash3", "flash3", {})]
    if call.kind in ("decoding", "cross"):
        variants.append(("flash3_splits", "flash3", {"num_splits": 0}))
    variants.append(("flash4", "flash4", {}))
    for name, module, further in variants:
        attend = peer(module)
        options: dict[str, Any] = {
            "causal": problem.is_causal or call.mask == LOWER_RIGHT,
            "scale": problem.head_dim**-0.5,
            **further,
        }
        if problem.is_windowed:
            options["window_size"] = problem.visible
        if problem.softcap:
            options["softcap"] = problem.softcap
        if isinstance(attend, str):
            yield name, partial(_refuse, attend), contextlib.nullcontext
        elif call.mask in (PADDING, POSITIONS):
            yield name, partial(_refuse, f"{name} takes no such mask"), contextlib.nullcontext
        else:
            yield name, partial(_flash, attend, options), contextlib.nullcontext


def _flash(attend: Callable[..., Any], options: Mapping[str, Any], at: Inputs) -> Any:
    return attend(*(t.transpose(1, 2) for t in at.tensors), **options).transpose(1, 2)


def _refuse(reason: str, at: Inputs) -> Any:
    raise RuntimeError(reason)


def _flex(problem: AttentionProblem) -> Callable[[Inputs], Any]:
    """Compiled FlexAttention with the problem's window and soft cap, and the call's mask."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    left, right = problem.visible
    cap = problem.softcap
    is_masked = problem.is_causal or problem.is_windowed
    kept: list[Any] = []

    def within(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key - row >= -left) & (key - row <= right)

    def given(mask: Any) -> Any:
        whole = mask[(None,) * (4 - mask.dim())]
        whole = whole.expand(problem.batch, 1, problem.seqlen_q, problem.seqlen_kv)
        return lambda b, h, row, key: whole[b, 0, row, key]

    def blocks(at: Inputs) -> Any:
        found = [within] if is_masked else []
        found += [] if at.mask is None else [given(at.mask)]
        if not found:
            return None
        batch = None if at.mask is None else problem.batch
        sizes = problem.seqlen_q, problem.seqlen_kv
        return create_block_mask(and_masks(*found), batch, None, *sizes, at.tensors[0].device)

    def capped(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def run(at: Inputs) -> Any:
        if not kept:
            torch.compiler.reset()
            kept.append(blocks(at))
            kept.append(torch.compile(flex_attention, dynamic=False))
        options = {"score_mod": capped} if cap else {}
        is_grouped = problem.heads_q != problem.heads_kv
        return kept[1](*at.tensors, block_mask=kept[0], enable_gqa=is_grouped, **options)

    return run


def _product_ways(call: ModelCall, compiles: bool | None) -> Iterator[_Way]:
    problem = call.problem
    plain = contextlib.nullcontext
    if isinstance(problem, SwigluProblem):
        yield PYTORCH, _gated, plain
        yield TUNER, lambda at: tuner.swiglu(*at.tensors[:2]), plain
        theirs = _gated
    else:
        assert isinstance(problem, GemmProblem)
        name = problem.activation
        act = activation(name)

        def theirs(at: Inputs) -> Any:
            return act(functional.linear(*at.tensors))

        yield PYTORCH, theirs, plain
        yield TUNER, lambda at: tuner.linear(*at.tensors, activation=name or None), plain
        if problem.has_bias and name in ("relu", "gelu_tanh"):
            yield "addmm_activation", partial(_fused, name == "gelu_tanh"), plain
    if compiles:
        options = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
        yield "inductor", torch.compile(theirs, **options), plain
    for library in ("cublas", "cublaslt"):
        yield library, theirs, partial(_preferring, library)


def activation(name: str) -> Callable[[Any], Any]:
    """PyTorch's own by the name that an epilogue has for it."""
    known: dict[str, Callable[[Any], Any]] = {
        "": lambda x: x,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    }
    return known.get(name) or getattr(functional, name)


def _fused(use_gelu: bool, at: Inputs) -> Any:
    x, weight, bias = at.tensors
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=use_gelu)


def _gated(at: Inputs) -> Any:
    """Both projections in one product, gate before up."""
    gate, up = functional.linear(*at.tensors[:2]).chunk(2, -1)
    return functional.silu(gate) * up


@contextlib.contextmanager
def _preferring(library: str) -> Iterator[None]:
    prefer = torch.backends.cuda.preferred_blas_library
    before = prefer()
    prefer(library)
    try:
        yield
    finally:
        prefer(before)
