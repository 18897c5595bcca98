"""Chosen entries and their compiled kernels in one file, for machines without a compiler.

A bundle is a tar file without compression, equal for equal content::

    manifest.json            format, version, platform; SHA-256 and size of every other member
    entries.json             the entries and what was measured around them, as `tuner export` writes
    artifacts/<key>.json     the SHA-256 of its library, ptxas resources, facts of the build
    artifacts/<key>.cu       the rendered source
    libraries/<sha256>.so    kernels of one translation unit share one

Installing is the only way in for a binary, and takes all or nothing. Members are read by the names
above and never extracted. Each kernel's source has to be what this program renders for a config of
the bundle's entries: so its interface is the one that this program calls. Whether the library was
made from that source nobody can see: the hash of the whole file, compared with what the maker
printed, says that it is the maker's.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import tuner
from tuner import nearest
from tuner.artifacts import Artifact, ArtifactCache
from tuner.errors import ConfigError, NoValidConfigError, StoreError, TunerError
from tuner.families import family
from tuner.measurement import Measurement, Provenance, Resources
from tuner.render import render
from tuner.store import Store
from tuner.store.base import Check, ImportReport
from tuner.store.entry import Entry, canonical, digest_of, is_vendor
from tuner.store.exchange import Decision, parse, read, write

FORMAT = "cutlass-tuner-bundle"
VERSION = 1
ORIGIN = "bundle"
"""`Entry.origin` of what was installed."""

_MANIFEST, _ENTRIES = "manifest.json", "entries.json"
#: Every name that a bundle may hold, with the most bytes that such a member may have.
_MEMBERS = (
    (re.compile(r"manifest\.json"), 64 << 20),
    (re.compile(r"entries\.json"), 512 << 20),
    (re.compile(r"artifacts/[0-9a-f]{32}\.json"), 1 << 20),
    (re.compile(r"artifacts/[0-9a-f]{32}\.cu"), 16 << 20),
    (re.compile(r"libraries/[0-9a-f]{64}\.so"), 1 << 30),
)


def this_platform() -> str:
    """What a compiled library runs on, as in ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


@dataclass(frozen=True)
class Packed:
    """What was written."""

    entries: int
    kernels: int
    bytes: int
    sha256: str
    """Of the whole file."""
    left_out: tuple[str, ...]
    """Why entries are not in it."""


@dataclass(frozen=True)
class Installed:
    """What an installation did."""

    report: ImportReport
    kernels_added: int
    kernels_known: int
    """Kernels that were in the artifact cache already."""


# Packing


def pack(
    entries: Sequence[Entry],
    store: Store,
    artifacts: ArtifactCache,
    out: Path,
    *,
    leave_out: bool = False,
) -> Packed:
    """Write a bundle of measured entries, with every own config whose kernels are here.

    Args:
        entries: what is packed.
        store: holds what was measured around them (`tuner widen`).
        artifacts: holds the kernels.
        out: the file; an older one is replaced at the end.
        leave_out: leave out an entry whose best own kernel is not here, in place of an error.

    Raises:
        NoValidConfigError: when the kernels of an entry, or of all, are not here.
        StoreError: when the file cannot be written or the store not be read.
    """
    taken: list[Entry] = []
    kernels: dict[str, Artifact] = {}
    left_out: list[str] = []
    for entry in entries:
        try:
            kernels |= _kernels(entry, artifacts)
            taken.append(entry)
        except NoValidConfigError as exc:
            if not leave_out:
                raise
            left_out.append(str(exc))
    if not taken:
        raise NoValidConfigError("; ".join(left_out) or "nothing to pack: no entry is measured")
    members = _members(taken, store, kernels)
    try:
        size, digest = _write(out, members)
    except OSError as exc:
        raise StoreError(f"{out} cannot be written: {exc.strerror or exc}") from exc
    return Packed(len(taken), len(kernels), size, digest, tuple(left_out))


def _kernels(entry: Entry, artifacts: ArtifactCache) -> dict[str, Artifact]:
    """The artifacts of an entry's own configs; those of the first ones have to be there."""
    found: dict[str, Artifact] = {}
    needed = {m.config for m in (entry.winner, entry.best_own) if m is not None}
    for m in (entry.winner, *entry.ranking):
        if is_vendor(m.config):
            continue
        try:
            found |= _artifacts_of(m, artifacts)
        except NoValidConfigError:
            if m.config in needed:
                raise
    return found


