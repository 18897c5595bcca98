"""Bits of built kernels, compared over calls (`tuner prove --invariance`).

A kernel varies whose rows depend on the other rows of a call, or differ from those of its class
(`Family.reduction_class`). It is noted in the kernel list, and serves no batch-invariant call from
then on. The rows are compared in a process of its own, which a kernel that hangs or fails costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tuner.base.processes import python_command, python_environment
from tuner.errors import WorkerLostError
from tuner.families.target import Target
from tuner.selection.kernels import read, update

MODULE = "tuner.runtime.bit_checks"
"""Program of the process; models' calls are above this package."""
LIMIT_S = 300.0
"""Seconds that the comparisons of one kernel may take."""


class BitChecker:
    """A process that compares the rows of one kernel at a time.

    Args:
        device: index of the CUDA device.
        limit_s: seconds for a kernel.
        command: program and arguments; None: `MODULE`.
    """

    def __init__(
        self, device: int, limit_s: float = LIMIT_S, command: Sequence[str] | None = None
    ) -> None:
        self._device, self._limit_s = device, limit_s
        self._command = list(command or python_command("-m", MODULE))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def ask(self, target: Target, artifacts: dict[str, str]) -> dict[str, Any]:
        """The counts of a kernel (`tuner.runtime.bit_checks`).

        Args:
            target: the kernel, and a small problem of its domain.
            artifacts: keys of its libraries, by their names.

        Raises:
            WorkerLostError: when it failed, or took too long.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        facts = {"problem": target.problem.to_json(), "config": target.config.to_json()}
        timer = threading.Timer(self._limit_s, self._kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({**facts, "artifacts": artifacts}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError as exc:
            line = json.dumps({"error": str(exc)})
        finally:
            timer.cancel()
        answer: dict[str, Any] = json.loads(line or '{"error": "no answer"}')
        if "error" in answer:
            self.end()
            raise WorkerLostError(str(answer["error"]))
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            visible = devices[self._device] if devices[0] else str(self._device)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**python_environment(), "CUDA_VISIBLE_DEVICES": visible},
                text=True,
            )
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """End the process; the next kernel starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


@dataclass
class InvarianceProgress:
    """Progress of a run."""

    kernels: int = 0
    """Kernels that were compared."""
    rows: int = 0
    """Rows that were compared with the same rows of other calls and kernels."""
    skipped: int = 0
    """Kernels without a proof, or without a class."""
    variant: list[str] = field(default_factory=list)
    """Kernels that serve no batch-invariant call, and why."""


def compare_rows(
    path: Path,
    targets: Sequence[Target],
    checker: BitChecker,
    *,
    changed: Callable[[InvarianceProgress], None] = lambda progress: None,
    is_over: Callable[[], bool] = lambda: False,
) -> InvarianceProgress:
    """Compare the rows of a list's proven kernels, and note those that vary in the list.

    Args:
        path: path of the kernel list.
        targets: kernels to compare.
        checker: process that compares.
        changed: called after each kernel.
        is_over: called before each; True ends the run.

    Raises:
        ConfigError: when the list cannot be read.
        StoreError: when it cannot be written.
    """
    kernel_list, progress = read(path), InvarianceProgress()
    for target in targets:
        if is_over():
            break
        kernels = {name: kernel_list.find(spec) for name, spec in target.kernels.items()}
        artifacts = {name: one.artifact for name, one in kernels.items() if one and one.proof}
        if len(artifacts) < len(kernels):
            progress.skipped += 1
            continue
        reason = ""
        try:
            rows = checker.ask(target, artifacts)
        except WorkerLostError as exc:
            reason, rows = f"not compared: {exc}", {}
        if not reason and not rows.get("views"):
            progress.skipped += 1
            continue
        progress.kernels += 1
        progress.rows += rows.get("compared", 0) + rows.get("crossed", 0)
        reason = reason or _reason(rows)
        if reason:
            progress.variant.append(f"{target.label()}: {reason}")
        _note(path, set(artifacts.values()), reason)
        changed(progress)
    return progress


def _reason(report: dict[str, Any]) -> str:
    """Why a kernel varies; empty when it does not."""
    if report["differing"]:
        at = ", ".join(report["at"])
        return f"{report['differing']} of {report['compared']} rows differ, at {at}"
    if report["crossed_differing"]:
        rows = f"{report['crossed_differing']} of {report['crossed']}"
        return f"{rows} rows differ from those of the class {report['class']}"
    return ""


def _note(path: Path, artifacts: set[str], reason: str) -> None:
    """Note in a list that kernels vary, or that they do not."""
    if not reason and not artifacts & read(path).variant.keys():
        return
    update(
        path,
        lambda k: replace(
            k,
            variant={
                **{key: text for key, text in k.variant.items() if key not in artifacts},
                **(dict.fromkeys(artifacts, reason) if reason else {}),
            },
        ),
    )
