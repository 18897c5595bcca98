"""Interface of the domains of all operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from tuner.config import Config
from tuner.families.work import sizes_of
from tuner.problem import DType, Problem

MAX_SHORT = 24
"""Most queries of an attention prompt without a window that kernels of few queries answer. Their
tiles are small, or hold the query heads of a KV head."""
MAX_SIZE_FACTOR = 2
"""Largest factor between a size and the measured ones at which a time model is trusted."""


class Domain(ABC):
    """Interface of the domains of all operations; each is also a `NamedTuple`."""

    __slots__ = ()
    op: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    """Names of `sizes`."""
    extrapolates: ClassVar[bool]
    """True if own kernels are also chosen far from measured sizes. PyTorch's attention is slower
    nearly everywhere, its products seldom."""

    @classmethod
    @abstractmethod
    def holding(cls, problem: Any) -> Self | None:
        """The domain of a problem of the operation; None without a portfolio."""

    @staticmethod
    @abstractmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """The sizes that decide if a problem is near measured ones; may be traced.

        Args:
            sizes: sizes that work is counted from (`tuner.families.work`).
        """

    @property
    def trusted_above(self) -> tuple[float, ...]:
        """Factors above the largest measured sizes up to which time models are trusted, by axis."""
        return (MAX_SIZE_FACTOR,) * len(self.axes)

    @property
    def trusted_below(self) -> tuple[float, ...]:
        """Factors below the smallest measured sizes down to which they are trusted, by axis."""
        return (MAX_SIZE_FACTOR,) * len(self.axes)

    @classmethod
    def sizes(cls, problem: Problem) -> tuple[int, ...]:
        """`axes_of` a problem."""
        return cls.axes_of(sizes_of(problem))

    @staticmethod
    @abstractmethod
    def group(problem: Any) -> tuple[int, ...]:
        """Key of a problem's model: problems with equal keys are left out of a fit together."""

    def with_known(self, sizes: Any) -> Any:
        """Sizes to trace (`tuner.families.tape`), with constants for the values that all problems
        of the domain share.
        """
        return sizes

    @property
    @abstractmethod
    def donors(self) -> Iterator[Self]:
        """Domains whose kernels do nearly the same work, nearest first. The kernels and time models
        of the first measured one serve this domain while it was not measured itself.
        """

    @property
    def is_fitted(self) -> bool:
        """True if rates are fitted to the domain's own measurements; else they are its donors'."""
        return True

    @property
    def of_times(self) -> Iterator[Self]:
        """Domains in which a kernel's times follow the same rates."""
        yield from ()

    @property
    def alike(self) -> Iterator[Self]:
        """Domains in which kernels take the same time at the same sizes, this one first."""
        yield self

    @property
    def filled(self) -> Iterator[Self]:
        """Domains of `alike` that a fit makes of this one's measurements if they have none. Else
        another GPU's times would be rescaled.
        """
        yield from ()

    def moved(self, problem: Any) -> Any:
        """A problem of one of the `alike` domains, as it is in this one."""
        return problem

    @property
    def without_activation(self) -> Self | None:
        """The domain of plain products of as many rows; None for other domains than of products
        with an activation.
        """
        return None

    @property
    @abstractmethod
    def recipients(self) -> Iterator[Self]:
        """Served domains that have this one among their `donors`."""

    @classmethod
    def other_recipients(cls) -> Iterator[Self]:
        """Domains served by measured donors that are not among any domain's `recipients`."""
        yield from ()

    @property
    @abstractmethod
    def donor_kernels(self) -> int | None:
        """Most kernels that an unmeasured domain takes from its donor.

        None: the best for each number of packed heads (1 included), with and without splits.
        """

    @property
    def donors_split(self) -> bool:
        """True if a kernel that an unmeasured domain takes from its donor also splits the keys."""
        return False

    @property
    def further_kernels(self) -> Iterator[Config]:
        """Kernels that the family names beside those that were measured, or are a donor's."""
        yield from ()

    @property
    @abstractmethod
    def max_kernels(self) -> int:
        """Most compiled kernels of the domain, each of which is built and proven.

        One kernel with and without programmatic dependent launch is two candidates.
        """

    @property
    @abstractmethod
    def vendors(self) -> frozenset[str]:
        """Names, in the vendor family, of PyTorch's own kernels for such calls."""

    def clocks(self, kernel: Config) -> float:
        """Fewest clocks that a multiprocessor takes for a score, by which a time model is bounded;
        0: not known.
        """
        return 0.0

    def pytorchs_factor(self, problem: Any) -> float:
        """PyTorch's time for a problem, over that of its time model."""
        return 1.0

    @property
    def has_donor_vendors(self) -> bool:
        """PyTorch serves such calls by the donor's kernels, whose time models hold there too."""
        return True

    @property
    def is_composed(self) -> bool:
        """PyTorch has no operator for such calls, and composes them of several operations, which
        take several times as long.
        """
        return False

    @abstractmethod
    def problems(self, dtype: DType) -> tuple[Problem, ...]:
        """A small problem for each kernel that a config needs in this domain and type."""

    def problem_for(self, config: Config) -> Problem:
        """A small problem that a config of the domain is legal for."""
        return self.problems("float16")[0]

    @abstractmethod
    def label(self) -> str:
        """Short text for people."""
