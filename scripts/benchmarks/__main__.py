"""``python -m benchmarks NAME``: one bench of this folder, by its ``BENCH`` or ``main(argv)``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from benchmarks import harness
from tuner.base.processes import RaisesInterrupted
from tuner.cli import ended

NAMES = (
    "backward",
    "block",
    "compile_ways",
    "counters",
    "dispatch",
    "engines",
    "fleet",
    "gpus",
    "models",
    "moe",
    "paged",
    "population",
    "products",
    "repeats",
    "results",
    "search",
    "stopping",
    "suites",
    "sweeps",
    "training",
)


#: Fits of what ships, which are the product's.
MOVED = ("backward --fit", "corrections", "cost", "paged --fit", "rates")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; the exit codes are the command line's."""
    name, *rest = argv or ("",)
    if name in MOVED or f"{name} {' '.join(rest[:1])}" in MOVED:
        print(f"scripts/bench {name} is `tuner fit {name}` now", file=sys.stderr)
        return 2
    if name not in NAMES:
        usage = f"scripts/bench NAME [options]; NAME is one of: {' '.join(NAMES)}"
        print(f"there is no benchmark '{name}': {usage}", file=sys.stderr)
        return 2
    with RaisesInterrupted():
        return ended(lambda: _run(name, rest), name)


def _run(name: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(f"benchmarks.{name}")
    return harness.main(module.BENCH, argv) if hasattr(module, "BENCH") else int(module.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
