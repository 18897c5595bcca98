"""Kernels that were built, and the proofs of those that were checked over their whole domain.

A portfolio names configs. What runs is an artifact, whose key only the compiler knows, for it holds
the versions and the rendered text. A *kernel list* brings both together: for each `KernelSpec` the
artifact that was built from it, and its `Proof`. ``tuner build --portfolio`` writes the user's,
``tuner prove`` enters the proofs, and a wheel of prebuilt kernels carries its own. Needs the
standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.base import document, output
from tuner.compile.artifacts import KEY
from tuner.errors import ConfigError
from tuner.families.base import FOREIGN, KernelSpec

FORMAT = "cutlass-tuner kernels"
VERSION = 1


@dataclass(frozen=True)
class Proof:
    """The numerics gate's verdict on a kernel, over problems drawn from all of its domain."""

    problems: int
    """Problems that passed; with one that failed there is no proof."""
    seed: int
    """What they were drawn by."""
    gpu: str
    driver: str
    date: str
    """UTC, as ``2026-11-23``."""


@dataclass(frozen=True)
class Kernel:
    """A built kernel."""

    spec: str
    """`KernelSpec.key`."""
    artifact: str
    """Key in the artifact cache."""
    sha256: str
    """Of the library that was checked."""
    proof: Proof | None = None
    fault: str = ""
    """How it failed the gate, in one line: it is not launched."""


@dataclass(frozen=True)
class KernelList:
    """Kernels by spec, of one compiler for one compute capability."""

    nvcc: str
    cutlass: str
    capability: str
    kernels: Mapping[str, Kernel] = field(default_factory=dict)

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The kernel that was built from a spec."""
        return self.kernels.get(spec.key)

    def with_kernels(self, kernels: Iterable[Kernel]) -> KernelList:
        """It with these added. One whose artifact changed loses its proof."""
        found = dict(self.kernels)
        for kernel in kernels:
            old = found.get(kernel.spec)
            same = old is not None and old.sha256 == kernel.sha256
            is_judged = kernel.proof is not None or kernel.fault
            found[kernel.spec] = old if old and same and not is_judged else kernel
        return replace(self, kernels=found)

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        rows = [asdict(kernel) for _, kernel in sorted(self.kernels.items())]
        facts = {"nvcc": self.nvcc, "cutlass": self.cutlass, "capability": self.capability}
        return {"format": FORMAT, "version": VERSION, **facts, "kernels": rows}

    @classmethod
    def from_json(cls, data: Any) -> KernelList:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when it is another format or version, or a value is wrong.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"it is not a kernel list (allowed: format '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(f"version {data.get('version')!r} is not known (allowed: {VERSION})")
        try:
            kernels = [_kernel_from(row) for row in data["kernels"]]
            facts = document.checked(cls, data)
            named = {name: facts[name] for name in ("nvcc", "cutlass", "capability")}
            return cls(**named, kernels={kernel.spec: kernel for kernel in kernels})
        except FOREIGN as exc:
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
    facts = document.checked(Kernel, row)
    proof = row.get("proof")
    if not KEY.fullmatch(facts["artifact"]):
        raise ConfigError(f"'{facts['artifact'][:80]}' is not the key of an artifact")
    checked = None if proof is None else Proof(**document.checked(Proof, proof))
    return Kernel(**{**facts, "proof": checked})
