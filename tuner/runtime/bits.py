"""Bits of rows by kernels: the same row beside other rows, at other places, in other batches.

A *view* is one call: some rows, among neighbours. The bits of each row are recorded under the row's
name, and compared wherever the row appears again. Neighbours are ordinary, huge, tiny, infinite and
not a number; their own results are not compared.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from tuner.config import Config
from tuner.families import family
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, GroupedGemmProblem, Problem
from tuner.problem.base import Operand
from tuner.runtime.attention.attention_call import AttentionCall
from tuner.runtime.attention.composed import Extras
from tuner.runtime.attention.paged import paged_call
from tuner.runtime.attention.varlen import VarlenCall
from tuner.runtime.call import devices
from tuner.runtime.call.plan import KernelPlan, Plan, Posed
from tuner.runtime.call.refusal import Refusal

Planner = Callable[[Posed, Config], Plan | str]
"""Makes the plan of a kernel, or says why it has none."""
Seen = tuple[str, torch.Tensor]
"""Name of a kind of rows, and for each row of an output its number of that kind, or -1."""

ROWS = 8192
"""Rows of a product that are compared."""
SIZES = (
    *(1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 200),
    *(256, 257, 500, 1000, 1024, 2049, 4096, ROWS),
)
"""Rows of a call."""
SHUFFLED = (2, 16, 100, 1000, ROWS)
"""Rows of calls whose rows are in another order, and of calls that are half neighbours."""
SHOWN_ROWS = 16
"""First rows of each kind that a digest is of."""
LENGTHS = (1, 64, 100, 257, 1000, 1100)
"""Keys of a sequence."""
QUERIES = (1, 2, 16, 100)
"""Queries that see equally many keys."""
REQUESTS, HEADS, KV_HEADS, PAGE = 3, 8, 2, 64
"""Sequences that are compared, their heads, and slots of a page."""


class Recorded:
    """Bits of rows by kind and number."""

    def __init__(self) -> None:
        self._bits: dict[str, torch.Tensor] = {}
        self._known: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: torch.Tensor, bits: torch.Tensor) -> tuple[int, int]:
        """Record rows; of those that were recorded before count all and those that differ.

        Args:
            name: kind of the rows.
            rows: number of each row, or -1.
            bits: (rows, width), integers.
        """
        is_meant = rows >= 0
        rows, bits = rows[is_meant], bits[is_meant]
        if not len(rows):
            return 0, 0
        self._reserve(name, int(rows.max()) + 1, bits)
        stored, mask = self._bits[name], self._known[name]
        again = mask[rows]
        differs = again & (stored[rows] != bits).any(1)
        new = rows[~again]
        stored[new], mask[new] = bits[~again], True
        return int(again.sum()), int(differs.sum())

    def _reserve(self, name: str, count: int, bits: torch.Tensor) -> None:
        old = self._bits.get(name)
        have = 0 if old is None else len(old)
        if count <= have:
            return
        self._bits[name] = bits.new_empty((count, bits.shape[1]))
        self._known[name], mask = bits.new_zeros(count, dtype=torch.bool), self._known.get(name)
        if old is not None and mask is not None:
            self._bits[name][:have], self._known[name][:have] = old, mask

    def merge(self, other: Recorded) -> tuple[int, int]:
        """`take` all rows of another record."""
        compared = differing = 0
        for name, theirs in other._known.items():
            rows = theirs.nonzero().flatten()
            counts = self.take(name, rows, other._bits[name][rows])
            compared, differing = compared + counts[0], differing + counts[1]
        return compared, differing

    def digests(self) -> dict[str, str]:
        """A short hash of the first `SHOWN_ROWS` rows of each kind, where all are known."""
        digests = {}
        for name, mask in self._known.items():
            if len(mask) >= SHOWN_ROWS and bool(mask[:SHOWN_ROWS].all()):
                first = self._bits[name][:SHOWN_ROWS].contiguous().cpu().view(torch.uint8)
                digests[name] = hashlib.sha1(first.numpy().tobytes()).hexdigest()[:8]
        return digests


@dataclass
class RowBits:
    """Bits of one kernel over all views."""

    recorded: Recorded = field(default_factory=Recorded)
    views: int = 0
    compared: int = 0
    """Rows that were recorded before."""
    differing: int = 0
    at: list[str] = field(default_factory=list)
    """Views in which rows differ."""
    refused: dict[str, str] = field(default_factory=dict)
    """Views that the kernel does not serve, and why."""


class RowView(ABC):
    """One call."""

    name: str

    @abstractmethod
    def posed(self) -> Posed:
        """The problem of the call."""

    @abstractmethod
    def bits(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Kind, numbers and bits of its rows."""


