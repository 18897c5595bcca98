"""Kernels that answer a model's calls: their expected times beside PyTorch's and the peers'.

The order is the runtime's: a measured decision, a rule, a portfolio's choice, else PyTorch. All
kernels count as built. Under ``TUNER_BATCH_INVARIANT`` a kernel of the layer's class answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tuner import settings
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.by_operation import domain_of, rule_of
from tuner.families.peers import BESIDE_PYTORCH
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance
from tuner.problem import E4M3, AttentionProblem, Problem
from tuner.problem.engines import Engine
from tuner.problem.steps import ModelStep
from tuner.selection import engine_ratios, invariant
from tuner.selection.candidates import pytorchs_choice
from tuner.selection.engine_ratios import EngineRatios
from tuner.selection.peer_ratios import sizes_of
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import lookup
from tuner.selection.result import LookupResult
from tuner.store.entry import is_vendor, vendor_name

PYTORCH, ENGINE = "PyTorch", "the engine's"
UNKNOWN = "unknown"


class Rival(NamedTuple):
    """Another kernel of the same problem."""

    name: str
    us: float


@dataclass(frozen=True)
class Answering:
    """The kernel that answers a problem, and its rivals."""

    problem: Problem
    source: str
    """``measured``, ``predicted``, or ``unknown`` where PyTorch answers without a known time."""
    us: float | None = None
    config: Config | None = None
    """Config of the own kernel; None where PyTorch or a vendor's kernel answers."""
    by: str = PYTORCH
    """Family of the own kernel, or name of the vendor's."""
    pytorch: Rival | None = None
    """PyTorch's kernel, or the engine's own attention; None where its time is not known."""
    peer: Rival | None = None
    """The fastest kernel that PyTorch does not choose by itself; None where none was measured."""
    measured: Measurement | None = None
    """Measurement of the own kernel, whose artifacts the store records."""

    @property
    def kernels(self) -> dict[str, KernelSpec]:
        """Specs of the own kernel's parts; empty without one.

        Raises:
            ConfigError: when the config is not one of its family.
        """
        if self.config is None:
            return {}
        return dict(family(self.config.family).kernels(self.problem, self.config))


def answering(
    problem: Problem, gpu: Gpu, path: Path | None = None, engine: Engine | None = None
) -> Answering:
    """The kernel that answers a problem on a GPU, once it is built.

    Args:
        problem: problem of a call.
        gpu: GPU that it runs on.
        path: the store's SQLite file; None: the user's.
        engine: engine that makes the call; None: no engine.

    Raises:
        StoreError: when the store or a shipped file cannot be read.
    """
    mine = next((p for p in serving(shipped(), gpu) if p.op == problem.op), None)
    if settings.batch_invariant():
        return _invariant(problem, gpu, mine)
    answer = _answering(problem, gpu, path)
    if not isinstance(problem, AttentionProblem) or answer.us is None:
        return answer
    if mine is None:
        return answer
    if problem.is_paged and engine is not None and engine.has_attention:
        return _beside_engine(answer, problem, mine.engines)
    domain = domain_of(problem)
    ratios = mine.peers.get(domain, ()) if domain and answer.peer is None else ()
    peers = [
        Rival(str(ratio.config["kernel"]), answer.us / math.exp(ratio.expected(sizes_of(problem))))
        for ratio in ratios
    ]
    return replace(answer, peer=min(peers, key=lambda rival: rival.us, default=answer.peer))


def _invariant(problem: Problem, gpu: Gpu, portfolio: Portfolio | None) -> Answering:
    """A kernel of the class of the problem's layer. Over pages a single query has a mask."""
    if isinstance(problem, AttentionProblem) and problem.is_paged:
        problem = replace(problem, is_causal=True)
    selection = invariant.select(problem, gpu, None if rule_of(problem) else portfolio)
    if selection is None:
        return Answering(problem, UNKNOWN)
    us, config = selection.expected[0]
    return Answering(problem, "predicted", us, config, config.family)


def _beside_engine(
    found: Answering, problem: AttentionProblem, measured: EngineRatios
) -> Answering:
    """An answer beside the engine's own attention, in PyTorch's place, which answers where it is
    faster.
    """
    assert found.us is not None
    ratio = engine_ratios.ratio(problem, measured)
    rival = None if ratio is None else Rival(ENGINE, found.us * ratio)
    is_captured = problem.seqlen_q == 1  # engines capture the steps of decoding
    is_engines = engine_ratios.is_engines(problem, measured, is_captured=is_captured)
    if is_engines is None:
        is_engines = problem.dtype == E4M3 or engine_ratios.is_wide_chunk(problem)
    if not is_engines:
        return replace(found, pytorch=rival)
    us = found.us if rival is None else rival.us
    return Answering(problem, "predicted", us, None, ENGINE, rival)


