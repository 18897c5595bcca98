"""One rank of ring attention over NCCL: a process of `test_context_parallel_gpu`.

Prints as JSON how far its results are from one GPU's in fp64, and that they repeat. Then rank 1
kills itself, and rank 0 waits for it. Steps are written to stderr with the time since the start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tuner.runtime.parallel.context_parallel import ring_attention, split_sequence
from tuner.runtime.parallel.distributed import agree

START_S, TIMEOUT_S = 60, 5
"""Limit of a transfer while the ranks start, and when one is killed."""
_began = time.monotonic()


def say(step: str) -> None:
    print(f"{time.monotonic() - _began:6.1f} s: {step}", file=sys.stderr, flush=True)


def main() -> None:
    """Compare, print, end."""
    rank = int(os.environ["RANK"])
    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    say("init_process_group")
    dist.init_process_group("nccl", device_id=here, timeout=timedelta(seconds=START_S))
    say("agree")
    agreement = agree()
    say("reference")
    generator = torch.Generator().manual_seed(7)  # the same tensors in every rank
    *whole, grad_out = (
        torch.randn(1, heads, 2048, 128, generator=generator).bfloat16().to(here)
        for heads in (8, 2, 2, 8)
    )
    wide = [tensor.double().requires_grad_() for tensor in whole]
    out = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    wanted = [out, *torch.autograd.grad(out, wide, grad_out.double())]
    parts = [split_sequence(tensor, is_causal=True).requires_grad_() for tensor in whole]
    grad_part = split_sequence(grad_out, is_causal=True)
    found = []
    say("ring")
    for _ in range(3):
        ours = ring_attention(*parts, is_causal=True, deterministic=True)
        found.append([ours, *torch.autograd.grad(ours, parts, grad_part)])
    errors = []
    for ours, theirs in zip(found[0], wanted, strict=True):
        theirs = split_sequence(theirs.detach(), is_causal=True)
        errors.append(float((ours.detach().double() - theirs).norm() / theirs.norm()))
    repeats = all(
        torch.equal(one, other)
        for again in found[1:]
        for one, other in zip(found[0], again, strict=True)
    )
    print(
        json.dumps({"errors": errors, "repeats": repeats, "agreed": not agreement.refusal}),
        flush=True,
    )
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    torch.cuda.synchronize()
    say("last call")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring_attention(*parts, is_causal=True, deterministic=True)
    torch.cuda.synchronize()
    print("unreachable", flush=True)


if __name__ == "__main__":
    main()
