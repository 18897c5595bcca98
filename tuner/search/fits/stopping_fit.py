"""Fit of `tuner.search.expectation` to simulated searches of recordings.

A row has its operation (``group``) and, by effort and cores as in ``quick 16``, the seconds and
losses of the searches with each seed (``searches``). ``promises`` has a list for each seed. After
each result it holds the number of results, the saving that the surrogate expected of all other
groups, and that of the best one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.search import expectation
from tuner.search.expectation import Credit, Expectation
from tuner.search.fits.refit import Refit, rows

RESULTS = (1, 2, 3, 5, 9, 17, 41)
"""Numbers of results from which a search has another credit."""
MIN_PROMISE = 0.001
"""Least expected saving that counts; a smaller one is below the noise."""
Promises = Sequence[tuple[int, float, float]]


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Medians and 90th percentiles of the searches' seconds and losses.

    Raises:
        ConfigError: when a file is wrong, or has no searches.
    """
    searches: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    every = rows(files)
    for row in every:
        for name, ends in row.get("searches", {}).items():
            searches.setdefault((row["group"], name), []).append(ends)
    if not searches:
        raise ConfigError(
            "no simulated search (wanted: rows of scripts/bench tuner, preset recorded)"
        )
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
    problems = [row["promises"] for row in every if "promises" in row]
    credits = _credits(problems)
    result.errors.append(_left_out(problems))
    earlier = {c.results: c.to_json() for c in expectation.credits()}
    for credit in credits:
        name = f"after {credit.results} results"
        result.note(name, earlier.get(credit.results, {}), credit.to_json())
    result.documents[expectation.file()] = {
        "what": "seconds simulated, losses replayed: tuner fit stopping",
        "seeds": len(ends[0]),
        "expected": [e.to_json() for e in fitted],
        "credits": [c.to_json() for c in credits],
    }
    return result


def _credits(problems: Sequence[Sequence[Promises]]) -> list[Credit]:
    """Credits by the searches of some problems."""
    promises = [promise for searches in problems for promise in searches]
    return list(filter(None, (_credit(promises, *step) for step in pairwise(RESULTS))))


def _left_out(problems: Sequence[Sequence[Promises]]) -> str:
    """Savings of each problem as the others' credits tell them, and those that came."""
    promised, told, came = [0.0], [0.0], [0.0]
    for place, searches in enumerate(problems):
        others = _credits([*problems[:place], *problems[place + 1 :]])
        for results, expected, true in (step for search in searches for step in search):
            fitting = [credit.share for credit in others if credit.results <= results]
            promised.append(expected)
            told.append(expected * (fitting[-1] if fitting else 1.0))
            came.append(true)
    texts = (f"{fmean(values):.2%}" for values in (promised, told, came))
    return "savings of problems left out: surrogate {}, told {}, came {}".format(*texts)


def _credit(promises: Sequence[Promises], least: int, beyond: int) -> Credit | None:
    """Credit of searches with `least` results or more, below `beyond`."""
    steps = [
        [p for p in search if least <= p[0] < beyond and p[1] >= MIN_PROMISE] for search in promises
    ]
    pairs = [(came, promised) for search in steps for _, promised, came in search]
    if not pairs:
        return None
    shares = sorted(came / promised for came, promised in pairs)
    share = sum(came for came, _ in pairs) / sum(promised for _, promised in pairs)
    p90 = max(share, shares[math.ceil(0.9 * len(shares)) - 1])
    return Credit(least, round(share, 4), round(p90, 4), sum(map(bool, steps)))
