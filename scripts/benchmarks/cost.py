"""``scripts/bench cost``: fits the families' cost models to the recordings and judges the fit.

A family's constants are fitted to the logarithm of the recorded quick times, over all problems at
once; the order within a problem counts most. The judgement is a cross-validation: problems are
shuffled into `FOLDS` parts, and each is judged by a fit without its part. The estimate with which
a search begins is judged too: that fit's, corrected by the results of the other problems.
``--write`` stores the fit to all problems as ``cache/cost/FAMILY.json``, which `Family.constants`
reads.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.arguments import add_recordings
from tuner.base import resources
from tuner.base.install import extra_command
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import DONE, Parser
from tuner.errors import ConfigError
from tuner.families import families, families_of
from tuner.families.base import Family
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.runners import recording, recording_archive
from tuner.runners.recording import Recording
from tuner.search.family_search import FamilySearch
from tuner.selection.describe import table

#: Deviation, in natural logarithms, from which a time counts as an outlier; of a problem's mean;
#: and of a constant from where its fit starts.
SCATTER = 0.05
BIAS = 0.1
PRIOR = 0.3
#: Measurements of a problem that are fitted to, at most: those of the smallest digests, which is a
#: draw. More would not give it more weight.
FULL_WEIGHT = 50
#: Evaluations at most, and the share of the loss that the last one saves: a fit takes 5 to 15.
STEPS = 40
SETTLED = 1e-3
#: Parts of the problems, each left out in turn; of so many problems or fewer each one alone.
FOLDS = 16
#: Measurements from which on a problem's rank correlation says something.
RANKED = 10
#: Rank correlation that is aimed at, and limits of the groups of problems by spread (`by_spread`).
AIM = 0.8
SPREADS = (0.03, 0.06, 0.1, 0.2)
#: Microseconds from which on calls are at the power limit, where times repeat less well.
LONG_US = 100.0
#: Draws of the rank correlation that a perfect estimate would have.
DRAWS = 25


def read(folder: Path) -> list[Recording]:
    """Every recording of a folder, in the order of their names.

    Raises:
        ConfigError: when there is none, or one is damaged.
    """
    sources = recording_archive.sources(folder)
    if not sources:
        raise ConfigError(f"{folder} holds no recording (*{recording.SUFFIX}, or an archive)")
    return [recording.read(source) for source in sources]


def parts(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings and those of their stages, the widest of each problem."""
    found: dict[tuple[str, str, str], Recording] = {}
    for one in recordings:
        for part in one.walk():
            key = _key(part)
            if key not in found or len(part.measurements) > len(found[key].measurements):
                found[key] = part
    return list(found.values())


def _key(part: Recording) -> tuple[str, str, str]:
    return part.problem.key, part.gpu.identity, str(part.regime)


def quick_pass(part: Recording) -> tuple[Measurement, ...]:
    """The quick measurements of own candidates that are legal still."""
    known = families()
    return tuple(
        m
        for m in part.measurements
        if not m.is_final
        and m.config.family in known
        and not known[m.config.family].is_vendor
        and known[m.config.family].accepts(part.problem, m.config, part.gpu)
    )


def estimated(problem: Problem) -> Regime:
    """Regime that estimates of a problem stand for: chained, as the shipped recordings are.

    Inputs are the operation's usual ones, but cold caches for decoding, whose keys no other kernel
    has just written.
    """
    if isinstance(problem, AttentionProblem) and problem.is_decoding:
        return Regime("chained", "cold")
    return Regime.default(problem.op).chained


