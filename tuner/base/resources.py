"""Where the data folders are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    checkout = _PACKAGE.parent / name
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return _PACKAGE / "_data" / name


def templates() -> Path:
    """Folder of the Jinja CUDA templates."""
    return _folder("templates")


def cache() -> Path:
    """Folder of the shipped data: recordings, tuned configurations, database migrations."""
    return _folder("cache")
