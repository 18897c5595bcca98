"""Report page: one self-contained HTML file of chart specifications and tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tuner
from tuner.base.install import extra_command
from tuner.errors import ConfigError
from tuner.report import analysis, assets, course
from tuner.report.lengths import scaling
from tuner.report.palette import colours
from tuner.report.sections import sections
from tuner.report.subject import ReportSubject

TEMPLATE = Path(__file__).with_name("page.html.j2")
EXTRA = "report"


def render(subject: ReportSubject) -> str:
    """The page's HTML.

    Raises:
        ConfigError: when the extra ``report`` is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    script = _library()
    parts = sections(subject)
    specs = {figure.name: figure.spec for s in parts for figure in s.figures}
    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=subject.label,
        verdict=analysis.verdict(subject),
        facts=_facts(subject),
        sections=parts,
        colours=colours(),
        library=script,
        figures=assets.figures(),
        specs=_in_script(specs),
        data=_in_script(data(subject)),
        version=tuner.__version__,
    )


def _library() -> str:
    try:
        import sklearn  # noqa: F401  # what Optuna's fANOVA stands on
        import vl_convert  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"a report needs the extra '{EXTRA}' ({exc.name}): `{extra_command(EXTRA)}`"
        ) from exc
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
            {
                "problem": part.problem.label(),
                "config": m.config.to_json(),
                "status": m.status.value,
                "latency_us": m.latency_us,
                "std_us": m.std_us,
                "rounds": m.rounds,
                "is_final": m.is_final,
                "flags": list(m.flags),
                "error": m.error,
                "workspace_bytes": m.workspace_bytes,
                "compile_cpu_s": m.compile_cpu_s,
                "clocks": asdict(m.clocks),
                "created_at": m.created_at,
            }
            for part in subject.recording.walk()
            for m in part.measurements
        ],
        "lengths": [
            {
                "seqlen": length.seqlen,
                "kernel": length.kernel,
                "config": length.measurement.config.to_json(),
                "latency_us": length.measurement.latency_us,
                "std_us": length.measurement.std_us,
                "rounds": length.measurement.rounds,
                "workspace_bytes": length.measurement.workspace_bytes,
                "environment": dict(length.measurement.environment.facts),
                "created_at": length.measurement.created_at,
            }
            for length in scaling(subject)
        ],
    }


def _facts(subject: ReportSubject) -> list[tuple[str, str]]:
    cost = course.cost(subject)
    return [
        ("problem", f"{subject.problem.op} {subject.problem.label()}"),
        ("GPU", f"{subject.gpu.name}, {subject.gpu.sm_count} multiprocessors"),
        ("timed", f"{subject.regime}, measured {subject.measured_on}"),
        ("from", subject.source),
        ("candidates", f"{cost.candidates} own, {cost.kernel_sets} sets of kernels"),
    ]
