"""Plan cache keyed by kind of call; checks the store at most every `LOOK_EVERY_S` seconds.

A call triggers the check once that time has passed, so an update is seen within a second, and most
calls need no look-up. While the store cannot be read, known plans stay in use, and PyTorch answers
unknown kinds of calls.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tuner import settings
from tuner.base import document, forks, ranges
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.problem import Problem, problem_from_json
from tuner.runtime.call import counters, devices, dispatch, invariance, proven_kernels
from tuner.runtime.call.answers import RETRY_EVERY_S, Answers, CachedPlan
from tuner.runtime.call.plan import KernelPlan, Plan, Posed
from tuner.runtime.call.refusal import Kind, Refusal, once
from tuner.runtime.call.store_watch import StoreWatch
from tuner.selection.kernels import lists
from tuner.selection.reader import of_any_length

LOOK_EVERY_S = 0.5
"""Seconds between checks of the store for changes."""
#: Kinds of calls kept. A larger table is cleared, so that a server of ever new shapes stays small.
_MAX_KNOWN = 4096

_Out = TypeVar("_Out")
DispatchedCall = tuple[str, tuple[Any, ...]]
"""Operation and arguments of a call in the C++ dispatcher's form (`dispatch.put`)."""
_OFF = Refusal(Kind.OFF, "TUNER_DISABLE is set")


