"""Serving of untuned shapes by a portfolio's proven kernels.

The portfolio selects by expected time (`tuner.selection.portfolio`). Kernel lists name the built
and proven kernels (`tuner.selection.kernels`). An own kernel is launched only with a proof, and
only if it is expected to be faster than the vendor's. Otherwise the vendor's kernel answers: by
PyTorch's own call, if PyTorch would choose that kernel.

A GPU without a portfolio of its own uses another GPU's, rescaled
(`tuner.selection.portfolio.serving`). A kernel's proof holds on both. Grouped products, products
with factors of blocks and gradients of attention have a rule in the place of a portfolio
(`tuner.selection.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend

from tuner.base import document
from tuner.config import Config
from tuner.errors import StoreBusyError, TunerError
from tuner.families import family
from tuner.families.fused_attention_backward import rule as backward
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Status
from tuner.problem import AttentionBackwardProblem, AttentionProblem, Problem
from tuner.runtime.call import counters, devices, native
from tuner.runtime.call.plan import Plan, Posed, plan_of
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.selection.choice import Selection
from tuner.selection.domains import domain_of
from tuner.selection.kernels import lists
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.rules import rule_of

if TYPE_CHECKING:
    from tuner.families.rule import RuleSelection
    from tuner.runtime.call.benchmark import TimedChoice

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash2",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
FAULTS = (TunerError, *document.FAULTS)
"""Errors of files that a call is looked up in; no call suffers from them."""
_MAX_TEXT = 300
#: Lengths of the small tensors for which PyTorch's choice is read.
_ASKED_LENGTHS = (128, 256)


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for a problem, and the plan that runs here."""

    selection: Selection | RuleSelection
    plan: Plan | Refusal
    """A refusal is final (`Kind.PORTFOLIO`, `Kind.TIMED`), or says which kernel is missing
    (`Kind.UNSERVED`), or that another process is timing (`Kind.BUSY`)."""


def portfolios() -> Sequence[Portfolio]:
    """Portfolios that serve: the shipped ones."""
    return shipped()


def knows(problem: Problem, gpu: Gpu) -> bool:
    """True when a portfolio that serves on this GPU has the problem's domain, or a rule
    has kernels for it.

    Raises:
        StoreError: when a shipped portfolio is damaged.
    """
    if rule := rule_of(problem):
        return rule.serves(problem, gpu)
    mine = _portfolio_of(problem, gpu)
    return mine is not None and mine.models_of(domain_of(problem)) is not None


def has_proven(problem: Problem, gpu: Gpu) -> bool:
    """True when an own kernel that serves such problems is proven on this machine.

    Args:
        problem: a small problem of a portfolio's domain, or of a kind of gradient.
        gpu: GPU that it runs on.
    """
    try:
        if isinstance(problem, AttentionBackwardProblem):
            kind = backward.kind_of(problem)
            config = None if kind is None else backward.KERNELS.get(kind)
            configs = [] if config is None else [config]
        else:
            mine = _portfolio_of(problem, gpu)
            models = None if mine is None else mine.models_of(domain_of(problem))
            known = () if models is None else models.candidates
            configs = [one.config for one in known if one.family is not None and not one.is_vendor]
        return any(not isinstance(_own(problem, gpu, one, (), ()), str) for one in configs)
    except FAULTS as exc:
        counters.count_error(damaged(problem, exc).reason)
        return False


def damaged(problem: Problem, exc: Exception) -> Refusal:
    """Refusal of a call for which a file of the tuner cannot be used."""
    text = " ".join(f"{type(exc).__name__}: {exc}".split())
    return Refusal(Kind.FILE, f"{problem.label()}: {text[:_MAX_TEXT]}")


def _portfolio_of(problem: Problem, gpu: Gpu) -> Portfolio | None:
    return next(iter(serving((one for one in portfolios() if one.op == problem.op), gpu)), None)


