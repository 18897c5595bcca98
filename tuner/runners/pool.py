"""One worker process for each GPU of a machine; requests are dealt to whichever is free.

A request runs from its first candidate to its last on one GPU. So a final pass is one chip's:
finalists and vendors' kernels are timed interleaved in one request, and their ratios are of one
GPU. Quick times of one search may come from several chips of a kind; they only choose the
finalists.

Requests with one key (`affinity`) go to one worker unless another one is idle. That worker has
the vendors' plans, which cost more than the timings.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tuner.errors import BenchmarkError, WorkerLostError
from tuner.measure.worker_client import AnyWorker

T = TypeVar("T")

MAX_LOSSES = 3
"""Workers that one request may cost: one that always loses its worker must end."""


@dataclass(eq=False)
class _Request:
    order: tuple[bool, int]
    work: Callable[[AnyWorker], Any]
    future: Future[Any]
    affinity: Hashable
    losses: int = 0
    """Workers that went away at it."""


class WorkerPool:
    """A thread for each worker, which waits for its answers. Safe between threads.

    Args:
        workers: one for each GPU; theirs is the first request of each, which starts its process.
    """

    def __init__(self, workers: Sequence[AnyWorker]) -> None:
        self._workers = list(workers)
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._running: dict[Future[Any], AnyWorker] = {}
        self._affine: dict[Hashable, AnyWorker] = {}
        """Worker of the first request of each affinity key."""
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._facts: dict[str, str] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._workers)

    def facts(self) -> dict[str, str]:
        """`WorkerClient.facts` of the machine, read once.

        Raises:
            BenchmarkError: when a worker cannot read them.
            concurrent.futures.CancelledError: after `close`.
        """
        if self._facts is None:
            self._facts = self.submit(lambda worker: worker.facts(), first=True).result()
        return self._facts

    def submit(
        self,
        work: Callable[[AnyWorker], T],
        *,
        first: bool = False,
        affinity: Hashable = None,
    ) -> Future[T]:
        """Have the next worker that is free do something.

        Args:
            work: called with the worker, in a thread of the pool.
            first: before what waits and is as near to the worker; else it is done in the order of
                submission. Nearness decides before it.
            affinity: key of related requests. A free worker first takes requests with its own
                keys or without one, then new keys, and last other workers' keys.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            request = _Request((not first, next(self._numbers)), work, future, affinity)
            self._waiting.append(request)
            self._start()
            self._changed.notify_all()
        return future

    def cancel(self, futures: Iterable[Future[Any]]) -> None:
        """Give requests up: those that wait are dropped, and the workers of the others are killed,
        so that their GPUs are free at once. Finished requests stay.
        """
        with self._changed:
            for future in futures:
                if future.cancel():
                    continue
                if (worker := self._running.get(future)) is not None:
                    worker.interrupt()
                else:
                    self._drop(future, CancelledError())

    def close(self) -> None:
        """Give everything up and end the processes."""
        with self._changed:
            self._is_closed = True
            self.cancel([*(request.future for request in self._waiting), *self._running])
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def _start(self) -> None:
        if not self._threads:
            for number, worker in enumerate(self._workers):
                thread = threading.Thread(
                    target=self._serve, args=(number, worker), name=f"worker {number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, number: int, worker: AnyWorker) -> None:
        while self._prepare(number) and (request := self._take(worker)) is not None:
            future = request.future
            try:
                result = request.work(worker)
            except WorkerLostError as exc:
                # Put the request back in its former place of the queue, for another worker.
                request.losses += 1
                with self._changed:
                    del self._running[request.future]
                    self._waiting.append(request)
                    if self._is_closed:
                        self._drop(request.future, CancelledError())
                    elif request.losses >= MAX_LOSSES:
                        text = f"{request.losses} workers went away at one request, the last: {exc}"
                        self._drop(request.future, BenchmarkError(text, status=exc.status))
                    self._changed.notify_all()
            except BaseException as exc:  # whoever waits for the request is to see it
                self._release(future)
                future.set_exception(exc)
            else:
                self._release(future)
                future.set_result(result)

    def _take(self, worker: AnyWorker) -> _Request | None:
        """The next request, None after `close`."""
        with self._changed:
            while not self._is_closed:
                while self._waiting:
                    request = min(self._waiting, key=lambda r: (self._distance(r, worker), r.order))
                    self._waiting.remove(request)
                    if request.losses or request.future.set_running_or_notify_cancel():
                        # From here on `cancel` interrupts, and it may before the worker is asked.
                        worker.renew()
                        self._running[request.future] = worker
                        self._affine.setdefault(request.affinity, worker)
                        return request
                self._changed.wait()
        return None

    def _distance(self, request: _Request, worker: AnyWorker) -> int:
        """0: the worker's own key, or none; 1: a new key; 2: another worker's key."""
        if request.affinity is None or self._affine.get(request.affinity) is worker:
            return 0
        return 2 if request.affinity in self._affine else 1

    def _prepare(self, number: int) -> bool:
        """Have a worker ready for its next request; false when the pool was closed meanwhile."""
        return True  # its first request starts the process

    def _drop(self, future: Future[Any], exc: Exception) -> None:
        """End a request that waits though it was begun before; called with the lock."""
        waiting = [request for request in self._waiting if request.future is not future]
        if len(waiting) < len(self._waiting):
            self._waiting = waiting
            future.set_exception(exc)

    def _release(self, future: Future[Any]) -> None:
        with self._changed:
            del self._running[future]
