"""Bundles that are damaged, foreign or hostile are refused, and nothing of them is installed."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_machines import (
    KEYS,
    LIBRARY,
    RANKING,
    Edit,
    Machine,
    maker_fixture,
    manifest_of,
    nothing_shipped_fixture,
    packed_fixture,
    said,
    user_fixture,
)

from tuner.bundle import installing, pack
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import ConfigError

nothing_shipped = nothing_shipped_fixture  # for every test here
maker = maker_fixture
user = user_fixture
packed = packed_fixture


def rebuilt(machine: Machine) -> ArtifactCache:
    """The machine's kernels as another library."""
    for m in RANKING[:2]:
        machine.cache.remove(*m.artifacts.values())
        machine.build(m, library=LIBRARY + b", and another")
    return machine.cache


def resealed(members: dict[str, bytes]) -> None:
    """Make the manifest fit what the members are now."""
    manifest = manifest_of(members)
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for name, data in members.items()
        if name != "manifest.json"
    }
    members["manifest.json"] = json.dumps(manifest).encode()


def rewritten(path: Path, edit: Edit, out: Path) -> Path:
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    edit(members)
    with tarfile.open(out, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out


def changed(name: str, data: bytes, reseal: bool = True) -> Edit:
    def edit(members: dict[str, bytes]) -> None:
        members[name] = data
        if reseal:
            resealed(members)

    return edit


def without(name: str, reseal: bool = True) -> Edit:
    def edit(members: dict[str, bytes]) -> None:
        del members[name]
        if reseal:
            resealed(members)

    return edit


def of_entries(change: Callable[[Any], None]) -> Edit:
    def edit(members: dict[str, bytes]) -> None:
        document = json.loads(members["entries.json"])
        change(document)
        members["entries.json"] = json.dumps(document).encode()
        resealed(members)

    return edit


def spoil_tile(document: Any) -> None:
    for row in document["measurements"]:
        if row["config"]["family"] == "softmax":
            row["config"]["params"] = {"threads": 7}
            row["config_digest"] = Config.from_json(row["config"]).digest


def put_code(document: Any) -> None:
    params = document["measurements"][0]["config"]["params"]
    params[min(params)] = "1;constexpr int q=0"


def swap_kernels(document: Any) -> None:
    for row in document["measurements"]:
        if row["artifacts"]:
            (key,) = row["artifacts"].values()
            row["artifacts"] = {"softmax": KEYS[1 - KEYS.index(key)]}


LIB = f"libraries/{hashlib.sha256(LIBRARY).hexdigest()}.so"


META = f"artifacts/{KEYS[0]}.json"


def lies_outside(members: dict[str, bytes]) -> None:
    facts = json.loads(members[META])
    members[META] = json.dumps({**facts, "sha256": f"../{facts['sha256']}"}).encode()
    resealed(members)


FOREIGN: dict[str, tuple[Edit, str]] = {
    "a path out of it": (changed("../evil", b""), r"'\.\./evil' does not belong in a bundle"),
    "an absolute path": (changed("/etc/passwd", b""), "does not belong in a bundle"),
    "a name with a path in it": (changed(f"libraries/../{'a' * 64}.so", b""), "does not belong"),
    "a foreign name": (changed("README", b""), "'README' does not belong in a bundle"),
    "a changed library": (changed(LIB, LIBRARY[:-1] + b"!", reseal=False), "it is damaged"),
    "a library under another's hash": (changed(LIB, b"\x7fELF evil"), "not named by its hash"),
    "changed entries": (changed("entries.json", b"{}", reseal=False), "it is damaged"),
    "a member too many": (changed(f"artifacts/{'f' * 32}.cu", b"", reseal=False), "not in its man"),
    "an orphan": (changed(f"artifacts/{'f' * 32}.cu", b""), "belongs to no kernel"),
    "a foreign kernel": (changed(f"artifacts/{'f' * 32}.json", b"{}"), "belongs to no entry"),
    "other templates": (changed(f"artifacts/{KEYS[0]}.cu", b"// old"), "of other templates"),
    "kernels that are each other's": (of_entries(swap_kernels), "of other templates"),
    "a library beside the others": (lies_outside, "library of kernel a+ is missing"),
    "no library": (without(LIB), "library of kernel a+ is missing"),
    "a member too few": (without(META, reseal=False), "of its manifest is missing"),
    "no entries": (without("entries.json"), "holds no entries.json"),
    "no manifest": (without("manifest.json", reseal=False), "does not begin with a manifest"),
    "another format": (said(format="other"), "of another program"),
    "another version": (said(version=2), "it has version 2, this program reads 1"),
    "another platform": (said(platform="linux-riscv"), "it is for linux-riscv, this is"),
    "a manifest of nothing": (said(files=3), "lists no files"),
    "a manifest of no hashes": (said(files={"entries.json": 3}), "lists no files"),
    "a manifest that is no JSON": (changed("manifest.json", b"{", reseal=False), "not JSON"),
    "a manifest of bytes": (changed("manifest.json", b"\xff", reseal=False), "not UTF-8"),
    "entries of bytes": (changed("entries.json", b"\xff"), "not UTF-8"),
    "entries that are none": (changed("entries.json", b"[]"), "not a document of entries"),
    "code in a config": (of_entries(put_code), r"config\.params\.\w+: '1;constexpr int q=0'"),
    "an illegal config": (of_entries(spoil_tile), "nothing was imported"),
    "facts that are none": (changed(META, b"[]"), "the metadata of kernel a+ cannot be read"),
}


def pax(**facts: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("manifest.json")
    info.pax_headers = {name.replace("_", "."): value for name, value in facts.items()}
    return info


def info(name: str = "manifest.json", **facts: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for fact, value in facts.items():
        setattr(made, fact, value)
    return made


SPARSE = {"GNU_sparse_major": "1", "GNU_sparse_minor": "0"}


HEADERS = {
    "pax size": pax(size="x"),
    "pax size of thousands of digits": pax(uid="1" * 5000),
    "pax name": pax(path="x" * 100_000),
    "pax name that is none": pax(hdrcharset="BINARY", path="\udcff"),
    "pax link": pax(linkpath="\0"),
    "pax sparse map": pax(GNU_sparse_map="0,x", GNU_sparse_size="9"),
    "pax sparse size": pax(GNU_sparse_size="x"),
    "pax sparse numbers": pax(GNU_sparse_numblocks="1", GNU_sparse_map="a,b"),
    "pax sparse 1.0": pax(**SPARSE),
    "pax sparse real size": pax(GNU_sparse_realsize="9" * 5000),
    "sparse": info(type=tarfile.GNUTYPE_SPARSE),
    "long name": info("a" * 5000),
    "long link": info(type=tarfile.SYMTYPE, linkname="l" * 5000),
    "control characters": info("\x1b[2J\n"),
}
"""Headers before the manifest, each of which needs or is one that `pack` never writes."""


def headed(header: tarfile.TarInfo, packed: Path) -> bytes:
    """A bundle whose manifest has another header."""
    kind = tarfile.PAX_FORMAT if header.pax_headers else tarfile.GNU_FORMAT
    with tarfile.open(packed) as tar:
        content = tar.extractfile("manifest.json").read()  # type: ignore[union-attr]
        rest = packed.read_bytes()[tar.getmembers()[1].offset :]
    header.size = len(content)
    padded = content + b"\0" * (-len(content) % 512)
    return header.tobuf(kind, "utf-8", "surrogateescape") + padded + rest


class TestWhatIsRefused:
    def refused(self, user: Machine, path: Path, match: str, **options: Any) -> None:
        before = user.content
        with pytest.raises(ConfigError, match=match) as error:
            user.install(path, **options)
        assert str(error.value).startswith(f"{path}: ")
        assert user.content == before == ([], [], 0)
        assert list((user.cache.root / ".building").iterdir()) == []

    @pytest.mark.parametrize("what", sorted(FOREIGN))
    def test_every_bundle_that_is_not_whole(
        self, packed: Path, user: Machine, tmp_path: Path, what: str
    ) -> None:
        edit, match = FOREIGN[what]
        self.refused(user, rewritten(packed, edit, tmp_path / "evil.tar"), match)

    def test_unchanged_it_is_taken(self, packed: Path, user: Machine, tmp_path: Path) -> None:
        """What refuses the ones above is their change, not the rewriting."""
        assert user.install(rewritten(packed, resealed, tmp_path / "fine.tar")).kernels_added == 2

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, b"3"])
    def test_links_folders_and_devices(
        self, packed: Path, user: Machine, tmp_path: Path, kind: bytes
    ) -> None:
        path = tmp_path / "evil.tar"
        with tarfile.open(packed) as tar, tarfile.open(path, "w") as out:
            for member in tar:
                if member.name == LIB:
                    link = tarfile.TarInfo(LIB)
                    link.type, link.linkname = kind, "/bin/sh"
                    out.addfile(link)
                else:
                    out.addfile(member, tar.extractfile(member))
        self.refused(user, path, "not a plain file")

    @pytest.mark.parametrize("name", sorted(HEADERS))
    def test_headers_that_name_no_plain_file(
        self, packed: Path, user: Machine, tmp_path: Path, name: str
    ) -> None:
        path = tmp_path / "evil.tar"
        path.write_bytes(headed(HEADERS[name], packed))
        self.refused(user, path, "is not a plain file|does not belong in a bundle")
        with pytest.raises(ConfigError) as error:
            user.install(path)
        assert str(error.value).removeprefix(str(path)).isprintable()
        assert len(str(error.value).removeprefix(str(path))) < 250

    def test_changed_headers(
        self, packed: Path, user: Machine, tmp_path: Path, long_mode: bool
    ) -> None:
        """Bytes of headers changed at random, their sums made right as a rule: a bundle is refused
        in a line, or is what it was.
        """
        generator = random.Random(22)
        seeds = [packed.read_bytes(), *(headed(header, packed) for header in HEADERS.values())]
        path = tmp_path / "evil.tar"
        for _ in range(100_000 if long_mode else 500):
            data = bytearray(generator.choice(seeds))
            at = 512 * generator.randrange(min(8, len(data) // 512))
            for _ in range(generator.randint(1, 6)):
                data[at + generator.randrange(512)] = generator.choice(b"\0\x07\xff\x80 -09xLKS")
            if generator.random() < 0.9:
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
            path.write_bytes(data)
            try:
                user.install(path)
            except ConfigError as exc:
                told = str(exc).removeprefix(str(path))
                assert told.isprintable()
                assert len(told) < 300
        user.install(packed)
        fresh = Machine(tmp_path / "fresh")
        fresh.install(packed)
        assert user.content == fresh.content
        fresh.store.close()

    def test_a_member_twice(self, packed: Path, user: Machine, tmp_path: Path) -> None:
        path = tmp_path / "evil.tar"
        with tarfile.open(packed) as tar, tarfile.open(path, "w") as out:
            for member in [*tar, *tar]:
                out.addfile(member, tar.extractfile(member))
        self.refused(user, path, "'manifest.json' appears twice")

    def test_a_member_too_large(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = [(names, min(most, 300)) for names, most in installing.MEMBERS]
        monkeypatch.setattr(installing, "MEMBERS", limits)
        self.refused(user, packed, r"bytes \(allowed: 300\)")

    def test_a_library_that_is_none(self, maker: Machine, user: Machine, tmp_path: Path) -> None:
        for key, m in zip(KEYS, RANKING[:2], strict=True):
            maker.cache.remove(key)
            maker.build(m, b"#!/bin/sh\n")
        pack(maker.store.entries(), maker.cache, tmp_path / "evil.tar")
        self.refused(user, tmp_path / "evil.tar", "is not a shared library")

    @pytest.mark.parametrize("length", [0, 100, 700, -3000])
    def test_a_file_that_was_cut(
        self, packed: Path, user: Machine, tmp_path: Path, length: int
    ) -> None:
        path = tmp_path / "cut.tar"
        data = packed.read_bytes().rstrip(b"\0")
        path.write_bytes(data[:length])
        self.refused(user, path, "bundle|damaged|missing")

    def test_a_compressed_one(self, packed: Path, user: Machine, tmp_path: Path) -> None:
        path = tmp_path / "b.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            tar.add(packed, "manifest.json")
        self.refused(user, path, "not a bundle")

    def test_another_file_than_the_one_that_was_meant(self, packed: Path, user: Machine) -> None:
        self.refused(user, packed, "it is another file", sha256="0" * 64)
        right = hashlib.sha256(packed.read_bytes()).hexdigest()
        assert user.install(packed, sha256=right).kernels_added == 2

    def test_an_overwrite_after_the_hash_was_checked(
        self, packed: Path, maker: Machine, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = hashlib.sha256(packed.read_bytes()).hexdigest()
        other = packed.with_name("other.tar")
        assert pack(maker.store.entries(), rebuilt(maker), other).sha256 != right
        is_open = tarfile.open

        def overwritten(*arguments: Any, **options: Any) -> tarfile.TarFile:
            packed.write_bytes(other.read_bytes())
            return is_open(*arguments, **options)

        monkeypatch.setattr(installing.tarfile, "open", overwritten)
        user.install(packed, sha256=right)
        found = user.cache.find(KEYS[0])
        assert found is not None and found.library.read_bytes() == LIBRARY

    def test_a_file_that_grows_while_it_is_read(self, tmp_path: Path) -> None:
        class Growing(io.BytesIO):
            def fileno(self) -> int:
                return short.fileno()

        with (tmp_path / "short").open("wb") as short:
            with pytest.raises(ConfigError, match="it grew while it was read"):
                installing._copy(Growing(b"longer"), tmp_path / "copy")

    def test_a_device(self, user: Machine) -> None:
        self.refused(user, Path("/dev/zero"), "it is not a plain file")

    def test_no_file(self, user: Machine, tmp_path: Path) -> None:
        self.refused(user, tmp_path / "none.tar", "No such file")