class Fit:
    """The fits of one set of recordings, each done once.

    An estimate stands for one regime of a problem, `estimated`, and is fitted and judged in that
    alone: a GEMM whose inputs are in the L2 is another thing.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.parts = [p for p in parts(recordings) if p.regime == estimated(p.problem)]
        self._quick = {_key(part): quick_pass(part) for part in self.parts}
        self._folds = cache(self._assigned)
        self._constants = cache(self._fit)

    def quick(self, part: Recording) -> tuple[Measurement, ...]:
        """The quick pass of a problem."""
        return self._quick[_key(part)]

    def measured(self, family: str, part: Recording) -> list[Measurement]:
        """Quick times of one family at a problem; only candidates that passed."""
        return [m for m in self.quick(part) if m.ok and m.config.family == family]

    def constants(self, family: Family, without: Recording | None = None) -> dict[str, float]:
        """Constants of a fit to all problems, or to the folds without a problem."""
        fold = None if without is None else self._folds(family.name).get(without.problem.key)
        return self._constants(family.name, fold)

    def _assigned(self, name: str) -> dict[str, int]:
        """The part of each problem that a family was measured at, by the problem's key."""
        keys = {part.problem.key for part in self.parts if self.measured(name, part)}
        shuffled = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
        return {key: i % FOLDS for i, key in enumerate(shuffled)}

    def without(self, part: Recording) -> list[Family]:
        """The own families that were recorded of a problem, fitted without it."""
        recorded = {m.config.family for m in self.quick(part)}
        return [
            family.refitted(self.constants(family, part)) if family.cost_constants else family
            for name, family in families_of(part.problem.op).items()
            if name in recorded
        ]

    def _fit(self, name: str, left_out: int | None) -> dict[str, float]:
        try:
            import numpy as np
            from scipy.optimize import least_squares
        except ImportError as exc:
            raise ConfigError(f"a fit needs scipy ({exc}): {extra_command('fit')}") from exc

        family = families()[name]
        start = family.cost_constants
        folds = self._folds(name)
        used = [
            (part, measured)
            for part in self.parts
            if (measured := _drawn(self.measured(name, part)))
            and (left_out is None or folds[part.problem.key] != left_out)
        ]
        if not used:
            return dict(start)

        def constants(steps: Sequence[float]) -> dict[str, float]:
            return {n: v * math.exp(s) for (n, v), s in zip(start.items(), steps, strict=True)}

        def residuals(steps: Any) -> Any:
            fitted = family.refitted(constants(steps))
            found: list[Any] = [np.asarray(steps) / PRIOR]
            for part, measured in used:
                errors = np.array(
                    [
                        math.log(fitted.predict_us(part.problem, m.config, part.gpu) / time)
                        for m in measured
                        if (time := m.latency_us) is not None
                    ]
                )
                found += [(errors - errors.mean()) / SCATTER, [errors.mean() / BIAS]]
            return np.concatenate(found)

        answer = least_squares(
            residuals,
            np.zeros(len(start)),
            loss="soft_l1",
            diff_step=1e-2,
            ftol=SETTLED,
            max_nfev=STEPS,
        )
        return {n: float(f"{v:.4g}") for n, v in constants(answer.x).items()}


def _drawn(measured: Sequence[Measurement]) -> list[Measurement]:
    return sorted(measured, key=lambda m: m.config.digest)[:FULL_WEIGHT]


def rank_correlation(
    family: Family, part: Recording, measured: Sequence[Measurement]
) -> float | None:
    """Spearman's, of predicted and measured times; None where too few were measured."""
    if len(measured) < RANKED:
        return None
    from scipy.stats import spearmanr

    predicted = [family.predict_us(part.problem, m.config, part.gpu) for m in measured]
    return float(spearmanr(predicted, [m.latency_us for m in measured]).statistic)


def search_correlation(
    family: Family,
    part: Recording,
    measured: Sequence[Measurement],
    others: Sequence[Measurement],
) -> float | None:
    """Spearman's, of the times that a search would expect before its first result; None where too
    few were measured.

    Args:
        family: family with the constants of a fit without the problem.
        part: recording of the problem.
        measured: its measurements.
        others: measurements of other problems.
    """
    if len(measured) < RANKED:
        return None
    from scipy.stats import spearmanr

    space = [m.config for m in measured]
    search = FamilySearch(
        family, part.problem, part.gpu, space, seeds=0, sampler="model", seed=0, history=others
    )
    assert search.surrogate is not None
    expected = []
    for m in measured:
        key = family.compile_digest(m.config)
        of_group = min(family.predict_us(part.problem, c, part.gpu) for c in search.groups[key])
        own = family.predict_us(part.problem, m.config, part.gpu)
        expected.append(search.surrogate.mean(key) + math.log(own / of_group))
    return float(spearmanr(expected, [m.latency_us for m in measured]).statistic)


