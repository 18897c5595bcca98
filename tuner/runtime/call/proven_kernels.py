"""Serving of untuned shapes by a portfolio's proven kernels.

The portfolio selects by expected time (`tuner.selection.portfolio`). Kernel lists name the built
and proven kernels (`tuner.selection.kernels`). An own kernel is launched only with a proof, and
only if it is expected to be faster than the vendor's. Otherwise the vendor's kernel answers: by
PyTorch's own call, if PyTorch would choose that kernel.

A GPU without a portfolio of its own uses another GPU's, rescaled
(`tuner.selection.portfolio.serving`). A kernel's proof holds on both. Grouped products, products
with factors of blocks and gradients of attention have a rule in the place of a portfolio
(`tuner.families.by_operation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend

from tuner.base import document
from tuner.compile import background
from tuner.config import Config
from tuner.errors import StoreBusyError, TunerError
from tuner.families import family
from tuner.families.by_operation import domain_of, rule_of
from tuner.families.rule import RuleSelection
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.runtime.call import counters, devices, lengths, native
from tuner.runtime.call.plan import Excluded, Plan, Posed, plan_of
from tuner.runtime.call.refusal import Kind, Refusal
from tuner.selection import engine_ratios, invariant
from tuner.selection.choice import Selection
from tuner.selection.kernels import Lists, lists
from tuner.selection.portfolio import Portfolio, serving, shipped

if TYPE_CHECKING:
    from tuner.families.target import Target

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash2",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
FAULTS = (TunerError, *document.FAULTS)
"""Errors of files that a call is looked up in; no call suffers from them."""
_MAX_TEXT = 300
_missing = Lists()
"""Kernel lists as the thread that builds missing kernels reads them."""
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


@lru_cache(1 << 12)
def is_engines(problem: AttentionProblem, gpu: Gpu, is_captured: bool) -> bool | None:
    """True if an engine's own kernel answers a call over pages, by measured ratios; None where its
    kind was not measured. Arguments are as of `engine_ratios.is_engines`.

    Raises:
        StoreError: when a shipped portfolio is damaged.
    """
    mine = _portfolio_of(problem, gpu)
    return (
        None
        if mine is None
        else engine_ratios.is_engines(problem, mine.engines, is_captured=is_captured)
    )


def has_proven(problem: Problem, gpu: Gpu) -> bool:
    """True when an own kernel that serves such problems is proven on this machine.

    Args:
        problem: a small problem of a portfolio's domain.
        gpu: GPU that it runs on.
    """
    try:
        mine = _portfolio_of(problem, gpu)
        models = None if mine is None else mine.models_of(domain_of(problem))
        candidates = () if models is None else models.candidates
        configs = [k.config for k in candidates if k.family is not None and not k.is_vendor]
        return any(isinstance(_artifacts(problem, gpu, c), dict) for c in configs)
    except FAULTS as exc:
        counters.count_error(damaged(problem, exc).reason)
        return False


def is_proven(target: Target, gpu: Gpu) -> bool:
    """True when a rule's kernel is proven on this machine."""
    try:
        return isinstance(_artifacts(target.problem, gpu, target.config), dict)
    except FAULTS as exc:
        counters.count_error(damaged(target.problem, exc).reason)
        return False


def damaged(problem: Problem, exc: Exception) -> Refusal:
    """Refusal of a call for which a file of the tuner cannot be used."""
    text = " ".join(f"{type(exc).__name__}: {exc}".split())
    return Refusal(Kind.FILE, f"{problem.label()}: {text[:_MAX_TEXT]}")


def _portfolio_of(problem: Problem, gpu: Gpu) -> Portfolio | None:
    return next(iter(serving((p for p in portfolios() if p.op == problem.op), gpu)), None)


@dataclass(frozen=True)
class _Candidates:
    """A selection's configs as plans of this machine."""

    posed: Posed
    gpu: Gpu
    device: int
    excluded: Excluded
    selection: Selection | RuleSelection

    def plan(self, config: Config) -> Plan | Refusal:
        """The plan of a config, or the reason why it has none. Own kernels need a proof."""
        problem, excluded = self.posed.problem, self.excluded
        is_vendor = family(config.family).is_vendor
        artifacts = {} if is_vendor else _artifacts(problem, self.gpu, config)
        if isinstance(artifacts, Refusal):
            return excluded.refusal(config, ()) or artifacts
        predicted = Measurement(
            problem,
            config,
            self.gpu,
            self.selection.regime,
            Status.OK,
            Provenance.PREDICTED,
            artifacts=artifacts,
        )
        refusal = excluded.refusal(config, artifacts.values())
        return refusal or plan_of(self.posed, predicted, self.device)


