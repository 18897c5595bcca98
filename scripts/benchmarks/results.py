"""The page of results, written from one JSON file a bench and from the shipped decisions.

A file has runs (command, GPU, versions, date) with their rows, and limits of the figures. A run
whose program has gone since names a ``commit`` that has it. A row says what was measured: cases,
own figure, peer, ratio and worst. A row with ``decisions`` is filled from ``cache/tuned/``.
``scripts/bench results`` writes the page, and needs no GPU. With ``--add`` it first puts a bench's
rows, a group each, in the place of an earlier run's.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import rows as bench_rows
from benchmarks.rows import PYTORCH, Row, figures, over, over_fastest, values
from tuner.base import resources
from tuner.bench.results import size_of
from tuner.bench.suites import SUITES
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.selection.reader import shipped
from tuner.tuning.job import read_problems

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
FACTS = "command", "gpu", "versions", "date"
"""Facts of a run, all of which a row of the page has."""
SECTIONS = {
    "Tuned shapes on both GPUs": ("tuned",),
    "Attention and its gradients": ("attention", "backward"),
    "Paged caches": ("paged",),
    "Products and mixtures of experts": ("products", "moe"),
    "Calls of public models": ("population",),
    "Vocabularies": ("vocabularies",),
    "Models, training and engines": ("block", "training", "models", "engines"),
    "Calls of the runtime": ("dispatch",),
    "Searching": ("search",),
    "Correctness": ("correctness",),
}
"""Sections of the page, each with its files."""
VERSIONS = {
    "B": "driver 580.159.04, CUDA 13.0, torch 2.11.0, cuDNN 9.19",
    "A": "driver 580.159.04, CUDA 13.0, torch 2.11.0",
}
"""Short names of versions on the page; one may begin with another, which comes later."""
HEAD = (
    *("measured", "cases", "own", "compared with", "ratio", "worst"),
    *("command", "GPU, day, versions"),
)


def read(name: str) -> dict[str, Any]:
    """Runs and limits of a file."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def decisions(
    gpu: str, launch: str, suite: str = "", list: str = "", l2: str = "", size: str = ""
) -> dict[str, str]:
    """Figures of shipped decisions: their number, the mean and worst ratio of the fastest vendor.

    Args:
        gpu: model of the decisions, as H200.
        launch: their regime.
        suite: suite of problems, or empty.
        list: list of problems of ``cache/grid`` in place of a suite.
        l2: state of the inputs; empty: the usual one.
        size: size class of the problems; empty: all.
    """
    operation = "gemm" if list == "gemm" else "attention"
    problems = (
        read_problems(resources.cache() / "grid" / f"{list}.yaml", operation)
        if list
        else SUITES[suite].problems
    )
    usual = Regime.default(operation).l2 if list else SUITES[suite].regimes[0].l2
    regime = Regime(launch, l2 or usual)
    wanted = {problem for problem in problems if not size or size_of(problem) == size}
    ratios = [
        next(iter(entry.speedups.values()))
        for entry in shipped()
        if (entry.gpu, entry.regime) == (GPUS[gpu], regime)
        and entry.problem in wanted
        and entry.speedups
    ]
    count = str(len(ratios)) if len(ratios) == len(wanted) else f"{len(ratios)} of {len(wanted)}"
    return {
        "cases": count,
        "over": "the fastest vendor",
        "ratio": f"{geometric_mean(ratios):.3f}",
        "worst": f"{min(ratios):.3f}",
    }


def page() -> str:
    """The whole page in Markdown."""
    names = [f"{key}: {text}" for key, text in sorted(VERSIONS.items())]
    lines = [(FOLDER / "head.md").read_text().rstrip().replace("{versions}", "; ".join(names))]
    for title, files in SECTIONS.items():
        contents = [read(name) for name in files]
        lines += ["", f"## {title}", ""]
        if texts := [content["text"] for content in contents if content["text"]]:
            lines += [" ".join(texts), ""]
        lines += [_cells(HEAD), "|" + "---|" * len(HEAD)]
        lines += [
            _cells(_row(row, run)) for one in contents for run in one["runs"] for row in run["rows"]
        ]
        if limits := [limit for content in contents for limit in content["limits"]]:
            lines += ["", *(f"- {limit}" for limit in limits)]
    return "\n".join(lines) + "\n"


