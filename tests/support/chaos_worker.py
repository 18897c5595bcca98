"""A controller as a process of its own, over toys: ``chaos_worker.py STORE [CLOCK]``.

CLOCK is a file with the seconds by which this machine's clock is off, read again and again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from queue_toys import Replays, catalogue

from tuner.runners.choose import Machine
from tuner.store import open_store, sql_jobs
from tuner.tuning import controller as controllers
from tuner.tuning.controller import Controller
from tuner.tuning.progress import Watcher


class Log(Watcher):
    """Notes on standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main(url: str, clock: Path | None) -> None:
    """Say that it is ready, and at a word on standard input work until nothing is open."""
    jobs: Any = sql_jobs
    jobs.BACKOFF_S = 0.1
    waits: Any = controllers
    waits.POLL_S = waits.STORE_WAIT_S = 0.1
    if clock is not None:
        jobs.time = SimpleNamespace(time=lambda: time.time() + float(clock.read_text() or 0))
    with (
        open_store(url) as store,
        Controller(
            store,
            Machine(),
            watcher=Log(),
            lease_s=1.0,
            catalogue=catalogue,
            create_runners=Replays(pause_s=0.02),
        ) as controller,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        controller.run(drain=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if sys.argv[2:] else None)
