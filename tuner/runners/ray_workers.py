"""Actors of a Ray cluster as the pool's workers, and the libraries that travel to them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, WorkerLostError
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.problem import Problem
from tuner.runners.ray_nodes import Card, artifacts_of

ATTEMPTS = 3
"""At a task, or at bringing a library to an actor."""
MAX_PARCELS = 4096
"""Kept in the object store; an older one is put there again when it is asked for."""


class RemoteWorker:
    """Counterpart of `WorkerClient` for an actor: one thread asks it,
    `interrupt` may come from another, and holds until `renew`.

    Args:
        ray: the module, connected.
        spawn: creates an actor; Ray places it as soon as it can.
        parcels: the libraries that requests need.
    """

    def __init__(self, ray: Any, spawn: Callable[[], Any], parcels: Parcels) -> None:
        self._ray, self._spawn, self._parcels = ray, spawn, parcels
        self._actor: Any = None
        self._coming: Any = None
        self._lock = threading.Lock()
        self._is_interrupted = False
        self.card: Card | None = None
        """Facts of the first actor; its replacements must have equal ones."""
        self.reason = ""
        """Reason for a missing actor."""

    @property
    def known(self) -> Card:
        """The card, once there was an actor.

        Raises:
            BenchmarkError: before.
        """
        if self.card is None:
            raise BenchmarkError(f"no actor has started: {self.reason}")
        return self.card

    def begin(self, timeout_s: float) -> bool:
        """True when there is an actor; creates one, and waits this long for it."""
        if self._actor is not None and self._coming is None:
            return True
        if self._actor is None:
            with self._lock:
                self._actor = self._spawn()
            self._coming = self._actor.card.remote()
        if not self._ray.wait([self._coming], timeout=timeout_s)[0]:
            return False
        try:
            card: Card = self._ray.get(self._coming)
        except self._ray.exceptions.RayError as exc:
            self._lose(reason_of(exc))
            return False
        difference = card.differs(self.card) if self.card is not None else ""
        if difference:
            self._lose(f"the actor that came in its place has {difference}")
            return False
        self.card, self._coming, self.reason = self.card or card, None, ""
        return True

    def facts(self) -> dict[str, str]:
        return {}  # the card has them all

    def listing(self, problem: Problem, family: str, max_workspace: int | None) -> list[Config]:
        """As `WorkerClient.listing`, there; none where the actor went away, which the next request
        sees.
        """
        if self._actor is None:
            return []
        try:
            reply = self._actor.listing.remote(problem, family, max_workspace)
            return list(self._ray.get(reply))
        except self._ray.exceptions.RayError:
            return []

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        """As `WorkerClient.measure`, there.

        Raises:
            WorkerLostError: when the actor or its node went away.
            BenchmarkError: when a library does not arrive.
            concurrent.futures.CancelledError: after `interrupt`.
        """
        refused: Mapping[str, str] = {}
        for _ in range(ATTEMPTS):
            actor = self._actor
            if self._is_interrupted:
                raise CancelledError
            if actor is None:
                raise WorkerLostError(self.reason or "the actor is gone")
            parcels = {a.sha256: self._parcels.of(a) for a in artifacts_of(ask).values()}
            try:
                reply = self._ray.get(actor.measure.remote(ask, parcels))
            except self._ray.exceptions.RayError as exc:
                self._lose(reason_of(exc))
                if self._is_interrupted:
                    raise CancelledError from exc
                raise WorkerLostError(f"{self.known.node}: {self.reason}") from exc
            if reply.is_spent:
                self._lose("a CUDA error or a hang cost it its process")
            if not reply.refused:
                return list(reply.outcomes)
            refused = reply.refused
            for sha256 in refused:
                self._parcels.drop(sha256)
        sha256, reason = next(iter(refused.items()))
        raise BenchmarkError(
            f"library {sha256[:16]} did not arrive at {self.known.node} in {ATTEMPTS} attempts: "
            f"{reason}"
        )

    def renew(self) -> None:
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Kill the actor, which ends its worker process too; the next request is another's."""
        self._is_interrupted = True
        self._lose("it was interrupted")

    def close(self) -> None:
        self._lose("it was closed")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._actor is not None:
                self._ray.kill(self._actor)
            self._actor = self._coming = None
            self.reason = reason


class Parcels:
    """References in Ray's object store of each library, by its hash: put there once. Safe between
    threads.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._references: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def hold(self, sha256: str, reference: Any) -> None:
        """A parcel that a task left behind."""
        with self._lock:
            self._references[sha256] = reference
            while len(self._references) > MAX_PARCELS:
                self._references.popitem(last=False)

    def of(self, artifact: Artifact) -> Any:
        """The parcel that holds a library; made of this machine's file where there is none."""
        with self._lock:
            if artifact.sha256 in self._references:
                self._references.move_to_end(artifact.sha256)
                return self._references[artifact.sha256]
        reference = self._ray.put({artifact.sha256: artifact.library.read_bytes()})
        self.hold(artifact.sha256, reference)
        return reference

    def drop(self, sha256: str) -> None:
        """Forget one that was lost or damaged."""
        with self._lock:
            self._references.pop(sha256, None)


def reason_of(exc: Exception) -> str:
    """The first line of what went wrong, of the remote cause where there is one."""
    cause = getattr(exc, "cause", None) or exc
    text = next(iter(str(cause).splitlines()), "")
    return text or type(cause).__name__