def choose(posed: Posed, gpu: Gpu, device: int, excluded: Excluded) -> Choice | None:
    """A portfolio's choice for a problem; None when no portfolio has a candidate for it.

    Args:
        posed: an untuned problem, and its strides.
        gpu: GPU that it runs on.
        device: index of the current device.
        excluded: kernels that must not be launched.

    Raises:
        StoreError: when a shipped portfolio is damaged.
    """
    problem = posed.problem
    selection: Selection | RuleSelection | None = None
    if not knows(problem, gpu):
        return _without_selection(posed, gpu, device, excluded)
    if rule := rule_of(problem):
        selection = rule.select(problem, gpu)
    elif mine := _portfolio_of(problem, gpu):
        selection = mine.select(posed.estimated or problem)
    if selection is None:
        return _without_selection(posed, gpu, device, excluded)
    candidates = _Candidates(posed, gpu, device, excluded, selection)
    return Choice(selection, _timed(candidates) or _expected(candidates))


def _without_selection(posed: Posed, gpu: Gpu, device: int, excluded: Excluded) -> Choice | None:
    """The fastest of PyTorch's and the libraries' kernels for a product without a selection; None
    unless it is timed. Such are products of e4m3 with a factor each.
    """
    if not isinstance(posed.problem, GemmProblem):
        return None
    selection = RuleSelection((), Regime(), ())
    plan = _timed(_Candidates(posed, gpu, device, excluded, selection))
    return None if plan is None else Choice(selection, plan)


def choose_invariant(posed: Posed, gpu: Gpu, device: int, excluded: Excluded) -> Plan | Refusal:
    """The fastest kernel of the class of a problem's layer that runs here, or why there is none.

    Args:
        posed: problem of a call, and its strides.
        gpu: GPU that it runs on.
        device: index of the current device.
        excluded: kernels that must not be launched.

    Raises:
        StoreError: when a shipped portfolio is damaged.
    """
    problem = posed.problem
    portfolio = None if rule_of(problem) else _portfolio_of(problem, gpu)
    selection = invariant.select(problem, gpu, portfolio)
    if selection is None:
        return Refusal(Kind.INVARIANT, f"{problem.label()}: no kernel of its layer's class")
    candidates = _Candidates(posed, gpu, device, excluded, selection)
    reasons: list[str] = []
    for _, config in selection.own():
        artifacts = _artifacts(problem, gpu, config)
        proven = [] if isinstance(artifacts, Refusal) else list(artifacts.values())
        if variant := lists.variant(proven):
            reasons.append(f"{config.family}: {variant}")
            continue
        plan = candidates.plan(config)
        if isinstance(plan, Plan):
            return plan
        reasons.append(_text(plan))
    why = "; ".join(dict.fromkeys(reasons))
    return Refusal(Kind.UNSERVED, f"{problem.label()}: {why}")


def _expected(candidates: _Candidates) -> Plan | Refusal:
    """The first kernel by expected time that runs here. A vendor's is called where PyTorch would
    choose another one.
    """
    selection, problem = candidates.selection, candidates.posed.problem
    reasons: list[str] = []
    for config in _peers(selection, problem):
        plan = candidates.plan(config)
        if isinstance(plan, Plan):
            return plan
    for _, config in selection.own():
        plan = candidates.plan(config)
        if isinstance(plan, Plan):
            return plan
        if not reasons:
            _request(candidates, config)
        reasons.append(_text(plan))
    if reasons:
        why = "; ".join(dict.fromkeys(reasons))
        return Refusal(Kind.UNSERVED, f"{problem.label()}: {why}")
    text = f"{problem.label()}: {selection.source}"
    # For products a call cannot choose a library: PyTorch's own call is the only vendor kernel.
    if (
        isinstance(selection, Selection)
        and isinstance(problem, AttentionProblem)
        and selection.vendor != pytorchs(problem, candidates.device)
        and selection.config not in candidates.excluded.configs
    ):
        plan = candidates.plan(selection.config)
        if isinstance(plan, Plan):
            return plan
        text += f" ({selection.vendor} cannot be called: {_text(plan)})"
    return Refusal(Kind.PORTFOLIO, text)


