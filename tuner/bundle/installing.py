"""Installation of a bundle: every member is checked, and all of it is installed or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import tuner
from tuner.base.document import FAULTS
from tuner.base.printable import one_line
from tuner.bundle.format import (
    ENTRIES,
    FORMAT,
    MANIFEST,
    MEMBERS,
    ORIGIN,
    VERSION,
    sha256_of,
    sources_of,
    this_platform,
)
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import ConfigError, StoreError
from tuner.measurement import Measurement, Provenance
from tuner.store import Store
from tuner.store.entry import digest_of, is_vendor
from tuner.store.exchange import Decision, parse_untrusted, read
from tuner.store.records import Check, ImportReport

_COPY = "bundle.tar"
"""Name of the copy of a bundle, beside the libraries that are taken out of it."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Installed:
    """Result of an installation."""

    report: ImportReport
    kernels_added: int
    kernels_known: int
    """Number of kernels that were already in the artifact cache."""


def install(
    path: Path,
    store: Store,
    artifacts: ArtifactCache,
    *,
    check: Check | None = None,
    sha256: str = "",
) -> Installed:
    """Verify a bundle, then add its kernels and entries, as a whole or not at all.

    Entries that this store decided itself are kept over the bundle's, as with `Store.import_`.

    Args:
        path: path of the bundle.
        store: store for the entries.
        artifacts: cache for the kernels.
        check: further checks of measurements that an entry serves.
        sha256: required hash of the whole file; empty: any.

    Raises:
        ConfigError: when the file is not valid; names the fault. Nothing is installed.
        StoreError: when the store or the artifact cache cannot be written. Nothing is installed.
    """
    try:
        with artifacts.workspace() as aside:
            content = _read(path, aside, sha256)
            document = parse_untrusted(content[ENTRIES])
            measured, decisions = read(document, check)
            served = _served(measured, decisions)
            kernels = _check_kernels(content, aside, served)
            added = _put(kernels, artifacts)
            try:
                _point(served, set(content), store, artifacts)
                report = store.import_(document, origin=ORIGIN, check=check)
            except BaseException:
                for key in added:
                    artifacts.remove(key)
                raise
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    return Installed(report, len(added), len(kernels) - len(added))


