"""``scripts/bench choices``: the shipped selection's choices at recorded problems, replayed.

Shipped recordings in a stream have times of many kernels at a problem. The time of the selection's
choice stands over the shortest one, and PyTorch's over it. A number of splits that was not measured
takes the nearest measured one. Rates are fitted to most of these problems: what was left out of a
fit is in ``cache/README.md``. Needs no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners import recording_archive
from tuner.runners.recording import Recording
from tuner.search.timed import kernel_of
from tuner.selection.describe import table
from tuner.selection.domains import domain_of
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu
from tuner.store.entry import is_vendor

HEADING = ("domain", "problems", "choice over best", "worst", "PyTorch's over choice", "least")


class Choice(NamedTuple):
    """A choice at a recorded problem: microseconds."""

    domain: str
    problem: Problem
    us: float
    best: float
    vendor: float
    """PyTorch's fastest kernel; infinite where none was measured."""


def main(argv: Sequence[str]) -> int:
    """Print a line for each domain and the worst choices; 0."""
    parser = Parser(prog="scripts/bench choices", description=__doc__)
    parser.add_argument("--gpu", default="H200", help="GPU of the recordings (default H200)")
    parser.add_argument(
        "--only", default="", metavar="TEXT,...", help="domains whose name holds each of these"
    )
    parser.add_argument(
        "--since", default="", metavar="TIME", help="measured from then on, as 2026-11-27T14:00"
    )
    parser.add_argument("--worst", type=int, default=5, help="choices to name (default 5)")
    args = parser.parse_args(argv)
    gpu = find_gpu(args.gpu)
    known = [
        one for l2 in ("warm", "cold") for one in recording_archive.taken(gpu, Regime("stream", l2))
    ]
    found = list(choices(known, serving(shipped(), gpu), args.only.split(","), args.since))
    print(report(found, args.worst))
    return 0


def choices(
    recordings: Iterable[Recording],
    portfolios: Sequence[Portfolio],
    only: Sequence[str] = (),
    since: str = "",
) -> Iterator[Choice]:
    """The choices at recorded problems; those that were not measured are left out.

    Args:
        recordings: measurements in a stream.
        portfolios: portfolios that serve the GPU.
        only: texts that a domain's name must hold, all of them.
        since: time from which on measurements count, ISO; empty: all.
    """
    by_op = {one.op: one for one in portfolios}
    for one in recordings:
        domain, portfolio = domain_of(one.problem), by_op.get(one.problem.op)
        if domain is None or portfolio is None or not all(t in domain.label() for t in only):
            continue
        times = {
            row.config: row.latency_us
            for row in one.measurements
            if row.ok and row.latency_us and row.created_at >= since
            if not is_vendor(row.config) or row.config.get("kernel") in domain.vendors
        }
        selection = portfolio.select(one.problem) if times else None
        us = None if selection is None else _time(selection.config, times)
        if us is not None:
            theirs = (time for config, time in times.items() if is_vendor(config))
            vendor = min(theirs, default=math.inf)
            yield Choice(domain.label(), one.problem, us, min(times.values()), vendor)


def _time(config: Config, times: Mapping[Config, float]) -> float | None:
    """Measured microseconds of a config, or of its kernel with the nearest number of splits."""
    if config in times:
        return times[config]
    if is_vendor(config):
        return None
    family, wanted = families()[config.family], config.get("splits", 1)
    kernel = kernel_of(family.overlapped(config))
    like = {
        abs(math.log(one.get("splits", 1) / wanted)): us
        for one, us in times.items()
        if one.family == config.family and kernel_of(family.overlapped(one)) == kernel
    }
    return like[min(like)] if like else None


def report(found: Sequence[Choice], worst: int) -> str:
    """A line for each domain, one for all, and the worst choices.

    Raises:
        BenchmarkError: when no choice was measured.
    """
    if not found:
        raise BenchmarkError("no recording holds the choice of such a domain")
    by_domain: dict[str, list[Choice]] = {}
    for one in found:
        by_domain.setdefault(one.domain, []).append(one)
    lines = [HEADING, *(_line(name, rows) for name, rows in sorted(by_domain.items()))]
    if len(by_domain) > 1:
        lines.append(_line("all", found))
    text = [table(lines, frozenset(range(1, 6)))]
    for one in sorted(found, key=lambda one: one.best / one.us)[:worst]:
        label = f"{one.problem.op} {one.problem.label()}"
        text.append(f"{one.us / one.best:.3f}  {one.us:.1f} us, best {one.best:.1f}: {label}")
    return "\n".join(text)


def _line(name: str, rows: Sequence[Choice]) -> tuple[str, ...]:
    losses = [one.us / one.best for one in rows]
    gains = [one.vendor / one.us for one in rows if math.isfinite(one.vendor)]
    mean, least = (f"{_mean(gains):.3f}", f"{min(gains):.3f}") if gains else ("", "")
    return name, str(len(rows)), f"{_mean(losses):.3f}", f"{max(losses):.3f}", mean, least


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
