"""Attention over a sequence that is split over the ranks of a process group.

Every rank holds its own part of the queries, keys and values. Keys and values pass from rank to
rank in a ring. In each step a rank computes attention of its queries over the keys that it holds.
The partial results are merged by their log-sum-exp. The backward pass sends keys and values round
again, together with the sums of their gradients, in at least single precision.

Under a full mask rank r holds the r-th part of the sequence. Under a causal mask that order would
leave the first ranks idle. There the sequence is cut into twice as many chunks as ranks, and rank r
of n holds chunks r and 2n - 1 - r (zigzag). Each step is then one kernel call, with equal work in
every rank. L is the length of a rank's part.

| keys come from | queries | keys | mask |
|---|---|---|---|
| the rank itself | all L | all L | causal |
| a rank before it | all L | first L / 2 | full |
| a rank after it | last L / 2 | all L | full |

`tuner::attention_with_lse` and `tuner::attention_backward` compute the partial results, by a tuned
kernel or by PyTorch's. After `tuner.runtime.parallel.distributed.agree` all ranks use one list of
decisions. Without it each rank reads its own store, and results are equal within rounding only.

    from tuner.runtime.parallel.context_parallel import position_ids, ring_attention, split_sequence

    tokens = split_sequence(tokens, dim=1, is_causal=True)  # (B, S) -> (B, S / ranks)
    positions = position_ids(length, is_causal=True)  # for rotary embeddings
    out = ring_attention(query, key, value, is_causal=True)  # in each layer

PyTorch's own ``torch.distributed.tensor.experimental.context_parallel`` computes each step by the
operators that `tuner.enable` overrides on CUDA. Its CPU attention has no such ring: PyTorch 2.13
refuses the call, with `tuner.enable` and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tuner.errors import ConfigError
from tuner.runtime.call import guards
from tuner.runtime.parallel.ring import Ring

__all__ = ["join_sequence", "position_ids", "ring_attention", "split_sequence"]

_ALL = slice(None)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V of a whole sequence, for this rank's queries.

    Call it in every rank of the group, with parts as `split_sequence` makes them. The ranks compare
    shapes, types and options at the first call of each kind, which all of them must make together.

    Partial results and gradients are added in a fixed order. With deterministic kernels equal calls
    give equal bits while the store's decisions stay.

    A rank that is lost ends the others. Over gloo they raise an error as soon as its connection
    closes, or after the process group's timeout. Over NCCL the group's watchdog ends the process
    after that timeout; with ``TORCH_NCCL_BLOCKING_WAIT=1`` it is an error.

    Under torch.compile the call stays outside of the graph. Second derivatives and transforms of
    `torch.func` are refused by PyTorch.

    Args:
        query: (B, H, L, D), this rank's queries; L is even under `is_causal` with several ranks.
        key: (B, HKV, LKV, D), HKV a divisor of H; LKV is L under `is_causal`.
        value: as `key`.
        attn_mask: None; masks are refused.
        dropout_p: 0; dropout is refused.
        is_causal: a token sees itself and earlier tokens of the whole sequence, which is split in
            zigzag order. Otherwise a token sees all, and the sequence is split in order.
        scale: factor of the scores; 1/sqrt(D) when None.
        group: process group; None: the default one.
        deterministic: run deterministic kernels, as under `torch.use_deterministic_algorithms`.
            That switch is set for the whole process while kernels are enqueued. None keeps it.

    Returns:
        (B, H, L, D), of the inputs' type: the output for this rank's queries.

    Raises:
        ConfigError: on tensors and options that are not as above, before any transfer. If ranks
            differ, every rank raises the same error.
        RankLostError: when another rank is gone.
    """
    arguments = query, key, value, attn_mask, dropout_p, group
    options = _Options(is_causal, scale, deterministic)
    if torch.compiler.is_compiling():  # a graph cannot hold the transfers
        out: torch.Tensor = torch.compiler.disable(_attend)(*arguments, options)
        return out
    return _attend(*arguments, options)


