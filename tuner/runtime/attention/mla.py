"""Decoding of multi-head latent attention over a paged cache: by the kernels `MLA_DECODE`, or by
PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.library import Library, register_fake

from tuner.compile.loading import LoadedKernel
from tuner.compile.single import MLA_DECODE
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.mla_decode import (
    ARGUMENTS,
    CUT_OVERHEAD,
    KERNELS,
    LATENT,
    MAX_BATCH,
    MAX_HEADS,
    MAX_QUERIES,
    PAGE_MULTIPLE,
    TILE_OVERHEAD,
    VECTOR,
    WIDTH,
    MlaKernel,
)
from tuner.runtime.call import counters, devices, guards
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.sourced import SourcedKernel

_LIMIT = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative Frobenius error of each sequence's output in a proof."""
_LSE_LIMIT = 1e-3
#: Page size, queries and heads of the calls of a proof.
_DRAWS = ((64, 1, 40), (16, 3, 20), (48, 2, 64), (128, 4, 16), (64, 1, 128))

kernels = {
    kernel: SourcedKernel(source, "PyTorch's operations decode latent attention")
    for kernel, source in MLA_DECODE.items()
}


class Decode(NamedTuple):
    """Checked tensors of a call; shapes as of `mla_decode`."""

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    out: torch.Tensor
    lse: torch.Tensor | None

    @property
    def kernel(self) -> MlaKernel:
        """The kernel for these tensors."""
        return KERNELS[guards.DTYPES[self.query.dtype]]


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """softmax(scale * Q C^T + mask) C[:, :512] of B sequences whose latent rows lie in pages.

    Multi-head latent attention (DeepSeek-V2 and later), with the up-projections absorbed into the
    queries and the output. All heads share a token's row of 512 latent and 64 rotary columns.
    Sequence b has `lengths[b]` rows, the new ones among them, in the order of its row of
    `block_table`. Query i of n sees the first lengths[b] - n + 1 + i of them. A query that sees
    none has zeros for its output and minus infinity for its log-sum-exp.

    Entries of the table behind a sequence's last page are not read. Unused slots reach no result.
    The blocks' work is divided by the lengths on the device, so a captured CUDA graph serves any
    lengths. The first call of a device loads the kernel, and is not to be captured. Equal inputs
    give equal bits. The kernel does not check lengths and pages.

    PyTorch's operations answer calls that no kernel serves, and where ``tuner build --portfolio``
    has not built it. They wait for the device. Such calls are counted (`tuner.stats`). Gradients
    are not computed.

    Args:
        query: (B, SQ, H, 576), fp16 or bf16.
        cache: (pages, page size, 576), of `query`'s type, page size a multiple of 16. Views are
            allowed, with contiguous columns and other strides of multiples of 16 bytes.
        block_table: int32 (B, columns), rows contiguous.
        lengths: int32 (B,), contiguous, each at most columns * page size.
        scale: positive factor of the scores: that of the model's heads, such as 192 ** -0.5.
        return_lse: return (out, log-sum-exp).
        out: (B, SQ, H, 512) to write to, as `query` and sharing no memory with it; None: a new
            tensor.

    Returns:
        (B, SQ, H, 512), of `query`'s type: `out` if given. With `return_lse` that and the natural
        logarithm of the sum of the scores' exponentials, fp32 (B, H, SQ).

    Raises:
        ConfigError: before any launch, on tensors that are not as above.
    """
    check(query, cache, block_table, lengths, scale, out)
    if torch.compiler.is_compiling():
        made, lse = torch.ops.tuner.mla_decode(query, cache, block_table, lengths, scale)
        made = made if out is None else out.copy_(made)
        return (made, lse) if return_lse else made
    return _answered(query, cache, block_table, lengths, scale, return_lse, out)


def _answered(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    with_lse: bool,
    out: torch.Tensor | None,
) -> Any:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT)) if out is None else out
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if with_lse else None
    call = Decode(query, cache, block_table, lengths, scale, out, lse)
    with torch.no_grad():
        found = _found(call)
        if isinstance(found, Refusal):
            counters.count_fallback(found.reason)
            composed(call)
        else:
            launch(found, call)
            counters.count_hit()
    return out if lse is None else (out, lse)


