"""What serves each kind of call: a dict that is as good as the store's last look is old.

The store is looked at when a call comes and `LOOK_EVERY_S` have passed, so an update is seen
within a second and a call costs no look-up. A store that cannot be read changes nothing: what is
known goes on serving, and what is not known is PyTorch's. While a generation grows, lengths near
one that was refused are refused without a look-up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tuner import settings
from tuner.base import ranges
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.hardware import Gpu
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem, Problem, problem_from_json
from tuner.runtime import counters, devices, dispatch, lengths, portfolio
from tuner.runtime.plan import KernelPlan, Plan, Posed, VendorPlan, resolve
from tuner.runtime.refusal import Kind, Refusal, once
from tuner.selection.reader import (
    Answer,
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
"""A call later than this after the last look at the store looks again."""
RETRY_EVERY_S = 5.0
"""What of an entry cannot run, for want of an artifact say, is tried again after this."""
GROWS_BY = 64
"""Keys of a cache: a length that nothing serves stands for the others of as many."""
#: Kinds of call kept; more start over, so that a server of ever new shapes stays small.
_MAX_KNOWN = 4096

_Out = TypeVar("_Out")
Told = tuple[str, tuple[Any, ...]]
"""Operation and arguments of a call as the C++ dispatcher takes them (`dispatch.put`)."""
_OFF = Refusal(Kind.OFF, "TUNER_DISABLE is set")


@dataclass(frozen=True)
class _Known:
    """What was found out about one kind of call."""

    until: float
    """It is good up to this time (`time.monotonic`)."""
    problem: Problem | None
    plan: Plan | Refusal
    is_stale: bool = False
    """The store may say something else by now."""

    @property
    def is_vendors(self) -> bool:
        """True where a vendor's kernel answers."""
        plan = self.plan
        return (
            plan.kind is Kind.VENDOR if isinstance(plan, Refusal) else isinstance(plan, VendorPlan)
        )

    @property
    def stale(self) -> _Known:
        """It, to be asked for anew."""
        return replace(self, until=0.0, is_stale=True)

    @property
    def passing(self) -> Plan | Refusal:
        """The plan, or why there is none, for one call."""
        return replace(self.plan, until=0.0) if isinstance(self.plan, Refusal) else self.plan


