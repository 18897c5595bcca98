"""Paths of the data folders: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import hashlib
import re
from functools import cache as once
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
TRITON_LIBRARY = "triton_library.cpp.j2"
"""Template of the C interface of every kernel in Triton."""
_NAME = re.compile(r"[A-Za-z0-9_/]{1,100}(\.[a-z0-9]{1,8}){1,3}", re.ASCII)
_JINJA = re.compile(r"""\{%[-+]?\s*(?:include|import|from|extends)\s*["']([^"']*)["']""")
_HEADER = re.compile(r'^\s*#\s*include\s*[<"]([^>"\n]+)[>"]', re.MULTILINE)


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


def sources(template: str) -> list[Path]:
    """A template and the files under ``templates/`` that it includes, also indirectly, sorted.

    An include whose name is computed takes every file of the folder that it begins with. Needs no
    template engine. Empty when the template does not exist.
    """
    folder = templates().resolve()
    names = [template] if _NAME.fullmatch(template) else []
    names += [TRITON_LIBRARY] if template.endswith(".py.j2") else []
    waiting, files = [folder / name for name in names], set[Path]()
    while waiting:
        path = waiting.pop().resolve()
        if path.is_dir():
            waiting += path.iterdir()
        elif path.is_file() and path.is_relative_to(folder) and path not in files:
            files.add(path)
            text = path.read_text(encoding="utf-8")
            waiting += [folder / name for name in _JINJA.findall(text)]
            for name in _HEADER.findall(text):
                waiting += [path.parent / name, folder / name]
    return sorted(files)


@once
def template_digest(template: str) -> str:
    """Digest of a template's `sources`, names and bytes, 16 hexadecimal digits. Empty when the
    template does not exist.

    Raises:
        OSError: when a file cannot be read.
    """
    files = sources(template)
    return _digest(files)[:16] if files else ""


@once
def templates_digest() -> str:
    """Digest over all templates of kernels and their headers, which kernel lists of version 1
    hold. The dispatcher's sources are left out.

    Raises:
        OSError: when one cannot be read.
    """
    files = (p for p in templates().resolve().rglob("*") if p.suffix in (".j2", ".h"))
    return _digest(sorted(path for path in files if path.parent.name != "dispatcher"))


def _digest(files: list[Path]) -> str:
    """SHA-256 over names and bytes of files under ``templates/``."""
    folder, digest = templates().resolve(), hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
