"""`tuner report`'s page of a stored or shipped sweep, as a page of the service."""

from __future__ import annotations

import threading

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import HTMLResponse

from tuner.errors import NoValidConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.report import page, subject
from tuner.selection.reader import find_gpu
from tuner.service.bodies import PlaceOf
from tuner.service.decisions import ServedDecisions
from tuner.service.pages.render import HEADERS
from tuner.store import Store

REPORT_HEADERS = {
    **HEADERS,
    # Its scripts stand in the page, so it is an origin of its own: it can neither read this
    # service's answers nor send anything anywhere.
    "content-security-policy": "; ".join(
        (
            "sandbox allow-scripts",
            "default-src 'none'",
            "script-src 'unsafe-inline'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "form-action 'none'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
}


def add_report(app: FastAPI, store: Store, served: ServedDecisions) -> None:
    """Add ``/report``.

    Args:
        app: application that receives the page.
        store: store of the measurements.
        served: served decisions, whose GPUs may be named.
    """
    making = threading.Lock()

    @app.get("/report", include_in_schema=False)
    def report(place: PlaceOf) -> Response:
        op = place.problem.op
        regimes = place.regimes or Regime.choices(op, l2=Regime.default(op).l2)
        gpu = find_gpu(place.gpu, served.table.gpus) if place.gpu else DEFAULT_GPU
        # Seconds of CPU each: those who wait would hold the threads that others need.
        if not making.acquire(blocking=False):
            detail = "another report is being made; load this page again"
            raise HTTPException(503, detail, {"retry-after": "5"})
        try:
            sweep = subject.from_store(store, place.problem, gpu, regimes, "the service's store")
            return HTMLResponse(page.render(sweep), headers=REPORT_HEADERS)
        except NoValidConfigError as exc:
            raise HTTPException(404, str(exc)) from exc
        finally:
            making.release()
