"""New keys and values of packed sequences, written to a paged cache, with rotary embedding: by the
kernel `PAGED_APPEND`, or PyTorch's operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from tuner.compile.loading import LoadedKernel
from tuner.compile.single import PAGED_APPEND
from tuner.errors import ConfigError
from tuner.runtime.attention.paged_arguments import checked, checked_scales
from tuner.runtime.call import devices, guards
from tuner.runtime.call.sourced import SourcedKernel

VECTOR = 8
"""Elements that a thread of the kernel reads at once."""
_STEP = 2 * VECTOR
"""D and the rotated columns are multiples of this."""
_LARGEST = 448.0
"""Largest number of e4m3."""
_TYPES = (torch.float16, torch.bfloat16)

kernels = SourcedKernel(PAGED_APPEND, "PyTorch's operations append to paged caches")


class Append(NamedTuple):
    """Checked tensors of a call; shapes as of `paged_append`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    page_table: torch.Tensor
    seqused_k: torch.Tensor
    starts: torch.Tensor | None
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    interleaved: bool
    scales: tuple[torch.Tensor, ...]
    out: torch.Tensor

    @property
    def rotated(self) -> int:
        """Columns of a head that are rotated."""
        return 0 if self.cosine is None else 2 * self.cosine.shape[1]


