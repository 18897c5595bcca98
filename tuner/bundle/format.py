"""Format of a bundle: names, limits, hashes, and the sources of a config."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from pathlib import Path

from tuner.compile.render import render
from tuner.families import family
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS
from tuner.measurement import Measurement

FORMAT = "cutlass-tuner-bundle"
VERSION = 1
ORIGIN = "bundle"
"""`Entry.origin` of installed entries."""
MANIFEST, ENTRIES = "manifest.json", "entries.json"
#: Allowed member names of a bundle, with their maximum bytes.
MEMBERS = (
    (re.compile(r"manifest\.json"), 64 << 20),
    (re.compile(r"entries\.json"), 512 << 20),
    (re.compile(r"artifacts/[0-9a-f]{32}\.json"), 1 << 20),
    (re.compile(r"artifacts/[0-9a-f]{32}\.cu"), 16 << 20),
    (re.compile(r"libraries/[0-9a-f]{64}\.so"), 1 << 30),
)


def this_platform() -> str:
    """Platform of a compiled library, as ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def sources_of(measurement: Measurement) -> dict[str, str]:
    """Sources that this program renders for a measurement's kernels; empty if it cannot."""
    try:
        member = family(measurement.config.family)
        specs = member.kernels(measurement.problem, measurement.config)
        return {
            name: render(spec, measurement.artifacts.get(name, "")) for name, spec in specs.items()
        }
    except INCOMPATIBLE_CONFIG_ERRORS:
        return {}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
