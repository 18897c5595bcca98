"""``tuner cache``: size of the compiled kernels, and pruning."""

from __future__ import annotations

import argparse
import re
from typing import Any

from tuner.base.printable import one_line
from tuner.cli.arguments import tell
from tuner.errors import ConfigError

DEFAULT_MAX_SIZE = "2GB"
MAX_SIZE = 1 << 63
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("cache", help="show or limit the size of the compiled kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=show)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", help="default: info")
    info = actions.add_parser("info", help="print the artifacts' folder, number and size")
    prune = actions.add_parser("prune", help="remove the least recently used artifacts")
    prune.add_argument(
        "--max-size",
        default=DEFAULT_MAX_SIZE,
        metavar="SIZE",
        help=f"size of the cache afterwards, as in 500MB or 2GB (default {DEFAULT_MAX_SIZE})",
    )
    for action, function in ((info, show), (prune, shrink)):
        action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object"
        )
        action.set_defaults(run=function)


def show(args: argparse.Namespace) -> int:
    """Print the artifacts' folder, number and size.

    Raises:
        StoreError: when other users can write the cache.
    """
    from tuner.compile.artifacts import ArtifactCache

    cache = ArtifactCache()
    cache.check()
    facts = {
        "folder": str(cache.root),
        "artifacts": len(cache.keys()),
        "bytes": cache.total_bytes(),
    }
    said = f"{facts['folder']}: {facts['artifacts']} kernels, {text(cache.total_bytes())}"
    tell(args, facts, said)
    return 0


def shrink(args: argparse.Namespace) -> int:
    """Prune, and print the bytes freed.

    Raises:
        ConfigError: when the size cannot be parsed.
        StoreError: when the cache cannot be written.
    """
    from tuner.compile.artifacts import ArtifactCache

    limit = parse_size(args.max_size)
    cache = ArtifactCache()
    removed, freed = cache.prune(limit)
    remaining = cache.total_bytes()
    data = {"removed": removed, "freed_bytes": freed, "bytes": remaining}
    tell(args, data, f"{removed} kernels removed, {text(freed)} freed, {text(remaining)} left")
    return 0


def parse_size(size: str, option: str = "--max-size") -> int:
    """Bytes of a size such as ``2GB`` (10^9) or ``2GiB`` (2^30). Only 0 may lack a unit.

    Raises:
        ConfigError: when it is not a number with a known unit, or is too large.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    units = _UNITS | _BINARY
    if match is None or match[2].upper() not in units or (not match[2] and float(match[1])):
        raise ConfigError(
            f"{option} {one_line(size)} is not a size (allowed: a number and B, KB, MB, GB, TB, "
            "KiB, MiB, GiB or TiB, as in 2GB)"
        )
    size_bytes = float(match[1]) * units[match[2].upper()]
    if size_bytes >= MAX_SIZE:
        raise ConfigError(f"{option} {one_line(size, 40)} is too large (allowed: below 2^63 bytes)")
    return int(size_bytes)


def text(size: int) -> str:
    """Format bytes as ``1.5 GB``."""
    for unit in ("GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
