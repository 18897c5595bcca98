"""One configuration: the source of its kernels, what they use, and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import TunerError
from tuner.families import families
from tuner.measurement import Measurement, Regime, Resources
from tuner.problem import Problem
from tuner.service.pages.highlight import Language
from tuner.service.pages.trials import runs
from tuner.store import Store
from tuner.store.entry import is_vendor


@dataclass(frozen=True)
class KernelSource:
    """One compiled kernel of a configuration."""

    name: str
    """Within its family."""
    source: str
    """CUDA or Python text; empty where this version of the program cannot render it."""
    language: Language
    resources: Resources | None
    """Report of ptxas; None where it was not recorded."""
    artifact: str
    """Empty where it was not built here."""


@dataclass(frozen=True)
class KernelPage:
    """A configuration of a problem."""

    problem: Problem
    config: Config
    measurements: Sequence[Measurement]
    """Measurements of it, not empty. Order: of the asked GPU and regime, final ones, newest
    ones."""
    kernels: Sequence[KernelSource]
    silence: str
    """Why there is no source; empty where there is."""

    @property
    def best(self) -> Measurement:
        """Measurement whose time stands for the kernel."""
        return next((m for m in self.measurements if m.ok), self.measurements[0])


def find(
    store: Store,
    problem: Problem,
    digest: str,
    *,
    gpu: str | None = None,
    regimes: Sequence[Regime] | None = None,
) -> KernelPage | None:
    """The configuration with a digest, among the measurements of a problem.

    Args:
        store: store to search, before shipped decisions.
        problem: measured problem.
        digest: digest of the configuration.
        gpu: name of the GPU of the measurement; default: any.
        regimes: accepted regimes; default: any.

    Returns:
        None if it was not measured there.

    Raises:
        StoreError: when the store cannot be read.
    """

    def is_there(m: Measurement) -> bool:
        return gpu in (None, m.gpu.name) and (regimes is None or m.regime in regimes)

    every = [m for run in runs(store, problem) for m in run.measurements]
    measured = [m for m in every if m.config.digest == digest]
    if not any(map(is_there, measured)):
        return None
    measured.sort(key=lambda m: m.created_at, reverse=True)
    measured.sort(key=lambda m: (not is_there(m), not m.is_final, not m.ok))
    config = measured[0].config
    sources, silence = _sources(problem, measured)
    resources = next((m.resources for m in measured if m.resources), {})
    artifacts = next((m.artifacts for m in measured if m.artifacts), {})
    kernels = [
        KernelSource(
            name,
            *sources.get(name, ("", "cuda")),
            resources.get(name),
            artifacts.get(name, ""),
        )
        for name in sorted({*sources, *resources, *artifacts})
    ]
    return KernelPage(problem, config, measured, kernels, silence)


def _sources(
    problem: Problem, measured: Sequence[Measurement]
) -> tuple[Mapping[str, tuple[str, Language]], str]:
    """Text and language of each kernel, or why there is none."""
    first = measured[0]
    if is_vendor(first.config):
        return {}, "A vendor's kernel: called, not compiled; it has no source here."
    family = families().get(first.config.family)
    if family is None or not family.accepts(problem, first.config, first.gpu):
        return {}, "This version of the program does not have this configuration."
    # The name that the compiled text carries, where it was compiled here.
    artifacts = next((m.artifacts for m in measured if m.artifacts), {})
    digest = first.config.digest
    try:
        specs = family.kernels(problem, first.config)
        texts: dict[str, tuple[str, Language]] = {
            name: (
                render(spec, artifacts.get(name, digest)),
                "python" if spec.template.endswith(".py.j2") else "cuda",
            )
            for name, spec in specs.items()
        }
        return texts, ""
    except TunerError as exc:
        return {}, f"It cannot be rendered: {exc}"