def _artifacts_of(measurement: Measurement, artifacts: ArtifactCache) -> dict[str, Artifact]:
    problem = measurement.problem
    what = f"{problem.op} {problem.label()} on {measurement.gpu.name}: {measurement.config.family}"
    remedy = f"`tuner build --op {problem.op} --shape {problem.label()}` makes it"
    found: dict[str, Artifact] = {}
    sources = _sources(measurement)
    for name, key in measurement.artifacts.items():
        artifact = artifacts.find(key)
        if artifact is None:
            raise NoValidConfigError(f"{what}: kernel {key} is not in the cache: {remedy}")
        if sources.get(name) != _source(artifact):
            raise NoValidConfigError(f"{what}: kernel {key} is of other templates: {remedy}")
        found[key] = artifact
    if set(measurement.artifacts) != set(sources):
        raise NoValidConfigError(f"{what}: its kernels are not built: {remedy}")
    return found


def _sources(measurement: Measurement) -> dict[str, str]:
    """What this program renders for each kernel that a measurement names; empty if it cannot."""
    try:
        member = family(measurement.config.family)
        specs = member.kernels(measurement.problem, measurement.config)
        return {
            name: render(spec, measurement.artifacts.get(name, "")) for name, spec in specs.items()
        }
    except nearest.FOREIGN:
        return {}


def _source(artifact: Artifact) -> str:
    try:
        return (artifact.library.parent / "kernel.cu").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _members(
    entries: Sequence[Entry], store: Store, kernels: Mapping[str, Artifact]
) -> dict[str, bytes | Path]:
    """Name and content of every member but the manifest."""
    document = _document(entries, store)
    members: dict[str, bytes | Path] = {_ENTRIES: canonical(document).encode()}
    for key, artifact in sorted(kernels.items()):
        facts = {
            "sha256": artifact.sha256,
            "resources": None if artifact.resources is None else asdict(artifact.resources),
            "compile_cpu_s": artifact.compile_cpu_s,
            "facts": dict(artifact.facts),
        }
        members[f"artifacts/{key}.json"] = canonical(facts).encode()
        members[f"artifacts/{key}.cu"] = _source(artifact).encode()
        members[f"libraries/{artifact.sha256}.so"] = artifact.library
    return members


def _document(entries: Sequence[Entry], store: Store) -> dict[str, Any]:
    """The entries as they are served, with what speaks for their kernels elsewhere."""
    measured: dict[int, Measurement] = {}
    numbers: dict[str, int] = {}

    def number(m: Measurement) -> int:
        found = numbers.setdefault(digest_of(m), len(numbers))
        measured[found] = m
        return found

    decisions = []
    for entry in entries:
        pinned = number(entry.winner) if entry.pinned else None
        ranking = [number(m) for m in entry.ranking]
        decisions.append(Decision(ranking, pinned, entry.sweep, entry.decided_at))
        for m in _around(entry, store):
            number(m)
    return write(measured, decisions)


def _around(entry: Entry, store: Store) -> Iterator[Measurement]:
    ranked = {m.config for m in entry.ranking}
    for problem in nearest.drawn(entry.problem):
        yield from (
            m
            for m in store.measurements(
                problem=problem,
                gpu=entry.gpu,
                regime=entry.regime,
                provenance=Provenance.MEASURED,
                final=False,
            )
            if m.config in ranked
        )


def _write(out: Path, members: Mapping[str, bytes | Path]) -> tuple[int, str]:
    """Write beside the file and rename; returns the size and the hash of all of it."""
    files = {name: _described(content) for name, content in members.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tuner": tuner.__version__,
        "platform": this_platform(),
        "files": {name: {"sha256": sha, "bytes": size} for name, (sha, size) in files.items()},
    }
    with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
        path = Path(file.name)
        try:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                _add(tar, _MANIFEST, canonical(manifest).encode())
                for name, content in sorted(members.items()):
                    _add(tar, name, content)
            file.flush()
            os.fsync(file.fileno())
            path.chmod(0o644)
            size, digest = path.stat().st_size, _sha256(path)
            path.replace(out)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return size, digest


