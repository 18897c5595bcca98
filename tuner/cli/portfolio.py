"""Kernels of the shipped portfolios, for `tuner build --portfolio`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tuner.cli import DONE
from tuner.cli.aot import compile_aot, say
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import ConfigError
from tuner.families.base import KernelSpec
from tuner.families.by_operation import OPERATIONS, WITHOUT_PORTFOLIO, rules
from tuner.families.target import Target
from tuner.hardware import HOPPER
from tuner.selection.kernel_list import KernelList, source_of
from tuner.selection.portfolio import Portfolio, everywhere, serving, shipped
from tuner.selection.reader import find_gpu

if TYPE_CHECKING:
    from tuner.compile.compiler import Compiler


def chosen(op: str | None, gpu: str | None) -> list[Portfolio]:
    """Shipped portfolios of an operation that serve a GPU.

    Args:
        op: operation; None: all.
        gpu: name; None: every GPU that has a portfolio of its own.

    Raises:
        ConfigError: when there is none.
    """
    every = shipped()
    here = serving(every, find_gpu(gpu, [p.gpu for p in every])) if gpu else everywhere()
    portfolios = [portfolio for portfolio in here if op in (None, portfolio.op)]
    if not portfolios:
        allowed = ", ".join(f"--op {p.op} --gpu '{p.gpu.name}'" for p in every) or "none"
        raise ConfigError(f"no portfolio ships for that (allowed: {allowed})")
    return portfolios


def build(
    artifacts: ArtifactCache,
    op: str | None,
    gpu: str | None,
    jobs: int | None,
    *,
    only: Sequence[str],
    dry_run: bool,
    reproducible: bool,
    force: bool,
) -> int:
    """Compile the kernels of the shipped portfolios, and add each to the user's kernel list.

    Args:
        artifacts: cache for compiled kernels.
        op: as in `chosen`.
        gpu: as in `chosen`.
        jobs: maximum nvcc processes; None: one a core.
        only: texts that a kernel's label must all contain; empty: every kernel.
        dry_run: True to list the kernels without compiling.
        reproducible: True for libraries that depend on the list of kernels only, so that equal
            builds give equal bytes, as for the wheel of prebuilt kernels. Kernels that are compiled
            in other company are compiled again.
        force: True to replace proven kernels by builds without a proof.

    Returns:
        Exit code: 1 if a kernel failed.

    Raises:
        ConfigError: when no such portfolio ships, or no kernel's label contains all of `only`.
        CompileError: when there is no compiler.
        StoreError: when the artifact cache or the list cannot be written.
    """
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain

    by_capability = _targets(op, gpu)
    for capability, every in by_capability.items():
        by_capability[capability] = [t for t in every if all(text in t.label() for text in only)]
    if not any(by_capability.values()):
        raise ConfigError(
            f"no kernel of the portfolio has {', '.join(only)} in its line "
            "(allowed: texts of `tuner build --portfolio --dry-run`)"
        )
    tools, codes = find_toolchain(), []
    for capability, targets in sorted(by_capability.items()):
        with Compiler(tools, artifacts, jobs=jobs, capability=capability) as compiler:
            codes.append(_build(targets, compiler, dry_run, reproducible, force))
    return max(codes)


def _targets(op: str | None, gpu: str | None) -> dict[str, list[Target]]:
    """Kernels of portfolios and rules by compute capability; arguments as of `build`."""
    from tuner.selection.kernels import targets

    by_capability: dict[str, list[Target]] = {}
    for p in [] if op in WITHOUT_PORTFOLIO else chosen(op, gpu):
        if p.made_on is not None:
            say(f"{p.op}: the portfolio of {p.made_on.name}, rescaled to {p.gpu.name}")
        by_capability.setdefault(p.gpu.compute_capability, []).extend(targets(p))
    for rule in rules(OPERATIONS if op is None else {op}):
        by_capability.setdefault(HOPPER, []).extend(rule.targets())
    return by_capability


def _build(
    wanted: Sequence[Target], compiler: Compiler, dry_run: bool, reproducible: bool, force: bool
) -> int:
    from tuner.compile.compiler import UNIT
    from tuner.compile.units import fixed_units
    from tuner.selection.kernels import PROVE, path_of, read, update
    from tuner.tuning.built import BuiltKernels

    specs = list(dict.fromkeys(spec for target in wanted for spec in target.kernels.values()))
    compiled = {spec: found for spec in specs if (found := compiler.cached(spec)) is not None}
    if reproducible:
        units = fixed_units(specs, UNIT)
        for spec in (spec for unit in units if not _is_whole(unit, compiled) for spec in unit):
            artifact = compiled.pop(spec, None)
            if artifact is not None and not dry_run:
                compiler.artifacts.remove(artifact.key)
        compiler.fix_units(units)
        specs = [spec for unit in units for spec in unit]
    if dry_run:
        for target in wanted:
            is_there = all(spec in compiled for spec in target.kernels.values())
            print(f"{'compiled' if is_there else 'missing '}  {target.label()}")
    text = f"{len(specs)} kernels, {len(compiled)} of them compiled already"
    missing = len(specs) - len(compiled)
    if compiled and missing:
        cpu_s = missing * fmean(artifact.compile_cpu_s for artifact in compiled.values())
        text += f"; the others take about {cpu_s / 60:.0f} CPU-minutes, as these did"
    say(text)
    if dry_run:
        return DONE
    path = path_of(compiler.toolchain.nvcc_version, compiler.capability)
    update(path, lambda kernels: kernels, start=lambda: starting_list(path, compiler))
    entries = BuiltKernels(path, force=force)
    code = compile_aot(specs, compiler, None, time.monotonic(), entries.enter)
    kernel_list = read(path)
    built = [kernel for spec in specs if (kernel := kernel_list.find(spec)) is not None]
    proven = sum(kernel.proof is not None for kernel in built)
    text = f"{path}: {proven} of {len(built)} kernels are proven and served"
    failed = sum(bool(kernel.fault) for kernel in built)
    text += f", {failed} failed before" if failed else ""
    missing = any(not kernel.is_judged for kernel in built)
    say(f"{text}; {PROVE} checks the others on the GPU" if missing else text)
    if entries.carried:
        say(f"{entries.carried} proofs are of other artifacts with equal machine code")
    if entries.stayed:
        say(_staying(entries.stayed))
    return code


def _staying(count: int) -> str:
    """Message about proven kernels that a build did not replace."""
    from tuner.compile.nvcc_flags import code_flags

    text = (
        f"{count} proven kernels stay in the list: today's builds have other machine code, so that "
        "`tuner prove --carry` finds no proof for them"
    )
    if variables := " and ".join(code_flags()):
        return f"{text} (unset {variables}, or --force replaces them)"
    return f"{text} (--force replaces them)"


def _is_whole(unit: Sequence[KernelSpec], compiled: Mapping[KernelSpec, Artifact]) -> bool:
    """True when one library has all kernels of the unit, and no others."""
    artifacts = [compiled.get(spec) for spec in unit]
    libraries = {artifact.sha256 if artifact is not None else None for artifact in artifacts}
    return len(libraries) == 1 and all(
        one is not None and one.facts["kernels_in_unit"] == len(unit) for one in artifacts
    )


def starting_list(path: Path, compiler: Compiler) -> KernelList:
    """Kernel list to start from: the one on disk. Kernels of other templates or another CUTLASS
    stay where today's text gives the same artifact, also those that this command does not build.

    Raises:
        StoreError: when other users can write the list.
    """
    from tuner.measure.gate import REFERENCE
    from tuner.selection.kernels import read

    tools = compiler.toolchain
    start = KernelList(tools.nvcc_version, tools.cutlass_version, compiler.capability)
    try:
        kernels = read(path) if path.is_file() else start
    except ConfigError as exc:
        say(f"made anew: {exc}")
        with contextlib.suppress(ConfigError):  # failures outlive a damaged row
            start = replace(start, faults=read(path, deferred=True).faults)
        return start
    stale = {kernel.spec for kernel in kernels.kernels.values() if not kernel.is_current}
    every = _targets(None, None).get(compiler.capability, ()) if stale else ()
    specs = {spec.key: spec for target in every for spec in target.kernels.values()}
    specs[REFERENCE.key] = REFERENCE
    rows = {}
    for name, kernel in kernels.kernels.items():
        if name not in stale:
            rows[name] = kernel
        elif name in specs and compiler.key(specs[name]) == kernel.artifact:
            rows[name] = replace(kernel, source=source_of(specs[name]))
    return replace(start, kernels=rows, faults=kernels.faults)
