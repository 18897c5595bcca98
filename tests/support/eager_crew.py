"""Workers of the simulated fleet that wait for nothing longer than needed, in processes of their
own.
"""

from __future__ import annotations

from typing import Any

from benchmarks import fleet
from tuner.store import sql_jobs


class EagerCrew(fleet.Crew):
    """Takes up again at once what a killed worker left."""

    def run(self) -> None:
        workers: Any = fleet
        jobs: Any = sql_jobs
        workers.POLL_S = jobs.BACKOFF_S = 0.1
        workers.longer_pause = lambda pause_s: pause_s
        super().run()
