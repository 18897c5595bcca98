"""Corrections of fitted rates to the calls of models.

The kernel in front of a fit's calls takes a few microseconds, and hides the early start of an own
kernel. In front of a model's small call stands a short kernel. There an own product of up to 256
rows or 128 columns takes longer than its rates say, where its kernel is launched early.

A library's product of few rows takes less than fitted where its sums are short, and more where they
are long. Few of a fit's products are small.

``tuner develop fit corrections`` fits them to calls of models that make selections, and judges
them at models left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.families.base import Family
from tuner.families.by_operation import AnyDomain, AttentionDomain, ProductDomain
from tuner.hardware import Gpu

Rates = Mapping[str, float]

ACTIVATED = "activated"
"""Name of activated products of many rows."""
OWN: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": {"few": 0.596, "narrow": 0.733, "tall": 0.733, ACTIVATED: 2.0}
}
"""Microseconds that are added to launches of own products, by GPU and rows. At 44 activated calls
of many rows any value from 1 to 3.5 leaves no loss to PyTorch
(``tests/assets/fits/corrections.jsonl.gz``, those of the present kernels)."""
LIBRARIES: Mapping[str, Rates] = {"NVIDIA H200": {"launch": -2.241, "depth": 0.3653}}
"""Microseconds that are added to rates of the libraries' products of few rows. They hold for sums
of 320 to 8192 elements."""
MARGINS: Mapping[str, Mapping[AnyDomain, float]] = {
    "NVIDIA H200": {AttentionDomain(96, "full", "one"): 0.0}
}
"""Margins (`DomainModels.margin`) that models' calls need with these corrections, by GPU. Domains
with measured ratios need none (`tuner.selection.ratios`)."""


def corrected(
    rates: Rates, domain: AnyDomain, family: Family, gpu: Gpu, is_plain: bool = False
) -> dict[str, float]:
    """Rates of a kernel at the calls of models.

    Args:
        rates: microseconds of each work term, as fitted.
        domain: domain of the kernel.
        family: its family.
        gpu: GPU of the measurements.
        is_plain: True if calls never launch it early (`Family.served`).
    """
    times = dict(rates)
    if is_plain:
        return times
    for term, us in _added(domain, family, gpu.name).items():
        times[term] = times.get(term, 0.0) + us
    return times


def _added(domain: AnyDomain, family: Family, gpu: str) -> Rates:
    if not isinstance(domain, ProductDomain) or domain.gradient:
        return {}
    if family.is_vendor:
        return LIBRARIES.get(gpu, {}) if domain.rows == "few" else {}
    is_wide = domain.rows == "wide" and domain.without_activation is not None
    us = OWN.get(gpu, {}).get(ACTIVATED if is_wide else domain.rows)
    return {} if us is None else {"launch": us}


def margins(domain: AnyDomain, gpu: Gpu) -> tuple[float, ...] | None:
    """The margin of a domain at the calls of models; None where it is left to the fit."""
    margin = MARGINS.get(gpu.name, {}).get(domain)
    return None if margin is None else (margin,)
