"""One worker process for each GPU of a machine; requests are dealt to whichever is free.

A request runs from its first candidate to its last on one GPU. That is what makes a final pass one
chip's word: finalists and the vendors' kernels are timed interleaved in one request, so their
ratios hold whichever GPU it was. Quick timings of one search may come from several chips of a
kind; they only choose who is in the final pass.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuner.worker_client import WorkerClient

T = TypeVar("T")


@dataclass(order=True)
class _Request:
    order: tuple[bool, int]
    work: Callable[[WorkerClient], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class WorkerPool:
    """A thread for each worker, which waits for its answers. Safe between threads.

    Args:
        workers: one for each GPU; theirs is the first request of each, which starts its process.
    """

    def __init__(self, workers: Sequence[WorkerClient]) -> None:
        self._workers = list(workers)
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._running: dict[Future[Any], WorkerClient] = {}
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._facts: dict[str, str] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._workers)

    def facts(self) -> dict[str, str]:
        """As `WorkerClient.facts`: the machine's, asked for once.

        Raises:
            BenchmarkError: when a worker cannot say.
            concurrent.futures.CancelledError: after `close`.
        """
        if self._facts is None:
            self._facts = self.submit(lambda worker: worker.facts(), first=True).result()
        return self._facts

    def submit(self, work: Callable[[WorkerClient], T], *, first: bool = False) -> Future[T]:
        """Have the next worker that is free do something.

        Args:
            work: called with the worker, in a thread of the pool.
            first: before all that waits; else it is done in the order of submission.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            request = _Request((not first, next(self._numbers)), work, future)
            heapq.heappush(self._waiting, request)
            self._start()
            self._changed.notify()
        return future

    def cancel(self, futures: Iterable[Future[Any]]) -> None:
        """Give requests up: those that wait are dropped, and the workers of the others are killed,
        so that their GPUs are free at once. What is done stays done.
        """
        with self._changed:
            for future in futures:
                if not future.cancel() and (worker := self._running.get(future)) is not None:
                    worker.interrupt()

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
                    target=self._serve, args=(worker,), name=f"worker {number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, worker: WorkerClient) -> None:
        while (request := self._take(worker)) is not None:
            future = request.future
            try:
                result = request.work(worker)
            except BaseException as exc:  # whoever waits for the request is to see it
                self._release(future)
                future.set_exception(exc)
            else:
                self._release(future)
                future.set_result(result)

    def _take(self, worker: WorkerClient) -> _Request | None:
        """The next request, None after `close`."""
        with self._changed:
            while not self._is_closed:
                while self._waiting:
                    request = heapq.heappop(self._waiting)
                    if request.future.set_running_or_notify_cancel():
                        self._running[request.future] = worker
                        return request
                self._changed.wait()
        return None

    def _release(self, future: Future[Any]) -> None:
        with self._changed:
            del self._running[future]
