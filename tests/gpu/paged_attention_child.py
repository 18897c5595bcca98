"""Runs one kernel of paged attention on drawn batches, in a process that may hang or die.

Called by `test_paged_attention_gpu.py` with a JSON of the kernel and its draws on the standard
input; prints a line of JSON for each draw.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tuner.compile.loading import LoadedKernel
from tuner.config import Config
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, AttentionProblem

FAMILY = family("fused_attention")
#: What a table's unset entries hold.
UNSET = (-1, -(2**31), 2**31 - 1, 1 << 20)
#: Share of sequences whose first pages are another one's.
SHARED = 0.3
#: Standard deviation of elements of e4m3; factors make them as large as others.
DEVIATION = 4.0
#: What a log-sum-exp may be off by: sums of e4m3 products are truncated.
LSE_LIMITS = {E4M3: 1e-2}


@dataclass
class Batch:
    """A drawn batch in a cache that holds infinities and NaNs wherever nothing belongs."""

    problem: AttentionProblem
    query: Any
    key: Any
    """(pages, HKV, page size, D), in any strides, as `value`."""
    value: Any
    table: Any
    lengths: list[int]
    queries: list[int]
    sinks: Any
    factors: list[Any]
    """Factors of e4m3 queries, keys and values: (H,), (HKV,) and (HKV,)."""

    @property
    def starts(self) -> Any:
        return torch.tensor([0, *self.queries], device="cuda").cumsum(0).int()


def cache(problem: AttentionProblem, pages: int, form: str) -> tuple[Any, Callable[..., Any]]:
    """A cache, and its keys and values seen as (pages, HKV, page size, D).

    Args:
        problem: sizes and type; of e4m3 the cache is float32, to be converted.
        pages: how many.
        form: ``slots``: (pages, page size, HKV, D); ``heads``: (pages, HKV, page size, D);
            ``halves``: (pages, HKV, page size, 2 D), keys and values halves of a row.
    """
    heads, size, width = problem.heads_kv, problem.page_size, problem.head_dim
    dtype = torch.float32 if problem.dtype == E4M3 else getattr(torch, problem.dtype)
    if form == "halves":
        both = torch.empty(pages, heads, size, 2 * width, dtype=dtype, device="cuda")
        return both, lambda both: (both[..., :width], both[..., width:])
    if form == "heads":
        both = torch.empty(2, pages, heads, size, width, dtype=dtype, device="cuda")
        return both, lambda both: (both[0], both[1])
    both = torch.empty(2, pages, size, heads, width, dtype=dtype, device="cuda")
    return both, lambda both: (both[0].transpose(1, 2), both[1].transpose(1, 2))


def drawn(problem: AttentionProblem, seed: int, is_mixed: bool) -> Batch:
    """A batch of `problem`'s kind: lengths at the edges of pages, pages shuffled and shared.

    Args:
        problem: batch, longest sequences, heads and page size.
        seed: of the draw.
        is_mixed: unlike numbers of queries, 0 among them; else all have `seqlen_q`.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size, longest = problem.page_size, problem.seqlen_kv
    edges = [0, 1, size - 1, size, size + 1, 3 * size, longest - 1, longest]
    lengths = [
        min(longest, rng.choice(edges) if rng.random() < 0.5 else rng.randint(1, longest))
        for _ in range(problem.batch)
    ]
    counts = [0, 1, 1, 1, 4, problem.seqlen_q]
    queries = [rng.choice(counts) if is_mixed else problem.seqlen_q for _ in lengths]
    queries = [min(count, problem.seqlen_q) for count in queries]
    needed = [-(-length // size) for length in lengths]
    pages = sum(needed) + 3
    free = list(range(pages))
    rng.shuffle(free)
    both, seen = cache(problem, pages, rng.choice(("slots", "heads", "halves")))
    key, value = seen(both)
    size_of_elements = DEVIATION if problem.dtype == E4M3 else 1.0
    for tensor, filler in ((key, math.nan), (value, math.inf)):
        tensor.fill_(filler)
    columns = max(needed) + rng.randint(0, 2)
    rows: list[list[int]] = []
    for index, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own = [free.pop() for _ in range(count)]
        if index and rng.random() < SHARED:
            donor = rng.randrange(index)
            whole = min(lengths[donor] // size, length // size)
            own[:whole] = rows[donor][:whole]
        rows.append([*own, *(rng.choice(UNSET) for _ in range(columns - count))])
        for at, page in enumerate(own):
            slots = min(size, length - at * size)
            for tensor in (key, value):
                shape = (problem.heads_kv, slots, problem.head_dim)
                new = size_of_elements * torch.randn(shape, device="cuda").to(tensor.dtype)
                part = tensor[page, :, :slots]
                part.copy_(torch.where(part.isfinite(), part, new))
    table = torch.tensor(rows, dtype=torch.int64, device="cuda").int()
    padded = torch.full((problem.batch, columns + 1), -1, dtype=torch.int32, device="cuda")
    padded[:, :columns] = table
    query = torch.randn(sum(queries), problem.heads_q, problem.head_dim, device="cuda")
    sinks = 2 * torch.randn(problem.heads_q, device="cuda") if problem.has_sinks else None
    query = (size_of_elements * query).to(getattr(torch, problem.dtype))
    factors = []
    if problem.dtype == E4M3:
        key, value = seen(both.to(torch.float8_e4m3fn))
        counts = (problem.heads_q, problem.heads_kv, problem.heads_kv)
        factors = [(0.5 + torch.rand(count, device="cuda")) / DEVIATION for count in counts]
    return Batch(problem, query, key, value, padded, lengths, queries, sinks, factors)


def expected(batch: Batch, scale: float) -> tuple[Any, Any]:
    """(total_q, H, D) and (H, total_q) in float64."""
    problem, outs, sums, at = batch.problem, [], [], 0
    group = problem.heads_q // problem.heads_kv
    left, right = problem.visible
    of_heads = [factor.double().view(-1, 1, 1) for factor in batch.factors]
    of_query, of_key, of_value = of_heads or (1.0, 1.0, 1.0)
    for index, (length, queries) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        query = batch.query[at : at + queries].double().transpose(0, 1) * of_query
        at += queries
        pages = batch.table[index, : -(-length // problem.page_size)].long()

        def gathered(tensor: Any, factor: Any, pages: Any = pages, length: int = length) -> Any:
            wide = tensor.float() if problem.dtype == E4M3 else tensor
            rows = wide[pages].transpose(1, 2).flatten(0, 1)[:length]
            return (rows.double().transpose(0, 1) * factor).repeat_interleave(group, 0)

        scores = query @ gathered(batch.key, of_key).mT * scale
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        if problem.is_causal or problem.is_windowed:
            row = torch.arange(queries, device="cuda")[:, None] + length - queries
            column = torch.arange(length, device="cuda")
            hidden = (column > row + right) | (column < row - left)
            scores = scores.masked_fill(hidden, -math.inf)
        if batch.sinks is not None:
            extra = batch.sinks.double().view(-1, 1, 1).expand(-1, queries, 1)
            scores = torch.cat((scores, extra), -1)
        weights = scores.softmax(-1)[..., :length].nan_to_num(0.0)
        outs.append((weights @ gathered(batch.value, of_value)).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


class Launcher:
    """A kernel's launches over one batch's tensors."""

    def __init__(self, kernel: LoadedKernel, config: Config, batch: Batch, scale: float) -> None:
        problem = batch.problem
        self.total = batch.query.shape[0]
        # A row more on either side, which belongs to no sequence.
        dtype = getattr(torch, problem.output.dtype)
        self.out = torch.empty(self.total + 2, *batch.query.shape[1:], dtype=dtype, device="cuda")
        self.lse = torch.empty(problem.heads_q, self.total, device="cuda")
        self.used = torch.tensor(batch.lengths, dtype=torch.int32, device="cuda")
        self.starts, self._kernel = batch.starts, kernel
        (launch,) = FAMILY.strided_launches(
            problem,
            config,
            scale,
            {
                "query": _packed(batch.query),
                "key": batch.key.stride(),
                "value": batch.value.stride(),
                "out": _packed(batch.query),
                "page_table": batch.table.stride(),
            },
        )
        *others, _total, size, _pages, stride = launch.integers
        self._integers = (*others, self.total, size, batch.key.shape[0], stride)
        self._scalars = launch.scalars
        size = max(1, kernel.workspace_bytes(self._integers))
        self._workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        tensors = [batch.query, batch.key, batch.value, self.out[1:], self.lse, batch.table]
        tensors += [self.used, self.starts, *([] if batch.sinks is None else [batch.sinks])]
        tensors += batch.factors
        self._tensors = tensors

    def poison(self) -> None:
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self._workspace.fill_(0xFF)

    def launch(self) -> None:
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        stream = torch.cuda.current_stream().cuda_stream
        workspace = self._workspace.data_ptr()
        self._kernel.launch(addresses, self._integers, self._scalars, workspace, stream)


def _packed(tensor: Any) -> tuple[int, ...]:
    row, head, column = tensor.stride()
    return (0, head, row, column)


def faults(batch: Batch, launcher: Launcher, scale: float, limit: float) -> list[str]:
    """Faults of a launch's results."""
    torch.cuda.synchronize()
    found: list[str] = []
    out, lse = launcher.out[1:-1], launcher.lse
    if not (launcher.out[0].isnan().all() and launcher.out[-1].isnan().all()):
        found.append("rows of no sequence were written")
    wanted, wanted_lse = expected(batch, scale)
    at = 0
    for index, (length, queries) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        rows = slice(at, at + queries)
        at += queries
        if not queries:
            continue
        what = f"sequence {index} of {queries} queries, {length} keys"
        part, reference = out[rows].double(), wanted[rows]
        if not part.isfinite().all():
            found.append(f"{what}: {int((~part.isfinite()).sum())} values are not finite")
            continue
        error = float((part - reference).norm() / reference.norm().clamp_min(1e-30))
        if not (reference == 0).all() and not error <= limit:
            found.append(f"{what}: error {error:.1e}")
        if (part[(reference == 0).all(-1)] != 0).any():
            found.append(f"{what}: rows without keys are not zero")
        of_rows, known = lse[:, rows].double(), wanted_lse[:, rows]
        if not torch.equal(of_rows.isneginf(), known.isneginf()):
            found.append(f"{what}: minus infinity at other rows of the log-sum-exp")
        elif not (of_rows - known).nan_to_num(0.0, 0.0, 0.0).abs().max() <= LSE_LIMITS.get(
            batch.problem.dtype, 1e-4
        ):
            found.append(f"{what}: log-sum-exp off")
        elif of_rows.isnan().any():
            found.append(f"{what}: log-sum-exp is not a number")
    return found


def grown(batch: Batch, launcher: Launcher, scale: float, limit: float, rng: random.Random) -> Any:
    """A captured graph serves lengths that change: shorter ones, then the first again."""
    launcher.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch()
    found: list[str] = []
    known = list(batch.lengths)
    for lengths in ([rng.randint(0, length) for length in known], known):
        batch.lengths = lengths
        launcher.used.copy_(torch.tensor(lengths, dtype=torch.int32))
        launcher.poison()
        graph.replay()
        found += [f"in a graph: {fault}" for fault in faults(batch, launcher, scale, limit)]
    return found


def run(kernel: LoadedKernel, config: Config, draw: Mapping[str, Any]) -> list[str]:
    """One draw: two launches that must leave the same bits, and the reference's numbers."""
    problem = AttentionProblem.parse(draw["problem"])
    params = {**config.params, "splits": draw["splits"]}
    params.pop("combine", None)
    if draw["splits"] > 1:
        params["combine"] = draw["combine"]
    config = Config(config.family, params)
    if found := FAMILY.violations(problem, config, DEFAULT_GPU):
        return found
    scale, limit = problem.head_dim**-0.5, draw["limit"]
    batch = drawn(problem, draw["seed"], draw["is_mixed"])
    if not sum(batch.queries):
        return []
    launcher = Launcher(kernel, config, batch, scale)
    launcher.poison()
    launcher.launch()
    torch.cuda.synchronize()
    first = launcher.out.clone(), launcher.lse.clone()
    launcher.poison()
    launcher.launch()
    found = faults(batch, launcher, scale, limit)
    again = launcher.out, launcher.lse
    for one, other in zip(first, again, strict=True):
        if not torch.equal(one.nan_to_num(7e3), other.nan_to_num(7e3)):
            found.append("a second launch left other bits")
    if draw["is_captured"]:
        found += grown(batch, launcher, scale, limit, random.Random(draw["seed"]))
    return found


def main(wanted: Mapping[str, Any]) -> None:
    kernel = LoadedKernel(wanted["key"], Path(wanted["library"]))
    config = Config.from_json(wanted["config"])
    draws: Sequence[Mapping[str, Any]] = wanted["draws"]
    for draw in draws:
        print(json.dumps({"draw": draw, "faults": run(kernel, config, draw)}), flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
