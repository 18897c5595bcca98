"""Hash of one kernel's machine code, read from its library.

An artifact's key is the hash of all its inputs, so every edit of a template changes it. This hash
shows whether an edit also changed the machine code. It covers the instructions, register count,
static shared memory and constants of the functions whose names contain the artifact's key, but not
the names themselves.

It also covers ``__device__`` and ``__constant__`` variables whose names contain the key.
Initialised variables without any key are covered too: each kernel of the unit may read them.

Libraries hold cubins, ELF files for the machine EM_CUDA, uncompressed (nvcc compresses PTX only,
unless told otherwise).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = b"\x7fELF"
_EM_CUDA = 190
#: ELF64: machine; offset of the section headers; their size, count and the names' index.
_MACHINE, _SECTIONS, _COUNTS = 18, 40, 58
#: Name, type, flags, address, offset, size, link, info, alignment, entry size.
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8
#: Of a function: instructions, with the register count in the section's `info`; static shared
#: memory; constants.
_PARTS = (".text.", ".nv.shared.", ".nv.constant")
#: Of all kernels of a unit: variables, those with initial values first.
_INITIALISED = (".nv.global.init", ".nv.constant3")
_VARIABLES = (*_INITIALISED, ".nv.global")
#: Name, type and binding, visibility, section, value, size.
_SYMBOL = struct.Struct("<IBBHQQ")
_OBJECT = 1
_KEY = re.compile(r"[0-9a-f]{32}")
"""An artifact's key, in the names of its variables."""
_UNIT = re.compile(r"\d*_INTERNAL_[0-9a-f]{8}_\d+_\w*?_cu_[0-9a-f]{8}(_\d+)?\d*")
"""Prefix of names that are local to a unit; it differs from build to build."""
DIGITS = 32
"""Digits of the hash, hexadecimal."""


class _Section(NamedTuple):
    name: str
    info: int
    size: int
    content: bytes
    link: int


class _Part(NamedTuple):
    """Something that the hash covers."""

    name: str
    registers: int
    size: int
    content: bytes


def device_code(library: bytes, key: str) -> str:
    """Hash of a kernel's machine code; empty if the library has no function of that key.

    Args:
        library: contents of the shared library.
        key: the artifact's, contained in the names of its functions.
    """
    parts: list[_Part] = []
    for sections in _cubins(library):
        own = [
            _Part(part.name.replace(key, ""), part.info >> 24, part.size, part.content)
            for part in sections
            if part.name.startswith(_PARTS) and key in part.name
        ]
        if any(part.name.startswith(_PARTS[0]) for part in own):
            parts += [*own, *_variables(sections, key)]
    if not parts:
        return ""
    digest = hashlib.sha256()
    for name, registers, size, content in sorted(parts):
        digest.update(f"{name}\0{registers}\0{size}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def _variables(sections: list[_Section], key: str) -> Iterator[_Part]:
    """Variables of a kernel, and initialised ones of no kernel."""
    for table in (section for section in sections if section.name == ".symtab"):
        names = sections[table.link].content
        for name_at, kind, _, place, at, size in _SYMBOL.iter_unpack(table.content):
            if kind & 0xF != _OBJECT or not 0 < place < len(sections):
                continue
            section = sections[place]
            name = _UNIT.sub("", names[name_at : names.index(b"\0", name_at)].decode())
            is_shared = section.name in _INITIALISED and not _KEY.search(name)
            if section.name in _VARIABLES and (key in name or is_shared):
                content = section.content[at : at + size]
                yield _Part(f"{section.name} {name.replace(key, '')}", 0, size, content)


def _cubins(library: bytes) -> Iterator[list[_Section]]:
    """Sections of every cubin. Truncated or damaged ones are skipped."""
    at = library.find(_MAGIC)
    while at >= 0:
        try:
            (machine,) = struct.unpack_from("<H", library, at + _MACHINE)
            if machine == _EM_CUDA:
                yield list(_of_cubin(library, at))
        except (struct.error, IndexError, UnicodeDecodeError, ValueError):
            pass
        at = library.find(_MAGIC, at + 1)


def _of_cubin(library: bytes, at: int) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", library, at + _SECTIONS)
    size, count, names = struct.unpack_from("<3H", library, at + _COUNTS)
    headers = [_SECTION.unpack_from(library, at + table + i * size) for i in range(count)]
    texts = at + headers[names][4]
    for name, kind, _, _, offset, length, link, info, _, _ in headers:
        end = library.index(b"\0", texts + name)
        content = b"" if kind == _NO_BITS else library[at + offset : at + offset + length]
        yield _Section(library[texts + name : end].decode(), info, length, content, link)
