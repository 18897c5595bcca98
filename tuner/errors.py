"""Every error the tuner raises.

::

    TunerError
    ├── ConfigError (ValueError)   a problem, configuration or option that is not allowed
    │   └── NewerRowError          a stored row that a newer program wrote
    ├── RenderError                a template that could not be rendered
    ├── CompileError               nvcc missing or refusing; carries ``command`` and ``log``
    ├── BenchmarkError             a kernel that could not be run or timed; carries ``status``
    │   ├── GateError              the numerics gate cannot judge; no candidate's fault
    │   └── WorkerLostError        what measured went away before it answered
    ├── StoreError                 a database that cannot be opened, read or written
    │   ├── StoreBusyError         another program has the database locked
    │   ├── StoreLostError         an SQLite file that was removed, replaced or truncated
    │   └── LeaseLostError         a job's problem that another controller works on by now
    ├── RankLostError              a rank of a process group that does not answer any more
    ├── NotInvariantError          a call whose result would depend on its batch, where it must not
    └── NoValidConfigError         no candidate passed

A cache miss is None and a failed candidate is a measurement with a status: neither is an error.
"""

from __future__ import annotations


class TunerError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(TunerError, ValueError):
    """A problem, configuration, setting or option that is not allowed. The message names the
    allowed ones.
    """


class NewerRowError(ConfigError):
    """A stored row that is whole, and says what this program does not know."""


class RenderError(TunerError):
    """A template could not be rendered."""


class CompileError(TunerError):
    """The compiler is missing or refused the source."""

    def __init__(self, message: str, *, command: str = "", log: str = "") -> None:
        super().__init__(message)
        self.command = command
        self.log = log


class BenchmarkError(TunerError):
    """A kernel could not be launched, checked or timed; `status` is a `Status` value."""

    def __init__(self, message: str, *, status: str = "launch_error") -> None:
        super().__init__(message)
        self.status = status


class GateError(BenchmarkError):
    """The numerics gate cannot judge, through no fault of a candidate."""


class WorkerLostError(BenchmarkError):
    """A worker that went away before it answered, without fault of a candidate."""


class StoreError(TunerError):
    """The database cannot be opened, read or written."""


class StoreBusyError(StoreError):
    """Another program has the database locked; a later attempt may succeed."""


class StoreLostError(StoreError):
    """The SQLite file of an open store was removed, replaced or truncated: further writes would be
    lost.
    """


class LeaseLostError(StoreError):
    """The lease on a job's problem is gone: whoever held it must not write."""


class RankLostError(TunerError):
    """A rank of a process group does not answer any more: the group cannot be used again."""


class NotInvariantError(TunerError):
    """No kernel answers a call independently of its batch, where the program asked for that."""


class NoValidConfigError(TunerError):
    """No candidate passed for a problem."""
