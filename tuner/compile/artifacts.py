"""Content-addressed cache of compiled kernels.

::

    <root>/<key>/kernel.so    shared library; kernels of one translation unit are hard links
                 meta.json    sha256, ptxas resources, CPU-seconds, facts of the build
                 kernel.cu    the rendered source, for inspection
    <root>/.building/         builds in progress, renamed when complete; a dead process's are swept
    <root>/.locks/            one file a key while a process builds it
    <root>/.quarantine/       folders whose library does not match its recorded hash

A lookup that finds nothing returns None. A damaged folder counts as a miss. Only a cache that
cannot be written is an error.

The libraries are loaded into this process. So the root and each library must belong to this user or
to root, and must not be writable by anyone else. ``TUNER_TRUST_CACHE`` lets a group share them. A
library is hashed through one descriptor, and again when its inode, size or time of change differs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tuner import settings
from tuner.base import document, filesystem, forks, scratch
from tuner.base.ownership import close_to_others, distrust, make_folder, opened, trusted_sha256
from tuner.compile import prebuilt
from tuner.compile.device_code import device_code
from tuner.errors import ConfigError, StoreError
from tuner.measurement import Resources

_log = logging.getLogger(__name__)

KEY = re.compile(r"[0-9A-Za-z_]{1,64}", re.ASCII)
"""Pattern of an artifact's key, which names its folder and its C functions."""
FORMAT = 1
"""Version of meta.json; an artifact of another version is a miss."""
SAFE_AGE_S = 60.0
"""`prune` keeps artifacts made or used within this time: another process may be about to load
them."""
_TOUCH_EVERY_S = 10.0
_LOCK_POLL_S = 0.05

_NAME = "artifact cache"

_File = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel in the cache."""

    key: str
    library: Path
    sha256: str
    resources: Resources | None
    """None when ptxas reported nothing under the kernel's id."""
    compile_cpu_s: float
    """CPU-seconds of its build: its share of the translation unit's."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the build: template, variables, versions, `advice` of ptxas."""

    @property
    def code(self) -> str:
        """`device_code` of the kernel; empty where its library holds no machine code of it."""
        code = "" if self.resources is None else self.resources.code
        return code or device_code(self.library.read_bytes(), self.key)

    def meta(self) -> dict[str, Any]:
        """Everything but the key and the library, as ``meta.json``, bundles and wheels hold it."""
        return {
            "format": FORMAT,
            "sha256": self.sha256,
            "resources": None if self.resources is None else asdict(self.resources),
            "compile_cpu_s": self.compile_cpu_s,
            "facts": dict(self.facts),
        }

    @classmethod
    def of_meta(cls, key: str, data: Any) -> Self:
        """The inverse of `meta`, from JSON. The library's path is its name among libraries.

        Raises:
            Exception: one of `document.FAULTS` when it is damaged or of another version.
        """
        meta = document.checked(cls, data)
        if meta.get("format", FORMAT) != FORMAT:  # bundles of earlier versions have none
            raise ValueError(f"format {meta['format']}")
        resources = meta["resources"]
        if resources is not None:
            resources = Resources(**document.checked(Resources, resources))
        return cls(
            key=key,
            library=Path(f"{meta['sha256']}.so"),
            sha256=meta["sha256"],
            resources=resources,
            compile_cpu_s=float(meta["compile_cpu_s"]),
            facts=dict(meta["facts"]),
        )