def _described(content: bytes | Path) -> tuple[str, int]:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    return _sha256(content), content.stat().st_size


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    # No time, owner or mode of this machine: equal content, equal file.
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    if isinstance(content, bytes):
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        return
    info.size = content.stat().st_size
    with content.open("rb") as file:
        tar.addfile(info, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Installing


@dataclass(frozen=True)
class _Kernel:
    """One artifact of a bundle, checked."""

    key: str
    library: Path
    resources: Resources | None
    compile_cpu_s: float
    facts: Mapping[str, Any]
    source: str


def install(
    path: Path,
    store: Store,
    artifacts: ArtifactCache,
    *,
    check: Check | None = None,
    sha256: str = "",
) -> Installed:
    """Verify a bundle, then add its kernels and entries: all of them or nothing.

    Entries that this store decided itself stand against the bundle's, as with `Store.import_`.

    Args:
        path: the file.
        store: where the entries go.
        artifacts: where the kernels go.
        check: further reasons to refuse a measurement that an entry serves.
        sha256: what the whole file's hash has to be; empty: any.

    Raises:
        ConfigError: names what is wrong with the file; nothing was installed.
        StoreError: when the store or the artifact cache cannot be written; nothing was installed.
    """
    try:
        with artifacts.workspace() as aside:
            content = _read(path, aside, sha256)
            document = parse(content[_ENTRIES].decode())
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
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: {_ENTRIES} is not UTF-8 text") from exc
    return Installed(report, len(added), len(kernels) - len(added))


def _read(path: Path, aside: Path, sha256: str) -> dict[str, bytes]:
    """Every member by name, checked against the manifest; libraries go into files of `aside`."""
    content: dict[str, bytes] = {}
    files: Mapping[str, Any] = {}
    try:
        file = path.open("rb")
    except OSError as exc:
        raise ConfigError(f"it cannot be read: {exc.strerror}") from exc
    try:
        with file:
            if sha256 and (found := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                raise ConfigError(f"its SHA-256 is {found}, not {sha256}: it is another file")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    name = member.name
                    size = _check_member(member, content)
                    data = tar.extractfile(member)
                    if data is None:
                        raise ConfigError(f"member '{name}' has no content")
                    if not content:
                        if name != _MANIFEST:
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
        raise ConfigError(f"member '{missing[0]}' of its manifest is missing")
    if _ENTRIES not in content:
        raise ConfigError(f"not a bundle: it holds no {_ENTRIES}")
    return content


def _check_member(member: tarfile.TarInfo, content: Mapping[str, bytes]) -> int:
    """The member's size.

    Raises:
        ConfigError: when it is a link, a folder, twice there, too large or not a bundle's.
    """
    name = member.name
    limit = next((most for names, most in _MEMBERS if names.fullmatch(name)), None)
    if limit is None:
        raise ConfigError(f"member '{name}' is none of a bundle's")
    if not member.isreg() or member.issparse():
        raise ConfigError(f"member '{name}' is not a plain file")
    if name in content:
        raise ConfigError(f"member '{name}' is there twice")
    if member.size > limit:
        raise ConfigError(f"member '{name}' has {member.size} bytes (allowed: {limit})")
    return member.size


def _files(text: bytes) -> Mapping[str, Any]:
    """The manifest's list of members.

    Raises:
        ConfigError: when it is of another program, version or platform.
    """
    try:
        manifest = parse(text.decode())
    except UnicodeDecodeError as exc:
        raise ConfigError("its manifest is not UTF-8 text") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError("not a bundle: its manifest is of another program")
    if manifest.get("version") != VERSION:
        raise ConfigError(f"it has version {manifest.get('version')}, this program reads {VERSION}")
    if manifest.get("platform") != this_platform():
        raise ConfigError(f"it is for {manifest.get('platform')}, this is {this_platform()}")
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
    """The content of a member that the manifest names with this hash; a library's is its file."""
    if name not in files:
        raise ConfigError(f"member '{name}' is not in its manifest")
    library = name.removeprefix("libraries/") if name.startswith("libraries/") else ""
    content = b""
    if library:
        with (aside / library).open("wb") as target:
            shutil.copyfileobj(data, target)
        found = _sha256(aside / library)
    else:
        content = data.read()
        found = hashlib.sha256(content).hexdigest()
    if (found, size) != (files[name]["sha256"], files[name]["bytes"]):
        raise ConfigError(f"member '{name}' is not what its manifest says: it is damaged")
    if library and library != f"{found}.so":
        raise ConfigError(f"member '{name}' is not named by its hash")
    return content


def _served(
    measured: Sequence[Measurement], decisions: Iterable[Decision]
) -> dict[str, Measurement]:
    """The own measurements that entries rank, by digest.

    Raises:
        ConfigError: when an entry is not measured.
    """
    found: dict[str, Measurement] = {}
    for decision in decisions:
        for number in (*decision.ranking, decision.pinned):
            if number is None:
                continue
            m = measured[number]
            if m.provenance is not Provenance.MEASURED:
                raise ConfigError(f"the entry of {m.problem.label()} is {m.provenance}")
            if not is_vendor(m.config):
                found[digest_of(m)] = m
    return found


def _check_kernels(
    content: Mapping[str, bytes], aside: Path, served: Mapping[str, Measurement]
) -> list[_Kernel]:
    """The artifacts, each with the source that this program renders for a config served.

    Raises:
        ConfigError: when a kernel lacks a part, is no entry's, or is of other templates.
    """
    rendered: dict[str, set[str]] = {}
    for m in served.values():
        for name, source in _sources(m).items():
            rendered.setdefault(m.artifacts.get(name, ""), set()).add(source)
    kernels = []
    used = set()
    for name in sorted(content):
        if not name.startswith("artifacts/") or not name.endswith(".json"):
            continue
        key = Path(name).stem
        source = content.get(f"artifacts/{key}.cu", b"").decode(errors="replace")
        if source not in rendered.get(key, ()):
            known = any(key in m.artifacts.values() for m in served.values())
            raise ConfigError(
                f"kernel {key} is of other templates than this program's (cutlass-tuner "
                f"{tuner.__version__}): pack it anew with this version"
                if known
                else f"kernel {key} belongs to no entry"
            )
        kernels.append(_kernel(key, content[name], source, aside))
        used |= {f"libraries/{kernels[-1].library.name}", f"artifacts/{key}.cu", name}
    if unused := sorted(set(content) - used - {_MANIFEST, _ENTRIES}):
        raise ConfigError(f"member '{unused[0]}' belongs to no kernel")
    return kernels


def _kernel(key: str, text: bytes, source: str, aside: Path) -> _Kernel:
    try:
        facts = parse(text.decode())
        library = aside / f"{facts['sha256']}.so"
        resources = facts["resources"]
        kernel = _Kernel(
            key,
            library,
            None if resources is None else Resources(**resources),
            float(facts["compile_cpu_s"]),
            dict(facts["facts"]),
            source,
        )
    except (TunerError, UnicodeDecodeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"what is said of kernel {key} cannot be read: {exc}") from exc
    if library not in aside.iterdir():  # as a path: the name may say `../`
        raise ConfigError(f"the library of kernel {key} is missing")
    with library.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ConfigError(f"the library of kernel {key} is not a shared library")
    return kernel


def _put(kernels: Sequence[_Kernel], artifacts: ArtifactCache) -> list[str]:
    """Add the kernels that are not there; the keys of those added. On an error none is."""
    added: list[str] = []
    try:
        for kernel in kernels:
            if artifacts.find(kernel.key) is not None:
                continue
            artifacts.put(
                kernel.key,
                kernel.library,
                resources=kernel.resources,
                compile_cpu_s=kernel.compile_cpu_s,
                source=kernel.source,
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
    """Have the entries launch these kernels, for what is imported names none.

    A config that can be launched here already keeps its own.
    """
    for m in served.values():
        if not all(f"artifacts/{key}.json" in members for key in m.artifacts.values()):
            continue
        mine = (
            known.artifacts.values()
            for entry in store.entries(problem=m.problem)
            for known in (entry.winner, *entry.ranking)
            if known.config == m.config
        )
        if not any(keys and all(map(artifacts.find, keys)) for keys in mine):
            store.record_build(m.problem, m.config, m.artifacts)
