"""Domains of a portfolio: sets of problems with equal compiled-in features and bottleneck.

Each domain has a few kernels, and time models that hold within it. fp16 and bf16 share a domain.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.families.domain import MAX_SIZE_FACTOR, Domain
from tuner.families.fused_attention.domains import (
    CAPPED,
    MAX_CAPPED,
    AttentionDomain,
    Mask,
    Phase,
)
from tuner.families.gemm.domains import (
    EPILOGUES,
    LAYOUTS,
    MAX_NARROW,
    GatedDomain,
    Gradient,
    ProductDomain,
    Rows,
)
from tuner.problem import Problem

__all__ = [
    "CAPPED",
    "DOMAINS",
    "EPILOGUES",
    "LAYOUTS",
    "MAX_CAPPED",
    "MAX_NARROW",
    "MAX_SIZE_FACTOR",
    "AnyDomain",
    "AttentionDomain",
    "Domain",
    "GatedDomain",
    "Gradient",
    "Mask",
    "Phase",
    "ProductDomain",
    "Rows",
    "domain_of",
]

AnyDomain = AttentionDomain | ProductDomain | GatedDomain
DOMAINS: Mapping[str, type[AnyDomain]] = {
    kind.op: kind for kind in (AttentionDomain, ProductDomain, GatedDomain)
}
"""The kind of domain of each operation that has portfolios."""


def domain_of(problem: Problem) -> AnyDomain | None:
    """The domain of a problem; None for problems without a portfolio."""
    kind = DOMAINS.get(problem.op)
    return None if kind is None else kind.holding(problem)
