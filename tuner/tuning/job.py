"""Jobs, which sweep many problems with one set of options on this machine.

While one problem's finalists are timed, the next one's kernels are compiled. Tuned problems are
skipped. Stored jobs (`tuner.store.jobs`) are run by controllers (`tuner.tuning.controller`)
instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tuner.base import document
from tuner.base.printable import one_line
from tuner.errors import ConfigError, StoreError, TunerError
from tuner.families import families_of
from tuner.hardware import DEFAULT_GPU
from tuner.measure.tolerance import floor_work
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.runners.base import Runner
from tuner.runners.choose import Runners
from tuner.store import Store, SweepRecord
from tuner.tuning.budget import Budget
from tuner.tuning.options import Catalogue, SweepOptions, check_families
from tuner.tuning.outcome import Outcome
from tuner.tuning.progress import Interruption, Watcher
from tuner.tuning.sweep import Sweep

if TYPE_CHECKING:
    from tuner.search.storage import StudyStorage

DEFAULT_OP = "attention"
MAX_BYTES = 4 << 20
"""Maximum bytes of a list of problems; 10,000 problems take a tenth of it."""
MAX_ERRORS = 20
"""Maximum wrong entries that a message names."""


@dataclass(frozen=True)
class JobOptions:
    """Options common to all problems of a job."""

    sweep: SweepOptions = field(default_factory=SweepOptions)
    launch: str | None = None
    """Launch regime, in place of the operation's default."""
    l2: str | None = None
    """L2 regime, in place of the operation's default."""
    skip_tuned: bool = True
    """Skip a problem whose sweep with equal settings ended in this environment."""

    def regime(self, problem: Problem) -> Regime:
        default = Regime.default(problem.op)
        return Regime(self.launch or default.launch, self.l2 or default.l2)

    def check(self, problems: Iterable[Problem], catalogue: Catalogue = families_of) -> None:
        """Check that the options fit the problems.

        Raises:
            ConfigError: when a named family does not serve one of the problems.
        """
        Regime(self.launch or "stream", self.l2 or "warm")
        for op in sorted({problem.op for problem in problems}):
            check_families(self.sweep.families, op, catalogue(op))

    def find_tuned(self, problem: Problem, runner: Runner, store: Store) -> SweepRecord | None:
        """Completed sweep of a problem with equal settings in this environment, if any."""
        if not self.skip_tuned:
            return None
        sweep = store.find_sweep(
            problem,
            runner.gpu,
            runner.regime,
            runner.environment.digest,
            self.sweep.digest(runner.provenance),
        )
        return sweep if sweep is not None and sweep.state == "done" else None

    def to_json(self) -> dict[str, Any]:
        """JSON of names and numbers."""
        data = asdict(self)
        return {**data.pop("sweep"), **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ConfigError: when an option is unknown or out of range.
        """
        own = {name: data[name] for name in ("launch", "l2", "skip_tuned") if name in data}
        # "widen" is an option of earlier versions.
        more = {name: data[name] for name in data if name not in own and name != "widen"}
        more["families"] = tuple(more.get("families", ()))
        try:
            return cls(SweepOptions(**more), **own)
        except TypeError as exc:
            raise ConfigError(f"options of a job: {exc}") from exc


@dataclass
class JobResult:
    """Outcomes of a job's problems."""

    outcomes: list[Outcome] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)
    failed: list[tuple[Problem, TunerError]] = field(default_factory=list)
    interrupted: bool = False


