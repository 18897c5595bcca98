"""JSON files of benchmarks, as they were written or compressed since."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tuner.errors import ConfigError

_GZIP = b"\x1f\x8b"


def text(path: Path) -> str:
    """Text of a file, which may be compressed by gzip.

    Raises:
        ConfigError: when it cannot be read.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def read(path: Path) -> Any:
    """JSON document of a file, which may be compressed by gzip.

    Raises:
        ConfigError: when it cannot be read, or is not JSON.
    """
    try:
        return json.loads(text(path))
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
