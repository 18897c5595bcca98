"""Built kernels of portfolios and rules, and the kernel lists of this machine.

A portfolio names configs. The runtime launches artifacts, whose keys hold the compiler's versions
and the rendered text. A *kernel list* connects both (`tuner.selection.kernel_list`). ``tuner build
--portfolio`` writes the user's list, and ``tuner prove`` adds the proofs. A wheel of prebuilt
kernels has a list of its own. A list decides which libraries are run. So it is read only when no
other user can have written it, as libraries are.

Proofs of one compiler's artifacts ship (`shipped_kernels`); equal builds need no new proof. A row
names the machine code that was checked. An artifact of another text whose machine code is equal can
take the proof over (``tuner prove --carry``), which then says so.

A proof holds on every GPU of the list's compute capability (`Gpu.shares_kernels`). It is about
machine code, whose instructions, shared memory and registers belong to the capability. The number
of multiprocessors is an argument of a launch, or read from the device. Problems above and below a
full GPU are among a proof's problems. Needs the standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.base import document, resources
from tuner.base.ownership import OWN_FOLDER, distrust, trusted_text
from tuner.base.printable import one_line
from tuner.compile import prebuilt
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import KernelSpec
from tuner.families.by_operation import domain_of
from tuner.families.target import DTYPES, Target
from tuner.problem import AttentionProblem
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.portfolio import Portfolio

_log = logging.getLogger(__name__)

BUILD, PROVE = "tuner build --portfolio", "tuner prove"
"""Commands that build kernels missing in a list, and prove them."""
_REINSTALL = f"install {prebuilt.DISTRIBUTION} again as this user or as root"


def targets(portfolio: Portfolio) -> list[Target]:
    """The kernels of all own candidates, once each, for both types, measured domains first. Those
    of the batch-invariant mode alone come last.
    """
    by_keys: dict[tuple[str, ...], Target] = {}
    for domain, models in sorted(portfolio.served(), key=lambda row: row[1].donor is not None):
        for candidate in models.candidates:
            if candidate.family is None or candidate.is_vendor:
                continue
            for dtype in DTYPES:
                for problem in domain.problems(dtype):
                    target = Target(candidate.config, problem, domain.label())
                    if target.has_use(portfolio.gpu):
                        keys = tuple(sorted(spec.key for spec in target.kernels.values()))
                        by_keys.setdefault(keys, target)
    own = [family for family in families().values() if family.op == portfolio.op]
    for family, dtype in product(own, DTYPES):
        for config, small in family.invariant_builds(dtype):
            if _is_measured(small, portfolio):
                target = Target(config, small, "batch-invariant")
                keys = tuple(sorted(spec.key for spec in target.kernels.values()))
                by_keys.setdefault(keys, target)
    return list(by_keys.values())


def _is_measured(problem: Any, portfolio: Portfolio) -> bool:
    """True if the portfolio has the problem's domain, with or without a causal mask: over pages the
    batch-invariant mode masks a single query, too.
    """
    masks = (False, True) if isinstance(problem, AttentionProblem) else ()
    alike = [problem, *(replace(problem, is_causal=is_causal) for is_causal in masks)]
    domains = (domain_of(posed) for posed in alike)
    return any(domain is not None and portfolio.models_of(domain) for domain in domains)


def path_of(nvcc: str, capability: str) -> Path:
    """The user's list of one compiler's kernels."""
    return settings.kernels_dir() / f"{nvcc}-{capability}.json"


def users() -> list[Path]:
    """The user's kernel lists, newest compiler last."""
    return sorted(settings.kernels_dir().glob("*.json"))


def places() -> list[Path]:
    """Paths of all kernel lists of this machine: the installed wheels', then the user's."""
    return [*prebuilt.kernel_lists(), *users()]


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


