"""Lists of built kernels, with proofs of those that were checked over their whole domain.

A portfolio names configs. The runtime launches artifacts, whose keys hold the compiler's versions
and the rendered text. A *kernel list* connects both: for each `KernelSpec` the artifact built from
it, and its `Proof`. ``tuner build --portfolio`` writes the user's list, and ``tuner prove`` adds
the proofs. A wheel of prebuilt kernels has a list of its own.

Templates know the arguments of a launch, so a list made with other templates is ignored. Proofs
of one compiler's artifacts ship (`shipped_kernels`); equal builds need no new proof. A proof names
the machine code that was checked. An artifact of another text whose machine code is equal can take
the proof over (``tuner prove --carry``), which then says so.

A proof holds on every GPU of the list's compute capability (`Gpu.shares_kernels`). It is about
machine code, whose instructions, shared memory and registers belong to the capability. The number
of multiprocessors is an argument of a launch, or read from the device. Problems above and below a
full GPU are among a proof's problems. Needs the standard library only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.base import document, output, resources
from tuner.base.deferred import Deferred
from tuner.compile import prebuilt
from tuner.compile.artifacts import KEY, Artifact, ArtifactCache
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, Family, KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, AttentionProblem, DType, Problem
from tuner.selection.domains import domain_of
from tuner.selection.portfolio import Portfolio

_log = logging.getLogger(__name__)

FORMAT = "cutlass-tuner kernels"
VERSION = 1
_FACTS = ("nvcc", "cutlass", "capability", "templates")
DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
"""Types that share a portfolio's domain; each has kernels of its own."""
BUILD, PROVE = "tuner build --portfolio", "tuner prove"
"""Commands that build kernels missing in a list, and prove them."""


@dataclass(frozen=True)
class Target:
    """The kernels of one config of a portfolio, built and proven together."""

    config: Config
    """Config with one choice of its run-time parameters."""
    problem: Problem
    """Small problem of the kernels' domain; the config may be illegal for its sizes."""

    @cached_property
    def family(self) -> Family:
        return families()[self.config.family]

    @cached_property
    def kernels(self) -> Mapping[str, KernelSpec]:
        """Kernel specs by their name within the family."""
        return self.family.kernels(self.problem, self.config)

    def has_use(self, gpu: Gpu) -> bool:
        """True when the kernel can serve at least one problem.

        For products with few rows that is the small problem, which needs the least shared memory.
        Attention's small problem may lack the heads that a config packs, so it is not checked.
        """
        if isinstance(self.problem, AttentionProblem):
            return True
        config = self.family.called(self.problem, self.config, 1)
        return self.family.accepts(self.problem, config, gpu)

    def label(self) -> str:
        """Short text for people."""
        names = {name: value for name, value in self.config.params.items()
                 if name not in self.family.runtime_parameters}  # fmt: skip
        shown = ",".join(
            f"{name}={value if isinstance(value, str) else int(value)}"
            for name, value in sorted(names.items())
        )
        domain, dtype = domain_of(self.problem), getattr(self.problem, "dtype", "")
        place = "" if domain is None else f" {domain.label()},"
        if isinstance(self.problem, AttentionBackwardProblem):
            one = self.problem
            named = (
                *(("causal", one.is_causal), ("windowed", one.is_windowed)),
                *(("soft cap", one.softcap > 0), ("varlen", one.is_varlen)),
            )
            mask = ", ".join(name for name, is_on in named if is_on) or "full"
            place = f" D={one.head_dim}, {mask},"
        return f"{self.family.name}{place} {dtype}: {shown}"


def targets(portfolio: Portfolio) -> list[Target]:
    """The kernels of all own candidates, once each, for both types, measured domains first."""
    found: dict[tuple[str, ...], Target] = {}
    for domain, models in sorted(portfolio.served(), key=lambda one: one[1].donor is not None):
        for candidate in models.candidates:
            if candidate.family is None or candidate.is_vendor:
                continue
            for dtype in DTYPES:
                for problem in domain.problems(dtype):
                    target = Target(candidate.config, problem)
                    if target.has_use(portfolio.gpu):
                        keys = tuple(sorted(spec.key for spec in target.kernels.values()))
                        found.setdefault(keys, target)
    return list(found.values())


@dataclass(frozen=True)
class Proof:
    """Verdict of the numerics gate on a kernel, over random problems of its whole domain."""

    problems: int
    """Number of problems, all of which passed."""
    seed: int
    """Seed of the random problems."""
    gpu: str
    """Name of the GPU it was made on, for people; it holds on others (see above)."""
    driver: str
    date: str
    """Day of the proof, UTC, as ``2026-11-23``."""
    code: str = ""
    """`Artifact.code` of what was checked; empty in proofs from before it was recorded."""
    carried: str = ""
    """Key of the artifact that was checked, where the proof is carried over from another text with
    equal machine code; empty: the kernel's own. GPU, driver and day stay those of the check.
    """


