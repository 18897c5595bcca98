"""Routes of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

import tuner
from tuner.errors import ConfigError, StoreError
from tuner.measurement import Measurement, Provenance
from tuner.service import answers
from tuner.service.bodies import (
    L2,
    GpuName,
    JobId,
    JobRequest,
    Launch,
    LookupBatch,
    Op,
    Shape,
)
from tuner.service.decisions import Question, ServedDecisions, entries_json
from tuner.service.guard import HEALTH_PATH, OPEN_PATHS, Guard
from tuner.service.metrics import CONTENT_TYPE, Metrics
from tuner.service.pages.render import error_page, wants_page
from tuner.service.pages.routes import add_pages
from tuner.service.rates import RateLimit
from tuner.service.tokens import Sessions, Tokens
from tuner.store import Store
from tuner.store.jobs import JobRecord
from tuner.tuning.job import JobOptions, parse_problem
from tuner.tuning.outcome import first_line
from tuner.tuning.sweep import SweepOptions

EVENT_POLL_S = 0.5
"""Seconds between two polls for events of a stream."""
KEEP_ALIVE_S = 15.0
"""Seconds after which an idle stream sends a keep-alive."""
MAX_STREAMS = 64
_ALIVE = b": still here\n\n"
MAX_JOBS, MAX_PROBLEMS = 600, 100_000
"""Maximum an hour with the write token; without tokens, maximum in all."""

_asked = attrgetter(*Question._fields)
"""Fields of a `Lookup` in one call; reading them one by one would double the cost of a batch."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": answers.Error}
    for status, text in {
        400: "Not JSON",
        401: "No valid token",
        403: "Not allowed with this token, or from there",
        404: "Not found",
        413: "Body too large",
        415: "Not application/json",
        422: "Wrong input; the error names what is allowed",
        429: "Too many at a time; the header retry-after has the seconds to wait",
        503: "The store cannot be used at the moment",
    }.items()
}


async def _knows_its_query(request: Request) -> None:
    """Refuses parameters that the route does not name: a misspelt filter would not filter."""
    names = [field.alias for field in request.scope["route"].dependant.query_params]
    if unknown := [name for name in request.query_params if name not in names]:
        raise ConfigError(
            f"unknown query parameter {unknown[0][:40]!a} (allowed: {', '.join(names)})"
        )


_KNOWN_QUERY = [Depends(_knows_its_query)]
"""Query of every route that answers programs."""


