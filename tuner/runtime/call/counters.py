"""Counters of the runtime: calls by the kernel that answered, over all threads.

A *reason* is one line that says why no tuned kernel ran: one of few kinds, then a colon and the
details. Counts are kept by kind. Each reason is logged once: the first of its kind as a warning,
the others as information.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tuner.base import forks

_log = logging.getLogger("tuner.runtime")

#: Reasons and kinds remembered as logged. After that many nothing more is logged, so that a server
#: of ever new shapes does not fill its log.
_MAX_SAID = 1024


@dataclass(frozen=True)
class Stats:
    """Calls since the process started or `stats(reset=True)` was called."""

    hits: int = 0
    """Calls answered by a tuned kernel, own or a vendor's."""
    portfolio_hits: int = 0
    """Hits whose kernel a portfolio selected."""
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    """Calls answered by PyTorch or by an engine's own kernel, by kind of reason, most frequent
    first."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failures that no call suffered from, by kind: a refused launch, an unreadable store."""
    peers: Mapping[str, int] = field(default_factory=dict)
    """Hits of vendors' kernels by their owner, a word of TUNER_ANSWERS; the others are own."""

    @property
    def calls(self) -> int:
        """All calls."""
        return self.hits + sum(self.fallbacks.values())

    @property
    def answers(self) -> Mapping[str, int]:
        """Calls by who answered: ``own``, ``pytorch`` (or an engine's kernel), and peers."""
        total = Counter(self.peers)
        total["own"] += self.hits - sum(self.peers.values())
        total["pytorch"] += sum(self.fallbacks.values())
        return dict(total.most_common())


class _Counts:
    """The counters and their lock."""

    lock: threading.Lock

    def __init__(self) -> None:
        forks.add_lock(self, name="lock")
        self.hits = 0
        self.portfolio_hits = 0
        self.peers: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.said: set[str] = set()


_counts = _Counts()
Source = Callable[[bool], tuple[int, int, Mapping[str, int]]]
_sources: list[Source] = []


def stats(reset: bool = False) -> Stats:
    """Calls of the runtime's functions, by the kernel that answered.

    Args:
        reset: set the counters to zero afterwards.
    """
    with _counts.lock:
        hits = [_counts.hits, _counts.portfolio_hits]
        fallbacks = Counter(_counts.fallbacks)
        for source in _sources:
            *more, more_fallbacks = source(reset)
            hits = [a + b for a, b in zip(hits, more, strict=True)]
            fallbacks.update(more_fallbacks)
        peers, errors = (dict(counter.most_common()) for counter in (_counts.peers, _counts.errors))
        all_hits, selected = hits
        stats = Stats(all_hits, selected, dict(fallbacks.most_common()), errors, peers)
        if reset:
            _counts.hits = _counts.portfolio_hits = 0
            _counts.peers.clear()
            _counts.fallbacks.clear()
            _counts.errors.clear()
    return stats


def count_hit(by_portfolio: bool = False, owner: str = "") -> None:
    """Count a call that a tuned kernel answered; `owner` has a vendor's one."""
    with _counts.lock:
        _counts.hits += 1
        if owner:
            _counts.peers[owner] += 1
        _counts.portfolio_hits += by_portfolio


def count_fallback(reason: str, by: str = "PyTorch") -> None:
    """Count a call that PyTorch, or `by` in its place, answers for this reason."""
    with _counts.lock:
        _counts.fallbacks[kind_of(reason)] += 1
    if reason not in _counts.said:
        _say(f"answered by {by}: ", reason)


def count_error(reason: str) -> None:
    """Count a failure that no call suffers from."""
    with _counts.lock:
        _counts.errors[kind_of(reason)] += 1
    _say("", reason)


def add_source(source: Source) -> None:
    """Add counters that are kept elsewhere.

    Args:
        source: called with `reset`; returns hits, the portfolio's share of them, and fallbacks by
            kind of reason.
    """
    _sources.append(source)


def kind_of(reason: str) -> str:
    """Kind of a reason, under which it is counted."""
    return reason.partition(":")[0]


def _say(what: str, reason: str) -> None:
    if reason in _counts.said:
        return
    with _counts.lock:
        if reason in _counts.said or len(_counts.said) >= _MAX_SAID:
            return
        is_first = kind_of(reason) not in _counts.said
        _counts.said |= {reason, kind_of(reason)}
    _log.log(logging.WARNING if is_first else logging.INFO, "%s%s", what, reason)