class Job:
    """Job over many problems. A failing one does not stop the others.

    Args:
        problems: problems to sweep, each once for every GPU model.
        runners: runners of the GPUs, or of the first GPU model.
        store: store for the results.
        options: options for all problems.
        watcher: receiver of every change.
        interruption: interruption that ends the job early.
        catalogue: finds the families of an operation.
        further: runners of other GPU models. One sweep never mixes times of two models.
        studies: storage for copies of the searches' studies.

    Raises:
        ConfigError: when a family that the options name does not serve one of the problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        runners: Runners,
        store: Store,
        options: JobOptions,
        *,
        watcher: Watcher | None = None,
        interruption: Interruption | None = None,
        catalogue: Catalogue = families_of,
        further: Sequence[Runners] = (),
        studies: StudyStorage | None = None,
    ) -> None:
        options.check(problems, catalogue)
        self._problems = list(dict.fromkeys(problems))
        self._runners = runners
        self._kinds = [runners, *further]
        self._store = store
        self._options = options
        self._watcher = watcher or Watcher()
        self._interruption = interruption or Interruption()
        self._catalogue = catalogue
        self._studies = studies
        self._sweeps: dict[Problem, Sweep] = {}
        self._beside: list[Runner] = []
        self._lock = threading.Lock()

    def run(self) -> JobResult:
        """Sweep the problems, as many at a time as there are GPUs. While one problem's finalists
        are timed on one GPU, the others continue their searches. The costliest problems come first,
        so that none runs alone at the end. If all kernels are compiled, one GPU gets two problems
        at a time, so that it stays busy while a search computes.

        Raises:
            ConfigError: when the chosen device does not exist.
            StoreError: when the store fails, since later results would be lost.
        """
        # Detected first, so that notes about the GPUs are printed before the sweeps start.
        devices = sum(len(runners.devices) for runners in self._kinds)
        together = 2 if devices == 1 and self._options.sweep.compiled_only else devices
        if together > 1 and len(self._problems) * len(self._kinds) > 1:
            return self._run_together(together, costliest_first=devices > 1)
        result = JobResult()
        for position, problem in enumerate(self._problems):
            if self._interruption.requested:
                result.interrupted = True
                break
            ahead = partial(self._ahead, self._problems[position + 1 :])
            self._sweep(problem, self._runners.of, result, ahead)
            self._sweeps.pop(problem, None)
        return result

    def _run_together(self, count: int, *, costliest_first: bool) -> JobResult:
        """Sweep several problems at a time, one thread each. Results are in the order of the
        problems.
        """
        turns = [(p, runners, JobResult()) for p in self._problems for runners in self._kinds]
        results = [result for *_, result in turns]
        if costliest_first:
            turns.sort(key=lambda turn: _floor_us(turn[0]), reverse=True)
        with ThreadPoolExecutor(count, thread_name_prefix="sweep") as threads:
            futures = [threads.submit(self._sweep_beside, *turn) for turn in turns]
            try:
                # Wait until all are done, one failed, or the second Ctrl-C. The first Ctrl-C ends
                # them early.
                with self._interruption.waiting():
                    wait(futures, return_when=FIRST_EXCEPTION)
                if self._interruption.requested:
                    with self._lock:
                        beside = list(self._beside)
                    for runner in beside:
                        runner.cancel()
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                # At once, because later results of the others would be lost or unwanted.
                threads.shutdown(wait=False, cancel_futures=True)
                for runners in self._kinds:
                    runners.close()
                raise
        return JobResult(
            outcomes=[outcome for result in results for outcome in result.outcomes],
            skipped=[problem for result in results for problem in result.skipped],
            failed=[failure for result in results for failure in result.failed],
            interrupted=any(result.interrupted for result in results),
        )

    def _sweep_beside(self, problem: Problem, runners: Runners, result: JobResult) -> None:
        """Sweep a problem beside others, with a runner of its own."""
        if self._interruption.requested:
            result.interrupted = True
            return
        own_runners: list[Runner] = []

        def apart(problem: Problem, regime: Regime) -> Runner:
            if not own_runners:
                own_runners.append(runners.apart(problem, regime))
                with self._lock:
                    self._beside.append(own_runners[0])
            return own_runners[0]

        try:
            self._sweep(problem, apart, result)
        finally:
            with self._lock:
                self._beside = [runner for runner in self._beside if runner not in own_runners]
            for runner in own_runners:
                runner.close()

    def _sweep(
        self,
        problem: Problem,
        runner_of: Callable[[Problem, Regime], Runner],
        result: JobResult,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        """Sweep one problem, and add its outcome to the result."""
        began = Budget.now()  # the time to read the machine's environment counts
        try:
            sweep = self._prepare(problem, runner_of)
            if sweep is None:
                result.skipped.append(problem)
                return
            outcome = sweep.run(on_drained, began)
            result.outcomes.append(outcome)
            result.interrupted |= outcome.interrupted
            with self._lock:
                self._watcher.finished(outcome)
        except StoreError:
            raise
        except TunerError as exc:
            result.failed.append((problem, exc))
            self._watcher.failed(problem)

    def _prepare(
        self, problem: Problem, runner_of: Callable[[Problem, Regime], Runner]
    ) -> Sweep | None:
        """Prepare the sweep of a problem; None if it is already tuned."""
        if problem in self._sweeps:
            return self._sweeps[problem]
        runner = runner_of(problem, self._options.regime(problem))
        if self._options.find_tuned(problem, runner, self._store) is not None:
            return None
        return Sweep(
            problem,
            runner.regime,
            runner,
            self._store,
            self._options.sweep,
            watcher=self._watcher,
            interruption=self._interruption,
            catalogue=self._catalogue,
            studies=self._studies,
        )

    def _ahead(self, problems: Sequence[Problem]) -> None:
        """Start compiling for the next untuned problem. Its errors are reported at its turn."""
        for problem in problems:
            try:
                sweep = self._prepare(problem, self._runners.of)
                if sweep is not None:
                    sweep.prefetch()
                    self._sweeps[problem] = sweep
                    return
            except StoreError:
                raise
            except TunerError:
                continue


def _floor_us(problem: Problem) -> float:
    """Lower bound of a call's time in microseconds, to order problems by the cost of timing."""
    return DEFAULT_GPU.floor_us(*floor_work(problem))