def composed(call: Decode, precision: torch.dtype = torch.float32) -> None:
    """The same by PyTorch's operations in `precision`, which wait for the device."""
    queries, size = call.query.shape[1], call.cache.shape[1]
    for b, length in enumerate(call.lengths.tolist()):
        pages = call.block_table[b, : -(-length // size)].long()
        rows = call.cache[pages].reshape(-1, WIDTH)[:length].to(precision)
        scores = torch.einsum("qhd,kd->hqk", call.query[b].to(precision), rows) * call.scale
        seen = torch.arange(1 - queries, 1, device=rows.device)[:, None] + length
        hidden = torch.arange(length, device=rows.device) >= seen
        lse = torch.logsumexp(scores.masked_fill_(hidden, -torch.inf), -1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
        call.out[b] = torch.einsum("hqk,kd->qhd", weights, rows[:, :LATENT]).to(call.out.dtype)
        if call.lse is not None:
            call.lse[b] = lse


def _found(call: Decode) -> LoadedKernel | Refusal:
    """The kernel of a call, or the reason why none serves it."""
    tensors = call.query, call.cache, call.out, call.block_table, call.lengths
    if not call.query.numel():
        return Refusal(Kind.EMPTY)
    if refusal := guards.unserved(tensors):
        return refusal
    if guards.is_misaligned(tensors[:3]):
        return Refusal(Kind.MISALIGNED)
    for tensor in tensors[:3]:
        steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if any(size > 1 and (step <= 0 or step % VECTOR) for size, step in steps):
            return Refusal(Kind.TENSORS, "a stride is not a multiple of 16 bytes")
    batch, queries, heads, _ = call.query.shape
    if batch > MAX_BATCH or queries > MAX_QUERIES or heads > MAX_HEADS:
        return Refusal(Kind.TENSORS, f"{batch} sequences of {queries} queries of {heads} heads")
    device = call.query.device
    kernel = kernels[call.kernel].of(device, partial(_is_proven, call.kernel, device))
    if kernel is None:
        reason = "the kernel of latent attention is not built: tuner build --portfolio"
        return Refusal(Kind.UNAVAILABLE, reason)
    return kernel


def launch(
    kernel: LoadedKernel,
    call: Decode,
    tile_overhead: int = TILE_OVERHEAD,
    cut_overhead: int = CUT_OVERHEAD,
) -> None:
    """Enqueue a kernel on the current stream.

    Args:
        kernel: loaded kernel.
        call: tensors that it takes.
        tile_overhead: tiles of keys that take as long as a sequence's begin and end in a block.
        cut_overhead: tiles that take as long as to add the parts of divided sequences.
    """
    query, cache, out = call.query, call.cache, call.out
    batch, queries, heads, _ = query.shape
    integers = {"batch": batch, "queries": queries, "heads": heads, "pages": cache.shape[0]}
    integers |= {"page_size": cache.shape[1], "table_row": call.block_table.stride(0)}
    for name, tensor, parts in (
        ("query", query, ("batch", "row", "head")),
        ("cache", cache, ("page", "slot")),
        ("out", out, ("batch", "row", "head")),
    ):
        for part, size, step in zip(parts, tensor.shape, tensor.stride(), strict=False):
            integers[f"{name}_{part}"] = step if size > 1 else WIDTH  # of one element any will do
    integers |= {"tile_overhead": tile_overhead, "cut_overhead": cut_overhead, "pdl": 1}
    tensors = {"query": query, "cache": cache, "out": out, "lse": call.lse}
    tensors |= {"block_table": call.block_table, "lengths": call.lengths}
    pointers, numbers, scalars = ARGUMENTS.ordered(
        {name: 0 if one is None else one.data_ptr() for name, one in tensors.items()},
        integers,
        {"scale": call.scale},
    )
    index = query.get_device()
    workspace = query.new_empty(kernel.workspace_bytes(numbers), dtype=torch.uint8)
    with devices.use(index):
        devices.bind(index)
        stream = devices.stream_of(index)
        kernel.launch(pointers, numbers, scalars, workspace.data_ptr(), stream)


def _is_proven(chosen: MlaKernel, device: torch.device, kernel: LoadedKernel) -> bool:
    """True when its results are those of PyTorch's operations, up to rounding."""
    for number in range(len(_DRAWS)):
        theirs, own = (drawn(chosen, device, number) for _ in range(2))
        composed(theirs, torch.float64)
        try:
            launch(kernel, own)
        except BenchmarkError as exc:
            counters.count_error(f"latent attention: {exc}")
            return False
        if not is_close(own, theirs):
            return False
    return True


def is_close(own: Decode, theirs: Decode) -> bool:
    """True when the outputs differ by rounding only, sequence by sequence."""
    found, wanted = own.out.float(), theirs.out.float()
    errors = (found - wanted).flatten(1).norm(dim=1)
    is_small = bool((errors <= _LIMIT[own.out.dtype] * wanted.flatten(1).norm(dim=1)).all())
    if own.lse is None or theirs.lse is None:
        return is_small
    return is_small and torch.allclose(own.lse, theirs.lse, atol=_LSE_LIMIT, rtol=0)


def drawn(
    chosen: MlaKernel, device: torch.device, number: int, lengths: Sequence[int] = ()
) -> Decode:
    """A small call whose unused slots are NaN, for a proof of a kernel.

    Args:
        chosen: kernel that takes it.
        device: device of its tensors.
        number: index of the call; calls have unlike pages and heads.
        lengths: rows of each sequence; empty: those of a proof.
    """
    draw = torch.Generator(device).manual_seed(number)
    size, queries, heads = _DRAWS[number]
    lengths = lengths or (1, 0, size, 64 * 41 + 5, 129, 1000)
    dtype = getattr(torch, chosen.dtype)
    columns = -(-max(lengths) // size) + 1
    table = torch.full((len(lengths), columns), 1 << 30, dtype=torch.int32)
    pages = sum(-(-length // size) for length in lengths) + 1
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(number)).int()
    cache = torch.full((pages, size, WIDTH + VECTOR), torch.nan, dtype=dtype, device=device)
    for b, length in enumerate(lengths):
        count = -(-length // size)
        table[b, :count], order = order[:count], order[count:]
        rows = torch.randn(count * size, WIDTH, generator=draw, device=device).to(dtype)
        rows[length:] = torch.nan
        cache[table[b, :count].long().to(device), :, :WIDTH] = rows.view(count, size, WIDTH)
    shape = len(lengths), queries, heads
    query = torch.randn(*shape, WIDTH, generator=draw, device=device)
    out = torch.full((*shape, LATENT), torch.nan, dtype=dtype, device=device)
    lse = torch.full((shape[0], heads, queries), torch.nan, device=device)
    return Decode(
        *(query.to(dtype), cache[..., :WIDTH], table.to(device)),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        *(WIDTH**-0.5, out, lse),
    )


def check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
) -> None:
    """Check the arguments of a call.

    Raises:
        ConfigError: names the given and the allowed values.
    """
    if query.dtype not in _LIMIT or cache.dtype != query.dtype:
        raise ConfigError(
            f"query is {query.dtype}, cache {cache.dtype} (allowed: torch.float16 or "
            "torch.bfloat16, one for both)"
        )
    if query.dim() != 4 or cache.dim() != 3 or {query.shape[-1], cache.shape[-1]} != {WIDTH}:
        raise ConfigError(
            f"query {tuple(query.shape)}, cache {tuple(cache.shape)} (allowed: (B, SQ, H, {WIDTH}) "
            f"and (pages, page size, {WIDTH}))"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, cache)):
        raise ConfigError(f"the {WIDTH} columns of query and cache are not contiguous")
    if not cache.shape[1] or cache.shape[1] % PAGE_MULTIPLE:
        raise ConfigError(
            f"pages have {cache.shape[1]} slots (allowed: multiples of {PAGE_MULTIPLE})"
        )
    batch = query.shape[0]
    for name, tensor, shape in (
        ("lengths", lengths, (batch,)),
        ("block_table", block_table, (batch, *block_table.shape[1:2])),
    ):
        is_row = shape[-1] < 2 or tensor.stride(-1) == 1
        if tensor.dtype != torch.int32 or tensor.shape != shape or not is_row:
            raise ConfigError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} "
                f"(allowed: torch.int32 {shape}, contiguous rows)"
            )
    if block_table.dim() != 2:
        raise ConfigError(
            f"block_table is {tuple(block_table.shape)} (allowed: ({batch}, columns))"
        )
    if not scale > 0:
        raise ConfigError(f"scale={scale} (allowed: positive)")
    wanted = (*query.shape[:3], LATENT)
    if out is not None and (out.shape, out.dtype, out.device, out.stride(-1)) != (
        *(wanted, query.dtype, query.device),
        1,
    ):
        raise ConfigError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device} "
            f"(allowed: {query.dtype} {wanted} on {query.device}, contiguous columns)"
        )


_library = Library("tuner", "FRAGMENT")
_library.define(
    "mla_decode(Tensor query, Tensor cache, Tensor block_table, Tensor lengths, float scale) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _operator(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(query, cache, block_table, lengths, scale, None)
    out, lse = _answered(query, cache, block_table, lengths, scale, True, None)
    return out, lse


def _fake(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = query.shape
    out = query.new_empty((batch, queries, heads, LATENT))
    return out, query.new_empty((batch, heads, queries), dtype=torch.float32)


_library.impl("mla_decode", _operator, "CompositeExplicitAutograd")
register_fake("tuner::mla_decode", _fake, lib=_library)
