"""Code on the nodes of a Ray cluster: building units of kernels, and measuring on one GPU.

`on_ray` makes a task of `build` and actors of `Gauge`. Libraries travel beside the requests, as
*parcels*: objects of Ray's store that hold libraries by the SHA-256 of their bytes. Whoever opens
one computes the hash again, and takes nothing that has another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any

import tuner
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.compiler import Compiler, find_toolchain
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, RenderError
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measure import device
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask, WorkerClient
from tuner.measurement import Resources
from tuner.problem import Problem

Parcel = Mapping[str, bytes]
"""Libraries by their SHA-256."""

FETCH_TIMEOUT_S = 120.0
"""For one parcel (megabytes) through Ray's object store; then it counts as lost."""
_POLL_S = 0.5
"""How soon a task that waits for nvcc sees that it was cancelled."""


@dataclass(frozen=True)
class Built:
    """A kernel that a node compiled; its library is in the parcel that came with it."""

    sha256: str
    resources: Resources | None
    compile_cpu_s: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """Description of an actor."""

    node: str
    """Name of the machine."""
    version: str
    """Version of the tuner there."""
    gpu: Gpu
    facts: Mapping[str, str | int | float]
    """Environment of the node: driver, limits of the chip, the vendors' libraries."""

    def differs(self, other: Card) -> str:
        """Reason why times of two actors cannot be compared; empty if they can."""
        if self.gpu.identity != other.gpu.identity:
            return f"{self.gpu.name} ({self.gpu.sm_count} SMs)"
        for fact in sorted({*self.facts, *other.facts}):
            if self.facts.get(fact) != other.facts.get(fact):
                return f"{fact} {self.facts.get(fact)}, not {other.facts.get(fact)}"
        return ""


