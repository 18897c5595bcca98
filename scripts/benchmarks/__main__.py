"""``python -m benchmarks NAME``: one bench of this folder, by its ``BENCH`` or ``main(argv)``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from benchmarks import harness
from tuner.base.processes import RaisesInterrupted
from tuner.cli import ended
from tuner.problem import PROBLEMS

NAMES = (
    "backward",
    "block",
    "cliffs",
    "dispatch",
    "engines",
    "invariance",
    "models",
    "moe",
    "paged",
    "population",
    "products",
    "results",
    "suites",
    "training",
    "tuner",
)


#: Present places of former benches and options.
MOVED = {
    **{name: f"tuner fit {name.split()[0]}" for name in ("backward --fit", "paged --fit")},
    **{name: f"tuner fit {name}" for name in ("corrections", "cost", "rates")},
    "counters": "tuner profile",
    "repeats": "scripts/bench tuner --preset quick --file FILE --seeds N",
    "search": "scripts/bench tuner --preset recorded, or quick for sweeps",
    "sweeps": "scripts/bench tuner --preset quick",
    **{
        name: f"scripts/bench population --preset {name}"
        for name in ("fp8_attention", "layers", "masks", "own_calls")
    },
    "regret": "scripts/bench tuner",
    "population --preset regret": "scripts/bench tuner",
    "sustained": "scripts/bench population --preset sustained",
    **{name: f"scripts/bench products --preset {name}" for name in ("e4m3", "narrow", "scaled")},
    "stopping": "scripts/bench tuner --preset recorded, whose rows `tuner fit stopping` reads",
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; the exit codes are the command line's."""
    name, *rest = argv or ("",)
    for asked in (" ".join((name, *rest[:count])) for count in range(3)):
        if asked in MOVED:
            print(f"scripts/bench {asked} is now: {MOVED[asked]}", file=sys.stderr)
            return 2
    if name not in NAMES:
        names = " ".join((*sorted(PROBLEMS), *NAMES))  # operations are `tuner bench`'s
        usage = f"scripts/bench NAME [options]; NAME is one of: {names}"
        if name in {"--list", "-h", "--help"}:
            print(usage)
            return 0
        print(f"unknown benchmark '{name}': {usage}", file=sys.stderr)
        return 2
    with RaisesInterrupted():
        return ended(lambda: _run(name, rest), name)


def _run(name: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(f"benchmarks.{name}")
    return harness.main(module.BENCH, argv) if hasattr(module, "BENCH") else int(module.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
