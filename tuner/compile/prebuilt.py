"""The optional wheels of prebuilt kernels (`scripts/build-kernels`).

Their package is data and is never imported. It holds the facts of artifacts as the cache
does, and their libraries, each once by its SHA-256. Each wheel has a kernel list with proofs
(`tuner.selection.kernels`).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

PACKAGE = "cutlass_tuner_kernels"
DISTRIBUTION = "cutlass-tuner-kernels"
ARTIFACTS, LIBRARIES, KERNELS = "artifacts", "libraries", "kernels*.json"
"""Names in the package's folder; of the first wheel's list the asterisk is nothing."""


@cache
def folder() -> Path | None:
    """Folder of the package; None if the wheel is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def artifacts() -> Path | None:
    """Folder of the wheel's artifacts; None if it is not installed."""
    package = folder()
    return None if package is None else package / ARTIFACTS


def libraries() -> Path | None:
    """Folder of the wheel's libraries; None if it is not installed."""
    package = folder()
    return None if package is None else package / LIBRARIES


def kernel_lists() -> list[Path]:
    """Files of the wheels' kernel lists, the first wheel's first."""
    package = folder()
    return [] if package is None else sorted(package.glob(KERNELS))