def repeatability(parts: Sequence[Recording], family: str) -> dict[bool, float]:
    """Deviation of a candidate's quick time from its time in the final pass, in logarithms.

    By whether calls take `LONG_US` or more. The mean of each problem does not count.
    """
    squares: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    for part in parts:
        finals = {m.config: m.latency_us for m in part.measurements if m.is_final and m.ok}
        pairs = [
            (m.latency_us, final)
            for m in quick_pass(part)
            if m.ok and m.config.family == family and m.latency_us
            if (final := finals.get(m.config))
        ]
        if len(pairs) > 1:
            changes = [math.log(quick / final) for quick, final in pairs]
            is_long = statistics.median(final for _, final in pairs) >= LONG_US
            spread = len(changes) * statistics.pvariance(changes)
            squares[is_long].append((spread, len(changes) - 1))
    return {
        is_long: math.sqrt(sum(s for s, _ in found) / sum(n for _, n in found))
        for is_long, found in squares.items()
        if found
    }


def attainable(times: Sequence[float], noise: float) -> float | None:
    """Rank correlation that a perfect estimate would have with times of this noise; None where too
    few were measured.

    Args:
        times: the measured ones.
        noise: deviation of a time when it is measured again, in logarithms.
    """
    if len(times) < RANKED:
        return None
    from scipy.stats import spearmanr

    draw = random.Random(len(times))
    spread = deviation(times)
    kept = math.sqrt(max(0.0, 1 - (noise / spread) ** 2)) if spread else 0.0
    true = [kept * math.log(one) for one in times]
    if not kept:
        return 0.0
    found = [
        spearmanr(true, [one + draw.gauss(0, noise) for one in true]).statistic
        for _ in range(DRAWS)
    ]
    return float(statistics.median(found))


