"""Compositions of peers that compute a layer of experts, each from the router's choice on.

All are graph-safe: sizes are read on the device, and no operation waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from tuner.families.peers import installed
from tuner.problem import SCALE_BLOCK

Peer = Callable[..., Any]
Peers = Mapping[str, Peer]
"""By name: of hidden, experts, weights, gate_up, down and the scales of both."""

MAX_SIZES = 64
"""Sizes that a composition is compiled for, at most; PyTorch stops after eight."""
MASKED_TOKENS = 1024
"""Most tokens for DeepGEMM's masked layout, which holds all of them at every expert."""


@cache
def peers_of(dtype: str) -> Peers:
    """The peers of a type that can be called here; each compiles when it is first called."""
    import torch

    torch._dynamo.config.recompile_limit = MAX_SIZES
    if dtype == "bf16":
        return {"grouped_mm": _composed, "compiled": torch.compile(_composed, dynamic=False)}
    return _e4m3()


def _composed(
    hidden: Any, experts: Any, weights: Any, gate_up: Any, down: Any, *scales: Any
) -> Any:
    """PyTorch's operations around its grouped kernel, as Transformers' ``grouped_mm`` has them."""
    import torch

    (tokens, top_k), count = experts.shape, gate_up.shape[0]
    order, offsets = _ordered(experts, count)
    both = torch._grouped_mm(hidden[order // top_k], gate_up.transpose(-2, -1), offs=offsets)
    gate, up = both.chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    each = torch._grouped_mm(gated, down.transpose(-2, -1), offs=offsets)
    each = each * weights.reshape(-1)[order, None]
    return each[_inverse(order)].view(tokens, top_k, -1).sum(1)


def _ordered(experts: Any, count: int) -> tuple[Any, Any]:
    """Slots by expert, and the end of each expert's."""
    import torch

    ordered, order = torch.sort(experts.reshape(-1))
    return order, _ends(ordered, count)


def _ends(ordered: Any, count: int) -> Any:
    """How many slots each expert and those before it have, int32."""
    import torch

    every = torch.arange(count, device=ordered.device)
    return torch.searchsorted(ordered, every, right=True, out_int32=True)


def _inverse(order: Any) -> Any:
    import torch

    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _e4m3() -> Peers:
    import torch

    if deep_gemm() is None:
        return {}
    placed, moved, gated, gathered = (
        torch.compile(function, dynamic=False) for function in (_placed, _moved, _gated, _gathered)
    )
    before = partial(_scattered, placed, moved)
    parts = before, gated, gathered
    return {
        "deep_gemm": partial(_by_deep_gemm, False, parts),
        "deep_gemm masked": partial(_by_deep_gemm, True, parts),
    }


def deep_gemm() -> Any:
    """DeepGEMM's package; None where this machine has none."""
    package = installed.module_of("deep_gemm")
    return None if isinstance(package, str) else getattr(package, "module", package)


def _by_deep_gemm(
    is_masked: bool,
    parts: tuple[Peer, Peer, Peer],
    hidden: Any,
    experts: Any,
    weights: Any,
    *matrices: Any,
) -> Any:
    """Both products in the masked layout, where each expert's matrix has as many rows as there are
    tokens; or in the contiguous one, where its rows begin at a multiple of 128 in one matrix.
    """
    import torch

    before, between, behind = parts
    gate_up, down, gate_up_scale, down_scale = matrices
    module, count, tokens = deep_gemm(), gate_up.shape[0], hidden.shape[0]
    shape: tuple[int, ...]
    ends: tuple[Any, ...]
    if is_masked:
        if tokens > MASKED_TOKENS:
            raise ValueError(f"{tokens} tokens at each of {count} experts")
        run, shape = module.m_grouped_fp8_gemm_nt_masked, (count, -(-tokens // 4) * 4)
        rows, scale, _, counts, places = before(hidden, experts, count, 0, 0, shape[1])
        ends = counts, -(-experts.numel() // count)
    else:
        run = module.m_grouped_fp8_gemm_nt_contiguous
        align = module.get_mk_alignment_for_contiguous_layout()
        room = experts.numel() + min(count, experts.numel()) * (align - 1)
        shape = (-(-room // align) * align,)
        rows, scale, groups, _, places = before(hidden, experts, count, *shape, align, 0)
        ends = (groups,)
    options = {"dtype": torch.bfloat16, "device": hidden.device}
    both = torch.empty(*shape, gate_up.shape[1], **options)
    run((rows.view(*shape, -1), scale), (gate_up, gate_up_scale), both, *ends)
    gated, scale = between(both)
    each = torch.empty(*shape, down.shape[1], **options)
    run((gated, scale), (down, down_scale), each, *ends)
    return behind(each.view(-1, down.shape[1]), places, weights)


def _scattered(
    placed: Peer,
    moved: Peer,
    hidden: Any,
    experts: Any,
    count: int,
    all_rows: int,
    align: int,
    expert_rows: int,
) -> tuple[Any, Any, Any, Any, Any]:
    """Quantised rows at their experts' places, their factors with stride 1 along the rows, each
    row's expert (-1: none), the experts' counts, and each slot's place.
    """
    import torch

    small, at, tokens, *others = placed(hidden, experts, count, all_rows, align, expert_rows)
    rows = torch.empty(
        len(others[1]), hidden.shape[1], dtype=torch.float8_e4m3fn, device=hidden.device
    )
    moved(rows.view(torch.int64), small.view(torch.int64), at, tokens)
    return rows, *others


def _moved(rows: Any, small: Any, at: Any, tokens: Any) -> None:
    """Rows of eight elements at a time: compiled code has no indices into e4m3."""
    rows[at] = small[tokens]


def _placed(
    hidden: Any, experts: Any, count: int, all_rows: int, align: int, expert_rows: int
) -> tuple[Any, ...]:
    """The tokens' quantised rows, the place and token of each slot by expert; and as `_scattered`
    but for the rows.
    """
    import torch

    top_k, flat = experts.shape[1], experts.reshape(-1)
    ordered, order = torch.sort(flat)
    ends = _ends(ordered, count)
    first = torch.nn.functional.pad(ends, (1, 0))[:-1]
    counts = ends - first
    within = torch.arange(len(flat), device=flat.device) - first[ordered]
    if expert_rows:
        starts = torch.arange(count, device=flat.device) * expert_rows
        all_rows = count * expert_rows
    else:
        padded = (counts + align - 1) // align * align
        starts = padded.cumsum(0) - padded
    at = starts[ordered] + within
    small, factors = _quantised(hidden)
    tokens = order // top_k
    # Both layouts have their factors side by side along the rows, of an expert or of all.
    height, groups_of = (expert_rows, count) if expert_rows else (all_rows, 1)
    blocks = factors.shape[1]
    scale = torch.empty(groups_of, blocks, height, dtype=torch.float32, device=hidden.device)
    scale[at // height, :, at % height] = factors[tokens]
    groups = torch.full((all_rows,), -1, dtype=torch.int32, device=hidden.device)
    groups[at] = ordered.int()
    places = torch.empty_like(order)
    places[order] = at
    scale = scale.transpose(1, 2)
    return small, at, tokens, scale if expert_rows else scale[0], groups, counts, places


def _quantised(rows: Any) -> tuple[Any, Any]:
    """e4m3 elements and factors of blocks of 128 columns."""
    import torch

    blocks = rows.float().unflatten(-1, (-1, SCALE_BLOCK))
    factors = blocks.abs().amax(-1).clamp_min(1e-4) / 448
    return (blocks / factors.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), factors


def _gated(both: Any) -> tuple[Any, Any]:
    import torch

    gate, up = both.float().chunk(2, -1)
    small, factors = _quantised(torch.nn.functional.silu(gate) * up)
    blocks = factors.transpose(-2, -1).contiguous()
    return small, blocks.transpose(-2, -1)


def _gathered(each: Any, places: Any, weights: Any) -> Any:
    tokens, top_k = weights.shape
    rows = each[places].view(tokens, top_k, -1).float()
    return (rows * weights.float().unsqueeze(-1)).sum(1).to(each.dtype)
