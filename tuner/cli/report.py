"""``tuner report``: a sweep, or a model's calls, as one self-contained HTML page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import output
from tuner.cli.arguments import tell
from tuner.cli.model import add_model, answers_json, answers_of, refuse_options
from tuner.cli.subject import add_subject, gpu_of, subject_of
from tuner.errors import ConfigError, NoValidConfigError
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.selection.describe import first_few
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.report.subject import ReportSubject
    from tuner.selection.answering import ModelAnswers

DESCRIPTION = """Writes one self-contained HTML page of a measured sweep. It shows the verdict and
its use, the kernel beside its peers, limits, reasons for the config, and course and cost of the
search. Also the space, a roofline, memory, and scaling where enough lengths are known. It reads the
store, else the shipped recordings; no GPU is needed. With --model it shows who answers a model's
calls, and the expected gain, as `tuner lookup --model` does."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a sweep, or a model's calls, as one HTML page",
        description=DESCRIPTION,
    )
    what = add_subject(parser)
    add_model(parser, what)
    what.add_argument(
        "--job",
        metavar="ID",
        help="job of `tuner jobs`; writes a page for each of its problems into -o FOLDER",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="default: report.html; of a job report/"
    )
    parser.add_argument(
        "--bench",
        type=Path,
        action="append",
        metavar="FILE",
        help="file of `tuner bench --json`; rows that differ only in length make the "
        "scaling curves; may be repeated",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="write the pictures as SVG instead of the page"
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="pictures to write with --pictures, as standing,ranking,progress",
    )
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        ConfigError: when the extra is not installed, or the file's folder does not exist.
        StoreError: when the file cannot be written.
        NoValidConfigError: when there are no measurements.
    """
    from tuner.report.analysis import verdict
    from tuner.report.page import require_extra

    refuse_options(args)
    require_extra()
    if args.job is not None and args.pictures is not None:
        raise ConfigError("--pictures draws one page: name it by --shape, --recording or --model")
    if args.pictures is not None:
        return _pictures(args)
    if args.only is not None:
        raise ConfigError("--only chooses among --pictures DIR")
    if args.job is not None:
        return _job(args)
    path: Path = args.out or Path("report.html")
    output.check_place(path)
    if args.model is not None:
        return _model(args, path)
    subject = subject_of(args)
    size = _write(path, subject)
    said = verdict(subject)
    text = f"{said}\n{path}: {size / 1e6:.1f} MB, from {subject.source}"
    tell(args, {**_facts(path, size, subject), "verdict": said}, text)
    return 0


def _model(args: argparse.Namespace, path: Path) -> int:
    """Write the page of a model."""
    from tuner.report import model
    from tuner.report.page import page

    gpu, answers = _answers(args)
    name = args.model.parent.name if args.model.name == "config.json" else args.model.stem
    text, facts = model.verdict(name, answers, gpu), model.facts(args.model, answers, gpu)
    numbers = answers_json(answers, gpu)
    size = output.write(path, page(name, text, facts, model.sections(answers), numbers))
    data = {"path": str(path), "bytes": size, "verdict": text}
    tell(args, data, f"{text}\n{path}: {size / 1e6:.1f} MB")
    return 0


def _answers(args: argparse.Namespace) -> tuple[Gpu, ModelAnswers]:
    from tuner.store.reading import sqlite_file

    gpu = gpu_of(args)
    return gpu, answers_of(args, gpu, sqlite_file(args.store) if args.store else None)


def _write(path: Path, subject: ReportSubject) -> int:
    from tuner.report.page import render

    return output.write(path, render(subject))


def _facts(path: Path, size: int, subject: ReportSubject) -> dict[str, Any]:
    return {"path": str(path), "bytes": size, "source": subject.source}


def _job(args: argparse.Namespace) -> int:
    """Write a page for each problem of a stored job that has measurements. Returns 1 if one has
    none.

    Raises:
        ConfigError: when the job does not exist, or the path is not a folder.
        NoValidConfigError: when a problem has no measurements; the other pages are written.
    """
    from tuner.report.analysis import verdict
    from tuner.report.subject import from_known
    from tuner.runners.recording import SUFFIX
    from tuner.runners.recording_archive import file_name
    from tuner.tuning.job import JobOptions

    place: Path = args.out or Path("report")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"-o {place} is a file; a job's pages go into a folder")
    with open_store(args.store, create=False) as store:
        job = store.jobs.find(args.job)
        if job is None:
            raise ConfigError(f"job {args.job} is unknown (`tuner jobs list` names them)")
        problems = [task.problem for task in store.jobs.tasks(job.id)]
    gpu = gpu_of(args)
    options, written, missing = JobOptions.from_json(job.options), [], []
    for problem in problems:
        regimes = Regime.preferred(options.regime(problem))
        try:
            subject = from_known(problem, gpu, regimes, args.store, args.bench or ())
        except NoValidConfigError:
            missing.append(f"{problem.op} {problem.label()}")
            continue
        place.mkdir(parents=True, exist_ok=True)
        path = place / (file_name(problem, gpu, subject.regime).removesuffix(SUFFIX) + ".html")
        size = _write(path, subject)
        written.append({**_facts(path, size, subject), "verdict": verdict(subject)})
        if not args.json:
            print(f"{verdict(subject)}\n  {path}")
    if args.json:
        print(json.dumps({"job": job.id, "pages": written, "missing": missing}))
    if missing:
        raise NoValidConfigError(
            f"nothing was measured on {gpu.name} for {len(missing)} of the {len(problems)} "
            f"problems of job {job.id}: {first_few(missing)}"
        )
    return 0


def _pictures(args: argparse.Namespace) -> int:
    from tuner.report import model, pictures
    from tuner.report.sections import sections

    if args.pictures.exists() and not args.pictures.is_dir():
        raise ConfigError(f"--pictures {args.pictures} is a file; name a folder")
    only = [name.strip() for name in (args.only or "").split(",") if name.strip()]
    if args.model is not None:
        parts, source = model.sections(_answers(args)[1]), str(args.model)
    else:
        subject = subject_of(args)
        parts, source = sections(subject), subject.source
    written = pictures.write(pictures.specs(parts, only), args.pictures)
    data = {"paths": [str(path) for path in written], "source": source}
    tell(args, data, f"{len(written)} pictures in {args.pictures}, from {source}")
    return 0