def read(path: Path, *, deferred: bool = False) -> KernelList:
    """Read a kernel list of this machine.

    Args:
        path: file of the list.
        deferred: as for `KernelList.from_json`.

    Raises:
        ConfigError: when it cannot be read.
        StoreError: when other users can write it; the message says how to mend it.
    """
    folder = settings.kernels_dir()
    is_users = path.parent == folder
    way = OWN_FOLDER if is_users else _REINSTALL
    for place in (folder, path) if is_users else (path,):
        if reason := distrust(place, "kernel list", way):
            raise StoreError(reason)
    try:
        return KernelList.from_json(document.parse(trusted_text(path)), deferred=deferred)
    except (OSError, ValueError, ConfigError) as exc:
        raise ConfigError(f"kernel list {path}: {one_line(str(exc))}") from exc


def current(note: Callable[[str], None]) -> dict[Path, KernelList]:
    """The user's lists that have kernels of today's templates.

    Args:
        note: receives a line for each list that cannot be read.
    """
    readable = dict[Path, KernelList]()
    for path in users():
        try:
            readable[path] = read(path)
        except (ConfigError, StoreError) as exc:
            note(f"left out: {exc}")
    return {
        path: readable_list
        for path, readable_list in readable.items()
        if any(kernel.is_current for kernel in readable_list.kernels.values())
    }


def update(
    path: Path,
    change: Callable[[KernelList], KernelList],
    start: Callable[[], KernelList] | None = None,
) -> KernelList:
    """Change a list on disk under a lock; returns the written list.

    Args:
        path: file of the list.
        change: makes the list to write from the present one.
        start: makes the present list; None: the one on disk.

    Raises:
        ConfigError: when the list cannot be read.
        StoreError: when it cannot be written, or other users can write it.
    """
    with ArtifactCache().lock("kernels"):
        changed = change(read(path) if start is None else start())
        changed.write(path)
    return changed