@dataclass(frozen=True)
class Reply:
    """An actor's answer to an `Ask`."""

    outcomes: Sequence[CandidateOutcome] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Libraries that did not arrive, with the reason; nothing was measured then."""
    is_spent: bool = False
    """A sticky CUDA error or a hang cost a process: the actor is to be replaced."""


def build(
    specs: Sequence[KernelSpec], keys: Sequence[str], capability: str
) -> tuple[list[Built | CompileError | RenderError], Parcel]:
    """Compile a translation unit on this node, into its artifact cache.

    Args:
        specs: kernels of one template.
        keys: the requester's artifact keys, in the same order.
        capability: compute capability to compile for.

    Returns:
        For each spec its artifact or error, and the libraries.

    Raises:
        BenchmarkError: when this node has no compiler, or another one than the requester's.
        StoreError: when its artifact cache cannot be written.
    """
    try:
        toolchain = find_toolchain()
    except CompileError as exc:
        raise BenchmarkError(f"a compile node has no compiler: {exc}") from exc
    cache = ArtifactCache()
    with Compiler(toolchain, cache, jobs=1, batch=len(specs), capability=capability) as compiler:
        if [compiler.key(spec) for spec in specs] != list(keys):
            raise BenchmarkError(
                f"a compile node has nvcc {toolchain.nvcc_version}, CUTLASS "
                f"{toolchain.cutlass_version}, tuner {tuner.__version__}: not what the "
                "controller has, or other templates or NVCC_*_FLAGS"
            )
        futures = [future for _, future in compiler.submit(specs)]
        while wait(futures, _POLL_S).not_done:
            pass  # Ray's cancelling comes as KeyboardInterrupt, between two waits
    built: list[Built | CompileError | RenderError] = []
    libraries: dict[str, bytes] = {}
    for future in futures:
        try:
            artifact = future.result()
        except (CompileError, RenderError) as exc:
            built.append(exc)
            continue
        libraries[artifact.sha256] = artifact.library.read_bytes()
        built.append(
            Built(artifact.sha256, artifact.resources, artifact.compile_cpu_s, artifact.facts)
        )
    return built, libraries


def arrived(sha256: str, parcel: Parcel) -> str:
    """Why a library cannot be taken from a parcel; empty when it can."""
    content = parcel.get(sha256)
    if content is None:
        return "the parcel does not hold it"
    digest = hashlib.sha256(content).hexdigest()
    return "" if digest == sha256 else f"its bytes have the hash {digest[:16]}"


def keep(
    cache: ArtifactCache, key: str, built: Built | Artifact, parcel: Parcel, source: str
) -> Artifact:
    """Put a library that `arrived` into an artifact cache.

    Raises:
        StoreError: when the cache cannot be written.
    """
    with cache.workspace() as aside:
        library = aside / "arrived.so"
        try:
            library.write_bytes(parcel[built.sha256])
        except OSError as exc:
            raise cache.write_error(exc) from exc
        return cache.put(
            key,
            library,
            resources=built.resources,
            compile_cpu_s=built.compile_cpu_s,
            source=source,
            facts=built.facts,
        )


def artifacts_of(ask: Ask) -> dict[str, Artifact]:
    """Every artifact of a request by its key."""
    used = [ask.reference, *(a for _, named in ask.candidates for a in named.values())]
    return {artifact.key: artifact for artifact in used}


class Gauge:
    """Measures on the one GPU that Ray gave this process, in a worker process of its own.

    Killing the actor ends that process too: its pipe of requests closes.
    """

    def __init__(self) -> None:
        self._client = WorkerClient(0)
        self._cache = ArtifactCache()

    def card(self) -> Card:
        """GPU of this actor; creates the worker process.

        Raises:
            BenchmarkError: when there is no GPU that can be used.
        """
        import ray

        gpu = device.detect(0)
        if gpu is None:
            raise BenchmarkError("the GPU that Ray gave to the actor was not found")
        facts = {**device.environment(0).facts, **self._client.facts()}
        node = ray.util.get_node_ip_address()
        return Card(node, tuner.__version__, gpu, facts)

    def listing(self, problem: Problem, family: str, max_workspace: int | None) -> list[Config]:
        """As `WorkerClient.listing`."""
        return self._client.listing(problem, family, max_workspace)

    def measure(self, ask: Ask, parcels: Mapping[str, Any]) -> Reply:
        """Check and time candidates.

        Args:
            ask: request, whose artifacts are in the requester's cache.
            parcels: Ray's references to the parcels, by the hash of their library.

        Raises:
            BenchmarkError: when no worker can be started, or the gate itself fails.
            StoreError: when the artifact cache cannot be written.
        """
        here: dict[str, Artifact] = {}
        refused: dict[str, str] = {}
        for key, artifact in artifacts_of(ask).items():
            present = self._cache.find(key)
            if present is None:
                parcel, reason = self._open(parcels[artifact.sha256])
                reason = reason or arrived(artifact.sha256, parcel)
                if reason:
                    refused[artifact.sha256] = reason
                    continue
                present = keep(self._cache, key, artifact, parcel, source="")
            here[key] = present
        if refused:
            return Reply(refused=refused)
        process = self._client.pid
        outcomes = self._measure(_relocated(ask, lambda artifact: here[artifact.key]))
        return Reply(outcomes, is_spent=process is not None and self._client.pid != process)

    def _open(self, reference: Any) -> tuple[Parcel, str]:
        """Object of a reference, or the reason that it cannot be fetched."""
        import ray

        try:
            return ray.get(reference, timeout=FETCH_TIMEOUT_S), ""
        except ray.exceptions.RayError as exc:
            return {}, f"{type(exc).__name__} of its parcel"

    def _measure(self, ask: Ask) -> list[CandidateOutcome]:
        return self._client.measure(ask)


def _relocated(ask: Ask, place: Callable[[Artifact], Artifact]) -> Ask:
    """The request with the artifacts of this machine's cache."""
    return replace(
        ask,
        reference=place(ask.reference),
        candidates=[
            (config, {name: place(artifact) for name, artifact in named.items()})
            for config, named in ask.candidates
        ],
    )
