"""Domains of the portfolios, and rules in their place, by operation.

A domain is a set of problems with equal compiled-in features and bottleneck. It has a few kernels,
and time models that hold within it. fp16 and bf16 share a domain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

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
from tuner.families.rule import Rule
from tuner.problem import (
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
)

__all__ = [
    "CAPPED",
    "DOMAINS",
    "EPILOGUES",
    "LAYOUTS",
    "MAX_CAPPED",
    "MAX_NARROW",
    "MAX_SIZE_FACTOR",
    "OPERATIONS",
    "WITHOUT_PORTFOLIO",
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
    "rule_of",
    "rules",
]

AnyDomain = AttentionDomain | ProductDomain | GatedDomain
DOMAINS: Mapping[str, type[AnyDomain]] = {
    kind.op: kind for kind in (AttentionDomain, ProductDomain, GatedDomain)
}
"""The kind of domain of each operation that has portfolios."""
WITHOUT_PORTFOLIO = (AttentionBackwardProblem.op, GroupedGemmProblem.op)
"""The operations that have a rule for all problems, and no portfolio."""
OPERATIONS = (*WITHOUT_PORTFOLIO, GemmProblem.op, AttentionProblem.op)
"""The operations that have a rule."""


def domain_of(problem: Problem) -> AnyDomain | None:
    """The domain of a problem; None for problems without a portfolio."""
    kind = DOMAINS.get(problem.op)
    return None if kind is None else kind.holding(problem)


def rule_of(problem: Problem) -> Rule | None:
    """The rule for a problem; None for problems that portfolios serve."""
    if isinstance(problem, GemmProblem) and problem.scales not in ("block", "row"):
        return None
    if isinstance(problem, AttentionProblem):
        if not (problem.value_dim or problem.is_wide):
            return None
        latent, values, wide = rules({problem.op})
        return latent if problem.is_latent else values if problem.value_dim else wide
    return next(rules({problem.op}), None)


def rules(operations: Collection[str] = OPERATIONS) -> Iterator[Rule]:
    """The rules of some operations; portfolios answer the others.

    A rule's module is imported when it is needed: other first calls do not load its families.
    """
    if AttentionBackwardProblem.op in operations:
        from tuner.families.fused_attention_backward import rule as gradients_rule

        yield gradients_rule
    if GroupedGemmProblem.op in operations:
        from tuner.families.grouped_gemm import rule as grouped_rule

        yield grouped_rule
    if GemmProblem.op in operations:
        from tuner.families.block_scaled_gemm import rule as scaled_rule

        yield scaled_rule
    if AttentionProblem.op in operations:
        from tuner.families.mla_decode import rule as latent_rule

        yield latent_rule
        from tuner.families.fused_attention import values_rule, wide_rule

        yield values_rule
        yield wide_rule