class ArtifactCache:
    """The artifacts under one folder; safe between threads and processes of one machine.

    Args:
        root: folder of the cache. The default is the user's; artifacts that it lacks are then read
            from the installed wheel of prebuilt kernels.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = settings.artifacts_dir() if root is None else root
        self._prebuilt = prebuilt.artifacts() if root is None else None
        self._libraries = prebuilt.libraries() if root is None else None

    def check(self) -> None:
        """Check that other users cannot put libraries into the cache.

        Raises:
            StoreError: when they can; the message says how to mend it.
        """
        if reason := distrust(self.root, _NAME):
            raise StoreError(reason)

    def _folder(self, key: str) -> Path:
        """Folder of an artifact.

        Raises:
            ConfigError: when the key is not one.
        """
        if not KEY.fullmatch(key):
            raise ConfigError(
                f"'{key[:80]}' is not the key of an artifact (allowed: 1 to 64 letters, digits "
                "and underscores)"
            )
        return self.root / key

    def find(self, key: str) -> Artifact | None:
        """Return the artifact of `key` after verifying its library's hash, or None.

        A corrupt folder is moved to quarantine. An artifact that is found counts as used. If other
        users can write the cache, every lookup is a miss, with one warning.
        """
        if not KEY.fullmatch(key):
            return None
        if reason := distrust(self.root, _NAME):
            if reason not in _said:
                _said.add(reason)
                _log.warning("%s", reason)
            return None
        folder = self._folder(key)
        artifact = _intact(key, folder)
        if artifact is not None:
            path = folder / "meta.json"
            with contextlib.suppress(OSError):  # a read-only cache is left as it is
                if time.time() - path.stat().st_mtime > _TOUCH_EVERY_S:
                    os.utime(path)
            return artifact
        if folder.is_dir():  # folders are created by rename, so an incomplete one is damaged
            target = self.root / ".quarantine" / f"{folder.name}-{time.time_ns()}"
            # The cache may be read-only, or another process faster.
            with contextlib.suppress(OSError):
                make_folder(target.parent)
                folder.rename(target)
        return self._find_prebuilt(key)

    def _find_prebuilt(self, key: str) -> Artifact | None:
        if self._prebuilt is None or not (folder := self._prebuilt / key).is_dir():
            return None
        artifact = _intact(key, folder, self._libraries)
        if artifact is None and str(folder) not in _said:
            _said.add(str(folder))
            _log.warning(
                "the prebuilt kernel %s is damaged or can be changed by others: install %s again",
                folder,
                prebuilt.DISTRIBUTION,
            )
        return artifact

    def put(
        self,
        key: str,
        library: Path,
        *,
        resources: Resources | None,
        compile_cpu_s: float,
        source: str,
        facts: Mapping[str, Any],
    ) -> Artifact:
        """Add a built library. It is hard-linked if the file system allows, else copied.

        Args:
            key: artifact's key, a hash.
            library: file of the shared library.
            resources: registers, spills and shared memory by ptxas; None: not known.
            compile_cpu_s: CPU-seconds that its compile took.
            source: rendered text.
            facts: further facts of the compile, as ptxas's advice; JSON.

        Raises:
            ConfigError: when the key is not one.
            StoreError: when the cache folder cannot be written or the disk is full.
        """
        folder = self._folder(key)
        try:
            with self.workspace() as aside:
                moved = aside / key
                make_folder(moved)
                target = moved / "kernel.so"
                try:
                    os.link(library, target)
                except OSError:
                    shutil.copyfile(library, target)
                close_to_others(target)
                if resources is not None:
                    resources = replace(resources, code=device_code(target.read_bytes(), key))
                sha256, cpu_s = trusted_sha256(target), round(compile_cpu_s, 3)
                meta = Artifact(key, target, sha256, resources, cpu_s, facts).meta()
                (moved / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
                (moved / "kernel.cu").write_text(source)
                for file in (target, moved / "meta.json", moved / "kernel.cu", moved):
                    _fsync(file)
                self._publish(moved, folder)
        except OSError as exc:
            raise self.write_error(exc) from exc
        artifact = self.find(key)
        if artifact is None:
            raise StoreError(f"artifact {key} was damaged while it was written under {self.root}")
        return artifact

    def _publish(self, source: Path, folder: Path) -> None:
        """Rename into place. An intact artifact that another process put there first stays."""
        for _ in range(2):
            try:
                source.rename(folder)
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if self.find(folder.name) is not None:  # a bad one is moved away by this
                    return
            else:
                _fsync(self.root)
                return

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Temporary folder on the cache's file system, removed on exit.

        Raises:
            StoreError: when the cache folder cannot be written, or other users can write it.
        """
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(scratch.held(self._made(".building")))
            except OSError as exc:
                raise self.write_error(exc) from exc
            yield folder

    def _made(self, name: str) -> Path:
        """Folder of the cache under the root, created if it is missing.

        Raises:
            OSError: when it cannot be created.
            StoreError: when other users can write the root.
        """
        make_folder(self.root)
        self.check()
        folder = self.root / name
        make_folder(folder)
        return folder

    @contextlib.contextmanager
    def lock(
        self, key: str, stop: threading.Event | None = None, wait_s: float = math.inf
    ) -> Iterator[bool]:
        """Wait for and hold the lock of `key`, between processes and threads.

        Args:
            key: artifact's key, or another name of letters, digits and underscores.
            stop: event that ends the waiting.
            wait_s: longest wait; 0: try once.

        Yields:
            True while the lock is held; False if `stop` was set, or the time was over.

        Raises:
            ConfigError: when the key is not one.
            StoreError: when the cache folder cannot be written, or its file system has no locks.
        """
        self._folder(key)
        descriptor, end = None, time.monotonic() + wait_s
        while descriptor is None and not (stop and stop.is_set()):
            descriptor = self._try_lock(key)
            if descriptor is None:
                if time.monotonic() >= end:
                    break
                time.sleep(_LOCK_POLL_S)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None and descriptor.is_open:
                # Unlinked while held; a waiter on the old file notices (`_try_lock`).
                (self.root / ".locks" / key).unlink(missing_ok=True)
                descriptor.close()

    def _try_lock(self, name: str) -> forks.Descriptor | None:
        try:
            path = self._made(".locks") / name
            descriptor = forks.Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        except OSError as exc:
            raise self.write_error(exc) from exc
        try:
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor.number).st_ino == path.stat().st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as exc:  # the file system has no locks
            descriptor.close()
            raise self.write_error(exc) from exc
        descriptor.close()
        return None

    def sweep(self) -> None:
        """Remove leftovers of dead processes from ``.building``.

        Raises:
            StoreError: when other users can write the cache folder.
        """
        self.check()
        scratch.sweep(self.root / ".building")

    def facts(self, key: str) -> Mapping[str, Any]:
        """Facts of an artifact's build, not verified; empty where there are none."""
        try:
            with opened(self._folder(key) / "meta.json") as file:
                return dict(document.parse(file.read().decode())["facts"])
        except document.FAULTS:
            return {}

    def keys(self) -> list[str]:
        """Every key in the cache, sorted. Artifacts are not verified."""
        return sorted(f.name for f in _folders(self.root) if KEY.fullmatch(f.name))

    def total_bytes(self) -> int:
        """Bytes of all artifacts and of the quarantine; each hard-linked library counts once."""
        return sum(_union(_files(folder) for folder in self._all_folders()).values())

    def prune(self, max_bytes: int) -> tuple[int, int]:
        """Remove the quarantine, then the least recently used artifacts, down to `max_bytes`.

        Artifacts made or used within `SAFE_AGE_S`, or locked, stay. Space is freed when the last
        of a library's hard links goes.

        Returns:
            Number of artifacts removed, quarantined ones included, and the bytes freed.

        Raises:
            StoreError: when the cache folder cannot be written.
        """
        self.sweep()
        files = {folder: _files(folder) for folder in self._all_folders()}
        links = Counter(file for linked in files.values() for file in linked)
        total = sum(_union(files.values()).values())
        removed = freed = 0
        for folder in sorted(files, key=lambda f: (self._is_artifact(f), _last_used(f))):
            if total - freed <= max_bytes:
                break
            if time.time() - _last_used(folder) <= SAFE_AGE_S or not self._remove(folder):
                continue
            removed += 1
            links.subtract(list(files[folder]))
            freed += sum(size for file, size in files[folder].items() if links[file] == 0)
        return removed, freed

    def remove(self, key: str) -> bool:
        """Remove one artifact; False when it is locked.

        Raises:
            ConfigError: when the key is not one.
            StoreError: when the cache folder cannot be written.
        """
        return self._remove(self._folder(key))

    def _all_folders(self) -> list[Path]:
        return [self.root / key for key in self.keys()] + _folders(self.root / ".quarantine")

    def _is_artifact(self, folder: Path) -> bool:
        return folder.parent == self.root

    def _remove(self, folder: Path) -> bool:
        descriptor = self._try_lock(folder.name)
        if descriptor is None:
            return False
        try:
            with self.workspace() as aside:
                folder.rename(aside / folder.name)  # readers see the whole artifact or none
        except OSError as exc:
            raise self.write_error(exc) from exc
        finally:
            (self.root / ".locks" / folder.name).unlink(missing_ok=True)
            descriptor.close()
        return True

    def write_error(self, exc: OSError) -> StoreError:
        """Error for a cache that cannot be written, in one line."""
        if exc.errno in filesystem.LOCKLESS:
            return StoreError(
                f"the artifact cache {self.root} {filesystem.NO_LOCKS} ({exc.strerror}): "
                "set TUNER_CACHE_DIR to a folder on another"
            )
        if exc.errno in filesystem.FULL:
            return StoreError(
                f"the disk of the artifact cache {self.root} is full: free some space, "
                "'tuner cache prune --max-size 2GB', or set TUNER_CACHE_DIR"
            )
        return StoreError(
            f"the artifact cache {self.root} cannot be written ({exc.strerror or exc}): "
            "set TUNER_CACHE_DIR to a folder that can"
        )


_said: set[str] = set()
"""Warnings already given."""


def _intact(key: str, folder: Path, libraries: Path | None = None) -> Artifact | None:
    """Artifact in a folder, its library's hash verified; None if it is damaged.

    Args:
        key: of the artifact.
        folder: with its facts.
        libraries: folder with libraries by their SHA-256; None: the library is beside the facts.
    """
    try:
        with opened(folder / "meta.json") as file:
            artifact = Artifact.of_meta(key, document.parse(file.read().decode()))
        path = folder / "kernel.so" if libraries is None else libraries / artifact.library
        artifact = replace(artifact, library=path)
        return artifact if trusted_sha256(artifact.library) == artifact.sha256 else None
    except document.FAULTS:
        return None


def _last_used(folder: Path) -> float:
    for path in (folder / "meta.json", folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _folders(parent: Path) -> list[Path]:
    try:
        return [entry for entry in parent.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _files(folder: Path) -> dict[_File, int]:
    """Size of each file of a folder, by device and inode."""
    sizes: dict[_File, int] = {}
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            stat = file.stat()
            if file.is_file():
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sizes


def _union(maps: Iterable[Mapping[_File, int]]) -> dict[_File, int]:
    return {file: size for sizes in maps for file, size in sizes.items()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