class Lists:
    """Kernel lists of this machine; read again when a file changes."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._known: tuple[KernelList, ...] = ()
        self._faults: dict[str, str] = {}
        """Failures of all lists: a kernel that failed in one list is not served from another."""
        self._there: set[Kernel] = set()
        """Kernels whose libraries were hashed; loading a library hashes it again."""
        self._agreed: frozenset[str] | None = None

    @property
    def is_agreed(self) -> bool:
        """True when ranks agreed on the kernels that serve."""
        return self._agreed is not None

    def restrict(self, artifacts: Collection[str] | None) -> None:
        """Serve proven kernels of these artifacts only; None: all."""
        self._agreed = None if artifacts is None else frozenset(artifacts)

    def artifacts(self, capability: str) -> set[str]:
        """Keys of the artifacts of all proven kernels that are served."""
        served = set()
        for rows in self.known():
            for kernel in self._kernels(rows) if rows.capability == capability else ():
                served.add(self._served(rows, kernel)[0])
        return served - {""}

    def known(self) -> tuple[KernelList, ...]:
        """All lists that can be read and trusted; the others are logged once."""
        paths = places()
        stamp = [(str(path), _stamp_of(path)) for path in (settings.kernels_dir(), *paths)]
        if stamp != self._stamp:
            readable = []
            for path in paths:
                try:
                    readable.append(read(path, deferred=True))
                except (ConfigError, StoreError) as exc:
                    _log.warning("%s", exc)
            self._known = tuple(readable)
            self._faults = {name: why for rows in readable for name, why in rows.faults.items()}
            self._there = set()
            self._stamp = stamp
        return self._known

    def kernels(self, capability: str) -> Iterator[Kernel]:
        """Kernels of today's templates in all lists of a compute capability; damaged rows are left
        out.
        """
        for kernel_list in self.known():
            yield from self._kernels(kernel_list) if kernel_list.capability == capability else ()

    def _kernels(self, rows: KernelList) -> Iterator[Kernel]:
        for spec in rows.kernels:
            try:
                kernel = rows.kernels[spec]
            except ConfigError:
                continue
            if kernel.is_current:
                yield kernel

    def proven(self, specs: Mapping[str, KernelSpec], capability: str) -> dict[str, str] | str:
        """Artifacts of proven kernels by the keys of `specs`, or why one of them is not served.

        Args:
            specs: specs by their name within a family.
            capability: compute capability of the GPU. `Family.accepts` must have judged the config
                for the problem and GPU before.
        """
        reasons = []
        for kernel_list in reversed(self.known()):
            if kernel_list.capability != capability:
                continue
            served = {name: self._proven(kernel_list, spec) for name, spec in specs.items()}
            faults = [fault for _, fault in served.values() if fault]
            if not faults:
                return {name: key for name, (key, _) in served.items()}
            reasons.append(faults[0])
        return reasons[0] if reasons else f"no kernel is built ({BUILD})"

    def lacks(self, specs: Mapping[str, KernelSpec], capability: str) -> bool:
        """True where kernels are not built here, and proofs of all that are missing ship.

        Args:
            specs: specs by their name within a family.
            capability: compute capability of the GPU.
        """
        missing = [spec for spec in specs.values() if not self._is_built(spec, capability)]
        proven = {kernel.spec for kernel in shipped_kernels()}
        return bool(missing) and all(spec.key in proven for spec in missing)

    def _is_built(self, spec: KernelSpec, capability: str) -> bool:
        """True where a list has the kernel and the cache its library, proven or not."""
        for kernel_list in self.known():
            try:
                kernel = kernel_list.find(spec) if kernel_list.capability == capability else None
            except ConfigError:
                continue
            if kernel is not None and artifact_of(kernel_list, kernel) is not None:
                return True
        return False

    def _proven(self, rows: KernelList, spec: KernelSpec) -> tuple[str, str]:
        """Key of a proven kernel's artifact or empty, and the reason why it is not served."""
        try:
            kernel = rows.find(spec)
        except ConfigError as exc:
            return "", f"a row of the kernel list is damaged: {exc}"
        if kernel is None:
            return "", f"a kernel is not built ({BUILD})"
        return self._served(rows, kernel)

    def _served(self, rows: KernelList, kernel: Kernel) -> tuple[str, str]:
        """As `_proven`, of a row."""
        if fault := self._fault(*kernel.identities):
            return "", fault
        if kernel.proof is None:
            return "", f"a kernel is not proven ({PROVE})"
        if self._agreed is not None and kernel.artifact not in self._agreed:
            return "", "a kernel is not proven on every rank"
        if kernel not in self._there:
            artifact = artifact_of(rows, kernel)
            if artifact is None:
                return "", f"the artifact of a proven kernel is not in the cache ({BUILD})"
            if self._faults and not kernel.code and (fault := self._fault(artifact.code)):
                return "", fault
            self._there.add(kernel)
        return kernel.artifact, ""

    def variant(self, artifacts: Iterable[str]) -> str:
        """Reason why kernels serve no batch-invariant call, of any list; empty without one.

        Args:
            artifacts: their keys.
        """
        keys = set(artifacts)
        texts = (rows.variant[key] for rows in self.known() for key in keys & rows.variant.keys())
        return next(
            (f"its rows depend on their batch: {one_line(text, 400)}" for text in texts), ""
        )

    def _fault(self, *identities: str) -> str:
        """Reason not to serve a kernel that failed; empty when it did not."""
        texts = (self._faults[name] for name in identities if name in self._faults)
        return next((f"a kernel failed its proof: {one_line(text, 400)}" for text in texts), "")


def artifact_of(rows: KernelList, kernel: Kernel) -> Artifact | None:
    """The artifact of a kernel, if the cache holds the same library by the list's compiler."""
    artifact = ArtifactCache().find(kernel.artifact)
    if artifact is None or artifact.sha256 != kernel.sha256:
        return None
    return artifact if artifact.facts.get("nvcc") == rows.nvcc else None


def _stamp_of(path: Path) -> Any:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ctime_ns, facts.st_size, facts.st_ino, facts.st_mode, facts.st_uid


lists = Lists()
