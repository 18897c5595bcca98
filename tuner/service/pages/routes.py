"""The addresses of the pages. They only read; errors are pages also."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse

from tuner.errors import ConfigError
from tuner.measurement import Provenance
from tuner.problem import PROBLEMS, Problem
from tuner.report import assets
from tuner.report.palette import colours
from tuner.service.bodies import Digest, GpuName, JobId, Op, PlaceOf, RunKey, Words
from tuner.service.connections import network_of
from tuner.service.decisions import ServedDecisions
from tuner.service.guard import LOGIN_PATH, LOGOUT_PATH
from tuner.service.packed import PackedText
from tuner.service.pages import environments, kernels, trials
from tuner.service.pages.overview import overview_of, workers
from tuner.service.pages.render import FOLDER, page, url
from tuner.service.pages.reports import add_report
from tuner.service.pages.table import ROWS, Filter, Order, Outcome, find_entries
from tuner.service.rates import RateLimit
from tuner.service.tokens import COOKIE, LIFETIME_S, Sessions
from tuner.store import Store
from tuner.store.jobs import MAX_PRIORITY, TASK_STATES, Task

JOB_ROWS = 50
TASK_ROWS = 200
MAX_LOGINS = 30
"""Most logins a minute that one address may try."""
_WITHIN = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""An address of this service: one that begins with two slashes, or holds a backslash, may be
another's to a browser."""

_STATIC = {
    "pages.css": "text/css",
    "pages.js": "text/javascript",
    "forms.js": "text/javascript",
    "figures.js": "text/javascript",
    "vega.js": "text/javascript",
}
"""All that is served beside the pages, by name: no path of a request reaches the file system."""
STATIC_HEADERS = {"cache-control": "no-cache", "x-content-type-options": "nosniff"}

First = Annotated[int, Query(ge=0, lt=1 << 31)]
State = Annotated[str, Query(pattern=f"^({'|'.join(TASK_STATES)})$")]


def add_pages(app: FastAPI, store: Store, served: ServedDecisions, sessions: Sessions) -> None:
    """Add every page.

    Args:
        app: application that receives the pages.
        store: store of jobs, trials and environments.
        served: decisions in memory.
        sessions: sessions of the browsers that logged in.
    """
    _add_static(app)
    _add_overview(app, store, served)
    _add_cache(app, served)
    _add_jobs(app, store, needs_token=bool(sessions))
    _add_problem(app, store)
    add_report(app, store, served)
    _add_compare(app, store)
    if sessions:
        _add_login(app, sessions)


def _add_static(app: FastAPI) -> None:
    @app.get("/static/{name}", include_in_schema=False)
    def static(request: Request, name: str) -> Response:
        if name not in _STATIC:
            raise HTTPException(404, "there is no such file")
        return _static(name).answer(request, _STATIC[name], STATIC_HEADERS)


@cache
def _static(name: str) -> PackedText:
    if name == "pages.css":
        text = f"{colours()}\n{_read(name)}"
    elif name in ("pages.js", "forms.js"):
        text = _read(name)
    else:
        text = assets.figures() if name == "figures.js" else assets.library()
    return PackedText.of(text.encode())


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _add_overview(app: FastAPI, store: Store, served: ServedDecisions) -> None:
    @app.get("/", include_in_schema=False)
    def start(request: Request) -> Response:
        values = {
            "overview": overview_of(served.table),
            "counts": store.jobs.counts(),
            "states": TASK_STATES,
            "workers": workers(store.jobs),
        }
        return page(request, "overview", values)


def _add_cache(app: FastAPI, served: ServedDecisions) -> None:
    @app.get("/cache", include_in_schema=False)
    def decisions(
        request: Request,
        q: Annotated[Words, Query()] = "",
        order: Annotated[Order, Query()] = "problem",
        op: Annotated[Op | Literal[""], Query()] = "",
        gpu: Annotated[GpuName | Literal[""], Query()] = "",
        provenance: Annotated[Provenance | Literal[""], Query()] = "",
        standing: Annotated[Outcome | Literal[""], Query()] = "",
        first: First = 0,
    ) -> Response:
        only = Filter(op, gpu, str(provenance), standing)
        matching = find_entries(served.table, q, order=order, first=first, only=only)
        query = {"q": q, **asdict(only)}
        pages = _neighbours("/cache", matching.first, ROWS, matching.total, **query, order=order)
        values = {
            "found": matching,
            "known": len(served.table.entries),
            "query": query,
            "order": order,
            "choices": {
                "op": sorted({entry.problem.op for entry in served.table.entries}),
                "gpu": sorted({entry.gpu.name for entry in served.table.entries}),
                "provenance": [str(p) for p in Provenance],
                "standing": get_args(Outcome),
            },
            "pages": pages,
        }
        return page(request, "cache", values)