class Table:
    """From a kind of call to its plan; safe between threads and after a fork."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._near: dict[Hashable, _Known] = {}
        """Refused calls of a growing cache, by `_neighbourhood`."""
        self._withdrawn: dict[str, set[Config]] = {}
        self._lock = threading.RLock()
        self._look_at = 0.0
        self._stamp: Hashable = None
        """Of the store's decisions, at the last look."""
        self._decided: Mapping[str, Hashable] | None = None
        """They themselves, from the first change on."""
        self._off: Refusal | None = None
        """Reason why nothing is served; None where something is."""
        self._path: Path | None = None
        self._absent: frozenset[str] = frozenset()
        self._refusal: Refusal | None = None
        self._fault: Refusal | None = None
        self._flagged: set[str] = set()

    def get(self, kind: Hashable) -> Plan | Refusal | None:
        """What is known of a kind of call: its plan, why there is none, or None.

        Args:
            kind: everything that tells this call from others: equal kinds pose equal problems.
        """
        if self._off is not None:
            return self._off
        known = self._known.get(kind)
        if known is None or (known.until != math.inf and time.monotonic() >= known.until):
            return None
        return known.plan

    def refresh(self, tensor: torch.Tensor) -> int:
        """Look at the store where that is due, before a call is looked up in this table.

        Args:
            tensor: one of the call's; nothing is looked up for those of other devices.

        Returns:
            The dispatcher's generation, for refusals that are found from now on.
        """
        if time.monotonic() >= self._look_at:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == devices.TYPE:
                self._look()
        return dispatch.generation()

    def find_out(
        self,
        kind: Hashable,
        told: Told | None,
        pose: Callable[[], Posed],
        device: int,
        pose_over: Callable[[int], Posed] | None = None,
    ) -> Plan | Refusal:
        """Ask the store about a kind of call that `get` does not know.

        Args:
            kind: as in `get`.
            told: the call as `dispatch.put` takes it; None: the C++ dispatcher keeps no plan.
            pose: the problem; raises ConfigError where no tuned kernel could serve.
            device: index of the device that the tensors are on.
            pose_over: the problem with a cache of so many keys; None: of no such call.
        """
        old = self._known.get(kind)
        if devices.is_capturing():  # what was loaded may be captured, whatever the store says now
            return once(Kind.CAPTURING, "call once before") if old is None else old.passing
        # While another thread asks, what was known a moment ago is good enough.
        if not self._lock.acquire(blocking=old is None) and old is not None:
            return old.passing
        try:
            if self._off is not None:  # since `get`
                return self._off
            found = self._find(pose, device, self._known.get(kind))
            if isinstance(found, Refusal):
                return old.plan if old and isinstance(old.plan, Plan) else found
            if len(self._known) >= _MAX_KNOWN:
                self._clear()
            self._known[kind] = found
            # Marked calls go through Python: the dispatcher opens no ranges.
            if told is not None and not ranges.ON:
                dispatch.prepare(then=self.renew)
                if isinstance(found.plan, KernelPlan):
                    dispatch.put(*told, found.plan, self._lengths(found.plan, pose_over, device))
            return found.plan
        finally:
            self._lock.release()

    def run(self, plan: Plan, *inputs: torch.Tensor) -> torch.Tensor | Refusal:
        """The plan's output, or the reason that there is none: it is withdrawn where it was
        refused.

        Raises:
            RuntimeError: what CUDA reports of an earlier kernel.
        """
        return self._tried(plan, plan.run, *inputs)

    def run_with_lse(
        self, plan: Plan, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | Refusal:
        """As `run`, of a plan that has the log-sum-exp."""
        return self._tried(plan, plan.run_with_lse, *inputs)

    def run_into(
        self, plan: KernelPlan, out: torch.Tensor, lse: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor | Refusal:
        """As `run`, into memory of the caller's (`KernelPlan.run_into`)."""
        return self._tried(plan, plan.run_into, out, lse, *inputs)

    def run_all(self, plan: Plan, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | Refusal:
        """As `run`, of a problem with several outputs."""
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
        # For this call only: the next may have more.
        return once(Kind.MEMORY, f"{plan.config.family} at {plan.problem.label()}")

    def withdraw(self, plan: Plan, exc: BenchmarkError) -> Refusal:
        """Never launch a plan's config for its problem again in this process; returns why."""
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
        """Serve what one file decides, whatever becomes of the user's store.

        Args:
            path: the SQLite file; None: the user's.
            absent: keys of the artifacts that must not be launched, here though they may be.
            refusal: reason why nothing at all is served; None where something is.
        """
        with self._lock:
            self._path, self._absent, self._refusal = path, frozenset(absent), refusal
            self._clear()
            self._look_at = 0.0

    def forget(self) -> None:
        """Know nothing, as a new process does."""
        with self._lock:
            self.pin(None)
            self._withdrawn = {}

    def _clear(self) -> None:
        self._known, self._near = {}, {}
        dispatch.clear()

    def renew(self) -> None:
        """Have the dispatcher given every plan anew, each when it is called for."""
        with self._lock:
            self._known = {
                kind: replace(known, until=0.0) if isinstance(known.plan, Plan) else known
                for kind, known in self._known.items()
            }
            self._near = {}
            dispatch.clear()
            self._serve()

    def _serve(self) -> None:
        """Have the dispatcher answer up to the next look; nothing is served while it is off."""
        dispatch.serve_until(self._look_at, with_plans=self._off is None)

    def _look(self) -> None:
        """See whether the store has changed; another thread's look is as good."""
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
            except StoreError as exc:
                self._blame(exc)
                wait = RETRY_EVERY_S
            off = _OFF if settings.disabled() else self._refusal
            if off != self._off:
                self._off = off
                self._clear()
        finally:
            self._look_at = time.monotonic() + wait
            self._serve()
            self._lock.release()

    def _drop(self) -> None:
        """Forget what was decided anew, and distrust refusals that hold for the lengths of a
        growing cache beside. At the first change everything is distrusted.
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
        """What serves a call now; a refusal, not to be kept, when the store cannot be read."""
        if old and isinstance(old.plan, Plan) and not old.is_stale:
            return replace(old, until=math.inf)  # only the dispatcher must be told again
        try:
            posed = pose()
        except ConfigError as exc:
            return _Known(math.inf, None, Refusal(Kind.TENSORS, str(exc)))
        if self._fault is not None:
            return self._fault
        problem = posed.problem
        # Refused for its strides: other lengths may have others.
        near = None if posed.strides else _neighbourhood(problem, device)
        try:
            known = self._near.get(near)
            if known and time.monotonic() < known.until and not is_decided(problem, self._path):
                return self._bounded(replace(known, problem=problem), is_alone=False)
            found, is_exact = self._serving(posed, device)
        except StoreError as exc:
            return self._blame(exc)
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
        chosen: _Known | None = None
        # Ranks that agreed on decisions may have unlike kernel lists.
        if self._path is None and portfolio.knows(problem, gpu):
            chosen = self._choose(posed, device)
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
        """What the portfolio serves; None where it knows nothing of such problems."""
        problem = posed.problem
        withdrawn = self._withdrawn.get(problem.key, ())
        with devices.use(device):
            gpu = devices.gpu_of(device)
            choice = portfolio.choose(posed, gpu, device, withdrawn, self._absent)
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
        """The plan over a range of lengths of a growing cache, where it serves them all."""
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
        except (StoreError, ConfigError, BenchmarkError):  # then it serves its own length
            pass
        return None

    def _bounded(self, known: _Known, is_alone: bool) -> _Known:
        """A refusal with the lengths of a growing cache that it holds for; `is_alone`: its own, for
        other lengths may have strides that a kernel takes.
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

    def _ask(self, problem: Problem, gpu: Gpu) -> Answer | None:
        """The store's answer for a problem on a GPU, or None: the only look-up of the runtime.

        Raises:
            StoreError: when the store cannot be read.
        """
        # The portfolio's choices are made with a look at the proofs (`_choose`).
        return lookup(problem, gpu=gpu, path=self._path, with_portfolio=False)

    def _resolve(self, posed: Posed, answer: Answer, device: int) -> _Known:
        """The part of the store's answer that can run here."""
        problem = posed.problem
        with devices.use(device):
            withdrawn = self._withdrawn.get(problem.key, ())
            plan = resolve(posed, answer, device, withdrawn, self._absent)
        for note in answer.notes:
            _log.info("%s: %s", problem.label(), note)
        self._flag(answer)
        if isinstance(plan, Plan):
            return _Known(math.inf, problem, plan)
        # That stays so until the store says something else.
        return _refused(problem, plan, math.inf if plan.kind is Kind.VENDOR else RETRY_EVERY_S)

    def _flag(self, answer: Answer) -> None:
        """Say once that entries are served which another environment measured."""
        found = "; ".join(differences(answer.entry, devices.environment()))
        if found and found not in self._flagged:
            self._flagged.add(found)
            _log.warning(
                "served as measured in another environment (%s): tuner revalidate times it here",
                found,
            )

    def _blame(self, exc: StoreError) -> Refusal:
        """Remember, up to the next look, that the store cannot be read."""
        self._fault = once(Kind.STORE, str(exc))
        counters.count_error(self._fault.reason)
        return self._fault


def _refused(problem: Problem, refusal: Refusal, for_s: float) -> _Known:
    """A refusal that is good for so long."""
    until = time.monotonic() + for_s
    return _Known(until, problem, replace(refusal, until=until))


def _neighbourhood(problem: Problem, device: int) -> Hashable | None:
    """Equal for attention over a cache's keys whose count differs by less than `GROWS_BY`; None of
    other problems.
    """
    if not isinstance(problem, AttentionProblem) or problem.seqlen_q == problem.seqlen_kv:
        return None
    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return device, *(facts | {"seqlen_kv": problem.seqlen_kv // GROWS_BY}).values()


def _of_any_length(keys: Iterable[str]) -> Iterator[str]:
    """`of_any_length` of problems, by key; those that another version wrote are nobody's here."""
    for key in keys:
        with contextlib.suppress(TypeError, ValueError):
            yield of_any_length(problem_from_json(json.loads(key)))


table = Table()


def _after_fork() -> None:
    table._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
