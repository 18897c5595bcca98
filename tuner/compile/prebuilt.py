"""The installed wheel of prebuilt kernels (`scripts/build-kernels`), where there is one.

Its package is data and never imported. It holds artifacts as the cache does, and a kernel list with
their proofs (`tuner.selection.kernels`).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

PACKAGE = "cutlass_tuner_kernels"
DISTRIBUTION = "cutlass-tuner-kernels"
ARTIFACTS, KERNELS = "artifacts", "kernels.json"
"""Names in the package's folder."""


@cache
def folder() -> Path | None:
    """The package's folder; None where the wheel is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def artifacts() -> Path | None:
    """Folder of its artifacts."""
    found = folder()
    return None if found is None else found / ARTIFACTS


def kernel_list() -> Path | None:
    """The file of its kernel list."""
    found = folder()
    return None if found is None else found / KERNELS
