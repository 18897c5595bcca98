"""One table of decisions and proven kernels for all ranks of a distributed program.

Ranks on different hosts read different stores and kernel lists: one may be older, another may lack
a compiled kernel. They could launch different kernels for the same call. After `agree` every rank
serves from a snapshot of rank 0's decisions, and from the proven kernels that all ranks have. It
launches no kernel that another rank lacks.

The ranks communicate through the key-value store of their process group, without a collective. So
a missing rank does not block the others.

1. Rank 0 writes a snapshot of its decisions (`tuner.selection.snapshot`).
2. Every rank writes a list of the decided kernels that it lacks, and of the kernels that are proven
   on it.
3. Rank 0 writes the verdict: the kernels that all ranks which answered have.

The verdict is written by one compare-and-set. A rank whose wait runs out writes the verdict "no
rank serves". Later ranks, rank 0 included, read it, and all ranks call PyTorch. A rank that is
started again reads the verdict also. Kernels that are built later serve from the next agreement on.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tuner
from tuner.base import scratch
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.runtime.call import devices
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.runtime.call.table import table
from tuner.selection.kernels import Lists
from tuner.selection.portfolio import digest
from tuner.selection.reader import entries
from tuner.selection.snapshot import take, unpack

__all__ = ["TIMEOUT_S", "Agreement", "agree", "agree_in_engine"]

_log = logging.getLogger("tuner.runtime")

TIMEOUT_S = 60.0
_PREFIX = "tuner/agreement"
_CHUNK_BYTES = 4 << 20
"""Size of a chunk of the snapshot; torch 2.13's TCPStore refuses messages of more than 8 MiB."""
_PROPOSAL, _VERDICT, _ROUND = "proposal", "verdict", "round"


@dataclass(frozen=True)
class Agreement:
    """The ranks' agreement, the same in each."""

    refusal: str = ""
    """Why no tuned kernel is launched on any rank; empty where they agreed."""
    ranks: tuple[int, ...] = ()
    """Ranks that answered in time. A late rank serves the same configurations, as far as it has
    their kernels."""
    absent: frozenset[str] = frozenset()
    """Keys of artifacts that one of these ranks lacks; no rank launches them."""
    proven: frozenset[str] = frozenset()
    """Keys of artifacts that are proven on all of these ranks; portfolios and rules serve them."""
    notes: tuple[str, ...] = ()
    """Differences of the ranks' machines."""


_lock = threading.Lock()
_agreed: Agreement | None = None
_round = 0
"""Number of the agreement that holds in this process."""
_folder: Path | None = None


def agree(
    store: dist.Store | None = None, *, timeout_s: float = TIMEOUT_S, renew: bool = False
) -> Agreement:
    """Serve from rank 0's decisions and the kernels that are proven on all ranks.

    Call it in every rank after ``init_process_group`` and ``torch.cuda.set_device``, and before
    the first kernel. Ranks may arrive up to half of the time limit apart. Later calls return the
    same agreement. Decisions and kernels made afterwards take effect at the next agreement. That is
    one with `renew`, which every rank calls at the same place, or the program's next start.

    Args:
        store: key-value store shared by the ranks; default: the default process group's.
        timeout_s: seconds after which no rank waits any longer.
        renew: True to agree again. Graphs that were captured before keep their kernels.

    Returns:
        The agreement, equal in every rank. A late rank that lacks kernels logs a warning.

    Raises:
        ConfigError: when there is no process group, or the time limit is not above 0.
        StoreError: when this rank's store or its temporary folder cannot be used. The other ranks
            continue without it.
    """
    global _agreed, _folder, _round
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError(f"timeout_s={timeout_s} is out of range (allowed: above 0 seconds)")
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("agree needs a process group: torch.distributed.init_process_group first")
    with _lock:
        if _agreed is None or renew:
            try:
                _folder = _folder or scratch.held_until_exit("tuner-agreed-")
            except OSError as exc:
                raise StoreError(f"no temporary folder for the ranks' decisions: {exc}") from exc
            shared = store or dist.distributed_c10d._get_default_store()
            _round = _latest_round(shared) if _agreed is None else _round + 1
            meeting = _Meeting(shared, _folder, timeout_s, _round)
            _agreed = meeting.hold()
        return _agreed


def agree_in_engine() -> None:
    """Agree in a rank of an engine, once; nothing to do for a single rank. Faults are logged, and
    the rank serves no tuned kernel.
    """
    if _agreed is None and devices.ranks() > 1:
        try:
            agree()
        except TunerError as exc:
            table.pin(None, refusal=Refusal(Kind.RANKS, str(exc)))
            _log.warning("no tuned kernel is launched on this rank: %s", exc)


def _latest_round(store: dist.Store) -> int:
    """Number of the agreement that the ranks hold; that of a rank which is started again."""
    rounds = dist.PrefixStore(_PREFIX, store)
    try:
        return int(rounds.get(_ROUND)) if rounds.check([_ROUND]) else 0
    except dist.DistError:
        return 0  # the meeting says why


@dataclass
class _Answer:
    """One rank's answer to the proposal."""

    lacking: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    """Keys of the artifacts of proven kernels."""
    gpu: str = ""
    """Identity of its GPU, which the choice among these kernels depends on."""
    facts: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """Reason why the rank cannot serve rank 0's decisions; empty where it can."""


