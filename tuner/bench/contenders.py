"""Contenders of a problem: kernels of decisions, and vendors' and peers' kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families_of, family
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, Family, without_fallbacks
from tuner.families.peers import Vendor
from tuner.hardware import Gpu
from tuner.measurement import Provenance, Regime
from tuner.problem import Problem
from tuner.selection.reader import Entry
from tuner.store.entry import is_vendor


class Role(StrEnum):
    """Role of a kernel in a comparison."""

    OWN = "own"
    """From a decision of the store."""
    UNTUNED = "untuned"
    """Own kernel that the cost model picks. It counts as own only if the problem is not tuned."""
    NAMED = "named"
    """Own kernel that was requested by its config. It is shown but does not enter a ratio."""
    PEER = "peer"


@dataclass(frozen=True)
class Contender:
    """One kernel of a row."""

    role: Role
    config: Config
    label: str = ""

    @property
    def name(self) -> str:
        """Its label, a peer's kernel name, or a family and the first digits of a config's
        digest.
        """
        if self.role is Role.PEER and not self.label:
            return str(self.config["kernel"])
        return self.label or f"{self.config.family} {self.config.digest[:6]}"


@dataclass(frozen=True)
class Lineup:
    """Contenders of one problem under one regime."""

    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()


def line_up(
    problem: Problem,
    gpu: Gpu,
    regime: Regime,
    entries: Iterable[Entry],
    against: Sequence[str],
    *,
    own: int,
    with_untuned: bool,
    named: Mapping[str, Config] | None = None,
) -> Lineup:
    """Line up the best own kernels of the decisions, the named ones, and the peers.

    Args:
        problem: problem to compute.
        gpu: GPU to measure on.
        regime: regime of the times. Its decisions come first, followed by those of other regimes.
        entries: decisions. Only measured ones that serve this GPU are used, its own first.
        against: peers, from `peers_named`.
        own: own kernels to take from each decision.
        with_untuned: time what the cost model picks beside what was tuned.
        named: further legal configs by name.
    """
    notes: list[str] = []
    cached = [
        entry
        for entry in entries
        if entry.problem == problem
        and gpu.shares_decisions(entry.gpu)
        and entry.provenance is Provenance.MEASURED
    ]
    cached.sort(key=lambda e: (e.gpu.identity != gpu.identity, e.regime != regime))
    lineup: dict[Config, None] = {}
    for entry in cached:
        lineup.update(dict.fromkeys(_best(entry, gpu, own, notes)))
    untuned = [] if lineup and not with_untuned else predicted(problem, gpu, own)
    if not lineup:
        notes.append("not tuned: own kernels are the cost model's first choices")
    roles = dict.fromkeys(lineup, Role.OWN)
    for config in untuned[: 1 if lineup else own]:
        roles.setdefault(config, Role.UNTUNED)
    contenders = [Contender(role, config) for config, role in roles.items()]
    contenders += [
        Contender(Role.NAMED, config, label)
        for label, config in (named or {}).items()
        if config not in roles
    ]
    rivals = [
        *_peers(problem, gpu, against, cached, notes),
        *_compiled_peers(problem, gpu, against, cached, notes),
    ]
    configs = {contender.config for contender in rivals}
    contenders = [contender for contender in contenders if contender.config not in configs]
    return Lineup((*contenders, *rivals), tuple(notes))


def _best(entry: Entry, gpu: Gpu, count: int, notes: list[str]) -> Iterator[Config]:
    """Winner if it is an own kernel, then the best own ones, if they are legal."""
    ranked = [m.config for m in entry.ranked if not is_vendor(m.config)]
    places = count
    for config in dict.fromkeys(ranked):
        if reason := _illegal(entry.problem, config, gpu):
            notes.append(f"{config.family} {config.digest[:6]} of the cache is left out: {reason}")
        elif places:
            places -= 1
            yield config


def _illegal(problem: Problem, config: Config, gpu: Gpu) -> str:
    """Reason why a stored config cannot serve in this version; empty if it can."""
    try:
        member = family(config.family)
        violations = member.violations(problem, config, gpu)
        if not violations:
            member.kernels(problem, config)
    except INCOMPATIBLE_CONFIG_ERRORS as exc:  # an older version of its family had other parameters
        return f"{type(exc).__name__}: {exc}"
    return "; ".join(violations)


def predicted(problem: Problem, gpu: Gpu, count: int) -> list[Config]:
    """First choices of the cost model over all own families, best first.

    Composite families do not have a space before their stages are tuned.
    """
    estimates: list[tuple[float, str, Config]] = []
    serving = [
        member
        for member in families_of(problem.op).values()
        if not (member.is_vendor or member.supports(problem, gpu) or member.stages(problem))
    ]
    for member in without_fallbacks(serving):
        space = member.space(problem, gpu)
        for config in member.seeds(problem, gpu, space, count) if space else ():
            estimates.append((member.predict_us(problem, config, gpu), config.digest, config))
    return [config for *_, config in sorted(estimates, key=lambda item: item[:2])][:count]


def peers_named(op: str, names: Sequence[str] = ()) -> list[str]:
    """Kernels of vendors and peers for an operation; all of them without names.

    A name includes its variants that are timed by default: ``flash3`` means ``flash3`` and
    ``flash3_splits``, ``cublaslt`` means ``cublaslt`` and ``cublaslt_search``.

    Raises:
        ConfigError: when a name is not known; lists the known ones.
    """
    vendors = _vendors(op)
    usual = [kernel for member in vendors for kernel in (*member.offered, *member.found())]
    if not names:
        return usual
    kernels = [k for member in vendors for k in (*member.offered, *member.on_request)]
    kernels += _compiled(op)
    peers: dict[str, None] = {}
    for name in names:
        matching = [k for k in kernels if k == name or (k.startswith(f"{name}_") and k in usual)]
        if not matching:
            raise ConfigError(f"'{name}' is not a peer of {op} (allowed: {', '.join(kernels)})")
        peers.update(dict.fromkeys(matching))
    return [kernel for kernel in kernels if kernel in peers]


def _peers(
    problem: Problem, gpu: Gpu, names: Sequence[str], cached: Sequence[Entry], notes: list[str]
) -> Iterator[Contender]:
    """Named peers that support the problem. For a library's list, the candidate that a sweep
    found fastest.
    """
    for member in _vendors(problem.op):
        for kernel in (*member.offered, *member.on_request):
            config = member.preferred(problem, kernel)
            if kernel not in names or member.violations(problem, config, gpu):
                continue
            if member.is_listed:
                if reason := member.lacks():
                    notes.append(f"{kernel} is left out: {reason}")
                    continue
                ranked = [m.config for entry in cached for m in entry.ranking]
                best = [c for c in ranked if c.family == member.name]
                if best:
                    config = best[0]
                else:
                    notes.append(f"{kernel} is its library's first choice: no sweep timed its list")
            yield Contender(Role.PEER, config)


def _compiled_peers(
    problem: Problem, gpu: Gpu, names: Sequence[str], cached: Sequence[Entry], notes: list[str]
) -> Iterator[Contender]:
    """Families of ours that are another language's peer: each by its best of the cache, else by
    what its estimate chooses.
    """
    for name, member in _compiled(problem.op).items():
        if name not in names:
            continue
        if reason := member.supports(problem, gpu) or member.lacks():
            notes.append(f"{name} is left out: {reason}")
            continue
        ranked = [m.config for entry in cached for m in entry.ranking]
        legal = [c for c in ranked if c.family == member.name and member.accepts(problem, c, gpu)]
        legal = legal or member.seeds(problem, gpu, member.space(problem, gpu), 1)
        if legal:
            yield Contender(Role.PEER, legal[0], name)


def _compiled(op: str) -> dict[str, Family]:
    """Own families of an operation that take part as peers if named, by the name used."""
    return {member.peer: member for member in families_of(op).values() if member.peer}


def _vendors(op: str) -> list[Vendor]:
    members: Iterable[Family] = families_of(op).values()
    return [member for member in members if isinstance(member, Vendor)]
