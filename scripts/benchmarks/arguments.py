"""Arguments that several benches share."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.runners import recording_archive


def add_recordings(parser: argparse.ArgumentParser) -> None:
    """Add ``--recordings``, a folder."""
    parser.add_argument(
        "--recordings",
        type=Path,
        default=recording_archive.folder(),
        metavar="DIR",
        help="folder of the recordings (default: the shipped ones)",
    )
