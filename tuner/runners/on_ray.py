"""A Ray cluster to evaluate on: units of kernels are tasks on CPU nodes, GPUs are actors.

The process that opens a `Cluster` stays what it is without one: it owns the search of its problem
and alone writes the store. Tasks and actors know nothing of either. Lost work (a node, an
actor, an object of the store) is done again, here. Arriving objects are checked by their hash.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import tuner
from tuner.base.install import extra_command
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import Toolchain
from tuner.compile.units import Unit
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.base import KernelSpec
from tuner.hardware import OLDEST_CAPABILITY, Gpu
from tuner.runners.choose import ClusterPlace, Machine, Runners
from tuner.runners.pool import WorkerPool
from tuner.runners.ray_nodes import Built, Card, Gauge, Parcel, arrived, build, keep
from tuner.runners.ray_workers import ATTEMPTS, Parcels, RemoteWorker, reason_of

Note = Callable[[str], None]

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 180.0
"""For the first actors: a process, torch from a shared file system, a CUDA context."""
REPLACE_TIMEOUT_S = 600.0
"""Without any GPU of a kind; then what waits for one fails."""
POLL_S = 1.0


class Cluster:
    """A connection to a Ray cluster, and the actors on its GPUs.

    Args:
        place: address of the cluster, and labels of its nodes.
        note: receives each notice for the user once.
        gauge: class of the actors, for tests.
        build_unit: function of a compile task, for tests.

    Raises:
        ConfigError: when Ray is not installed, no cluster is there, or no node has the labels:
            before anything is submitted.
        BenchmarkError: when no GPU can be used.
    """

    def __init__(
        self,
        place: ClusterPlace,
        note: Note,
        *,
        gauge: type[Gauge] = Gauge,
        build_unit: Callable[..., Any] = build,
    ) -> None:
        self._place, self._note = place, note
        self._ray = _connect(place.address)
        self._workers: list[RemoteWorker] = []
        try:
            count = self._check()
            self.parcels = Parcels(self._ray)
            # The controller tries again by itself: it must know which attempt's bytes it has.
            self._task = self._ray.remote(num_cpus=1, num_returns=2, max_retries=0)(build_unit)
            actor = self._ray.remote(num_cpus=0, num_gpus=1, max_restarts=0)(gauge)
            spawn = actor.options(label_selector=dict(place.gpu_labels)).remote
            self._workers = [RemoteWorker(self._ray, spawn, self.parcels) for _ in range(count)]
            self.kinds = self._sort(self._start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the actors and the connection."""
        for worker in self._workers:
            worker.close()
        self._ray.shutdown()

    def runners(self, machine: Machine, note: Note) -> list[ClusterRunners]:
        """Runners of each kind of GPU, those with the most GPUs first."""
        return [ClusterRunners(self, kind, machine, note) for kind in self.kinds]

    def only(self, machine: Machine, note: Note) -> ClusterRunners:
        """Runner of a cluster with one kind of GPU.

        Raises:
            ConfigError: when there are several.
        """
        if len(self.kinds) > 1:
            models = ", ".join(kind.card.gpu.name for kind in self.kinds)
            raise ConfigError(
                f"the chosen nodes have several GPU models ({models}), and a worker measures on "
                "one: choose with --gpu-label, and start a worker for each"
            )
        return self.runners(machine, note)[0]

    @property
    def cores(self) -> int:
        """CPUs of the nodes that compile."""
        nodes = [node for node in _alive(self._ray) if self._compiles(node)]
        return max(1, int(sum(node["Resources"].get("CPU", 0) for node in nodes)))

    def build(
        self,
        specs: Sequence[KernelSpec],
        keys: Sequence[str],
        capability: str,
        stop: threading.Event,
    ) -> tuple[list[Any], Parcel]:
        """`ray_nodes.build` on a compile node; the libraries' hashes are verified.

        Raises:
            BenchmarkError: when the task failed, or its libraries were damaged, every time.
            concurrent.futures.CancelledError: when `stop` was set.
        """
        reason = ""
        for _ in range(ATTEMPTS):
            task = self._task.options(label_selector=self._compile_selector())
            answer, reference = task.remote(list(specs), list(keys), capability)
            try:
                while not self._ray.wait([answer], timeout=POLL_S)[0]:
                    if stop.is_set():
                        self._ray.cancel(answer)
                        raise CancelledError
                built, parcel = self._ray.get([answer, reference])
            except self._ray.exceptions.RayError as exc:
                reason = reason_of(exc)
                continue
            hashes = {unit.sha256 for unit in built if isinstance(unit, Built)}
            wrong = [text for sha256 in hashes if (text := arrived(sha256, parcel))]
            if not wrong:
                for sha256 in hashes:
                    self.parcels.hold(sha256, reference)
                return built, parcel
            reason = f"a library was damaged on its way: {wrong[0]}"
        raise BenchmarkError(f"a compile task failed {ATTEMPTS} times: {reason}")

    # Placing

    def _check(self) -> int:
        """How many GPUs to take; nothing is submitted before this."""
        nodes = _alive(self._ray)
        place = self._place
        total = int(sum(node["Resources"]["GPU"] for node in nodes if self._measures(node)))
        for least, nodes_there, labels in (
            ("a GPU", total, place.gpu_labels),
            ("a CPU", any(map(self._compiles, nodes)), place.compile_labels),
        ):
            if not nodes_there:
                labelled = "".join(f" and label {name}={text}" for name, text in labels.items())
                raise ConfigError(
                    f"no node of the Ray cluster has {least}{labelled} "
                    f"(it has: {_described(nodes)})"
                )
        free = int(self._ray.available_resources().get("GPU", 0))
        count = min(total, free, place.gpus or total)
        if not count:
            raise BenchmarkError(f"all {total} GPUs of the chosen nodes are taken by others")
        if count < min(total, place.gpus or total):
            self._note(f"{total} GPUs were chosen, {count} of the cluster's are free")
        return count

    def _measures(self, node: Mapping[str, Any]) -> bool:
        return node["Resources"].get("GPU", 0) >= 1 and _has(node, self._place.gpu_labels)

    def _compiles(self, node: Mapping[str, Any]) -> bool:
        return node["Resources"].get("CPU", 0) >= 1 and _has(node, self._place.compile_labels)

    def _compile_selector(self) -> dict[str, str]:
        """Nodes on which the next task may run; asked each time, for nodes come and go."""
        if self._place.compile_labels:
            return dict(self._place.compile_labels)
        bare = [
            node["NodeID"]
            for node in _alive(self._ray)
            if self._compiles(node) and not node["Resources"].get("GPU")
        ]
        return {"ray.io/node-id": f"in({','.join(bare)})"} if bare else {}

    # Actors

    def _start(self) -> list[RemoteWorker]:
        """The workers whose actors came up in time."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in self._workers:
            worker.begin(0.0)
        missing = list(self._workers)
        while missing and time.monotonic() < deadline:
            missing = [w for w in missing if not w.begin(POLL_S) and not w.reason]
        for worker in missing:
            worker.reason = worker.reason or f"it did not start within {START_TIMEOUT_S:.0f} s"
        for reason, count in Counter(w.reason for w in self._workers if not w.card).items():
            self._note(f"{count} of {len(self._workers)} GPUs cannot be used: {reason}")
        ready = [worker for worker in self._workers if worker.card is not None]
        if not ready:
            raise BenchmarkError(f"no GPU of the cluster can be used: {self._workers[0].reason}")
        return ready

    def _sort(self, workers: Sequence[RemoteWorker]) -> list[ComparableGpus]:
        """Workers by GPU model; of one model, those whose environment most of them have."""
        groups: list[list[RemoteWorker]] = []
        for worker in workers:
            group = next((g for g in groups if not worker.known.differs(g[0].known)), None)
            if group is None:
                groups.append([worker])
            else:
                group.append(worker)
        kinds: dict[str, ComparableGpus] = {}
        for group in sorted(groups, key=len, reverse=True):
            card = group[0].known
            comparable = kinds.get(card.gpu.identity)
            reason = ""
            if comparable is not None:
                reason = f"{card.differs(comparable.card)} on {comparable.card.node}"
            elif card.version != tuner.__version__:
                reason = f"its tuner is {card.version}, not {tuner.__version__}"
            elif not card.gpu.is_served:
                reason = f"the kernels need compute capability {OLDEST_CAPABILITY} or newer"
            if not reason:
                kinds[card.gpu.identity] = ComparableGpus(card, group)
                continue
            self._note(f"{len(group)} {card.gpu.name} of {card.node} are left out: {reason}")
            for worker in group:
                worker.close()
        if not kinds:
            raise BenchmarkError("no GPU of the cluster can be used: all are left out")
        texts = (f"{len(kind.workers)} {kind.card.gpu.name}" for kind in kinds.values())
        self._note(f"measuring on a Ray cluster: {', '.join(texts)}")
        return list(kinds.values())


@dataclass(frozen=True)
class ComparableGpus:
    """GPUs whose times can be compared."""

    card: Card
    workers: Sequence[RemoteWorker]


class ClusterRunners(Runners):
    """The runners of one job on one kind of GPU of a cluster."""

    def __init__(
        self, cluster: Cluster, kind: ComparableGpus, machine: Machine, note: Note
    ) -> None:
        super().__init__(machine, note)
        self._cluster, self._kind = cluster, kind

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(range(len(self._kind.workers)))

    @cached_property
    def gpu(self) -> Gpu | None:
        return self._kind.card.gpu

    def _create_pool(self) -> WorkerPool:
        return ClusterPool(self._kind.workers)

    def _facts(self) -> Mapping[str, str | int | float]:
        return self._kind.card.facts

    def _create_compiler(
        self, tools: Toolchain, artifacts: ArtifactCache, capability: str
    ) -> Compiler:
        return ClusterCompiler(self._cluster, tools, artifacts, self._machine.jobs, capability)


class ClusterCompiler(Compiler):
    """Has units built on the cluster's compile nodes, and also keeps their artifacts here. A sweep
    that goes on later does not compile again, and its decisions can be served from here.
    """

    def __init__(
        self,
        cluster: Cluster,
        toolchain: Toolchain,
        artifacts: ArtifactCache,
        jobs: int | None,
        capability: str,
    ) -> None:
        self._cluster = cluster
        super().__init__(toolchain, artifacts, jobs, capability=capability)

    def _most_units(self, jobs: int | None) -> int:
        return jobs or self._cluster.cores

    def _build(self, unit: Unit) -> None:
        """As the base's, without its lock: a node that shares the cache takes that one itself."""
        todo = [job for job in unit.jobs if not self._settle_found(job)]
        if not todo:
            return
        built, parcel = self._cluster.build(
            [job.spec for job in todo], [job.key for job in todo], self.capability, unit.cancelled
        )
        for job, result in zip(todo, built, strict=True):
            if isinstance(result, Built):
                source = self.source(job.spec, job.key)
                self._settle(job, keep(self.artifacts, job.key, result, parcel, source))
            else:
                self._fail([job], result)


