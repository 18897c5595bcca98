"""What was found, as JSON and as a short table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.families.base import KernelSpec

from .plan import Kernel, Trial

#: Faults printed below the table; the JSON has all.
MAX_LINES = 20


@dataclass(frozen=True)
class Finding:
    """What one kernel did on one case; no `faults` is a pass."""

    frobenius: float | None = None
    """Relative Frobenius error against fp64."""
    row: float | None = None
    """The worst row's relative error."""
    lse: float | None = None
    """Worst absolute error of the log-sum-exp; None where the kernel writes none."""
    peer: float | None = None
    """FlashAttention-2's relative Frobenius error; None where it does not take the input."""
    repeats: int = 0
    """Launches compared bit by bit with the first."""
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """NaN and infinity, which JSON does not have, are None; `faults` names them."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class Report:
    """Every trial with what was found."""

    kernels: Sequence[Kernel]
    artifacts: Mapping[KernelSpec, Artifact]
    results: Sequence[tuple[Trial, Finding]]
    environment: Mapping[str, Any]
    seconds: float

    def of(self, section: str) -> list[tuple[Trial, Finding]]:
        return [(trial, found) for trial, found in self.results if trial.case.section == section]

    def faults(self, section: str | None = None) -> list[str]:
        """One line a fault: the case, the config, what is wrong."""
        results = self.results if section is None else self.of(section)
        return [
            f"{trial.case.label()}: {trial.config.digest} {_text(trial)}: {fault}"
            for trial, found in results
            for fault in found.faults
        ]

    def write(self, path: Path) -> None:
        """The whole report as JSON."""
        data = {
            "environment": dict(self.environment),
            "seconds": round(self.seconds, 1),
            "cases": len({trial.case for trial, _ in self.results}),
            "problems": len({trial.case.problem for trial, _ in self.results}),
            "faults": len(self.faults()),
            "kernels": [
                {
                    "head_dim": kernel.combination[0],
                    "is_causal": kernel.combination[1],
                    "dtype": kernel.combination[2],
                    "origin": kernel.origin,
                    "configs": [config.to_json() for config in kernel.members],
                }
                for kernel in self.kernels
            ],
            "artifacts": {
                artifact.key: {
                    "template": spec.template,
                    "variables": dict(spec.variables),
                    "resources": asdict(artifact.resources) if artifact.resources else None,
                }
                for spec, artifact in self.artifacts.items()
            },
            "results": [
                {
                    "section": trial.case.section,
                    "problem": trial.case.problem.label(),
                    "kind": trial.case.kind,
                    "scale_factor": trial.case.scale_factor,
                    "config": trial.config.to_json(),
                    **found.to_json(),
                }
                for trial, found in self.results
            ],
        }
        path.write_text(json.dumps(data, indent=1) + "\n")

    def table(self) -> str:
        """A line a section, then the first faults, then the sum."""
        head = ("section", "cases", "checks", "fp16", "bf16", "/ FA2", "lse", "repeats", "faults")
        sections = dict.fromkeys(trial.case.section for trial, _ in self.results)
        rows = [head, *((name, *_summary(self.of(name))) for name in sections)]
        rows.append(("all", *_summary(self.results)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                 for row in rows]  # fmt: skip
        faults = self.faults()
        lines += [f"FAULT {fault}" for fault in faults[:MAX_LINES]]
        if len(faults) > MAX_LINES:
            lines.append(f"and {len(faults) - MAX_LINES} more")
        lines.append(
            f"{len(self.artifacts)} kernels, {len({t.case.problem for t, _ in self.results})} "
            f"problems, {len(faults)} faults, {self.seconds:.0f} s"
        )
        return "\n".join(lines)


def _text(trial: Trial) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(trial.config.params.items()))


def _summary(results: Sequence[tuple[Trial, Finding]]) -> tuple[str, ...]:
    """Counts, and the worst of each number."""

    def worst(values: Iterable[float | None], form: str = ".1e") -> str:
        known = [value for value in values if value is not None and math.isfinite(value)]
        return format(max(known), form) if known else "-"

    def errors(dtype: str) -> str:
        return worst(f.frobenius for t, f in results if t.case.problem.dtype == dtype)

    ratios = [f.frobenius / f.peer for _, f in results if f.frobenius and f.peer]
    return (
        str(len({trial.case for trial, _ in results})),
        str(len(results)),
        errors("float16"),
        errors("bfloat16"),
        worst(ratios, ".3f"),
        worst(f.lse for _, f in results),
        str(sum(f.repeats for _, f in results)),
        str(sum(bool(f.faults) for _, f in results)),
    )
