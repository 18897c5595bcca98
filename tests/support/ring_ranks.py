"""Ranks of ring attention over gloo: processes forked from this one, each of which writes what it
found to a file. ``python -m ring_ranks FOLDER``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tuner.errors import TunerError
from tuner.runtime.parallel import context_parallel, ring
from tuner.runtime.parallel.context_parallel import (
    join_sequence,
    position_ids,
    ring_attention,
    split_sequence,
)

WORLD, VICTIM, LONG_S, SHORT_S = 4, 2, 60, 3
PATIENCE_S = 120
LENGTH, HEADS, HEADS_KV, HEAD_DIM = 32, 4, 2, 8
Found = dict[str, Any]


@contextmanager
def watched() -> Iterator[list[Any]]:
    """Events inside, in order: transfers with their types, kernels with their sizes."""
    events: list[Any] = []

    def before(name: str, function: Any, facts: Callable[..., Any]) -> Any:
        def called(*arguments: Any) -> Any:
            events.append([name, *facts(*arguments)])
            return function(*arguments)

        return called

    places = (
        (ring.Ring, "start", lambda _, *tensors: [str(t.dtype)[6:] for t in tensors]),
        (ring.Ring, "_publish", lambda *_: []),
        (ring.Passing, "wait", lambda _: []),
        (
            context_parallel,
            "partial",
            lambda *a: [a[0].shape[2], a[1].shape[2], a[3], is_deterministic()],
        ),
        (
            context_parallel,
            "partial_gradients",
            lambda *a: [a[1].shape[2], a[2].shape[2], a[5].is_contiguous(), is_deterministic()],
        ),
    )
    kept = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, facts in places:
        setattr(place, name, before(name.strip("_"), getattr(place, name), facts))
    try:
        yield events
    finally:
        for place, name, function in kept:
            setattr(place, name, function)


def is_deterministic() -> bool:
    return bool(torch.are_deterministic_algorithms_enabled())


def drawn(dtype: torch.dtype, is_token_major: bool, lengths: tuple[int, int]) -> list[torch.Tensor]:
    """Whole query, key, value and gradient of the output: the same in every rank."""
    torch.manual_seed(0)
    tensors = []
    for heads, length in zip(
        (HEADS, HEADS_KV, HEADS_KV, HEADS), (*lengths, *lengths[::-1]), strict=True
    ):
        size = (2, length, heads, HEAD_DIM) if is_token_major else (2, heads, length, HEAD_DIM)
        tensor = torch.randn(size, dtype=dtype)
        tensors.append(tensor.transpose(1, 2) if is_token_major else tensor)
    return tensors


def parts_of(tensors: list[torch.Tensor], is_causal: bool, group: Any) -> list[torch.Tensor]:
    """This rank's, in the layout of the whole, which want gradients."""
    made = []
    for whole in tensors:
        part = split_sequence(whole, is_causal=is_causal, group=group)
        laid = torch.empty_like(whole[:, :, : part.shape[2]], dtype=part.dtype).copy_(part)
        made.append(laid.requires_grad_())
    return made


def compared(group: Any, is_causal: bool, dtype: str, is_token_major: bool, keys: int) -> float:
    """Largest error of output and gradients, from attention of the whole sequence in fp64."""
    type_ = getattr(torch, dtype)
    *inputs, grad_out = drawn(type_, is_token_major, (LENGTH, keys))
    wanted = [t.detach().double().requires_grad_() for t in inputs]
    options: Found = {"is_causal": is_causal, "scale": 0.3}
    out = scaled_dot_product_attention(*wanted, enable_gqa=True, **options)
    grads = torch.autograd.grad(out, wanted, grad_out.double())
    parts = parts_of(inputs, is_causal, group)
    ours = ring_attention(*parts, group=group, **options)
    grad_part = split_sequence(grad_out, is_causal=is_causal, group=group)
    our_grads = torch.autograd.grad(ours, parts, grad_part)
    assert [t.dtype for t in (ours, *our_grads)] == [type_] * 4
    joined = [
        join_sequence(t.detach(), is_causal=is_causal, group=group) for t in (ours, *our_grads)
    ]
    found = zip(joined, (out.detach(), *grads), strict=True)
    return max(float((a.double() - b).abs().max()) for a, b in found)


def repeated(deterministic: bool | None) -> Found:
    """Two equal calls, and what happens in the second."""
    inputs = drawn(torch.bfloat16, False, (LENGTH, LENGTH))
    *parts, grad_part = parts_of(inputs, True, None)
    bits = []
    for _ in range(2):
        with watched() as events:
            out = ring_attention(*parts, is_causal=True, deterministic=deterministic)
            grads = torch.autograd.grad(out, parts, grad_part.detach())
        bits.append([t.detach().view(torch.int16) for t in (out, *grads)])
    equal = all(torch.equal(*pair) for pair in zip(*bits, strict=True))
    return {"equal": equal, "events": events, "after": is_deterministic()}


