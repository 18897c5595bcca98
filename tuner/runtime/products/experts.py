"""A whole layer of a mixture of experts: rows to their experts, three products, weighted sums."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import torch

from tuner import settings
from tuner.errors import ConfigError
from tuner.problem import SCALE_BLOCK, SIZES
from tuner.problem.grouped_gemm import Sizes
from tuner.runtime.call import counters, guards, invariance, serving
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.products import block_scaled, expert_products, expert_rows, grouped

_INDICES = (torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_E4M3 = torch.float8_e4m3fn


def moe(
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    sizes: Sizes = "zipf",
) -> torch.Tensor:
    """Sum over each token's experts e: weight * (silu(x @ gate_e^T) * (x @ up_e^T)) @ down_e^T.

    The router's choice is an argument, as of Transformers' experts and of vLLM's. Everything after
    it is computed on the device, and nothing is read back: a captured CUDA graph may be replayed
    with other experts. Results are the same from run to run.

    Rows are copied to their experts, multiplied by `grouped_mm`, gated, and summed by their weights
    in fp32, in the order of a token's experts. A kernel of its own (`tuner build`) moves, gates and
    sums the rows of bf16. Each product is an own kernel's, or PyTorch's. Another kernel has both
    products of bf16 and the gate, where experts have few rows each.

    With scales the weights are e4m3 elements with factors of blocks. Rows are quantised in blocks
    of 128, the copied ones while they are copied and the gated ones while they are gated.

    PyTorch's operations answer all other calls, with gradients. Those are other types, weights that
    are not contiguous, and more than 512 experts or 32 of a token. Products of e4m3 without a
    kernel are among them: dequantised weights are multiplied by rows in bf16. Such a call is
    counted by its reason (`tuner.stats`), a served one as two calls of `grouped_mm`.

    Args:
        hidden: (T, H), the tokens' rows; rows may lie apart.
        experts: (T, top_k), int32 or int64. A token may name an expert twice. Numbers below 0, and
            of G or more, add nothing: experts of other ranks.
        weights: (T, top_k), floating: the experts' weights.
        gate_up: (G, 2 I, H), the rows of gate before those of up; as `hidden`, or float8_e4m3fn.
        down: (G, H, I), as `gate_up`.
        gate_up_scale: fp32 (G, 2 I / 128, H / 128), rounded up.
        down_scale: fp32 (G, H / 128, I / 128), rounded up.
        sizes: as of `grouped_mm`.

    Returns:
        (T, H), of the type of `hidden`.

    Raises:
        ConfigError: on tensors or sizes that are not as above.
    """
    call = Layer(hidden, experts, weights, gate_up, down, gate_up_scale, down_scale, sizes)
    out = answer(call)
    return _composed(call) if out is None else out


class OwnGate(NamedTuple):
    """Experts that differ from SwiGLU's, by PyTorch's operations between the products."""

    function: Callable[[torch.Tensor], torch.Tensor]
    """(M, 2 I) to (M, I)."""
    gate_up_bias: torch.Tensor | None
    """(G, 2 I)"""
    down_bias: torch.Tensor | None
    """(G, H)"""


class Layer(NamedTuple):
    """Arguments of `moe`."""

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    sizes: Sizes
    gate: OwnGate | None = None
    """None: SwiGLU, without biases."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        every = *self, *(self.gate or ())
        return tuple(item for item in every if isinstance(item, torch.Tensor))


def answer(call: Layer) -> torch.Tensor | None:
    """The output by own kernels, or None and a counted reason when PyTorch must answer.

    Raises:
        ConfigError: as `moe`.
    """
    _check(call)
    if torch.compiler.is_compiling():
        invariance.forbid("a graph of torch.compile has PyTorch's operations")
        return None
    refusal = _refusal(call)
    rows = None if refusal else expert_rows.by_kernel(call.hidden.device)
    if rows is None:
        reason = (refusal or Refusal(Kind.EXPERT_ROWS)).reason
        invariance.forbid(reason, call.hidden)
        counters.count_fallback(reason)
        return None
    return _launched(call, rows)


