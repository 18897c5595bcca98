"""``tuner record``: write what a store holds of a sweep as a recording."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tuner.problem import PROBLEMS


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "record",
        help="write the measured sweep of a shape as a recording",
        description="Writes every measurement that the store holds of a shape, its stages' too, "
        "as one compact file, which `tuner sweep` replays where no GPU is.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a file, or a folder to name it in")
    parser.add_argument("--op", choices=sorted(PROBLEMS), default="attention")
    parser.add_argument("--shape", required=True, metavar="KEY=VALUE,...", help="as S=1024,D=64")
    parser.add_argument("--gpu", metavar="NAME", help="as H200 (default)")
    parser.add_argument("--regime", choices=("graph", "eager"), help="how it is launched")
    parser.add_argument("--l2", choices=("warm", "cold"), help="state of the inputs")
    parser.add_argument("--store", metavar="URL", help="SQLAlchemy URL or SQLite file")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the recording.

    Raises:
        ConfigError: when nothing was measured, or the file cannot be written.
    """
    from tuner import recording
    from tuner.hardware import DEFAULT_GPU
    from tuner.job import JobOptions
    from tuner.lookup import find_gpu
    from tuner.store import open_store

    problem = PROBLEMS[args.op].parse(args.shape)
    regime = JobOptions(launch=args.regime, l2=args.l2).regime(problem)
    with open_store(args.store, create=False) as store:
        gpu = find_gpu(args.gpu, store.entries()) if args.gpu else DEFAULT_GPU
        found = recording.from_store(store, problem, gpu, regime)
    path: Path = args.out
    if path.is_dir():
        path = path / recording.file_name(problem, gpu, regime)
    recording.write(path, found)
    facts = {
        "path": str(path),
        "bytes": path.stat().st_size,
        "kernels": found.kernels(),
        "measurements": sum(len(part.measurements) for part in found.walk()),
        "problems": [part.problem.label() for part in found.walk()],
    }
    if args.json:
        print(json.dumps(facts))
    else:
        print(
            f"{path}: {facts['measurements']} measurements of {facts['kernels']} kernels, "
            f"{facts['bytes']} bytes"
        )
    return 0
