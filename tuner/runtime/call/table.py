"""Plan cache keyed by kind of call; checks the store at most every `LOOK_EVERY_S` seconds.

A call triggers the check once that time has passed, so an update is seen within a second, and most
calls need no look-up. While the store cannot be read, known plans stay in use, and PyTorch answers
unknown kinds of calls. When a growing cache was refused at one length, nearby lengths are refused
without a look-up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tuner import settings
from tuner.base import document, forks, ranges
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.hardware import Gpu
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem, Problem, problem_from_json
from tuner.runtime.call import counters, devices, dispatch, lengths, proven_kernels
from tuner.runtime.call.plan import Excluded, KernelPlan, Plan, Posed, VendorPlan, resolve
from tuner.runtime.call.refusal import Kind, Refusal, once
from tuner.selection.kernels import lists
from tuner.selection.reader import (
    LookupResult,
    decided,
    decided_lengths,
    decided_stamp,
    differences,
    is_decided,
    lookup,
    of_any_length,
)

_log = logging.getLogger("tuner.runtime")

LOOK_EVERY_S = 0.5
"""Seconds between checks of the store for changes."""
RETRY_EVERY_S = 5.0
"""Seconds until an entry that cannot run, for a missing artifact say, is tried again."""
GROWS_BY = 64
"""Lengths of a growing cache that share one refusal."""
#: Kinds of calls kept. A larger table is cleared, so that a server of ever new shapes stays small.
_MAX_KNOWN = 4096

_Out = TypeVar("_Out")
DispatchedCall = tuple[str, tuple[Any, ...]]
"""Operation and arguments of a call in the C++ dispatcher's form (`dispatch.put`)."""
_OFF = Refusal(Kind.OFF, "TUNER_DISABLE is set")


@dataclass(frozen=True)
class _Known:
    """Cached result for one kind of call."""

    until: float
    """Time up to which it is valid (`time.monotonic`, seconds)."""
    problem: Problem | None
    plan: Plan | Refusal
    is_stale: bool = False
    """True when the store may have changed since."""

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
    def stale(self) -> _Known:
        """A copy that must be looked up again."""
        return replace(self, until=0.0, is_stale=True)

    @property
    def passing(self) -> Plan | Refusal:
        """The plan, or a refusal of one call only."""
        return replace(self.plan, until=0.0) if isinstance(self.plan, Refusal) else self.plan


