"""JSON files of benchmarks, as they were written or compressed since."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tuner.errors import ConfigError

_GZIP = b"\x1f\x8b"


def read(path: Path) -> Any:
    """The document of a file, which may be compressed by gzip.

    Raises:
        ConfigError: when it cannot be read, or is not JSON.
    """
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except (OSError, EOFError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