class ClusterPool(WorkerPool):
    """Hands requests to actors. One that was lost is replaced before it gets the next request."""

    def __init__(self, workers: Sequence[RemoteWorker]) -> None:
        super().__init__(workers)
        self._actors = list(workers)
        self._seen_at = time.monotonic()

    def _prepare(self, number: int) -> bool:
        """Wait until the actor is ready, which may never happen; the others continue."""
        worker = self._actors[number]
        while not self._is_closed:
            if worker.begin(POLL_S):
                self._seen_at = time.monotonic()
                return True
            with self._changed:
                if self._running:
                    self._seen_at = time.monotonic()
                elif time.monotonic() - self._seen_at > REPLACE_TIMEOUT_S:
                    self._give_up(worker.reason)
                self._changed.wait(POLL_S)
        return False

    def _give_up(self, reason: str) -> None:
        text = f"no GPU came back within {REPLACE_TIMEOUT_S:.0f} s: {reason or 'none is free'}"
        for request in list(self._waiting):
            if request.losses or request.future.set_running_or_notify_cancel():
                self._drop(request.future, BenchmarkError(text))
        self._waiting = []


def _connect(address: str | None) -> Any:
    """Ray, connected.

    Raises:
        ConfigError: when it is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as exc:
        raise ConfigError(f"--runner ray needs Ray ({exc}): {extra_command('ray')}") from exc
    try:
        _reach(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as exc:
        where = f"at {address}" if address else "here"
        raise ConfigError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, or name one with "
            f"--ray-address HOST:PORT ({' '.join(str(exc).split())[:200]})"
        ) from exc
    return ray


def _reach(address: str) -> None:
    """Check that the address accepts connections; Ray itself waits for minutes, then ends the
    process.

    Raises:
        OSError: when no server listens.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in address:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()


def _alive(ray: Any) -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _has(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(node["Labels"].get(name) == text for name, text in labels.items())


def _described(nodes: Sequence[Mapping[str, Any]]) -> str:
    """``1 node with 16 CPU; 2 nodes with 32 CPU, 8 GPU, gpu=H200``."""
    counts: Counter[str] = Counter()
    for node in nodes:
        amounts = (f"{node['Resources'].get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        labels = sorted(
            f"{name}={text}" for name, text in node["Labels"].items() if name != "ray.io/node-id"
        )
        counts[", ".join(itertools.chain(amounts, labels))] += 1
    return "; ".join(f"{n} node{'s' * (n > 1)} with {text}" for text, n in counts.items())