class PlanTable:
    """Plans by kind of call; safe between threads and after a fork."""

    _lock: threading.RLock

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._near: dict[Hashable, _Known] = {}
        """Refused calls of a growing cache, by `_neighbourhood`."""
        self._withdrawn: dict[str, set[Config]] = {}
        forks.add_lock(self, threading.RLock)
        self._look_at = 0.0
        self._stamp: Hashable = None
        """Stamp of the store's decisions at the last check."""
        self._decided: Mapping[str, Hashable] | None = None
        """The decisions themselves, read from the first change on."""
        self._proven: Any = None
        """Kernel lists at the last check, where calls are timed."""
        self._off: Refusal | None = None
        """Reason why nothing is served; None otherwise."""
        self._path: Path | None = None
        self._absent: frozenset[str] = frozenset()
        self._refusal: Refusal | None = None
        self._fault: Refusal | None = None
        self._flagged: set[str] = set()

    def get(self, kind: Hashable) -> Plan | Refusal | None:
        """Cached plan or refusal of a kind of call; None for an unknown kind.

        Args:
            kind: key of the call; calls with equal keys have equal problems.
        """
        if self._off is not None:
            return self._off
        known = self._known.get(kind)
        if known is None or (known.until != math.inf and time.monotonic() >= known.until):
            return None
        return known.plan

    def refresh(self, tensor: torch.Tensor) -> int:
        """Check the store if that is due; to be called before a call is looked up in this table.

        Args:
            tensor: an input of the call; other devices than the served one need no check.

        Returns:
            The dispatcher's generation, for refusals found from now on.
        """
        if time.monotonic() >= self._look_at:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == devices.TYPE:
                self._look()
        return dispatch.generation()

    def find_out(
        self,
        kind: Hashable,
        dispatched: DispatchedCall | None,
        pose: Callable[[], Posed],
        device: int,
        pose_over: Callable[[int], Posed] | None = None,
    ) -> Plan | Refusal:
        """Look up a kind of call that `get` does not know.

        Args:
            kind: as in `get`.
            dispatched: the call in the form of `dispatch.put`; None: the C++ dispatcher keeps no
                plan.
            pose: gives the problem; raises ConfigError if no tuned kernel could serve it.
            device: index of the tensors' device.
            pose_over: gives the problem with a cache of that many keys; None: no growing cache.
        """
        old = self._known.get(kind)
        if devices.is_capturing():  # a loaded kernel may be captured, even if the store has changed
            return once(Kind.CAPTURING, "call once before") if old is None else old.passing
        # While another thread looks up, the plan known so far is good enough.
        if not self._lock.acquire(blocking=old is None) and old is not None:
            return old.passing
        try:
            if self._off is not None:  # since `get`
                return self._off
            found = self._find(pose, device, self._known.get(kind))
            if isinstance(found, Refusal):
                return old.plan if old and isinstance(old.plan, Plan) else found
            if found.is_hindered and old and isinstance(old.plan, Plan):
                found = replace(old, until=found.until)  # a plan outlives the file it came from
            if len(self._known) >= _MAX_KNOWN:
                self._clear()
            self._known[kind] = found
            # With NVTX ranges calls go through Python: the dispatcher opens none.
            if dispatched is not None and not ranges.ON:
                dispatch.prepare(then=self.renew)
                if isinstance(found.plan, KernelPlan):
                    dispatch.put(
                        *dispatched, found.plan, self._lengths(found.plan, pose_over, device)
                    )
            return found.plan
        finally:
            self._lock.release()

    def run(self, plan: Plan, *inputs: torch.Tensor) -> torch.Tensor | Refusal:
        """The plan's output, or a refusal. A plan whose launch was refused is withdrawn.

        Raises:
            RuntimeError: a CUDA error of an earlier kernel.
        """
        return self._tried(plan, plan.run, *inputs)

    def run_with_lse(
        self, plan: Plan, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        """As `run`, with the log-sum-exp, for a plan that writes it."""
        return self._tried(plan, plan.run_with_lse, *inputs)

    def run_into(
        self, plan: KernelPlan, out: torch.Tensor, lse: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor | Refusal:
        """As `run`, with the output in the caller's memory (`KernelPlan.run_into`)."""
        return self._tried(plan, plan.run_into, out, lse, *inputs)

    def run_all(self, plan: Plan, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | Refusal:
        """As `run`, for a problem with several outputs."""
        return self._tried(plan, plan.run_all, *inputs)

    def _tried(self, plan: Plan, run: Callable[..., _Out], *tensors: Any) -> _Out | Refusal:
        try:
            if not ranges.ON:
                return run(*tensors)
            with ranges.named(f"tuner {plan.config.family} {plan.problem.label()}"):
                return run(*tensors)
        except (torch.OutOfMemoryError, BenchmarkError) as exc:
            return self._failed(plan, exc)

    def _failed(self, plan: Plan, exc: Exception) -> Refusal:
        if isinstance(exc, BenchmarkError):
            return self.withdraw(plan, exc)
        # For this call only: the next may find more memory.
        return once(Kind.MEMORY, f"{plan.config.family} at {plan.problem.label()}")

    def withdraw(self, plan: Plan, exc: BenchmarkError) -> Refusal:
        """Stop launching a plan's config for its problem in this process; returns the refusal."""
        problem, config = plan.problem, plan.config
        with self._lock:
            self._withdrawn.setdefault(problem.key, set()).add(config)
            self._known = {k: v for k, v in self._known.items() if v.problem != problem}
            self.renew()
        refusal = once(Kind.LAUNCH, f"{config.family} at {problem.label()}: {exc}")
        counters.count_error(refusal.reason)
        return refusal

    def pin(
        self,
        path: Path | None,
        absent: Collection[str] = (),
        refusal: Refusal | None = None,
    ) -> None:
        """Serve the decisions of one file, independent of later changes of the user's store.

        Args:
            path: the SQLite file; None: the user's store.
            absent: keys of artifacts that must not be launched, even if present.
            refusal: reason to serve nothing; None: serve.
        """
        with self._lock:
            self._path, self._absent, self._refusal = path, frozenset(absent), refusal
            self._clear()
            self._look_at = 0.0

    def forget(self) -> None:
        """Reset the table to its state in a new process."""
        with self._lock:
            self.pin(None)
            self._withdrawn = {}

    def _clear(self) -> None:
        self._known, self._near = {}, {}
        dispatch.clear()

    def renew(self) -> None:
        """Clear the dispatcher; it gets each plan again at the plan's next call."""
        with self._lock:
            self._known = {
                kind: replace(known, until=0.0) if isinstance(known.plan, Plan) else known
                for kind, known in self._known.items()
            }
            self._near = {}
            dispatch.clear()
            self._serve()

    def _serve(self) -> None:
        """Let the dispatcher answer until the next check; without plans while serving is off."""
        dispatch.serve_until(self._look_at, with_plans=self._off is None)

    def _look(self) -> None:
        """Check the store for changes, unless another thread does."""
        if devices.is_capturing() or not self._lock.acquire(blocking=False):
            return
        try:
            self._fault = None
            wait = LOOK_EVERY_S
            try:
                stamp = decided_stamp(self._path)
                if stamp != self._stamp:
                    self._drop()
                    self._stamp = stamp
            except proven_kernels.FAULTS as exc:
                self._blame(exc)
                wait = RETRY_EVERY_S
            self._end_choices()
            off = _OFF if settings.disabled() else self._refusal
            if off != self._off:
                self._off = off
                self._clear()
        finally:
            self._look_at = time.monotonic() + wait
            self._serve()
            self._lock.release()

    def _end_choices(self) -> None:
        """Look up again, where calls are timed, when other kernels are proven than before."""
        if not settings.benchmark():
            return
        try:
            proven = lists.known()
        except proven_kernels.FAULTS as exc:
            counters.count_error(f"{Kind.FILE}: {exc}")
            return
        if self._proven is not None and proven is not self._proven:
            self._known = {kind: known.stale for kind, known in self._known.items()}
            self.renew()
        self._proven = proven

    def _drop(self) -> None:
        """Drop plans of changed decisions, and mark refusals of the same cache at other lengths as
        stale. At the first change all plans are marked.
        """
        if not self._known:
            self._decided = None
            return
        self._near = {}
        before, self._decided = self._decided, decided(self._path)
        if before is None:
            self._known = {k: v.stale for k, v in self._known.items()}
            self.renew()
            return
        now = self._decided
        changed = {key for key in {*before, *now} if before.get(key) != now.get(key)}
        alike = set(_of_any_length(changed))
        kept: dict[Hashable, _Known] = {}
        for kind, known in self._known.items():
            problem, plan = known.problem, known.plan
            if problem is not None and problem.key in changed:
                continue
            if isinstance(plan, Refusal) and problem and of_any_length(problem) in alike:
                known = known.stale
            kept[kind] = known
        if kept != self._known:
            self._known = kept
            self.renew()

    def _find(self, pose: Callable[[], Posed], device: int, old: _Known | None) -> _Known | Refusal:
        """Result for a call now; a refusal, not to be cached, when the store cannot be read."""
        if old and isinstance(old.plan, Plan) and not old.is_stale:
            return replace(old, until=math.inf)  # only the dispatcher needs it again
        try:
            posed = pose()
        except ConfigError as exc:
            return _Known(math.inf, None, Refusal(Kind.TENSORS, str(exc)))
        if self._fault is not None:
            return self._fault
        problem = posed.problem
        # A refusal for strides does not hold for other lengths, whose strides may differ.
        near = None if posed.strides else _neighbourhood(problem, device)
        try:
            known = self._near.get(near)
            if known and time.monotonic() < known.until and not is_decided(problem, self._path):
                return self._bounded(replace(known, problem=problem), is_alone=False)
            found, is_exact = self._serving(posed, device)
        except StoreError as exc:
            return self._blame(exc)
        except proven_kernels.FAULTS as exc:
            return self._damaged(problem, exc)
        if near is not None and isinstance(found.plan, Refusal) and not is_exact:
            self._near[near] = found
        return found

    def _serving(self, posed: Posed, device: int) -> tuple[_Known, bool]:
        """What serves a problem, and whether a decision of its own says so: else the portfolio's
        choice, which also comes before a vendor's kernel that stands in for a decided own one: a
        machine with prebuilt kernels has the portfolio's only.

        Raises:
            StoreError: when the store cannot be read.
        """
        problem, is_strided = posed.problem, bool(posed.strides)
        gpu = devices.gpu_of(device)
        own: _Known | None = None
        stands_in = False
        answer = self._ask(problem, gpu)
        is_measured = answer is not None and answer.entry.provenance is Provenance.MEASURED
        if answer is not None:
            own = self._resolve(posed, answer, device)
            entry = answer.entry
            stands_in = own.is_vendors and entry.winner not in entry.vendors.values()
            is_final = isinstance(own.plan, Plan) or (is_measured and own.until == math.inf)
            if is_final and not stands_in:
                return self._bounded(own, is_strided), True
        # Ranks that agreed on decisions may have different kernel lists.
        chosen = self._choose(posed, device) if self._path is None else None
        wanted = KernelPlan if stands_in else Plan
        if chosen is not None and isinstance(chosen.plan, wanted):
            return chosen, False
        if own is not None and (is_measured or chosen is None):
            return self._bounded(own, is_strided), True
        if chosen is not None:
            return self._bounded(chosen, is_strided and chosen.until == math.inf), False
        label = problem.label()
        miss = Refusal(Kind.MISS, f"{label} (tuner sweep --op {problem.op} --shape {label})")
        return self._bounded(_refused(problem, miss, math.inf), is_alone=False), False

    def _choose(self, posed: Posed, device: int) -> _Known | None:
        """The portfolio's result; None when it has no candidates for such problems."""
        problem = posed.problem
        try:
            with devices.use(device):
                gpu = devices.gpu_of(device)
                if not proven_kernels.knows(problem, gpu):
                    return None
                choice = proven_kernels.choose(posed, gpu, device, self._excluded(problem))
        except proven_kernels.FAULTS as exc:
            return self._damaged(problem, exc)
        if choice is None:
            return None
        selection, plan = choice.selection, choice.plan
        if isinstance(plan, Refusal):
            is_final = plan.kind in (Kind.PORTFOLIO, Kind.TIMED)
            return _refused(problem, plan, math.inf if is_final else RETRY_EVERY_S)
        doubts = "".join(f", {doubt}" for doubt in selection.doubts)
        _log.info("%s: portfolio: %s%s", problem.label(), selection.source, doubts)
        return _Known(math.inf, problem, plan)

    def _lengths(
        self, plan: KernelPlan, pose_over: Callable[[int], Posed] | None, device: int
    ) -> lengths.Lengths | None:
        """Launches over a range of lengths of a growing cache; None if the plan serves only its
        own.
        """
        problem = plan.problem
        if pose_over is None or not dispatch.is_loaded():
            return None
        if not isinstance(problem, AttentionProblem) or not lengths.grows(problem):
            return None

        def resolved(length: int) -> KernelPlan | None:
            known, _ = self._serving(pose_over(length), device)
            found = known.plan
            is_same = isinstance(found, KernelPlan) and found.config == plan.config
            return found if is_same else None  # type: ignore[return-value]

        try:
            decided_here = decided_lengths(problem, self._path)
            for width in (0, lengths.MIN_BLOCK):
                ends = lengths.between(problem.seqlen_kv, decided_here, width)
                if found := lengths.served(plan, problem.seqlen_kv, ends, resolved):
                    return found
        except proven_kernels.FAULTS:  # then it serves its own length
            pass
        return None

    def _bounded(self, known: _Known, is_alone: bool) -> _Known:
        """A refusal with the lengths of a growing cache that it holds for.

        Args:
            known: result; plans are returned unchanged.
            is_alone: the refusal holds for its own length only: other strides may be supported.
        """
        problem, refusal = known.problem, known.plan
        if not isinstance(refusal, Refusal) or not isinstance(problem, AttentionProblem):
            return known
        if not lengths.grows(problem):
            return known
        ends = problem.seqlen_kv, problem.seqlen_kv
        if not is_alone:
            ends = lengths.between(problem.seqlen_kv, decided_lengths(problem, self._path))
        return replace(known, plan=replace(refusal, lengths=ends))

    def _ask(self, problem: Problem, gpu: Gpu) -> LookupResult | None:
        """The lookup result for a problem on a GPU, or None: the only look-up of the runtime.

        Raises:
            StoreError: when the store cannot be read.
        """
        # The portfolio's choices depend on the proofs, and are made in `_choose`.
        return lookup(problem, gpu=gpu, path=self._path, with_portfolio=False)

    def _resolve(self, posed: Posed, answer: LookupResult, device: int) -> _Known:
        """The best candidate of a lookup result that can run here."""
        problem = posed.problem
        with devices.use(device):
            plan = resolve(posed, answer, device, self._excluded(problem))
        for note in answer.notes:
            _log.info("%s: %s", problem.label(), note)
        self._flag(answer)
        if isinstance(plan, Plan):
            return _Known(math.inf, problem, plan)
        # A vendor's win holds until the store changes.
        return _refused(problem, plan, math.inf if plan.kind is Kind.VENDOR else RETRY_EVERY_S)

    def _excluded(self, problem: Problem) -> Excluded:
        return Excluded(self._withdrawn.get(problem.key, ()), self._absent)

    def _flag(self, answer: LookupResult) -> None:
        """Warn once about entries that were measured in another environment."""
        found = "; ".join(differences(answer.entry, devices.environment()))
        if found and found not in self._flagged:
            self._flagged.add(found)
            _log.warning(
                "serving decisions of another environment (%s): tuner revalidate times them here",
                found,
            )

    def _damaged(self, problem: Problem, exc: Exception) -> _Known:
        """Refuse a kind of call for a while: a file that it is looked up in cannot be used."""
        refusal = proven_kernels.damaged(problem, exc)
        counters.count_error(refusal.reason)
        return _refused(problem, refusal, RETRY_EVERY_S)

    def _blame(self, exc: Exception) -> Refusal:
        """Refuse unknown calls until the next check: the store cannot be read."""
        self._fault = once(Kind.STORE, str(exc))
        counters.count_error(self._fault.reason)
        return self._fault


def _refused(problem: Problem, refusal: Refusal, for_s: float) -> _Known:
    """A refusal that is valid for that many seconds."""
    until = time.monotonic() + for_s
    return _Known(until, problem, replace(refusal, until=until))


def _neighbourhood(problem: Problem, device: int) -> Hashable | None:
    """Key shared by attention problems that differ only in the length of their cache, in blocks of
    `GROWS_BY` keys; None for other problems.
    """
    if not isinstance(problem, AttentionProblem) or problem.seqlen_q == problem.seqlen_kv:
        return None
    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return device, *(facts | {"seqlen_kv": problem.seqlen_kv // GROWS_BY}).values()


def _of_any_length(keys: Iterable[str]) -> Iterator[str]:
    """`of_any_length` of the problems with these keys; unreadable keys of other versions are
    skipped.
    """
    for key in keys:
        with contextlib.suppress(*document.FAULTS):
            yield of_any_length(problem_from_json(document.parse(key)))


table = PlanTable()