def read_problems(path: Path, op: str = DEFAULT_OP) -> list[Problem]:
    """Read a YAML or JSON list of problems.

    An entry is a string (``S=1024,D=64``, with ``op=gemm`` for another operation) or an object with
    the same keys.

    Args:
        path: path of the file.
        op: operation of entries without one.

    Raises:
        ConfigError: names the wrong entries, at most `MAX_ERRORS`.
    """
    entries = _load(path, _read(path))
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"problems file {path} must hold a list of problems that is not empty")
    problems: list[Problem] = []
    errors: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            problems.append(parse_problem(entry, op))
        except ConfigError as exc:
            errors.append(f"entry {number}: {one_line(str(exc))}")
    if errors:
        more = len(errors) - MAX_ERRORS
        raise ConfigError(
            f"{len(errors)} of the {len(entries)} problems in {path} are wrong; "
            "nothing was started\n"
            + "\n".join(errors[:MAX_ERRORS])
            + (f"\nand {more} more" if more > 0 else "")
        )
    return problems


def parse_problem(entry: Any, op: str = DEFAULT_OP) -> Problem:
    """Parse a problem from a string or from an object of keys.

    Args:
        entry: the string or the object.
        op: operation of an entry without one.

    Raises:
        ConfigError: when it is neither, or the problem is not valid.
    """
    if isinstance(entry, str):
        parts = [part.strip() for part in entry.split(",")]
        named = [part.removeprefix("op=") for part in parts if part.startswith("op=")]
        if len(named) > 1:
            raise ConfigError("key 'op' is given twice")
        shape = ",".join(part for part in parts if not part.startswith("op="))
        return _problem_class(named[0] if named else op).parse(shape)
    if isinstance(entry, dict):
        values = {str(key): value for key, value in entry.items()}
        return _problem_class(values.pop("op", op)).from_keys(values)
    raise ConfigError(f"{entry!r} is neither text like S=1024,D=64 nor an object of such keys")


def _problem_class(op: Any) -> type[Problem]:
    if not isinstance(op, str) or op not in PROBLEMS:
        raise ConfigError(f"op={op} is not known (allowed: {', '.join(PROBLEMS)})")
    return PROBLEMS[op]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"problems file {path} is too large (allowed: {MAX_BYTES} bytes)")
        return text.decode()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"problems file {path} cannot be read: {reason}") from exc


def _load(path: Path, text: str) -> Any:
    is_json = path.suffix == ".json"
    try:
        return (document.parse if is_json else document.parse_yaml)(text, _unrepeated)
    except ConfigError as exc:
        raise ConfigError(f"problems file {path}: {one_line(str(exc))}") from exc
    except ValueError as exc:
        kind = "JSON" if is_json else "YAML"
        reason = one_line(str(exc))
        raise ConfigError(f"problems file {path} is not {kind}: {reason}") from exc


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ConfigError(f"key '{key}' is given twice")
        unique[key] = value
    return unique