def paged_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    cosine: torch.Tensor | None = None,
    sine: torch.Tensor | None = None,
    interleaved: bool = False,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the new keys and values of B sequences to their pages, and rotate queries and keys.

    The call before `tuner.paged_attention`, whose queries it returns. Sequence b has the tokens
    cu_seqlens_q[b]..cu_seqlens_q[b + 1], which are the last ones of its seqused_k[b] keys. So token
    i of n has the position seqused_k[b] - n + i, which names its slot and its angles.

    Rotation is computed in fp32 and rounded once. With `interleaved` the elements 2i and 2i + 1 of
    a head are a pair (GPT-J), otherwise i and i + R/2 (GPT-NeoX, Llama). Columns from R on are
    copied.

    A token behind the last sequence writes nothing. Nor does one whose position is negative, or
    lies beyond the table's row, the cache or the angles. One kernel does all of it on the current
    stream, and can be captured in a CUDA graph. PyTorch's operations answer where ``tuner build``
    has not built it, and for tensors that it does not take. They wait for the device. Gradients are
    not computed.

    Args:
        query: (tokens, H, D), fp16 or bf16; D a multiple of 16.
        key: (tokens, HKV, D), of `query`'s type.
        value: as `key`.
        key_cache: (pages, page size, HKV, D), of `query`'s type or float8_e4m3fn; written to.
            Views are allowed, with contiguous D.
        value_cache: as `key_cache`.
        page_table: int32 (B, columns), rows contiguous.
        seqused_k: int32 (B,), contiguous: keys of each sequence, the new ones among them.
        cu_seqlens_q: int32 (B + 1,), contiguous; None: every sequence has tokens / B.
        cosine: fp32 (positions, R / 2), contiguous, R a multiple of 16 up to D; None: no rotation.
        sine: as `cosine`.
        interleaved: True: pairs are neighbours; False: halves of the rotated columns.
        q_scale: positive fp32 factors of e4m3 queries: (H,), or one element for all heads. Caches
            of e4m3 come with all three factors; elements are divided by them.
        k_scale: factors of the keys: (HKV,), or one element.
        v_scale: factors of the values, as `k_scale`.
        out: tensor for the queries; may be `query` itself, if of its type.

    Returns:
        (tokens, H, D) of the caches' type: `out` if given. Rows of tokens that write nothing keep
        what `out` held, and are undefined without it.

    Raises:
        ConfigError: before any launch, on tensors that are not as above.
    """
    call = _checked(
        *(query, key, value, key_cache, value_cache, page_table, seqused_k, cu_seqlens_q),
        *(cosine, sine, interleaved, (q_scale, k_scale, v_scale), out),
    )
    if not (call.query.shape[0] and call.page_table.numel()):
        return call.out
    with torch.no_grad():
        proof = partial(_is_proven, query.device)
        kernel = kernels.of(query.device, proof) if _takes(call) else None
        if kernel is None:
            composed(call)
        else:
            _launch(kernel, call)
    return call.out


def composed(call: Append) -> None:
    """The same by PyTorch's operations, which wait for the device."""
    query, cache, used = call.query, call.key_cache, call.seqused_k.long()
    batch, tokens, size = used.numel(), query.shape[0], cache.shape[1]
    starts = call.starts
    if starts is None:
        starts = torch.arange(batch + 1, device=query.device) * (tokens // batch)
    starts = starts.long()
    token = torch.arange(tokens, device=query.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    valid = sequence < batch
    sequence = sequence.clamp(max=batch - 1)
    position = used[sequence] - (starts[sequence + 1] - token)
    column = position.clamp(min=0) // size
    valid &= (position >= 0) & (column < call.page_table.shape[1])
    if call.cosine is not None:
        valid &= position < call.cosine.shape[0]
    column = column.clamp(max=call.page_table.shape[1] - 1)
    page = call.page_table[sequence, column].long()
    valid &= (page >= 0) & (page < cache.shape[0])
    token, position, page = token[valid], position[valid], page[valid]
    slot = position % size
    factors: tuple[Any, ...] = call.scales or (None, None, None)
    rotated = (_rotated(call, tensor[token], position) for tensor in (query, call.key))
    new = (*rotated, call.value[token].float())
    narrow = [_narrow(rows, cache.dtype, factor) for rows, factor in zip(new, factors, strict=True)]
    bits = torch.uint8 if cache.element_size() == 1 else torch.int16
    call.out.view(bits)[token] = narrow[0].view(bits)
    call.key_cache.view(bits)[page, slot] = narrow[1].view(bits)
    call.value_cache.view(bits)[page, slot] = narrow[2].view(bits)


def _rotated(call: Append, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    if call.cosine is None or call.sine is None:
        return rows
    turned, unturned = rows[..., : call.rotated], rows[..., call.rotated :]
    cosine, sine = (table[position].unsqueeze(1) for table in (call.cosine, call.sine))
    if call.interleaved:
        low, high = turned[..., 0::2], turned[..., 1::2]
    else:
        low, high = turned.chunk(2, -1)
    halves = low * cosine - high * sine, high * cosine + low * sine
    joined = torch.stack(halves, -1).flatten(-2) if call.interleaved else torch.cat(halves, -1)
    return torch.cat((joined, unturned), -1)


def _narrow(rows: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None) -> torch.Tensor:
    if factor is None:
        return rows.to(dtype)
    return (rows / factor[:, None]).clamp(-_LARGEST, _LARGEST).to(dtype)


def _takes(call: Append) -> bool:
    """True for tensors whose strides the kernel supports, on a device with kernels. No grid is
    launched for heads or columns that are not there.
    """
    if not (call.query.numel() and call.key.numel()):
        return False
    wide = call.query, call.key, call.value, call.out, call.key_cache, call.value_cache
    every = *wide, call.page_table, call.seqused_k, *call.scales
    if guards.unserved(every) is not None:
        return False
    return all(
        rows.stride(-1) == 1
        and rows.data_ptr() % (VECTOR * rows.element_size()) == 0
        and all(step >= 0 and step % VECTOR == 0 for step in rows.stride()[:-1])
        for rows in wide
    )


def _launch(kernel: LoadedKernel, call: Append) -> None:
    query, cache, index = call.query, call.key_cache, call.query.get_device()
    tensors: dict[str, torch.Tensor | None] = {
        **{"query": query, "key": call.key, "value": call.value, "out": call.out},
        **{"cosine": call.cosine, "sine": call.sine, "starts": call.starts},
        **{"table": call.page_table, "used": call.seqused_k},
        **{"key_cache": cache, "value_cache": call.value_cache},
        **dict(zip(("factor_q", "factor_k", "factor_v"), call.scales or (None,) * 3, strict=True)),
    }
    batch = call.seqused_k.numel()
    integers = {
        "is_bf16": int(query.dtype == torch.bfloat16),
        "is_e4m3": int(cache.dtype == torch.float8_e4m3fn),
        "interleaves": int(call.interleaved),
        "tokens": query.shape[0],
        "batch": batch,
        "queries": 0 if call.starts is not None else query.shape[0] // batch,
        "heads_q": query.shape[1],
        "heads_kv": call.key.shape[1],
        "head_dim": query.shape[2],
        "rotary_dim": call.rotated,
        "positions": 0 if call.cosine is None else call.cosine.shape[0],
        "page_size": cache.shape[1],
        "pages": cache.shape[0],
        "columns": call.page_table.shape[1],
        "table_row": call.page_table.stride(0),
        "pdl": 1,
    }
    for name, tensor in (("query", query), ("key", call.key), ("value", call.value)):
        integers |= {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    integers |= {"out_row": call.out.stride(0), "out_head": call.out.stride(1)}
    for name, tensor in (("key_cache", cache), ("value_cache", call.value_cache)):
        steps = zip(("page", "slot", "head"), tensor.stride(), strict=False)
        integers |= {f"{name}_{part}": step for part, step in steps}
    pointers, numbers, _ = PAGED_APPEND.arguments.ordered(
        {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}, integers, {}
    )
    with devices.use(index):
        devices.bind(index)
        kernel.launch(pointers, numbers, (), 0, devices.stream_of(index))


def _is_proven(device: torch.device, kernel: LoadedKernel) -> bool:
    """True when its bits are those of PyTorch's operations, for every type and pairing."""
    cases = [(dtype, is_e4m3, i) for dtype in _TYPES for is_e4m3 in (False, True) for i in (0, 1)]
    for dtype, is_e4m3, number in cases:
        theirs, own = (_drawn(device, dtype, is_e4m3, number) for _ in range(2))
        composed(theirs)
        _launch(kernel, own)
        bits = torch.uint8 if is_e4m3 else torch.int16
        for name in ("out", "key_cache", "value_cache"):
            pair = (getattr(call, name).view(bits) for call in (theirs, own))
            if not torch.equal(*pair):
                return False
    return True


def _drawn(device: torch.device, dtype: torch.dtype, is_e4m3: bool, number: int) -> Append:
    """A small call: sequences of 1, 0, 37 and 2 tokens, two behind the last, one without a page."""
    draw = torch.Generator(device).manual_seed(number)
    width, rotated, size, heads, heads_kv = 96, (96, 64)[number], 48, 6, 2
    queries, used = (1, 0, 37, 2), (49, 5, 90, 300)
    tokens = sum(queries) + 2

    def rows(count: int) -> torch.Tensor:
        drawn = torch.randn(tokens, count, width, generator=draw, device=device)
        return (8 * drawn).to(dtype)

    kind = torch.float8_e4m3fn if is_e4m3 else dtype
    halves = torch.zeros(9, heads_kv, size, 2 * width, device=device).to(kind).transpose(1, 2)
    table = torch.arange(8, device=device, dtype=torch.int32).flip(0).view(4, 2)
    angles = torch.randn(91, rotated // 2, generator=draw, device=device)
    counts = (heads, heads_kv, heads_kv) if is_e4m3 else ()
    return Append(
        *(rows(heads), rows(heads_kv), rows(heads_kv)),
        *(halves[..., :width], halves[..., width:], table),
        torch.tensor(used, dtype=torch.int32, device=device),
        torch.tensor([0, *queries], device=device).cumsum(0).int(),
        *(angles.cos().contiguous(), angles.sin().contiguous(), bool(number)),
        tuple(torch.rand(n, generator=draw, device=device) / 16 + 0.01 for n in counts),
        torch.zeros(tokens, heads, width, device=device).to(kind),
    )


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    starts: torch.Tensor | None,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
    interleaved: bool,
    scales: tuple[torch.Tensor | None, ...],
    out: torch.Tensor | None,
) -> Append:
    if query.dtype not in _TYPES or not query.dtype == key.dtype == value.dtype:
        raise ConfigError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype} "
            "(allowed: torch.float16 or torch.bfloat16, one for all)"
        )
    result = query.new_empty(query.shape, dtype=key_cache.dtype) if out is None else out
    like = query if key_cache.dtype == query.dtype else result
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ConfigError(
            f"the caches are {key_cache.dtype} (allowed: {query.dtype} or torch.float8_e4m3fn)"
        )
    if (result.shape, result.dtype, result.device) != (query.shape, key_cache.dtype, query.device):
        raise ConfigError(
            f"out is {result.dtype} {tuple(result.shape)} on {result.device} "
            f"(allowed: {key_cache.dtype} {tuple(query.shape)} on {query.device})"
        )
    checked(like, key_cache, value_cache, page_table, seqused_k, starts, None, None, None)
    sizes = query.shape[0], key_cache.shape[2], query.shape[2]
    if key.shape != sizes or value.shape != sizes:
        raise ConfigError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} (allowed: {sizes}, as the "
            "queries and caches)"
        )
    if query.shape[2] % _STEP:
        raise ConfigError(f"D = {query.shape[2]} (allowed: multiples of {_STEP})")
    if (cosine is None) != (sine is None):
        raise ConfigError("cosine and sine come together")
    if cosine is not None and sine is not None:
        width = 2 * cosine.shape[-1]
        is_table = cosine.dim() == 2 and cosine.shape == sine.shape
        are_wide = cosine.dtype == sine.dtype == torch.float32
        is_packed = cosine.is_contiguous() and sine.is_contiguous()
        if not (is_table and are_wide and is_packed) or width > query.shape[2] or width % _STEP:
            raise ConfigError(
                f"cosine {cosine.dtype} {tuple(cosine.shape)}, sine {sine.dtype} "
                f"{tuple(sine.shape)} (allowed: torch.float32 (positions, R / 2), contiguous, R a "
                f"multiple of {_STEP} up to {query.shape[2]})"
            )
    return Append(
        *(query, key, value, key_cache, value_cache, page_table, seqused_k, starts),
        *(cosine, sine, bool(interleaved), checked_scales(result, key_cache, scales), result),
    )
