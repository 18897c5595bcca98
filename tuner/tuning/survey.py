"""Surveys: measurements of a random sample of a problem's space, drawn before any measurement.

A sweep measures promising candidates, so its recording is biased towards the model that chose them.
A survey draws kernels at random, by a hash of the seed and of the compiled source. The same command
draws the same kernels, and problems that share kernels draw the same ones.

`pooled` instead takes the kernels that a portfolio may be made of (`tuner.search.pool`), at
problems that `tuner.search.sampled_problems` draws from models. Each problem has one recording,
written after every request. Its measurements from this environment are not repeated.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from tuner.config import Config, Value
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families_of
from tuner.families.base import Family, group_by_kernels, without_fallbacks
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.runners import recording, recording_archive
from tuner.runners.base import Runner
from tuner.runners.recording import Recording
from tuner.search import pool, sampled_problems
from tuner.selection.portfolio import Portfolio
from tuner.tuning.options import Catalogue, check_families
from tuner.tuning.progress import Interruption

NO_GPU = "no GPU found: a survey is measured on a GPU; --compile compiles its kernels without one"
REQUEST_KERNELS = 4
"""Kernels that are timed in one request: as many as a translation unit holds. Each request computes
the references of its problem again."""
POOL_REQUEST_KERNELS = 64
"""The same for a portfolio's kernels, which are compiled in advance."""


@dataclass(frozen=True)
class SurveySize:
    """Size of the sample of every problem's space."""

    kernels: int = 120
    """Maximum distinct kernels of a problem, divided among its families by the size of their
    space."""
    variants: int = 4
    """Maximum run-time variants of each kernel."""
    seed: int = 0
    families: tuple[str, ...] = ()
    """Own families; empty: all competing ones that are not composites."""

    def __post_init__(self) -> None:
        for name in ("kernels", "variants"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value} is out of range (allowed: 1 or more)")

    def rank(self, text: str) -> str:
        """Random rank of a kernel or a variant; the lowest ranks are drawn."""
        return hashlib.sha256(f"{self.seed}:{text}".encode()).hexdigest()


@dataclass(frozen=True)
class Sample:
    """Sample of one problem."""

    problem: Problem
    groups: tuple[tuple[Config, ...], ...]
    """Groups of candidates that share a kernel, by family."""
    spaces: Mapping[str, tuple[int, int]]
    """Number of kernels and candidates in each family's whole space."""

    @property
    def candidates(self) -> int:
        return sum(map(len, self.groups))

    def drawn(self, family: str) -> int:
        """Number of drawn kernels of a family."""
        return sum(group[0].family == family for group in self.groups)

    def values(self, family: str) -> dict[str, dict[Value, int]]:
        """Number of drawn kernels by value of each compile-time parameter."""
        counts: dict[str, Counter[Value]] = {}
        for group in self.groups:
            params = group[0].params if group[0].family == family else {}
            for name, value in params.items():
                if all(config.get(name) == value for config in group):
                    counts.setdefault(name, Counter())[value] += 1
        kinds = sorted(name for name, values in counts.items() if len(values) > 1)
        return {
            name: dict(sorted(counts[name].items(), key=lambda item: (len(f"{item[0]}"), item)))
            for name in kinds
        }


def draw(problem: Problem, gpu: Gpu, how: SurveySize, catalogue: Catalogue = families_of) -> Sample:
    """Draw the kernels and variants of a problem for a survey. Does not measure.

    Raises:
        ConfigError: when no family serves the problem, or a named one does not.
    """
    members = catalogue(problem.op)
    check_families(how.families, problem.op, members)
    serving = [
        family
        for family in members.values()
        if not family.is_vendor and not family.stages(problem) and not family.supports(problem, gpu)
    ]
    named = [family for family in serving if family.name in how.families]
    families = named if how.families else without_fallbacks(serving)
    spaces = {family: family.space(problem, gpu) for family in families}
    groups = {family: group_by_kernels(family, space) for family, space in spaces.items()}
    sizes = {family.name: len(of_family) for family, of_family in groups.items()}
    if not sum(sizes.values()):
        raise ConfigError(f"no family has a kernel to draw for {problem.op} {problem.label()}")
    drawn: list[tuple[Config, ...]] = []
    for family, share in zip(groups, _shares(list(sizes.values()), how.kernels), strict=True):
        ranked = sorted(groups[family], key=lambda group: how.rank(_kernel(family, problem, group)))
        for group in ranked[:share]:
            variants = sorted(group, key=lambda config: how.rank(config.digest))[: how.variants]
            drawn.append(tuple(variants))
    counts = {family.name: (sizes[family.name], len(space)) for family, space in spaces.items()}
    return Sample(problem, tuple(drawn), counts)


