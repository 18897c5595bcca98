"""Stand-in of the C++ dispatcher while none is loaded: PyTorch answers calls that were refused.

It holds calls without gradients, of tensors that PyTorch's kernels read rightly where they lie, up
to the table's next look at the store. All others are left to the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from time import monotonic
from typing import Any, Final, Literal

from torch import Tensor, is_grad_enabled
from torch.nn.functional import linear as pytorch_linear
from torch.nn.functional import scaled_dot_product_attention as pytorch_attention

from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.runtime.call import counters, devices, guards, handed_over
from tuner.runtime.call.refusal import Kind, Refusal

REFUSED: Final = False
"""Result for a refused call that was counted; the caller passes it to PyTorch."""
_ALIGNED_COLUMNS = 8
"""Columns that rows of an output are aligned by. `tuner.linear` has its own answer to others."""
_MAX_HELD = 256
"""Calls held; more kinds between two looks at the store go through the table."""
_OFF = TMA_ALIGNMENT_BYTES - 1
"""Bits of an address that an aligned tensor does not have."""
_MATMUL = "matmul"
"""Stands where facts of `linear` have the activation."""
_FAULTS = (AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of arguments that are not held: tensors without strides or memory, other types."""


class _Tally:
    """A counter that threads add to without a lock."""

    def __init__(self) -> None:
        self.add: Callable[[], int] = itertools.count().__next__
        self._taken = 0

    def take(self, reset: bool) -> int:
        """Calls of `add` since the last reset."""
        calls = self.add() - self._taken
        self._taken += 1 + reset * calls
        return calls


_tallies: dict[str, _Tally] = {}
_held: dict[Hashable, Callable[[], int]] = {}
"""Count of each call, by its facts."""
_ends = 0.0
generation = 0
"""Changes whenever calls are forgotten."""


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Hashable:
    """Facts of a call of attention, for tensors of one type and device; flat, so quickly made."""
    return (
        query.shape,
        query.stride(),
        query.dtype,
        query.get_device(),
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        is_causal,
        scale,
        enable_gqa,
    )


def _multiplied(a: Tensor, b: Tensor, bias: Tensor | None, which: object) -> Hashable:
    """Facts of a product, for tensors of one type and device."""
    of_bias = None if bias is None else (bias.shape, bias.stride())
    return a.shape, b.shape, a.stride(), b.stride(), a.dtype, a.get_device(), of_bias, which


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """PyTorch's output of a call that is held; else None. Arguments are those of PyTorch."""
    if not _held or attn_mask is not None or dropout_p:
        return None
    try:
        count = _held.get(_attended(query, key, value, is_causal, scale, enable_gqa))
        if (
            count is None
            or (query.data_ptr() | key.data_ptr() | value.data_ptr()) & _OFF
            or (
                is_grad_enabled()
                and (query.requires_grad or key.requires_grad or value.requires_grad)
            )
            or devices.is_autocast()
            or monotonic() >= _ends
        ):
            return None
    except _FAULTS:
        return None
    count()
    if not is_causal and scale is None and not enable_gqa:
        return pytorch_attention(query, key, value)  # the fewer arguments, the less to parse
    return pytorch_attention(
        query, key, value, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor | Literal[False] | None:
    """As `attention`; `REFUSED` for a call that is held and is not PyTorch's `linear` alone."""
    if not _holds(input, weight, bias, activation):
        return None
    if activation is not None or weight.shape[0] % _ALIGNED_COLUMNS:
        return REFUSED
    return pytorch_linear(input, weight, bias)


def matmul(input: Tensor, other: Tensor, out: Tensor | None) -> Literal[False] | None:
    """As `linear`."""
    return REFUSED if out is None and _holds(input, other, None, _MATMUL) else None


def _holds(a: Tensor, b: Tensor, bias: Tensor | None, which: object) -> bool:
    """True for a product that is held, which is counted."""
    if not _held:
        return False
    try:
        count = _held.get(_multiplied(a, b, bias, which))
        if (
            count is None
            or (
                is_grad_enabled()
                and (
                    a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
                )
            )
            or monotonic() >= _ends
        ):
            return False
    except _FAULTS:
        return False
    count()
    return True


def refuse(operation: str, arguments: tuple[Any, ...], refusal: Refusal, found_in: int) -> None:
    """Hold a call that was refused and counted, unless another one of equal facts may be served.

    Args:
        operation: ``attention``, ``linear`` or ``matmul``; no others are held.
        arguments: as for `dispatch.put`.
        refusal: the reason.
        found_in: `generation` before the look-up.
    """
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    is_held = (
        found_in == generation
        and refusal.until >= _ends
        and refusal.kind is not Kind.MISALIGNED  # of these tensors, not of the kind
        and len(_held) < _MAX_HELD
        and guards.are_plain(*tensors)
        and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        and not guards.wants_gradient(*tensors)
        and not devices.is_autocast()
    )
    if not is_held:
        return
    facts: Hashable = None
    if operation == "attention":
        query, key, value, attn_mask, dropout_p, *options = arguments
        if attn_mask is None and not dropout_p and handed_over.is_ready(query, key, value):
            facts = _attended(query, key, value, *options)
    elif operation == "linear":
        facts = _multiplied(*arguments)
    elif operation == "matmul":
        a, b = arguments
        facts = _multiplied(a, b, None, _MATMUL)
    if facts is not None:
        kind = counters.kind_of(refusal.reason)
        _held[facts] = _tallies.setdefault(kind, _Tally()).add


def forget() -> None:
    """Hold nothing."""
    global _held, generation
    _held = {}
    generation += 1


def hold_until(end: float) -> None:
    """Forget all calls, and hold those to come up to this time (`time.monotonic`, seconds)."""
    global _ends
    forget()
    _ends = end


def _take_counts(reset: bool) -> tuple[int, int, Mapping[str, int]]:
    """Calls answered by kind of reason, as `counters.Source`."""
    refused = {kind: tally.take(reset) for kind, tally in list(_tallies.items())}
    return 0, 0, {kind: calls for kind, calls in refused.items() if calls}


counters.add_source(_take_counts)
