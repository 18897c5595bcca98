"""Paths of the data folders: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import hashlib
from functools import cache as once
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """Root of the checkout that the package runs from; None for an installed wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def _folder(name: str) -> Path:
    root = checkout()
    if root is not None and (root / name).is_dir():
        return root / name
    return _PACKAGE / "_data" / name


def templates() -> Path:
    """Folder of the Jinja CUDA templates."""
    return _folder("templates")


def cache() -> Path:
    """Folder of the shipped data: recordings, tuned configurations, database migrations."""
    return _folder("cache")


@once
def templates_digest() -> str:
    """SHA-256 of the templates of kernels and their headers, names and bytes: kernels of equal
    digests are launched with equal arguments. The dispatcher's sources are left out.

    Raises:
        OSError: when one cannot be read.
    """
    folder, digest = templates(), hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".j2", ".h")):
        if path.parent.name == "dispatcher":
            continue
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