def within_kernels(
    family: Family, measured: Sequence[Measurement], ratios: Sequence[float]
) -> float | None:
    """Deviation of the estimate's error among the run-time variants of one compiled kernel; None
    where none has two.

    Args:
        family: family of the measurements.
        measured: the measurements.
        ratios: their estimates over their times.
    """
    kernels: dict[str, list[float]] = {}
    for m, ratio in zip(measured, ratios, strict=True):
        kernels.setdefault(family.compile_digest(m.config), []).append(math.log(ratio))
    groups = [group for group in kernels.values() if len(group) > 1]
    if not groups:
        return None
    squares = sum(len(group) * statistics.pvariance(group) for group in groups)
    return math.sqrt(squares / sum(len(group) - 1 for group in groups))


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the natural logarithms."""
    return statistics.pstdev(map(math.log, values))


def judge(fit: Fit, family: Family) -> list[dict[str, Any]]:
    """How a family's estimate does on each problem, by a fit without and with it."""
    rows = []
    noise = repeatability(fit.parts, family.name)
    for part in fit.parts:
        measured = fit.measured(family.name, part)
        if not measured:
            continue
        times = [m.latency_us for m in measured if m.latency_us]
        own = noise.get(statistics.median(times) >= LONG_US, 0.0)
        left_out = family.refitted(fit.constants(family, part))
        fitted = family.refitted(fit.constants(family))
        predicted = {
            m.config: left_out.predict_us(part.problem, m.config, part.gpu) for m in measured
        }
        others = [
            m
            for one in fit.parts
            if one.problem != part.problem and one.gpu.identity == part.gpu.identity
            for m in fit.measured(family.name, one)
        ]
        best = min(measured, key=lambda m: m.latency_us or math.inf)
        ratios = [predicted[m.config] / m.latency_us for m in measured if m.latency_us]
        rows.append(
            {
                "problem": f"{part.problem.op} {part.problem.label()}",
                "measurements": len(measured),
                "spearman": rank_correlation(left_out, part, measured),
                "spearman_in_fit": rank_correlation(fitted, part, measured),
                "spearman_of_search": search_correlation(left_out, part, measured, others),
                "bias": math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1,
                "attainable": attainable(times, own),
                "spread": deviation(times),
                "error": deviation(ratios),
                "error_in_kernels": within_kernels(family, measured, ratios),
                "best_over_lowest": predicted[best.config] / min(predicted.values()),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, judge, and with ``--write`` store.

    Raises:
        ConfigError: when an argument or a recording is wrong.
    """
    parser = Parser(
        prog="scripts/bench cost",
        description="Fits the cost models to the recordings; each problem is judged by the fit "
        "that left it out.",
    )
    add_recordings(parser)
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="only this family; may be repeated"
    )
    parser.add_argument("--write", action="store_true", help="store the constants in cache/cost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    known = {name: f for name, f in families().items() if f.cost_constants}
    for name in args.family or ():
        if name not in known:
            raise ConfigError(f"family '{name}' has no fit (allowed: {', '.join(known)})")
    check_place(args.json)
    fit = Fit(read(args.recordings))
    document = {}
    for name in args.family or known:
        family = known[name]
        judged = judge(fit, family)
        constants = fit.constants(family)
        document[name] = {"constants": constants, "judged": judged}
        print(f"\n{name}: " + ", ".join(f"{n}={v:g}" for n, v in constants.items()))
        print(_table(judged))
        print(by_spread(judged))
        if args.write and any(row["spearman"] is not None for row in judged):
            _write(name, constants, judged)
    if args.json is not None:
        write_json(args.json, document)
    return DONE


def _table(judged: Sequence[Mapping[str, Any]]) -> str:
    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    head = (
        *(
            "problem",
            "measured",
            "Spearman left out",
            "in fit",
            "in a search",
            "bias",
            "best / lowest",
        ),
        *("spread", "error"),
    )
    rows = [
        (
            row["problem"],
            str(row["measurements"]),
            text(row["spearman"]),
            text(row["spearman_in_fit"]),
            text(row["spearman_of_search"]),
            f"{100 * row['bias']:+.0f} %",
            f"{row['best_over_lowest']:.3f}",
            *(f"{100 * row[name]:.1f} %" for name in ("spread", "error")),
        )
        for row in judged
    ]
    return table([head, *rows], frozenset(range(1, len(head))))


def by_spread(judged: Sequence[Mapping[str, Any]]) -> str:
    """Rank correlations of the problems, grouped by the deviation of their measured times."""
    rows = []
    for low, high in pairwise((0.0, *SPREADS, math.inf)):
        group = [r for r in judged if low <= r["spread"] < high and r["spearman"] is not None]
        if group:
            found = [row["spearman"] for row in group]
            rows.append(
                (
                    f"{100 * low:.0f} % and more"
                    if math.isinf(high)
                    else f"{100 * low:.0f} to {100 * high:.0f} %",
                    str(len(group)),
                    str(sum(value >= AIM for value in found)),
                    str(sum(row["spearman_of_search"] >= AIM for row in group)),
                    str(sum(row["attainable"] >= AIM for row in group)),
                    f"{statistics.median(found):.2f}",
                    f"{100 * statistics.median(row['error'] for row in group):.1f} %",
                    _median([row["error_in_kernels"] for row in group]),
                )
            )
    head = (
        *("spread of the times", "problems", f"{AIM} or more", "in a search"),
        *("by a perfect estimate",),
        *("median", "median error", "within a kernel"),
    )
    return table([head, *rows], frozenset(range(1, len(head))))


def _median(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{100 * statistics.median(known):.1f} %" if known else ""


def _write(name: str, constants: Mapping[str, float], judged: Sequence[Mapping[str, Any]]) -> None:
    folder = resources.cache() / "cost"
    folder.mkdir(exist_ok=True)
    document = {
        "fit": "scripts/bench cost --write",
        "constants": dict(constants),
        "judged_left_out": [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            for row in judged
        ],
    }
    write_json(folder / f"{name}.json", document)
