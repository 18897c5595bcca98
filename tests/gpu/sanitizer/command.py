"""``scripts/sanitize``: arguments, compiling, the tools, a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.compiler import Compiler
from tuner.compile.toolchain import find_toolchain
from tuner.errors import ConfigError, TunerError
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect

from .targets import DEFAULT, FAMILIES, Target, halved_of, specs, targets
from .tools import TOOLS, Run, Sanitizer, Seen, find_sanitizer, say, table
from .variants import VARIANTS, rendered_as


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/sanitize",
        description="compute-sanitizer over the kernels that the GPU tests prove",
    )
    parser.add_argument("--family", default=DEFAULT, help=f"of {', '.join(FAMILIES)} (%(default)s)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="of these the kernels whose printed line has this text; may be repeated",
    )
    parser.add_argument(
        "--variant",
        default="",
        choices=sorted(VARIANTS),
        metavar="NAME",
        help=f"change the kernels' text: {', '.join(sorted(VARIANTS))} "
        "(tests/gpu/sanitizer/variants.py)",
    )
    parser.add_argument("--list", action="store_true", help="print the kernels and end")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile what this needs, and end; no GPU",
    )
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: %(default)s")
    parser.add_argument("--print-limit", type=int, default=20, help="reports kept (%(default)s)")
    parser.add_argument(
        "--tool-options", default="", help="further options of compute-sanitizer, with spaces"
    )
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=330.0, help="of all (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write everything that was seen")
    return parser.parse_args(arguments)


def names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The distinct names of a list with commas.

    Raises:
        ConfigError: for one that is not allowed.
    """
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in allowed:
            raise ConfigError(f"{option} {name} is unknown (allowed: {', '.join(allowed)})")
    return found


def chosen(found: Sequence[Target], only: Sequence[str], variant: str) -> list[Target]:
    """Targets whose printed line has all the texts `only`, named after their variant.

    Raises:
        ConfigError: when there is none.
    """
    wanted = [target for target in found if all(text in target.label() for text in only)]
    if not wanted:
        raise ConfigError(f"--only {' '.join(only)}: no kernel's line has it (--list prints them)")
    suffix = f" ({variant})" if variant else ""
    return [replace(target, name=target.name + suffix) for target in wanted]


def runs_of(found: Sequence[Target], tools: Sequence[str]) -> list[Run]:
    """Every tool on every kernel, after a control for each family where memcheck is one."""
    runs = [Run(tool, target) for target, tool in product(found, tools)]
    if "memcheck" not in tools:
        return runs
    first: dict[str, Target] = {}
    for target in found:
        first.setdefault(target.family, replace(target, launches=target.launches[:1]))
    controls = [Run("memcheck", target, halved_of(target)) for target in first.values()]
    return [*controls, *runs]


def without(target: Target, failed: Mapping[KernelSpec, str]) -> Target:
    """`target` without the launches whose kernels do not compile."""
    launches = [pair for pair in target.launches if not failed.keys() & specs([pair])]
    return replace(target, launches=tuple(launches))


def build(
    compiler: Compiler, wanted: Sequence[KernelSpec]
) -> tuple[dict[KernelSpec, Artifact], dict[KernelSpec, str]]:
    """Compile all at once: the artifacts, and the reason of each kernel that has none."""
    built: dict[KernelSpec, Artifact] = {}
    failed: dict[KernelSpec, str] = {}
    for spec, future in compiler.submit(wanted):
        try:
            built[spec] = future.result()
        except TunerError as exc:
            failed[spec] = str(exc)
            say(f"does not compile: {exc}")
    return built, failed


def write(path: Path | None, seen: Sequence[Seen]) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(one) for one in seen], indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    families = names("--family", options.family, [*FAMILIES])
    tools = names("--tools", options.tools, TOOLS)
    gpu = detect() or DEFAULT_GPU
    found = chosen(targets(families, gpu), options.only, options.variant)
    if options.list:
        for target in found:
            print(target.label())
        return 0
    wanted = dict.fromkeys(spec for target in found for spec in target.specs())
    compiler = Compiler(find_toolchain(), ArtifactCache())
    with rendered_as(options.variant), compiler:
        built, failed = build(compiler, list(wanted))
    if options.compile_only:
        print(f"{len(built)} kernels compiled, {len(failed)} do not compile")
        return 1 if failed else 0
    left = [target for target in (without(t, failed) for t in found) if target.launches]
    further = (f"--print-limit={options.print_limit}", *options.tool_options.split())
    sanitizer = Sanitizer(find_sanitizer(), built, options.timeout_s, options.budget_s, further)
    come: list[Seen] = []

    def noted(one: Seen) -> None:
        """A run that is cut off keeps what it saw."""
        come.append(one)
        write(options.json, come)

    seen = sanitizer.run(runs_of(left, tools), options.jobs, noted)
    write(options.json, seen)
    print(table(seen))
    for reason in failed.values():
        print(f"does not compile: {reason}")
    return 0 if not failed and all(s.passed for s in seen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TunerError as exc:
        print(f"scripts/sanitize: {exc}", file=sys.stderr)
        sys.exit(2)