def outcome(config: Config, views: Iterator[RowView], planner: Planner, gpu: Gpu) -> RowBits:
    """The bits of a kernel's rows over all views that it serves."""
    found, member = RowBits(), family(config.family)
    for view in views:
        posed = view.posed()
        try:
            reasons = member.violations(posed.problem, config, gpu)
        except INCOMPATIBLE_CONFIG_ERRORS as exc:
            reasons = [str(exc)]
        plan = "; ".join(reasons) if reasons else planner(posed, config)
        if isinstance(plan, str):
            found.refused[view.name] = plan
            continue
        if isinstance(plan, KernelPlan):  # with the config's splits, not those of a schedule
            plan = replace(plan, by_portfolio=False)
        found.views += 1
        for name, rows, bits in view.bits(plan):
            compared, differing = found.recorded.take(name, rows, bits)
            found.compared += compared
            found.differing += differing
            if differing:
                found.at.append(view.name)
    return found


def as_bits(out: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return out.view(kinds[out.element_size()])


class ProductRows:
    """Rows of a product, or of the groups of a grouped one, and calls of some of them.

    Args:
        problem: product of any number of rows.
        rows: rows that are compared.
        sizes: rows of the calls.
        shuffled: rows of calls in another order, and beside neighbours.
    """

    def __init__(
        self,
        problem: Any,
        rows: int = ROWS,
        sizes: Sequence[int] = SIZES,
        shuffled: Sequence[int] = SHUFFLED,
    ) -> None:
        self.problem, self.rows = problem, rows
        self._sizes = [size for size in sizes if size <= rows]
        self._shuffled = [size for size in shuffled if size <= rows]
        self._generator = torch.Generator(devices.TYPE).manual_seed(0)
        self._of_rows: dict[str, torch.Tensor] = {}
        self._others: dict[str, torch.Tensor] = {}

    def views(self) -> Iterator[RowView]:
        """Calls of the first rows, of rows in another order, and beside neighbours; before them all
        rows in each group alone.
        """
        every = torch.arange(self.rows, device=devices.TYPE)
        for group in range(groups := getattr(self.problem, "groups", 0)):
            starts = [0] * (group + 1) + [self.rows] * (groups - group)
            yield self._view(f"group {group}", every, starts)
        for size in reversed(self._sizes):
            yield self._view(f"M={size}", every[:size])
        for size in self._shuffled:
            order = torch.randperm(self.rows, generator=self._generator, device=devices.TYPE)
            yield self._view(f"M={size} shuffled", order[:size])
            planted = torch.randint(
                self.rows,
                self.rows + len(PLANTED),
                (size,),
                generator=self._generator,
                device=devices.TYPE,
            )
            is_own = torch.rand(size, generator=self._generator, device=devices.TYPE) < 0.5
            yield self._view(f"M={size} planted", torch.where(is_own, order[:size], planted))

    def _view(self, name: str, rows: torch.Tensor, starts: Sequence[int] = ()) -> RowView:
        problem = replace(self.problem, m=len(rows))
        if not starts and not isinstance(problem, GroupedGemmProblem):
            starts = 0, len(rows)
        elif not starts:
            cuts = torch.randint(
                0,
                len(rows) + 1,
                (problem.groups - 1,),
                generator=self._generator,
                device=devices.TYPE,
            )
            starts = [0, *sorted(cuts.tolist()), len(rows)]
        return _ProductView(self, name, problem, rows, starts)

    def inputs(
        self, problem: Problem, rows: torch.Tensor, starts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Tensors in the order of the operands."""
        tensors = []
        for operand in problem.operands[:-1]:
            if operand.name == "offsets":
                tensors.append(torch.tensor(starts, dtype=torch.int32, device=devices.TYPE))
            elif self._belongs_to_rows(problem, operand):
                tensors.append(self._picked(operand, rows))
            else:
                if operand.name not in self._others:
                    self._others[operand.name] = self._drawn(operand, (operand.elements,))
                tensors.append(self._others[operand.name])
        return tensors

    @staticmethod
    def _belongs_to_rows(problem: Any, operand: Operand) -> bool:
        if operand.name == "scale_a":
            return getattr(problem, "scales", "block") != "tensor"
        return operand.name in ("a", "residual")

    def _picked(self, operand: Operand, rows: torch.Tensor) -> torch.Tensor:
        """The operand's part of some rows; factors of blocks lie row by row within a block."""
        is_factor = operand.name == "scale_a"
        width = operand.shape[0] if is_factor and len(operand.shape) == 2 else operand.shape[-1]
        width = 1 if is_factor and len(operand.shape) == 1 else width
        if operand.name not in self._of_rows:
            table = self._drawn(operand, (self.rows + len(PLANTED), width))
            for i, planted in enumerate(PLANTED):
                table[self.rows + i] = planted.to(table.dtype)
            self._of_rows[operand.name] = table
        table = self._of_rows[operand.name]
        picked = table.view(torch.uint8)[rows].view(table.dtype)
        if not is_factor or width == 1:
            return picked
        padded = picked.new_zeros((operand.shape[1], width))
        padded[: len(rows)] = picked
        return padded.t().contiguous()

    def _drawn(self, operand: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal elements; factors between a half and one and a half of a small number."""
        dtype = getattr(torch, operand.dtype)
        # The same for every kernel, whichever views it serves before.
        seed = zlib.crc32(operand.name.encode())
        generator = torch.Generator(devices.TYPE).manual_seed(seed)
        if operand.name.startswith("scale"):
            factors = torch.rand(shape, generator=generator, device=devices.TYPE) + 0.5
            return factors / 64
        drawn = torch.randn(shape, generator=generator, device=devices.TYPE, dtype=torch.bfloat16)
        return (drawn * 8).to(dtype) if dtype.itemsize == 1 else drawn.to(dtype)


PLANTED = tuple(
    torch.tensor(value)
    for value in (1e4, -3e4, 1e-6, 0.0, float("inf"), float("-inf"), float("nan"))
)
"""Elements of neighbours."""


@dataclass
class _ProductView(RowView):
    of: ProductRows
    name: str
    problem: Problem
    rows: torch.Tensor
    starts: Sequence[int]

    def posed(self) -> Posed:
        return Posed(self.problem)

    def bits(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        out = plan.run_uncounted(*self.of.inputs(self.problem, self.rows, self.starts))
        bits = as_bits(out.reshape(len(self.rows), -1))
        meant = torch.where(self.rows < self.of.rows, self.rows, -1)
        for group, (first, last) in enumerate(pairwise(self.starts)):
            yield f"group {group}", meant[first:last], bits[first:last]


class Sequences:
    """Requests of attention: queries, keys and values of a few sequences, and calls of them.

    Query i of a request that sees keys 0..i is the row ``seen`` i, whichever call computes it.
    Query i that sees the first L keys is the row ``L`` i.

    Args:
        problem: attention of the kernel's types, mask and kind of cache, of any sizes.
        is_grouped: keys and values have fewer heads; else they are repeated for each query head.
    """

    def __init__(self, problem: AttentionProblem, *, is_grouped: bool) -> None:
        self.problem, self.is_grouped = problem, is_grouped
        self.length = LENGTHS[-1]
        generator = torch.Generator(devices.TYPE).manual_seed(0)
        shape = REQUESTS + 2, self.length
        dtype = getattr(torch, problem.dtype)

        def drawn(heads: int) -> torch.Tensor:
            wide = torch.randn(
                *shape, heads, problem.head_dim, generator=generator, device=devices.TYPE
            ).to(torch.bfloat16)
            wide[REQUESTS] *= 1e4
            # A sequence that is packed behind another reaches into its last block of keys.
            is_packed_behind = problem.is_varlen and not problem.is_paged
            wide[REQUESTS + 1] = 1e30 if is_packed_behind else float("inf")
            wide[REQUESTS + 1, ::3] = -1e30 if is_packed_behind else float("nan")
            return wide.to(dtype)

        self.query = drawn(HEADS)
        self.key, self.value = drawn(KV_HEADS), drawn(KV_HEADS)
        if not is_grouped:
            self.key, self.value = (
                t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (self.key, self.value)
            )
        self.sinks = torch.randn(HEADS, generator=generator, device=devices.TYPE)

    @property
    def extras(self) -> Extras:
        """Window and soft cap."""
        problem = self.problem
        return Extras(problem.window_left, problem.window_right, problem.softcap)

    def views(self) -> Iterator[RowView]:
        """Calls of the kind of cache that the problem has."""
        if self.problem.is_paged:
            yield from self._paged()
        elif self.problem.is_varlen:
            yield from self._packed()
        elif self.problem.is_causal:
            for batch in _BATCHES:
                for length in reversed(LENGTHS):
                    yield _DenseView(self, batch, length, length)
        else:
            # A window lies along the top-left diagonal: only whole sequences have their own place.
            counts = () if self.problem.is_windowed else QUERIES
            for batch in _BATCHES:
                for length in LENGTHS:
                    for queries in sorted({*(n for n in counts if n < length), length}):
                        yield _DenseView(self, batch, queries, length)

    def _packed(self) -> Iterator[RowView]:
        for requests in _BATCHES:
            for turn in range(4):
                yield _PackedView(
                    self,
                    [(r, LENGTHS[(5 * i + turn) % len(LENGTHS)]) for i, r in enumerate(requests)],
                )

    def _paged(self) -> Iterator[RowView]:
        ends = (1, 17, 64, 100, 257, 500, 1000, self.length)
        for requests in _BATCHES:
            for turn, queries in enumerate((1, 2, 5, 64, 100, 300, 1, self.length)):
                chunks = []
                for i, r in enumerate(requests):
                    end = ends[-1 - (3 * i + turn) % len(ends)]
                    # Chunks of prompts beside decoding, and calls of decoding alone.
                    mine = queries if turn < 2 or i % 2 == 0 else 1
                    chunks.append((r, max(0, end - mine), end))
                yield _PagedView(self, chunks, turn)

    def number(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Numbers of rows; -1 of a neighbour's."""
        numbers = request * self.length + positions
        return numbers if request < REQUESTS else torch.full_like(numbers, -1)


_OTHERS = REQUESTS, REQUESTS + 1
_BATCHES: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (0, 1, 2), (2, *_OTHERS, 0), (*_OTHERS, 1)),
    (0, 1, 2) * 6,
    (*(0, 1, 2) * 3, *_OTHERS) * 6,
)
"""Requests of a batch."""


@dataclass
class _DenseView(RowView):
    """The last queries of each request, which see its first keys; under a causal mask all."""

    of: Sequences
    requests: Sequence[int]
    queries: int
    keys: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"B={len(self.requests)},SQ={self.queries},SKV={self.keys}"

    def _call(self) -> AttentionCall:
        at, of = list(self.requests), self.of
        first = self.keys - self.queries
        query, key, value = (
            tensor[at, start : self.keys].transpose(1, 2).contiguous()
            for tensor, start in ((of.query, first), (of.key, 0), (of.value, 0))
        )
        options = None, 0.0, of.problem.is_causal, None, True
        return AttentionCall(query, key, value, *options, of.extras)

    def posed(self) -> Posed:
        return self._call().pose()

    def bits(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        out = plan.run_uncounted(*self._call().inputs).transpose(1, 2)
        bits = as_bits(out.reshape(len(self.requests) * self.queries, -1).contiguous())
        positions = torch.arange(self.keys - self.queries, self.keys, device=devices.TYPE)
        rows = torch.cat([self.of.number(request, positions) for request in self.requests])
        if self.of.problem.is_causal:
            yield "seen", rows, bits
            return
        yield str(self.keys), rows, bits
        if self.of.problem.is_windowed:
            return
        is_last = (positions == self.keys - 1).repeat(len(self.requests))
        yield "seen", torch.where(is_last, rows, -1), bits


@dataclass
class _PackedView(RowView):
    """Whole sequences, one after the other."""

    of: Sequences
    parts: Sequence[tuple[int, int]]
    """Request and length of each."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"packed {' '.join(str(length) for _, length in self.parts[:6])}"

    def _call(self) -> VarlenCall:
        of, lengths = self.of, [length for _, length in self.parts]
        starts = torch.tensor([0, *lengths], device=devices.TYPE).cumsum(0).to(torch.int32)
        query, key, value = (
            torch.cat([tensor[request, :length] for request, length in self.parts])
            for tensor in (of.query, of.key, of.value)
        )
        longest, scale = max(lengths), of.problem.head_dim**-0.5
        options = longest, longest, of.problem.is_causal, scale, True
        return VarlenCall(query, key, value, starts, starts, *options)

    def posed(self) -> Posed:
        return self._call().pose()

    def bits(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        bits = _bits_of(self._call().run(plan))
        start = 0
        for request, length in self.parts:
            rows = self.of.number(request, torch.arange(length, device=devices.TYPE))
            mine = bits[start : start + length]
            if self.of.problem.is_causal:
                yield "seen", rows, mine
            else:
                yield str(length), rows, mine
                yield "seen", rows[-1:], mine[-1:]
            start += length


@dataclass
class _PagedView(RowView):
    """Chunks of prompts and decoding over a paged cache, pages in any order."""

    of: Sequences
    chunks: Sequence[tuple[int, int, int]]
    """Request, first query and end of each."""
    seed: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"pages {' '.join(f'{first}:{end}' for _, first, end in self.chunks[:6])}"

    def _call(self) -> Any:
        of, columns = self.of, -(-self.of.length // PAGE)
        count = len(self.chunks) * columns
        generator = torch.Generator(devices.TYPE).manual_seed(self.seed)
        order = torch.randperm(count, generator=generator, device=devices.TYPE)
        table = order.view(len(self.chunks), columns).to(torch.int32)
        # What no sequence has written is not a number.
        key, value = (
            torch.full(
                (count, PAGE, *tensor.shape[2:]),
                float("nan"),
                dtype=torch.bfloat16,
                device=devices.TYPE,
            ).to(tensor.dtype)
            for tensor in (of.key, of.value)
        )
        for row, (request, _, end) in zip(table.long(), self.chunks, strict=True):
            for cache, tensor in ((key, of.key), (value, of.value)):
                pages = cache[row].flatten(0, 1)
                pages[:end] = tensor[request, :end]
                cache[row] = pages.view(columns, PAGE, *tensor.shape[2:])
        ends = [end for *_, end in self.chunks]
        lengths = [end - first for _, first, end in self.chunks]
        used = torch.tensor(ends, dtype=torch.int32, device=devices.TYPE)
        starts = torch.tensor([0, *lengths], device=devices.TYPE).cumsum(0).to(torch.int32)
        query = torch.cat([of.query[request, first:end] for request, first, end in self.chunks])
        problem = of.problem
        call = paged_call(
            *(query, key, value, table, used, starts, of.sinks if problem.has_sinks else None),
            *(max(lengths), max(ends), True, of.extras, problem.head_dim**-0.5),
        )
        if query.element_size() > 1:
            return call
        ones = [torch.ones(heads, device=devices.TYPE) for heads in (HEADS, *(2 * [key.shape[2]]))]
        return call._replace(descales=tuple(ones))

    def posed(self) -> Posed:
        posed: Posed = self._call().pose()
        # A window longer than these sequences is compiled in all the same.
        for name in ("window_left", "window_right"):
            object.__setattr__(posed.problem, name, getattr(self.of.problem, name))
        return posed

    def bits(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        bits, start = _bits_of(self._call().run(plan)), 0
        for request, first, end in self.chunks:
            positions = torch.arange(first, end, device=devices.TYPE)
            yield "seen", self.of.number(request, positions), bits[start : start + end - first]
            start += end - first


def _bits_of(out: torch.Tensor | Refusal) -> torch.Tensor:
    """Bits of (rows, H, D).

    Raises:
        RuntimeError: when the kernel refused the call.
    """
    if isinstance(out, Refusal):
        raise RuntimeError(out.reason)
    return as_bits(out.reshape(len(out), -1).contiguous())
