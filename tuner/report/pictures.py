"""Pictures of the page as SVG files that follow the reader's choice of light or dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from tuner.base import output
from tuner.base.install import extra_command
from tuner.errors import ConfigError
from tuner.report.page import EXTRA
from tuner.report.palette import colours
from tuner.report.sections import Section
from tuner.report.spec import CONFIG, Spec

#: What Vega tells of each mark to those who hear a page: in a file of its own, nine tenths of it.
_OF_MARKS = re.compile(r' (?:role|aria-[a-z]+)="[^"]*"')
_VARIABLE = re.compile(r"var\(--([a-z0-9-]+)\)")
WIDTH = 560
"""Width of the drawing; axes and labels come beside it."""

PADDING = {"left": 40, "right": 24, "top": 8, "bottom": 8}
"""Text is laid out here and drawn with the reader's fonts, which may be wider."""


def specs(parts: Sequence[Section], only: Sequence[str] = ()) -> dict[str, Spec]:
    """The specifications of a page's pictures, by name.

    Args:
        parts: sections of the page.
        only: names of the pictures; empty: all.

    Raises:
        ConfigError: when a name in `only` is not known; lists the known ones.
    """
    specs = {figure.name: figure.spec for part in parts for figure in part.figures}
    if unknown := [name for name in only if name not in specs]:
        raise ConfigError(f"no picture '{unknown[0]}' (allowed: {', '.join(specs)})")
    return {name: specs[name] for name in only} if only else specs


def svg(spec: Spec) -> str:
    """A picture as SVG text.

    Raises:
        ConfigError: when the extra ``report`` is not installed.
    """
    try:
        import vl_convert
    except ImportError as exc:
        raise ConfigError(
            f"a picture needs the extra '{EXTRA}' ({exc.name}): `{extra_command(EXTRA)}`"
        ) from exc
    config = {**CONFIG, "background": "var(--paper)", "padding": PADDING}
    text = str(vl_convert.vegalite_to_svg({**spec, "width": WIDTH}, config=config))
    head, _, body = text.partition(">")
    body = _OF_MARKS.sub("", body)
    label = f'{head} role="img" aria-label={quoteattr(spec["description"])}>'
    style = colours(set(_VARIABLE.findall(body)))  # a colour that it lacks does not change it
    return f"{label}<style>{escape(style)}</style>{body}\n"


def write(pictures: Mapping[str, Spec], folder: Path) -> list[Path]:
    """Write pictures as ``NAME.svg``; returns their paths.

    Raises:
        ConfigError: when the extra is not installed.
        StoreError: when a file cannot be written.
    """
    written = []
    for name, spec in pictures.items():
        path = folder / f"{name}.svg"
        output.write(path, svg(spec), make_folder=True)
        written.append(path)
    return written
