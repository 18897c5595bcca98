"""Bundles: what is packed, that it arrives whole, and that nothing else gets in."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tuner import bundle
from tuner.bundle import install, installing, pack
from tuner.cli import main
from tuner.cli.entries import unservable
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError, StoreError
from tuner.families import families
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Regime, Resources, Status
from tuner.problem import GemmProblem, SoftmaxProblem
from tuner.selection.nearest import drawn
from tuner.selection.reader import close, lookup
from tuner.store import Entry, open_store

LOOKUP = importlib.import_module("tuner.selection.reader")
H200, WARM = GPUS["H200"], Regime("stream", "warm")
PROBLEM = SoftmaxProblem(1024, 1024, 4)
MEMBER = families()["softmax"]
SPACE = MEMBER.space(PROBLEM, H200)
OTHER = next(c for c in SPACE if MEMBER.kernels(PROBLEM, c) != MEMBER.kernels(PROBLEM, SPACE[0]))
VENDOR = Config("vendor_softmax", {"kernel": "torch"})
LIBRARY = b"\x7fELF" + b"a library" * 99
KEYS = ("a" * 32, "b" * 32)


def measured(config: Config, us: float, key: str = "", **changes: Any) -> Measurement:
    return Measurement(
        problem=PROBLEM,
        config=config,
        gpu=H200,
        regime=WARM,
        status=Status.OK,
        environment=Environment({"driver": "1"}),
        latency_us=us,
        is_final=True,
        artifacts={"softmax": key} if key else {},
        created_at="2026-11-01T00:00:00+00:00",
    ).but(**changes)


RANKING = (
    measured(SPACE[0], 5.0, KEYS[0]),
    measured(OTHER, 5.5, KEYS[1]),
    measured(VENDOR, 6.0),
)


@cache
def empty_store() -> bytes:
    """A store's file, made once: its migrations take longer than a test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        open_store(str(path)).close()
        return path.read_bytes()


class Machine:
    """A store and an artifact cache."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "s.sqlite"
        self.path.write_bytes(empty_store())
        self.store = open_store(str(self.path))
        self.cache = ArtifactCache(folder / "artifacts")

    def build(self, m: Measurement, library: bytes = LIBRARY, source: str | None = None) -> None:
        (spec,) = MEMBER.kernels(m.problem, m.config).values()
        (key,) = m.artifacts.values()
        file = self.path.parent / "kernel.so"
        file.unlink(missing_ok=True)
        file.write_bytes(library)
        self.cache.put(
            key,
            file,
            resources=Resources(32, 0, 0, 0),
            compile_cpu_s=1.5,
            source=render(spec, key) if source is None else source,
            facts={"template": spec.template},
        )

    @property
    def content(self) -> tuple[list[Entry], list[str], int]:
        return self.store.entries(), self.cache.keys(), len(self.store.measurements())

    def install(self, path: Path, **options: Any) -> bundle.Installed:
        return install(path, self.store, self.cache, check=unservable, **options)


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches = (LOOKUP.shipped, LOOKUP.shipped_index)
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: tmp_path / "nothing")
    for cached in caches:
        cached.cache_clear()
    yield
    close()
    for cached in caches:
        cached.cache_clear()


def made(folder: Path) -> Machine:
    """A machine that tuned the problem, with two kernels that share a library."""
    machine = Machine(folder)
    machine.store.decide(PROBLEM, H200, WARM, RANKING, "sweep")
    for m in RANKING[:2]:
        machine.build(m)
    return machine


def rebuilt(machine: Machine) -> ArtifactCache:
    """The machine's kernels as another library."""
    for m in RANKING[:2]:
        machine.cache.remove(*m.artifacts.values())
        machine.build(m, library=LIBRARY + b", and another")
    return machine.cache


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Machine]:
    machine = made(tmp_path / "maker")
    yield machine
    machine.store.close()