def _answering(problem: Problem, gpu: Gpu, path: Path | None) -> Answering:
    """As `answering`, without an engine and ratios of peers."""
    answer = lookup(problem, gpu=gpu, path=path)
    if answer is not None and answer.entry.provenance is Provenance.MEASURED:
        return _decided(answer)
    rule = rule_of(problem)
    if rule is not None:
        selected = rule.select(problem, gpu) if rule.serves(problem, gpu) else None
        if selected is None:
            return Answering(problem, UNKNOWN)
        us, config = selected.expected[0]
        return Answering(problem, "predicted", us, config, config.family)
    if answer is None or (selection := answer.selected) is None:
        return Answering(problem, UNKNOWN)
    vendor = Rival(selection.vendor, selection.vendor_us) if selection.vendor else None
    if not is_vendor(selection.config):
        us, config = selection.expected_us, selection.config
        return Answering(problem, "predicted", us, config, config.family, vendor)
    return Answering(
        problem, "predicted", selection.expected_us, by=selection.vendor, pytorch=vendor
    )


def _decided(answer: LookupResult) -> Answering:
    """By a measured decision. Peers' kernels stand aside for the next one, as on most machines."""
    problem, entry = answer.entry.problem, answer.entry
    times = {
        name: run.latency_us for name, run in entry.vendors.items() if run.latency_us is not None
    }
    ours = [name for name in times if name not in BESIDE_PYTORCH]
    usual = pytorchs_choice(ours) if ours else ""
    pytorch = Rival(usual, times[usual]) if usual else None
    by_vendor = {name: us for name, us in times.items() if name in BESIDE_PYTORCH}
    fastest = min(by_vendor, key=by_vendor.__getitem__, default="")
    peer = Rival(fastest, by_vendor[fastest]) if fastest else None
    for own in answer.candidates:
        if not is_vendor(own.config):
            config = own.config
            return Answering(
                problem, "measured", own.latency_us, config, config.family, pytorch, peer, own
            )
        name = vendor_name(own.config)
        if not isinstance(problem, AttentionProblem) and pytorch:
            return Answering(problem, "measured", pytorch.us, None, usual, pytorch, peer)
        if name not in BESIDE_PYTORCH:
            return Answering(problem, "measured", own.latency_us, None, name, pytorch, peer)
    return Answering(problem, UNKNOWN, pytorch=pytorch, peer=peer)


class AnswerRow(NamedTuple):
    """A problem of a model."""

    answer: Answering
    share: float
    """Part of the calls' time, in the mean over the steps."""


@dataclass(frozen=True)
class ModelAnswers:
    """Answers to all calls of a model's steps."""

    steps: Sequence[ModelStep]
    answers: Mapping[Problem, Answering]

    @classmethod
    def of(
        cls,
        steps: Iterable[ModelStep],
        gpu: Gpu,
        path: Path | None = None,
        engine: Engine | None = None,
    ) -> ModelAnswers:
        """Look every problem of the steps up; arguments as of `answering`.

        Raises:
            StoreError: when the store or a shipped file cannot be read.
        """
        every = list(steps)
        problems = dict.fromkeys(problem for step in every for problem in step.calls)
        return cls(every, {problem: answering(problem, gpu, path, engine) for problem in problems})

    def rows(self) -> list[AnswerRow]:
        """Problems by their share of the time, the largest first; each step counts as much."""
        shares = dict.fromkeys(self.answers, 0.0)
        for step in self.steps:
            total = sum(self.times(step, PYTORCH).values()) or 1.0
            for problem, us in self.times(step, PYTORCH).items():
                shares[problem] += us / total / len(self.steps)
        rows = [AnswerRow(self.answers[problem], share) for problem, share in shares.items()]
        return sorted(rows, key=lambda row: -row.share)

    def gain(self, step: ModelStep, rival: str) -> float:
        """Time of a step's calls by a rival over that by the answering kernels.

        Args:
            step: one of `steps`.
            rival: ``PyTorch``, or ``peer`` for the faster one of PyTorch's kernel and a peer's. A
                call without the rival's time counts with the answering kernel's.
        """
        ours = sum(self.times(step, "").values())
        return sum(self.times(step, rival).values()) / ours if ours else 1.0

    def mean_gain(self, rival: str) -> float:
        """Geometric mean of `gain` over the steps."""
        logs = [math.log(self.gain(step, rival)) for step in self.steps]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    def times(self, step: ModelStep, rival: str) -> dict[Problem, float]:
        """Microseconds of a step by problem, by a rival or by the answering kernels."""
        latencies = {}
        for problem, count in step.calls.items():
            answer = self.answers[problem]
            if answer.us is not None:
                comparable = [answer.pytorch] if rival else []
                comparable += [answer.peer] if rival == "peer" else []
                times = [us.us for us in comparable if us is not None]
                latencies[problem] = count * min(times, default=answer.us)
        return latencies


def needed(rows: Iterable[AnswerRow]) -> Iterator[tuple[KernelSpec, float]]:
    """Kernels that rows need, each once, with their shares of the calls' time; the largest first.

    Raises:
        ConfigError: when a config is not one of its family.
    """
    shares: dict[KernelSpec, float] = {}
    for row in rows:
        for spec in row.answer.kernels.values():
            shares[spec] = shares.get(spec, 0.0) + row.share
    yield from sorted(shares.items(), key=lambda item: -item[1])