def _check(call: Layer) -> None:
    hidden, experts, weights, gate_up, down, *_ = call
    shapes = [tuple(tensor.shape) for tensor in (hidden, experts, weights, gate_up, down)]
    ranks = [len(shape) for shape in shapes]
    (tokens, columns), (count, _, inner) = ((*shapes[0], 0, 0)[:2], (*shapes[4], 0, 0, 0)[:3])
    due = [(tokens, columns), shapes[1], shapes[1], (count, 2 * inner, columns)]
    due.append((count, columns, inner))
    if ranks != [2, 2, 2, 3, 3] or shapes != due or shapes[1][0] != tokens or not count:
        raise ConfigError(
            f"{', '.join(map(str, shapes))} are not a layer of experts (allowed: (T, H), twice "
            "(T, top_k), (G, 2 I, H), (G, H, I), G > 0)"
        )
    if experts.dtype not in _INDICES or weights.dtype not in _FLOATS:
        came = f"{experts.dtype} and {weights.dtype}"
        raise ConfigError(f"experts and weights are {came} (allowed: int32 or int64, floating)")
    if call.sizes not in SIZES:
        raise ConfigError(f"sizes={call.sizes} is not known (allowed: {', '.join(SIZES)})")
    is_scaled = call.gate_up_scale is not None or call.down_scale is not None
    kind = _E4M3 if is_scaled else hidden.dtype
    if hidden.dtype not in _FLOATS or gate_up.dtype != kind or down.dtype != kind:
        came = ", ".join(str(t.dtype).removeprefix("torch.") for t in (hidden, gate_up, down))
        raise ConfigError(
            f"hidden, gate_up and down are {came} (allowed: one floating type, or both weights "
            "float8_e4m3fn with gate_up_scale and down_scale)"
        )
    if is_scaled:
        _check_scale("gate_up_scale", call.gate_up_scale, gate_up)
        _check_scale("down_scale", call.down_scale, down)


def _check_scale(name: str, scale: torch.Tensor | None, weight: torch.Tensor) -> None:
    count, *sizes = weight.shape
    due = (count, *(ceil(size / SCALE_BLOCK) for size in sizes))
    if scale is None or scale.dtype != torch.float32 or tuple(scale.shape) != due:
        came = "missing" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise ConfigError(f"{name} is {came} (allowed: torch.float32 {due})")


def _refusal(call: Layer) -> Refusal | None:
    """Reason why own kernels do not compute the layer; else None."""
    if settings.disabled():
        return Refusal(Kind.OFF)
    inputs = call.inputs
    if refusal := guards.unserved(inputs) or guards.deferred(*inputs):
        return refusal
    hidden, experts, gate_up, down = call.hidden, call.experts, call.gate_up, call.down
    if len({tensor.device for tensor in inputs}) > 1:
        return Refusal(Kind.MIXED)
    (tokens, columns), (count, _, inner) = hidden.shape, down.shape
    if call.gate is not None and call.gate_up_scale is not None:
        return Refusal(Kind.TENSORS, "e4m3 with a gate of its own")
    if hidden.dtype != torch.bfloat16:
        return Refusal(Kind.TENSORS, f"the tokens are {hidden.dtype} (bf16 is served)")
    step = expert_rows.VECTOR
    if not (hidden.numel() and inner and experts.numel()) or columns % step or inner % step:
        return Refusal(Kind.TENSORS, f"{tokens} tokens, H={columns}, I={inner}")
    top_k = experts.shape[1]
    if count > expert_rows.MAX_EXPERTS or top_k > expert_rows.MAX_TOP_K:
        return Refusal(Kind.TENSORS, f"{count} experts, {top_k} of a token")
    if experts.numel() > expert_rows.MAX_SLOTS:
        return Refusal(Kind.TENSORS, f"{experts.numel()} rows")
    is_apart = tokens > 1 and (hidden.stride(0) < columns or hidden.stride(0) % step)
    if hidden.stride(1) != 1 or is_apart or not (gate_up.is_contiguous() and down.is_contiguous()):
        return Refusal(Kind.NOT_CONTIGUOUS)
    if guards.is_misaligned((hidden, gate_up, down)):
        return Refusal(Kind.MISALIGNED)
    # PyTorch has a grouped kernel of bf16 only: then rows of e4m3 are better not quantised.
    scales = call.gate_up_scale, call.down_scale
    for b, scale in zip((call.gate_up, call.down), scales, strict=True):
        if scale is None:
            return None
        a, offsets = b.new_empty(call.experts.numel(), b.shape[2]), call.experts.new_empty(1)
        product = grouped.GroupedCall(a, b, offsets, call.sizes, scale, scale)
        plan = serving.find(product)
        if isinstance(plan, Refusal):
            return plan
    return None


