"""One rank of ring attention over NCCL: a process of `test_context_parallel_gpu`.

Prints as JSON how far its results are from one GPU's in fp64, and that they repeat. Then rank 1
kills itself, and rank 0 waits for it.
"""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tuner.runtime.context_parallel import ring_attention, split_sequence
from tuner.runtime.distributed import agree

TIMEOUT_S = 15


def main() -> None:
    """Compare, print, end."""
    rank = int(os.environ["RANK"])
    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here, timeout=timedelta(seconds=TIMEOUT_S))
    agreement = agree()
    generator = torch.Generator().manual_seed(7)  # the same tensors in every rank
    *whole, grad_out = (
        torch.randn(1, heads, 4096, 128, generator=generator).bfloat16().to(here)
        for heads in (8, 2, 2, 8)
    )
    wide = [tensor.double().requires_grad_() for tensor in whole]
    out = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    wanted = [out, *torch.autograd.grad(out, wide, grad_out.double())]
    parts = [split_sequence(tensor, is_causal=True).requires_grad_() for tensor in whole]
    grad_part = split_sequence(grad_out, is_causal=True)
    found = []
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
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring_attention(*parts, is_causal=True, deterministic=True)
    torch.cuda.synchronize()
    print("unreachable", flush=True)


if __name__ == "__main__":
    main()