def _row(row: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of a row; a run's facts stand in each of its rows."""
    figures = {**row, **(decisions(**row["decisions"]) if "decisions" in row else {})}
    versions = run["versions"]
    for key, text in VERSIONS.items():
        versions = re.sub(re.escape(text) + r"(?![\w.+])", key, versions)
    day = datetime.date.fromisoformat(run["date"])
    cells = (str(figures.get(name, "")) for name in ("what", "cases", "own", "over"))
    ratios = (str(figures.get(name, "")) for name in ("ratio", "worst"))
    command = f"`{run['command']}`" + (f" at {run['commit']}" if "commit" in run else "")
    return *cells, *ratios, command, f"{run['gpu']}, {day:%-d %b %Y}, {versions}"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def run_of(head: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """A run of the page: of each group and of all, the speed over PyTorch and the fastest peer.

    Raises:
        ConfigError: when no row has times to compare.
    """
    groups = [*dict.fromkeys(row["group"] for row in rows)]
    parts = {name: [row for row in rows if row["group"] == name] for name in groups}
    if len(groups) > 1:
        parts["all"] = list(rows)
    summaries = []
    for name, mine in parts.items():
        peers = {
            "PyTorch": figures(values(mine, lambda row: over(row, PYTORCH))),
            "the fastest peer": figures(values(mine, over_fastest)),
        }
        peers = {peer: pair for peer, pair in peers.items() if pair[0]}
        ratios, worst = ("; ".join(pair[i] for pair in peers.values()) for i in range(2))
        summary = {"what": name, "cases": len(mine), "over": "; ".join(peers)}
        summaries += [{**summary, "ratio": ratios, "worst": worst}] if peers else []
    if not summaries:
        raise ConfigError("no row has times of the tuner and of a peer: enter its figures by hand")
    names = {gpu.name: name for name, gpu in GPUS.items()}
    versions = {"driver": "driver", "cuda": "CUDA", "torch": "torch", "cudnn": "cuDNN"}
    return {
        "command": re.sub(r" --(json|time-limit)[ =]\S+", "", head["command"]),
        "gpu": names.get(head["gpu"], head["gpu"] or "no GPU"),
        "versions": ", ".join(
            f"{text} {head[key]}" for key, text in versions.items() if key in head
        ),
        "date": head["date"],
        "rows": summaries,
    }


def add(run: Mapping[str, Any], bench: str) -> Path:
    """Put a run in the place of one of the same preset on the same GPU, or behind a bench's others.

    Raises:
        ConfigError: when the page has no file of the bench.
    """

    def identity(run: Mapping[str, Any]) -> tuple[str, ...]:
        preset = re.search(r"--preset[ =](\S+)", run["command"])
        name = re.match(r"scripts/bench (\S+)", run["command"])
        return name[1] if name else "", preset[1] if preset else "", run["gpu"]

    contents = {name: read(name) for files in SECTIONS.values() for name in files}
    places = [
        (name, index)
        for name, content in contents.items()
        for index, former in enumerate(content["runs"])
        if identity(former) == identity(run)
    ]
    if not places and bench not in contents:
        raise ConfigError(f"the page has no file of '{bench}' (has: {', '.join(contents)})")
    name, index = places[0] if places else (bench, len(contents[bench]["runs"]))
    contents[name]["runs"][index : index + 1] = [dict(run)]
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(contents[name], indent=1, ensure_ascii=False) + "\n")
    return path


def main(argv: Sequence[str]) -> int:
    """Write the page, with a bench's rows first where a file of them is named.

    Raises:
        ConfigError: when these rows have nothing to compare, or no place.
        StoreError: when they cannot be read.
    """
    parser = Parser(prog="scripts/bench results", description=__doc__)
    parser.add_argument("--add", type=Path, metavar="FILE", help="rows of a bench's --json FILE")
    args = parser.parse_args(argv)
    if args.add:
        head, rows = bench_rows.read(args.add)
        print(add(run_of(head, rows), str(head["bench"])))
    PAGE.write_text(page())
    from benchmarks import results_chart

    results_chart.PATH.write_text(results_chart.chart())
    return 0
