"""Hash of one kernel's machine code, read from its library.

An artifact's key is the hash of all its inputs, so every edit of a template changes it. This hash
shows whether an edit also changed the machine code. It covers the instructions, register count,
static shared memory and constants of the functions whose names contain the artifact's key, but not
the names themselves.

Libraries hold cubins, ELF files for the machine EM_CUDA, uncompressed (nvcc compresses PTX only,
unless told otherwise).
"""

from __future__ import annotations

import hashlib
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
DIGITS = 32
"""Digits of the hash, hexadecimal."""


class _Section(NamedTuple):
    name: str
    info: int
    size: int
    content: bytes


def device_code(library: bytes, key: str) -> str:
    """Hash of a kernel's machine code; empty if the library has no function of that key.

    Args:
        library: contents of the shared library.
        key: the artifact's, contained in the names of its functions.
    """
    found = [
        (section.name.replace(key, ""), section.info >> 24, section.size, section.content)
        for section in _sections(library)
        if section.name.startswith(_PARTS) and key in section.name
    ]
    if not any(name.startswith(_PARTS[0]) for name, *_ in found):
        return ""
    digest = hashlib.sha256()
    for name, registers, size, content in sorted(found):
        digest.update(f"{name}\0{registers}\0{size}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def _sections(library: bytes) -> Iterator[_Section]:
    """Sections of every cubin. Truncated or damaged ones are skipped."""
    at = library.find(_MAGIC)
    while at >= 0:
        try:
            (machine,) = struct.unpack_from("<H", library, at + _MACHINE)
            if machine == _EM_CUDA:
                yield from list(_of_cubin(library, at))
        except (struct.error, IndexError, UnicodeDecodeError, ValueError):
            pass
        at = library.find(_MAGIC, at + 1)


def _of_cubin(library: bytes, at: int) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", library, at + _SECTIONS)
    size, count, names = struct.unpack_from("<3H", library, at + _COUNTS)
    headers = [_SECTION.unpack_from(library, at + table + i * size) for i in range(count)]
    texts = at + headers[names][4]
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        end = library.index(b"\0", texts + name)
        content = b"" if kind == _NO_BITS else library[at + offset : at + offset + length]
        yield _Section(library[texts + name : end].decode(), info, length, content)
