"""Statements of the jobs of a store, built once: building one costs more than running it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tuner.errors import LeaseLostError
from tuner.problem import PROBLEMS
from tuner.store import models
from tuner.store.jobs import LEASE_S, Lease

_P, _J, _T = models.problems, models.jobs, models.tasks

LONGEST_BACKOFF_S = 300.0
#: Another transaction may have read the clock, and written a time by it, so much later than this
#: one, which finds that time: it is no sign of a clock that was set back.
SKEW_S = LEASE_S


def times(clock: float) -> dict[str, float]:
    """The parameters of the statements below. A time further ahead than any wait, or any lease,
    means that the clock was set back.
    """
    waits, leases = clock + LONGEST_BACKOFF_S + SKEW_S, clock + LEASE_S + SKEW_S
    return {"clock": clock, "longest_wait": waits, "longest_lease": leases}


_CLOCK = sa.bindparam("clock", type_=sa.Double)
_OTHERS = _T.alias()
#: Tasks that may be taken.
_DUE = (
    _T.c.state == "queued",
    sa.or_(
        _T.c.not_before <= _CLOCK,
        _T.c.not_before > sa.bindparam("longest_wait", type_=sa.Double),
    ),
    ~sa.exists().where(_OTHERS.c.problem_id == _T.c.problem_id, _OTHERS.c.state == "running"),
)
KNOWN = _P.c.op.in_(PROBLEMS)
"""Operations of this program: a newer one may have submitted others."""
NEXT = (
    sa.select(_T, _J.c.options, _P.c.key)
    .select_from(_T.join(_J).join(_P))
    .where(*_DUE, KNOWN, _T.c.id.not_in(sa.bindparam("newer", expanding=True)))
    .order_by(_J.c.priority.desc(), _T.c.id)
    .limit(1)
    .with_for_update(of=_T, skip_locked=True)
)
#: Tasks whose holder is silent.
LOST = sa.select(_T).where(
    _T.c.state == "running",
    sa.or_(
        _T.c.expires_at < _CLOCK,
        _T.c.expires_at > sa.bindparam("longest_lease", type_=sa.Double),
    ),
)
#: Whether a claim would change anything.
IS_DUE = sa.select(
    sa.or_(sa.exists().where(*_DUE, _T.c.problem_id == _P.c.id, KNOWN), LOST.exists())
)

_IS_HELD = (
    _T.c.id == sa.bindparam("task"),
    _T.c.token == sa.bindparam("number"),
    _T.c.state == "running",
)
#: The task of a lease that is held.
HELD = sa.select(_T).where(*_IS_HELD)
_LOCKED = HELD.with_for_update()
_EXTENDED = _T.update().where(*_IS_HELD).values(progress=sa.bindparam("told"))
EXTEND = _EXTENDED.values(expires_at=sa.bindparam("until", type_=sa.Double))
#: By the server's clock, without asking for it first.
EXTEND_THERE = _EXTENDED.values(
    expires_at=sa.extract("epoch", sa.func.clock_timestamp())
    + sa.bindparam("lease_s", type_=sa.Double)
)


def named(lease: Lease) -> dict[str, int]:
    """The parameters of `HELD` and of the extensions."""
    return {"task": lease.task, "number": lease.token}


def check(connection: sa.Connection, lease: Lease) -> sa.Row[Any]:
    """The task of a lease, kept from changing until the transaction ends.

    Raises:
        LeaseLostError: when the lease is no longer held.
    """
    row = connection.execute(_LOCKED, named(lease)).first()
    if row is None:
        raise lost(lease)
    return row


def lost(lease: Lease) -> LeaseLostError:
    """Message to a former holder."""
    return LeaseLostError(
        f"lease {lease.token} on task {lease.task} is lost: the job was cancelled, or another "
        "controller took over; nothing was written"
    )