def choose(
    posed: Posed,
    gpu: Gpu,
    device: int,
    withdrawn: Collection[Config],
    absent: Collection[str],
) -> Choice | None:
    """A portfolio's choice for a problem; None when no portfolio has a candidate for it.

    Args:
        posed: an untuned problem, and its strides.
        gpu: GPU that it runs on.
        device: index of the current device.
        withdrawn: configs that this process must not launch for the problem.
        absent: keys of artifacts that it must not launch.

    Raises:
        StoreError: when a shipped portfolio is damaged.
    """
    problem = posed.problem
    selection: Selection | RuleSelection | None
    if rule := rule_of(problem):
        selection = rule.select(problem, gpu)
    else:
        mine = _portfolio_of(problem, gpu)
        selection = None if mine is None else mine.select(problem)
    if selection is None:
        return None

    def made(config: Config, artifacts: dict[str, str]) -> Plan | str:
        """The plan of a selected config, or the reason why it has none."""
        predicted = Measurement(
            problem,
            config,
            gpu,
            selection.regime,
            Status.OK,
            Provenance.PREDICTED,
            artifacts=artifacts,
        )
        found = plan_of(posed, predicted, device)
        return found.reason if isinstance(found, Refusal) else found

    if posed.run is not None and isinstance(selection, Selection):
        timed = _timed(posed, gpu, selection, made, withdrawn, absent)
        if timed is not None:
            return timed
    reasons: list[str] = []
    for _, config in selection.own():
        is_vendor = family(config.family).is_vendor
        found = {} if is_vendor else _own(problem, gpu, config, withdrawn, absent)
        plan = found if isinstance(found, str) else made(config, found)
        if isinstance(plan, Plan):
            return Choice(selection, plan)
        reasons.append(plan)
    if reasons:
        why = "; ".join(dict.fromkeys(reasons))
        return Choice(selection, Refusal(Kind.UNSERVED, f"{problem.label()}: {why}"))
    text = f"{problem.label()}: {selection.source}"
    if not isinstance(selection, Selection):
        return Choice(selection, Refusal(Kind.PORTFOLIO, text))
    # For products a call cannot choose a library: PyTorch's own call is the only vendor kernel.
    is_pytorchs = not isinstance(problem, AttentionProblem) or (
        selection.vendor == pytorchs(problem, device)
    )
    if is_pytorchs or selection.config in withdrawn:
        return Choice(selection, Refusal(Kind.PORTFOLIO, text))
    plan = made(selection.config, {})
    if isinstance(plan, Plan):
        return Choice(selection, plan)
    text += f" ({selection.vendor} cannot be called: {plan})"
    return Choice(selection, Refusal(Kind.PORTFOLIO, text))


def _timed(
    posed: Posed,
    gpu: Gpu,
    selection: Selection,
    made: Callable[[Config, dict[str, str]], Plan | str],
    withdrawn: Collection[Config],
    absent: Collection[str],
) -> Choice | None:
    """The fastest candidate by measurement on this machine, timed now unless a choice holds; None
    when nothing can be timed.
    """
    from tuner.runtime.call import benchmark  # only programs that time their calls need it

    problem, run = posed.problem, posed.run
    assert run is not None
    ranked = [config for _, config in selection.ranked()]

    def planned(config: Config) -> Plan | None:
        """The plan of a proven candidate; None where it has none."""
        found = _own(problem, gpu, config, withdrawn, absent)
        plan = found if isinstance(found, str) else made(config, found)
        return plan if isinstance(plan, Plan) else None

    ended: TimedChoice | None = None
    timed = benchmark.journal.find(problem, gpu)
    if timed is not None and any(map(planned, timed.untimed(ranked))):
        timed, ended = None, timed
    if timed is None:
        plans: dict[Config, Plan] = {}
        for config in ranked:
            if (plan := planned(config)) is not None:
                plans[config] = plan
            if len(plans) == benchmark.KERNELS:
                break
        if not plans:
            return None
        is_cold = selection.regime.l2 == "cold"
        decide = benchmark.journal.decide
        try:
            timed = decide(problem, gpu, plans, run, is_cold=is_cold, ended=ended)
        except StoreBusyError:
            return Choice(selection, Refusal(Kind.BUSY, problem.label()))
    if timed is None:
        return None
    if timed.config is None:
        text = f"{problem.label()}: {timed.pytorch_us:.1f} us"
        return Choice(selection, Refusal(Kind.TIMED, text))
    chosen = planned(timed.config)
    return None if chosen is None else Choice(selection, chosen)


def _own(
    problem: Problem,
    gpu: Gpu,
    config: Config,
    withdrawn: Collection[Config],
    absent: Collection[str],
) -> dict[str, str] | str:
    """The proven artifacts of an own config, or the reason why it is not served."""
    if config in withdrawn:
        return f"{config.family} failed in this process"
    try:
        specs = family(config.family).kernels(problem, config)
    except TunerError as exc:
        return str(exc)
    found = lists.proven(specs, gpu.compute_capability)
    if not isinstance(found, str) and any(key in absent for key in found.values()):
        return f"{config.family} is not compiled on every rank"
    return found


def pytorchs(problem: Problem, device: int) -> str:
    """Name of the vendor's kernel that PyTorch would choose; empty for an unknown one.

    PyTorch's choice is read for small tensors. It depends on types, heads, masks and strides; the
    lengths matter only by being one or equal.

    Args:
        problem: problem of attention.
        device: index of the device.
    """
    if not isinstance(problem, AttentionProblem) or problem.extras:
        return ""
    lengths = problem.seqlen_q, problem.seqlen_kv
    short, long = _ASKED_LENGTHS
    asked = [n if n == 1 else long if n == max(lengths) else short for n in lengths]
    small = replace(problem, batch=1, seqlen_q=asked[0], seqlen_kv=asked[1])
    return _pytorchs(small, device)


@lru_cache(1 << 10)
def _pytorchs(problem: AttentionProblem, device: int) -> str:
    place = torch.device(devices.TYPE, device)
    query, key, value = (
        torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device=place
        )
        for operand in problem.operands[:3]
    )
    is_grouped = problem.heads_q != problem.heads_kv
    chosen = native.call(
        torch._fused_sdp_choice,
        *(query, key, value, None, 0.0, problem.is_causal),
        enable_gqa=is_grouped,
    )
    return _BACKENDS.get(int(chosen), "")