def _neighbours(path: str, first: int, rows: int, total: int, **query: Any) -> dict[str, str]:
    """Addresses of the page before and the page after; empty where there is none."""
    before, after = max(0, first - rows), first + rows
    return {
        "before": url(path, **query, first=before or None) if first > 0 else "",
        "after": url(path, **query, first=after) if after < total else "",
    }


def _add_jobs(app: FastAPI, store: Store, *, needs_token: bool) -> None:
    @app.get("/jobs", include_in_schema=False)
    def jobs(request: Request, state: State | None = None, first: First = 0) -> Response:
        every = store.jobs.all()
        shown = [job for job in every if state in (None, job.state)]
        values = {
            "jobs": shown[first : first + JOB_ROWS],
            "total": len(every),
            "counts": store.jobs.counts(),
            "state": state,
            "states": TASK_STATES,
            "pages": _neighbours("/jobs", first, JOB_ROWS, len(shown), state=state),
        }
        return page(request, "jobs", values)

    @app.get("/jobs/new", include_in_schema=False)
    async def new_job(request: Request) -> Response:
        values = {"ops": list(PROBLEMS), "needs_token": needs_token, "most": MAX_PRIORITY}
        return page(request, "new_job", values)

    @app.get("/jobs/{id}", include_in_schema=False)
    def job(
        request: Request,
        id: JobId,
        state: State | None = None,
        first: First = 0,
    ) -> Response:
        record = store.jobs.find(id)
        if record is None:
            raise HTTPException(404, f"job {id} is unknown")
        tasks = store.jobs.tasks(id, state=state)
        if state is None:
            # What happens now, and what needs eyes, before what waits or is over.
            order = ("running", "failed", "queued", "done", "cancelled")
            tasks.sort(key=lambda task: order.index(task.state))
        values = {
            "job": record,
            "tasks": tasks[first : first + TASK_ROWS],
            "state": state,
            "states": TASK_STATES,
            "needs_token": needs_token,
            "pages": _neighbours(f"/jobs/{id}", first, TASK_ROWS, len(tasks), state=state),
        }
        return page(request, "job", values)


def _add_problem(app: FastAPI, store: Store) -> None:
    @app.get("/trials", include_in_schema=False)
    def show_trials(
        request: Request,
        place: PlaceOf,
        sweep: Annotated[Words | None, Query()] = None,
        run: Annotated[RunKey | None, Query()] = None,
        job: Annotated[JobId | None, Query()] = None,
        show: Annotated[trials.Show, Query()] = "all",
        first: First = 0,
    ) -> Response:
        problem = place.problem
        task = None if job is None else _task(store, job, problem)
        runs = trials.runs(store, problem)
        shown_run = trials.choose(
            runs,
            key=run,
            sweep=task.sweep if task else sweep,
            gpu=place.gpu,
            regimes=place.regimes,
        )
        if shown_run is None and run is not None:
            raise HTTPException(404, f"there is no run {run} of {problem.op} {problem.label()}")
        if task is not None and shown_run is not None and shown_run.sweep != (task.sweep or None):
            shown_run = None  # nothing of its sweep yet: what another one found is not its
        rows = shown_run.table(show) if shown_run else []
        query = dict(request.query_params) | {"show": None if show == "all" else show}
        values = {
            "problem": problem,
            "runs": runs,
            "run": shown_run,
            "job": job,
            "task": task,
            "rows": rows[first : first + trials.ROWS],
            "total": len(rows),
            "first": first,
            "show": show,
            "filters": {
                name: url(
                    "/trials", **_without_first(query) | {"show": None if name == "all" else name}
                )
                for name in trials.SHOWN
            },
            "pages": _neighbours("/trials", first, trials.ROWS, len(rows), **_without_first(query)),
        }
        return page(request, "trials", values)

    @app.get("/kernel", include_in_schema=False)
    def kernel(
        request: Request,
        place: PlaceOf,
        config: Annotated[Digest, Query()],
    ) -> Response:
        problem, gpu, regimes = place.problem, place.gpu, place.regimes
        source = kernels.find(store, problem, config, gpu=gpu, regimes=regimes)
        if source is None:
            what = f"nothing was measured of configuration {config} for "
            what += f"{problem.op} {problem.label()}{f' on {gpu}' if gpu else ''}"
            raise HTTPException(404, what + (f", {regimes[0]}" if regimes else ""))
        differing = environments.differing([m.environment for m in source.measurements])
        return page(request, "kernel", {"subject": source, "differing": differing})


