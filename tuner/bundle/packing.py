"""Packing of a bundle."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.base.output import replacing
from tuner.bundle.format import (
    ENTRIES,
    FORMAT,
    MANIFEST,
    VERSION,
    sha256_of,
    sources_of,
    this_platform,
)
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import NoValidConfigError
from tuner.measurement import Measurement
from tuner.selection.describe import counted
from tuner.store.entry import Entry, canonical, digest_of, is_vendor
from tuner.store.exchange import Decision, write


@dataclass(frozen=True)
class Packed:
    """The written bundle."""

    entries: int
    kernels: int
    bytes: int
    sha256: str
    """SHA-256 of the whole file."""
    left_out: tuple[str, ...]
    """Reasons of entries that were left out."""


def pack(
    entries: Sequence[Entry],
    artifacts: ArtifactCache,
    out: Path,
    *,
    leave_out: bool = False,
) -> Packed:
    """Write a bundle of measured entries, with every own config whose kernels are in the cache.

    Args:
        entries: entries to pack.
        artifacts: cache with the kernels.
        out: path of the bundle. An older file is replaced at the end.
        leave_out: True to leave out an entry whose best own kernel is missing, instead of an error.

    Raises:
        NoValidConfigError: when the kernels of an entry, or of all entries, are missing.
        StoreError: when the file cannot be written.
    """
    packed: list[Entry] = []
    kernels: dict[str, Artifact] = {}
    left_out: list[str] = []
    for entry in entries:
        try:
            kernels |= _kernels(entry, artifacts)
            packed.append(entry)
        except NoValidConfigError as exc:
            if not leave_out:
                raise
            left_out.append(str(exc))
    if not packed:
        if not left_out:
            raise NoValidConfigError("nothing to pack: no entry is measured")
        raise NoValidConfigError(
            f"nothing is built of {counted(len(left_out), 'entry')} (`tuner build` makes all), "
            f"as {left_out[0]}"
        )
    members = _members(packed, kernels)
    size, digest = _write(out, members)
    return Packed(len(packed), len(kernels), size, digest, tuple(left_out))


def _kernels(entry: Entry, artifacts: ArtifactCache) -> dict[str, Artifact]:
    """Artifacts of an entry's own configs. Those of the best ones must exist."""
    by_key: dict[str, Artifact] = {}
    needed = {m.config for m in (entry.winner, entry.best_own) if m is not None}
    for m in entry.ranked:
        if is_vendor(m.config):
            continue
        try:
            by_key |= _artifacts_of(m, artifacts)
        except NoValidConfigError:
            if m.config in needed:
                raise
    return by_key


def _artifacts_of(measurement: Measurement, artifacts: ArtifactCache) -> dict[str, Artifact]:
    problem = measurement.problem
    what = f"{problem.op} {problem.label()} on {measurement.gpu.name}: {measurement.config.family}"
    remedy = f"`tuner build --op {problem.op} --shape {problem.label()}` makes it"
    by_key: dict[str, Artifact] = {}
    sources = sources_of(measurement)
    for name, key in measurement.artifacts.items():
        artifact = artifacts.find(key)
        if artifact is None:
            raise NoValidConfigError(f"{what} is not in the cache: {remedy}")
        if sources.get(name) != _source(artifact):
            raise NoValidConfigError(f"{what} is of other templates: {remedy}")
        by_key[key] = artifact
    if set(measurement.artifacts) != set(sources):
        raise NoValidConfigError(f"{what}: its kernels are not built: {remedy}")
    return by_key


def _source(artifact: Artifact) -> str:
    try:
        return (artifact.library.parent / "kernel.cu").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _members(entries: Sequence[Entry], kernels: Mapping[str, Artifact]) -> dict[str, bytes | Path]:
    """Name and content of every member but the manifest."""
    document = _document(entries)
    members: dict[str, bytes | Path] = {ENTRIES: canonical(document).encode()}
    for key, artifact in sorted(kernels.items()):
        members[f"artifacts/{key}.json"] = canonical(artifact.meta()).encode()
        members[f"artifacts/{key}.cu"] = _source(artifact).encode()
        members[f"libraries/{artifact.sha256}.so"] = artifact.library
    return members


def _document(entries: Sequence[Entry]) -> dict[str, Any]:
    """The entries as they are served."""
    measured: dict[int, Measurement] = {}
    numbers: dict[str, int] = {}

    def number(m: Measurement) -> int:
        place = numbers.setdefault(digest_of(m), len(numbers))
        measured[place] = m
        return place

    decisions = []
    for entry in entries:
        pinned = number(entry.winner) if entry.pinned else None
        ranking = [number(m) for m in entry.ranking]
        decisions.append(Decision(ranking, pinned, entry.sweep, entry.decided_at))
    return write(measured, decisions)


def _write(out: Path, members: Mapping[str, bytes | Path]) -> tuple[int, str]:
    """Write the file atomically (`replacing`). Returns its size and hash."""
    files = {name: _described(content) for name, content in members.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tuner": tuner.__version__,
        "platform": this_platform(),
        "files": {name: {"sha256": sha, "bytes": size} for name, (sha, size) in files.items()},
    }
    with replacing(out) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, MANIFEST, canonical(manifest).encode())
            for name, content in sorted(members.items()):
                _add(tar, name, content)
        file.flush()
        path = Path(file.name)
        return path.stat().st_size, sha256_of(path)


def _described(content: bytes | Path) -> tuple[str, int]:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    return sha256_of(content), content.stat().st_size


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    # Times, owners and modes are fixed, so that equal content gives an equal file.
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    if isinstance(content, bytes):
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        return
    info.size = content.stat().st_size
    with content.open("rb") as file:
        tar.addfile(info, file)
