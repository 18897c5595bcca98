"""A compiler that is not there: it names artifacts after their specs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from tuner.compile.artifacts import Artifact
from tuner.errors import CompileError
from tuner.families.base import KernelSpec
from tuner.measurement import Resources

TOOLS = SimpleNamespace(nvcc_version="13.0.88", cutlass_version="4.2.0")
#: Attributes of `Compiler` before each test.
STATE: dict[str, Any] = {"version": "1", "refuses": "", "built": [], "company": 1, "units": []}


class Compiler:
    """Names artifacts after their specs and the version of the templates."""

    version: ClassVar[str] = "1"
    refuses: ClassVar[str] = ""
    built: ClassVar[list[KernelSpec]] = []
    company: ClassVar[int] = 1
    units: ClassVar[list[list[KernelSpec]]] = []

    def __init__(self, tools: Any, artifacts: Any, *, jobs: int | None, capability: str) -> None:
        self.toolchain, self.capability = tools, capability
        self.artifacts = artifacts

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None: ...

    def key(self, spec: KernelSpec) -> str:
        return hashlib.sha256(f"{self.version}{spec.key}".encode()).hexdigest()[:32]

    def cached(self, spec: KernelSpec) -> Artifact | None:
        return self._artifact(spec) if spec in self.built else None

    def _artifact(self, spec: KernelSpec) -> Artifact:
        key = self.key(spec)
        facts = {"kernels_in_unit": self.company}
        sha256 = f"sha of {key}" if self.company == 1 else "sha of all"
        used = Resources(168, 0, 0, 0, code=f"code of {spec.key}")
        return Artifact(key, Path("kernel.so"), sha256, used, 30.0, facts)

    def fix_units(self, units: list[list[KernelSpec]]) -> None:
        self.units.extend(units)

    def submit(self, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Future[Artifact]]]:
        made = []
        for spec in specs:
            future: Future[Artifact] = Future()
            if self.refuses and spec.variables.get("dtype") == self.refuses:
                future.set_exception(CompileError("nvcc refused"))
            else:
                self.built.append(spec)
                future.set_result(self._artifact(spec))
            made.append((spec, future))
        return made
