"""Recordings of a folder: single files, and archives of one operation each.

Recordings that ship lie in ``cache/recordings/OP.zip``. Its member `INDEX` lists the names of the
recordings in each block, ``0.jsonl`` and so on. A block has a document in each line, and is
compressed as a whole. The members of former archives are single files. A file in the folder
replaces a recording of its name until `pack` moves it into the archive.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import zipfile
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from tuner.base import document, output, resources
from tuner.errors import ConfigError
from tuner.hardware import Gpu
from tuner.measurement import Regime, Regimes, listed, regime_keys
from tuner.problem import Problem
from tuner.runners.recording import (
    SUFFIX,
    Member,
    Recording,
    Source,
    content_of,
    decode,
    read,
    read_document,
)

ARCHIVE_SUFFIX = ".zip"
INDEX = "index.json"
BLOCK = 16
"""Recordings of a block: 64 would take a fifth less space, and four times as long to read one."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of every member: equal recordings make equal archives."""


def file_name(problem: Problem, gpu: Gpu, regime: Regime) -> str:
    """Name of a recording. Members of archives are found by it, single files by their contents."""
    label = re.sub(r"[^A-Za-z0-9]+", "_", problem.label().replace("=", ""))
    return f"{problem.op}-{label}{_ending(gpu, regime)}{SUFFIX}"


def folder() -> Path:
    """Folder of the shipped recordings."""
    return resources.cache() / "recordings"


def sources(place: Path, op: str = "*") -> list[Source]:
    """The recordings of a folder, by name.

    Args:
        place: folder of single recordings and archives; it may be missing.
        op: operation whose archive is opened; all by default. Single files are listed always.

    Raises:
        ConfigError: when an archive is damaged.
    """
    by_name: dict[str, Source] = {}
    for path in sorted(place.glob(f"{op}{ARCHIVE_SUFFIX}")):
        by_name |= _members(path, path.stat().st_mtime_ns)
    by_name |= {path.name: path for path in place.glob(f"*{SUFFIX}")}
    return [by_name[name] for name in sorted(by_name)]


def named(place: Path, name: str) -> Source | None:
    """The recording of a folder that has a name (`file_name`), or None.

    Raises:
        ConfigError: when an archive is damaged.
    """
    if (single := place / name).exists():
        return single
    op = name.partition("-")[0]
    return next((source for source in sources(place, op) if source.name == name), None)


def find(
    problem: Problem, gpu: Gpu, regimes: Regimes, where: Sequence[Path] | None = None
) -> Recording | None:
    """The recording of a problem in the first regime that has one; None when there is none.

    Args:
        problem: recorded problem.
        gpu: GPU model of the recording.
        regimes: accepted regimes, the preferred one first.
        where: folders to look in; the shipped recordings by default.

    Raises:
        ConfigError: when a file of the operation is damaged.
    """
    keys, posed = regime_keys(regimes), problem.to_json()
    names = {_unnumbered(file_name(problem, gpu, regime)) for regime in listed(regimes)}
    by_regime: dict[str, Recording] = {}
    for source in (file for place in where or [folder()] for file in sources(place, problem.op)):
        if not isinstance(source, Path) and _unnumbered(source.name) not in names:
            continue
        header = read_document(source)
        if header.get("problem") != posed or header.get("regime") not in keys:
            continue
        recording = decode(source, header)
        if recording.gpu.identity == gpu.identity:
            by_regime.setdefault(recording.regime.key, recording)
            if recording.regime.key == keys[0]:
                break
    return next((by_regime[key] for key in keys if key in by_regime), None)


def taken(gpu: Gpu, regime: Regime) -> Iterator[Recording]:
    """Every shipped recording on a GPU model in a regime.

    Raises:
        ConfigError: when a file is damaged.
    """
    ending = _ending(gpu, regime)
    for source in sources(folder()):
        if not isinstance(source, Path) and not _unnumbered(source.name).endswith(ending):
            continue
        recording = read(source)
        if (recording.regime, recording.gpu.identity) == (regime, gpu.identity):
            yield recording


def pack(place: Path) -> dict[Path, int]:
    """Move the single recordings of a folder into its archives.

    Returns:
        By archive that was written, how many recordings it holds now.

    Raises:
        ConfigError: when a recording is damaged, or does not have the name that `find` expects.
        StoreError: when an archive cannot be written.
    """
    singles = sorted(place.glob(f"*{SUFFIX}"))
    for path in singles:
        recording = read(path)
        expected = file_name(recording.problem, recording.gpu, recording.regime)
        if _unnumbered(path.name) != _unnumbered(expected):
            raise ConfigError(f"recording {path} is not named {expected}: rename it first")
    counts: dict[Path, int] = {}
    for op in sorted({path.name.partition("-")[0] for path in singles}):
        members = [file for file in sources(place, op) if file.name.startswith(f"{op}-")]
        counts[_write_archive(place / f"{op}{ARCHIVE_SUFFIX}", members)] = len(members)
    for path in singles:
        path.unlink()
    return counts


def _write_archive(path: Path, members: Sequence[Source]) -> Path:
    blocks = [members[first : first + BLOCK] for first in range(0, len(members), BLOCK)]
    files = {INDEX: json.dumps([[member.name for member in block] for block in blocks]).encode()}
    for number, block in enumerate(blocks):
        files[_name(number)] = b"\n".join(map(content_of, block))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_LZMA)
    output.write(path, buffer.getvalue())
    return path


def _name(number: int) -> str:
    return f"{number}.jsonl"


def _unnumbered(name: str) -> str:
    """A recording's name without suffix, and without the number of a later recording of the same:
    ``a_2.json.gz`` is ``a``.
    """
    return re.sub(r"_\d+$", "", name.removesuffix(SUFFIX))


def _ending(gpu: Gpu, regime: Regime) -> str:
    """End of a recording's name: its GPU model and regime."""
    return f"-{gpu.name.removeprefix('NVIDIA ').replace(' ', '_')}-{regime.key}"


@lru_cache(maxsize=16)
def _members(path: Path, mtime_ns: int) -> dict[str, Source]:
    """Recordings of an archive by name; its index is read once.

    Args:
        path: file of the archive.
        mtime_ns: its time of change, so that a changed archive is read anew.
    """
    try:
        archive = zipfile.ZipFile(path)
        if INDEX not in archive.namelist():
            return {name: zipfile.Path(archive, name) for name in archive.namelist()}
        return {
            name: Member(path, name, partial(_block, archive, number), place)
            for number, names in enumerate(document.parse(archive.read(INDEX)))
            for place, name in enumerate(names)
        }
    except (OSError, zipfile.BadZipFile, lzma.LZMAError, EOFError, ValueError, TypeError) as exc:
        raise ConfigError(f"recordings {path} cannot be read: {exc}") from exc


@lru_cache(maxsize=4)
def _block(archive: zipfile.ZipFile, number: int) -> list[bytes]:
    return archive.read(_name(number)).split(b"\n")