def pooled(
    op: str, gpu: Gpu, portfolio: Portfolio | None, only: Sequence[str] = ()
) -> list[Sample]:
    """Kernels that a portfolio may be made of, and PyTorch's, for problems of public models.

    The first problem of each domain comes before the second of each, and so on.

    Args:
        op: operation.
        gpu: GPU to measure on.
        portfolio: shipped portfolio of the operation and GPU, or of another GPU of its compute
            capability.
        only: texts that a domain's name must all contain.
    """
    by_domain: list[list[Sample]] = []
    for domain, problems in sampled_problems.problems(op).items():
        if not all(text in domain.label() for text in only):
            continue
        by_domain.append([])
        for problem, groups in pool.sample(domain, problems, gpu, portfolio).items():
            by_domain[-1].append(Sample(problem, tuple(map(tuple, groups)), _sizes(groups)))
    turns = zip_longest(*by_domain)
    return [sample for turn in turns for sample in turn if sample is not None]


def listed(
    problems: Sequence[Problem],
    gpu: Gpu,
    portfolio: Portfolio,
    further: Callable[[Problem], Sequence[Config]] = lambda problem: (),
) -> list[Sample]:
    """The kernels that serve some problems by a portfolio, and PyTorch's.

    Args:
        problems: problems to time.
        gpu: GPU to measure on.
        portfolio: portfolio of the operation that serves there.
        further: kernels that may join those of a problem.

    Raises:
        ConfigError: when a problem's domain has no kernels.
    """
    samples = []
    for problem in problems:
        groups = pool.of_portfolio(problem, gpu, portfolio, further=further(problem))
        if not groups:
            raise ConfigError(f"no portfolio has kernels for {problem.op} {problem.label()}")
        samples.append(Sample(problem, tuple(map(tuple, groups)), _sizes(groups)))
    return samples


def _sizes(groups: Sequence[Sequence[Config]]) -> dict[str, tuple[int, int]]:
    """Number of kernels and candidates of each family."""
    sizes: dict[str, tuple[int, int]] = {}
    for group in groups:
        kernels, candidates = sizes.get(group[0].family, (0, 0))
        sizes[group[0].family] = kernels + 1, candidates + len(group)
    return sizes


