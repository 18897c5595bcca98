"""Changes of the store and of this machine's kernel lists since the last look."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.runtime.call import counters, proven_kernels
from tuner.runtime.call.refusal import Kind
from tuner.selection.kernels import lists
from tuner.selection.reader import decided, decided_stamp


class StoreWatch:
    """The store's decisions at the last look; to be called under the table's lock."""

    def __init__(self) -> None:
        self._stamp: Hashable = None
        self._decided: Mapping[str, Hashable] | None = None
        """The decisions themselves, read from the first change on."""
        self._proven: Any = None
        """Kernel lists, where calls are timed."""

    def changed(self, path: Path | None, has_plans: bool) -> Collection[str] | None:
        """Keys of the problems whose decisions changed; None at the first change: any may have.

        Args:
            path: SQLite file of the decisions; None: the user's store.
            has_plans: False when nothing was looked up since, so that no change matters.

        Raises:
            StoreError: when the store cannot be read, and any other of `proven_kernels.FAULTS`.
        """
        stamp = decided_stamp(path)
        if stamp == self._stamp:
            return ()
        before, now = self._decided, decided(path) if has_plans else None
        self._stamp, self._decided = stamp, now
        if before is None or now is None:
            return None if has_plans else ()
        return {key for key in {*before, *now} if before.get(key) != now.get(key)}

    def has_other_kernels(self) -> bool:
        """True, where calls are timed, when other kernels are proven than before."""
        before = self._proven
        if settings.benchmark():
            try:
                self._proven = lists.known()
            except proven_kernels.FAULTS as exc:
                counters.count_error(f"{Kind.FILE}: {exc}")
        return before is not None and before is not self._proven
