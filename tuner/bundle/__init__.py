"""Chosen entries and their compiled kernels in one file, for machines without a compiler.

A bundle is a tar file without compression, equal for equal content::

    manifest.json            format, version, platform; SHA-256 and size of every other member
    entries.json             the entries, as `tuner store export` writes
    artifacts/<key>.json     the SHA-256 of its library, ptxas resources, facts of the build
    artifacts/<key>.cu       the rendered source
    libraries/<sha256>.so    kernels of one translation unit share one

Installing a bundle is the only way to import binaries, and installs all of it or nothing. Members
are read by the names above and are never extracted. Each kernel's source must equal the source that
this program renders for a config of the bundle's entries, so its interface is known.

A library does not prove that it was built from that source. Comparing the hash of the whole file
with the published one shows that it is the publisher's file.
"""

from __future__ import annotations

from tuner.bundle.installing import Installed, install
from tuner.bundle.packing import Packed, pack

__all__ = ["Installed", "Packed", "install", "pack"]
