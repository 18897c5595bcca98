"""The search itself: recorded sweeps replayed, and repeated sweeps.

Results of ``recorded`` make expected seconds and losses (``tuner fit stopping``). Each sweep of
``repeats`` is a process of its own, ``tuner sweep``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import search_recorded, search_sweeps
from benchmarks.harness import Bench, Preset
from tuner.cli import Parser
from tuner.problem import PROBLEMS
from tuner.runners import recording_archive

HOUR_S = 3600.0


def options(parser: Parser) -> None:
    """Options of the presets."""
    add = parser.add_argument
    add("--recordings", type=Path, default=recording_archive.folder(), metavar="DIR",
        help="recorded: folder of recordings (default: the shipped ones)")  # fmt: skip
    samplers = search_recorded.SAMPLERS
    add("--samplers", default=samplers, metavar="NAME,...", help=f"recorded: default {samplers}")
    add("--least-groups", type=int, default=32, metavar="N", help="recorded: kernels (default 32)")
    add("--in-flight", type=int, default=1, metavar="N", help="recorded: compiled at once")
    add("--times", type=int, default=3, metavar="N", help="recorded, repeats: seeds (default 3)")
    add("--op", default="attention", choices=sorted(PROBLEMS), help="repeats: default attention")
    add("--shape", default="S=1024,D=64", help="repeats: problem (default S=1024,D=64)")
    add("--keep-cache", action="store_true", help="repeats: with this machine's compiled kernels")
    add("--sweep", default="", metavar="OPTIONS", help="further options of tuner sweep, quoted")
    add("--device", default="0", metavar="N,...", help="CUDA devices (default 0)")


BENCH = Bench(
    "search",
    __doc__,
    {
        "recorded": Preset(
            "samplers on recorded sweeps by compiles, and simulated seconds; no GPU",
            search_recorded.cases,
            search_recorded.measure,
            search_recorded.line,
            search_recorded.table,
            limit_s=3 * HOUR_S,
            smoke=search_recorded.SMOKE,
            needs_gpu=False,
        ),
        "repeats": Preset(
            "sweeps of one problem with several seeds, their winners in one pass",
            search_sweeps.repeated,
            search_sweeps.repeat,
            search_sweeps.line,
            search_sweeps.repeats_table,
            limit_s=HOUR_S,
            is_fresh=True,
        ),
    },
    options,
)