@dataclass(frozen=True)
class Kernel:
    """A built kernel."""

    spec: str
    """`KernelSpec.key`."""
    artifact: str
    """Key in the artifact cache."""
    sha256: str
    """SHA-256 of the library that was checked."""
    proof: Proof | None = None
    fault: str = ""
    """Failure in the gate, in one line; such a kernel is not launched. Empty: none."""

    @property
    def is_judged(self) -> bool:
        """True with a proof or a fault."""
        return self.proof is not None or bool(self.fault)


@dataclass(frozen=True)
class KernelList:
    """Kernels by spec, of one compiler for one compute capability."""

    nvcc: str
    cutlass: str
    capability: str
    templates: str
    """`resources.templates_digest` of the templates that they were built from."""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The kernel that was built from a spec."""
        return self.kernels.get(spec.key)

    def with_built(self, kernels: Iterable[Kernel]) -> KernelList:
        """A list with newly built kernels added. Kernels without a verdict get the shipped proof of
        their artifact, if there is one.
        """
        return self.with_kernels(kernels).with_verdicts(shipped_kernels())

    def with_verdicts(self, judged: Iterable[Kernel]) -> KernelList:
        """A list whose kernels have the verdicts of equal artifacts, built here or elsewhere.

        A kernel that has a proof keeps it, unless the artifact has a fault elsewhere.
        """
        verdicts: dict[str, Kernel] = {}
        for one in judged:
            if one.is_judged and (one.artifact not in verdicts or one.fault):
                verdicts[one.artifact] = one
        found = dict(self.kernels)
        for spec, kernel in self.kernels.items():
            verdict = verdicts.get(kernel.artifact)
            if verdict is None or kernel.fault:
                continue
            if verdict.fault:
                found[spec] = replace(kernel, proof=None, fault=verdict.fault)
            elif kernel.proof is None:
                found[spec] = replace(kernel, proof=verdict.proof)
        return replace(self, kernels=found)

    def with_kernels(self, kernels: Iterable[Kernel]) -> KernelList:
        """A list with kernels added. A kernel whose artifact changed loses its proof."""
        found = dict(self.kernels)
        for kernel in kernels:
            old = found.get(kernel.spec)
            same = old is not None and old.sha256 == kernel.sha256
            found[kernel.spec] = old if old and same and not kernel.is_judged else kernel
        return replace(self, kernels=found)

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        rows = [asdict(kernel) for _, kernel in sorted(self.kernels.items())]
        facts = {name: getattr(self, name) for name in _FACTS}
        return {"format": FORMAT, "version": VERSION, **facts, "kernels": rows}

    @classmethod
    def from_json(cls, data: Any, *, deferred: bool = False) -> KernelList:
        """The inverse of `to_json`.

        Args:
            data: the document.
            deferred: check a kernel's row when the kernel is first asked for, which then raises the
                ConfigError; the default checks all now.

        Raises:
            ConfigError: on another format or version, or a wrong value.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"it is not a kernel list (allowed: format '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(f"version {data.get('version')!r} is not known (allowed: {VERSION})")
        try:
            rows = {str(row["spec"]): partial(_kernel_from, row) for row in data["kernels"]}
            kernels: Mapping[str, Kernel] = Deferred(rows)
            facts = document.checked(cls, data)
            named = {name: facts[name] for name in _FACTS}
            return cls(**named, kernels=kernels if deferred else dict(kernels))
        except INCOMPATIBLE_CONFIG_ERRORS as exc:
            raise ConfigError(f"it cannot be read: {exc!r}") from exc

    def text(self) -> str:
        """The document as JSON, a line for each kernel."""
        data = self.to_json()
        lines = ",\n".join(f"  {json.dumps(row)}" for row in data.pop("kernels"))
        return f'{json.dumps(data)[:-1]}, "kernels": [\n{lines}\n]}}\n'

    def write(self, path: Path) -> None:
        """Write `text` to a file.

        Raises:
            StoreError: when it cannot be written.
        """
        output.write(path, self.text())

    @classmethod
    def read(cls, path: Path) -> KernelList:
        """Read what `write` wrote.

        Raises:
            ConfigError: when it cannot be read.
        """
        try:
            return cls.from_json(document.parse(path.read_text()))
        except (OSError, ValueError, ConfigError) as exc:
            raise ConfigError(f"kernel list {path}: {exc}") from exc


def _kernel_from(row: Mapping[str, Any]) -> Kernel:
    """A kernel of a list.

    Raises:
        ConfigError: on a wrong value.
    """
    try:
        facts = document.checked(Kernel, row)
        proof = row.get("proof")
        if not KEY.fullmatch(facts["artifact"]):
            raise ConfigError(f"'{facts['artifact'][:80]}' is not the key of an artifact")
        checked = None if proof is None else Proof(**document.checked(Proof, proof))
        return Kernel(**{**facts, "proof": checked})
    except INCOMPATIBLE_CONFIG_ERRORS as exc:
        raise ConfigError(f"it cannot be read: {exc!r}") from exc