def _launched(call: Layer, rows: expert_rows.LaunchedRows) -> torch.Tensor:
    """The layer by the kernel of rows and the grouped products."""
    weights = call.weights
    if weights.dtype not in (torch.bfloat16, torch.float32):
        weights = weights.float()
    quantises = call.down_scale is not None
    if (products := _products(call)) is not None:
        return _tiled(call, products, rows, weights)
    offsets, places = rows.place(call.experts.contiguous(), call.down.shape[0])
    copies, factors = rows.copy(call.hidden, places, quantises=quantises)
    pairs = grouped.grouped_mm(
        copies, call.gate_up, offsets,
        sizes=call.sizes, scale_a=factors, scale_b=call.gate_up_scale,
    )  # fmt: skip
    if call.gate is not None:
        return rows.combine(_gated(call, call.gate, pairs, offsets), places, weights.contiguous())
    products, factors = rows.gate(pairs, offsets, quantises=quantises)
    outs = grouped.grouped_mm(
        products, call.down, offsets,
        sizes=call.sizes, scale_a=factors, scale_b=call.down_scale,
    )  # fmt: skip
    return rows.combine(outs, places, weights.contiguous())


def _tile_rows(call: Layer) -> int:
    count, hidden, inner = call.down.shape
    return expert_products.tile_rows(call.experts.numel(), count, hidden * inner)


def _products(call: Layer) -> expert_products.LaunchedProducts | None:
    """The kernel of both products where experts have few rows; None: grouped products.

    A row's bits must not depend on its expert's other rows in the mode of `tuner.deterministic`,
    and so not on which kernel has them.
    """
    if call.gate is not None or call.down_scale is not None or invariance.is_on():
        return None
    # Also where it has no part in the call: the next one may be captured, and none is loaded there.
    products = expert_products.by_kernel(call.hidden.device)
    return products if _tile_rows(call) else None


def _tiled(
    call: Layer,
    products: expert_products.LaunchedProducts,
    rows: expert_rows.LaunchedRows,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The layer by tiles of experts' rows."""
    experts = call.experts.contiguous()
    tiles = products.place(experts, len(call.down), _tile_rows(call), rows)
    outs = products.down(products.up(call.hidden, call.gate_up, tiles), call.down, tiles)
    for _ in range(2):
        counters.count_hit()
    return rows.combine(outs, tiles.places, weights.contiguous())


def _gated(call: Layer, gate: OwnGate, halves: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The down product behind a gate of its own, with biases; rows behind the last are anything."""
    places = torch.arange(len(halves), device=halves.device)
    experts = torch.searchsorted(offsets[1:], places, right=True).clamp_(max=len(call.down) - 1)
    if gate.gate_up_bias is not None:
        halves += gate.gate_up_bias[experts]
    products = gate.function(halves).contiguous()
    outs = grouped.grouped_mm(products, call.down, offsets, sizes=call.sizes)
    if gate.down_bias is not None:
        outs += gate.down_bias[experts]
    return outs


def _composed(call: Layer) -> torch.Tensor:
    """The layer by PyTorch's operations, of weights in the type of `hidden`."""
    rows, hidden = expert_rows.ComposedRows(), call.hidden
    gate_up, down = call.gate_up, call.down
    if call.gate_up_scale is not None and call.down_scale is not None:
        gate_up = block_scaled.dequantised_all(gate_up, call.gate_up_scale).to(hidden.dtype)
        down = block_scaled.dequantised_all(down, call.down_scale).to(hidden.dtype)
    if call.experts.numel() == 0:
        return torch.zeros_like(hidden)
    offsets, places = rows.place(call.experts, down.shape[0])
    pairs = grouped.by_pytorch(rows.copy(hidden, places), gate_up, offsets)
    outs = grouped.by_pytorch(rows.gate(pairs, offsets), down, offsets)
    return rows.combine(outs, places, call.weights)
