"""Ranks of a process group in a ring: checks before the first transfer, transfers, lost ranks.

On CUDA a transfer is issued from a side stream (`devices.beside`), behind the current stream's work
so far. Kernels enqueued later overlap with it. `Passing.wait` makes the current stream wait for the
transfer. Received tensors are newly allocated, so two buffers exist at once. A buffer returns to
torch's allocator once its last reader is enqueued.

NCCL's transfers run on multiprocessors. Own persistent kernels launch one block for every
multiprocessor of the device, and their launch has no argument for fewer. Blocks that find no free
multiprocessor start when the transfer ends. Under a causal mask tiles are handed out by a counter,
so the running blocks take over their tiles.

Two options of the process group help: a high-priority stream
(``ProcessGroupNCCL.Options(is_high_priority_stream=True)``) lets the transfer start first, and
``options.config.max_ctas`` bounds its multiprocessors. Neither was needed on two H100s: their
transfers add 1.7 % or less to a step (`scripts/benchmarks/README.md`).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tuner.errors import ConfigError, RankLostError
from tuner.runtime.call import devices

_PREFIX = "tuner/ring"
_LOST = "lost"
_ADVICE = "end this process and start all ranks again from the last checkpoint"
#: Errors of this rank's device, unrelated to other ranks.
_OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


@dataclass
class _Checks:
    """Comparisons of calls by the ranks of a group."""

    count: int = 0
    alike: set[Hashable] = field(default_factory=set)
    """Calls found equal in all ranks."""


_checks: WeakKeyDictionary[dist.ProcessGroup, _Checks] = WeakKeyDictionary()


class Ring:
    """The ranks of a process group, each of which sends to the next.

    Messages name ranks by their number in the default group.

    Raises:
        ConfigError: when there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "context parallelism needs a process group: torch.distributed.init_process_group "
                "first"
            )
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise ConfigError(f"rank {dist.get_rank()} is not in the group (allowed: its members)")
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        shared = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(_PREFIX, shared)
        self._checks = _checks.setdefault(group, _Checks())

    @property
    def next(self) -> int:
        """Number, within the group, of the rank that this one sends to."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """Number, within the group, of the rank that this one receives from."""
        return (self.rank - 1) % self.size

    def check(self, call: Mapping[str, str | int | float | bool | None], refusal: str = "") -> None:
        """Refuse a call that this rank cannot make, or that another rank makes differently.

        The ranks compare each new kind of call once, through the key-value store of the group. So
        no collective is open when a rank refuses, and a missing rank is known by name. Later calls
        are not compared: a rank that calls differently shows only by the group's timeout.

        Args:
            call: values that must be equal in all ranks, by name.
            refusal: reason why this rank cannot make the call; empty where it can.

        Raises:
            ConfigError: the same in every rank, except for this rank's own `refusal`.
            RankLostError: when a rank does not answer within the group's timeout.
        """
        kind = tuple(call.items())
        if not refusal and (self.size == 1 or kind in self._checks.alike):
            return
        if self.size > 1:
            self._checks.count += 1
            self._publish(call, refusal)
        if refusal:
            raise ConfigError(refusal)
        first: dict[str, Any] = {}
        for rank in range(self.size):
            theirs = self._published(rank)
            if theirs["refusal"]:
                raise ConfigError(f"{self._name(rank)} cannot do that: {theirs['refusal']}")
            first = first or theirs["call"]
            for name, value in theirs["call"].items():
                if value != first.get(name):
                    raise ConfigError(
                        f"{self._name(rank)} has {name} {value}, {self._name(0)} "
                        f"{first.get(name)} (allowed: the same in every rank)"
                    )
        self._checks.alike.add(kind)

    def _publish(self, call: Mapping[str, Any], refusal: str) -> None:
        document = json.dumps({"call": dict(call), "refusal": refusal})
        try:
            self._store.set(f"{self._checks.count}/{self.rank}", document)
        except dist.DistError as exc:
            raise self._lost(None, exc) from exc

    def _published(self, rank: int) -> dict[str, Any]:
        key = f"{self._checks.count}/{rank}"
        try:
            if self._store.check([_LOST]):
                raise self._lost(None, None)
            self._store.wait([key], self._timeout)
            data: dict[str, Any] = json.loads(self._store.get(key))
        except dist.DistStoreError as exc:
            raise self._lost(rank, exc) from exc
        except dist.DistError as exc:
            raise self._lost(None, exc) from exc
        return data

    @property
    def _timeout(self) -> timedelta:
        """The process group's timeout, or PyTorch's default if its backend has none."""
        options = self._group._get_backend(self._group._device_types[0]).options
        limit: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
        return limit

    def start(self, *tensors: torch.Tensor) -> Passing:
        """Start to send tensors to the next rank and to receive the previous rank's.

        Args:
            tensors: contiguous tensors of one device, with equal shapes in all ranks. They must not
                be written before `Passing.wait`.

        Raises:
            RankLostError: when a neighbour is known to be gone.
        """
        received = tuple(torch.empty_like(tensor) for tensor in tensors)
        sent = [self._operation(dist.isend, tensor, self.next) for tensor in tensors]
        awaited = [self._operation(dist.irecv, tensor, self.previous) for tensor in received]
        peers = [self.next] * len(sent) + [self.previous] * len(awaited)
        try:
            with devices.beside(tensors[0].device):
                works = dist.batch_isend_irecv([*sent, *awaited])
        except _OWN_ERRORS:
            raise
        except RuntimeError as exc:
            raise self._lost(None, exc) from exc
        if len(works) != len(peers):  # one work for all transfers
            return Passing(self, [(work, None) for work in works], received)
        return Passing(self, list(zip(works, peers, strict=True)), received)

    def _operation(self, function: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(function, tensor, group=self._group, group_peer=peer)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The contiguous tensors of all ranks, in the order of ranks; shapes and types are equal.

        Raises:
            RankLostError: when a rank is gone.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(parts, tensor, group=self._group)
        except _OWN_ERRORS:
            raise
        except RuntimeError as exc:
            raise self._lost(None, exc) from exc
        return parts

    def _lost(self, peer: int | None, cause: Exception | None) -> RankLostError:
        """The error that names the lost rank.

        While the store answers, it is the rank that was found lost first: ranks that end with this
        error look lost to others.

        Args:
            peer: rank that did not answer; None: one of the neighbours.
            cause: error that showed it; None: another rank reported it.
        """
        blamed = "" if peer is None else self._name(peer)
        try:
            if blamed:
                blamed = self._store.compare_set(_LOST, "", blamed).decode()
            elif self._store.check([_LOST]):
                blamed = self._store.get(_LOST).decode()
        except RuntimeError as exc:
            cause = cause or exc
            blamed = f"{blamed or self._name(self.previous)}, or the process group's store,"
        if not blamed:
            blamed = " or ".join(map(self._name, sorted({self.previous, self.next})))
        return RankLostError(
            f"{blamed} does not answer {self._name(self.rank)} any more: {_ADVICE}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {dist.get_global_rank(self._group, rank)}"


@dataclass(frozen=True)
class Passing:
    """A transfer in flight."""

    ring: Ring
    works: list[tuple[Any, int | None]]
    """Works of torch, each with the other rank; None: both neighbours."""
    received: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The previous rank's tensors, after both directions have completed.

        On CUDA the current stream waits, not the host. There a lost rank shows by the process
        group's timeout: NCCL's watchdog ends the process, after the time that it leaves for a dump.

        Raises:
            RankLostError: when a neighbour is gone, or after the group's timeout.
        """
        for work, peer in self.works:
            try:
                work.wait()
            except _OWN_ERRORS:
                raise
            except RuntimeError as exc:
                raise self.ring._lost(peer, exc) from exc
        return self.received