def said(function: Callable[[], Any]) -> list[str]:
    """Type and text of the error, and how many transfers there were."""
    with watched() as events:
        try:
            function()
        except TunerError as exc:
            starts = sum(name == "start" for name, *_ in events)
            return [type(exc).__name__, str(exc), str(starts)]
    return ["", "", ""]


def refused(rank: int) -> dict[str, list[str]]:
    def call(length: int, keys: int | None = None, is_causal: bool = True, **options: Any) -> Any:
        query = torch.zeros(1, 2, length, HEAD_DIM, requires_grad=options.pop("wants", False))
        key = torch.zeros(1, 2, keys or length, HEAD_DIM)
        return lambda: ring_attention(query, key, key, is_causal=is_causal, **options)

    one = torch.zeros(1, 2, 4, HEAD_DIM)
    cases = {
        "uneven": call(8 + 2 * (rank == 1)),
        "options": call(8, scale=1.0 + (rank == 3)),
        "gradient": call(12, wants=rank == 1),
        "odd": call(7),
        "odd in one rank": call(7 + (rank != 1)),
        "lengths": call(8, keys=16),
        "dropout": call(8, dropout_p=0.1),
        "mask": call(8, attn_mask=torch.ones(8, 8, dtype=torch.bool)),
        "heads": lambda: ring_attention(one[:, :1], one, one, is_causal=True),
        "types": lambda: ring_attention(one, one.double(), one.double(), is_causal=True),
        "empty": lambda: ring_attention(one[:, :, :0], one, one, is_causal=False),
        "length": lambda: split_sequence(torch.zeros(WORLD * 3), 0, is_causal=True),
        "join": lambda: join_sequence(torch.zeros(2, requires_grad=True), 0, is_causal=True),
        "parts": lambda: join_sequence(torch.zeros(2 + 2 * (rank == 1)), 0, is_causal=True),
    }
    return {name: said(case) for name, case in cases.items()}


def lost(rank: int, pair: Any) -> dict[str, list[str]]:
    """Errors of ranks beside some that make no call, then beside one that is killed.

    Args:
        rank: this one.
        pair: its group, of two, with a timeout of `SHORT_S`.
    """
    inputs = drawn(torch.float32, False, (LENGTH, LENGTH))[:3]
    parts, halves = parts_of(inputs, True, None), [t[:, :, :8] for t in inputs]
    found: dict[str, list[str]] = {}
    ring_attention(*halves, is_causal=True, group=pair)
    if rank == 0:
        found["silent"] = said(lambda: ring_attention(*halves, is_causal=True, group=pair))
    if rank == WORLD - 1:
        found["absent"] = said(lambda: ring_attention(*inputs, is_causal=True, group=pair))
    ring_attention(*parts, is_causal=True)  # known to all
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = said(lambda: ring_attention(*parts, is_causal=True))
    found["afterwards"] = said(lambda: ring_attention(*halves, is_causal=True))
    return found


class Broken:
    """One work for a batch of transfers, as NCCL's, that fails."""

    def wait(self) -> None:
        raise RuntimeError("it is broken")


def one_work() -> list[str]:
    """The error of a batch that is one work."""
    batch, dist.batch_isend_irecv = dist.batch_isend_irecv, lambda operations: [Broken()]
    try:
        return said(lambda: ring.Ring(None).start(torch.zeros(1)).wait())
    finally:
        dist.batch_isend_irecv = batch


def run(rank: int) -> Iterator[tuple[str, Any]]:
    groups = {WORLD: None}
    for size in (2, 1):
        every = [list(range(first, first + size)) for first in range(0, WORLD, size)]
        groups[size] = [dist.new_group(ranks) for ranks in every][rank // size]
    limit = timedelta(seconds=SHORT_S)
    pairs = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [2, 3])]
    yield "outside", said(lambda: position_ids(8, is_causal=True, group=pairs[0]))
    for size, group in groups.items():
        for is_causal in (True, False):
            positions = position_ids(16, is_causal=is_causal, group=group)
            yield f"positions {size} {is_causal}", positions.tolist()
            for kind in (("float64", False), ("float32", True)):
                error = compared(group, is_causal, *kind, LENGTH)
                yield f"error {size} {is_causal} {kind[0]}", error
        yield f"error {size} cross float64", compared(group, False, "float64", False, 16)
    for deterministic in (None, True):
        yield f"repeated {deterministic}", repeated(deterministic)
    yield "refused", refused(rank)
    yield "one work", one_work()
    yield "lost", lost(rank, pairs[rank // 2])


def rank_main(rank: int, port: int, folder: Path) -> None:
    signal.alarm(PATIENCE_S)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = {"rank": rank, "world_size": WORLD, "timeout": timedelta(seconds=LONG_S)}
    dist.init_process_group("gloo", store=store, **members)
    found = dict(run(rank))
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(WORLD):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            rank_main(rank, port, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    # Behind the forks: a child of a process with its thread may find a lock held for ever.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store.port == port
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
