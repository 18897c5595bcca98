"""Admission of connections: a limit in all and one an address, below the process's descriptors.

At a limit the connection that has waited longest for its client is closed for a newer one. So
silent clients cannot lock others out.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from tuner.errors import ConfigError

MAX_CONNECTIONS = 4096
ACCEPTORS = 32
"""Maximum connections accepted in one turn of the event loop; the next turn reads them."""
SPARE_CONNECTIONS = 4 * ACCEPTORS
"""Places beyond the limit, each for one health check or refusal."""
OWN_DESCRIPTORS = 192
"""Descriptors kept for the store (15 connections of up to 3 files), listening sockets and files."""
MIN_DESCRIPTORS = SPARE_CONNECTIONS + OWN_DESCRIPTORS + 2 * ACCEPTORS


class Connection(Protocol):
    """A member of `Admission`."""

    def evict(self) -> None:
        """End at once."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Maximum connections: served in all, served for one address, and spare ones beside them."""

    total: int
    per_address: int
    spare: int = SPARE_CONNECTIONS

    @classmethod
    def of_process(cls) -> Self:
        """Limits below the soft RLIMIT_NOFILE; one address has at most half of all places.

        Raises:
            ConfigError: when the soft limit is too low to serve.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        total = MAX_CONNECTIONS
        if soft != resource.RLIM_INFINITY:
            if soft < MIN_DESCRIPTORS:
                raise ConfigError(
                    f"RLIMIT_NOFILE={soft} is too low to serve (allowed: {MIN_DESCRIPTORS} or "
                    f"more, as by `ulimit -n {MIN_DESCRIPTORS}`)"
                )
            total = min(total, soft - SPARE_CONNECTIONS - OWN_DESCRIPTORS)
        return cls(total, total // 2)


class Admission:
    """Open connections, and which ones wait for their clients.

    Args:
        limits: maximum connections of each kind.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._served: dict[Connection, str] = {}
        """Network of each, as `network_of` names it."""
        self._counts: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}
        """Connections that wait, the longest wait first."""
        self._spare: dict[Connection, None] = {}
        """Connections beyond the limit, the oldest first."""

    def enter(self, connection: Connection, host: str) -> bool:
        """Admit a new connection, in place of another where a limit is reached.

        Args:
            connection: the new one; it is to say at once whether it waits.
            host: address of its client.

        Returns:
            True when it may be served. False when every other is at work: it is a spare one then,
            for a health check or a refusal.
        """
        network = network_of(host)
        if self._has_room(network):
            self._served[connection] = network
            self._counts[network] += 1
            return True
        if len(self._spare) >= self._limits.spare:
            self._evict(self._spare)
        self._spare[connection] = None
        return False

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for its client from now on."""
        if connection in self._served:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def work(self, connection: Connection) -> None:
        """Note that a connection's request is worked on."""
        self._waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Remove a connection that has ended; an unknown one is ignored."""
        self._spare.pop(connection, None)
        self._waiting.pop(connection, None)
        network = self._served.pop(connection, None)
        if network is not None:
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]

    def _has_room(self, network: str) -> bool:
        """Evict a waiting connection if a limit is reached. Returns False if all others are at
        work.
        """
        if self._counts[network] >= self._limits.per_address:
            return self._evict(c for c in self._waiting if self._served[c] == network)
        return len(self._served) < self._limits.total or self._evict(self._waiting)

    def _evict(self, among: Iterable[Connection]) -> bool:
        """Evict the first of some connections. Returns False if there is none."""
        connection = next(iter(among), None)
        if connection is None:
            return False
        self.leave(connection)
        connection.evict()
        return True


def network_of(host: str) -> str:
    """The unit in which clients are counted: an IPv4 address, or the /64 network of an IPv6 one,
    which belongs to one subscriber as a rule.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if address.version == 4:
        return host
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
