"""``scripts/bench bound``: the share of drawn calls that own kernels can answer without a loss.

Shipped recordings in a stream give the ratio of a problem: PyTorch's time over that of the fastest
own kernel that was measured there. A drawn call stands for the problems of its domain. No selection
beats the best measured kernel, so ratios of 1 and more bound the share of own kernels. A larger
share needs calls with smaller ratios: the last line has the least of them. Needs no GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem.population import ModelCall, draw, subset
from tuner.runners import recording_archive
from tuner.runners.recording import Recording
from tuner.selection.describe import table
from tuner.selection.domains import AnyDomain, domain_of
from tuner.selection.reader import find_gpu
from tuner.store.entry import is_vendor

MIN_PROBLEMS = 3
"""Problems that a domain needs; with fewer, those of domains with the same kernels and times."""
SHARES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)

Ratios = Mapping[AnyDomain, Sequence[float]]


def main(argv: Sequence[str]) -> int:
    """Print a line for each domain of the draw, the bound, and what larger shares cost; 0."""
    parser = Parser(prog="scripts/bench bound", description=__doc__)
    parser.add_argument("--gpu", default="H200", help="GPU of the recordings (default H200)")
    parser.add_argument("--seed", default="0", help="seed of the draw (default 0)")
    parser.add_argument("--count", type=int, default=400, help="calls to draw")
    parser.add_argument("--models", default="held-out", help="as of scripts/bench population")
    args = parser.parse_args(argv)
    gpu = find_gpu(args.gpu)
    found = ratios(one for cache in ("warm", "cold") for one in _recorded(gpu, cache))
    calls = drawn(draw(args.seed, args.count, subset(args.models)))
    print(report(calls, found, args.count))
    return 0


def _recorded(gpu: Gpu, l2: str) -> Iterator[Recording]:
    return recording_archive.taken(gpu, Regime("stream", l2))


def ratios(recordings: Iterable[Recording]) -> dict[AnyDomain, list[float]]:
    """PyTorch's time over the fastest own kernel's at each recorded problem, by domain."""
    found: dict[AnyDomain, list[float]] = {}
    for one in recordings:
        domain = domain_of(one.problem)
        if domain is None:
            continue
        own, theirs = list[float](), list[float]()
        for row in one.measurements:
            if row.ok and row.latency_us:
                if not is_vendor(row.config):
                    own.append(row.latency_us)
                elif row.config.get("kernel") in domain.vendors:
                    theirs.append(row.latency_us)
        if own and theirs:
            found.setdefault(domain, []).append(min(theirs) / min(own))
    return found


def drawn(calls: Iterable[ModelCall]) -> Counter[AnyDomain | None]:
    """Number of drawn calls by domain; None: those that no portfolio takes."""
    from benchmarks.population_tensors import posed

    found = Counter[AnyDomain | None]()
    for call in calls:
        try:
            problem = posed(call)
        except ConfigError:
            found[None] += 1
            continue
        found[domain_of(problem)] += 1
    return found


def of_domain(domain: AnyDomain, found: Ratios) -> Sequence[float]:
    """The ratios that stand for a domain's calls; empty where too few problems were measured.

    Calls that PyTorch composes of operations, as under windows, take it several times as long:
    their ratio counts as infinite.
    """
    for one in (domain, *domain.alike, *(domain.donors if domain.has_donor_vendors else ())):
        if len(known := found.get(one, ())) >= MIN_PROBLEMS:
            return known
    return (math.inf,) if domain.is_composed else ()


def report(calls: Mapping[AnyDomain | None, int], found: Ratios, count: int) -> str:
    """A line for each domain of the draw, for each operation, and for each of `SHARES`."""
    lines = [("domain", "drawn", "measured", "own at least as fast", "share")]
    weighted: dict[str, list[tuple[float, float]]] = {"attention": [], "products": []}
    unmeasured = 0
    for domain, number in sorted(calls.items(), key=lambda one: (-one[1], str(one[0]))):
        known = () if domain is None else of_domain(domain, found)
        if domain is None or not known:
            unmeasured += number
            label = "no portfolio" if domain is None else domain.label()
            lines.append((label, str(number), "", "", ""))
            continue
        least = sum(one >= 1 for one in known)
        counts = ("composed", "") if math.isinf(known[0]) else (str(len(known)), str(least))
        lines.append((domain.label(), str(number), *counts, f"{least / len(known):.0%}"))
        kind = "attention" if domain.op == "attention" else "products"
        weighted[kind] += [(ratio, number / len(known)) for ratio in known]
    text = [table(lines, frozenset(range(1, 5))), ""]
    every = [one for rows in weighted.values() for one in rows]
    for kind, rows in (*weighted.items(), ("all measured", every)):
        total = sum(weight for _, weight in rows)
        if total:
            share = sum(weight for ratio, weight in rows if ratio >= 1) / total
            text.append(f"{kind}: {total:.0f} calls, own kernels at least as fast at {share:.0%}")
    text.append(f"not measured: {unmeasured} of {count} calls")
    costs = ", ".join(f"{share:.0%} {reached(every, share):.3f}" for share in SHARES if every)
    return "\n".join([*text, f"least ratio for a share of own kernels: {costs}"])


def reached(rows: Iterable[tuple[float, float]], share: float) -> float:
    """The ratio down to which calls must be answered by own kernels for a share of the weights.

    Args:
        rows: ratios and weights.
        share: part of all weights, 0 to 1.
    """
    ranked = sorted(rows, reverse=True)
    wanted, sum_of = share * sum(weight for _, weight in ranked), 0.0
    for ratio, weight in ranked:
        sum_of += weight
        if sum_of >= wanted - 1e-9:
            return ratio
    return ranked[-1][0]