def _kernel(family: Family, problem: Problem, group: Sequence[Config]) -> str:
    """Key of a group's compiled kernels, independent of the problem."""
    return "\n".join(sorted(spec.key for spec in family.kernels(problem, group[0]).values()))


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to `sizes`, each at most its size (largest remainders)."""
    total = min(total, sum(sizes))
    exact = [total * size / sum(sizes) for size in sizes]
    shares = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass
class SurveyProgress:
    """Progress of the survey of one problem."""

    sample: Sample
    path: Path
    measurements: list[Measurement] = field(default_factory=list)
    """Measurements in its recording."""
    resumed: int = 0
    """Number of drawn candidates that were already in the recording."""
    elapsed_s: float = 0.0

    @property
    def seen(self) -> list[Measurement]:
        """Quick measurements of the drawn candidates."""
        drawn = {config for group in self.sample.groups for config in group}
        return [m for m in self.measurements if not m.is_final and m.config in drawn]

    @property
    def is_complete(self) -> bool:
        return len(self.seen) == self.sample.candidates


class Survey:
    """Measures samples on a GPU, one problem after the other, while later kernels compile.

    Args:
        samples: samples, with the most important problem first.
        regime_of: regime that a problem is timed under.
        runner_of: function that returns the runner of a problem and regime.
        folder: folder of the recordings.
        together: kernels in one request.
        changed: callback for a problem's progress after every request.
        interruption: interruption that ends the survey early. Measurements are kept.
        time_limit_s: seconds after which waiting for results ends; None: no limit.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        regime_of: Callable[[Problem], Regime],
        runner_of: Callable[[Problem, Regime], Runner],
        folder: Path,
        *,
        together: int = REQUEST_KERNELS,
        changed: Callable[[SurveyProgress], None] = lambda progress: None,
        interruption: Interruption | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        if time_limit_s is not None and not (time_limit_s > 0 and math.isfinite(time_limit_s)):
            raise ConfigError(
                f"time-limit={time_limit_s} is out of range (allowed: above 0 seconds)"
            )
        self._samples, self._regime_of, self._runner_of = samples, regime_of, runner_of
        self._folder, self._together, self._changed = folder, together, changed
        self._interruption = interruption or Interruption()
        self._limit_s = time_limit_s
        self._deadline = math.inf
        self._wholes: dict[Problem, Recording] = {}

    @property
    def _stopped(self) -> bool:
        return self._interruption.requested or time.monotonic() >= self._deadline

    def run(self) -> list[SurveyProgress]:
        """Measure the candidates that are not measured yet. Returns the final progress of each
        problem.

        Raises:
            BenchmarkError: when there is no GPU, or it cannot be used.
            ConfigError: when a recording is damaged, or from another environment.
            StoreError: when a recording cannot be written.
        """
        if self._limit_s is not None:
            self._deadline = time.monotonic() + self._limit_s
        work = [(self._open(sample), self._runner(sample.problem)) for sample in self._samples]
        for progress, runner in work:  # in the order in which their results are collected
            runner.prefetch(progress.sample.problem, _missing(progress))
        for progress, runner in work:
            if not self._stopped:
                self._measure(progress, runner)
        return [progress for progress, _ in work]

    def _runner(self, problem: Problem) -> Runner:
        runner = self._runner_of(problem, self._regime_of(problem))
        if runner.provenance is not Provenance.MEASURED:
            raise BenchmarkError(NO_GPU)
        return runner

    def _open(self, sample: Sample) -> SurveyProgress:
        """Measurements of the problem in its recording in the folder."""
        problem, regime = sample.problem, self._regime_of(sample.problem)
        runner = self._runner(problem)
        path = self._folder / recording_archive.file_name(problem, runner.gpu, regime)
        whole = Recording(problem, runner.gpu, regime, runner.environment, ())
        if (source := recording_archive.named(self._folder, path.name)) is not None:
            whole = recording.read(source)
            if whole.environment.digest != runner.environment.digest:
                raise ConfigError(f"{path} was measured in another environment: use another folder")
        self._wholes[problem] = whole
        progress = SurveyProgress(sample, path, list(whole.measurements))
        progress.resumed = len(progress.seen)
        return progress

    def _measure(self, progress: SurveyProgress, runner: Runner) -> None:
        """Measure request by request. Each is written to the recording before the next is
        collected.
        """
        started, problem = time.monotonic(), progress.sample.problem
        requests = _requests(_missing(progress), self._together)
        for request in requests:
            runner.submit(problem, request)
        count = len(requests)
        with _Alarm(self._deadline - time.monotonic(), runner.cancel):
            while count and not self._stopped:
                results: list[Measurement] = []
                with self._interruption.waiting():
                    results = runner.collect()
                count -= 1
                progress.measurements += results
                progress.elapsed_s = time.monotonic() - started
                if results:
                    self._write(progress)
                    self._changed(progress)
        if count:
            runner.cancel()

    def _write(self, progress: SurveyProgress) -> None:
        whole = self._wholes[progress.sample.problem]
        recording.write(progress.path, replace(whole, measurements=tuple(progress.measurements)))


class _Alarm:
    """Timer around a block; does nothing without a limit."""

    def __init__(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = threading.Timer(max(0.0, seconds), then) if seconds < math.inf else None

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _missing(progress: SurveyProgress) -> list[list[Config]]:
    """Drawn candidates that are not measured, by kernel."""
    tried = {m.config for m in progress.seen}
    groups = ([c for c in group if c not in tried] for group in progress.sample.groups)
    return [group for group in groups if group]


def _requests(groups: Sequence[Sequence[Config]], together: int) -> list[list[Config]]:
    """Requests with candidates of up to `together` kernels of one family."""
    requests: list[list[Config]] = []
    families: dict[str, list[Sequence[Config]]] = {}
    for group in groups:
        families.setdefault(group[0].family, []).append(group)
    for of_family in families.values():
        for start in range(0, len(of_family), together):
            part = of_family[start : start + together]
            requests.append([config for group in part for config in group])
    return requests
