"""Report page: one self-contained HTML file of chart specifications and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tuner
from tuner.base.install import extra_command
from tuner.errors import ConfigError
from tuner.measurement import Measurement
from tuner.report import analysis, assets, course
from tuner.report.lengths import scaling
from tuner.report.palette import colours
from tuner.report.sections import Section, sections
from tuner.report.subject import ReportSubject

TEMPLATE = Path(__file__).with_name("page.html.j2")
EXTRA = "report"
OF_LENGTH = (
    *("config", "latency_us", "std_us", "rounds", "workspace_bytes", "environment", "created_at"),
)
MEASURED = (
    *("config", "status", "latency_us", "std_us", "rounds", "is_final", "flags", "error"),
    *("workspace_bytes", "compile_cpu_s", "clocks", "created_at"),
)
"""Fields of a measurement in the page's data, of a point over the length and of any other."""


def render(subject: ReportSubject) -> str:
    """The page's HTML.

    Raises:
        ConfigError: when the extra ``report`` is not installed.
    """
    title, words = subject.label, analysis.verdict(subject)
    return page(title, words, _facts(subject), sections(subject), data(subject))


def page(
    title: str,
    verdict: str,
    facts: Sequence[tuple[str, str]],
    parts: Sequence[Section],
    numbers: Mapping[str, Any],
) -> str:
    """A page's HTML.

    Args:
        title: heading above the verdict.
        verdict: the first sentence.
        facts: names and texts below it.
        parts: sections, in order.
        numbers: data that the page holds as JSON.

    Raises:
        ConfigError: when the extra ``report`` is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    script = _library()
    specs = {figure.name: figure.spec for s in parts for figure in s.figures}
    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        verdict=verdict,
        facts=facts,
        sections=parts,
        colours=colours(),
        library=script,
        figures=assets.figures(),
        specs=_in_script(specs),
        data=_in_script(numbers),
        version=tuner.__version__,
    )


def require_extra() -> None:
    """Refuse what no report can be made without.

    Raises:
        ConfigError: when the extra is not installed.
    """
    try:
        import sklearn  # noqa: F401  # what Optuna's fANOVA stands on
        import vl_convert  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"a report needs the extra '{EXTRA}' ({exc.name}): `{extra_command(EXTRA)}`"
        ) from exc


def _library() -> str:
    require_extra()
    return assets.library().replace("</script", "<\\/script")


def _in_script(value: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def data(subject: ReportSubject) -> dict[str, Any]:
    """Every number behind the page's charts, with its environment."""
    own = subject.entry.best_own
    counted = subject.profile_of(own.config) if own else None
    return {
        "source": subject.source,
        "problem": subject.problem.to_json(),
        "gpu": asdict(subject.gpu),
        "regime": str(subject.regime),
        "environment": dict(subject.environment.facts),
        "counted": counted and counted.to_json(),
        "measurements": [
            {"problem": part.problem.label(), **_some(m, MEASURED)}
            for part in subject.recording.walk()
            for m in part.measurements
        ],
        "lengths": [
            {
                "seqlen": length.seqlen,
                "kernel": length.kernel,
                **_some(length.measurement, OF_LENGTH),
            }
            for length in scaling(subject)
        ],
    }


def _some(measurement: Measurement, names: Sequence[str]) -> dict[str, Any]:
    values = measurement.to_json()
    return {name: values[name] for name in names}


def _facts(subject: ReportSubject) -> list[tuple[str, str]]:
    cost = course.cost(subject)
    return [
        ("problem", f"{subject.problem.op} {subject.problem.label()}"),
        ("GPU", f"{subject.gpu.name}, {subject.gpu.sm_count} multiprocessors"),
        ("timed", f"{subject.regime}, measured {subject.measured_on}"),
        ("from", subject.source),
        ("candidates", f"{cost.candidates} own, {cost.kernel_sets} sets of kernels"),
    ]
