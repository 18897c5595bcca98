"""Scripts that pictures need in a browser: the drawing library, and its call.

The report contains them in its one file. The service serves them beside its pages.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tuner.base.install import install_command
from tuner.errors import ConfigError
from tuner.report.spec import CONFIG

_FIGURES = Path(__file__).with_name("figures.js")


@cache
def figures() -> str:
    """JavaScript that exports ``draw(place, spec)``; it calls `library`'s ``vegaEmbed``."""
    return f"const config = {json.dumps(CONFIG)};\n{_FIGURES.read_text(encoding='utf-8')}"


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script.

    Raises:
        ConfigError: when vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as exc:
        raise ConfigError(
            f"pictures need vl-convert-python: `{install_command('vl-convert-python')}`"
        ) from exc
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
