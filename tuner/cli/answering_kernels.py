"""Build of the kernels that answer some problems, those with the largest share of the time first.

Kernels of portfolios and rules enter the machine's kernel list, with the proofs that ship. Kernels
of measured decisions are recorded in the store. A program that serves takes each up as it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tuner.base import document
from tuner.cli.aot import compile_aot, say
from tuner.compile.artifacts import Artifact
from tuner.errors import NoValidConfigError, TunerError
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu

if TYPE_CHECKING:
    from tuner.compile.compiler import Compiler
    from tuner.selection.answering import Answering, AnswerRow
    from tuner.store import Store
    from tuner.tuning.built import BuiltKernels


def build(
    rows: Sequence[AnswerRow],
    gpu: Gpu,
    compiler: Compiler,
    store: Store,
    *,
    dry_run: bool,
    force: bool,
    libraries: Callable[[], None],
    started: float,
) -> BuildResult:
    """Compile the kernels of some problems' answers.

    Args:
        rows: problems with their answers and shares.
        gpu: GPU that they hold for.
        compiler: compiler for its compute capability.
        store: store that records the kernels of measured decisions.
        dry_run: True to list the kernels without compiling.
        force: True to replace proven kernels in the list by builds without a proof.
        libraries: builds the libraries beside the kernels, in a thread.
        started: `time.monotonic` at which the command began.

    Raises:
        ConfigError: when the kernel list cannot be read.
        NoValidConfigError: when no own kernel answers any of the problems.
        StoreError: when the cache, the list or the store cannot be written.
    """
    from tuner.selection.answering import needed

    own = _own(rows, gpu)
    legal = [row for row in own if _is_legal(row.answer, gpu)]
    shares = dict(needed(legal))
    compiled = {spec for spec in shares if compiler.cached(spec) is not None}
    share = sum(row.share for row in legal)
    say(
        f"{len(rows)} problems on {gpu.name}: own kernels answer {len(legal)}, "
        f"{100 * share:.0f} % of the calls' time; {len(shares)} kernels, {len(compiled)} of them "
        "compiled already"
    )
    if dry_run:
        firsts = {spec: row.answer for row in legal[::-1] for spec in row.answer.kernels.values()}
        for spec, part in shares.items():
            text, answer = "compiled" if spec in compiled else "missing ", firsts[spec]
            print(f"{text}  {100 * part:4.1f} %  {answer.by} for {answer.problem.label()}")
        return BuildResult(len(compiled), [], [])
    beside = threading.Thread(target=libraries, name="tuner-libraries", daemon=True)
    beside.start()
    entered = _Entered(legal, compiler, store, force=force)
    course: list[tuple[float, float]] = []

    def enter(spec: KernelSpec, artifact: Artifact) -> None:
        entered.enter(spec, artifact)
        answered = sum(shares[one] for one in entered.built) / sum(shares.values())
        course.append((round(time.monotonic() - started, 2), round(answered, 4)))

    begun = time.monotonic()
    compile_aot(list(shares), compiler, None, begun, enter, with_gate=False, shares=shares)
    beside.join()
    say(entered.said())
    failed = [row.answer for row in own if row not in legal or not entered.has(row.answer)]
    return BuildResult(
        len(entered.built),
        [f"{answer.by} for {answer.problem.label()}" for answer in failed],
        course,
    )


class BuildResult(NamedTuple):
    """Result of a build."""

    built: int
    """Kernels that are there."""
    failed: list[str]
    """Answers that lack a kernel."""
    course: list[tuple[float, float]]
    """Seconds since the command began, and the answered part of own kernels' time, by kernel."""


def _own(rows: Sequence[AnswerRow], gpu: Gpu) -> list[AnswerRow]:
    """Rows that an own kernel answers.

    Raises:
        NoValidConfigError: when there are none.
    """
    own = [row for row in rows if row.answer.config is not None]
    if not own:
        names = ", ".join(dict.fromkeys(row.answer.by for row in rows))
        raise NoValidConfigError(
            f"nothing to build: {names} answers {rows[0].answer.problem.label()} on {gpu.name}"
            + (f" and {len(rows) - 1} further problems" if rows[1:] else "")
        )
    return own


def _is_legal(answer: Answering, gpu: Gpu) -> bool:
    """True when the config's family has kernels for the problem; else says why not."""
    from tuner.families import family

    reasons = ["it has no kernels"]
    try:
        if answer.config is not None and answer.kernels:
            reasons = family(answer.config.family).violations(answer.problem, answer.config, gpu)
    except (TunerError, *document.FAULTS) as exc:
        reasons = [str(exc)]
    if reasons:
        say(f"{answer.problem.op} {answer.problem.label()}: not legal here: {'; '.join(reasons)}")
    return not reasons


class _Entered:
    """Kernels as they are compiled, in the kernel list and in the store."""

    def __init__(
        self, rows: Sequence[AnswerRow], compiler: Compiler, store: Store, *, force: bool
    ) -> None:
        from tuner.selection.kernels import path_of, update
        from tuner.tuning.built import BuiltKernels

        self._store = store
        self._decided = [row.answer for row in rows if row.answer.measured is not None]
        answers = [row.answer for row in rows if row.answer.measured is None]
        self._listed = {spec for answer in answers for spec in answer.kernels.values()}
        self.built: dict[KernelSpec, Artifact] = {}
        self._path: Path = path_of(compiler.toolchain.nvcc_version, compiler.capability)
        self._entries: BuiltKernels | None = None
        if self._listed:
            from tuner.cli.portfolio import starting_list

            update(self._path, lambda rows: rows, start=lambda: starting_list(self._path, compiler))
            self._entries = BuiltKernels(self._path, force=force)

    def enter(self, spec: KernelSpec, artifact: Artifact) -> None:
        """Enter a compiled kernel where the runtime looks for it.

        Raises:
            StoreError: when the list or the store cannot be written.
        """
        self.built[spec] = artifact
        if self._entries is not None and spec in self._listed:
            self._entries.enter(spec, artifact)
        for answer in self._decided:
            if spec in answer.kernels.values() and self.has(answer):
                self._record(answer)

    def has(self, answer: Answering) -> bool:
        """True when all kernels of an answer are built."""
        return all(spec in self.built for spec in answer.kernels.values())

    def _record(self, answer: Answering) -> None:
        measured = answer.measured
        artifacts = {name: self.built[spec].key for name, spec in answer.kernels.items()}
        if measured is not None and artifacts != dict(measured.artifacts):
            self._store.record_build(measured.problem, measured.config, artifacts)

    def said(self) -> str:
        """Result in one line."""
        from tuner.selection.kernels import PROVE, read

        text = f"{len(self.built)} kernels are built"
        if not self._listed:
            return text
        kernels = read(self._path)
        rows = [kernels.find(spec) for spec in self._listed & self.built.keys()]
        proven = sum(row is not None and row.proof is not None for row in rows)
        text += f"; {proven} of {len(rows)} that need a proof have one"
        return text if proven == len(rows) else f"{text} ({PROVE} checks the others on the GPU)"
