"""Choice of the finalists, and ranking of a pass. Pure functions on measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tuner.config import Config
from tuner.measurement import Measurement, is_tie
from tuner.store.entry import is_vendor, vendor_name

MAX_FAMILY_FACTOR = 1.3
"""Largest factor over the best own time at which a family's best candidate is a finalist."""
MIN_OWN = 3
"""Fewest distinct own kernels in the final pass, if that many passed."""
MAX_LISTED = 3
"""Most plans or algorithms of one library in the final pass: its fastest."""


NEAR = 0.05
"""Largest relative difference of a quick time near the best. Each request allocates its operands
anew, which changes a product's time by 1.6 % (`tuner develop fit cost`). Besides, a quick pass
timed persistent kernels 3 % faster than a final pass does, and others of the same product not.
Quick times choose among many kernels, so the least of them are also the luckiest."""
MAX_NEAR, NEAR_US = 36, 2400.0
"""Most further finalists near the best, and microseconds of their calls together."""


def finalists(
    measurements: Sequence[Measurement],
    count: int,
    kernel: Callable[[Config], str],
    near: int = 0,
) -> list[Measurement]:
    """Candidates of the final pass: the best own ones, and each vendor kernel's fastest config.

    Args:
        measurements: measurements of the quick pass, of any status.
        count: number of own candidates; other families near the best are added.
        kernel: gives the identity of a config's compiled kernels.
        near: number of further own kernels with quick times near the best, a config each; of short
            calls more, as many as take `NEAR_US` together.
    """
    passed = sorted((m for m in measurements if m.ok), key=by_latency)
    own = [m for m in passed if not is_vendor(m.config)]
    kernels: dict[str, Measurement] = {}
    families: dict[str, Measurement] = {}
    for measurement in own:
        kernels.setdefault(kernel(measurement.config), measurement)
        if _us(measurement) <= MAX_FAMILY_FACTOR * _us(own[0]):
            families.setdefault(measurement.config.family, measurement)
    best = list(kernels.values())[: min(count, MIN_OWN)]
    best += [m for m in own if m not in best][: count - len(best)]
    best += [m for m in families.values() if m not in best]
    if own:
        close = [m for m in kernels.values() if _us(m) <= (1 + NEAR) * _us(own[0])]
        most = max(near, min(MAX_NEAR, int(NEAR_US / _us(own[0])))) if near else 0
        best += [m for m in close if m not in best][:most]
    named = Counter[str]()
    for m in passed:
        if is_vendor(m.config) and named[name := vendor_name(m.config)] < MAX_LISTED:
            named[name] += 1
            best.append(m)
    return best


def rank(measured: Sequence[Measurement]) -> list[Measurement]:
    """Measurements of one pass that passed, best first; ties are broken in a fixed order.

    Each step takes the fastest remaining candidate and all that tie with it
    (`measurement.is_tie`). Among them an own kernel comes before a vendor's, then the smaller
    workspace, then the smaller digest.

    Raises:
        ValueError: on a mixture of quick and final times, which cannot be compared.
    """
    passed = sorted((m for m in measured if m.ok), key=_us)
    if len({m.is_final for m in passed}) > 1:
        raise ValueError("quick times and final times cannot be ranked together")
    ranking: list[Measurement] = []
    while passed:
        tied = [m for m in passed if is_tie(passed[0], m)]
        first = min(tied, key=_tie_order)
        ranking.append(first)
        passed.remove(first)
    return ranking


def _us(measurement: Measurement) -> float:
    """Microseconds of a measurement that is known to have passed."""
    return measurement.latency_us if measurement.latency_us is not None else float("inf")


def by_latency(measurement: Measurement) -> tuple[float, str]:
    """Sort key: time, then the config's digest."""
    return _us(measurement), measurement.config.digest


def _tie_order(measurement: Measurement) -> tuple[bool, int, str]:
    return is_vendor(measurement.config), measurement.workspace_bytes, measurement.config.digest
