from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
from locks import hold

from tuner import cli
from tuner.base import ownership, scratch
from tuner.compile import artifacts
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.compile.loading import LoadedKernel, load
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.measurement import Resources

USED = Resources(168, 0, 4, 8, 1024)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def put(cache: ArtifactCache, key: str, content: bytes = b"library") -> Artifact:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(content)
        return cache.put(
            key, library, resources=USED, compile_cpu_s=1.5, source="// cu", facts={"n": 1}
        )


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / "meta.json", (then, then))


def hidden(cache: ArtifactCache, name: str) -> list[Path]:
    folder = cache.root / name
    return sorted(folder.iterdir()) if folder.exists() else []


def test_what_is_put_is_found_by_another_cache(cache: ArtifactCache) -> None:
    made = put(cache, "k1")
    found = ArtifactCache(cache.root).find("k1")
    assert found == made
    assert (found.resources, found.compile_cpu_s, found.facts) == (USED, 1.5, {"n": 1})
    assert found.library.read_bytes() == b"library"
    assert (cache.root / "k1" / "kernel.cu").read_text() == "// cu"
    assert hidden(cache, ".building") == []


def test_a_miss_is_none_and_makes_nothing(cache: ArtifactCache) -> None:
    assert cache.find("k1") is None
    assert cache.keys() == []
    assert cache.total_bytes() == 0
    assert not cache.root.exists()


def test_kernels_of_one_unit_share_the_library(cache: ArtifactCache) -> None:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(bytes(10_000))
        made = [
            cache.put(k, library, resources=None, compile_cpu_s=0, source="", facts={})
            for k in ("k1", "k2", "k3")
        ]
    assert len({a.library.stat().st_ino for a in made}) == 1
    assert 10_000 < cache.total_bytes() < 13_000


def test_a_library_is_copied_where_links_are_refused(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert put(cache, "k1").library.read_bytes() == b"library"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("kernel.so", b"librarx"),
        ("kernel.so", b""),
        ("meta.json", b'{"format": 1, "sha'),
        ("meta.json", b"[]"),
        ("meta.json", b"\xff\xfe"),
        ("meta.json", b'{"format": 99}'),
        ("kernel.so", None),
        ("meta.json", None),
    ],
)
def test_what_is_corrupt_is_quarantined_and_counts_as_a_miss(
    cache: ArtifactCache, file: str, content: bytes | None
) -> None:
    put(cache, "k1")
    path = cache.root / "k1" / file
    path.unlink()  # not in place: the mtime must not decide
    if content is not None:
        path.write_bytes(content)
    assert cache.find("k1") is None
    assert not (cache.root / "k1").exists()
    assert [p.name.split("-")[0] for p in hidden(cache, ".quarantine")] == ["k1"]
    assert put(cache, "k1").library.read_bytes() == b"library"


def test_a_library_is_hashed_once_per_state(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "k1")
    monkeypatch.setattr(ownership, "_hashes", {})
    hashed = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: hashed.append(a) or real(*a))
    for _ in range(3):
        assert ArtifactCache(cache.root).find("k1") is not None
    assert len(hashed) == 1
    os.utime(cache.root / "k1" / "kernel.so", (1, 1))
    assert cache.find("k1") is not None
    assert len(hashed) == 2


def test_finding_one_again_asks_for_three_files(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root, the library and the time of its last use; a model's first call waits for it."""
    put(cache, "k1")
    asked: list[str] = []
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: asked.append(path.name) or real(path))
    assert cache.find("k1") is not None
    assert asked == ["cache", "kernel.so", "meta.json"]


def swap(library: Path, content: bytes) -> None:
    """Put another file in the place of a library, of equal size and time of modification."""
    before, other = library.stat(), library.with_name("other.so")
    assert len(content) == before.st_size
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(library)


def test_a_swap_within_a_process_is_a_miss(cache: ArtifactCache) -> None:
    made = put(cache, "k1")
    assert cache.find("k1") is not None
    swap(made.library, b"LIBRARY")
    assert cache.find("k1") is None


def test_a_swap_between_finding_and_loading_is_refused(cache: ArtifactCache) -> None:
    made = put(cache, "k1")
    swap(made.library, b"LIBRARY")
    with pytest.raises(BenchmarkError, match=r"k1 cannot be loaded: .* is another library"):
        load(made)


