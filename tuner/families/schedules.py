"""Amounts of work, and choices for each shape, of a family with a portfolio or a rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, final

from tuner.config import Config, Value
from tuner.families.work import sizes_of
from tuner.hardware import Gpu
from tuner.problem import DTYPE_BYTES, Problem


class PagedBatch(NamedTuple):
    """Sequences over a paged cache, as far as the host knows them."""

    batch: int
    rows: int
    """Queries of all sequences."""
    heads_q: int
    heads_kv: int
    head_dim: int
    longest: int
    """Keys that a query of the longest sequence sees, or more; at least one."""
    mean: int
    """Mean keys of a sequence; 0: not known."""
    element_bytes: int
    sm_count: int

    @classmethod
    def of(cls, problem: Any, sm_count: int) -> Self:
        """Sequences of a problem of attention, all of which are alike."""
        rows, keys = problem.batch * problem.seqlen_q, problem.seqlen_kv
        if problem.window_left >= 0:
            keys = min(keys, problem.window_left + problem.seqlen_q)
        heads = problem.heads_q, problem.heads_kv, problem.head_dim
        return cls(problem.batch, rows, *heads, keys, keys, DTYPE_BYTES[problem.dtype], sm_count)


class Schedules:
    """Time models, and the run-time parameters of a compiled kernel at each shape. The defaults are
    those of a family without: no terms, and one schedule.
    """

    work_terms: ClassVar[tuple[str, ...]] = ()
    rated_apart: ClassVar[frozenset[str]] = frozenset()
    """Optional parameters whose kernels have rates unlike the others'."""
    """Names of the terms of `work`; empty for a family without time models."""

    @final
    def work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[float, ...]:
        """Amount of each of `work_terms`. The time model is their sum, weighted by fitted
        microseconds (`tuner.selection.portfolio`).
        """
        if not self.work_terms:
            return ()
        return self.amounts(sizes_of(problem), self.tiling(config), gpu)

    @staticmethod
    def amounts(sizes: Any, tiling: Any, gpu: Gpu) -> tuple[float, ...]:
        """`work` of `tuner.families.work.sizes_of` a problem and of a `tiling`; it may be traced
        (`tuner.families.tape`).
        """
        return ()

    def tiling(self, config: Config) -> Any:
        """Tiling of the problem into thread blocks, for `amounts`, with the ``splits`` of `config`
        or 1. None for a kernel of unknown tiles.
        """
        return None

    @final
    def scheduled(self, problem: Problem, config: Config, gpu: Gpu) -> Sequence[Config]:
        """Run-time choices of the compiled kernel of `config` for `problem`, a config for each.
        Empty when the kernel cannot serve the problem.

        Args:
            problem: problem in the kernel's domain.
            config: config without the parameters that a schedule sets.
            gpu: GPU that it runs on.
        """
        counts = self.splits(problem, config, gpu)
        return [self.called(problem, config, count) for count in counts]

    @final
    def splits(self, problem: Problem, config: Config, gpu: Gpu) -> Sequence[int]:
        """Counts of splits of the schedules of `scheduled`."""
        return self.splitter(config, gpu)(problem)

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        """`splits` of any problem, made once: a selection calls it for each new shape."""
        return lambda problem: (1,)

    def traced_splits(self, config: Config, sizes: Any, gpu: Gpu) -> Any:
        """`splits` by the problem's sizes (`tuner.families.work.sizes_of`), which may be traced.
        None where they need more than the sizes.
        """
        return None

    def condition(self, config: Config) -> str:
        """When a scheduled config has any `splits`: a Python expression over the fields of the
        problem's sizes (`tuner.families.work.sizes_of`). Empty: always, or not known.
        """
        return ""

    def is_scheduled(self, config: Config) -> bool:
        """True when `splits` depends on the problem; else they are those of `tiling`."""
        return False

    def is_split(self, config: Config) -> bool:
        """True if `splits` of a scheduled config are always two or more; else they are one."""
        return self.is_scheduled(config)

    def paged_schedule(self, config: Config, batch: PagedBatch) -> Mapping[str, Value]:
        """Run-time parameters of a kernel for sequences of a paged cache."""
        return {}

    def paged_us(self, config: Config, batch: PagedBatch) -> float | None:
        """Expected time of the schedule of a kernel that splits the keys of such sequences,
        microseconds; None of other kernels.
        """
        return None

    def ordered_schedule(self, config: Config) -> Mapping[str, Value]:
        """As `paged_schedule`, of parts that add in one order whatever the batch is."""
        return {}

    def holds(self, config: Config, group: int) -> bool:
        """True if a kernel's packs hold the query heads of a KV head, `group` of them."""
        return True

    def joins(self, config: Config) -> bool:
        """True for a kernel that `Portfolio.joining` adds to those that serve a domain."""
        return False

    def tile_rows(self, config: Config) -> int:
        """Rows of a tile, of a kernel that packs heads."""
        return 1

    def overlapped(self, config: Config) -> Config:
        """The config with its launch hidden behind the kernel in front, where that is a parameter
        and costs nothing: as a portfolio launches it.
        """
        return config

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        """The config of the schedule with this number of splits."""
        return config

    def served(self, problem: Problem, config: Config) -> Config:
        """A portfolio's config as a call launches it: early launches (`overlapped`) give way to
        ordinary ones where those were faster.

        In CUDA graphs an ordinary launch of a `gemv` took 0.865 of an early one's time below 6 us,
        0.91 below 9 us and 0.976 above (411 pairs). Dense attention by one kernel took 0.93 to 0.98
        below 20 us, and as long above 50 us (364 pairs). A product by clusters that divide K took
        0.85 to 0.94 below 20 us (6 pairs). Streams without graphs are the exception:
        an early launch was 1.5 to 2 us faster there at five products, the host ahead. All are by
        ``scripts/bench`` on an H200, 29 November 2026.
        """
        return config

    def legality_facts(self, problem: Problem) -> Hashable:
        """Facts of a problem that decide legality within a domain (`tuner.families.by_operation`):
        problems with equal facts have equal legal configs.
        """
        return problem