def _without_first(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if name != "first"}


def _task(store: Store, job: str, problem: Problem) -> Task:
    # Those that run first: a job may hold thousands.
    for state in ("running", None):
        for task in store.jobs.tasks(job, state=state):
            if task.problem == problem:
                return task
    raise HTTPException(404, f"job {job} has no problem {problem.op} {problem.label()}")


def _add_compare(app: FastAPI, store: Store) -> None:
    @app.get("/compare", include_in_schema=False)
    def compare(
        request: Request,
        a: Annotated[Digest | None, Query()] = None,
        b: Annotated[Digest | None, Query()] = None,
        relative: Annotated[bool, Query()] = False,
        first: First = 0,
    ) -> Response:
        every = environments.known(store)
        by_digest = {env.digest: env for env in every}
        if missing := [d for d in (a, b) if d is not None and d not in by_digest]:
            raise HTTPException(404, f"nothing was measured in environment {missing[0]}")
        values: dict[str, Any] = {"known": every, "labels": _labels(every), "relative": relative}
        values |= {"a": a, "b": b, "sides": None, "fault": ""}
        if a and b and a == b:
            values["fault"] = "These are the same environment."
        elif a and b:
            try:
                sides = environments.sides(store, by_digest[a], by_digest[b], is_relative=relative)
            except ConfigError:
                values["fault"] = "These two have no problem, GPU and regime in common."
            else:
                query = {"a": a, "b": b, "relative": "true" if relative else None}
                pages = _neighbours("/compare", first, ROWS, len(sides.pairs), **query)
                values |= {"sides": sides, "pairs": sides.pairs[first : first + ROWS]}
                values["pages"] = pages
        return page(request, "compare", values)


def _labels(sides: Sequence[environments.Known]) -> dict[str, str]:
    names = environments.differing([e.environment for e in sides])
    return {e.digest: environments.label(e, names) for e in sides}


def _add_login(app: FastAPI, sessions: Sessions) -> None:
    logins = RateLimit(MAX_LOGINS, 60)

    @app.get(LOGIN_PATH, include_in_schema=False)
    async def form(
        request: Request, next: Annotated[str, Query(max_length=2048)] = "/"
    ) -> Response:
        return page(request, "login", {"next": _within(next), "fault": ""})

    @app.post(LOGIN_PATH, include_in_schema=False)
    async def log_in(request: Request) -> Response:
        network = network_of(request.client.host if request.client else "")
        logins.check("logins from this address", network)
        try:
            fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=8)
        except ValueError as exc:
            raise HTTPException(422, f"not the login's form: {exc}") from exc
        token, next = (fields.get(name, [""])[0] for name in ("token", "next"))
        session = sessions.begin(token)
        if session is None:
            values = {"next": _within(next), "fault": "This is none of the service's tokens."}
            return page(request, "login", values, status=401)
        answer = RedirectResponse(_within(next), 303)
        answer.set_cookie(
            COOKIE,
            session,
            max_age=LIFETIME_S,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return answer

    @app.post(LOGOUT_PATH, include_in_schema=False)
    async def log_out(request: Request) -> Response:
        sessions.end(request.headers.get("cookie", "").encode("latin-1"))
        answer = RedirectResponse(LOGIN_PATH, 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="lax")
        return answer


def _within(address: str) -> str:
    return address if _WITHIN.fullmatch(address) else "/"
