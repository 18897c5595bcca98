"""Corrections of fitted rates to the calls of models.

The kernel in front of a fit's calls takes a few microseconds, and hides the early start of an own
kernel. In front of a model's small product stands a short kernel. There an own product takes longer
than its rates say. A library's product takes less than fitted where its sums are short, and more
where they are long. Few of a fit's products are small.

``scripts/bench corrections`` fits them to the layers of models that make selections, and judges
them at models left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.selection.domains import AnyDomain, ProductDomain

Rates = Mapping[str, float]

OWN: Mapping[str, Rates] = {"NVIDIA H200": {"launch": 0.739}}
"""Microseconds that are added to rates of own products of few rows, by GPU."""
LIBRARIES: Mapping[str, Rates] = {"NVIDIA H200": {"launch": -2.746, "depth": 0.4705}}
"""The same of the libraries' products. They hold for sums of 320 to 8192 elements."""


def corrected(rates: Rates, domain: AnyDomain, family: Family, gpu: Gpu) -> dict[str, float]:
    """Rates of a kernel at the calls of models.

    Args:
        rates: microseconds of each work term, as fitted.
        domain: domain of the kernel.
        family: its family.
        gpu: GPU of the measurements.
    """
    found = dict(rates)
    if isinstance(domain, ProductDomain) and domain.rows == "few":
        added = (LIBRARIES if family.is_vendor else OWN).get(gpu.name, {})
        for term, us in added.items():
            found[term] = found.get(term, 0.0) + us
    return found