class TestOthers:
    """Users beside this one and root."""

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
    def test_a_folder_that_they_can_write_holds_nothing_and_takes_nothing(
        self, cache: ArtifactCache, mode: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        put(cache, "k1")
        cache.root.chmod(mode)
        assert cache.find("k1") is None and cache.find("k1") is None
        assert caplog.text.count(str(cache.root)) == 2, "once, with its remedy"
        said = rf"can be written by others \(mode 0{mode:o}\).*`chmod -R go-w {cache.root}`"
        for attempt in (
            cache.check,
            cache.sweep,
            lambda: put(cache, "k2"),
            lambda: cache.prune(0),
            lambda: cache.lock("k1").__enter__(),
        ):
            with pytest.raises(StoreError, match=said) as raised:
                attempt()
            assert "\n" not in str(raised.value)
        cache.root.chmod(0o755)
        assert cache.find("k1") is not None, "nothing was moved or lost"

    def test_a_folder_of_another_user(
        self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(cache, "k1")
        owner = cache.root.stat().st_uid
        if owner == 0:
            owner = 54321
            os.chown(cache.root, owner, -1)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert cache.find("k1") is None
        said = rf"belongs to another user \({owner}\).*set TUNER_CACHE_DIR to a folder of your own"
        with pytest.raises(StoreError, match=said):
            put(cache, "k2")

    def test_a_library_that_they_can_write_is_a_miss(self, cache: ArtifactCache) -> None:
        library = put(cache, "k1").library
        library.chmod(0o666)
        assert cache.find("k1") is None
        assert put(cache, "k1").library.stat().st_mode & 0o022 == 0

    def test_no_umask_lets_them_write(self, cache: ArtifactCache) -> None:
        before = os.umask(0)
        try:
            made = put(cache, "k1")
            with cache.workspace() as aside, cache.lock("k1"):
                own = [cache.root, aside, aside.parent, cache.root / ".locks"]
                modes = [path.stat().st_mode for path in (*own, made.library.parent, made.library)]
        finally:
            os.umask(before)
        assert [mode & 0o022 for mode in modes] == [0] * 6

    @pytest.mark.parametrize("mode", [0o775, 0o2770])
    def test_a_trusted_group_shares_the_cache(
        self, cache: ArtifactCache, mode: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A volume that a group owns, whose users have other numbers with each start."""
        put(cache, "k1")
        group = cache.root.stat().st_gid
        cache.root.chmod(mode)
        with pytest.raises(StoreError, match=f"or set TUNER_TRUST_CACHE={group} to trust"):
            cache.check()
        monkeypatch.setenv("TUNER_TRUST_CACHE", str(group))
        assert cache.find("k1") is not None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert cache.find("k1") is not None, "another member's"
        monkeypatch.setenv("TUNER_TRUST_CACHE", str(group + 1))
        assert cache.find("k1") is None

    def test_no_group_is_trusted_with_what_all_can_write(
        self, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(cache, "k1")
        monkeypatch.setenv("TUNER_TRUST_CACHE", str(cache.root.stat().st_gid))
        cache.root.chmod(0o777)
        assert cache.find("k1") is None
        with pytest.raises(StoreError, match=r"mode 0777\)") as raised:
            cache.check()
        assert "TUNER_TRUST_CACHE" not in str(raised.value)

    def test_the_command_says_so_in_one_line(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
        (tmp_path / "artifacts").mkdir()
        (tmp_path / "artifacts").chmod(0o777)
        for action in (["info"], ["prune"], []):
            assert cli.main(["cache", *action]) == 1
            said = capsys.readouterr().err
            assert said.startswith("tuner: the artifact cache") and said.count("\n") == 1


@pytest.mark.parametrize(
    "key", ["", "..", "../k1", "a/b", "{elsewhere}", "k1\n", ".locks", "k" * 65, "ä"]
)
def test_a_key_that_is_none_is_a_miss_and_makes_nothing(
    cache: ArtifactCache, tmp_path: Path, key: str
) -> None:
    """The keys name places in the test's own folder: a fault here moves or removes them."""
    (tmp_path / "elsewhere").mkdir()
    key = key.format(elsewhere=tmp_path / "elsewhere")
    put(cache, "k1")
    before = sorted(cache.root.parent.rglob("*"))
    assert cache.find(key) is None
    for attempt in (
        lambda: put(cache, key),
        lambda: cache.remove(key),
        lambda: cache.lock(key).__enter__(),
    ):
        with pytest.raises(ConfigError, match="is not the key of an artifact"):
            attempt()
    assert sorted(cache.root.parent.rglob("*")) == before


def test_putting_a_key_again_keeps_the_good_one_and_replaces_a_bad_one(
    cache: ArtifactCache,
) -> None:
    put(cache, "k1", b"first")
    assert put(cache, "k1", b"second").library.read_bytes() == b"first"
    library = cache.root / "k1" / "kernel.so"
    library.unlink()
    library.write_bytes(b"damaged")
    assert put(cache, "k1", b"third").library.read_bytes() == b"third"


def test_prune_removes_the_least_recently_used(cache: ArtifactCache) -> None:
    for i, key in enumerate(("old", "used", "new")):
        put(cache, key, bytes([i]) * 10_000)
        age(cache.root / key, 1000 - i)
    assert cache.find("old") is not None  # now the most recently used
    age(cache.root / "old", 500)
    removed, freed = cache.prune(25_000)
    assert removed == 1
    assert freed > 10_000
    assert cache.keys() == ["new", "old"]
    assert cache.total_bytes() <= 25_000
    assert hidden(cache, ".building") == hidden(cache, ".locks") == []


def test_finding_is_using(cache: ArtifactCache) -> None:
    put(cache, "k1")
    age(cache.root / "k1", 1000)
    cache.find("k1")
    assert time.time() - (cache.root / "k1" / "meta.json").stat().st_mtime < 100
    assert cache.prune(0) == (0, 0)


def test_prune_counts_what_hard_links_free(cache: ArtifactCache) -> None:
    with cache.workspace() as folder:
        library = folder / "built.so"
        library.write_bytes(bytes(100_000))
        for i, key in enumerate(("k1", "k2")):
            cache.put(key, library, resources=None, compile_cpu_s=0, source="", facts={})
            age(cache.root / key, 1000 - i)
    removed, freed = cache.prune(100_000)  # the first link frees next to nothing
    assert (removed, cache.keys()) == (2, [])
    assert freed > 100_000
    assert cache.total_bytes() == 0


def test_prune_leaves_the_young_and_the_locked(cache: ArtifactCache) -> None:
    put(cache, "young")
    put(cache, "locked")
    age(cache.root / "locked", 1000)
    with cache.lock("locked"):
        assert cache.prune(0) == (0, 0)
    assert cache.prune(0)[0] == 1
    assert cache.keys() == ["young"]


def test_prune_takes_the_quarantine_first(cache: ArtifactCache) -> None:
    put(cache, "bad")
    (cache.root / "bad" / "kernel.so").unlink()
    assert cache.find("bad") is None
    put(cache, "good")
    for folder in (*hidden(cache, ".quarantine"), cache.root / "good"):
        age(folder, 1000)
    assert cache.prune(cache.total_bytes() - 1)[0] == 1
    assert cache.keys() == ["good"]
    assert hidden(cache, ".quarantine") == []


def test_a_lock_excludes_other_threads(cache: ArtifactCache) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(5):
            with cache.lock("k1") as held:
                assert held
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert hidden(cache, ".locks") == []


def test_a_lock_excludes_other_processes_and_ends_with_them(cache: ArtifactCache) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(cache.root, held, release))
    process.start()
    assert held.wait(30)
    assert cache._try_lock("k1") is None
    process.kill()
    process.join()
    with cache.lock("k1") as mine:
        assert mine


def test_waiting_for_a_lock_can_be_stopped(cache: ArtifactCache) -> None:
    stop = threading.Event()
    with cache.lock("k1"):
        threading.Timer(0.1, stop.set).start()
        with cache.lock("k1", stop) as held:
            assert not held
    assert hidden(cache, ".locks") == []


def test_leftovers_of_dead_processes_are_swept(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = cache.root / ".building" / "dead"
    dead.mkdir(parents=True)
    (dead / "unit.cu").write_text("x")
    with cache.workspace() as alive:
        cache.sweep()
        assert dead.exists()  # too young to tell
        monkeypatch.setattr(scratch, "_SWEEP_AGE_S", -1.0)
        cache.sweep()
        assert not dead.exists()
        assert alive.exists()


def test_a_cache_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = ArtifactCache(tmp_path / "file" / "cache")
    assert cache.find("k1") is None
    for attempt in (lambda: put(cache, "k1"), lambda: cache.lock("k1").__enter__()):
        with pytest.raises(StoreError, match=r"cannot be written \(Not a directory\).*TUNER_CACHE"):
            attempt()


def test_a_full_disk_says_so_and_leaves_nothing(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "_fsync", full)
    with pytest.raises(StoreError, match=r"is full: free some space, 'tuner cache prune"):
        put(cache, "k1")
    assert cache.keys() == []
    assert hidden(cache, ".building") == []


def test_a_library_that_cannot_be_loaded_is_a_benchmark_error(cache: ArtifactCache) -> None:
    with pytest.raises(BenchmarkError, match="kernel k1 cannot be loaded"):
        load(put(cache, "k1"))
    with pytest.raises(BenchmarkError, match="kernel k2 cannot be loaded: No such file"):
        load(Artifact("k2", Path("/no/kernel.so"), "", None, 0.0))
    with pytest.raises(BenchmarkError, match="tuner_k2_workspace"):
        LoadedKernel("k2", Path("libc.so.6"))


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (-5, "launch_error", r"cutlass::Status 5 \(kErrorNotSupported\)"),
        (2, "out_of_memory", "cudaError 2"),
        (700, "illegal_access", "cudaError 700"),
        (9, "launch_error", "cudaError 9"),
    ],
)
def test_a_refused_launch_says_who_refused(code: int, status: str, message: str) -> None:
    kernel = LoadedKernel.__new__(LoadedKernel)
    kernel.key = "k1"
    kernel._launch = lambda *_: code
    with pytest.raises(BenchmarkError, match=f"launch of k1: {message}") as raised:
        kernel.launch([1, 2], [3], [0.5], 0, 0)
    assert raised.value.status == status


def test_launch_passes_its_arguments_in_c_types() -> None:
    kernel = LoadedKernel.__new__(LoadedKernel)
    kernel.key = "k1"
    seen: list[list[float]] = []
    kernel._launch = lambda *a: seen.append([list(a[0]), list(a[1]), list(a[2]), a[3], a[4]]) or 0
    kernel.launch([1 << 47, 16], [-3, 1 << 40], [0.125], 64, 7)
    assert seen == [[[1 << 47, 16], [-3, 1 << 40], [0.125], 64, 7]]