class _Meeting:
    """One rank's part in the agreement."""

    def __init__(self, store: dist.Store, folder: Path, timeout_s: float, number: int = 0) -> None:
        self._rounds, self._number = dist.PrefixStore(_PREFIX, store), number
        self._store = dist.PrefixStore(f"{_PREFIX}/{number}", store)
        self._path = folder / f"store{number}.sqlite"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._began, self._timeout_s = time.monotonic(), timeout_s

    def hold(self) -> Agreement:
        """Agree, and set the runtime's table to the result."""
        try:
            agreed, answer = self._agree()
        except dist.DistError as exc:
            text = str(exc).partition("\n")[0]
            agreed, answer = Agreement(f"the process group's store failed: {text}"), _Answer()
        if agreed.refusal:
            table.pin(None, refusal=Refusal(Kind.RANKS, agreed.refusal))
            _log.warning("rank %d: no tuned kernel is launched: %s", self._rank, agreed.refusal)
            return agreed
        table.pin(self._path, agreed.absent, proven=agreed.proven)
        for note in agreed.notes:
            _log.warning("rank %d: %s", self._rank, note)
        missing = agreed.proven - {*answer.proven}
        if late := ({*answer.lacking} - agreed.absent) | missing:
            _log.warning(
                "rank %d came when the others had agreed, and lacks %d of their kernels: others "
                "serve in their place here",
                self._rank,
                len(late),
            )
        return agreed

    def _agree(self) -> tuple[Agreement, _Answer]:
        """The agreement, and what this rank answered."""
        if self._rank == 0 and not self._store.check([_VERDICT]):
            self._propose()
        if not self._has(_PROPOSAL, 1.0):
            return self._settle(Agreement(refusal="rank 0 did not come in time")), _Answer()
        proposal = json.loads(self._store.get(_PROPOSAL))
        if proposal["version"] != tuner.__version__:
            versions = f"tuner {tuner.__version__}, rank 0 {proposal['version']}"
            answer = _Answer(refusal=f"rank {self._rank} runs {versions}")
        elif proposal["portfolios"] != digest():
            answer = _Answer(refusal=f"rank {self._rank} has other portfolios than rank 0")
        else:
            unpack(self._fetch(int(proposal["chunks"])), self._path)
            answer = self._answer()
        self._store.set(f"answer/{self._rank}", json.dumps(asdict(answer)))
        if self._rank == 0:
            return self._settle(self._verdict()), answer
        refusal = "" if self._has(_VERDICT, 1.0) else "rank 0 did not come to an end in time"
        return self._settle(Agreement(refusal)), answer

    def _propose(self) -> None:
        data = take()
        chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"snapshot/{number}", chunk)
        document = {"version": tuner.__version__, "portfolios": digest(), "chunks": len(chunks)}
        self._rounds.set(_ROUND, str(self._number))
        self._store.set(_PROPOSAL, json.dumps(document))

    def _fetch(self, chunks: int) -> bytes:
        return b"".join(self._store.get(f"snapshot/{number}") for number in range(chunks))

    def _answer(self) -> _Answer:
        """The kernels for its GPU that this rank lacks and has, and its environment."""
        gpu, cache = devices.gpu_of(devices.current()), ArtifactCache()
        subset = {
            key
            for entry in entries(self._path)
            if gpu.shares_decisions(entry.gpu)
            for measurement in entry.ranked
            for key in measurement.artifacts.values()
        }
        lacking = sorted(key for key in subset if cache.find(key) is None)
        proven = sorted(Lists().artifacts(gpu.compute_capability))
        facts = {"GPU": gpu.name, **devices.environment().facts}
        return _Answer(lacking, proven, gpu.identity, facts)

    def _verdict(self) -> Agreement:
        """Rank 0's verdict, from the answers up to half of the time limit."""
        answers: dict[int, _Answer] = {}
        for rank in range(self._world):
            if self._has(f"answer/{rank}", 0.5):
                answers[rank] = _Answer(**json.loads(self._store.get(f"answer/{rank}")))
        missing = sorted(set(range(self._world)) - set(answers))
        notes = [f"rank {rank} did not come in time" for rank in missing]
        for rank, answer in answers.items():
            notes += _differences(rank, answer.facts, answers[0].facts)
        proven = frozenset.intersection(*(frozenset(a.proven) for a in answers.values()))
        if len({answer.gpu for answer in answers.values()}) > 1:
            proven = frozenset()
            notes.append("the ranks' GPUs are not alike: no portfolio serves")
        return Agreement(
            refusal="; ".join(answer.refusal for answer in answers.values() if answer.refusal),
            ranks=tuple(answers),
            absent=frozenset(key for answer in answers.values() for key in answer.lacking),
            proven=proven,
            notes=tuple(notes),
        )

    def _settle(self, agreed: Agreement) -> Agreement:
        """Write this verdict unless there is one already; return the one that holds."""
        keys = {"absent": sorted(agreed.absent), "proven": sorted(agreed.proven)}
        document = json.dumps({**asdict(agreed), **keys})
        verdict = json.loads(self._store.compare_set(_VERDICT, "", document))
        absent, proven = frozenset(verdict["absent"]), frozenset(verdict["proven"])
        ranks, notes = tuple(verdict["ranks"]), tuple(verdict["notes"])
        return Agreement(verdict["refusal"], ranks, absent, proven, notes)

    def _has(self, key: str, share: float) -> bool:
        """Wait for a key until a share of the time limit is over."""
        left_s = self._began + share * self._timeout_s - time.monotonic()
        if left_s <= 0:
            return bool(self._store.check([key]))
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except dist.DistStoreError:
            return False
        return True


def _differences(rank: int, facts: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Facts of a rank that differ from rank 0's, among the facts that both have."""
    return [
        f"rank {rank} has {name} {facts[name]}, rank 0 {first[name]}"
        for name in sorted(facts.keys() & first.keys())
        if facts[name] != first[name]
    ]
