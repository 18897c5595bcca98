"""``tuner jobs submit, list, show, cancel, retry, logs``: jobs for workers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import OF_LIST, add_op, add_result, tell
from tuner.cli.sweep import add_budget, add_regime, options_of, problems_of
from tuner.errors import ConfigError
from tuner.selection.describe import counted, microseconds, table
from tuner.store import open_store
from tuner.store.jobs import JobRecord, Task, result_text

if TYPE_CHECKING:
    from tuner.store import Store

FOLLOW_S = 0.5
"""Seconds between two polls for new events."""


def register(subparsers: Any) -> None:
    """Add the commands."""
    about = "jobs and their workers: submit, list, show, cancel, retry, logs, worker"
    parser = subparsers.add_parser("jobs", help=about, description=about)
    commands = parser.add_subparsers(dest="job_command", required=True, metavar="COMMAND")
    _register_submit(commands)
    _add(commands, "list", list_all, "all jobs, newest first")
    for name, run, text in (
        ("show", show, "one job: its problems, how far they are, and why they failed"),
        ("cancel", cancel, "end a job; what was measured is kept, nothing more is decided"),
        ("retry", retry, "put the failed and cancelled problems of a job into the queue again"),
        ("logs", logs, "what happened to a job"),
    ):
        command = _add(commands, name, run, text)
        command.add_argument("id", metavar="JOB", help="the job's id, or its beginning")
        if name == "logs":
            command.add_argument(
                "--follow", action="store_true", help="print progress until the job ends"
            )


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    add_result(parser, run, "JSON on standard output")
    return parser


def _register_submit(commands: Any) -> None:
    parser = _add(commands, "submit", submit, "add a job; prints its id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "problems", type=Path, nargs="?", metavar="FILE", help="YAML or JSON list of shapes"
    )
    what.add_argument("--shape", metavar="KEY=VALUE,...", help="one shape, as S=1024,D=64")
    add_op(parser, OF_LIST)
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="higher ones are taken first"
    )
    parser.add_argument(
        "--attempts", type=int, default=3, metavar="N", help="for each problem (default 3)"
    )
    add_budget(parser)
    add_regime(parser)


def submit(args: argparse.Namespace) -> int:
    """Add a job."""
    problems = problems_of(args)
    options = replace(options_of(args), skip_tuned=True)
    options.check(problems)
    with open_store(args.store) as store:
        id = store.jobs.submit(
            problems, options.to_json(), priority=args.priority, attempts=args.attempts
        )
        job = _find(store, id)
    if args.json:
        print(json.dumps(job.to_json()))
    else:
        print(id)
        print(f"{counted(sum(job.counts.values()), 'problem')} queued", file=sys.stderr)
    return 0


def list_all(args: argparse.Namespace) -> int:
    """Print a table of all jobs."""
    with open_store(args.store, create=False) as store:
        jobs = store.jobs.all()
    if args.json:
        print(json.dumps([job.to_json() for job in jobs]))
        return 0
    rows = [("job", "state", "priority", "done", "failed", "problems", "effort", "submitted")]
    for job in jobs:
        counts = job.counts
        rows.append(
            (
                job.id,
                job.state,
                str(job.priority),
                str(counts.get("done", 0)),
                str(counts.get("failed", 0)),
                str(sum(counts.values())),
                str(job.options.get("effort", "")),
                job.created_at[:19],
            )
        )
    print(table(rows, right=frozenset({2, 3, 4, 5})) if jobs else "no jobs")
    return 0


def show(args: argparse.Namespace) -> int:
    """Print one job and its problems."""
    with open_store(args.store, create=False) as store:
        job = _find(store, args.id)
        tasks = store.jobs.tasks(job.id)
    if args.json:
        print(json.dumps({**job.to_json(), "problems": [task.to_json() for task in tasks]}))
        return 0
    options = ", ".join(f"{k} {v}" for k, v in job.options.items() if v not in (None, [], ""))
    print(f"job {job.id}: {job.state}, priority {job.priority}, submitted {job.created_at[:19]}")
    print(f"options: {options}\n")
    rows = [("op", "shape", "state", "attempt", "trials", "progress or result")]
    for task in tasks:
        counts = (f"{task.attempt}/{job.attempts}", str(task.trials))
        label = (task.problem.op, task.problem.label())
        shown = _progress_text(task) if task.result is None else result_text(task.result)
        rows.append((*label, task.state, *counts, shown))
    print(table(rows, right=frozenset({3, 4})))
    for task in tasks:
        if task.reason:
            print(f"\n{task.problem.op} {task.problem.label()}: {task.reason}")
    return 0


def _progress_text(task: Task) -> str:
    facts = task.progress
    if task.state != "running" or "phase" not in facts:
        return task.holder
    goal = f" {facts.get('done', 0)}/{facts['goal']}" if facts.get("goal") else ""
    own = facts.get("best_own_us")
    best = f", best own {microseconds(own)} us" if own else ""
    return f"{facts['phase']}{goal}{best} on {task.holder}"


def cancel(args: argparse.Namespace) -> int:
    """Cancel a job. Returns 1 if it had already ended."""
    return _change(args, "cancelled", lambda store, id: store.jobs.cancel(id))


def retry(args: argparse.Namespace) -> int:
    """Queue the failed problems of a job again. Returns 1 if none had failed."""
    return _change(args, "queued", lambda store, id: store.jobs.retry(id))


def _change(args: argparse.Namespace, what: str, change: Callable[[Store, str], int]) -> int:
    with open_store(args.store, create=False) as store:
        job = _find(store, args.id)
        count = change(store, job.id)
    tell(args, {what: count}, f"{counted(count, 'problem')} of job {job.id} {what}")
    return 0 if count else 1


def logs(args: argparse.Namespace) -> int:
    """Print a job's events."""
    last = 0
    with open_store(args.store, create=False) as store:
        job = _find(store, args.id)
        while True:
            # The state is read first, so that all events before its end are included.
            is_open = _find(store, job.id).is_open
            while events := store.jobs.events(job.id, after=last):
                for event in events:
                    if args.json:
                        print(json.dumps(event.to_json()), flush=True)
                    else:
                        about = (
                            f"{event.problem.op} {event.problem.label()}: " if event.problem else ""
                        )
                        print(f"{event.at[:19]}  {about}{event.text}", flush=True)
                last = events[-1].id
            if not (args.follow and is_open):
                return 0
            time.sleep(FOLLOW_S)


def _find(store: Store, id: str) -> JobRecord:
    job = store.jobs.find(id)
    if job is None:
        raise ConfigError(f"job {id} is unknown (`tuner jobs list` names them)")
    return job
