"""``tuner explain``: explanation of why a config won."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tuner.cli.arguments import tell
from tuner.cli.subject import add_subject, subject_of
from tuner.errors import NoValidConfigError
from tuner.selection.describe import config_lines, wrapped

if TYPE_CHECKING:
    from tuner.report.explain import Explanation, Statement
    from tuner.report.subject import ReportSubject

DESCRIPTION = """Compares the best own kernel with the runner-up and the default: parameters, waves,
occupancy, bytes, instructions, and its limit. Also shows the effect of each parameter that was
measured alone. Every sentence says whether its numbers were measured or computed."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain", help="explain why a configuration won", description=DESCRIPTION
    )
    add_subject(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation.

    Raises:
        NoValidConfigError: when no own kernel passed.
    """
    from tuner.report.explain import explain

    subject = subject_of(args)
    explanation = explain(subject)
    if explanation is None:
        raise NoValidConfigError(f"no own kernel passed for {subject.label} ({subject.source})")
    facts = {"subject": subject.label, "source": subject.source}
    tell(args, {**facts, **explanation.to_json()}, explanation_text(subject, explanation))
    return 0


def explanation_text(subject: ReportSubject, explained: Explanation) -> str:
    """The explanation, in paragraphs."""
    lines = [
        f"{subject.label}: measured {subject.measured_on}, {subject.source}",
        "",
        *wrapped(explained.headline),
        *(f"  {line}" for line in config_lines(explained.config.config, 98)),
    ]
    for contrast in explained.contrasts:
        lines += ["", contrast.title]
        if contrast.changes:
            lines += _item("changed: " + "; ".join(contrast.changes))
        lines += _claims(contrast.claims)
    if explained.single:
        lines += ["", "Changing one parameter alone", *_claims(explained.single)]
    lines += ["", "Limits", *_claims(explained.limits), *_claims(explained.counted)]
    return "\n".join(lines)


def _claims(claims: Iterable[Statement]) -> list[str]:
    return [line for claim in claims for line in _item(f"{claim.text} [{claim.source}]")]


def _item(text: str) -> list[str]:
    first, *more = wrapped(text, 96)
    return [f"  - {first}", *(f"  {line}" for line in more)]