def split_sequence(
    tensor: torch.Tensor,
    dim: int = 2,
    *,
    is_causal: bool,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part of a whole sequence: contiguous, differentiable, no communication.

    Args:
        tensor: the whole sequence. Its length along `dim` is a multiple of the number of ranks; of
            twice that number under `is_causal` with several ranks.
        dim: dimension of the tokens.
        is_causal: zigzag order.
        group: process group; None: the default one.

    Raises:
        ConfigError: when the length is not such a multiple.
    """
    ring = Ring(group)
    chunks = _chunks(ring.rank, ring.size, is_causal)
    count, length = len(chunks) * ring.size, tensor.shape[dim]
    if not length or length % count:
        raise ConfigError(
            f"a sequence of {length} cannot be split over {ring.size} ranks (allowed: multiples of "
            f"{count})"
        )
    parts = tensor.chunk(count, dim)
    return torch.cat([parts[chunk] for chunk in chunks], dim)


def join_sequence(
    part: torch.Tensor,
    dim: int = 2,
    *,
    is_causal: bool,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The whole sequence in every rank, from the parts that `split_sequence` makes.

    Args:
        part: this rank's part, of one shape in all ranks; gradients do not pass.
        dim: dimension of the tokens.
        is_causal: zigzag order.
        group: process group; None: the default one.

    Raises:
        ConfigError: when a gradient is wanted, a zigzag part has an odd length, or parts differ.
        RankLostError: when another rank is gone.
    """
    ring = Ring(group)
    orders = [_chunks(rank, ring.size, is_causal) for rank in range(ring.size)]
    refusal = ""
    if guards.wants_gradient(part):
        refusal = "join_sequence passes no gradient (allowed: part.detach())"
    elif part.shape[dim] % len(orders[0]):
        refusal = f"a part of {part.shape[dim]} has no halves (allowed: an even length)"
    options = {"dim": dim, "is_causal": is_causal}
    ring.check({"part": str(tuple(part.shape)), "type": str(part.dtype), **options}, refusal)
    chunks: dict[int, torch.Tensor] = {}
    for order, piece in zip(orders, ring.gather(part.contiguous()), strict=True):
        chunks.update(zip(order, piece.chunk(len(order), dim), strict=True))
    return torch.cat([chunks[number] for number in range(len(chunks))], dim)


def position_ids(
    length: int,
    *,
    is_causal: bool,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Positions of this rank's tokens in the whole sequence, as rotary embeddings need them.

    Args:
        length: tokens of the whole sequence.
        is_causal: zigzag order.
        group: process group; None: the default one.
        device: device of the result.

    Returns:
        int64 (length / ranks,).

    Raises:
        ConfigError: when the length is not a multiple as `split_sequence` needs it.
    """
    return split_sequence(torch.arange(length, device=device), 0, is_causal=is_causal, group=group)


class _Options(NamedTuple):
    is_causal: bool
    scale: float | None
    deterministic: bool | None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    group: dist.ProcessGroup | None,
    options: _Options,
) -> torch.Tensor:
    """`ring_attention` outside of graphs."""
    ring = Ring(group)
    query, key, value = guards.autocast(query.device.type, query, key, value)
    call = {
        "query": str(tuple(query.shape)),
        "key": str(tuple(key.shape)),
        "type": str(query.dtype),
        "layout of keys": "bshd" if _is_token_major(key) else "bhsd",
        "gradient": guards.wants_gradient(query, key, value),
        **options._asdict(),
    }
    is_zigzag = options.is_causal and ring.size > 1
    ring.check(call, _refusal(query, key, value, attn_mask, dropout_p, is_zigzag))
    out: torch.Tensor = _RingAttention.apply(query, key, value, ring, options)
    return out


def _refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_zigzag: bool,
) -> str:
    """Reason why this rank cannot make a call; empty where it can."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if attn_mask is not None or dropout_p:
        return "ring_attention takes no attn_mask and no dropout_p (allowed: None and 0)"
    if any(t.dim() != 4 or not t.numel() for t in (query, key, value)):
        return f"{shapes} (allowed: 4-D (B, H, L, D), not empty)"
    if (
        key.shape != value.shape
        or query.shape[::3] != key.shape[::3]
        or query.shape[1] % key.shape[1]
    ):
        return (
            f"{shapes} (allowed: (B, H, L, D) and twice (B, HKV, LKV, D), with HKV a divisor of H)"
        )
    if len({(t.dtype, t.device) for t in (query, key, value)}) > 1:
        return "query, key and value differ in type or device (allowed: one of each)"
    if not query.is_floating_point():
        return f"query, key and value are {query.dtype} (allowed: floating point)"
    if is_zigzag and (query.shape[2] != key.shape[2] or query.shape[2] % 2):
        return f"{shapes} under a causal mask (allowed: one even length, of two chunks)"
    return ""


def _chunks(rank: int, ranks: int, is_causal: bool) -> tuple[int, ...]:
    """Numbers of the chunks that a rank holds, in its order."""
    return (rank, 2 * ranks - 1 - rank) if is_causal and ranks > 1 else (rank,)


class RingStep(NamedTuple):
    """Rows of this rank's queries and of another rank's keys that one step computes."""

    rows: slice
    keys: slice
    is_causal: bool


def step_of(rank: int, source: int, length: int, is_causal: bool) -> RingStep:
    """The step of one rank's queries with another rank's keys, by the table above.

    Args:
        rank: rank of the queries.
        source: rank of the keys.
        length: tokens of a rank's part, L.
        is_causal: mask of the whole attention.
    """
    if not is_causal or source == rank:
        return RingStep(_ALL, _ALL, is_causal)
    half = length // 2
    return (
        RingStep(_ALL, slice(half), False)
        if source < rank
        else RingStep(slice(half, None), _ALL, False)
    )


def partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of the keys, (B, H, L, D), and its log-sum-exp, (B, H, L).

    Args:
        query: (B, H, L, D).
        key: (B, HKV, LKV, D), some of the keys.
        value: as `key`.
        is_causal: mask between these queries and keys.
        scale: factor of the scores; 1/sqrt(D) when None.
    """
    out, lse = torch.ops.tuner.attention_with_lse(query, key, value, is_causal, scale)
    return out, lse


def partial_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Three:
    """Contribution of some of the keys to the gradients of query, key and value.

    Args:
        grad_out: (B, H, L, D), gradient of the output.
        query: (B, H, L, D).
        key: (B, HKV, LKV, D), some of the keys.
        value: as `key`.
        out: (B, H, L, D), output of attention over all keys.
        lse: its log-sum-exp, contiguous (B, H, L).
        is_causal: mask between these queries and keys.
        scale: factor of the scores.
    """
    tensors = grad_out, query, key, value, out, lse
    grads = torch.ops.tuner.attention_backward(*tensors, is_causal, scale)
    return grads[0], grads[1], grads[2]


class _Merged:
    """Attention over the keys seen so far: the mean of partial results, weighted by exp(lse)."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out, self.lse = out, lse

    def add(self, out: torch.Tensor, lse: torch.Tensor, rows: slice) -> None:
        """Merge a partial result for some of the rows, in at least single precision."""
        self.out = self.out.to(_wide(out.dtype))
        ours, total = self.out[:, :, rows], self.lse[:, :, rows]
        weight = torch.sigmoid(lse - total).to(ours.dtype).unsqueeze(-1)
        ours.lerp_(out.to(ours.dtype), weight)
        total.copy_(torch.logaddexp(total, lse))


class _RingAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring,
        options: _Options,
    ) -> torch.Tensor:
        with _determinism(options.deterministic):
            out, lse = _forward(query, key, value, ring, options)
        ctx.ring, ctx.options = ring, options
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _determinism(ctx.options.deterministic):
            grads = _backward(grad_out, ctx.saved_tensors, ctx.ring, ctx.options)
        return (*grads, None, None)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over the keys of all ranks."""
    is_causal, scale, _ = options
    is_token_major = _is_token_major(key)
    packed = _pack(key, value, is_token_major) if ring.size > 1 else key
    merged: _Merged | None = None
    for step in range(ring.size):
        passing = ring.start(packed) if step + 1 < ring.size else None
        source = (ring.rank - step) % ring.size
        rows, keys, is_masked = step_of(ring.rank, source, query.shape[2], is_causal)
        tensors = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        out, lse = partial(*tensors, is_masked, scale)
        if merged is None:
            merged = _Merged(out, lse)
        else:
            merged.add(out, lse, rows)
        if passing is not None:
            (packed,) = passing.wait()
            key, value = _unpack(packed, is_token_major)
    assert merged is not None
    return merged.out.to(query.dtype), merged.lse


def _backward(
    grad_out: torch.Tensor, saved: Sequence[torch.Tensor], ring: Ring, options: _Options
) -> Three:
    """Gradients of this rank's query, key and value.

    The sums of a rank's key and value gradients start in that rank, follow its keys one step
    behind, and return to it after the last step.

    Args:
        grad_out: (B, H, L, D), gradient of the output.
        saved: query, key, value, and the output and log-sum-exp over the keys of all ranks.
        ring: the ranks.
        options: the forward pass's.
    """
    query, key, value, out, lse = saved
    is_causal, scale, _ = options
    if ring.size == 1:
        return partial_gradients(grad_out, query, key, value, out, lse, is_causal, scale)
    is_token_major = _is_token_major(key)
    wide, last = _wide(key.dtype), ring.size - 1
    packed = _pack(key, value, is_token_major)
    grad_query = torch.zeros_like(query, dtype=wide)
    sums = torch.zeros_like(packed, dtype=wide)
    for step in range(ring.size):
        sent = [packed] if step < last else []
        sent += [sums] if step else []
        passing = ring.start(*sent)
        source = (ring.rank - step) % ring.size
        rows, keys, is_masked = step_of(ring.rank, source, query.shape[2], is_causal)
        grad_rows, query_rows, out_rows = (t[:, :, rows] for t in (grad_out, query, out))
        theirs = key[:, :, keys], value[:, :, keys]
        tensors = grad_rows, query_rows, *theirs, out_rows, lse[:, :, rows].contiguous()
        grads = partial_gradients(*tensors, is_masked, scale)
        grad_query[:, :, rows] += grads[0]
        received = passing.wait()
        if step:
            sums = received[-1]
        for total, grad in zip(_unpack(sums, is_token_major), grads[1:], strict=True):
            total[:, :, keys] += grad
        if step < last:
            packed = received[0]
            key, value = _unpack(packed, is_token_major)
    (sums,) = ring.start(sums).wait()
    grad_key, grad_value = _unpack(sums.to(key.dtype), is_token_major)
    return grad_query.to(query.dtype), grad_key, grad_value


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least single precision."""
    return torch.promote_types(dtype, torch.float32)


def _is_token_major(key: torch.Tensor) -> bool:
    """True for keys stored as (B, S, H, D), which kernels of that layout need."""
    return key.dim() == 4 and bool(key.stride(1) < key.stride(2))


def _pack(key: torch.Tensor, value: torch.Tensor, is_token_major: bool) -> torch.Tensor:
    """Keys and values in one contiguous tensor, for one message."""
    tensors = (key.transpose(1, 2), value.transpose(1, 2)) if is_token_major else (key, value)
    return torch.stack(tensors)


def _unpack(packed: torch.Tensor, is_token_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values, (B, HKV, S, D)."""
    key, value = packed.unbind()
    return (key.transpose(1, 2), value.transpose(1, 2)) if is_token_major else (key, value)


@contextmanager
def _determinism(is_wanted: bool | None) -> Iterator[None]:
    """Set PyTorch's switch of deterministic algorithms for a while; None leaves it as it is."""
    before = torch.are_deterministic_algorithms_enabled()
    if is_wanted is None or is_wanted == before:
        yield
        return
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(is_wanted, warn_only=only_warns)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=only_warns)
