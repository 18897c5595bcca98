"""Rendering of kernel specs to CUDA source. An unknown variable is an error, never an empty string.

This is the last check of a config before it becomes source code. A variable is an integer, a
boolean, or one of the words that its family declares (`KernelSpec.words`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from tuner.base import resources
from tuner.errors import RenderError
from tuner.families.base import KernelSpec, shown

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"\n]+)[>"]', re.MULTILINE)

_WORD = re.compile(r"[A-Za-z0-9_:<>, ]{0,128}")
"""Text allowed as a declared word: names and template arguments, without quotes, operators,
semicolons, braces or line breaks."""
MIN_CUTLASS = (4, 2)
"""First release that the templates are written for."""
_ID = re.compile(r"[A-Za-z0-9_]{0,64}")
"""Identifier of a kernel, the suffix of its functions' names."""
_INTEGER_BITS = 63
"""Maximum bits of an integer's magnitude, so that it fits a 64-bit C++ integer."""

_digests: dict[tuple[Path, str], tuple[tuple[tuple[Path, int], ...], str]] = {}
"""(folder, template) -> its files with their mtime_ns, and the digest."""


def render(spec: KernelSpec, kernel_id: str, cutlass: tuple[int, ...] = MIN_CUTLASS) -> str:
    """Render one kernel.

    Args:
        spec: the template and its variables.
        kernel_id: the suffix of every global name of the kernel; the template sees it as `id`. It
            sees the spec's declaration as `arguments`.
        cutlass: major and minor version of the headers, for what changed between releases.

    Raises:
        RenderError: names the template and the fault: a missing file, a syntax error with its line,
            a missing variable, or a value that is not declared.
    """
    own = {"id": kernel_id, "arguments": spec.arguments, "cutlass": cutlass}
    if reserved := sorted(own.keys() & spec.variables.keys()):
        raise RenderError(f"template {spec.template}: '{reserved[0]}' is set by the tuner")
    if not _ID.fullmatch(kernel_id):
        raise RenderError(f"template {spec.template}: {shown(kernel_id)} cannot be part of a name")
    for name, value in spec.variables.items():
        if fault := _fault(value, spec.words.get(name, ())):
            raise RenderError(f"template {spec.template}: {shown(name)} is {fault}")
    return fill(spec.template, {**spec.variables, **own})


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with trusted values that the tuner computed. Values of a config go through
    `render`, which checks them.

    Raises:
        RenderError: as `render`.
    """
    try:
        return _environment(resources.templates()).get_template(template).render(values)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
        raise _render_error(template, exc) from exc


def _fault(value: object, words: Sequence[str]) -> str:
    """Reason why a value is not allowed as a variable; empty if it is."""
    if type(value) is bool:
        return ""
    if type(value) is int:
        return f"{shown(value)}: too large" if value.bit_length() > _INTEGER_BITS else ""
    if type(value) is not str:
        return f"{shown(value)} (allowed: whole numbers, true and false, declared words)"
    if value not in words:
        return f"{shown(value)} (allowed: {', '.join(words) or 'no text'})"
    return "" if _WORD.fullmatch(value) else f"{shown(value)}: not a word, though it is declared"


def template_digest(template: str) -> str:
    """SHA-256 of a file under ``templates/`` and of every file that it includes.

    Jinja's include, import and extends, and `#include` of headers under ``templates/``, are
    followed transitively. CUTLASS's headers enter an artifact's key through the toolchain.

    Raises:
        RenderError: when a file is missing, or its name is an expression that is known only when
            rendering.
    """
    folder = resources.templates()
    remembered = _digests.get((folder, template))
    if remembered and all(_mtime(path) == mtime for path, mtime in remembered[0]):
        return remembered[1]
    texts: dict[str, str] = {}
    _gather(folder, template, texts)
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\0{len(texts[name])}\0{texts[name]}".encode())
    files = tuple((folder / name, _mtime(folder / name)) for name in texts)
    _digests[folder, template] = (files, digest.hexdigest())
    return digest.hexdigest()


def included(text: str) -> list[str]:
    """Names of the headers under ``templates/`` that a rendered source includes directly."""
    folder = resources.templates()
    return sorted({name for name in _INCLUDE.findall(text) if (folder / name).is_file()})


@lru_cache(maxsize=8)
def _environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(folder)),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # CUDA, not HTML
    )


def _gather(folder: Path, name: str, texts: dict[str, str]) -> None:
    """Add `name` and every file it includes to `texts`."""
    if name in texts:
        return
    try:
        texts[name] = text = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RenderError(f"template {name} cannot be read in {folder}: {exc}") from exc
    try:
        tree = _environment(folder).parse(text, name)
    except jinja2.TemplateError as exc:
        raise _render_error(name, exc) from exc
    for referenced in meta.find_referenced_templates(tree):
        if referenced is None:
            raise RenderError(f"template {name}: includes must be named by text, not by a variable")
        _gather(folder, referenced, texts)
    for header in _INCLUDE.findall(text):
        beside = (folder / name).parent / header
        for path in (beside, folder / header):
            if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
                _gather(folder, str(path.resolve().relative_to(folder.resolve())), texts)
                break


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _render_error(template: str, exc: Exception) -> RenderError:
    if isinstance(exc, jinja2.TemplateNotFound):
        return RenderError(f"template {exc.name} is not in {resources.templates()}")
    if isinstance(exc, jinja2.TemplateSyntaxError):
        return RenderError(f"template {exc.name or template}, line {exc.lineno}: {exc.message}")
    if isinstance(exc, jinja2.UndefinedError):
        return RenderError(f"template {template}: variable {exc.message}")
    return RenderError(f"template {template}: {type(exc).__name__}: {exc}")
