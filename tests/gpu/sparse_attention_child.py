"""Runs one kernel of block-sparse attention on drawn masks, in a process that may hang or die.

Called by `test_sparse_attention_gpu.py` with a JSON of the kernel and its draws on the standard
input; prints a line of JSON for each draw.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from tuner.compile.loading import LoadedKernel
from tuner.config import Config
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.measure import block_masks
from tuner.problem import AttentionProblem
from tuner.runtime.attention.block_mask import tabulated

FAMILY = family("fused_attention")
SCALE = 0.11


@dataclass
class Drawn:
    """Tensors of a problem; the tables as the gate makes them, and as the runtime does."""

    problem: AttentionProblem
    matrices: list[Any]
    dense: Any
    """(B or 1, H or 1, SQ, SKV), true where a query sees a key."""
    by_gate: list[Any]
    by_runtime: list[Any]


def drawn(problem: AttentionProblem, seed: int) -> Drawn:
    """Tensors and a mask with another pattern in each block of queries."""
    torch.manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    matrices = []
    for operand in problem.matrices[:3]:
        flat = torch.randn(operand.elements, device="cuda").to(dtype)
        matrices.append(flat.as_strided(operand.shape, operand.strides))
    tables = block_masks.tables(problem, "dominant", seed)
    of_problem = {operand.name: operand for operand in problem.operands}
    by_gate = [
        torch.frombuffer(bytearray(getattr(tables, name)), dtype=torch.int32)
        .view(of_problem[name].shape)
        .cuda()
        for name in ("block_counts", "block_indices", "block_bits")
    ]
    batches, heads, *_ = problem.block_shape
    shape = (batches, heads, problem.seqlen_q, problem.seqlen_kv)
    dense = torch.frombuffer(bytearray(tables.dense), dtype=torch.bool).view(shape).cuda()

    def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
        return dense[b, h, query, key]

    mask = create_block_mask(seen, *shape, device="cuda", BLOCK_SIZE=64 if seed % 2 else 128)
    return Drawn(problem, matrices, dense, by_gate, list(tabulated(mask)))


def expected(one: Drawn) -> tuple[Any, Any]:
    """(B, H, SQ, D) and (B, H, SQ) in float64."""
    problem = one.problem
    group = problem.heads_q // problem.heads_kv
    query, key, value = (tensor.double() for tensor in one.matrices)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * SCALE
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~one.dense, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value, scores.logsumexp(-1)


def launched(
    kernel: LoadedKernel, config: Config, one: Drawn, tables: Sequence[Any]
) -> tuple[Any, Any]:
    """Output and log-sum-exp of a launch over poisoned memory."""
    problem = one.problem
    operand = problem.output
    dtype = getattr(torch, operand.dtype)
    out = torch.full((operand.elements,), math.nan, dtype=dtype, device="cuda")
    out = out.as_strided(operand.shape, operand.strides)
    lse = torch.full(operand.shape[:3], math.nan, device="cuda")
    (launch,) = FAMILY.launches(problem, config, SCALE)
    size = max(1, kernel.workspace_bytes(launch.integers))
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    addresses = [tensor.data_ptr() for tensor in (*one.matrices, out, lse, *tables)]
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(addresses, launch.integers, launch.scalars, workspace.data_ptr(), stream)
    torch.cuda.synchronize()
    return out, lse


def run(kernel: LoadedKernel, config: Config, draw: Mapping[str, Any]) -> list[str]:
    """One draw: launches that must leave the same bits, and the reference's numbers."""
    problem = AttentionProblem.parse(draw["problem"])
    if reasons := FAMILY.violations(problem, config, DEFAULT_GPU):
        return reasons
    one = drawn(problem, draw["seed"])
    out, lse = launched(kernel, config, one, one.by_gate)
    found = []
    for what, tables in (("again", one.by_gate), ("by the runtime's tables", one.by_runtime)):
        other, other_lse = launched(kernel, config, one, tables)
        if not (torch.equal(out, other) and torch.equal(lse, other_lse)):
            found.append(f"{what}: other bits")
    wanted, wanted_lse = expected(one)
    part = out.double()
    if not part.isfinite().all():
        return [*found, f"{int((~part.isfinite()).sum())} values are not finite"]
    is_blind = wanted_lse.isneginf()
    if (part[is_blind] != 0).any():
        found.append("rows without keys are not zero")
    if not torch.equal(lse.isneginf(), is_blind):
        found.append("minus infinity at other rows of the log-sum-exp")
    elif not (lse.double() - wanted_lse).masked_fill(is_blind, 0.0).abs().max() <= 1e-3:
        found.append("log-sum-exp off")
    rows = (part - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    worst = float(rows.masked_fill(is_blind, 0.0).max())
    if not worst <= draw["limit"]:
        found.append(f"error {worst:.1e} of a row")
    return found


def main(wanted: Mapping[str, Any]) -> None:
    """Run every draw."""
    kernel = LoadedKernel(wanted["key"], Path(wanted["library"]))
    config = Config.from_json(wanted["config"])
    for draw in wanted["draws"]:
        print(json.dumps({"draw": draw, "faults": run(kernel, config, draw)}), flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
