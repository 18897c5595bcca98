"""Document of built kernels, with the proofs and failures of those that were checked.

For each `KernelSpec` the list has the artifact built from it and its `Proof`, if it has one. A
template and its declared arguments decide how a kernel is launched, so each row holds a digest of
them (`source_of`). A row counts while that digest is today's. Failures are kept beside the rows, by
artifact and by machine code. They outlive the artifacts.

| version | differences |
|---|---|
| 2 | each row has `source` and `code`; `faults` |
| 1 | one digest over all templates; while it is today's, all rows count, else none |

A build takes a row of other templates over where its artifact's key is still today's.

Needs the standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.base import document, output, resources
from tuner.base.deferred import Deferred
from tuner.base.printable import one_line
from tuner.compile.artifacts import KEY, Artifact
from tuner.errors import ConfigError
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, KernelSpec

FORMAT = "cutlass-tuner kernels"
VERSION = 2
_FACTS = ("nvcc", "cutlass", "capability")


@dataclass(frozen=True)
class Proof:
    """Verdict of the numerics gate on a kernel, over random problems of its whole domain."""

    problems: int
    """Number of problems, all of which passed; at least one."""
    seed: int
    """Seed of the random problems."""
    gpu: str
    """Name of the GPU it was made on, for people; it holds on others (`tuner.selection.kernels`).
    """
    driver: str
    date: str
    """Day of the proof, UTC, as ``2026-11-23``."""
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
    code: str = ""
    """`Artifact.code`; empty where it is not known."""
    source: str = ""
    """`source_of` its spec when it was built; in lists of version 1 the template's digest only.
    Empty where the artifact's key alone identifies the kernel, as in the proofs that ship.
    """

    @classmethod
    def of(cls, spec: KernelSpec, artifact: Artifact) -> Kernel:
        """A kernel that was built from a spec with today's template, without a verdict."""
        code, source = artifact.code, source_of(spec)
        return cls(spec.key, artifact.key, artifact.sha256, code=code, source=source)

    @property
    def is_judged(self) -> bool:
        """True with a proof or a fault."""
        return self.proof is not None or bool(self.fault)

    @property
    def is_current(self) -> bool:
        """True when today's template is the one that it was built from."""
        digest = resources.template_digest(self.spec.partition("{")[0])
        return bool(digest) and self.source[: len(digest)] == digest

    @property
    def identities(self) -> tuple[str, ...]:
        """Keys of its failures in `KernelList.faults`: its artifact, and its machine code."""
        return (self.artifact, self.code) if self.code else (self.artifact,)

    def to_json(self) -> dict[str, Any]:
        """A row of the document, without empty verdicts and digests."""
        needed = ("spec", "artifact", "sha256")
        return {name: value for name, value in asdict(self).items() if value or name in needed}


def source_of(spec: KernelSpec) -> str:
    """Digest of a spec's template, its headers, and the declared arguments of its launch."""
    arguments = hashlib.sha256(repr(spec.arguments).encode()).hexdigest()
    return resources.template_digest(spec.template) + arguments[:16]


