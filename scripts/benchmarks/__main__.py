"""``python -m benchmarks NAME``: one benchmark of this folder, by ``main(argv) -> int``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tuner.base.processes import RaisesInterrupted
from tuner.cli import ended

NAMES = (
    "append",
    "backward",
    "batching",
    "block",
    "bound",
    "choices",
    "compile_ways",
    "context_parallel",
    "corrections",
    "cost",
    "counters",
    "cute_dsl",
    "dispatch",
    "e4m3",
    "engines",
    "fleet",
    "fp8_attention",
    "gpus",
    "layers",
    "learning",
    "levers",
    "logits",
    "masks",
    "models",
    "moe",
    "narrow",
    "odd_columns",
    "own_calls",
    "paged",
    "peers",
    "population",
    "quantiser",
    "rates",
    "regret",
    "repeats",
    "scaled",
    "search",
    "select",
    "service",
    "standing",
    "stopping",
    "suites",
    "sustained",
    "sweeps",
    "training",
)


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; the exit codes are the command line's."""
    name, *rest = argv or ("",)
    if name not in NAMES:
        usage = f"scripts/bench NAME [options]; NAME is one of: {' '.join(NAMES)}"
        print(f"there is no benchmark '{name}': {usage}", file=sys.stderr)
        return 2
    with RaisesInterrupted():
        return ended(lambda: int(importlib.import_module(f"benchmarks.{name}").main(rest)), name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