@pytest.fixture
def user(tmp_path: Path) -> Iterator[Machine]:
    """A machine without anything."""
    machine = Machine(tmp_path / "user")
    yield machine
    machine.store.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What such a machine packs; nobody changes it."""
    folder = tmp_path_factory.mktemp("packed")
    machine = made(folder / "maker")
    out = folder / "b.tar"
    pack(machine.store.entries(), machine.store, machine.cache, out)
    machine.store.close()
    return out


class TestRoundTrip:
    def test_what_was_packed_serves_elsewhere(self, packed: Path, user: Machine) -> None:
        done = user.install(packed)
        assert (done.kernels_added, done.report.entries_added) == (2, 1)
        answer = lookup(PROBLEM, gpu=H200, path=user.path)
        assert answer is not None
        assert answer.candidates == RANKING
        assert answer.entry.origin == "bundle"
        found = [user.cache.find(key) for key in KEYS]
        assert all(a is not None and a.library.read_bytes() == LIBRARY for a in found)
        assert found[0] is not None
        assert (found[0].resources, found[0].compile_cpu_s) == (Resources(32, 0, 0, 0), 1.5)

    def test_a_second_time_nothing_is_new(self, packed: Path, user: Machine) -> None:
        user.install(packed)
        before = user.content
        done = user.install(packed)
        assert (done.kernels_added, done.kernels_known, done.report.entries_known) == (0, 2, 1)
        assert user.content == before

    def test_equal_content_equal_file(self, maker: Machine, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("one.tar", "two.tar")]
        for file in files:
            done = pack(maker.store.entries(), maker.store, maker.cache, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert done.sha256 == hashlib.sha256(files[0].read_bytes()).hexdigest()

    def test_a_library_is_packed_once(self, packed: Path) -> None:
        with tarfile.open(packed) as tar:
            names = tar.getnames()
        assert names[0] == "manifest.json"
        assert len([name for name in names if name.startswith("libraries/")]) == 1

    def test_what_passed_around_comes_along(
        self, maker: Machine, user: Machine, tmp_path: Path
    ) -> None:
        near = SoftmaxProblem(1000, 1024, 4)
        shapes = [p for p in drawn(PROBLEM) if not MEMBER.violations(p, SPACE[0], H200)]
        timed = (RANKING[0], RANKING[-1])  # ours, and the vendor's that it is faster than
        maker.store.add(m.but(problem=p, is_final=False) for p in shapes for m in timed)
        assert lookup(near, gpu=H200, path=maker.path) is not None
        out = tmp_path / "wide.tar"
        pack(maker.store.entries(), maker.store, maker.cache, out)
        user.install(out)
        answer = lookup(near, gpu=H200, path=user.path)
        assert answer is not None
        assert (answer.kind, answer.lent) == ("nearest", (RANKING[0],))

    def test_a_pin_comes_along(self, maker: Machine, user: Machine, tmp_path: Path) -> None:
        maker.store.pin(PROBLEM, H200, WARM, OTHER)
        out = tmp_path / "pinned.tar"
        pack(maker.store.entries(), maker.store, maker.cache, out)
        user.install(out)
        (entry,) = user.store.entries()
        assert (entry.pinned, entry.winner.config) == (True, OTHER)

    def test_an_imported_entry_gets_its_kernels(
        self, maker: Machine, user: Machine, tmp_path: Path
    ) -> None:
        """Built at the maker's under another key than the one that was measured with."""
        user.store.import_(maker.store.export())
        built = RANKING[0].but(artifacts={"softmax": "c" * 32})
        maker.build(built)
        maker.store.record_build(PROBLEM, SPACE[0], built.artifacts)
        out = tmp_path / "built.tar"
        pack(maker.store.entries(), maker.store, maker.cache, out)
        user.install(out)
        answer = lookup(PROBLEM, gpu=H200, path=user.path)
        assert answer is not None
        assert answer.candidates[0].artifacts == built.artifacts

    def test_the_users_own_decision_stands(self, packed: Path, user: Machine) -> None:
        mine = (measured(OTHER, 4.0, "d" * 32),)
        user.store.decide(PROBLEM, H200, WARM, mine, "mine")
        user.build(mine[0])
        done = user.install(packed)
        assert len(done.report.entries_kept) == 1
        (entry,) = user.store.entries()
        assert entry.ranking == mine


class TestPacking:
    def test_a_kernel_that_is_not_here(self, maker: Machine, tmp_path: Path) -> None:
        maker.cache.remove(KEYS[0])
        with pytest.raises(
            NoValidConfigError, match=r"not in the cache: `tuner build --op softmax"
        ):
            pack(maker.store.entries(), maker.store, maker.cache, tmp_path / "b.tar")
        assert not (tmp_path / "b.tar").exists()

    def test_a_kernel_that_is_not_needed_may_be_missing(
        self, maker: Machine, user: Machine, tmp_path: Path
    ) -> None:
        maker.cache.remove(KEYS[1])
        done = pack(maker.store.entries(), maker.store, maker.cache, tmp_path / "b.tar")
        assert done.kernels == 1
        assert user.install(tmp_path / "b.tar").kernels_added == 1

    def test_a_kernel_of_other_templates(self, maker: Machine, tmp_path: Path) -> None:
        maker.cache.remove(KEYS[0])
        maker.build(RANKING[0], source="// of an older version")
        with pytest.raises(NoValidConfigError, match="of other templates"):
            pack(maker.store.entries(), maker.store, maker.cache, tmp_path / "b.tar")

    def test_a_folder_that_is_not_there(self, maker: Machine, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="cannot be written"):
            pack(maker.store.entries(), maker.store, maker.cache, tmp_path / "no" / "b.tar")


Edit = Callable[[dict[str, bytes]], None]


