"""Counters of any bench's contenders beside one another, by Nsight Compute.

``scripts/bench counters --of backward --only S=2048 --call tuner --call flash3`` counts one call of
each at the cases of `backward` that are named so. A name is whole or a beginning. Presets and other
options of that bench stand in ``--with "--preset errors"``. Clocks are not locked, and nothing is
timed.
"""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bench, Contender, Preset, Row, Times
from tuner.base.processes import python_command
from tuner.cli import Parser
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure import nsight
from tuner.measure.profile import CYCLES, CYCLES_ACTIVE, DURATION, SHARES, STALLS, KernelCounters

MARK = "triu_tril_kernel"
"""Kernel of PyTorch that is launched before each call, and that no contender launches."""
STALLS_SHOWN = 3
SMALL = "B=1,H=2,S=32,D=64,dtype=bf16"


@dataclass(frozen=True)
class Case:
    """A case of another bench with these options."""

    group: str
    options: tuple[str, ...]
    label: str

    def opened(self) -> tuple[Preset, Namespace]:
        """The bench's preset, and all of its options.

        Raises:
            ConfigError: when no bench has this name.
        """
        try:
            bench: Bench = importlib.import_module(f"benchmarks.{self.group}").BENCH
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"--of {self.group} is not a bench of contenders: {exc}") from exc
        args = harness.parser_of(bench).parse_args(self.options)
        return bench.presets[args.preset], args


def cases(args: Namespace) -> list[Case]:
    """Those of the other bench."""
    options = tuple(shlex.split(args.options))
    preset, others_args = Case(args.of, options, "").opened()
    return [Case(args.of, options, case.label) for case in preset.cases(others_args)]


def measure(case: Case, args: Namespace) -> Row:
    """Microseconds under the counters and all values, of each launch of each call."""
    names = list(dict.fromkeys(args.call or ["tuner"]))
    asked = json.dumps([asdict(case), names])
    command = python_command("-m", "benchmarks.counters", asked)
    launches = parted(nsight.counted(nsight.find_ncu(args.ncu), command, "warm"), names)
    return {
        "figures": {name: sum(map(_us, kernels)) for name, kernels in launches.items()},
        "text": text(launches),
        "launches": {
            name: [
                {"kernel": kernel.kernel, **{m: v.value for m, v in kernel.counters.items()}}
                for kernel in kernels
            ]
            for name, kernels in launches.items()
        },
    }


def count(case: Case, names: Sequence[str]) -> None:
    """Measure a case by a stopwatch that runs the named calls between the CUDA profiler's marks,
    each behind the kernel `MARK`.

    Raises:
        ConfigError: when a name is unknown.
    """
    import torch

    preset, args = case.opened()
    contenders: dict[str, Contender] = {}
    counted: list[Contender] = []

    def time_calls(ways: Sequence[Contender], *_: Any) -> Times:
        contenders.update({way.name: way for way in ways})
        if not counted and all(matching(name, contenders) for name in names):
            counted.extend(contenders[matching(name, contenders)] for name in names)
            square = torch.ones(8, 8, device="cuda")
            torch.triu(square)
            _run(counted * 2, lambda: None)  # loads modules, then brings the inputs into the L2
            torch.cuda.profiler.start()
            _run(counted, lambda: torch.triu(square))
            torch.cuda.profiler.stop()
        return Times({way.name: 1.0 for way in ways}, {})

    harness.time_calls = time_calls  # type: ignore[assignment]
    (wanted,) = (other for other in preset.cases(args) if other.label == case.label)
    preset.measure(wanted, args)
    if not counted:
        raise ConfigError(f"--call {', '.join(names)}: allowed are {', '.join(contenders)}")


def _run(contenders: Sequence[Contender], before: Callable[[], Any]) -> None:
    import torch

    for contender in contenders:
        with contender.around():
            before()
            contender.call(0)
    torch.cuda.synchronize()


def matching(name: str, contenders: Mapping[str, Any]) -> str:
    """The name itself, or the first that begins so; empty without one."""
    begun = [other for other in contenders if other.startswith(name)]
    return name if name in contenders else next(iter(begun), "")


def parted(
    kernels: Sequence[KernelCounters], names: Sequence[str]
) -> dict[str, list[KernelCounters]]:
    """The launches of each call, in order: those between two marks.

    Raises:
        BenchmarkError: when there are not as many marks as calls, or a call launched nothing.
    """
    parts: list[list[KernelCounters]] = []
    for kernel in kernels:
        if MARK in kernel.kernel:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    if len(parts) != len(names) or not all(parts):
        counts = [len(part) for part in parts]
        raise BenchmarkError(f"{len(names)} calls were made, counted were launches: {counts}")
    return dict(zip(names, parts, strict=True))


def _us(kernel: KernelCounters) -> float:
    return (kernel.get(DURATION) or 0.0) / 1e3


def text(launches: Mapping[str, Sequence[KernelCounters]]) -> list[str]:
    """Lines of each call: its longest launch, and the time of all of them."""
    lines = []
    for name, kernels in launches.items():
        longest = max(kernels, key=_us)
        cycles, active = (longest.get(metric) or 0.0 for metric in (CYCLES, CYCLES_ACTIVE))
        lines.append(
            f"  {name}: {sum(map(_us, kernels)):.1f} us in {len(kernels)} kernels; "
            f"{longest.kernel} {_us(longest):.1f} us, {cycles / 1e3:.0f} thousand cycles, "
            f"{active / 1e3:.0f} active"
        )
        shares = [f"{c.label} {value.value:.1f} %" for c, value in longest.shown(SHARES)]
        stalls = sorted(longest.shown(STALLS), key=lambda stall: -stall[1].value)[:STALLS_SHOWN]
        lines.append("    " + ", ".join(shares))
        lines.append("    stalls: " + ", ".join(f"{c.label} {v.value:.2f}" for c, v in stalls))
    return lines


def line(row: Row) -> str:
    """A case's lines."""
    return "\n".join([row["case"], *row["text"]])


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("--of", default="paged", metavar="BENCH", help="bench of the cases (default paged)")
    add("--with", dest="options", default="", metavar="OPTIONS", help="that bench's, quoted")
    add("--call", action="append", metavar="NAME", help="a contender (default tuner); repeatable")
    add("--ncu", type=Path, metavar="PATH", help="Nsight Compute's command")


BENCH = Bench(
    "counters",
    __doc__,
    {
        "calls": Preset(
            "the contenders that --call names",
            cases,
            measure,
            line,
            lambda every: [line(row) for row in every if "text" in row],
            smoke=Case("backward", ("--shape", SMALL), SMALL),
        )
    },
    _options,
)

if __name__ == "__main__":
    _case, *_names = json.loads(sys.argv[1])
    count(Case(**_case), *_names)