class Json(Response):
    """JSON response from encoded bytes or an object; ASCII, so that any text can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else json.dumps(content).encode()


def create_app(store: Store, tokens: Tokens) -> Guard:
    """Create the service over a store.

    Args:
        store: store to serve. The caller closes it.
        tokens: tokens; without them only requests from this machine, by its own name, are accepted.
    """
    served, sessions = ServedDecisions(store), Sessions(tokens)
    metrics = Metrics(
        tasks=store.jobs.counts,
        entries=lambda: len(served.table.entries),
        age_s=lambda: served.age_s,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with served:
            yield

    app = FastAPI(
        title="cutlass-tuner",
        version=tuner.__version__,
        description="Tuned kernel configurations, and the jobs that find them.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    _add_error_handlers(app)
    _add_configs(app, served, metrics)
    _add_jobs(app, store)
    _add_state(app, served, metrics)
    add_pages(app, store, served, sessions)
    if tokens:
        _describe_tokens(app)
    return Guard(app, tokens=tokens, sessions=sessions, metrics=metrics)


def _add_error_handlers(app: FastAPI) -> None:
    def error(request: Request, status: int, detail: str, headers: Any = None) -> Response:
        if wants_page(request):
            return error_page(request, status, detail, headers)
        return Json({"error": detail}, status_code=status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, exc: RequestValidationError) -> Response:
        # The input is not echoed, since it may be anything.
        texts = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in exc.errors()[:4]
        ]
        return error(request, 422, "; ".join(texts))

    @app.exception_handler(ConfigError)
    async def wrong(request: Request, exc: ConfigError) -> Response:
        return error(request, 422, str(exc))

    @app.exception_handler(StoreError)
    async def unavailable(request: Request, exc: StoreError) -> Response:
        return error(request, 503, str(exc), {"retry-after": "5"})

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, exc: StarletteHTTPException) -> Response:
        return error(request, exc.status_code, str(exc.detail), exc.headers)

    @app.exception_handler(Exception)
    async def defect(request: Request, exc: Exception) -> Response:
        return error(request, 500, "a defect of the service; its log says more")


def _add_configs(app: FastAPI, served: ServedDecisions, metrics: Metrics) -> None:
    @app.get(
        "/v1/configs",
        summary="Decisions that match every filter given",
        response_model=answers.Configurations,
        dependencies=_KNOWN_QUERY,
    )
    async def configs(
        op: Annotated[Op | None, Query()] = None,
        shape: Annotated[Shape | None, Query(description="of `op`, default attention")] = None,
        gpu: Annotated[GpuName | None, Query()] = None,
        regime: Annotated[Launch | None, Query()] = None,
        l2: Annotated[L2 | None, Query()] = None,
        provenance: Annotated[Provenance | None, Query()] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    ) -> Response:
        rows = served.table.matching(
            op=op, shape=shape, gpu=gpu, regime=regime, l2=l2, provenance=provenance
        )
        return Json(entries_json(rows[offset : offset + limit], total=len(rows)))

    @app.post(
        "/v1/configs:lookup",
        summary="What serves each of some problems",
        response_model=answers.Lookups,
    )
    async def look_up(batch: LookupBatch) -> Response:
        table = served.table
        bodies = []
        for number, item in enumerate(batch.items):
            try:
                bodies.append(table.answer(Question(*_asked(item))))
            except ConfigError as exc:
                raise ConfigError(f"items.{number}: {exc}") from exc
        misses = bodies.count(b"null")
        metrics.count_lookups(len(bodies) - misses, misses)
        return Json(b'{"answers":[' + b",".join(bodies) + b"]}")

    @app.get(
        "/v1/snapshot",
        summary="All of the store's decisions, as `tuner store export` writes them",
        response_model=answers.Snapshot,
        responses={304: {"description": "Not changed since the ETag that was named"}},
    )
    async def snapshot(request: Request) -> Response:
        headers = {"cache-control": "no-cache"}
        return served.table.snapshot.answer(request, "application/json", headers)


def _find_job(store: Store, id: str) -> JobRecord:
    """A job by its id; the response 404 without one."""
    job = store.jobs.find(id)
    if job is None:
        raise HTTPException(404, f"job {id} is unknown")
    return job


def _add_jobs(app: FastAPI, store: Store) -> None:
    _add_changes_of_jobs(app, store)
    _add_views_of_jobs(app, store)
    _add_events_of_jobs(app, store)


def _add_changes_of_jobs(app: FastAPI, store: Store) -> None:
    jobs, tasks = RateLimit(MAX_JOBS, 3600), RateLimit(MAX_PROBLEMS, 3600)

    @app.post(
        "/v1/jobs", status_code=201, summary="Submit a job", response_model=answers.JobSummary
    )
    def submit(request: JobRequest) -> Json:
        options = options_of(request)
        problems = []
        for number, entry in enumerate(request.problems):
            try:
                problems.append(parse_problem(entry, request.op))
            except ConfigError as exc:
                raise ConfigError(f"problems.{number}: {exc}") from exc
        options.check(problems)
        jobs.check("jobs")
        tasks.check("problems", count=len(problems))
        id = store.jobs.submit(
            problems, options.to_json(), priority=request.priority, attempts=request.attempts
        )
        job = _find_job(store, id)
        return Json(job.to_json(), status_code=201, headers={"location": f"/v1/jobs/{id}"})

    @app.post(
        "/v1/jobs/{id}/cancel",
        summary="End a job; what was measured is kept",
        response_model=answers.Cancelled,
    )
    def cancel(id: JobId) -> Json:
        _find_job(store, id)
        return Json({"cancelled": store.jobs.cancel(id)})


def _add_views_of_jobs(app: FastAPI, store: Store) -> None:
    @app.get(
        "/v1/jobs",
        summary="All jobs, newest first",
        response_model=answers.JobList,
        dependencies=_KNOWN_QUERY,
    )
    def jobs(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    ) -> Json:
        every = store.jobs.all()
        some = [job.to_json() for job in every[offset : offset + limit]]
        return Json({"total": len(every), "jobs": some})

    @app.get(
        "/v1/jobs/{id}",
        summary="A job, its problems and its trials",
        response_model=answers.JobDetail,
        dependencies=_KNOWN_QUERY,
    )
    def show(
        id: JobId,
        trials: Annotated[int, Query(ge=0, le=1000, description="how many, at most")] = 100,
        after: Annotated[int, Query(ge=0, lt=1 << 31, description="trials after this id")] = 0,
    ) -> Json:
        job = _find_job(store, id)
        problems = [task.to_json() for task in store.jobs.tasks(id)]
        measured = store.jobs.trials(id, after=after, limit=trials) if trials else []
        rows = [trial_json(number, m) for number, m in measured]
        return Json({**job.to_json(), "problems": problems, "trials": rows})


def _add_events_of_jobs(app: FastAPI, store: Store) -> None:
    streams = asyncio.Semaphore(MAX_STREAMS)

    @app.get(
        "/v1/jobs/{id}/events",
        summary="What happens to a job, as it happens (server-sent events)",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def events(
        id: JobId, last_event_id: Annotated[int, Header(ge=0, lt=1 << 31)] = 0
    ) -> Response:
        await run_in_threadpool(_find_job, store, id)
        if streams.locked():
            raise HTTPException(503, f"{MAX_STREAMS} streams are open already")
        await streams.acquire()  # at once: nothing else ran since it was looked at
        return _Stream(_stream(store, id, last_event_id), streams)


class _Stream(StreamingResponse):
    """Server-sent events. Its place among the streams is free again at its end.

    Args:
        events: the events.
        streams: the places, of which one is taken.
    """

    def __init__(self, events: AsyncIterator[bytes], streams: asyncio.Semaphore) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.release()


async def _stream(store: Store, id: str, last: int) -> AsyncIterator[bytes]:
    """Stream of log lines with ids to resume after, changes of the state, and the end.

    A store that does not answer ends no stream, which is kept alive meanwhile.
    """

    def look(after: int) -> tuple[dict[str, Any], list[Any]]:
        # The state first: what happened before the job ended is then among the events.
        job = store.jobs.find(id)
        running = store.jobs.tasks(id, state="running")
        state = {**(job.to_json() if job else {}), "running": [t.to_json() for t in running]}
        return state, store.jobs.events(id, after=after)

    sent: dict[str, Any] = {}
    quiet_s = 0.0
    while True:
        looking = asyncio.ensure_future(run_in_threadpool(look, last))
        while not (await asyncio.wait({looking}, timeout=KEEP_ALIVE_S))[0]:
            yield _ALIVE
        is_away = isinstance(looking.exception(), StoreError)
        state, events = (sent, list[Any]()) if is_away else looking.result()
        lines = [_event("log", e.to_json(), e.id) for e in events]
        last = events[-1].id if events else last
        if state != sent:
            sent = state
            lines.append(_event("state", state))
        quiet_s = 0.0 if lines else quiet_s + EVENT_POLL_S
        if quiet_s >= KEEP_ALIVE_S:
            lines, quiet_s = [_ALIVE], 0.0
        if lines:
            yield b"".join(lines)
        if state and state.get("state") not in ("queued", "running") and not events:
            yield _event("end", {"state": state.get("state")})
            return
        await asyncio.sleep(EVENT_POLL_S)


def _event(kind: str, data: Any, id: int | None = None) -> bytes:
    number = "" if id is None else f"id: {id}\n"
    return f"{number}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def _add_state(app: FastAPI, served: ServedDecisions, metrics: Metrics) -> None:
    @app.get(HEALTH_PATH, summary="Whether the store can be read", response_model=answers.Health)
    async def health() -> Json:
        state = {"status": "ok" if served.is_healthy else "stale", "age_s": round(served.age_s, 1)}
        return Json(state, status_code=200 if served.is_healthy else 503)

    @app.get(
        "/metrics",
        summary="Counters for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _describe_tokens(app: FastAPI) -> None:
    """Say in the OpenAPI document that the guard asks for a bearer token."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        document = plain()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"bearer": []}]
        for path in OPEN_PATHS:
            for operation in document["paths"].get(path, {}).values():
                operation["security"] = []
        return document

    app.openapi = described  # type: ignore[method-assign]


def options_of(request: JobRequest) -> JobOptions:
    """Options of a job.

    Raises:
        ConfigError: when one is not allowed.
    """
    sweep = SweepOptions(
        families=tuple(request.families),
        effort=request.effort,
        trials=request.trials,
        time_limit_s=request.time_limit_s,
        max_workspace=request.max_workspace,
        seed=request.seed,
        sampler=request.sampler,
        compiled_only=request.compiled_only,
    )
    return JobOptions(sweep, request.regime, request.l2)


def trial_json(id: int, m: Measurement) -> dict[str, Any]:
    """JSON of a job's measurement, without its source and artifacts."""
    return {
        "id": id,
        "op": m.problem.op,
        "shape": m.problem.label(),
        "gpu": m.gpu.name,
        "regime": str(m.regime),
        "config": m.config.to_json(),
        "config_digest": m.config.digest,
        "status": m.status.value,
        "provenance": m.provenance.value,
        "latency_us": m.latency_us,
        "is_final": m.is_final,
        "compile_cpu_s": m.compile_cpu_s,
        "reason": first_line(m.log) if not m.ok else "",
        "created_at": m.created_at,
    }
