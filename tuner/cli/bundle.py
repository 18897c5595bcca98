"""``tuner bundle``: pack entries and their compiled kernels into one file, and install it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from tuner.cli.arguments import add_result, problem_of, url_of
from tuner.cli.entries import known_entries
from tuner.cli.imports import imported_text, unservable
from tuner.errors import ConfigError, NoValidConfigError
from tuner.measurement import Provenance
from tuner.problem import PROBLEMS
from tuner.selection.describe import counted, list_text
from tuner.selection.reader import find_gpu
from tuner.selection.shipped import in_use
from tuner.store import Entry, open_store

INSTALL = "install"
MAX_REASONS = 3
"""Maximum lines about entries that were left out; further ones are counted."""

DESCRIPTION = """Packs measured entries with their compiled kernels, for machines and containers
without a compiler, and prints the file's SHA-256. `tuner bundle install FILE` verifies such a file
and adds it to this user's store and artifact cache, completely or not at all. It is the only way in
for a compiled kernel. Install only files that you or your machines have packed. Compare the hash
(--sha256) after a transfer that you do not trust."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bundle",
        help="pack entries with their compiled kernels; install such a file",
        usage="tuner bundle [-h] OUT.tar (--shape KEY=VALUE,... | --all) [--op OP] [--gpu NAME]\n"
        "       tuner bundle [-h] install FILE [--sha256 HEX]\n"
        "       both: [--store URL] [--json]",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "words", nargs="+", metavar="OUT.tar | install FILE", help="file to write, or to install"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", metavar="KEY=VALUE,...", help="pack the entries of this problem")
    which.add_argument("--all", action="store_true", help="pack every entry whose kernels are here")
    parser.add_argument(
        "--op",
        choices=sorted(PROBLEMS),
        help="pack only this operation's entries; of --shape, default attention",
    )
    parser.add_argument("--gpu", metavar="NAME", help="pack only this GPU's entries, as in H200")
    parser.add_argument("--sha256", metavar="HEX", help="install only a file of this hash")
    add_result(parser, run)


def run(args: argparse.Namespace) -> int:
    """Pack or install.

    Raises:
        ConfigError: when the arguments, or the file to install, are wrong.
        NoValidConfigError: when there is nothing to pack.
        StoreError: when the file, the store or the artifact cache cannot be read or written.
    """
    if args.words[0] == INSTALL:
        return _install(args)
    if len(args.words) != 1:
        raise ConfigError(f"'{args.words[1]}' is too many (allowed: OUT.tar, or install FILE)")
    if not args.shape and not args.all:
        raise ConfigError("nothing is chosen to pack (allowed: --shape KEY=VALUE,... or --all)")
    if args.sha256:
        raise ConfigError("--sha256 is for an installation (allowed: tuner bundle install FILE)")
    return _pack(args)


def _pack(args: argparse.Namespace) -> int:
    from tuner.bundle import pack
    from tuner.compile.artifacts import ArtifactCache

    out, filters = Path(args.words[0]), _chosen(args)
    packed = pack(filters, ArtifactCache(), out, leave_out=args.all)
    if args.json:
        print(json.dumps({**vars(packed), "file": str(out)}))
        return 0
    for reason in packed.left_out[:MAX_REASONS]:
        print(f"left out: {reason}", file=sys.stderr)
    if (more := len(packed.left_out) - MAX_REASONS) > 0:
        print(f"left out: {more} more (all of them: --json)", file=sys.stderr)
    if args.shape:
        print(f"{list_text(filters)}\n")
    print(
        f"{counted(packed.entries, 'entry')} with {counted(packed.kernels, 'kernel')} in {out}, "
        f"{packed.bytes} bytes\nsha256 {packed.sha256}"
    )
    return 0


def _chosen(args: argparse.Namespace) -> list[Entry]:

    problem = problem_of(args) if args.shape else None
    every = known_entries(args)
    gpu = find_gpu(args.gpu, [e.gpu for e in every]) if args.gpu else None
    filters = {"op": args.op, "problem": problem, "gpu": gpu, "provenance": Provenance.MEASURED}
    # `tuner build` makes the kernels of those in use.
    chosen_entries = [entry for entry in in_use(every) if entry.matches(**filters)]
    if not chosen_entries:
        raise NoValidConfigError(
            "nothing to pack: nothing is measured"
            + (f" for {problem.op} {problem.label()}" if problem else "")
            + (f" for {args.op}" if args.op and not problem else "")
            + (f" on {gpu.name}" if gpu else "")
        )
    return chosen_entries


def _install(args: argparse.Namespace) -> int:
    from tuner.bundle import install
    from tuner.compile.artifacts import ArtifactCache

    if len(args.words) != 2:
        raise ConfigError("name one file (allowed: tuner bundle install FILE)")
    if args.shape or args.all or args.gpu or args.op:
        raise ConfigError("a bundle is installed as it is (allowed beside FILE: --sha256 HEX)")
    digest = (args.sha256 or "").lower()
    if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ConfigError(f"--sha256 {args.sha256} is not a SHA-256 (allowed: 64 hex digits)")
    with open_store(url_of(args)) as store:
        done = install(Path(args.words[1]), store, ArtifactCache(), check=unservable, sha256=digest)
    report = done.report
    if args.json:
        kernels = {"kernels_added": done.kernels_added, "kernels_known": done.kernels_known}
        print(json.dumps({**vars(report), **kernels}))
        return 0
    added = counted(done.kernels_added, "kernel")
    print(imported_text(report, f"{added} added, {done.kernels_known} known already"))
    return 0
