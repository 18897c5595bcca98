"""Chosen entries and their compiled kernels in one file, for machines without a compiler.

A bundle is a tar file without compression, equal for equal content::

    manifest.json            format, version, platform; SHA-256 and size of every other member
    entries.json             the entries, as `tuner export` writes
    artifacts/<key>.json     the SHA-256 of its library, ptxas resources, facts of the build
    artifacts/<key>.cu       the rendered source
    libraries/<sha256>.so    kernels of one translation unit share one

Installing is the only way in for a binary, and takes all or nothing. Members are read by the names
above and never extracted. Each kernel's source must equal the text that this program renders for a
config of the bundle's entries, so its interface is known.

A library does not show whether it was made from that source. The hash of the whole file, compared
with the printed one, says that it is the maker's.
"""

from __future__ import annotations

from tuner.bundle.installing import Installed, install
from tuner.bundle.packing import Packed, pack

__all__ = ["Installed", "Packed", "install", "pack"]