def manifest_of(members: dict[str, bytes]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(members["manifest.json"])
    return manifest


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


def said(**facts: Any) -> Edit:
    """The manifest with some facts changed."""

    def edit(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps({**manifest_of(members), **facts}).encode()

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
    "a path out of it": (changed("../evil", b""), r"'\.\./evil' is none of a bundle's"),
    "an absolute path": (changed("/etc/passwd", b""), "none of a bundle's"),
    "a name with a path in it": (changed(f"libraries/../{'a' * 64}.so", b""), "none of"),
    "a foreign name": (changed("README", b""), "'README' is none of a bundle's"),
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
    "facts that are none": (changed(META, b"[]"), "what is said of kernel a+ cannot be read"),
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
        self.refused(user, path, "is not a plain file|is none of a bundle's")
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
        self.refused(user, path, "'manifest.json' is there twice")

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
        pack(maker.store.entries(), maker.store, maker.cache, tmp_path / "evil.tar")
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
        assert pack(maker.store.entries(), maker.store, rebuilt(maker), other).sha256 != right
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


class TestNothingHalfInstalled:
    def test_the_store_fails(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(user.store, "import_", fail)
        with pytest.raises(StoreError, match="the disk is full"):
            user.install(packed)
        assert user.content == ([], [], 0)

    def test_the_cache_fails_at_the_second_kernel(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = user.cache.put

        def fail(key: str, *rest: Any, **facts: Any) -> Any:
            if key == KEYS[1]:
                raise StoreError("the disk is full")
            return put(key, *rest, **facts)

        monkeypatch.setattr(user.cache, "put", fail)
        with pytest.raises(StoreError, match="the disk is full"):
            user.install(packed)
        assert user.content == ([], [], 0)

    def test_kernels_that_were_there_stay(
        self, packed: Path, user: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        user.build(RANKING[0])

        def fail(*_: Any, **__: Any) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(user.store, "import_", fail)
        with pytest.raises(StoreError):
            user.install(packed)
        assert user.cache.keys() == [KEYS[0]]


def command(maker: Machine, *arguments: str) -> int:
    try:
        return main(["bundle", *arguments, "--store", str(maker.path)])
    except SystemExit as exc:
        return int(str(exc.code))


class TestCommand:
    @pytest.fixture(autouse=True)
    def cache(self, maker: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUNER_CACHE_DIR", str(maker.path.parent))

    def test_pack_and_install(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "b.tar"
        assert command(maker, str(out), "--all", "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["entries"], done["kernels"], done["bytes"]) == (1, 2, out.stat().st_size)
        assert command(maker, "install", str(out), "--sha256", done["sha256"]) == 0
        assert "1 known already" in capsys.readouterr().out

    def test_what_is_left_out_is_said(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = SoftmaxProblem(64, 1024)
        lone = measured(SPACE[0], 3.0, "9" * 32, problem=other)
        maker.store.decide(other, H200, WARM, [lone], "sweep")
        assert command(maker, str(tmp_path / "b.tar"), "--all") == 0
        said = capsys.readouterr()
        assert "left out: softmax M=64" in said.err
        assert "1 entry with 2 kernels" in said.out
        shape = ("--op", "softmax", "--shape", "M=64,N=1024")
        assert command(maker, str(tmp_path / "c.tar"), *shape) == 1
        assert "is not in the cache" in capsys.readouterr().err

    def test_of_many_without_kernels_the_first_are_named_and_the_rest_counted(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for key in KEYS:
            maker.cache.remove(key)
        for rows in range(1, 20):
            other = SoftmaxProblem(64 * rows, 512)
            lone = measured(SPACE[0], 3.0, "9" * 32, problem=other)
            maker.store.decide(other, H200, WARM, [lone], "sweep")
        assert command(maker, str(tmp_path / "b.tar"), "--all") == 1
        err = capsys.readouterr().err
        assert err.count("is not in the cache") == 3
        assert err.endswith(" and 17 more\n")

    def test_only_the_operation_that_is_named_is_packed(
        self, maker: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lone = measured(SPACE[0], 3.0, "9" * 32, problem=(other := GemmProblem(64, 64, 64)))
        maker.store.decide(other, H200, WARM, [lone], "sweep")
        out = str(tmp_path / "b.tar")
        assert command(maker, out, "--all", "--op", "softmax", "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["entries"], done["left_out"]) == (1, [])
        assert command(maker, out, "--all", "--op", "swiglu", "--gpu", "H200") == 1
        assert "nothing is measured for swiglu" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["b.tar"],
            ["b.tar", "c.tar", "--all"],
            ["b.tar", "--all", "--sha256", "0" * 64],
            ["b.tar", "--all", "--shape", "M=1,N=1"],
            ["b.tar", "--op", "softmax", "--shape", "M=0,N=1"],
            ["b.tar", "--all", "--gpu", "TPU"],
            ["install"],
            ["install", "a", "b"],
            ["install", "a", "--all"],
            ["install", "a", "--op", "gemm"],
            ["install", "a", "--sha256", "abc"],
            ["install", "/nonexistent/b.tar"],
        ],
    )
    def test_wrong_input_is_one_line(
        self, maker: Machine, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command(maker, *arguments) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
