"""One rank of an attention that is split by heads over NCCL: a process of `test_many_gpus`.

Collectives are under way while the kernels run. Prints as JSON what the rank saw.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import tuner
from tuner.problem import AttentionProblem
from tuner.runtime.parallel.distributed import agree

ROUNDS = 5
ELEMENTS = 1 << 24
"""64 MiB: the sum of it takes longer than the attention that runs beside it."""


def main(shape: str) -> None:
    """Compare this rank's heads, gathered from all ranks, with one GPU's whole attention."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here, timeout=timedelta(seconds=120))
    agreement = agree()
    problem = AttentionProblem.parse(shape)
    generator = torch.Generator().manual_seed(7)  # the same tensors in every rank
    whole = [
        torch.randn(operand.shape, generator=generator).half().to(here)
        for operand in problem.operands[:-1]
    ]
    mine = [tensor.chunk(world, dim=1)[rank].contiguous() for tensor in whole]
    agreed = not agreement.refusal and agreement.ranks == tuple(range(world))
    seen = {"agreed": agreed, "equal": True, "repeats": True, "reduced": True}
    for _ in range(ROUNDS):
        total = torch.full((ELEMENTS,), float(rank + 1), device=here)
        sum_up = dist.all_reduce(total, async_op=True)
        out = tuner.attention(*mine, is_causal=problem.is_causal)
        parts = [torch.empty_like(out) for _ in range(world)]
        gather = dist.all_gather(parts, out, async_op=True)
        again = tuner.attention(*mine, is_causal=problem.is_causal)
        sum_up.wait()
        gather.wait()
        alone = tuner.attention(*whole, is_causal=problem.is_causal)
        seen["equal"] &= torch.equal(torch.cat(parts, dim=1), alone)
        seen["repeats"] &= torch.equal(again, out)
        seen["reduced"] &= bool((total == world * (world + 1) / 2).all())
    wide = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double() for tensor in whole), is_causal=problem.is_causal
    )
    error = ((alone.double() - wide).norm() / wide.norm()).item()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({**seen, "error": error, "hits": tuner.stats().hits}))


if __name__ == "__main__":
    main(sys.argv[1])
