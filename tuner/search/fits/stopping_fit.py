"""Fit of `tuner.search.expectation` to simulated searches of recordings.

A row has its operation (``group``) and, by effort and cores as in ``quick 16``, the seconds and
losses of the searches with each seed (``searches``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.search import expectation
from tuner.search.expectation import Expectation
from tuner.search.fits.refit import Refit, rows


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Medians and 90th percentiles of the searches' seconds and losses.

    Raises:
        ConfigError: when a file is wrong, or has no searches.
    """
    searches: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for row in rows(files):
        for name, ends in row.get("searches", {}).items():
            searches.setdefault((row["group"], name), []).append(ends)
    if not searches:
        raise ConfigError("no simulated search (wanted: rows of scripts/bench search)")
    result = Refit(str(expectation.file()))
    ships = {(e.op, f"{e.effort} {e.cores}"): e for e in expectation.shipped()}
    fitted = []
    for (op, name), ends in searches.items():
        effort, cores = name.split()
        values: dict[str, float] = {}
        for place, of in enumerate(("seconds", "loss")):
            ends_of = sorted(end[place] for case in ends for end in case)
            values[of] = round(median(ends_of), 4)
            values[f"{of}_p90"] = round(ends_of[math.ceil(0.9 * len(ends_of)) - 1], 4)
        fitted.append(Expectation(op, effort, int(cores), len(ends), **values))
        before = ships.get((op, name))
        result.note(f"{op} {name}", before.to_json() if before else {}, values)
        result.errors.append(f"{op}: {fitted[-1].text(int(cores))}")
    result.documents[expectation.file()] = {
        "what": "seconds simulated, losses replayed: tuner fit stopping",
        "seeds": len(ends[0]),
        "expected": [e.to_json() for e in fitted],
    }
    return result
