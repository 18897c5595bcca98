"""``tuner develop record``: write the stored measurements of a sweep as a recording."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import OF_LIST, add_op, add_place, add_result, gpu_of, usual_inputs
from tuner.cli.sweep import problems_of
from tuner.errors import ConfigError, NoValidConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.runners.recording import Recording


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "record",
        help="write the measured sweep of a shape, or of a list, as a recording",
        description="Writes every measurement that the store holds of a shape, its stages' too, "
        "as one compact file, which `tuner sweep` replays where no GPU is.",
    )
    parser.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="output file, or a folder for a file named by the shape",
    )
    add_op(parser, OF_LIST)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="as S=1024,D=64")
    what.add_argument(
        "--pack",
        action="store_true",
        help="move the single recordings of the folder OUT into its archives, one an operation",
    )
    what.add_argument(
        "--problems", type=Path, metavar="FILE", help="YAML or JSON list, a file each in OUT"
    )
    add_place(parser, "as H200 (default)")
    add_result(parser, run)


def run(args: argparse.Namespace) -> int:
    """Write the recordings. Returns 1 if one of several problems has no measurements.

    Raises:
        NoValidConfigError: when the problem of `--shape` has no measurements.
        ConfigError: when the place of the files is wrong.
        StoreError: when a file cannot be written.
    """
    from tuner.runners import recording, recording_archive

    out: Path = args.out
    if args.pack:
        return _pack(out, args.json)
    problems = problems_of(args)
    if args.problems is not None and not out.is_dir():
        raise ConfigError(f"{out} is not a folder (allowed: one, for the files of --problems)")
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    with open_store(args.store, create=False) as store:
        gpu = gpu_of(args, store) or DEFAULT_GPU
        for problem in problems:
            regimes = usual_inputs(args, problem.op)
            try:
                sweep = recording.from_store(store, problem, gpu, regimes)
            except NoValidConfigError as exc:
                if args.shape:
                    raise
                missing.append(str(exc))
                continue
            name = recording_archive.file_name(problem, gpu, sweep.regime)
            path = out / name if out.is_dir() else out
            rows.append(_facts(path, recording.write(path, sweep), sweep))
    if args.json:
        print(json.dumps(rows if args.shape is None else rows[0]))
    else:
        for row in rows:
            print(
                f"{row['path']}: {row['measurements']} measurements of {row['kernels']} kernels, "
                f"{row['bytes']} bytes"
            )
    for reason in missing:
        print(f"tuner: {reason}", file=sys.stderr)
    return 1 if missing else 0


def _pack(place: Path, as_json: bool) -> int:
    """Pack a folder's recordings, and say which archives were written.

    Raises:
        ConfigError: when OUT is not a folder, or a recording is damaged or has another name.
        StoreError: when an archive cannot be written.
    """
    from tuner.runners import recording_archive

    if not place.is_dir():
        raise ConfigError(f"{place} is not a folder (allowed: a folder of recordings)")
    counts = recording_archive.pack(place)
    if as_json:
        print(json.dumps([{"path": str(path), "recordings": n} for path, n in counts.items()]))
        return 0
    for path, count in counts.items():
        print(f"{path}: {count} recordings")
    if not counts:
        print(f"{place} holds no single recordings")
    return 0


def _facts(path: Path, size: int, recording: Recording) -> dict[str, Any]:
    return {
        "path": str(path),
        "bytes": size,
        "kernels": recording.kernels(),
        "measurements": sum(len(part.measurements) for part in recording.walk()),
        "problems": [part.problem.label() for part in recording.walk()],
    }