def _peers(selection: Selection | RuleSelection, problem: Problem) -> list[Config]:
    """Peers' kernels that are expected to be faster, where they may answer.

    None of ranks that agreed, which may have other peers; and none over a dense cache that grows:
    each of its lengths would be looked up, since peers' plans hold for one length.
    """
    if not isinstance(selection, Selection) or not isinstance(problem, AttentionProblem):
        return []
    is_dense = not (problem.is_varlen or problem.is_paged)
    if lists.is_agreed or (is_dense and lengths.grows(problem)):
        return []
    return [config for _, config in selection.peers]


def _request(candidates: _Candidates, config: Config) -> None:
    """Have the kernels of a config built in the background, if proofs of them ship.

    Ranks of a distributed program build nothing before they agree: one would take a kernel up
    before the others.
    """
    problem, gpu = candidates.posed.problem, candidates.gpu
    is_apart = devices.ranks() > 1 and not lists.is_agreed
    if config in candidates.excluded.configs or is_apart:
        return
    with contextlib.suppress(TunerError):
        specs = family(config.family).kernels(problem, config)
        background.request(problem, gpu.name, lambda: _missing.lacks(specs, gpu.compute_capability))


def _text(refusal: Refusal) -> str:
    """The reason for people; of one candidate without its kind."""
    return refusal.detail if refusal.kind is Kind.UNAVAILABLE else refusal.reason


def _timed(candidates: _Candidates) -> Plan | Refusal | None:
    """The fastest candidate by measurement on this machine, timed now unless a choice holds; None
    when nothing can be timed. Ranks that agreed would measure different times.
    """
    selection, posed = candidates.selection, candidates.posed
    is_ruled = isinstance(selection, RuleSelection) and bool(selection.expected)
    if posed.run is None or lists.is_agreed or is_ruled:
        return None
    # Only programs that time their calls need these.
    from tuner.runtime.call import benchmark, peer_contenders

    own = selection.ranked() if isinstance(selection, Selection) else selection.own()
    ranked = [config for _, config in own]

    def planned(config: Config) -> Plan | None:
        """The plan of a proven candidate; None where it has none."""
        plan = candidates.plan(config)
        return plan if isinstance(plan, Plan) else None

    place = posed.problem, candidates.gpu
    timed, ended = benchmark.journal.find(*place), None
    if timed is not None and any(map(planned, timed.untimed(ranked))):
        timed, ended = None, timed
    if timed is None:
        served = ((config, plan) for config in ranked if (plan := planned(config)) is not None)
        plans = dict(islice(served, benchmark.KERNELS))
        for config in peer_contenders.contending(*place):
            plan = planned(config)
            if plan is not None and peer_contenders.agrees(place[0], plan, posed.run):
                plans[config] = plan
        if not plans:
            return None
        is_cold = selection.regime.l2 == "cold"
        try:
            timed = benchmark.journal.decide(*place, plans, posed.run, is_cold=is_cold, ended=ended)
        except StoreBusyError:
            return Refusal(Kind.BUSY, posed.problem.label())
    if timed is None:
        return None
    if timed.config is None:
        return Refusal(Kind.TIMED, f"{posed.problem.label()}: {timed.pytorch_us:.1f} us")
    return planned(timed.config)


def _artifacts(problem: Problem, gpu: Gpu, config: Config) -> dict[str, str] | Refusal:
    """The proven artifacts of an own config, or the reason why it is not served."""
    try:
        specs = family(config.family).kernels(problem, config)
    except TunerError as exc:
        return Refusal(Kind.UNAVAILABLE, str(exc))
    proven = lists.proven(specs, gpu.compute_capability)
    return Refusal(Kind.UNAVAILABLE, proven) if isinstance(proven, str) else proven


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
    sizes = [n if n == 1 else long if n == max(lengths) else short for n in lengths]
    small = replace(problem, batch=1, seqlen_q=sizes[0], seqlen_kv=sizes[1])
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
    kernel = native.call(
        torch._fused_sdp_choice,
        *(query, key, value, None, 0.0, problem.is_causal),
        enable_gqa=is_grouped,
    )
    return _BACKENDS.get(int(kernel), "")