def path_of(nvcc: str, capability: str) -> Path:
    """The user's list of one compiler's kernels."""
    return settings.kernels_dir() / f"{nvcc}-{capability}.json"


def users() -> list[Path]:
    """The user's kernel lists, newest compiler last."""
    return sorted(settings.kernels_dir().glob("*.json"))


def places() -> list[Path]:
    """Paths of all kernel lists of this machine: the installed wheel's, then the user's."""
    found = prebuilt.kernel_list()
    return [*([] if found is None else [found]), *users()]


@cache
def shipped_kernels() -> tuple[Kernel, ...]:
    """Proven kernels that ship with the package, under ``cache/proofs/``.

    An artifact's key covers the compiler's version, the flags and the source: equal keys mean the
    same kernel.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    try:
        return tuple(
            kernel
            for path in sorted((resources.cache() / "proofs").glob("*.json"))
            for kernel in KernelList.read(path).kernels.values()
            if kernel.proof is not None
        )
    except ConfigError as exc:
        raise StoreError(f"a shipped file cannot be read: {exc}") from exc


def update(
    path: Path,
    add: Iterable[Kernel],
    start: KernelList | None = None,
    *,
    are_built: bool = False,
) -> KernelList:
    """Add kernels to a list on disk under a lock; returns the written list.

    Args:
        path: file of the list.
        add: kernels for `KernelList.with_kernels`.
        are_built: add them by `KernelList.with_built` instead.
        start: list to add to; None: the one on disk.

    Raises:
        ConfigError: when the list cannot be read.
        StoreError: when it cannot be written.
    """
    with ArtifactCache().lock("kernels"):
        known = KernelList.read(path) if start is None else start
        found = known.with_built(add) if are_built else known.with_kernels(add)
        path.parent.mkdir(parents=True, exist_ok=True)
        found.write(path)
    return found


class Lists:
    """Kernel lists of this machine that fit this version; read again when a file changes."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._known: tuple[KernelList, ...] = ()
        self._faults: dict[str, str] = {}
        """Failures by the library's hash: a kernel that failed in one list is not served from
        another."""
        self._there: set[Kernel] = set()
        """Kernels whose libraries were hashed; loading a library hashes it again."""

    def known(self) -> tuple[KernelList, ...]:
        """All readable lists; an unreadable one is logged once."""
        paths = places()
        stamp = [(str(path), _stamp_of(path)) for path in paths]
        if stamp != self._stamp:
            found = []
            for path in paths:
                try:
                    data = document.parse(path.read_text())
                    found.append((KernelList.from_json(data, deferred=True), data["kernels"]))
                except (OSError, ValueError, ConfigError) as exc:
                    _log.warning("kernel list %s: %s", path, exc)
            current = resources.templates_digest() if found else ""
            fitting = [(one, rows) for one, rows in found if one.templates == current]
            self._known = tuple(one for one, _ in fitting)
            self._faults = {
                str(row.get("sha256")): str(row["fault"])
                for _, rows in fitting
                for row in rows
                if row.get("fault")
            }
            self._there = set()
            self._stamp = stamp
        return self._known

    def proven(self, specs: Mapping[str, KernelSpec], capability: str) -> dict[str, str] | str:
        """Artifacts of proven kernels by the keys of `specs`, or why one of them is not served.

        Args:
            specs: specs by their name within a family.
            capability: compute capability of the GPU. `Family.accepts` must have judged the config
                for the problem and GPU before.
        """
        reasons = []
        for one in reversed(self.known()):
            if one.capability != capability:
                continue
            found = {name: self._proven(one, spec) for name, spec in specs.items()}
            faults = [fault for _, fault in found.values() if fault]
            if not faults:
                return {name: key for name, (key, _) in found.items()}
            reasons.append(faults[0])
        return reasons[0] if reasons else f"no kernel is built ({BUILD})"

    def _proven(self, one: KernelList, spec: KernelSpec) -> tuple[str, str]:
        """Key of a proven kernel's artifact or empty, and the reason why it is not served."""
        try:
            kernel = one.find(spec)
        except ConfigError as exc:
            return "", f"a row of the kernel list is damaged: {exc}"
        if kernel is None:
            return "", f"a kernel is not built ({BUILD})"
        if fault := self._faults.get(kernel.sha256, ""):
            return "", f"a kernel failed its proof: {fault}"
        if kernel.proof is None:
            return "", f"a kernel is not proven ({PROVE})"
        if kernel not in self._there and artifact_of(one, kernel) is None:
            return "", f"the artifact of a proven kernel is not in the cache ({BUILD})"
        self._there.add(kernel)
        return kernel.artifact, ""


def artifact_of(one: KernelList, kernel: Kernel) -> Artifact | None:
    """The artifact of a kernel, if the cache holds the same library by the list's compiler."""
    artifact = ArtifactCache().find(kernel.artifact)
    if artifact is None or artifact.sha256 != kernel.sha256:
        return None
    return artifact if artifact.facts.get("nvcc") == one.nvcc else None


def _stamp_of(path: Path) -> Any:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


lists = Lists()
