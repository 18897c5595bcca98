"""``tuner develop profile``: Nsight Compute's counters of a shape's kernel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import (
    add_inputs,
    add_launch,
    add_op,
    add_result,
    problem_of,
    tell,
    usual_inputs,
    within,
)
from tuner.cli.entries import known_entries
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError, NoValidConfigError
from tuner.hardware import Gpu
from tuner.measurement import Environment, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.selection.describe import config_lines, facts_text, table, wrapped
from tuner.selection.reader import Entry
from tuner.store.entry import is_vendor, vendor_name

if TYPE_CHECKING:
    from tuner.measure.profile import Profile

DESCRIPTION = """Runs one call of a shape's best own kernel under Nsight Compute (ncu) and keeps its
counters: load of each unit, stall reasons, bytes, clocks. `tuner explain` and `tuner report` show
them from then on. Clocks are not locked, and nothing is timed."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "profile", help="count a kernel's work with Nsight Compute", description=DESCRIPTION
    )
    add_op(parser)
    parser.add_argument("--shape", required=True, metavar="KEY=VALUE,...", help="as S=1024,D=64")
    parser.add_argument(
        "--kernel",
        metavar="NAME",
        help="another kernel of the ranking: a vendor's name (of several the fastest), or the "
        "beginning of a digest",
    )
    add_launch(parser, "whose decision to read")
    add_inputs(parser, "cold flushes the caches before")
    parser.add_argument("--ncu", type=Path, metavar="PATH", help="Nsight Compute's command")
    parser.add_argument(
        "--timeout",
        type=within(1e-3, kind=float),
        default=300.0,
        metavar="S",
        help="seconds after which it is killed (default 300)",
    )
    add_result(parser, run)


def run(args: argparse.Namespace) -> int:
    """Profile a kernel, store the counters and print them.

    Raises:
        ConfigError: when the shape, the kernel or a number is wrong.
        NoValidConfigError: when the shape has no measured decision on this GPU.
        BenchmarkError: when there is no GPU or no ncu, or the counters cannot be read.
        CompileError: when a kernel cannot be compiled.
    """
    from tuner.measure import nsight
    from tuner.measure.device import detect
    from tuner.measure.profile import keep

    problem = problem_of(args)
    regimes = usual_inputs(args, problem.op)
    ncu = nsight.find_ncu(args.ncu)
    gpu = detect()
    if gpu is None:
        raise BenchmarkError("there is no NVIDIA GPU to profile on", status=Status.UNAVAILABLE)
    config, regime = _chosen(known_entries(args), problem, gpu, regimes, args.kernel)
    counted = _profile(ncu, problem, config, gpu, regime, args.timeout)
    path = keep(counted)
    tell(args, counted.to_json(), profile_text(counted))
    print(f"kept in {path}", file=sys.stderr)
    return 0


def _chosen(
    entries: list[Entry],
    problem: Problem,
    gpu: Gpu,
    regimes: Sequence[Regime],
    name: str | None,
) -> tuple[Config, Regime]:
    """Best own kernel of the shape's measured decision, or the named one, and the decision's
    regime.
    """
    filters: dict[str, Any] = {"problem": problem, "gpu": gpu, "provenance": Provenance.MEASURED}
    decided = (e for regime in regimes for e in entries if e.matches(**filters, regime=[regime]))
    entry = next(decided, None)
    if entry is None:
        raise NoValidConfigError(
            f"nothing is measured for {problem.op} {problem.label()} on {gpu.name} ({regimes[0]}): "
            "`tuner sweep` comes first"
        )
    ranked = list(dict.fromkeys(m.config for m in entry.ranking))
    if name is None:
        return (entry.best_own or entry.winner).config, entry.regime
    names = [vendor_name(c) if is_vendor(c) else c.digest for c in ranked]
    named = [
        config
        for config, identity in zip(ranked, names, strict=True)
        if (identity == name if is_vendor(config) else identity.startswith(name))
    ]
    if named and is_vendor(named[0]):
        return named[0], entry.regime  # of a library's plans or algorithms the first in rank
    if len(named) != 1:
        raise ConfigError(
            f"--kernel {name} names {len(named)} kernels of the ranking (allowed: "
            f"{', '.join(names)})"
        )
    return named[0], entry.regime


def _profile(
    ncu: Path, problem: Problem, config: Config, gpu: Gpu, regime: Regime, timeout_s: float
) -> Profile:
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import environment_facts, find_toolchain
    from tuner.families import family
    from tuner.measure import device, nsight
    from tuner.measure.gate import REFERENCE

    member = family(config.family)
    if reasons := member.violations(problem, config, gpu):
        raise NoValidConfigError(
            f"{config.family} {config.digest} is not legal here: {'; '.join(reasons)}"
        )
    tools = find_toolchain()
    with Compiler(tools, ArtifactCache()) as compiler:
        specs = member.kernels(problem, config)
        (_, reference), *jobs = compiler.submit([REFERENCE, *specs.values()])
        artifacts = {name: future.result() for name, (_, future) in zip(specs, jobs, strict=True)}
        gate = reference.result()
    environment = Environment({**device.environment().facts, **environment_facts(tools)})
    return nsight.profile(
        ncu, problem, config, gpu, regime, gate, artifacts, environment, timeout_s=timeout_s
    )


def profile_text(counted: Profile) -> str:
    """Tables of the counters, one kernel after the other."""
    from tuner.measure.profile import FACTS, SHARES, STALLS

    lines = [
        f"{counted.problem.op} {counted.problem.label()} on {counted.gpu.name}, {counted.regime}, "
        f"counted {counted.created_at[:10]}",
        *config_lines(counted.config),
    ]
    for kernel in counted.kernels:
        lines += ["", kernel.kernel]
        rows = [("counter", "value", "unit", "says")]
        stalls = sorted(kernel.shown(STALLS), key=lambda item: -item[1].value)
        for counter, value in [*kernel.shown(SHARES), *kernel.shown(FACTS)]:
            rows.append((counter.label, f"{value.value:,.6g}", value.unit, counter.says))
        for counter, value in stalls:
            rows.append((f"waits: {counter.label}", f"{value.value:.3g}", "warps", counter.says))
        lines.append(table(rows, right=frozenset({1})))
    return "\n".join([*lines, "", *wrapped(f"environment: {facts_text(counted.environment)}")])