class PlanTable:
    """Plans by kind of call; safe between threads and after a fork."""

    _lock: threading.RLock

    def __init__(self) -> None:
        self._known: dict[Hashable, CachedPlan] = {}
        forks.add_lock(self, threading.RLock)
        self._answers, self._watch = Answers(), StoreWatch()
        self._look_at = 0.0
        self._off: Refusal | None = None
        """Reason why nothing is served; None otherwise."""
        self._refusal: Refusal | None = None
        """As `_off`, of `pin`, from the next check on."""
        self._fault: Refusal | None = None
        """Reason why the store could not be read at the last check."""
        self._notes: Counter[Problem] | None = None
        """Calls by problem, while they are noted."""
        self._is_invariant = invariance.is_on()
        """True if the plans are those of the mode of `tuner.deterministic`."""

    def get(self, kind: Hashable) -> Plan | Refusal | None:
        """Cached plan or refusal of a kind of call; None for an unknown kind.

        Args:
            kind: key of the call; calls with equal keys have equal problems.
        """
        if self._off is not None:
            return self._off
        entry = self._known.get(kind)
        if entry is not None and (entry.until == math.inf or time.monotonic() < entry.until):
            return entry.plan
        return None

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
        # A graph may capture a loaded kernel, even if the store has changed. While another thread
        # looks up, the plan known so far is good enough.
        if devices.is_capturing() or not self._lock.acquire(blocking=old is None):
            return once(Kind.CAPTURING, "call once before") if old is None else old.passing
        try:
            if self._notes is not None:
                return self._note(pose)
            outlives = old is not None and isinstance(old.plan, Plan)
            answer = self._off or self._find(pose, device, self._known.get(kind))
            if isinstance(answer, Refusal):
                return old.plan if old and outlives and not self._off else answer
            if answer.is_hindered and old and outlives:
                answer = replace(old, until=answer.until)  # a plan outlives the file it came from
            if len(self._known) >= _MAX_KNOWN:
                self._clear()
            self._known[kind] = answer
            # With NVTX ranges calls go through Python: the dispatcher opens none.
            if dispatched is not None and not ranges.ON:
                dispatch.prepare(then=self.renew)
                if isinstance(plan := answer.plan, KernelPlan):
                    ranged = self._answers.over_lengths(plan, pose_over, device)
                    dispatch.put(*dispatched, plan, ranged)
            return answer.plan
        finally:
            self._lock.release()

    def _find(
        self, pose: Callable[[], Posed], device: int, old: CachedPlan | None
    ) -> CachedPlan | Refusal:
        """Answer to a call now; a refusal, not to be cached, when the store cannot be read."""
        if old and isinstance(old.plan, Plan) and not old.is_stale:
            return replace(old, until=math.inf)  # only the dispatcher needs it again
        try:
            settings.answers()
        except ConfigError as exc:
            return CachedPlan.of(None, Refusal(Kind.SETTING, str(exc)))
        try:
            posed = pose()
            return self._fault or self._answers.of(posed, device)
        except ConfigError as exc:
            return CachedPlan.of(None, Refusal(Kind.TENSORS, str(exc)))
        except StoreError as exc:
            return self._blame(exc)

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
            self._answers.withdrawn.setdefault(problem.key, set()).add(config)
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
        proven: Collection[str] | None = None,
    ) -> None:
        """Serve the decisions of one file, independent of later changes of the user's store.

        Args:
            path: the SQLite file; None: the user's store.
            absent: keys of artifacts that must not be launched, even if present.
            refusal: reason to serve nothing; None: serve.
            proven: keys of the artifacts that portfolios and rules serve; None: all proven ones.
        """
        with self._lock:
            lists.restrict(proven)
            self._answers.path, self._answers.absent = path, frozenset(absent)
            self._refusal = refusal
            self._clear()
            self._look_at = 0.0

    @contextlib.contextmanager
    def noting(self) -> Iterator[Counter[Problem]]:
        """Count the calls of the block by problem; PyTorch answers them."""
        with self._lock:
            self._notes = notes = Counter[Problem]()
            self._clear()
        try:
            yield notes
        finally:
            with self._lock:
                self._notes = None
                self._clear()

    def _note(self, pose: Callable[[], Posed]) -> Refusal:
        with contextlib.suppress(ConfigError):
            posed = pose()
            if self._notes is not None:
                self._notes[posed.problem] += 1
        return once(Kind.OFF, "calls are noted by tuner.prepare")

    def switch(self) -> None:
        """Forget all plans: `tuner.deterministic` has begun or ended."""
        with self._lock:
            self._is_invariant = invariance.is_on()
            self._clear()

    def forget(self) -> None:
        """Reset the table to its state in a new process."""
        with self._lock:
            self.pin(None)
            self._answers.withdrawn = {}

    def _clear(self) -> None:
        self._known = {}
        self._answers.forget_near()
        dispatch.clear()

    def renew(self) -> None:
        """Clear the dispatcher; it gets each plan again at the plan's next call."""
        with self._lock:
            self._known = {
                kind: replace(e, until=0.0) if isinstance(e.plan, Plan) else e
                for kind, e in self._known.items()
            }
            self._answers.forget_near()
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
                changed = self._watch.changed(self._answers.path, bool(self._known))
                if changed is None or changed:
                    self._drop(changed)
            except proven_kernels.FAULTS as exc:
                self._blame(exc)
                wait = RETRY_EVERY_S
            if self._watch.has_other_kernels():
                self._drop(None)
            off = _OFF if settings.disabled() else self._refusal
            is_invariant = invariance.look()
            if off != self._off or is_invariant != self._is_invariant:
                self._off, self._is_invariant = off, is_invariant
                self._clear()
        finally:
            self._look_at = time.monotonic() + wait
            self._serve()
            self._lock.release()

    def _drop(self, changed: Collection[str] | None) -> None:
        """Drop plans of changed decisions, and mark refusals of the same cache at other lengths as
        stale.

        Args:
            changed: keys of their problems; None marks all plans as stale.
        """
        if changed is None:
            self._known = {kind: e.stale for kind, e in self._known.items()}
            self.renew()
            return
        self._answers.forget_near()
        alike = set(_of_any_length(changed))
        remaining: dict[Hashable, CachedPlan] = {}
        for kind, entry in self._known.items():
            problem, plan = entry.problem, entry.plan
            if problem is not None and problem.key in changed:
                continue
            if isinstance(plan, Refusal) and problem and of_any_length(problem) in alike:
                entry = entry.stale
            remaining[kind] = entry
        if remaining != self._known:
            self._known = remaining
            self.renew()

    def _blame(self, exc: Exception) -> Refusal:
        """Refuse unknown calls until the next check: the store cannot be read."""
        self._fault = once(Kind.STORE, str(exc))
        counters.count_error(self._fault.reason)
        return self._fault


def _of_any_length(keys: Iterable[str]) -> Iterator[str]:
    """`of_any_length` of the problems with these keys; unreadable keys of other versions are
    skipped.
    """
    for key in keys:
        with contextlib.suppress(*document.FAULTS):
            yield of_any_length(problem_from_json(document.parse(key)))


table = PlanTable()
invariance.switched.append(table.switch)