@dataclass(frozen=True)
class KernelList:
    """Kernels by spec, of one compiler for one compute capability."""

    nvcc: str
    cutlass: str
    capability: str
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    """Failures in one line, by artifact and by machine code. A later proof of the same kernel
    removes them, and nothing else does.
    """
    variant: Mapping[str, str] = field(default_factory=dict)
    """Kernels whose rows depend on their batch, or differ from their class's, by artifact: the
    reason in one line. They serve no batch-invariant call.
    """

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The kernel that was built from a spec with today's template and arguments."""
        kernel = self.kernels.get(spec.key)
        if kernel is None or not kernel.is_current:
            return None
        sources = (source_of(spec), resources.template_digest(spec.template))
        return kernel if kernel.source in sources else None

    def with_verdicts(
        self, judged: Iterable[Kernel], faults: Mapping[str, str] | None = None
    ) -> KernelList:
        """A list whose kernels have the verdicts of equal kernels, built here or elsewhere.

        A proof is taken over by kernels without a verdict whose artifact is equal. A failure is
        taken over by all kernels of equal artifact or machine code.

        Args:
            judged: kernels with verdicts.
            faults: failures as in `KernelList.faults`.
        """
        proofs = dict[str, Proof]()
        failures = {**(faults or {}), **self.faults}
        for kernel in judged:
            if kernel.proof is not None:
                proofs[kernel.artifact] = kernel.proof
            if kernel.fault:
                failures |= dict.fromkeys(kernel.identities, kernel.fault)
        rows, failures = _spread(self.kernels, failures)
        for spec, kernel in rows.items():
            if not kernel.is_judged and kernel.artifact in proofs:
                rows[spec] = replace(kernel, proof=proofs[kernel.artifact])
        return replace(self, kernels=rows, faults=failures)

    def with_kernels(self, kernels: Iterable[Kernel]) -> KernelList:
        """A list with kernels added. A kernel whose artifact changed loses its proof, not the
        failure of its machine code.
        """
        rows, faults = dict(self.kernels), dict(self.faults)
        for kernel in kernels:
            for name in kernel.identities:
                if kernel.proof is not None:
                    faults.pop(name, None)
                elif kernel.fault:
                    faults[name] = kernel.fault
            old = rows.get(kernel.spec)
            is_same = old and (old.artifact, old.sha256) == (kernel.artifact, kernel.sha256)
            if old and is_same and not kernel.is_judged:
                source, code = kernel.source or old.source, kernel.code or old.code
                kernel = replace(old, source=source, code=code)
            rows[kernel.spec] = kernel
        rows, faults = _spread(rows, faults)
        return replace(self, kernels=rows, faults=faults)

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        facts = {name: getattr(self, name) for name in _FACTS}
        rows = [kernel.to_json() for _, kernel in sorted(self.kernels.items())]
        faults = dict(sorted(self.faults.items()))
        more = {"variant": dict(sorted(self.variant.items()))} if self.variant else {}
        head = {"format": FORMAT, "version": VERSION, **facts, "faults": faults, **more}
        return {**head, "kernels": rows}

    @classmethod
    def from_json(cls, data: Any, *, deferred: bool = False) -> KernelList:
        """The inverse of `to_json`; also reads version 1.

        Args:
            data: the document.
            deferred: check a kernel's row when the kernel is first asked for, which then raises the
                ConfigError; the default checks all now.

        Raises:
            ConfigError: on another format or version, or a wrong value.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"it is not a kernel list (allowed: format '{FORMAT}')")
        if data.get("version") not in (1, VERSION):
            version = data.get("version")
            text = one_line(f"version {version!r}", 40)
            raise ConfigError(f"{text} is not known (allowed: 1 and {VERSION})")
        try:
            if data["version"] == 1:
                data = _second_version(data)
            rows = {str(row["spec"]): partial(_kernel_from, row) for row in data["kernels"]}
            kernels: Mapping[str, Kernel] = Deferred(rows)
            facts = document.checked(cls, data)
            return cls(
                **{name: facts[name] for name in _FACTS},
                kernels=kernels if deferred else dict(kernels),
                faults=_faults_of(data),
                variant=_texts_of(data, "variant"),
            )
        except INCOMPATIBLE_CONFIG_ERRORS as exc:
            raise _unreadable(exc) from exc

    def text(self) -> str:
        """The document as JSON, a line for each kernel."""
        data = self.to_json()
        lines = ",\n".join(f"  {json.dumps(row)}" for row in data.pop("kernels"))
        return f'{json.dumps(data)[:-1]}, "kernels": [\n{lines}\n]}}\n'

    def write(self, path: Path) -> None:
        """Write `text` to a file that only this user and root can write.

        Raises:
            StoreError: when it cannot be written.
        """
        output.write(path, self.text(), make_folder=True, is_own=True)

    @classmethod
    def read(cls, path: Path) -> KernelList:
        """Read what `write` wrote, of whoever owns it.

        Raises:
            ConfigError: when it cannot be read.
        """
        try:
            return cls.from_json(document.parse(path.read_text()))
        except (OSError, ValueError, ConfigError) as exc:
            raise ConfigError(f"kernel list {path}: {one_line(str(exc))}") from exc


def _spread(
    kernels: Mapping[str, Kernel], faults: Mapping[str, str]
) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Kernels by spec with the failures of their artifacts and machine code, and all failures."""
    rows, spread = dict(kernels), dict(faults)
    is_spreading = True
    while is_spreading:
        is_spreading = False
        for spec, kernel in rows.items():
            fault = next((spread[name] for name in kernel.identities if name in spread), "")
            if bool(fault) != bool(kernel.fault):
                proof = None if fault else kernel.proof
                rows[spec] = replace(kernel, proof=proof, fault=fault)
                spread = {**dict.fromkeys(kernel.identities if fault else (), fault), **spread}
                is_spreading = True
    return rows, spread


def _kernel_from(row: Mapping[str, Any]) -> Kernel:
    """A kernel of a list. A proof without problems does not count.

    Raises:
        ConfigError: on a wrong value.
    """
    try:
        facts = document.checked(Kernel, row)
        proof = row.get("proof")
        if not KEY.fullmatch(facts["artifact"]):
            raise ConfigError(f"'{facts['artifact'][:80]}' is not the key of an artifact")
        checked = None if proof is None else Proof(**document.checked(Proof, proof))
        if checked is not None and checked.problems < 1:
            checked = None
        return Kernel(**{**facts, "proof": checked})
    except INCOMPATIBLE_CONFIG_ERRORS as exc:
        raise _unreadable(exc) from exc


def _unreadable(exc: Exception) -> ConfigError:
    """Error of a wrong value, in one line."""
    return ConfigError(
        one_line(str(exc) if isinstance(exc, ConfigError) else f"it cannot be read: {exc!r}")
    )


def _faults_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Failures of a document: those beside its rows, and artifacts of failed rows, also of damaged
    ones.

    Raises:
        ConfigError: on a wrong value.
    """
    faults = _texts_of(data, "faults")
    for row in data["kernels"]:
        if fault := row.get("fault"):
            faults[str(row.get("artifact"))] = str(fault)
    return faults


def _texts_of(data: Mapping[str, Any], name: str) -> dict[str, str]:
    """An object of text in a document; empty where it has none.

    Raises:
        ConfigError: on a wrong value.
    """
    texts = data.get(name, {})
    if not isinstance(texts, Mapping) or any(type(text) is not str for text in texts.values()):
        raise ConfigError(f"'{name}' is not an object of text")
    return dict(texts)


def _second_version(data: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 1 as one of version 2."""
    is_current = data["templates"] == resources.templates_digest()
    rows = []
    for row in data["kernels"]:
        converted = dict(row)
        if isinstance(row.get("proof"), Mapping):
            converted["proof"] = dict(row["proof"])
            converted["code"] = converted["proof"].pop("code", "")
        if is_current:
            template = str(row["spec"]).partition("{")[0]
            converted["source"] = resources.template_digest(template)
        rows.append(converted)
    return {**data, "version": VERSION, "kernels": rows}
