"""From a template and values to an answer that a browser may trust with nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse

import tuner
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.report import glossary
from tuner.report.explain import size
from tuner.selection.describe import (
    against_fastest,
    caveats,
    facts_text,
    kernel_name,
    microseconds,
    where_from,
)
from tuner.service.guard import is_for_people
from tuner.service.pages.highlight import highlight
from tuner.service.tokens import COOKIE
from tuner.store.entry import Entry, is_vendor
from tuner.store.jobs import result_speed

if TYPE_CHECKING:
    import jinja2

FOLDER = Path(__file__).parent
#: Scripts, styles and connections of this service alone; nothing inline, nothing framed.
HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


def page(
    request: Request,
    template: str,
    values: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """A template's page.

    Args:
        request: request to answer.
        template: its file name without ``.html.j2``.
        values: variables of the template.
        status: HTTP status.
        headers: headers beside those of every page.
    """
    frame = {"path": request.url.path, "has_session": COOKIE in request.cookies}
    text = _environment().get_template(f"{template}.html.j2").render({**frame, **values})
    return HTMLResponse(text, status, {**HEADERS, **(headers or {})})


def wants_page(request: Request) -> bool:
    """True when an error is shown as a page."""
    return is_for_people(request.url.path, request.headers.get("accept", "").encode("latin-1"))


def error_page(
    request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """Error message, in the frame of the other pages."""
    values = {"detail": detail, "code": status}
    return page(request, "error", values, status=status, headers=headers)


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "us": microseconds,
        "config": str,
        "kernel": kernel_name,
        "facts": facts_text,
        "marks": where_from,
        "speed": against_fastest,
        "bytes": size,
        "highlight": highlight,
        "stamp": _stamp,
        "percent": _percent,
    }
    jinja.globals |= {
        "version": tuner.__version__,
        "url": url,
        "trials_url": trials_url,
        "report_url": report_url,
        "terms": glossary.MEANINGS,
        "kernel_url": kernel_url,
        "caveats": caveats,
        "is_vendor": is_vendor,
        "result_speed": result_speed,
    }
    return jinja


def url(path: str, **query: Any) -> str:
    """A path of this service and a query, of which empty values are left out."""
    pairs = {name: str(value) for name, value in query.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(pairs)}" if pairs else path


def trials_url(of: Entry | Measurement | Problem, **query: Any) -> str:
    """The page of a problem's trials, on the GPU and in the regime of an entry."""
    if isinstance(of, Problem):
        return url("/trials", op=of.op, shape=of.label(), **query)
    return url("/trials", op=of.problem.op, shape=of.problem.label(), **_place(of), **query)


def report_url(of: Entry) -> str:
    """The report of an entry's problem, on its GPU and in its regime."""
    return url("/report", op=of.problem.op, shape=of.problem.label(), **_place(of))


def kernel_url(measurement: Measurement) -> str:
    """The page of one configuration, on the GPU and in the regime of a measurement."""
    problem, digest = measurement.problem, measurement.config.digest
    place = _place(measurement)
    return url("/kernel", op=problem.op, shape=problem.label(), config=digest, **place)


def _place(of: Entry | Measurement) -> dict[str, str]:
    return {"gpu": of.gpu.name, "regime": of.regime.launch, "l2": of.regime.l2}


def _stamp(text: str) -> str:
    """``2026-11-21 11:20:25`` of ISO 8601."""
    return text[:19].replace("T", " ") or "-"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}\N{NO-BREAK SPACE}%"
