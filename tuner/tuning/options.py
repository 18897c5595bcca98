"""Options of a sweep: what it measures, and when it ends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tuner.errors import ConfigError
from tuner.families.base import Family
from tuner.measurement import Provenance
from tuner.search.study import effort, sampler_name

Catalogue = Callable[[str], Mapping[str, Family]]
"""Function that returns the families of an operation by name."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep: what it measures, and when it ends."""

    families: tuple[str, ...] = ()
    """Own families to try; empty means all. Vendors' kernels are always measured beside them."""
    effort: str = "quick"
    trials: int | None = None
    """Number of groups of candidates, instead of the effort's. Groups in the store count."""
    time_limit_s: float | None = None
    """Seconds for the whole sweep. The search ends early enough for the final pass."""
    max_workspace: int | None = None
    """Bytes that a candidate may use beside its operands."""
    seed: int = 0
    sampler: str | None = None
    compiled_only: bool = False
    """True to evaluate only candidates with compiled kernels, so that the GPU never waits for a
    compiler."""

    def __post_init__(self) -> None:
        effort(self.effort)
        sampler_name(self.sampler)
        for name, value, least in (
            ("trials", self.trials, 1),
            ("max-workspace", self.max_workspace, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is out of range (allowed: {least} or more)")
        limit = self.time_limit_s
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise ConfigError(f"time-limit={limit} is out of range (allowed: above 0 seconds)")

    def digest(self, provenance: Provenance) -> str:
        """Digest, equal for sweeps that would measure the same."""
        facts = {
            **asdict(self),
            "families": sorted(self.families),
            "sampler": sampler_name(self.sampler),
            "provenance": provenance.value,
        }
        if not self.compiled_only:  # as before this option existed
            del facts["compiled_only"]
        if provenance is Provenance.REPLAYED:  # older replays ranked times of two passes together
            facts["passes"] = 1
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def check_families(names: Sequence[str], op: str, known: Mapping[str, Family]) -> None:
    """Check that every named family serves an operation.

    Raises:
        ConfigError: when one does not; names those that do.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"family '{name}' does not serve {op} (allowed: {', '.join(known)})")
