"""The answer to a problem: a decision of the store, else a portfolio's choice, as a plan.

When a growing cache was refused at one length, nearby lengths are refused without a look-up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tuner.config import Config
from tuner.errors import StoreError
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem, Problem
from tuner.runtime.call import (
    counters,
    devices,
    dispatch,
    invariance,
    lengths,
    proven_kernels,
)
from tuner.runtime.call.plan import Excluded, KernelPlan, Plan, Posed, VendorPlan, resolve
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.selection.reader import (
    LookupResult,
    decided_lengths,
    differences,
    is_decided,
    lookup,
)

_log = logging.getLogger("tuner.runtime")

RETRY_EVERY_S = 5.0
"""Seconds until an entry that cannot run, for a missing artifact say, is tried again."""
GROWS_BY = 64
"""Lengths of a growing cache that share one refusal."""
#: Refusals that hold until the store changes.
_LASTING = {Kind.MISS, Kind.PORTFOLIO, Kind.TENSORS, Kind.TIMED, Kind.VENDOR}


@dataclass(frozen=True)
class CachedPlan:
    """Plan or refusal of one kind of call."""

    until: float
    """Time up to which it is valid (`time.monotonic`, seconds)."""
    problem: Problem | None
    plan: Plan | Refusal
    is_stale: bool = False
    """True when the store may have changed since."""

    @classmethod
    def of(cls, problem: Problem | None, plan: Plan | Refusal) -> CachedPlan:
        """A plan, or a refusal for as long as its kind lasts. A kernel that is proven later is not
        taken up where equal bits are wanted.
        """
        if not isinstance(plan, Refusal) or plan.kind in _LASTING:
            return cls(math.inf, problem, plan)
        if plan.kind is Kind.UNSERVED and devices.is_repeatable():
            return cls(math.inf, problem, plan)
        until = time.monotonic() + RETRY_EVERY_S
        return cls(until, problem, replace(plan, until=until))

    @property
    def is_vendors(self) -> bool:
        """True where a vendor's kernel answers."""
        plan = self.plan
        return (
            plan.kind is Kind.VENDOR if isinstance(plan, Refusal) else isinstance(plan, VendorPlan)
        )

    @property
    def is_hindered(self) -> bool:
        """True where a file that the call is looked up in cannot be used, or not now."""
        return isinstance(self.plan, Refusal) and self.plan.kind in (Kind.FILE, Kind.BUSY)

    @property
    def stale(self) -> CachedPlan:
        """A copy that must be looked up again."""
        return replace(self, until=0.0, is_stale=True)

    @property
    def passing(self) -> Plan | Refusal:
        """The plan, or a refusal of one call only."""
        return replace(self.plan, until=0.0) if isinstance(self.plan, Refusal) else self.plan