class _Member(tarfile.TarInfo):
    """Header of a plain file. Others are refused before their content, which may be any number of
    further headers, is read: `pack` writes none.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ConfigError(f"member '{one_line(member.name)}' is not a plain file")
        return member


def _read(path: Path, aside: Path, sha256: str) -> dict[str, bytes]:
    """Every member by name, checked against the manifest; libraries go into files of `aside`.

    The hash and the contents come from a copy in `aside`, because the file itself may change
    meanwhile.
    """
    content: dict[str, bytes] = {}
    files: Mapping[str, Any] = {}
    try:
        file = path.open("rb")
    except OSError as exc:
        raise ConfigError(f"it cannot be read: {exc.strerror}") from exc
    try:
        with file:
            copy = _copy(file, aside / _COPY)
        if sha256 and copy != sha256:
            raise ConfigError(f"its SHA-256 is {copy}, not {sha256}: it is another file")
        with tarfile.open(aside / _COPY, mode="r:", tarinfo=_Member) as tar:
            for member in tar:
                name = member.name
                size = _check_member(member, content)
                data = tar.extractfile(member)
                if data is None:
                    raise ConfigError(f"member '{name}' has no content")
                if not content:
                    if name != MANIFEST:
                        raise ConfigError("not a bundle: it does not begin with a manifest")
                    content[name] = data.read()
                    files = _files(content[name])
                    continue
                content[name] = _take(name, data, size, files, aside)
    except tarfile.TarError as exc:
        raise ConfigError(f"not a bundle, or a damaged one: {exc}") from exc
    except OSError as exc:
        raise StoreError(f"{path} cannot be unpacked: {exc.strerror or exc}") from exc
    if missing := sorted(set(files) - set(content)):
        raise ConfigError(f"member '{one_line(missing[0])}' of its manifest is missing")
    if ENTRIES not in content:
        raise ConfigError(f"not a bundle: it holds no {ENTRIES}")
    return content


def _copy(file: IO[bytes], target: Path) -> str:
    """Copy a bundle; returns the SHA-256 of what was written.

    Raises:
        ConfigError: when it is not a plain file, or grows during the copy.
    """
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError("it is not a plain file")
    digest, missing = hashlib.sha256(), facts.st_size
    with target.open("wb") as copy:
        while chunk := file.read(_CHUNK_BYTES):
            missing -= len(chunk)
            if missing < 0:
                raise ConfigError("it grew while it was read")
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def _check_member(member: tarfile.TarInfo, content: Mapping[str, bytes]) -> int:
    """The member's size.

    Raises:
        ConfigError: when it is repeated, too large or not a bundle's.
    """
    name = member.name
    limit = next((most for names, most in MEMBERS if names.fullmatch(name)), None)
    if limit is None:
        raise ConfigError(f"member '{one_line(name)}' does not belong in a bundle")
    if name in content:
        raise ConfigError(f"member '{name}' appears twice")
    if not 0 <= member.size <= limit:
        raise ConfigError(f"member '{name}' has {member.size} bytes (allowed: {limit})")
    return member.size


def _files(text: bytes) -> Mapping[str, Any]:
    """The manifest's list of members.

    Raises:
        ConfigError: when it is from another program, version or platform.
    """
    manifest = parse_untrusted(text)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError("not a bundle: its manifest is of another program")
    if manifest.get("version") != VERSION:
        version = one_line(str(manifest.get("version")))
        raise ConfigError(f"it has version {version}, this program reads {VERSION}")
    if manifest.get("platform") != this_platform():
        platform = one_line(str(manifest.get("platform")))
        raise ConfigError(f"it is for {platform}, this is {this_platform()}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(facts, dict)
        and isinstance(facts.get("sha256"), str)
        and type(facts.get("bytes")) is int
        for facts in files.values()
    ):
        raise ConfigError("its manifest lists no files with hashes and sizes")
    return files


def _take(name: str, data: IO[bytes], size: int, files: Mapping[str, Any], aside: Path) -> bytes:
    """Contents of a member that the manifest names with this hash; for a library, its file."""
    if name not in files:
        raise ConfigError(f"member '{name}' is not in its manifest")
    library = name.removeprefix("libraries/") if name.startswith("libraries/") else ""
    content = b""
    if library:
        with (aside / library).open("wb") as target:
            shutil.copyfileobj(data, target)
        digest = sha256_of(aside / library)
    else:
        content = data.read()
        digest = hashlib.sha256(content).hexdigest()
    if (digest, size) != (files[name]["sha256"], files[name]["bytes"]):
        raise ConfigError(f"member '{name}' is not what its manifest says: it is damaged")
    if library and library != f"{digest}.so":
        raise ConfigError(f"member '{name}' is not named by its hash")
    return content


def _served(
    measured: Sequence[Measurement], decisions: Iterable[Decision]
) -> dict[str, Measurement]:
    """Own measurements that entries rank, by digest.

    Raises:
        ConfigError: when an entry is not measured.
    """
    by_digest: dict[str, Measurement] = {}
    for decision in decisions:
        for m in (measured[number] for number in decision.numbers):
            if m.provenance is not Provenance.MEASURED:
                raise ConfigError(f"the entry of {m.problem.label()} is {m.provenance}")
            if not is_vendor(m.config):
                by_digest[digest_of(m)] = m
    return by_digest


def _check_kernels(
    content: Mapping[str, bytes], aside: Path, served: Mapping[str, Measurement]
) -> dict[str, Artifact]:
    """Artifacts by their source, which has to be the one that is rendered for a served config.

    Raises:
        ConfigError: when a kernel lacks a part, does not belong to an entry, or is from other
            templates.
    """
    rendered: dict[str, set[str]] = {}
    for m in served.values():
        for name, source in sources_of(m).items():
            rendered.setdefault(m.artifacts.get(name, ""), set()).add(source)
    kernels: dict[str, Artifact] = {}
    used = {MANIFEST, ENTRIES}
    for name in sorted(content):
        if not name.startswith("artifacts/") or not name.endswith(".json"):
            continue
        key = Path(name).stem
        source = content.get(f"artifacts/{key}.cu", b"").decode(errors="replace")
        if source not in rendered.get(key, ()):
            is_named = any(key in m.artifacts.values() for m in served.values())
            raise ConfigError(
                f"kernel {key} is of other templates than this program's (cutlass-tuner "
                f"{tuner.__version__}): pack it anew with this version"
                if is_named
                else f"kernel {key} belongs to no entry"
            )
        kernels[source] = kernel = _kernel(key, content[name], aside)
        used |= {f"libraries/{kernel.library.name}", f"artifacts/{key}.cu", name}
    if unused := sorted(set(content) - used):
        raise ConfigError(f"member '{unused[0]}' belongs to no kernel")
    return kernels


def _kernel(key: str, text: bytes, aside: Path) -> Artifact:
    try:
        artifact = Artifact.of_meta(key, parse_untrusted(text))
    except FAULTS as exc:
        reason = one_line(str(exc))
        raise ConfigError(f"the metadata of kernel {key} cannot be read: {reason}") from exc
    library = aside / artifact.library
    if library not in aside.iterdir():  # as a path: the name may say `../`
        raise ConfigError(f"the library of kernel {key} is missing")
    with library.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ConfigError(f"the library of kernel {key} is not a shared library")
    return replace(artifact, library=library)


def _put(kernels: Mapping[str, Artifact], artifacts: ArtifactCache) -> list[str]:
    """Add the missing kernels. Returns the keys of those added. On an error none is added.

    Args:
        kernels: artifacts by source, their libraries in files of any place.
        artifacts: cache to add to.
    """
    added: list[str] = []
    try:
        for source, kernel in kernels.items():
            if artifacts.find(kernel.key) is not None:
                continue
            artifacts.put(
                kernel.key,
                kernel.library,
                resources=kernel.resources,
                compile_cpu_s=kernel.compile_cpu_s,
                source=source,
                facts=kernel.facts,
            )
            added.append(kernel.key)
    except BaseException:
        for key in added:
            artifacts.remove(key)
        raise
    return added


def _point(
    served: Mapping[str, Measurement],
    members: set[str],
    store: Store,
    artifacts: ArtifactCache,
) -> None:
    """Record these kernels for the entries, since imported measurements do not name any.

    A config that can already be launched keeps its own kernels.
    """
    for m in served.values():
        if not all(f"artifacts/{key}.json" in members for key in m.artifacts.values()):
            continue
        mine = (
            ranked.artifacts.values()
            for entry in store.entries(problem=m.problem)
            for ranked in entry.ranked
            if ranked.config == m.config
        )
        if not any(keys and all(map(artifacts.find, keys)) for keys in mine):
            store.record_build(m.problem, m.config, m.artifacts)