class Answers:
    """Looks up problems; to be called under the table's lock."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """SQLite file whose decisions are served; None: the user's store."""
        self.absent: frozenset[str] = frozenset()
        """Keys of artifacts that must not be launched, even if present."""
        self.withdrawn: dict[str, set[Config]] = {}
        """Configs whose launch was refused in this process, by the problem's key."""
        self._near: dict[Hashable, CachedPlan] = {}
        """Refused calls of a growing cache, by `neighbourhood`."""
        self._flagged: set[str] = set()

    def forget_near(self) -> None:
        """Look up each length of a growing cache again."""
        self._near = {}

    def of(self, posed: Posed, device: int) -> CachedPlan:
        """The plan that serves a problem, or the reason why there is none.

        Raises:
            StoreError: when the store cannot be read.
        """
        problem = posed.problem
        # A refusal for strides does not hold for other lengths, whose strides may differ.
        near = None if posed.strides or posed.needs_lse else neighbourhood(problem, device)
        refused = self._near.get(near)
        is_fresh = refused is not None and time.monotonic() < refused.until
        try:
            if refused is not None and is_fresh and not is_decided(problem, self.path):
                return self._bounded(replace(refused, problem=problem), is_alone=False)
            answer, is_exact = self._serving(posed, device)
        except StoreError:
            raise
        except proven_kernels.FAULTS as exc:
            return _damaged(problem, exc)
        if near is not None and isinstance(answer.plan, Refusal) and not is_exact:
            self._near[near] = answer
        return answer

    def over_lengths(
        self, plan: KernelPlan, pose_over: Callable[[int], Posed] | None, device: int
    ) -> lengths.Lengths | None:
        """Launches over a range of lengths of a growing cache; None if the plan serves only its
        own.
        """
        problem, served = plan.problem, None
        if pose_over is None or not dispatch.is_loaded():
            return None
        if not isinstance(problem, AttentionProblem) or not lengths.grows(problem):
            return None

        def resolved(length: int) -> KernelPlan | None:
            other = self._serving(pose_over(length), device)[0].plan
            is_same = isinstance(other, KernelPlan) and other.config == plan.config
            return other if is_same else None  # type: ignore[return-value]

        with contextlib.suppress(*proven_kernels.FAULTS):  # then it serves its own length
            decided_here = decided_lengths(problem, self.path)
            for width in (0, lengths.MIN_BLOCK):
                ends = lengths.between(problem.seqlen_kv, decided_here, width)
                served = served or lengths.served(plan, problem.seqlen_kv, ends, resolved)
        return served

    def _serving(self, posed: Posed, device: int) -> tuple[CachedPlan, bool]:
        """Kernel that serves a problem, and True if a decision of its own names it.

        The portfolio's choice serves where no decision does. It also comes before a vendor's kernel
        that stands in for a decided own one: a machine with prebuilt kernels has the portfolio's
        only.

        Raises:
            StoreError: when the store cannot be read.
        """
        problem, is_strided = posed.problem, bool(posed.strides)
        if invariance.is_on():
            return self._invariant(posed, device), True
        # The portfolio's choices depend on the proofs, and are made in `_choose`.
        answer = lookup(problem, gpu=devices.gpu_of(device), path=self.path, with_portfolio=False)
        own = None if answer is None else self._resolve(posed, answer, device)
        is_measured = answer is not None and answer.entry.provenance is Provenance.MEASURED
        stands_in = is_final = False
        if own is not None and answer is not None:
            entry = answer.entry
            stands_in = own.is_vendors and entry.winner not in entry.vendors.values()
            is_final = isinstance(own.plan, Plan) or (is_measured and own.until == math.inf)
        plan = None
        if stands_in or not is_final:
            plan = self._choose(posed, device)
        kind = KernelPlan if stands_in else Plan
        if own is not None and (plan is None or (is_measured and not isinstance(plan.plan, kind))):
            return self._bounded(own, is_strided), True
        if plan is None:
            label = problem.label()
            text = f"{label} (tuner sweep --op {problem.op} --shape {label})"
            plan, is_strided = CachedPlan.of(problem, Refusal(Kind.MISS, text)), False
        return self._bounded(plan, is_strided and plan.until == math.inf), False

    def _invariant(self, posed: Posed, device: int) -> CachedPlan:
        """Kernel of the class of the problem's layer, the fastest that runs here."""
        problem = posed.problem
        try:
            with devices.use(device):
                gpu, excluded = devices.gpu_of(device), self._excluded(problem)
                plan = proven_kernels.choose_invariant(posed, gpu, device, excluded)
        except proven_kernels.FAULTS as exc:
            return _damaged(problem, exc)
        return CachedPlan.of(problem, plan)

    def _resolve(self, posed: Posed, answer: LookupResult, device: int) -> CachedPlan:
        """The best candidate of a lookup result that can run here."""
        problem = posed.problem
        with devices.use(device):
            plan = resolve(posed, answer, device, self._excluded(problem))
        for note in answer.notes:
            _log.info("%s: %s", problem.label(), note)
        self._flag(answer)
        return CachedPlan.of(problem, plan)

    def _choose(self, posed: Posed, device: int) -> CachedPlan | None:
        """The portfolio's result; None when it has no candidates for such problems."""
        problem = posed.problem
        try:
            with devices.use(device):
                gpu, excluded = devices.gpu_of(device), self._excluded(problem)
                choice = proven_kernels.choose(posed, gpu, device, excluded)
        except proven_kernels.FAULTS as exc:
            return _damaged(problem, exc)
        if choice is not None and isinstance(choice.plan, Plan):
            selection = choice.selection
            doubts = "".join(f", {doubt}" for doubt in selection.doubts)
            _log.info("%s: portfolio: %s%s", problem.label(), selection.source, doubts)
        return None if choice is None else CachedPlan.of(problem, choice.plan)

    def _excluded(self, problem: Problem) -> Excluded:
        return Excluded(self.withdrawn.get(problem.key, ()), self.absent)

    def _bounded(self, answer: CachedPlan, is_alone: bool) -> CachedPlan:
        """A refusal with the lengths of a growing cache that it holds for.

        Args:
            answer: result; plans are returned unchanged.
            is_alone: the refusal holds for its own length only: other strides may be supported.
        """
        problem, refusal = answer.problem, answer.plan
        if (
            not isinstance(refusal, Refusal)
            or not isinstance(problem, AttentionProblem)
            or not lengths.grows(problem)
        ):
            return answer
        ends = problem.seqlen_kv, problem.seqlen_kv
        if not is_alone:
            ends = lengths.between(problem.seqlen_kv, decided_lengths(problem, self.path))
        return replace(answer, plan=replace(refusal, lengths=ends))

    def _flag(self, answer: LookupResult) -> None:
        """Warn once about entries that were measured in another environment."""
        changes = "; ".join(differences(answer.entry, devices.environment()))
        if changes and changes not in self._flagged:
            self._flagged.add(changes)
            _log.warning(
                "serving decisions of another environment (%s): "
                "tuner entries revalidate times them here",
                changes,
            )


def _damaged(problem: Problem, exc: Exception) -> CachedPlan:
    """Refuse a kind of call for a while: a file that it is looked up in cannot be used."""
    refusal = proven_kernels.damaged(problem, exc)
    counters.count_error(refusal.reason)
    return CachedPlan.of(problem, refusal)


def neighbourhood(problem: Problem, device: int) -> Hashable | None:
    """Key shared by attention problems that differ only in the length of their cache, in blocks of
    `GROWS_BY` keys; None for other problems.
    """
    if not isinstance(problem, AttentionProblem) or problem.seqlen_q == problem.seqlen_kv:
        return None
    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return device, *(facts | {"seqlen_kv": problem.seqlen_kv // GROWS_BY}).values()
